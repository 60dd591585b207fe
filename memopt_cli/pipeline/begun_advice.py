"""What steps without data tell of the batch that a plan allows, before any is run."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.batch_size.capacity import device_capacity
from memopt_cli.batch_size.runs import TARGET_SHARE, Limits
from memopt_cli.batch_size.search import BatchSearch
from memopt_cli.pipeline.batch_probes import BatchProbes
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import BatchProbe, Measurement, OptimizeRequest, Plan

_AIM = 0.7
"""Share of the longest step at which a run aims: it is taken once, cold, and while its memory is recorded, where the
measurement that it goes by was warm, and took 1.2 to 1.5 times as long in a ResNet and a spiking VGG.  One that comes
late costs another run.
"""
_LEAST_S, _LEAST_GPU_S, _MOST_S = 1.0, 5.0, 10.0
_LONGEST_STEPS = 2.5
"""The step at the answer takes no longer than so many steps as described, within these bounds, if nothing is asked for:
the answer is not to cost more than the search did.  On a GPU memory bounds the batch: few steps there take seconds.
"""


@dataclass(slots=True, kw_only=True)
class BegunAdvice:
    """The search for the batch of a plan, in which the batch as described counts as run.

    What its session has told is known whichever session goes on.
    """

    plan: Plan
    probes: BatchProbes
    search: BatchSearch


def begin_advice(
    request: OptimizeRequest, prepared: Prepared, plan: Plan, measured: Measurement, session: Sessions
) -> BegunAdvice:
    """``measured``: under the plan, at the batch as described."""
    device, longest_s = prepared.subject.settings.device, request.longest_step_s
    if longest_s is None:
        least_s = _LEAST_S if device == "cpu" else _LEAST_GPU_S
        longest_s = round(max(min(max(_LONGEST_STEPS * measured.step_s, least_s), _MOST_S), measured.step_s), 1)
    probes = BatchProbes(session=session, plan=plan, progress=prepared.progress)
    search = probes.search(prepared.batch, _limits(device, longest_s))
    search.runs[prepared.batch] = BatchProbe(
        batch=prepared.batch, allocated_peak_bytes=measured.allocated_peak_bytes, step_s=measured.step_s
    )
    return BegunAdvice(plan=plan, probes=probes, search=search)


def _limits(device: str, longest_step_s: float) -> Limits:
    capacity = device_capacity(device)
    budget = int(capacity.device_bytes * TARGET_SHARE)
    return Limits(
        budget_bytes=budget,
        device_bytes=capacity.device_bytes,
        runnable_bytes=budget,
        name=f"80 % of {capacity.limited_by}",
        longest_step_s=longest_step_s,
        aim=_AIM,
    )

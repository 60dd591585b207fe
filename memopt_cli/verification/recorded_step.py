"""The verification of a plan, before it is written: compares a step with the plan and without, and further ones."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from memopt_cli.errors import StepError
from memopt_cli.records import TOLERANCE, FurtherCheck, Plan, Verification
from memopt_cli.runtime import find_part
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.samples import sampling_off
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.unsafe import why_whole
from memopt_cli.training.step import TrainingStep, failure_named, synchronize
from memopt_cli.verification.effects import (
    EffectDifference,
    difference,
    effects,
    gradients_by_parameter,
    step_in_double,
)
from memopt_cli.verification.further_steps import CheckResult, RecordedStep, follow
from memopt_cli.verification.variations import Resize

Transform = Callable[[nn.Module], object]


def verify_step(
    step: TrainingStep,
    plan: Plan,
    install: Transform,
    remove: Transform,
    *,
    batch: int,
    full_size: bool,
    resize: Resize | None = None,
    original_step_s: float = 0.0,
) -> Verification:
    """Compare outputs, gradients, buffers, state and random numbers of ``step`` with and without ``plan``.

    Without chunks they must be bit-identical, or, if the original itself differs from run to run, within that noise.
    Chunks change the order of sums, and a difference in rounding can flip a spike.  So a plan with chunks is compared
    in float64, to :data:`TOLERANCE`; there the model's own casts to float32 do not round.  In segments that the user
    allowed to be inexact, batch norms have fixed statistics during the comparison: everything else must agree.

    ``install`` and ``remove`` put the plan on the model and remove it.  With ``resize``, a few more steps follow
    (:func:`memopt_cli.verification.further_steps.follow`).  ``original_step_s`` are the seconds of a step
    at the requested size, if this one is smaller.
    """
    chunked = plan.has_chunks
    inexact = tuple(dict.fromkeys(segment.path for segment in plan.everywhere if segment.inexact))
    fixed = _fixed_statistics([find_part(step.model, path) for path in inexact])
    with sampling_off(), fixed, step_in_double(step) if chunked else contextlib.nullcontext(step) as step:
        compared = _compare(step, install, remove, batch=batch, original_step_s=original_step_s, chunked=chunked)
        further: tuple[FurtherCheck, ...] = ()
        differing: CheckResult | None = None
        if compared.passed and resize is not None and not plan.is_empty:
            further, differing = follow(compared.recorded, install, resize)
    worst = differing.worst if differing else compared.worst
    return Verification(
        passed=compared.passed and differing is None,
        exact=compared.exact,
        precision="fp64" if chunked else step.settings.precision,
        tolerance=compared.recorded.tolerance,
        compared=compared.worst.compared,
        worst_name=worst.name,
        worst_difference=worst.relative,
        batch=batch,
        full_size=full_size,
        detail=differing.detail if differing else "",
        inexact=inexact,
        further=further,
        whole=compared.whole,
        differs_in=differing.check if differing else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedStep:
    """The recorded step, and the tensor that differs most in it under the plan."""

    recorded: RecordedStep
    worst: EffectDifference
    exact: bool
    """Whether the effects must be bit-identical."""
    whole: bool
    """Whether a segment with chunks ran whole, since its first chunk did something that chunks must not do."""

    @property
    def passed(self) -> bool:
        return not self.worst.name if self.exact else self.worst.relative <= self.recorded.tolerance


def _compare(
    step: TrainingStep, install: Transform, remove: Transform, *, batch: int, original_step_s: float, chunked: bool
) -> _ComparedStep:
    """Return the difference of ``step`` with the plan and without it, which is taken twice if not ``chunked``."""
    start = StartingState(step.model)
    try:
        reference, plain_s = _timed_effects(step, start)
    except StepError:
        # The step ran as it was measured.  A model may reject inputs that need a gradient: the speech models of
        # transformers set ``requires_grad`` on a view.
        reference, step = None, replace(step, compares_inputs=False)
    if reference is None:  # not in the ``except`` above, whose error would be shown with that of this call
        reference, plain_s = _timed_effects(step, start)
    noise = 0.0
    if not chunked:
        second, second_s = _timed_effects(step, start)  # shows how exactly the original repeats
        noise = _noise(reference, second, step.settings.device)
        plain_s = min(plain_s, second_s)
        del second  # frees its memory before the step with the plan
    install(step.model)
    try:
        optimized = _effects(step, start)
        whole = any(map(why_whole, step.model.modules()))
    except StepError as error:
        raise StepError(f"without the plan the step runs, and with it {error.message}") from error
    finally:
        remove(step.model)
        start.restore()
    recorded = RecordedStep(
        step=step,
        batch=batch,
        gradients=gradients_by_parameter(reference),
        plain_s=plain_s,
        original_step_s=original_step_s,
        tolerance=TOLERANCE if chunked else noise,
    )
    exact = not chunked and noise == 0.0
    return _ComparedStep(recorded=recorded, worst=difference(reference, optimized), exact=exact, whole=whole)


@contextlib.contextmanager
def _fixed_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let batch norms in ``modules`` use their running statistics in the ``with`` block."""
    norms = {m for module in modules for m in batch_norms(module) if m.training}
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _timed_effects(step: TrainingStep, start: StartingState) -> tuple[dict[str, Tensor], float]:
    began = time.monotonic()
    collected = _effects(step, start)
    synchronize(step.settings.device)
    return collected, time.monotonic() - began


def _effects(step: TrainingStep, start: StartingState) -> dict[str, Tensor]:
    start.restore()
    with failure_named(step.model):
        return effects(step)


def _noise(first: dict[str, Tensor], second: dict[str, Tensor], device: str) -> float:
    """Return twice the difference of two runs of the original; atomic additions on a GPU may cause one.

    Raises :class:`StepError` for a difference on the CPU: nothing can be verified for such a model.
    """
    worst = difference(first, second)
    if not worst.name:
        return 0.0
    if not device.startswith("cuda") or not math.isfinite(worst.relative):
        raise StepError(
            f"the original's own step is not repeatable: {worst.name} differs between two runs from one seed",
            hint="Draw random numbers from PyTorch's, NumPy's or Python's global generators, which memopt seeds; "
            "your own step must take all its data from its inputs.",
        )
    return 2 * worst.relative

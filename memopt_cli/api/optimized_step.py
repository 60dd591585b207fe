"""``memopt_cli.optimize_step``: optimize a training step that the user wrote, from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from memopt_cli.api.arguments import check_budget, resolve_search
from memopt_cli.measure import processes
from memopt_cli.measure.devices import process_device
from memopt_cli.pipeline.live.model import find_and_verify, refuse_recursion
from memopt_cli.pipeline.live.step import prepared_step
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.records import (
    STEP,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    SearchGoal,
    StepSettings,
)
from memopt_cli.records.progress import log_progress
from memopt_cli.text.options import check_option
from memopt_cli.text.spelling import notes_in_python, warn_if_unchanged, with_python_spelling
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.user_step import Step, join_models


@with_python_spelling
def optimize_step(
    make_step: Callable[[], Step],
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    level: int = 3,
    budget: str | float | None = None,
    max_slowdown: float | None = None,
    offload: str = "none",
    host_memory: str | int | None = None,
    timeout: float = 600.0,
    verbose: bool = False,
) -> tuple[Step, MemOptSummary]:
    """Return a step from ``make_step`` that trains in less memory, and the summary of the search for its plan.

    ``make_step`` is called several times, here and in profiling subprocesses, and must return an equal step each time.
    Define it at the top level of a module or script, so that subprocesses can import it; else this process profiles.
    ``inputs``: those of one step, positional or by name; dimension 0 of the first tensor is the batch.
    ``budget``: the largest allowed peak, ``"8GiB"``, bytes, or ``0.6`` or ``"60%"`` of the original's; memopt then
    returns the fastest plan within it.  With ``None``, the plan with the least peak whose step takes at most
    ``max_slowdown`` times as long (1.33 by default; ``math.inf`` for no limit).
    ``offload``, ``host_memory``: where plans may offload stored tensors, and how many bytes, as for
    ``memopt_cli.optimize``; the training script sets ``memopt_cli.offload_folder``.
    ``timeout``: seconds that each answer of a profiling subprocess may take.
    ``verbose``: log the course of the search.  Ctrl-C ends the search; the best plan so far is applied.

    To put the same plan on a step that exists already, call ``memopt_cli.apply_plan(step, summary.plan)``.
    Raises ``OptionError`` (a ``ValueError``) for a value out of its range, ``VerificationError`` if the
    optimized step differs from the original, and other errors of ``memopt_cli.errors`` if it cannot be taken.
    """
    started = time.monotonic()
    limit_s = check_option("timeout", timeout)
    settings = StepSettings(device=process_device())
    request = OptimizeRequest(
        source=ModelSource(location=STEP),
        spec=None,
        settings=settings,
        search=resolve_search(level=level, max_slowdown=max_slowdown, offload=offload, host_memory=host_memory),
        goal=SearchGoal(budget=check_budget(budget)),
        recommend_batch=False,
        interruptible=True,
    )
    with (
        processes.keep_server(),
        log_progress(verbose) as progress,
        refuse_recursion(),
        prepared_step(make_step, inputs, settings) as prepared,
    ):
        findings = find_and_verify(request, prepared.with_progress(progress, limit_s))
    step = make_step()
    apply_plan(join_models(step), findings.plan)
    summary = summarize(findings, spent_s=time.monotonic() - started)
    warn_if_unchanged(summary.unchanged)
    return step, notes_in_python(summary)

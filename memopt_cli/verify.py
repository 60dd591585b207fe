"""The optimized model against the original, on the same inputs, before anything is written."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from memopt_cli.equality import TOLERANCE, bit_equal, difference, effects, step_in_double
from memopt_cli.errors import StepError
from memopt_cli.records import Plan, Verification
from memopt_cli.runtime import find_part
from memopt_cli.runtime.batch_statistics import batch_norms
from memopt_cli.runtime.state import StartingState
from memopt_cli.step import Step

Transform = Callable[[nn.Module], object]


def verify(
    step: Step, plan: Plan, install: Transform, remove: Transform, *, batch: int, full_size: bool
) -> Verification:
    """Compare outputs, gradients, buffers, state and random numbers of a step with and without the plan.

    A plan without chunks must be equal to the bit, or, where the original itself differs from run to run, within that
    noise.  Chunks change the order of sums, and a rounding difference can flip a spike: such a plan is compared in
    float64, to :data:`TOLERANCE`, and what the model itself casts to float32 is left in float64.  In segments that are
    inexact, as asked for, batch norms are held at fixed statistics meanwhile: all else must agree.
    """
    chunked = any(segment.chunks > 1 for segment in plan.segments)
    inexact = tuple(segment.path for segment in plan.segments if segment.inexact)
    fixed = _fixed_statistics([find_part(step.model, path) for path in inexact])
    with fixed, step_in_double(step) if chunked else contextlib.nullcontext(step) as step:
        start = StartingState(step.model)
        reference = _effects(step, start)
        noise = 0.0 if chunked else _noise(reference, _effects(step, start), step.settings.device)
        install(step.model)
        try:
            optimized = _effects(step, start)
        finally:
            remove(step.model)
            start.enter()
    worst = difference(reference, optimized)
    exact = not chunked and noise == 0.0
    tolerance = TOLERANCE if chunked else noise
    return Verification(
        passed=bit_equal(reference, optimized) if exact else worst.relative <= tolerance,
        exact=exact,
        precision="fp64" if chunked else step.settings.precision,
        tolerance=tolerance,
        compared=worst.compared,
        worst_name=worst.name,
        worst_difference=worst.relative,
        batch=batch,
        full_size=full_size,
        inexact=inexact,
    )


@contextlib.contextmanager
def _fixed_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms in ``modules`` use their running statistics meanwhile."""
    norms = {m for module in modules for m in batch_norms(module) if m.training}
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _effects(step: Step, start: StartingState) -> dict[str, Tensor]:
    start.enter()
    return effects(step)


def _noise(once: dict[str, Tensor], again: dict[str, Tensor], device: str) -> float:
    """Twice the original's own difference from run to run, as happens with atomic sums on a GPU.

    Raises :class:`StepError` where there is no such excuse: nothing could be proven of such a model.
    """
    if bit_equal(once, again):
        return 0.0
    worst = difference(once, again)
    if not device.startswith("cuda") or not math.isfinite(worst.relative):
        raise StepError(
            f"the original's own step is not repeatable: {worst.name} differs between two runs from one seed",
            hint="Draw random numbers from PyTorch's, NumPy's or Python's global generators, which memopt seeds.",
        )
    return 2 * worst.relative

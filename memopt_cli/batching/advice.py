"""The batch configuration that goes with a plan: a line through measured peaks, and a run at its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memopt_cli.records import BatchAdvice, BatchProbe, Failure, describe

TARGET_SHARE = 0.8
"""Share of the device's memory that the recommended batch may take."""
_PROBES = 3
"""Points of the fit."""
_ATTEMPTS = 3
"""Runs towards the answer; then the largest that fitted is recommended."""
_WORTH_ANOTHER_RUN = 1.5
"""A step that took so much less than it may is followed by a larger one: small batches are slower per sample."""

Probe = Callable[[int], BatchProbe | Failure]
"""Batch size -> its allocated peak, measured."""


def advise(
    batch: int, probe: Probe, *, device_bytes: int, device_limit: str, longest_step_s: float
) -> BatchAdvice | None:
    """Fit ``peak = a + c * batch`` to three probes and verify the largest batch within 80 % of the device by a run.

    Only a batch that was run is recommended.  Where one step of it would take longer than ``longest_step_s`` the batch
    is smaller, and the largest by the fit is called an estimate.  ``None`` if fewer than three batch sizes could be
    run, or if none of them fits.
    """
    budget = int(device_bytes * TARGET_SHARE)
    probes = _three_probes(batch, probe)
    fitting = [p for p in probes if p.allocated_peak_bytes <= budget]
    if len(probes) < _PROBES or not fitting:
        return None
    intercept, slope = fit_line([(p.batch, p.allocated_peak_bytes) for p in probes])
    largest = max(probes, key=lambda p: p.batch)
    estimate = ceiling = max(1, int((budget - intercept) / slope)) if slope > 0 else largest.batch
    limited_by = f"80 % of {device_limit}"
    candidate = min(ceiling, _affordable(largest, longest_step_s))
    for _ in range(_ATTEMPTS):
        run = next((p for p in probes if p.batch == candidate), None) or probe(candidate)
        if isinstance(run, BatchProbe):
            probes.append(run)
        if isinstance(run, BatchProbe) and run.allocated_peak_bytes <= budget:
            fitting.append(run)
            following = min(ceiling, _affordable(run, longest_step_s))
            if following < candidate * _WORTH_ANOTHER_RUN:
                break
        else:
            reason = "it took more than the budget" if isinstance(run, BatchProbe) else describe(run)
            limited_by = f"a run at batch {candidate}: {reason}"
            ceiling = max(1, candidate - 1)
            following = max(1, candidate * 9 // 10)
        candidate = following
    recommended = max(p.batch for p in fitting)
    unproven = ceiling == estimate > recommended
    return BatchAdvice(
        recommended_batch=recommended,
        estimated_batch=estimate if unproven else recommended,
        probes=tuple(sorted({p.batch: p for p in probes}.values(), key=lambda p: p.batch)),
        intercept_bytes=intercept,
        slope_bytes=slope,
        budget_bytes=budget,
        device_bytes=device_bytes,
        limited_by=f"the time of a step ({longest_step_s:g} s)" if unproven else limited_by,
    )


def _affordable(run: BatchProbe, longest_step_s: float) -> int:
    """The batch whose step takes that long, in proportion to a step that was timed; at least the batch of that one."""
    return max(run.batch, int(run.batch * longest_step_s / run.step_s))


def _three_probes(batch: int, probe: Probe) -> list[BatchProbe]:
    """At the batch, half and twice of it; where one of these cannot run, at smaller and then at larger ones."""
    found: list[BatchProbe] = []
    sizes = (batch // 2, batch, batch * 2, batch // 4, batch * 3 // 4, batch * 3, batch * 4)
    for size in dict.fromkeys(max(1, size) for size in sizes):
        outcome = probe(size) if len(found) < _PROBES else None
        if isinstance(outcome, BatchProbe):
            found.append(outcome)
    return found


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: ``(intercept, slope)`` of ``y = intercept + slope * x``; the points differ in x."""
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope

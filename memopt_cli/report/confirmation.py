"""Output of ``memopt apply --confirm``: predicted and measured numbers, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator

from memopt_cli.records import Confirmation
from memopt_cli.text.units import format_bytes, format_seconds, format_some


def lines(confirmation: Confirmation) -> Iterator[str]:
    """Yield a line for each predicted and measured number of ``confirmation``, then its notes."""
    yield from _comparison_lines(confirmation)
    yield from confirmation.notes


def _comparison_lines(confirmation: Confirmation) -> Iterator[str]:
    measured, estimate = confirmation.measurement, confirmation.predicted
    allocated, reserved = format_bytes(measured.allocated_peak_bytes), format_bytes(measured.reserved_peak_bytes)
    step = format_seconds(measured.step_s)
    if estimate is None:
        yield (
            f"measured on {confirmation.device}: allocated peak {allocated}, step {step}; "
            "the plan predicts nothing for a card (`memopt optimize --for`)"
        )
        return
    yield f"estimated for {estimate.device}, and measured on {confirmation.device}:"
    yield _line("allocated peak", format_bytes(estimate.allocated_peak_bytes), allocated, confirmation.allocated_off)
    if confirmation.reserved_off is not None:
        yield _line("reserved peak", format_bytes(estimate.reserved_peak_bytes), reserved, confirmation.reserved_off)
    yield _line("step", format_seconds(estimate.step_s), step, confirmation.step_off)
    if confirmation.device == "cpu":
        yield f"this device is not {estimate.device}, so nothing is confirmed; run this there, with `--device cuda:0`"
    if confirmation.unlike:
        yield f"the step differs from the estimated step in: {format_some(confirmation.unlike, max_shown=9)}"


def _line(what: str, estimated: str, measured: str, off: float | None) -> str:
    assert off is not None, "a plan with an estimate predicts every number that is shown"
    direction = "too high" if off >= 0 else "too low"
    return f"  {what}: {estimated} estimated, {measured} measured; the estimate is {abs(off):.1%} {direction}"

"""Measurements made by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from memopt_cli.progress import Progress
from memopt_cli.records import Breakdown, LevelRow, Measurement, Plan

NOTHING = Breakdown(
    parameters_bytes=0,
    buffers_bytes=0,
    gradients_bytes=0,
    optimizer_bytes=0,
    inputs_bytes=0,
    activations_bytes=0,
    temporaries_bytes=0,
)


def measured(peak: int, *step_times_s: float) -> Measurement:
    """With this peak; of steps that took so long, or one of a second."""
    return Measurement(
        tensor_peak_bytes=peak,
        allocated_peak_bytes=peak,
        resident_bytes=0,
        reserved_peak_bytes=peak,
        process_peak_bytes=peak,
        step_times_s=step_times_s or (1.0,),
        breakdown=NOTHING,
        holders=(),
        backend="",
        batch=1,
        spent_s=0.0,
    )


def measurements_by(
    measure: Callable[[Plan], Any], confirm: Callable[[LevelRow, float], LevelRow] = lambda row, most_slowdown: row
) -> Any:
    """Stands in for measurements of plans."""
    return SimpleNamespace(measure=measure, confirm=confirm, prepared=SimpleNamespace(progress=Progress()))

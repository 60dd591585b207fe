"""Records for all tests, so that a test says of a record only what it is about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from memopt_cli.measure.jobs import MeasureAnswer
from memopt_cli.records import (
    Breakdown,
    Failure,
    FileHeader,
    Fingerprint,
    InputSpec,
    LevelRow,
    Measurement,
    MemOptSummary,
    ModuleTrace,
    Plan,
    StepPeaks,
    Verification,
    from_data,
)
from memopt_cli.records.header import SCHEMA_VERSION
from memopt_cli.records.plan_file import plan_yaml

MIB = 2**20


def a_header(**changes: Any) -> FileHeader:
    """The header of a file about ``model.pt``, on the CPU."""
    plain = FileHeader(
        schema_version=SCHEMA_VERSION,
        memopt="0.1.0",
        torch="2.13.0",
        model="model.pt",
        sha256=None,
        spec=InputSpec(source="here"),
        seed=0,
        device="cpu",
    )
    return replace(plain, **changes)


def plan_file(folder: Path, plan: Plan) -> str:
    """A file in ``folder`` that holds ``plan``."""
    path = folder / "p.plan.yaml"
    path.write_bytes(plan_yaml(a_header(), plan, 3))
    return str(path)


def summary_of(done: Any, code: int = 0) -> MemOptSummary:
    """What ``memopt optimize --json`` has printed, which ended with ``code``."""
    assert done.code == code, done.err
    return from_data(MemOptSummary, json.loads(done.out)["summary"])


def a_breakdown(**in_bytes: int) -> Breakdown:
    """A breakdown in which every category that is not given is empty."""
    return Breakdown(**dict.fromkeys(Breakdown.__dataclass_fields__, 0) | in_bytes)


def measured(peak: int, *step_times_s: float, **changes: Any) -> Measurement:
    """A measurement in which every peak is ``peak`` bytes; of steps that took so long, or one of a second."""
    plain = Measurement(
        tensor_peak_bytes=peak,
        allocated_peak_bytes=peak,
        resident_bytes=0,
        reserved_peak_bytes=peak,
        process_peak_bytes=peak,
        step_times_s=step_times_s or (1.0,),
        breakdown=a_breakdown(),
        holders=(),
        backend="cpu profiler",
        batch=4,
        spent_s=0.0,
    )
    return replace(plain, **changes)


def answered(measurement: Measurement) -> MeasureAnswer:
    """What a subprocess answers that has measured this, of a step that leaves nothing."""
    return MeasureAnswer(measurement=measurement, fingerprint=Fingerprint(tensors=(), put_off=(), repeats=True))


def counted(peak: int, gradients: int = 0, **changes: Any) -> StepPeaks:
    """A count with this peak, at which so many bytes of gradients stand."""
    plain = StepPeaks(
        tensor_peak_bytes=peak,
        allocated_peak_bytes=peak,
        resident_bytes=0,
        breakdown=a_breakdown(gradients_bytes=gradients),
        holders=(),
    )
    return replace(plain, **changes)


def a_row(level: int, outcome: Measurement | Failure | None, plan: Plan | None = None, **changes: Any) -> LevelRow:
    """The row of a level whose plan did this."""
    return replace(LevelRow(level=level, plan=plan or Plan(), outcome=outcome, dry_runs=1, search_s=0.0), **changes)


def verified(**changes: Any) -> Verification:
    """A verification that all passed, to the bit and at full size."""
    plain = Verification(
        passed=True,
        exact=True,
        precision="stored",
        tolerance=0.0,
        compared=3,
        worst_name="",
        worst_difference=0.0,
        batch=4,
        full_size=True,
    )
    return replace(plain, **changes)


def a_module(path: str, class_name: str = "Block", **changes: Any) -> ModuleTrace:
    """A module that was called once and keeps nothing."""
    plain = ModuleTrace(
        path=path,
        class_name=class_name,
        calls=1,
        order=0,
        input_bytes=0,
        packed_input_bytes=0,
        compressor="null",
        input_shape=(),
        output_bytes=0,
        saved_bytes=0,
    )
    return replace(plain, **changes)

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.errors import UsageError
from memopt_cli.records import (
    BatchAdvice,
    BatchProbe,
    Crashed,
    Failure,
    InputDimension,
    InputSpec,
    LevelRow,
    Measurement,
    MemOptSummary,
    ModuleShare,
    OptimizeRequest,
    OutOfMemory,
    Plan,
    PlanRange,
    SegmentPlan,
    StepFailed,
    TensorSpec,
    TimedOut,
    describe,
    from_data,
    to_data,
)
from tests.zoo.records import a_row, measured, verified

PLAN = Plan(segments=(SegmentPlan(path="a.0", compressor="bit"), SegmentPlan(path="", chunks=4, axis=1)))
MEASUREMENT = measured(
    120, 0.3, 0.1, 0.2, tensor_peak_bytes=100, resident_bytes=50, holders=(ModuleShare(path="a", held_bytes=60),)
)
FAILURES: tuple[Failure, ...] = (
    OutOfMemory(detail="std::bad_alloc"),
    TimedOut(limit_s=2.5),
    Crashed(reason="killed by SIGSEGV", output_tail="…"),
    StepFailed(message="the loss is NaN", hint="Lower the input values.", exit_code=3),
)


def row(outcome: Measurement | Failure) -> LevelRow:
    return a_row(1, outcome, PLAN, predicted_allocated_peak_bytes=7, repeats=0)


def summary() -> MemOptSummary:
    return MemOptSummary(
        profile=None,
        checkpoint_budget="speed",
        prefer=None,
        device="cpu",
        requested_level=3,
        applied_level=2,
        compress_x=True,
        allow_expensive_profiling=False,
        notes=["first", "second"],
        options={"seed": 1, "nested": {"list": [1, 2.5, None]}},
        levels=[row(MEASUREMENT), *map(row, FAILURES)],
        plan=PLAN,
        verification=verified(),
        advice=BatchAdvice(
            recommended_batch=8,
            fastest_batch=8,
            estimated_batch=9,
            probes=(BatchProbe(batch=1, allocated_peak_bytes=10, step_s=0.1),),
            intercept_bytes=5.0,
            slope_bytes=5.0,
            budget_bytes=50,
            device_bytes=100,
            limited_by="the budget",
        ),
    )


def through_json(record: Any) -> Any:
    return from_data(type(record), json.loads(json.dumps(to_data(record))))


@pytest.mark.parametrize("outcome", [MEASUREMENT, *FAILURES], ids=lambda outcome: type(outcome).__name__)
def test_a_row_keeps_its_kind_of_outcome(outcome: Measurement | Failure) -> None:
    assert through_json(row(outcome)) == row(outcome)


def test_a_summary_survives_json() -> None:
    assert through_json(summary()) == summary()


names = st.text(max_size=8)
counts = st.integers(0, 2**40)
segments = st.builds(
    SegmentPlan,
    path=names,
    compressor=st.sampled_from(["null", "boolean", "uint8", "bit", "sparse"]),
    chunks=counts,
    axis=counts,
    seq_inputs=counts,
    seq_outputs=counts,
    spatial_split=st.booleans(),
)
tensor_specs = st.builds(
    TensorSpec, name=st.none() | names, shape=st.lists(counts | names, max_size=4).map(tuple), dtype=names, values=names
)
input_specs = st.one_of(
    st.builds(InputSpec, dims=st.dictionaries(names, counts, max_size=3), source=names, **{way: values})
    for way, values in {
        "tensors": st.lists(tensor_specs, max_size=3).map(tuple),
        "data_file": st.none() | names,
        "script": st.none() | names,
    }.items()
)
bound = operator.attrgetter("up_to")
parts = {"packed": st.booleans(), "segments": st.lists(segments, max_size=3).map(tuple)}
dimensions = st.builds(
    InputDimension,
    dim=names.filter(str.strip),
    argument=names | st.integers(0, 9),
    axis=counts | st.lists(counts, min_size=1).map(tuple),
)
ranges = st.lists(st.builds(PlanRange, up_to=st.integers(1, 99), **parts), min_size=1, max_size=3, unique_by=bound)
plans = st.builds(Plan, **parts) | st.builds(
    Plan, by=dimensions, ranges=ranges.map(lambda some: tuple(sorted(some, key=bound)))
)


@pytest.mark.slow
@given(plans | input_specs)
def test_every_plan_and_spec_survives_json(record: Plan | InputSpec) -> None:
    assert through_json(record) == record


def test_a_missing_key_takes_its_default() -> None:
    assert from_data(SegmentPlan, {"path": "a"}) == SegmentPlan(path="a")


@pytest.mark.parametrize(
    ("cls", "data", "message"),
    [
        (SegmentPlan, {}, "SegmentPlan lacks the key 'path'"),
        (Plan, {"packed": True, "segment": []}, "Plan has an unknown key 'segment'"),
        (Plan, {"segments": [{"path": "a"}, {"path": 2}]}, r"Plan.segments\[1\].path must be text, not 2"),
        (Plan, {"segments": {"path": "a"}}, "Plan.segments must be a list"),
        (SegmentPlan, {"path": "a", "chunks": True}, "SegmentPlan.chunks must be int, not True"),
        (SegmentPlan, {"path": "a", "chunks": 1.0}, "SegmentPlan.chunks must be int, not 1.0"),
        (Plan, [], r"Plan must be a mapping, not \[\]"),
        (SegmentPlan, {"path": "a", "compressor": "zip"}, "SegmentPlan.compressor is 'zip'; it must be one of null,"),
        (SegmentPlan, {"path": "a", "spatial_split": 1}, "SegmentPlan.spatial_split must be bool, not 1"),
        (InputSpec, {"source": "x", "dims": [1]}, "InputSpec.dims must be a mapping"),
        (InputSpec, {"source": "x", "dims": {"B": "8"}}, "InputSpec.dims.B must be int, not '8'"),
        (TimedOut, {"limit_s": "1"}, "TimedOut.limit_s must be float, not '1'"),
        (TimedOut, {"limit_s": 10**400}, "TimedOut.limit_s"),
        (InputSpec, {"source": None}, "InputSpec.source must be text, not None"),
        (TensorSpec, {"shape": [1, None]}, r"TensorSpec.shape\[1\] must be text, not None"),
    ],
)
def test_a_wrong_field_is_named(cls: type[Any], data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_data(cls, data)


@pytest.mark.parametrize("kind", [None, "Plan", 3, ["OutOfMemory"]])
def test_an_outcome_of_no_known_kind_is_refused(kind: Any) -> None:
    data = to_data(row(FAILURES[0]))
    data["outcome"]["kind"] = kind
    with pytest.raises(UsageError, match=r"LevelRow\.outcome must have a kind among Measurement, OutOfMemory"):
        from_data(LevelRow, data)


def test_the_place_of_an_error_starts_where_the_caller_says() -> None:
    with pytest.raises(UsageError, match=r"model\.plan\.yaml\.packed must be bool"):
        from_data(Plan, {"packed": "3"}, where="model.plan.yaml")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
RECORDS = (LevelRow, MemOptSummary, OptimizeRequest, SegmentPlan)


@pytest.mark.slow
@given(st.sampled_from(RECORDS), json_values)
def test_arbitrary_json_is_a_usage_error(cls: type[Any], data: Any) -> None:
    with pytest.raises(UsageError):
        from_data(cls, data)


def places(data: Any) -> list[tuple[Any, ...]]:
    """Every path of keys and indices inside ``data``."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [(), *((key, *rest) for key, value in items for rest in places(value))]


SUMMARY_DATA = json.dumps(to_data(summary()))


@pytest.mark.slow
@given(st.sampled_from(places(json.loads(SUMMARY_DATA))[1:]), json_values)
def test_a_value_replaced_anywhere_reads_or_is_a_usage_error(place: tuple[Any, ...], value: Any) -> None:
    data = holder = json.loads(SUMMARY_DATA)
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    try:
        record = from_data(MemOptSummary, data)
    except UsageError:
        return
    assert dataclasses.is_dataclass(record)


def test_step_time_is_the_median() -> None:
    assert MEASUREMENT.step_s == 0.2
    assert dataclasses.replace(MEASUREMENT, step_times_s=(4.0, 1.0, 2.0, 100.0)).step_s == 3.0
    assert dataclasses.replace(MEASUREMENT, step_times_s=(3.0,)).step_variation == 0.0
    assert dataclasses.replace(MEASUREMENT, step_times_s=(3.0, 1.0, 2.0, 4.0, 5.0)).step_variation == 2 / 3


def test_activation_peak_is_never_negative() -> None:
    assert MEASUREMENT.activation_peak_bytes == 70
    assert dataclasses.replace(MEASUREMENT, resident_bytes=500).activation_peak_bytes == 0


@pytest.mark.parametrize(
    ("failure", "expected"), list(zip(FAILURES, ["std::bad_alloc", "2.5 s", "SIGSEGV", "NaN"], strict=True))
)
def test_a_failure_describes_itself(failure: Failure, expected: str) -> None:
    assert expected in describe(failure)


@dataclasses.dataclass(frozen=True)
class WithMapping:
    """It says ``Mapping`` of what is not to be written."""

    indices: Mapping[str, int]


def test_a_mapping_is_read_back() -> None:
    assert from_data(WithMapping, {"indices": {"edges": 3}}) == WithMapping({"edges": 3})
    with pytest.raises(UsageError, match="must be a mapping"):
        from_data(WithMapping, {"indices": 3})


def test_a_plan_prints_only_what_differs_from_the_defaults() -> None:
    plan = Plan(segments=(SegmentPlan(path="a", chunks=2, axis=1), SegmentPlan(path="")), packed=True)
    assert repr(plan) == ("Plan(segments=(SegmentPlan(path='a', axis=1, chunks=2), SegmentPlan(path='')), packed=True)")
    assert eval(repr(plan)) == plan

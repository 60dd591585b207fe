"""A step recorded at two batch sizes, at others: held against records of these."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import Plan, SegmentPlan, StepSettings, StepTrace
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.scaled import ScaledStep, pair_records
from memopt_cli.trace import FakeStep
from memopt_cli.training.step import TrainingStep
from tests.search.plan.subjects import Chain, Steps


class ByRows(nn.Module):
    """Another operator for every sample."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.exp() for row in x])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def recorded(model: nn.Module, x: Tensor, batch: int) -> StepTrace:
    step = TrainingStep(
        model=model,
        args=(x,),
        kwargs={},
        settings=StepSettings(),
        optimizer=sgd(model),
        make_optimizer=sgd,
    )
    return FakeStep(step).record(batch)


@functools.cache
def chain(batch: int) -> StepTrace:
    return recorded(Chain(blocks=3), torch.randn(batch, 16, 8, 8), batch)


@functools.cache
def steps(batch: int) -> StepTrace:
    return recorded(Steps(), torch.randn(5, batch, 32), batch)


def of(small: StepTrace, large: StepTrace) -> ScaledStep:
    found = pair_records(small, large)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("record", [chain, steps])
@pytest.mark.parametrize("batch", [2, 3, 17, 64])
def test_between_and_beyond_its_sizes_are_those_of_a_record(record: Callable[[int], StepTrace], batch: int) -> None:
    found, true = of(record(3), record(8)).scale_to(batch, pace=1.0, update_pace=1.0), record(batch)
    assert [s.nbytes for s in found.storages] == [s.nbytes for s in true.storages]
    assert [m.input_shape for m in found.modules] == [m.input_shape for m in true.modules]
    assert found.allocated_peak_bytes == true.allocated_peak_bytes
    assert found.batch == batch


def test_a_plan_is_priced_as_on_a_record() -> None:
    plan = Plan(segments=(SegmentPlan(path="blocks.0", chunks=4), SegmentPlan(path="blocks.1")))
    found, true = (
        CostModel(trace).predict(plan)
        for trace in (of(chain(3), chain(8)).scale_to(20, pace=1.0, update_pace=1.0), chain(20))
    )
    assert found.allocated_peak_bytes == true.allocated_peak_bytes
    assert found.module == true.module


def test_what_runs_once_in_a_step_takes_as_long_at_any_batch() -> None:
    timed = replace(chain(8), ops=tuple(replace(op, seconds=1.0) for op in chain(8).ops))
    step = of(chain(3), timed)
    once, total = sum(op.phase == "update" for op in timed.ops), len(timed.ops)
    assert step.timed is timed
    assert 0 < once < total
    found = step.scale_to(16, pace=2.0, update_pace=1.0)
    assert sum(op.seconds for op in found.ops) == 2 * (total - once) + once


def test_the_smaller_record_tells_the_time_where_the_larger_does_not() -> None:
    timed = replace(chain(3), ops=tuple(replace(op, seconds=1.0) for op in chain(3).ops))
    assert of(timed, chain(8)).timed is timed


def test_steps_of_other_operators_are_not_on_one_line() -> None:
    found = [recorded(nn.Sequential(nn.Linear(4, 4), ByRows()), torch.randn(batch, 4), batch) for batch in (2, 3)]
    assert pair_records(*found) is None


def test_a_compressor_that_held_one_record_alone_holds_none() -> None:
    packed = tuple(replace(s, compressor="bit", packed_bytes=1) for s in chain(8).storages)
    found = of(chain(3), replace(chain(8), storages=packed)).scale_to(16, pace=1.0, update_pace=1.0)
    assert {(s.compressor, s.packed_bytes - s.nbytes) for s in found.storages} == {("null", 0)}


def test_what_describes_the_device_is_that_of_the_timed_record() -> None:
    untimed, large = chain(2), chain(4)
    timed = replace(
        large,
        ops=tuple(replace(op, seconds=1.0) for op in large.ops),
        packing_bytes_per_s=2.0e9,
        recompute_factor=1.2,
    )
    scaled = of(untimed, timed).scale_to(64, pace=1.0, update_pace=1.0)
    assert (scaled.packing_bytes_per_s, scaled.recompute_factor) == (2.0e9, 1.2)

"""Plans priced at batches that were not recorded, by a step on tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from memopt_cli.errors import MemoptError
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.pricing import Pricing
from memopt_cli.pipeline.batches.scaled_models import ScaledModels
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.records import BatchProbe, Plan, SearchOptions, StepSettings, StepTrace
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.scaled import pair_records
from memopt_cli.trace import FakeStep
from memopt_cli.training.step import TrainingStep
from tests.api.live_model import Block


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


@functools.cache
def record(batch: int) -> StepTrace:
    model = nn.Sequential(*(Block(8) for _ in range(6)))
    x = torch.randn(batch, 64, 8)
    step = TrainingStep(
        model=model, args=(x,), kwargs={}, settings=StepSettings(), optimizer=sgd(model), make_optimizer=sgd
    )
    return FakeStep(step).record(batch)


def ran(step_s: Callable[[int], float], *batches: int, plan: Plan = ORIGINAL) -> list[tuple[Plan, BatchProbe]]:
    return [(plan, BatchProbe(batch=batch, allocated_peak_bytes=1, step_s=step_s(batch))) for batch in batches]


def pricing(runs: list[tuple[Plan, BatchProbe]], large: StepTrace | None = None) -> Pricing:
    def nobody() -> None:
        raise MemoptError("nothing is asked at this level")

    step = pair_records(record(2), large or record(4))
    assert step is not None
    return Pricing(
        models=ScaledModels(
            step=step,
            record=lambda plan, batch: pytest.fail("no head runs through its loss"),
            runs=lambda: runs,
        ),
        probes=SearchProbes(nobody, limit_s=None),  # type: ignore[arg-type]
        options=SearchOptions(level=2),
        progress=Progress(),
    )


def timed(trace: StepTrace) -> StepTrace:
    return replace(trace, ops=tuple(replace(op, seconds=1e-3) for op in trace.ops))


@pytest.mark.slow
def test_a_plan_that_fits_by_the_sums_has_the_peak_of_a_record() -> None:
    prices = pricing(ran(lambda batch: 0.1 + 0.01 * batch, 2, 4))
    budget = record(20).allocated_peak_bytes * 7 // 10
    plan = prices.fastest(20, budget)
    assert plan.segments
    assert prices.peak_bytes(plan, 20) == CostModel(record(20)).predict(plan).allocated_peak_bytes <= budget
    assert prices.step_s(plan, 20) > prices.original_s(20) == pytest.approx(0.3)
    assert prices.step_s(Plan(), 20) == pytest.approx(0.3)


def test_where_none_fits_the_least_is_told() -> None:
    prices = pricing(ran(lambda batch: 0.1, 4))
    least = prices.peak_bytes(prices.least(20), 20)
    assert prices.fastest(20, least - 1) is None
    assert prices.fastest(20, least) is not None


def test_what_python_does_between_operators_counts_as_theirs() -> None:
    prices = pricing(ran(lambda batch: 1.0 * batch, 2, 4), timed(record(4)))
    assert prices.step_s(Plan(), 40) == pytest.approx(40.0)


def test_an_update_takes_what_it_took_in_the_runs_at_any_batch() -> None:
    runs = [(plan, replace(run, update_s=0.6)) for plan, run in ran(lambda batch: 0.6 + batch, 2, 4)]
    prices = pricing(runs, timed(record(4)))
    assert prices.models.update_s == 0.6
    plan = prices.fastest(20, record(20).allocated_peak_bytes * 7 // 10)
    assert plan is not None
    slowdown = prices.step_s(plan, 20) / prices.step_s(Plan(), 20)
    assert 1 < slowdown < 1.0 + 20 / 20.6  # no plan has the update run twice


@pytest.mark.parametrize(
    ("step_s", "at_10"),
    [
        (lambda batch: 1.0 + batch, 11.0),
        (lambda batch: batch**2, 10 * 4.0),  # more than in proportion: in proportion to the largest
        (lambda batch: 5.0 - batch, 10 * 1 / 4),  # a line that falls is one of noise
    ],
)
def test_the_time_of_the_original(step_s: Callable[[int], float], at_10: float) -> None:
    assert pricing(ran(step_s, 2, 4)).original_s(10) == pytest.approx(at_10)


def test_without_a_run_it_is_told_by_flops() -> None:
    prices = pricing([])
    assert 0 < prices.original_s(4) < prices.original_s(400)
    assert prices.models.update_s == 0


def test_a_plan_that_ran_tells_how_the_step_grows_where_the_original_ran_at_one_batch() -> None:
    runs = ran(lambda batch: 0.1 + 0.01 * batch, 2)
    prices = pricing(runs)
    plan = prices.fastest(20, record(20).allocated_peak_bytes * 7 // 10)
    assert plan is not None
    assert not prices.growth_known
    assert prices.original_s(20) == pytest.approx(1.2)
    slowdown = prices.step_s(plan, 20) / prices.original_s(20)
    runs += ran(lambda batch: (0.1 + 0.01 * batch) * slowdown, 20, plan=plan)
    assert prices.growth_known
    assert prices.original_s(40) == pytest.approx(0.5)
    assert prices.step_s(plan, 20) == pytest.approx(0.3 * slowdown)
    runs += ran(lambda batch: 0.04 + 0.04 * batch, 2, 4)[1:]  # its own two say more
    assert prices.original_s(40) == pytest.approx(0.12 + 0.04 * 38)

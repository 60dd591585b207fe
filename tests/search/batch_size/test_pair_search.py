"""Which pairs of a plan and a batch are run, on machines that tests make up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from memopt_cli.records import BatchProbe, Failure, OutOfMemory, Plan, SegmentPlan
from memopt_cli.search.batch_size.accumulation import accumulate
from memopt_cli.search.batch_size.pair_search import PairSearch
from memopt_cli.search.batch_size.runs import Limits

PLANS = [Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(count))) for count in range(8)]
"""The first is the original."""


@dataclass
class Machine:
    """A plan of n segments takes ``1 / (n + 1)`` of what a sample takes, and a step longer by ``n`` slowdowns.

    A step takes ``fixed_s`` and a second for 1000 samples; a sample takes 10 bytes, and all else 100.
    """

    fixed_s: float = 0.5
    slowdown: float = 0.1
    """Of each segment, by the sums."""
    true_slowdown: float = 0.1
    fails: Callable[[int], bool] = lambda batch: False
    more_bytes: int = 0
    """Of a run, beyond what dry runs say."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    dry_runs: int = 0

    def peak(self, plan: Plan, batch: int) -> float:
        self.dry_runs += 1
        return 100 + 10 * batch / (len(plan.segments) + 1)

    def step_s(self, plan: Plan, batch: int) -> float:
        return self._step_s(plan, batch, self.slowdown)

    def true_step_s(self, plan: Plan, batch: int) -> float:
        return self._step_s(plan, batch, self.true_slowdown)

    def _step_s(self, plan: Plan, batch: int, slowdown: float) -> float:
        return (self.fixed_s + batch / 1000) * (1 + slowdown * len(plan.segments))

    def fastest(self, batch: int, budget: int = 1100) -> Plan | None:
        return next((plan for plan in PLANS if self.peak(plan, batch) <= budget), None)

    def run(self, plan: Plan, batch: int) -> BatchProbe | Failure:
        self.asked.append((len(plan.segments), batch))
        if self.fails(batch):
            return OutOfMemory(detail="")
        peak_bytes = int(self.peak(plan, batch)) + self.more_bytes
        step_s = self.true_step_s(plan, batch)
        return BatchProbe(batch=batch, allocated_peak_bytes=peak_bytes, step_s=step_s)

    def search(self, *, max_runs: int = 8, global_batch: int | None = None, **limits: Any) -> PairSearch:
        named: dict[str, Any] = {"longest_step_s": 1e9, "max_samples": global_batch, **limits}
        return PairSearch(
            limits=Limits(budget_bytes=1100, device_bytes=9999, runnable_bytes=9999, name="", **named),
            fastest=self.fastest,
            predict=lambda plan: lambda batch: self.peak(plan, batch),
            ratio=1.0,
            step_s=self.step_s,
            update_s=0.0,
            samples_per_s=lambda batch, step_s, update_s: batch / step_s,
            is_growth_known=lambda: True,
            usable_batch=lambda size: size if global_batch is None else accumulate(global_batch, size).batch,
            run=self.run,
            runs_left=lambda: max_runs - len(self.asked),
            is_over=lambda: False,
        )


def best(machine: Machine) -> tuple[int, int]:
    """Of all pairs that fit, that which trains most samples a second."""
    pairs = [(plan, batch) for plan in PLANS for batch in range(1, 900)]
    fitting = [(plan, batch) for plan, batch in pairs if machine.peak(plan, batch) + machine.more_bytes <= 1100]
    plan, batch = max(fitting, key=lambda pair: pair[1] / machine.true_step_s(*pair))
    return len(plan.segments), batch


def sought(machine: Machine, **limits: Any) -> PairSearch:
    search = machine.search(**limits)
    search.try_pairs(search.price(100), 100 / machine.step_s(PLANS[0], 100))
    return search


@pytest.mark.parametrize("fixed_s", [0.1, 0.5, 2.0])
def test_the_best_pair_is_run(fixed_s: float) -> None:
    machine = Machine(fixed_s=fixed_s)
    search = sought(machine)
    plan, batch = best(machine)
    wanted = batch / machine.step_s(PLANS[plan], batch)
    assert max(run.samples_per_s for run in search.fitting_runs) >= 0.97 * wanted
    assert len(machine.asked) <= 8


def test_where_the_growth_is_not_known_a_pair_is_run_and_corrects_the_sums() -> None:
    """By the sums a step takes as many times longer as its batch is larger, and the original is faster."""
    machine = Machine(fixed_s=2.0)
    search = machine.search()
    first_s = machine.step_s(PLANS[0], 100)
    search.is_growth_known = lambda: bool(machine.asked)
    search.step_s = lambda plan, batch: (
        machine.step_s(plan, batch) if machine.asked else first_s * batch / 100 * (1 + 0.1 * len(plan.segments))
    )
    search.try_pairs(search.price(100), 100 / first_s)
    plan, batch = best(machine)
    assert max(run.samples_per_s for run in search.fitting_runs) >= 0.97 * batch / machine.step_s(PLANS[plan], batch)
    assert len(machine.asked) <= 8


def test_nothing_is_run_where_the_sums_say_that_the_original_is_faster() -> None:
    machine = Machine(fixed_s=0.0, slowdown=0.25)
    sought(machine)
    assert machine.asked == []


def test_a_pair_that_disappoints_ends_the_search_of_those_like_it() -> None:
    machine = Machine(fixed_s=0.5, true_slowdown=1.0)
    sought(machine)
    assert len(machine.asked) == 1


def test_a_run_beyond_the_limit_is_followed_by_a_smaller_batch() -> None:
    machine = Machine(more_bytes=50)
    search = sought(machine)
    (first, large), (second, small), *_ = machine.asked
    assert first == second
    assert small < large
    assert search.fitting_runs
    assert all(run.allocated_peak_bytes <= 1100 for run in search.fitting_runs)


def test_a_run_far_below_the_limit_is_followed_by_a_larger_batch() -> None:
    machine = Machine(more_bytes=-300)
    search = sought(machine)
    (first, small), (second, large), *_ = machine.asked
    assert first == second
    assert large > 1.2 * small
    assert max(run.allocated_peak_bytes for run in search.fitting_runs) > 1000


def test_a_run_out_of_memory_is_too() -> None:
    machine = Machine(fails=lambda batch: batch > 300)
    search = sought(machine)
    assert search.fitting_runs
    assert all(run.batch <= 300 for run in search.fitting_runs)


def test_what_an_allocator_keeps_is_learned_once() -> None:
    """Every plan runs out of memory above 85 % of the limit, as where an allocator keeps the rest."""
    machine = Machine(fixed_s=2.0)
    kept = 0.85 * 1100
    machine.fails = lambda batch: machine.peak(PLANS[machine.asked[-1][0]], batch) > kept
    search = sought(machine)
    assert 0 < len(machine.asked) - len(search.fitting_runs) <= 2
    plan, batch = machine.asked[-1]
    assert machine.peak(PLANS[plan], batch) >= 0.8 * kept


@pytest.mark.parametrize("max_runs", [0, 1, 3])
def test_no_more_pairs_are_run_than_may_be(max_runs: int) -> None:
    machine = Machine(fails=lambda batch: True)
    sought(machine, max_runs=max_runs)
    assert len(machine.asked) == max_runs


def test_of_a_global_batch_only_parts_are_run() -> None:
    machine = Machine()
    search = sought(machine, global_batch=480)
    assert search.fitting_runs
    assert all(480 % batch == 0 for _, batch in machine.asked)


def test_batches_are_multiples() -> None:
    machine = Machine()
    search = machine.search(multiple_of=64)
    search.usable_batch = lambda size: size // 64 * 64
    search.try_pairs(search.price(64), 0.0)
    assert search.fitting_runs
    assert all(batch % 64 == 0 for _, batch in machine.asked)


def test_no_step_is_to_take_longer_than_it_may() -> None:
    machine = Machine(true_slowdown=0.1)
    search = sought(machine, longest_step_s=0.8)
    assert search.fitting_runs
    assert all(run.step_s <= 0.8 for run in search.fitting_runs)


def test_where_no_step_is_in_time_the_smallest_batch_is_run() -> None:
    """As without a plan: a step that takes long is an answer, and none is not."""
    machine = Machine(fixed_s=50.0, slowdown=0.1)
    search = machine.search(longest_step_s=10.0)
    search.fastest = lambda batch: PLANS[1]
    assert search.price(after=0) == [(PLANS[1], 1)]
    assert search.price(after=8) == []
    search.try_pairs([(PLANS[1], 1)], 0.0)
    assert machine.asked == [(1, 1)]


def test_dry_runs_are_spared_for_pairs_that_cannot_win() -> None:
    machine = Machine(fixed_s=0.5, true_slowdown=1.0)
    search = machine.search()
    priced, before = search.price(100), machine.dry_runs
    search.try_pairs(priced, 1e9)
    assert machine.dry_runs == before

"""The search for the largest batch, on machines that tests make up: nothing that was not run is called recommended."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from memopt_cli.errors import MeasurementError
from memopt_cli.records import (
    BatchAdvice,
    BatchEstimate,
    BatchOutcome,
    BatchProbe,
    Budget,
    Crashed,
    Failure,
    NoBatchFits,
    OutOfMemory,
    StepFailed,
)
from memopt_cli.search.batch_size import capacity
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.batch_size.capacity import device_capacity, free_capacity, runnable_bytes
from memopt_cli.search.batch_size.lines import fit_line, interpolate, largest_root
from memopt_cli.search.batch_size.memory_limit import limits_of_device
from memopt_cli.search.batch_size.runs import MAX_PROBES, Limits


def answer(search: BatchSearch) -> BatchOutcome:
    """Run ``search`` to its end, and return what it found."""
    search.find()
    return search.outcome()


@dataclass
class Machine:
    """Runs a batch in memory, or does not; remembers what it was asked to run."""

    peak: Callable[[int], float]
    predict: Callable[[int], float] | None = None
    seconds: Callable[[int], float] = lambda batch: 1e-6 * batch
    fails: Callable[[int], bool] = lambda batch: False
    asked: list[int] = field(default_factory=list)

    def probe(self, batch: int) -> BatchProbe | Failure:
        self.asked.append(batch)
        if self.fails(batch):
            return OutOfMemory(detail="")
        return BatchProbe(batch=batch, allocated_peak_bytes=int(self.peak(batch)), step_s=self.seconds(batch))

    def search(self, batch: int, budget_bytes: int = 8000, **limits: Any) -> BatchSearch:
        named: dict[str, Any] = {
            "budget_bytes": budget_bytes,
            "device_bytes": 10_000,
            "runnable_bytes": 1 << 60,
            "name": "the limit",
            "longest_step_s": 20.0,
        }
        return BatchSearch(batch=batch, probe=self.probe, predict=self.predict, limits=Limits(**(named | limits)))

    def advise(self, batch: int, **limits: Any) -> BatchAdvice:
        found = answer(self.search(batch, **limits))
        assert isinstance(found, BatchAdvice)
        return found


def line(batch: int) -> int:
    return 515 + 30 * batch


LARGEST = (8000 - 515) // 30


# ---------------------------------------------------------------------------------------------- with dry runs


def test_two_samples_are_the_fewest_where_dry_runs_refuse_a_single_one() -> None:
    machine = Machine(peak=line, predict=lambda batch: line(batch) if batch > 1 else math.inf, fails=lambda b: b == 1)
    found = answer(machine.search(batch=16, budget_bytes=line(2) - 1))
    assert isinstance(found, NoBatchFits)
    assert (found.batch, machine.asked) == (2, [2])
    assert answer(machine.search(batch=16, budget_bytes=line(2))).recommended_batch == 2


def test_a_dry_run_that_is_right_needs_a_small_run_and_one_for_its_answer() -> None:
    machine = Machine(peak=line, predict=line)
    advice = machine.advise(64)
    assert machine.asked == [LARGEST // 4, LARGEST]
    assert advice.recommended_batch == advice.estimated_batch == LARGEST == 249
    assert (advice.intercept_bytes, advice.slope_bytes) == (pytest.approx(515), pytest.approx(30))
    assert (advice.budget_bytes, advice.device_bytes, advice.limited_by) == (8000, 10_000, "the limit")


def test_an_answer_that_fits_with_room_is_run_at_once() -> None:
    machine = Machine(peak=lambda n: 1.01 * line(n), predict=line)
    assert machine.advise(4, budget_bytes=715).recommended_batch == 6
    assert machine.asked == [6]


def test_an_answer_far_from_the_batch_described_waits_for_a_run_of_that() -> None:
    machine = Machine(peak=line, predict=line)
    assert machine.advise(8).recommended_batch == LARGEST
    assert machine.asked == [8, LARGEST]


@pytest.mark.parametrize("workspace", [0.9, 1.0, 1.1, 2.0])
def test_what_was_measured_corrects_the_dry_run(workspace: float) -> None:
    machine = Machine(peak=lambda n: workspace * 30 * n + 1200, predict=line)
    advice = machine.advise(64)
    truth = int((8000 - 1200) / (workspace * 30))
    assert truth / 1.03 < advice.recommended_batch <= truth
    assert len(machine.asked) <= 4


def test_another_instant_becomes_the_peak() -> None:
    def peak(batch: int) -> int:
        return max(3000 + 10 * batch, 60 * batch - 2000)

    machine = Machine(peak=peak, predict=peak)
    advice = machine.advise(16)
    assert advice.recommended_batch == 10_000 // 60
    assert machine.asked == [16, 166]
    assert advice.slope_bytes == pytest.approx((peak(166) - peak(83)) / 83)


def test_a_dry_run_that_fails_beyond_some_size_bounds_the_answer() -> None:
    machine = Machine(peak=line, predict=lambda n: line(n) if n < 100 else math.inf)
    assert machine.advise(40).recommended_batch == 99


# ---------------------------------------------------------------------------------------------- without


def test_a_line_is_found_and_its_answer_run() -> None:
    machine = Machine(peak=line)
    advice = machine.advise(8)
    assert machine.asked == [8, 84, LARGEST]
    assert (advice.intercept_bytes, advice.slope_bytes) == (pytest.approx(515), pytest.approx(30))
    assert [probe.batch for probe in advice.probes] == [8, 84, LARGEST]
    assert advice.recommended_batch == advice.estimated_batch == LARGEST


def test_a_batch_described_that_is_too_large() -> None:
    machine = Machine(peak=line)
    assert machine.advise(1000).recommended_batch == LARGEST
    assert len(machine.asked) <= 4


def test_a_peak_that_grows_faster_than_the_line() -> None:
    machine = Machine(peak=lambda batch: 30 * batch + (500 if batch > 200 else 0))
    advice = machine.advise(8)
    assert 250 / 1.03 < advice.recommended_batch <= 250
    assert max(machine.asked) == 266


@pytest.mark.parametrize("peak", [lambda batch: 700, lambda batch: 700 - batch])
def test_a_peak_that_does_not_grow_says_nothing_of_larger_batches(peak: Callable[[int], int]) -> None:
    machine = Machine(peak=peak)
    advice = machine.advise(8)
    assert advice.recommended_batch == max(machine.asked)
    assert advice.recommended_batch >= 8


# ---------------------------------------------------------------------------------------------- bounds


def test_a_run_that_would_take_too_long_makes_an_estimate() -> None:
    machine = Machine(peak=lambda batch: 10 * batch, seconds=lambda batch: 0.5 * batch)
    advice = machine.advise(4)
    assert advice.recommended_batch == 40 == machine.asked[-1]
    assert advice.estimated_batch == 800
    assert advice.limited_by == "`--longest-step` (20 s)"


def test_a_crash_far_above_what_fits_does_not_end_the_search_there() -> None:
    """A step that loops over its batch overflows the stack in its backward at some batch, whatever memory there is."""
    limits = Limits(budget_bytes=100_000, device_bytes=100_000, runnable_bytes=100_000, name="", longest_step_s=1e6)

    def probe(batch: int) -> BatchProbe | Failure:
        if batch > 3000:
            return Crashed(reason="killed by SIGSEGV", output_tail="")
        return BatchProbe(batch=batch, allocated_peak_bytes=10 * batch, step_s=0.01 * batch)

    advice = answer(BatchSearch(batch=8, probe=probe, predict=lambda batch: 10.0 * batch, limits=limits))
    assert isinstance(advice, BatchAdvice)
    assert advice.recommended_batch > 1000


def test_small_batches_that_are_slow_per_sample_do_not_hold_it_back() -> None:
    machine = Machine(peak=lambda batch: 10 * batch, seconds=lambda batch: 1.0 + 0.01 * batch)
    advice = machine.advise(8, longest_step_s=10.0)
    assert machine.asked == [8, 74, 425, 800]  # 10 s at the pace of batch 8, then of batch 74; then within the budget
    assert advice.recommended_batch == advice.estimated_batch == 800


def test_a_step_limited_by_its_time_takes_no_search_for_what_memory_holds_first() -> None:
    dry: list[int] = []

    def predict(batch: int) -> float:
        dry.append(batch)
        return 10 * batch

    machine = Machine(peak=lambda batch: 10 * batch, predict=functools.cache(predict), seconds=lambda batch: batch / 8)
    search = machine.search(8, 1_000_000, longest_step_s=4.0)
    search.run(8)
    search.find()
    assert machine.asked == [8, 32]
    assert dry == [32, 8]
    advice = search.outcome()
    assert advice.estimated_batch == 100_000
    assert dry == [32, 8, 100_000, 16]


def test_what_is_foreseen_is_all_that_is_asked_without_data() -> None:
    dry: dict[int, float] = {}

    def predict(batch: int) -> float:
        known = interpolate(dry, batch)
        return dry.setdefault(batch, 100 + 10 * batch) if known is None else known

    machine = Machine(
        peak=lambda batch: 150 + 10.2 * batch,
        predict=predict,
        seconds=lambda batch: (1.0 if batch == 8 else 1.3) * batch,
    )
    search = machine.search(8, 1_000_000, longest_step_s=20.0, aim=0.7)
    search.run(8)
    search.dry_run_ahead()
    foreseen = [*dry]
    search.find()
    advice = search.outcome()
    assert machine.asked == [8, 14]
    assert advice.estimated_batch == pytest.approx(98_024, rel=0.01)
    assert [*dry] == foreseen


def test_a_sample_that_is_refused_alone_tells_nothing_of_many() -> None:
    assert largest_root(lambda n: math.inf if n == 1 else 10 * n, 800, start=4, evaluated=[1, 4]) == 80


def test_runs_that_are_slower_than_what_they_go_by_aim_below_the_longest_step() -> None:
    """A single cold run may take a quarter longer than the warm steps before it: not late, it is the last."""
    machine = Machine(peak=lambda batch: 10 * batch, seconds=lambda batch: (1.0 if batch == 8 else 1.25) * batch / 8)
    asked = {}
    for aim in (1.0, 0.75):
        machine.asked.clear()
        assert machine.seconds(machine.advise(8, longest_step_s=4.0, aim=aim).recommended_batch) <= 4.0
        asked[aim] = machine.asked[:]
    assert asked == {1.0: [8, 32, 26, 25], 0.75: [8, 24]}


@pytest.mark.parametrize("power", [1.5, 2.0])
def test_a_step_that_took_too_long_is_not_recommended(power: float) -> None:
    machine = Machine(peak=lambda batch: 10 * batch, seconds=lambda batch: 0.01 * batch**power)
    advice = machine.advise(8, longest_step_s=10.0)
    assert any(machine.seconds(batch) > 11 for batch in machine.asked)
    assert machine.seconds(advice.recommended_batch) <= 11
    assert machine.seconds(2 * advice.recommended_batch) > 10
    assert advice.limited_by == "`--longest-step` (10 s)"
    assert advice.estimated_batch == 800


def test_a_batch_described_whose_step_takes_too_long() -> None:
    advice = Machine(peak=lambda batch: 10 * batch, seconds=lambda batch: 1.0 * batch).advise(64, longest_step_s=10.0)
    assert advice.recommended_batch == 10
    slow = Machine(peak=lambda batch: 10 * batch, seconds=lambda batch: 30.0 + batch).advise(4, longest_step_s=10.0)
    assert slow.recommended_batch == 1
    assert slow.limited_by == "`--longest-step` (10 s; batch 1 takes 31.00 s)"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_step_longer_than_allowed_is_never_passed_over(most: int) -> None:
    """By a clock of its own: where no run is in time, or none is left for a smaller batch, the answer says so."""
    machine = Machine(peak=lambda batch: 100 * batch, seconds=lambda batch: 21.5, fails=lambda batch: batch > 16)
    advice = machine.advise(16, longest_step_s=10.0, probes=most)
    assert all(machine.seconds(batch) > 11 for batch in machine.asked)
    taken = f"batch {advice.recommended_batch} takes 21.50 s"
    assert advice.limited_by == f"`--longest-step` (10 s; {taken})"


@pytest.mark.slow
@given(
    batch=st.integers(1, 64),
    fixed=st.floats(0, 20),
    each=st.floats(1e-3, 2),
    power=st.floats(0.5, 2),
    noise=st.floats(0.8, 1.25),
    fits=st.integers(1, 400),
    most=st.integers(1, MAX_PROBES),
)
def test_what_is_recommended_is_in_time_or_says_how_long_it_takes(
    batch: int, fixed: float, each: float, power: float, noise: float, fits: int, most: int
) -> None:
    def seconds(size: int) -> float:
        return (fixed + each * size**power) * (noise if size % 2 else 1)

    machine = Machine(peak=lambda size: 8 * size, seconds=seconds, fails=lambda size: size > fits)
    found = answer(machine.search(batch, longest_step_s=10.0, probes=most))
    if isinstance(found, BatchAdvice):
        took = seconds(found.recommended_batch)
        assert took <= 10 or "takes" in found.limited_by
        assert took <= 10 or not any(seconds(size) <= 10 for size in machine.asked if size <= fits)


def test_a_model_of_one_batch_says_why() -> None:
    refused = StepFailed(message="shape [8, 4] is invalid", hint="")

    def probe(batch: int) -> BatchProbe | Failure:
        return BatchProbe(batch=8, allocated_peak_bytes=90, step_s=1e-3) if batch == 8 else refused

    machine = Machine(peak=line, predict=lambda batch: 90 if batch == 8 else math.inf)
    search = machine.search(8)
    search.probe = probe
    search.find()
    assert search.refusal() == StepFailed(message="shape [8, 4] is invalid")
    search.runs[16] = BatchProbe(batch=16, allocated_peak_bytes=90, step_s=1e-3)
    assert search.refusal() is None


@pytest.mark.parametrize(
    ("batch", "fewer", "reason", "runs"),
    [
        (8, 7, "index 7 is out of bounds", 1),
        (32, 7, "index 7 is out of bounds", 1),
        (32, 9, "", 1),
        (2, 1, "", 0),
        (8, 8, "", 0),
    ],
)
def test_what_points_at_rows_refuses_a_batch_without_the_last_of_them(
    batch: int, fewer: int, reason: str, runs: int
) -> None:
    machine = Machine(peak=line, predict=line)
    search = machine.search(batch)
    run, refused = search.probe, StepFailed(message="index 7 is out of bounds", hint="")
    search.probe = lambda size: refused if size < 8 else run(size)
    assert search.smaller_refusal(fewer) == reason
    assert len(search.runs) == runs  # not of a single sample, nor of the batch described


def test_a_smaller_batch_that_fails_says_nothing_of_larger_ones() -> None:
    machine = Machine(peak=line, predict=line, fails=lambda batch: batch < 64)
    search = machine.search(64)
    search.run(32)
    search.run(64)
    advice = answer(search)
    assert (advice.recommended_batch, advice.limited_by) == (LARGEST, "the limit")


def test_beyond_this_machine_it_is_an_estimate() -> None:
    machine = Machine(peak=line, predict=line)
    advice = machine.advise(64, runnable_bytes=4000)
    assert advice.recommended_batch == (4000 - 515) // 30 == max(machine.asked)
    assert advice.estimated_batch == LARGEST
    assert advice.limited_by == "this machine, where 3.9 KiB are free"


def test_failing_runs_fall_back_to_what_fitted() -> None:
    machine = Machine(peak=lambda batch: 30 * batch, fails=lambda batch: batch > 16)
    advice = machine.advise(8)
    assert len(machine.asked) <= MAX_PROBES
    assert 8 <= advice.recommended_batch <= 16
    assert "out of memory" in advice.limited_by
    assert advice.estimated_batch == advice.recommended_batch


@pytest.mark.parametrize(
    ("runs", "largest", "limit"), [(16, 16, "a dry run at batch 17, which failed"), (300, LARGEST, "the limit")]
)
def test_a_failing_dry_run_is_what_limits(runs: int, largest: int, limit: str) -> None:
    machine = Machine(peak=line, predict=lambda batch: line(batch) if batch <= runs else math.inf)
    advice = machine.advise(8)
    assert (advice.recommended_batch, advice.limited_by) == (largest, limit)


def test_nothing_fits() -> None:
    machine = Machine(peak=lambda batch: 9000 + batch)
    found = answer(machine.search(8))
    assert found == NoBatchFits(batch=1, budget_bytes=8000, reason="it took 8.8 KiB")
    assert machine.asked[-1] == 1


def test_nothing_runs() -> None:
    machine = Machine(peak=line, fails=lambda batch: True)
    found = answer(machine.search(8))
    assert found == NoBatchFits(batch=1, budget_bytes=8000, reason="out of memory")
    assert machine.asked == [8, 4, 2, 1]


def test_without_runs_it_is_an_estimate() -> None:
    machine = Machine(peak=line, predict=line)
    found = answer(machine.search(8, probes=0))
    assert found == BatchEstimate(batch=LARGEST, predicted_peak_bytes=line(LARGEST), budget_bytes=8000)
    assert machine.asked == []
    nothing = answer(machine.search(8, budget_bytes=300, probes=0))
    assert nothing == NoBatchFits(batch=1, budget_bytes=300, reason="its predicted peak is 545 B")


def test_the_last_run_is_to_fit() -> None:
    machine = Machine(peak=lambda n: 1.01 * line(n), predict=line)
    assert isinstance(answer(machine.search(64, probes=1)), BatchAdvice)


@pytest.mark.parametrize("unit", [2, 8, 64])
def test_multiples(unit: int) -> None:
    machine = Machine(peak=line, predict=line)
    advice = machine.advise(60, multiple_of=unit)
    assert advice.recommended_batch == LARGEST // unit * unit
    assert all(batch % unit == 0 for batch in machine.asked)


def test_not_even_one_multiple_fits() -> None:
    found = answer(Machine(peak=line, predict=line).search(8, multiple_of=500))
    assert isinstance(found, NoBatchFits)
    assert found.batch == 500


def test_the_fastest_of_those_that_ran() -> None:
    machine = Machine(peak=line, predict=line, seconds=lambda n: n / (100 - abs(n - 124)))
    search = machine.search(64)
    answer(search)
    search.also_run([124, 62, 31, 15, 7, 3, 2, 0])
    assert machine.asked == [62, 249, 124, 31, 15, 7]
    found = search.outcome()
    assert (found.recommended_batch, found.fastest_batch) == (249, 124)


@pytest.mark.parametrize(
    ("fastest", "max_runs", "asked"),
    [(249, 3, [124]), (124, 3, [124]), (1, 3, [124, 31, 15]), (1, 1, [124]), (1, 0, [])],
)
def test_smaller_batches_are_run_until_one_is_slower(fastest: int, max_runs: int, asked: list[int]) -> None:
    machine = Machine(peak=line, predict=line, seconds=lambda n: n / (1000 - abs(n - fastest)))
    search = machine.search(64)
    search.find()
    search.find_faster([124, 62, 31, 15, 7], max_runs)
    assert machine.asked == [62, 249, *asked]  # what ran first tells of 62 as well


def test_dry_runs_are_taken_where_they_tell_something() -> None:
    dry: list[int] = []

    def predict(batch: int) -> float:
        dry.append(batch)
        return line(batch)

    machine = Machine(peak=line, predict=functools.cache(predict))
    search = machine.search(4, 700)
    search.find()
    search.also_run([3, 2])
    found = search.outcome()
    assert machine.asked == [1, 6, 3, 2]
    assert dry == [4, 8, 6, 1]  # 7 lies beyond on their line; what is run for its speed alone is compared with nothing
    assert (found.recommended_batch, found.intercept_bytes) == (6, pytest.approx(515))


def test_a_straight_peak_takes_three_dry_runs() -> None:
    asked: list[int] = []

    def value(batch: int) -> float:
        asked.append(batch)
        return line(batch)

    assert largest_root(value, 30_000_530, start=32) == 1_000_000
    assert asked == [32, 64, 1_000_000]


def test_what_lies_between_three_on_a_line_is_known() -> None:
    known = {32: 3700.0, 64: 6900.0, 1000: 100_500.0}
    assert interpolate(known, 500) == 50_500.0
    assert interpolate(known, 33) == 3800.0


def test_near_a_known_number_a_bend_changes_little() -> None:
    known = {32: 3700.0, 64: 6900.0, 1000: 103_000.0, 1100: 113_500.0}
    assert interpolate(known, 990) == pytest.approx(101_973, rel=1e-4)
    assert interpolate(known, 65) == pytest.approx(7003, rel=1e-3)
    assert interpolate(known, 800) is None


@pytest.mark.parametrize(
    ("known", "number"),
    [
        ({32: 3700.0, 64: 6900.0, 1000: 100_500.0}, 1001),
        ({32: 3700.0, 64: 6900.0, 1000: 100_500.0}, 31),
        ({32: 3700.0, 1000: 100_500.0}, 500),
        ({32: 3700.0, 64: 6900.0, 1000: 103_000.0}, 500),
        ({32: 3700.0, 64: 6900.0, 1000: math.inf}, 500),
        ({32: math.inf, 64: math.inf, 1000: math.inf}, 500),
    ],
)
def test_what_lies_beyond_a_line_or_around_a_bend_is_not(known: dict[int, float], number: int) -> None:
    assert interpolate(known, number) is None


@pytest.mark.slow
@given(
    st.floats(0, 1e9), st.floats(1, 1e3), st.floats(0, 10), st.integers(0, 100_000), st.lists(st.integers(1, 100_000))
)
@example(0.0, 1.0, 1.0, 2, [1, 252, 253, 2])
def test_between_known_numbers_little_is_lost(
    base: float, slope: float, curve: float, at: int, batches: list[int]
) -> None:
    def value(n: int) -> float:
        return base + slope * n + curve * slope * max(0, n - at)

    known: dict[int, float] = {}
    for batch in batches:
        found = interpolate(known, batch)
        if found is None:
            known[batch] = value(batch)
        else:
            assert value(batch) == pytest.approx(found, rel=0.005)


def test_a_bend_above_the_answer_is_looked_at() -> None:
    bent = {4: 100.0, 8: 210.0, 6: 180.0, 5: 110.0, 7: 199.0}
    assert largest_root(bent.__getitem__, 185, start=4) == 6


def test_a_peak_a_hair_above_the_bound_takes_one_question_more() -> None:
    asked = []

    def value(batch: int) -> float:
        asked.append(batch)
        return -(-batch // 4) * 4000  # as an allocator rounds

    found = largest_root(value, 599_999_500, start=8)
    assert asked[:3] == [8, 16, 599_999]
    assert len(asked) == 4
    assert 0.99 * 599_996 <= found <= 599_996


def test_inputs_that_run_out_are_found_in_few_dry_runs() -> None:
    """The memory would hold a million samples, and the data set has 40."""
    asked: list[int] = []

    def value(batch: int) -> float:
        asked.append(batch)
        return line(batch) if batch <= 40 else math.inf

    assert largest_root(value, 30_000_530, start=8) == 40
    assert len(asked) <= 14


@pytest.mark.parametrize("runs", [range(1, 11), range(7, 100), [4, 8, 32]])
def test_sizes_that_cannot_run(runs: Container[int]) -> None:
    machine = Machine(peak=lambda batch: batch, fails=lambda batch: batch not in runs)
    advice = machine.advise(8)
    assert advice.recommended_batch in runs
    assert advice.recommended_batch >= 8


@given(
    batch=st.integers(1, 64),
    base=st.integers(0, 2000),
    slope=st.integers(-5, 200),
    jump=st.integers(0, 5000),
    jump_at=st.integers(1, 200),
    longest=st.floats(0.1, 100),
    limit=st.integers(1, 400),
    share=st.none() | st.floats(0.2, 2.0),
    unit=st.integers(1, 9),
)
def test_only_what_was_run_within_the_budget_is_recommended(
    batch: int,
    base: int,
    slope: int,
    jump: int,
    jump_at: int,
    longest: float,
    limit: int,
    share: float | None,
    unit: int,
) -> None:
    def peak(n: int) -> int:
        return max(0, base + slope * n) + (jump if n >= jump_at else 0)

    machine = Machine(
        peak=peak,
        predict=None if share is None else lambda n: share * peak(n),
        seconds=lambda n: 0.01 + 0.1 * n,
        fails=lambda n: n > limit,
    )
    outcome: BatchOutcome = answer(machine.search(batch, longest_step_s=longest, multiple_of=unit))
    assert len(machine.asked) <= MAX_PROBES
    assert len(set(machine.asked)) == len(machine.asked)
    assert all(n % unit == 0 for n in machine.asked)
    if isinstance(outcome, BatchAdvice):
        within = [n for n in sorted(machine.asked) if n <= limit and peak(n) <= outcome.budget_bytes]
        within = [n for n in within if 0.01 + 0.1 * n <= longest] or within[:1]
        assert outcome.recommended_batch == max(within)
        assert outcome.fastest_batch in within
        assert outcome.estimated_batch >= outcome.recommended_batch
    if isinstance(outcome, NoBatchFits):
        assert unit > limit or peak(unit) > outcome.budget_bytes


@given(
    base=st.floats(100, 5000),
    slope=st.floats(0.5, 300),
    second=st.floats(0.5, 300),
    at=st.integers(0, 300),
    share=st.floats(0.5, 1.5),
    workspace=st.floats(0, 500),
    batch=st.integers(1, 64),
)
def test_a_batch_larger_by_a_twentieth_does_not_fit(
    base: float, slope: float, second: float, at: int, share: float, workspace: float, batch: int
) -> None:
    def tensors(n: int) -> float:
        return max(base + slope * n, base + slope * at + (slope + second) * (n - at))

    machine = Machine(peak=lambda n: share * tensors(n) + workspace, predict=tensors, seconds=lambda n: 1e-9)
    outcome = answer(machine.search(batch))
    if isinstance(outcome, BatchAdvice):
        n = outcome.recommended_batch
        assert machine.peak(n) < 8001
        assert machine.peak(n + max(2, math.ceil(0.05 * n))) > 8000
    else:
        assert machine.peak(1) > 8000


@given(
    st.floats(0, 1e6), st.floats(0.01, 1e3), st.floats(0, 10), st.integers(0, 10_000), st.integers(1, 500), st.data()
)
def test_the_root_of_joined_lines(
    base: float, slope: float, curve: float, at: int, start: int, data: st.DataObject
) -> None:
    asked: list[int] = []

    def value(n: int) -> float:
        asked.append(n)
        return base + slope * n + curve * slope * max(0, n - at)

    bound = data.draw(st.floats(0, 2e6))
    told = data.draw(st.lists(st.integers(1, 20_000), max_size=8, unique=True))
    found = largest_root(value, bound, start=start, evaluated=told)
    assert found == 0 or value(found) <= bound
    assert value(max(found + 1, math.ceil(found * 1.01) + 1)) > bound
    assert len(asked) - len(told) <= 26


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True))
def test_a_straight_line_is_fitted_exactly(intercept: float, slope: float, places: list[int]) -> None:
    found = fit_line([(x, intercept + slope * x) for x in places])
    assert found == (pytest.approx(intercept, abs=1e-3), pytest.approx(slope, abs=1e-5))


# ---------------------------------------------------------------------------------------------- what the device has


def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    machine = device_capacity("cpu")
    assert machine.device_bytes > 1 << 28
    limit = f"{tmp_path}/memory.max"
    monkeypatch.setattr(capacity, "_CGROUP_LIMITS", (limit, "/nowhere"))
    for text, expected in (("max", None), (str(1 << 27), 1 << 27)):
        with open(limit, "w") as file:
            file.write(text + "\n")
        found = device_capacity("cpu")
        assert found.device_bytes == expected or expected is None
        assert ("control group" in found.limited_by) is (expected is not None)


def test_the_address_space_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity.resource, "getrlimit", lambda which: (12345, -1))
    assert device_capacity("cpu") == capacity.Capacity(12345, "the process's address space limit")


def test_a_run_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capacity, "_MEMINFO", tmp_path / "meminfo")
    assert runnable_bytes("cpu") == int(0.9 * device_capacity("cpu").device_bytes)
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:    1000 kB\nBuffers: 5 kB\n")
    assert runnable_bytes("cpu") == 921_600
    assert free_capacity("cpu") == device_capacity("cpu")


@pytest.mark.parametrize("budget", [Budget(nbytes=3 << 10), Budget(nbytes=1 << 60), Budget(share=0.5), None])
def test_a_budget_in_bytes_bounds_the_batch_as_well(budget: Budget | None) -> None:
    limits = limits_of_device("cpu", 1.0, aim=0.7, budget=budget)
    device = int(0.8 * device_capacity("cpu").device_bytes)
    named = budget is not None and budget.nbytes == 3 << 10
    assert limits.budget_bytes == limits.runnable_bytes == (3 << 10 if named else device)
    assert limits.name.startswith("`--budget 3KiB`" if named else "80 % of ")


class FakeNvml(SimpleNamespace):
    """NVML of one device, 10 GiB of it free, as ``pynvml`` tells it."""

    class NVMLError(Exception):
        """As pynvml's."""

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(free=10 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        held = {capacity.os.getpid(): 1 << 30, 11: None, 12: 3 << 30, 13: 5 << 30, 14: 1, 15: 2}
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in held.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = SimpleNamespace(total_memory=24 << 30, uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    return fake


def test_what_a_cuda_device_has_free_and_who_holds_the_rest(nvml: FakeNvml) -> None:
    found = free_capacity("cuda:0")
    assert found.device_bytes == 10 << 30 == runnable_bytes("cuda:0")
    assert found.limited_by == (
        "10.0 GiB free of the 24.0 GiB of Card; "
        "held by others: process 13 with 5.0 GiB, process 12 with 3.0 GiB, process 15 with 2 B, 2 more"
    )
    assert not nvml.open


def test_without_nvml_a_share_is_refused(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: nvml.nvmlDeviceGetHandleByUUID("GPU-0")
    with pytest.raises(MeasurementError, match=r"NVML does not report.*not found"):
        free_capacity("cuda:0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MeasurementError, match="without NVML") as caught:
        free_capacity("cuda:0")
    assert "--memory 24GiB" in caught.value.hint
    assert runnable_bytes("cuda:0") == 24 << 30


# ---------------------------------------------------------------------------------------------- failed dry runs


def test_a_run_whose_dry_run_failed_teaches_nothing_of_the_dry_runs() -> None:
    machine = Machine(peak=line, predict=lambda batch: math.inf if batch == 62 else line(batch))
    found = machine.search(64)
    for batch in (62, 31, 124):
        found.run(batch)
    assert found.model.peak_bytes(62) == line(62)
    assert found.model.peak_bytes(200) == pytest.approx(line(200))
    assert found.model.measured_ratio() == pytest.approx(1)
    assert machine.advise(64).recommended_batch == LARGEST


def test_a_batch_that_alone_can_be_predicted() -> None:
    advice = Machine(peak=line, predict=lambda batch: line(1) if batch == 1 else math.inf).advise(1)
    assert advice.recommended_batch == 1
    assert (advice.intercept_bytes, advice.slope_bytes) == (0, line(1))


@pytest.mark.parametrize(("most", "largest"), [(50, 50), (52, 50), (800, 790)])
def test_no_larger_batch_is_run_than_is_of_use(most: int, largest: int) -> None:
    machine = Machine(peak=lambda batch: 10 * batch, predict=lambda batch: 10 * batch)
    search = machine.search(8, max_samples=most, multiple_of=10 if most < 800 else 1)
    search.find()
    assert max(machine.asked) == search.runs.best
    assert search.runs.best == pytest.approx(largest, rel=0.02)
    assert search.runs.best <= most

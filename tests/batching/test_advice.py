"""Batch advice from probes that tests make up: nothing that was not run is called recommended."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.batching import capacity
from memopt_cli.batching.advice import advise, fit_line
from memopt_cli.batching.capacity import device_capacity
from memopt_cli.records import BatchAdvice, BatchProbe, Failure, OutOfMemory


@dataclass
class Machine:
    """Runs a batch in memory, or does not; remembers what it was asked to run."""

    peak: Callable[[int], int]
    seconds: Callable[[int], float] = lambda batch: 1e-6 * batch
    fails: Callable[[int], bool] = lambda batch: False
    asked: list[int] = field(default_factory=list)

    def probe(self, batch: int) -> BatchProbe | Failure:
        self.asked.append(batch)
        if self.fails(batch):
            return OutOfMemory(detail="")
        return BatchProbe(batch=batch, allocated_peak_bytes=self.peak(batch), step_s=self.seconds(batch))

    def advise(self, batch: int, device_bytes: int = 10_000, longest_step_s: float = 20.0) -> BatchAdvice | None:
        return advise(
            batch,
            self.probe,
            device_bytes=device_bytes,
            device_limit="the machine's memory",
            longest_step_s=longest_step_s,
        )


def test_a_line_is_found_and_its_answer_run() -> None:
    machine = Machine(peak=lambda batch: 515 + 30 * batch)
    advice = machine.advise(8)
    assert advice is not None
    assert (advice.intercept_bytes, advice.slope_bytes) == (pytest.approx(515), pytest.approx(30))
    assert machine.asked == [4, 8, 16, 249]
    assert advice.recommended_batch == advice.estimated_batch == 249 == (8000 - 515) // 30
    assert [probe.batch for probe in advice.probes] == [4, 8, 16, 249]
    assert (advice.budget_bytes, advice.device_bytes) == (8000, 10_000)
    assert advice.limited_by == "80 % of the machine's memory"


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1, 2, 3]), (2, [1, 2, 4]), (3, [1, 3, 6]), (8, [4, 8, 16])])
def test_three_sizes_are_tried(batch: int, sizes: list[int]) -> None:
    machine = Machine(peak=lambda batch: batch)
    machine.advise(batch)
    assert machine.asked[:3] == sizes


def test_a_run_that_would_take_too_long_makes_an_estimate() -> None:
    machine = Machine(peak=lambda batch: 10 * batch - 5, seconds=lambda batch: 0.5 * batch)
    advice = machine.advise(4)
    assert advice is not None
    assert advice.recommended_batch == 40 == machine.asked[-1]
    assert advice.estimated_batch == 800
    assert "time of a step (20 s)" in advice.limited_by


def test_small_batches_that_are_slow_per_sample_do_not_hold_it_back() -> None:
    machine = Machine(peak=lambda batch: 10 * batch - 5, seconds=lambda batch: 1.0 + 0.01 * batch)
    advice = machine.advise(4, longest_step_s=10.0)
    assert advice is not None
    assert machine.asked[:4] == [2, 4, 8, 74]  # 10 s at the pace of batch 8
    assert machine.asked[4:] == [425, 800]  # of batch 74; then within the budget
    assert advice.recommended_batch == advice.estimated_batch == 800


def test_a_peak_that_grows_faster_than_the_line() -> None:
    machine = Machine(peak=lambda batch: 30 * batch + (500 if batch > 200 else 0))
    advice = machine.advise(8)
    assert advice is not None
    assert machine.asked[3:] == [266, 239]
    assert advice.recommended_batch == advice.estimated_batch == 239
    assert advice.limited_by == "a run at batch 266: it took more than the budget"


def test_failing_runs_fall_back_to_what_fitted() -> None:
    machine = Machine(peak=lambda batch: 30 * batch, fails=lambda batch: batch > 16)
    advice = machine.advise(8)
    assert advice is not None
    assert len(machine.asked) == 6
    assert advice.recommended_batch == 16
    assert advice.limited_by == "a run at batch 215: out of memory"


def test_no_advice_where_nothing_fits() -> None:
    assert Machine(peak=lambda batch: 9000 + batch).advise(8) is None


@pytest.mark.parametrize(
    ("runs", "sizes"),
    [
        (range(1, 11), [4, 8, 2]),  # a device that is nearly full
        (range(7, 100), [8, 16, 24]),  # statistics that want several samples
        ([4, 8, 32], [4, 8, 32]),
    ],
)
def test_other_sizes_stand_in_for_those_that_cannot_run(runs: Container[int], sizes: list[int]) -> None:
    machine = Machine(peak=lambda batch: batch, fails=lambda batch: batch not in runs)
    advice = machine.advise(8)
    assert advice is not None
    assert set(sizes) <= {probe.batch for probe in advice.probes}
    assert advice.recommended_batch == max(sizes)


@pytest.mark.parametrize("peak", [lambda batch: 700, lambda batch: 700 - batch])
def test_a_peak_that_does_not_grow_says_nothing_of_larger_batches(peak: Callable[[int], int]) -> None:
    machine = Machine(peak=peak)
    advice = machine.advise(8)
    assert advice is not None
    assert machine.asked == [4, 8, 16]
    assert advice.recommended_batch == advice.estimated_batch == 16


@pytest.mark.parametrize("runs", [[], [4], [4, 8]])
def test_no_advice_from_less_than_three_sizes(runs: list[int]) -> None:
    assert Machine(peak=lambda batch: batch, fails=lambda batch: batch not in runs).advise(8) is None


@given(
    batch=st.integers(1, 64),
    base=st.integers(0, 2000),
    slope=st.integers(-5, 200),
    jump=st.integers(0, 5000),
    jump_at=st.integers(1, 200),
    longest=st.floats(0.1, 100),
    limit=st.integers(1, 400),
)
def test_only_what_was_run_within_the_budget_is_recommended(
    batch: int, base: int, slope: int, jump: int, jump_at: int, longest: float, limit: int
) -> None:
    machine = Machine(
        peak=lambda n: max(0, base + slope * n) + (jump if n >= jump_at else 0),
        seconds=lambda n: 0.01 + 0.1 * n,
        fails=lambda n: n > limit,
    )
    advice = machine.advise(batch, longest_step_s=longest)
    assert len(machine.asked) <= 10
    if advice is None:
        return
    peaks = {probe.batch: probe.allocated_peak_bytes for probe in advice.probes}
    assert set(peaks) <= set(machine.asked)
    within = [n for n, peak in peaks.items() if peak <= advice.budget_bytes]
    assert advice.recommended_batch == max(within)
    assert advice.estimated_batch >= advice.recommended_batch


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

"""How many copies of a model train fastest, by runs that tests make up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from memopt_cli.records import BatchProbe, Failure, NoBatchFits, OutOfMemory, ReplicaAdvice, StepFailed, TimedOut
from memopt_cli.search.batch_size.replicas import CHOICE_RATIO, ReplicaSearch
from memopt_cli.search.batch_size.runs import Limits

BATCH = 10
SIZES = (1, 2, 4, 8, 16, 32, 64)


def limits(budget: int = 1 << 40, runnable: int = 1 << 40, longest_step_s: float = 1e9) -> Limits:
    return Limits(
        budget_bytes=budget,
        device_bytes=1 << 40,
        runnable_bytes=runnable,
        name="--memory",
        longest_step_s=longest_step_s,
    )


def search(
    peak: Callable[[int], int] = lambda n: n,
    step_s: Callable[[int], float] = lambda n: 1.0,
    fails: dict[int, Failure] | None = None,
    **within: Any,
) -> ReplicaSearch:
    """A search whose runs take what the functions of the number of copies say."""

    def probe(copies: int) -> BatchProbe | Failure:
        found = BatchProbe(
            batch=BATCH, allocated_peak_bytes=peak(copies), step_s=step_s(copies), replicas=copies, route="fused"
        )
        return (fails or {}).get(copies, found)

    return ReplicaSearch(probe=probe, limits=limits(**within), batch=BATCH)


def advised(found: ReplicaSearch) -> ReplicaAdvice:
    advice = found.fastest(SIZES)
    assert isinstance(advice, ReplicaAdvice)
    return advice


def tried(found: ReplicaSearch) -> list[int]:
    return [run.replicas for run in found.runs]


def test_all_are_run_while_more_train_faster() -> None:
    found = search()
    advice = advised(found)
    assert tried(found) == list(SIZES)
    assert (advice.fastest, advice.limited_by) == (64, "`--replicas 64`")
    assert advice.best.samples_per_s == 64 * BATCH


def test_two_numbers_that_train_no_faster_end_the_search() -> None:
    found = search(step_s=lambda n: max(1.0, n / 4))
    advice = advised(found)
    assert tried(found) == [1, 2, 4, 8, 16]
    assert (advice.fastest, advice.limited_by) == (4, "more copies train no faster")


def test_the_most_that_fit_by_the_fit_are_run_and_no_more() -> None:
    found = search(peak=lambda n: 100 + 10 * n, budget=100 + 10 * 13)
    advice = advised(found)
    assert tried(found) == [1, 2, 4, 8, 13]
    assert (advice.fastest, advice.limited_by) == (13, "--memory")


def test_a_run_over_the_budget_is_not_recommended() -> None:
    found = search(peak=lambda n: n * n, budget=12)
    assert advised(found).fastest == 2
    assert found.runs[-1].allocated_peak_bytes == 16  # the line did not see it coming


def test_nothing_is_run_that_this_machine_has_no_room_to_choose_a_route_for() -> None:
    found = search(peak=lambda n: 10 * n, runnable=CHOICE_RATIO * 45)
    advice = advised(found)
    assert tried(found) == [1, 2, 4]
    assert "this machine, where 180 B are free" in advice.limited_by


def test_no_step_is_longer_than_it_may_be() -> None:
    found = search(step_s=lambda n: n**0.9, longest_step_s=5)
    assert "`--longest-step` (5 s)" in advised(found).limited_by
    assert tried(found) == [1, 2, 4]


def test_a_run_that_fails_ends_the_search_with_its_reason() -> None:
    advice = advised(search(fails={8: OutOfMemory(detail="you tried to allocate")}))
    assert advice.fastest == 4
    assert advice.limited_by == "a run of 8 copies: out of memory (you tried to allocate)"


@pytest.mark.parametrize("fails", [{1: TimedOut(limit_s=9.0)}, {2: StepFailed(message="it has hooks", exit_code=2)}])
def test_what_gives_no_answer_is_that_failure(fails: dict[int, Failure]) -> None:
    found = search(fails=fails)
    (failed,) = fails
    assert found.fastest(SIZES) == fails[failed]
    assert [*found.outcomes][-1] == failed


@pytest.mark.parametrize(
    ("fails", "reason"),
    [({}, "--memory"), ({1: OutOfMemory(detail="all of it")}, r"a run of 1 copy: out of memory \(all of it\)")],
)
def test_the_fewest_that_do_not_fit_are_an_answer(fails: dict[int, Failure], reason: str) -> None:
    found = search(fails=fails, budget=0)
    nothing = found.fastest(SIZES)
    assert isinstance(nothing, NoBatchFits)
    assert nothing.batch == BATCH
    assert re.fullmatch(reason, nothing.reason)
    assert list(found.outcomes) == [1]

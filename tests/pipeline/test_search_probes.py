"""What a search is told when its time is up, and what is said of that afterwards."""

from __future__ import annotations

import math

import pytest

from memopt_cli.measure.jobs import CountJob
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.records import Plan
from memopt_cli.search.plan.interface import NotTried


class Nobody:
    """Answers every job alike."""

    def ask(self, job: object) -> str:
        return "answered"


def probes(limit_s: float) -> SearchProbes:
    return SearchProbes(Nobody, limit_s=limit_s)  # type: ignore[arg-type]


def test_a_search_that_asks_nothing_more_was_not_ended_by_the_time() -> None:
    search = probes(0.0)
    assert not search.over
    refused = search.ask(CountJob(plan=Plan(), fake=True))
    assert isinstance(refused, NotTried)
    assert search.over == refused.reason == "the search was ended after 0 s (`--search-time`)"


@pytest.mark.parametrize(("limit_s", "longer_s"), [(0.0, 60), (14.5, 60), (30.5, 120)])
def test_a_search_that_its_default_time_ended_names_a_longer_time(limit_s: float, longer_s: int) -> None:
    search = SearchProbes(Nobody, limit_s=limit_s, is_default_limit=True)  # type: ignore[arg-type]
    search._ends = 0.0
    assert search.is_late()
    longer = f"by its default time (`--search-time {longer_s}` searches longer)"
    assert search.over == f"the search was ended after {limit_s:g} s {longer}"


def test_a_search_that_looks_at_the_clock_and_stops_says_so() -> None:
    search = probes(0.0)
    assert search.is_late()
    assert "--search-time" in search.over


@pytest.mark.parametrize("limit_s", [math.inf, 1e6])
def test_within_its_time_it_is_answered(limit_s: float) -> None:
    search = probes(limit_s)
    assert search.ask(CountJob(plan=Plan(), fake=True)) == "answered"  # type: ignore[comparison-overlap]
    assert not search.is_late()
    assert not search.over


def test_what_was_answered_is_known_when_the_time_is_up() -> None:
    search, job = probes(math.inf), CountJob(plan=Plan(), fake=True)
    search.ask(job)
    search.end("Ctrl-C")
    assert search.ask(job) == "answered"  # type: ignore[comparison-overlap]
    assert isinstance(search.ask(CountJob(plan=Plan(packed=True), fake=True)), NotTried)
    assert search.over == "Ctrl-C"


def test_a_search_that_is_prolonged_goes_on_and_was_ended_by_the_time_all_the_same() -> None:
    search = probes(1e6)
    search._ends = 0.0
    assert search.is_late()
    search.prolong()
    assert not search.is_late()
    assert search.ask(CountJob(plan=Plan(), fake=True)) == "answered"  # type: ignore[comparison-overlap]
    assert "--search-time" in search.over
    search.end("Ctrl-C")
    search.prolong()
    assert search.is_late()

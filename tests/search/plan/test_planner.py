"""The planner on real steps, counted by dry runs: levels, budgets, the frontier, limits, and what it asks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.online import LIF, OverTime
from memopt_cli.records import LOWER_SHARE, ChunkRule, Crashed, Outlook, Plan, Refused, SearchOptions, SegmentPlan
from memopt_cli.runtime.runs import group_layers
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.keeping import names_single_calls
from memopt_cli.search.plan.level_search import LevelSearch
from memopt_cli.search.plan.levels import find_level
from memopt_cli.search.plan.planner import Planner
from memopt_cli.search.plan.proposals import Proposals, Solvers
from memopt_cli.search.plan.schedules import Schedule, count_segments
from memopt_cli.search.plan.search_spaces import SearchSpaces
from memopt_cli.search.plan.solver import Solver
from memopt_cli.text.paths import is_within
from sample_models import gpt
from tests.rows import quick
from tests.search.plan.subjects import (
    SUBJECTS,
    Chain,
    Subject,
    carriers,
    carrying,
    drawn,
    rule_along,
    segments,
    without_norms,
)
from tests.zoo.models import Parts

LEVELS = (1, 2, 3, 4)
NEARLY = 1 / 0.98
"""Of a level's best, which is the fastest of those that are nearly the smallest, or not below the level below."""
NEARLY_A_FRONTIER = 1.01 * NEARLY
"""A frontier counts more plans, one of which may take less than is predicted."""


def counted(plans: Planner) -> list[PricedPlan]:
    """All plans that were dry-run, without the original."""
    return [found for found in plans.dry_runs.up_to(4) if not found.plan.is_empty]


@functools.cache
def known(name: str) -> Subject:
    """One for all tests: what one has counted, the others need not."""
    return SUBJECTS[name]()


@pytest.fixture(scope="module", params=["chain", "gpt", "steps"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return known(request.param)


# ---------------------------------------------------------------------------------------------- steps as chance has it


@pytest.fixture(scope="module", params=quick(range(20), (0, 1, 2, 11)))
def any_step(request: pytest.FixtureRequest) -> Subject:
    return drawn(request.param)


@pytest.fixture(scope="module")
def best(any_step: Subject) -> dict[int, PricedPlan]:
    """Of every level, by one planner."""
    plans = any_step.planner(without_norms(any_step))
    return {level: plans.best(level) for level in LEVELS}


@pytest.mark.slow
def test_no_level_is_above_the_one_below(any_step: Subject, best: dict[int, PricedPlan]) -> None:
    plans = any_step.planner(without_norms(any_step))
    for found in ([plans.least(level) for level in LEVELS], [best[level] for level in LEVELS]):
        peaks = [any_step.original.allocated_peak_bytes, *(priced.peak_bytes for priced in found)]
        assert peaks == sorted(peaks, reverse=True)
        for level, priced in zip(LEVELS, found, strict=True):
            assert find_level(priced.plan) == priced.level <= level
            assert any_step.dry_run(priced.plan) == priced.peak_bytes


@pytest.mark.slow
def test_a_level_is_nearly_as_small_as_its_frontier(any_step: Subject, best: dict[int, PricedPlan]) -> None:
    """And no plan is dry-run that the level does not allow."""
    refused = {m.path for m in any_step.trace.modules if m.refusal}
    for level in LEVELS:
        plans = any_step.planner(without_norms(any_step), level=level)
        assert best[level].peak_bytes <= NEARLY_A_FRONTIER * plans.frontier(level)[-1].peak_bytes
        for priced in counted(plans):
            paths = [s.path for s in priced.plan.segments]
            assert find_level(priced.plan) <= level
            assert len(paths) == len(set(paths))
            assert not refused.intersection(paths)
            assert not any(names_single_calls(s.keep) for s in priced.plan.segments if s.chunks > 1)


@pytest.mark.slow
def test_a_budget_that_a_level_meets_is_met_by_every_level_above(
    any_step: Subject, best: dict[int, PricedPlan]
) -> None:
    chunking = without_norms(any_step)
    for level, other in itertools.combinations_with_replacement(LEVELS, 2):
        budget = best[level].peak_bytes
        found = any_step.planner(chunking, level=other).within(other, budget)
        assert found is not None, (level, other)
        assert found.peak_bytes <= budget
        assert find_level(found.plan) <= other


@pytest.mark.slow
def test_a_budget_is_met_that_a_level_alone_meets() -> None:
    """What the levels below it are asked for leads this step elsewhere."""
    step = drawn(145)
    chunking = without_norms(step)
    budget = step.planner(chunking).best(4).peak_bytes
    found = step.planner(chunking).within(4, budget)
    assert found.peak_bytes <= budget


@pytest.mark.slow
def test_what_only_a_level_may_do_lowers_the_peak_by_enough_or_takes_no_longer(any_step: Subject) -> None:
    plans = any_step.planner(without_norms(any_step))
    for level, most in itertools.product(LEVELS, (1.33, math.inf)):
        found = plans.best(level, most)
        below = plans.dry_runs.smallest(level - 1, most)
        assert found.peak_bytes <= 0.98 * below.peak_bytes or found.slowdown <= below.slowdown


def test_what_is_nearly_the_least_lowers_the_peak_by_enough_too() -> None:
    subject = known("chain")
    probes = replace(subject.probes(), count=lambda plan: NotTried(reason="no time"))
    plans = subject.planner_asking(probes)
    original = plans.dry_runs.smallest(0)
    for path, share, slowdown in (("blocks.0", 0.979, 2.0), ("blocks.1", 0.98, 1.8), ("blocks.2", 0.985, 1.5)):
        counted = replace(original.counted, allocated_peak_bytes=int(share * original.peak_bytes))
        found = PricedPlan(plan=segments(path), counted=counted, level=1, slowdown=slowdown)
        plans.dry_runs._priced[found.plan] = found
    assert plans.best(1).slowdown == 1.8


@pytest.mark.slow
def test_a_level_takes_no_more_time_than_is_asked(any_step: Subject) -> None:
    plans = any_step.planner(without_norms(any_step))
    for level in (2, 4):
        lowest = any_step.original.allocated_peak_bytes
        for most in (1.0, 1.1, 1.33, 2.0, math.inf):
            found = plans.best(level, most)
            assert found.slowdown <= most
            assert found.peak_bytes <= NEARLY * lowest
            lowest = min(lowest, found.peak_bytes)


# ---------------------------------------------------------------------------------------------- limits


LIMITS: dict[str, tuple[dict[str, Any], Callable[[Plan], bool]]] = {
    "no segment": ({"max_gc_wrapped_modules": 0}, lambda plan: count_segments(plan.segments, 2)[0] == 0),
    "one segment": ({"max_gc_wrapped_modules": 1}, lambda plan: count_segments(plan.segments, 2)[0] <= 1),
    "three segments": ({"max_gc_wrapped_modules": 3}, lambda plan: count_segments(plan.segments, 2)[0] <= 3),
    "no share": ({"gc_target_budget_ratio": 0.0}, lambda plan: count_segments(plan.segments, 2)[0] == 0),
    "half of two": (
        {"gc_target_budget_ratio": 0.5, "targets": ("blocks.0", "blocks.1")},
        lambda plan: count_segments(plan.segments, 2)[0] <= 1,
    ),
    "no rounds": (
        {"max_split_rounds": 0},
        lambda plan: not any(s.chunks > 1 for s in plan.segments) and not count_segments(plan.segments, 2)[1],
    ),
    "one round": ({"max_split_rounds": 1}, lambda plan: max(count_segments(plan.segments, 2)[1:]) <= 1),
    "three rounds": ({"max_split_rounds": 3}, lambda plan: max(count_segments(plan.segments, 2)[1:]) <= 3),
    "chunks by three": (
        {"temporal_split_factor": 3, "max_split_rounds": 2},
        lambda plan: max(count_segments(plan.segments, 3)[1:]) <= 2,
    ),
    "a target": (
        {"targets": ("blocks.1",)},
        lambda plan: all(is_within(s.path, "blocks.1") for s in plan.segments),
    ),
    "modules": (
        {"modules": ("blocks.1", "blocks.2.0")},
        lambda plan: all(is_within(s.path, "blocks.1") or s.path == "blocks.2.0" for s in plan.segments),
    ),
    "no module": ({"modules": ()}, lambda plan: not plan.segments),
    "no packing": (
        {"compress_x": False},
        lambda plan: not plan.packed and all(s.compressor == "null" for s in plan.segments),
    ),
    "nothing asked": (
        {"max_candidates_per_round": 0, "max_split_rounds": 4},
        lambda plan: not any(s.chunks > 1 for s in plan.segments if not s.through_loss),
    ),
}


LIMITED = {("chain", limit) for limit in LIMITS} | {("gpt", limit) for limit in ("one round", "nothing asked")}
"""Limits are those of the search, whatever the model; what differs is whose rules are asked."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), quick(itertools.product(["chain", "gpt"], LIMITS), LIMITED))
def test_limits_hold_in_every_plan(name: str, limit: str) -> None:
    subject = small(name)
    options, holds = LIMITS[limit]
    chunking = without_norms(subject) if name == "gpt" else lambda path: rule_along(0)
    asked: list[str] = []
    plans = subject.planner(lambda path: asked.append(path) or chunking(path), **options)
    for level in LEVELS:
        assert holds(plans.best(level).plan)
        found = plans.within(level, subject.original.allocated_peak_bytes * 3 // 4)
        assert found is None or holds(found.plan)
    assert all(holds(found.plan) for found in plans.frontier(4))
    assert not [found.plan for found in counted(plans) if not holds(found.plan)]
    if limit in ("no rounds", "nothing asked", "no module"):
        assert not asked


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["three segments", "one round", "a target", "chunks by three"])
def test_limits_leave_something_to_do(limit: str) -> None:
    options, _ = LIMITS[limit]
    subject = small("chain")
    plans = subject.planner(lambda path: rule_along(0), **options)
    assert plans.least(4).peak_bytes < subject.original.allocated_peak_bytes


@functools.cache
def small(name: str) -> Subject:
    """Of few blocks, for what is asked of them many times."""
    if name == "gpt":
        model = gpt.GPT(vocabulary=200, width=16, heads=2, blocks=2)
        return Subject(model, torch.randint(0, 400, (4, 32)))
    return Subject(Chain(blocks=3), torch.randn(4, 16, 16, 16))


# ---------------------------------------------------------------------------------------------- within a budget


@pytest.mark.slow
def test_the_least_peak_is_that_of_chunks_of_every_module_alike() -> None:
    subject = carriers()

    def chunking(path: str) -> ChunkRule | Refused:
        if path in ("", "blocks.3"):
            return Refused(reason="no")
        return ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)

    found = subject.planner(chunking).least(4)
    chunks = {s.path: s.chunks for s in found.plan.segments}
    assert chunks.get("blocks.3", 1) == 1
    by_hand = carrying(10, True)
    by_hand = replace(by_hand, segments=by_hand.segments[:3])
    assert found.peak_bytes <= subject.dry_run(by_hand)


@pytest.mark.slow
def test_chunks_that_a_step_refutes_are_not_planned_again() -> None:
    """The module that saves most is refuted only if a plan cuts it alone, and classes of refuted modules are left."""
    rule = ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
    planner = carriers().planner(lambda path: Refused(reason="no") if path in ("", "blocks.3") else rule)
    plans = [planner.least(4).plan]
    while planner.distrust_chunks(plans[-1]):
        plans.append(planner.least(4).plan)
    paths_cut = [{segment.path for segment in plan.segments if segment.chunks > 1} for plan in plans]
    assert len(paths_cut) > 1
    assert paths_cut[-1] == set()
    assert all(len(before & after) <= 1 for before, after in itertools.pairwise(paths_cut))


def conv_norm(inputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]


@pytest.mark.parametrize(("layers", "whole"), [(2, True), (3, False)])
def test_a_pair_of_normalized_layers_runs_in_chunks_together(layers: int, whole: bool) -> None:
    """Nothing is held between them then; of more layers each norm would take another pass over the chunks."""
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        rule = ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, batch_statistics=True)
        return rule if path else Refused(reason="no")

    block = nn.Sequential(*(part for i in range(layers) for part in conv_norm(8 if i else 3)))
    model = nn.Sequential(block, nn.AvgPool2d(4), nn.Conv2d(8, 8, 3))
    group_layers(model)
    found = Subject(model, torch.randn(16, 3, 32, 32)).planner(chunking, level=3).least(3).plan
    paths = {segment.path for segment in found.segments if segment.chunks > 1}
    assert ("0" in asked) == whole
    assert ("0" in paths) == whole
    assert paths


@pytest.mark.slow
def test_every_budget_that_can_be_met_is(subject: Subject) -> None:
    plans = subject.planner()
    least, high = plans.least(4).peak_bytes, subject.original.allocated_peak_bytes
    slowdowns = []
    for quarter in range(5):
        budget = least + (high - least) * quarter // 4
        found = plans.within(4, budget)
        assert found is not None, f"{budget} of {high}"
        assert found.peak_bytes <= budget
        assert subject.dry_run(found.plan) == found.peak_bytes
        slowdowns.append(found.slowdown)
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[-1] == 1.0
    assert plans.within(4, least // 4) is None


@pytest.mark.slow
def test_the_frontier_falls_in_peak_and_rises_in_time(subject: Subject) -> None:
    plans = subject.planner()
    found = plans.frontier(4)
    peaks = [priced.peak_bytes for priced in found]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[0] <= subject.original.allocated_peak_bytes
    assert [p.slowdown for p in found] == sorted({p.slowdown for p in found})
    assert found == plans.frontier_so_far
    for at, priced in enumerate(found):
        faster, smaller = plans.neighbours(priced.plan)
        before = [p for p in found[:at] if p.slowdown <= 0.99 * priced.slowdown and not p.plan.is_empty]
        after = [p for p in found[at:] if p.peak_bytes <= (1 - LOWER_SHARE) * priced.peak_bytes]
        assert (faster.peak_bytes if faster else 0) == (before[-1].peak_bytes if before else 0)
        assert not after or (smaller and smaller.peak_bytes) == after[0].peak_bytes
    assert plans.neighbours(segments("nowhere")) == (None, None)
    first, *others = found[1:]
    smaller = plans.neighbours(first.plan, [priced.plan for priced in others])[1]
    assert smaller is None or smaller.peak_bytes not in [priced.peak_bytes for priced in others]


@pytest.mark.slow
def test_what_a_dry_run_has_refuted_is_not_told_as_a_smaller_plan(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = subject.planner()
    least = plans.least(4)
    known, unknown = counted(plans)[0].plan, segments("nowhere")
    monkeypatch.setattr(Proposals, "predict_peak", lambda self, plan: 1)
    monkeypatch.setattr(Proposals, "slowdown", lambda self, plan: 2.0)
    told = []
    for plan in (known, unknown):
        monkeypatch.setattr(Solvers, "least", lambda self, high_bytes, plan=plan: plan)
        told.append(plans.neighbours(least.plan)[1])
    assert told == [None, Outlook(peak_bytes=1, slowdown=2.0)]


@pytest.mark.parametrize("max_slowdown", [10.0, math.inf])
def test_a_longer_search_is_worth_it_as_long_as_sums_promise_a_lower_peak(max_slowdown: float) -> None:
    is_over = False
    subject = small("chain")
    plans = subject.planner_asking(replace(subject.probes(), is_late=lambda: is_over))
    assert plans.may_go_lower(Plan(), 3, max_slowdown)
    assert not plans.may_go_lower(Plan(), 3, 1.0)  # no plan takes no time
    found = plans.least(3, max_slowdown)
    assert not plans.may_go_lower(found.plan, 3, max_slowdown)
    is_over = True
    assert plans.may_go_lower(found.plan, 3, max_slowdown)


SEARCHES: dict[str, Callable[[Planner, int], object]] = {
    "within": lambda plans, high: plans.within(4, high // 2),
    "least": lambda plans, high: plans.least(4),
    "best": lambda plans, high: plans.best(4, 10.0),  # steps so short hardly bear a segment
    "frontier": lambda plans, high: plans.frontier(4),
}


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("dry_runs", [0, 1])
def test_nothing_is_solved_when_the_time_is_up(search: str, dry_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, fastest = small("gpt"), Solver.fastest
    answered: list[Plan] = []
    refused: list[Plan] = []

    def count(plan: Plan) -> Any:
        (answered if len(answered) < dry_runs else refused).append(plan)
        return NotTried(reason="time is up") if refused else subject.count(plan)

    def solve(solver: Solver, budget_bytes: int) -> Schedule | None:
        schedule = fastest(solver, budget_bytes)
        assert not refused
        return schedule

    monkeypatch.setattr(Solver, "fastest", solve)
    plans = subject.planner_asking(replace(subject.probes(), count=count, is_late=lambda: bool(refused)))
    SEARCHES[search](plans, subject.original.allocated_peak_bytes)
    assert len(plans.dry_runs) == len(answered) == dry_runs
    assert len(refused) == 1


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("asked", [0, 3, 40, 120])
def test_sums_end_when_the_time_is_up(search: str, asked: int) -> None:
    """Within the solver and the cost model, too; the best of what was counted before is the answer."""
    subject = small("chain")
    ticks = itertools.count()
    over: list[bool] = []
    peaks = [subject.original.allocated_peak_bytes]

    def late() -> bool:
        if next(ticks) >= asked:
            over.append(True)
        return bool(over)

    def count(plan: Plan) -> Any:
        assert not over
        peaks.append(subject.dry_run(plan))
        return subject.count(plan)

    plans = subject.planner_asking(replace(subject.probes(), count=count, is_late=late))
    SEARCHES[search](plans, peaks[0])
    assert 0 < len(over) <= 20
    assert len(plans.dry_runs) == len(peaks) - 1
    assert plans.least(4).peak_bytes == min(peaks)
    assert plans.frontier(4)[-1].peak_bytes == min(peaks)


@pytest.mark.slow
def test_chunks_go_below_what_segments_reach() -> None:
    subject = known("chain")
    plain = subject.planner().least(4)
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, inexact=True)

    chunked = subject.planner(chunking).least(4)
    assert chunked.peak_bytes < plain.peak_bytes
    assert len(asked) == len(set(asked)) > 0
    assert any(segment.chunks > 1 for segment in chunked.plan.segments)


class Loop(Parts, layers=lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(8))):
    """What takes memory is between its layers, none of which saves anything by chunks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow
def test_a_model_that_calls_its_parts_in_every_step_is_asked_itself() -> None:
    """Each call holds its share: chunks of one do not help.  The model is asked last, for it takes longest to try."""
    subject = Subject(OverTime(nn.Sequential(nn.Linear(16, 64), LIF(64), nn.Linear(64, 4))), torch.rand(24, 8, 16))
    asked = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return Refused(reason="its state goes from step to step") if path else rule_along(0)

    found = subject.planner(chunking).least(3)
    assert asked.index("") == len(asked) - 1
    assert len(asked) > 1
    assert [(s.path, s.chunks > 1) for s in found.plan.segments] == [("", True)]
    assert found.peak_bytes < 0.6 * subject.planner().least(3).peak_bytes


@pytest.mark.parametrize("max_slowdown", [10.0, math.inf])
def test_a_model_whose_parts_are_called_once_is_asked_itself(max_slowdown: float) -> None:
    """Chunks of parts leave what lies between them whole: of this U-Net twice what chunks of the model take."""
    subject = Subject(Joined(), torch.randn(8, 3, 32, 32))
    found = subject.planner(lambda path: rule_along(0), level=3).least(3, max_slowdown)
    parts = subject.planner(lambda path: rule_along(0) if path else Refused(reason="no"), level=3).least(3)
    assert any(not segment.path for segment in found.plan.segments)
    assert found.peak_bytes < 0.7 * parts.peak_bytes


class Joined(nn.Module):
    """A U-Net of one level, whose convolutions are called once."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.low = conv_relu(3, 16), conv_relu(16, 16)
        self.right, self.out = conv_relu(32, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        low = nn.functional.interpolate(self.low(nn.functional.max_pool2d(left, 2)), scale_factor=2)
        return self.out(self.right(torch.cat([low, left], dim=1)))


def conv_relu(inputs: int, outputs: int) -> nn.Sequential:
    layers = ((nn.Conv2d(a, outputs, 3, padding=1), nn.ReLU()) for a in (inputs, outputs))
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def test_no_more_modules_are_asked_than_the_limits_allow() -> None:
    """Of those around the peak one after another was asked until one could, however many."""
    asked: list[str] = []
    subject = Subject(nn.Sequential(nn.Sequential(Loop())), torch.randn(512, 64))
    refusing = subject.probes(lambda path: asked.append(path) or Refused(reason="no"))
    subject.planner_asking(refusing).least(4)
    assert asked == ["0.0", "0", ""]
    asked.clear()
    subject.planner_asking(refusing, max_candidates_per_round=1).least(4)
    assert asked == ["0.0"]


@pytest.mark.slow
def test_only_those_are_asked_for_chunks_that_a_lower_plan_needs() -> None:
    asked: list[str] = []
    subject = known("chain")
    space = subject.planner(lambda path: asked.append(path) or rule_along(0))._level_search(3).space
    assert space.lower(1, 10.0) is None
    assert not asked
    plan = space.lower(subject.original.allocated_peak_bytes, 10.0)
    assert plan is not None
    assert set(asked) == {segment.path for segment in plan.segments if segment.chunks > 1}


@pytest.mark.slow
def test_no_plan_is_dry_run_that_cannot_be_the_smallest() -> None:
    subject = known("chain")
    smallest = subject.planner(lambda path: rule_along(0)).least(4)
    plans = subject.planner(lambda path: Refused(reason="no"))
    for known_first in (True, False):
        search = plans._level_search(4)
        if known_first:
            search.runs.count(smallest.plan)
        else:
            plans.dry_runs._priced.pop(smallest.plan)
        before = len(plans.dry_runs)
        search.descend(0)
        assert (len(plans.dry_runs) > before) is not known_first


@pytest.mark.slow
def test_what_is_refused_is_planned_without() -> None:
    subject = known("chain")
    space = subject.planner(lambda path: Refused(reason="no"))._level_search(3).space
    assert space.lower(subject.original.allocated_peak_bytes // 4, 10.0) is None
    whole = space.lower(subject.original.allocated_peak_bytes, 10.0)
    assert whole is not None
    assert all(segment.chunks == 1 for segment in whole.segments)


@pytest.mark.slow
def test_where_nothing_at_the_peak_saves_by_chunks_what_it_lies_in_is_asked() -> None:
    subject = Subject(nn.Sequential(nn.Sequential(Loop())), torch.randn(512, 64))
    assert subject.model.predict(Plan()).module.startswith("0.0.layers.")
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return Refused(reason="no") if path == "0.0" else rule_along(0)

    high = subject.original.allocated_peak_bytes
    found = subject.planner(chunking).within(4, high * 2 // 3)
    assert found is not None
    assert asked == ["0.0", "0"]
    assert [(s.path, s.chunks > 1) for s in found.plan.segments] == [("0", True)]
    assert subject.planner().within(4, high * 2 // 3) is None


@pytest.mark.slow
@pytest.mark.parametrize(("share", "times"), [(1.0, 5), (0.5, 1)])
def test_a_budget_just_below_the_least_peak_is_sought_for_each_level_from_the_start(
    share: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which a level asks, which may lead lower."""
    subject, made = small("gpt"), list[SearchSpaces]()
    least = subject.planner().least(4).peak_bytes

    def spaces(*args: Any) -> SearchSpaces:
        made.append(SearchSpaces(*args))
        return made[-1]

    monkeypatch.setattr("memopt_cli.search.plan.planner.SearchSpaces", spaces)
    assert subject.planner().within(4, int(share * least) - 1) is None
    assert len(made) == times


def test_what_no_plan_may_cut_is_not_asked() -> None:
    subject = Subject(nn.Sequential(nn.Sequential(Loop())), torch.randn(512, 64))
    asked: list[str] = []
    plans = subject.planner(lambda path: asked.append(path) or rule_along(0), targets=("0.0.layers.*",))
    plans.least(4)
    assert not asked


@pytest.mark.slow
@pytest.mark.parametrize(("worth", "asks"), [(0.0, True), (50.0, False)])
def test_chunks_are_asked_for_where_they_could_save_enough(
    worth: float, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.search.plan.search_spaces._MIN_TIME_SAVED", worth)
    subject = known("chain")
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return rule_along(0)

    plans = subject.planner(chunking, allow_inexact=True)
    slow = plans._level_search(4).runs.count(segments(*(f"blocks.{n}" for n in range(6)), chunks=4))
    assert slow.peak_bytes < subject.planner().least(4).peak_bytes
    found = plans.within(4, slow.peak_bytes)
    assert bool(asked) is asks
    assert found.peak_bytes <= slow.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_how_much_chunks_may_save_is_estimated_before_they_are_asked_for(
    axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 1, 64)
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    subject = Subject(nn.Sequential(*blocks), x.transpose(0, axis))

    def priced(*plans: Plan) -> tuple[LevelSearch, int]:
        """And the least budget, which the first of the plans is within."""
        planned = subject.planner(lambda path: rule_along(axis))._level_search(4)
        first, *_ = (planned.runs.count(plan) for plan in plans)
        return planned, first.peak_bytes

    plans, budget = priced(segments("0", "1", "2", chunks=16, axis=axis))
    assert plans.space.may_give_faster(plans.runs.fastest(budget), budget)  # fewer chunks, or of fewer, are faster
    monkeypatch.setattr(plans.space.trials, "_classes_tried", 12)
    assert not plans.space.may_give_faster(plans.runs.fastest(budget), budget)
    plans, budget = priced(segments("0", "1", "2", chunks=16, axis=axis), Plan())
    assert not plans.space.may_give_faster(
        plans.runs.fastest(subject.original.allocated_peak_bytes), budget
    )  # the original is within that


@pytest.mark.slow
@pytest.mark.parametrize(("max_slowdown", "asks"), [(math.inf, True), (1.5, True), (1.001, False)])
def test_no_chunks_are_asked_for_that_would_be_too_slow(max_slowdown: float, asks: bool) -> None:
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    asked: list[str] = []
    subject = Subject(nn.Sequential(*blocks), torch.randn(4, 1, 1024, 64))
    ops = tuple(replace(op, seconds=1.0 if op.flops else 0.01) for op in subject.trace.ops)
    subject.trace = replace(subject.trace, ops=ops)
    subject.planner(lambda path: asked.append(path) or rule_along(0)).least(3, max_slowdown)
    assert bool(asked) is asks


@pytest.mark.slow
def test_chunks_that_a_budget_does_not_need_are_taken_back() -> None:
    """The solver's sums may be too high, and chunks cost a multiple of the step."""
    plans = known("chain").planner(lambda path: rule_along(0))
    needed = plans._level_search(4).runs.count(segments("blocks.1"))
    many = SegmentPlan(path="blocks.1", chunks=4, axis=0, inexact=True)
    plans.dry_runs._priced.pop(needed.plan)
    needless = plans._level_search(4).runs.count(Plan(segments=(many, SegmentPlan(path="blocks.2"))))
    budget = max(needed.peak_bytes, needless.peak_bytes) + (1 << 10)
    relaxed = relaxed_to(plans, needless, budget)
    assert relaxed.slowdown < needless.slowdown
    assert all(segment.chunks == 1 for segment in relaxed.plan.segments)


def relaxed_to(plans: Planner, start: PricedPlan, budget: int) -> PricedPlan:
    """What is left of a plan that is the only one to fit so far."""
    assert plans.dry_runs.fastest(4, budget) is start
    plans._relax_fastest(4, budget)
    found = plans.dry_runs.fastest(4, budget)
    assert found.peak_bytes <= budget
    return found


@pytest.mark.parametrize("needed", [False, True])
def test_packing_is_taken_back_where_a_budget_does_not_need_it(needed: bool) -> None:
    plain = segments("blocks.1")

    def fits(plan: Plan) -> bool:
        return plan.segments == plain.segments and plan.packed >= needed

    relaxed = known("chain").planner()._spaces.plain.improvements.relax(replace(plain, packed=True), fits)
    assert relaxed == replace(plain, packed=needed)


@pytest.mark.slow
def test_where_a_dry_run_refutes_fewer_chunks_not_as_few_are_tried() -> None:
    """Those that are predicted to do, of unequal lengths, pass the budget by a hair: all were left."""
    blocks = (nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))
    subject = Subject(nn.Sequential(*blocks), torch.randn(2048, 512))
    in_chunks = [Plan(segments=(rule_along(0).applied(SegmentPlan(path=""), n),)) for n in (32, 64, 128)]
    plans = subject.planner(lambda path: rule_along(0))
    enough, more = (plans._level_search(3).runs.count(plan) for plan in in_chunks[:2])
    plans = subject.planner(lambda path: rule_along(0))
    start = plans._level_search(3).runs.count(in_chunks[-1])
    assert start is not None
    assert enough.slowdown <= relaxed_to(plans, start, enough.peak_bytes).slowdown < more.slowdown


@pytest.mark.slow
def test_no_more_chunks_than_a_budget_needs() -> None:
    """The solver tries 2, 4 and 8 of them only."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    subject = Subject(nn.Sequential(blocks), torch.randn(96, 64))
    in_chunks = [Plan(segments=(rule_along(0).applied(SegmentPlan(path="0"), n),)) for n in (2, 3, 4)]
    two, three, four = (subject.dry_run(plan) for plan in in_chunks)
    enough = int(1.02 * three)  # the cost model need not be right to the byte
    assert four < three < enough < two
    plans = subject.planner(lambda path: rule_along(0))
    found = plans._level_search(3).runs.count(in_chunks[2])
    assert found is not None
    assert relaxed_to(plans, found, enough).plan == in_chunks[1]


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 2])
def test_a_module_runs_in_chunks_by_its_own_rule_not_by_that_of_its_class(axis: int) -> None:
    """Of the first block asked the answer is taken for all, until a plan relies on it."""
    plans = small("chain").planner(lambda path: rule_along(0 if path == "blocks.0" else axis))
    plans.least(4)
    cut = [s for found in counted(plans) for s in found.plan.segments if s.chunks > 1]
    assert cut
    assert all(s.axis == (0 if s.path == "blocks.0" else axis) for s in cut)


def test_a_rearrangement_takes_the_place_of_what_it_lies_in_and_of_what_lies_in_it() -> None:
    plans = known("chain").planner(lambda path: rule_along(0))
    space, rules = plans._level_search(4).space, {"blocks.1": (rule_along(0), 4)}
    space.trials._set_rules(rules)
    around = segments("", "blocks.0", "blocks.1.0")
    found = [[(s.path, s.chunks) for s in plan.segments] for plan in space.improvements.rearrange(around, rules)]
    assert found
    assert all(paths == [("blocks.0", 1), ("blocks.1", paths[-1][1])] and paths[-1][1] > 1 for paths in found)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "cut"), [(1, False), (2, False), (3, True), (4, True)])
def test_what_was_learned_of_chunks_is_not_tried_at_lower_levels(level: int, cut: bool) -> None:
    plans = small("chain").planner(lambda path: rule_along(0))
    plans.least(3)
    search = plans._level_search(level)
    rearranged = search.space.improvements.rearrange(segments("blocks.1"), search.space.optimistic_rules())
    assert any(segment.chunks > 1 for plan in rearranged for segment in plan.segments) is cut


@pytest.mark.slow
@pytest.mark.parametrize(("other", "rule"), [("blocks.3", None), ("blocks.5", rule_along(2))])
def test_a_search_ends_where_one_block_answers_otherwise(other: str, rule: ChunkRule | None) -> None:
    """The solver takes blocks for alike no longer once their answers differ: each plan it makes follows them."""
    subject = known("chain")
    asked: list[str] = []
    ticks = itertools.count()

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return rule_along(0) if path != other else rule or Refused(reason="no")

    def late() -> bool:
        assert next(ticks) < 50_000, "the search does not end"
        return False

    plans = subject.planner_asking(replace(subject.probes(chunking), is_late=late))
    plans.least(4)
    assert other in asked
    assert len(asked) == len(set(asked))
    cut = [segment for found in counted(plans) for segment in found.plan.segments if segment.chunks > 1]
    assert {segment.axis for segment in cut if segment.path == other} <= ({rule.axis} if rule else set())
    assert {segment.axis for segment in cut if segment.path != other} == {0}


def test_plans_that_cannot_run_are_no_answers() -> None:
    subject = small("chain")

    def count(plan: Plan) -> Any:
        fails = any(s.path == "blocks.1" for s in plan.segments)
        return Crashed(reason="killed by SIGSEGV", output_tail="") if fails else subject.count(plan)

    plans = subject.planner_asking(replace(subject.probes(lambda path: rule_along(0)), count=count))
    for priced in [*(plans.best(level) for level in LEVELS), *plans.frontier(4)]:
        assert "blocks.1" not in [s.path for s in priced.plan.segments]
    assert plans.dry_runs.failures
    assert all("blocks.1" in [s.path for s in plan.segments] for plan in plans.dry_runs.failures)


@pytest.mark.slow
@pytest.mark.parametrize("level", quick(LEVELS, (1, 4)))
def test_a_plan_that_cannot_run_does_not_end_a_level(level: int) -> None:
    subject = known("chain")
    failing = {"blocks.1", "blocks.4"}

    def count(plan: Plan) -> Any:
        fails = any(s.path in failing for s in plan.segments)
        return Crashed(reason="killed by SIGSEGV", output_tail="") if fails else subject.count(plan)

    probes = subject.probes(lambda path: rule_along(0))
    found = subject.planner_asking(replace(probes, count=count), level=level).best(level)
    modules = tuple(replace(m, refusal="it fails") if m.path in failing else m for m in subject.trace.modules)
    without = Planner(replace(subject.trace, modules=modules), subject.original, probes, SearchOptions(level=level))
    assert found.peak_bytes <= NEARLY * without.best(level).peak_bytes


@pytest.mark.slow
def test_level_4_keeps_costly_outputs_where_the_peak_has_room_for_them() -> None:
    subject = copy.copy(known("chain"))
    ops = tuple(replace(op, seconds=1.0 if op.flops else 0.1) for op in subject.trace.ops)
    subject.trace = replace(subject.trace, ops=ops)  # so long that what a segment adds to each is nothing
    budget = int(1.15 * subject.planner(level=3).least(3).peak_bytes)
    without, found = (subject.planner(level=level).within(level, budget) for level in (3, 4))
    assert found.peak_bytes <= budget
    assert found.slowdown < without.slowdown
    assert {name.partition("#")[0] for s in found.plan.segments for name in s.keep} == {"aten::convolution"}

"""The search for the fastest plan within a budget, against trying everything."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt_cli.records import ChunkRule, SegmentPlan
from memopt_cli.search.plan import schedules
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.search.plan.cost_model import SEGMENT_S, Recomputation
from memopt_cli.search.plan.keeping import CostlyCall, candidate_sets
from memopt_cli.search.plan.schedules import Schedule, SegmentLimits, _pareto_set, count_segments, thin_out
from memopt_cli.search.plan.segment_schedules import Context, PlanPermissions
from memopt_cli.search.plan.solver import Solver
from memopt_cli.text.paths import is_within

BYTES = st.integers(0, 50)
SECONDS = st.integers(1, 20).map(float)


def block(path: str, children: tuple[Block, ...] = (), **numbers: int | float) -> Block:
    """A block as the recorded step would give it: what its parts say counts, its own operators apart."""
    made = Block(
        path=path,
        kept_bytes=int(numbers.get("kept", 0)),
        peak_bytes=int(numbers.get("peak", 0)),
        forward_bytes=int(numbers.get("forward", 0)),
        recomputation=Recomputation(
            stop=sys.maxsize,
            seconds=float(numbers.get("seconds", 0)) + sum(c.recomputation.seconds for c in children),
            ops=int(numbers.get("ops", 0)),
        ),
        input_bytes=int(numbers.get("input", 0)),
        children=children,
    )
    made.costly = tuple(c for child in children for c in child.costly)
    if numbers.get("output"):
        own = CostlyCall(
            op=hash(path),
            name="aten::mm",
            module=path,
            nbytes=int(numbers["output"]),
            seconds=float(numbers["costly_seconds"]),
        )
        made.costly = (own,)
    made.signature = hash((path, *sorted(numbers.items()), *(c.signature for c in children)))
    return made


@st.composite
def trees(draw: st.DrawFn, most: int = 8, keeps: bool = False) -> Block:
    """A root over at most ``most`` modules, nested as chance has it; ``keeps``: with outputs that can be kept."""
    names = iter(f"m{i}" for i in range(draw(st.integers(1, most))))

    def subtree(name: str, depth: int) -> Block:
        own = {key: draw(BYTES) for key in ("kept", "peak", "forward", "input")} | {"seconds": draw(SECONDS)}
        children = []
        if keeps:
            own |= {"output": draw(BYTES), "costly_seconds": draw(st.integers(1, int(own["seconds"])))}
        if depth < 3 and draw(st.booleans()):
            children = [subtree(f"{name}.{n}", depth + 1) for n in itertools.islice(names, draw(st.integers(1, 3)))]
        return block(name, tuple(children), **own)

    return block("", tuple(subtree(name, 0) for name in names))


def paths(root: Block) -> list[str]:
    return [b.path for b in root if b.path]


def step(root: Block, segments: frozenset[str]) -> tuple[int, int, float]:
    """(kept, peak, added time) of a plan, straight from the definition."""
    if root.children:
        kept = peak = 0
        added = 0.0
        for child in root.children:
            child_kept, child_peak, child_added = step(child, segments)
            peak = max(peak, kept + child_peak)
            kept, added = kept + child_kept, added + child_added
    else:
        kept, peak, added = root.kept_bytes, root.kept_bytes + root.peak_bytes, 0.0
    if root.path not in segments:
        return kept, peak, added
    added += root.recomputation.seconds + root.recomputation.overhead_s(SegmentPlan(path=""))
    return root.input_bytes, max(root.input_bytes, peak, root.forward_bytes), added


def every_plan(root: Block) -> Iterator[tuple[int, float]]:
    """(peak, added time) of every set of segments."""
    names = paths(root)
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            _, peak, added = step(root, frozenset(chosen))
            yield peak, added


@pytest.mark.slow
@settings(max_examples=150)
@given(trees(), st.floats(0, 1))
def test_the_fastest_plan_is_found(root: Block, share: float) -> None:
    plans = list(every_plan(root))
    least, most = min(p for p, _ in plans), max(p for p, _ in plans)
    budget = int(least + share * (most - least))
    schedule = Solver(root, PlanPermissions()).fastest(budget)
    kept, peak, added = step(root, frozenset(s.path for s in schedule.segments()))
    assert peak <= budget
    assert (schedule.kept_bytes, schedule.peak_bytes, schedule.added_s) == (kept, peak, pytest.approx(added))
    assert added == pytest.approx(min(t for p, t in plans if p <= budget))


def depths(chosen: frozenset[str]) -> tuple[int, int]:
    """Of a set of segments: those that lie in no other, and those with others in them."""
    inner = {path for path in chosen if any(path != other and is_within(path, other) for other in chosen)}
    outer = {path for path in chosen if any(path != other and is_within(other, path) for other in chosen)}
    return len(chosen - inner), len(outer)


LIMITED = {
    "no nesting": (lambda most: PlanPermissions(nested=False), lambda most, outermost, with_others: not with_others),
    "outermost": (
        lambda most: PlanPermissions(limits=SegmentLimits(segments=most)),
        lambda most, outermost, with_others: outermost <= most,
    ),
    "with others in them": (
        lambda most: PlanPermissions(limits=SegmentLimits(splits=most)),
        lambda most, outermost, with_others: with_others <= most,
    ),
    "both": (
        lambda most: PlanPermissions(limits=SegmentLimits(segments=most, splits=1)),
        lambda most, outermost, with_others: outermost <= most and with_others <= 1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITED)
@settings(max_examples=60)
@given(trees(most=6), st.integers(0, 3), st.floats(0, 1))
def test_the_fastest_plan_within_limits_is_found(limit: str, root: Block, most: int, share: float) -> None:
    allowed, admits = LIMITED[limit]
    plans = [
        step(root, frozenset(names))[1:]
        for count in range(len(paths(root)) + 1)
        for names in itertools.combinations(paths(root), count)
        if admits(most, *depths(frozenset(names)))
    ]
    least, highest = min(p for p, _ in plans), max(p for p, _ in plans)
    budget = int(least + share * (highest - least))
    solver = Solver(root, allowed(most))
    schedule = solver.fastest(budget)
    found = frozenset(s.path for s in schedule.segments())
    assert admits(most, *depths(found))
    assert step(root, found)[1:] == (schedule.peak_bytes, pytest.approx(schedule.added_s))
    assert schedule.peak_bytes <= budget
    assert schedule.added_s == pytest.approx(min(t for p, t in plans if p <= budget))
    assert solver.fastest(least - 1) is None


@settings(max_examples=60)
@given(trees(most=6), st.floats(0, 1), st.booleans())
def test_the_least_peak_that_adds_so_much_time_at_most_is_found(root: Block, share: float, nested: bool) -> None:
    plans = [
        step(root, frozenset(names))[1:]
        for count in range(len(paths(root)) + 1)
        for names in itertools.combinations(paths(root), count)
        if nested or not depths(frozenset(names))[1]
    ]
    most_s = share * max(added for _, added in plans)
    solver = Solver(root, PlanPermissions(nested=nested))
    assert solver.least_peak_bytes(10_000, most_s) == min(p for p, t in plans if t <= most_s + 1e-9)
    assert solver.least_peak_bytes(10_000, -1.0) is None


Chunked = dict[str, int]
"""Segments, and in how many chunks each of them runs."""
LENGTH = 8
RULE = ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)


def chunked_step(root: Block, plan: Chunked) -> tuple[int, int, float]:
    """(kept, peak, added time) of a plan, straight from the definition."""
    kept = peak = 0
    added = 0.0
    for child in root.children:
        child_kept, child_peak, child_added = chunked_step(child, plan)
        peak = max(peak, kept + child_peak)
        kept, added = kept + child_kept, added + child_added
    if not root.children:
        kept, peak = root.kept_bytes, root.kept_bytes + root.peak_bytes
    if root.path not in plan:
        return kept, peak, added
    chunks = plan[root.path]
    peak = max(peak, root.forward_bytes)
    if chunks > 1:  # output and its gradient are whole, as are those of the input; the rest is of one chunk
        longest = int(peak * (LENGTH // chunks) / LENGTH)
        peak = root.input_bytes + max(
            root.output_bytes + root.all_input_bytes + longest,
            root.output_bytes + 2 * root.all_input_bytes,
            2 * root.output_bytes,
        )
    overhead = root.recomputation.overhead_s(SegmentPlan(path="", chunks=chunks))
    return root.input_bytes, max(root.input_bytes, peak), added + root.recomputation.seconds + overhead


@pytest.mark.slow
@settings(max_examples=60)
@given(trees(most=3), st.none() | st.integers(0, 4), st.floats(0, 1), st.sets(st.integers(0, 2)), st.integers(0, 30))
def test_the_fastest_plan_of_so_many_chunks_is_found(
    root: Block, most: int | None, share: float, able: set[int], output: int
) -> None:
    for each in root:
        each.output_bytes = each.all_input_bytes = output
    rules = {path: (RULE, LENGTH) for n, path in enumerate(paths(root)) if n in able}
    schedules: list[list[int]] = [[0, 1, *([2, 4, 8] if path in rules else [])] for path in paths(root)]
    every: list[Chunked] = [
        {path: chunks for path, chunks in zip(paths(root), chosen, strict=True) if chunks}
        for chosen in itertools.product(*schedules)
    ]
    usual = [plan for plan in every if most is None or sum(n.bit_length() - 1 for n in plan.values()) <= most]
    plans = [chunked_step(root, plan)[1:] for plan in usual]
    least, highest = min(p for p, _ in plans), max(p for p, _ in plans)
    budget = int(least + share * (highest - least))
    solver = Solver(root, PlanPermissions(chunks=rules, limits=SegmentLimits(cuts=most)))
    schedule = solver.fastest(budget)
    found = {s.path: s.chunks for s in schedule.segments()}
    assert found in usual
    assert chunked_step(root, found)[1:] == (schedule.peak_bytes, pytest.approx(schedule.added_s))
    assert schedule.peak_bytes <= budget
    assert schedule.added_s == pytest.approx(min(t for p, t in plans if p <= budget))
    assert solver.least_peak_bytes(10_000) == least


@pytest.mark.parametrize(
    ("counts", "plan"),
    [
        ((0, 0, 0), []),
        ((2, 0, 0), [SegmentPlan(path="a"), SegmentPlan(path="b")]),
        ((1, 1, 0), [SegmentPlan(path="a"), SegmentPlan(path="a.x"), SegmentPlan(path="a.y")]),
        ((1, 2, 0), [SegmentPlan(path="a"), SegmentPlan(path="a.x"), SegmentPlan(path="a.x.y")]),
        ((1, 1, 0), [SegmentPlan(path="a", spatial_split=True)]),
        ((2, 0, 5), [SegmentPlan(path="a", chunks=4), SegmentPlan(path="ab", chunks=5)]),
        ((1, 0, 0), [SegmentPlan(path="a"), SegmentPlan(path="head", chunks=4, through_loss=True)]),
    ],
)
def test_what_a_plan_spends(counts: tuple[int, ...], plan: list[SegmentPlan]) -> None:
    assert count_segments(plan, 2) == counts


Kept = dict[str, frozenset[int]]
"""Segments, and the calls whose outputs each of them keeps."""


def keeping_step(root: Block, segments: Kept, around: frozenset[int] = frozenset()) -> tuple[int, int, float, int]:
    """(kept, peak, added time, held for the segment around it) of a plan, straight from the definition."""
    is_segment = root.path in segments
    inner = segments[root.path] if is_segment else around
    if root.children:
        kept = peak = held = 0
        added = 0.0
        for child in root.children:
            child_kept, child_peak, child_added, child_held = keeping_step(child, segments, inner)
            peak = max(peak, kept + child_peak)
            kept, added, held = kept + child_kept, added + child_added, held + child_held
    else:
        own = [c for c in root.costly if c.op in inner]
        kept, peak = root.kept_bytes, root.kept_bytes + root.peak_bytes
        added, held = -sum(c.seconds for c in own), sum(c.nbytes for c in own)
    if not is_segment:
        return kept, peak, added, held
    stored = root.input_bytes + held
    segment = SegmentPlan(path="", keep=("costly",) if inner else ())
    added += root.recomputation.seconds + root.recomputation.overhead_s(segment)
    return stored, max(stored, peak, root.forward_bytes + held), added, 0


def every_keeping_plan(root: Block) -> Iterator[Kept]:
    """Every set of segments, those in no other keeping any of their choices."""
    blocks = {b.path: b for b in root if b.path}
    for count in range(len(blocks) + 1):
        for chosen in itertools.combinations(blocks, count):
            schedules = [
                [frozenset[int]()]
                if any(path != other and is_within(path, other) for other in chosen)
                else [frozenset[int](), *candidate_sets(blocks[path].costly)]
                for path in chosen
            ]
            yield from (dict(zip(chosen, kept, strict=True)) for kept in itertools.product(*schedules))


@settings(max_examples=60)
@given(trees(most=4, keeps=True), st.floats(0, 1))
def test_the_fastest_plan_that_keeps_outputs_is_found(root: Block, share: float) -> None:
    plans = [keeping_step(root, kept)[1:3] for kept in every_keeping_plan(root)]
    least, most = min(p for p, _ in plans), max(p for p, _ in plans)
    budget = int(least + share * (most - least))
    schedule = Solver(root, PlanPermissions()).fastest(budget)
    assert schedule.peak_bytes <= budget
    assert schedule.added_s == pytest.approx(min(t for p, t in plans if p <= budget), abs=1e-9)
    assert keeping_step(root, kept_of(root, schedule))[1:3] == (
        schedule.peak_bytes,
        pytest.approx(schedule.added_s, abs=1e-9),
    )


def kept_of(root: Block, schedule: Schedule) -> Kept:
    """What the plan says by name: which calls each segment keeps."""
    blocks, segments = {b.path: b for b in root}, {s.path: s for s in schedule.segments()}
    kept = {}
    for path, segment in segments.items():
        within = [other for other in segments if other != path and is_within(other, path)]
        own = [c for c in blocks[path].costly if not any(is_within(c.module, other) for other in within)]
        named = enumerate(own, 1)
        kept[path] = frozenset(
            c.op for number, c in named if "aten::mm" in segment.keep or f"aten::mm#{number}" in segment.keep
        )
    return kept


def test_a_segment_keeps_what_costs_most_time_for_its_bytes() -> None:
    parts = tuple(
        block(f"a.{i}", kept=20, output=nbytes, seconds=seconds, costly_seconds=seconds, input=9)
        for i, (nbytes, seconds) in enumerate([(10, 9), (40, 1), (12, 8)])
    )
    root = block("", (block("a", parts, input=4, forward=10), block("b", kept=1, peak=60)))
    found = {}
    for budget in (80, 100, 120, 140):
        schedule = Solver(root, PlanPermissions(targets=lambda path: path == "a")).fastest(budget)
        assert schedule is not None
        found[budget] = [(s.path, s.keep) for s in schedule.segments()]
    assert found[80] == [("a", ("aten::mm#1",))]
    assert found[100] == [("a", ("aten::mm#1", "aten::mm#3"))]
    assert found[140] == []


@pytest.mark.slow
@settings(max_examples=50)
@given(trees())
def test_nothing_fits_below_the_least_peak(root: Block) -> None:
    least = min(p for p, _ in every_plan(root))
    solver = Solver(root, PlanPermissions())
    assert solver.fastest(least - 1) is None
    assert solver.least_peak_bytes(10_000) == least
    assert solver.least_peak_bytes(least - 1) is None


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_the_pareto_set(numbers: list[tuple[int, int, int]]) -> None:
    kept = {(w.kept_bytes, w.peak_bytes, w.added_s) for w in _pareto_set([Schedule(*n) for n in numbers], 0)}
    best = {n for n in numbers if not any(o != n and all(a <= b for a, b in zip(o, n, strict=True)) for o in numbers)}
    assert kept == best


@pytest.mark.parametrize("resident", [0, 10**9])
def test_a_thinned_set_is_spread_out(resident: int) -> None:
    """Whatever all of them contain."""
    incomparable = [
        Schedule(resident + kept, resident + peak, 400.0 - kept - peak)
        for kept in range(100, 200)
        for peak in range(100, 200)
    ]
    most = 32
    left = thin_out(incomparable, most)
    assert most * 3 // 4 <= len(left) <= most
    assert min(schedule.peak_bytes for schedule in left) == resident + 100
    assert max(schedule.added_s for schedule in left) > 2 * min(schedule.added_s for schedule in left)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), max_size=60), st.integers(2, 8))
def test_a_thinned_set_has_no_more_ways_and_none_twice(numbers: list[tuple[int, int, int]], most: int) -> None:
    given = [Schedule(*n) for n in numbers]
    left = thin_out(given, most)
    assert len(left) == len(set(left)) <= most
    assert min((w.peak_bytes for w in left), default=0) == min((w.peak_bytes for w in given), default=0)
    assert min((w.added_s for w in left), default=0) == min((w.added_s for w in given), default=0)


def layers(count: int) -> Block:
    """Blocks that are alike but for the gradients that are there already when their backward begins."""

    def layer(i: int) -> Block:
        parts = tuple(
            block(f"layers.{i}.{name}", kept=kept, peak=20, forward=20, input=8, seconds=seconds)
            for name, kept, seconds in (("attention", 40, 3.0), ("norm", 8, 0.1), ("mlp", 64, 4.0))
        )
        made = block(f"layers.{i}", parts, forward=60, input=8)
        for part in (*parts, made):
            part.signature = hash((part.path.rpartition(".")[2] if part is not made else "layer", len(part.children)))
            part.resident_bytes = count - i
            part.peak_bytes += count - i
        return made

    return block("", (block("layers", tuple(layer(i) for i in range(count))),))


def test_blocks_that_are_alike_are_solved_once_and_named_each() -> None:
    schedule = Solver(layers(40), PlanPermissions()).fastest(1200)
    assert schedule is not None
    chosen = [segment.path for segment in schedule.segments()]
    assert len(chosen) == len(set(chosen)) > 10
    assert {int(path.split(".")[1]) for path in chosen} <= set(range(40))
    _, peak, added = step(layers(40), frozenset(chosen))
    assert peak <= 1200
    assert added == pytest.approx(schedule.added_s)


def runs_of_layers(count: int) -> Block:
    """The blocks of :func:`layers`, named as runs of a flat Sequential: ``3-5`` with ``3-5.3`` to ``3-5.5``."""
    root = layers(count)
    for first, run in zip(range(0, 3 * count, 3), root.children[0].children, strict=True):
        run.path = f"layers.{first}-{first + 2}"
        for number, part in enumerate(run.children, first):
            part.path = f"{run.path}.{number}"
    return root


def test_parts_of_blocks_that_are_alike_are_named_each_by_its_own_name() -> None:
    root = runs_of_layers(40)
    schedule = Solver(root, PlanPermissions()).fastest(1200)
    assert schedule is not None
    chosen = [segment.path for segment in schedule.segments()]
    assert len(chosen) == len(set(chosen)) > 10
    assert {*chosen} <= {each.path for each in root}
    assert any(path.count(".") > 1 for path in chosen)
    _, peak, added = step(root, frozenset(chosen))
    assert peak <= 1200
    assert added == pytest.approx(schedule.added_s)


@pytest.mark.parametrize("path", ["layers.0.mlp", "layers.3", "layers.5.attention"])
def test_of_blocks_that_are_alike_only_the_targets_become_segments(path: str) -> None:
    _, peak, added = step(layers(6), frozenset({path}))
    schedule = Solver(layers(6), PlanPermissions(targets=path.__eq__)).fastest(peak)
    assert [segment.path for segment in schedule.segments()] == [path]
    assert schedule.added_s == pytest.approx(added)


def test_of_blocks_that_are_alike_each_runs_in_chunks_by_its_own_rule() -> None:
    rules = {f"layers.{i}": (ChunkRule(axis=i % 2, seq_inputs=1, seq_outputs=1), 4 + i) for i in (0, 1, 2, 4)}
    solver = Solver(layers(6), PlanPermissions(chunks=rules))
    least = solver.least_peak_bytes(10_000)
    assert least is not None
    schedule = solver.fastest(least)
    assert schedule is not None
    cut = [segment for segment in schedule.segments() if segment.chunks > 1]
    assert len({segment.axis for segment in cut}) == 2
    assert all(segment == rules[segment.path][0].applied(segment, segment.chunks) for segment in cut)


def test_a_module_that_is_called_twice_is_not_taken_for_one_that_is_like_it() -> None:
    def call(path: str) -> Block:
        made = block(path, kept=50, peak=5, input=1, seconds=1)
        made.signature = 1
        return made

    root = block("", (call("a"), call("b"), call("a")))
    schedule = Solver(root, PlanPermissions()).fastest(110)
    assert schedule is not None
    assert [segment.path for segment in schedule.segments()] == ["b"]


@pytest.mark.slow
def test_search_grows_about_linearly_with_blocks_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    pairs = schedules._best_pairs
    monkeypatch.setattr(schedules, "_best_pairs", lambda own: (compared.append(len(own)), pairs(own))[1])

    def work(count: int) -> int:
        compared.clear()
        assert Solver(layers(count), PlanPermissions()).fastest(30 * count) is not None
        return sum(compared)

    assert work(512) < 8 * work(128)  # a square would make it 16


def test_chunks_where_nothing_else_fits() -> None:
    root = block("", (block("a", kept=100, peak=20, forward=60, input=10, seconds=1, ops=10),))
    rule = ChunkRule(axis=1, seq_inputs=1, seq_outputs=1)
    assert Solver(root, PlanPermissions()).fastest(70) is None
    schedule = Solver(root, PlanPermissions(chunks={"a": (rule, 4)})).fastest(70)
    (segment,) = schedule.segments()
    assert (segment.path, segment.chunks, segment.axis) == ("a", 2, 1)


def test_chunks_keep_the_calls_of_an_operator_all_or_none() -> None:
    """A number counts the calls of one run, and there is a run for every chunk."""
    parts = tuple(block(f"a.{i}", kept=20, output=4, seconds=9 - i, costly_seconds=9 - i, input=9) for i in range(3))
    root = block("", (block("a", parts, input=4, forward=10), block("b", kept=1, peak=60)))
    rule = ChunkRule(axis=1, seq_inputs=1, seq_outputs=1)
    solver = Solver(root, PlanPermissions(targets=lambda path: path == "a", chunks={"a": (rule, 8)}))
    chunked, whole = set(), set()
    for schedule in solver._segment_schedules(root.children[0], Context()):
        (segment,) = schedule.segments()
        (chunked if segment.chunks > 1 else whole).add(segment.keep)
    assert chunked == {(), ("aten::mm",)}
    assert ("aten::mm#1",) in whole


def test_only_targets_become_segments() -> None:
    root = block("", tuple(block(name, kept=50, peak=5, input=1, seconds=1) for name in "abc"))
    schedule = Solver(root, PlanPermissions(targets=lambda path: path == "b")).fastest(120)
    assert schedule is not None
    assert [segment.path for segment in schedule.segments()] == ["b"]


def test_a_module_called_twice_is_a_segment_in_both_calls_or_none() -> None:
    calls = tuple(block("a", kept=50, peak=5, input=1, seconds=1) for _ in range(2))
    solver = Solver(block("", (*calls, block("b", kept=1, peak=1, input=1, seconds=1))), PlanPermissions())
    schedule = solver.fastest(60)
    assert [segment.path for segment in schedule.segments()] == ["a", "a"]
    assert schedule.added_s == pytest.approx(2 + 2 * SEGMENT_S)

"""The levels on synthetic steps: what a plan costs is computed here, not measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt_cli.errors import PlanError
from memopt_cli.plan.interface import Candidate, ModuleTree, NotTried, Probes, held_at_peak, is_within
from memopt_cli.plan.strategies import STRATEGIES, spatial_split
from memopt_cli.plan.strategies.greedy_unwrap import GreedyUnwrap
from memopt_cli.plan.strategies.segments import Segments, choose_targets, matching_targets
from memopt_cli.plan.strategies.spatial_split import SpatialSplit
from memopt_cli.plan.strategies.temporal_split import TemporalSplit, iterate_cuts
from memopt_cli.records import (
    Breakdown,
    ChunkRule,
    Counted,
    Crashed,
    Failure,
    ModuleShare,
    ModuleTrace,
    Plan,
    Refused,
    SearchOptions,
    SegmentPlan,
    StepTrace,
)

LENGTH = 8
RULE = ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
NO_RULE = Refused(reason="batch statistics")


def module(path: str, saved: float, packed: float = 1, **changes: object) -> ModuleTrace:
    plain = ModuleTrace(
        path=path,
        class_name=f"Layer{path[-1:]}",
        calls=1,
        order=0,
        forward_s=1.0,
        input_bytes=int(packed),
        input_shape=(LENGTH, 4),
        packed_input_bytes=int(packed),
        compressor="bit",
        output_bytes=1,
        saved_bytes=int(saved),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def tree_of(*modules: ModuleTrace, peak: int = 0) -> ModuleTree:
    """Adds the root, which saves what the outermost modules save."""
    outermost = [m for m in modules if "." not in m.path]
    root = module("", sum(m.saved_bytes for m in outermost), class_name="Net")
    ordered = tuple(replace(m, order=i) for i, m in enumerate((root, *modules)))
    return ModuleTree(StepTrace(modules=ordered, tensor_peak_bytes=peak, resident_bytes=0, batch=1))


@dataclass
class Machine:
    """Counts as checkpointing does: a segment keeps its input, and what is inside it exists while it is recomputed.

    Modules without children save their ``saved_bytes`` themselves; a chunked segment recomputes a chunk at a time.
    """

    tree: ModuleTree
    rules: dict[str, ChunkRule | Refused] = field(default_factory=dict)
    fails: Callable[[Plan], bool] = lambda plan: False
    probed: list[Plan] = field(default_factory=list)

    def probes(self) -> Probes:
        return Probes(count=self.count, chunking=lambda path: self.rules.get(path, RULE), report=lambda line: None)

    def count(self, plan: Plan) -> Counted | Failure:
        self.probed.append(plan)
        if self.fails(plan):
            return Crashed(reason="killed by SIGSEGV", output_tail="")
        held = self._kept("", plan)
        transient = self._transient("", plan)
        total = dict(held)
        for path, nbytes in transient.items():
            total[path] = total.get(path, 0) + nbytes
        peak = sum(total.values())
        holders = sorted((ModuleShare(path=p, held_bytes=b) for p, b in total.items()), key=lambda s: -s.held_bytes)
        return Counted(
            tensor_peak_bytes=peak,
            allocated_peak_bytes=peak,
            resident_bytes=0,
            breakdown=Breakdown(
                parameters_bytes=0,
                buffers_bytes=0,
                gradients_bytes=0,
                optimizer_bytes=0,
                inputs_bytes=0,
                activations_bytes=peak,
                temporaries_bytes=0,
            ),
            holders=tuple(holders),
        )

    def start(self, *segments: SegmentPlan, level: int = 0) -> Candidate:
        plan = Plan(level=level, segments=segments)
        counted = self.count(plan)
        assert isinstance(counted, Counted)
        self.probed.clear()
        return Candidate(plan=plan, counted=counted)

    def _kept(self, path: str, plan: Plan, inside: bool = False) -> dict[str, int]:
        if not inside and any(s.path == path for s in plan.segments):
            return {path: self.tree[path].packed_input_bytes}
        children = self.tree.children(path)
        if not children:
            return {path: self.tree[path].saved_bytes}
        return {p: b for child in children for p, b in self._kept(child.path, plan).items()}

    def _transient(self, path: str, plan: Plan) -> dict[str, int]:
        deeper = [self._transient(child.path, plan) for child in self.tree.children(path)]
        largest = max(deeper, key=lambda held: sum(held.values()), default={})
        segment = next((s for s in plan.segments if s.path == path), None)
        if segment is None:
            return largest
        inner = self._kept(path, plan, inside=True)
        for name, nbytes in largest.items():
            inner[name] = inner.get(name, 0) + nbytes
        parts = 2 if segment.spatial_split else segment.chunks
        return {name: -(-nbytes // parts) for name, nbytes in inner.items()}


def segment(path: str, chunks: int = 1) -> SegmentPlan:
    return SegmentPlan(path=path, compressor="bit", chunks=chunks)


def paths(plan: Plan) -> list[str]:
    return [s.path for s in plan.segments]


# ---------------------------------------------------------------------------------------------- level 1


@st.composite
def trees(draw: st.DrawFn) -> ModuleTree:
    """Up to nine modules, three deep, with sizes of any proportion; some cannot be segments, some run often."""
    modules: list[ModuleTrace] = []

    def grow(prefix: str, depth: int) -> int:
        count = draw(st.integers(1 if depth == 0 else 0, 3))
        total = 0
        for i in range(count):
            if len(modules) >= 9:
                break
            path = f"{prefix}{i}"
            at = len(modules)
            modules.append(module(path, 0))
            inner = grow(f"{path}.", depth + 1) if depth < 2 else 0
            saved = inner + draw(st.integers(0, 100))
            modules[at] = module(
                path,
                saved,
                draw(st.integers(0, 60)),
                calls=draw(st.sampled_from([1, 1, 4])),
                refusal=draw(st.sampled_from(["", "", "", "it is a ScriptModule"])),
            )
            total += saved
        return total

    grow("", 0)
    return tree_of(*modules)


def antichains(tree: ModuleTree) -> Iterator[list[ModuleTrace]]:
    """Every set of modules that may be segments together and are worth it."""
    least = tree[""].saved_bytes * 1e-3
    worth = [m for m in tree if m.path and not m.refusal and m.saved_bytes - m.packed_input_bytes > least]
    for size in range(1, len(worth) + 1):
        for chosen in itertools.combinations(worth, size):
            if not any(a is not b and is_within(a.path, b.path) for a in chosen for b in chosen):
                yield list(chosen)


def model_peak(tree: ModuleTree, chosen: list[ModuleTrace]) -> float:
    saved = tree[""].saved_bytes - sum(m.saved_bytes - m.packed_input_bytes for m in chosen)
    return saved + max(m.saved_bytes / m.calls for m in chosen)


@settings(max_examples=200, deadline=None)
@given(tree=trees())
def test_the_first_choice_is_the_best_of_all_sets(tree: ModuleTree) -> None:
    every = [model_peak(tree, chosen) for chosen in antichains(tree)]
    found = choose_targets(tree)
    assert bool(every) == bool(found)
    if every:
        assert model_peak(tree, found[0]) == pytest.approx(min(every))
        peaks = [model_peak(tree, chosen) for chosen in found]
        assert peaks == sorted(peaks)
        assert len(found) <= 6


@settings(max_examples=50, deadline=None)
@given(tree=trees())
def test_level_1_never_raises_the_peak_and_keeps_only_what_was_probed(tree: ModuleTree) -> None:
    machine = Machine(tree)
    start = machine.start()
    improvement = Segments().improve(start, tree, SearchOptions(), machine.probes())
    assert improvement.tried == len(machine.probed)
    assert improvement.best is start or improvement.best.plan in machine.probed
    assert improvement.best is start or improvement.best.peak_bytes < start.peak_bytes


BLOCKS = tree_of(
    module("a", 100, 10),
    module("a.x", 60, 10, class_name="Attention"),
    module("a.y", 40, 10, class_name="Mlp"),
    module("b", 100, 10),
    module("b.x", 60, 10, class_name="Attention", refusal="it is parametrized"),
    module("b.y", 40, 10, class_name="Mlp"),
)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("Attention",), ["a.x"]),
        (("Mlp", "Attention"), ["a.x", "a.y", "b.y"]),
        (("a",), ["a"]),
        (("?",), ["a", "b"]),
        (("*.y",), ["a.y", "b.y"]),
        (("a.y", "a"), ["a"]),
        (("Net",), [""]),
        (("Net", "Mlp"), [""]),
    ],
)
def test_targets_asked_for(targets: tuple[str, ...], expected: list[str]) -> None:
    assert [m.path for m in matching_targets(BLOCKS, targets)] == expected


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Conv2d", "target 'Conv2d' matches no module that the training step calls .*Attention, Layera, Layerb, Mlp"),
        ("mlp", "target 'mlp' matches no module"),
        ("b.x", "target 'b.x' matches 'b.x', which cannot be a segment: it is parametrized"),
    ],
)
def test_targets_that_match_nothing(target: str, message: str) -> None:
    machine = Machine(BLOCKS)
    with pytest.raises(PlanError, match=message):
        Segments().improve(machine.start(), BLOCKS, SearchOptions(targets=("a", target)), machine.probes())


def test_targets_asked_for_stay_even_if_they_cost_memory() -> None:
    tree = tree_of(module("a", 5, 50))
    machine = Machine(tree)
    best = Segments().improve(machine.start(), tree, SearchOptions(targets=("a",)), machine.probes()).best
    assert paths(best.plan) == ["a"]
    assert best.peak_bytes > machine.start().peak_bytes
    assert Segments().improve(machine.start(), tree, SearchOptions(), machine.probes()).best.plan.segments == ()


@pytest.mark.parametrize(("compress", "codec"), [(True, "bit"), (False, "null")])
def test_inputs_are_packed_if_that_is_wanted(compress: bool, codec: str) -> None:
    machine = Machine(BLOCKS)
    best = Segments().improve(machine.start(), BLOCKS, SearchOptions(compress_x=compress), machine.probes()).best
    assert {s.compressor for s in best.plan.segments} == {codec}
    assert best.plan.level == 1


def test_plans_that_cannot_run_are_noted() -> None:
    machine = Machine(BLOCKS, fails=lambda plan: "a" in paths(plan))
    start = machine.start()
    improvement = Segments().improve(start, BLOCKS, SearchOptions(), machine.probes())
    assert any("could not run" in note for note in improvement.notes)
    assert "a" not in paths(improvement.best.plan)


# ---------------------------------------------------------------------------------------------- levels 2 and 3


def test_spatial_split_takes_the_heaviest_segment_apart() -> None:
    tree = tree_of(
        *(module(p, b, 10) for p, b in {"a": 30, "a.x": 15, "a.y": 15, "b": 99, "b.x": 50, "b.y": 49}.items())
    )
    machine = Machine(tree)
    start = machine.start(segment("a"), segment("b"), level=1)
    best = SpatialSplit().improve(start, tree, SearchOptions(), machine.probes()).best
    assert best.peak_bytes < start.peak_bytes == 10 + 10 + 99
    assert paths(best.plan)[-2:] == ["b.x", "b.y"]
    assert best.plan.level == 2
    assert best.plan in machine.probed


def test_spatial_split_of_a_module_s_own() -> None:
    tree = tree_of(module("a", 100, 10, spatial_split=True), module("a.x", 100, 10))
    machine = Machine(tree)
    best = SpatialSplit().improve(machine.start(segment("a")), tree, SearchOptions(), machine.probes()).best
    assert best.plan.segments == (SegmentPlan(path="a", compressor="bit", spatial_split=True),)


def test_spatial_split_of_a_module_s_own_into_modules_of_the_model() -> None:
    """They are segments as any other: level 3 cuts the one that can be cut."""
    a = module("a", 100, 10, spatial_split=True, spatial_parts=("a.drive", "a.cell"))
    parts = module("a.drive", 40, 10), module("a.drive.conv", 40, 10), module("a.cell", 60, 10)
    tree = tree_of(a, *parts)
    machine = Machine(tree, rules={"a": NO_RULE, "a.drive": NO_RULE, "a.drive.conv": NO_RULE})
    start = machine.start(segment("a"))
    split = SpatialSplit().improve(start, tree, SearchOptions(), machine.probes()).best
    assert split.plan.segments == (segment("a.drive"), segment("a.cell"))
    best = TemporalSplit().improve(split, tree, SearchOptions(), machine.probes()).best
    assert [s.path for s in best.plan.segments if s.chunks > 1] == ["a.cell"]


@pytest.mark.parametrize(
    "parts", [[], [module("a.drive", 40, 10)], [module("a.drive", 40), module("a.cell", 60, refusal="no")]]
)
def test_spatial_split_into_what_cannot_be_segments(parts: list[ModuleTrace]) -> None:
    tree = tree_of(module("a", 100, 10, spatial_split=True, spatial_parts=("a.drive", "a.cell")), *parts)
    assert spatial_split.split(segment("a"), tree, compress=True) == (replace(segment("a"), spatial_split=True),)


def test_spatial_split_looks_through_wrappers_and_skips_what_cannot() -> None:
    tree = tree_of(
        module("a", 100, 1),
        module("a.only", 100, 1),
        module("a.only.x", 50, 1),
        module("a.only.y", 30, 1),
        module("a.only.z", 20, 1, refusal="it is a ScriptModule"),
        module("a.only.free", 0, 1),
    )
    machine = Machine(tree)
    best = SpatialSplit().improve(machine.start(segment("a")), tree, SearchOptions(), machine.probes()).best
    assert paths(best.plan) == ["a.only.x", "a.only.y"]


def test_temporal_split_multiplies_the_chunks_up_to_the_length() -> None:
    tree = tree_of(module("a", 800, 1), module("b", 1, 1))
    machine = Machine(tree)
    start = machine.start(segment("a"))
    best = TemporalSplit().improve(start, tree, SearchOptions(temporal_split_factor=3), machine.probes()).best
    assert best.plan.segments == (segment("a", chunks=8),)
    assert best.plan.level == 3
    assert [s.chunks for plan in machine.probed for s in plan.segments][:3] == [3, 8]


def test_temporal_split_recomputes_states_where_there_are_any() -> None:
    for state_bytes in (0, 1):
        tree = tree_of(module("a", 800, 1, state_bytes=state_bytes), module("b", 1, 1))
        machine = Machine(tree)
        TemporalSplit().improve(machine.start(segment("a")), tree, SearchOptions(), machine.probes())
        assert any(s.recompute_states for plan in machine.probed for s in plan.segments) is bool(state_bytes)


@pytest.mark.parametrize(("peak", "chunks"), [(800, [2, 4, 8]), (10_000, [2, 4]), (100_000, [])])
def test_chunks_that_hold_little_of_the_peak_are_not_cut_again(peak: int, chunks: list[int]) -> None:
    tree = tree_of(module("a", 800, 1, state_bytes=1), peak=peak)
    cuts = list(iterate_cuts(segment("a"), tree, 2, Machine(tree).probes()))
    assert [cut.chunks for cut in cuts if not cut.recompute_states] == chunks
    assert [cut.chunks for cut in cuts if cut.recompute_states] == chunks[-1:]


def test_temporal_split_of_the_parts_that_can() -> None:
    tree = tree_of(module("a", 100, 1), module("a.norm", 20, 1), module("a.linear", 80, 1))
    machine = Machine(tree, rules={"a": NO_RULE, "a.norm": NO_RULE})
    best = TemporalSplit().improve(machine.start(segment("a")), tree, SearchOptions(), machine.probes()).best
    chunks = {s.path: s.chunks for s in best.plan.segments}
    assert chunks["a.linear"] > 1
    assert chunks.get("a", 1) == chunks.get("a.norm", 1) == 1


@pytest.mark.parametrize(
    ("options", "rules", "cut"),
    [
        (SearchOptions(), {}, ["a"]),
        (SearchOptions(targets=("a",)), {}, ["a"]),
        (SearchOptions(targets=("a.x", "a.y")), {}, ["a.x", "a.y"]),
        (SearchOptions(), {"a": NO_RULE}, ["a.x", "a.y"]),
    ],
)
def test_a_split_module_runs_in_chunks_as_a_whole_where_that_is_less(
    options: SearchOptions, rules: dict[str, ChunkRule | Refused], cut: list[str]
) -> None:
    """Level 2 split it: as a whole it holds more.  In chunks it holds less, for its parts each store their input."""
    tree = tree_of(module("a", 120, 10), module("a.x", 60, 10), module("a.y", 60, 10))
    machine = Machine(tree, rules=rules)
    split = SpatialSplit().improve(machine.start(segment("a")), tree, SearchOptions(), machine.probes()).best
    assert paths(split.plan) == ["a.x", "a.y"]
    best = TemporalSplit().improve(split, tree, options, machine.probes()).best
    assert [s.path for s in best.plan.segments if s.chunks > 1] == cut
    assert paths(best.plan) == cut
    assert best.peak_bytes < split.peak_bytes


def test_what_cannot_be_cut_is_left_alone() -> None:
    machine = Machine(BLOCKS, rules=dict.fromkeys(("", "a", "b", "a.x", "a.y", "b.x", "b.y"), NO_RULE))
    start = machine.start(segment("a"), segment("b"))
    improvement = TemporalSplit().improve(start, BLOCKS, SearchOptions(), machine.probes())
    assert improvement.best is start
    assert improvement.tried == 0
    assert machine.probed == []


def many(count: int) -> ModuleTree:
    """Blocks of falling size, each with two halves; each input is a share of the peak that is worth a look."""
    sizes = [400 - 50 * i for i in range(count)]
    blocks = [
        [module(f"b{i}{part}", n // (2 if part else 1), 20) for part in ("", ".x", ".y")] for i, n in enumerate(sizes)
    ]
    return tree_of(*itertools.chain(*blocks))


@pytest.mark.parametrize("strategy", [SpatialSplit(), TemporalSplit()])
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_the_number_of_rounds_is_limited(strategy: SpatialSplit | TemporalSplit, rounds: int) -> None:
    tree = many(4)
    machine = Machine(tree)
    start = machine.start(*(segment(f"b{i}") for i in range(4)))
    best = strategy.improve(start, tree, SearchOptions(max_split_rounds=rounds), machine.probes()).best
    unlimited = strategy.improve(start, tree, SearchOptions(), Machine(tree).probes()).best
    assert unlimited.peak_bytes <= best.peak_bytes <= start.peak_bytes
    assert (best is start) == (rounds == 0)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_number_of_candidates_in_a_round_is_limited(limit: int) -> None:
    tree = many(5)
    machine = Machine(tree, fails=lambda plan: plan.level == 2)  # nothing helps: the one round tries all it may
    start = machine.start(*(segment(f"b{i}") for i in range(5)))
    options = SearchOptions(max_candidates_per_round=limit)
    assert SpatialSplit().improve(start, tree, options, machine.probes()).best is start
    assert len(one_changed(machine, start)) == limit
    machine.probed.clear()
    SpatialSplit().improve(start, tree, SearchOptions(), machine.probes())
    assert len(one_changed(machine, start)) > limit


def one_changed(machine: Machine, start: Candidate) -> list[str]:
    """The segments of ``start`` that were probed in another form while all others stayed, in order."""
    gone = [[s.path for s in start.plan.segments if s not in plan.segments] for plan in machine.probed]
    return [missing[0] for missing in gone if len(missing) == 1]


def test_the_heaviest_at_the_peak_comes_first() -> None:
    tree = tree_of(
        *(module(p, b, 5) for p, b in {"a": 50, "a.x": 25, "a.y": 25, "b": 90, "b.x": 45, "b.y": 45}.items())
    )
    machine = Machine(tree, fails=lambda plan: not {"a", "b"} & set(paths(plan)))
    start = machine.start(segment("a"), segment("b"))
    SpatialSplit().improve(start, tree, SearchOptions(max_split_rounds=1), machine.probes())
    assert one_changed(machine, start)[0] == "b"


def test_a_change_that_leaves_the_peak_as_it_is_is_not_kept() -> None:
    tree = tree_of(module("a", 100, 10), module("a.x", 60, 10), module("a.y", 40, 0), module("b", 100, 10))
    machine = Machine(tree)
    start = machine.start(segment("a"), segment("b"))
    improvement = SpatialSplit().improve(start, tree, SearchOptions(), machine.probes())
    reached = [machine.count(plan) for plan in list(machine.probed)]
    assert start.peak_bytes in [c.allocated_peak_bytes for c in reached if isinstance(c, Counted)]
    assert improvement.best is start


@settings(max_examples=60, deadline=None)
@given(tree=trees(), cuttable=st.booleans())
def test_levels_never_raise_the_peak_and_keep_only_what_was_probed(tree: ModuleTree, cuttable: bool) -> None:
    machine = Machine(tree, rules={} if cuttable else {m.path: NO_RULE for m in tree})
    best = machine.start()
    for strategy in STRATEGIES:
        before, machine.probed = best, []
        best = strategy.improve(before, tree, SearchOptions(), machine.probes()).best
        assert best.peak_bytes <= before.peak_bytes
        assert best.plan.segments == before.plan.segments or best.plan.segments in [p.segments for p in machine.probed]
        assert len(set(paths(best.plan))) == len(paths(best.plan))
        assert all(not tree[path].refusal for path in paths(best.plan))
        if strategy.level in (2, 3):
            assert best is before or best.peak_bytes < before.peak_bytes
        counted = machine.count(best.plan)
        assert isinstance(counted, Counted)
        assert counted.allocated_peak_bytes == best.peak_bytes


# ---------------------------------------------------------------------------------------------- level 4


def test_unwrapping_takes_the_slowest_first_and_keeps_the_peak() -> None:
    tree = tree_of(
        module("a", 10, 1, forward_s=1.0), module("b", 10, 1, forward_s=9.0), module("c", 100, 1, forward_s=0.1)
    )
    machine = Machine(tree)
    start = machine.start(segment("a"), segment("b"), segment("c"))
    improvement = GreedyUnwrap().improve(start, tree, SearchOptions(), machine.probes())
    assert "b" not in paths(machine.probed[0])
    assert improvement.best.peak_bytes <= start.peak_bytes
    assert improvement.best.plan.level == 4
    assert improvement.tried == len(machine.probed)


def test_unwrapping_what_costs_nothing() -> None:
    tree = tree_of(module("a", 1, 1), module("b", 100, 1), module("c", 100, 1))
    machine = Machine(tree)
    best = (
        GreedyUnwrap()
        .improve(machine.start(segment("a"), segment("b"), segment("c")), tree, SearchOptions(), machine.probes())
        .best
    )
    assert paths(best.plan) == ["b", "c"]


def test_unwrapping_ends_when_the_time_is_up() -> None:
    tree = tree_of(*(module(name, 1, 1) for name in "abc"))
    machine = Machine(tree)
    start = machine.start(*map(segment, "abc"))
    asked: list[Plan] = []

    def count(plan: Plan) -> Counted | Failure | NotTried:
        asked.append(plan)
        return machine.count(plan) if len(asked) == 1 else NotTried(reason="time is up")

    improvement = GreedyUnwrap().improve(start, tree, SearchOptions(), replace(machine.probes(), count=count))
    assert len(asked) == 2
    assert improvement.tried == 1
    assert paths(improvement.best.plan) == ["b", "c"]


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_rounds_count_the_plans_that_were_tried_before_the_time_was_up(answered: int) -> None:
    tree = tree_of(*(module(name, 100, 1) for name in "abc"))
    machine = Machine(tree)
    asked: list[Plan] = []

    def count(plan: Plan) -> Counted | Failure | NotTried:
        asked.append(plan)
        return machine.count(plan) if len(asked) <= answered else NotTried(reason="time is up")

    start = machine.start(*map(segment, "abc"))
    probes = replace(machine.probes(), count=count)
    assert TemporalSplit().improve(start, tree, SearchOptions(), probes).tried == answered


def test_a_plan_that_fails_is_not_taken() -> None:
    tree = tree_of(module("a", 1, 1), module("b", 100, 1), module("c", 100, 1))
    machine = Machine(tree, fails=lambda plan: "a" not in paths(plan))
    start = machine.start(segment("a"), segment("b"), segment("c"))
    best = GreedyUnwrap().improve(start, tree, SearchOptions(), machine.probes()).best
    assert best.plan.segments == start.plan.segments
    assert best.peak_bytes == start.peak_bytes


# ---------------------------------------------------------------------------------------------- the tree


def test_children_are_the_nearest_called_modules() -> None:
    tree = tree_of(module("a", 3), module("a.list.0", 1), module("a.list.1", 2), module("holder.x", 1), module("ab", 1))
    assert [m.path for m in tree.children("")] == ["a", "holder.x", "ab"]
    assert [m.path for m in tree.children("a")] == ["a.list.0", "a.list.1"]
    assert tree.children("ab") == []
    assert "a" in tree
    assert "a.list" not in tree


def test_holders_below_a_path_are_added_up() -> None:
    machine = Machine(BLOCKS)
    counted = machine.start().counted
    assert held_at_peak(counted, "") == 200
    assert held_at_peak(counted, "a") == 100
    assert held_at_peak(counted, "a.x") == 60


def test_levels_are_in_order() -> None:
    assert [s.level for s in STRATEGIES] == [1, 2, 3, 4]

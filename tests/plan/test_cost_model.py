"""The cost model against dry runs: the same step, by arithmetic and by autograd."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.plan.block_tree import Block, block_tree
from memopt_cli.plan.cost_model import CostModel, chunk_counts
from memopt_cli.plan.cost_models import CostModels
from memopt_cli.plan.interface import Candidate, ModuleTree, NotTried, Probes, is_within
from memopt_cli.plan.keeping import choices, keep_names
from memopt_cli.plan.planner import Planner, Priced
from memopt_cli.plan.search import Allowed, Solver, Way, _Around
from memopt_cli.plan.strategies import STRATEGIES
from memopt_cli.plan.strategies.greedy_unwrap import GreedyUnwrap, _Less
from memopt_cli.plan.strategies.segments import Segments, choose_targets
from memopt_cli.records import ChunkRule, Crashed, Plan, Refused, SearchOptions, SegmentPlan, StepSettings, StepTrace
from memopt_cli.step import Step
from memopt_cli.trace import FakeStep, record, resident_bytes
from memopt_cli.workspace import Workspaces
from sample_models import gpt, resnet

CONV = "aten::convolution"


class Chain(nn.Module):
    """Blocks one after another, as most networks are."""

    def __init__(self, blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Steps(nn.Module):
    """One cell, called once for every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 64)
        self.readout = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 64)
        for step in x:
            state = self.cell(step, state)
        return self.readout(state)


class Subject:
    """A step on tensors without data, recorded and ready to be counted under plans."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        step = Step(model=model, args=args, kwargs={}, settings=StepSettings(), loss=None, optimizer=None)
        self.fake = FakeStep(step)
        self.trace: StepTrace = self.fake.record(batch=1)
        self.usable = [m.path for m in self.trace.modules if m.path and not m.refusal and m.saved_bytes]
        self.model = CostModel(self.trace)

    def dry_run(self, plan: Plan) -> int:
        return self.count(plan).allocated_peak_bytes

    def count(self, plan: Plan) -> Any:
        apply_plan(self.fake.step.model, plan)
        try:
            return self.fake.count()
        finally:
            remove_plan(self.fake.step.model)

    def error(self, plan: Plan) -> float:
        return self.model.predict(plan).allocated_peak_bytes / self.dry_run(plan) - 1


def segments(*paths: str, chunks: int = 1, axis: int = 0) -> Plan:
    return Plan(
        level=3, segments=tuple(SegmentPlan(path=p, chunks=chunks, axis=axis, inexact=chunks > 1) for p in paths)
    )


def tiny_gpt() -> Subject:
    return Subject(gpt.GPT(vocabulary=400, width=64, heads=2, blocks=4), torch.randint(0, 400, (4, 64)))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "chain": lambda: Subject(Chain(), torch.randn(4, 16, 24, 24)),
    "resnet": lambda: Subject(resnet.build(), torch.randn(2, 3, 64, 64)),
    "gpt": tiny_gpt,
    "steps": lambda: Subject(Steps(), torch.randn(12, 32, 32)),
}


@pytest.fixture(scope="module", params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


def test_the_original_is_replayed_exactly(subject: Subject) -> None:
    assert subject.model.predict(Plan(level=0)).allocated_peak_bytes == subject.trace.allocated_peak_bytes
    assert subject.error(Plan(level=0)) == 0.0


def test_random_plans_are_close_to_their_dry_runs(subject: Subject) -> None:
    chance = random.Random(1)
    errors = []
    for _ in range(12):
        chosen = chance.sample(subject.usable, chance.randint(1, min(5, len(subject.usable))))
        errors.append(abs(subject.error(segments(*sorted(chosen, key=subject.usable.index)))))
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.10


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_are_close_to_their_dry_run(chunks: int) -> None:
    subject = SUBJECTS["chain"]()
    assert abs(subject.error(segments("blocks.2", "blocks.4", chunks=chunks))) <= 0.05


@pytest.mark.parametrize("chunks", [2, 8])
def test_every_chunk_adds_a_gradient_of_the_weights(chunks: int) -> None:
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)]
    subject = Subject(nn.Sequential(*layers), torch.randn(64, 256))
    original = subject.dry_run(Plan(level=0))
    for path in ("0", "2.2"):
        assert subject.dry_run(segments(path, chunks=chunks)) > 0.9 * original  # the weights are most of the step
        assert abs(subject.error(segments(path, chunks=chunks))) <= 0.02


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_of_a_recurrent_layer_in_chunks_not_all_workspace_is_divided(chunks: int) -> None:
    """Its kernel lays the weights out anew in every chunk."""
    model = nn.LSTM(57, 128)
    full, small = (
        Step(model=model, args=(torch.randn(24, batch, 57),), kwargs={}, settings=StepSettings()) for batch in (16, 8)
    )
    workspaces = taken(full).compared(taken(small))
    fake = FakeStep(full)
    trace = fake.record(16, workspaces)
    assert any(0 < op.fixed_workspace_bytes < op.workspace_bytes for op in trace.ops)
    plan = Plan(level=3, segments=(SegmentPlan(path="", chunks=chunks, axis=0, seq_inputs=1, seq_outputs=1),))
    apply_plan(fake.step.model, plan)
    wanted = fake.count(workspaces).allocated_peak_bytes
    assert CostModel(trace).predict(plan).allocated_peak_bytes == pytest.approx(wanted, rel=0.1)


def taken(step: Step) -> Workspaces:
    """What the step's kernels take for themselves."""
    for _ in range(2):  # the first run fills caches
        step.model.zero_grad(set_to_none=True)
        found = measure_allocated(lambda: step.backward(step.forward()), "cpu", resident_bytes(step)).workspaces
    return found


class Carrying(nn.Module):
    """What it leaves from step to step is as large as a step of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for frame in x:
            self.v = torch.tanh(frame if self.v is None else 0.5 * self.v + frame)
            outputs.append(self.v.sin().exp().sin())
        return torch.stack(outputs)


class Carriers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Carrying() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.v = None
        return self.blocks(x).mean()


def carriers() -> Subject:
    return Subject(Carriers(), torch.randn(10, 4, 256, requires_grad=True))


def carrying(chunks: int, recompute_states: bool) -> Plan:
    every = (SegmentPlan(path=f"blocks.{i}", chunks=chunks, recompute_states=recompute_states) for i in range(4))
    return Plan(level=3, segments=tuple(every))


@pytest.mark.parametrize("recompute_states", [False, True])
@pytest.mark.parametrize("chunks", [2, 4, 10])
def test_states_between_chunks_are_seen(chunks: int, recompute_states: bool) -> None:
    subject = carriers()
    assert {m.state_bytes for m in subject.trace.modules if m.class_name == "Carrying"} == {4 * 256 * 4}
    assert abs(subject.error(carrying(chunks, recompute_states))) <= 0.12


def test_recomputed_states_are_dearer_and_smaller() -> None:
    model = carriers().model
    held, recomputed = (model.predict(carrying(10, recompute_states)) for recompute_states in (False, True))
    assert recomputed.allocated_peak_bytes < held.allocated_peak_bytes
    assert recomputed.step_s > held.step_s


def test_the_least_peak_is_that_of_chunks_of_every_module_alike() -> None:
    subject = carriers()
    refused: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        if path != "blocks.3":
            return ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
        refused.append(path)
        return Refused(reason="no")

    found = planner(subject, chunking).least(start(subject).peak_bytes)
    assert found is not None
    chunks = {s.path: s.chunks for s in found.candidate.plan.segments}
    assert chunks.get("blocks.3", 1) == 1
    by_hand = carrying(10, True)
    by_hand = replace(by_hand, segments=by_hand.segments[:3])
    assert found.peak_bytes <= subject.dry_run(by_hand)


@pytest.mark.parametrize(
    ("length", "factor", "counts"),
    [(10, 2, [2, 4, 5, 10]), (8, 3, [3, 8]), (3, 2, [2, 3]), (1, 2, []), (16, 4, [4, 16]), (10, 1, [2, 3, 4, 5, 10])],
)
def test_numbers_of_chunks(length: int, factor: int, counts: list[int]) -> None:
    assert list(chunk_counts(length, factor)) == counts


def test_nested_segments_are_close_to_their_dry_run() -> None:
    subject = SUBJECTS["resnet"]()
    inner = [p for p in subject.usable if p.startswith("stages.0.")]
    assert abs(subject.error(segments("stages.0", *inner[:4]))) <= 0.05


def keeping(subject: Subject, root: Block, chance: random.Random) -> Plan:
    """Some segments, none in another, each keeping some costly outputs."""
    blocks = {block.path: block for block in root}
    worthy = {p: choices([c for c in blocks[p].costly if c.op < blocks[p].stop]) for p in subject.usable}
    able = [path for path, sets in worthy.items() if sets]
    chosen = chance.sample(able, min(len(able), chance.randint(1, 5)))
    outermost = [p for p in able if p in chosen and not any(p != o and is_within(p, o) for o in chosen)]
    names = {p: keep_names(blocks[p].costly, chance.choice(worthy[p]), []) for p in outermost}
    return Plan(level=4, segments=tuple(SegmentPlan(path=p, keep=keep) for p, keep in names.items()))


@pytest.mark.parametrize("name", ["chain", "resnet", "gpt"])
def test_what_segments_keep_is_close_to_the_dry_run(name: str) -> None:
    subject, chance = SUBJECTS[name](), random.Random(2)
    root = block_tree(subject.trace, subject.model.recompute_s)
    errors = [abs(subject.error(keeping(subject, root, chance))) for _ in range(10)]
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.05


def test_what_is_kept_takes_no_time_again() -> None:
    subject = SUBJECTS["chain"]()
    ops = tuple(replace(op, seconds=1.0 if op.flops else 0.0) for op in subject.trace.ops)
    model = CostModel(replace(subject.trace, ops=ops))
    plain, kept = segments("blocks.2"), Plan(level=4, segments=(SegmentPlan(path="blocks.2", keep=(CONV,)),))
    assert model.predict(plain).step_s == model.step_s + 1
    assert model.predict(kept).step_s == pytest.approx(model.step_s, abs=0.01)


def test_what_runs_again_faster_takes_that_time() -> None:
    subject = SUBJECTS["chain"]()
    ops = tuple(replace(op, seconds=3.0, recompute_s=1.0 if op.name == CONV else None) for op in subject.trace.ops)
    first, again = (
        CostModel(replace(subject.trace, ops=o)) for o in (tuple(replace(op, recompute_s=None) for op in ops), ops)
    )
    plan = segments("blocks.2")
    convolutions = sum(op.name == CONV and op.module.startswith("blocks.2") for op in ops)
    assert convolutions > 0
    assert first.step_s == again.step_s
    assert first.predict(plan).step_s - again.predict(plan).step_s == pytest.approx(2 * convolutions)


@pytest.mark.parametrize(
    "rule", [None, ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, batch_statistics=True)], ids=["whole", "statistics"]
)
def test_the_search_and_the_replay_price_a_segment_alike(rule: ChunkRule | None) -> None:
    subject = SUBJECTS["chain"]()
    chunks = {"blocks.2": (rule, 4)} if rule else {}
    allowed = Allowed(targets=lambda path: path == "blocks.2", chunks=chunks)
    (block,) = (b for b in block_tree(subject.trace, subject.model.recompute_s) if b.path == "blocks.2")
    ways = Solver(block, allowed)._as_segment(block, _Around())
    priced = {segment: way.added_s for way in ways for segment in way.segments()}
    assert any(segment.batch_statistics for segment in priced) is bool(rule)
    for segment, added_s in priced.items():
        predicted = subject.model.predict(Plan(level=3, segments=(segment,)))
        assert predicted.step_s - subject.model.step_s == pytest.approx(added_s)


def test_a_recomputation_ends_where_autograd_has_what_it_saved() -> None:
    subject = Subject(nn.Sequential(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))), torch.randn(4, 8))
    ops = tuple(replace(op, seconds=1.0) for op in subject.trace.ops)
    model = CostModel(replace(subject.trace, ops=ops))
    runs: list[str] = []
    segment = subject.fake.step.model[0]  # type: ignore[index]
    apply_plan(subject.fake.step.model, segments("0"))
    hooks = [m.register_forward_hook(lambda m, _, __: runs.append(type(m).__name__)) for m in segment]
    subject.fake.count()
    remove_plan(subject.fake.step.model)
    for hook in hooks:
        hook.remove()
    assert runs == ["Linear", "Tanh", "Linear", "Linear", "Tanh"]
    whole = sum(op.module.startswith("0") and op.phase == "forward" for op in ops)
    assert model.predict(segments("0")).step_s - model.step_s <= whole - 1


def test_time_is_what_runs_again(subject: Subject) -> None:
    timed = replace(subject.trace, ops=tuple(replace(op, seconds=1.0) for op in subject.trace.ops))
    model = CostModel(timed)
    assert model.step_s == len(timed.ops)
    path = subject.usable[0]
    calls = [c for c in timed.calls if c.path == path]
    again = model.predict(segments(path)).step_s - model.step_s
    assert 0 < again <= sum(c.end - c.start for c in calls)


def in_tree(block: Block, chosen: set[str]) -> tuple[int, int]:
    """(kept, peak) of a plan, as the search adds them up."""
    if block.children:
        kept = peak = 0
        for child in block.children:
            child_kept, child_peak = in_tree(child, chosen)
            peak, kept = max(peak, kept + child_peak), kept + child_kept
    else:
        kept, peak = block.kept_bytes, block.kept_bytes + block.peak_bytes
    return (
        (block.input_bytes, max(block.input_bytes, peak, block.forward_bytes)) if block.path in chosen else (kept, peak)
    )


@pytest.mark.parametrize("name", ["chain", "resnet", "gpt"])
def test_the_tree_adds_up_to_the_replay(name: str) -> None:
    subject = SUBJECTS[name]()
    root = block_tree(subject.trace, subject.model.recompute_s)
    assert in_tree(root, set())[1] == pytest.approx(subject.trace.allocated_peak_bytes, rel=0.01)
    for path in subject.usable[::3]:
        replayed = subject.model.predict(segments(path)).allocated_peak_bytes
        assert in_tree(root, {path})[1] == pytest.approx(replayed, rel=0.05)


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_blocks_that_are_alike_have_tensors_of_the_same_sizes(name: str) -> None:
    subject = SUBJECTS[name]()
    sizes: dict[int, set[tuple[int, ...]]] = {}
    for block in block_tree(subject.trace, subject.model.recompute_s):
        own = block.kept_bytes, block.packed_bytes, block.input_bytes, block.output_bytes, block.forward_bytes
        sizes.setdefault(block.signature, set()).add(own)
    assert all(len(found) == 1 for found in sizes.values())


# ---------------------------------------------------------------------------------------------- within a budget


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + x * x)


class Firing(nn.Module):
    """Convolutions of spikes: of what one saves, packing makes a 32nd."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Spike.apply(layer(x))
        return x


@pytest.mark.parametrize("packed", [False, True])
def test_the_sums_of_a_step_without_segments_are_those_of_the_cost_model(packed: bool) -> None:
    step = Step(model=Firing(), args=(torch.rand(4, 16, 24, 24),), kwargs={}, settings=StepSettings())
    trace = record(step, 4, contents=True)
    model = CostModel(trace)
    assert model.packable_bytes > 0
    solver = Solver(block_tree(trace, model.recompute_s), Allowed(targets=lambda path: False, packed=packed))
    way = solver.fastest(trace.allocated_peak_bytes)
    assert way is not None
    predicted = model.predict(Plan(level=1, packed=packed)).allocated_peak_bytes
    assert way.peak_bytes == pytest.approx(predicted, rel=0.02)


def planner(subject: Subject, chunking: Callable[[str], ChunkRule | Refused] | None = None) -> Planner:
    probes = Probes(
        count=subject.count, chunking=chunking or (lambda path: Refused(reason="no")), report=lambda text: None
    )
    return Planner(subject.trace, probes, Allowed(), may_chunk=chunking is not None, level=4)


def start(subject: Subject) -> Priced:
    plan = Plan(level=0)
    return Priced(candidate=Candidate(plan=plan, counted=subject.count(plan)), slowdown=1.0)


def test_every_budget_that_can_be_met_is(subject: Subject) -> None:
    plans = planner(subject)
    least = plans.least(start(subject).peak_bytes)
    assert least is not None
    high = start(subject).peak_bytes
    slowdowns = []
    for quarter in range(5):
        budget = least.peak_bytes + (high - least.peak_bytes) * quarter // 4
        found = plans.within(budget)
        assert found is not None, f"{budget} of {high}"
        assert found.peak_bytes <= budget
        assert subject.dry_run(found.candidate.plan) == found.peak_bytes
        slowdowns.append(found.slowdown)
    assert slowdowns[-1] == 1.0
    assert plans.within(least.peak_bytes // 4) is None


def test_the_frontier_falls_in_peak_and_rises_in_time(subject: Subject) -> None:
    first = start(subject)
    found = planner(subject).frontier(first)
    peaks = [priced.peak_bytes for priced in found]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] <= first.peak_bytes
    assert [p.slowdown for p in found] == sorted(p.slowdown for p in found)


SEARCHES: dict[str, Callable[[Planner, Priced], object]] = {
    "within": lambda plans, first: plans.within(first.peak_bytes // 2),
    "least": lambda plans, first: plans.least(first.peak_bytes),
    "frontier": lambda plans, first: plans.frontier(first),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("dry_runs", [0, 1])
def test_nothing_is_solved_when_the_time_is_up(search: str, dry_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, fastest = SUBJECTS["chain"](), Solver.fastest
    refused: list[Plan] = []
    plans = planner(subject)

    def count(plan: Plan) -> Any:
        if plans.tried == dry_runs:
            refused.append(plan)
            return NotTried(reason="time is up")
        return subject.count(plan)

    def solve(solver: Solver, budget_bytes: int) -> Way | None:
        assert not refused
        return fastest(solver, budget_bytes)

    monkeypatch.setattr(Solver, "fastest", solve)
    plans._probes = replace(plans._probes, count=count)
    SEARCHES[search](plans, start(subject))
    assert plans.tried == dry_runs
    assert len(refused) == (0 if (search, dry_runs) == ("least", 1) else 1)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("asked", [0, 3, 40])
def test_sums_end_when_the_time_is_up(search: str, asked: int) -> None:
    """Within the solver and the cost model, too; what was counted before is kept."""
    subject = SUBJECTS["chain"]()
    first, plans = start(subject), planner(subject)
    answers: list[bool] = []
    counted: list[int] = []

    def late() -> bool:
        answers.append(len(answers) >= asked)
        return answers[-1]

    def count(plan: Plan) -> Any:
        if any(answers):
            return NotTried(reason="time is up")
        counted.append(subject.count(plan).allocated_peak_bytes)
        return subject.count(plan)

    plans._probes = replace(plans._probes, count=count, late=late)
    SEARCHES[search](plans, first)
    assert answers.count(True) == 1
    assert plans.tried == len(counted)
    smallest = plans.least(first.peak_bytes)
    assert (smallest.peak_bytes if smallest else None) == min(counted, default=None)


def test_chunks_go_below_what_segments_reach() -> None:
    subject = SUBJECTS["chain"]()
    plain = planner(subject).least(start(subject).peak_bytes)
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, inexact=True)

    chunked = planner(subject, chunking).least(start(subject).peak_bytes)
    assert plain is not None
    assert chunked is not None
    assert chunked.peak_bytes < plain.peak_bytes
    assert len(asked) == len(set(asked)) > 0
    assert any(segment.chunks > 1 for segment in chunked.candidate.plan.segments)
    assert ModuleTree(subject.trace)[chunked.candidate.plan.segments[0].path]


class Loop(nn.Module):
    """What takes memory is between its layers, none of which saves anything by chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_where_nothing_at_the_peak_saves_by_chunks_what_it_lies_in_is_asked() -> None:
    subject = Subject(nn.Sequential(nn.Sequential(Loop())), torch.randn(512, 64))
    assert subject.model.predict(Plan(level=4)).module.startswith("0.0.layers.")
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return Refused(reason="no") if path == "0.0" else rule_along(0)

    high = start(subject).peak_bytes
    found = planner(subject, chunking).within(high * 2 // 3)
    assert found is not None
    assert asked == ["0.0", "0"]
    assert [(s.path, s.chunks > 1) for s in found.candidate.plan.segments] == [("0", True)]
    assert planner(subject).within(high * 2 // 3) is None


def test_what_no_plan_may_cut_is_not_asked() -> None:
    subject = Subject(nn.Sequential(nn.Sequential(Loop())), torch.randn(512, 64))
    plans = planner(subject, lambda path: rule_along(0))
    plans._allowed = replace(plans._allowed, targets=lambda path: path != "0.0")
    assert [block.path for block in plans._around("0.0.layers.3", Plan(level=4))] == ["0"]
    plans._heads = (SegmentPlan(path="0.0.layers.7", chunks=2, through_loss=True),)
    assert not [*plans._around("0.0.layers.3", Plan(level=4))]


@pytest.mark.parametrize(("worth", "asks"), [(0.0, True), (5.0, False)])
def test_chunks_are_asked_for_where_they_could_save_enough(
    worth: float, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.plan.planner._WORTH_ASKING", worth)
    subject = SUBJECTS["chain"]()
    asked: list[str] = []

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return rule_along(0)

    plans = planner(subject, chunking)
    assert plans._is_worth_asking(0, 0)  # nothing is within that yet
    slow = plans._count(segments(*(f"blocks.{n}" for n in range(6)), chunks=4))
    whole = planner(subject).least(start(subject).peak_bytes)
    assert slow is not None
    assert whole is not None
    assert slow.peak_bytes < whole.peak_bytes
    found = plans.within(slow.peak_bytes)
    assert found is not None
    assert bool(asked) is asks
    assert found.peak_bytes <= slow.peak_bytes


@pytest.mark.parametrize("axis", [0, 1])
def test_how_much_chunks_may_save_is_estimated_before_they_are_asked_for(
    axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 1, 64)
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    subject = Subject(nn.Sequential(*blocks), x.transpose(0, axis))

    def counted(*plans: Plan) -> tuple[Planner, int]:
        """And the least budget, which the first of the plans is within."""
        planned = planner(subject, lambda path: rule_along(axis))
        first, *_ = (planned._count(plan) for plan in plans)
        assert first is not None
        return planned, first.peak_bytes

    plans, budget = counted(segments("0", "1", "2", chunks=16, axis=axis))
    assert plans._is_worth_asking(budget, budget)  # fewer chunks, or of fewer, are faster
    monkeypatch.setattr(plans, "_questions", 12)
    assert not plans._is_worth_asking(budget, budget)
    plans, budget = counted(segments("0", "1", "2", chunks=16, axis=axis), Plan(level=4))
    assert not plans._is_worth_asking(budget, start(subject).peak_bytes)  # the original is within that


def test_chunks_that_a_budget_does_not_need_are_taken_back() -> None:
    """The solver's sums may be too high, and chunks cost a multiple of the step."""
    subject = SUBJECTS["chain"]()
    plans = planner(subject, lambda path: rule_along(0))
    needed = plans._count(segments("blocks.1"))
    many = SegmentPlan(path="blocks.1", chunks=4, axis=0, inexact=True)
    needless = plans._count(Plan(level=4, segments=(many, SegmentPlan(path="blocks.2"))))
    assert needed is not None
    assert needless is not None
    relaxed = plans._relaxed(needless, max(needed.peak_bytes, needless.peak_bytes) + (1 << 10))
    assert relaxed.slowdown < needless.slowdown
    assert all(segment.chunks == 1 for segment in relaxed.candidate.plan.segments)
    assert relaxed.peak_bytes <= max(needed.peak_bytes, needless.peak_bytes) + (1 << 10)


def test_level_1_dry_runs_no_set_of_segments_that_lowers_nothing(subject: Subject) -> None:
    tree, counted = ModuleTree(subject.trace), []

    def count(plan: Plan) -> Any:
        found = subject.count(plan)
        counted.append(found.allocated_peak_bytes)
        return found

    original = start(subject)
    probes = Probes(count=count, chunking=lambda path: Refused(reason="no"), report=lambda text: None)
    found = Segments().improve(original.candidate, tree, SearchOptions(), probes)
    sets = [segments(*(module.path for module in chosen)) for chosen in choose_targets(tree)]
    assert found.best.peak_bytes == min(original.peak_bytes, *map(subject.dry_run, sets))
    assert found.tried == len(counted) <= len(sets)
    for before, peak_bytes in zip(itertools.accumulate(counted, min), counted[1:], strict=False):
        assert peak_bytes < 1.02 * before


def test_packing_that_a_budget_does_not_need_is_taken_back() -> None:
    subject = SUBJECTS["chain"]()
    plans = planner(subject, lambda path: rule_along(0))
    plain, packed = (plans._count(replace(segments("blocks.1"), packed=packed)) for packed in (False, True))
    assert plain is not None
    assert packed is not None
    assert plans._relaxed(packed, plain.peak_bytes).candidate.plan == plain.candidate.plan
    assert plans._relaxed(packed, plain.peak_bytes - 1) == packed


def test_no_more_chunks_than_a_budget_needs() -> None:
    """The solver tries 2, 4 and 8 of them only."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    subject = Subject(nn.Sequential(blocks), torch.randn(96, 64))
    plans = planner(subject, lambda path: rule_along(0))
    whole = SegmentPlan(path="0")
    in_chunks = [Plan(level=4, segments=(rule_along(0).applied(whole, chunks),)) for chunks in (2, 3, 4)]
    two, three, four = (plans._count(plan) for plan in in_chunks)
    assert two is not None
    assert three is not None
    assert four is not None
    enough = int(1.02 * three.peak_bytes)  # the cost model need not be right to the byte
    assert four.peak_bytes < three.peak_bytes < enough < two.peak_bytes
    assert plans._relaxed(four, enough).candidate.plan == three.candidate.plan


def rule_along(axis: int) -> ChunkRule:
    return ChunkRule(axis=axis, seq_inputs=1, seq_outputs=1, inexact=True)


def test_only_targets_are_put_in_chunks() -> None:
    plans = planner(SUBJECTS["chain"](), lambda path: rule_along(0))
    plans._allow_chunks({f"blocks.{i}": (rule_along(0), 4) for i in range(3)})

    def put_in_chunks() -> set[str]:
        return {segment.path for plan in plans._rearranged(Plan(level=4)) for segment in plan.segments}

    assert put_in_chunks() == {"blocks.0", "blocks.1", "blocks.2"}
    plans._allowed = replace(plans._allowed, targets=lambda path: path != "blocks.1")
    assert put_in_chunks() == {"blocks.0", "blocks.2"}


def test_a_rearrangement_takes_the_place_of_what_it_lies_in_and_of_what_lies_in_it() -> None:
    plans = planner(SUBJECTS["chain"](), lambda path: rule_along(0))
    plans._allow_chunks({"blocks.1": (rule_along(0), 4)})
    around = segments("", "blocks.0", "blocks.1.0")
    found = [[(s.path, s.chunks) for s in plan.segments] for plan in plans._rearranged(around)]
    assert found
    assert all(paths == [("blocks.0", 1), ("blocks.1", paths[-1][1])] and paths[-1][1] > 1 for paths in found)


def test_a_module_runs_in_chunks_by_its_own_rule_not_by_that_of_its_class() -> None:
    """Of the first block asked the answer is taken for all, until a plan relies on it."""
    subject = SUBJECTS["chain"]()
    plans = planner(subject, lambda path: rule_along(0 if path == "blocks.0" else 2))
    plans._allow_chunks({f"blocks.{i}": (rule_along(0), 4) for i in range(3)})
    assert plans._count(segments("blocks.0")) is not None
    plans._rearrange(0)
    cut = [s for plan in plans._counted for s in plan.segments if s.chunks > 1]
    assert {s.path for s in cut} > {"blocks.0"}
    assert all(s.axis == (0 if s.path == "blocks.0" else 2) for s in cut)


@pytest.mark.parametrize(("other", "rule"), [("blocks.3", None), ("blocks.5", rule_along(2))])
def test_a_search_ends_where_one_block_answers_otherwise(other: str, rule: ChunkRule | None) -> None:
    """The solver takes blocks for alike no longer once their answers differ: each plan it makes follows them."""
    subject = SUBJECTS["chain"]()
    asked: list[str] = []
    ticks = itertools.count()

    def chunking(path: str) -> ChunkRule | Refused:
        asked.append(path)
        return rule_along(0) if path != other else rule or Refused(reason="no")

    def late() -> bool:
        assert next(ticks) < 50_000, "the search does not end"
        return False

    plans = planner(subject, chunking)
    plans._probes = replace(plans._probes, late=late)
    plans.least(start(subject).peak_bytes)
    assert other in asked
    assert len(asked) == len(set(asked))
    cut = [segment for plan in plans._counted for segment in plan.segments if segment.chunks > 1]
    assert {segment.axis for segment in cut if segment.path == other} <= ({rule.axis} if rule else set())
    assert {segment.axis for segment in cut if segment.path != other} == {0}


def test_level_4_keeps_no_single_call_in_chunks() -> None:
    """A number counts the calls of one run, and there is a run for every chunk."""
    subject = Subject(nn.Sequential(Chain(blocks=2)), torch.randn(4, 16, 24, 24))
    less = _Less(subject.trace, planner(subject)._probes)

    def kept(segment: SegmentPlan) -> list[tuple[str, ...]]:
        plans = less._keeping(Plan(level=3, segments=(segment,)), segment, subject.model)
        return [plan.segments[0].keep for plan in plans]

    assert kept(SegmentPlan(path="0")) == [(f"{CONV}#1",), (CONV,)]
    assert kept(SegmentPlan(path="0", chunks=2)) == [(CONV,)]


def test_levels_dry_run_nothing_that_raises_the_peak_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """And find the plan that they find without the cost model."""
    subject = SUBJECTS["chain"]()
    tree = ModuleTree(subject.trace)

    def climb() -> tuple[Candidate, set[Plan]]:
        counted: dict[Plan, int] = {}

        def count(plan: Plan) -> Any:
            found = subject.count(plan)
            counted[plan] = found.allocated_peak_bytes
            return found

        probes = Probes(count=count, chunking=lambda path: Refused(reason="no"), report=lambda text: None)
        best = start(subject).candidate
        for strategy in STRATEGIES:
            best = strategy.improve(best, tree, SearchOptions(level=4), probes).best
        return best, set(counted)

    best, counted = climb()
    monkeypatch.setattr(CostModels, "raises_peak", lambda *_: False)
    same, more = climb()
    assert best.plan == same.plan
    assert counted < more


def test_level_4_keeps_costly_outputs_where_the_peak_has_room_for_them() -> None:
    subject = SUBJECTS["chain"]()

    def count(plan: Plan) -> Any:  # were a segment to go, it would not run
        whole = len(plan.segments) == 6
        return subject.count(plan) if whole else Crashed(reason="out of memory", output_tail="")

    probes = Probes(count=count, chunking=lambda path: Refused(reason="no"), report=lambda text: None)
    plan = Plan(level=3, segments=tuple(SegmentPlan(path=f"blocks.{i}") for i in range(6)))
    begun = Candidate(plan=plan, counted=subject.count(plan))
    found = GreedyUnwrap().improve(begun, ModuleTree(subject.trace), SearchOptions(level=4), probes).best
    assert found.peak_bytes <= begun.peak_bytes
    assert subject.model.predict(found.plan).step_s < subject.model.predict(begun.plan).step_s
    # The peak stands in the backward of the last block, where its own convolution's output is there anyhow.
    assert [segment.keep for segment in found.plan.segments] == [()] * 5 + [(CONV,)]

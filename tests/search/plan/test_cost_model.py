"""The cost model against dry runs: the same step, by arithmetic and by autograd."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.records import ChunkRule, CompressorName, Plan, Refused, SegmentPlan, StepSettings
from memopt_cli.runtime.chunk_rows import rows_untried
from memopt_cli.search.plan.block_tree import Block, block_tree
from memopt_cli.search.plan.cost_model import (
    KEEP_OP_S,
    MODULE_S,
    NORM_S,
    SEGMENT_OP_S,
    SEGMENT_S,
    CostModel,
    NormOperator,
    Passes,
    Recomputation,
    chunk_counts,
    statistics_passes,
)
from memopt_cli.search.plan.keeping import candidate_sets, keep_names
from memopt_cli.search.plan.segment_schedules import Context, PlanPermissions
from memopt_cli.search.plan.solver import Solver
from memopt_cli.text.paths import is_within
from memopt_cli.trace import FakeStep, record, resident_bytes
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep
from tests.rows import quick
from tests.search.plan.subjects import SUBJECTS, Subject, carriers, carrying, drawn, segments
from tests.zoo.models import GIVEN, Parts

CONV = "aten::convolution"


@pytest.fixture(scope="module", params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


@pytest.mark.slow
def test_the_original_is_replayed_exactly(subject: Subject) -> None:
    assert subject.model.predict(Plan()).allocated_peak_bytes == subject.trace.allocated_peak_bytes
    assert subject.error(Plan()) == 0.0


@pytest.mark.slow
def test_random_plans_are_close_to_their_dry_runs(subject: Subject) -> None:
    chance = random.Random(1)
    errors = []
    for _ in range(12):
        chosen = chance.sample(subject.usable, chance.randint(1, min(5, len(subject.usable))))
        errors.append(abs(subject.error(segments(*sorted(chosen, key=subject.usable.index)))))
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.10


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_are_close_to_their_dry_run(chunks: int) -> None:
    subject = SUBJECTS["chain"]()
    assert abs(subject.error(segments("blocks.2", "blocks.4", chunks=chunks))) <= 0.05


def wide() -> Subject:
    layers = (nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1), nn.Sigmoid())
    return Subject(nn.Sequential(nn.Tanh(), nn.Sequential(*layers), nn.ReLU()), torch.randn(4, 8, 16, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        segments("1.1"),  # its input is held until its backward ends, although nothing within saves it
        segments("1", "1.1"),  # the recomputation around gives the input away
        segments("1.1", chunks=2),
        segments("1.2", chunks=2),  # the pieces of the input's gradient are joined when the input is gone
        segments("2"),  # its output is the model's, and what is made again is not
        Plan(segments=(SegmentPlan(path="1", keep=(CONV,)),)),
        Plan(segments=(SegmentPlan(path="1.2", keep=(CONV,)),)),  # no recomputation comes to what it keeps
    ],
    ids=lambda plan: " and ".join(f"{s.path}{s.chunks}{s.keep}" for s in plan.segments),
)
def test_how_long_a_segment_holds_what_it_holds(plan: Plan) -> None:
    assert abs(wide().error(plan)) <= 0.001


class Widening(nn.Module):
    """Ends in what a recomputation leaves out, and takes most there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1  # type: ignore[no-any-return]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


@pytest.mark.slow
@pytest.mark.parametrize("paths", [("1.2",), ("1",), ("1", "1.0", "1.1", "1.2"), ("1.2", "1.2.inner")])
def test_a_first_run_holds_what_it_saves_to_its_end(paths: tuple[str, ...]) -> None:
    """The inputs of the segments within, too: the peak is where the last segment ends in forward."""
    blocks = nn.Sequential(*(Widening(width) for width in (64, 64, 512)))
    subject = Subject(nn.Sequential(nn.Linear(8, 64), blocks, Mean()), torch.randn(512, 8))
    assert abs(subject.error(segments(*paths))) <= 0.001


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 8])
def test_every_chunk_adds_a_gradient_of_the_weights(chunks: int) -> None:
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)]
    subject = Subject(nn.Sequential(*layers), torch.randn(64, 256))
    original = subject.dry_run(Plan())
    for path in ("0", "2.2"):
        assert subject.dry_run(segments(path, chunks=chunks)) > 0.9 * original  # the weights are most of the step
        assert abs(subject.error(segments(path, chunks=chunks))) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_of_a_recurrent_layer_in_chunks_not_all_workspace_is_divided(chunks: int) -> None:
    """Its kernel lays the weights out anew in every chunk."""
    model = nn.LSTM(57, 128)
    full, small = (
        TrainingStep(model=model, args=(torch.randn(24, batch, 57),), kwargs={}, settings=StepSettings())
        for batch in (16, 8)
    )
    workspaces = taken(full).pair_with(taken(small))
    fake = FakeStep(full)
    trace = fake.record(16, workspaces)
    assert any(0 < op.fixed_workspace_bytes < op.workspace_bytes for op in trace.ops)
    plan = Plan(segments=(SegmentPlan(path="", chunks=chunks, axis=0, seq_inputs=1, seq_outputs=1),))
    apply_plan(fake.step.model, plan)
    wanted = fake.count(workspaces).allocated_peak_bytes
    assert CostModel(trace).predict(plan).allocated_peak_bytes == pytest.approx(wanted, rel=0.1)


def taken(step: TrainingStep) -> Workspaces:
    """What the step's kernels take for themselves."""
    for _ in range(2):  # the first run fills caches
        step.model.zero_grad(set_to_none=True)
        found = measure_allocated(lambda _: step.backward(step.forward()), "cpu", resident_bytes(step)).workspaces
    return found


@functools.cache
def carried() -> Subject:
    return carriers()


@pytest.mark.slow
@pytest.mark.parametrize("recompute_states", [False, True])
@pytest.mark.parametrize("chunks", quick([2, 4, 10], [2, 10]))
def test_states_between_chunks_are_seen(chunks: int, recompute_states: bool) -> None:
    subject = carried()
    assert {m.state_bytes for m in subject.trace.modules if m.class_name == "Carrying"} == {4 * 256 * 4}
    assert abs(subject.error(carrying(chunks, recompute_states))) <= 0.12


def test_recomputed_states_are_dearer_and_smaller() -> None:
    model = carried().model
    held, recomputed = (model.predict(carrying(10, recompute_states)) for recompute_states in (False, True))
    assert recomputed.allocated_peak_bytes < held.allocated_peak_bytes
    assert recomputed.step_s > held.step_s


@pytest.mark.parametrize(
    ("length", "factor", "counts"),
    [(10, 2, [2, 4, 5, 10]), (8, 3, [3, 8]), (3, 2, [2, 3]), (1, 2, []), (16, 4, [4, 16]), (10, 1, [2, 3, 4, 5, 10]),
     (4096, 4, [4, 16, 64, 256])],
)  # fmt: skip
def test_numbers_of_chunks(length: int, factor: int, counts: list[int]) -> None:
    assert list(chunk_counts(length, factor)) == counts


@pytest.mark.slow
def test_nested_segments_are_close_to_their_dry_run() -> None:
    subject = SUBJECTS["resnet"]()
    inner = [p for p in subject.usable if p.startswith("stages.0.")]
    assert abs(subject.error(segments("stages.0", *inner[:4]))) <= 0.05


def keeping(subject: Subject, root: Block, chance: random.Random) -> Plan:
    """Some segments, none in another, each keeping some costly outputs."""
    blocks = {block.path: block for block in root}
    worthy = {
        p: candidate_sets([c for c in blocks[p].costly if c.op < blocks[p].recomputation.stop]) for p in subject.usable
    }
    able = [path for path, sets in worthy.items() if sets]
    chosen = chance.sample(able, min(len(able), chance.randint(1, 5)))
    outermost = [p for p in able if p in chosen and not any(p != o and is_within(p, o) for o in chosen)]
    names = {p: keep_names(blocks[p].costly, chance.choice(worthy[p]), []) for p in outermost}
    return Plan(segments=tuple(SegmentPlan(path=p, keep=keep) for p, keep in names.items()))


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(["chain", "resnet", "gpt"], ["chain", "gpt"]))
def test_what_segments_keep_is_close_to_the_dry_run(name: str) -> None:
    subject, chance = SUBJECTS[name](), random.Random(2)
    root = block_tree(subject.model)
    errors = [abs(subject.error(keeping(subject, root, chance))) for _ in range(10)]
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.05


@pytest.mark.slow
def test_what_is_kept_takes_no_time_again() -> None:
    subject = SUBJECTS["chain"]()
    ops = tuple(replace(op, seconds=1.0 if op.flops else 0.0) for op in subject.trace.ops)
    model = CostModel(replace(subject.trace, ops=ops))
    plain, kept = segments("blocks.2"), Plan(segments=(SegmentPlan(path="blocks.2", keep=(CONV,)),))
    assert model.predict(plain).step_s == pytest.approx(model.step_s + 1, abs=0.01)
    assert model.predict(kept).step_s == pytest.approx(model.step_s, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("keep", "per_op_s"), [((), SEGMENT_OP_S), ((CONV,), SEGMENT_OP_S + 2 * KEEP_OP_S)])
def test_a_segment_of_operators_that_take_no_time_takes_some(
    keep: tuple[str, ...], per_op_s: float, scale: float
) -> None:
    subject = SUBJECTS["chain"]()
    ops = tuple(replace(op, seconds=1e-12) for op in subject.trace.ops)
    model = CostModel(replace(subject.trace, ops=ops, segment_overhead=scale))
    (call,) = (call for call in subject.trace.calls if call.path == "blocks.2")
    added_s = model.predict(Plan(segments=(SegmentPlan(path="blocks.2", keep=keep),))).step_s - model.step_s
    recomputation = model.recomputation(call)
    watched_s = SEGMENT_S + MODULE_S * recomputation.modules + per_op_s * recomputation.ops
    assert added_s == pytest.approx(scale * watched_s, rel=0.01)


@pytest.mark.slow
def test_one_slow_run_of_an_operator_makes_no_block_dearer_than_those_that_are_alike() -> None:
    subject = SUBJECTS["chain"]()
    ops = tuple(replace(op, seconds=9.0 if op.module.startswith("blocks.1") else 1.0) for op in subject.trace.ops)
    model = CostModel(replace(subject.trace, ops=ops))
    first, second = (model.predict(segments(f"blocks.{n}")).step_s for n in (1, 2))
    assert first == second
    assert model.step_s == len(ops)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    "rule", [None, ChunkRule(axis=0, seq_inputs=1, seq_outputs=1, batch_statistics=True)], ids=["whole", "statistics"]
)
def test_the_search_and_the_replay_price_a_segment_alike(rule: ChunkRule | None, scale: float) -> None:
    trace = replace(SUBJECTS["chain"]().trace, segment_overhead=scale)
    model = CostModel(trace)
    chunks = {"blocks.2": (rule, 4)} if rule else {}
    allowed = PlanPermissions(targets=lambda path: path == "blocks.2", chunks=chunks)
    (block,) = (b for b in block_tree(model) if b.path == "blocks.2")
    schedules = Solver(block, allowed)._segment_schedules(block, Context())
    priced = {segment: schedule.added_s for schedule in schedules for segment in schedule.segments()}
    assert any(segment.batch_statistics for segment in priced) is bool(rule)
    for segment, added_s in priced.items():
        predicted = model.predict(Plan(segments=(segment,)))
        assert predicted.step_s - model.step_s == pytest.approx(added_s)


class Between(Parts, layer=lambda: nn.Linear(64, 64)):
    """Runs operators of its own around its one module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer.weight.sum() * x.tanh().sin()).tanh().sin()


def test_what_a_model_runs_between_its_modules_is_no_segment_where_it_is_one_itself() -> None:
    model = Subject(Between(), torch.randn(512, 64)).model
    solver = Solver(
        block_tree(model), PlanPermissions(chunks={"": (ChunkRule(axis=0, seq_inputs=1, seq_outputs=1), 512)})
    )
    found = [solver.fastest(model.peak_bytes * share // 20) for share in range(20, 8, -1)]
    schedules = [schedule for schedule in found if schedule is not None]
    assert any(segment.path == "" for schedule in schedules for segment in schedule.segments())
    for schedule in schedules:
        predicted = model.predict(Plan(segments=tuple({s.path: s for s in schedule.segments()}.values())))
        assert predicted.step_s - model.step_s == pytest.approx(schedule.added_s)


def test_every_norm_costs_a_pass_over_what_precedes_it() -> None:
    """In forward and in recomputation, but in forward the next pass is handed what the norm is given."""
    relu = 2  # convolution, norm, relu, convolution, norm
    elapsed = [0.0, 50.0, 60.0, 61.0, 81.0, 91.0]
    both = functools.partial(
        statistics_passes,
        elapsed,
        [NormOperator(1, input_maker=0), NormOperator(4, input_maker=3, input_bytes=8)],
        trained_bytes=8,
    )
    norm_s, saved_s = 4.0, 6.0  # of ten seconds each
    first_s = 2 * 50.0 - 50.0 + norm_s
    second_s = 2 * (50.0 + norm_s + 1.0 + 20.0) - 20.0 + norm_s
    assert both(start=0, stop=5) == Passes(norms=2, ops=2 + 5, seconds=first_s + second_s - 2 * 2 * saved_s)
    assert both(start=relu, stop=5) == Passes(norms=1, ops=3, seconds=2 * 21.0 - 20.0 + norm_s - 2 * saved_s)
    assert both(start=relu, stop=4) == Passes()
    larger = 4 * 21.0 + norm_s - 2 * saved_s  # what the norm is given than what the segment is
    assert both(start=relu, stop=5, trained_bytes=7) == Passes(norms=1, ops=3, seconds=larger)


@pytest.mark.parametrize("norms", [1, 2, 3])
def test_the_runs_that_are_priced_are_those_that_chunks_take(norms: int) -> None:
    """Of chunks in every pass, of operators in them, and of norms among these."""
    layers = nn.Sequential(*(layer for _ in range(norms) for layer in (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))))
    runs: list[nn.Module] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: runs.append(module))
    model, segment = nn.Sequential(layers), SegmentPlan(path="0", chunks=3, batch_statistics=True)
    apply_plan(model, Plan(segments=(segment,)))
    with rows_untried():
        model(torch.randn(3, 2, 4, 4, requires_grad=True))
    ops, segments_run = 2 * norms, runs.count(layers[0])
    norms_met = sum(isinstance(module, nn.BatchNorm2d) for module in runs)
    passes = statistics_passes([0.0] * (ops + 1), [NormOperator(op, op - 1) for op in range(1, ops, 2)], 0, ops, 0)
    recomputation = Recomputation(ops=ops, min_s=1e-3, modules=ops + 1, passes=passes)
    again = len(runs) / ops - 1
    assert recomputation.overhead_s(segment) == pytest.approx(
        (SEGMENT_S + MODULE_S * recomputation.modules) * segments_run
        + SEGMENT_OP_S * len(runs)
        + 3 * again * 1e-3
        + NORM_S * norms_met
    )


def test_passes_cost_nothing_where_no_statistics_are_gathered() -> None:
    segment, recomputation = SegmentPlan(path="", chunks=4), Recomputation(seconds=1.0, ops=9)
    with_norms = replace(recomputation, passes=Passes(norms=2, ops=7, seconds=5.0))
    assert with_norms.overhead_s(segment) == recomputation.overhead_s(segment)


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
    watched_s = SEGMENT_S + 4 * MODULE_S + whole * SEGMENT_OP_S
    assert model.predict(segments("0")).step_s - model.step_s < whole + watched_s - 0.99


@pytest.mark.slow
def test_time_is_what_runs_again(subject: Subject) -> None:
    timed = replace(subject.trace, ops=tuple(replace(op, seconds=1.0) for op in subject.trace.ops))
    model = CostModel(timed)
    assert model.step_s == len(timed.ops)
    path = subject.usable[0]
    calls = [c for c in timed.calls if c.path == path]
    again = model.predict(segments(path)).step_s - model.step_s
    assert 0 < again < sum((c.end - c.start) * (1 + SEGMENT_OP_S) + SEGMENT_S for c in calls) + 0.01


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "resnet", "gpt"])
def test_the_tree_adds_up_to_the_replay(name: str) -> None:
    subject = SUBJECTS[name]()
    root = block_tree(subject.model)
    assert in_tree(root, set())[1] == pytest.approx(subject.trace.allocated_peak_bytes, rel=0.01)
    for path in subject.usable[::3]:
        replayed = subject.model.predict(segments(path)).allocated_peak_bytes
        assert in_tree(root, {path})[1] == pytest.approx(replayed, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_blocks_that_are_alike_have_tensors_of_the_same_sizes(name: str) -> None:
    subject = SUBJECTS[name]()
    sizes: dict[int, set[tuple[int, ...]]] = {}
    for block in block_tree(subject.model):
        own = block.kept_bytes, block.packed_bytes, block.input_bytes, block.output_bytes, block.forward_bytes
        sizes.setdefault(block.signature, set()).add(own)
    assert all(len(found) == 1 for found in sizes.values())


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + x * x)


class Firing(Parts, layers=lambda: nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))):
    """Convolutions of spikes: of what one saves, packing makes a 32nd."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Spike.apply(layer(x))
        return x


def test_packing_takes_as_long_as_it_took_on_the_device() -> None:
    step = TrainingStep(model=Firing(), args=(torch.rand(4, 16, 24, 24),), kwargs={}, settings=StepSettings())
    trace = record(step, 4, contents=True)
    added = []
    for rate in (1e9, 2e9, math.inf):
        model = CostModel(replace(trace, packing_bytes_per_s=rate))
        added.append(model.predict(Plan(packed=True)).step_s - model.step_s)
    slow, fast, at_once = added
    assert slow - at_once == pytest.approx(2 * (fast - at_once))
    assert fast > at_once > 0  # however small they are, tensors take their time


@pytest.mark.parametrize("packed", [False, True])
def test_the_sums_of_a_step_without_segments_are_those_of_the_cost_model(packed: bool) -> None:
    step = TrainingStep(model=Firing(), args=(torch.rand(4, 16, 24, 24),), kwargs={}, settings=StepSettings())
    trace = record(step, 4, contents=True)
    model = CostModel(trace)
    assert model.packable_bytes > 0
    solver = Solver(block_tree(model), PlanPermissions(targets=lambda path: False, packed=packed))
    schedule = solver.fastest(trace.allocated_peak_bytes)
    predicted = model.predict(Plan(packed=packed)).allocated_peak_bytes
    assert schedule.peak_bytes == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_what_no_recomputation_comes_to_is_not_kept() -> None:
    """The last operator of ``3.branch`` saves its input alone, and the segment's output is soon nobody's."""
    assert abs(drawn(1).error(Plan(segments=(SegmentPlan(path="3.branch", keep=("aten::addmm",)),)))) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3])
def test_the_gradients_of_a_products_weights_are_added_when_its_node_has_run(chunks: int) -> None:
    """Of batch 4: three chunks are uneven, and the longest comes last in backward."""
    wide = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    subject = Subject(nn.Sequential(nn.Linear(16, 16), wide, nn.BatchNorm1d(16)), torch.randn(4, 16, 16))
    assert abs(subject.error(segments("1", chunks=chunks))) <= 0.02


class Neuron(Parts, v=None):
    """Its membrane stays on it from one time step to the next."""

    def forward(self, x: Tensor) -> Tensor:
        v = x if self.v is None else 0.5 * self.v.detach() + x
        self.v = v
        return (4 * v).sigmoid() * v.tanh()


class OverSteps(Parts, neuron=Neuron):
    """One neuron, every time step."""

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.v = None
        return torch.stack([self.neuron(step) for step in x])


@pytest.mark.slow
def test_what_a_call_finds_of_the_call_before_is_held_till_its_backward() -> None:
    layers = nn.Sequential(nn.Linear(32, 32), OverSteps(), nn.Linear(32, 32), OverSteps(), nn.Linear(32, 32))
    subject = Subject(layers, torch.randn(8, 64, 32))
    for paths in (["1.neuron"], ["3.neuron"], ["1.neuron", "3.neuron"], ["1", "3.neuron"]):
        assert abs(subject.error(segments(*paths))) <= 0.01, paths


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_recurrent_layer_in_chunks_of_time(chunks: int) -> None:
    """A part of its workspace is there for every chunk."""
    lstm = nn.LSTM(16, 64)

    class Recurrent(Parts, lstm=lambda: lstm):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.lstm(x)[0]
            return y.tanh()

    subject = Subject(Recurrent(), torch.randn(12, 32, 16))
    plan = Plan(segments=(SegmentPlan(path="lstm", chunks=chunks, axis=0),))
    assert abs(subject.error(plan)) <= 0.02


def _convolutions(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(
        *(m for i, o in pairs for m in (nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()))
    )


class Residual(Parts, inner=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return (x + self.inner(x)).relu()


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize(
    "block",
    [_convolutions(8, 8, 8), _convolutions(8, 8, 8, 8), _convolutions(8, 32, 8), Residual(_convolutions(8, 8, 8))],
    ids=["two norms", "three norms", "wide between", "residual"],
)
def test_every_pass_for_batch_statistics_saves_what_it_alone_goes_back_through(block: nn.Module, chunks: int) -> None:
    """And what goes back from one to the next is there beside the gradient of an input that a later one reads."""
    subject = Subject(nn.Sequential(nn.Conv2d(3, 8, 3), block, nn.Conv2d(8, 4, 1)), torch.randn(12, 3, 24, 24))
    plan = Plan(segments=(SegmentPlan(path="1", chunks=chunks, batch_statistics=True),))
    assert abs(subject.error(plan)) <= 0.04


@pytest.mark.slow
def test_the_pass_for_batch_statistics_in_backward() -> None:
    """It has three tensors of a chunk beside the gradient of the whole, and the longest chunk is a half here."""
    layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8))
    subject = Subject(layers, torch.randn(4, 8, 12, 12))
    plan = Plan(segments=(SegmentPlan(path="2", chunks=3, batch_statistics=True),))
    assert abs(subject.error(plan)) <= 0.02


class Dense(nn.Module):
    """Every layer gets what all before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8 + 4 * i, 4, 3, padding=1), nn.Tanh()) for i in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_concatenations_by_their_parts(packed: bool) -> None:
    subject = Subject(nn.Sequential(nn.Conv2d(3, 8, 1), Dense()), torch.randn(4, 3, 12, 12))
    segments = tuple(SegmentPlan(path=f"1.layers.{i}", compressor="parts") for i in range(8))
    plan = Plan(packed=True) if packed else Plan(segments=segments)
    assert subject.count(plan).allocated_peak_bytes < 0.75 * subject.count(Plan()).allocated_peak_bytes
    assert abs(subject.error(plan)) <= 0.02


@pytest.mark.slow
def test_the_search_stores_concatenations_by_their_parts() -> None:
    subject = Subject(nn.Sequential(nn.Conv2d(3, 8, 1), Dense()), torch.randn(4, 3, 12, 12))
    least = subject.planner().least(1)
    assert {segment.compressor for segment in least.plan.segments} & {"parts"} or least.plan.packed
    raw = Plan(segments=tuple(replace(segment, compressor="null") for segment in least.plan.segments))
    assert least.peak_bytes < 0.8 * subject.count(raw).allocated_peak_bytes


class Joining(nn.Module):
    """A U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolved(inputs, outputs) for inputs, outputs in ((3, 32), (32, 64), (64, 64)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(64, outputs, 2, stride=2) for outputs in (64, 32))
        self.join = nn.ModuleList((_convolved(128, 64), _convolved(64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        left = []
        for index, down in enumerate(self.down):
            x = down(x if not index else nn.functional.max_pool2d(x, 2))
            left.append(x)
        left.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([left.pop(), up(x)], dim=1))
        return x


def _convolved(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_concatenation_is_whole_where_nothing_stores_its_parts(packed: bool) -> None:
    """What autograd saves on its own, without packing, is none that a segment could share."""
    subject = Subject(nn.Sequential(Joining(), nn.Conv2d(32, 2, 1)), torch.randn(4, 3, 32, 32))
    join = SegmentPlan(path="0.join.0", compressor="parts")
    raw, parts = (Plan(segments=(s,), packed=packed) for s in (replace(join, compressor="null"), join))
    assert abs(subject.error(parts)) <= 0.01
    assert (subject.dry_run(parts) < subject.dry_run(raw)) == packed


@pytest.mark.slow
def test_what_is_packed_is_whole_again_where_backward_uses_it_in_the_sums_too() -> None:
    """They found plans to fit that did not, by as much, and passed by those that keep a concatenation as it is."""
    subject = Subject(nn.Sequential(Joining(), nn.Conv2d(32, 2, 1)), torch.randn(4, 3, 32, 32))
    solver = Solver(block_tree(subject.model), PlanPermissions(packed=True))
    for share in (0.82, 0.84, 0.85, 0.88, 0.9, 0.92, 0.95, 0.98):
        schedule = solver.fastest(int(share * subject.original.allocated_peak_bytes))
        plan = Plan(segments=tuple(schedule.segments()), packed=True)
        assert subject.model.predict(plan).allocated_peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.01)


class Twice(Parts, first=lambda: _convolved(3, 8), both=lambda: nn.Conv2d(8, 8, 3, padding=1)):
    """A convolution that is given a part of its second input before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.both(torch.cat([x, self.both(x).tanh()]))


@pytest.mark.slow
def test_copies_of_parts_are_held_until_backward_is_done() -> None:
    subject = Subject(Twice(), torch.randn(8, 3, 16, 16))
    assert abs(subject.error(Plan(segments=(SegmentPlan(path="both", compressor="parts"),)))) <= 0.02


_STORED: tuple[CompressorName, ...] = ("null", "parts")


@pytest.mark.slow
def test_what_a_segment_was_given_is_gone_before_gradients_are_added_up() -> None:
    subject = Subject(nn.Sequential(nn.Conv2d(3, 8, 1), Dense()), torch.randn(4, 3, 12, 12))
    for compressor in _STORED:
        plan = Plan(segments=tuple(SegmentPlan(path=f"1.layers.{i}", compressor=compressor) for i in range(8)))
        assert abs(subject.error(plan)) <= 0.01


@pytest.mark.parametrize("axis", [0, 1])
def test_chunks_behind_an_axis_that_is_not_cut_are_not_packed(axis: int) -> None:
    """They have gaps, and a compressor stores them as they are: predicted as packed they looked far too small."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(6)]
    subject = Subject(nn.Sequential(*blocks), torch.randn(64, 64, 64))
    paths, rule = [str(index) for index in range(1, 6)], ChunkRule(axis=axis)
    spikes = {path: {"compressor": "bit", "packed_input_bytes": 2**15} for path in paths}
    modules = (replace(module, **spikes.get(module.path, {})) for module in subject.trace.modules)
    subject.trace = replace(subject.trace, modules=tuple(modules))
    subject.model = CostModel(subject.trace)
    packed = [rule.applied(SegmentPlan(path=path, compressor="bit"), 4) for path in paths]
    assert abs(subject.error(Plan(segments=tuple(packed)))) <= 0.05
    planner = subject.planner(lambda path: rule if path else Refused(reason="no"), level=3)
    planner.least(3)
    chunked = [s for found in planner.dry_runs.up_to(3) for s in found.plan.segments if s.chunks > 1]
    assert {segment.compressor for segment in chunked if segment.path in paths} == ({"bit"} if axis == 0 else {"null"})


class CallsItself(Parts, layer=lambda: nn.Linear(8, 8)):
    """Its outer call begins with the inner one, before any operator of its own."""

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self(x, times - 1) if times > 1 else x
        return self.layer(x).sin()


def test_running_a_call_again_is_priced_apart_from_one_that_begins_with_it() -> None:
    step = TrainingStep(
        model=nn.Sequential(CallsItself()), args=(torch.randn(4, 8),), kwargs={}, settings=StepSettings()
    )
    trace = record(step, 4, contents=False)
    outer, inner = (call for call in trace.calls if call.path == "0")
    assert outer.start == inner.start
    model = CostModel(trace)
    assert [model.recomputation(call).ops for call in (outer, inner)] == [len(outer.forward), len(inner.forward)]

"""The record of a step: what it says of operators, storages and modules is what the step did."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.loading.input_spec import make_inputs
from memopt_cli.measure import replies
from memopt_cli.measure.jobs import RecordJob
from memopt_cli.records import (
    InputSpec,
    Plan,
    SegmentPlan,
    StepSettings,
    StepTrace,
    StorageTrace,
    to_data,
)
from memopt_cli.search.plan.block_tree import block_tree
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.trace import (
    Compressors,
    FakeStep,
    count_step,
    fake_mode,
    match_compressors,
    move_fake_model,
    record,
    time_operators,
    with_contents,
    with_seconds,
)
from memopt_cli.trace.clock import OperatorTime
from memopt_cli.trace.log import StorageLog, active, module_stack, run_step
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep
from tests.rows import quick
from tests.zoo.models import Parts

FLOAT = 4
SMALL = {
    "spiking_vgg": {"T": 3, "B": 2},
    "lif_rnn": {"T": 5, "B": 4},
    "resnet": {"B": 2},
    "gpt": {"B": 2, "S": 16},
    "char_rnn": {"T": 4, "B": 3},
}


@pytest.mark.parametrize("optimizer", ["none", "sgd", "adamw"])
def test_a_step_that_accumulates_is_one_after_another(optimizer: str) -> None:
    """It is compared with a step that finds the gradients that an earlier step has left."""
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.Sigmoid())
    plain = step_of(net, torch.randn(4, 32), optimizer=optimizer)
    count_step(plain)  # makes the optimizer's state
    accumulating = replace(plain, settings=replace(plain.settings, micro_batches=2))
    counted = count_step(accumulating)
    assert all(p.grad is None for p in net.parameters())
    plain.backward(plain.forward())
    with module_stack(net) as running:
        log = StorageLog(running, None)
        with active(log, plain):
            run_step(plain, log)
    assert counted.tensor_peak_bytes == log.peaks.tensor_bytes
    peak_is_in_backward = optimizer != "adamw"
    assert (log.peaks.tensor_bytes > count_step(plain).tensor_peak_bytes) == peak_is_in_backward
    assert FakeStep(accumulating).count().tensor_peak_bytes == counted.tensor_peak_bytes
    assert counted.breakdown.gradients_bytes == sum(p.nbytes for p in net.parameters())


def step_of(
    model: nn.Module, *args: Any, optimizer: str = "none", loss: Callable[[Any], Tensor] | None = None
) -> TrainingStep:
    settings = StepSettings(optimizer=optimizer)
    make = optimizer_maker(parse_optimizer(optimizer))
    step = TrainingStep(model=model.train(), args=args, kwargs={}, settings=settings, loss=loss)
    return replace(step, optimizer=make(model), make_optimizer=make)


def sample_step(name: str) -> TrainingStep:
    module = importlib.import_module(f"sample_models.{name}")
    tensors = []
    for entry in module.INPUTS["inputs"]:
        prefix = f"{entry['name']}:" if "name" in entry else ""
        tensors.append(parse_tensor(f"{prefix}{entry['shape']}@{entry.get('dtype', 'float32')}={entry['values']}"))
    spec = InputSpec(tensors=tuple(tensors), dims=SMALL[name], source="here")
    args, kwargs = make_inputs(spec, seed=0, device="cpu", dtype=None)
    return TrainingStep(model=module.build().train(), args=args, kwargs=kwargs, settings=StepSettings())


@pytest.fixture(scope="module", params=quick(SMALL, {*SMALL} - {"spiking_vgg"}))
def sample(request: pytest.FixtureRequest) -> tuple[StepTrace, StepTrace]:
    """A sample model's step on tensors without data, and on real ones."""
    step = sample_step(request.param)
    return FakeStep(step).record(2), record(step, 2, contents=False)


def forward_ops(trace: StepTrace) -> int:
    return max(i for i, op in enumerate(trace.ops) if op.phase == "forward") + 1


def live(trace: StepTrace, op: int) -> int:
    return sum(s.nbytes for s in trace.storages if s.born <= op and (s.died is None or s.died > op))


def ops_of(trace: StepTrace, phase: str) -> list[tuple[str, str]]:
    return [(op.name.removeprefix("aten::"), op.module) for op in trace.ops if op.phase == phase and op.makes]


@pytest.mark.slow
def test_tensors_without_data_leave_the_same_record(sample: tuple[StepTrace, StepTrace]) -> None:
    fake, real = sample
    # Of a recurrent layer's workspace, what no chunk shrinks is known of dry runs alone.
    assert replace(fake, storages=tuple(replace(s, fixed_bytes=()) for s in fake.storages)) == real


def test_storages_are_where_operators_put_them(sample: tuple[StepTrace, StepTrace]) -> None:
    trace, _ = sample
    made = [index for op in trace.ops for index in op.makes]
    assert made == [i for i, s in enumerate(trace.storages) if s.born >= 0]
    assert all(trace.storages[i].born == op for op, ran in enumerate(trace.ops) for i in ran.makes)
    for number, op in enumerate(trace.ops):
        for index in (*op.reads, *op.mutates):
            storage = trace.storages[index]
            sums_in_place = op.name == "aten::add" and op.phase == "backward" and index == op.reads[0]
            assert storage.born <= number
            assert storage.died is None or storage.died > number or (sums_in_place and storage.died == number)


def test_what_is_saved_lives_until_backward(sample: tuple[StepTrace, StepTrace]) -> None:
    trace, _ = sample
    end = forward_ops(trace)
    saved = [s for s in trace.storages if s.saved_by]
    assert saved
    assert all(s.died is None or s.died > end for s in saved)
    assert all(op < end for s in saved for op in s.saved_by)
    # What forward lets go of while it runs lives on into backward only because autograd holds it.
    let_go = [s for s in trace.storages if s.freed is not None and s.freed < end]
    assert all(s.saved_by for s in let_go if s.died is None or s.died > end)


def test_forward_lets_go_no_later_than_the_step(sample: tuple[StepTrace, StepTrace]) -> None:
    trace, _ = sample
    end = len(trace.ops)
    assert all(
        (s.freed if s.freed is not None else end) <= (s.died if s.died is not None else end) for s in trace.storages
    )
    assert any(s.freed != s.died for s in trace.storages)


def test_calls_nest_and_hold_their_operators(sample: tuple[StepTrace, StepTrace]) -> None:
    trace, _ = sample
    assert trace.calls[0].path == ""
    assert [call.start for call in trace.calls] == sorted(call.start for call in trace.calls)
    assert_nested([(call.start, call.end) for call in trace.calls])
    assert_nested([(call.backward_start, call.backward_end) for call in trace.calls])
    innermost = {op: call.path for call in trace.calls for op in range(call.start, call.end)}
    assert all(op.module == innermost.get(i, "") for i, op in enumerate(trace.ops) if op.phase == "forward")


def assert_nested(ranges: list[tuple[int, int]]) -> None:
    for i, (start, end) in enumerate(ranges):
        for other_start, other_end in ranges[i + 1 :]:
            apart = other_end <= start or end <= other_start
            assert apart or (start <= other_start and other_end <= end) or (other_start <= start and end <= other_end)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("gpt", "blocks."), ("spiking_vgg", "blocks."), ("resnet", "stages.")])
def test_backward_meets_blocks_in_reverse(name: str, blocks: str) -> None:
    trace = FakeStep(sample_step(name)).record(2)
    calls = [call for call in trace.calls if call.path.startswith(blocks) and call.path.count(".") == 1]
    assert len(calls) >= 4
    for earlier, later in pairwise(calls):
        assert earlier.end <= later.start
        assert later.backward_start < later.backward_end <= earlier.backward_start


@pytest.mark.slow
def test_the_kernels_workspace_is_in_the_allocated_peak() -> None:
    workspaces = Workspaces()
    workspaces.record("aten::native_batch_norm_backward", ((2, 64, 16, 16), (2, 64, 16, 16)), 1 << 20)
    workspaces.record("aten::convolution", ((2, 3, 32, 32), (64, 3, 3, 3)), 1 << 18)
    fake = FakeStep(sample_step("resnet"))
    trace, counted = fake.record(2, workspaces), fake.count(workspaces)
    assert max(live(trace, i) + op.workspace_bytes for i, op in enumerate(trace.ops)) == trace.allocated_peak_bytes
    assert trace.allocated_peak_bytes == counted.allocated_peak_bytes > trace.tensor_peak_bytes
    taking = {op.name for op in trace.ops if op.workspace_bytes}
    assert taking == {"aten::native_batch_norm_backward", "aten::convolution"}


class Chain(Parts, weight=lambda: nn.Parameter(torch.ones(1000))):
    """``sin(exp(w x))``: exp keeps its output, sin its input, which are one storage; the product keeps ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).exp().sin().cos()


def test_a_chain_worked_out_by_hand() -> None:
    trace = record(step_of(Chain(), torch.ones(1000)), 1, contents=False)
    assert [op.name.removeprefix("aten::") for op in trace.ops[:4]] == ["mul", "exp", "sin", "cos"]
    weight, x, product, exponential, sine, cosine = trace.storages[:6]
    assert (weight.kind, weight.born, weight.saved_by) == ("parameters", -1, ())
    assert (x.kind, x.saved_by) == ("inputs", (0,))
    assert (product.saved_by, product.died, product.freed) == ((), 2, 2)
    assert (exponential.saved_by, exponential.freed) == ((1, 2), 3)
    assert (sine.saved_by, sine.freed) == ((3,), 4)
    assert cosine.saved_by == ()
    assert cosine.freed == cosine.died
    assert exponential.died is not None
    assert trace.ops[exponential.died - 1].phase == "backward"
    assert exponential.packed_bytes == exponential.nbytes == 4000


def test_backward_belongs_to_the_modules_it_differentiates() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 5)), nn.Sigmoid())
    trace = record(step_of(model, torch.randn(2, 3)), 2, contents=False)
    assert ops_of(trace, "forward") == [
        ("addmm", "0"),
        ("tanh", "1.0"),
        ("addmm", "1.1"),
        ("sigmoid", "2"),
        ("randn", ""),
    ]
    assert ops_of(trace, "backward") == [
        ("sigmoid_backward", "2"),
        *[("mm", "1.1"), ("mm", "1.1"), ("sum", "1.1"), ("tanh_backward", "1.0")],
        *[("mm", "0"), ("sum", "0")],
    ]


def test_a_module_called_twice_has_two_ranges() -> None:
    class Twice(Parts, layer=lambda: nn.Linear(4, 4)):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    trace = record(step_of(Twice(), torch.randn(2, 4)), 2, contents=False)
    first, second = (call for call in trace.calls if call.path == "layer")
    assert first.end < second.start
    assert second.backward_end < first.backward_start
    assert {op.module for op in trace.ops[second.backward_end : first.backward_start]} == {""}  # tanh
    assert second.inputs == trace.ops[first.end].makes
    assert first.outputs == trace.ops[first.end - 1].makes


def test_a_module_whose_exception_is_caught_has_left() -> None:
    class Early(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError(x.tanh().shape)

    class Tries(Parts, early=Early, layer=lambda: nn.Linear(4, 4)):
        def forward(self, x: Tensor) -> Tensor:
            with suppress(LookupError):
                self.early(x)
            return self.layer(x)

    trace = record(step_of(nn.Sequential(Tries(), nn.Linear(4, 4)), torch.randn(2, 4)), 2, contents=False)
    whole, tries, early, layer, last = trace.calls
    assert [call.path for call in (whole, tries, early, layer, last)] == ["", "0", "0.early", "0.layer", "1"]
    assert (early.start, early.end, layer.end, tries.end) == (whole.start, layer.start, tries.end, last.start)
    assert whole.end == last.end
    assert {op.module for op in trace.ops if op.phase == "backward"} == {"0.layer", "1"}


def test_the_calls_of_a_pass_for_statistics_have_ended() -> None:
    """A norm breaks the pass off by an exception; what is read back says when every call ended."""
    model = nn.Sequential(nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(2))), nn.Conv2d(2, 2, 3))
    apply_plan(model, Plan(segments=(SegmentPlan(path="0", chunks=2, batch_statistics=True),)))
    trace = FakeStep(step_of(model, torch.randn(4, 2, 8, 8))).record(4)
    assert all(call.start <= call.end for call in trace.calls)
    line = json.dumps({"kind": "answer", "answer": to_data(trace)}).encode()
    assert replies.read(line, RecordJob(plan=Plan())) == trace


def test_targets_that_the_loss_holds_are_inputs_with_data_and_without() -> None:
    targets = torch.zeros(64, dtype=torch.long)
    step = step_of(nn.Linear(8, 4), torch.randn(4, 8), loss=lambda y: F.cross_entropy(y, targets[: len(y)]))
    counted, dry_run = count_step(step), FakeStep(step).count()
    assert counted.breakdown.inputs_bytes == step.args[0].nbytes + targets.nbytes
    assert (dry_run.breakdown, dry_run.tensor_peak_bytes) == (counted.breakdown, counted.tensor_peak_bytes)
    assert FakeStep(step).record(4).resident_bytes == dry_run.resident_bytes == counted.resident_bytes


def test_the_loss_is_forward_and_of_no_module() -> None:
    step = step_of(nn.Linear(3, 4), torch.randn(5, 3), loss=lambda y: (y * y).mean())
    trace = record(step, 5, contents=False)
    assert ops_of(trace, "forward") == [("addmm", ""), ("mul", ""), ("mean", ""), ("ones_like", "")]
    (root,) = trace.calls
    assert (root.start, trace.ops[root.end].name) == (0, "aten::mul")
    assert trace.ops[root.backward_start - 1].module == ""
    output = trace.storages[root.outputs[0]]
    assert output.saved_by == (root.end,)


def test_parameters_and_buffers_belong_to_their_owners() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4)))
    trace = record(step_of(model, torch.randn(2, 3)), 2, contents=False)
    owners = [(s.kind, s.module) for s in trace.storages if s.born < 0]
    assert owners[:4] == [("parameters", "0")] * 2 + [("parameters", "1.0")] * 2
    assert owners[4:] == [("buffers", "1.0")] * 3 + [("inputs", "")]
    assert sum(s.kind == "gradients" for s in trace.storages) == 4


class Writing(Parts, norm=lambda: nn.BatchNorm1d(4)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.norm(x)).mul_(2)


def mutated(trace: StepTrace) -> dict[str, list[str]]:
    """Operator -> kinds of the storages that it writes."""
    return {op.name: [trace.storages[i].kind for i in op.mutates] for op in trace.ops if op.mutates}


def test_what_operators_write_running_statistics_included() -> None:
    model = Writing()
    trace = record(step_of(model, torch.randn(5, 4)), 5, contents=False)
    found = mutated(trace)
    assert found["aten::native_batch_norm"] == ["buffers", "buffers"]
    assert found["aten::relu_"] == found["aten::mul_"] == ["activations"]
    step = step_of(model, torch.randn(5, 4))
    model.norm.eval()
    assert "aten::native_batch_norm" not in mutated(record(step, 5, contents=False))


def test_which_operators_draw() -> None:
    class Drawing(Parts, project=lambda: nn.Linear(4, 12)):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.project(x).unflatten(-1, (3, 1, 4)).permute(2, 0, 3, 1, 4)
            return F.dropout(F.scaled_dot_product_attention(query, key, value), 0.5)

    trace = record(step_of(Drawing(), torch.randn(2, 3, 4), loss=lambda y: y.sum()), 2, contents=False)
    assert [op.name for op in trace.ops if op.random] == ["aten::bernoulli_"]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in [op.name for op in trace.ops]


def flops(trace: StepTrace, phase: str) -> int:
    return sum(op.flops for op in trace.ops if op.phase == phase)


def test_flops_of_products_convolutions_attention_and_recurrence() -> None:
    linear = record(step_of(nn.Linear(3, 5), torch.randn(7, 3, requires_grad=True)), 7, contents=False)
    assert (flops(linear, "forward"), flops(linear, "backward")) == (2 * 7 * 3 * 5, 2 * 2 * 7 * 3 * 5)
    conv = record(step_of(nn.Conv2d(2, 3, 3), torch.randn(4, 2, 6, 6)), 4, contents=False)
    assert flops(conv, "forward") == flops(conv, "backward") == 2 * 4 * 3 * 16 * 2 * 9
    lstm = FakeStep(step_of(nn.LSTM(6, 5), torch.randn(8, 3, 6))).record(3)
    assert flops(lstm, "forward") == 2 * 8 * 3 * 4 * 5 * (6 + 5)
    assert flops(lstm, "backward") == 2 * flops(lstm, "forward")


class Spikes(Parts, first=lambda: nn.Linear(40, 40), second=lambda: nn.Linear(40, 40)):
    def forward(self, x: Tensor) -> Tensor:
        spikes = (self.first(x) > 0).float()
        y: Tensor = self.second(spikes + 0 * self.first(x))
        return y.tanh()


def saved_in(trace: StepTrace, path: str) -> StorageTrace:
    """The one storage that a module's operators save, parameters aside."""
    (found,) = (s for s in trace.storages if any(trace.ops[op].module == path for op in s.saved_by) and s.born >= 0)
    return found


def test_contents_of_a_small_step_tell_of_a_large_one() -> None:
    step = step_of(Spikes(), torch.randn(64, 40), optimizer="adamw")
    large = FakeStep(step).record(64)
    assert {s.compressor for s in large.storages} == {"null"}
    small = replace(step, args=(torch.randn(4, 40),), optimizer=None)
    trace, unknown = with_contents(large, record(small, 4, contents=True))
    assert not unknown
    packed = saved_in(trace, "second")
    assert (packed.compressor, packed.nbytes, packed.packed_bytes) == ("bit", 64 * 40 * FLOAT, 64 * 40 * FLOAT // 32)
    assert [s for s in trace.storages if s.compressor != "null"] == [packed]
    assert replace(trace, modules=(), storages=()) == replace(large, modules=(), storages=())


def test_contents_of_another_step_tell_nothing_of_storages() -> None:
    large = FakeStep(step_of(Spikes(), torch.randn(64, 40))).record(64)
    other = record(step_of(nn.Linear(40, 40), torch.randn(4, 40)), 4, contents=True)
    trace, unknown = with_contents(large, other)
    assert trace.storages == large.storages
    assert "runs other operators than the full step" in unknown


def test_of_modules_that_run_other_operators_in_a_dry_run_nothing_is_known() -> None:
    trace = record(step_of(Spikes(), torch.randn(64, 40)), 64, contents=True)
    saved = match_compressors(trace, trace).saved
    ((module, _),) = saved
    for path, left in ((module, {}), ("elsewhere", saved)):
        ops = tuple(replace(op, name="aten::other") if op.module == path else op for op in trace.ops)
        assert match_compressors(trace, replace(trace, ops=ops)).saved == left


def test_times_come_to_their_operators() -> None:
    step = step_of(Spikes(), torch.randn(64, 40), optimizer="sgd")
    step.update()
    fake = FakeStep(step).record(64)
    record(step, 64, contents=False)  # makes the optimizer's state
    times = time_operators(step)
    timed, unknown = with_seconds(fake, times)
    assert not unknown
    assert [op.seconds for op in timed.ops] == [t.seconds for t in times]
    assert all(t.seconds > 0 for t in times)
    seconds = {m.path: m.forward_s for m in timed.modules}
    assert seconds[""] == pytest.approx(sum(op.seconds for op in timed.ops if op.phase == "forward"))
    assert all(seconds[""] >= seconds[path] > 0 for path in seconds)
    assert all(p.grad is None for p in step.model.parameters())
    same, unknown = with_seconds(fake, times[1:])
    assert same == fake
    assert "operators of the timed step differ" in unknown


def test_operators_of_packing_share_their_time_where_the_timed_step_ran_others() -> None:
    trace = FakeStep(step_of(Spikes(), torch.randn(64, 40))).record(64)
    packing = replace(trace.ops[0], name="aten::view", packs=True)
    trace = replace(trace, ops=(packing, *trace.ops, packing))
    own = [OperatorTime(op.name, 2.0) for op in trace.ops if not op.packs]
    timed, unknown = with_seconds(trace, [own[0], OperatorTime("aten::slice", 6.0, packs=True), *own[1:]])
    assert not unknown
    assert [op.seconds for op in timed.ops] == [3.0, *[2.0] * len(own), 3.0]


def test_a_step_under_a_plan_is_recorded_too() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Sigmoid()) for _ in range(3)))
    step = step_of(model, torch.randn(50, 30))
    before = record(step, 50, contents=False)
    apply_plan(model, Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="1"))))
    trace = record(step, 50, contents=False)
    assert trace.tensor_peak_bytes == count_step(step).tensor_peak_bytes < before.tensor_peak_bytes
    assert max(live(trace, op) for op in range(-1, len(trace.ops))) == trace.tensor_peak_bytes
    again = [op for op in trace.ops if op.phase == "backward" and op.name == "aten::tanh"]
    assert [op.module for op in again] == ["1.1", "0.1"]
    assert [c.path for c in trace.calls] == [c.path for c in before.calls]
    assert not any(trace.ops[i].module.startswith(("0.", "1.")) for s in trace.storages for i in s.saved_by)


def test_a_model_without_data_is_placed_with_its_ties() -> None:
    mode = fake_mode()
    with mode:
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 1 << 20), nn.BatchNorm1d(1 << 20)).eval()
        model[1].weight = model[0].weight
        model[1].requires_grad_(False)
        move_fake_model(model, StepSettings(precision="fp64"))
        x = torch.randn(2, 1 << 20, dtype=torch.float64)
    assert model[1].weight is model[0].weight
    assert model.training
    assert [p.requires_grad for p in model[1].parameters()] == [False, False]
    assert model[2].num_batches_tracked.dtype is torch.int64
    trace = FakeStep(step_of(model, x), mode).record(2)
    assert trace.tensor_peak_bytes > 8 << 40  # 8 TiB of weights


class Sliced(Parts, cell=lambda: nn.Linear(32, 32)):
    """Gives a cell one time step after another of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.cell(step) for step in x])


@pytest.mark.parametrize(("x", "compressor"), [(torch.randn(10, 8, 32), "null"), (torch.ones(10, 8, 32), "bit")])
def test_a_slice_packs_as_a_slice(x: Tensor, compressor: str) -> None:
    step = TrainingStep(model=Sliced(), args=(x,), kwargs={}, settings=StepSettings(), loss=None, optimizer=None)
    cell = next(m for m in record(step, batch=8, contents=True).modules if m.path == "cell")
    assert cell.compressor == compressor


class MostlyZero(Parts, blocks=lambda: nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))):
    """Segments are given tensors of which few elements are not zero, and which nobody saves."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for n, block in enumerate(self.blocks):
            total = total + block(F.hardshrink(x.roll(n), 2.5)).square().mean()
        return total


@pytest.mark.slow
def test_a_dry_run_knows_how_sparse_inputs_were() -> None:
    torch.manual_seed(0)
    step = step_of(MostlyZero(), torch.randn(1024, 64))
    trace = record(step, 1024, contents=True)
    blocks = [m for m in trace.modules if m.path.startswith("blocks.") and m.path.count(".") == 1]
    assert {m.compressor for m in blocks} == {"sparse"}
    plan = Plan(segments=tuple(SegmentPlan(path=m.path, compressor="sparse") for m in blocks))
    raw = Plan(segments=tuple(SegmentPlan(path=m.path) for m in blocks))
    tree = {block.path: block for block in block_tree(CostModel(trace))}
    for m in blocks:
        assert tree[m.path].compressor == "sparse"
        assert tree[m.path].packed_input_bytes < 0.05 * m.input_bytes

    def peak(fake: FakeStep | None, plan: Plan, compressors: Compressors | None) -> int:
        model = fake.step.model if fake else step.model
        apply_plan(model, plan)
        counted = fake.count(compressors=compressors) if fake else count_step(step)
        remove_plan(model)
        return counted.tensor_peak_bytes

    fake = FakeStep(step)
    really = peak(None, plan, None)
    assert really < 0.75 * peak(None, raw, None)
    assert peak(fake, plan, None) == peak(None, raw, None)
    assert peak(fake, plan, match_compressors(trace, trace)) == pytest.approx(really, rel=0.05)
    assert CostModel(trace).predict(plan).allocated_peak_bytes == pytest.approx(really, rel=0.05)


class SharesOutputs(nn.Module):
    """Two views of one tensor, another twice, and a mask, all of which are saved until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()
        self.scale, self.other = nn.Parameter(torch.ones(32, 64)), nn.Parameter(torch.ones(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        *values, mask = self.shares(x * self.scale)
        total = sum((value * self.scale).sum() for value in values) + (mask * self.scale[:8]).sum()
        for _ in range(5):
            x = (x * self.other).sin()
        return total + x.sum()


class Shares(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, again = torch.cat((x.tanh(), x.cos()), 1).sigmoid(), x.tanh() * 3
        return *values.chunk(2, 1), again, again, (x[:, :8] > 0.5).float() + 0 * x[:, :8]


def test_a_dry_run_knows_which_output_of_chunks_packs_where_others_share_storages() -> None:
    torch.manual_seed(0)
    step = step_of(SharesOutputs(), torch.randn(16, 32, 64))
    trace = record(step, 16, contents=True)
    plan = Plan(packed=True, segments=(SegmentPlan(path="shares", chunks=4, seq_outputs=5),))
    apply_plan(step.model, plan)
    really = count_step(step).tensor_peak_bytes
    remove_plan(step.model)
    fake = FakeStep(step)
    apply_plan(fake.step.model, plan)
    assert match_compressors(trace, trace).outputs == {("shares", 4): "bit"}
    assert fake.count(compressors=match_compressors(trace, trace)).tensor_peak_bytes == really


def test_bytes_of_outputs_that_share_a_storage_count_once() -> None:
    trace = record(step_of(SharesOutputs(), torch.randn(16, 32, 64)), 16, contents=False)
    (call,) = (call for call in trace.calls if call.path == "shares")
    (block,) = (block for block in block_tree(CostModel(trace)) if block.path == "shares")
    assert len(call.outputs) == 5
    assert block.output_bytes == 16 * (64 + 32 + 8) * 64 * FLOAT


class FiresOnce(Parts, v=None):
    """A spike where the potential that earlier calls have left is high enough."""

    def forward(self, x: Tensor) -> Tensor:
        v = x if self.v is None else 0.9 * self.v + x
        spikes = (v > 0.5).float() + 0 * v
        self.v = v - spikes.detach()
        return spikes


class FiringEachStep(Parts, fires=FiresOnce, scale=lambda: nn.Parameter(torch.ones(32, 64))):
    """Calls it once a time step, and saves what fires outside it."""

    def forward(self, x: Tensor) -> Tensor:
        self.fires.v = None
        return torch.stack([(self.fires(t * self.scale) * self.scale).sum() for t in x]).sum()


def test_a_dry_run_knows_how_what_fires_packs_where_the_potential_is_copied_at_each_call() -> None:
    torch.manual_seed(0)
    step = step_of(FiringEachStep(), torch.randn(10, 32, 64))
    trace = record(step, 10, contents=True)
    plan = Plan(packed=True, segments=(SegmentPlan(path="fires"),))
    fake = FakeStep(step)
    apply_plan(step.model, plan)
    really = count_step(step).tensor_peak_bytes
    remove_plan(step.model)
    apply_plan(fake.step.model, plan)
    assert fake.count(compressors=match_compressors(trace, trace)).tensor_peak_bytes == pytest.approx(really, rel=0.01)

"""Known failures of tools like this one, each by its number: the test of it here, or where else it is."""

from __future__ import annotations

import ast
import copy
import functools
import io
import json
import pickle
import random
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memopt_cli.measure.answers import timed
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.jobs import MeasureJob, Subject
from memopt_cli.measure.worker import Worker
from memopt_cli.records import InputSpec, ModelSource, Plan, StepSettings, TensorSpec
from memopt_cli.runtime import (
    GCContainer,
    SegmentConfig,
    install_segment,
    refusal,
    remove_segment,
    segment_call,
    segment_of,
)
from memopt_cli.runtime.compressor import COMPRESSORS, PackedTensor, SpikeCompressor
from memopt_cli.runtime.packing import PackedSaves
from memopt_cli.trace import record
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.effects import effects
from tests.zoo.models import Before, Parts, mlp

PLAIN = SegmentConfig()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@torch.jit.script
def _charge(x: Tensor, v: Tensor) -> Tensor:
    v = torch.sigmoid(v + (x - v) / 2.0)
    return torch.tanh(v * 3.0) * v


def test_pitfall_02_statistics_are_updated_in_forward_and_not_in_backward() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh())
    install_segment(block, PLAIN)
    output = block(torch.randn(8, 4))
    after_forward = copy.deepcopy(block.state_dict())
    assert block[0].num_batches_tracked == 1
    output.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(after_forward.values(), block.state_dict().values(), strict=True))


@needs_cuda
def test_pitfall_03_synchronized_batch_norm_reduces_alike() -> None:
    """In one process, where the statistics of the group are its own: what is counted is how often they advance."""
    block = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Tanh()).cuda()
    plain = copy.deepcopy(block)
    install_segment(block, PLAIN)
    x = torch.randn(8, 4, device="cuda")
    for net in (plain, block):
        net(x).sum().backward()
    assert block[1].num_batches_tracked == 1
    torch.testing.assert_close(block.state_dict(), plain.state_dict())


@pytest.mark.parametrize("compressor", ["null", "sparse", "bit", "uint8"])
def test_pitfall_05_06_08_dropout_keeps_its_mask(compressor: str) -> None:
    """The gradient must be zero exactly where the output is."""
    block = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    install_segment(block, SegmentConfig(compressor=compressor))
    x = torch.ones(1000, requires_grad=True)
    output = block(x)
    torch.randn(7)  # someone else draws in between
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(output == 0, x.grad == 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("compressor", ["null", "bit"])
def test_pitfall_05_random_numbers_of_python_and_numpy(compressor: str) -> None:
    class Skipping(Parts, inner=mlp):
        def forward(self, x: Tensor) -> Tensor:
            scale = random.choice([0.0, 1.0, 2.0, 3.0]) + np.random.rand()
            return self.inner(x * scale)

    plain = nn.Sequential(*(Skipping() for _ in range(4)))
    optimized = copy.deepcopy(plain)
    for block in optimized:
        install_segment(block, SegmentConfig(compressor=compressor))
    found = []
    for net in (plain, optimized):
        random.seed(0)
        np.random.seed(0)
        net(torch.ones(3, 4)).square().sum().backward()
        found.append(([p.grad for p in net.parameters()], random.random(), np.random.rand()))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1:] == found[1][1:]


@needs_cuda
def test_pitfall_07_capture_of_a_cuda_graph() -> None:
    """Replays of the captured step, backward included, are right, or PyTorch refuses the capture."""
    net = Before(nn.Sequential(mlp(), mlp())).cuda()
    plain = copy.deepcopy(net)
    install_segment(net.block, PLAIN)
    try:
        graphed = torch.cuda.make_graphed_callables(net, (torch.randn(3, 4, device="cuda", requires_grad=True),))
    except RuntimeError as error:
        assert "captur" in str(error)  # noqa: PT017 - either outcome is right
        return
    for _ in range(2):
        given = torch.randn(3, 4, device="cuda")
        for model in (plain, graphed):
            model.zero_grad()
            model(given).square().sum().backward()
        for a, b in zip(plain.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_pitfall_10_routing_that_depends_on_data_and_noise(judge: Any) -> None:
    class Routing(Parts, gate=lambda: nn.Linear(4, 3), experts=lambda: nn.ModuleList([mlp() for _ in range(3)])):
        def forward(self, x: Tensor) -> Tensor:
            chosen = (self.gate(x) + torch.randn(len(x), 3)).argmax(1)
            output = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().flatten()
                output = output.index_add(0, rows, expert(x[rows]))
            return output

    judge(Before(Routing()), {"block": PLAIN}, torch.randn(9, 4), steps=3)
    assert judge.recomputations == 3


def test_pitfall_11_in_place_on_an_output_that_is_a_view(judge: Any) -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = x.sigmoid().chunk(2, dim=1)
            return left, right

    class InPlace(Before):
        def forward(self, x: Tensor) -> Tensor:
            left = super().forward(x)[0].clone()
            left.mul_(3)[:, 0].add_(1)
            return left.exp()

    judge(InPlace(nn.Sequential(mlp(), Viewed())), {"block": PLAIN}, torch.randn(3, 4))
    assert judge.recomputations == 2


def test_pitfall_14_an_input_modified_afterwards() -> None:
    block = mlp()
    install_segment(block, PLAIN)
    x = torch.randn(3, 4)
    output = block(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"^Sequential: an input of shape \(3, 4\) was modified in place"):
        output.sum().backward()


def test_pitfall_14_a_packed_input_may_be_modified(judge: Any) -> None:
    block = mlp()
    plain = copy.deepcopy(block)
    install_segment(block, SegmentConfig(compressor="bit"))
    x = (torch.rand(3, 4) < 0.5).float()
    plain(x.clone()).sum().backward()
    output = block(x)
    x.add_(1)
    output.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), block.parameters(), strict=True))


def test_pitfall_16_a_mutable_argument_does_not_keep_later_layers_alive() -> None:
    class Adding(Parts, inner=mlp):
        def forward(self, context: dict[str, Tensor]) -> Tensor:
            return self.inner(context["x"])

    block = Adding()
    install_segment(block, PLAIN)
    context = {"x": torch.randn(3, 4)}
    output = block(context)
    later = torch.randn(3, 4)
    context["later"] = later
    alive = weakref.ref(later.untyped_storage())
    context.clear()
    del later
    assert alive() is None
    output.sum().backward()
    assert block.inner[0].weight.grad is not None


@pytest.mark.parametrize("compressor", ["null", "bit", "uint8"])
def test_pitfall_18_one_tensor_passed_twice_is_stored_once(compressor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attending(nn.Module):
        def forward(self, q: Tensor, k: Tensor, *, v: Tensor) -> Tensor:
            return (q @ k.t()).softmax(-1) @ v

    stored: list[PackedTensor] = []
    compress = segment_call.store

    def storing(compressor: SpikeCompressor, x: Tensor) -> PackedTensor:
        stored.append(compress(compressor, x))
        return stored[-1]

    monkeypatch.setattr(segment_call, "store", storing)
    block, x = Attending(), (torch.rand(8, 8) < 0.5).float().requires_grad_()
    (expected,) = torch.autograd.grad(block(x, x, v=x).square().sum(), x)
    install_segment(block, SegmentConfig(compressor=compressor))
    (found,) = torch.autograd.grad(block(x, x, v=x).square().sum(), x)
    assert torch.equal(found, expected)
    inputs = [packed for packed in stored if packed.shape == (8, 8)]
    assert len(inputs) == 1


def test_pitfall_18_overlapping_views_are_not_packed_where_that_raises_memory() -> None:
    class Windows(Parts, inner=mlp):
        def forward(self, windows: tuple[Tensor, ...]) -> Tensor:
            return self.inner(torch.stack(windows).sum(0))

    spikes = (torch.rand(240, 4) < 0.5).float()
    windows = tuple(spikes[i : i + 120] for i in range(120))
    step = TrainingStep(model=Windows(), args=(windows,), kwargs={}, settings=StepSettings())
    root = record(step, 240, contents=True).modules[0]
    packed = sum(COMPRESSORS["bit"].compress(window).nbytes for window in windows)
    assert packed > spikes.nbytes
    assert root.compressor == "null"
    assert root.packed_input_bytes == root.input_bytes == spikes.nbytes


def test_pitfall_19_two_tensors_that_had_one_address_in_turn() -> None:
    block = mlp()
    plain = copy.deepcopy(block)
    install_segment(block, SegmentConfig(compressor="bit"))
    gradients = []
    for net in (plain, block):
        torch.manual_seed(0)
        # Each input is freed, and its memory taken by the next one, before backward runs.
        total = sum(net((torch.rand(64, 4) < 0.5).float()).square().sum() for _ in range(5))
        gradients.append(torch.autograd.grad(total, list(net.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_pitfall_19_a_storage_at_the_address_of_one_whose_packed_copy_lives() -> None:
    with ThreadPoolExecutor(1) as fresh:  # a thread's allocator gives at once what it got back
        fresh.submit(_pack_two_at_one_address).result()


def _pack_two_at_one_address() -> None:
    saves = PackedSaves([])
    for _ in range(100):
        first = (torch.rand(64, 64) < 0.5).float()
        address, expected = first.untyped_storage()._cdata, first.clone()
        kept = saves.pack(first)
        saves.pack_waiting()
        del first
        alive = []  # each takes the place of a storage that went, until one takes the first's
        while len(alive) < 100 and address not in [other.untyped_storage()._cdata for other in alive]:
            alive.append(torch.ones(64, 64))
        other = alive[-1]
        if other.untyped_storage()._cdata == address:
            break
    else:
        raise AssertionError("no storage was made where the first had been")
    assert torch.equal(saves.unpack(saves.pack(other)), other)
    assert torch.equal(saves.unpack(kept), expected)


def test_pitfall_20_parameters_are_not_packed() -> None:
    class Taking(Parts, taken=nn.Identity):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return (x @ self.taken(weight)).tanh()

    block, seen = Taking(), list[int]()
    block.taken.register_forward_hook(lambda *called: seen.append(called[-1].untyped_storage()._cdata))
    install_segment(block, SegmentConfig(compressor="bit"))
    weight = nn.Parameter(torch.eye(4))  # zeros and ones: the compressor would take it
    block(torch.ones(3, 4, requires_grad=True), weight).sum().backward()
    assert seen == [weight.untyped_storage()._cdata] * 2
    assert weight.grad is not None


@pytest.mark.parametrize("compressor", ["null", "boolean", "uint8", "bit", "sparse"])
def test_pitfall_21_strides_survive(compressor: str) -> None:
    strides: list[tuple[int, ...]] = []
    block = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Sigmoid())
    block[0].register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    install_segment(block, SegmentConfig(compressor=compressor))
    spikes = (torch.rand(2, 3, 5, 5) < 0.1).float()
    for x in (
        spikes.contiguous(memory_format=torch.channels_last),
        spikes.transpose(2, 3),
        spikes[:1].expand(4, 3, 5, 5),
    ):
        strides.clear()
        block(x).sum().backward()
        assert strides == [x.stride(), x.stride()]


def test_pitfall_23_gradient_hooks_of_a_shared_parameter_fire_once() -> None:
    net = nn.Sequential(mlp(), mlp())
    net[1][0].weight = net[0][0].weight
    calls: list[int] = []
    net[0][0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    for block in net:
        install_segment(block, PLAIN)
    net(torch.randn(3, 4)).sum().backward()
    assert calls == [1]


def test_pitfall_29_scripted_function(judge: Any) -> None:
    """Its last operation is the last to save a tensor: there a recomputation ends, inside the interpreter."""

    class Charging(Parts, inner=mlp):
        def forward(self, x: Tensor) -> Tensor:
            return _charge(self.inner(x), x.sin())

    with torch.jit.optimized_execution(False):  # its own rules of differentiation round otherwise
        judge(Before(Charging()), {"block": PLAIN}, torch.randn(3, 4), steps=4)
    judge.tolerance = 1e-5
    judge(Before(Charging()), {"block": PLAIN}, torch.randn(3, 4), steps=4)
    assert judge.recomputations == 8


def test_pitfall_30_warm_up_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(mlp(), tmp_path / "net.pt")
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 4)),), dims={"B": 8}, source="here")
    source = ModelSource(location=str(tmp_path / "net.pt"))
    worker = Worker(Subject(source=source, spec=spec, settings=StepSettings()))
    calls: list[str] = []
    worker.bench.model.register_forward_pre_hook(lambda *_: calls.append("step"))
    take_time = timed._time_step

    def timing(bench: Bench, step: TrainingStep, **asked: Any) -> Any:
        calls.append("timed")
        return take_time(bench, step, **asked)

    monkeypatch.setattr(timed, "_time_step", timing)
    worker.answer(MeasureJob(plan=Plan(), steps=3))
    assert calls.index("step") < calls.index("timed")


@needs_cuda
def test_pitfall_31_allocated_and_reserved_are_both_reported(tmp_path: Path) -> None:
    torch.save(mlp(), tmp_path / "net.pt")
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 4)),), dims={"B": 8}, source="here")
    source = ModelSource(location=str(tmp_path / "net.pt"))
    worker = Worker(Subject(source=source, spec=spec, settings=StepSettings(device="cuda:0")))
    found = worker.answer(MeasureJob(plan=Plan(), steps=3)).measurement
    assert found.reserved_peak_bytes >= found.allocated_peak_bytes >= found.tensor_peak_bytes > 0


def _fully_sharded(module: nn.Module) -> type:
    """Put a mixin in front of the class of ``module``, as PyTorch's ``fully_shard`` does."""

    class Sharded:
        def unshard(self) -> str:
            return "whole"

    module.__class__ = type(f"FSDP{type(module).__name__}", (Sharded, type(module)), {})
    return Sharded


def test_pitfall_37_removal_leaves_a_mixin_put_on_later() -> None:
    block = mlp()
    install_segment(block, PLAIN)
    sharded = _fully_sharded(block)
    remove_segment(block)
    assert isinstance(block, sharded)
    assert isinstance(block, nn.Sequential)
    assert not isinstance(block, GCContainer)
    assert block.unshard() == "whole"
    assert type(block).__name__ == "FSDPSequential"
    assert block(torch.randn(3, 4)).shape == (3, 4)
    install_segment(block, PLAIN)
    assert isinstance(block, sharded)
    assert isinstance(block, GCContainer)


def test_pitfall_37_removal_leaves_a_mixin_put_on_before() -> None:
    block = mlp()
    sharded = _fully_sharded(block)
    kind = type(block)
    install_segment(block, PLAIN)
    assert block.unshard() == "whole"
    remove_segment(block)
    assert type(block) is kind
    assert isinstance(block, sharded)


@pytest.mark.parametrize("take", [lambda b: b[:1], lambda b: type(b)(*b), lambda b: b[1:]])
def test_pitfall_38_slices_are_plain(take: Callable[[nn.Sequential], nn.Module]) -> None:
    block = mlp()
    install_segment(block, PLAIN)
    part = take(block)
    assert type(part) is nn.Sequential
    assert segment_of(part) is None


def test_pitfall_39_lazy_parametrized_and_own_forward() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    assert "run the model once" in refusal(lazy[0])
    install_segment(lazy, PLAIN)
    lazy(torch.randn(3, 5)).sum().backward()
    assert lazy[0].weight.grad is not None

    parametrized = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())
    install_segment(parametrized, PLAIN)
    parametrized(torch.randn(3, 4)).sum().backward()
    parametrize.remove_parametrizations(parametrized[0], "weight")
    parametrized(torch.randn(3, 4)).sum().backward()
    assert type(parametrized[0]) is nn.Linear
    assert refusal(parametrized[0]) == ""

    block = mlp()
    block.forward = block[0].forward  # type: ignore[method-assign]
    assert "forward is set on the instance" in refusal(block)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["", "transformer.h.0"])
def test_pitfall_41_save_pretrained_names_the_users_class(wrapped: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    net = transformers.GPT2LMHeadModel(config)
    install_segment(net.get_submodule(wrapped), PLAIN)
    net.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert net.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))


def test_pitfall_42_selective_checkpoint_of_the_users_own_inside(judge: Any) -> None:
    """It advances batch statistics twice; within a segment it does so neither less nor more often."""

    class Selective(Parts, inner=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())):
        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

    net = judge(Before(Selective()), {"block": PLAIN}, torch.randn(8, 4), steps=3)
    assert net.block.inner[1].num_batches_tracked == 2 * 3
    assert judge.recomputations == 3


def test_pitfall_43_gradients_do_not_vanish_in_the_proof() -> None:
    """The sum of a softmax, or of normalized values, is constant: as a loss it would prove nothing."""
    net = nn.Sequential(mlp(), nn.Softmax(-1))
    x = torch.randn(3, 4)
    by_sum = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    found = effects(TrainingStep(model=net, args=(x,), kwargs={}, settings=StepSettings()))
    largest = max(g.abs().max() for g in by_sum)
    assert all(found[f"gradient of {name}"].abs().max() > 1e3 * largest for name, _ in net.named_parameters())


def test_pitfall_44_a_module_that_cannot_be_pickled_can_be_a_segment() -> None:
    class Closing(Parts, inner=mlp, surrogate=lambda: lambda x: x.sigmoid()):
        def forward(self, x: Tensor) -> Tensor:
            return self.surrogate(self.inner(x))

    block = Closing()
    install_segment(block, PLAIN)
    block(torch.randn(3, 4)).sum().backward()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save(block, io.BytesIO())
    copy.deepcopy(block)(torch.randn(3, 4)).sum().backward()


# ---------------------------------------------------------------------------------------------- beyond the list


def test_parameters_changed_between_forward_and_backward() -> None:
    """Without a segment PyTorch notices it as well: gradients of another model would be wrong."""
    block = mlp()
    install_segment(block, PLAIN)
    loss = block(torch.randn(3, 4)).sum()
    torch.optim.SGD(block.parameters(), lr=0.1).step()  # no gradient yet: nothing changes
    loss.backward(retain_graph=True)
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"the parameter weight of shape \(6, 4\) was modified in place between"):
        loss.backward()


def test_parameters_of_a_functional_call() -> None:
    block = mlp()
    other = {name: (3 * p.detach() + 1).requires_grad_() for name, p in block.named_parameters()}
    own = dict(block.named_parameters())
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(functional_call(block, other, x).square().sum(), list(other.values()))
    install_segment(block, PLAIN)
    found = torch.autograd.grad(functional_call(block, other, x).square().sum(), list(other.values()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(own[name] is p for name, p in block.named_parameters())


# ---------------------------------------------------------------------------------------------- the list

PITFALLS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("batch-norm statistics updated twice", ("runtime/test_container.py::test_convolution_norm_dropout",)),
    2: ("statistics updated in backward", ()),
    3: ("synchronized batch norm reduced twice", ("runtime/test_distributed.py::ddp_synchronized_norm",)),
    4: ("neuron state advanced twice", ("runtime/test_state.py::test_state_in_an_attribute",)),
    5: ("dropout without saved RNG", ()),
    6: ("a new dropout mask in recomputation", ()),
    7: ("CUDA-graph capture", ()),
    8: ("random operations under pack hooks", ()),
    9: ("autocast differs in recomputation", ("runtime/test_container.py::test_autocast",)),
    10: ("data-dependent routing", ()),
    11: ("in-place operation on a view output", ()),
    12: ("inputs without gradient", ("runtime/test_container.py::test_frozen_parameters",)),
    13: ("tensors inside containers", ("runtime/test_container.py::test_nested_inputs_and_outputs",)),
    14: ("an input modified afterwards", ()),
    15: (
        "uncollectable cycle",
        tuple(f"runtime/test_container.py::test_{what}" for what in ("no_reference_cycle", "memory_stays_flat")),
    ),
    16: ("mutable arguments keep later layers alive", ()),
    17: ("unpacking twice, double backward", ("runtime/test_container.py::test_ways_of_differentiating",)),
    18: ("views of one storage saved twice", ()),
    19: ("a reused address", ()),
    20: ("parameters packed", ()),
    21: ("strides lost", ("runtime/test_compressor.py::test_round_trip",)),
    22: (
        "forward hooks run again",
        ("runtime/test_container.py::test_its_own_hooks_run_once_and_its_children_s_again",),
    ),
    23: ("gradient hooks of a shared parameter fire twice", ()),
    24: (
        "DDP: parameter marked ready twice",
        tuple(f"runtime/test_distributed.py::ddp_{how}" for how in ("default", "static_graph", "looking_for_unused")),
    ),
    25: (
        "FSDP inside a checkpoint",
        tuple(f"runtime/test_distributed.py::fsdp_{how}" for how in ("inside", "before", "after")),
    ),
    26: (
        "compile + DDP + checkpoint",
        ("runtime/test_distributed.py::ddp_compiled", "runtime/test_compile.py::test_the_segment_is_not_dropped"),
    ),
    27: ("compiled autograd saves nothing", ("runtime/test_compile.py::test_compiled_autograd",)),
    28: (
        "a solver exceeds the budget, an evaluator counts twice",
        (
            "search/plan/test_planner.py::test_no_level_is_above_the_one_below",
            "search/plan/test_planner.py::test_every_budget_that_can_be_met_is",
            "measure/test_worker.py::test_the_dry_run_tells_the_tensor_peak_to_the_byte",
        ),
    ),
    29: ("TorchScript inside", ("runtime/test_container.py::test_script_module_inside",)),
    30: ("missing warm-up", ()),
    31: ("allocator cache", ("measure/test_worker.py::test_a_measurement_adds_up",)),
    32: (
        "integers, frozen, tied, root, nested",
        (
            "runtime/test_container.py::test_integer_inputs",
            "runtime/test_container.py::test_frozen_parameters",
            "runtime/test_container.py::test_tied_submodules_and_shared_parameters",
            "runtime/test_container.py::test_the_root_and_a_single_layer_as_segments",
            "runtime/test_container.py::test_segments_within_segments",
        ),
    ),
    33: (
        "the caller's things changed",
        (
            "pipeline/plans/test_optimization.py::test_nothing_changes_for_the_caller",
            "measure/test_worker.py::test_a_job_leaves_the_model_as_it_was",
            "verification/test_effects.py::test_the_caller_keeps_what_it_had",
        ),
    ),
    34: (
        "a dead worker hangs the parent",
        ("test_fault.py::test_its_death_is_an_answer", "test_fault.py::test_fault_in_a_subprocess"),
    ),
    35: (
        "a compressor that rounds",
        (
            "runtime/test_compressor.py::test_one_foreign_value_and_the_tensor_is_kept_raw",
            "runtime/test_compressor.py::test_uint8_foreign_values",
            "runtime/test_user_attributes.py::test_what_a_compressor_of_the_users_own_would_round_is_kept_raw",
        ),
    ),
    36: ("hidden state with a graph", ("runtime/test_state.py::test_hidden_state_with_a_graph_is_detached",)),
    37: ("removal strips another mixin", ("runtime/test_distributed.py::fsdp_removal",)),
    38: ("slices are silently segments", ()),
    39: ("lazy, parametrized, own forward", ()),
    40: (
        "a segment that never fires",
        ("runtime/test_container.py::test_refusals", "measure/test_worker.py::test_a_segment_that_never_runs_is_named"),
    ),
    41: ("save_pretrained writes the wrapped class", ()),
    42: ("selective checkpoint + batch norm", ()),
    43: ("an output sum as loss", ()),
    44: ("a module that cannot be pickled", ()),
}
"""Number -> what it is, and the functions that test it beyond those of this file that have the number in their name."""


@pytest.mark.parametrize("number", PITFALLS, ids=lambda n: f"{n:02} {PITFALLS[n][0]}")
def test_every_pitfall_has_a_test(number: int) -> None:
    here = [name for name in globals() if re.match(r"test_pitfall_\d", name) and f"_{number:02}_" in name]
    elsewhere = PITFALLS[number][1]
    assert here or elsewhere
    for place in elsewhere:
        file, _, function = place.partition("::")
        tree = ast.parse((Path(__file__).parents[1] / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place


def test_the_pitfalls_are_numbered_through() -> None:
    assert list(PITFALLS) == list(range(1, 45))

"""Known failures of checkpointing tools, by their number in the project's table; those about the runtime."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from memopt_cli.runtime import (
    GCContainer,
    SegmentConfig,
    install_segment,
    is_recomputing,
    refusal,
    remove_segment,
    reset_hidden_state,
    segment_of,
)

PLAIN = SegmentConfig()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class After(nn.Module):
    """The segment ``block``, fed with something that requires gradients."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(4, 4), block

    def forward(self, x: Tensor) -> Any:
        return self.block(self.before(x))


def test_pitfall_01_batch_norm_statistics_updated_once() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    install_segment(block, PLAIN)
    x = torch.randn(8, 4)
    expected = 0.1 * block[0](x).mean(0).detach()
    block(x).sum().backward()
    assert block[1].num_batches_tracked == 1
    torch.testing.assert_close(block[1].running_mean, expected)


def test_pitfall_02_statistics_are_updated_in_forward_and_not_in_backward() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh())
    install_segment(block, PLAIN)
    output = block(torch.randn(8, 4))
    after_forward = copy.deepcopy(block.state_dict())
    assert block[0].num_batches_tracked == 1
    output.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(after_forward.values(), block.state_dict().values(), strict=True))


def test_pitfall_04_neuron_state_advances_once() -> None:
    class Neuron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.seen = torch.zeros(4), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.v = 0.5 * self.v + x
            self.seen[0] += 1
            return self.v.sigmoid().sin()

    net = After(Neuron())
    install_segment(net.block, PLAIN)
    x = torch.randn(3, 4)
    net(x).sum().backward()
    torch.testing.assert_close(net.block.v, net.before(x))
    assert net.block.seen == [1]


@pytest.mark.parametrize("codec", ["null", "bit"])
def test_pitfall_05_06_dropout_keeps_its_mask(codec: str) -> None:
    """The gradient must be zero exactly where the output is."""
    block = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    install_segment(block, SegmentConfig(compressor=codec))
    x = torch.ones(1000, requires_grad=True)
    output = block(x)
    torch.randn(7)  # someone else draws in between
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(output == 0, x.grad == 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_pitfall_08_random_numbers_under_pack_hooks() -> None:
    found = []
    for codec in ("null", "sparse", "bit", "uint8"):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
        install_segment(block, SegmentConfig(compressor=codec))
        block(torch.ones(100, requires_grad=True)).sum().backward()
        found.append(torch.rand(3))
    assert all(torch.equal(found[0], other) for other in found)


def test_pitfall_09_autocast_is_the_same_in_recomputation() -> None:
    dtypes: list[torch.dtype] = []
    block = mlp()
    block[0].register_forward_hook(lambda *call: dtypes.append(call[2].dtype))
    install_segment(block, PLAIN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = block(torch.randn(3, 4))
    output.float().sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def test_pitfall_10_routing_that_depends_on_data_and_noise(judge: Any) -> None:
    class Routing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList([mlp() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            chosen = (self.gate(x) + torch.randn(len(x), 3)).argmax(1)
            output = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().flatten()
                output = output.index_add(0, rows, expert(x[rows]))
            return output

    judge(After(Routing()), {"block": PLAIN}, torch.randn(9, 4), steps=3)
    assert judge.recomputations == 3


def test_pitfall_11_in_place_on_an_output_that_is_a_view(judge: Any) -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = x.sigmoid().chunk(2, dim=1)
            return left, right

    class InPlace(After):
        def forward(self, x: Tensor) -> Tensor:
            left = super().forward(x)[0].clone()
            left.mul_(3)[:, 0].add_(1)
            return left.exp()

    judge(InPlace(nn.Sequential(mlp(), Viewed())), {"block": PLAIN}, torch.randn(3, 4))
    assert judge.recomputations == 2


def test_pitfall_12_inputs_without_gradient() -> None:
    block = mlp()
    install_segment(block, PLAIN)
    block(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


@dataclass
class Batch:
    x: Tensor
    extra: dict[str, Any]


def test_pitfall_13_tensors_inside_containers_get_gradients(judge: Any) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, batch: Batch, *, more: tuple[Any, ...]) -> Batch:
            y = self.inner(batch.x * batch.extra["deep"][0]) * more[1]["scale"]
            return Batch(y.exp(), {"half": (y * 0.5, "text")})

    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
    batch = Batch(leaves[0], {"deep": [leaves[1]]})
    net = judge(nn.Sequential(Taking())[0], {"": PLAIN}, batch, more=(1, {"scale": leaves[2]}))
    assert isinstance(net(batch, more=(1, {"scale": leaves[2]})), Batch)
    assert judge.recomputations == 2


def test_pitfall_14_an_input_modified_afterwards() -> None:
    block = mlp()
    install_segment(block, PLAIN)
    x = torch.randn(3, 4)
    output = block(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3, 4\) stored for recomputation was modified in place"):
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


def test_pitfall_15_no_cycle_holds_the_graph() -> None:
    net = After(mlp())
    install_segment(net.block, PLAIN)
    held: list[weakref.ref[Any]] = []
    net.before.register_forward_hook(lambda *call: held.append(weakref.ref(call[2].untyped_storage())))
    output = net(torch.randn(3, 4))
    assert held[0]() is not None
    del output
    assert held[0]() is None  # at once, and without the garbage collector


def test_pitfall_16_a_mutable_argument_does_not_keep_later_layers_alive() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, context: dict[str, Tensor]) -> Tensor:
            output: Tensor = self.inner(context["x"])
            return output

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


def test_pitfall_17_backward_twice_and_grad_of_grad() -> None:
    block = mlp()
    install_segment(block, PLAIN)
    x = torch.randn(3, 4, requires_grad=True)
    loss = block(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)
    assert torch.equal(first, second)
    (third,) = torch.autograd.grad(second.square().sum(), x)
    assert third.abs().sum() > 0


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


def test_pitfall_20_parameters_are_not_packed() -> None:
    class Taking(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            seen.append(weight.untyped_storage()._cdata)
            return (x @ weight).tanh()

    block, seen = Taking(), []
    install_segment(block, SegmentConfig(compressor="bit"))
    weight = nn.Parameter(torch.eye(4))  # zeros and ones: the codec would take it
    block(torch.ones(3, 4, requires_grad=True), weight).sum().backward()
    assert seen == [weight.untyped_storage()._cdata] * 2
    assert weight.grad is not None


@pytest.mark.parametrize("codec", ["null", "boolean", "uint8", "bit", "sparse"])
def test_pitfall_21_strides_survive(codec: str) -> None:
    strides: list[tuple[int, ...]] = []
    block = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Sigmoid())
    block[0].register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    install_segment(block, SegmentConfig(compressor=codec))
    spikes = (torch.rand(2, 3, 5, 5) < 0.1).float()
    for x in (
        spikes.contiguous(memory_format=torch.channels_last),
        spikes.transpose(2, 3),
        spikes[:1].expand(4, 3, 5, 5),
    ):
        strides.clear()
        block(x).sum().backward()
        assert strides == [x.stride(), x.stride()]


def test_pitfall_22_own_hooks_once_children_s_hooks_again() -> None:
    calls: list[tuple[str, bool]] = []
    block = mlp()
    block.register_forward_hook(lambda *_: calls.append(("own", is_recomputing())))
    block[2].register_forward_pre_hook(lambda *_: calls.append(("child", is_recomputing())))
    install_segment(block, PLAIN)
    block(torch.randn(3, 4)).sum().backward()
    assert calls == [("child", False), ("own", False), ("child", True)]


def test_pitfall_23_gradient_hooks_of_a_shared_parameter_fire_once() -> None:
    net = nn.Sequential(mlp(), mlp())
    net[1][0].weight = net[0][0].weight
    calls: list[int] = []
    net[0][0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    for block in net:
        install_segment(block, PLAIN)
    net(torch.randn(3, 4)).sum().backward()
    assert calls == [1]


def test_pitfall_29_script_module() -> None:
    block = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4))), nn.Tanh())
    install_segment(block, PLAIN)
    for _ in range(3):  # the first run is special: TorchScript's executor watches it
        block(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_pitfall_32_integers_frozen_tied_root_nested(judge: Any) -> None:
    net = nn.Sequential(nn.Embedding(9, 4), mlp(), nn.Sequential(mlp(), mlp()))
    net[0].requires_grad_(False)
    net[2][1] = net[1]
    judge(net, {"": PLAIN, "1": PLAIN, "2": PLAIN, "2.0": PLAIN}, torch.randint(0, 9, (3,)))
    assert judge.recomputations >= 2


def test_pitfall_36_hidden_state_with_a_graph() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.mem = self.inner(x)
            return self.mem[0]

    net = Keeping()
    install_segment(net, PLAIN)
    net(torch.randn(3, 4))
    with pytest.raises(RuntimeError):
        copy.deepcopy(net)
    reset_hidden_state(net)
    assert torch.equal(copy.deepcopy(net).mem, net.mem)


def _fully_sharded(module: nn.Module) -> type:
    """Puts a mixin in front of the module's class, as PyTorch's ``fully_shard`` does."""

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
    assert "on the instance" in refusal(block)


def test_pitfall_40_a_module_without_a_forward_is_refused() -> None:
    for holder in (nn.ModuleList([mlp()]), nn.ModuleDict({"a": mlp()}), nn.ParameterList([])):
        with pytest.raises(ValueError, match="has no forward"):
            install_segment(holder, PLAIN)


def test_pitfall_41_the_class_keeps_its_name() -> None:
    block = mlp()
    text = repr(block)
    install_segment(block, PLAIN)
    assert type(block).__name__ == "Sequential"
    assert type(block).__module__ == nn.Sequential.__module__
    assert repr(block) == text


def test_pitfall_44_a_module_that_cannot_be_pickled_can_be_a_segment() -> None:
    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.surrogate = mlp(), lambda x: x.sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.surrogate(self.inner(x))
            return output

    block = Closing()
    install_segment(block, PLAIN)
    block(torch.randn(3, 4)).sum().backward()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save(block, io.BytesIO())
    copy.deepcopy(block)(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("chunks", [1, 2])
def test_torch_compile(chunks: int) -> None:
    """Graphs are captured and differentiated ahead of time; no C++ compiler is needed for that."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()))
    plain = copy.deepcopy(net)
    install_segment(net[1], SegmentConfig(compressor="bit", chunks=chunks))
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(6, 4)
    for model in (plain, compiled):
        model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)

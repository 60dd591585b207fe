"""Each private name of PyTorch still does what memopt uses it for; ``make compat`` asks the oldest and the newest."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memopt_cli.runtime import private_torch as p
from tests.zoo.models import GIVEN, Parts


def a_view() -> Tensor:
    return torch.zeros(4)[1:]


def names_without_test() -> set[str]:
    """Return the names of the file that no test here uses."""
    given = set(p.__all__)
    for node in ast.parse(Path(p.__file__).read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                given.add(name)
    here = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    tested = {node.attr for node in here if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "p"}
    return {name for name in given - tested if not name.startswith("_")}


def test_every_name_has_a_test() -> None:
    assert names_without_test() == set()


# ---------------------------------------------------------------------------------------------- compilers


def test_a_memory_budget_belongs_to_the_backend() -> None:
    assert p.within_budget("aot_eager", None, 0.5) == p.within_budget("aot_eager", None, 0.5)
    assert p.within_budget("aot_eager", None, 0.5) != p.within_budget("aot_eager", None, 0.2)


def test_a_memory_budget_of_the_process_can_be_left_out() -> None:
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=0.0):
        with p.compiled_within_budget():
            assert config.activation_memory_budget == 1.0
        assert config.activation_memory_budget == 0.0


def test_what_breaks_a_graph_is_listed() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with p.graph_breaks() as found:
        torch.compile(broken, backend="eager")(torch.zeros(1))
    assert found


def test_each_model_is_called_by_code_of_its_own() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 3)]
    calls = [p.make_uncached_call(model) for model in models]
    assert [call("", torch.ones(1, 2)).shape[1] for call in calls] == [2, 3]
    assert calls[0].__code__ is not calls[1].__code__


# ---------------------------------------------------------------------------------------------- tensors


def test_a_version_counts_writes_through_views_too() -> None:
    x = torch.zeros(4)
    before = p.version_counter(x)
    x[1:].add_(1)
    assert p.version_counter(x) == before + 1


def test_a_tensor_of_inference_has_no_version() -> None:
    with torch.inference_mode():
        x = torch.zeros(1)
    with pytest.raises(RuntimeError):
        p.version_counter(x)


def test_views_share_a_storage_and_others_do_not() -> None:
    x, empty, other = torch.zeros(4), torch.empty(0), torch.empty(0)
    assert p.memory_of(x) == p.memory_of(x[1:]) == p.storage_key(x.untyped_storage())
    assert p.memory_of(empty) != p.memory_of(other)


def test_holders_of_a_storage_are_tensors() -> None:
    x = torch.zeros(4, requires_grad=True) * 2
    assert p.count_holders(x) == 1
    view, again = x[1:], x.detach()
    assert p.count_holders(x) == 3
    del view, x
    assert p.count_holders(again) == 1
    result = again.requires_grad_().exp()
    assert p.count_holders(result) == 2, "its node saves it"
    with p.FakeTensorMode():
        fake = torch.zeros(4)
        assert p.count_holders(fake) == 1


def test_a_tangent_of_zeros_says_so() -> None:
    assert p.stands_for_zeros(torch._efficientzerotensor(3))
    assert not p.stands_for_zeros(torch.zeros(3))


def test_tensors_with_memory() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    others = [nested, torch.eye(2).to_sparse(), torch._efficientzerotensor(3)]
    assert [p.has_memory(x) for x in [torch.zeros(3), *others]] == [True, False, False, False]
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(p.has_memory(x)) or x)(torch.zeros(3))
    assert seen == [False]


def test_ordinary_tensors() -> None:
    class Own(torch.Tensor): ...

    with p.DryRun() as mode:
        fake = mode.from_tensor(torch.zeros(3))
    assert [p.is_ordinary(x) for x in (torch.zeros(3), fake, torch.zeros(3).as_subclass(Own))] == [True, True, False]


def test_a_hook_that_does_nothing() -> None:
    x = torch.zeros(3)
    assert p.unchanged(x) is x


def test_views_are_told() -> None:
    assert p.is_view(a_view())
    assert not p.is_view(torch.zeros(3))
    whole = torch.zeros(3)
    assert p.base_of(whole[1:].view(2, 1)) is whole
    assert p.base_of(whole) is None


def test_a_subclass_without_memory() -> None:
    class Own(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    made = p.make_without_memory(Own, (2, 3), torch.float16, torch.device("cpu"))
    assert (type(made), made.shape, made.dtype, made.requires_grad) == (Own, (2, 3), torch.float16, False)


def test_quantized_tensors_are_made_empty() -> None:
    one = p.quantized_by_tensor([2, 3], scale=0.5, zero_point=1, dtype=torch.quint8)
    assert (one.shape, one.q_scale(), one.q_zero_point()) == ((2, 3), 0.5, 1)
    scales, zeros = torch.tensor([0.5, 0.25]).double(), torch.tensor([0, 1])
    two = p.quantized_by_channel([2, 3], scales=scales, zero_points=zeros, axis=0, dtype=torch.qint8)
    assert two.q_per_channel_scales().tolist() == [0.5, 0.25]


def test_bits_of_a_stored_tensor_are_set() -> None:
    x = torch.ones(2, dtype=torch.complex64)
    p.set_bits(x, {"conj": True, "neg": False})
    assert x.is_conj()


def test_the_layout_of_mkldnn() -> None:
    assert torch.zeros(1).to_mkldnn().layout is p.LAYOUT_OF_MKLDNN


def test_the_memory_format_that_a_kernel_would_take() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert p.suggest_memory_format(x) is torch.contiguous_format
    assert p.suggest_memory_format(x.contiguous(memory_format=torch.channels_last)) is torch.channels_last


# ---------------------------------------------------------------------------------------------- dry runs and modes


def test_tensors_of_a_dry_run_are_fake() -> None:
    with p.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.zeros(2)
        with p.unset_fake_temporarily():
            real = torch.ones(2)
        with p.unseen():
            unseen = torch.ones(2)
        with pytest.raises(p.UNKNOWN_WITHOUT_DATA):
            fake.nonzero()
        with pytest.raises(p.UNKNOWN_WITHOUT_DATA):
            fake.sum().item()
    assert p.is_fake(fake)
    assert p.is_fake(mode.from_tensor(real))
    assert not p.is_fake(real)
    assert not p.is_fake(unseen)
    assert real.tolist() == unseen.tolist() == [1, 1]


def test_a_module_is_copied_into_a_dry_run() -> None:
    model = nn.Linear(2, 2)
    with p.FakeCopyMode(p.FakeTensorMode()):
        twin = copy.deepcopy(model)
    assert p.is_fake(twin.weight)
    assert isinstance(twin.weight, nn.Parameter)


def test_a_method_is_replaced_and_put_back() -> None:
    class Child(nn.Linear):
        pass

    plain = nn.Linear.extra_repr
    with p.replaced(nn.Linear, "extra_repr", lambda was: lambda self: was(self).upper()):
        assert nn.Linear(2, 3).extra_repr() == "IN_FEATURES=2, OUT_FEATURES=3, BIAS=TRUE"
    assert nn.Linear.extra_repr is plain
    with p.replaced(Child, "extra_repr", lambda was: lambda self: "child"):
        assert Child(2, 3).extra_repr() == "child"
    assert "extra_repr" not in vars(Child)


@pytest.mark.skipif(p._GROUPED_PRODUCT is None, reason="this PyTorch makes no other dry run of it")
@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "CompositeExplicitAutograd"),
    reason="this PyTorch has no such product on the CPU",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dry_run_multiplies_in_groups(dtype: torch.dtype) -> None:
    ends = torch.tensor([2, 6], dtype=torch.int32)
    rows, weights = torch.ones(6, 16, dtype=dtype), torch.ones(2, 16, 8, dtype=dtype)
    made = torch.ops.aten._grouped_mm.default(rows, weights, ends)
    with p.DryRun(allow_non_fake_inputs=True) as mode:
        found = torch.ops.aten._grouped_mm.default(mode.from_tensor(rows), weights, ends)
        across = torch.ops.aten._grouped_mm.default(mode.from_tensor(rows).t(), rows, offs=ends)
    assert p.is_fake(found)
    assert (found.shape, found.dtype) == (made.shape, made.dtype)
    assert (across.shape, across.dtype) == ((2, 16, 16), dtype)


def test_pytorch_says_of_which_operators_it_takes_no_notes() -> None:
    with p.DryRun(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.zeros(2, 3)
        for known in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            before = p.count_cache_bypasses()
            assert type(known(x, 1)) is p.FakeTensor
            assert p.count_cache_bypasses() == before
        torch.ops.aten._unsafe_view.default(x, [6])
    assert p.count_cache_bypasses() > before


def test_a_tensor_of_a_dry_run_has_a_mode_and_a_device() -> None:
    without_data = torch.empty_strided((2, 3), (1, 2), device="meta")
    with p.DryRun(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake, number = torch.zeros(2, 3), torch.tensor(1)
        made = p.FakeTensor(mode, without_data, torch.device("cpu"))
        assert (made.fake_mode, made.fake_device, made.constant) == (mode, torch.device("cpu"), None)
        assert (made + fake).stride() == (1, 2)
    assert number.constant is not None  # type: ignore[attr-defined]
    assert mode.shape_env is None


def test_a_tensor_of_a_dry_run_is_copied_deeply() -> None:
    p.patch_deepcopy()
    with p.FakeTensorMode():
        layer, plain = nn.Linear(2, 2), torch.zeros(3).requires_grad_()
        plain.sum().backward()
        twin, (one, other) = copy.deepcopy(layer), copy.deepcopy([plain, plain])
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(plain + 1)
    assert isinstance(twin.weight, nn.Parameter)
    assert p.is_fake(twin.weight)
    assert p.memory_of(twin.weight) != p.memory_of(layer.weight)
    assert one is other
    assert one is not plain
    assert one.requires_grad
    assert one.grad is not None
    assert one.grad is not plain.grad
    assert p.memory_of(copy.deepcopy(plain)) != p.memory_of(plain)  # when the dry run is over


class Seen(p.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_operators_but_for_those_unseen() -> None:
    assert not p.is_in_torch_dispatch_mode()
    with Seen() as mode:
        assert p.is_in_torch_dispatch_mode()
        torch.ones(1).add_(1)
        with p.unseen():
            torch.ones(1).mul_(1)
    assert torch.ops.aten.add_.Tensor in mode.operators
    assert torch.ops.aten.mul_.Tensor not in mode.operators


def test_the_modes_of_functions_are_exchanged() -> None:
    outer, inner = BaseTorchFunctionMode(), BaseTorchFunctionMode()
    with outer:
        assert p.function_modes() == [outer]
        with p.with_function_modes([inner, outer]):
            assert p.function_modes() == [inner, outer]
        assert p.function_modes() == [outer]
    assert p.function_modes() == []


# ---------------------------------------------------------------------------------------------- operators


def test_a_schema_tells_arguments_and_writes() -> None:
    schema = p.schema_of(torch.ops.aten.add_.Tensor)
    assert p.has_schema(torch.ops.aten.add_.Tensor)
    assert not p.has_schema(len)
    assert (schema.name, schema.overload_name, schema.is_mutable) == ("aten::add_", "Tensor", True)
    assert [(a.name, bool(a.alias_info and a.alias_info.is_write)) for a in schema.arguments][:2] == [
        ("self", True),
        ("other", False),
    ]


def test_classes_of_operators() -> None:
    assert isinstance(torch.ops.aten.add, p.OpOverloadPacket)
    assert isinstance(torch.ops.aten.add.Tensor, p.OpOverload)


def test_who_runs_an_operator_is_told() -> None:
    assert p.has_kernel(torch.ops.aten.add.Tensor)
    assert not p.has_kernel(torch.ops.aten.append.t)
    assert p.consists_of_others(torch.ops.aten.linear.default)
    assert not p.consists_of_others(torch.ops.aten.mm.default)
    assert p.is_known_to_script("aten::relu")
    assert not p.is_known_to_script("aten::no_such")


def test_a_subclass_is_not_asked_by_its_own_code() -> None:
    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("asked")

    own = torch.zeros(1).as_subclass(Own)
    with p.with_plain_functions():
        assert torch.add(own, 1).tolist() == [1]


def test_an_alias_shares_the_version_that_detach_renews() -> None:
    x = torch.zeros(2, requires_grad=True) * 1
    with torch.no_grad(), Seen():
        alias = p.alias(x)
        x.add_(1)
    assert p.version_counter(alias) == p.version_counter(x)
    assert not alias.requires_grad


# ---------------------------------------------------------------------------------------------- modules


def test_what_a_module_holds_is_exchanged() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm, other = module[0], nn.Identity()
    assert list(p.parameters_of(norm)) == ["weight", "bias"]
    assert list(p.buffers_of(norm)) == ["running_mean", "running_var", "num_batches_tracked"]
    p.children_of(module)["0"] = other
    p.parameters_of(norm)["bias"] = None
    p.buffers_of(norm)["running_mean"] = torch.ones(2)
    assert (module[0], norm.bias, norm.running_mean.tolist()) == (other, None, [1, 1])


def test_a_script_lists_what_it_holds() -> None:
    script = torch.jit.script(nn.Sequential(nn.BatchNorm1d(2)))
    assert [name for name, _ in p.children_of(script).items()] == ["0"]
    inner = p.children_of(script)["0"]
    assert [name for name, _ in p.parameters_of(inner).items()] == ["weight", "bias"]
    assert "running_mean" in p.buffers_of(inner)


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_a_module_are_noticed(register: str) -> None:
    module = nn.Identity()
    assert not p.has_hooks(module)
    getattr(module, f"register_{register}")(lambda *_: None)
    assert p.has_hooks(module)


def test_a_recurrent_layer_uses_the_weights_it_is_told_to() -> None:
    layer = nn.RNN(1, 1)
    x = torch.ones(1, 1, 1)
    p.parameters_of(layer)["weight_ih_l0"] = nn.Parameter(torch.zeros(1, 1))
    p.parameters_of(layer)["bias_ih_l0"] = p.parameters_of(layer)["bias_hh_l0"] = nn.Parameter(torch.zeros(1))
    p.use_weights(layer)
    assert layer(x)[0].tolist() == [[[0]]]


def test_padding_of_convolutions() -> None:
    assert list(p.padding_of(nn.Conv2d(1, 1, 3, padding=(1, 2)))) == [2, 2, 1, 1]


def test_a_convolution_with_another_weight_pads_as_it_does() -> None:
    layer, weight = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), torch.ones(1, 1, 3)
    assert p.convolve(layer, torch.tensor([[[1.0, 2, 3]]]), weight, None).tolist() == [[[6, 6, 6]]]


def test_runs_of_the_engine_are_watched() -> None:
    heard: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with p.engine_watched(lambda: heard.append("enter"), lambda: heard.append("leave")):
        x.sum().backward()
        torch.autograd.grad(x.sum(), x)
    torch.autograd.grad(x.sum(), x)
    assert heard == ["enter", "leave"] * 2


def test_bases_of_layers() -> None:
    assert isinstance(nn.BatchNorm2d(1), p.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(1), p.BatchNorm)
    assert isinstance(nn.InstanceNorm2d(1), p.InstanceNorm)


def test_a_checkpoint_makes_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    begin = p.CheckpointCall.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(p.CheckpointCall, "__init__", noted)
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert len(made) == 1


def test_what_is_compiled_can_draw_as_what_is_not() -> None:
    import torch._inductor.config

    with p.compiled_with_eager_random():
        assert torch._inductor.config.fallback_random
    assert not torch._inductor.config.fallback_random


def test_layers_of_a_transformer_consist_of_these() -> None:
    x, layer = torch.randn(3, 1, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    mixed = layer.norm1(x + p.self_attention(layer, x, None, None, False))
    assert torch.equal(layer.norm2(mixed + p.feed_forward(layer, mixed)), layer(x))


# ---------------------------------------------------------------------------------------------- autograd


def test_nodes_are_numbered_in_turn() -> None:
    x = torch.ones(1, requires_grad=True)
    first = p.next_node()
    y = x.exp()
    z = y.sin()
    assert [p.sequence_number(t.grad_fn) for t in (y, z)] == [first, first + 1]
    assert p.next_node() == first + 2


def test_the_node_that_runs_is_known_in_backward() -> None:
    seen: list[Any] = []
    assert p.running_node() is None
    with saved_tensors_hooks(lambda t: t, lambda t: seen.append(p.running_node()) or t):
        y = torch.ones(1, requires_grad=True).exp()
    y.backward()
    assert [node.name() for node in seen] == ["ExpBackward0"]


def test_the_innermost_hooks_are_told() -> None:
    def pack(tensor: Tensor) -> Any:
        return tensor

    assert p.hooks_on_saving() is None
    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(pack, pack):
        assert p.hooks_on_saving() == (pack, pack)


@pytest.mark.parametrize("kept", [True, False])
def test_whether_backward_may_run_again_is_known(kept: bool) -> None:
    seen: list[bool] = []
    y = torch.ones(1, requires_grad=True).exp()
    y.register_hook(lambda _: seen.append(p.graph_is_kept()))
    y.backward(retain_graph=kept)
    assert seen == [kept]


def test_vector_jacobian_products_keep_the_graph() -> None:
    x, other = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    y = x * 3
    for _ in range(2):
        of_x, of_other = p.vector_jacobian((y,), (torch.tensor([1.0, 2.0]),), (x, other))
        assert of_x.tolist() == [3, 6]
        assert of_other is None


def test_the_engine_is_told_from_python() -> None:
    seen: list[bool] = []

    def unpack(tensor: Tensor) -> Tensor:
        seen.append(p.is_engine(sys._getframe().f_back))
        return tensor

    with saved_tensors_hooks(lambda t: t, unpack):
        y = torch.ones(1, requires_grad=True).exp()
    y.backward(retain_graph=True)
    assert y.grad_fn._saved_result is not None
    torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable)
    assert seen == [True, False, True]
    assert p.is_engine(None)


def test_callers_are_passed_over_by_the_name_of_their_module() -> None:
    def asked() -> Any:
        return p.caller_beyond(frozenset())

    frame = asked()
    assert frame.f_code is asked.__code__
    assert p.caller_beyond(frozenset({__name__})).f_globals["__name__"] != __name__


# ---------------------------------------------------------------------------------------------- hooks on saving


def test_a_script_runs_as_it_is_written() -> None:
    before = torch._C._get_graph_executor_optimize()
    with contextlib.suppress(ValueError), p.without_script_optimizations():
        assert not torch._C._get_graph_executor_optimize()
        raise ValueError
    assert torch._C._get_graph_executor_optimize() == before


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jacrev])
def test_hooks_forbid_gradients_by_torch_func(transform: Any) -> None:
    x = torch.zeros(3)
    with saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(RuntimeError) as caught:
        transform(torch.sum, x) if transform is torch.func.vjp else transform(torch.sum)(x)
    assert p.forbids_hooks(caught.value)
    assert not p.forbids_hooks(RuntimeError("another"))


def test_too_much_memory_is_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.int8)
    assert p.is_out_of_cpu_memory(caught.value)
    assert not p.is_out_of_cpu_memory(RuntimeError("another"))


# ---------------------------------------------------------------------------------------------- transforms


def test_transforms_are_noticed() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def f(x: Tensor) -> Tensor:
        seen.append((p.is_transforming(), p.is_of_transform(x), p.is_of_vmap(x)))
        return x.sum()

    torch.func.grad(f)(torch.ones(1))
    torch.func.vmap(f)(torch.ones(2, 1))
    f(torch.ones(1))
    assert seen == [(True, True, False), (True, True, True), (False, False, False)]


def test_tangents_are_noticed() -> None:
    assert not p.has_tangents()
    with torch.autograd.forward_ad.dual_level():
        assert p.has_tangents()


def test_lanes_are_left_and_entered() -> None:
    def f(x: Tensor) -> Tensor:
        vmap = p.running_vmap()
        size, level = vmap.batch_size(), vmap.level()
        assert (size, p.level_of(x), p.lane_axis(x)) == (3, level, 1)
        assert p.level_of(torch.ones(1)) < 0
        whole = p.without_transform(x)
        assert whole.shape == (2, 3)
        with vmap.lower():
            total = whole.movedim(1, 0) + 1
        return p.in_lanes(total, level)

    assert torch.func.vmap(f, in_dims=1)(torch.ones(2, 3)).tolist() == [[2, 2]] * 3


# ---------------------------------------------------------------------------------------------- the rest


def test_the_tree_functions_take_containers_apart() -> None:
    leaves, spec = p.tree_flatten({"a": [1, (2,)]})
    assert isinstance(spec, p.TreeSpec)
    assert p.tree_leaves({"a": [1, (2,)]}) == leaves == [1, 2]
    assert p.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert p.tree_map(lambda n: n + 1, [1, (2,)]) == [2, (3,)]
    assert p.tree_map_only(int, lambda n: n + 1, [1, "a"]) == [2, "a"]
    assert p.tree_map(lambda leaf: leaf, (1, [2]), is_leaf=lambda v: isinstance(v, list)) == (1, [2])


def test_a_function_stays_out_of_a_compiled_one() -> None:
    compiled: list[bool] = []

    @p.not_compiled
    def inner(x: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    assert torch.compile(lambda x: inner(x * 2), backend="eager")(torch.ones(1)).tolist() == [3]
    assert compiled == [False]


def test_a_function_between_graphs_has_what_it_calls_compiled() -> None:
    compiled: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x + 2

    @p.between_graphs
    def outer(x: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_compiling())
        return inner(x)

    assert torch.compile(lambda x: outer(x * 2), backend="eager")(torch.ones(1)).tolist() == [3]
    assert compiled == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ahead"),
    [("eager", False), ("aot_eager", True), ("aot_eager_decomp_partition", True), (lambda g, _: g.forward, False)],
)
def test_who_differentiates_ahead(backend: Any, ahead: bool) -> None:
    """Asked while it compiles, once, in a function that itself is traced."""
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return x + 1 if p.backend_is_aot() else x + 2

    assert torch.compile(f, backend=backend)(torch.zeros(1)).item() == (1 if ahead else 2)


def test_inductor_differentiates_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wrapper alone: it would need a C++ compiler."""

    def compiled_to(self: Any, graph: Any, inputs: Any) -> Any:
        return graph.forward

    def f(x: Tensor) -> Tensor:
        return x + 1 if p.backend_is_aot() else x + 2

    torch._dynamo.reset()
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compiled_to)
    assert torch.compile(f)(torch.zeros(1)).item() == 1


@pytest.mark.slow
def test_how_often_a_compiled_checkpoint_writes() -> None:
    norm = nn.BatchNorm1d(4)

    def f(x: Tensor) -> Tensor:
        return checkpoint(norm, x * 2, use_reentrant=False).sum()  # type: ignore[no-any-return]

    torch._dynamo.reset()
    torch.compile(f, backend="aot_eager")(torch.randn(6, 4)).backward()
    assert norm.num_batches_tracked <= (2 if p.WRITES_TWICE else 1)


def test_what_is_asked_while_compiling_is_a_constant() -> None:
    asked: list[str] = []

    @p.constant_while_compiling
    def answer(question: str) -> int:
        asked.append(question)
        return 3

    compiled = torch.compile(lambda x: x * answer("how much"), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [3, 3]
    assert asked == ["how much"]


@pytest.mark.parametrize("whole", [True, False])
def test_whether_one_graph_is_wanted(whole: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1 if p.wants_one_graph() else x + 2

    torch._dynamo.reset()
    assert torch.compile(f, backend="eager", fullgraph=whole)(torch.zeros(1)).item() == (1 if whole else 2)


def test_what_goes_to_the_compiler() -> None:
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not p.is_compiled(module)
    assert p.is_compiled(torch.compile(module))
    module.compile(backend="eager")
    assert p.is_compiled(module)
    other.forward = torch.compile(other.forward, backend="eager")  # type: ignore[method-assign]
    assert p.is_compiled(other)


@pytest.mark.slow
def test_what_was_compiled_often_is_compiled_anew() -> None:
    compiled: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()

    class Scaled(Parts, factor=GIVEN):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    def run(count: int) -> int:
        before = len(compiled)
        for factor in range(len(compiled), len(compiled) + count):
            torch.compile(Scaled(factor), backend=backend, dynamic=False)(torch.ones(2))
        return len(compiled) - before

    assert run(20) < 20, "there is no limit any more: compiled_again can go"
    with p.compiled_again():
        assert run(20) == 20
    torch._dynamo.reset()


def test_stacks_are_recorded_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = inspect.signature(torch.cuda.memory._record_memory_history)

    def record(**given: Any) -> None:
        asked.append(plain.bind(**given).arguments["enabled"])

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    with p.memory_history():
        assert asked == ["state"]
    assert asked == ["state", None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an allocator to ask")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has one")
def test_without_an_allocator_there_is_no_snapshot() -> None:
    with pytest.raises(AttributeError, match="_cuda_memorySnapshot"):
        p.memory_snapshot()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no allocator to ask")
def test_a_snapshot_is_of_plain_containers() -> None:
    with p.memory_history():
        held = torch.ones(1000, device="cuda")
        found = p.memory_snapshot()
    assert held.nbytes <= sum(segment["total_size"] for segment in found["segments"])
    assert {type(segment) for segment in found["segments"]} == {dict}


def test_the_compiler_is_there_to_import() -> None:
    p.import_compiler()
    assert "torch._dynamo" in sys.modules


PUBLIC: list[Callable[[], bool]] = [
    lambda: torch.backends.mkldnn.enabled,
    lambda: torch.backends.cudnn.enabled,
    lambda: torch.backends.cudnn.benchmark,
    lambda: torch.backends.cudnn.deterministic,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
]


@pytest.mark.parametrize("number", range(len(PUBLIC)))
def test_kernels_are_chosen_by_flags(number: int) -> None:
    (read, write), public = p.FLAGS[number], PUBLIC[number]
    before = read()
    assert public() == before
    try:
        write(not before)
        assert read() == public() == (not before)
    finally:
        write(before)


def test_there_is_a_public_name_for_every_flag() -> None:
    assert len(p.FLAGS) == len(PUBLIC)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_generator_of_a_gpu_is_put_back() -> None:
    device = torch.device("cuda")
    before = torch.cuda.get_rng_state()
    drawn = torch.rand(8, device=device)
    p.put_cuda_generator(device, before)
    assert torch.equal(torch.rand(8, device=device), drawn)


def test_the_generator_of_a_gpu_is_asked_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [SimpleNamespace(graphsafe_get_state=torch.Generator) for _ in range(2)]
    own = torch.Generator().manual_seed(3)
    generators[1].graphsafe_get_state = lambda: own
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    p.put_cuda_generator(torch.device("cuda", 1), torch.Generator().manual_seed(7).get_state())
    assert own.initial_seed() == 7


def test_no_device_has_started_before_it_is_used() -> None:
    assert p.is_started(torch.device("cuda")) == torch.cuda.is_initialized()


class Scripted(Parts, factor=3):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    @torch.jit.export
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def archive_of(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    return buffer.getvalue()


def test_a_script_is_taken_apart() -> None:
    script, unit = p.load_script(archive_of(Scripted()))
    assert isinstance(script, torch.jit.ScriptModule)
    assert script(torch.ones(1)).tolist() == [3]
    assert unit.get_functions() is not None
    assert p.program_of(script).qualified_name.endswith("Scripted")
    assert sorted(p.method_names(script)) == ["forward", "scaled"]
    assert p.has_method(script, "scaled")
    assert not p.has_method(script, "missing")
    assert p.program_of(script).getattr("factor") == 3
    assert p.hooks_of(script) == []
    assert p.program_of(script) == p.program_of(script)
    assert hash(p.program_of(script)) == hash(p.program_of(script))
    assert [argument.name for argument in p.method_of(script, "forward").schema.arguments] == ["self", "x"]


def test_an_archive_is_read_record_by_record() -> None:
    reader = p.open_archive(archive_of(Scripted()))
    names = reader.get_all_records()
    code = next(name for name in names if name.endswith(".py"))
    assert b"def forward" in reader.get_record(code)
    with pytest.raises(RuntimeError):
        p.open_archive(b"no archive")


def test_functional_layers_take_what_these_return() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    padded = F.pad(torch.zeros(1, 1, 4, 4), p.padding_of(layer), mode="reflect")
    assert padded.shape == (1, 1, 6, 6)


def test_what_a_script_keeps_is_read_and_written_in_its_program() -> None:
    script = torch.jit.script(nn.BatchNorm1d(2))  # type: ignore[no-untyped-call]
    assert "training" in p.attributes_of_script(script)
    assert "weight" not in p.attributes_of_script(script)
    p.program_of(script).setattr("training", False)
    assert script.training is False
    assert p.program_of(script).getattr("running_mean") is script.running_mean


def test_cached_parametrizations_are_read_and_put_back() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached():
        weight = linear.weight
        cached = p.cached_parametrizations()
        assert cached == (1, {next(iter(cached[1])): weight})
        p.cache_parametrizations((1, {}))
        assert linear.weight is not weight
        p.cache_parametrizations(cached)
        assert linear.weight is weight
    assert p.cached_parametrizations() is None


@pytest.mark.parametrize("register", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_on_gradients_of_modules(register: str, everywhere: bool) -> None:
    module = nn.Linear(1, 1)
    forward = module.register_forward_hook(lambda *_: None)
    assert not p.has_gradient_hooks(module)
    owner, name = (nn.modules.module, f"register_module_{register}") if everywhere else (module, f"register_{register}")
    handle = getattr(owner, name)(lambda *_: None)
    assert p.has_gradient_hooks(module)
    assert p.has_gradient_hooks(nn.Tanh()) == everywhere
    handle.remove()
    forward.remove()
    assert not p.has_gradient_hooks(module)


def test_tables_of_hooks() -> None:
    module = nn.Linear(1, 1)
    assert len(list(p.hook_tables(module))) == 7
    assert len(list(p.global_hook_tables())) == 6
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
    ):
        handle = register(lambda *_: None)
        assert sum(handle.id in table for table in p.hook_tables(module)) == 1
        handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert sum(everywhere.id in table for table in p.global_hook_tables()) == 1
    everywhere.remove()


# ---------------------------------------------------------------------------------------------- optimizers


def test_the_step_of_an_optimizer_without_its_hooks() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    parameter.grad = torch.ones(1)
    p.step_without_hooks(optimizer)
    assert parameter.item() == 0
    assert not called


def test_hooks_on_gradients_are_found() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert p.hooks_on_gradient(parameter) == []
    hooks = [lambda gradient: None, lambda parameter: None]
    parameter.register_hook(hooks[0])
    parameter.register_post_accumulate_grad_hook(hooks[1])
    assert p.hooks_on_gradient(parameter) == hooks


# ---------------------------------------------------------------------------------------------- many ranks


def test_a_tensor_made_of_others_is_taken_apart() -> None:
    p.start_fake_group(0, 4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        sharded = distribute_tensor(torch.zeros(10), mesh, [Shard(0)])
        assert p.is_made_of_others(type(sharded))
        (part,) = p.walk_parts(sharded)
        assert part.shape == (3,)
        assert torch.distributed.get_world_size() == 4
    finally:
        torch.distributed.destroy_process_group()
    whole = torch.zeros(10)
    assert list(p.walk_parts(whole)) == [whole]
    assert not p.is_made_of_others(nn.Parameter)
    with p.FakeTensorMode():
        assert not p.is_made_of_others(type(torch.zeros(1)))


def test_a_group_that_sends_nothing_needs_no_other_rank() -> None:
    p.start_fake_group(2, 3)
    try:
        given = torch.ones(2)
        torch.distributed.all_reduce(given)
        assert given.tolist() == [1, 1]
        assert torch.distributed.get_rank() == 2
        with p.FakeTensorMode():
            torch.distributed.all_reduce(torch.ones(2))
            torch.distributed.all_gather_into_tensor(torch.ones(6), torch.ones(2))
            torch.distributed.reduce_scatter_tensor(torch.ones(2), torch.ones(6))
            torch.distributed.broadcast(torch.ones(2), 0)
    finally:
        torch.distributed.destroy_process_group()


def test_over_how_many_ranks_gradients_are_reduced() -> None:
    from torch.distributed.fsdp import fully_shard

    p.start_fake_group(0, 8)
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        assert p.reducing_ranks(fully_shard(nn.Linear(8, 8), mesh=mesh)) == 8
        assert p.reducing_ranks(fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])) == 4
        assert p.reducing_ranks(fully_shard(nn.ReLU(), mesh=mesh)) == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_rank_makes_the_shards_that_it_keeps(length: int, dim: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    tensor = torch.arange(2.0 * length).view(2, length).movedim(1, dim)
    expected = _fsdp_param._chunk_with_empty(tensor, 4, dim)
    with p.sharded_without_the_others():
        found = _fsdp_param._chunk_with_empty(tensor, 4, dim)
    assert len(found) == 4
    for rank in (0, 1, 2, 3, -1):
        assert torch.equal(found[rank], expected[rank])
        assert found[rank].stride() == expected[rank].stride()


def test_a_model_without_data_changes_its_dtype() -> None:
    """It does so even the first time, when the mode remembers what an operator made."""
    with p.FakeTensorMode(), p.fake_parameters_swappable():
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).to(torch.bfloat16)
        assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
        assert model.half()[0].weight.dtype is torch.float16


def test_ddp_makes_its_reducer_and_takes_hooks_by_these() -> None:
    for name in (p.MAKES_REDUCER, *p.SETS_HOOKS):
        assert callable(getattr(torch.nn.parallel.DistributedDataParallel, name))
    assert p.FIRST_BUCKET_BYTES == 1 << 20


@pytest.mark.slow
def test_a_rank_that_is_gone_or_late_is_told() -> None:
    """Two of gloo's ranks in one process, the second of which takes no part."""
    store = torch.distributed.HashStore()

    def join(rank: int) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=0.5))

    with ThreadPoolExecutor(2) as threads:
        group, other = threads.map(join, range(2))
    with pytest.raises(RuntimeError) as late:
        group.allreduce([torch.zeros(1)]).wait()
    del other
    assert p.means_lost_rank(late.value)
    assert p.means_lost_rank(torch.distributed.DistBackendError("NCCL"))
    assert not p.means_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_tensors_share_buckets_up_to_a_limit() -> None:
    tensors = [torch.zeros(size) for size in (4, 4, 4, 1)]
    assert p.assign_buckets(tensors, [16, 32]) == [[0], [1, 2], [3]]
    assert p.assign_buckets(tensors, [sys.maxsize]) == [[0, 1, 2, 3]]


def test_tensors_made_without_a_device_are_on_the_default_one() -> None:
    assert torch.device(p.default_device()) == torch.ops.aten.empty.memory_format([1]).device


def test_the_name_of_a_node() -> None:
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.name = "own"
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    for tensor in (x * 2, x.exp(), x.view(1, 2), torch.cat([x, x]), x.chunk(2)[1]):
        node: Any = tensor.grad_fn
        assert p.name_of_node(node) == node.name()
    assert p.name_of_node(Named.apply(x).grad_fn) == "NamedBackward"  # type: ignore[no-untyped-call]


def test_what_a_tensor_was_concatenated_from() -> None:
    leaf, plain = torch.randn(2, 3, requires_grad=True), torch.randn(2, 1)
    twice, (low, high) = leaf * 2, torch.ones(2, 4, requires_grad=True).aminmax(dim=0)
    found = p.parts_of_concatenation(torch.cat([twice, leaf, plain], dim=-1))
    assert found == (-1, [(p.edge_of(twice), 3), (None, 3), (None, None)])
    assert p.edge_of(twice) == (p.sequence_number(twice.grad_fn), 0)
    assert [p.edge_of(t) for t in (low, high)] == [
        (p.sequence_number(low.grad_fn), 0),
        (p.sequence_number(low.grad_fn), 1),
    ]
    assert p.edge_of(leaf) is p.edge_of(plain) is None
    nothing = torch.empty(0, requires_grad=True) * 1
    found = p.parts_of_concatenation(torch.cat([nothing, twice], dim=1))
    assert found == (1, [(p.edge_of(nothing), 0), (p.edge_of(twice), 3)])
    for tensor in (twice, plain, torch.stack([twice, twice])):
        assert p.parts_of_concatenation(tensor) is None


def test_hooks_get_other_numbers_than_those_of_a_loaded_module() -> None:
    loaded = nn.Linear(1, 1)

    def register() -> int:
        return loaded.register_forward_hook(lambda *_: None).id

    number = register() + 5  # of a process that has registered more hooks
    loaded._forward_hooks[number] = lambda *_: None
    p.reserve_hook_numbers(nn.Sequential(loaded))
    assert register() == number + 1
    p.reserve_hook_numbers(nn.Linear(1, 1))
    assert register() == number + 2


def test_files_that_are_saved_are_checked_before(tmp_path: Path) -> None:
    checked = list[str]()
    path = str(tmp_path / "w.pth")
    with p.saving_checked(checked.append):
        torch.save(1, path)
        torch.save(1, tmp_path / "w.pth")
        torch.save(1, io.BytesIO())
    torch.save(1, path)
    assert checked == [path, path]

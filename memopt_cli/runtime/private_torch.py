"""Private names of PyTorch, which may change without notice: no other file of memopt uses one.

A private name begins with an underscore, or is in a module whose name does.  Each is wrapped here once, under a name
for its purpose.  ``tests/runtime/test_private_torch.py`` fails if PyTorch changes what it does, and
``tests/runtime/test_private_names.py`` if another file uses one.  All exist in PyTorch 2.8 to 2.14 (``make compat``).
Names that are read at every operator are aliases or an ``attrgetter``, which cost nothing.

Two kinds are not here: names in saved files (``torch._utils._rebuild_tensor_v2``) are a file format, and operators
(``torch.ops.aten._to_copy``) are called by the names of their schemas.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import get_unwrapped as without_transform
from torch._C._functorch import is_batchedtensor as is_of_vmap
from torch._C._functorch import is_functorch_wrapped_tensor as is_of_transform
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._python_dispatch import _disable_current_modes as unseen
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _CheckpointFrame as CheckpointCall
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch._functorch.pyfunctorch import VmapInterpreter

__all__ = [
    "BatchNorm",
    "CheckpointCall",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "InstanceNorm",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "is_in_torch_dispatch_mode",
    "is_of_transform",
    "is_of_vmap",
    "suggest_memory_format",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unseen",
    "unset_fake_temporarily",
    "without_transform",
]
"""Names that are passed on unchanged, some under a clearer name.

- ``BatchNorm``, ``InstanceNorm``: the bases of PyTorch's layers of that kind; there is no public one.
- ``CheckpointCall``: one call of ``torch.utils.checkpoint``.
- ``TorchDispatchMode``: sees every operator.  In a ``with unseen()`` block no mode does, nor does a dry run;
  ``is_in_torch_dispatch_mode()`` returns whether one does.
- ``unset_fake_temporarily()``: suspends a dry run in a ``with`` block, so that tensors have data.
- ``FakeTensorMode``, ``FakeCopyMode``: a dry run, and the copy of a module into it; ``FakeTensor``: its tensors.
- ``is_of_transform``, ``is_of_vmap``, ``without_transform``: whether ``torch.func`` or ``vmap`` wraps a tensor, and the
  tensor inside one wrapping.
- ``suggest_memory_format``: the memory format in which a kernel lays out its result for a tensor.
- ``OpOverload``, ``OpOverloadPacket``: the classes of what ``torch.ops`` holds.
- ``tree_…``: PyTorch's own walk through containers, registered ones of other packages included.
"""


# ---------------------------------------------------------------------------------------------- tensors

version_counter: Final[Callable[[Tensor], int]] = attrgetter("_version")
"""The number of in-place writes to a tensor; raises :class:`RuntimeError` for an inference tensor."""

storage_key: Final[Callable[[torch.UntypedStorage], int]] = attrgetter("_cdata")
"""The address of the storage object: unlike ``data_ptr``, it also identifies storages without memory."""


def memory_of(tensor: Tensor) -> int:
    """Return the :data:`storage_key` of the storage of ``tensor``, which all its views share."""
    return storage_key(tensor.untyped_storage())


def count_holders(tensor: Tensor) -> int:
    """Return the number of tensors that hold the storage of ``tensor``, including itself and autograd's."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage_key(storage))) - 1  # without ``storage``, this function's own


@functools.cache
def is_made_of_others(cls: type) -> bool:
    """Return whether tensors of class ``cls`` consist of others and hold no memory, like a ``DTensor``."""
    return hasattr(cls, "__tensor_flatten__")


def walk_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the values of ``tensor``: itself, or its parts if it is like a ``DTensor``."""
    if not is_made_of_others(type(tensor)):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # there may be meshes, too
            yield from walk_parts(part)


stands_for_zeros: Final[Callable[[Tensor], bool]] = Tensor._is_zerotensor
"""Whether a tensor is PyTorch's special zero tensor without memory, like some tangents."""

is_view: Final[Callable[[Tensor], bool]] = Tensor._is_view
"""Whether autograd takes a tensor for a view of another one."""


base_of: Final[Callable[[Tensor], Tensor | None]] = attrgetter("_base")
"""The base of a tensor that autograd takes for a view; ``None`` if it is not a view."""


def has_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has strided memory.

    Nested tensors have none, nor special zero tensors (``torch.func.jvp``) and the tensors that a transform wraps.
    """
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not (stands_for_zeros(tensor) or is_of_transform(tensor))


def make_without_memory(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of the subclass ``cls`` that has no memory."""
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)


quantized_by_tensor: Final[Callable[..., Tensor]] = torch._empty_affine_quantized
"""A function that makes an empty quantized tensor with one scale; public functions can only quantize floats."""

quantized_by_channel: Final[Callable[..., Tensor]] = torch._empty_per_channel_affine_quantized
"""A function that makes an empty quantized tensor with one scale for each channel."""


def set_bits(tensor: Tensor, bits: dict[str, bool]) -> None:
    """Set the bits of a stored tensor: ``conj`` and ``neg``."""
    torch._utils.set_tensor_metadata(tensor, bits)


LAYOUT_OF_MKLDNN: Final[torch.layout] = torch._mkldnn  # type: ignore[attr-defined]
"""The layout of tensors that MKL-DNN has arranged for its own kernels."""


# ---------------------------------------------------------------------------------------------- dry runs

UNKNOWN_WITHOUT_DATA: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of an operator in a dry run if its result, or the result's shape, depends on data."""


def is_fake(value: Any) -> bool:
    """Return whether ``value`` is a tensor of a dry run, which has a shape and a device, but no data."""
    return isinstance(value, FakeTensor)


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is of PyTorch's own class or of a dry run: other classes may redefine operators."""
    return type(tensor) is Tensor or isinstance(tensor, FakeTensor)


class DryRun(FakeTensorMode):
    """PyTorch's mode in which tensors have no data, mended for an operator with dtypes that the mode refuses.

    For grouped matrix products (mixtures of experts), the meta function takes only bfloat16, and kernels take more.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of operator ``func``."""
        if func is not _GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
            return super().dispatch(func, types, args, kwargs)
        with self:
            return _grouped_product(*args, **(kwargs or {}))


_GROUPED_OUTPUT: Final = getattr(torch._meta_registrations, "_create_grouped_mm_output_tensor", None)
_GROUPED_PRODUCT: Final = torch.ops.aten._grouped_mm.default if _GROUPED_OUTPUT is not None else None


def _grouped_product(first: Tensor, second: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    assert _GROUPED_OUTPUT is not None
    return _GROUPED_OUTPUT(first, second, offs, out_dtype)


default_device: Final[Callable[[], str]] = torch._C._get_default_device
"""The device of tensors that are made without naming one; ``torch.get_default_device`` asks every mode first."""


def count_cache_bypasses() -> int:
    """Return how many operators of dry runs PyTorch has computed without its cache of fake results."""
    return sum(FakeTensorMode.cache_bypasses.values())


@contextlib.contextmanager
def replaced(owner: type | ModuleType, name: str, changed: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``name`` of ``owner``, a class or module, by ``changed`` of it, in the ``with`` block."""
    is_own, plain = name in vars(owner), getattr(owner, name)
    setattr(owner, name, changed(plain))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)


def patch_deepcopy() -> None:
    """Make ``copy.deepcopy`` of a dry run's tensor return another tensor of the dry run, from now on.

    PyTorch would copy its storage, which has a size but no memory, and write out of bounds.  The change is permanent,
    because such tensors may outlive a dry run (for example in a list that a user's hook appends to) and are then copied
    with the model.
    """
    FakeTensor.__deepcopy__ = _copy_of_fake  # type: ignore[method-assign]


@contextlib.contextmanager
def fake_parameters_swappable() -> Iterator[None]:
    """Let ``Module.to``, ``half`` and the like work on models without data, in the ``with`` block.

    They swap tensors, which fails for a tensor with weak references, and a dry run keeps such references.
    """

    def exchanging(plain: Any) -> Any:
        def swap_tensors(first: Tensor, second: Tensor) -> None:
            for tensor in (first, second):
                if isinstance(tensor, FakeTensor):
                    memory = tensor.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
                    for key in [key for key, known in memory.items() if known is tensor]:
                        del memory[key]
            plain(first, second)

        return swap_tensors

    with replaced(torch.utils, "swap_tensors", exchanging):
        yield


def _copy_of_fake(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("cannot deepcopy a tensor that has a grad_fn: detach it first")
        copied = tensor.detach().clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad)
        else:
            memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
            copied.grad = copy.deepcopy(tensor.grad, memo)
    copied_before: Tensor = memo[id(tensor)]
    return copied_before


# ---------------------------------------------------------------------------------------------- operators

schema_of: Final[Callable[[Any], Any]] = attrgetter("_schema")
"""The schema of an operator: its arguments, which of them it writes, its results."""


def has_schema(operator: Any) -> bool:
    """Return whether ``operator`` has a schema: higher-order operators, such as ``torch.compile``'s, have none."""
    return hasattr(operator, "_schema")


def has_kernel(operator: OpOverload) -> bool:
    """Return whether the dispatcher can run ``operator``, and not only TorchScript's interpreter."""
    return bool(torch._C._dispatch_has_kernel(operator.name()))


def consists_of_others(operator: OpOverload) -> bool:
    """Return whether modes see, in place of ``operator``, the ones that it calls."""
    name = operator.name()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def is_known_to_script(operator: str) -> bool:
    """Return whether TorchScript knows an operator of that name, such as ``aten::relu``."""
    return bool(torch._C._jit_get_schemas_for_operator(operator))


def with_plain_functions() -> AbstractContextManager[None]:
    """Ignore ``__torch_function__`` of arguments' classes in the ``with`` block."""
    return torch._C.DisableTorchFunctionSubclass()


def alias(tensor: Tensor) -> Tensor:
    """Return ``tensor`` detached, but with the same version counter; a plain ``detach`` makes a new one."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# ---------------------------------------------------------------------------------------------- modules

# Functions and not aliases, since ``torch.compile`` can trace them.


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of the own parameters of ``module``, some ``None``; writing to it skips every check."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of the own buffers of ``module``."""
    return module._buffers


MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
"""Attributes of every module, which hold its parameters, buffers, submodules and hooks."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the memory format with the channels last."""


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of the children of ``module``; of a ``ScriptModule``, an object that has ``items``."""
    return module._modules


def program_of(script: Any) -> Any:
    """Return the C++ object behind ``script``, which all of its Python wrappers share.

    Its ``getattr`` and ``setattr`` reach attributes and buffers by name; ``qualified_name`` is the name of its class.
    """
    return script._c


def attributes_of_script(script: Any) -> list[str]:
    """Return the names of what ``script`` keeps besides parameters; in one from a file, buffers are among them."""
    kind = vars(script).get("_concrete_type")  # one that is still being built has none
    attributes = {} if kind is None else kind.get_attributes()
    return [name for name, (_, is_parameter) in attributes.items() if not is_parameter]


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks of ``module`` itself run before or after its forward or backward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def has_gradient_hooks(module: nn.Module) -> bool:
    """Return whether a hook gets the gradients that pass ``module``: its own hook, or one of all modules."""
    everywhere = nn.modules.module
    global_hooks = (everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks)
    return any((module._backward_hooks, module._backward_pre_hooks, *global_hooks))


def hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the dictionaries of hooks on forward and backward of ``module``, to be read and written in place."""
    return [table for table in map(vars(module).get, _HOOK_ATTRIBUTES) if isinstance(table, dict)]


def saving_checked(check: Callable[[str], object]) -> AbstractContextManager[None]:
    """Call ``check`` in the ``with`` block with the path of each file that ``torch.save`` is about to write.

    PyTorch opens such a file in C++, so no audit event reports it.
    """

    def checked(plain: Any) -> Any:
        def open_writer(file: Any) -> Any:
            if isinstance(file, str):
                check(file)
            return plain(file)

        return open_writer

    return replaced(torch.serialization, "_open_zipfile_writer", checked)


def reserve_hook_numbers(model: nn.Module) -> None:
    """Keep the numbers of hooks that are registered from now on apart from those of the hooks of ``model``.

    PyTorch counts hooks from 0 in each process, and saves a hook with its number.  In another process, a new hook
    would replace a loaded one of the same number, such as that of ``torch.nn.utils.weight_norm``.
    """
    tables = (table for module in model.modules() for table in hook_tables(module))
    numbers = (number for table in tables for number in table if isinstance(number, int))
    RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(numbers, default=-1))


def hooks_on_gradient(parameter: Tensor) -> list[Any]:
    """Return the hooks on the gradient of ``parameter``, which ``deepcopy`` and ``torch.save`` drop."""
    return [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]


def global_hook_tables() -> list[dict[Any, Any]]:
    """Return the dictionaries of hooks that every module calls."""
    tables = (getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)
    return [table for table in tables if isinstance(table, dict)]


_HOOK_TABLES: Final = (
    *("forward_hooks", "forward_hooks_with_kwargs", "forward_hooks_always_called", "forward_pre_hooks"),
    *("forward_pre_hooks_with_kwargs", "backward_hooks", "backward_pre_hooks"),
)
_HOOK_ATTRIBUTES: Final = tuple(f"_{name}" for name in _HOOK_TABLES)
_GLOBAL_HOOKS: Final = tuple(f"_global_{name}" for name in _HOOK_TABLES)


def use_weights(recurrent: nn.Module) -> None:
    """Make a recurrent layer use the weights that are its attributes now; it caches them in a flat list."""
    names: Any = recurrent._flat_weights_names
    recurrent._flat_weights = [getattr(recurrent, name, None) for name in names]  # type: ignore[assignment]


padding_of: Final[Callable[[Any], list[int]]] = attrgetter("_reversed_padding_repeated_twice")
"""The padding of a convolution as ``F.pad`` takes it."""


def convolve(convolution: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``convolution`` of ``x``, its padding included, with another ``weight`` and ``bias``."""
    y: Tensor = convolution._conv_forward(x, weight, bias)
    return y


def self_attention(layer: Any, *arguments: Any) -> Any:
    """Run the self-attention of ``layer``, one of a transformer, dropout included."""
    return layer._sa_block(*arguments)


def feed_forward(layer: Any, x: Any) -> Any:
    """Run the two linear layers of ``layer``, one of a transformer, dropout included."""
    return layer._ff_block(x)


# ---------------------------------------------------------------------------------------------- autograd

next_node: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr
"""The number that the next node of autograd will have in this thread."""


def name_of_node(node: Any) -> str:
    """Return the name of ``node``, even where a user's ``torch.autograd.Function`` has set ``ctx.name``."""
    return type(node).__name__


def sequence_number(node: Any) -> int:
    """Return the number that ``node`` got when it was made; nodes that accumulate gradients have the largest."""
    return int(node._sequence_nr())


Edge = tuple[int, int]
"""The number of the node that made a tensor, and the index of the tensor among the node's outputs."""


def edge_of(tensor: Tensor) -> Edge | None:
    """Return the edge that leads to ``tensor``, or ``None`` if no node made it."""
    node = tensor.grad_fn
    return None if node is None else (sequence_number(node), tensor.output_nr)


def _edge_from(node: Any, output: int) -> Edge | None:
    # A node that adds up gradients has no unique number.
    return None if node is None or hasattr(node, "variable") else (sequence_number(node), output)


def parts_of_concatenation(tensor: Tensor) -> tuple[int, list[tuple[Edge | None, int | None]]] | None:
    """Return the dimension along which ``torch.cat`` has made ``tensor``, and edge and length of each of its parts.

    Return ``None`` if ``torch.cat`` did not make it.  A part that no node made has no edge, and its length is unknown.
    """
    node = tensor.grad_fn
    if node is None or name_of_node(node) != "CatBackward0":
        return None
    dim: int = node._saved_dim  # type: ignore[attr-defined]
    dim -= 2**64 if dim >= 2**63 else 0  # autograd stores a negative dimension as an unsigned number
    parts = node.next_functions
    return dim, [(_edge_from(maker, output), _part_length(maker, output, dim, tensor.dim())) for maker, output in parts]


def _part_length(maker: Any, output: int, dim: int, dimensions: int) -> int | None:
    if maker is None:
        return None
    shape: Sequence[int] = maker._input_metadata[output].shape
    # ``torch.cat`` takes a tensor of shape (0,) for an empty one of any dimensions.
    return shape[dim] if len(shape) == dimensions else 0


running_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
"""The node whose derivative is being computed in this thread; ``None`` outside backward."""


hooks_on_saving: Final[Callable[[], Any]] = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""The innermost (pack, unpack) hooks on the tensors that autograd saves now; ``None`` if there are none."""


graph_is_kept: Final[Callable[[], bool]] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs may run again (``retain_graph``)."""


def vector_jacobian(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the products of ``cotangents`` with the Jacobian of ``outputs`` by ``inputs``; keep the graph.

    The product is ``None`` for an input on which no output depends.  ``torch.autograd.grad`` calls the same function,
    but checks its arguments first, which takes as long as a small Jacobian.
    """
    engine = Variable._execution_engine
    return list(engine.run_backward(tuple(outputs), tuple(cotangents), True, False, tuple(inputs), True, False))


_ENGINE: Final = _engine_run_backward.__code__


def engine_watched(enter: Callable[[], object], leave: Callable[[], object]) -> AbstractContextManager[None]:
    """Call ``enter`` and ``leave`` around every run of autograd that a script starts in the ``with`` block.

    ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all look this function up to start it.
    """

    def watched(plain: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            enter()
            try:
                return plain(*arguments, **named)
            finally:
                leave()

        return run

    return replaced(torch.autograd, "_engine_run_backward", watched)


_NOT_COMPILED: Final = frozenset({"torch._compile", "torch._dynamo.eval_frame"})
"""Modules with frames around a function that is not compiled."""


def is_engine(caller: FrameType | None) -> bool:
    """Return whether autograd's engine made a call, where ``caller`` is the Python frame below the called one.

    The engine is written in C++.  So the Python frame below a function called by it is the frame that started the
    engine; there is no frame if the engine runs in its own thread.  PyTorch has no other way to tell that autograd adds
    up two gradients.
    """
    caller = _first_frame_outside(caller, _NOT_COMPILED)
    return caller is None or caller.f_code is _ENGINE


def caller_beyond(names: frozenset[str]) -> FrameType | None:
    """Return the caller's caller, passing over frames of the modules ``names``."""
    return _first_frame_outside(sys._getframe(1), names)


def _first_frame_outside(frame: FrameType | None, names: frozenset[str]) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__") in names:
        frame = frame.f_back
    return frame


# ---------------------------------------------------------------------------------------------- hooks on saving


class without_script_optimizations:  # used like a function, so in lower case
    """Context manager in which TorchScript runs unoptimized, as in ``torch.jit.optimized_execution(False)``."""

    __slots__ = ("_optimizes",)

    def __enter__(self) -> None:
        self._optimizes = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_graph_executor_optimize(self._optimizes)


def forbids_hooks(error: RuntimeError) -> bool:
    """Return whether ``error`` means that ``torch.func`` cannot compute gradients under hooks on saved tensors.

    PyTorch has no class of exception for that, so its message is found by provoking it once.
    """
    return str(error) == _refusal_of_hooks()


@functools.cache
def _refusal_of_hooks() -> str:
    with unseen(), saved_tensors_hooks(unchanged, unchanged):
        try:
            torch.func.grad(torch.sum)(torch.zeros(()))
        except RuntimeError as refusal:
            return str(refusal)
    return "PyTorch does not refuse"


def is_out_of_cpu_memory(error: Exception) -> bool:
    """Return whether ``error`` means that the CPU's memory ran out, for which PyTorch has no class."""
    return any(words in str(error) for words in ("can't allocate memory", "bad_alloc"))


# ---------------------------------------------------------------------------------------------- transforms

is_transforming: Final[Callable[[], bool]] = torch._C._are_functorch_transforms_active
"""Whether ``torch.func`` or ``vmap`` transforms what runs now."""


def has_tangents() -> bool:
    """Return whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def running_vmap() -> VmapInterpreter:
    """Return the innermost transform, which must be a ``vmap``: it knows its lanes, and runs the operators below it."""
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, VmapInterpreter)
    return interpreter


def in_lanes(batch: Tensor, level: int) -> Tensor:
    """Return ``batch`` as one lane of the ``vmap`` at ``level`` sees it; its first axis is the lanes."""
    return torch._C._functorch._add_batch_dim(batch, 0, level)


level_of: Final[Callable[[Tensor], int]] = torch._C._functorch.maybe_get_level
"""The level of the ``vmap`` that a tensor belongs to; negative if it belongs to none."""

lane_axis: Final[Callable[[Tensor], int]] = torch._C._functorch.maybe_get_bdim
"""The axis along which the lanes lie in ``without_transform`` of a tensor."""


# ---------------------------------------------------------------------------------------------- torch.compile

_C = TypeVar("_C", bound=Callable[..., Any])
_SKIPPED: Final = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def not_compiled(function: _C) -> _C:
    """Hide ``function``, and all that it calls, from ``torch.compile``.

    ``torch.compiler.disable`` would do so too, but imports the compiler and puts a wrapper around every call.
    """
    set_code_exec_strategy(function.__code__, _SKIPPED)  # where the function is called from code that is not traced
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # and where it is
    return function


@not_compiled
def unchanged(tensor: Tensor) -> Tensor:
    """Return ``tensor``: a hook on saving that does nothing."""
    return tensor


between_graphs: Final[Callable[[Callable[..., Any]], Callable[..., Any]]] = torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
"""A decorator: ``torch.compile`` does not look into the function, but compiles the functions that it calls."""


def constant_while_compiling(function: _C) -> _C:
    """Let ``torch.compile`` call ``function``, whose arguments are strings, and treat its result as a constant.

    ``torch.compiler.assume_constant_result`` would do so too, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_AOT_BACKENDS: Final = (
    "inductor",
    "cudagraphs",
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_default_partitioner",
)
"""Names of the backends that derive backward ahead of time."""

WRITES_TWICE: Final = TorchVersion(torch.__version__) < "2.13"
"""Whether a compiled checkpoint may repeat in backward what it writes in place, so that running statistics move twice.

PyTorch 2.8 does, with ``inductor`` and ``aot_eager``, and 2.13 does not; the versions in between were not tried.
"""


@constant_while_compiling
def backend_is_aot() -> bool:
    """Return whether the backend that compiles now is one of PyTorch's that derive backward ahead of time.

    Such a backend takes a checkpoint apart, so that its operators use random numbers and update buffers once.  Other
    backends run the graph as it is, in which a checkpoint runs its part twice, with other random numbers.
    """
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    known = (AotAutograd, torch._TorchCompileInductorWrapper)
    ahead: list[Any] = [lookup_backend(name) for name in list_backends(()) if name in _AOT_BACKENDS]
    backend: Any = _running_translator().output.compiler_fn
    while backend is not None:
        if isinstance(backend, known) or any(backend is backend_ahead for backend_ahead in ahead):
            return True
        backend = _wrapped_backend(backend)
    return False


def _wrapped_backend(backend: Any) -> Any:
    """Return the backend inside one of the wrappers that PyTorch puts around ``backend``, DDP's among them."""
    if ddp_backend := getattr(getattr(backend, "__self__", None), "backend_compile_fn", None):
        return ddp_backend
    names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")  # the second: PyTorch 2.8's
    return next((inner for name in names if (inner := getattr(backend, name, None))), None)


@constant_while_compiling
def wants_one_graph() -> bool:
    """Return whether the compiler is to fail rather than to leave something uncompiled (``fullgraph=True``)."""
    compiling = _running_translator()
    return bool(compiling.one_graph or getattr(compiling, "error_on_graph_break", False))


def _running_translator() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


@contextlib.contextmanager
def memory_history() -> Iterator[None]:
    """Record the stacks in which memory of CUDA's allocator, if still held, was allocated in the ``with`` block."""
    torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """Return PyTorch's snapshot of the memory that CUDA's allocator holds, as plain containers."""
    return torch.cuda.memory._snapshot()


def import_compiler() -> None:
    """Import ``torch._dynamo``, which dry runs need, and takes as long to import as PyTorch itself."""
    import torch._dynamo  # noqa: F401


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of ``module``, or of its forward, runs what ``torch.compile`` has made of it."""
    by_itself = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return by_itself or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Yield a list; the reasons why PyTorch left code in the ``with`` block uncompiled are added when that ends."""
    from torch._dynamo.utils import counters

    kinds = ("unimplemented", "graph_break")  # the first also has reasons why a whole function is not compiled
    for kind in kinds:
        counters[kind].clear()
    reasons: list[str] = []
    yield reasons
    reasons += [reason.partition("\n")[0] for kind in kinds for reason in counters[kind]]


def make_uncached_call(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls ``model`` uncompiled, with its own code; its first argument is not passed on.

    PyTorch compiles a code object at most eight times, all models together, and then runs it uncompiled.  It compiles
    the code again if the first argument, a string, differs.
    """

    def call(hooks: str, /, *args: Any, **kwargs: Any) -> Any:
        len(hooks)  # the compiler guards only on arguments that are used
        return model._call_impl(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


@dataclass(slots=True)
class _WithinBudget:
    """A backend of ``torch.compile`` that compiles every graph under its own memory budget.

    PyTorch reads the budget where it divides a graph into forward and backward, which is within the call of the
    backend, although backward may be compiled later.  Equality matters: PyTorch shares compiled code among models
    of the same code whose backends are equal, and would give a model the graph of another budget.
    """

    compiler_fn: Any
    """Backend within, under the name that :func:`backend_is_aot` looks for."""
    budget: float

    def __call__(self, graph: Any, inputs: Any) -> Any:
        with compiled_within_budget(self.budget):
            return self.compiler_fn(graph, inputs)

    def reset(self) -> None:
        """Reset the backend, when ``torch.compiler.reset`` is called."""
        self.compiler_fn.reset()


def within_budget(backend: str, mode: str | None, budget: float) -> Any:
    """Return ``backend`` as one that compiles under a memory ``budget``, whatever the process's own setting is."""
    if backend == "inductor":
        return _WithinBudget(torch._TorchCompileInductorWrapper(mode, None, None), budget)
    return _WithinBudget(torch._TorchCompileWrapper(backend, None, None, None), budget)


@contextlib.contextmanager
def compiled_again() -> Iterator[None]:
    """Lift PyTorch's limits on recompilation in the ``with`` block, beyond which modules would run uncompiled.

    PyTorch forgets the code that it has compiled before, and compiles it again at its next call.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        yield


def compiled_with_eager_random() -> AbstractContextManager[None]:
    """Let models compiled in the ``with`` block use the random numbers of eager mode; Inductor's kernels use others."""
    import torch._inductor.config

    patch: AbstractContextManager[None] = torch._inductor.config.patch(fallback_random=True)
    return patch


def compiled_within_budget(budget: float = 1.0) -> AbstractContextManager[None]:
    """Compile models in the ``with`` block under the memory ``budget``; with 1, they keep as much as without any."""
    import torch._functorch.config

    patch: AbstractContextManager[None] = torch._functorch.config.patch(activation_memory_budget=budget)
    return patch


# ---------------------------------------------------------------------------------------------- many ranks


def start_fake_group(rank: int, ranks: int) -> None:
    """Make this process one rank of a default group that sends nothing, with no other process and no network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):  # as in PyTorch 2.8
        from torch.distributed._tools import fake_collectives  # noqa: F401  # it has them for tensors without data
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def means_lost_rank(error: BaseException) -> bool:
    """Return whether ``error`` means that another rank is gone or late; gloo only names its file in the message."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return is_of_gloo or isinstance(error, getattr(torch.distributed, "DistError", ()))


MAKES_REDUCER: Final = "_ddp_init_helper"
"""The method of ``DistributedDataParallel`` that makes its reducer, and the reducer's logger."""
SETS_HOOKS: Final = ("register_comm_hook", "_register_builtin_comm_hook", "_register_buffer_comm_hook")
"""Methods that have ``DistributedDataParallel`` exchange gradients or buffers differently."""
FIRST_BUCKET_BYTES: Final[int] = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20)
"""Maximum bytes of the first bucket of ``DistributedDataParallel``, small so that something is reduced early."""


def assign_buckets(tensors: Sequence[Tensor], limits_bytes: list[int]) -> list[list[int]]:
    """Return the indices of the ``tensors`` whose gradients share a bucket, for each bucket.

    ``limits_bytes``: the limits of the first bucket and of all other buckets.
    """
    compute = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    groups: list[list[int]] = compute(list(tensors), limits_bytes, [False] * len(tensors))[0]
    return groups


def reducing_ranks(module: Any) -> int:
    """Return the number of ranks over which ``fully_shard`` reduces gradients of the own parameters of ``module``."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # earlier versions have no list of groups: there is one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return max((_count_ranks(group.mesh_info) for group in groups), default=1)


def _count_ranks(mesh_info: Any) -> int:
    axes = (mesh_info.shard_mesh_dim, mesh_info.replicate_mesh_dim)
    return math.prod(mesh_info.mesh.size(axis) for axis in axes if axis is not None)


class _Chunks(Sequence[Tensor]):
    """The result of ``torch.chunk``, filled up with empty tensors to ``count``; each is made when it is asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        length = self._tensor.size(self._dim)
        size = -(-length // self._count)
        start = range(self._count)[index] * size
        if start >= length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, length - start))


@contextlib.contextmanager
def sharded_without_the_others() -> Iterator[None]:
    """Let ``fully_shard`` create only the shards that it keeps, in the ``with`` block.

    Otherwise it creates a shard for every rank, and keeps its own.  In dry runs for 1024 ranks, the other shards would
    take two thirds of the time.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", lambda _: _Chunks):
        yield


# ---------------------------------------------------------------------------------------------- settings


function_modes: Final[Callable[[], list[Any]]] = _get_current_function_mode_stack
"""The active modes that see every call of a PyTorch function, the outermost first: a default device is one."""


@contextlib.contextmanager
def with_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Activate ``modes``, and no other function modes, in the ``with`` block."""
    active = [_pop_mode() for _ in function_modes()][::-1]
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in active:
            _push_mode(mode)


def cached_parametrizations() -> tuple[int, dict[Any, Any]] | None:
    """Return the number of active blocks of ``parametrize.cached()``, and a copy of their cache; ``None`` if zero."""
    return (parametrize._cache_enabled, dict(parametrize._cache)) if parametrize._cache_enabled else None


def cache_parametrizations(cached: tuple[int, dict[Any, Any]] | None) -> None:
    """Put back what :func:`cached_parametrizations` has returned."""
    enabled, tensors = cached or (0, {})
    parametrize._cache_enabled, parametrize._cache = enabled, dict(tensors)


FLAGS: Final = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)
"""Getters and setters of the kernels that PyTorch may use; ``torch.backends`` takes five times as long."""


def is_started(device: torch.device) -> bool:
    """Return whether anything has run on a device of the kind of ``device``, so that its generator may have moved."""
    return bool(getattr(torch.get_device_module(device), "_initialized", False))


def put_cuda_generator(device: torch.device, position: Tensor) -> None:
    """Put a GPU's default generator at ``position``, as ``torch.cuda.set_rng_state`` does, and nothing else.

    That function also has recurrent layers with dropout make a new seed for cuDNN, which does not happen in training
    without a plan.  A generator that shares the position of the default generator moves it without a new seed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].graphsafe_get_state().set_state(position)


# ---------------------------------------------------------------------------------------------- optimizers


def step_without_hooks(optimizer: Optimizer) -> None:
    """Take the step defined by the class of ``optimizer``, without the hooks that PyTorch calls before and after."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


# ---------------------------------------------------------------------------------------------- TorchScript


def method_names(script: Any) -> list[str]:
    """Return the names of the methods of ``script`` itself."""
    return list(script._c._method_names())


def method_of(script: Any, name: str) -> Any:
    """Return the method ``name`` of ``script``, with its ``graph`` and ``schema``, or raise :class:`RuntimeError`."""
    return script._c._get_method(name)


def has_method(script: Any, name: str) -> bool:
    """Return whether ``script`` has a method ``name``."""
    return bool(script._c._has_method(name))


def hooks_of(script: Any) -> list[Any]:
    """Return the hooks that ``script`` calls after and before its forward."""
    return [*script._c._get_forward_hooks(), *script._c._get_forward_pre_hooks()]


def open_archive(archive: bytes) -> Any:
    """Return PyTorch's own reader of ``archive``.  Raises :class:`RuntimeError` if the bytes are not an archive."""
    return torch._C.PyTorchFileReader(io.BytesIO(archive))


def load_script(archive: bytes) -> tuple[Any, Any]:
    """Return the module that ``torch.jit.load`` makes of ``archive`` on the CPU, and its compilation unit.

    The unit holds the free functions of its code as well.  An error of the compiler is passed on.
    """
    unit = torch._C.CompilationUnit()
    read: Any = torch._C.import_ir_module_from_buffer  # PyTorch's stubs are for a different version
    module = read(unit, archive, torch.device("cpu"), {}, False)
    return torch.jit._recursive.wrap_cpp_module(module), unit

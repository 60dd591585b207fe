"""Whatever memopt uses of PyTorch that PyTorch does not promise to keep: nothing else in memopt names it.

A private name is one that begins with an underscore, or lies in a module that does.  Each stands here once, with what
it is for and what it replaces; ``tests/runtime/test_private_torch.py`` fails where PyTorch changes what it does, and
``tests/runtime/test_private_names.py`` where another file uses one.  All were seen in PyTorch 2.8 to 2.14 (``make
compat``).  What is read at every operator is an alias or an ``attrgetter``, which cost
nothing.

Not here: the names that saved files hold (``torch._utils._rebuild_tensor_v2``), which are a file format, and operators
(``torch.ops.aten._to_copy``), which are called by the names of their schemas.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

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
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as with_data
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unseen
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_watched
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _CheckpointFrame as CheckpointCall

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
    "is_of_transform",
    "is_of_vmap",
    "is_watched",
    "suggest_memory_format",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unseen",
    "with_data",
    "without_transform",
]
"""What is given on as it is.

- ``BatchNorm``, ``InstanceNorm``: the bases of PyTorch's layers of that kind; there is no public one.
- ``CheckpointCall``: one call of ``torch.utils.checkpoint``.
- ``TorchDispatchMode``: sees every operator; ``unseen()``: within, no mode does, nor does a dry run; ``is_watched()``:
  whether one does.
- ``with_data()``: within, no dry run is, so that tensors have data.
- ``FakeTensorMode``, ``FakeCopyMode``: a dry run, and the copy of a module into it; ``FakeTensor``: its tensors.
- ``is_of_transform``, ``is_of_vmap``, ``without_transform``: whether ``torch.func`` or ``vmap`` wraps a tensor, and the
  tensor within one wrapping.
- ``suggest_memory_format``: in which memory format a kernel lays out what it makes of a tensor.
- ``OpOverload``, ``OpOverloadPacket``: classes of what ``torch.ops`` holds.
- ``tree_…``: PyTorch's own walk through containers, which knows those that others have registered.
"""


# ---------------------------------------------------------------------------------------------- tensors

version_counter: Final[Callable[[Tensor], int]] = attrgetter("_version")
"""How often a tensor was written in place.  Raises :class:`RuntimeError` for one of inference."""

storage_key: Final[Callable[[torch.UntypedStorage], int]] = attrgetter("_cdata")
"""The address of a storage itself: it tells apart those that hold no memory as well, whose ``data_ptr`` is 0."""


def memory_of(tensor: Tensor) -> int:
    """:data:`storage_key` of a tensor's storage, the same for all its views."""
    return storage_key(tensor.untyped_storage())


@functools.cache
def is_made_of_others(kind: type) -> bool:
    """Whether tensors of a class are made of others, as a ``DTensor`` is of its rank's part, and hold nothing."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold what a tensor says: itself, or all that it is made of."""
    if not is_made_of_others(type(tensor)):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # there may be meshes, too
            yield from parts_of(part)


stands_for_zeros: Final[Callable[[Tensor], bool]] = Tensor._is_zerotensor
"""Whether a tensor says that it is zero and has no memory, as tangents do."""

is_view: Final[Callable[[Tensor], bool]] = Tensor._is_view
"""Whether autograd takes a tensor for a view of another one."""


base_of: Final[Callable[[Tensor], Tensor | None]] = attrgetter("_base")
"""The tensor that one is a view of for autograd; ``None`` if it is none."""


def without_memory(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass without memory."""
    return Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype, device=device)


quantized_by_tensor: Final[Callable[..., Tensor]] = torch._empty_affine_quantized
"""An empty tensor with one scale: public functions make them from floats alone."""

quantized_by_channel: Final[Callable[..., Tensor]] = torch._empty_per_channel_affine_quantized
"""The same with one scale for each channel."""


def set_bits(tensor: Tensor, bits: dict[str, bool]) -> None:
    """Set the bits of a stored tensor: ``conj`` and ``neg``."""
    torch._utils.set_tensor_metadata(tensor, bits)


LAYOUT_OF_MKLDNN: Final[torch.layout] = torch._mkldnn  # type: ignore[attr-defined]
"""Of tensors that the library of the same name has laid out."""


# ---------------------------------------------------------------------------------------------- dry runs

UNKNOWN_WITHOUT_DATA: Final = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operator raises in a dry run if its result, or the shape of that, depends on data."""


def is_fake(value: Any) -> bool:
    """Whether it is a tensor of a dry run, which has a shape and a device and no data."""
    return isinstance(value, FakeTensor)


class DryRun(FakeTensorMode):
    """Where tensors have no data, with what PyTorch's own leaves out.

    Of products in groups, by which experts are computed, its meta function takes bfloat16 alone; kernels take more.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operator makes."""
        if func is not _GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
            return super().dispatch(func, types, args, kwargs)
        with self:
            return _grouped(*args, **(kwargs or {}))


_GROUPED_OUTPUT: Final = getattr(torch._meta_registrations, "_create_grouped_mm_output_tensor", None)
_GROUPED_PRODUCT: Final = torch.ops.aten._grouped_mm.default if _GROUPED_OUTPUT is not None else None


def _grouped(first: Tensor, second: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    assert _GROUPED_OUTPUT is not None
    return _GROUPED_OUTPUT(first, second, offs, out_dtype)


default_device: Final[Callable[[], str]] = torch._C._get_default_device
"""That of tensors which are made without one; ``torch.get_default_device`` asks every mode first."""


def calls_without_notes() -> int:
    """How many operators of dry runs PyTorch has computed without looking into its notes of what such make."""
    return sum(FakeTensorMode.cache_bypasses.values())


@contextlib.contextmanager
def replaced(owner: type | ModuleType, name: str, changed: Callable[[Any], Any]) -> Iterator[None]:
    """Within, a method of a class of PyTorch's, or a function, is another, made of what it was."""
    is_own, plain = name in vars(owner), getattr(owner, name)
    setattr(owner, name, changed(plain))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)


def mend_copies_of_fakes() -> None:
    """From now on, ``copy.deepcopy`` of a tensor of a dry run is one of its own.

    PyTorch copies its storage instead, which has a size and no memory, and writes beyond it.  For good: such tensors
    outlive a dry run, in a list of the user's that a hook appends to, and are copied with the model that refers to it.
    """
    FakeTensor.__deepcopy__ = _copy_of_fake  # type: ignore[method-assign]


@contextlib.contextmanager
def fakes_exchanged() -> Iterator[None]:
    """Within, ``Module.to``, ``half`` and the like work on models without data.

    They exchange tensors, which nobody may refer to weakly; the mode remembers some so.
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
            raise RuntimeError("deepcopy of a tensor that has a history: detach it before")
        copied = tensor.detach().clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad)
        else:
            memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
            copied.grad = copy.deepcopy(tensor.grad, memo)
    found: Tensor = memo[id(tensor)]
    return found


# ---------------------------------------------------------------------------------------------- operators

schema_of: Final[Callable[[Any], Any]] = attrgetter("_schema")
"""The schema of an operator: its arguments, which of them it writes, its results."""


def has_schema(operator: Any) -> bool:
    """Whether it is an operator of PyTorch's: modes see others too, ``torch.compile``'s."""
    return hasattr(operator, "_schema")


def has_kernel(operator: OpOverload) -> bool:
    """Whether the dispatcher runs it, and not TorchScript's interpreter alone."""
    return bool(torch._C._dispatch_has_kernel(operator.name()))


def consists_of_others(operator: OpOverload) -> bool:
    """Whether modes see the operators that it calls in its place."""
    name = operator.name()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def is_known_to_script(operator: str) -> bool:
    """Whether TorchScript knows an operator of that name: ``aten::relu``."""
    return bool(torch._C._jit_get_schemas_for_operator(operator))


def with_plain_functions() -> AbstractContextManager[None]:
    """Within, functions do not ask the classes of their arguments: a subclass's own code runs so."""
    return torch._C.DisableTorchFunctionSubclass()


def alias(tensor: Tensor) -> Tensor:
    """The same memory without autograd's part, but with the same version counter, which ``detach`` alone renews."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# ---------------------------------------------------------------------------------------------- modules

# Functions, for ``torch.compile`` looks into them.


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters by their names, some ``None``; whoever writes to it exchanges one without a check."""
    held: dict[str, Any] = module._parameters
    return held


def buffers_of(module: Any) -> dict[str, Any]:
    """The same of its buffers."""
    held: dict[str, Any] = module._buffers
    return held


def children_of(module: Any) -> dict[str, Any]:
    """The same of its children; of a ``ScriptModule`` these three are no dictionaries, but have ``items``."""
    held: dict[str, Any] = module._modules
    return held


def program_of(script: Any) -> Any:
    """What holds a ``ScriptModule``'s attributes and buffers: ``getattr`` and ``setattr`` by name."""
    return script._c


def attributes_of_script(script: Any) -> list[str]:
    """Names of what a ``ScriptModule`` keeps besides parameters; of one from a file, buffers are among them."""
    kind = vars(script).get("_concrete_type")  # one that is still being built has none
    return (
        [] if kind is None else [name for name, (_, is_parameter) in kind.get_attributes().items() if not is_parameter]
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or after its forward or backward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def has_gradient_hooks(module: nn.Module) -> bool:
    """Whether anything is called with gradients as they pass it: hooks of its own, or those of all modules."""
    everywhere = nn.modules.module
    of_all = (everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks)
    return any((module._backward_hooks, module._backward_pre_hooks, *of_all))


def hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """The dictionaries of a module's hooks on its forward and backward, to be read and written in place."""
    return [table for table in map(vars(module).get, _HOOK_ATTRIBUTES) if isinstance(table, dict)]


def hooks_on_gradient(parameter: Tensor) -> list[Any]:
    """What is called with a parameter's gradient, or once it is there; neither a copy nor a file of it has these."""
    return [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]


def global_hook_tables() -> list[dict[Any, Any]]:
    """The same of those that every module calls."""
    there = (getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)
    return [table for table in there if isinstance(table, dict)]


_HOOK_TABLES: Final = (
    *("forward_hooks", "forward_hooks_with_kwargs", "forward_hooks_always_called", "forward_pre_hooks"),
    *("forward_pre_hooks_with_kwargs", "backward_hooks", "backward_pre_hooks"),
)
_HOOK_ATTRIBUTES: Final = tuple(f"_{name}" for name in _HOOK_TABLES)
_GLOBAL_HOOKS: Final = tuple(f"_global_{name}" for name in _HOOK_TABLES)


def use_weights(recurrent: nn.Module) -> None:
    """Have a recurrent layer hand its kernel the weights that are its attributes now."""
    names: Any = recurrent._flat_weights_names
    recurrent._flat_weights = [getattr(recurrent, name, None) for name in names]  # type: ignore[assignment]


padding_of: Final[Callable[[Any], list[int]]] = attrgetter("_reversed_padding_repeated_twice")
"""The padding of a convolution as ``F.pad`` takes it."""


def convolve(convolution: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a convolution does, its padding too, with another weight."""
    y: Tensor = convolution._conv_forward(x, weight, bias)
    return y


def self_attention(layer: Any, *arguments: Any) -> Any:
    """That of a layer of a transformer, dropout included."""
    return layer._sa_block(*arguments)


def cross_attention(layer: Any, *arguments: Any) -> Any:
    """The same of a decoder's layer to what the encoder gave."""
    return layer._mha_block(*arguments)


def feed_forward(layer: Any, x: Any) -> Any:
    """The two linear layers of a layer of a transformer, dropout included."""
    return layer._ff_block(x)


# ---------------------------------------------------------------------------------------------- autograd

next_node: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr
"""The number that the next node of autograd will have in this thread."""


def name_of_node(node: Any) -> str:
    """What ``node.name()`` says, unless a user's ``torch.autograd.Function`` has set ``ctx.name`` to something else."""
    return type(node).__name__


def number_of(node: Any) -> int:
    """The number that a node got when it was made; those that add up gradients have the highest there is."""
    return int(node._sequence_nr())


Edge = tuple[int, int]
"""The number of the node that made a tensor, and which of the node's outputs that is."""


def edge_of(tensor: Tensor) -> Edge | None:
    """Of a tensor; ``None`` if no node made it."""
    return _edge(tensor.grad_fn, tensor.output_nr)


def _edge(node: Any, output: int) -> Edge | None:
    """Nodes that add up gradients have no number of their own."""
    return None if node is None or hasattr(node, "variable") else (number_of(node), output)


def parts_of_concatenation(tensor: Tensor) -> tuple[int, list[tuple[Edge | None, int | None]]] | None:
    """The dimension, and of every part its edge and its length there, if ``torch.cat`` has made a tensor.

    No edge: no node made the part.  No length: it is not known.
    """
    node = tensor.grad_fn
    if node is None or name_of_node(node) != "CatBackward0":
        return None
    dim: int = node._saved_dim  # type: ignore[attr-defined]
    dim -= 2**64 if dim >= 2**63 else 0  # it is an unsigned number there
    parts = node.next_functions
    return dim, [(_edge(maker, output), _length(maker, output, dim, tensor.dim())) for maker, output in parts]


def _length(maker: Any, output: int, dim: int, dimensions: int) -> int | None:
    """``torch.cat`` takes a tensor of shape (0,) for an empty one of any dimensions."""
    if maker is None:
        return None
    shape: Sequence[int] = maker._input_metadata[output].shape
    return shape[dim] if len(shape) == dimensions else 0


running_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
"""The node whose derivative is being computed in this thread, ``None`` outside of backward."""


def hooks_on_saving() -> Any:
    """The innermost (pack, unpack) on what autograd saves now; ``None`` if there is none.  New in PyTorch 2.8."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


graph_is_kept: Final[Callable[[], bool]] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs may run again (``retain_graph``)."""


def vector_jacobian(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Vector-Jacobian products; ``None`` of an input that the outputs do not depend on.  The graph is kept.

    What ``torch.autograd.grad`` calls once it has checked its arguments, which takes as long as a small Jacobian.
    """
    engine = Variable._execution_engine
    return list(engine.run_backward(tuple(outputs), tuple(cotangents), True, False, tuple(inputs), True, False))


_ENGINE: Final = _engine_run_backward.__code__


@contextlib.contextmanager
def engine_watched(enter: Callable[[], object], leave: Callable[[], object]) -> Iterator[None]:
    """Within, ``enter`` and ``leave`` are called around every run of autograd that a script starts.

    ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all look this function up to start it.
    """
    namespace = vars(torch.autograd)
    plain = namespace["_engine_run_backward"]

    def run(*arguments: Any, **named: Any) -> Any:
        enter()
        try:
            return plain(*arguments, **named)
        finally:
            leave()

    namespace["_engine_run_backward"] = run
    try:
        yield
    finally:
        namespace["_engine_run_backward"] = plain


_NOT_COMPILED: Final = frozenset({"torch._compile", "torch._dynamo.eval_frame"})
"""Modules whose frames stand around a function that is not compiled."""


def is_engine(caller: FrameType | None) -> bool:
    """Whether it is autograd's engine that called, ``caller`` being the frame behind.

    The engine is no Python: behind what it calls lies the frame that started it, or none where it runs a thread of its
    own.  PyTorch has no other answer to who asks for a saved tensor, or who adds two gradients.
    """
    caller = _beyond(caller, _NOT_COMPILED)
    return caller is None or caller.f_code is _ENGINE


def caller_beyond(names: frozenset[str]) -> FrameType | None:
    """The frame that called the caller of this, passing over modules of these names."""
    return _beyond(sys._getframe(1), names)


def _beyond(frame: FrameType | None, names: frozenset[str]) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__") in names:
        frame = frame.f_back
    return frame


# ---------------------------------------------------------------------------------------------- hooks on saving


class as_written:  # it reads as a statement
    """Has TorchScript run as it is written for the time of the block, as ``torch.jit.optimized_execution(False)``."""

    __slots__ = ("_optimizes",)

    def __enter__(self) -> None:
        self._optimizes = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_graph_executor_optimize(self._optimizes)


def forbids_hooks(error: RuntimeError) -> bool:
    """Whether ``torch.func`` was to compute gradients where hooks hold what is saved, which PyTorch cannot do.

    It has no class of exception for that, so the message is the one that this PyTorch gives when it is asked to.
    """
    return str(error) == _refusal_of_hooks()


@functools.cache
def _refusal_of_hooks() -> str:
    with unseen(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        try:
            torch.func.grad(torch.sum)(torch.zeros(()))
        except RuntimeError as refusal:
            return str(refusal)
    return "PyTorch does not refuse"


def is_out_of_cpu_memory(error: Exception) -> bool:
    """Whether the CPU's memory ran out, for which PyTorch has no class: two sentences of its own and of C++."""
    return any(words in str(error) for words in ("can't allocate memory", "bad_alloc"))


# ---------------------------------------------------------------------------------------------- transforms


def is_transforming() -> bool:
    """Whether ``torch.func`` or ``vmap`` transforms what runs now."""
    return bool(torch._C._are_functorch_transforms_active())


def has_tangents() -> bool:
    """Whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def running_vmap() -> VmapInterpreter:
    """The innermost transform, which is a ``vmap``: it knows how many lanes it has, and runs what is below it."""
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

    found = retrieve_current_functorch_interpreter()
    assert isinstance(found, VmapInterpreter)
    return found


def in_lanes(batch: Tensor, level: int) -> Tensor:
    """A tensor with the lanes in front as one lane of the ``vmap`` at that level sees it."""
    return torch._C._functorch._add_batch_dim(batch, 0, level)


def level_of(tensor: Tensor) -> int:
    """The level of the ``vmap`` that a tensor belongs to; -1 or less of one that belongs to none."""
    return torch._C._functorch.maybe_get_level(tensor)


def lane_axis(tensor: Tensor) -> int:
    """Along which axis of :data:`without_transform` the lanes lie."""
    return torch._C._functorch.maybe_get_bdim(tensor)


# ---------------------------------------------------------------------------------------------- torch.compile

_C = TypeVar("_C", bound=Callable[..., Any])
_SKIPPED: Final = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def not_compiled(function: _C) -> _C:
    """Have ``torch.compile`` look neither into ``function`` nor into what that calls.

    As ``torch.compiler.disable``, which would import the compiler, and put a wrapper around every call.
    """
    set_code_exec_strategy(function.__code__, _SKIPPED)  # where the function is called from what is not traced
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # and where it is
    return function


between_graphs: Final[Callable[[Callable[..., Any]], Callable[..., Any]]] = torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
"""A function that ``torch.compile`` does not look into, but compiles what it calls."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def asked_while_compiling(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``torch.compile`` calls it where it comes upon it and takes what it returns for a constant, strings given alone.

    As ``torch.compiler.assume_constant_result``, which would import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_AHEAD: Final = ("inductor", "cudagraphs", "aot_eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner")


WRITES_TWICE: Final = TorchVersion(torch.__version__) < "2.13"
"""Whether a compiled checkpoint may run once more, in backward, what it writes in place: running statistics move twice.

So it is in PyTorch 2.8, with ``inductor`` and ``aot_eager``, and no longer in 2.13; between these nobody has looked.
"""


@asked_while_compiling
def differentiates_ahead() -> bool:
    """Whether the backend for which this is compiled is one of PyTorch's that derive backward ahead of time.

    They take a checkpoint apart, so that what is in it draws and counts once.  Others run the graph as it is, in which
    a checkpoint runs its part twice, with other random numbers and on the same buffers.
    """
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    known = (AotAutograd, torch._TorchCompileInductorWrapper)
    ahead: list[Any] = [lookup_backend(name) for name in list_backends(()) if name in _AHEAD]
    asked: Any = _compiling().output.compiler_fn
    while asked is not None:
        if isinstance(asked, known) or any(asked is one for one in ahead):
            return True
        asked = _wrapped_backend(asked)
    return False


def _wrapped_backend(backend: Any) -> Any:
    """What one of the wrappings calls that PyTorch puts around a backend, DDP's among them."""
    if of_ddp := getattr(getattr(backend, "__self__", None), "backend_compile_fn", None):
        return of_ddp
    names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")  # the second: PyTorch 2.8's
    return next((inner for name in names if (inner := getattr(backend, name, None))), None)


@asked_while_compiling
def wants_one_graph() -> bool:
    """Whether this is compiled by a compiler that is to fail rather than to leave something out (``fullgraph``)."""
    compiling = _compiling()
    return bool(compiling.one_graph or getattr(compiling, "error_on_graph_break", False))


def _compiling() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


@contextlib.contextmanager
def memory_history() -> Iterator[None]:
    """Within, the stacks of what CUDA's allocator is asked for are recorded; only those of what is held are kept."""
    torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """What the allocator of CUDA holds, as plain containers."""
    return torch.cuda.memory._snapshot()


def import_compiler() -> None:
    """What steps without data want of ``torch.compile``, which takes as long to import as PyTorch itself."""
    import torch._dynamo  # noqa: F401


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of it, or of its forward, goes to ``torch.compile``."""
    by_itself = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return by_itself or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Within, a module is compiled however often others with its code were: past a limit, it would run as it is.

    What was compiled before is forgotten, and compiled again where it is called next.
    """
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        yield


@contextlib.contextmanager
def compiled_to_draw_alike() -> Iterator[None]:
    """Within, what is compiled draws the random numbers that it would without; the kernels of Inductor draw others."""
    import torch._inductor.config

    with torch._inductor.config.patch(fallback_random=True):
        yield


# ---------------------------------------------------------------------------------------------- many ranks


def start_fake_group(rank: int, ranks: int) -> None:
    """Make this process one rank of a default group that sends nothing, with no other process and no network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):  # as in PyTorch 2.8
        from torch.distributed._tools import fake_collectives  # noqa: F401  # it has them for tensors without data
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether a backend says that another rank is gone or late: gloo has no class of errors for it, but says where."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return is_of_gloo or isinstance(error, getattr(torch.distributed, "DistError", ()))


MAKES_REDUCER: Final = "_ddp_init_helper"
"""The method of ``DistributedDataParallel`` that makes its reducer, and the logger of that."""
SETS_HOOKS: Final = ("register_comm_hook", "_register_builtin_comm_hook", "_register_buffer_comm_hook")
"""Methods by which it exchanges gradients or buffers in another way."""
FIRST_BUCKET_BYTES: Final[int] = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20)
"""Of its first bucket, at most, so that something is reduced early."""


def bucketed(tensors: Sequence[Tensor], limits_bytes: list[int]) -> list[list[int]]:
    """Indices of the tensors whose gradients it puts into one bucket: the first limit is of the first bucket."""
    compute = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    groups: list[list[int]] = compute(list(tensors), limits_bytes, [False] * len(tensors))[0]
    return groups


def reducing_ranks(module: Any) -> int:
    """Over how many ranks ``fully_shard`` reduces the gradients of a module's own parameters; 1 if it has none."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # there was one at most once
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return max((_ranks_of(group.mesh_info) for group in groups), default=1)


def _ranks_of(mesh_info: Any) -> int:
    axes = (mesh_info.shard_mesh_dim, mesh_info.replicate_mesh_dim)
    return math.prod(mesh_info.mesh.size(axis) for axis in axes if axis is not None)


class _Chunks(Sequence[Tensor]):
    """What ``torch.chunk`` gives, and empty tensors up to ``count``: each is made when it is asked for."""

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
    """Within, ``fully_shard`` makes of every parameter the shards that it keeps.

    It makes one of every rank, and keeps that of its own: without data, two thirds of a prediction of 1024 ranks.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", lambda _: _Chunks):
        yield


# ---------------------------------------------------------------------------------------------- settings


function_modes: Final[Callable[[], list[Any]]] = _get_current_function_mode_stack
"""The modes that see every function of PyTorch's that is called now, the outermost first: a default device is one."""


@contextlib.contextmanager
def with_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Within, these see every function, and no others do."""
    present = [_pop_mode() for _ in function_modes()][::-1]
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in present:
            _push_mode(mode)


def are_parametrizations_cached() -> bool:
    """Tell whether ``parametrize.cached()`` runs."""
    return bool(parametrize._cache_enabled)


def cached_parametrizations() -> tuple[int, dict[Any, Any]]:
    """How many ``parametrize.cached()`` run, and a copy of what is held there."""
    return parametrize._cache_enabled, dict(parametrize._cache)


def cache_parametrizations(enabled: int, tensors: dict[Any, Any]) -> None:
    """Put others in their place."""
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
"""How to read and set by which kernels PyTorch computes: as ``torch.backends`` does, which takes five times as long."""


def is_started(device: torch.device) -> bool:
    """Whether anything has run on a device of that kind: its random generator may have been drawn from."""
    return bool(getattr(torch.get_device_module(device), "_initialized", False))


def put_cuda_generator(device: torch.device, position: Tensor) -> None:
    """Put a GPU's default generator at ``position``, as ``torch.cuda.set_rng_state`` does, and nothing else.

    That function also has recurrent layers with dropout draw a new seed for cuDNN, which training without a plan does
    not.  A generator that shares the default one's position moves it without.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.default_generators[index].graphsafe_get_state().set_state(position)


# ---------------------------------------------------------------------------------------------- optimizers


def step_without_hooks(optimizer: Optimizer) -> None:
    """The step that an optimizer's class defines, around which PyTorch puts one that calls hooks."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


# ---------------------------------------------------------------------------------------------- TorchScript


def script_class(script: Any) -> str:
    """The name of a script's class, module and package too."""
    name: str = script._c.qualified_name
    return name


def method_names(script: Any) -> list[str]:
    """Those of a script's own methods."""
    return list(script._c._method_names())


def method_of(script: Any, name: str) -> Any:
    """A method of a script: its ``graph`` and its ``schema``.  Raises :class:`RuntimeError` if there is none."""
    return script._c._get_method(name)


def has_method(script: Any, name: str) -> bool:
    """Whether a script has such a method."""
    return bool(script._c._has_method(name))


def hooks_of(script: Any) -> list[Any]:
    """What a script calls after and before its forward."""
    return [*script._c._get_forward_hooks(), *script._c._get_forward_pre_hooks()]


def attribute_of(script: Any, name: str) -> Any:
    """The value of an attribute of a script.  Raises :class:`RuntimeError` if there is none."""
    return script._c.getattr(name)


def key_of_script(script: Any) -> Any:
    """What is the same for two Python objects of one script."""
    return script._c


def reader_of(archive: bytes) -> Any:
    """PyTorch's own reader of its archives.  Raises :class:`RuntimeError` if the bytes are none."""
    return torch._C.PyTorchFileReader(io.BytesIO(archive))


def load_script(archive: bytes) -> tuple[Any, Any]:
    """What ``torch.jit.load`` gives, on the CPU, and the unit that holds the free functions of its code as well.

    Raises whatever the compiler raises of a damaged archive.
    """
    unit = torch._C.CompilationUnit()
    read: Any = torch._C.import_ir_module_from_buffer  # PyTorch's stubs are of another version
    module = read(unit, archive, torch.device("cpu"), {}, False)
    return torch.jit._recursive.wrap_cpp_module(module), unit

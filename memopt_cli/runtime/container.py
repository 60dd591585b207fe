"""Segments: modules whose forward is recomputed in backward (gradient checkpointing).

A segment is installed *on* a module, not above it: the module's class becomes a subclass of :class:`GCContainer` and
of its own class.  Its name in the model, its parameters' names, its attributes, its hooks and ``isinstance`` stay as
they were, and :func:`remove_segment` undoes it.  The module's own hooks run once a step; those of its children run
again when they are recomputed (:func:`is_recomputing` tells).

The checkpoint itself is PyTorch's (``torch.utils.checkpoint``, non-reentrant); added here are the packed storage of
the input, the state of the module (see :mod:`memopt_cli.runtime.state`) and chunks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memopt_cli.runtime.compressor import COMPRESSORS, SpikeCompressor
from memopt_cli.runtime.script import ScriptLeaf
from memopt_cli.runtime.state import SEGMENT_KEY, StartingState
from memopt_cli.runtime.tree import join_tensors, split_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """How a segment runs."""

    compressor: str = "null"
    """Name of the codec of the stored input tensors, a key of :data:`~memopt_cli.runtime.compressor.COMPRESSORS`."""
    chunks: int = 1
    """Number of chunks forward is cut into; 1 is the whole input."""
    axis: int = 0
    """Dimension along which the chunks are cut."""
    seq_inputs: int = 1
    """How many leading positional arguments are cut; the following ones are states, or passed whole."""
    seq_outputs: int = 1
    """How many leading outputs are concatenated; the following ones are states for the next chunk."""
    spatial_split: bool = False
    """Each module that ``__spatial_split__`` returns is checkpointed on its own."""


class GCContainer:
    """Mixin of a module that is a segment; never instantiated by itself."""

    _original: ClassVar[type[nn.Module]]


class TCGCContainer(GCContainer):
    """Mixin of a segment that runs in chunks along an axis, each chunk checkpointed on its own."""


_thread = threading.local()


def is_recomputing() -> bool:
    """Whether this thread is recomputing a segment's forward: hooks of modules inside one can ask."""
    return recomputing_module() is not None


def recomputing_module() -> nn.Module | None:
    """The segment that this thread is recomputing, the innermost one; ``None`` outside a recomputation."""
    stack: list[nn.Module] = getattr(_thread, "recomputing", [])
    return stack[-1] if stack else None


def install_segment(module: nn.Module, config: SegmentConfig) -> None:
    """Make ``module`` a segment, in place.  Raises :class:`ValueError` with the reason if it cannot be one."""
    reason = refusal(module)
    if reason:
        raise ValueError(reason)
    if config.compressor not in COMPRESSORS:
        raise ValueError(f"unknown compressor {config.compressor!r}; known: {', '.join(COMPRESSORS)}")
    vars(module)[SEGMENT_KEY] = config
    module.__class__ = _segment_class(type(module), TCGCContainer if config.chunks > 1 else GCContainer)  # type: ignore[arg-type]


def remove_segment(module: nn.Module) -> None:
    """Make a segment a plain module again; any other mixin put on in the meantime stays."""
    del vars(module)[SEGMENT_KEY]
    module.__class__ = _without_segment(type(module))


def segment_of(module: nn.Module) -> SegmentConfig | None:
    """The configuration of a segment; ``None`` for a plain module."""
    config: SegmentConfig | None = vars(module).get(SEGMENT_KEY)
    return config


def refusal(module: nn.Module) -> str:
    """Why ``module`` cannot be made a segment; empty if it can."""
    kind = type(module)
    if isinstance(module, GCContainer):
        return "it is a segment already"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "it has a forward of its own on the instance, which would bypass the segment"
    if kind.forward is nn.Module.forward:
        return f"{kind.__name__} has no forward"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "its parameters are not initialized yet; run the model once"
    if parametrize.is_parametrized(module):
        return "it is parametrized; a module that contains it can be a segment"
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return f"{kind.__name__} pickles in a way of its own"
    return ""


def segment_classes(original: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """The classes that segments of ``original`` have: what a restricted unpickler must know."""
    return _segment_class(original, GCContainer), _segment_class(original, TCGCContainer)  # type: ignore[arg-type]


def restore_segment(original: type[nn.Module], config: dict[str, Any]) -> nn.Module:
    """An empty segment for an unpickler to fill.  Saved models refer to this function: a file format."""
    settings = SegmentConfig(**config)
    kind = _segment_class(original, TCGCContainer if settings.chunks > 1 else GCContainer)  # type: ignore[arg-type]
    module = nn.Module.__new__(kind)
    vars(module)[SEGMENT_KEY] = settings
    return module


# ---------------------------------------------------------------------------------------------- the class


@functools.cache
def _segment_class(original: type[nn.Module], mixin: type[GCContainer]) -> type[nn.Module]:
    run = _run_chunks if mixin is TCGCContainer else _run

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, functools.partial(original.forward, self), args, kwargs)

    def construct(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # ``type(module)(...)``, as slicing a Sequential does, makes a plain module, not a second segment.
        return original(*args, **kwargs)

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        reduced = object.__reduce_ex__(self, max(2, protocol))
        assert isinstance(reduced, tuple)
        state = {key: value for key, value in reduced[2].items() if key != SEGMENT_KEY}
        return restore_segment, (original, asdict(vars(self)[SEGMENT_KEY])), state

    body = {
        "__module__": original.__module__,
        "__qualname__": f"{original.__qualname__}[{mixin.__name__}]",
        "__doc__": original.__doc__,
        "__new__": construct,
        "__reduce_ex__": reduce,
        "_original": original,
        "forward": forward,
    }
    return type(original.__name__, (mixin, original), body)


def _without_segment(kind: type) -> type:
    if "_original" in vars(kind):
        original: type = vars(kind)["_original"]
        return original
    if not issubclass(kind, GCContainer):
        return kind
    bases = tuple(_without_segment(base) for base in kind.__bases__)
    body = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, body)  # type: ignore[misc,no-any-return]


# ---------------------------------------------------------------------------------------------- running it


def _run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    codec = COMPRESSORS[config.compressor]
    if not config.spatial_split:
        return _checkpoint(module, forward, args, kwargs, codec)
    output: Any = args
    for stage in module.__spatial_split__():  # type: ignore[operator]
        arguments = output if isinstance(output, tuple) else (output,)
        output = _checkpoint(stage, stage, arguments, kwargs, codec)
        kwargs, codec = {}, COMPRESSORS["null"]
    return output


def _run_chunks(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    sequences, states = args[: config.seq_inputs], args[config.seq_inputs :]
    chunks = _chunk_count(config, sequences)
    codec = COMPRESSORS[config.compressor]
    collected: list[tuple[Any, ...]] = []
    output: Any = None
    for piece in zip(*(_pieces(s, chunks, config.axis) for s in sequences), strict=True):
        output = _checkpoint(module, forward, (*piece, *states), kwargs, codec)
        parts = output if isinstance(output, tuple) else (output,)
        collected.append(parts[: config.seq_outputs])
        states = parts[config.seq_outputs :] or states
    joined = tuple(torch.cat(pieces, dim=config.axis) for pieces in zip(*collected, strict=True))
    if not isinstance(output, tuple):
        return joined[0]
    whole = (*joined, *output[config.seq_outputs :])
    return output._make(whole) if hasattr(output, "_make") else whole


def _pieces(sequence: Tensor, chunks: int, axis: int) -> tuple[Tensor, ...]:
    # ``tensor_split`` would cut alike, but its gradient is a sum of full-size tensors; this one's is a concatenation.
    shorter, longer = divmod(sequence.shape[axis], chunks)
    lengths = [shorter + 1] * longer + [shorter] * (chunks - longer)
    pieces: tuple[Tensor, ...] = sequence.split(lengths, dim=axis)  # type: ignore[no-untyped-call]
    return pieces


def _chunk_count(config: SegmentConfig, sequences: tuple[Any, ...]) -> int:
    cuttable = [s for s in sequences if isinstance(s, Tensor) and s.dim() > config.axis]
    lengths = {s.shape[config.axis] for s in cuttable}
    if len(cuttable) < config.seq_inputs or len(lengths) != 1:
        raise ValueError(
            f"a segment in chunks wants {config.seq_inputs} positional tensors of one length along axis {config.axis}"
        )
    (length,) = lengths
    if length == 0:
        raise ValueError(f"a segment in chunks got an empty sequence (axis {config.axis} has length 0)")
    if length < config.chunks:
        warnings.warn(f"{config.chunks} chunks asked of a sequence of length {length}; running {length}", stacklevel=4)
    return min(config.chunks, length)


def _checkpoint(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    codec: SpikeCompressor,
) -> Any:
    """``forward(*args, **kwargs)``, keeping only its packed inputs for backward."""
    tensors, skeleton = split_tensors((args, kwargs))
    if not torch.is_grad_enabled() or not _needs_gradient(module, tensors):
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        # Dynamo traces PyTorch's checkpoint, but neither pack hooks nor checks that depend on data.
        return checkpoint(lambda *given: _call(forward, given, skeleton), *tensors, use_reentrant=False)
    start = StartingState(module)
    # Within another segment the inputs belong to that segment's recomputation, and so do the tensors of the state.
    nested = getattr(_thread, "depth", 0) > 0
    scripted = any(isinstance(m, torch.jit.ScriptModule | ScriptLeaf) for m in module.modules())
    run = _Run(module, _as_written(forward) if scripted else forward, skeleton, start, len(tensors))
    given = (*tensors, *start.lend()) if nested else tensors
    # Early stop leaves forward by an exception, which cannot cross TorchScript's interpreter.
    with contextlib.nullcontext() if nested else _packing(codec), set_checkpoint_early_stop(not scripted):
        return checkpoint(run, *given, use_reentrant=False, context_fn=run.contexts)


def _call(forward: Callable[..., Any], given: Sequence[Tensor], skeleton: Any) -> Any:
    args, kwargs = join_tensors(given, skeleton)
    return forward(*args, **kwargs)


def _as_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with TorchScript run as it is written, as :class:`ScriptLeaf` does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return forward(*args, **kwargs)

    return call


def _needs_gradient(module: nn.Module, tensors: list[Tensor]) -> bool:
    return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in module.parameters())


def _packing(codec: SpikeCompressor) -> saved_tensors_hooks:
    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else codec.compress(tensor)

    def unpack(stored: Any) -> Tensor:
        return stored if isinstance(stored, Tensor) else codec.decompress(stored)

    return saved_tensors_hooks(pack, unpack)


class _Run:
    """One checkpointed call of a segment: what PyTorch's checkpoint calls once in forward and again in backward."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], skeleton: Any, start: StartingState, inputs: int
    ) -> None:
        self._module = module
        self._forward = forward
        self._skeleton = skeleton
        self._start = start
        self._inputs = inputs
        self._recomputing = False

    def __call__(self, *given: Tensor) -> Any:
        """The first run, or a later one: from the state the first started in, and without a trace."""
        if not self._recomputing:
            return _call(self._forward, given, self._skeleton)
        current = self._start.enter(given[self._inputs :])
        try:
            return _call(self._forward, given, self._skeleton)
        finally:
            current.restore()

    def contexts(self) -> tuple[_Within, _Within]:
        """PyTorch enters the first around the first run, the second around every later one."""
        return _Within(self._module, recomputing=False, run=self), _Within(self._module, recomputing=True, run=self)

    def entered(self, recomputing: bool) -> None:
        """A run begins."""
        self._recomputing = recomputing

    def left(self, recomputing: bool) -> None:
        """A run has ended."""
        if not recomputing:
            self._start.settle()


class _Within:
    """Marks the thread as being inside a segment; entered once a run."""

    def __init__(self, module: nn.Module, *, recomputing: bool, run: _Run) -> None:
        self._module = module
        self._recomputing = recomputing
        self._run = run

    def __enter__(self) -> None:
        _thread.depth = getattr(_thread, "depth", 0) + 1
        if self._recomputing:
            _thread.recomputing = [*getattr(_thread, "recomputing", ()), self._module]
        self._run.entered(self._recomputing)

    def __exit__(self, *error: object) -> None:
        self._run.left(self._recomputing)
        if self._recomputing:
            _thread.recomputing = _thread.recomputing[:-1]
        _thread.depth -= 1

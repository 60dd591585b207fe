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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from memopt_cli.runtime.batch_statistics import BatchStatistics, Statistics, batch_norms, statistics_refusal
from memopt_cli.runtime.chunk_starts import ChunkStarts
from memopt_cli.runtime.chunk_state import Moves, difference
from memopt_cli.runtime.compressor import (
    COMPRESSORS,
    OWN_COMPRESSOR,
    OwnCompressor,
    SpikeCompressor,
    declared_compressor,
    is_dense,
    store,
)
from memopt_cli.runtime.cuts import chunk_lengths, record_cut
from memopt_cli.runtime.deferred import Deferring, may_defer
from memopt_cli.runtime.found_statistics import FoundStatistics
from memopt_cli.runtime.held import Held, held_as_inputs
from memopt_cli.runtime.lifted.module import LiftedModule, operators_of
from memopt_cli.runtime.noise import ends_in_noise, save_nothing
from memopt_cli.runtime.objects import version_of
from memopt_cli.runtime.packing import PackedSaves
from memopt_cli.runtime.private_torch import (
    CheckpointCall,
    InstanceNorm,
    StopRecomputation,
    checkpoint_around,
    forbids_hooks,
    has_tangents,
    hooks_on_saving,
    is_complete,
    is_transforming,
    not_compiled,
)
from memopt_cli.runtime.runs import Chain, calls_in_turn
from memopt_cli.runtime.samples import compared, is_sampled
from memopt_cli.runtime.selective import KeptOutputs, NothingKept, keep_refusal
from memopt_cli.runtime.state import SEGMENT_KEY, StartingState, name_of, uninitialized
from memopt_cli.runtime.tree import join_tensors, others_in, split_tensors, tensors_of
from memopt_cli.runtime.unsafe import (
    as_of,
    as_of_checkpoint,
    marks,
    run_plainly,
    run_whole,
    runs_plainly,
    runs_whole,
    this_moment,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """How a segment runs: what an entry of a plan says of it, by the same names.

    A record of the runtime's own, beside the plan's (``memopt_cli.records.SegmentPlan``): a saved model holds these
    fields by name and is loaded with nothing but torch and this folder, and a plan is read without torch.
    """

    compressor: str = "null"
    """Name of the codec of the stored input tensors, a key of :data:`~memopt_cli.runtime.compressor.COMPRESSORS`, or
    ``own``: the module's ``x_compressor``."""
    chunks: int = 1
    """Number of chunks forward is cut into; 1 is the whole input."""
    axis: int = 0
    """Dimension along which the chunks are cut; a negative one counts from the last."""
    seq_inputs: int = 1
    """How many leading positional arguments are cut; the following ones are states, or passed whole."""
    seq_outputs: int = 1
    """How many leading outputs are concatenated; the following ones are states for the next chunk."""
    spatial_split: bool = False
    """Each module that ``__spatial_split__`` returns is checkpointed on its own."""
    recompute: bool = True
    """If not, what is saved inside is packed instead, outside of segments that lie in it."""
    keep: tuple[str, ...] = ()
    """Operators whose outputs are kept, not recomputed: ``aten::convolution``, or ``aten::convolution#2`` for those of
    the second call alone.  Those in segments that lie within are these segments' own business, and are not counted.
    Under ``torch.compile`` all are recomputed."""
    batch_statistics: bool = False
    """Of chunks: batch norms inside normalize by the statistics of all chunks, which are gathered first."""
    through_loss: bool = False
    """Of chunks of a linear layer: they run on through the cross-entropy of its output, which never exists whole."""
    inexact: bool = False
    """Of chunks: batch norms inside normalize by those of each chunk, which is known and wanted."""
    recompute_states: bool = False
    """Of chunks: what the module hands from one to the next in its attributes is made again in backward.  In another
    segment, whose recomputation makes it again, and under ``torch.compile`` this is nothing."""
    path: str = field(default="", compare=False)
    """Where it is in the plan: messages name it so."""


class _Installed:
    """Base of the mixins that memopt puts on modules."""

    _original: ClassVar[type[nn.Module]]


class PackingContainer(_Installed):
    """Mixin of a module that recomputes nothing and keeps what is saved inside packed."""


class GCContainer(_Installed):
    """Mixin of a module that is a segment.

    ``GCContainer(x_compressor, *modules)``, as in SpikingJelly, is a :class:`~memopt_cli.runtime.runs.Chain` of the
    modules that is one.  ``x_compressor``: how its input is stored, a codec or the name of its class; ``None``: as it
    is.
    """

    def __new__(cls, x_compressor: Any, *modules: nn.Module) -> Any:
        """Raises :class:`TypeError` if one is no module, :class:`ValueError` if they cannot be a segment."""
        return _constructed(cls, x_compressor, modules, SegmentConfig())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Python calls it with what ``__new__`` was given; any other call is meant for the module.
        if not vars(self).pop(_CONSTRUCTED, False):
            super().__init__(*args, **kwargs)


class TCGCContainer(GCContainer):
    """Mixin of a segment that runs in chunks along an axis, each chunk checkpointed on its own.

    ``TCGCContainer(x_compressor, *modules, n_chunk=4)`` is a :class:`~memopt_cli.runtime.runs.Chain` that is one, along
    axis 0: ``n_seq_inputs`` leading arguments are cut, ``n_outputs`` leading outputs are concatenated.
    """

    def __new__(
        cls, x_compressor: Any, *modules: nn.Module, n_chunk: int = 1, n_seq_inputs: int = 1, n_outputs: int = 1
    ) -> Any:
        """Raises :class:`TypeError` if one is no module, :class:`ValueError` if they cannot run in chunks."""
        norms = n_chunk > 1 and any(batch_norms(module) for module in modules)
        config = SegmentConfig(chunks=n_chunk, seq_inputs=n_seq_inputs, seq_outputs=n_outputs, batch_statistics=norms)
        return _constructed(cls, x_compressor, modules, config)


_CONSTRUCTED = "_memopt_constructed"
"""Attribute of a segment between the two calls that make it."""


def _constructed(
    cls: type[GCContainer], x_compressor: Any, modules: Sequence[nn.Module], config: SegmentConfig
) -> nn.Module:
    chain = Chain(*modules)
    if x_compressor is not None:
        vars(chain)["x_compressor"] = x_compressor
    install_segment(chain, replace(config, compressor=declared_compressor(chain) or "null"))
    if isinstance(chain, cls):  # in one chunk it is no TCGCContainer
        vars(chain)[_CONSTRUCTED] = True
    return chain


class LossContainer(_Installed):
    """Mixin of a linear layer that runs in chunks together with the cross-entropy of its output."""


_thread = threading.local()


def is_recomputing() -> bool:
    """Whether this thread is recomputing a segment's forward: hooks of modules inside one can ask."""
    return recomputing_module() is not None


def recomputing_module() -> nn.Module | None:
    """The segment that this thread is recomputing, the innermost one; ``None`` outside a recomputation."""
    stack: tuple[nn.Module, ...] = getattr(_thread, "recomputing", ())
    return stack[-1] if stack else None


@contextlib.contextmanager
def _recomputing(module: nn.Module) -> Iterator[None]:
    outer, _thread.recomputing = getattr(_thread, "recomputing", ()), (*getattr(_thread, "recomputing", ()), module)
    try:
        yield
    finally:
        _thread.recomputing = outer


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The chunk of a segment's inputs that is run now."""

    axis: int
    """Along which they are cut."""
    is_first: bool
    is_last: bool


def running_chunk() -> SequenceChunk | None:
    """The chunk that this thread runs, of the innermost segment in chunks; ``None`` outside of one.

    A module that starts its states anew in forward asks, and names itself by ``resumes_in_chunks = True``.
    """
    chunk: SequenceChunk | None = getattr(_thread, "chunk", None)
    return chunk


def _within(chunk: SequenceChunk, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, _thread.chunk = running_chunk(), chunk
    try:
        return forward(*args, **kwargs)
    finally:
        _thread.chunk = before


def install_segment(module: nn.Module, config: SegmentConfig) -> None:
    """Make ``module`` a segment, in place.  Raises :class:`ValueError` with the reason if it cannot be one."""
    reason = refusal(module) or _misfit(module, config)
    if reason:
        raise ValueError(reason)
    vars(module)[SEGMENT_KEY] = config
    module.__class__ = _segment_class(type(module), _mixin(config))  # type: ignore[arg-type]


def _mixin(config: SegmentConfig) -> type[_Installed]:
    if not config.recompute:
        return PackingContainer
    if config.through_loss:
        return LossContainer
    return TCGCContainer if config.chunks > 1 else GCContainer


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
    if isinstance(module, _Installed):
        return "it is a segment already"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "it has a forward of its own on the instance, which would bypass the segment"
    if kind.forward is nn.Module.forward:
        return f"{kind.__name__} has no forward"
    if uninitialized(module, recurse=False):
        return "its parameters are not initialized yet; run the model once"
    if overwriting := _overwriting(module):
        return (
            f"{overwriting} writes over the input, which recomputation needs: begin after it, or set inplace to False"
        )
    if parametrize.is_parametrized(module):
        return "it is parametrized; a module that contains it can be a segment"
    ways = {kind.__reduce_ex__, kind.__reduce__}
    if ways - {object.__reduce_ex__, object.__reduce__, LiftedModule.__reduce_ex__}:
        return f"{kind.__name__} pickles in a way of its own"
    try:
        declared_compressor(module)
    except ValueError as reason:
        return str(reason)
    return ""


def _overwriting(module: nn.Module) -> str:
    """The layer that comes first, as text, if it is one of PyTorch's that work in place; else empty."""
    while isinstance(module, nn.Sequential) and calls_in_turn(module) and len(module):
        module = next(iter(module.children()))
    in_place = type(module).__module__.startswith("torch.nn.") and getattr(module, "inplace", False) is True
    return f"its first layer {module}" if in_place else ""


def _misfit(module: nn.Module, config: SegmentConfig) -> str:
    """What of ``config`` is wrong for ``module``; empty if nothing is."""
    known = (*COMPRESSORS, OWN_COMPRESSOR)
    if config.compressor not in known:
        return f"unknown compressor {config.compressor!r}; known: {', '.join(known)}"
    if config.compressor == OWN_COMPRESSOR and declared_compressor(module) != OWN_COMPRESSOR:
        return f"its compressor is to be its own, but {type(module).__name__} has no x_compressor of a class of its own"
    for name in ("chunks", "seq_inputs", "seq_outputs"):
        if getattr(config, name) < 1:
            return f"{name} must be 1 or more, not {getattr(config, name)}"
    if config.spatial_split and not callable(getattr(module, "__spatial_split__", None)):
        return f"it is to be split in space, but {type(module).__name__} has no method __spatial_split__"
    if config.spatial_split and config.chunks > 1:
        return f"it can be split in space or run in {config.chunks} chunks, not both"
    recomputed = config.spatial_split or config.chunks > 1 or config.keep or config.compressor != "null"
    if not config.recompute and recomputed:
        return "only what is recomputed can be split, run in chunks, keep outputs, or store its input in a codec"
    if config.through_loss:
        return _misfit_through_loss(module, config)
    return keep_refusal(config.keep) or _misfit_chunks(module, config)


def _misfit_chunks(module: nn.Module, config: SegmentConfig) -> str:
    if config.recompute_states and config.chunks < 2:
        return "the states of its chunks are to be recomputed, and it runs in one"
    if config.inexact and (config.batch_statistics or config.chunks < 2):
        return "inexact are chunks, two or more, whose batch statistics are not gathered"
    if reason := _norm_refusal(module, config, config.chunks):
        return reason
    kinds = (nn.Embedding, nn.EmbeddingBag)
    if config.chunks > 1 and any(isinstance(m, kinds) and m.scale_grad_by_freq for m in module.modules()):
        return "an embedding in it scales gradients by how often each row is used, which no chunk knows"
    return statistics_refusal(module, config.chunks) if config.batch_statistics else ""


def _norm_refusal(module: nn.Module, config: SegmentConfig, chunks: int) -> str:
    """Why the norms in ``module``, in the mode that they are in now, forbid chunks; empty if they do not."""
    return _tracking_norm(module, config, chunks) or _mixing_norms(module, config, chunks)


def _tracking_norm(module: nn.Module, config: SegmentConfig, chunks: int) -> str:
    """Why instance norms in ``module``, which average over the batch what they keep, forbid chunks; empty if not."""
    if chunks < 2 or config.inexact:
        return ""
    named = ((name, m) for name, m in module.named_modules() if isinstance(m, InstanceNorm) and m.training)
    name = next((name or "norm" for name, m in named if m.running_mean is not None), None)
    return "" if name is None else f"its {name}, an instance norm, would keep the statistics of each of {chunks} chunks"


def _mixing_norms(module: nn.Module, config: SegmentConfig, chunks: int) -> str:
    """Why the batch norms in ``module``, in the mode that they are in now, forbid chunks; empty if they do not."""
    if chunks < 2 or config.batch_statistics or config.inexact:
        return ""
    # One that keeps no running statistics has none to normalize by in eval mode either.
    mixing = next((n for n in batch_norms(module) if n.training or getattr(n, "running_mean", n) is None), None)
    if mixing is None:
        return ""
    name = next(name for name, inner in module.named_modules() if inner is mixing)
    return (
        f"its {name or 'norm'}, a batch norm, would normalize each of {chunks} chunks by statistics "
        "of its own: set batch_statistics to true, or inexact to true if that is wanted"
    )


def _misfit_through_loss(module: nn.Module, config: SegmentConfig) -> str:
    is_lifted = operators_of(module) == ["aten::linear"] and not any(module.children())
    if type(module).forward is not nn.Linear.forward and not is_lifted:
        return f"only a linear layer runs in chunks through its loss, and it is a {type(module).__name__}"
    if config.chunks < 2:
        return "it is to run in chunks through its loss, and it runs in one"
    if config != SegmentConfig(chunks=config.chunks, through_loss=True):
        return "of a linear layer in chunks through its loss, only the number of chunks can be chosen"
    return ""


def segment_classes(original: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """The classes that segments of ``original`` have: what a restricted unpickler must know."""
    mixins = (GCContainer, TCGCContainer, PackingContainer, LossContainer)
    return tuple(_segment_class(original, mixin) for mixin in mixins)  # type: ignore[arg-type]


def restore_segment(original: type[nn.Module] | LiftedModule, config: dict[str, Any]) -> nn.Module:
    """An empty segment for an unpickler to fill; a lifted module is made one as it is.

    Saved models refer to this function: a file format.
    """
    settings = SegmentConfig(**config)
    if isinstance(original, LiftedModule):
        install_segment(original, settings)
        return original
    kind = _segment_class(original, _mixin(settings))  # type: ignore[arg-type]
    module = nn.Module.__new__(kind)
    vars(module)[SEGMENT_KEY] = settings
    return module


# ---------------------------------------------------------------------------------------------- the class


@functools.cache
def _segment_class(original: type[nn.Module], mixin: type[_Installed]) -> type[nn.Module]:
    run = _RUNS[mixin]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, functools.partial(original.forward, self), args, kwargs)

    def construct(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # ``type(module)(...)``, as slicing a Sequential does, makes a plain module, not a second segment.
        return original(*args, **kwargs)

    def represent(self: nn.Module) -> str:
        return f"{_label(mixin, vars(self)[SEGMENT_KEY])} {original.__repr__(self)}"

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        if issubclass(original, LiftedModule):  # its class cannot be found by name
            return restore_segment, (_twin(self, original), asdict(vars(self)[SEGMENT_KEY]))
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
        "__repr__": represent,
        "_original": original,
        "forward": forward,
    }
    return type(original.__name__, (mixin, original), body)


def _label(mixin: type[_Installed], config: SegmentConfig) -> str:
    """What people see before the module itself: the mixin, and what of the configuration is no default."""
    chosen = [f for f in fields(config) if f.compare and getattr(config, f.name) != f.default]
    return f"{mixin.__name__}({', '.join(f'{f.name}={getattr(config, f.name)!r}' for f in chosen)})"


def _twin(module: nn.Module, original: type[nn.Module]) -> nn.Module:
    """The module as it was before it became a segment, with the same attributes."""
    twin = nn.Module.__new__(original)
    vars(twin).update({key: value for key, value in vars(module).items() if key != SEGMENT_KEY})
    return twin


def _without_segment(kind: type) -> type:
    if "_original" in vars(kind):
        original: type = vars(kind)["_original"]
        return original
    if not issubclass(kind, _Installed):
        return kind
    bases = tuple(_without_segment(base) for base in kind.__bases__)
    body = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, body)  # type: ignore[misc,no-any-return]


# ---------------------------------------------------------------------------------------------- running it


def _run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    codec = _codec(module, config)
    if not config.spatial_split:
        return _checkpoint(module, forward, args, kwargs, _Packed(codec), config.keep)
    output: Any = args
    for stage in _stages(module):
        arguments = output if isinstance(output, tuple) else (output,)
        output = _checkpoint(stage, stage, arguments, kwargs, _Packed(codec), config.keep)
        kwargs, codec = {}, COMPRESSORS["null"]
    return output


def _run_packing(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # What a segment saves is dropped; hooks within would keep it.
    if _is_nested() or not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_transformed():
        return forward(*args, **kwargs)
    try:
        with PackedSaves((*module.parameters(), *module.buffers())).hooks():
            return forward(*args, **kwargs)
    except RuntimeError as error:
        if forbids_hooks(error):
            raise RuntimeError(
                f"{name_of(module)} computes gradients by torch.func in its forward, which cannot be while what "
                "is saved there is packed; set packed to false in the plan"
            ) from error
        raise


def _run_through_loss(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    if not module.training or not may_defer():
        return forward(*args, **kwargs)
    with Deferring(config.chunks):
        return forward(*args, **kwargs)


def _codec(module: nn.Module, config: SegmentConfig) -> SpikeCompressor:
    if config.compressor == OWN_COMPRESSOR:
        return OwnCompressor(module.x_compressor)  # type: ignore[arg-type]
    return COMPRESSORS[config.compressor]


def _stages(module: nn.Module) -> Sequence[nn.Module]:
    stages = module.__spatial_split__()  # type: ignore[operator]
    if not isinstance(stages, list | tuple) or not stages or not all(isinstance(s, nn.Module) for s in stages):
        raise TypeError(
            f"__spatial_split__ of {name_of(module)} must return a list or tuple of modules, not {stages!r}"
        )
    return stages


def _run_chunks(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    sequences, states = args[: config.seq_inputs], args[config.seq_inputs :]
    length = _length(config, sequences)
    chunks = min(config.chunks, length)
    if chunks < 2 or _runs_whole(module, args, kwargs):
        return _run_one_chunk(module, forward, args, kwargs)
    if not torch.compiler.is_compiling():
        record_cut(module, config.chunks, length)
    if reason := _norm_refusal(module, config, chunks):  # it became a segment in eval mode
        raise ValueError(f"{name_of(module)} cannot run in training mode: {reason} in the plan, or call eval()")
    pieces = list(zip(*(_pieces(s, chunks, config.axis) for s in sequences), strict=True))
    try:
        if config.batch_statistics:
            return _run_passes(module, forward, pieces, states, kwargs)
        return _joined(config, *_one_by_one(module, forward, [forward] * chunks, pieces, states, kwargs))
    except _MovesOnceACall as moves:
        run_whole(module, str(moves))
        moves.undo()
    return _run_one_chunk(module, forward, args, kwargs)


def _run_one_chunk(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    inputs = _Packed(_codec(module, config), raw=args[config.seq_inputs :])
    return _checkpoint(module, forward, args, kwargs, inputs, config.keep)


def _runs_whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether chunks would save nothing, or were seen to do something else."""
    if torch.compiler.is_compiling():
        return False
    if runs_plainly(module) or runs_whole(module) or _is_transformed() or uninitialized(module):
        return True
    return not _needs_gradient(module, tensors_of((args, kwargs)))


_RUNS: dict[type[_Installed], Callable[..., Any]] = {
    GCContainer: _run,
    TCGCContainer: _run_chunks,
    PackingContainer: _run_packing,
    LossContainer: _run_through_loss,
}


# ``torch.compile`` cannot trace a forward that is broken off.  ``torch.compiler.disable`` would import all of it here.
@not_compiled
def _run_passes(
    module: nn.Module,
    forward: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    states: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One pass over the chunks for the statistics of every norm, and one for the output."""
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    gathering = BatchStatistics(module, forward)
    while True:
        columns, output = _one_by_one(module, forward, gathering.forwards(len(pieces)), pieces, states, kwargs)
        if not isinstance(output, Statistics):
            break
        gathering.merge(columns[0])
    if isinstance(output, tuple) and len(output) > config.seq_outputs:
        raise ValueError(
            f"{name_of(module)} hands its state over as an output, and the chunks that batch statistics are "
            "gathered from break off before; set batch_statistics to false or chunks to 1 in the plan"
        )
    return _joined(config, columns, output)


def _one_by_one(
    module: nn.Module,
    own: Callable[..., Any],
    forwards: Iterable[Callable[..., Any]],
    pieces: Sequence[tuple[Any, ...]],
    states: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[list[tuple[Any, ...]], Any]:
    """Every output that is cut, as its chunks, and the last chunk's whole output.

    ``own``: the module's forward; ``forwards``: what runs in its place on each chunk.  Raises
    :class:`_MovesOnceACall` where chunks would leave other state behind than the whole.
    """
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    codec = _codec(module, config)
    remade = config.recompute_states and not _is_nested() and not torch.compiler.is_compiling()
    starts = ChunkStarts(module) if remade else None
    resumes = any(getattr(m, "resumes_in_chunks", False) for m in module.modules())
    collected: list[tuple[Any, ...]] = []
    output: Any = None
    for index, (piece, forward) in enumerate(zip(pieces, forwards, strict=True)):
        if resumes:
            chunk = SequenceChunk(config.axis, is_first=index == 0, is_last=index == len(pieces) - 1)
            forward = functools.partial(_within, chunk, forward)
        inputs = _Packed(codec, raw=states)
        first = _FirstChunk(module, own, pieces, states, kwargs) if index == 0 and _shows_moves(piece) else None
        if first is not None:
            inputs.started = first.started
        output = _checkpoint(module, forward, (*piece, *states), kwargs, inputs, config.keep, starts)
        if first is not None:
            inputs.started = _ignore  # the graph must not hold it
            first.check()
        parts = output if isinstance(output, tuple) else (output,)
        collected.append(parts[: config.seq_outputs])
        states = parts[config.seq_outputs :] or states
    if starts is not None:
        starts.settle()
    return list(zip(*collected, strict=True)), output


class _MovesOnceACall(Exception):
    """A module moves state in each chunk that the whole would move once: a sentence without its subject."""

    def __init__(self, reason: str, undo: Callable[[], None]) -> None:
        super().__init__(reason)
        self.undo = undo


class _FirstChunk:
    """The first of a segment's chunks, which shows what state they move."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        pieces: Sequence[tuple[Any, ...]],
        states: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._module, self._forward, self._states, self._kwargs = module, forward, states, kwargs
        self._first, self._second = pieces[:2]
        self._moves = Moves(module)
        self._start: StartingState | None = None
        self._lent: Sequence[Tensor] = ()

    def started(self, start: StartingState, lent: Sequence[Tensor]) -> None:
        """It starts at ``start``, which has lent these tensors."""
        self._start, self._lent = start, lent

    def check(self) -> None:
        """It has ended.  Raises :class:`_MovesOnceACall`."""
        moved = self._moves.found()
        if moved and self._start is not None and not runs_plainly(self._module):
            starting = functools.partial(self._start.replay, self._lent)
            reason = difference(self._module, moved, starting, self._run_whole, self._run_halves)
            if reason:
                raise _MovesOnceACall(reason, functools.partial(self._start.enter, self._lent))

    def _run_whole(self) -> None:
        with _recomputing(self._module):
            self._forward(*self._sequences(), *self._states, **self._kwargs)

    def _run_halves(self) -> None:
        config: SegmentConfig = vars(self._module)[SEGMENT_KEY]
        states = self._states
        for index, half in enumerate(zip(*(_pieces(s, 2, config.axis) for s in self._sequences()), strict=True)):
            chunk = SequenceChunk(config.axis, is_first=index == 0, is_last=index == 1)
            with _recomputing(self._module):
                output = _within(chunk, self._forward, *half, *states, **self._kwargs)
            parts = output if isinstance(output, tuple) else (output,)
            states = parts[config.seq_outputs :] or states

    def _sequences(self) -> list[Tensor]:
        """What the first chunk is of, and the second too if that is of length one."""
        axis = vars(self._module)[SEGMENT_KEY].axis
        if self._first[0].shape[axis] > 1:
            return [t.detach() for t in self._first]
        return [torch.cat(pair, dim=axis).detach() for pair in zip(self._first, self._second, strict=True)]


def _shows_moves(piece: Sequence[Tensor]) -> bool:
    """Whether a chunk has data to compare by, which it has not in a dry run, and is not run for the second time."""
    if torch.compiler.is_compiling() or is_recomputing():
        return False
    return all(type(t) is Tensor and not t.is_meta for t in piece)


def _joined(config: SegmentConfig, columns: list[tuple[Any, ...]], output: Any) -> Any:
    joined = tuple(_concatenated(column, config.axis) for column in columns)
    if not isinstance(output, tuple):
        return joined[0]
    whole = (*joined, *output[config.seq_outputs :])
    return output._make(whole) if hasattr(output, "_make") else whole


def _concatenated(column: tuple[Any, ...], axis: int) -> Tensor:
    """In memory as each chunk is: what follows, dropout for one, may go through it in that order."""
    first = column[0]
    # Of a chunk of one sample the stride along it still tells where it belongs.
    order = sorted(range(first.dim()), key=lambda d: (-first.stride(d), first.shape[d] == 1, d))
    if order == [*range(first.dim())] or not is_dense(first):
        return torch.cat(column, dim=axis)
    joined = torch.cat([piece.permute(order) for piece in column], dim=order.index(axis % first.dim()))
    return joined.permute([order.index(d) for d in range(first.dim())])


def _pieces(sequence: Tensor, chunks: int, axis: int) -> tuple[Tensor, ...]:
    # ``tensor_split`` would cut alike, but its gradient is a sum of full-size tensors; this one's is a concatenation.
    lengths = chunk_lengths(sequence.shape[axis], chunks)
    pieces: tuple[Tensor, ...] = sequence.split(lengths, dim=axis)  # type: ignore[no-untyped-call]
    return pieces


def _length(config: SegmentConfig, sequences: tuple[Any, ...]) -> int:
    """Of what is cut, along the axis.  Raises :class:`ValueError` if it cannot be."""
    cuttable = [s for s in sequences if isinstance(s, Tensor) and -s.dim() <= config.axis < s.dim()]
    lengths = {s.shape[config.axis] for s in cuttable}
    if len(cuttable) < config.seq_inputs or len(lengths) != 1:
        given = ", ".join(str(tuple(s.shape)) if isinstance(s, Tensor) else type(s).__name__ for s in sequences)
        raise ValueError(
            f"a segment in chunks wants {config.seq_inputs} positional tensors of one length along axis {config.axis}, "
            f"and got {given or 'none'}; change axis or seq_inputs in the plan"
        )
    (length,) = lengths
    return length


def _checkpoint(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: _Packed,
    keep: tuple[str, ...],
    starts: ChunkStarts | None = None,
) -> Any:
    """``forward(*args, **kwargs)``, keeping only its ``inputs``, empty as yet, and outputs of ``keep`` for backward.

    ``starts``: of the chunks of which this is the next; they make its starting state again.
    """
    if (chunk := running_chunk()) is not None:  # of a segment around, which backward is to run the forward in again
        forward = functools.partial(_within, chunk, forward)
    if torch.compiler.is_compiling():
        return _checkpoint_now(module, forward, args, kwargs, inputs, keep, starts)
    with as_of_checkpoint():
        return _checkpoint_now(module, forward, args, kwargs, inputs, keep, starts)


def _checkpoint_now(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: _Packed,
    keep: tuple[str, ...],
    starts: ChunkStarts | None,
) -> Any:
    tensors, skeleton = split_tensors((args, kwargs))
    plainly = not torch.is_grad_enabled() or runs_plainly(module) or _is_transformed()
    if plainly or not _needs_gradient(module, tensors):
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(_traced(module, forward, skeleton, keep), *tensors, use_reentrant=False)
    if uninitialized(module):  # there is no state yet to start from again
        return forward(*args, **kwargs)
    start = StartingState(module, tensors, others_in(skeleton))
    call = functools.partial(_call_as_written, forward, skeleton)
    # The caller's own lists and dicts are for the first run: what that leaves in them stays.
    first = functools.partial(_as_written, forward, args, kwargs)
    run = _Run(module, first, call, start, len(tensors), keep)
    run.hooks = hooks_on_saving()
    if module in _overwrites_input:
        tensors = [t.clone() for t in tensors]
    lent: Sequence[Tensor] = ()
    try:
        if _is_nested():
            run.is_nested = True
            # The inputs belong to the recomputation of the segment around, and so do the tensors of the state.
            lent = start.lend()
            inputs.started(start, lent)
            with held_as_inputs():
                return _recomputed(run, *tensors, *lent)
        if starts is not None:
            needs_gradient = [t.requires_grad for t in tensors]
            # Not with the run, which holds the chunks before it: a cycle would outlive backward.
            run.lent = starts.add(start, functools.partial(_run_again, call, inputs, needs_gradient))
        inputs.started(start, ())
        with inputs.hooks():
            return _recomputed(run, *tensors)
    except _Unrepeatable as error:
        if starts is not None:  # chunks before this one have run
            raise
        reason = str(error)
        if lost := start.lost():
            raise RuntimeError(f"{name_of(module)} {reason} and {lost}; take it out of the plan") from error
    run_plainly(module, reason)
    start.enter(lent)
    return forward(*args, **kwargs)


class _Unrepeatable(RuntimeError):
    """A forward did what it cannot do in a segment, or does otherwise there: a sentence without its subject."""


def _recomputed(run: _Run, *given: Tensor) -> Any:
    """PyTorch's checkpoint; where the generators stand is in a run's starting state, which shares it with others."""
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)


_overwrites_input: WeakSet[nn.Module] = WeakSet()
"""Segments that were seen to write over their inputs: a recomputation needs copies."""


@contextlib.contextmanager
def _holding_inputs() -> Iterator[None]:
    """Around a recomputation, which makes the inputs of the segments within again: they must stay as they were.

    In the first run nobody holds them.  Raises :class:`RuntimeError` if one was written later.
    """
    outer, _thread.inputs = getattr(_thread, "inputs", None), []
    try:
        yield
    except StopRecomputation:  # all that is wanted has been made again
        _check_unchanged(_thread.inputs)
        raise
    else:
        _check_unchanged(_thread.inputs)
    finally:
        _thread.inputs = outer


def _check_unchanged(inputs: Sequence[tuple[nn.Module, Tensor, int]]) -> None:
    for module, tensor, version in inputs:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"an input of shape {tuple(tensor.shape)} of {name_of(module)} was modified in place after its "
                f"forward (version {version} -> {version_of(tensor)}); recomputing with it would be wrong"
            )


def _is_transformed() -> bool:
    """Whether forward runs on what no checkpoint can hold: tensors of ``torch.func``, ``vmap``'s too, or tangents.

    Tangents need nothing from backward, and a checkpoint would drop them.
    """
    return has_tangents() or is_transforming()


def _is_nested() -> bool:
    """Whether a segment runs around what runs now, and nothing between them keeps or recomputes what is saved.

    A checkpoint of the user's own may: it recomputes when no segment runs around it any longer.
    """
    return getattr(_thread, "depth", 0) > 0 and hooks_on_saving() == _thread.hooks


@contextlib.contextmanager
def _within_segment() -> Iterator[None]:
    outer = getattr(_thread, "depth", 0), getattr(_thread, "hooks", None)
    _thread.depth, _thread.hooks = outer[0] + 1, hooks_on_saving()
    try:
        yield
    finally:
        _thread.depth, _thread.hooks = outer


def _traced(module: nn.Module, forward: Callable[..., Any], skeleton: Any, keep: tuple[str, ...]) -> Callable[..., Any]:
    """What PyTorch's checkpoint calls under ``torch.compile``, which can trace neither pack hooks nor :class:`_Run`.

    What it cannot trace at all, a forward that writes to attributes among others, it leaves to a checkpoint that is
    not compiled: there every run goes through one :class:`_Run` as it does without ``torch.compile``.
    """
    runs: list[_Run] = []

    def call(*given: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return _call(forward, given, skeleton)
        if not runs:
            as_written = functools.partial(_call_as_written, forward, skeleton)
            first = functools.partial(as_written, given, {})
            runs.append(_Run(module, first, as_written, StartingState(module, given), len(given), keep))
        return runs[0](*given)

    return call


def _call(forward: Callable[..., Any], given: Sequence[Tensor], skeleton: Any) -> Any:
    args, kwargs = join_tensors(given, skeleton)
    return forward(*args, **kwargs)


def _as_written(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # TorchScript as it is written: its executor would save other tensors in one run than in the next.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return forward(*args, **kwargs)


def _call_as_written(
    forward: Callable[..., Any], skeleton: Any, given: Sequence[Tensor], replaced: Mapping[int, Any]
) -> Any:
    return _as_written(forward, *join_tensors(given, skeleton, replaced))


def _run_again(call: Callable[..., Any], inputs: _Packed, needs_gradient: Sequence[bool]) -> None:
    given = zip(inputs.last(len(needs_gradient)), needs_gradient, strict=True)
    call([t.detach().requires_grad_(needed) for t, needed in given], {})


def _needs_gradient(module: nn.Module, tensors: list[Tensor]) -> bool:
    if getattr(module, "may_use_parameters_of_others", False):
        return True
    return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in module.parameters())


def _ignore(start: StartingState, lent: Sequence[Tensor]) -> None:
    pass


class _Packed:
    """Tensors that a checkpoint saves, in a codec; those in ``raw`` as they are.

    Raw are the states that chunks hand on: the codec is the one that suits the module's inputs.
    """

    def __init__(self, codec: SpikeCompressor, raw: Any = ()) -> None:
        self._codec = codec
        self._raw = frozenset(map(id, tensors_of(raw)))
        self._stored: list[Any] = []
        self.started: Callable[[StartingState, Sequence[Tensor]], None] = _ignore
        """Is told where the run starts, and what that lends to a segment around."""

    def hooks(self) -> saved_tensors_hooks:
        """Within, what is saved is packed."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def last(self, count: int) -> list[Tensor]:
        """The tensors that were saved last, whole again."""
        return [self._unpack(stored) for stored in self._stored[len(self._stored) - count :]]

    def _pack(self, tensor: Tensor) -> Any:
        codec = COMPRESSORS["null"] if id(tensor) in self._raw else self._codec
        self._stored.append(tensor if isinstance(tensor, nn.Parameter) else store(codec, tensor))
        return self._stored[-1]

    def _unpack(self, stored: Any) -> Tensor:
        return stored if isinstance(stored, Tensor) else self._codec.decompress(stored)


class _Run:
    """One checkpointed call of a segment: what PyTorch's checkpoint calls once in forward and again in backward."""

    def __init__(
        self,
        module: nn.Module,
        first: functools.partial[Any],
        call: Callable[[Sequence[Tensor], Mapping[int, Any]], Any],
        start: StartingState,
        inputs: int,
        keep: tuple[str, ...],
    ) -> None:
        """``first``: the first run; ``call``: a later one, of the tensors among the arguments and what replaces others.

        ``inputs``: how many tensors those are.
        """
        self._module = module
        self._first: functools.partial[Any] | None = first
        self._call = call
        self._start = start
        self._inputs = inputs
        self._kept = KeptOutputs(keep) if keep else NothingKept()
        self._statistics = FoundStatistics(module, keep)
        self._began = this_moment()
        self._ends_in_noise = False
        self._samples: list[list[Any] | None] = []
        self.hooks: Any = None
        """Those around the segment, on what autograd saves."""
        self.is_nested = False
        """Its inputs belong to the recomputation of the segment around."""
        self.lent: Callable[[], Sequence[Tensor]] | None = None
        """Gives the tensors of the starting state, if they are no inputs and not held."""

    @not_compiled  # it only comes here where the compiler has given up
    def __call__(self, *given: Tensor) -> Any:
        """The first run, or a later one."""
        return self._recompute(given) if self._first is None else self._run(given, self._first)

    def _run(self, given: Sequence[Tensor], first: functools.partial[Any]) -> Any:
        self._first, handed = None, (first.args, first.keywords)
        inputs = [(self._module, t, version_of(t)) for t in given[: self._inputs]]
        turn = is_sampled(self._module)
        held, before = Held(self._kept.note_save, is_sampled=turn), marks()
        try:
            with held.holding(), self._kept.recording(), self._statistics.recording(), _within_segment():
                output = first()
        except RuntimeError as error:
            if forbids_hooks(error):
                raise _Unrepeatable("computes gradients by torch.func") from error
            raise
        finally:
            self._start.settle()
        if self._kept.changes:
            raise _Unrepeatable(self._kept.changes)
        if reason := self._start.lost():
            run_plainly(self._module, reason)
        if reason or marks() != before:  # or one within cannot run again: it would do otherwise than it did
            held.keep(self.hooks)
            return output
        if any(version_of(t) != version for _, t, version in inputs):
            _overwrites_input.add(self._module)
            if not self.is_nested:
                held.keep()
        elif self.is_nested and getattr(_thread, "inputs", None) is not None:
            _thread.inputs += inputs
        self._samples = held.samples(tensors_of((output, handed))) if turn else []
        held.drop()
        self._ends_in_noise = ends_in_noise(tensors_of((output, handed)), held.last_nodes)
        if self._ends_in_noise:
            save_nothing()
        return output

    def _recompute(self, given: Sequence[Tensor]) -> Any:
        """From the state in which the first run started, and without a trace.

        Of what came before its inputs it knows nothing: hooks that forward puts on an input, or that others have put
        there and a gradient within forward would call, are those of the first run.
        """
        around = checkpoint_around()
        with _recomputing(self._module):
            lent = given[self._inputs :] if self.lent is None else self.lent()
            if self._module not in _overwrites_input:  # a leaf is not to be written
                given = [t.detach().requires_grad_() if t.requires_grad else t for t in given]
            with self._start.replay(lent) as replaced, self._kept.replaying(), self._statistics.replaying():
                with self._compared(), _within_segment(), _holding_inputs(), as_of(self._began):
                    output = self._repeat(given, replaced, around)
                if self._ends_in_noise:
                    save_nothing()
                return output

    def _repeat(self, given: Sequence[Tensor], replaced: Mapping[int, Any], around: CheckpointCall | None) -> Any:
        try:
            return self._call(given, replaced)
        except RuntimeError as error:  # as which PyTorch's end of a recomputation leaves TorchScript's interpreter
            if is_complete(around):
                raise StopRecomputation from error
            raise

    def _compared(self) -> AbstractContextManager[None]:
        return compared(self._module, self._samples, self._differs) if self._samples else contextlib.nullcontext()

    def _differs(self, shape: tuple[int, ...]) -> None:
        run_plainly(
            self._module,
            "draws or reads something that memopt does not see (a tensor of shape "
            f"{shape} was another when it ran again, and the gradients of this step are wrong)",
        )

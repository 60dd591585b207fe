"""Calling a segment: deciding whether its forward can be recomputed, and storing its inputs and state until then.

Containers call :func:`call_checkpointed`.  There are four cases:

- a compiler traces the call: PyTorch's own checkpoint runs it;
- forward cannot be recomputed: it runs without recomputation;
- the call runs inside the recomputation of another segment: nothing is stored;
- any other call: ``segment_run.py`` takes over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt_cli.runtime.chunk_starts import ChunkStarts
from memopt_cli.runtime.compressor import (
    COMPRESSORS,
    OWN_COMPRESSOR,
    ModifiedError,
    OwnCompressor,
    PackedTensor,
    SpikeCompressor,
    internal_tensors,
    load,
    note_stored,
    store,
)
from memopt_cli.runtime.copies import copy_values, restored_tensors
from memopt_cli.runtime.learned import SegmentKnowledge, ensure_learned
from memopt_cli.runtime.lengths import config_of
from memopt_cli.runtime.module_state import find_matrices, label_of, uninitialized
from memopt_cli.runtime.places.schedule import Parcel
from memopt_cli.runtime.private_torch import hooks_on_saving, not_compiled, without_script_optimizations
from memopt_cli.runtime.running import (
    enclosing_segment_run,
    is_checkpointed,
    is_transformed,
    running_chunk,
    within_chunk,
)
from memopt_cli.runtime.segment_config import SegmentConfig
from memopt_cli.runtime.segment_run import SegmentRun, UnrepeatableError, UnusedSaves, unpack_saved
from memopt_cli.runtime.selective import KeptOutputs, NothingKept, uncounted
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import Arguments, join_tensors, joined, split_tensors, tensors_of
from memopt_cli.runtime.unsafe import run_plainly, runs_plainly


def choose_compressor(module: nn.Module, config: SegmentConfig) -> SpikeCompressor:
    """Return the compressor in which the inputs of ``module`` are stored."""
    if config.compressor == OWN_COMPRESSOR:
        return OwnCompressor(module.x_compressor)  # type: ignore[arg-type]
    return COMPRESSORS[config.compressor]


def call_checkpointed(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: PackedInputs,
    keep: tuple[str, ...],
    starts: ChunkStarts | None = None,
    learned: SegmentKnowledge | None = None,
) -> Any:
    """Call ``forward(*args, **kwargs)``, storing only its inputs and the outputs of the operators in ``keep``.

    ``inputs``: an empty container for the inputs.  ``starts``: recomputes the states from which chunks start.
    ``learned``: what earlier calls showed; by default, the object kept on ``module``.
    """
    # Backward must recompute the forward in the same chunk.
    if (chunk := running_chunk()) is not None:
        forward = functools.partial(within_chunk, chunk, forward)
    if torch.compiler.is_compiling():
        return _call_traced(module, forward, args, kwargs)
    arguments = Arguments.split(args, kwargs)
    learned = ensure_learned(module) if learned is None else learned
    if not _can_run_again(module, arguments.tensors, learned):
        return forward(*args, **kwargs)
    outer = enclosing_segment_run()
    run_first = functools.partial(_run_unoptimized, forward, args, kwargs)
    if outer is not None and outer.is_recomputation:
        return _within_recomputation(module, run_first, arguments.tensors, outer, learned)
    start = StartingState(module, arguments.tensors, arguments.others, learned, watches=learned.schedule.begin_run())
    kept = KeptOutputs(keep, inputs.parcel) if keep else NothingKept()
    repeat = functools.partial(_repeat_forward, forward, arguments.skeleton)
    run = SegmentRun(module, learned, start, repeat, kept)
    run.gathers = inputs.of_chunk and config_of(module).batch_statistics
    tensors = arguments.tensors
    if learned.overwrites_input:
        with internal_tensors():
            tensors = _clone_inputs(tensors)
    leaves = functools.partial(
        _make_leaves, gradient_flags=[t.requires_grad for t in arguments.tensors], learned=learned
    )
    state_tensors: Sequence[Tensor] = ()
    if outer is not None:
        # The outer segment recomputes the inputs and the state tensors, like everything saved in it.
        state_tensors = start.release_tensors()
        saved = run.saved_inputs = [outer.hold_input(t) for t in tensors]
        run.inputs = lambda: leaves([unpack_saved(record) for record in saved])
        run.state_tensors = functools.partial(_RecomputedWhenRead, [outer.hold_input(t) for t in state_tensors])
    else:
        inputs.keep(tensors)
        run.inputs = lambda: leaves(inputs.tensors(module))
        if starts is not None:
            # Do not capture ``run``: it refers to ``starts``, and the cycle would outlive backward.
            stored_inputs = run.inputs
            run.state_tensors = starts.add(start, lambda others: repeat(stored_inputs(), others))
    inputs.on_start(start, state_tensors)
    gradients = [(t, t.grad) for t in arguments.tensors if t.retains_grad]
    try:
        return run.run_first(run_first, arguments.tensors, hooks_on_saving())
    except UnrepeatableError as error:
        # Earlier chunks may have run and updated norms; ``chunked.py`` rolls all of it back.
        if inputs.of_chunk:
            raise
        reason = str(error)
        irreversible = start.irreversible_effect() or (
            "changed something that it did not change before" if start.has_new_changes else ""
        )
        if irreversible:
            raise RuntimeError(f"{label_of(module)} {reason} and {irreversible}; remove it from the plan") from error
    run_plainly(module, reason)
    start.restore(state_tensors, arguments.others)
    # Forward may have run a backward before it failed, which added to these gradients.
    for tensor, gradient in gradients:
        tensor.grad = gradient
    return forward(*args, **kwargs)


_callbacks: MutableMapping[nn.Module, Callable[[bool], object]] = WeakKeyDictionary()


def on_first_call(segment: nn.Module, callback: Callable[[bool], object]) -> None:
    """Register ``callback`` to be called before the first run of ``segment``, recomputed or not.

    Its argument is whether the segment is in the user's own checkpoint, so not recomputed.  It should refer to the
    model weakly, because it lives as long as the segment.
    """
    _callbacks[segment] = callback


def _call_back(segment: nn.Module, *, is_in_checkpoint: bool) -> None:
    if (callback := _callbacks.get(segment)) is not None:
        callback(is_in_checkpoint)


def _can_run_again(module: nn.Module, tensors: Sequence[Tensor], learned: SegmentKnowledge) -> bool:
    for tensor in tensors:
        if tensor.is_nested and tensor.layout is torch.strided:
            run_plainly(module, "is given a nested tensor of the strided layout")
    if not torch.is_grad_enabled() or runs_plainly(module) or is_transformed():
        return False
    if is_checkpointed():
        _call_back(module, is_in_checkpoint=True)
        return False
    if not needs_gradient(module, tensors):
        return False
    if learned.known is None:
        _call_back(module, is_in_checkpoint=False)
        return not uninitialized(module)  # a lazy module has no state yet to start from
    return True


def _within_recomputation(
    module: nn.Module, first: Callable[[], Any], tensors: Sequence[Tensor], outer: Any, learned: SegmentKnowledge
) -> Any:
    """Run ``module`` inside the recomputation of ``outer``, which holds its inputs and matrices as in forward."""
    for tensor in _clone_inputs(tensors) if learned.overwrites_input else tensors:
        outer.hold_input(tensor)
    for tensor in find_matrices(module):
        outer.hold_input(tensor)
    with uncounted(), UnusedSaves(drops=not learned.is_differentiated_in_forward).hooks():
        return first()


def _make_leaves(tensors: Sequence[Tensor], gradient_flags: Sequence[bool], learned: SegmentKnowledge) -> list[Tensor]:
    """Return ``tensors`` detached, or copies if forward writes over them: autograd forbids in-place writes to leaves.

    ``gradient_flags``: whether each tensor needs a gradient.
    """
    if learned.overwrites_input:
        return _clone_inputs(tensors, gradient_flags)
    leaves = [tensor.detach() for tensor in tensors]
    for leaf, is_needed in zip(leaves, gradient_flags, strict=True):
        if is_needed:
            leaf.requires_grad_()
    return leaves


def _clone_inputs(tensors: Sequence[Tensor], gradient_flags: Sequence[bool] = ()) -> list[Tensor]:
    """Return copies that share memory where ``tensors`` do: a write of forward to one copy shows in the others."""
    copies = copy_values(tensors)
    for tensor, is_needed in zip(tensors, gradient_flags, strict=False):
        copies[id(tensor)].needs_gradient = is_needed
    clones = restored_tensors(copies)
    return [clones[id(tensor)] for tensor in tensors]


class _RecomputedWhenRead(Sequence[Tensor]):
    """Tensors that an outer segment saves.  Each is recomputed only when read; most never are."""

    def __init__(self, saved: Sequence[Any]) -> None:
        self._saved = saved

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, index: Any) -> Any:
        return unpack_saved(self._saved[index])


def _run_unoptimized(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # TorchScript's profiling executor would save different tensors in the second run than in the first.
    with without_script_optimizations():
        return forward(*args, **kwargs)


def _repeat_forward(
    forward: Callable[..., Any], skeleton: Any, tensors: Sequence[Tensor], others: Sequence[Any]
) -> Any:
    return _run_unoptimized(forward, *joined(tensors, others, skeleton))


def _call_traced(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``forward`` in PyTorch's checkpoint, which ``torch.compile`` can trace.

    PyTorch runs a forward that it cannot trace (for example because it writes to attributes) in an uncompiled
    checkpoint.  There :func:`_call_replayed` starts every later run from the starting state of the first.
    """
    tensors, skeleton = split_tensors((args, kwargs))
    if not torch.is_grad_enabled() or not needs_gradient(module, tensors):
        return forward(*args, **kwargs)
    starts: list[StartingState] = []

    def call(*tensors: Tensor) -> Any:
        args, kwargs = join_tensors(tensors, skeleton)
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        return _call_replayed(module, forward, args, kwargs, starts)

    return checkpoint(call, *tensors, use_reentrant=False)


@not_compiled
def _call_replayed(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], starts: list[Any]
) -> Any:
    """Call ``forward``: the first call adds its starting state to ``starts``, and later calls start from that state."""
    if starts:
        with starts[0].replay():
            return forward(*args, **kwargs)
    starts.append(StartingState(module, tensors_of((args, kwargs))))
    try:
        return forward(*args, **kwargs)
    finally:
        starts[0].end_forward()


def needs_gradient(module: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Return whether backward will ask for anything that ``module`` saves when it is given ``tensors``."""
    if any(t.requires_grad for t in tensors):
        return True
    return getattr(module, "may_use_parameters_of_others", False) or any(p.requires_grad for p in module.parameters())


def ignore_start(start: StartingState, state_tensors: Sequence[Tensor]) -> None:
    """Do nothing: the default of :attr:`PackedInputs.on_start`."""


class PackedInputs:
    """The tensors among the arguments of a call, stored by a compressor, except those in ``raw``.

    The states that chunks pass on are stored raw: the compressor was chosen for the module's inputs.
    """

    def __init__(self, compressor: SpikeCompressor, raw: Any = (), parcel: Parcel | None = None) -> None:
        self._compressor = compressor
        self.parcel = parcel
        """The parcel that sends stored tensors and kept outputs to a place; ``None`` if they stay on the device."""
        self._raw = frozenset(map(id, tensors_of(raw))) if raw else frozenset()
        self._stored: list[Any] = []
        self.of_chunk = False
        """Whether these are the inputs of one chunk, and not of the whole segment."""
        self.on_start: Callable[[StartingState, Sequence[Tensor]], None] = ignore_start
        """Callback for the starting state, and the tensors that it has released to an outer segment."""

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Store ``tensors``; parameters, which exist anyway, are only referred to."""
        for tensor in tensors:
            # ``nn.Parameter`` has an ``isinstance`` of its own, written in Python, so most tensors must not get there.
            if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
                self._stored.append(tensor)
                continue
            compressor = COMPRESSORS["null"] if id(tensor) in self._raw or not tensor.numel() else self._compressor
            packed = store(compressor, tensor)
            note_stored(tensor, packed)
            self._stored.append(packed if self.parcel is None else self.parcel.take(packed))

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors that were stored.

        Raises :class:`RuntimeError`, which names ``module``, if one of them was modified in place.
        """
        try:
            return [
                s if isinstance(s, Tensor) else load(self._compressor, s if isinstance(s, PackedTensor) else s.get())
                for s in self._stored
            ]
        except ModifiedError as error:
            raise RuntimeError(f"{label_of(module)}: {error}") from None

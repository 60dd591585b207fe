"""A segment's forward under PyTorch's checkpoint: what is kept for backward, and how it is held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memopt_cli.runtime.chunk_starts import ChunkStarts
from memopt_cli.runtime.compressor import (
    COMPRESSORS,
    OWN_COMPRESSOR,
    OwnCompressor,
    SpikeCompressor,
    beside_the_model,
    note_stored,
    store,
)
from memopt_cli.runtime.held import held_as_inputs
from memopt_cli.runtime.lengths import config_of
from memopt_cli.runtime.module_state import name_of, uninitialized
from memopt_cli.runtime.private_torch import (
    hooks_on_saving,
    not_compiled,
)
from memopt_cli.runtime.running import (
    is_checkpointed,
    is_nested,
    is_transformed,
    running_chunk,
    within_chunk,
)
from memopt_cli.runtime.segment_config import SegmentConfig
from memopt_cli.runtime.segment_run import SegmentRun, Unrepeatable, overwrites_input
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import join_tensors, others_in, split_tensors, tensors_of
from memopt_cli.runtime.unsafe import as_of_checkpoint, run_plainly, runs_plainly


def codec_of(module: nn.Module, config: SegmentConfig) -> SpikeCompressor:
    """The codec of a segment's stored input."""
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
) -> Any:
    """``forward(*args, **kwargs)``, keeping only its ``inputs``, empty as yet, and outputs of ``keep`` for backward.

    ``starts``: of the chunks of which this is the next; they make its starting state again.
    """
    if (chunk := running_chunk()) is not None:  # of a segment around, which backward is to run the forward in again
        forward = functools.partial(within_chunk, chunk, forward)
    if torch.compiler.is_compiling():
        return _call_now(module, forward, args, kwargs, inputs, keep, starts)
    with as_of_checkpoint():
        return _call_now(module, forward, args, kwargs, inputs, keep, starts)


def _call_now(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: PackedInputs,
    keep: tuple[str, ...],
    starts: ChunkStarts | None,
) -> Any:
    tensors, skeleton = split_tensors((args, kwargs))
    if any(t.is_nested and t.layout is torch.strided for t in tensors):
        run_plainly(module, "is given a nested tensor of the strided layout")
    plainly = not torch.is_grad_enabled() or runs_plainly(module) or is_transformed()
    if plainly or not needs_gradient(module, tensors):
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(_traced(module, forward, skeleton, keep), *tensors, use_reentrant=False)
    if uninitialized(module):  # there is no state yet to start from again
        return forward(*args, **kwargs)
    start = StartingState(module, tensors, others_in(skeleton))
    kept = [(t, t.grad) for t in tensors if t.retains_grad]
    call = functools.partial(_call_as_written, forward, skeleton)
    # The caller's own lists and dicts are for the first run: what that leaves in them stays.
    first = functools.partial(_as_written, forward, args, kwargs)
    run = SegmentRun(module, first, call, start, len(tensors), keep)
    run.hooks, run.is_checkpointed = hooks_on_saving(), is_checkpointed()
    run.gathers = inputs.of_chunk and config_of(module).batch_statistics
    if module in overwrites_input:
        with beside_the_model():
            tensors = [t.clone() for t in tensors]
    lent: Sequence[Tensor] = ()
    try:
        if is_nested():
            run.is_nested = True
            # The inputs belong to the recomputation of the segment around, and so do the tensors of the state.
            lent = start.lend()
            inputs.started(start, lent)
            with held_as_inputs():
                return _recomputed(run, *tensors, *lent)
        if starts is not None:
            needed = [t.requires_grad for t in tensors]
            # Not with the run, which holds the chunks before it: a cycle would outlive backward.
            run.lent = starts.add(start, functools.partial(_run_again, call, inputs, needed))
        inputs.started(start, ())
        with inputs.hooks():
            return _recomputed(run, *tensors)
    except Unrepeatable as error:
        if inputs.of_chunk:  # others may have run, and norms counted them: the whole begins again
            raise
        reason = str(error)
        if lost := start.lost():
            raise RuntimeError(f"{name_of(module)} {reason} and {lost}; take it out of the plan") from error
    run_plainly(module, reason)
    start.enter(lent)
    for given, gradient in kept:  # one that forward computes within is added to it
        given.grad = gradient
    return forward(*args, **kwargs)


def _recomputed(run: SegmentRun, *given: Tensor) -> Any:
    """PyTorch's checkpoint; where the generators stand is in a run's starting state, which shares it with others."""
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)


def _traced(module: nn.Module, forward: Callable[..., Any], skeleton: Any, keep: tuple[str, ...]) -> Callable[..., Any]:
    """What PyTorch's checkpoint calls under ``torch.compile``, which traces neither pack hooks nor :class:`SegmentRun`.

    What it cannot trace at all, a forward that writes to attributes among others, it leaves to a checkpoint that is
    not compiled: there every run goes through one :class:`SegmentRun` as it does without ``torch.compile``.
    """
    runs: list[SegmentRun] = []

    def call(*given: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return _call(forward, given, skeleton)
        if not runs:
            as_written = functools.partial(_call_as_written, forward, skeleton)
            first = functools.partial(as_written, given, {})
            runs.append(SegmentRun(module, first, as_written, StartingState(module, given), len(given), keep))
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


def _run_again(call: Callable[..., Any], inputs: PackedInputs, needs_gradient: Sequence[bool]) -> None:
    given = zip(inputs.last(len(needs_gradient)), needs_gradient, strict=True)
    call([t.detach().requires_grad_(needed) for t, needed in given], {})


def needs_gradient(module: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether backward will ask for anything of a module that is given these tensors."""
    if getattr(module, "may_use_parameters_of_others", False):
        return True
    return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in module.parameters())


def ignore_start(start: StartingState, lent: Sequence[Tensor]) -> None:
    """What is done with where a run starts, unless somebody asks."""


class PackedInputs:
    """Tensors that a checkpoint saves, in a codec; those in ``raw`` as they are.

    Raw are the states that chunks hand on: the codec is the one that suits the module's inputs.  So are tensors without
    elements: PyTorch 2.8's checkpoint saves one of its own in front of the inputs.
    """

    def __init__(self, codec: SpikeCompressor, raw: Any = ()) -> None:
        self._codec = codec
        self._raw = frozenset(map(id, tensors_of(raw)))
        self._stored: list[Any] = []
        self.of_chunk = False
        """They are a part of what the segment is given."""
        self.started: Callable[[StartingState, Sequence[Tensor]], None] = ignore_start
        """Is told where the run starts, and what that lends to a segment around."""

    def hooks(self) -> saved_tensors_hooks:
        """Within, what is saved is packed."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def last(self, count: int) -> list[Tensor]:
        """The tensors that were saved last, whole again."""
        return [self._unpack(stored) for stored in self._stored[len(self._stored) - count :]]

    @not_compiled
    def _pack(self, tensor: Tensor) -> Any:
        codec = COMPRESSORS["null"] if id(tensor) in self._raw or not tensor.numel() else self._codec
        if isinstance(tensor, nn.Parameter):
            self._stored.append(tensor)
        else:
            self._stored.append(store(codec, tensor))
            note_stored(tensor, self._stored[-1])
        return self._stored[-1]

    @not_compiled
    def _unpack(self, stored: Any) -> Tensor:
        return stored if isinstance(stored, Tensor) else self._codec.decompress(stored)

"""Running a segment in chunks: its input is cut along an axis, chunks run one after another, and outputs are joined.

Each chunk is checkpointed on its own, so that backward recomputes one chunk at a time.  Not every module computes the
same in chunks.  So the first chunk is watched: if it changes state that the whole would change once
(``chunk_state.py``), or if rows mix (``chunk_rows.py``), everything is restored, and the segment runs whole, now and in
later calls, with a warning.  To use the statistics of the whole batch, batch norms take several passes over the chunks
(``batch_statistics.py``).

No compiler traces this: :func:`~memopt_cli.runtime.compiled.run_compiled` runs chunks between two graphs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.runtime import chunk_rows
from memopt_cli.runtime.batch_statistics import (
    BatchStatistics,
    NotGatheredError,
    ReachedNorm,
    StateBeforePasses,
    statistics_refusal,
)
from memopt_cli.runtime.chunk_starts import ChunkStarts
from memopt_cli.runtime.chunk_state import StateChanges, difference
from memopt_cli.runtime.compressor import is_dense
from memopt_cli.runtime.cuts import chunk_lengths, record_cut
from memopt_cli.runtime.frozen import pickle_value
from memopt_cli.runtime.lengths import config_of
from memopt_cli.runtime.module_state import Complaint, label_of, uninitialized
from memopt_cli.runtime.norms import SameStatistics
from memopt_cli.runtime.packing import note_joined
from memopt_cli.runtime.places.schedule import Parcel, parcel_to
from memopt_cli.runtime.private_torch import is_out_of_cpu_memory, unseen
from memopt_cli.runtime.refusals import norm_refusal
from memopt_cli.runtime.running import (
    SequenceChunk,
    bypassing_hooks,
    is_checkpointed,
    is_in_segment,
    is_recomputing,
    is_transformed,
    recomputing,
    within_chunk,
)
from memopt_cli.runtime.segment_call import (
    PackedInputs,
    call_checkpointed,
    choose_compressor,
    ignore_start,
    needs_gradient,
)
from memopt_cli.runtime.segment_config import SegmentConfig, describe_chunks
from memopt_cli.runtime.segment_run import UnrepeatableError
from memopt_cli.runtime.stand_ins import AbridgedCall, abridge_call, in_memory
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import Arguments, tensors_of
from memopt_cli.runtime.unsafe import cannot_repeat, run_whole, runs_plainly, runs_whole

_UNCUT: Final[Mapping[int, int]] = {}
"""The axes along which a piece in full size is cut short: none."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module in chunks."""

    module: nn.Module
    forward: Callable[..., Any]
    """The module's own forward."""
    pieces: Sequence[tuple[Any, ...]]
    """For each chunk, its pieces of the arguments that are cut."""
    states: tuple[Any, ...]
    """The other positional arguments, for the first chunk; a chunk may return the next one's (as an LSTM's state)."""
    kwargs: dict[str, Any]
    """Keyword arguments, which every chunk gets whole."""
    parcel: Parcel | None
    """The parcel that sends away what the chunks store; ``None`` if it stays on the device."""


def run_chunks(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the ``forward`` of ``module`` in chunks.  Raises :class:`ValueError` if its arguments cannot be cut."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    config = config_of(module)
    parcel = parcel_to(config.place)
    output = _run_chunks(module, forward, args, kwargs, parcel)
    if parcel is not None:
        parcel.complete()
    return output


def _run_chunks(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parcel: Parcel | None,
) -> Any:
    config = config_of(module)
    sequences, states = args[: config.seq_inputs], args[config.seq_inputs :]
    length = _length(config, sequences)
    chunks = min(config.chunks, length)
    if chunks < 2 or _runs_whole(module, args, kwargs):
        return _run_one_chunk(module, forward, args, kwargs, parcel)
    record_cut(module, config.chunks, length)
    # It may have become a segment in eval mode, where its norms were not a reason to refuse it.
    if reason := norm_refusal(module, config, chunks):
        raise ValueError(f"{label_of(module)} cannot run in training mode: {reason} in the plan, or call eval()")
    lengths = chunk_lengths(length, chunks)
    # Chunks that hand something to the next one must all run.  A dry run may replace equal chunks of other modules.
    hands_on = config.batch_statistics or config.recompute_states or _resumes(module)
    short = None if hands_on or parcel is not None else abridge_call(module, lengths, config.axis, sequences)
    lengths = lengths if short is None else short.lengths(lengths)
    pieces = list(zip(*(_pieces(s, lengths, config.axis) for s in sequences), strict=True))
    call = _Call(module, forward, pieces, states, kwargs, parcel)
    try:
        if config.batch_statistics:
            return _run_passes(call)
        return _join_outputs(config, *_one_by_one(call, [forward] * len(pieces), short))
    except _NotInChunksError as error:
        reason, undo, is_certain = str(error), error.undo, error.is_certain
    # After the except block, which would hold the traceback and with it the chunks' tensors.
    undo()
    if is_certain:
        run_whole(module, reason)
        return _run_one_chunk(module, forward, args, kwargs, parcel)
    try:
        output = _run_one_chunk(module, forward, args, kwargs, parcel)
    except Exception:
        # The whole fails as well, so chunks are not at fault.  If an enclosing segment catches the error and goes
        # on, its recomputation could not repeat both attempts.
        cannot_repeat()
        raise
    run_whole(module, reason)
    return output


def _run_one_chunk(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parcel: Parcel | None,
) -> Any:
    config = config_of(module)
    inputs = PackedInputs(choose_compressor(module, config), args[config.seq_inputs :], parcel)
    return call_checkpointed(module, forward, args, kwargs, inputs, config.keep)


def _runs_whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``module`` runs whole in this call: chunks would save nothing, or gave other results before."""
    if runs_plainly(module) or runs_whole(module) or is_transformed() or is_checkpointed() or uninitialized(module):
        return True
    return not needs_gradient(module, tensors_of((args, kwargs)))


def _run_passes(call: _Call) -> Any:
    """Run a pass over the chunks for the statistics of each norm, and one for the output.

    Raises :class:`_NotInChunksError` if the module would compute other values.
    """
    # Also checked when it became a segment, but hooks or norms may have been added since.
    if refused := statistics_refusal(call.module, len(call.pieces)):
        raise _NotInChunksError(
            f"gathers batch statistics over its chunks, and {refused}", lambda: None, is_certain=True
        )
    gathering = BatchStatistics(call.module, call.forward, tensors_of((call.pieces, call.states, call.kwargs)))
    try:
        return _join_outputs(config_of(call.module), *_gather(call, gathering))
    except NotGatheredError as error:
        raise _NotInChunksError(str(error), gathering.undo, is_certain=True) from None


def _gather(call: _Call, gathering: BatchStatistics) -> tuple[list[tuple[Any, ...]], Any]:
    """Run passes until every norm knows its statistics; return what :func:`_one_by_one` returns in the last pass.

    Raises :class:`NotGatheredError` if the passes would not give the result of the whole.
    """
    tries_rows = True
    while True:
        columns, output = _one_by_one(call, gathering.forwards(len(call.pieces)), tries_rows=tries_rows)
        if not isinstance(output, ReachedNorm):
            break
        gathering.merge(columns[0])
        tries_rows = False  # the trial runs the module's whole forward, and need not be repeated in every pass
    if isinstance(output, tuple) and len(output) > config_of(call.module).seq_outputs:
        raise NotGatheredError("passes its state on as an output, before which chunks break off for their statistics")
    return columns, output


def _one_by_one(
    call: _Call, forwards: Iterable[Callable[..., Any]], short: AbridgedCall | None = None, *, tries_rows: bool = True
) -> tuple[list[tuple[Any, ...]], Any]:
    """Run the chunks; return a tuple of pieces for each output that is joined, and the last chunk's whole output.

    ``forwards``: the functions that run in place of the module's own forward on each chunk; ``short``: the call
    with stand-ins for some chunks, in a dry run; ``tries_rows``: try whether rows mix.  Raises
    :class:`_NotInChunksError` if chunks would compute other values than the whole, or leave different state.
    """
    module, pieces, states = call.module, call.pieces, call.states
    config = config_of(module)
    compressor = choose_compressor(module, config)
    # An outer segment drops everything that is stored here, and recomputes it in backward.
    makes_states_again = config.recompute_states and not is_in_segment()
    starts = ChunkStarts(module) if makes_states_again else None
    resumes = _resumes(module)
    outputs: list[tuple[Any, ...]] = []
    output: Any = None
    for index, (piece, forward) in enumerate(zip(pieces, forwards, strict=True)):
        if short is not None and short.counts[index] > 1:
            outputs.append(short.stand_in(index, piece))
            continue
        piece = piece if short is None else short.noting_gradients(index, piece)
        if resumes:
            chunk = SequenceChunk(config.axis, is_first=index == 0, is_last=index == len(pieces) - 1)
            forward = functools.partial(within_chunk, chunk, forward)
        inputs = PackedInputs(compressor, states, call.parcel)
        inputs.of_chunk = True
        first = _FirstChunk(call) if index == 0 else None
        is_watched = first is not None and _has_data(piece)
        if first is not None:
            inputs.on_start = first.on_start
        try:
            output = call_checkpointed(module, forward, (*piece, *states), call.kwargs, inputs, config.keep, starts)
        except Exception as error:  # the module's own code, on a part of what it was written for
            if first is not None and (is_watched or isinstance(error, UnrepeatableError)):
                first.failed(error)
            raise
        inputs.on_start = ignore_start  # ``inputs`` lives in autograd's graph, which must not hold ``first``
        if first is not None and is_watched:
            first.check(output, tries_rows=tries_rows and not config.inexact)
        if short is not None:
            short.note_run(index, output, config.seq_outputs)
        parts = output if isinstance(output, tuple) else (output,)
        outputs.append(parts[: config.seq_outputs])
        states = parts[config.seq_outputs :] or states
    if starts is not None:
        starts.check_repeatable()
    return list(zip(*outputs, strict=True)), output


def _resumes(module: nn.Module) -> bool:
    """Return whether a part of ``module`` hands state from chunk to chunk by itself (SpikingJelly's neurons do)."""
    return any(getattr(m, "resumes_in_chunks", False) for m in module.modules())


class _NotInChunksError(Exception):
    """A module computes other values in chunks, or leaves different state behind."""

    def __init__(self, reason: Complaint, undo: Callable[[], None], *, is_certain: bool) -> None:
        """Give the ``reason``.  ``undo``: restores state; ``is_certain``: chunks are certainly at fault."""
        super().__init__(reason)
        self.undo, self.is_certain = undo, is_certain


class _FirstChunk:
    """The first chunk of a segment, which shows what state chunks change and whether they are independent."""

    def __init__(self, call: _Call) -> None:
        self._module, self._forward, self._states, self._kwargs = call.module, call.forward, call.states, call.kwargs
        self._first, self._second = call.pieces[:2]
        self._length = sum(piece[0].shape[config_of(call.module).axis] for piece in call.pieces)
        self._state_changes = StateChanges(call.module)
        self._others = Arguments.split((*self._first, *call.states), call.kwargs).others
        """The arguments that are not tensors."""
        named = _whole_arguments(len(self._first), call.states, call.kwargs)
        self._whole = [(name, value, pickle_value(value)) for name, value in named]
        """Name, value and data before the chunk of each argument that every chunk gets whole, such as a cache."""
        self._start: StartingState | None = None
        """The state from which the chunk starts; ``None`` if it did not start yet."""
        self._state_tensors: Sequence[Tensor] = ()
        """The tensors that :attr:`_start` has released to an enclosing segment."""

    def on_start(self, start: StartingState, state_tensors: Sequence[Tensor]) -> None:
        """Note that the chunk starts at ``start``, which has released ``state_tensors`` to an enclosing segment."""
        self._start, self._state_tensors = start, state_tensors

    def check(self, output: Any, *, tries_rows: bool) -> None:
        """Check the ``output`` of the chunk and the state that it changed; ``tries_rows``: also try whether rows mix.

        Raises :class:`_NotInChunksError` if the chunks would not give the result of the whole.
        """
        changed = self._state_changes.names_to_try()
        if self._start is None or runs_plainly(self._module):
            return
        starting = functools.partial(self._start.replay, self._state_tensors)
        reason = _without_axis(config_of(self._module), output) or self._states_refusal(output)
        moved_on = (_writing(name, value) for name, value, before in self._whole if before != pickle_value(value))
        reason = reason or next(moved_on, "")
        if changed and not reason:
            reason = difference(self._module, changed, starting, self._run_whole, self._run_halves)
        if not reason and tries_rows and chunk_rows.begin_forward(self._module):
            reason = chunk_rows.why_rows_mix(
                self._short_pieces(starting),
                self._full_pieces(starting),
                is_compared=config_of(self._module).compared == self._described(),
            )
        if reason:
            raise _NotInChunksError(
                reason, functools.partial(self._start.restore, self._state_tensors, self._others), is_certain=True
            )

    def _described(self) -> str:
        """Describe the chunks and the shape of the input, as a plan's ``compared`` does."""
        config, shape = config_of(self._module), list(self._first[0].shape)
        shape[config.axis] = self._length
        return describe_chunks(config.chunks, config.axis, shape)

    def _states_refusal(self, output: Any) -> Complaint:
        """Return why the next chunk cannot take the states in this chunk's ``output``."""
        config = config_of(self._module)
        states = output[config.seq_outputs :] if isinstance(output, tuple) else ()
        # Without states, every chunk gets the arguments that the first one got.
        if not states:
            return ""
        try:
            inspect.signature(self._forward).bind(*range(config.seq_inputs), *states, **self._kwargs)
        except TypeError:
            return f"returns {len(output)} outputs, and its forward cannot take the last ones for the next chunk"
        except ValueError:  # a function without a signature, such as one written in C
            pass
        return ""

    def failed(self, error: Exception) -> None:
        """Raise :class:`_NotInChunksError` for an ``error`` of the chunk, unless the whole would fail as well.

        A mask of all rows, for example, or state that is kept for all of them, does not fit a part of them.
        """
        is_full = isinstance(error, torch.OutOfMemoryError) or is_out_of_cpu_memory(error)
        is_explained = isinstance(
            error, NotGatheredError
        )  # whose own message is more precise, and which _run_passes handles
        if self._start is None or is_explained or is_full or self._start.irreversible_effect():
            return
        uncut = ", ".join(self._uncut())
        line = str(error).partition("\n")[0]
        likely_cause = f"gets {uncut} whole with every chunk, and " if uncut else ""
        undo = functools.partial(self._start.restore, self._state_tensors, self._others)
        is_certain = isinstance(error, UnrepeatableError)
        raise _NotInChunksError(f"{likely_cause}fails on a chunk ({line})", undo, is_certain=is_certain)

    def _uncut(self) -> Iterator[str]:
        """Yield the names of keyword arguments that are as long as the tensors that are cut, such as a mask."""
        axis = config_of(self._module).axis
        for name, value in self._kwargs.items():
            if isinstance(value, Tensor) and -value.dim() <= axis < value.dim() and value.shape[axis] == self._length:
                yield name

    def _short_pieces(self, starting: chunk_rows.Starting) -> Iterator[chunk_rows.Piece]:
        """Yield pieces for trials that are cut to a quarter along the last two other axes, or along one of them.

        A trial needs two rows, and a chunk may have one.  Cut short, they need less memory than its backward does.
        """
        others = self._other_axes()
        for short in ([others[:2]] if len(others) > 1 else []) + [[axis] for axis in others]:
            yield self._piece(starting, dict.fromkeys(short, 4))

    def _full_pieces(self, starting: chunk_rows.Starting) -> list[chunk_rows.Piece]:
        """Return pieces for trials as large as a chunk; the last one is not cut short, and has two rows at least.

        Two rows take up to twice the memory of a chunk of one.  If ``optimize`` has compared the chunks of an input of
        another shape, so that only its size is new, two halves of rows are tried first: as large as the chunk.
        """
        whole = self._piece(starting)
        config = config_of(self._module)
        chunks_compared, chunks = (text.rpartition(" ")[0] for text in (config.compared, self._described()))
        if chunks_compared != chunks or self._first[0].shape[config.axis] > 1:
            return [whole]
        return [self._piece(starting, {axis: 2}) for axis in self._other_axes()[:1]] + [whole]

    def _other_axes(self) -> list[int]:
        """Return the axes of the first input, from the last one, that are not cut into chunks and can be cut short."""
        shape = self._first[0].shape
        cut = config_of(self._module).axis % len(shape)
        return [axis for axis in reversed(range(len(shape))) if axis != cut and shape[axis] > 1]

    def _piece(self, starting: chunk_rows.Starting, short: Mapping[int, int] = _UNCUT) -> chunk_rows.Piece:
        """Return a piece for a trial; ``short``: see :meth:`_sequences`."""
        config = config_of(self._module)
        return chunk_rows.Piece(
            module=self._module,
            starting=starting,
            whole=self._run,
            halves=functools.partial(self._run_halves, short),
            sequences=functools.partial(self._sequences, short),
            length=max(2, self._first[0].shape[config.axis]),
            axis=config.axis,
            outputs=config.seq_outputs,
            resumes=_resumes(self._module),
            norms=SameStatistics() if config.batch_statistics else contextlib.nullcontext(),
        )

    def _run_whole(self) -> None:
        self._run(self._sequences())

    def _run(self, sequences: Sequence[Tensor]) -> Any:
        with recomputing(self._module), bypassing_hooks():
            return self._forward(*sequences, *self._states, **self._kwargs)

    def _run_halves(self, short: Mapping[int, int] = _UNCUT) -> list[Any]:
        config = config_of(self._module)
        start = StateBeforePasses(self._module)
        states = self._states
        outputs = list[Any]()
        for index, half in enumerate(zip(*(_halves(s, config.axis) for s in self._sequences(short)), strict=True)):
            chunk = SequenceChunk(config.axis, is_first=index == 0, is_last=index == 1)
            start.restore_norms()
            with recomputing(self._module), bypassing_hooks():
                outputs.append(within_chunk(chunk, self._forward, *half, *states, **self._kwargs))
            parts = outputs[-1] if isinstance(outputs[-1], tuple) else (outputs[-1],)
            states = parts[config.seq_outputs :] or states
        return outputs

    def _sequences(self, short: Mapping[int, int] = _UNCUT) -> list[Tensor]:
        """Return copies of the first chunk's inputs, joined with the second's if a chunk has one row only.

        ``short``: axis -> the part to which inputs as long as the first one are cut there, such as 4 for a quarter.
        """
        axis = config_of(self._module).axis
        pairs: Iterable[tuple[Tensor, ...]] = zip(self._first, self._second, strict=True)
        if self._first[0].shape[axis] > 1:
            pairs = ((first,) for first in self._first)
        for other, part in short.items():
            length = self._first[0].shape[other]
            pairs = [tuple(_first_part(t, other, length, part) for t in pair) for pair in pairs]
        with torch.no_grad(), unseen():  # else a recorded step would count the bytes of these copies
            return [torch.cat(pair, dim=axis) for pair in pairs]


def _first_part(tensor: Tensor, axis: int, length: int, part: int) -> Tensor:
    """Return the first ``part`` of ``tensor`` along ``axis`` (4: a quarter) if it is ``length`` long; else all."""
    is_as_long = tensor.dim() > axis and tensor.shape[axis] == length
    return tensor.narrow(axis, 0, max(1, length // part)) if is_as_long else tensor


def _without_axis(config: SegmentConfig, output: Any) -> Complaint:
    """Return why chunks with such an ``output`` cannot be joined."""
    if isinstance(output, ReachedNorm):
        return ""
    parts = output if isinstance(output, tuple) else (output,)
    for part in parts[: config.seq_outputs]:
        if not isinstance(part, Tensor):
            return f"returns an object of class {type(part).__name__}, and only tensors of chunks can be joined"
        if not -part.dim() <= config.axis < part.dim():
            return (
                f"returns a tensor of shape {tuple(part.shape)}, which has no axis {config.axis} to join chunks along"
            )
    return ""


def _writing(name: str, value: Any) -> Complaint:
    """Return the complaint that the first chunk wrote to the argument ``value`` named ``name``."""
    kind = type(value).__name__
    is_cache = "cache" in kind.lower()
    hint = " (keys and values are cached for generation: train with use_cache=False)" if is_cache else ""
    return f"writes to {name}, a {kind}, which the next chunk would read{hint}"


def _whole_arguments(cut: int, states: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument, except tensors, that every chunk gets whole.

    ``cut``: number of arguments before ``states``, which are cut.
    """
    named = [(f"its argument {position}", value) for position, value in enumerate(states, cut + 1)]
    named += [(f"its argument {name}", value) for name, value in kwargs.items()]
    # Tensors do no harm: a chunk passes them on changed by returning them, like a recurrent layer's state.
    yield from ((name, value) for name, value in named if not isinstance(value, Tensor | tuple))


def _has_data(piece: Sequence[Tensor]) -> bool:
    """Return whether ``piece`` has data that trials can compare: not in a dry run, nor in a recomputation."""
    return not is_recomputing() and all(type(t) is Tensor and not t.is_meta for t in piece)


def _join_outputs(config: SegmentConfig, columns: list[tuple[Any, ...]], output: Any) -> Any:
    joined = tuple(_concatenate(column, config.axis) for column in columns)
    note_joined(joined)
    if not isinstance(output, tuple):
        return joined[0]
    whole = (*joined, *output[config.seq_outputs :])
    return output._make(whole) if hasattr(output, "_make") else whole


def _concatenate(column: tuple[Any, ...], axis: int) -> Tensor:
    """Return the chunks in ``column`` joined, with their order of dimensions in memory (such as channels last).

    A later dropout makes its mask in that order.
    """
    first = column[0]
    order = in_memory(first)
    if order == [*range(first.dim())] or not is_dense(first):
        return torch.cat(column, dim=axis)
    joined = torch.cat([piece.permute(order) for piece in column], dim=order.index(axis % first.dim()))
    return joined.permute([order.index(d) for d in range(first.dim())])


def _pieces(sequence: Tensor, lengths: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    # ``tensor_split`` cuts the same way, but sums full-size gradients; ``split`` concatenates them.
    pieces: tuple[Tensor, ...] = sequence.split(lengths, dim=axis)
    return pieces


def _halves(sequence: Tensor, axis: int) -> tuple[Tensor, ...]:
    return _pieces(sequence, chunk_lengths(sequence.shape[axis], 2), axis)


def _length(config: SegmentConfig, sequences: tuple[Any, ...]) -> int:
    """Return the length of ``sequences`` along the axis of ``config``.  Raises :class:`ValueError` if it differs."""
    cuttable = [s for s in sequences if isinstance(s, Tensor) and -s.dim() <= config.axis < s.dim()]
    lengths = {s.shape[config.axis] for s in cuttable}
    if len(cuttable) < config.seq_inputs or len(lengths) != 1:
        shapes = ", ".join(str(tuple(s.shape)) if isinstance(s, Tensor) else type(s).__name__ for s in sequences)
        raise ValueError(
            f"a segment in chunks needs {config.seq_inputs} positional tensors of one length along axis {config.axis}, "
            f"but got {shapes or 'none'}. Change axis or seq_inputs in the plan."
        )
    (length,) = lengths
    return length

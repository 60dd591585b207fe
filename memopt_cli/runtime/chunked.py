"""A segment in chunks along an axis: cut, run one after another, and joined."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.runtime.batch_statistics import BatchStatistics, Statistics
from memopt_cli.runtime.chunk_starts import ChunkStarts
from memopt_cli.runtime.compressor import (
    is_dense,
)
from memopt_cli.runtime.cuts import chunk_lengths, record_cut
from memopt_cli.runtime.private_torch import (
    not_compiled,
)
from memopt_cli.runtime.refusals import norm_refusal
from memopt_cli.runtime.running import (
    SequenceChunk,
    is_nested,
    steps_singly,
    within_chunk,
)
from memopt_cli.runtime.segment_call import PackedInputs, call_checkpointed, codec_of
from memopt_cli.runtime.segment_config import SegmentConfig
from memopt_cli.runtime.state import SEGMENT_KEY, ModuleState, name_of


def run_chunks(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A segment's forward in chunks.  Raises :class:`ValueError` if its arguments cannot be cut so."""
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    sequences, states = args[: config.seq_inputs], args[config.seq_inputs :]
    chunks = _chunk_count(module, config, sequences)
    if not torch.compiler.is_compiling():
        record_cut(module, config.chunks, sequences[0].shape[config.axis])
    if reason := norm_refusal(module, config, chunks):  # it became a segment in eval mode
        raise ValueError(f"{name_of(module)} cannot run in training mode: {reason} in the plan, or call eval()")
    pieces = list(zip(*(_pieces(s, chunks, config.axis) for s in sequences), strict=True))
    if config.batch_statistics and chunks > 1:
        return _run_passes(module, forward, pieces, states, kwargs)
    return _joined(config, *_one_by_one(module, [forward] * chunks, pieces, states, kwargs))


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
        columns, output = _one_by_one(module, gathering.forwards(len(pieces)), pieces, states, kwargs)
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
    forwards: Iterable[Callable[..., Any]],
    pieces: Sequence[tuple[Any, ...]],
    states: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[list[tuple[Any, ...]], Any]:
    """Every output that is cut, as its chunks, and the last chunk's whole output."""
    config: SegmentConfig = vars(module)[SEGMENT_KEY]
    codec = codec_of(module, config)
    remade = config.recompute_states and not is_nested() and not torch.compiler.is_compiling()
    starts = ChunkStarts(module) if remade else None
    resumes = any(getattr(m, "resumes_in_chunks", False) for m in module.modules())
    collected: list[tuple[Any, ...]] = []
    output: Any = None
    kept = list(ModuleState(module).tensors()) if steps_singly() else None
    for index, (piece, forward) in enumerate(zip(pieces, forwards, strict=True)):
        if resumes:
            chunk = SequenceChunk(config.axis, is_first=index == 0, is_last=index == len(pieces) - 1)
            forward = functools.partial(within_chunk, chunk, forward)
        inputs = PackedInputs(codec, raw=states)
        output = call_checkpointed(module, forward, (*piece, *states), kwargs, inputs, config.keep, starts)
        parts = output if isinstance(output, tuple) else (output,)
        collected.append(parts[: config.seq_outputs])
        states = parts[config.seq_outputs :] or states
        if kept is not None and list(map(id, ModuleState(module).tensors())) != list(map(id, kept)):
            raise ValueError(
                f"{name_of(module)} keeps state from one time step to the next and is called with a single one: in "
                "chunks its samples would get each other's; set chunks to 1 in the plan, or cut the whole sequence"
            )
    if starts is not None:
        starts.settle()
    return list(zip(*collected, strict=True)), output


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


def _chunk_count(module: nn.Module, config: SegmentConfig, sequences: tuple[Any, ...]) -> int:
    cuttable = [s for s in sequences if isinstance(s, Tensor) and -s.dim() <= config.axis < s.dim()]
    lengths = {s.shape[config.axis] for s in cuttable}
    if len(cuttable) < config.seq_inputs or len(lengths) != 1:
        given = ", ".join(str(tuple(s.shape)) if isinstance(s, Tensor) else type(s).__name__ for s in sequences)
        raise ValueError(
            f"a segment in chunks wants {config.seq_inputs} positional tensors of one length along axis {config.axis}, "
            f"and got {given or 'none'}; change axis or seq_inputs in the plan"
        )
    (length,) = lengths
    if length == 0:
        raise ValueError(f"a segment in chunks got an empty sequence (axis {config.axis} has length 0)")
    if length < config.chunks:
        warnings.warn(
            f"{name_of(module)}: {config.chunks} chunks asked of a sequence of length {length} "
            f"(axis {config.axis}); running {length}",
            stacklevel=1,
        )
    return min(config.chunks, length)

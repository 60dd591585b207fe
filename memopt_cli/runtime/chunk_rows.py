"""Finding rows that mix: modules that must not run in chunks, since a row of their output needs rows of another chunk.

A cumulative sum, attention, or a loop over time steps that is written in forward would start again in each chunk, and
silently compute other values.  Two trials on a piece of the input, without gradients, find that::

    whole                   cumsum([1, 2, 3, 4])    1 3 6 10
    trial 1, second half    cumsum([1, 2, 1, 2])    1 3 4 6     the first half of the output stays as it was: good
             first half     cumsum([3, 4, 3, 4])    3 7 10 14   the second half changes with the first: rows mix
    trial 2, two halves     joined                  1 3 3 7     the row after the cut is 3 and not 6: rows mix

Trial 1 replaces one half of the input by the other.  Trial 2 also finds modules that use the position of a row.  Batch
statistics do make rows depend on one another.  If they are gathered over the chunks, the norms in every trial use the
statistics of the first run.  Segments whose norms use the statistics of each chunk (``inexact``) are not tried.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt_cli.runtime.chunk_state import StateChanges, largest
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import Complaint
from memopt_cli.runtime.norms import NormChannelsDifferError
from memopt_cli.runtime.private_torch import unseen
from memopt_cli.runtime.this_thread import set_in_block, this_thread

_MAX_ROUNDINGS: Final = 8
"""Difference that an output may show between two runs on one shape, in roundings of the largest value."""
_MAX_DIFFERENCE_SHARE: Final = 1e-3
"""Share of the largest value by which an element may differ between inputs of two shapes: kernels for other shapes add
up in a different order."""
_MAX_FLIPPED_SHARE: Final = 0.02
"""At most this share of a row's elements may differ more: rounding may flip a few spikes from 0 to 1."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_forwards: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""Segment -> number of its forwards in chunks so far."""


def rows_untried() -> AbstractContextManager[None]:
    """Try no segment in the block, whose caller compares chunks with the whole itself."""
    return set_in_block("tries_rows", False)


Starting = Callable[[], AbstractContextManager[object]]
"""A function that returns a context manager that keeps a module in its starting state."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The subject of a trial: a segment, and a piece of its input along the axis to cut."""

    module: nn.Module
    starting: Starting
    whole: Callable[[Sequence[Tensor]], Any]
    """A function that runs the module on tensors in the piece's shapes, uncut."""
    halves: Callable[[], Sequence[Any]]
    """A function that runs the module on two halves of the piece, one after the other."""
    sequences: Callable[[], list[Tensor]]
    """A function that returns new copies of the piece's tensors, since forward may write its input in place."""
    length: int
    """The length of the piece along :attr:`axis`."""
    axis: int
    """The axis along which the piece's tensors are cut."""
    outputs: int
    """Number of the module's outputs that are joined over the chunks; later outputs are states for the next chunk."""
    resumes: bool
    """Whether the module hands state from chunk to chunk by itself (``resumes_in_chunks``), like a neuron."""
    norms: AbstractContextManager[object]
    """A context manager around every run, in which batch norms use the same statistics."""

    @property
    def half_lengths(self) -> tuple[int, int]:
        """The lengths of the two halves, the longer one first, as :func:`torch.chunk` has it."""
        return self.length - self.length // 2, self.length // 2


def begin_forward(module: nn.Module) -> bool:
    """Count a forward of ``module``, and return whether to try rows in it: in its first, 16th, 256th and so on.

    One trial is not enough, since it sees nothing where all values are zero.  Many trials would show in measured times.
    """
    if not this_thread.tries_rows:
        return False
    count = _forwards[module] = _forwards.get(module, 0) + 1
    return count.bit_count() == 1 and count.bit_length() % 4 == 1


def why_rows_mix(short: Iterable[Piece], full: Sequence[Piece], *, is_compared: bool) -> Complaint:
    """Return why a module cannot run in chunks: the first ``short`` piece that proves something decides, else ``full``.

    A piece proves nothing if the module's own code does not take its shape, or if an output has only one value: spikes
    may come late.  A short piece may hide that rows mix, as where an expert has no room for all tokens of the batch.
    So in the first forward, when there is no state of an optimizer yet, the first of the ``full`` pieces that proves
    something is tried as well, unless ``is_compared``: ``optimize`` has compared these chunks with the whole.  The last
    of them has the module's own sizes.
    """
    short_reason = _first_proof(short)
    is_first = _forwards[full[-1].module] == 1
    needs_full = not is_compared if is_first else short_reason is None
    if short_reason or not needs_full:
        return short_reason or ""
    full_reason = _first_proof(full[:-1])
    return (_why_mixed(full[-1], is_short=False) or "") if full_reason is None else full_reason


def _first_proof(pieces: Iterable[Piece]) -> Complaint | None:
    """Return what the first of ``pieces``, all cut short, proves; ``None`` if no piece proves anything."""
    proofs = (_why_mixed(piece, is_short=True) for piece in pieces)
    return next((reason for reason in proofs if reason is not None), None)


def _why_mixed(piece: Piece, *, is_short: bool) -> Complaint | None:
    """Return why the rows of ``piece`` mix, empty if they do not; ``None`` if it proves nothing."""
    try:
        with torch.no_grad(), unseen(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module may warn of a piece that is not the user's
            return _try(piece)
    except NormChannelsDifferError as error:  # cutting a piece short may cut the channels of its norms
        return None if is_short else str(error)
    except Exception:
        return None


def _try(piece: Piece) -> Complaint | None:
    """Return why the module of ``piece`` cannot run in chunks; ``None`` if its outputs prove nothing.

    The trial takes place in the middle of a step, whose plan has no bytes to spare.  So it holds the outputs of the
    whole run, and in addition only one other run at a time.
    """
    whole = _run_whole(piece, piece.sequences())
    shapes, after_cut = _cut_in_half(piece)
    if whole.shapes != shapes:
        uncut, joined = (", ".join(map(str, run_shapes)) for run_shapes in (whole.shapes, shapes))
        return f"gives {joined} in two chunks along axis {piece.axis}, and {uncut} as a whole"
    if any(bool((part == part.flatten()[:1]).all()) for (part,) in whole.outputs):
        return None
    return _compare_halves(piece, whole) or _compare_restart(piece, whole, after_cut)


def _cut_in_half(piece: Piece) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Run two halves of ``piece``; return the shape of each joined output, and its first row after the cut."""
    cut = _run(piece, piece.halves)
    rows = [parts[1].narrow(piece.axis, 0, 1).clone() for parts in cut.outputs] if cut.is_cut_at(piece) else []
    return cut.shapes, rows


def _compare_restart(piece: Piece, whole: _Result, after_cut: Sequence[Tensor]) -> Complaint:
    """Return a complaint if the first row after a cut, ``after_cut``, differs from that row of the ``whole``."""
    # The module's own generator may draw numbers that ``is_random`` does not see.  It draws other numbers for half
    # the length than for the whole, and outputs then prove nothing.
    if any(isinstance(value, torch.Generator) for m in piece.module.modules() for value in vars(m).values()):
        return ""
    half, _ = piece.half_lengths
    if whole.is_random or not whole.is_cut_at(piece):
        return ""
    if not any(map(_differs, whole.rows(piece.axis, half, 1), after_cut)):
        return ""
    return f"computes something else behind a cut along axis {piece.axis}"


def _compare_halves(piece: Piece, whole: _Result) -> Complaint:
    """Return a complaint if either half of the output changes with the other half of the input."""
    if piece.resumes or whole.hands_over or not whole.is_cut_at(piece):
        return ""
    half, rest = piece.half_lengths
    for start, source, compared, size in ((0, half, half, rest), (half, 0, 0, half)):
        inputs = piece.sequences()
        for tensor in inputs:
            replaced = tensor.narrow(piece.axis, source, rest).clone()  # the halves may overlap by a row
            tensor.narrow(piece.axis, start, rest).copy_(replaced)
        changed = _run_whole(piece, inputs)
        if not all(map(_is_alike, whole.rows(piece.axis, compared, size), changed.rows(piece.axis, compared, size))):
            return f"mixes what lies along axis {piece.axis}: part of its output depends on another part of its input"
    return ""


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a run on a piece."""

    outputs: list[tuple[Tensor, ...]]
    """Each output, in the parts in which the piece was run."""
    shapes: list[tuple[int, ...]]
    """The shape of each output, its parts joined."""
    is_random: bool
    """Whether the run drew random numbers."""
    hands_over: bool
    """Whether the run left or returned state for a next chunk, so that later rows rightly depend on earlier rows."""

    def is_cut_at(self, piece: Piece) -> bool:
        axis = piece.axis
        return {shape[axis] if -len(shape) <= axis < len(shape) else 0 for shape in self.shapes} == {piece.length}

    def rows(self, axis: int, start: int, count: int) -> list[Tensor]:
        return [whole.narrow(axis, start, count) for (whole,) in self.outputs]


def _run(piece: Piece, run: Callable[[], Sequence[Any]]) -> _Result:
    # The block's end restores the training mode of the dropouts.
    with piece.starting():
        for module in piece.module.modules():
            if isinstance(module, _DROPOUTS):
                module.eval()
        generators, changes = Generators(), StateChanges(piece.module)
        with piece.norms:
            parts = [output if isinstance(output, tuple) else (output,) for output in run()]
        outputs = [*zip(*(part[: piece.outputs] for part in parts), strict=True)]
        shapes = [tuple(torch.cat([p.to("meta") for p in output], dim=piece.axis).shape) for output in outputs]
        changes_state = len(parts[0]) > piece.outputs or bool(changes.changed_names())
        return _Result(outputs, shapes, generators.moved(), changes_state)


def _run_whole(piece: Piece, inputs: Sequence[Tensor]) -> _Result:
    return _run(piece, lambda: [piece.whole(inputs)])


def _is_alike(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return largest(a - b) <= _MAX_ROUNDINGS * torch.finfo(a.dtype).eps * largest(a)


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return whether more elements of ``a`` and ``b`` differ than rounding explains."""
    if not (a.is_floating_point() or a.is_complex()):
        differs = a != b
    else:
        differs = (a - b).abs().nan_to_num(0.0) > _MAX_DIFFERENCE_SHARE * largest(a)
    return differs.numel() > 0 and differs.float().mean().item() > _MAX_FLIPPED_SHARE

"""Rows that mix: along the axis by which a segment is cut, a row of its output needs other rows of its input.

A cumulative sum, a loop over time steps that is written in forward, attention: in chunks each would start anew where
it is cut, and silently compute something else.  Two trials on a piece of the input, without gradients, find that::

    cumsum([1, 2, 3, 4])    1 3 6 10
    cumsum([1, 2, 1, 2])    1 3 4 6     other values in one half must leave the other half as it is: here they do
    cumsum([3, 4, 3, 4])    3 7 10 14   here they do not: rows mix
    two halves, joined      1 3 3 7     the row after a cut must be as without the cut: 3 is not 6

The second trial also finds modules that go by the position of a row.  Batch statistics do make rows depend on one
another: where they are gathered over the chunks, the norms in every trial use the statistics found in the first run.
Segments whose norms are to use the statistics of each chunk are not tried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt_cli.runtime.chunk_state import Moves, largest
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.norms import OtherNorms
from memopt_cli.runtime.private_torch import unseen

_ROUNDINGS: Final = 8
"""Steps of rounding, of the largest value, by which an output may differ between two runs of one shape."""
_SHARE: Final = 1e-3
"""Share of the largest value by which an element may differ between two shapes, which add up in another order."""
_FEW: Final = 0.02
"""Share of a row's elements that may differ by more: a spike that rounding flips is one of many."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_tried: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""Segment -> its forwards in chunks so far."""

_thread = threading.local()


@contextlib.contextmanager
def rows_untried() -> Iterator[None]:
    """Try no segment in the block: somebody else compares chunks with the whole."""
    outer, _thread.untried = getattr(_thread, "untried", False), True
    try:
        yield
    finally:
        _thread.untried = outer


Starting = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Piece:
    """The subject of a trial: a segment, and a piece of its input along the axis by which it is cut."""

    module: nn.Module
    starting: Starting
    """A context manager in whose block the module is in its starting state."""
    whole: Callable[[Sequence[Tensor]], Any]
    """A function that runs the module on tensors like the piece at once."""
    halves: Callable[[], Sequence[Any]]
    """A function that runs the module on two halves of the piece, one after the other."""
    sequences: Sequence[Tensor]
    """The tensors of the piece."""
    axis: int
    outputs: int
    """How many of its outputs are cut; later ones are states."""
    resumes: bool
    """Whether it hands state on from chunk to chunk that it does not leave behind."""
    norms: AbstractContextManager[object]
    """A context manager around every run."""

    @property
    def halves_of(self) -> tuple[int, int]:
        """The lengths of the halves, cut as chunks are."""
        length = self.sequences[0].shape[self.axis]
        return length - length // 2, length // 2


def is_due(module: nn.Module) -> bool:
    """Tell whether ``module`` is to be tried in this forward: the first, the 16th, the 256th and so on.

    One trial may see nothing, as where all values are zero; more of them would show in measured times.
    """
    if getattr(_thread, "untried", False):
        return False
    _tried[module] = _tried.get(module, 0) + 1
    return _tried[module].bit_count() == 1 and _tried[module].bit_length() % 4 == 1


def mixing(piece: Piece) -> str:
    """Return why the module of ``piece`` cannot run in chunks, a sentence without its subject; empty if it may."""
    try:
        with torch.no_grad(), unseen():
            whole = _run_whole(piece, _copies(piece.sequences))
            cut = _run(piece, piece.halves)
            return _other_shape(piece, whole, cut) or _dependence(piece, whole) or _restart(piece, whole, cut)
    except OtherNorms as found:
        return str(found)
    except Exception:  # the module's own code, on a length that it may not take: that proves nothing about chunks
        return ""


def _other_shape(piece: Piece, whole: _Found, cut: _Found) -> str:
    """Return how the joined outputs of two halves differ in shape from the output of the whole; empty if not."""
    shapes = [tuple(tuple(tensor.shape) for tensor in found.tensors) for found in (whole, cut)]
    if shapes[0] == shapes[1]:
        return ""
    uncut, joined = (", ".join(map(str, found)) for found in shapes)
    return f"gives {joined} in two chunks along axis {piece.axis}, and {uncut} as a whole"


def _dependence(piece: Piece, whole: _Found) -> str:
    """Return why rows mix, if either half of the output changes with the other half of the input; else empty."""
    if piece.resumes or whole.hands_over or not whole.is_cut_at(piece):
        return ""
    half, rest = piece.halves_of
    for start, other, kept, size in ((0, half, half, rest), (half, 0, 0, half)):
        inputs = [_exchanged(s, start, other, rest, piece.axis) for s in piece.sequences]
        changed = _run_whole(piece, inputs)
        if not all(map(_is_alike, whole.rows(piece.axis, kept, size), changed.rows(piece.axis, kept, size))):
            return f"mixes what lies along axis {piece.axis}: part of its output depends on another part of its input"
    return ""


def _restart(piece: Piece, whole: _Found, cut: _Found) -> str:
    """Return why a cut shows, if the first row after it differs from that without the cut; else empty."""
    if any(isinstance(value, torch.Generator) for m in piece.module.modules() for value in vars(m).values()):
        return ""  # no two shapes draw alike
    if whole.is_random or not whole.is_cut_at(piece):
        return ""
    half, _ = piece.halves_of
    if not any(map(_is_unlike, whole.rows(piece.axis, half, 1), cut.rows(piece.axis, half, 1))):
        return ""
    return f"computes something else behind a cut along axis {piece.axis}"


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a run on a piece."""

    tensors: list[Tensor]
    """The outputs that are cut, joined."""
    is_random: bool
    """Whether it drew random numbers."""
    hands_over: bool
    """Whether it leaves state behind, or returns some: then later rows do depend on earlier ones."""

    def is_cut_at(self, piece: Piece) -> bool:
        """Tell whether it has a row for each row of ``piece``."""
        lengths = {t.shape[piece.axis] if -t.dim() <= piece.axis < t.dim() else 0 for t in self.tensors}
        return lengths == {sum(piece.halves_of)}

    def rows(self, axis: int, start: int, count: int) -> list[Tensor]:
        return [tensor.narrow(axis, start, count) for tensor in self.tensors]


def _run(piece: Piece, run: Callable[[], Sequence[Any]]) -> _Found:
    with piece.starting():
        for module in piece.module.modules():
            if isinstance(module, _DROPOUTS):
                module.eval()
        generators, moves = Generators(), Moves(piece.module)
        with piece.norms:
            parts = [output if isinstance(output, tuple) else (output,) for output in run()]
        columns = zip(*(part[: piece.outputs] for part in parts), strict=True)
        joined = [torch.cat(column, dim=piece.axis) for column in columns]
        return _Found(joined, generators.moved(), len(parts[0]) > piece.outputs or bool(moves.now()))


def _run_whole(piece: Piece, inputs: Sequence[Tensor]) -> _Found:
    return _run(piece, lambda: [piece.whole(inputs)])


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]  # the module may write its input in place


def _exchanged(tensor: Tensor, start: int, other: int, count: int, axis: int) -> Tensor:
    """Return a copy of ``tensor`` with ``count`` rows from ``start`` on replaced by those from ``other`` on."""
    (copied,) = _copies([tensor])
    copied.narrow(axis, start, count).copy_(tensor.detach().narrow(axis, other, count))
    return copied


def _is_alike(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return largest(a - b) <= _ROUNDINGS * torch.finfo(a.dtype).eps * largest(a)


def _is_unlike(a: Tensor, b: Tensor) -> bool:
    """Tell whether more of ``a`` and ``b`` differs than rounding explains."""
    if not (a.is_floating_point() or a.is_complex()):
        others = a != b
    else:
        others = (a - b).abs().nan_to_num(0.0) > _SHARE * largest(a)
    return others.numel() > 0 and others.float().mean().item() > _FEW

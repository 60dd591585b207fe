"""Copying tensors with their layout in memory: copies have the same strides, and overlap if the tensors do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from memopt_cli.runtime.compressor import is_dense, same_bits
from memopt_cli.runtime.private_torch import memory_of, version_counter

_WORD: Final = 16
"""Size in bytes of the largest element.  An offset that is a multiple of it is aligned for every dtype."""


@dataclass(slots=True)
class Copy:
    """The values of a tensor at one moment."""

    values: Tensor
    """A separate tensor, or a view of ``shared``."""
    stride: tuple[int, ...] = ()
    """The strides of the tensor; empty if ``values`` has the same strides."""
    shared: Tensor | None = None
    """A vector that several copies are views of; ``None`` if ``values`` is a separate tensor."""
    needs_gradient: bool = False
    """Whether the tensor that is restored from the copy needs a gradient."""


def copy_values(tensors: Sequence[Tensor]) -> dict[int, Copy]:
    """Return copies of the values that ``tensors`` have now, as a dictionary by ``id``.

    Overlapping tensors are copied as views of one vector with the same layout::

        a = memory[0:6], b = memory[4:8]    one vector of 8 elements, of which both copies are views
    """
    distinct = {id(t): t for t in tensors}
    if _are_disjoint(distinct.values()):
        return {key: Copy((t.detach() if t.requires_grad else t).clone()) for key, t in distinct.items()}
    copies: dict[int, Copy] = {}
    for group in _by_memory([t for t in distinct.values() if _lies_in_memory(t)]):
        for piece in [group] if len(group) == 1 else _overlapping_groups(group):
            overlaps_itself = not piece[0].is_contiguous() and _count_spanned(piece[0]) < piece[0].numel()
            if len(piece) > 1 or overlaps_itself:
                copies |= _copies_in_one_vector(piece)
    for key, tensor in distinct.items():
        if key not in copies:
            is_gapped = _lies_in_memory(tensor) and not (tensor.is_contiguous() or is_dense(tensor))
            copies[key] = Copy(tensor.detach().clone(), tensor.stride() if is_gapped else ())
    return copies


def _are_disjoint(tensors: Iterable[Tensor]) -> bool:
    """Return whether all ``tensors`` are contiguous in memory, and no two of them overlap."""
    spans = []
    for t in tensors:
        if type(t) is not Tensor or t.layout is not torch.strided or not t.is_contiguous():
            return False
        spans.append((t.data_ptr(), t.nbytes))
    spans.sort()
    end = 1  # a tensor without memory starts at 0
    for start, size in spans:
        if start < end:
            return False
        end = start + size
    return True


def restored_tensors(copies: Mapping[int, Copy]) -> dict[int, Tensor]:
    """Return new tensors with the values of ``copies``, under the same keys."""
    shared = {id(c.shared): c.shared for c in copies.values() if c.shared is not None}
    clones: dict[int, Tensor] = {}
    if shared:
        needing = {id(c.shared) for c in copies.values() if c.needs_gradient}
        clones = {key: vector.detach().requires_grad_(key in needing).clone() for key, vector in shared.items()}
    return {key: _restored_tensor(copy, clones) for key, copy in copies.items()}


def _restored_tensor(copy: Copy, shared: Mapping[int, Tensor]) -> Tensor:
    if copy.shared is not None:
        view = _matching_view(shared[id(copy.shared)], copy.values, 0)
        return view if copy.needs_gradient else view.detach()
    values = copy.values.detach().requires_grad_() if copy.needs_gradient else copy.values
    if not copy.stride:
        return values.clone()
    return torch.empty_strided(values.shape, copy.stride, dtype=values.dtype, device=values.device).copy_(values)


def _lies_in_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a nonempty plain strided tensor whose memory holds its values as they are.

    Conjugated, negated, quantized and meta tensors are not.
    """
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_conj() and not tensor.is_neg() and tensor.numel() > 0 and not tensor.is_meta


def _count_spanned(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _byte_range(tensor: Tensor) -> range:
    """Return the range of bytes of its storage in which ``tensor`` lies."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return range(start * size, (start + _count_spanned(tensor)) * size)


def _by_memory(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Yield ``tensors`` in groups of one storage.

    If one of a group needs a gradient, the group is divided by dtype, since raw bytes have no gradient.
    """
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[memory_of(tensor)].append(tensor)
    for group in groups.values():
        if len(group) == 1 or not any(t.requires_grad for t in group):
            yield group
        else:
            yield from ([t for t in group if t.dtype is dtype] for dtype in {t.dtype for t in group})


def _overlapping_groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield ``tensors``, all of one storage, in groups that overlap."""
    piece: list[Tensor] = []
    end = 0
    for tensor in sorted(tensors, key=lambda t: _byte_range(t).start):
        if piece and _byte_range(tensor).start >= end:
            yield piece
            piece = []
        piece.append(tensor)
        end = max(end, _byte_range(tensor).stop)
    yield piece


def _copies_in_one_vector(piece: Sequence[Tensor]) -> dict[int, Copy]:
    finest = min(piece, key=Tensor.element_size)
    size = finest.element_size()
    start = min(_byte_range(t).start for t in piece) // _WORD * _WORD
    length = max(_byte_range(t).stop for t in piece) - start
    memory = finest.detach().as_strided((length // size,), (1,), start // size)
    shared = memory.new_zeros(-(-length // _WORD) * _WORD // size)
    shared[: len(memory)] = memory
    return {id(t): Copy(_matching_view(shared, t, start), shared=shared) for t in piece}


def _matching_view(shared: Tensor, like: Tensor, start: int) -> Tensor:
    """Return the view of ``shared``, a copy of a storage from byte ``start`` on, that corresponds to ``like``."""
    offset = like.storage_offset() - start // like.element_size()
    return shared.view(like.dtype).as_strided(like.shape, like.stride(), offset)


def version_of(tensor: Tensor | None) -> int:
    """Return the number of in-place writes to ``tensor``; 0 for ``None`` and inference tensors, which count none."""
    if tensor is None:
        return 0
    try:
        return version_counter(tensor)
    except RuntimeError:
        return 0


def is_unchanged(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether ``tensor`` has the same bits as ``copy``, NaNs included, or is of a kind that is not compared."""
    if tensor.is_meta or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return True
    return torch.equal(tensor, copy) or (not tensor.is_quantized and same_bits(tensor, copy))

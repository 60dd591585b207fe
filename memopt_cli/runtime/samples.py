"""Comparing a recomputation with its forward, by a few elements of every tensor that autograd saves in both.

The comparison reveals sources that cannot be restored: the clock, random numbers of the operating system, and
generators that memopt does not find.  It is made in a module's first run, and again in its 16th, its 256th and so on.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.runtime.private_torch import is_of_transform, stands_for_zeros, unseen

_SAMPLE_SIZE: Final = 64
"""Approximate number of elements of a tensor that are compared."""
_TURN_FACTOR: Final = 16
"""Factor between the runs that are watched: the 16th, the 256th and so on."""
_COMPARED_DTYPES: Final = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
    | {torch.bool, torch.int16, torch.int32, torch.int64}
)
"""Dtypes that are compared.  Bytes are not: some are the workspace of a kernel, which may write only a part of it."""

_is_off = False
_PLACE_BYTES: Final = 32
"""Number of bytes that are read at each of three places; a multiple of the size of every element."""


@contextlib.contextmanager
def sampling_off() -> Iterator[None]:
    """Sample nothing in the ``with`` block: its caller compares everything itself, or measures time."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


class WatchSchedule:
    """The schedule of watching the calls of a segment, and of comparing them when they are recomputed."""

    def __init__(self) -> None:
        self._runs, self._next = 0, _TURN_FACTOR
        self._was_compared = False

    def begin_run(self) -> bool:
        """Count a run, and return whether to watch it: all until one is compared, then the 16th, 256th and so on."""
        self._runs += 1
        if self._runs < self._next:
            return not self._was_compared and not _is_off
        self._next *= _TURN_FACTOR
        return not _is_off

    def note_comparison(self) -> None:
        """Note that a run has been compared with its recomputation."""
        self._was_compared = True


def sample(tensor: Tensor) -> list[Any] | None:
    """Return a few elements of ``tensor``; ``None`` if it is not a plain tensor with data, or sampling is off."""
    if _is_off:
        return None
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or is_of_transform(tensor) or tensor.dtype not in _COMPARED_DTYPES or _has_no_values(tensor):
        return None
    steps = max(1, round(_SAMPLE_SIZE ** (1 / max(1, tensor.dim()))))
    with torch.no_grad(), unseen():
        part = tensor.detach()[tuple(slice(None, None, max(1, size // steps)) for size in tensor.shape)]
        elements: list[Any] = part.flatten().tolist()
    return elements


def few_bytes(tensor: Tensor) -> bytes | None:
    """Return the bytes at start, middle and end of ``tensor``, at almost no cost; ``None`` if they cannot be read."""
    if _is_off or type(tensor) is not Tensor or not tensor.is_cpu or is_of_transform(tensor):
        return None
    if not tensor.is_contiguous():
        return None
    start, size = tensor.data_ptr(), tensor.nbytes
    if start == 0 or size == 0 or tensor.dtype not in _COMPARED_DTYPES:
        return None
    if size <= _PLACE_BYTES:
        return ctypes.string_at(start, size)
    # ``string_at`` would take twice as long.
    read = _PlaceBytes.from_address
    last = size // _PLACE_BYTES * _PLACE_BYTES - _PLACE_BYTES
    middle = size // 2 // _PLACE_BYTES * _PLACE_BYTES
    return read(start).raw + read(start + middle).raw + read(start + last).raw


def matches_few_bytes(before: bytes, tensor: Tensor) -> bool:
    """Return whether :func:`few_bytes` reads the bytes ``before`` of ``tensor``, except for rounding."""
    now = few_bytes(tensor)
    if now is None or now == before:
        return True
    elements, elements_now = (torch.frombuffer(bytearray(b), dtype=tensor.dtype).tolist() for b in (before, now))
    return _are_close(elements, elements_now, tensor.dtype)


_PlaceBytes = ctypes.c_char * _PLACE_BYTES


def _has_no_values(tensor: Tensor) -> bool:
    """Return whether ``tensor`` stands for zeros, was freed (as by FSDP), or is only being captured in a CUDA graph."""
    if stands_for_zeros(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < end


def matches_sample(before: list[Any], tensor: Tensor) -> bool:
    """Return whether :func:`sample` reads the elements ``before`` of ``tensor``, except for rounding.

    The tensor may come from a different kernel, which rounds differently.
    """
    now = sample(tensor)
    return now is None or now == before or _are_close(before, now, tensor.dtype)


def _are_close(before: list[Any], now: list[Any], dtype: torch.dtype) -> bool:
    if not (dtype.is_floating_point or dtype.is_complex) or len(now) != len(before):
        return False
    leeway = torch.finfo(dtype).eps ** 0.5 * max((abs(x) for x in before if abs(x) < float("inf")), default=0.0)
    return all(x == y or (x != x and y != y) or abs(x - y) <= leeway for x, y in zip(before, now, strict=True))

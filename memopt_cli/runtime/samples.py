"""Whether a recomputation computes what forward computed: a few elements of every tensor that they save are compared.

This tells of what nothing can put back: the clock, random numbers of the operating system, generators that no name
leads to.  It is done where a module runs first, and again when it has run sixteen times as often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.private_torch import hooks_on_saving, not_compiled, stands_for_zeros, unseen

_ELEMENTS: Final = 64
"""Of a tensor, about so many."""
_RARER: Final = 16
_DTYPES: Final = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128}
    | {torch.bool, torch.int16, torch.int32, torch.int64}
)
"""Those of values: bytes are the workspace of some kernel, not all of which it writes."""

_runs: MutableMapping[nn.Module, int] = WeakKeyDictionary()
_compared_at: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""How often a module had run when it was last compared."""
_is_off = False


@contextlib.contextmanager
def nothing_sampled() -> Iterator[None]:
    """Within, nothing is: somebody else compares all there is, or measures time."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


def is_sampled(module: nn.Module) -> bool:
    """Whether it is the turn of ``module``, which runs now."""
    _runs[module] = _runs.get(module, 0) + 1
    return not _is_off and _runs[module] >= _RARER * _compared_at.get(module, 0)


@contextlib.contextmanager
def compared(
    module: nn.Module, samples: Sequence[list[Any] | None], tell: Callable[[tuple[int, ...]], None]
) -> Iterator[None]:
    """A run of ``module`` that saved tensors with these samples is repeated within; ``None`` stands for any.

    ``tell`` is called afterwards with the shape of the first tensor that differs, if one does.
    """
    again = _Again(samples)
    try:
        with again.hooks():
            yield
    finally:
        _compared_at[module] = _runs[module]
        if (shape := again.differs()) is not None:
            tell(shape)


class _Again:
    """What is saved in a recomputation."""

    def __init__(self, samples: Sequence[list[Any] | None]) -> None:
        self._samples = iter(samples)
        self._suspects: list[tuple[list[Any], Tensor]] = []
        self._pack, self._unpack = hooks_on_saving()

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._look, self._unpack)

    def differs(self) -> tuple[int, ...] | None:
        """The shape of the first tensor that does."""
        # Some operators fill a tensor after they have saved it, and its memory may have held the same before.
        found = (tuple(tensor.shape) for before, tensor in self._suspects if not _agrees(before, tensor))
        shape = next(found, None)
        self._suspects.clear()
        return shape

    @not_compiled
    def _look(self, tensor: Tensor) -> Any:
        before = next(self._samples, None)
        if before is not None and not _agrees(before, tensor):
            self._suspects.append((before, tensor))
        return self._pack(tensor)


def sample(tensor: Tensor) -> list[Any] | None:
    """A few of its elements; ``None`` of one whose values do not simply lie in memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype not in _DTYPES or _has_no_values(tensor):
        return None
    along = max(1, round(_ELEMENTS ** (1 / max(1, tensor.dim()))))
    with torch.no_grad(), unseen():
        part = tensor.detach()[tuple(slice(None, None, max(1, size // along)) for size in tensor.shape)]
        elements: list[Any] = part.flatten().tolist()
    return elements


def _has_no_values(tensor: Tensor) -> bool:
    """Whether it stands for zeros, its memory was freed (as FSDP does), or kernels are being recorded for later."""
    if stands_for_zeros(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < end


def _agrees(before: list[Any], tensor: Tensor) -> bool:
    """Whether a tensor is as it was but for rounding: what is kept or found may have come from another kernel."""
    now, dtype = sample(tensor), tensor.dtype
    if now is None or now == before:
        return True
    if not (dtype.is_floating_point or dtype.is_complex) or len(now) != len(before):
        return False
    leeway = torch.finfo(dtype).eps ** 0.5 * max((abs(x) for x in before if abs(x) < float("inf")), default=0.0)
    return all(x == y or abs(x - y) <= leeway for x, y in zip(before, now, strict=True))

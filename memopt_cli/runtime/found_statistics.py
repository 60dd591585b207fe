"""The batch statistics that a segment's norms find in forward, for its recomputation.

Finding mean and variance takes most of the time of a batch norm on the CPU.  A recomputation has the same input, so it
normalizes by what forward found, which comes out equal to the bit: PyTorch's kernel for a contiguous input computes
``input * (invstd * weight) + (bias - mean * (invstd * weight))``, whether it has just found the statistics or is given
them.  Other kernels group the factors otherwise; there the statistics are found again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memopt_cli.runtime.batch_statistics import BATCH_NORMS, batch_norms

_thread = threading.local()

_NATIVE, _NAME = torch.ops.aten.native_batch_norm.default, "aten::native_batch_norm"
_LAYOUTS = {torch.contiguous_format: range(2, 6), torch.channels_last: (4,), torch.channels_last_3d: (5,)}
"""Layouts of an input, and of how many dimensions it may be, for which the kernel is the one that this is about."""


@dataclass(frozen=True, slots=True)
class KnownNorm:
    """What one batch norm found in its input."""

    shape: torch.Size
    dtype: torch.dtype
    mean: Tensor
    invstd: Tensor

    def again(self, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """What ``native_batch_norm(*args)`` returned, to the bit.

        Raises :class:`RuntimeError` if the input is another.
        """
        x, weight, bias, *_ = args
        if (x.shape, x.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"a recomputation calls batch_norm on {tuple(x.shape)}, {x.dtype}, where forward called it on "
                f"{tuple(self.shape)}, {self.dtype}; the module does not compute the same twice. Do not make it a "
                "segment."
            )
        scale = self.invstd if weight is None else weight * self.invstd
        output, *_ = _NATIVE(x, scale, bias, self.mean, torch.ones_like(self.invstd), False, 0.0, 0.0)
        return output, self.mean.detach(), self.invstd.detach()


def known_norm(func: Any, args: Sequence[Any], result: Any) -> KnownNorm | None:
    """What the call found, if it is a batch norm that can be repeated to the bit with it."""
    if func is not _NATIVE or not _is_repeatable(*args):
        return None
    x, (_, mean, invstd) = args[0], result
    return KnownNorm(x.shape, x.dtype, mean.detach(), invstd.detach())


class FoundStatistics:
    """What the norms of one run of a segment found, in their order; not those of segments in it, which have theirs."""

    def __init__(self, module: nn.Module, keep: Sequence[str]) -> None:
        """``keep``: the operators whose outputs are kept anyhow."""
        is_kept = any(name.partition("#")[0] == _NAME for name in keep)
        self._has_norms = not is_kept and bool(batch_norms(module))
        self._found: list[KnownNorm | None] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forward runs within."""
        if not self._has_norms:
            yield
            return
        with _AroundNorms(_Recording(self._found)):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A recomputation runs within."""
        if not any(self._found):
            yield
            return
        with _AroundNorms(_Replaying(self._found)):
            yield


class _AroundNorms(TorchFunctionMode):
    """Enters a mode for the time of each call of ``batch_norm``: no other operator passes through it."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in BATCH_NORMS or getattr(_thread, "in_norm", False):
            return func(*args, **(kwargs or {}))
        _thread.in_norm = True
        try:
            with self._mode:
                return func(*args, **(kwargs or {}))
        finally:
            _thread.in_norm = False


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[KnownNorm | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _NATIVE:
            self._found.append(known_norm(func, args, result))
        return result


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[KnownNorm | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = iter(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = next(self._left, None) if func is _NATIVE else None
        return func(*args, **(kwargs or {})) if known is None else known.again(args)


def _is_repeatable(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
) -> bool:
    return (
        training
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() > 0
        and any(x.is_contiguous(memory_format=layout) for layout, dims in _LAYOUTS.items() if x.dim() in dims)
        and all(t is None or (t.dtype == x.dtype and t.is_contiguous()) for t in (weight, bias))
    )

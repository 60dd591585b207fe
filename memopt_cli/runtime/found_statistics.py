"""The batch statistics that a segment's norms find in forward, for its recomputation.

Finding mean and variance takes most of the time of a batch norm on the CPU.  A recomputation has the same input, so it
normalizes by what forward found, which comes out equal to the bit: PyTorch's kernel for a contiguous input computes
``input * (invstd * weight) + (bias - mean * (invstd * weight))``, whether it has just found the statistics or is given
them.  Other kernels group the factors otherwise; there the statistics are found again.  So are those of small inputs,
where finding them takes less time than noting them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt_cli.runtime.compressor import same_bits
from memopt_cli.runtime.norms import BATCH_NORMS, batch_norms
from memopt_cli.runtime.private_torch import TorchDispatchMode, is_compiled, not_compiled, unseen
from memopt_cli.runtime.selective import uncounted

_thread = threading.local()

_FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that, in eval mode, take other kernels where functions pass through a mode."""
_NATIVE, _NAME = torch.ops.aten.native_batch_norm.default, "aten::native_batch_norm"
_LAYOUTS = {torch.contiguous_format: range(2, 6), torch.channels_last: (4,), torch.channels_last_3d: (5,)}
"""Layouts of an input, and of how many dimensions it may be, for which the kernel is the one that this is about."""
_LEAST_ELEMENTS = 1 << 18
"""Of an input whose statistics are noted (``python benchmarks/overhead.py``)."""

_Shapes = tuple[torch.Size, ...]
_nothing_to_note: MutableMapping[nn.Module, set[_Shapes]] = WeakKeyDictionary()
"""A segment -> shapes of its inputs with which none of its norms could be repeated."""
_MOST_SHAPES: Final = 100


@dataclass(frozen=True, slots=True)
class RepeatableNorm:
    """A call of batch norm that can be repeated without looking at its input again."""

    shape: torch.Size
    dtype: torch.dtype
    mean: Tensor
    invstd: Tensor

    def repeat(self, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """What ``native_batch_norm(*args)`` returned, to the bit; running statistics are not written.

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


def repeatable_norm(func: Any, args: Sequence[Any], result: Any) -> RepeatableNorm | None:
    """The call, if it is a batch norm that can be repeated to the bit."""
    if func is not _NATIVE or not _is_repeatable(*args):
        return None
    x, (_, mean, invstd) = args[0], result
    return RepeatableNorm(x.shape, x.dtype, mean.detach(), invstd.detach())


def _is_repeatable(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
) -> bool:
    vectors = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    return (
        training
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() >= max(1, _LEAST_ELEMENTS)
        and any(x.is_contiguous(memory_format=layout) for layout, dims in _LAYOUTS.items() if x.dim() in dims)
        and all(t.dtype == x.dtype and t.is_contiguous() for t in vectors)
        and _is_exact(x.dtype)
    )


@functools.cache
def _is_exact(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch, on this processor, computes as the head of this file says."""
    with torch.no_grad(), unseen():
        whole = torch.linspace(-3, 5, 2 * 37 * 7 * 7, dtype=torch.float64).to(dtype).view(2, 37, 7, 7)
        weight = bias = whole[0, :, 0, 0].contiguous()
        for x in (whole, whole.contiguous(memory_format=torch.channels_last)):
            args = (x, weight, bias, None, None, True, 0.1, 1e-5)
            output, mean, invstd = _NATIVE(*args)
            if not same_bits(output, RepeatableNorm(x.shape, dtype, mean, invstd).repeat(args)[0]):
                return False
    return True


@dataclass(frozen=True, slots=True)
class _Call:
    is_searching: bool
    """It looks for the statistics of its input, and is not given those of earlier ones."""
    norm: RepeatableNorm | None
    running: tuple[Tensor | None, ...]
    """Running mean and variance after the call."""


class FoundStatistics:
    """What the norms of one run of a segment found, in their order; not those of segments in it, which have theirs."""

    def __init__(self, module: nn.Module, keep: Sequence[str]) -> None:
        """``keep``: the operators whose outputs are kept; if norms are among them, there is nothing to repeat."""
        self._module = module
        self._are_kept = any(name.partition("#")[0] == _NAME for name in keep)
        self._calls: list[_Call] = []
        self._is_noting = False

    @contextmanager
    def recording(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Forward runs within."""
        shapes, without = tuple(t.shape for t in inputs), _nothing_to_note.setdefault(self._module, set())
        may_note = shapes not in without and not self._are_kept
        self._is_noting = may_note and _has_norms(self._module)
        with self._around(_Recording(self._calls)):
            yield
        only_searching = all(call.is_searching and call.norm is None for call in self._calls)
        is_known = bool(self._calls) or not self._is_noting  # norms that did not run yet say nothing
        if may_note and only_searching and is_known:
            if len(without) == _MOST_SHAPES:
                without.clear()
            without.add(shapes)

    def replaying(self) -> AbstractContextManager[None]:
        """A recomputation runs within."""
        return self._around(_Replaying(self._calls))

    @contextmanager
    def _around(self, mode: TorchDispatchMode) -> Iterator[None]:
        outer, _thread.innermost = getattr(_thread, "innermost", None), self
        try:
            if self._is_noting:
                with _InnermostNorms(self, mode):
                    yield
            else:
                yield
        finally:
            _thread.innermost = outer


def _has_norms(module: nn.Module) -> bool:
    others = any(isinstance(m, _FAST) or is_compiled(m) for m in module.modules())
    return bool(batch_norms(module)) and not others


class _InnermostNorms(TorchFunctionMode):
    """Enters a mode for the time of each call of ``batch_norm``, but of those in a segment within.

    Functions pass through this one, operators that are no part of a norm not through the other.
    """

    def __init__(self, owner: FoundStatistics, mode: AbstractContextManager[object]) -> None:
        super().__init__()
        self._owner = owner
        self._mode = mode

    @not_compiled  # what it is around would be compiled in one run and not in the next
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in BATCH_NORMS or _thread.innermost is not self._owner:
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


class _Norms(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Recording(_Norms):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _NATIVE:
            with uncounted():
                norm = repeatable_norm(func, args, result)
                running = tuple(t.clone() if norm and t is not None else None for t in args[3:5])
            self._calls.append(_Call(bool(args[5]), norm, running))
        return result


class _Replaying(_Norms):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = iter(calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = next(self._left, None) if func is _NATIVE else None
        if call is None or call.norm is None:
            return func(*args, **(kwargs or {}))
        with uncounted():
            for there, after in zip(args[3:5], call.running, strict=True):
                if there is not None and after is not None:
                    there.data.copy_(after)  # past the version, as batch norm itself writes it
            return call.norm.repeat(args)

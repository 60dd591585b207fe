"""Recognizing batch norms, the modules and the functions that all their classes call, and fixing their statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt_cli.runtime.lifted.module import list_operators
from memopt_cli.runtime.private_torch import BatchNorm

_OPERATOR_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: _OPERATOR_ARGUMENTS,
    torch.ops.aten.batch_norm: _OPERATOR_ARGUMENTS,
    torch.ops.aten.batch_norm.default: _OPERATOR_ARGUMENTS,
}
"""Function that normalizes a batch -> the names of its positional arguments."""


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the modules in ``module`` that normalize by batch statistics in training mode, lifted ones included."""
    return [m for m in module.modules() if isinstance(m, BatchNorm) or "aten::batch_norm" in list_operators(m)]


class NormChannelsDifferError(Exception):
    """A batch norm gets different channels on a part of the input from those on all of it.

    The message is a ``Complaint``.
    """


class SameStatistics(TorchFunctionMode):
    """A mode in which each call of a batch norm uses the statistics of the same call in the first run.

    In later runs, a module may run on several parts in turn, and the norms' calls repeat for each part.  No weights are
    applied: weights of zero would hide differences.  Raises :class:`NormChannelsDifferError` if a call gets
    other channels.
    """

    def __init__(self) -> None:
        super().__init__()
        self._statistics: list[tuple[Tensor, Tensor]] = []
        """Mean and variance for each call of the first run."""
        self._calls = 0
        self._is_first = True

    def __enter__(self) -> SameStatistics:
        self._calls = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_first = False
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = dict(zip(BATCH_NORMS.get(func, ()), args, strict=False)) | (kwargs or {})
        if func not in BATCH_NORMS or not arguments.get("training", False):
            return func(*args, **(kwargs or {}))
        x, call = arguments["input"], self._calls
        self._calls += 1
        if self._is_first:
            precise = x.to(torch.promote_types(x.dtype, torch.float32))
            dims = [d for d in range(x.dim()) if d != 1]
            self._statistics.append((precise.mean(dims), precise.var(dims, correction=0)))
        statistics = self._statistics[call % len(self._statistics)] if self._statistics else ()
        vectors = [arguments.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
        if not statistics or any(v is not None and v.shape != x.shape[1:2] for v in (*statistics, *vectors)):
            raise NormChannelsDifferError("gives its batch norms other channels on a part of its input")
        return F.batch_norm(x, *statistics, eps=arguments.get("eps", 1e-5))

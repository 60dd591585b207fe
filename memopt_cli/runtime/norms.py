"""Batch norms: the modules, and the functions that every class of them calls in the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt_cli.runtime.lifted.module import operators_of
from memopt_cli.runtime.private_torch import BatchNorm

_OF_MODULES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OF_OPERATORS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _OF_MODULES,
    torch.batch_norm: _OF_OPERATORS,
    torch.ops.aten.batch_norm: _OF_OPERATORS,
    torch.ops.aten.batch_norm.default: _OF_OPERATORS,
}
"""The ways to ask for batch normalization, with the names of their positional arguments."""


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the modules in ``module`` that normalize by batch statistics in training mode, lifted ones included."""
    return [m for m in module.modules() if isinstance(m, BatchNorm) or "aten::batch_norm" in operators_of(m)]


class OtherNorms(Exception):
    """Part of an input reaches a module's batch norms in another way than the whole; a sentence without its subject."""


class SameStatistics(TorchFunctionMode):
    """A mode in which batch norms normalize as in the first run under it: call for call by the statistics found there.

    A run of several parts, one after the other, calls them as often for each part.  No weights are applied, for they
    may be zero.  Raises :class:`OtherNorms`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, Tensor]] = []
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
        given = dict(zip(BATCH_NORMS.get(func, ()), args, strict=False)) | (kwargs or {})
        if func not in BATCH_NORMS or not given.get("training", False):
            return func(*args, **(kwargs or {}))
        x, call = given["input"], self._calls
        self._calls += 1
        if self._is_first:
            precise, others = x.to(torch.promote_types(x.dtype, torch.float32)), [d for d in range(x.dim()) if d != 1]
            self._found.append((precise.mean(others), precise.var(others, correction=0)))
        found = self._found[call % len(self._found)] if self._found else ()
        vectors = [given.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
        if not found or any(v is not None and v.shape != x.shape[1:2] for v in (*found, *vectors)):
            raise OtherNorms("gives its batch norms other channels on a part of its input")
        return F.batch_norm(x, *found, eps=given.get("eps", 1e-5))

"""Results that a plain step writes to an existing storage, where a watched step makes another.

If a tensor has several gradients, autograd adds each of them to the first in place, unless something else holds the
first.  Under a dispatch mode, or on fake tensors, autograd makes a new tensor instead.  Such a sum is therefore counted
as replacing its first summand, and so is the result of a derivative formula that would be written in place
(:mod:`memopt_cli.trace.formulas`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.compressor import is_dense
from memopt_cli.runtime.private_torch import caller_beyond, is_engine, is_view
from memopt_cli.trace.formulas import Formula, formula_at
from memopt_cli.trace.operators import name_of
from memopt_cli.trace.storages import Peaks, Storage, Storages


class InPlace:
    """Accounts for the storage that the last operator of a derivative would have written to in a plain step."""

    def __init__(self, storages: Storages, peaks: Peaks) -> None:
        self._storages = storages
        self._peaks = peaks
        self._formula: Formula | None = None
        """Formula of the last operator; ``None`` if it belongs to none."""
        self._first: Storage | None = None
        """Storage that the last operator would have written to in a plain step, if nobody else holds it."""
        self._with_first_bytes = 0
        self._written: Storage | None = None
        """Result of the last operator, if a plain step writes it into ``_first`` even where others hold that."""

    def share_of(self, func: Any, *, differentiates: bool) -> float:
        """Return the share of the bytes of an operator that a plain step takes; to be asked once, before its tick."""
        formula = self._formula = formula_at(self._storages.tick, self._formula) if differentiates else None
        return 0.0 if func is _ZEROS else formula.share_of(name_of(func)) if formula else 1.0

    def replaced_bytes(self, func: Any, args: Any, output: Any) -> int:
        """Return the bytes of the storage that a plain step would write the result to; 0 if there is none."""
        if not self._is_written(func, args) and not self._is_sum(func, args):
            return 0
        self._first, self._with_first_bytes = self._storages.known(args[0]), self._storages.live_bytes
        combines = self._formula is not None and self._formula.combines(name_of(func))
        self._written = self._storages.known(output) if combines else None
        if self._first is None:
            return 0
        self._first.is_replaced = True
        return self._first.nbytes

    def settle(self) -> None:
        """Close the account of the last operator.

        If something else still holds the storage to write to, a plain step makes a new one as well, which counts; only
        masks are combined in place all the same.
        """
        if self._first is not None:
            self._first.is_replaced = False
            if self._first.died is None:
                if self._written is None:
                    self._peaks.rise(self._storages.tick, self._with_first_bytes, 0)
                else:
                    self._storages.drop(self._written)
        self._first = self._written = None

    def _is_written(self, func: Any, args: Any) -> bool:
        """Return whether a formula calls ``func``, which in a plain step writes to its first argument."""
        formula = self._formula
        return formula is not None and formula.writes(name_of(func)) and self._is_of(formula, args[0])

    def _is_sum(self, func: Any, args: Any) -> bool:
        """Return whether autograd adds up gradients of a tensor, and not a formula two of its own results."""
        formula = self._formula
        return _adds_gradients(func, args) and (
            formula is None or formula.is_shared or not self._is_of(formula, args[0])
        )

    def _is_of(self, formula: Formula, tensor: Tensor) -> bool:
        made = self._storages.known(tensor)
        return made is not None and made.born > formula.began


def _adds_gradients(func: Any, args: Any) -> bool:
    """Return whether autograd itself, and no function of a node, calls ``func`` to add up the gradients of a tensor.

    It adds in place only to a gradient that is dense, without overlaps and no view, since the base would hold it; and a
    sparse one only to one that is contiguous.
    """
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    first, other = args
    if not isinstance(other, Tensor) or is_view(first) or not is_dense(first):
        return False
    if other.layout is not torch.strided and not first.is_contiguous():
        return False
    caller = caller_beyond(_AROUND)
    return caller is not None and is_engine(caller)


_ZEROS = torch.ops.aten._efficientzerotensor.default
"""Operator whose result stands for zeros and takes no memory."""

_AROUND = frozenset((__name__, "memopt_cli.trace.log", "torch._compile", "torch._dynamo.eval_frame"))
"""Modules on the stack between an operator and a mode that sees it."""

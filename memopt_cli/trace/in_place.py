"""Corrections of the counted bytes where autograd writes in place, but not under a dispatch mode.

If a tensor has several gradients, autograd adds each to the first in place, unless something else holds the first.
Under a dispatch mode, or on fake tensors, autograd makes a new tensor instead.  Such a sum is therefore counted as
replacing its first summand.  The result of a derivative formula that would be written in place is counted likewise
(:mod:`memopt_cli.trace.formulas`).  Whether something else holds the summand shows only once the operator has returned:
the account of an operator is settled when the next one begins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.compressor import is_dense
from memopt_cli.runtime.private_torch import caller_beyond, is_engine, is_view
from memopt_cli.trace.formulas import Formula, formula_at
from memopt_cli.trace.operators import operator_name
from memopt_cli.trace.storages import Peaks, Storage, Storages

_ZEROS = torch.ops.aten._efficientzerotensor.default
"""Operator whose result represents zeros without memory."""
_OWN_MODULES = frozenset((__name__, "memopt_cli.trace.log", "torch._compile", "torch._dynamo.eval_frame"))
"""Python modules with frames between the caller of an operator and the dispatch mode that sees it."""


class InPlace:
    """Corrects the peaks for the last operator of backward, if it writes in place in a plain step."""

    def __init__(self, storages: Storages, peaks: Peaks) -> None:
        self._storages = storages
        self._peaks = peaks
        self._formula: Formula | None = None
        """Derivative formula of the last operator; ``None`` if it is part of no formula."""
        self._target: Storage | None = None
        """Storage that the last operator writes to in a plain step, if only it holds it; ``None`` if it is new."""
        self._uncorrected_bytes = 0
        """Bytes alive with both the target and the result."""
        self._forced: Storage | None = None
        """Result of the last operator, if a plain step writes it into the target although something holds that."""

    def plain_share(self, func: Any, *, differentiates: bool) -> float:
        """Return the share of the result's bytes that a plain step takes; call it once, before the operator counts."""
        formula = self._formula = formula_at(self._storages.tick, self._formula) if differentiates else None
        if func is _ZEROS:
            return 0.0
        return formula.count_call(operator_name(func)) if formula else 1.0

    def replaced_bytes(self, func: Any, args: Any, output: Any) -> int:
        """Return the bytes of the storage to which a plain step would write ``output``; 0 if it makes a new one."""
        if not self._writes_in_formula(func, args) and not self._is_sum(func, args):
            return 0
        self._target, self._uncorrected_bytes = self._storages.find(args[0]), self._storages.live_bytes
        combines = self._formula is not None and self._formula.combines(operator_name(func))
        self._forced = self._storages.find(output) if combines else None
        if self._target is None:
            return 0
        self._target.is_replaced = True
        return self._target.nbytes

    def finish_operator(self) -> None:
        """Settle the account of the last operator.

        If something else still holds the target, a plain step makes a new storage as well, which then counts.  Masks
        are an exception: formulas combine them in place in any case.
        """
        if self._target is not None:
            self._target.is_replaced = False
            if self._target.died is None:
                if self._forced is None:
                    self._peaks.raise_to(self._storages.tick, self._uncorrected_bytes, 0)
                else:
                    self._storages.drop(self._forced)
        self._target = self._forced = None

    def _writes_in_formula(self, func: Any, args: Any) -> bool:
        """Return whether a formula calls ``func`` where, in a plain step, it writes to its first argument."""
        formula = self._formula
        return formula is not None and formula.writes(operator_name(func)) and self._is_made_by(formula, args[0])

    def _is_sum(self, func: Any, args: Any) -> bool:
        """Return whether ``func`` is autograd's sum of gradients, and not a sum inside a derivative formula."""
        formula = self._formula
        return _adds_gradients(func, args) and (
            formula is None or formula.is_shared or not self._is_made_by(formula, args[0])
        )

    def _is_made_by(self, formula: Formula, tensor: Tensor) -> bool:
        storage = self._storages.find(tensor)
        return storage is not None and storage.born > formula.began


def _adds_gradients(func: Any, args: Any) -> bool:
    """Return whether autograd's engine, and not the code of a node, calls ``func`` to sum gradients of a tensor.

    The engine adds in place only to a dense gradient without overlaps, and not to a view: its base may be in use.  It
    adds a sparse gradient only to a contiguous one.
    """
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    first, second = args
    if not isinstance(second, Tensor) or is_view(first) or not is_dense(first):
        return False
    if second.layout is not torch.strided and not first.is_contiguous():
        return False
    caller = caller_beyond(_OWN_MODULES)
    return caller is not None and is_engine(caller)

"""PyTorch's derivative formulas that run other operators under a dispatch mode, or on fake tensors: how to count these.

Many formulas (``torch/csrc/autograd/FunctionsManual.cpp``) ask whether a tensor could be a subclass, which is true of
every tensor in a *watched* step, one under a dispatch mode.  Then they write nothing in place: where a plain step has
one tensor, the watched step has two, and some formulas compute quite differently.  This cannot be turned off,
as fake tensors are subclasses.  So the tensors of a watched formula are counted as in a plain one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.autograd.function import BackwardCFunction

from memopt_cli.runtime.private_torch import running_node, sequence_number

_WRITES = {
    "aten::index_add",
    "aten::index_copy",
    "aten::index_fill",
    "aten::index_put",
    "aten::masked_scatter",
    "aten::put",
    "aten::scatter",
    "aten::scatter_add",
}
"""Operators that a watched formula calls on its own results, where the plain formula calls the in-place operator."""

_COMBINES = {"aten::logical_and", "aten::logical_or"}
"""Operators on masks that the plain formula calls in place as well, even if it keeps the mask."""

_WRITES_IN = {
    "BinaryCrossEntropyBackward0": {"aten::mul"},
    "AminmaxBackward0": {"aten::add"},
    "ClampBackward0": {"aten::masked_fill"},  # since PyTorch 2.14
}
"""Formula -> further operators that the plain formula calls in place."""
_MASK = 1 / 4
"""Size of a mask, as a share of a float32 tensor."""


def _without(*operators: str) -> dict[str, float]:
    return dict.fromkeys(operators, 0.0)


_SPREAD = _without("aten::isnan", "aten::logical_and")
_SHARES: dict[str, dict[str, float]] = {
    "MaxBackward1": _SPREAD,
    "MinBackward1": _SPREAD,
    "MedianBackward0": _SPREAD,
    "NanmedianBackward0": _SPREAD,
    "ProdBackward0": _without("aten::ones", "aten::cat", "aten::cumprod", "aten::flip"),
    "ProdBackward1": _without("aten::ones", "aten::cat#2", "aten::cumprod", "aten::flip") | {"aten::cat#1": _MASK},
    "LinalgMatrixExpBackward0": _without("aten::cat#1", "aten::cat#2", "aten::zeros_like"),
    "CumprodBackward0": _without(
        *("aten::zeros", "aten::new_zeros", "aten::cumsum#1", "aten::eq#2", "aten::eq#3", "aten::bitwise_not"),
        *(
            "aten::masked_fill",
            "aten::max",
            "aten::zeros_like",
            "aten::cumprod",
            "aten::ne",
            "aten::mul#2",
            "aten::sub",
        ),
        "aten::gather",
    )
    | {"aten::cat#1": 2.0},  # PyTorch 2.8's, which goes from row to row where a plain one sums all at once
}
"""Formula -> operators of the watched formula only, each with the share of its bytes that a plain formula takes.

A plain formula chooses a shorter way by the values of its input, which a watched formula may not read.  It is assumed
to find no zeros in a product, and no NaN.  ``aten::cumsum#1`` is the first call of that operator.
"""


@dataclass(slots=True)
class Formula:
    """The derivative formula that is running: a node of autograd in its backward."""

    name: str
    """Name of the node."""
    number: int
    """Number of the node, in the order in which forward made them."""
    began: int
    """Tick before its first operator."""
    is_shared: bool
    """Whether the formula gives two gradients of the same tensor, which the engine then sums."""
    calls: Counter[str] = field(default_factory=Counter)
    """Operator -> the number of its calls."""

    def writes(self, operator: str) -> bool:
        """Return whether a plain step calls ``operator`` in place on a result of the formula."""
        return operator in _WRITES | _COMBINES or operator in _WRITES_IN.get(self.name, ())

    def combines(self, operator: str) -> bool:
        """Return whether a plain step calls ``operator`` in place even on a result that the formula keeps."""
        return operator in _COMBINES

    def count_call(self, operator: str) -> float:
        """Count a call of ``operator``, and return the share of its bytes that a plain step takes."""
        shares = _SHARES.get(self.name)
        if shares is None:
            return 1.0
        self.calls[operator] += 1
        return shares.get(operator, shares.get(f"{operator}#{self.calls[operator]}", 1.0))


def formula_at(tick: int, before: Formula | None) -> Formula | None:
    """Return PyTorch's formula that is running, if any; it may be ``before``, the previous operator's."""
    if torch.is_grad_enabled():
        return None
    node = running_node()
    if node is None or isinstance(node, BackwardCFunction):
        return None
    name, number = node.name(), sequence_number(node)
    if before is not None and (before.name, before.number) == (name, number):
        return before
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return Formula(name, number, tick, is_shared=len(set(edges)) < len(edges))

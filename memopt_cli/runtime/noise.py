"""Operators that save a tensor first and fill it afterwards, as RReLU does with its noise.

PyTorch ends a recomputation when the last tensor has been saved, before such an operator has run.  A segment that ends
in one saves something behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

_FILLED_LATER: Final = ("RreluWithNoiseBackward", "RreluWithNoiseFunctionalBackward")
"""Nodes of operators whose schema says that they write to an argument which they save: of ATen's only these."""
_ALWAYS_SAVING: Final = frozenset(
    f"{name}Backward0"
    for name in (
        *("Relu", "Sigmoid", "Tanh", "Gelu", "Silu", "Softmax", "LogSoftmax", "NativeDropout", "Convolution"),
        *("NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm", "LeakyRelu", "Elu", "Hardtanh", "Softplus"),
        *("Exp", "Log", "Sin", "Cos", "Sqrt", "Rsqrt", "MaxPool2DWithIndices", "AvgPool2D", "NllLoss"),
    )
)
"""Nodes that hold a tensor in any case."""


def first_node() -> int:
    """The number that the next node of autograd will have."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def ends_in_noise(outputs: Sequence[Tensor], since: int) -> bool:
    """Whether the last operator that surely saved a tensor is none, and one of those before it fills it later.

    ``since``: the number of the first node that counts.
    """
    pending: list[tuple[int, int, Any]] = []
    seen = set[Any]()

    def add(node: Any) -> None:
        if node is not None and node not in seen and node._sequence_nr() >= since:
            seen.add(node)
            heapq.heappush(pending, (-node._sequence_nr(), len(seen), node))

    for output in outputs:
        add(output.grad_fn)
    while pending:
        _, _, node = heapq.heappop(pending)
        name = node.name()
        if name.startswith(_FILLED_LATER):
            return True
        if name in _ALWAYS_SAVING or getattr(node, "_raw_saved_tensors", None):
            return False
        for following, _ in node.next_functions:
            add(following)
    return False


def save_nothing() -> None:
    """Save a tensor that nobody will ask for."""
    torch.zeros((), requires_grad=True).exp()

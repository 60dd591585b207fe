"""Operators that save a tensor first and fill it afterwards, as RReLU does with its noise.

A recomputation ends when the last tensor has been saved, which is before such an operator has filled it.  A segment
that ends in one is therefore run to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from memopt_cli.runtime.private_torch import name_of_node, number_of

_FILLED_LATER: Final = ("RreluWithNoiseBackward", "RreluWithNoiseFunctionalBackward")
"""Names of the nodes of all ATen operators whose schema says that they write to an argument which they save."""


def noise_since(first: int, outputs: Sequence[Tensor]) -> frozenset[int]:
    """Return the numbers of those operators' nodes, from ``first`` on, on which ``outputs`` depend.

    A node that no output depends on is never asked for its tensors.
    """
    pending, seen, found = [output.grad_fn for output in outputs], set[Any](), set[int]()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen and number_of(node) >= first:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
            if name_of_node(node).startswith(_FILLED_LATER):
                found.add(number_of(node))
    return frozenset(found)

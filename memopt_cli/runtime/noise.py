"""Operators that save a tensor first and fill it afterwards, as RReLU does with its noise.

PyTorch ends a recomputation when the last tensor has been saved, before such an operator has run.  A segment that ends
in one saves something behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from memopt_cli.runtime.private_torch import name_of_node, number_of

_FILLED_LATER: Final = ("RreluWithNoiseBackward", "RreluWithNoiseFunctionalBackward")
"""Nodes of operators whose schema says that they write to an argument which they save: of ATen's only these."""


def ends_in_noise(outputs: Sequence[Tensor], last: range) -> bool:
    """Whether the last node that saved a tensor, one of these numbers, is of an operator that fills it later.

    ``outputs``: of what ran; a node that they do not depend on is never asked for its tensors.
    """
    if not last:  # nothing was saved
        return False
    pending: list[tuple[int, int, Any]] = []
    seen = set[Any]()

    def add(node: Any) -> None:
        if node is not None and node not in seen and number_of(node) >= last.start:
            seen.add(node)
            heapq.heappush(pending, (-number_of(node), len(seen), node))

    for output in outputs:
        add(output.grad_fn)
    while pending:
        number, _, node = heapq.heappop(pending)
        if -number in last and name_of_node(node).startswith(_FILLED_LATER):
            return True
        for following, _ in node.next_functions:
            add(following)
    return False


def noise_since(first: int, outputs: Sequence[Tensor]) -> frozenset[int]:
    """The numbers of such operators' nodes from ``first`` on; in eval mode they never fill what they saved."""
    pending, seen, found = [output.grad_fn for output in outputs], set[Any](), set[int]()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen and number_of(node) >= first:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
            if name_of_node(node).startswith(_FILLED_LATER):
                found.add(number_of(node))
    return frozenset(found)

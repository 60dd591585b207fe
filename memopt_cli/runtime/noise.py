"""Operators that save a tensor first and fill it afterwards, as RReLU does with its noise.

A recomputation ends when the last tensor has been saved.  If the last operator is of this kind, it has not filled its
tensor by then, so a segment that ends in such an operator runs to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import Tensor

from memopt_cli.runtime.graph import reachable_nodes
from memopt_cli.runtime.private_torch import name_of_node, sequence_number

_FILLED_LATER: Final = ("RreluWithNoiseBackward", "RreluWithNoiseFunctionalBackward")
"""Names of the nodes of all ATen operators that, by their schemas, write to an argument that they save."""


def noise_since(first: int, outputs: Iterable[Tensor]) -> frozenset[int]:
    """Return the numbers, from ``first`` on, of the nodes of ``outputs`` that fill a tensor after saving it.

    Backward never asks a node for its tensors if no output depends on the node.
    """
    nodes = reachable_nodes(outputs, lambda node: sequence_number(node) < first)
    return frozenset(sequence_number(node) for node in nodes if name_of_node(node).startswith(_FILLED_LATER))

"""Packed weights of quantized layers, which are objects of PyTorch's C++ classes."""

from __future__ import annotations

from typing import Any, Final

import torch

from memopt_cli.loading.pickles.kinds.interface import BrokenError, Graph, ListedNames, Recipe
from memopt_cli.loading.pickles.nodes import Built, Tuple
from memopt_cli.loading.pickles.packed_weights import CLASSES, is_packed


def _make(*arguments: Any) -> Any:
    if arguments:
        raise BrokenError("packed weights are created with arguments")
    return torch.ScriptObject.__new__(torch.ScriptObject)


def _check(node: Built, graph: Graph) -> str:
    """Refuse packed weights whose state is not a pair: the name of a known class, and a state that the class checks."""
    match node.state:
        case Tuple(items=(state, str(name))) if name in CLASSES:
            return "" if is_packed(name, state) else "holds packed weights in a form that PyTorch does not write"
    return "is not an object of a class of packed weights"


QUANTIZED: Final = ListedNames(
    called={},
    created={"torch.ScriptObject": Recipe(make=_make, fill=lambda made, state: made.__setstate__(state), check=_check)},
    held={},
)

"""The packed weights of quantized layers: objects of PyTorch's own classes of C++."""

from __future__ import annotations

from typing import Any, Final

import torch

from memopt_cli.loading.pickles.kinds.interface import Broken, Graph, Listed, Recipe
from memopt_cli.loading.pickles.nodes import Built, Tuple

_CLASSES: Final = tuple(
    f"__torch__.torch.classes.{name}"
    for name in (
        "quantized.LinearPackedParamsBase",
        "quantized.Conv2dPackedParamsBase",
        "quantized.Conv3dPackedParamsBase",
        "quantized.EmbeddingPackedParamsBase",
    )
)
_CELLS: Final = "__torch__.torch.classes.rnn.CellParamsBase"
_KINDS_OF_CELLS: Final = ("quantized_dynamic", "quantized_fp16")
"""Those that are made of packed weights; others read the offsets of their columns unchecked."""


def _make(*arguments: Any) -> Any:
    if arguments:
        raise Broken("packed weights are created with arguments")
    return torch.ScriptObject.__new__(torch.ScriptObject)


def _check(node: Built | None, graph: Graph) -> str:
    """Its state is what the class takes, and the name of the class."""
    assert node is not None
    match node.state:
        case Tuple(items=(Tuple(items=(str(kind), *_)), str(name))) if name == _CELLS:
            return "" if kind in _KINDS_OF_CELLS else f"holds a recurrent cell of the kind {kind!r}"
        case Tuple(items=(_, str(name))) if name in _CLASSES:
            return ""
    return "is of a class that is none of packed weights"


QUANTIZED: Final = Listed(
    called={},
    created={"torch.ScriptObject": Recipe(make=_make, fill=lambda made, state: made.__setstate__(state), check=_check)},
    held={},
)

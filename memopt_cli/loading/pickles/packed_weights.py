"""Checking the state of packed weights (of quantized layers) before PyTorch's C++ classes take it."""

from __future__ import annotations

from typing import Any, Final

from memopt_cli.loading.pickles.nodes import Tuple

NATIVE: Final = "__torch__.torch.classes."
"""Prefix of the names of C++ classes."""
_CELLS: Final = f"{NATIVE}rnn.CellParamsBase"
_CONVOLUTIONS: Final = tuple(f"{NATIVE}quantized.Conv{dims}dPackedParamsBase" for dims in (2, 3))
CLASSES: Final = (
    *_CONVOLUTIONS,
    f"{NATIVE}quantized.LinearPackedParamsBase",
    f"{NATIVE}quantized.EmbeddingPackedParamsBase",
    _CELLS,
)


def is_packed(name: str, state: Any) -> bool:
    """Return whether ``state`` is a state of the class ``name`` in its current form, which PyTorch checks.

    PyTorch also reads the forms of older versions, but takes their parts unchecked.
    """
    items = state.items if isinstance(state, Tuple) else ()
    if name == _CELLS:
        return items[:1] in (("quantized_dynamic",), ("quantized_fp16",))
    if name in _CONVOLUTIONS:
        return len(items) == 3 and type(items[0]) in (int, str) and items[0] in (3, "2")
    return True

"""Which line of the model's code runs."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import FrameType

import torch

_OURS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(os.__file__).parent) + os.sep,
    "<",  # of no file
)
"""Beginnings of the names of files that are no model's: PyTorch's, memopt's, and those of the standard library."""
_TAKES_STEPS = tuple(str(Path(__file__).parents[1] / "training" / name) for name in ("step.py", "own_step.py"))
"""Files whose functions call the model: above them is whoever asked for the step."""
_LIBRARIES = str(Path(torch.__file__).parents[1]) + os.sep
"""Beside PyTorch: a model of a library is there, within the standard library's folder."""


def line_of_the_model() -> str:
    """``model.py:31`` of the innermost one; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_code.co_filename) not in _TAKES_STEPS:
        if _is_of_model(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def _is_of_model(name: str) -> bool:
    if name.startswith(_OURS[:2]):
        return False
    return name.startswith(_LIBRARIES) or not name.startswith(_OURS[2:])

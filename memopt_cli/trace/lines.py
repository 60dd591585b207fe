"""The line of the model's code that calls an operator, for profiles that show which line holds the memory."""

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
    "<",  # code without a file
)
"""Prefixes of files that belong to no model: PyTorch's, memopt's, and those of the standard library."""
_TAKES_STEPS = tuple(str(Path(__file__).parents[1] / "training" / name) for name in ("step.py", "own_step.py"))
"""Files whose functions call the model: frames outside of these are not the model's."""
_LIBRARIES = str(Path(torch.__file__).parents[1]) + os.sep
"""Folder of installed packages, where models of libraries are; it lies within the standard library's folder."""


def line_of_the_model() -> str:
    """Return the innermost line of the model's code on the stack, ``model.py:31``; empty if there is none."""
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

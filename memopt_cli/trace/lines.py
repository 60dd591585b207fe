"""The line of the model's code that calls an operator: profiles show the lines that hold the memory."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import FrameType

import torch

_TOOLS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
"""Prefixes of files of PyTorch and memopt, which belong to no model."""
_STANDARD_LIBRARY = (str(Path(os.__file__).parent) + os.sep, "<")
"""Prefixes of files of the standard library, and of code without a file."""
_STEP_FILES = tuple(str(Path(__file__).parents[1] / "training" / name) for name in ("step.py", "own_step.py"))
"""Files whose functions call the model; further out on the stack, no frame is the model's."""
_INSTALLED = str(Path(torch.__file__).parents[1]) + os.sep
"""Folder of installed packages, where models of libraries are; it lies within the standard library's folder."""


def line_of_the_model() -> str:
    """Return the innermost line of the model's code on the stack, ``model.py:31``; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_code.co_filename) not in _STEP_FILES:
        if _is_model_file(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def _is_model_file(name: str) -> bool:
    if name.startswith(_TOOLS):
        return False
    return name.startswith(_INSTALLED) or not name.startswith(_STANDARD_LIBRARY)

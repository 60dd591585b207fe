"""What a kernel is: one module type, or one function, for all models at once.

A kernel of a module gets the stacked module, whose parameters are (models, …), and inputs (models, …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Convolutions = Literal["grouped", "per model"]
"""Convolutions of all models as groups of one, or one after the other: which is faster depends on the images."""


@dataclass(frozen=True, slots=True)
class ModuleKernel:
    """How one type of module runs."""

    run: Callable[..., Any]
    """``run(module, *inputs)``."""
    unless: Callable[[Any], str] = lambda module: ""
    """Why it cannot run this instance; empty if it can."""


Kernels = dict[type[nn.Module], ModuleKernel]

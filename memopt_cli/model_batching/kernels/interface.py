"""What a kernel is: one module type, or one function, for all models at once.

A kernel of a module gets the stacked module, whose parameters are (models, …), and inputs (models, …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Convolutions = Literal["grouped", "by size"]
"""Convolutions of all models as groups of one; or one after the other where there are fewer weights than inputs.

One after the other, none is slower than by itself, but the gradients of the weights are copied into one tensor.
"""


@dataclass(frozen=True, slots=True)
class ModuleKernel:
    """How one type of module runs."""

    run: Callable[..., Any]
    """``run(module, *inputs)``."""
    unless: Callable[[Any], str] = lambda module: ""
    """Why it cannot run this instance; empty if it can."""


Kernels = dict[type[nn.Module], ModuleKernel]

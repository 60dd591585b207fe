"""Kernels: one type of module, or one function, for all models at once.

A kernel of a module gets the stacked module, whose parameters are (models, …), and inputs (models, …).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class ModuleKernel:
    """A kernel of one type of module."""

    run: Callable[..., Any]
    """Function of the stacked module and its inputs that returns the outputs of all models."""
    unless: Callable[[Any], str] = lambda module: ""
    """Function of the stacked module that returns why the kernel cannot run it; empty if it can."""


Kernels = dict[type[nn.Module], ModuleKernel]

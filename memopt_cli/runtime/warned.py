"""Warnings that point at the user's line, whatever depth of memopt and PyTorch they come from."""

from __future__ import annotations

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warn with ``message`` at the innermost line that is outside PyTorch and memopt."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "memopt_cli"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)

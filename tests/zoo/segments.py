"""Copies of models with segments in them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from memopt_cli.runtime import SegmentConfig, install_segment


def with_segments(model: nn.Module, config: SegmentConfig, *paths: str) -> Any:
    """A copy of ``model`` with segments at ``paths``, outermost first, or at its root without any."""
    optimized = copy.deepcopy(model)
    for path in paths or ("",):
        install_segment(optimized.get_submodule(path), config)
    return optimized

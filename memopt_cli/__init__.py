"""memopt: train the same model in a fraction of the memory.

The public names are loaded when they are first used, so that ``import memopt_cli.runtime`` (what an optimized model
needs) and ``memopt --help`` stay light.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

_PUBLIC = {
    "apply_plan": "memopt_cli.apply",
    "load": "memopt_cli.loading",
    "read_plan": "memopt_cli.write",
    "remove_plan": "memopt_cli.apply",
    "GCContainer": "memopt_cli.runtime",
    "MemOptSummary": "memopt_cli.records",
    "Plan": "memopt_cli.records",
    "SegmentPlan": "memopt_cli.records",
    "Trust": "memopt_cli.records",
    "TCGCContainer": "memopt_cli.runtime",
    "is_recomputing": "memopt_cli.runtime",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("memopt")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'memopt_cli' has no attribute {name!r}")

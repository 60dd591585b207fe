"""The names that a pickle imports, as Python 3 spells them, and what is called by way of another name."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's names, which protocol 2 writes
from typing import Any

from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.nodes import COMPUTED, GETATTR, Built, Global

_LONGEST_NAME = 1000
"""Characters."""
LONGEST_ATTRIBUTE = 500
"""The same of a part of a module: a path has the names of all modules on the way, and each module its own path."""


def wanted_name(scan: PickleScan, module: str, name: str) -> Global:
    """The name that a pickle imports.  Raises :class:`ValueError` if it is too long."""
    if len(module) + len(name) > _LONGEST_NAME:
        raise ValueError(f"it imports a name of {len(module) + len(name)} characters")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    found = Global(module, name)
    scan.wanted.add(found)
    return found


def called_name(scan: PickleScan, callee: Any) -> Global:
    """What is called or created; a callable that is computed is wanted under a name of its own."""
    found = within_class(callee) or COMPUTED
    scan.wanted.add(found)
    scan.called.add(found)
    return found


def within_class(callee: Any) -> Global | None:
    """The name that is called or created; protocols before 4 ask a class for one that is defined in it."""
    if isinstance(callee, Global):
        return callee
    match callee:
        case Built(how="called", callee=Global() as asked) if asked == GETATTR:
            match callee.given():
                case owner, str(name) if (found := within_class(owner)) and name.isidentifier():
                    return Global(found.module, f"{found.name}.{name}") if len(found.name) < _LONGEST_NAME else None
    return None

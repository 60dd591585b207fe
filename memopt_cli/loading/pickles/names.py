"""The names that a pickle imports and calls, as Python 3 spells them."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's names, which protocol 2 writes
from typing import Any

from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.nodes import COMPUTED, GETATTR, Built, Global

_MAX_NAME_LENGTH = 1000
"""Maximum number of characters in the name of an import."""
MAX_ATTRIBUTE_LENGTH = 500
"""Maximum number of characters in the name of a child, parameter or buffer; the paths of modules below repeat it."""


def wanted_name(scan: PickleScan, module: str, name: str) -> Global:
    """Return the name that a pickle imports, and record it in ``scan``.  Raises :class:`ValueError` if too long."""
    if len(module) + len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"it imports a name of {len(module) + len(name)} characters")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    wanted = Global(module, name)
    scan.wanted.add(wanted)
    return wanted


def called_name(scan: PickleScan, callee: Any) -> Global:
    """Return the name of ``callee``, or :data:`~.nodes.COMPUTED` if a pickle computes it, and record it in ``scan``."""
    called = within_class(callee) or COMPUTED
    scan.wanted.add(called)
    scan.called.add(called)
    return called


def within_class(callee: Any) -> Global | None:
    """Return the name of ``callee``, or ``None`` if it is computed.

    Protocols before 4 name ``Outer.Inner`` by ``getattr(Outer, "Inner")``, which counts as a name.
    """
    if isinstance(callee, Global):
        return callee
    match callee:
        case Built(how="called", callee=Global() as asked) if asked == GETATTR:
            match callee.argument_items():
                case owner, str(name) if (outer := within_class(owner)) and name.isidentifier():
                    return Global(outer.module, f"{outer.name}.{name}") if len(outer.name) < _MAX_NAME_LENGTH else None
    return None

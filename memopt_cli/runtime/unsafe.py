"""Segments that turn out to be unsafe: their forward cannot be repeated, or computes other values in chunks.

Such a segment warns, and is not recomputed, or runs whole, from then on; with ``memopt_cli.on_unsafe = "raise"``, its
forward fails instead.  A recomputation must do what its forward did, even if the segment has changed in between.  So
changes are numbered by *moments*, and a recomputation sees only the changes from before its forward
(:class:`~memopt_cli.runtime.this_thread.as_of`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import MutableMapping
from weakref import WeakKeyDictionary

from torch import nn

from memopt_cli.runtime.module_state import Complaint, label_of
from memopt_cli.runtime.this_thread import this_thread
from memopt_cli.runtime.warned import warn_caller

_moments = itertools.count(1)
_unrepeatable_count = 0
_plain_since: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""Module that runs without recomputation -> the moment from which it does."""
_whole_since: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""Module that runs in one chunk instead of several -> the moment from which it does."""
_reasons: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Module -> why it runs in one chunk."""
_warnings: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Module of either kind -> the last warning about it."""
_REACTIONS = ("warn", "raise")


def run_plainly(module: nn.Module, reason: Complaint, *, silently: bool = False) -> None:
    """Stop recomputing ``module``, for the ``reason`` that its forward has shown.

    Warns unless ``silently``.  Raises :class:`RuntimeError` instead if ``memopt_cli.on_unsafe`` is ``raise``, and
    :class:`ValueError` if it is neither ``warn`` nor ``raise``.
    """
    if silently:
        _plain_since.setdefault(module, next(_moments))
        _warnings[module] = f"{label_of(module)} {reason}: it runs without recomputation from now on"
        cannot_repeat()
    else:
        _note_reason(_plain_since, module, f"{reason}, which a recomputation cannot repeat", "without recomputation")


def run_whole(module: nn.Module, reason: Complaint) -> None:
    """Stop running ``module`` in chunks; warn or raise like :func:`run_plainly`."""
    _note_reason(_whole_since, module, reason, "whole")
    _reasons.setdefault(module, reason)


def _note_reason(moments: MutableMapping[nn.Module, int], module: nn.Module, reason: Complaint, manner: str) -> None:
    # Another run, which ended earlier than this one, may have noted it already.
    if module in moments:
        cannot_repeat()
        return
    reaction = sys.modules[__name__.partition(".")[0]].on_unsafe
    if reaction not in _REACTIONS:
        raise ValueError(f"memopt_cli.on_unsafe is {reaction!r}; it must be one of: {', '.join(_REACTIONS)}")
    message = f"{label_of(module)} {reason}"
    if reaction == "raise":
        raise RuntimeError(f"{message}; take this module out of the plan")
    moments[module] = next(_moments)
    cannot_repeat()
    _warnings[module] = f"{message}: it runs {manner} from now on"
    warn_caller(_warnings[module])


def cannot_repeat() -> None:
    """Note that this call cannot be repeated, so enclosing segments keep all that autograd saves in it."""
    global _unrepeatable_count
    _unrepeatable_count += 1


def unrepeatable_runs() -> int:
    """Return the number of runs so far that could not be repeated."""
    return _unrepeatable_count


def runs_plainly(module: nn.Module) -> bool:
    """Return whether ``module`` is not recomputed; in a recomputation, whether it was not when the first run began."""
    return _was_noted(_plain_since, module)


def runs_whole(module: nn.Module) -> bool:
    """Return whether ``module`` runs in one chunk; in a recomputation, whether it did when the first run began."""
    return _was_noted(_whole_since, module)


def why_whole(module: nn.Module) -> Complaint:
    """Return why ``module`` runs in one chunk instead of several."""
    return _reasons.get(module, "")


def list_warnings(module: nn.Module) -> list[str]:
    """Return a sentence about each part of ``module`` that runs without recomputation, or whole: its last warning."""
    return [f"{_warnings[part]}." for part in module.modules() if part in _warnings]


def forget_unsafe(module: nn.Module) -> None:
    """Let all parts of ``module`` be recomputed and run in chunks again.

    Every call of a part must have had its backward: otherwise its recomputation would differ from it.
    """
    for part in module.modules():
        for notes in (_plain_since, _whole_since, _reasons, _warnings):
            notes.pop(part, None)


def _was_noted(moments: MutableMapping[nn.Module, int], module: nn.Module) -> bool:
    moment = moments.get(module) if moments else None
    return moment is not None and moment < (this_thread.moment or moment + 1)


def this_moment() -> int:
    """Return the current moment; in a recomputation, the moment at which the first run began."""
    return this_thread.moment or next(_moments)

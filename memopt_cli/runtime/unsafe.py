"""Segments that turn out to be unsafe: their forward cannot be repeated, or computes something else in chunks.

They warn, and run plainly, or in one chunk, from then on; with ``memopt_cli.on_unsafe = "raise"``, their forward fails
instead.  A recomputation must do what its forward did, before or after such a change.  So changes are numbered by
*moments*, and a recomputation sees only those from before its forward (:class:`as_of`).
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import MutableMapping
from weakref import WeakKeyDictionary

from torch import nn

from memopt_cli.runtime.module_state import name_of
from memopt_cli.runtime.thread_block import ThreadBlock

_thread = threading.local()
_moments = itertools.count(1)
_made = 0
_plain: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""Module that runs plainly -> the moment from which it does."""
_whole: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""Module that runs in one chunk instead of several -> the moment from which it does."""
_reasons: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Module -> why it runs in one chunk."""
_warnings: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Module of either kind -> the last warning about it."""
_REACTIONS = ("warn", "raise")


def run_plainly(module: nn.Module, reason: str, *, silently: bool = False) -> None:
    """Have ``module`` run plainly from now on.

    ``reason``: what its forward did, a sentence without its subject.  Warns, unless ``silently``, or raises
    :class:`RuntimeError` if ``memopt_cli.on_unsafe`` says so; :class:`ValueError` if that is neither ``warn`` nor
    ``raise``.
    """
    if silently:
        _plain.setdefault(module, next(_moments))
        _warnings[module] = f"{name_of(module)} {reason}: it runs without recomputation from now on"
        cannot_repeat()
    else:
        _note(_plain, module, f"{reason}, which a recomputation cannot repeat", "without recomputation")


def run_whole(module: nn.Module, reason: str) -> None:
    """Have ``module`` run in one chunk from now on, and warn or raise as :func:`run_plainly` does."""
    _note(_whole, module, reason, "whole")
    _reasons.setdefault(module, reason)


def _note(moments: MutableMapping[nn.Module, int], module: nn.Module, reason: str, how: str) -> None:
    if module in moments:  # noted by another run already; this one began before that
        cannot_repeat()
        return
    reaction = sys.modules[__name__.partition(".")[0]].on_unsafe
    if reaction not in _REACTIONS:
        raise ValueError(f"memopt_cli.on_unsafe is {reaction!r}; it must be one of: {', '.join(_REACTIONS)}")
    message = f"{name_of(module)} {reason}"
    if reaction == "raise":
        raise RuntimeError(f"{message}; take this module out of the plan")
    moments[module] = next(_moments)
    cannot_repeat()
    _warnings[module] = f"{message}: it runs {how} from now on"
    warnings.warn(_warnings[module], stacklevel=1)


def cannot_repeat() -> None:
    """Make the segments around keep all that autograd saves in this call: a recomputation would do something else."""
    global _made
    _made += 1


def unrepeatable_runs() -> int:
    """Return how many runs so far could not be repeated."""
    return _made


def runs_plainly(module: nn.Module) -> bool:
    """Return whether ``module`` runs plainly; in a recomputation, whether it did when the first run began."""
    return _was_noted(_plain, module)


def runs_whole(module: nn.Module) -> bool:
    """Return whether ``module`` runs in one chunk; in a recomputation, whether it did when the first run began."""
    return _was_noted(_whole, module)


def why_whole(module: nn.Module) -> str:
    """Return why ``module`` runs in one chunk, a sentence without its subject; empty if it runs in several."""
    return _reasons.get(module, "")


def warnings_of(module: nn.Module) -> list[str]:
    """Return the last warning, as a sentence, about each part of ``module`` that runs plainly or whole."""
    return [f"{_warnings[part]}." for part in module.modules() if part in _warnings]


def forget_unsafe(module: nn.Module) -> None:
    """Let all parts of ``module`` be recomputed and run in chunks again.

    No call of them may still have its backward before it, whose recomputation would then do something else.
    """
    for part in module.modules():
        for moments in (_plain, _whole, _reasons, _warnings):
            moments.pop(part, None)


def _was_noted(moments: MutableMapping[nn.Module, int], module: nn.Module) -> bool:
    moment = moments.get(module) if moments else None
    return moment is not None and moment < (getattr(_thread, "now", 0) or moment + 1)


def this_moment() -> int:
    """Return the present moment, for :func:`as_of`; in a recomputation, that at which the first run began."""
    now: int = getattr(_thread, "now", 0)
    return now or next(_moments)


class as_of(ThreadBlock):
    """A block in which modules run plainly or whole only if they did so before ``moment``."""

    __slots__ = ("_value",)
    _thread, _name, _default = _thread, "now", 0

    def __init__(self, moment: int) -> None:
        self._value = moment

"""Segments that cannot run again, or in chunks: what their forward did once, no recomputation could repeat.

They say so and run plainly, or whole, from then on; with ``memopt_cli.on_unsafe = "raise"`` the forward that did it
fails instead.
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

_thread = threading.local()
_moments = itertools.count(1)
_made = 0
_marked: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""A module that runs plainly -> the number of its mark, in the order in which they were made."""
_whole: MutableMapping[nn.Module, int] = WeakKeyDictionary()
"""The same of one that runs in one chunk instead of several."""
_reasons: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Of those, why."""
_told: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Of those of both kinds, what was last said."""
_WAYS = ("warn", "raise")


def run_plainly(module: nn.Module, reason: str, *, silently: bool = False) -> None:
    """Have ``module`` run plainly from now on.

    ``reason``: what its forward did, a sentence without its subject.  Warns, unless ``silently``, or raises
    :class:`RuntimeError` if ``memopt_cli.on_unsafe`` says so; :class:`ValueError` if that is neither ``warn`` nor
    ``raise``.
    """
    if silently:
        _marked.setdefault(module, next(_moments))
        _told[module] = f"{name_of(module)} {reason}: it runs without recomputation from now on"
        cannot_repeat()
    else:
        _mark(_marked, module, f"{reason}, which a recomputation cannot repeat", "without recomputation")


def run_whole(module: nn.Module, reason: str) -> None:
    """From now on ``module`` runs in one chunk.  As :func:`run_plainly`."""
    _mark(_whole, module, reason, "whole")
    _reasons.setdefault(module, reason)


def _mark(marked: MutableMapping[nn.Module, int], module: nn.Module, reason: str, how: str) -> None:
    if module in marked:  # by a run that was going on already, or as of an earlier moment
        cannot_repeat()
        return
    way = sys.modules[__name__.partition(".")[0]].on_unsafe
    if way not in _WAYS:
        raise ValueError(f"memopt_cli.on_unsafe is {way!r}; it must be one of: {', '.join(_WAYS)}")
    message = f"{name_of(module)} {reason}"
    if way == "raise":
        raise RuntimeError(f"{message}; take this module out of the plan")
    marked[module] = next(_moments)
    cannot_repeat()
    _told[module] = f"{message}: it runs {how} from now on"
    warnings.warn(_told[module], stacklevel=1)


def cannot_repeat() -> None:
    """What runs now would do otherwise in a recomputation, this once: the segments around keep all that they save."""
    global _made
    _made += 1


def marks() -> int:
    """How many runs could not be repeated so far."""
    return _made


def runs_plainly(module: nn.Module) -> bool:
    """Whether ``module`` was marked; in a recomputation, whether it was when the first run began."""
    return _is_marked(_marked, module)


def runs_whole(module: nn.Module) -> bool:
    """The same of running in one chunk."""
    return _is_marked(_whole, module)


def why_whole(module: nn.Module) -> str:
    """The reason, a sentence without its subject; empty if it runs in chunks."""
    return _reasons.get(module, "")


def told_of(module: nn.Module) -> list[str]:
    """What was said of the parts of ``module`` that run plainly or whole: a sentence each."""
    return [f"{_told[part]}." for part in module.modules() if part in _told]


def forget_marks(module: nn.Module) -> None:
    """Whatever is in ``module`` is tried anew: nothing that was run waits for its backward."""
    for part in module.modules():
        for marked in (_marked, _whole, _reasons, _told):
            marked.pop(part, None)


def _is_marked(marked: MutableMapping[nn.Module, int], module: nn.Module) -> bool:
    mark = marked.get(module) if marked else None
    return mark is not None and mark < (getattr(_thread, "now", 0) or mark + 1)


def this_moment() -> int:
    """Now, for :func:`as_of`; in a recomputation, when the first run began."""
    now: int = getattr(_thread, "now", 0)
    return now or next(_moments)


class as_of:  # it reads as a statement
    """Has only what was marked before a moment run plainly in the block."""

    __slots__ = ("_moment", "_outer")

    def __init__(self, moment: int) -> None:
        self._moment = moment

    def __enter__(self) -> None:
        self._outer: int = getattr(_thread, "now", 0)
        _thread.now = self._moment

    def __exit__(self, *raised: object) -> None:
        _thread.now = self._outer

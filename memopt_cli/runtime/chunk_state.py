"""Finding state that forward updates once per call: in chunks it would be updated once per chunk, and end up different.

Examples are the power iteration of spectral norm, an average over calls, and a counter of calls.  State that is updated
once per time step, such as a neuron's membrane, ends up the same in chunks.  A trial tells the two apart: a piece of
the input runs whole, and in two halves.  Both start from the state in which the first chunk started, and both must
leave the same state behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt_cli.runtime.copies import is_unchanged, version_of
from memopt_cli.runtime.module_state import Complaint, state_by_name
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.private_torch import InstanceNorm

_MAX_CHANGE_SHARE: Final = 1e-3
"""Share of a tensor's change by which whole and halves may differ: rounding adds less, and one more call adds more."""
_MAX_ROUNDINGS: Final = 8
"""Roundings of the largest value by which whole and halves may differ in addition."""
_change_counts: MutableMapping[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""Segment -> name of state that its first chunk changed -> number of forwards in which it did."""


class StateChanges:
    """The state of a segment at one moment, by weak references, to find the state that a chunk changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: _record_value(value) for name, value in _named_state(module).items()}

    def names_to_try(self) -> set[str]:
        """Return the names of state that has changed for the first, second, fourth, eighth time and so on.

        One trial is not enough: a power iteration may have converged, or a batch consist of equal samples.
        """
        counts = _change_counts.setdefault(self._module, {})
        changed = self.changed_names()
        for name in changed:
            counts[name] = counts.get(name, 0) + 1
        return {name for name in changed if counts[name].bit_count() == 1}

    def changed_names(self) -> set[str]:
        """Return the names of all state that has changed since this object was made."""
        nothing = _record_value(None)
        return {n for n, value in _named_state(self._module).items() if not self._before.get(n, nothing).matches(value)}


def difference(
    module: nn.Module,
    changed: Iterable[str],
    starting: Callable[[], AbstractContextManager[object]],
    whole: Callable[[], object],
    halves: Callable[[], object],
) -> Complaint:
    """Return why the state that ``changed`` forbids chunks of ``module``.

    ``changed``: names of state; ``starting``: makes a context manager that puts the module into its starting state;
    ``whole``, ``halves``: run the module on the same piece, uncut and in two halves.
    """
    names = sorted(changed)
    try:
        states = [_state_after(run, module, starting) for run in (lambda: None, whole, halves)]
    except Exception as error:  # the module's own code, on a length that it may not take
        return f"changes its {names[0]}, and cannot be tried on part of a chunk ({type(error).__name__}: {error})"
    name = next((name for name in names if not _is_alike(*(state.get(name) for state in states))), "")
    return f"changes its {name} once a call, and would change it once for each chunk" if name else ""


def _state_after(
    run: Callable[[], object], module: nn.Module, starting: Callable[[], AbstractContextManager[object]]
) -> dict[str, Any]:
    with torch.no_grad(), starting():
        # Their running statistics are gathered (batch_statistics.py), or differ on purpose.
        for norm in batch_norms(module):
            norm.eval()
        run()
        state = _named_state(module).items()
        return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state}


def _named_state(module: nn.Module) -> dict[str, Any]:
    """Return the state of ``module`` by name, without the state of norms, for which chunks have their own rules."""
    norms = {*batch_norms(module), *(m for m in module.modules() if isinstance(m, InstanceNorm))}
    return state_by_name(module, norms)


@dataclass(frozen=True, slots=True)
class _RecordedValue:
    """A value of the state at one moment."""

    tensor: weakref.ref[Tensor] | None
    """The value if it is a tensor."""
    version: int
    """The tensor's version at that moment."""
    number: Any
    """The value if it is not a tensor."""

    def matches(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self.tensor is not None and self.tensor() is value and self.version == version_of(value)
        return self.tensor is None and type(value) is type(self.number) and bool(value == self.number)


def _record_value(value: Any) -> _RecordedValue:
    if isinstance(value, Tensor):
        return _RecordedValue(weakref.ref(value), version_of(value), None)
    return _RecordedValue(None, 0, value)


def _is_alike(before: Any, whole: Any, halves: Any) -> bool:
    """Return whether two runs changed ``before`` to the same value but for rounding: to ``whole`` and to ``halves``."""
    values = (before, whole, halves)
    before, whole, halves = (torch.tensor(v, dtype=torch.float64) if type(v) is float else v for v in values)
    if not isinstance(whole, Tensor) or not isinstance(halves, Tensor):
        return type(whole) is type(halves) and bool(whole == halves)
    if (whole.shape, whole.dtype) != (halves.shape, halves.dtype):
        return False
    if not whole.dtype.is_floating_point:
        return is_unchanged(whole, halves)
    is_like_before = isinstance(before, Tensor) and (before.shape, before.dtype) == (whole.shape, whole.dtype)
    # The change is measured from ``before``, unless that is infinite, like the extremes of a quantization observer.
    change = largest(whole - before if is_like_before and before.isfinite().all() else whole)
    rounding = _MAX_ROUNDINGS * torch.finfo(whole.dtype).eps * largest(whole)
    return largest(whole - halves) <= _MAX_CHANGE_SHARE * change + rounding


def largest(x: Tensor) -> float:
    """Return the largest absolute value in ``x``, NaN aside; 0 if it is empty."""
    return x.abs().nan_to_num(0.0).max().item() if x.numel() else 0.0

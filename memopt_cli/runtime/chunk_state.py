"""State that forward updates once per call, and that chunks would therefore update once each.

Examples are the power iteration of spectral norm, an average over calls, and a counter of calls.  State that is updated
once per time step, such as a neuron's membrane, ends up alike in chunks.  A trial tells the two apart: a piece of the
input runs whole and in two halves, from the state in which the first chunk started, and both must leave the same state
behind.
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
from memopt_cli.runtime.module_state import state_by_name
from memopt_cli.runtime.norms import batch_norms
from memopt_cli.runtime.private_torch import InstanceNorm

_SHARE: Final = 1e-3
"""Share of its move by which a tensor may differ between the two: rounding adds less, one call more adds more."""
_ROUNDINGS: Final = 8
"""Steps of rounding, of the largest value, by which two equal ways to compute a tensor may differ."""
_seen: MutableMapping[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""Segment -> name of state that moved in its first chunk -> in how many forwards it did."""


class Moves:
    """The state of a segment at one moment, without references to its tensors, to find what a chunk moves."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = {name: _place(value) for name, value in _state(module).items()}

    def found(self) -> set[str]:
        """Return the names of state that has moved since, for the first, second, fourth, eighth time and so on.

        One trial is not enough: a power iteration may have come to rest, or a batch consist of equal samples.
        """
        seen, moved = _seen.setdefault(self._module, {}), self.now()
        for name in moved:
            seen[name] = seen.get(name, 0) + 1
        return {name for name in moved if seen[name].bit_count() == 1}

    def now(self) -> set[str]:
        """Return the names of all state that has moved since."""
        nothing = _place(None)
        return {n for n, value in _state(self._module).items() if not self._places.get(n, nothing).is_of(value)}


def difference(
    module: nn.Module,
    moved: Iterable[str],
    starting: Callable[[], AbstractContextManager[object]],
    whole: Callable[[], object],
    halves: Callable[[], object],
) -> str:
    """Return why ``module`` cannot run in chunks, a sentence without its subject; empty if what ``moved`` allows it.

    ``starting``: a block in which the module is in its starting state; ``whole``, ``halves``: run it on the same piece.
    """
    names = sorted(moved)
    try:
        before, *after = (_left_by(module, starting, run) for run in (lambda: None, whole, halves))
    except Exception as error:  # the module's own code, on a length that it may not take
        return f"moves its {names[0]}, and cannot be tried on part of a chunk ({type(error).__name__}: {error})"
    states = (before, *after)
    unlike = next((name for name in names if not _is_alike(*(state.get(name) for state in states))), "")
    return f"moves its {unlike} once a call, and would once for each chunk" if unlike else ""


def _left_by(
    module: nn.Module, starting: Callable[[], AbstractContextManager[object]], run: Callable[[], object]
) -> dict[str, Any]:
    with torch.no_grad(), starting():
        for norm in batch_norms(module):  # their statistics are gathered elsewhere, or differ on purpose
            norm.eval()
        run()
        state = _state(module).items()
        return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state}


def _state(module: nn.Module) -> dict[str, Any]:
    """Return the state of ``module`` by name, but for norms, which are treated apart in chunks."""
    norms = {*batch_norms(module), *(m for m in module.modules() if isinstance(m, InstanceNorm))}
    return state_by_name(module, norms)


@dataclass(frozen=True, slots=True)
class _Place:
    tensor: weakref.ref[Tensor] | None
    version: int
    number: Any
    """The value itself, if it is no tensor; otherwise ``None``."""

    def is_of(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self.tensor is not None and self.tensor() is value and self.version == version_of(value)
        return self.tensor is None and type(value) is type(self.number) and bool(value == self.number)


def _place(value: Any) -> _Place:
    return _Place(weakref.ref(value), version_of(value), None) if isinstance(value, Tensor) else _Place(None, 0, value)


def _is_alike(before: Any, whole: Any, halves: Any) -> bool:
    """Tell whether ``whole`` and ``halves``, to which two runs moved ``before``, are equal but for rounding."""
    before, whole, halves = (_as_tensor(value) for value in (before, whole, halves))
    if not isinstance(whole, Tensor) or not isinstance(halves, Tensor):
        return type(whole) is type(halves) and bool(whole == halves)
    if (whole.shape, whole.dtype) != (halves.shape, halves.dtype):
        return False
    if not whole.dtype.is_floating_point:
        return is_unchanged(whole, halves)
    is_like_before = isinstance(before, Tensor) and (before.shape, before.dtype) == (whole.shape, whole.dtype)
    # An observer's extremes begin at infinity.
    move = largest(whole - before if is_like_before and before.isfinite().all() else whole)
    rounding = _ROUNDINGS * torch.finfo(whole.dtype).eps * largest(whole)
    return largest(whole - halves) <= _SHARE * move + rounding


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if type(value) is float else value


def largest(x: Tensor) -> float:
    """Return the largest absolute value in ``x``, NaN aside; 0 if it is empty."""
    return x.abs().nan_to_num(0.0).max().item() if x.numel() else 0.0

"""State that moves once a call: the whole would move it once, and each chunk moves it once more.

A power iteration (spectral norm), an average over calls, a counter of them.  State that moves once a time step, a
neuron's membrane say, does the same in chunks.  The two are told apart by trying: a piece of the input runs whole and
in two halves, from the state in which the first chunk started, and must leave the same behind.
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
"""Of its move by which a tensor may differ between two ways: rounding adds less, a call more or less adds more."""
_ROUNDINGS: Final = 8
"""Steps of rounding, of the largest value, by which two equal ways to compute a tensor may differ."""
_seen: MutableMapping[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""A segment -> names of what moved in its first chunk -> in how many forwards."""


class Moves:
    """What a segment's chunks may move: where it stands now, without holding it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = {name: _place(value) for name, value in _state(module).items()}

    def found(self) -> set[str]:
        """Names of what has moved since, for the first time, the second, the fourth, the eighth and so on.

        One trial does not settle it: a power iteration may have come to rest, a batch consist of equal samples.
        """
        seen, moved = _seen.setdefault(self._module, {}), self.now()
        for name in moved:
            seen[name] = seen.get(name, 0) + 1
        return {name for name in moved if seen[name].bit_count() == 1}

    def now(self) -> set[str]:
        """Names of all that has moved since."""
        nothing = _place(None)
        return {n for n, value in _state(self._module).items() if not self._places.get(n, nothing).is_of(value)}


def difference(
    module: nn.Module,
    moved: Iterable[str],
    starting: Callable[[], AbstractContextManager[object]],
    whole: Callable[[], object],
    halves: Callable[[], object],
) -> str:
    """Why ``module`` cannot run in chunks, a sentence without its subject; empty if all that ``moved`` does so alike.

    ``starting``: within, the module stands where it started from; ``whole``, ``halves``: run it on the same piece.
    """
    names = sorted(moved)
    try:
        before, *after = (_left_by(module, starting, run) for run in (_nothing, whole, halves))
    except Exception as error:  # the module's own code, on a length that it may not take
        return f"moves its {names[0]}, and cannot be tried on part of a chunk ({type(error).__name__}: {error})"
    states = (before, *after)
    unlike = next((name for name in names if not _is_alike(*(state.get(name) for state in states))), "")
    return f"moves its {unlike} once a call, and would once for each chunk" if unlike else ""


def _nothing() -> None:
    pass


def _left_by(
    module: nn.Module, starting: Callable[[], AbstractContextManager[object]], run: Callable[[], object]
) -> dict[str, Any]:
    with torch.no_grad(), starting():
        for norm in batch_norms(module):  # their statistics are gathered elsewhere, or known to be other ones
            norm.eval()
        run()
        return {name: _copied(value) for name, value in _state(module).items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _state(module: nn.Module) -> dict[str, Any]:
    """Without that of norms, which have a way of their own in chunks."""
    norms = {*batch_norms(module), *(m for m in module.modules() if isinstance(m, InstanceNorm))}
    return state_by_name(module, norms)


@dataclass(frozen=True, slots=True)
class _Place:
    tensor: weakref.ref[Tensor] | None
    version: int
    number: Any
    """If it is no tensor."""

    def is_of(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self.tensor is not None and self.tensor() is value and self.version == version_of(value)
        return self.tensor is None and type(value) is type(self.number) and bool(value == self.number)


def _place(value: Any) -> _Place:
    return _Place(weakref.ref(value), version_of(value), None) if isinstance(value, Tensor) else _Place(None, 0, value)


def _is_alike(before: Any, whole: Any, halves: Any) -> bool:
    """Whether both ways moved it to the same, but for rounding."""
    before, whole, halves = (_as_tensor(value) for value in (before, whole, halves))
    if not isinstance(whole, Tensor) or not isinstance(halves, Tensor):
        return type(whole) is type(halves) and bool(whole == halves)
    if (whole.shape, whole.dtype) != (halves.shape, halves.dtype):
        return False
    if not whole.dtype.is_floating_point:
        return is_unchanged(whole, halves)
    is_like_before = isinstance(before, Tensor) and (before.shape, before.dtype) == (whole.shape, whole.dtype)
    # An observer's extremes begin at infinity.
    move = _largest(whole - before if is_like_before and before.isfinite().all() else whole)
    rounding = _ROUNDINGS * torch.finfo(whole.dtype).eps * _largest(whole)
    return _largest(whole - halves) <= _SHARE * move + rounding


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if type(value) is float else value


def _largest(x: Tensor) -> float:
    return x.abs().nan_to_num(0.0).max().item() if x.numel() else 0.0

"""Checking and putting back the parameters of a forward: a recomputation needs the same ones, with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor, nn

from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.owners import Snapshot, Table, is_same
from memopt_cli.runtime.private_torch import is_of_transform, is_ordinary, memory_of, version_counter

_is_leaf, _gradient, _is_trainable = attrgetter("is_leaf"), attrgetter("grad"), attrgetter("requires_grad")


class _Entries:
    """The entries of the modules' own dictionaries of parameters, which most calls share."""

    def __init__(self, tables: Sequence[dict[str, Any]]) -> None:
        self.by_table = [(table, dict(table)) for table in tables]
        """Pairs of a dictionary of parameters and a copy of it."""
        entries = [(name, p) for table in tables for name, p in table.items()]
        self._snapshot = Snapshot([(Table(table), table) for table in tables], with_names=True)
        self.names = [name for name, p in entries if p is not None]
        self.tensors: list[Tensor] = [p for _, p in entries if p is not None]
        """The parameters, in the order of ``names``."""
        self._have_versions = all(map(_is_whole, self.tensors))

    def are_in_place(self) -> bool:
        return self._snapshot.is_current()

    def versions(self) -> list[int | None]:
        if self._have_versions:
            try:
                return [*map(version_counter, self.tensors)]
            except RuntimeError:  # a parameter made in inference mode has no version, even with other data
                self._have_versions = False
        return [version_of(p) if _is_whole(p) else None for p in self.tensors]


class Parameters:
    """The parameters of some modules in one call.

    They are not copied, so their values must not change before the recomputation.  But the module may hold other
    tensors by then: ``torch.func.functional_call`` replaces parameters for the time of one call.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], earlier: Parameters | None, *, is_watched: bool) -> None:
        """Note the current parameters.

        ``tables``: each module's own dictionary of parameters.  ``earlier``: the parameters of an earlier call, which
        are reused if they are the same.  ``is_watched``: also notice writes that raise no version (``p.data = ...``).
        """
        entries = None if earlier is None else earlier._entries
        self._entries: _Entries = entries if entries is not None and entries.are_in_place() else _Entries(tables)
        self.tensors = self._entries.tensors
        """The parameters."""
        self.trainable = [*map(_is_trainable, self.tensors)]
        self._versions = self._entries.versions()
        self._memory = _memory_of_all(self.tensors) if is_watched else []
        self._leaves = self.tensors
        if not all(map(_is_leaf, self.tensors)):
            self._leaves = [p for p in self.tensors if p.is_leaf]
        self._gradients: list[Tensor | None] = [*map(_gradient, self._leaves)]
        """The gradient of each leaf, until forward has ended."""
        self._gradient_versions = [version_of(gradient) for gradient in self._gradients if gradient is not None]
        self.written = ""
        """Name of a parameter to which forward itself wrote; empty if there is none."""
        self.has_gradients = False
        """Whether forward itself called backward, which adds to the parameters' gradients."""

    def end_forward(self) -> None:
        """Note, when forward has ended, whether it wrote parameters, and the versions that backward must find."""
        versions, before = self._entries.versions(), self._versions
        if versions != before or (self._memory and self._memory != _memory_of_all(self.tensors)):
            memory = _memory_of_all(self.tensors) if self._memory else []
            for index, name in enumerate(self._entries.names):
                has_other_memory = bool(memory) and memory[index] != self._memory[index]
                if before[index] is not None and (versions[index] != before[index] or has_other_memory):
                    self.written = self.written or name
        self._versions = versions
        if self._gradients:
            are_others = any(map(is_not, map(_gradient, self._leaves), self._gradients))
            versions_now = [version_of(gradient) for gradient in self._gradients if gradient is not None]
            self.has_gradients = are_others or self._gradient_versions != versions_now
            self._gradients = []
            self._memory = []

    def check(self) -> None:
        """Raise :class:`RuntimeError` if a parameter was modified in place since forward ended."""
        versions = self._entries.versions()
        if versions == self._versions:
            return
        for name, p, before, now in zip(self._entries.names, self.tensors, self._versions, versions, strict=True):
            if before != now:
                raise RuntimeError(
                    f"the parameter {name} of shape {tuple(p.shape)} was modified in place between forward and "
                    f"backward (version {before} -> {now}), so recomputing with it would be wrong. Call backward "
                    "before the optimizer's step."
                )

    def put(self) -> None:
        """Make the modules hold the parameters of this call, and no others."""
        for table, entries in self._entries.by_table:
            _exchange_entries(table, entries)

    def in_place(self) -> AbstractContextManager[None]:
        """Return a context manager that gives the modules these parameters, with ``requires_grad`` as in that call.

        Afterwards the modules hold their current parameters again, even if the forward in the ``with`` block replaced
        parameters for itself, and ended before it restored them.
        """
        is_in_place = self._entries.are_in_place() and self.trainable == [*map(_is_trainable, self.tensors)]
        return _InPlace(self, self._entries, is_in_place)

    def set_trainable(self, trainable: Sequence[bool]) -> list[bool]:
        """Set ``requires_grad`` of each parameter from ``trainable``; return the previous flags."""
        before = [*map(_is_trainable, self.tensors)]
        if before != trainable:
            for p, is_trainable in zip(self.tensors, trainable, strict=True):
                if p.is_leaf and not p.is_inference():
                    p.requires_grad_(is_trainable)
        return before


class _InPlace:
    """The context manager of :meth:`Parameters.in_place`; ``is_in_place``: the modules hold them already."""

    __slots__ = ("_entries", "_is_in_place", "_outer_entries", "_outer_trainable", "_parameters")

    def __init__(self, parameters: Parameters, entries: _Entries, is_in_place: bool) -> None:
        self._parameters, self._entries, self._is_in_place = parameters, entries, is_in_place

    def __enter__(self) -> None:
        if self._is_in_place:
            self._outer_entries = self._entries.by_table
            self._outer_trainable = self._parameters.trainable
            return
        self._outer_entries = [(table, dict(table)) for table, _ in self._entries.by_table]
        self._outer_trainable = self._parameters.set_trainable(self._parameters.trainable)
        self._parameters.put()

    def __exit__(self, *raised: object) -> None:
        self._parameters.set_trainable(self._outer_trainable)
        if self._is_in_place and self._entries.are_in_place():
            return
        for table, entries in self._outer_entries:
            _exchange_entries(table, entries)


def _memory_of_all(tensors: Sequence[Tensor]) -> list[int]:
    """Return a key of the memory of each of ``tensors``, which ``p.data = ...`` replaces, or 0 without memory."""
    return [memory_of(p) if _is_whole(p) and not is_of_transform(p) else 0 for p in tensors]


def _exchange_entries(table: dict[str, Any], entries: dict[str, Any]) -> None:
    """Make ``table`` hold ``entries``, except sharded parameters, which FSDP gathers and frees by hooks."""
    if is_same(table, entries):
        return
    sharded = {name: p for name, p in table.items() if not (_may_move(p) and _may_move(entries.get(name)))}
    entries = {**entries, **sharded}
    for name in table.keys() - entries.keys():
        del table[name]
    table.update(entries)


def _may_move(parameter: Tensor | None) -> bool:
    return parameter is None or _is_whole(parameter)


def _is_whole(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter or is_ordinary(parameter)

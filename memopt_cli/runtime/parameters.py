"""Check and put back the parameters of a forward: a recomputation needs the same ones, with the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.owners import is_same
from memopt_cli.runtime.private_torch import is_of_transform, is_ordinary, memory_of


class Parameters:
    """The parameters of some modules in one call.

    They are not copied, so their values must not change before the recomputation.  But the module may hold other
    tensors by then: ``torch.func.functional_call`` exchanges parameters for the time of one call.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], earlier: Parameters | None, *, is_watched: bool) -> None:
        """Note the present parameters.

        ``tables``: each module's own dictionary of parameters.  ``earlier``: the parameters of an earlier call, which
        are reused if they are the same.  ``is_watched``: also notice writes that raise no version (``p.data = ...``).
        """
        self.entries: list[tuple[dict[str, Any], dict[str, Any]]]
        """Each of ``tables``, and its entries in this call."""
        self.tensors: list[Tensor]
        """The parameters in these entries."""
        if earlier is not None and all(is_same(*pair) for pair in earlier.entries):
            self.entries, self.tensors = earlier.entries, earlier.tensors
        else:
            self.entries = [(table, dict(table)) for table in tables]
            self.tensors = [p for _, entries in self.entries for p in entries.values() if p is not None]
        self.trainable = [p.requires_grad for p in self.tensors]
        self._versions = _versions(self.tensors)
        self._memory = _memory_of_all(self.tensors) if is_watched else []
        self._gradients: list[Any] = [(p, p.grad, version_of(p.grad)) for p in self.tensors if p.is_leaf]
        self.written = ""
        """Name of a parameter to which forward itself wrote, or empty."""
        self.has_gradients = False
        """Whether forward itself called backward, which adds to the parameters' gradients."""

    def settle(self) -> None:
        """Note, when forward has ended, whether it wrote parameters, and the versions that backward must find."""
        versions, before = _versions(self.tensors), self._versions
        if versions != before or (self._memory and self._memory != _memory_of_all(self.tensors)):
            memory = _memory_of_all(self.tensors) if self._memory else []
            for index, name in enumerate(self._names()):
                has_other_memory = bool(memory) and memory[index] != self._memory[index]
                if before[index] is not None and (versions[index] != before[index] or has_other_memory):
                    self.written = self.written or name
        self._versions = versions
        if self._gradients:
            changed = (p.grad is not g or version_of(p.grad) != version for p, g, version in self._gradients)
            self.has_gradients = any(changed)
            self._gradients.clear()
            self._memory.clear()

    def _names(self) -> Iterator[str]:
        return (name for _, entries in self.entries for name, p in entries.items() if p is not None)

    def check(self) -> None:
        """Raise :class:`RuntimeError` if a parameter was modified in place since forward ended."""
        present = _versions(self.tensors)
        if present == self._versions:
            return
        for name, p, before, now in zip(self._names(), self.tensors, self._versions, present, strict=True):
            if before != now:
                raise RuntimeError(
                    f"the parameter {name} of shape {tuple(p.shape)} was modified in place between forward and "
                    f"backward (version {before} -> {now}), so recomputing with it would be wrong. Call backward "
                    "before the optimizer's step."
                )

    def put(self) -> None:
        """Make the modules hold the parameters of this call, and no others."""
        for table, entries in self.entries:
            _exchange(table, entries)

    def in_place(self) -> AbstractContextManager[None]:
        """Return a context manager in whose block the modules hold these parameters, which need gradients as then.

        Afterwards the modules hold their present parameters again, even if the forward in the block exchanged
        parameters for itself, and ended before it put them back.
        """
        is_in_place = all(is_same(table, entries) for table, entries in self.entries)
        return _InPlace(self, is_in_place and self.trainable == [p.requires_grad for p in self.tensors])

    def set_trainable(self, trainable: Sequence[bool]) -> list[bool]:
        """Have the parameters need gradients as ``trainable`` says; return whether they did."""
        before = [p.requires_grad for p in self.tensors]
        if before != trainable:
            for p, is_trainable in zip(self.tensors, trainable, strict=True):
                if p.is_leaf and not p.is_inference():
                    p.requires_grad_(is_trainable)
        return before


class _InPlace:
    """The context manager of :meth:`Parameters.in_place`; ``is_in_place``: the modules hold them already."""

    __slots__ = ("_is_in_place", "_outer_entries", "_outer_trainable", "_parameters")

    def __init__(self, parameters: Parameters, is_in_place: bool) -> None:
        self._parameters, self._is_in_place = parameters, is_in_place

    def __enter__(self) -> None:
        entries = self._parameters.entries
        if self._is_in_place:
            self._outer_entries, self._outer_trainable = entries, self._parameters.trainable
            return
        self._outer_entries = [(table, dict(table)) for table, _ in entries]
        self._outer_trainable = self._parameters.set_trainable(self._parameters.trainable)
        self._parameters.put()

    def __exit__(self, *raised: object) -> None:
        self._parameters.set_trainable(self._outer_trainable)
        for table, entries in self._outer_entries:
            _exchange(table, entries)


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return the version of each of ``tensors``.  ``None``: it is sharded or lazy."""
    return [version_of(p) if type(p) is nn.Parameter or is_ordinary(p) else None for p in tensors]


def _memory_of_all(tensors: Sequence[Tensor]) -> list[int]:
    """Return a key of the memory of each of ``tensors``, which ``p.data = ...`` exchanges, or 0 without memory."""
    return [memory_of(p) if _is_whole(p) and not is_of_transform(p) else 0 for p in tensors]


def _exchange(table: dict[str, Any], entries: dict[str, Any]) -> None:
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
    """Return whether ``parameter`` is neither sharded (FSDP, DTensor) nor lazy."""
    return type(parameter) is nn.Parameter or is_ordinary(parameter)

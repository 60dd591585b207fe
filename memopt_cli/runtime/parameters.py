"""The parameters of a forward: a recomputation needs the same ones, with the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

from torch import Tensor, nn

from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.owners import is_same
from memopt_cli.runtime.private_torch import is_fake, is_of_transform, memory_of


class Parameters:
    """The parameters of some modules in one call.

    They are not copied, so they must not change before the recomputation.  They need not be those that are there now:
    ``torch.func.functional_call`` puts others in their place for the time of one call.
    """

    def __init__(self, tables: Sequence[dict[str, Any]], earlier: Parameters | None, *, is_watched: bool) -> None:
        """Note the present parameters.

        ``tables``: the parameters of each module by their names, which others may exchange.  ``earlier``: those of an
        earlier call.  ``is_watched``: notice writes that raise no version, too.
        """
        self.used: list[tuple[dict[str, Any], dict[str, Any]]]
        self.tensors: list[Tensor]
        if earlier is not None and all(is_same(*pair) for pair in earlier.used):
            self.used, self.tensors = earlier.used, earlier.tensors
        else:
            self.used = [(table, dict(table)) for table in tables]
            self.tensors = [p for _, used in self.used for p in used.values() if p is not None]
        self.trainable = [p.requires_grad for p in self.tensors]
        self._versions = _versions(self.tensors)
        self._places = _places(self.tensors) if is_watched else []
        self._gradients: list[Any] = [(p, p.grad, version_of(p.grad)) for p in self.tensors if p.is_leaf]
        self.written = ""
        """Name of a parameter to which forward itself wrote; empty if there is none."""
        self.has_gradients = False
        """Whether forward itself called backward, which adds to their gradients."""

    def settle(self) -> None:
        """Note, when forward has ended, whether it wrote parameters, and their versions, which must stay so."""
        versions, before = _versions(self.tensors), self._versions
        if versions != before or (self._places and self._places != _places(self.tensors)):
            places = _places(self.tensors) if self._places else []
            for place, name in enumerate(self._names()):
                moved = bool(places) and places[place] != self._places[place]
                if before[place] is not None and (versions[place] != before[place] or moved):
                    self.written = self.written or name
        self._versions = versions
        if self._gradients:
            changed = (p.grad is not g or version_of(p.grad) != version for p, g, version in self._gradients)
            self.has_gradients = any(changed)
            self._gradients.clear()
            self._places.clear()

    def _names(self) -> Iterator[str]:
        return (name for _, used in self.used for name, p in used.items() if p is not None)

    def check(self) -> None:
        """Raise :class:`RuntimeError` if one was modified in place since."""
        present = _versions(self.tensors)
        if present == self._versions:
            return
        for name, p, before, now in zip(self._names(), self.tensors, self._versions, present, strict=True):
            if before != now:
                raise RuntimeError(
                    f"the parameter {name} of shape {tuple(p.shape)} was modified in place between forward and "
                    f"backward (version {before} -> {now}); recomputing with it would be wrong. Call backward before "
                    "the optimizer's step."
                )

    def put(self) -> None:
        """Put the parameters back where they were, and take others away."""
        for current, used in self.used:
            _exchange(current, used)

    def in_place(self) -> AbstractContextManager[None]:
        """Return a context manager that puts the parameters back, needing gradients if they did, for its block.

        Afterwards those from before are there again, even if the forward in the block was broken off between
        exchanging parameters and putting them back.
        """
        is_there = all(is_same(current, used) for current, used in self.used)
        return _InPlace(self, is_there and self.trainable == [p.requires_grad for p in self.tensors])

    def set_trainable(self, trainable: Sequence[bool]) -> list[bool]:
        """Have the parameters need gradients as ``trainable`` says; return whether they did."""
        before = [p.requires_grad for p in self.tensors]
        if before != trainable:
            for p, is_trainable in zip(self.tensors, trainable, strict=True):
                if p.is_leaf and not p.is_inference():
                    p.requires_grad_(is_trainable)
        return before


class _InPlace:
    """The context manager of :meth:`Parameters.in_place`; ``is_there``: they are in place already."""

    __slots__ = ("_is_there", "_others", "_parameters", "_trainable")

    def __init__(self, parameters: Parameters, is_there: bool) -> None:
        self._parameters, self._is_there = parameters, is_there

    def __enter__(self) -> None:
        used = self._parameters.used
        if self._is_there:
            self._others, self._trainable = used, self._parameters.trainable
            return
        self._others = [(current, dict(current)) for current, _ in used]
        self._trainable = self._parameters.set_trainable(self._parameters.trainable)
        self._parameters.put()

    def __exit__(self, *raised: object) -> None:
        self._parameters.set_trainable(self._trainable)
        for current, there in self._others:
            _exchange(current, there)


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return how often each of ``tensors`` was written; ``None`` for one that is not plain."""
    return [version_of(p) if type(p) is nn.Parameter or _is_plain(p) else None for p in tensors]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return a key of the memory of each of ``tensors``, which ``.data`` may exchange; 0 if it has none."""
    return [memory_of(p) if _is_plain(p) and not is_of_transform(p) else 0 for p in tensors]


def _exchange(current: dict[str, Any], held: dict[str, Any]) -> None:
    """Make ``current`` hold the parameters ``held``, but for sharded ones, which FSDP gathers and frees by hooks."""
    if is_same(current, held):
        return
    sharded = {name: p for name, p in current.items() if not (_may_move(p) and _may_move(held.get(name)))}
    wanted = {**held, **sharded}
    for name in current.keys() - wanted.keys():
        del current[name]
    current.update(wanted)


def _may_move(parameter: Tensor | None) -> bool:
    return parameter is None or _is_plain(parameter)


def _is_plain(parameter: Tensor | None) -> TypeGuard[Tensor]:
    """Tell a tensor of memory, or of a dry run, from a sharded one, which has a life of its own, and a lazy one."""
    return parameter is not None and (type(parameter) in (Tensor, nn.Parameter) or is_fake(parameter))

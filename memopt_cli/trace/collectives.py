"""What ranks exchange in a step: how much, by which collectives, and which tensors are there for that alone.

FSDP2 gathers parameters into buffers of its own, frees them by resizing their storages, which no operator does, and
reduces gradients in others.  Its operators (``fsdp::``) and those of process groups (``c10d::``) tell which is which.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memopt_cli.records import Collective
from memopt_cli.runtime.private_torch import replaced, tree_leaves, unseen

_GROUPS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operators of process groups: as they are called, and as functions of PyTorch's."""

_KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "scatter": "scatter",
    "gather": "gather",
    "send": "send",
    "recv": "receive",
}
"""How the name of such an operator begins, without underscores -> the kind; others exchange nothing."""


@functools.cache
def collective_of(func: Any) -> str:
    """The kind of collective that an operator is; empty of all others."""
    namespace, _, name = func.name().partition("::")
    if namespace not in _GROUPS:
        return ""
    plain = name.replace("_", "")
    return next((kind for begin, kind in _KINDS.items() if plain.startswith(begin)), "")


class Exchanged:
    """The collectives of a step so far."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """An operator ran.  The tensor as a whole is the larger of what a collective takes and what it gives."""
        kind = collective_of(func)
        if kind:
            self._calls[kind] += 1
            self._bytes[kind] += max(map(_bytes_of, (*args, *kwargs.values(), output)))

    def records(self) -> tuple[Collective, ...]:
        """Those first that exchange most."""
        kinds = sorted(self._calls, key=lambda kind: (-self._bytes[kind], kind))
        return tuple(Collective(kind=k, calls=self._calls[k], whole_bytes=self._bytes[k]) for k in kinds)


def _bytes_of(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def labelled(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, str]]:
    """Tensors that an operator fills for the sake of an exchange, and what they are: ``gathered`` or ``reduction``."""
    kind, places = _label_of(func)
    for place in places:
        for leaf in tree_leaves(kwargs.get(place) if isinstance(place, str) else args[place]):
            if isinstance(leaf, Tensor):
                yield leaf, kind


@functools.cache
def _label_of(func: Any) -> tuple[str, tuple[int | str, ...]]:
    """The kind, and which arguments of the operator are of it."""
    return _LABELS.get(func.name().partition(".")[0], ("", ()))


_LABELS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "fsdp::all_gather_copy_in": ("gathered", (0, 1)),
    "fsdp::split_with_sizes_copy": ("gathered", ("out",)),
    "fsdp::chunk_cat": ("reduction", ("out",)),
    "c10d::_reduce_scatter_base_": ("reduction", (0,)),
}
"""Of the first, what is gathered is a copy where it is cast.  The last gives gradients in the end, and those are called
gradients."""


@contextlib.contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Within, ``seen`` is told of every storage that Python has given another size."""

    def resizing(plain: Any) -> Any:
        def resize_(storage: Any, size: int) -> Any:
            resized = plain(storage, size)
            seen(storage)
            return resized

        return resize_

    with replaced(torch.UntypedStorage, "resize_", resizing):
        yield


@contextlib.contextmanager
def staging_unseen() -> Iterator[None]:
    """Within, no mode sees what a backend does when it is waited for: gloo copies tensors of its own.

    As the workspace of kernels, these are no tensors of the step.
    """

    def waiting(plain: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                return plain(*args, **kwargs)

        return wait

    if not dist.is_available():
        yield
        return
    with replaced(dist.Work, "wait", waiting):
        yield

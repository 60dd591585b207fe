"""The exchange among ranks in a step: counts collectives and their bytes, and labels the tensors of the exchange.

FSDP2 gathers parameters into its own buffers, frees the buffers by resizing their storages (which is not an
operator), and reduces gradients in other buffers.  Operators of FSDP (``fsdp::``) and of process groups (``c10d::``)
tell which buffer is which.
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
"""Namespaces of the operators of process groups: direct calls, and PyTorch's functional collectives."""

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
"""Beginning of an operator's name, without underscores -> the kind of collective; other operators exchange nothing."""
_LABELS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "fsdp::all_gather_copy_in": ("gathered", (0, 1)),
    "fsdp::split_with_sizes_copy": ("gathered", ("out",)),
    "fsdp::chunk_cat": ("reduction", ("out",)),
    "c10d::_reduce_scatter_base_": ("reduction", (0,)),
}
"""Operator -> the kind of the tensors that it fills for an exchange, and the arguments with such tensors.  The second
argument of the first operator is its input, which is a copy if it casts.  The last operator fills gradients, which get
their own label later."""


@functools.cache
def classify_collective(func: Any) -> str:
    """Return the kind of collective that ``func`` is (``all-gather``); empty if it is none."""
    namespace, _, name = func.name().partition("::")
    if namespace not in _GROUPS:
        return ""
    plain = name.replace("_", "")
    return next((kind for begin, kind in _KINDS.items() if plain.startswith(begin)), "")


class Collectives:
    """The collectives of a step so far."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def record_call(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Count ``func`` if it is a collective, with the bytes of its largest tensor, which all ranks share."""
        kind = classify_collective(func)
        if kind:
            self._calls[kind] += 1
            leaves = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in (*args, *kwargs.values(), output))
            self._bytes[kind] += max(sum(tensor.nbytes for tensor in tensors) for tensors in leaves)

    def records(self) -> tuple[Collective, ...]:
        """Return the collectives so far, in descending order of their bytes."""
        kinds = sorted(self._calls, key=lambda kind: (-self._bytes[kind], kind))
        return tuple(Collective(kind=k, calls=self._calls[k], whole_bytes=self._bytes[k]) for k in kinds)


def exchange_buffers(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors that ``func`` fills for an exchange, with their kind: ``gathered`` or ``reduction``."""
    kind, arguments = _label_of(func)
    for argument in arguments:
        for leaf in tree_leaves(kwargs.get(argument) if isinstance(argument, str) else args[argument]):
            if isinstance(leaf, Tensor):
                yield leaf, kind


@functools.cache
def _label_of(func: Any) -> tuple[str, tuple[int | str, ...]]:
    """Return the kind of the tensors that ``func`` fills for an exchange, and the arguments with such tensors."""
    return _LABELS.get(func.name().partition(".")[0], ("", ()))


@contextlib.contextmanager
def resizes_seen(report: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Call ``report`` with every storage that Python code in the ``with`` block resizes."""

    def resizing(plain: Any) -> Any:
        def resize_(storage: Any, size: int) -> Any:
            resized = plain(storage, size)
            report(storage)
            return resized

        return resize_

    with replaced(torch.UntypedStorage, "resize_", resizing):
        yield


@contextlib.contextmanager
def staging_unseen() -> Iterator[None]:
    """Hide from all dispatch modes the tensors that a backend makes in ``wait()``; gloo copies results there.

    They are not tensors of the step, just as the workspaces of kernels are not.
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

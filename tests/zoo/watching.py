"""What is seen while a test runs something: warnings, and what autograd keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def silent() -> Iterator[None]:
    """Fail at the first warning of the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of the storages that autograd holds between ``forward`` and backward, each counted once."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept_alive = forward()
    del kept_alive
    return sum(held.values())

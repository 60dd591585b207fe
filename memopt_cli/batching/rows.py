"""Cutting, joining and queuing the rows of batches, which may be any structure of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memopt_cli.errors import BatchShapeError
from memopt_cli.runtime.tree import join_tensors, map_leaves, split_tensors, tensors_of


def count_rows(batch: Any) -> int:
    """Return the number of samples in ``batch``: the first size of every tensor in it.

    Raises :class:`BatchShapeError` if ``batch`` has no tensor, something other than tensors, or first sizes that
    differ.
    """
    sizes = {tensor.shape[:1] for tensor in tensors_of(batch)}
    other_types: list[str] = []
    map_leaves(lambda leaf: other_types.append(type(leaf).__name__) if not isinstance(leaf, Tensor) else None, batch)
    if other_types:
        raise BatchShapeError(
            f"a batch must hold tensors; this batch holds a value of type {other_types[0]}",
            hint="Collate samples into tensors.",
        )
    if len(sizes) != 1 or not (size := sizes.pop()):
        shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
        raise BatchShapeError(
            f"the tensors of a batch have shapes {shapes}; the first size must be the same for all",
            hint="Pass (inputs, targets), both with the batch as their first dimension.",
        )
    return size[0]


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """Return rows ``start`` to ``stop`` (exclusive) of ``batch``, as views."""
    return map_leaves(lambda tensor: tensor[start:stop], batch)


def concatenate(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of all ``batches``, in order, in the structure of the first."""
    if len(batches) == 1:
        return batches[0]
    split = [split_tensors(batch) for batch in batches]
    columns = zip(*(tensors for tensors, _ in split), strict=True)
    _, skeleton = split[0]
    return join_tensors([torch.cat(column) for column in columns], skeleton)


class RowQueue:
    """A queue of rows that are put in and taken out in batches of any size."""

    def __init__(self) -> None:
        self._batches: deque[Any] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def put(self, batch: Any) -> None:
        """Add the rows of ``batch`` at the end."""
        self._rows += count_rows(batch)
        self._batches.append(batch)

    def put_first(self, batch: Any) -> None:
        """Add the rows of ``batch`` in front: :meth:`take` returns them next."""
        self._rows += count_rows(batch)
        self._batches.appendleft(batch)

    def take(self, rows: int) -> Any:
        """Remove and return the first ``rows`` rows, or all rows if there are fewer; the queue must not be empty."""
        parts: list[Any] = []
        missing = min(rows, self._rows)
        self._rows -= missing
        while missing:
            batch = self._batches.popleft()
            size = count_rows(batch)
            if size > missing:
                self._batches.appendleft(slice_rows(batch, missing, size))
                batch = slice_rows(batch, 0, missing)
            parts.append(batch)
            missing -= min(size, missing)
        return concatenate(parts)

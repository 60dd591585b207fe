"""Batch samplers for ``DataLoader(batch_sampler=…)`` that group sequences of similar length: each index once an epoch.

The order depends only on the seed and the epoch, so that all ranks of a distributed run agree on it.  Each rank gets
its share, the same number of batches on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

from torch.utils.data import Sampler

from memopt_cli.errors import BatchShapeError, UsageError

Oversize = Literal["alone", "error"]


class LengthSampler(Sampler[list[int]]):
    """Base of the samplers: sorts sequences by length, cuts them into batches, and shuffles these.

    ``lengths`` has the steps of each sequence.  Sequences of equal length are in random order.  ``shuffle=False`` keeps
    both orders fixed, longest batches first.  Call :meth:`set_epoch` before each epoch.
    """

    def __init__(
        self, lengths: Sequence[int], *, seed: int = 0, shuffle: bool = True, rank: int = 0, ranks: int = 1
    ) -> None:
        if not 0 <= rank < ranks:
            raise UsageError(f"rank {rank} of {ranks} does not exist", hint="Ranks count from 0.")
        if not lengths:
            raise BatchShapeError("lengths is empty", hint="Pass the number of steps of each sequence.")
        if (shortest := min(lengths)) < 1:
            raise BatchShapeError(
                f"sequence {lengths.index(shortest)} has {shortest} steps; it must have at least 1",
                hint="Leave empty sequences out of the data set.",
            )
        self._lengths = list(lengths)
        self._seed, self._shuffle = seed, shuffle
        self._rank, self._ranks = rank, ranks
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of ``epoch``, which is the same on every rank."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Count the batches of this rank."""
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches()

    def _batches(self) -> list[list[int]]:
        generator = random.Random(f"{self._seed} {self._epoch}")
        indices = list(range(len(self._lengths)))
        if self._shuffle:
            generator.shuffle(indices)
        indices.sort(key=self._lengths.__getitem__, reverse=True)
        batches = make_divisible(self._cut(indices), self._ranks)
        if self._shuffle:
            generator.shuffle(batches)
        return batches[self._rank :: self._ranks]

    def _cut(self, indices: list[int]) -> list[list[int]]:
        """Cut ``indices``, longest sequences first, into consecutive batches."""
        raise NotImplementedError


class LengthBucketSampler(LengthSampler):
    """Batches of ``batch_size`` sequences of similar length; one batch may be smaller.

    The smaller batch is placed in the sorted order where padding is least.  No other batches of these sizes have less
    padding, since consecutive sequences of the sorted order are best for any sizes.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(lengths, seed=seed, shuffle=shuffle, rank=rank, ranks=ranks)
        if batch_size < 1:
            raise UsageError(
                f"batch_size is {batch_size}; it must be at least 1", hint="Pass the number of sequences in a batch."
            )
        self._size = batch_size

    def _cut(self, indices: list[int]) -> list[list[int]]:
        whole, rest = divmod(len(indices), self._size)
        starts = self._batch_starts(indices, whole, rest) if rest else list(range(0, len(indices), self._size))
        return [indices[start:stop] for start, stop in zip(starts, [*starts[1:], len(indices)], strict=True)]

    def _batch_starts(self, indices: list[int], whole: int, rest: int) -> list[int]:
        """Return the starts of batches in ``indices``, with the smaller one where padded positions are fewest."""

        def starts(smaller: int) -> list[int]:
            return [i * self._size - (self._size - rest) * (i > smaller) for i in range(whole + 1)]

        longest = [self._lengths[i] for i in indices]
        # Moving the smaller batch one place swaps it with its neighbour: only the terms of these two change in the sum.
        positions = sum(self._size * longest[rest + i * self._size] for i in range(whole)) + rest * longest[0]
        best = (positions, 0)
        for index in range(1, whole + 1):
            previous = index - 1
            positions += self._size * (longest[previous * self._size] - longest[rest + previous * self._size])
            positions += rest * (longest[index * self._size] - longest[previous * self._size])
            best = min(best, (positions, index))
        return starts(best[1])


class TokenBudgetSampler(LengthSampler):
    """Batches of at most ``max_tokens`` positions, padding included: ``max(lengths) * sequences <= max_tokens``.

    A sequence longer than the budget is a batch by itself (``oversize="alone"``) or an error (``oversize="error"``).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        oversize: Oversize = "error",
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__(lengths, seed=seed, shuffle=shuffle, rank=rank, ranks=ranks)
        if oversize not in ("alone", "error"):
            raise UsageError(f"oversize is '{oversize}'; it must be 'alone' or 'error'")
        if max_tokens < 1:
            raise BatchShapeError(f"max_tokens is {max_tokens}; it must be at least 1")
        if oversize == "error" and max(lengths) > max_tokens:
            raise BatchShapeError(
                f"a sequence of {max(lengths)} steps does not fit into {max_tokens} tokens",
                hint="Raise max_tokens, cut the sequence, or let it stand alone: oversize='alone'.",
            )
        self._max_tokens = max_tokens

    def _cut(self, indices: list[int]) -> list[list[int]]:
        batches = []
        start = 0
        while start < len(indices):
            stop = start + max(1, self._max_tokens // self._lengths[indices[start]])
            batches.append(indices[start:stop])
            start = stop
        return batches


def make_divisible(batches: list[list[int]], ranks: int) -> list[list[int]]:
    """Halve the largest of ``batches`` until ``ranks`` divides their number.

    If every batch has only one sequence, some batches are repeated instead, as ``DistributedSampler`` does.
    """
    batches = list(batches)
    while len(batches) % ranks:
        index = max(range(len(batches)), key=lambda i: len(batches[i]))
        batch = batches[index]
        if len(batch) == 1:
            missing = -len(batches) % ranks
            return batches + [batches[i % len(batches)] for i in range(missing)]
        batches[index : index + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    return batches

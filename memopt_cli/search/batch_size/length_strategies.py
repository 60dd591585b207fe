"""Ways to batch sequences of given lengths, side by side: padding, buckets, sequence packing, a token budget."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.text.documents import MOST_BYTES, printable, read_bytes

TOKEN_BUDGET = "token_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchExtent:
    """Size of one batch of sequences."""

    sequences: int
    steps: int
    """Of the longest."""
    positions: int
    """Computed: ``sequences * steps`` if padded, the sum of lengths if packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyReport:
    """What one epoch costs when batched one way."""

    strategy: str
    """``padding`` (random batches), ``buckets``, ``sequence_packing`` (random batches) or ``token_budget``."""
    batches: int
    tokens: int
    """Sum of all lengths."""
    positions: int
    """Computed in an epoch."""
    peak_bytes: int | None
    """Of the batch that needs most, by the memory model; ``None`` without one."""
    epoch_s: float | None
    """Sum over batches, by the time model; ``None`` without one."""

    @property
    def waste(self) -> float:
        """Share of computed positions that are padding, 0 to 1."""
        return 1 - self.tokens / self.positions


MemoryModel = Callable[[BatchExtent], int]
"""Peak bytes of one step."""
TimeModel = Callable[[BatchExtent], float]
"""Seconds of one step."""


def compare_length_strategies(
    lengths: Sequence[int],
    *,
    batch_size: int = 32,
    max_tokens: int | None = None,
    memory: MemoryModel | None = None,
    step_s: TimeModel | None = None,
    seed: int = 0,
) -> tuple[StrategyReport, ...]:
    """Waste, memory and time of the four ways on these lengths (steps of each sequence).

    ``batch_size`` sequences make a batch, except under the token budget, ``max_tokens`` positions: by default what an
    average batch has, and at least the longest sequence.  ``memory`` and ``step_s`` model one step.
    """
    from memopt_cli.search.batch_size.samplers import LengthBucketSampler, TokenBudgetSampler  # import torch

    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
    buckets = LengthBucketSampler(lengths, batch_size, seed=seed)
    budget = max_tokens or max(max(lengths), round(batch_size * sum(lengths) / len(lengths)))
    tokens = TokenBudgetSampler(lengths, budget, oversize="alone", seed=seed)
    drawn = _random_batches(len(lengths), batch_size, seed)
    plans = {
        "padding": [_extent([lengths[i] for i in batch], packed=False) for batch in drawn],
        "buckets": [_extent([lengths[i] for i in batch], packed=False) for batch in buckets],
        "sequence_packing": [_extent([lengths[i] for i in batch], packed=True) for batch in drawn],
        TOKEN_BUDGET: [_extent([lengths[i] for i in batch], packed=False) for batch in tokens],
    }
    return tuple(
        StrategyReport(
            strategy=name,
            batches=len(extents),
            tokens=sum(lengths),
            positions=sum(extent.positions for extent in extents),
            peak_bytes=max(map(memory, extents)) if memory else None,
            epoch_s=sum(map(step_s, extents)) if step_s else None,
        )
        for name, extents in plans.items()
    )


_NUMBER = r"0{0,9}[1-9][0-9]{0,17}"
_LENGTH = re.compile(_NUMBER)
_COUNTED = re.compile(rf"({_NUMBER})(?:\s*[\s:,]\s*({_NUMBER}))?")


def read_lengths(path: str | Path) -> list[int]:
    """Lengths from a text file, one positive whole number a line; empty lines do not count.

    Raises :class:`UsageError` naming the line that is none.
    """
    return [int(match[0]) for match in _matches(path, _LENGTH, "Write one number above 0 a line.")]


def read_histogram(path: str | Path) -> dict[int, int]:
    """Lengths and how often each occurs, from lines ``LENGTH``, ``LENGTH COUNT`` or ``LENGTH: COUNT``, as often as they
    come; in ascending order.

    Raises :class:`UsageError` naming the line that is none.
    """
    counts: dict[int, int] = {}
    hint = "Write one number above 0 a line, or two: a length and how often it occurs."
    for match in _matches(path, _COUNTED, hint):
        length = int(match[1])
        counts[length] = counts.get(length, 0) + int(match[2] or 1)
    return dict(sorted(counts.items()))


def _matches(path: str | Path, line_of: re.Pattern[str], hint: str) -> list[re.Match[str]]:
    """The lines of a file that are not empty."""
    try:
        lines = io.TextIOWrapper(io.BytesIO(read_bytes(path, MOST_BYTES)), "utf-8-sig", errors="replace")
    except OSError as err:
        raise UsageError(f"cannot read lengths from {path}: {err.strerror}", hint="Check the path.") from err
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        match = line_of.fullmatch(text)
        if text and match is None:
            raise UsageError(f"{path}, line {number}: '{printable(text[:40])}' is not a length", hint=hint)
        if match is not None:
            found.append(match)
    if not found:
        raise BatchShapeError(f"{path} holds no lengths", hint=hint)
    return found


def _random_batches(count: int, batch_size: int, seed: int) -> list[list[int]]:
    indices = list(range(count))
    random.Random(seed).shuffle(indices)
    return [indices[start : start + batch_size] for start in range(0, count, batch_size)]


def _extent(lengths: Sequence[int], *, packed: bool) -> BatchExtent:
    steps = max(lengths)
    return BatchExtent(sequences=len(lengths), steps=steps, positions=sum(lengths) if packed else steps * len(lengths))

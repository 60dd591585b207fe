"""Four strategies to batch sequences (padding, buckets, sequence packing, a token budget), and what an epoch costs."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.text.documents import MAX_BYTES, printable, read_bytes

TOKEN_BUDGET = "token_budget"
_NUMBER = r"0{0,9}[1-9][0-9]{0,17}"  # bounded, as Python refuses to parse integers of thousands of digits
_LENGTH = re.compile(_NUMBER)
_COUNTED = re.compile(rf"({_NUMBER})(?:\s*[\s:,]\s*({_NUMBER}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchExtent:
    """The size of one batch of sequences."""

    sequences: int
    steps: int
    """Length of the longest sequence."""
    positions: int
    """Number of computed positions: ``sequences * steps`` if padded, the sum of lengths if packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyReport:
    """The cost of one epoch under one strategy."""

    strategy: str
    """``padding`` (random batches), ``buckets``, ``sequence_packing`` (random batches) or ``token_budget``."""
    batches: int
    tokens: int
    """Sum of all lengths."""
    positions: int
    """Number of computed positions in an epoch, padding included."""
    peak_bytes: int | None
    """Peak of the batch that needs most bytes, according to the memory model; ``None`` if there is no model."""
    epoch_s: float | None
    """Seconds of all batches, according to the time model; ``None`` if there is no model."""

    @property
    def waste(self) -> float:
        """Share of computed positions that are padding, 0 to 1."""
        return 1 - self.tokens / self.positions


MemoryModel = Callable[[BatchExtent], int]
"""Returns the peak bytes of one step on a batch."""
TimeModel = Callable[[BatchExtent], float]
"""Returns the seconds of one step on a batch."""


def compare_length_strategies(
    lengths: Sequence[int],
    *,
    batch_size: int = 32,
    max_tokens: int | None = None,
    memory: MemoryModel | None = None,
    step_s: TimeModel | None = None,
    seed: int = 0,
) -> tuple[StrategyReport, ...]:
    """Compare padding, buckets, sequence packing and a token budget on ``lengths``: waste, memory and time.

    Parameters
    ----------
    lengths:
        Steps of each sequence.
    batch_size:
        Sequences in a batch, except under the token budget.
    max_tokens:
        Maximum number of positions in a batch under the token budget; ``None`` for as many as an average batch has, or
        as the longest sequence has, if more.
    memory, step_s:
        Models of one step: functions of a :class:`BatchExtent` that return its peak bytes and its seconds.
    seed:
        Seed of the random batches.

    Returns
    -------
    One report for each strategy.

    Raises
    ------
    UsageError
        If ``batch_size`` is below 1.
    BatchShapeError
        If there are no lengths, or one is below 1.
    """
    from memopt_cli.search.batch_size.samplers import LengthBucketSampler, TokenBudgetSampler  # import torch

    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
    buckets = LengthBucketSampler(lengths, batch_size, seed=seed)
    budget = max_tokens or max(max(lengths), round(batch_size * sum(lengths) / len(lengths)))
    tokens = TokenBudgetSampler(lengths, budget, oversize="alone", seed=seed)
    indices = list(range(len(lengths)))
    random.Random(seed).shuffle(indices)
    random_batches = [indices[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    extents_by_strategy = {
        "padding": [_extent_of([lengths[i] for i in batch], packed=False) for batch in random_batches],
        "buckets": [_extent_of([lengths[i] for i in batch], packed=False) for batch in buckets],
        "sequence_packing": [_extent_of([lengths[i] for i in batch], packed=True) for batch in random_batches],
        TOKEN_BUDGET: [_extent_of([lengths[i] for i in batch], packed=False) for batch in tokens],
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
        for name, extents in extents_by_strategy.items()
    )


def read_lengths(path: str | Path) -> list[int]:
    """Read lengths from a text file, one positive whole number a line; empty lines are skipped.

    Raises :class:`UsageError` with the first line that is not a length.
    """
    return [int(match[0]) for match in _matching_lines(path, _LENGTH, "Write one number above 0 per line.")]


def read_histogram(path: str | Path) -> dict[int, int]:
    """Read lengths and their counts from lines ``LENGTH``, ``LENGTH COUNT`` or ``LENGTH: COUNT``.

    Returns length -> count, in ascending order; counts of several lines for a length add up.  Raises
    :class:`UsageError` that names the first line of a different form.
    """
    counts: dict[int, int] = {}
    hint = "Write one number above 0 per line, or two: a length and how often it occurs."
    for match in _matching_lines(path, _COUNTED, hint):
        length = int(match[1])
        counts[length] = counts.get(length, 0) + int(match[2] or 1)
    return dict(sorted(counts.items()))


def _matching_lines(path: str | Path, line_of: re.Pattern[str], hint: str) -> list[re.Match[str]]:
    """Match the lines of the file at ``path`` against ``line_of``; empty lines are skipped."""
    try:
        lines = io.TextIOWrapper(io.BytesIO(read_bytes(path, MAX_BYTES)), "utf-8-sig", errors="replace")
    except OSError as err:
        raise UsageError(f"cannot read lengths from {path}: {err.strerror}", hint="Check the path.") from err
    matches = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        match = line_of.fullmatch(text)
        if text and match is None:
            raise UsageError(f"{path}, line {number}: '{printable(text[:40])}' is not a length", hint=hint)
        if match is not None:
            matches.append(match)
    if not matches:
        raise BatchShapeError(f"{path} holds no lengths", hint=hint)
    return matches


def _extent_of(lengths: Sequence[int], *, packed: bool) -> BatchExtent:
    steps = max(lengths)
    return BatchExtent(sequences=len(lengths), steps=steps, positions=sum(lengths) if packed else steps * len(lengths))

"""Comparison of the strategies to batch sequences of the user's lengths (``--lengths``), by three measured runs.

Models of memory and of time are fitted to the runs, and give the cost of an epoch under each strategy.  All strategies
stay within the budget: the batch size fits with the longest sequences, and the token budget has as many positions as
such a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memopt_cli.errors import UsageError
from memopt_cli.records import BatchProbe, DimRange, InputSpec, LengthBatching
from memopt_cli.search.batch_size.length_strategies import (
    TOKEN_BUDGET,
    BatchExtent,
    StrategyReport,
    compare_length_strategies,
)
from memopt_cli.search.batch_size.lines import fit_line

RUNS = 2
"""Number of runs in addition to the run of the recommended batch."""
_LENGTH_SYMBOLS = ("S", "T")


def size_of_length_symbol(lengths: Sequence[int], spec: InputSpec, dim_range: DimRange | None) -> dict[str, int]:
    """Return ``{symbol: size}``: the length's symbol in ``spec``, and the longest of ``lengths`` (at least 2).

    Raises :class:`UsageError` if the inputs have no such symbol, or if ``dim_range`` gives it a range.
    """
    symbol = next((symbol for symbol in _LENGTH_SYMBOLS if symbol in spec.dims), None)
    if symbol is None:
        raise UsageError(
            "`--lengths` needs a dimension S or T in the inputs, to know which of their sizes is the length",
            hint="Name it, for example `-i BxS@int64=0..32000 --dim B=8 --dim S=128`.",
        )
    if dim_range is not None and dim_range.symbol == symbol:
        raise UsageError(
            f"`--lengths` cannot be combined with a range of `--dim {symbol}`: the lengths are the sizes of {symbol}",
            hint="Remove one of them.",
        )
    return {symbol: max(2, *lengths)}


@dataclass(frozen=True, slots=True)
class FittedCost:
    """The function ``constant + linear * positions + quadratic * positions * steps``; the last term is attention's."""

    constant: float
    linear: float
    quadratic: float

    def __call__(self, extent: BatchExtent) -> float:
        """Return the value for a batch of ``extent``."""
        return self.constant + extent.positions * (self.linear + self.quadratic * extent.steps)


def fit(points: Sequence[tuple[BatchExtent, float]]) -> FittedCost:
    """Fit ``points`` by least squares, without the quadratic term if that would be negative."""
    import torch  # not at the top: needed only after a model was run

    rows = [[1.0, extent.positions, extent.positions * extent.steps] for extent, _ in points]
    values = torch.tensor([[value] for _, value in points], dtype=torch.float64)
    design = torch.tensor(rows, dtype=torch.float64)
    scale = design.abs().amax(0)
    constant, linear, quadratic = (torch.linalg.pinv(design / scale) @ values).flatten().div(scale).tolist()
    if quadratic >= 0:
        return FittedCost(constant, linear, quadratic)
    return FittedCost(*fit_line([(extent.positions, value) for extent, value in points]), 0.0)


def compare_lengths(
    lengths: Sequence[int],
    *,
    batch: int,
    runnable: int,
    budget_bytes: int,
    seed: int,
    probe: Callable[[int, int], BatchProbe],
) -> tuple[LengthBatching, ...]:
    """Compare the four strategies on ``lengths``, with ``batch`` sequences or as many positions in a batch.

    ``batch`` of the longest sequences must fit ``budget_bytes``.  ``probe(batch, steps)`` measures a batch.  It is
    called for ``runnable`` sequences of the longest length, then of half the length, and for twice as many of half the
    length.
    """
    longest = max(2, *lengths)
    sizes = ((runnable, longest), (runnable, longest // 2), (2 * runnable, longest // 2))
    runs = [(BatchExtent(sequences=n, steps=steps, positions=n * steps), probe(n, steps)) for n, steps in sizes]
    memory = fit([(extent, run.allocated_peak_bytes) for extent, run in runs])
    step_s = fit([(extent, run.step_s) for extent, run in runs])
    fastest_s_per_position = min(run.step_s / extent.positions for extent, run in runs)

    def compare(max_tokens: int) -> tuple[StrategyReport, ...]:
        return compare_length_strategies(
            lengths,
            batch_size=batch,
            max_tokens=max_tokens,
            memory=lambda extent: round(memory(extent)),
            # Far below the sizes of the runs, the fitted time may be negative; no batch beats the best measured rate.
            step_s=lambda extent: max(fastest_s_per_position * extent.positions, step_s(extent)),
            seed=seed,
        )

    max_tokens = batch * longest
    while _tokens_peak(reports := compare(max_tokens)) > budget_bytes and max_tokens > longest:
        max_tokens = max(longest, max_tokens * 9 // 10)  # a tenth fewer, until the largest batch fits
    return tuple(
        LengthBatching(
            name=report.strategy,
            batch=None if report.strategy == TOKEN_BUDGET else batch,
            max_tokens=max_tokens if report.strategy == TOKEN_BUDGET else None,
            batches=report.batches,
            waste=report.waste,
            peak_bytes=report.peak_bytes or 0,
            epoch_s=report.epoch_s or 0.0,
        )
        for report in reports
    )


def _tokens_peak(reports: Sequence[StrategyReport]) -> int:
    return next(report.peak_bytes or 0 for report in reports if report.strategy == TOKEN_BUDGET)

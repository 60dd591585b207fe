"""Text of ``memopt recommend-batch --ranks``: the fewest ranks that fit, and the largest batch of each number."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.inputs.spec_text import format_layout
from memopt_cli.records import NoBatchFits, NotPredicted, RankBatch, RanksRecommendation, RanksRow
from memopt_cli.report.lines import plain_table
from memopt_cli.report.rank import NOTE, TENSOR_PEAK
from memopt_cli.text.units import format_bytes, format_count, format_seconds


def headline(recommendation: RanksRecommendation) -> Iterator[str]:
    """Yield the fewest ranks that fit, or the largest batch if only one number of ranks was tried; then the limit."""
    fewest, _ = _fitting_rows(recommendation)[0]
    if len({row.layout.ranks for row in recommendation.rows}) > 1:
        smaller = _fewer_ranks(recommendation, fewest)
        yield f"fewest ranks that fit: {recommendation.fewest_ranks}{_under_plan(fewest)}{smaller}"
    else:
        row, fit = max(_fitting_rows(recommendation), key=lambda each: each[1].batch)
        ranks = format_count(row.layout.ranks, "rank")
        yield f"batch {fit.batch} should fit on each of {ranks}{_under_plan(row)}: global batch {fit.global_batch}"
    yield f"memory limit of a rank: {recommendation.limit}"
    first, last = (format_layout(recommendation.rows[n].layout) for n in (0, -1))
    yield f"spread by {first}" if first == last else f"spread by {first} to {last.partition(' over ')[2]}"


def _fitting_rows(recommendation: RanksRecommendation) -> list[tuple[RanksRow, RankBatch]]:
    return [(row, row.outcome) for row in recommendation.rows if isinstance(row.outcome, RankBatch)]


def _under_plan(row: RanksRow) -> str:
    return " under the plan" if row.planned else ""


def _fewer_ranks(recommendation: RanksRecommendation, fewest: RanksRow) -> str:
    smaller = [row.layout.ranks for row in recommendation.rows if row.layout.ranks < fewest.layout.ranks]
    if smaller:
        return f", of those tried; {smaller[-1]} {'does' if smaller[-1] == 1 else 'do'} not"
    return ", the fewest that were tried"


def table(recommendation: RanksRecommendation) -> Table:
    """Return a table with a row for each number of ranks, without the plan and with it."""
    planned = any(row.planned for row in recommendation.rows)
    peak = "peak of one rank,\nestimated" if recommendation.card else TENSOR_PEAK.replace(", ", ",\n")
    headings = ("ranks", *(["plan"] if planned else []), "batch of\none rank", "global\nbatch", peak)
    shown = plain_table(*headings, "exchanged by a rank\nin a pass", "", names=["plan"], words=[""])
    for row in recommendation.rows:
        plan = ["with" if row.planned else "without"] if planned else []
        shown.add_row(f"{row.layout.ranks}", *plan, *_cells(row))
    return shown


def _cells(row: RanksRow) -> tuple[str, ...]:
    match row.outcome:
        case RankBatch() as fit:
            largest, most = f"{fit.batch}", format_bytes(fit.peak_bytes)
            return (largest, f"{fit.global_batch}", most, format_bytes(fit.exchanged_bytes), "")
        case NoBatchFits() as nothing:
            return ("none", "–", "–", "–", f"batch {nothing.batch}: {nothing.reason}")
        case NotPredicted(reason=reason):
            return ("–", "–", "–", "–", reason)


def remarks(recommendation: RanksRecommendation) -> Iterator[str]:
    """Yield the source of the numbers of ``recommendation``, the time it took, and notes."""
    yield "batches are within 1 % of the largest that fit; exchanged bytes count whole tensors"
    yield NOTE
    total_time = format_seconds(recommendation.spent_s)
    yield f"{format_count(recommendation.dry_runs, 'dry run')}, nothing was run; total time {total_time}"
    yield from recommendation.notes

"""Text of ``memopt recommend-batch --strategy``: memory by time steps, and which strategies are exact."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.records import StrategyComparison, StrategyCurve, StrategyPoint
from memopt_cli.report.lines import plain_table
from memopt_cli.text.units import format_bytes, format_seconds


def headline(comparison: StrategyComparison) -> Iterator[str]:
    """Yield a heading for the table of ``comparison``, and the memory limit."""
    yield f"memory of a training step by its time steps {comparison.symbol}, batch {comparison.batch}"
    yield f"memory limit: {comparison.limit}"


def tables(comparison: StrategyComparison) -> Iterator[Table]:
    """Yield a table of peaks by time steps; a strategy that cannot be run has no column."""
    curves = [curve for curve in comparison.curves if curve.points]
    if not curves:
        return
    table = plain_table(comparison.symbol, *(curve.label for curve in curves))
    columns = [{point.steps: _peak(point, comparison.budget_bytes) for point in curve.points} for curve in curves]
    for steps in sorted({steps for column in columns for steps in column}):
        table.add_row(str(steps), *(column.get(steps, "–") for column in columns))
    table.add_row("exact", *({True: "yes", False: "no", None: "?"}[curve.exact] for curve in curves))
    yield table


def verdicts(comparison: StrategyComparison) -> Iterator[str]:
    """Yield one sentence for each strategy of ``comparison``."""
    for curve in comparison.curves:
        if not curve.points:
            yield f"{curve.label}: cannot be run. {curve.remark}"
            continue
        word = {True: "exact", False: "approximate", None: "exactness not known"}[curve.exact]
        last = [point for point in curve.points if point.step_s is not None][-1]
        assert last.step_s is not None
        growth = _growth_in_words(curve, comparison.symbol)
        time = f"{format_seconds(last.step_s)} at {comparison.symbol}={last.steps}"
        yield f"{curve.label}: {word}, {curve.remark}; {growth}; {time}"


def remarks(comparison: StrategyComparison) -> Iterator[str]:
    """Yield the meaning of the marks in the table, notes, and the total time."""
    points = [point for curve in comparison.curves for point in curve.points]
    if not all(point.measured for point in points):
        yield "~: an estimate, on the line through the measured peaks"
    if any(point.allocated_peak_bytes > comparison.budget_bytes for point in points):
        yield "!: beyond the memory limit"
    if any(curve.strategy == "online" and curve.points for curve in comparison.curves):
        yield "Online, the inputs of one time step are counted, which a loader can make as they are needed."
    yield from comparison.notes
    yield f"total time {format_seconds(comparison.spent_s)}"


def _peak(point: StrategyPoint, budget_bytes: int) -> str:
    estimate, beyond = "" if point.measured else "~", " !" if point.allocated_peak_bytes > budget_bytes else ""
    return f"{estimate}{format_bytes(point.allocated_peak_bytes)}{beyond}"


def _growth_in_words(curve: StrategyCurve, symbol: str) -> str:
    last = curve.points[-1]
    if curve.slope_bytes is None:
        return f"growth not known, as only {symbol}={last.steps} was measured"
    grown = abs(curve.slope_bytes) * (last.steps - curve.points[0].steps)
    if grown <= 0.01 * last.allocated_peak_bytes:
        return f"does not grow with {symbol}"
    return f"grows by {format_bytes(round(curve.slope_bytes))} a time step"

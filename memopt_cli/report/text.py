"""Reports for people: tables and sentences, in colour on a terminal, plain aligned lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memopt_cli.records import (
    ApplyResult,
    BaselineResult,
    BatchRecommendation,
    Comparison,
    Equivalence,
    Explanation,
    FastestTraining,
    GroupMeasurement,
    InputSpec,
    Inspection,
    OptimizeResult,
    RanksRecommendation,
    SelftestReport,
    StepProfile,
    StrategyComparison,
)
from memopt_cli.report import (
    comparison,
    confirmation,
    equivalence,
    explanation,
    fastest,
    inspection,
    optimization,
    profiling,
    rank,
    rank_batches,
    recommendation,
    strategies,
)
from memopt_cli.report.lines import guarded, not_typed, plain_table
from memopt_cli.text.documents import printable
from memopt_cli.text.units import format_bytes, format_seconds

_PLOT_COLUMNS = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """Text for people; sizes are in binary units, and ratios are to level 0, the original."""

    verbose: bool = False
    """Whether to show all that was found, as ``-v`` asks, and not the result alone."""

    def inspected(self, found: Inspection, stream: TextIO) -> None:
        console = _console(stream)
        for line, style in zip(inspection.headline(found), ("bold", "dim", None), strict=False):
            _print(console, line, style=style)
        table = inspection.contents_table(found)
        if table is not None:
            _print(console)
            console.print(table)
        _print(console)
        for line in inspection.remarks(found):
            _print(console, line)
        if found.globals:
            _print(console)
            console.print(inspection.globals_table(found.globals))

    def profiled(self, found: StepProfile, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, profiling.headline(found), found.header.spec)
        exchanged = [rank.collective_table(found.rank)] if found.rank is not None else []
        tables = (
            *exchanged,
            profiling.phase_table(found),
            profiling.category_table(found),
            *([profiling.time_table(found)] if found.times else []),
            profiling.module_table(found),
            profiling.saved_table(found),
        )
        for part in (profiling.plot(found, _PLOT_COLUMNS), *tables):
            _print(console)
            console.print(part, markup=False)
        _print(console)
        for line in profiling.remarks(found):
            _print(console, line)

    def measured(self, found: GroupMeasurement, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, rank.measured_headline(found))
        for table in (rank.rank_table(found), rank.collective_table(found.largest)):
            if table.row_count:
                _print(console)
                console.print(table, markup=False)
        _print(console)
        for line in rank.measured_remarks(found):
            _print(console, line)

    def recorded(self, result: BaselineResult, stream: TextIO) -> None:
        memory = result.baseline.memory
        peaks = f"tensor peak {format_bytes(memory.tensor_peak_bytes)}, allocated peak "
        line = f"{peaks}{format_bytes(memory.allocated_peak_bytes)}, step {format_seconds(memory.step_s)}"
        if result.baseline.conditions is not None and result.baseline.conditions.layout is not None:
            line = f"{rank.TENSOR_PEAK}: {format_bytes(memory.tensor_peak_bytes)}"
        _print_headline(_console(stream), [line], result.baseline.header.spec)
        for step in result.baseline.shorter:
            _print(_console(stream), f"at {step.name}: tensor peak {format_bytes(step.memory.tensor_peak_bytes)}")
        for note in result.notes:
            _print(_console(stream), note)
        _written(_console(stream), [result.file])

    def optimized(self, result: OptimizeResult, stream: TextIO) -> None:
        console, summary = _console(stream), result.summary
        _print_headline(console, [optimization.headline(summary)], result.header.spec)
        for table in optimization.tables(summary, verbose=self.verbose):
            _print(console)
            console.print(table, markup=False)
        if self.verbose or not summary.unchanged:
            _print(console)
        for line in optimization.details(summary) if self.verbose else ():
            _print(console, line)
        for line in (*optimization.remarks(summary), *optimization.outlook(result)):
            _print(console, line)

    def recommended(self, found: BatchRecommendation, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, recommendation.headline(found), found.header.spec)
        lengths = [recommendation.length_table(found)] if found.lengths else []
        copies = recommendation.replica_tables(found)
        for part in (*copies, recommendation.case_table(found), recommendation.run_table(found), *lengths):
            if not part.row_count:
                continue
            _print(console)
            console.print(part, markup=False)
        for lines in (recommendation.settings(found), recommendation.remarks(found)):
            _print(console)
            for line in lines:
                _print(console, line)
        for file in found.files:
            _print(console, f"wrote {file}")

    def ranks_recommended(self, found: RanksRecommendation, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, rank_batches.headline(found))
        _print(console)
        console.print(rank_batches.table(found), markup=False)
        _print(console)
        for line in rank_batches.remarks(found):
            _print(console, line)

    def fastest_found(self, found: FastestTraining, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, fastest.headline(found), found.header.spec)
        _print(console)
        console.print(fastest.run_table(found), markup=False)
        for lines in (fastest.settings(found), fastest.remarks(found)):
            _print(console)
            for line in lines:
                _print(console, line)
        _written(console, found.files)

    def strategies_compared(self, found: StrategyComparison, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, strategies.headline(found))
        if any(curve.points for curve in found.curves):
            _print(console)
            console.print(strategies.peak_table(found), markup=False)
        for lines in (strategies.verdicts(found), strategies.remarks(found)):
            _print(console)
            for line in lines:
                _print(console, line)

    def applied(self, result: ApplyResult, stream: TextIO) -> None:
        console = _console(stream)
        for line in confirmation.lines(result.confirmation) if result.confirmation is not None else ():
            _print(console, line)
        for found in (*result.shorter, *([result.verification] if result.verification is not None else [])):
            for line in (optimization.verification(found), *optimization.inexact(found)):
                _print(console, line)
        _written(console, result.files)

    def tested(self, found: SelftestReport, stream: TextIO) -> None:
        console, failed = _console(stream), len(found.failed)
        tried = " that was tried" if found.interrupted else ""
        missed = f"{failed} of {len(found.rows)} promises do not hold here"
        said = missed if failed else f"every promise{tried} holds here"
        _print(console, said, style="bold")
        _print(console, f"{found.conditions.device_name}, PyTorch {found.torch}, memopt {found.memopt}")
        _print(console)
        table = plain_table()
        for heading in ("what was run", "", "promise", "seen"):
            table.add_column(heading)
        for row in found.rows:
            table.add_row(*map(escape, (row.name, "yes" if row.holds else "NO", row.promise, printable(row.seen))))
        console.print(table)
        _print(console)
        _print(console, f"total time {format_seconds(found.spent_s)}")

    def explained(self, found: Explanation, stream: TextIO) -> None:
        console = _console(stream)
        _print_headline(console, explanation.headline(found))
        for table in explanation.tables(found):
            _print(console)
            console.print(table, markup=False)
        _print(console)
        for line in explanation.remarks(found):
            _print(console, line)

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        for file in files:
            _print(_console(stream), f"wrote {file}")


class TextJudgement:
    """Text of the commands that judge: ``check``, ``compare`` and ``verify``."""

    def compared(self, found: Comparison, stream: TextIO) -> None:
        console = _console(stream)
        for line in comparison.headline(found):
            _print(console, line, style="bold")
        for part in (found, *comparison.grown(found)):
            if part.at:
                _print(console)
                _print(console, part.at, style="bold")
            tables = (
                (comparison.METRIC_HEADINGS, comparison.metric_rows(part)),
                (comparison.MODULE_HEADINGS, comparison.module_rows(part)),
            )
            for headings, rows in tables:
                if rows:
                    _print(console)
                    console.print(_plain_table(headings, rows))
            _print(console)
            for line in comparison.reasons(part):
                _print(console, line)

    def refused(self, reason: str, stream: TextIO) -> None:
        """Write nothing: stderr has the reason."""

    def verified(self, found: Equivalence, stream: TextIO) -> None:
        console = _console(stream)
        _print(console, equivalence.headline(found), style="bold")
        for line in equivalence.where(found):
            _print(console, line)
        _print(console)
        if found.gaps:
            console.print(_plain_table(equivalence.HEADINGS, equivalence.rows(found)))
            _print(console)
        for line in equivalence.remarks(found):
            _print(console, line)


def _written(console: Console, files: Sequence[str]) -> None:
    for file in files:
        _print(console, f"wrote {file}")
    if not files:
        _print(console, "nothing written")


def _console(stream: TextIO) -> Console:
    return Console(file=cast(TextIO, guarded(stream)), width=None if stream.isatty() else 1000, highlight=False)


def _print_headline(console: Console, lines: Iterable[str], spec: InputSpec | None = None) -> None:
    """Print ``lines``, the first one in bold, with the inputs of ``spec`` if nobody typed them now."""
    first, *others = lines
    _print(console, first + (not_typed(spec) if spec is not None else ""), style="bold")
    for line in others:
        _print(console, line)


def _print(console: Console, text: str = "", *, style: str | None = None) -> None:
    console.print("\n".join(map(printable, text.split("\n"))), style=style, markup=False, soft_wrap=True)


def _plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; its last three columns, the first excepted, hold numbers and are right-aligned."""
    table = plain_table()
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index >= max(1, len(headings) - 3) else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table

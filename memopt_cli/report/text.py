"""Reports for people: tables and sentences, in colour on a terminal, plain aligned lines elsewhere."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TextIO, cast

from rich.console import Console
from rich.table import Table

from memopt_cli.errors import MemoptError
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
from memopt_cli.report.interface import Answer
from memopt_cli.report.lines import choice_notes, guard, inputs_warning, other_notes, plain_table
from memopt_cli.text.documents import printable
from memopt_cli.text.units import format_bytes, format_seconds


class Printer(Protocol):
    """Part of rich's ``Console`` that text reports use."""

    def print(self, part: Table | str = "", /, *, style: str | None, markup: bool, soft_wrap: bool) -> None:
        """Print ``part`` and the end of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """Text for people; sizes are in binary units, and ratios are to level 0, the original."""

    verbose: bool = False
    """Whether to show details as well as the result (``-v``)."""
    verdict_only: bool = False
    """Whether to show a comparison in one line, without tables (``-q``)."""

    def show(self, answer: Answer, stream: TextIO) -> None:
        self.show_on(_console(stream), answer)

    def show_on(self, console: Printer, answer: Answer) -> None:
        """Print ``answer`` on ``console``."""
        match answer:
            case Inspection():
                _print_inspection(console, answer, verbose=self.verbose)
            case BaselineResult():
                _print_baseline(console, answer)
            case OptimizeResult():
                _print_optimized(console, answer, verbose=self.verbose)
            case ApplyResult():
                _print_applied(console, answer)
            case SelftestReport():
                _print_selftest(console, answer)
            case Comparison() if self.verdict_only:
                elsewhere = comparison.measured_elsewhere(answer) if answer.exceeded else ()
                _print(console, "; ".join([*comparison.headline(answer), *elsewhere]))
            case Comparison():
                _print_comparison(console, answer)
            case _:
                _in_parts(console, answer)

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        _print_files(_console(stream), files)

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        """Write nothing: stderr has the ``error``."""


def _in_parts(
    console: Printer,
    answer: BatchRecommendation
    | Equivalence
    | Explanation
    | FastestTraining
    | GroupMeasurement
    | RanksRecommendation
    | StepProfile
    | StrategyComparison,
) -> None:
    """Print an answer that consists of a headline, tables and blocks of lines."""
    match answer:
        case StepProfile():
            parts, lines = profiling.parts(answer), profiling.remarks(answer)
            _print_all(console, profiling.headline(answer), parts, lines, spec=answer.header.spec)
        case GroupMeasurement():
            tables = rank.rank_table(answer), rank.collective_table(answer.largest)
            _print_all(console, rank.measured_headline(answer), tables, rank.measured_remarks(answer))
        case BatchRecommendation():
            blocks = recommendation.settings(answer), recommendation.remarks(answer)
            first = recommendation.headline(answer)
            spec = answer.header.spec
            _print_all(console, first, recommendation.tables(answer), *blocks, spec=spec)
            _print_files(console, answer.files)
        case RanksRecommendation():
            table = rank_batches.table(answer)
            _print_all(console, rank_batches.headline(answer), [table], rank_batches.remarks(answer))
        case FastestTraining():
            blocks = fastest.settings(answer), fastest.remarks(answer)
            first, spec = fastest.headline(answer), answer.header.spec
            _print_all(console, first, [fastest.run_table(answer)], *blocks, spec=spec)
            _print_files(console, answer.files, none="nothing written")
        case StrategyComparison():
            blocks = strategies.verdicts(answer), strategies.remarks(answer)
            _print_all(console, strategies.headline(answer), strategies.tables(answer), *blocks)
        case Explanation():
            code = [*explanation.micro_batch_code(answer)]
            sections = [section for section in (code, explanation.remarks(answer)) if section]
            _print_all(console, explanation.headline(answer), explanation.tables(answer), *sections)
        case Equivalence():
            table = _table_of(equivalence.HEADINGS, equivalence.rows(answer))
            first_lines = equivalence.headline(answer), *equivalence.location_lines(answer)
            _print_all(console, first_lines, [table], equivalence.remarks(answer))


def _print_inspection(console: Printer, result: Inspection, *, verbose: bool) -> None:
    for line, style in zip(inspection.headline(result), ("bold", "dim", None), strict=False):
        _print(console, line, style=style)
    _print_parts(console, inspection.contents_tables(result, verbose=verbose))
    _print_block(console, inspection.remarks(result, verbose=verbose))
    _print_parts(console, [inspection.globals_table(result.globals)])


def _print_baseline(console: Printer, result: BaselineResult) -> None:
    memory = result.baseline.memory
    peaks = f"tensor peak {format_bytes(memory.tensor_peak_bytes)}, allocated peak "
    line = f"{peaks}{format_bytes(memory.allocated_peak_bytes)}, step {format_seconds(memory.step_s)}"
    if result.baseline.conditions is not None and result.baseline.conditions.layout is not None:
        line = f"{rank.TENSOR_PEAK}: {format_bytes(memory.tensor_peak_bytes)}"
    _print_headline(console, [line], result.baseline.header.spec)
    for step in result.baseline.shorter:
        _print(console, f"at {step.name}: tensor peak {format_bytes(step.memory.tensor_peak_bytes)}")
    for note in result.notes:
        _print(console, note)
    _print_files(console, [result.file])


def _print_optimized(console: Printer, result: OptimizeResult, *, verbose: bool) -> None:
    summary = result.summary
    tables = optimization.tables(summary, verbose=verbose)
    own_remark = optimization.own_checkpoints_remark(summary)
    first = [optimization.headline(summary), *own_remark, *choice_notes(summary.notes)]
    _print_all(console, first, tables, spec=result.header.spec)
    if verbose or not summary.unchanged:
        _print(console)
    details = optimization.details(summary) if verbose else ()
    for line in (*details, *optimization.remarks(summary), *optimization.outlook(result)):
        _print(console, line)


def _print_applied(console: Printer, result: ApplyResult) -> None:
    for line in confirmation.lines(result.confirmation) if result.confirmation is not None else ():
        _print(console, line)
    for each in (*result.shorter, *([result.verification] if result.verification is not None else [])):
        for line in (optimization.verification_line(each), *optimization.inexact(each)):
            _print(console, line)
    _print_files(console, result.files, none="nothing written")


def _print_selftest(console: Printer, selftest: SelftestReport) -> None:
    failed = len(selftest.failed)
    tried = " that was tried" if selftest.interrupted else ""
    missed = f"{failed} of {len(selftest.rows)} promises do not hold here"
    verdict = missed if failed else f"every promise{tried} holds here"
    here = f"{selftest.conditions.device_name}, PyTorch {selftest.torch}, memopt {selftest.memopt}"
    table = plain_table("what was run", "", "promise", "seen", words=("what was run", "", "promise", "seen"))
    for row in selftest.rows:
        table.add_row(row.name, "yes" if row.holds else "NO", row.promise, printable(row.seen))
    _print_all(console, [verdict, here], [table], [f"total time {format_seconds(selftest.spent_s)}"])


def _print_comparison(console: Printer, found: Comparison) -> None:
    for line in comparison.headline(found):
        _print(console, line, style="bold")
    for part in (found, *comparison.grown_parts(found)):
        if part.at:
            _print(console)
            _print(console, part.at, style="bold")
        metrics = _table_of(comparison.METRIC_HEADINGS, comparison.metric_rows(part))
        modules = _table_of(comparison.MODULE_HEADINGS, comparison.module_rows(part))
        _print_parts(console, [metrics, modules])
        _print_block(console, comparison.reasons(part))


def _print_files(console: Printer, files: Sequence[str], none: str = "") -> None:
    for line in [f"wrote {file}" for file in files] or filter(None, [none]):
        _print(console, line)


def plain_text(answer: Answer) -> str:
    """Return the report on ``answer``, without colours in any environment."""
    text = io.StringIO()
    TextReport().show_on(_console(text, colours=None), answer)
    return text.getvalue().rstrip()


def _console(stream: TextIO, colours: Literal["auto"] | None = "auto") -> Console:
    """Return a console that writes to ``stream``, even in a notebook, where rich would display the text."""
    width = None if stream.isatty() else 1000  # rich would wrap lines in files and logs at 80 columns
    file = cast(TextIO, guard(stream))
    return Console(file=file, width=width, highlight=False, emoji=False, color_system=colours, force_jupyter=False)


def _print_all(
    console: Printer,
    headline: Iterable[str],
    parts: Iterable[Table | str],
    *blocks: Iterable[str],
    spec: InputSpec | None = None,
) -> None:
    """Print a headline, then ``parts`` and blocks of lines, with an empty line before each.

    Lines that say what memopt chose itself come right below the headline's first line.
    """
    first, *more = headline
    remarks = [list(lines) for lines in blocks]
    _print_headline(console, [first, *choice_notes(itertools.chain(*remarks)), *more], spec)
    _print_parts(console, parts)
    for lines in remarks:
        _print_block(console, other_notes(lines))


def _print_headline(console: Printer, lines: Iterable[str], spec: InputSpec | None) -> None:
    """Print ``lines``, the first one in bold, with the inputs of ``spec`` if nobody typed them now."""
    first, *below = lines
    more = "" if spec is None else inputs_warning(spec)
    _print(console, f"{first.removesuffix('.')}{more}" if more else first, style="bold")
    for line in below:
        _print(console, line)


def _print_parts(console: Printer, parts: Iterable[Table | str]) -> None:
    """Print plots and tables with an empty line before each; leave tables without rows out."""
    for part in parts:
        if isinstance(part, str) or part.row_count:
            _print(console)
            console.print(part, style=None, markup=False, soft_wrap=False)


def _print_block(console: Printer, lines: Iterable[str]) -> None:
    _print(console)
    for line in lines:
        _print(console, line)


def _print(console: Printer, text: str = "", *, style: str | None = None) -> None:
    console.print("\n".join(map(printable, text.split("\n"))), style=style, markup=False, soft_wrap=True)


def _table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; its last three columns hold numbers, but never the first."""
    table = plain_table(*headings, names=headings[: max(1, len(headings) - 3)])
    for row in rows:
        table.add_row(*row)
    return table

"""Reports in Markdown, for a comment on a pull request or the summary of a CI job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from memopt_cli.errors import MemoptError
from memopt_cli.records import Comparison, Equivalence
from memopt_cli.report import equivalence
from memopt_cli.report.comparison import (
    METRIC_HEADINGS,
    MODULE_HEADINGS,
    grown_parts,
    headline,
    metric_rows,
    module_rows,
    reasons,
)
from memopt_cli.report.interface import VerdictResult
from memopt_cli.report.lines import guard
from memopt_cli.text.documents import printable
from memopt_cli.text.spelling import split_marked_options

_PLAIN = re.compile(r"(?!www\.)(?:[^\W_]|[+−–→…×'.])*", re.IGNORECASE)
"""Words that every dialect of Markdown shows as they are: no markup, link, mention or formula."""


class MarkdownReport:
    """Markdown with a heading, sentences and tables."""

    def show(self, answer: VerdictResult, stream: TextIO) -> None:
        lines = _comparison(answer) if isinstance(answer, Comparison) else _equivalence(answer)
        guard(stream).write("\n".join(lines) + "\n")

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        lines = [f"memopt: {model} was not checked", error.message, error.hint]
        guard(stream).write("### " + "\n\n".join(_sentence(line) for line in lines if line) + "\n")


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield f"### memopt: {_sentence(comparison.after.model)}"
    for line in headline(comparison):
        yield from ("", f"**{_sentence(line)}**")
    for part in (comparison, *grown_parts(comparison)):
        if part.at:
            yield from ("", f"#### {_sentence(part.at)}")
        yield from _table_lines(METRIC_HEADINGS, metric_rows(part))
        if rows := module_rows(part):
            yield from _table_lines(MODULE_HEADINGS, rows)
        yield ""
        yield from (f"- {_sentence(reason)}" for reason in reasons(part))


def _equivalence(found: Equivalence) -> Iterator[str]:
    yield f"### memopt: {_sentence(found.candidate)}"
    yield from ("", f"**{_sentence(equivalence.headline(found))}**")
    for line in equivalence.location_lines(found):
        yield from ("", _sentence(line))
    if found.gaps:
        yield from _table_lines(equivalence.HEADINGS, equivalence.rows(found))
    yield ""
    yield from (f"- {_sentence(line)}" for line in equivalence.remarks(found))


def _table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; its last three columns, the first excepted, hold numbers and are right-aligned."""
    rule = ["---:" if index >= max(1, len(headings) - 3) else "---" for index in range(len(headings))]
    yield ""
    yield from (f"| {' | '.join(cells)} |" for cells in (headings, rule))
    for row in rows:
        cells = [_sentence(text).replace("|", "\\|") for text in row]
        yield f"| {' | '.join(cells)} |"


def _sentence(text: str) -> str:
    """Return ``text`` with each command, and every word that Markdown might interpret, in a code span."""
    parts = map(printable, split_marked_options(" ".join(text.split())))
    return "".join(
        _code(part) if i % 2 else " ".join(map(_escaped_word, part.split(" "))) for i, part in enumerate(parts)
    )


def _escaped_word(word: str) -> str:
    opened = word.lstrip("(")
    if _PLAIN.fullmatch(opened.rstrip("),.:;%")):
        return word
    core = opened.rstrip("),.:;")  # the % stays inside: `peak:5%`
    return word[: len(word) - len(opened)] + _code(core) + opened[len(core) :]


def _code(text: str) -> str:
    """Return ``text`` as a code span, its fence longer than any run of backticks inside."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"

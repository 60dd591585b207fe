"""Reports for pages that show Markdown: a comment on a change, the summary of a CI job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from memopt_cli.documents import no_commands
from memopt_cli.records import Comparison
from memopt_cli.report.comparison import (
    METRIC_HEADINGS,
    MODULE_HEADINGS,
    headline,
    metric_rows,
    module_rows,
    reasons,
)

_SPECIAL = str.maketrans({character: f"\\{character}" for character in r"\`*_[]<>|#~"})


class MarkdownReport:
    """A heading, sentences and tables."""

    def compared(self, found: Comparison, stream: TextIO) -> None:
        stream.write(no_commands(markdown(found)))

    def refused(self, reason: str, stream: TextIO) -> None:
        stream.write(f"### memopt: not checked\n\n{_escaped(reason)}\n")


def markdown(found: Comparison) -> str:
    """The comparison as a section of its own."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Comparison) -> Iterator[str]:
    yield f"### memopt: {_escaped(found.after.model)}"
    for line in headline(found):
        yield from ("", f"**{_escaped(line)}**")
    yield from _table(METRIC_HEADINGS, metric_rows(found))
    if rows := module_rows(found):
        yield from _table(MODULE_HEADINGS, rows)
    yield ""
    yield from (f"- {_escaped(reason)}" for reason in reasons(found))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The last three columns hold numbers."""
    rule = ["---:" if index >= len(headings) - 3 else "---" for index in range(len(headings))]
    yield ""
    yield from (f"| {' | '.join(cells)} |" for cells in (headings, rule))
    yield from (f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _escaped(text: str) -> str:
    return " ".join(text.split()).translate(_SPECIAL)

"""Reports for GitHub Actions: annotations of the run, and the job's summary page."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TextIO

from memopt_cli.errors import MemoptError, WriteError, printable, printable_lines
from memopt_cli.records import Comparison
from memopt_cli.report import equivalence
from memopt_cli.report.comparison import circumstances, describe_verdict, growth, headline, reasons
from memopt_cli.report.interface import VerdictResult
from memopt_cli.report.lines import guard
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.text.misnamed import definitions_in
from memopt_cli.text.spelling import on_command_line


class GithubReport:
    """Annotations: an ``::error`` for each length with exceeded limits, or one ``::notice`` if there are none.

    Tables go to the summary page.
    """

    def __init__(self, summary: str | None, baseline: str = "") -> None:
        """Append tables to the file ``summary``, which ``$GITHUB_STEP_SUMMARY`` names, unless it is ``None``.

        An annotation on a model that is in no file of Python is shown next to the file ``baseline``, if there is one.
        """
        self._summary, self._baseline = summary, baseline

    def show(self, answer: VerdictResult, stream: TextIO) -> None:
        if isinstance(answer, Comparison):
            self._write_comparison(answer, stream)
        else:
            lines = [equivalence.headline(answer), *equivalence.location_lines(answer)]
            kind = "notice" if answer.passed else "error"
            guard(stream).command(
                _annotation(kind, f"memopt: {answer.candidate}", lines, self._place(answer.candidate))
            )
        page = io.StringIO()
        MarkdownReport().show(answer, page)
        self._append(page.getvalue())

    def _write_comparison(self, comparison: Comparison, stream: TextIO) -> None:
        lines, model = guard(stream), comparison.after.model
        for part in comparison.parts:
            exceeded = [describe_verdict(verdict) for verdict in part.verdicts if verdict.exceeded]
            if exceeded:
                why = [*growth(part), *reasons(part)]
                lines.command(_annotation("error", f"memopt: {model}", [*exceeded, *why], self._place(model)))
        if not comparison.exceeded:
            summary_lines = [*headline(comparison), *circumstances(comparison)]
            lines.command(_annotation("notice", f"memopt: {model}", summary_lines, self._place(model)))

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        lines = [on_command_line(text) for text in (error.message, error.hint) if text]
        place = self._place(model, error.message)
        guard(stream).command(_annotation("error", f"memopt: {model} was not checked", lines, place))
        page = io.StringIO()
        MarkdownReport().refused(error, model, page)
        self._append(page.getvalue())

    def _place(self, model: str, message: str = "") -> tuple[str, str] | None:
        """Return the file in the repository and the line at which to show an annotation on ``model``, if any.

        This is the line named by ``message``, else the class or function named by ``model``, else the baseline.
        """
        module, _, name = model.rpartition(":")
        source = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
        line_of_name = next((str(node.lineno) for node in definitions_in(source) if node.name == name), "1")
        places = [(source, line_of_name), (self._baseline, "1")]
        if match := re.search(r"\(([^()]+\.py), line (\d+)\)", message):
            places.insert(0, (match[1], match[2]))
        repository = os.path.abspath(os.environ.get("GITHUB_WORKSPACE", ""))
        for file, line in places:
            path = Path(os.path.abspath(file))
            if path.is_file() and path.is_relative_to(repository):
                return path.relative_to(repository).as_posix(), line
        return None

    def _append(self, text: str) -> None:
        if not self._summary:
            return
        try:
            with open(self._summary, "a", encoding="utf-8") as page:
                page.write(text)
        except OSError as err:
            raise WriteError(
                f"the summary page {self._summary} cannot be written: {err.strerror}",
                hint="$GITHUB_STEP_SUMMARY names it; unset it where there is none.",
            ) from err


def _annotation(kind: str, title: str, lines: list[str], place: tuple[str, str] | None = None) -> str:
    """Return the command for an annotation; ``place``: file and line at which GitHub shows it, if any."""
    message = printable_lines("\n".join(lines))
    properties = {"title": title} | (dict(zip(("file", "line"), place, strict=True)) if place else {})
    spelled = ",".join(f"{name}={_escape(printable(value), ':,')}" for name, value in properties.items())
    return f"{kind} {spelled}::{_escape(message, '')}\n"


def _escape(text: str, also: str) -> str:
    """Return ``text`` with every character that would end a value as ``%XX``: GitHub's runner decodes it."""
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{also}" else c for c in text)

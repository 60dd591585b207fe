"""Reports for programs: one JSON document, with sizes in bytes and times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from memopt_cli.errors import MemoptError
from memopt_cli.records import Comparison, Equivalence, OptimizeResult, SelftestReport, to_data
from memopt_cli.report.interface import Answer
from memopt_cli.text.documents import json_text
from memopt_cli.text.spelling import on_command_line


class JsonReport:
    """JSON of the record of every command; a number that is not finite becomes ``null``."""

    def show(self, answer: Answer, stream: TextIO) -> None:
        stream.write(json_text(_document(answer)))

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Write nothing: output is one document, and whoever asked for ``files`` knows their paths."""

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        """Write a document that holds only the ``error`` and its hint."""
        stream.write(json_text({"error": on_command_line(error.message), "hint": on_command_line(error.hint)}))


def _document(answer: Answer) -> Any:
    match answer:
        case OptimizeResult():
            # Recorded steps are left out, which only --html and --snapshot show; stderr has the error that ended it.
            return to_data({name: getattr(answer, name) for name in ("header", "summary", "files", "use")})
        case SelftestReport():
            return {"holds": not answer.failed and not answer.interrupted, **to_data(answer)}
        case Comparison():
            return {"regression": bool(answer.exceeded), **to_data(answer)}
        case Equivalence():
            return {"passed": answer.passed, **to_data(answer)}
        case _:
            return to_data(answer)

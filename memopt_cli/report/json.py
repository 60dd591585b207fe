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

    def show(self, found: Answer, stream: TextIO) -> None:
        stream.write(json_text(_document(found)))

    def written(self, files: Sequence[str], stream: TextIO) -> None:
        """Write nothing: output is one document, and whoever asked for ``files`` knows their paths."""

    def refused(self, error: MemoptError, model: str, stream: TextIO) -> None:
        """Write a document with the ``error`` and its hint alone, as the other formats do."""
        stream.write(json_text({"error": on_command_line(error.message), "hint": on_command_line(error.hint)}))


def _document(found: Answer) -> Any:
    match found:
        case OptimizeResult():
            # Recorded steps are left out, which only --html and --snapshot show; stderr has the error that ended it.
            return to_data({name: getattr(found, name) for name in ("header", "summary", "files", "use")})
        case SelftestReport():
            return {"holds": not found.failed and not found.interrupted, **to_data(found)}
        case Comparison():
            return {"regression": bool(found.exceeded), **to_data(found)}
        case Equivalence():
            return {"passed": found.passed, **to_data(found)}
        case _:
            return to_data(found)

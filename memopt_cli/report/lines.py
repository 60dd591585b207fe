"""Text on its way to a terminal, a file or a log of a CI system."""

from __future__ import annotations

from typing import Any, TextIO

from memopt_cli.documents import no_commands


class LinesForPeople:
    """A stream none of whose lines a CI system takes for a command; for what is written whole lines at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(no_commands(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

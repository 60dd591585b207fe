"""Helpers shared by all text reports: tables, notes, and a stream that escapes what a CI system would run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TextIO

from rich.table import Table

from memopt_cli.inputs.spec_text import format_tensor
from memopt_cli.records import BUSY, FIRST_USED, DeviceEstimate, InputSpec
from memopt_cli.text.documents import COMMAND
from memopt_cli.text.units import format_bytes

_KEPT = 4096
"""Maximum number of characters of an unfinished line that are examined again when more of it is written."""


def inputs_warning(spec: InputSpec) -> str:
    """Return the end of a headline: a warning of guessed or remembered inputs in ``spec``; empty for typed inputs."""
    if not spec.is_guess and not spec.is_remembered:
        return ""
    sizes = "".join(f", {symbol}={size}" for symbol, size in spec.dims.items())
    inputs = ", ".join(map(format_tensor, spec.tensors)) + sizes
    if spec.is_remembered:
        return f"; the inputs are {spec.source}: {inputs} (`-i` gives others)"
    return f"; the inputs are a guess: {inputs} (`-i` gives yours)"


def choice_notes(notes: Iterable[str]) -> Iterator[str]:
    """Yield those of ``notes`` that say what memopt chose itself, for the lines below the headline."""
    yield from (note for note in notes if FIRST_USED in note)


def other_notes(notes: Iterable[str]) -> Iterator[str]:
    """Yield the ``notes`` that :func:`choice_notes` leaves out."""
    yield from (note for note in notes if FIRST_USED not in note)


def busy_notes(waited: Iterable[float]) -> Iterator[str]:
    """Yield a line that the machine was busy, if a share in ``waited``, of a step's time, exceeds :data:`BUSY`."""
    if (most := max(waited, default=0.0)) > BUSY:
        yield f"the machine was busy: steps waited for a processor {most:.0%} of their time, so times are rough"


def room_in_words(estimate: DeviceEstimate) -> str:
    """Return whether the step of ``estimate`` fits: ``it fits: 1.2 GiB reserved of 38.9 GiB``."""
    reserved, there = format_bytes(estimate.reserved_peak_bytes), format_bytes(estimate.memory_bytes)
    if estimate.fits and estimate.reserved_peak_bytes > estimate.memory_bytes:
        allocated = format_bytes(estimate.allocated_peak_bytes)
        return (
            f"it fits in {there}, but only after the allocator frees cached blocks ({allocated} allocated, {reserved} "
            "reserved)"
        )
    return f"{'it fits' if estimate.fits else 'it does not fit'}: {reserved} reserved of {there}"


def plain_table(*headings: str, names: Container[str] = (), words: Container[str] = ()) -> Table:
    """Return an empty table without lines or margins, whose columns are two spaces apart.

    Columns under ``names`` and ``words`` are aligned to the left, and the latter wrap; the others hold numbers.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        is_text = heading in names or heading in words
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading not in words)
    return table


class GuardedStream:
    """Stream that escapes commands of CI systems, such as ``::error``, even if written in pieces.

    ``spelled`` turns the options that a text names into the command line's spelling.
    """

    def __init__(self, stream: TextIO, spelled: Callable[[str], str]) -> None:
        self._stream, self._spelled = stream, spelled
        self._line = ""
        """Text of the current, unfinished line: ``:`` and then another ``:`` are a command only together."""

    def write(self, text: str) -> int:
        begun, whole = len(self._line), self._line + self._spelled(text)
        self._stream.write(COMMAND.sub(lambda found: found[0] + "\\" * (found.end() >= begun), whole)[begun:])
        self._line = whole[-_KEPT:].rpartition("\n")[2]
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def command(self, text: str) -> None:
        """Write a command to the CI system; ``text`` is the part after ``::``."""
        self._stream.write("::")
        self._line = "::"
        self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard(stream: TextIO | GuardedStream, spelled: Callable[[str], str] = str) -> GuardedStream:
    """Return ``stream`` as a :class:`GuardedStream`, unchanged if it is one already."""
    return stream if isinstance(stream, GuardedStream) else GuardedStream(stream, spelled)

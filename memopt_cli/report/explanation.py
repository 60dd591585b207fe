"""Sentences and tables of ``memopt explain``: why memory runs out, who holds it, and what would fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.table import Table

from memopt_cli.records import Explanation, Holder, to_data
from memopt_cli.report.lines import plain_table
from memopt_cli.text.paths import gathered
from memopt_cli.text.units import format_bytes, format_seconds

_LONGEST = 56
"""Most characters of a name."""
_SHOWN = 12
"""Most rows in a table."""


def headline(found: Explanation) -> Iterator[str]:
    """Yield how much memory the step of ``found`` needs, how much there is, and where it runs out."""
    if found.event:
        yield found.event
    if outcome := _outcome(found):
        yield outcome
    if found.asked_bytes:
        beyond = ", which alone is more than this step needs" * (0 < found.needed_bytes < found.asked_bytes)
        yield f"the error asked for {format_bytes(found.asked_bytes)} more{beyond}"
    if found.counted_as:
        yield found.counted_as
    if found.instant is not None and found.instant.op < 0:
        yield "memory runs out before the first operator runs"
    elif found.instant is not None:
        where = f" of {found.instant.module}" if found.instant.module else ""
        line = f", {_short(found.line)}" if found.line else ""
        yield f"memory runs out in {found.instant.phase}{where}, while {found.instant.name} runs{line}"
    if found.raised_at:
        yield f"the error was raised at {_short(found.raised_at)}"


def _outcome(found: Explanation) -> str:
    """Return a sentence on whether the step of ``found`` fits, and, after an error, whether the step explains it."""
    needed, there = format_bytes(found.needed_bytes), f"{format_bytes(found.limit_bytes)} ({found.limit})"
    has_failed = found.asked_bytes or found.event
    if has_failed and not found.limit_bytes:
        step = "" if found.header is None else f". This step needs about {needed}"
        return f"memory ran out, and the error does not say how much there was: say so with `--memory 16GiB`{step}"
    if found.header is None and not found.asked_bytes and found.event:
        return ""  # a process was killed, which says all
    if found.header is None:
        return f"tensors held {needed} of {there}"
    if found.instant is not None:
        return f"the step needs about {needed}, and there are {there}"
    if has_failed:
        return f"memory ran out, but this step alone does not fill it: it needs about {needed} of {there}"
    return f"the step fits: it needs about {needed}, and there are {there}"


def tables(found: Explanation) -> Iterator[Table]:
    """Yield the tables of ``found``: memory by category, by module and by line of code, and what would fit."""
    if found.breakdown is not None:
        parts = {name.removesuffix("_bytes"): size for name, size in to_data(found.breakdown).items()}
        yield _holders("held then", [Holder(name=name, nbytes=size) for name, size in parts.items() if size])
    if found.modules:
        held = gathered({holder.name: holder.nbytes for holder in found.modules})
        rows = [Holder(name=name, nbytes=nbytes) for name, nbytes in held.items()]
        yield _holders("activations of", [_named(row, "(the step)") for row in rows[:_SHOWN]])
    if lines := [_named(holder, "(no line is known)") for holder in found.lines[:_SHOWN]]:
        yield _holders("made at", lines)
    if found.suggestions:
        yield _suggestions(found)


def _named(holder: Holder, empty: str) -> Holder:
    return Holder(name=_short(holder.name) or empty, nbytes=holder.nbytes)


def _short(name: str) -> str:
    """Return ``name`` relative to the working directory if it lies there, cut to :data:`_LONGEST` characters."""
    if os.path.isabs(name) and name.startswith(here := os.getcwd() + os.sep):
        name = name.removeprefix(here)
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _holders(heading: str, holders: Sequence[Holder]) -> Table:
    table = plain_table(heading, "", names=[heading])
    for holder in holders:
        table.add_row(holder.name, format_bytes(holder.nbytes))
    return table


def _suggestions(found: Explanation) -> Table:
    table = plain_table("what fits", "predicted", "measured", "time", names=["what fits"])
    for said in found.suggestions:
        predicted = format_bytes(said.predicted_bytes) if said.predicted_bytes is not None else "–"
        measured = said.not_run if said.peak_bytes is None else format_bytes(said.peak_bytes)
        table.add_row(said.text, predicted, measured, "–" if said.seconds is None else format_seconds(said.seconds))
    return table


def remarks(found: Explanation) -> Iterator[str]:
    """Yield the command for each suggestion of ``found``, what was tried and does not fit, and notes."""
    yield from (f"for {said.text}: {said.command}" for said in found.suggestions)
    yield from found.refused
    yield from found.notes
    yield f"total time {format_seconds(found.spent_s)}"

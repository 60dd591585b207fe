"""Sentences and tables of ``memopt explain``: why memory runs out, who holds it, and what would fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.table import Table

from memopt_cli.records import Explanation, Holder, to_data
from memopt_cli.report.lines import plain_table
from memopt_cli.report.recommendation import settings
from memopt_cli.text.paths import gather_paths
from memopt_cli.text.units import format_apart, format_bytes, format_seconds

_MAX_NAME_LENGTH = 56
"""Maximum number of characters of a name."""
_SHOWN = 12
"""Maximum number of rows in a table."""


def headline(explanation: Explanation) -> Iterator[str]:
    """Yield the memory that the step of ``explanation`` needs, the memory there is, and where it runs out."""
    if explanation.event:
        yield explanation.event
    if outcome := _outcome(explanation):
        yield outcome
    if explanation.asked_bytes:
        exceeds_step = 0 < explanation.needed_bytes < explanation.asked_bytes
        remark = ", which alone is more than this step needs" if exceeds_step else ""
        yield f"the error asked for {format_bytes(explanation.asked_bytes)} more{remark}"
    if explanation.counted_as:
        yield explanation.counted_as
    if explanation.instant is not None and explanation.instant.op < 0:
        yield "memory runs out before the first operator runs"
    elif explanation.instant is not None:
        where = f" of {explanation.instant.module}" if explanation.instant.module else ""
        line = f", {_short_name(explanation.line)}" if explanation.line else ""
        yield f"memory runs out in {explanation.instant.phase}{where}, while {explanation.instant.name} runs{line}"
    if explanation.raised_at:
        yield f"the error was raised at {_short_name(explanation.raised_at)}"


def _outcome(explanation: Explanation) -> str:
    """Return a sentence on whether the step of ``explanation`` fits, and on whether that explains the error, if any."""
    limit, needed = format_apart(explanation.limit_bytes, explanation.needed_bytes)
    available = f"{limit} ({explanation.limit})"
    if explanation.header is None and explanation.event and not (explanation.asked_bytes and explanation.limit_bytes):
        return ""  # the event is the whole explanation, such as a process that was killed
    has_failed = explanation.asked_bytes or explanation.event
    if has_failed and not explanation.limit_bytes:
        step = "" if explanation.header is None else f". This step needs about {needed}"
        how = "add `--memory 16GiB`, or use the `--log` that explain_oom wrote"
        return f"memory ran out, and the error does not say how much there was: {how}{step}"
    if explanation.header is None:
        return f"in use: {needed} of {available}"
    if explanation.instant is not None:
        return f"the step needs about {needed}; available: {available}"
    if has_failed:
        return f"memory ran out, but this step alone fits: it needs about {needed} of {available}"
    return f"the step fits: it needs about {needed}; available: {available}"


def tables(explanation: Explanation) -> Iterator[Table]:
    """Yield the tables of ``explanation``: memory by category, by module and by line of code, and what would fit."""
    if explanation.breakdown is not None:
        parts = {name.removesuffix("_bytes"): size for name, size in to_data(explanation.breakdown).items()}
        heading = "held at the peak" if explanation.instant is None else "held then"
        yield _holders(heading, [Holder(name=name, nbytes=size) for name, size in parts.items() if size])
    if explanation.modules:
        held_bytes = gather_paths({holder.name: holder.nbytes for holder in explanation.modules})
        rows = [Holder(name=name, nbytes=nbytes) for name, nbytes in held_bytes.items()]
        yield _holders("activations of", [_with_short_name(row, "(the step)") for row in rows[:_SHOWN]])
    if lines := [_with_short_name(holder, "(no line is known)") for holder in explanation.lines[:_SHOWN]]:
        yield _holders("made at", lines)
    if explanation.suggestions:
        yield _suggestions(explanation)


def _with_short_name(holder: Holder, empty: str) -> Holder:
    return Holder(name=_short_name(holder.name) or empty, nbytes=holder.nbytes)


def _short_name(name: str) -> str:
    """Return ``name`` relative to the working directory if it is in it, cut to :data:`_MAX_NAME_LENGTH` characters."""
    if os.path.isabs(name) and name.startswith(here := os.getcwd() + os.sep):
        name = name.removeprefix(here)
    return name if len(name) <= _MAX_NAME_LENGTH else f"…{name[1 - _MAX_NAME_LENGTH :]}"


def _holders(heading: str, holders: Sequence[Holder]) -> Table:
    table = plain_table(heading, "", names=[heading])
    for holder in holders:
        table.add_row(holder.name, format_bytes(holder.nbytes))
    return table


def _suggestions(explanation: Explanation) -> Table:
    table = plain_table("what fits", "predicted", "measured", "time", names=["what fits"])
    for suggestion in explanation.suggestions:
        predicted = format_bytes(suggestion.predicted_bytes) if suggestion.predicted_bytes is not None else "–"
        measured = suggestion.not_run if suggestion.peak_bytes is None else format_bytes(suggestion.peak_bytes)
        table.add_row(
            suggestion.text,
            predicted,
            measured,
            "–" if suggestion.seconds is None else format_seconds(suggestion.seconds),
        )
    return table


def micro_batch_code(explanation: Explanation) -> Iterator[str]:
    """Yield the code to paste for micro-batches of ``explanation``, as ``memopt recommend-batch`` prints it."""
    for suggestion in explanation.suggestions:
        if suggestion.recommendation is not None:
            yield f"# {suggestion.text}"
            yield from settings(suggestion.recommendation, has_objective=False)


def remarks(explanation: Explanation) -> Iterator[str]:
    """Yield the command for each suggestion of ``explanation``, what was tried and does not fit, and notes."""
    yield from (f"for {suggestion.text}: {suggestion.command}" for suggestion in explanation.suggestions)
    yield from explanation.refused
    yield from explanation.notes
    yield f"total time {format_seconds(explanation.spent_s)}"

"""Sentences and table rows of ``memopt verify``, shared by all report formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from memopt_cli.records import Equivalence, Likeness, TensorGap
from memopt_cli.text.units import format_seconds

_SHOWN = 12
"""Maximum number of rows in a table."""

HEADINGS = ("tensor", "differs by")

_ALIKE: dict[Likeness, str] = {
    "to the bit": "the same bit for bit",
    "within noise": "as close as two runs of the reference are",
    "up to rounding": "the same up to rounding: within 1e-9 in float64",
    "as far as memopt can tell": "equal to half of the digits; float64 cannot tell more here",
}
_KINDS = {
    "outputs": "output",
    "inputs": "input",
    "gradients": "gradient",
    "buffers": "buffer",
    "hidden state": "state",
    "random numbers": "the random",
    "parameters after the update": "parameter",
}
"""Kind of effect -> how the names of its tensors begin."""


def headline(equivalence: Equivalence) -> str:
    """Return one sentence on whether the candidate of ``equivalence`` trains as the reference does."""
    both = f"{equivalence.candidate} trains as {equivalence.reference} does"
    if equivalence.passed:
        steps = f"{equivalence.steps} steps" if equivalence.steps > 1 else "one step"
        far = f", {equivalence.worst:.1g} apart at most" if equivalence.worst else ""
        mode = " in training mode" if equivalence.in_training_mode else ""
        return f"{both}: {steps}{mode}, {equivalence.compared} tensors each, {_ALIKE[equivalence.alike]}{far}"
    return f"{equivalence.candidate} does not train as {equivalence.reference} does"


def _first_difference(equivalence: Equivalence) -> str:
    step = f"in step {equivalence.differs_in_step} of {equivalence.steps}"
    if equivalence.failed:
        return f"{step} the candidate fails: {equivalence.failed}"
    return f"{step} {_describe_gap(equivalence.gaps[0])}" if equivalence.gaps else equivalence.hooks


def _describe_gap(gap: TensorGap) -> str:
    if gap.missing:
        return f"{gap.name} is missing in the {gap.missing}"
    return f"{gap.name} differs" + (f" by {gap.apart:.2g}" if math.isfinite(gap.apart) else "")


def location_lines(equivalence: Equivalence) -> Iterator[str]:
    """Yield the first difference in ``equivalence``, its module and the likely cause, if there is one."""
    if not equivalence.passed:
        yield _first_difference(equivalence)
    cause = equivalence.cause
    if cause is None:
        return
    if cause.module or cause.class_name:
        kind = f" ({cause.class_name})" if cause.class_name else ""
        yield f"first in: {cause.module or 'the model itself'}{kind}"
    yield f"likely cause: {cause.text}"


def rows(equivalence: Equivalence) -> list[tuple[str, str]]:
    """Return a row for each of the first differing tensors in ``equivalence``, and one with the number of others."""
    shown = [(gap.name, _distance(gap)) for gap in equivalence.gaps[:_SHOWN]]
    more = len(equivalence.gaps) - len(shown)
    return [*shown, (f"and {more} more", "")] if more > 0 else shown


def _distance(gap: TensorGap) -> str:
    if gap.missing:
        return f"missing in the {gap.missing}"
    return f"{gap.apart:.2g}" if math.isfinite(gap.apart) else "other values"


def remarks(equivalence: Equivalence) -> tuple[str, ...]:
    """Return the notes of ``equivalence``, and how long the comparison took."""
    return (*equivalence.notes, f"total time {format_seconds(equivalence.spent_s)}")


def faults(equivalence: Equivalence) -> dict[str, str]:
    """Describe the differences in ``equivalence``, by kind of effect; empty where there are none."""
    return {kind: _first_of(_gaps(equivalence, kind)) for kind in _KINDS} | {
        "hooks": equivalence.hooks,
        "the step": equivalence.failed,
    }


def differences(equivalence: Equivalence, kind: str) -> list[str]:
    """Return a line for each of the first tensors of ``kind`` that differ in ``equivalence``, with the count of others.

    The kind that differs first has the likely cause as well.
    """
    gaps = _gaps(equivalence, kind)
    lines = [_describe_gap(gap) for gap in gaps[:_SHOWN]]
    more = [f"and {len(gaps) - _SHOWN} more"] if len(gaps) > _SHOWN else []
    _, *cause = location_lines(equivalence)
    return [*lines, *more, *(cause if gaps and gaps[0] is equivalence.gaps[0] else [])]


def _gaps(equivalence: Equivalence, kind: str) -> list[TensorGap]:
    return [gap for gap in equivalence.gaps if kind in _KINDS and gap.name.startswith(_KINDS[kind])]


def _first_of(gaps: Sequence[TensorGap]) -> str:
    more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    return f"{_describe_gap(gaps[0])}{more}" if gaps else ""

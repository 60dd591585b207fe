"""Sentences and table rows of ``memopt verify``, shared by all report formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from memopt_cli.records import Equivalence, Likeness, TensorGap
from memopt_cli.text.units import format_seconds

_SHOWN = 12
"""Most rows in a table."""

HEADINGS = ("tensor", "differs by")

_ALIKE: dict[Likeness, str] = {
    "to the bit": "the same to the bit",
    "within noise": "as close as two runs of the reference are",
    "up to rounding": "the same up to rounding: within 1e-9 in float64",
    "as far as memopt can tell": "equal to half of the digits, which is as far as float64 can tell here",
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


def headline(found: Equivalence) -> str:
    """Return one sentence that says whether the candidate of ``found`` trains as the reference does."""
    both = f"{found.candidate} trains as {found.reference} does"
    if found.passed:
        far = f", {found.worst:.1g} apart at most" if found.worst else ""
        return f"{both}: {_steps(found)}, {found.compared} tensors each, {_ALIKE[found.alike]}{far}"
    return f"{found.candidate} does not train as {found.reference} does"


def _steps(found: Equivalence) -> str:
    return f"{found.steps} steps" if found.steps > 1 else "one step"


def _reason(found: Equivalence) -> str:
    """Return the first difference in ``found``, and the step in which it appears."""
    where = f"in step {found.differs_in_step} of {found.steps}"
    if found.failed:
        return f"{where} the candidate fails: {found.failed}"
    return f"{where} {_described(found.gaps[0])}" if found.gaps else found.hooks


def _described(gap: TensorGap) -> str:
    if gap.missing:
        return f"{gap.name} is missing in the {gap.missing}"
    return f"{gap.name} differs" + (f" by {gap.apart:.2g}" if math.isfinite(gap.apart) else "")


def where(found: Equivalence) -> Iterator[str]:
    """Yield the first difference in ``found``, its module and the likely cause; nothing if there is no difference."""
    if not found.passed:
        yield _reason(found)
    cause = found.cause
    if cause is None:
        return
    if cause.module or cause.class_name:
        kind = f" ({cause.class_name})" if cause.class_name else ""
        yield f"first in: {cause.module or 'the model itself'}{kind}"
    yield f"likely cause: {cause.text}"


def rows(found: Equivalence) -> list[tuple[str, str]]:
    """Return a row for each of the first tensors that differ in ``found``, and one that counts the others."""
    shown = [(gap.name, _apart(gap)) for gap in found.gaps[:_SHOWN]]
    more = len(found.gaps) - len(shown)
    return [*shown, (f"and {more} more", "")] if more > 0 else shown


def _apart(gap: TensorGap) -> str:
    if gap.missing:
        return f"missing in the {gap.missing}"
    return f"{gap.apart:.2g}" if math.isfinite(gap.apart) else "other values"


def remarks(found: Equivalence) -> tuple[str, ...]:
    """Return the notes of ``found``, and how long the comparison took."""
    return (*found.notes, f"total time {format_seconds(found.spent_s)}")


def faults(found: Equivalence) -> dict[str, str]:
    """Return kind of effect -> a sentence on its differences in ``found``: the first, and how many more; or ``""``."""
    kinds = {kind: [gap for gap in found.gaps if gap.name.startswith(start)] for kind, start in _KINDS.items()}
    return {kind: _first_of(gaps) for kind, gaps in kinds.items()} | {"hooks": found.hooks, "the step": found.failed}


def _first_of(gaps: Sequence[TensorGap]) -> str:
    more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    return f"{_described(gaps[0])}{more}" if gaps else ""

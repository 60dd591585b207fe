"""``memopt verify``: two trainings of one model, whoever arranged them, held against each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from memopt_cli.errors import StepError
from memopt_cli.measure.jobs import FollowJob
from memopt_cli.pipeline.causes import RANDOM, RANDOM_COMPILED, Pair, cause_of, of_failure, of_gaps
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.gaps import Apart, by_the_same_names, first_gap, half_of_digits, largest_gap
from memopt_cli.pipeline.prepare import Opening, Prepared, prepare_with_plan
from memopt_cli.progress import Ask, Progress
from memopt_cli.records import (
    Cause,
    Equivalence,
    EquivalenceRequest,
    Failure,
    Followed,
    ModelSource,
    StepFailed,
    TensorGap,
)

_TOLERANCE: Final = 1e-9
"""Relative difference in float64 up to which two steps are taken for the same, as for a plan in chunks."""
_EPSILONS: Final = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""Of autocast, whose matrices float64 would leave alone: it is not tried there."""


def verify(request: EquivalenceRequest, *, progress: Progress, ask: Ask | None = None) -> Equivalence:
    """Take the same steps of both, and compare all that they leave.  Raises :class:`MemoptError`."""
    started = time.monotonic()
    reference = _prepared(request, request.reference, progress, ask)
    like_it = replace(request, spec=reference.subject.spec)
    candidate = _prepared(like_it, request.candidate, progress, ask)
    found = compare_prepared(reference, candidate, request.steps, request.timeout_s, progress)
    return replace(found, spent_s=time.monotonic() - started)


def _prepared(request: EquivalenceRequest, source: ModelSource, progress: Progress, ask: Ask | None) -> Prepared:
    opening = Opening(source=source, spec=request.spec, settings=request.settings, timeout_s=request.timeout_s)
    return prepare_with_plan(opening, progress=progress, ask=ask)


def compare_prepared(
    reference: Prepared, candidate: Prepared, steps: int, timeout_s: float, progress: Progress
) -> Equivalence:
    """The same of two that are ready.

    Raises :class:`StepError` if they are not of one model, and :class:`MemoptError` if the reference cannot be run.
    """
    sides = _Sides(reference, candidate, timeout_s, progress)
    job = FollowJob(steps=steps)
    progress.stage("following the reference")
    once, again = sides.reference(job), sides.reference(job)
    progress.stage("following the candidate")
    other = sides.candidate(job)
    blank = Equivalence(
        reference=reference.subject.source.location,
        candidate=candidate.subject.source.location,
        alike="not",
        steps=steps,
        batch=reference.batch,
        compared=len(once.steps[0].left),
        precision=reference.subject.settings.precision,
        worst=0.0,
        notes=tuple(dict.fromkeys((*reference.notes, *candidate.notes))),
    )
    if not isinstance(other, Followed):
        raise_failure(other, "the candidate's step could not be run: ")
    if other.failed:
        cause = of_failure(other.steps[-1])
        return replace(blank, failed=other.failed, differs_in_step=len(other.steps), cause=cause)
    return _compared(sides, job, _Runs(once=once, again=again, other=other), blank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What the reference left, twice, and the candidate."""

    once: Followed
    again: Followed
    other: Followed


class _Sides:
    """The reference and the candidate, asked in subprocesses of their own."""

    def __init__(self, reference: Prepared, candidate: Prepared, timeout_s: float, progress: Progress) -> None:
        self._reference, self._candidate, self._timeout_s = reference, candidate, timeout_s
        self.progress = progress
        self.precision = reference.subject.settings.precision

    def reference(self, job: FollowJob) -> Followed:
        """Raises :class:`MemoptError` if it cannot be run."""
        found = self._ask(self._reference, job)
        if not isinstance(found, Followed):
            raise_failure(found, "the reference's step could not be run: ")
        if found.failed:
            raise StepError(f"the reference's step fails: {found.failed}")
        return found

    def candidate(self, job: FollowJob) -> Followed | Failure:
        """What it leaves, or why it leaves nothing."""
        return self._ask(self._candidate, job)

    def both(self, job: FollowJob) -> tuple[Followed, Followed] | Failure:
        """The same of each, by the same names."""
        one = self._ask(self._reference, job)
        other = self._ask(self._candidate, job) if isinstance(one, Followed) else one
        if isinstance(one, Followed) and isinstance(other, Followed):
            failed = one.failed or other.failed
            return StepFailed(message=failed) if failed else by_the_same_names(one, other)
        assert not isinstance(other, Followed)
        return other

    def _ask(self, prepared: Prepared, job: FollowJob) -> Followed | Failure:
        with prepared.session(self._timeout_s) as session:
            return session.ask(replace(job, plan=prepared.carried))


def _compared(sides: _Sides, job: FollowJob, runs: _Runs, blank: Equivalence) -> Equivalence:
    again, _ = by_the_same_names(runs.again, runs.again)
    once, other = by_the_same_names(runs.once, runs.other)
    hooks, repeated_hooks = _hooks(once, other)
    notes = (*blank.notes, *repeated_hooks)
    found = replace(blank, worst=largest_gap(once, other), hooks=hooks, notes=notes)
    apart = first_gap(once, other)
    if apart is None:
        return replace(found, alike="not" if hooks else "to the bit")
    noise = _noise(once, again)
    if noise and first_gap(once, other, noise) is None:
        return replace(found, alike="within noise")
    if noise or not apart.is_rounding:
        return _explained(sides, job, replace(found, gaps=apart.gaps), apart, noise)
    return _told_by_rounding(sides, job, found, once, other)


def _noise(once: Followed, again: Followed) -> float:
    """Twice the distance of two runs of the reference, as atomic sums on a GPU leave it.

    Raises :class:`StepError` where it is larger than such sums explain: nothing could be said of such a model.
    """
    apart = first_gap(once, again, half_of_digits(once, 0.0))
    if apart is not None:
        raise StepError(
            f"the reference's own step is not repeatable: {apart.gaps[0].name} differs between two runs from one seed",
            hint="Draw random numbers from PyTorch's, NumPy's or Python's global generators, which memopt seeds.",
        )
    return 2 * largest_gap(once, again)


def _told_by_rounding(
    sides: _Sides, job: FollowJob, found: Equivalence, once: Followed, other: Followed
) -> Equivalence:
    """Numbers alone differ: in float64 sums in another order agree to nine digits, and nothing else does."""
    epsilon = _EPSILONS.get(sides.precision, 0.0)
    if epsilon:
        why = "autocast leaves float64 alone"
    else:
        sides.progress.stage("comparing in float64")
        wide = replace(job, double=True)
        both = sides.both(wide)
        if isinstance(both, tuple):
            apart, cast = first_gap(*both, _TOLERANCE), replace(found, precision="fp64")
            if apart is None:
                return replace(cast, alike="up to rounding")
            if not other.is_compiled:
                return _explained(sides, wide, cast, apart, _TOLERANCE)
            why = "what a compiled model casts to float32 stays so"
        else:
            why = (
                f"it does not run in float64: {both.message}"
                if isinstance(both, StepFailed)
                else "float64 does not fit"
            )
    allowed = half_of_digits(once, epsilon)
    apart = first_gap(once, other, allowed)
    noted = replace(found, notes=(*found.notes, f"Judged by half of the digits, {allowed:.1g}: {why}."))
    if apart is None:
        return replace(noted, alike="as far as can be told")
    return _explained(sides, job, noted, apart, allowed)


def _explained(sides: _Sides, job: FollowJob, found: Equivalence, apart: Apart, tolerance: float) -> Equivalence:
    """Where they differ, looked at once more: which module, and why."""
    sides.progress.stage("looking for the cause")
    both = sides.both(replace(job, steps=apart.step + 1, watched=apart.step))
    cause = _cause(sides, job, both, apart.gaps, tolerance) if isinstance(both, tuple) else of_gaps(apart.gaps)
    return replace(found, alike="not", differs_in_step=apart.step + 1, gaps=apart.gaps, cause=cause)


def _cause(
    sides: _Sides, job: FollowJob, both: tuple[Followed, Followed], gaps: Sequence[TensorGap], tolerance: float
) -> Cause | None:
    one, other = both
    cause = cause_of(Pair(reference=one.steps[-1], candidate=other.steps[-1], gaps=gaps, tolerance=tolerance))
    if cause is not None and cause.text != RANDOM and not other.is_compiled:
        return cause
    if one.draws or other.draws:
        calm = sides.both(replace(job, in_eval=True))
        if isinstance(calm, tuple) and first_gap(*calm, max(tolerance, half_of_digits(calm[0], 0.0))) is None:
            text = RANDOM_COMPILED if other.is_compiled else RANDOM
            return replace(cause, text=text) if cause else Cause(module="", class_name="", text=text)
    return cause


def _hooks(reference: Followed, candidate: Followed) -> tuple[str, tuple[str, ...]]:
    """How the calls of hooks differ that both have; and notes, of those that are called once more."""
    for one, other in zip(reference.steps, candidate.steps, strict=True):
        ours, theirs = one.hooks, other.hooks
        shared = set(ours) & set(theirs)
        firsts = [[*dict.fromkeys(name for name in names if name in shared)] for names in (ours, theirs)]
        missing = next((name for name in ours if name not in shared), "")
        if missing:
            return f"the hook {missing} is never called", ()
        if firsts[0] != firsts[1]:
            return f"the hooks {', '.join(firsts[0])} are called in another order: {', '.join(firsts[1])}", ()
        more = next((name for name in shared if theirs.count(name) > ours.count(name)), "")
        if more:
            times = f"{theirs.count(more)} times a step instead of {ours.count(more)}"
            return "", (f"The hook {more} is called {times}, in recomputations too.",)
    return "", ()

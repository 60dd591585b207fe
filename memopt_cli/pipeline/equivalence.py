"""Compare two ways to train one model, step by step, for ``memopt verify``.

Both sides take the same steps from the same seed, and everything that the steps leave is compared: outputs, gradients,
buffers, state and parameters.  Differences that may be rounding are judged in float64, where sums in another order
agree to nine digits.  Where the sides differ, the step is repeated and watched to find the module and the likely cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from memopt_cli.errors import StepError
from memopt_cli.measure.jobs import FollowJob
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.fingerprints.causes import (
    EVAL,
    FROZEN,
    RANDOM,
    RANDOM_AGAIN,
    RANDOM_COMPILED,
    RANDOM_IN_BACKWARD,
    Pair,
    cause_of,
    of_failure,
    of_gaps,
)
from memopt_cli.pipeline.fingerprints.gaps import (
    Apart,
    by_the_same_names,
    first_gap,
    first_step_apart,
    half_of_digits,
    is_in_double,
    is_nowhere_finite,
    largest_gap,
    unsteady,
    with_others,
)
from memopt_cli.pipeline.fingerprints.steps import EPSILONS
from memopt_cli.pipeline.prepare import Opening, Prepared, prepare_with_plan
from memopt_cli.records import Cause, Equivalence, EquivalenceRequest, Failure, Followed, StepFailed, TensorGap
from memopt_cli.records.progress import Ask, Progress

_TOLERANCE: Final = 1e-9
"""Equal to :data:`memopt_cli.verification.effects.TOLERANCE`, whose module imports PyTorch."""


def verify(request: EquivalenceRequest, *, progress: Progress, ask: Ask | None = None) -> Equivalence:
    """Train the reference and the candidate of ``request`` for a few steps, and compare all that the steps leave.

    Raises :class:`MemoptError`.
    """
    started = time.monotonic()
    opening = Opening(
        source=replace(request.reference, keeps_compiled=True),
        spec=request.spec,
        settings=request.settings,
        timeout_s=request.timeout_s,
    )
    reference = prepare_with_plan(opening, progress=progress, ask=ask)
    like_it = replace(opening, source=replace(request.candidate, keeps_compiled=True), spec=reference.subject.spec)
    candidate = prepare_with_plan(like_it, progress=progress, ask=ask)
    found = compare_prepared(reference, candidate, request.steps)
    return replace(found, spent_s=time.monotonic() - started)


Known = dict[tuple[FollowJob, int], Followed | Failure]
"""Cache of a reference's steps, for comparisons with several candidates: job and number of its repetition -> answer."""


def compare_prepared(reference: Prepared, candidate: Prepared, steps: int, known: Known | None = None) -> Equivalence:
    """Compare the trainings of two prepared models over a number of ``steps``.

    ``known``: a cache of the reference's steps, shared with other comparisons.  Raises :class:`StepError` if the two
    are not the same model, and :class:`MemoptError` if the reference cannot be run.
    """
    sides = _Sides(reference, candidate, {} if known is None else known)
    sides.progress.stage("following the reference")
    job, once = sides.first(steps)
    again = sides.reference(job)
    sides.progress.stage("following the candidate")
    other = sides.candidate(job)
    blank = Equivalence(
        reference=reference.subject.source.location,
        candidate=candidate.subject.source.location,
        alike="not",
        steps=steps,
        batch=reference.batch,
        compared=0,
        precision=reference.subject.settings.precision,
        worst=0.0,
        notes=tuple(dict.fromkeys((*reference.notes, *candidate.notes, *reference.heard, *candidate.heard))),
    )
    if other.failed:
        cause = sides.cause_of_failure(job, other)
        return replace(blank, failed=other.failed, differs_in_step=len(other.steps), cause=cause)
    sides.unsteady = unsteady(*by_the_same_names(once, again))
    again, _ = sides.comparable(again, other)
    once, other = sides.comparable(once, other)
    return _Judge(sides=sides, job=job, once=once, again=again, other=other).compared(blank)


def _trained(found: Followed | Failure) -> Followed:
    found = required(found, "the reference's step could not be run: ")
    if found.failed:
        raise StepError(f"the reference's step fails: {found.failed}")
    gradients = [tensor for tensor in found.steps[0].effects if tensor.name.startswith("gradient of ")]
    if gradients and all(is_nowhere_finite(tensor) for tensor in gradients):
        raise StepError(
            "the reference's gradients are all NaN or infinity, so there is nothing to compare",
            hint="torch.autograd.set_detect_anomaly(True) in the script says where they come from.",
        )
    return found


class _Sides:
    """The reference and the candidate, each of which takes its steps in fresh subprocesses."""

    def __init__(self, reference: Prepared, candidate: Prepared, known: Known) -> None:
        self._reference, self._candidate = reference, candidate
        self._known, self._asked = known, Counter[FollowJob]()
        self.progress = reference.progress
        self.unsteady: Set[str] = frozenset()
        """Names of numbers and generators that differ between two runs of the reference."""
        self.precision = reference.subject.settings.precision

    def first(self, steps: int) -> tuple[FollowJob, Followed]:
        """Take the reference's first ``steps``; return the job that worked, for the candidate to repeat, and the steps.

        Hidden state is detached between steps only if the reference cannot be trained otherwise.  Raises
        :class:`MemoptError` if it cannot be trained at all.
        """
        job = FollowJob(steps=steps)
        found = self._ask(self._reference, job)
        if isinstance(found, Followed) and found.failed and len(found.steps) > 1:
            job = replace(job, detached=True)
            return job, self.reference(job)
        return job, _trained(found)

    def reference(self, job: FollowJob) -> Followed:
        """Take the steps of the reference.  Raises :class:`MemoptError` if it cannot be run."""
        return _trained(self._ask(self._reference, job))

    def candidate(self, job: FollowJob) -> Followed:
        """Take the steps of the candidate.  Raises :class:`MemoptError` if it cannot be run."""
        return required(self._ask(self._candidate, job), "the candidate's step could not be run: ")

    def cause_of_failure(self, job: FollowJob, failed: Followed) -> Cause | None:
        """Return why the last step in ``failed`` failed, by watching both sides as they take it once more."""
        self.progress.stage("looking for the cause")
        count = len(failed.steps)
        watched = replace(job, steps=count, watched=count - 1)
        one, other = self._ask(self._reference, watched), self._ask(self._candidate, watched)
        if not isinstance(one, Followed) or not isinstance(other, Followed) or not other.failed:
            one = other = failed
        pair = Pair(reference=one.steps[-1], candidate=other.steps[-1], gaps=(), tolerance=0.0)
        return of_failure(pair, is_first=count == 1)

    def both(self, job: FollowJob) -> tuple[Followed, Followed] | Failure:
        """Take the steps of both sides; return them with equal names for equal tensors, or the failure of one."""
        one = self._ask(self._reference, job)
        other = self._ask(self._candidate, job) if isinstance(one, Followed) else one
        if isinstance(one, Followed) and isinstance(other, Followed):
            failed = one.failed or other.failed
            return StepFailed(message=failed) if failed else self.comparable(one, other)
        assert not isinstance(other, Followed)
        return other

    def budgeted(self, job: FollowJob) -> tuple[Followed, Followed] | None:
        """Take the candidate's steps without PyTorch's memory budget, and with it; ``None`` if either fails."""
        found = [self._ask(self._candidate, each) for each in (replace(job, compiled="keeping all"), job)]
        one, other = (side if isinstance(side, Followed) and not side.failed else None for side in found)
        return None if one is None or other is None else (one, other)

    def comparable(self, one: Followed, other: Followed) -> tuple[Followed, Followed]:
        """Return both sides under the same names.  Raises :class:`StepError` if they are not of one model."""
        return with_others(*by_the_same_names(one, other), self.unsteady)

    def _ask(self, prepared: Prepared, job: FollowJob) -> Followed | Failure:
        job = replace(job, plan=prepared.carried)
        if prepared is self._candidate:
            return prepared.ask(job)
        at = job, self._asked[job]  # the second run shows whether the reference is repeatable
        self._asked[job] += 1
        if at not in self._known:
            self._known[at] = prepared.ask(job)
        return self._known[at]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """A judge of the results of both sides, which makes further runs where these results do not decide."""

    sides: _Sides
    job: FollowJob
    once: Followed
    """The reference's steps."""
    again: Followed
    """The reference's steps in a second run."""
    other: Followed
    """The candidate's steps."""

    def compared(self, blank: Equivalence) -> Equivalence:
        """Compare the steps, the hooks and the modes, and return the verdict."""
        hooks, notes = _hooks(self.once, self.other)
        found = replace(
            blank,
            compared=len(self.once.steps[0].effects),
            worst=largest_gap(self.once, self.other),
            hooks=hooks,
            notes=(*blank.notes, *notes),
        )
        judged = self._in_their_modes(self._judged(found))
        return replace(judged, alike="not") if hooks else judged

    def _judged(self, found: Equivalence) -> Equivalence:
        """Judge by the tensors that the steps left, without the hooks."""
        noise, apart = _noise(self.once, self.again), first_gap(self.once, self.other)
        if apart is None:
            return replace(found, alike="to the bit")
        apart = first_gap(self.once, self.other, noise)
        if apart is None:
            return replace(found, alike="within noise")
        if apart.is_rounding:
            return self._judged_by_rounding(found)
        return self._explained(self.job, found, apart, noise)

    def _judged_by_rounding(self, found: Equivalence) -> Equivalence:
        """Judge in float64 whether a difference is rounding: only sums in another order agree to nine digits there."""
        epsilon = EPSILONS.get(self.sides.precision, 0.0)
        least = half_of_digits(self.once, epsilon)
        both: tuple[Followed, Followed] | Failure = self.once, self.other
        wide = self.job
        if not is_in_double(self.once):
            self.sides.progress.stage("comparing in float64")
            wide = replace(wide, double=True)
            both = self.sides.both(wide)
        if not isinstance(both, tuple):
            said = f"it does not run in float64: {both.message}" if isinstance(both, StepFailed) else ""
            return self._judged_by_half(found, least, said or "float64 does not fit")
        apart, cast = first_gap(*both, _TOLERANCE), replace(found, precision="fp64")
        if apart is not None and self.other.is_compiled:
            return self._judged_by_half(found, least, "what a compiled model casts to float32 stays so")
        if apart is not None:
            return self._explained(wide, cast, apart, _TOLERANCE)
        if epsilon:
            return self._judged_by_half(found, least, "float64 agrees, and autocast leaves it alone")
        return replace(cast, alike="up to rounding", notes=(*found.notes, *self._far(least)))

    def _far(self, least: float) -> tuple[str, ...]:
        """Return a note if rounding alone makes the first step differ in more than half of the digits."""
        apart = first_step_apart(self.once, self.other)
        if apart <= least:
            return ()
        return (
            f"In float64 they agree; as stored they are {apart:.1g} apart, more than half of the digits: rounding tips "
            "choices, or one of them computes in a lower precision.",
        )

    def _judged_by_half(self, found: Equivalence, allowed: float, why: str) -> Equivalence:
        """Judge by whether half of the digits agree, since float64 does not decide; ``why`` says the reason."""
        noted = replace(found, notes=(*found.notes, f"Judged by half of the digits, {allowed:.1g}: {why}."))
        apart = first_gap(self.once, self.other, allowed)
        if apart is None:
            return replace(noted, alike="as far as memopt can tell")
        return self._explained(self.job, noted, apart, allowed)

    def _explained(self, job: FollowJob, found: Equivalence, apart: Apart, tolerance: float) -> Equivalence:
        """Run the differing step again while watching it, and name the module and the likely cause."""
        self.sides.progress.stage("looking for the cause")
        both = self.sides.both(replace(job, steps=apart.step + 1, watched=apart.step))
        cause = self._cause(job, both, apart.gaps, tolerance) if isinstance(both, tuple) else of_gaps(apart.gaps)
        return replace(found, alike="not", differs_in_step=apart.step + 1, gaps=apart.gaps, cause=cause)

    def _cause(
        self, job: FollowJob, both: tuple[Followed, Followed], gaps: Sequence[TensorGap], tolerance: float
    ) -> Cause | None:
        one, other = both
        if frozen := _frozen(one, other, gaps):
            return frozen
        cause = cause_of(Pair(reference=one.steps[-1], candidate=other.steps[-1], gaps=gaps, tolerance=tolerance))
        if job.mode == "as it came":
            return cause or _evaluated(one, other)
        if other.is_compiled:
            return self._drawn_when_compiled(job, gaps, tolerance) or cause
        if cause is not None:
            return cause
        drawn = _drawn_otherwise(gaps)
        if drawn is None or any(gap.name.startswith("the random") for gap in gaps):
            return drawn
        if one.draws or other.draws:
            calm = self.sides.both(replace(job, mode="eval"))
            if isinstance(calm, tuple) and self._agree(calm, tolerance):
                return drawn
        return None

    def _drawn_when_compiled(self, job: FollowJob, gaps: Sequence[TensorGap], tolerance: float) -> Cause | None:
        """Return how random numbers explain the gaps of a compiled candidate; ``None`` if they do not.

        The candidate is run again with the random numbers of the uncompiled model.  If it agrees then, the cause is
        harmless.  If only forward agrees, backward recomputes with other numbers, and the gradients are wrong: the two
        must not be confused, lest users dismiss wrong gradients as other random numbers.
        """
        alike = self.sides.both(replace(job, compiled="drawing alike"))
        if not isinstance(alike, tuple) or not (alike[0].draws or alike[1].draws):
            return None
        if self._agree(alike, tolerance):
            return Cause(text=RANDOM_IN_BACKWARD if self._errs_by_budget(job, gaps, tolerance) else RANDOM_COMPILED)
        apart = first_gap(*alike, self._allowed(alike, tolerance))
        assert apart is not None, "they do not agree"
        if not _is_backward_alone(apart.gaps):
            return None
        calm = self.sides.both(replace(job, mode="eval"))
        is_drawn = isinstance(calm, tuple) and self._agree(calm, tolerance)
        return Cause(text=RANDOM_IN_BACKWARD) if is_drawn else None

    def _errs_by_budget(self, job: FollowJob, gaps: Sequence[TensorGap], tolerance: float) -> bool:
        """Return whether a compiled candidate that draws other random numbers, hence ``gaps``, has wrong gradients too.

        Under a memory budget, PyTorch may recompute the operators that draw a compiled model's random numbers.
        """
        own = None if _is_backward_alone(gaps) else self.sides.budgeted(job)
        apart = None if own is None else first_gap(*own, self._allowed(own, tolerance))
        return _is_backward_alone(gaps if apart is None else apart.gaps)

    def _agree(self, both: tuple[Followed, Followed], tolerance: float) -> bool:
        return first_gap(*both, self._allowed(both, tolerance)) is None

    def _allowed(self, both: tuple[Followed, Followed], tolerance: float) -> float:
        return max(tolerance, half_of_digits(both[0], 0.0))

    def _in_their_modes(self, found: Equivalence) -> Equivalence:
        """Return ``found``, or if the sides came with different modules in eval mode, a comparison in these modes."""
        noted = replace(found, notes=(*found.notes, *_modes(self.once, self.other)))
        if not found.passed or set(self.once.evaluating) == set(self.other.evaluating):
            return noted
        self.sides.progress.stage("comparing in the modes that they came in")
        as_came = replace(self.job, mode="as it came")
        both = self.sides.both(as_came)
        if not isinstance(both, tuple):
            return noted
        allowed = max(half_of_digits(both[0], EPSILONS.get(self.sides.precision, 0.0)), 2 * found.worst)
        apart = first_gap(*both, allowed)
        return noted if apart is None else self._explained(as_came, noted, apart, allowed)


def _noise(once: Followed, again: Followed) -> float:
    """Return the noise of the reference: twice the largest gap between two of its runs, as from atomic sums on a GPU.

    Raises :class:`StepError` if the gap is larger than such sums explain, since no comparison would mean anything.
    """
    apart = first_gap(once, again, half_of_digits(once, 0.0))
    if apart is not None:
        raise StepError(
            f"the reference's own step is not repeatable: {apart.gaps[0].name} differs between two runs from one seed",
            hint="Draw random numbers from PyTorch's, NumPy's or Python's global generators, which memopt seeds.",
        )
    return 2 * largest_gap(once, again)


def _modes(reference: Followed, candidate: Followed) -> tuple[str, ...]:
    """Return a note on modules that were given in eval mode, in one of the two models or in parts of both."""
    ours, theirs = set(reference.evaluating), set(candidate.evaluating)
    different = sorted(ours ^ theirs)
    if different:
        whose = "the reference" if different[0] in ours else "the candidate"
        return (f"{different[0] or 'The model'} was given in eval mode only in {whose}.",)
    if ours and "" not in ours:
        return (
            f"{min(ours)} was given in eval mode, but models are compared in training mode: a function that makes "
            "a step (memopt_cli.Step) keeps modes.",
        )
    return ()


def _drawn_otherwise(gaps: Sequence[TensorGap]) -> Cause | None:
    """Return how other random numbers explain the gaps of a candidate that is not compiled; ``None`` if they do not.

    If the outputs differ, forward draws other numbers; if only gradients differ, recomputation in backward does.
    """
    if any(gap.name.startswith("output") for gap in gaps):
        return Cause(text=RANDOM)
    return Cause(text=RANDOM_AGAIN) if _is_backward_alone(gaps) else None


def _is_backward_alone(gaps: Sequence[TensorGap]) -> bool:
    """Return whether the outputs agree, but not all gradients that both sides have."""
    has_gradient = any(gap.name.startswith("gradient") and not gap.missing for gap in gaps)
    return has_gradient and not any(gap.name.startswith("output") for gap in gaps)


def _frozen(reference: Followed, candidate: Followed, gaps: Sequence[TensorGap]) -> Cause | None:
    """Return the first parameter that is frozen only in the candidate, as the cause, if the outputs agree."""
    if any(gap.name.startswith("output") for gap in gaps):
        return None
    alone = {f"gradient of {name}" for name in set(candidate.frozen) - set(reference.frozen)}
    name = next((gap.name for gap in gaps if gap.name in alone and gap.missing == "candidate"), "")
    return Cause(module=name.removeprefix("gradient of "), text=FROZEN) if name else None


def _evaluated(reference: Followed, candidate: Followed) -> Cause:
    """Return the outermost module that one of them has in eval mode as the cause."""
    first = min(set(reference.evaluating) ^ set(candidate.evaluating))
    whose = "reference" if first in reference.evaluating else "candidate"
    return Cause(module=first, text=EVAL.format(whose))


def _hooks(reference: Followed, candidate: Followed) -> tuple[str, tuple[str, ...]]:
    """Return how calls of the shared hooks differ (empty if not), and notes on hooks that recomputation calls again."""
    notes: dict[str, None] = {}
    for one, other in zip(reference.steps, candidate.steps, strict=True):
        ours, theirs = one.hooks, other.hooks
        shared = set(ours) & set(theirs)
        firsts = [[*dict.fromkeys(name for name in names if name in shared)] for names in (ours, theirs)]
        missing = next((name for name in ours if name not in shared), "")
        if missing:
            return f"the hook {missing} is never called", ()
        if firsts[0] != firsts[1]:
            return f"the hooks {', '.join(firsts[0])} are called in another order: {', '.join(firsts[1])}", ()
        for name in firsts[0]:
            times = f"called {theirs.count(name)} times a step instead of {ours.count(name)}"
            if theirs.count(name) < ours.count(name):
                return f"the hook {name} is {times}", ()
            if theirs.count(name) > ours.count(name):
                notes[f"The hook {name} is {times}, in recomputations too."] = None
    return "", (*notes,)[:1]

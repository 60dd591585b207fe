"""Comparing two ways to train one model, step by step, for ``memopt verify``.

Both sides take the same steps from the same seed, and everything that the steps leave is compared: outputs, gradients,
buffers, state and parameters.  Differences that may be rounding are judged in float64, where the order of a sum
changes it only in the tenth digit.  Where the sides differ, the step is repeated and watched to find the module and the
likely cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from memopt_cli.errors import StepError
from memopt_cli.measure.jobs import FollowJob
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.fingerprints.causes import (
    DRAWS,
    DRAWS_COMPILED,
    DRAWS_IN_BACKWARD,
    FREEZING,
    REDRAWS,
    Pair,
    cause_in_backward,
    cause_of,
    cause_of_failure,
    cause_of_gaps,
    eval_text,
)
from memopt_cli.pipeline.fingerprints.gaps import (
    FirstDifference,
    first_difference,
    half_of_digits,
    is_in_double,
    is_nowhere_finite,
    largest_gap,
    largest_gap_of_first_step,
    rename_notes,
    unsteady_names,
    with_equal_names,
    with_shared_values,
)
from memopt_cli.pipeline.fingerprints.imports import import_notes
from memopt_cli.pipeline.fingerprints.steps import EPSILONS
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, import_libraries, prepare_without_libraries
from memopt_cli.records import (
    STEP,
    TOLERANCE,
    Cause,
    Equivalence,
    EquivalenceRequest,
    Failure,
    FollowedSteps,
    StepFailed,
    TensorGap,
)
from memopt_cli.records.progress import Ask, Progress


def verify(request: EquivalenceRequest, *, progress: Progress, ask: Ask | None = None) -> Equivalence:
    """Train the reference and the candidate of ``request`` for a few steps, and compare all that the steps leave."""
    started = time.monotonic()
    load_request = LoadRequest(
        source=replace(request.reference, keeps_compiled=True),
        spec=request.spec,
        settings=request.settings,
        timeout_s=request.timeout_s,
    )
    reference = prepare_without_libraries(load_request, progress=progress, ask=ask)
    # Two checkouts have modules of one name: the reference imports them from the first of the code paths, the candidate
    # from the last.
    trust = replace(request.candidate.trust, code_paths=request.candidate.trust.code_paths[::-1])
    source = replace(request.candidate, keeps_compiled=True, trust=trust)
    candidate_request = replace(load_request, source=source, spec=reference.subject.spec)
    candidate = prepare_without_libraries(candidate_request, progress=progress, ask=ask)
    import_libraries(reference, [name for name in reference.facts.libraries if name in candidate.facts.libraries])
    comparison = compare_prepared(reference, candidate, request.steps)
    return replace(comparison, spent_s=time.monotonic() - started)


StepCache = dict[tuple[FollowJob, int], FollowedSteps | Failure]
"""Cache of a reference's steps, for comparisons with several candidates: job and number of its repetition -> answer."""


def compare_prepared(
    reference: PreparedModel, candidate: PreparedModel, steps: int, cache: StepCache | None = None
) -> Equivalence:
    """Compare the trainings of two prepared models over a number of ``steps``.

    ``cache``: a cache of the reference's steps, shared with other comparisons.  Raises :class:`StepError` if the two
    are not the same model, and :class:`MemoptError` if the reference cannot be run.
    """
    sides = _Sides(reference, candidate, {} if cache is None else cache)
    sides.progress.stage("following the reference")
    job, first_run = sides.run_first(steps)
    second_run = sides.run_reference(job)
    sides.progress.stage("following the candidate")
    candidate_run = sides.run_candidate(job)
    comparison = Equivalence(
        reference=reference.subject.source.location,
        candidate=candidate.subject.source.location,
        alike="not",
        steps=steps,
        batch=reference.batch,
        compared=0,
        in_training_mode=reference.facts.format != STEP,
        precision=reference.subject.settings.precision,
        worst=0.0,
        notes=tuple(dict.fromkeys((*reference.notes, *candidate.notes, *reference.messages, *candidate.messages))),
    )
    imports = import_notes(comparison.reference, comparison.candidate, first_run, candidate_run)
    comparison = replace(comparison, notes=(*comparison.notes, *imports))
    if candidate_run.failed:
        cause = sides.cause_of_failure(job, candidate_run)
        return replace(comparison, failed=candidate_run.failed, differs_in_step=len(candidate_run.steps), cause=cause)
    comparison = replace(comparison, notes=(*comparison.notes, *rename_notes(first_run, candidate_run)))
    sides.unsteady_names = unsteady_names(*with_equal_names(first_run, second_run))
    second_run, _ = sides.with_common_names(second_run, candidate_run)
    first_run, candidate_run = sides.with_common_names(first_run, candidate_run)
    return _Judge(
        sides=sides, job=job, first_run=first_run, repeated_run=second_run, candidate_run=candidate_run
    ).judge(comparison)


def _require_trained(answer: FollowedSteps | Failure) -> FollowedSteps:
    answer = require_answer(answer, "the reference's step could not be run: ")
    if answer.failed:
        raise StepError(f"the reference's step fails: {answer.failed}")
    gradients = [tensor for tensor in answer.steps[0].effects if tensor.name.startswith("gradient of ")]
    if gradients and all(is_nowhere_finite(tensor) for tensor in gradients):
        raise StepError(
            "the reference's gradients are all NaN or infinity, so there is nothing to compare",
            hint="torch.autograd.set_detect_anomaly(True) in the script shows where they come from.",
        )
    return answer


class _Sides:
    """The reference and the candidate; each takes its steps in fresh subprocesses."""

    def __init__(self, reference: PreparedModel, candidate: PreparedModel, cache: StepCache) -> None:
        self._reference, self._candidate = reference, candidate
        self._cache, self._counts = cache, Counter[FollowJob]()
        self.progress = reference.progress
        self.unsteady_names: Set[str] = frozenset()
        """Names of numbers and generators that differ between two runs of the reference."""
        self.precision = reference.subject.settings.precision

    def run_first(self, steps: int) -> tuple[FollowJob, FollowedSteps]:
        """Take the reference's first ``steps``; return the job that worked, for the candidate to repeat, and the steps.

        Hidden state is detached between steps only if the reference cannot be trained otherwise.  Raises
        :class:`MemoptError` if it cannot be trained at all.
        """
        job = FollowJob(steps=steps)
        answer = self._ask(self._reference, job)
        if isinstance(answer, FollowedSteps) and answer.failed and len(answer.steps) > 1:
            job = replace(job, detached=True)
            return job, self.run_reference(job)
        return job, _require_trained(answer)

    def run_reference(self, job: FollowJob) -> FollowedSteps:
        """Take the steps of the reference.  Raises :class:`MemoptError` if it cannot be run."""
        return _require_trained(self._ask(self._reference, job))

    def run_candidate(self, job: FollowJob) -> FollowedSteps:
        """Take the steps of the candidate.  Raises :class:`MemoptError` if it cannot be run."""
        return require_answer(self._ask(self._candidate, job), "the candidate's step could not be run: ")

    def cause_of_failure(self, job: FollowJob, failed_run: FollowedSteps) -> Cause | None:
        """Return why the last step in ``failed_run`` failed, by watching both sides as they take it once more."""
        self.progress.stage("looking for the cause")
        count = len(failed_run.steps)
        watched = replace(job, steps=count, watched_step=count - 1)
        reference_run, candidate_run = self._ask(self._reference, watched), self._ask(self._candidate, watched)
        if (
            not isinstance(reference_run, FollowedSteps)
            or not isinstance(candidate_run, FollowedSteps)
            or not candidate_run.failed
        ):
            reference_run = candidate_run = failed_run
        pair = Pair(reference=reference_run.steps[-1], candidate=candidate_run.steps[-1], gaps=(), tolerance=0.0)
        return cause_of_failure(pair, is_first=count == 1)

    def run_both(self, job: FollowJob) -> tuple[FollowedSteps, FollowedSteps] | Failure:
        """Take the steps of both sides; return them with equal names for equal tensors, or the failure of one."""
        reference_run = self._ask(self._reference, job)
        candidate_run = self._ask(self._candidate, job) if isinstance(reference_run, FollowedSteps) else reference_run
        if isinstance(reference_run, FollowedSteps) and isinstance(candidate_run, FollowedSteps):
            error = reference_run.failed or candidate_run.failed
            return StepFailed(message=error) if error else self.with_common_names(reference_run, candidate_run)
        assert not isinstance(candidate_run, FollowedSteps)
        return candidate_run

    def run_budgeted(self, job: FollowJob) -> tuple[FollowedSteps, FollowedSteps] | None:
        """Take the candidate's steps without PyTorch's memory budget, and with it; ``None`` if either fails."""
        answers = [self._ask(self._candidate, each) for each in (replace(job, compiled="no recomputation"), job)]
        without_budget, with_budget = (
            answer if isinstance(answer, FollowedSteps) and not answer.failed else None for answer in answers
        )
        return None if without_budget is None or with_budget is None else (without_budget, with_budget)

    def with_common_names(
        self, reference_run: FollowedSteps, candidate_run: FollowedSteps
    ) -> tuple[FollowedSteps, FollowedSteps]:
        """Return both sides under the same names.  Raises :class:`StepError` if they are not of one model."""
        return with_shared_values(*with_equal_names(reference_run, candidate_run), self.unsteady_names)

    def _ask(self, prepared: PreparedModel, job: FollowJob) -> FollowedSteps | Failure:
        job = replace(job, plan=prepared.carried)
        if prepared is self._candidate:
            return prepared.ask(job)
        key = job, self._counts[job]  # the second run shows whether the reference is repeatable
        self._counts[job] += 1
        if key not in self._cache:
            self._cache[key] = prepared.ask(job)
        return self._cache[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """A judge of the results of both sides, which makes further runs where these results do not decide."""

    sides: _Sides
    job: FollowJob
    first_run: FollowedSteps
    """Reference's steps."""
    repeated_run: FollowedSteps
    """Reference's steps in a second run."""
    candidate_run: FollowedSteps
    """Candidate's steps."""

    def judge(self, blank_comparison: Equivalence) -> Equivalence:
        """Compare the steps, the hooks and the modes, and return the verdict."""
        hooks, notes = _compare_hooks(self.first_run, self.candidate_run)
        comparison = replace(
            blank_comparison,
            compared=len(self.first_run.steps[0].effects),
            worst=largest_gap(self.first_run, self.candidate_run),
            hooks=hooks,
            notes=(*blank_comparison.notes, *notes),
        )
        verdict = self._judge_in_own_modes(self._judge_effects(comparison))
        return replace(verdict, alike="not") if hooks else verdict

    def _judge_effects(self, comparison: Equivalence) -> Equivalence:
        """Judge by the tensors that the steps left, without the hooks."""
        noise, difference = (
            _noise(self.first_run, self.repeated_run),
            first_difference(self.first_run, self.candidate_run),
        )
        if difference is None:
            return replace(comparison, alike="to the bit")
        difference = first_difference(self.first_run, self.candidate_run, noise)
        if difference is None:
            return replace(comparison, alike="within noise")
        if difference.is_rounding:
            return self._judge_in_float64(comparison)
        return self._explain(self.job, comparison, difference, noise)

    def _judge_in_float64(self, comparison: Equivalence) -> Equivalence:
        """Judge in float64 whether a difference is rounding: there, sums in a different order agree to nine digits."""
        epsilon = EPSILONS.get(self.sides.precision, 0.0)
        half_gap = half_of_digits(self.first_run, epsilon)
        runs: tuple[FollowedSteps, FollowedSteps] | Failure = self.first_run, self.candidate_run
        job = self.job
        if not is_in_double(self.first_run):
            self.sides.progress.stage("comparing in float64")
            job = replace(job, double=True)
            runs = self.sides.run_both(job)
        if not isinstance(runs, tuple):
            error = f"it does not run in float64: {runs.message}" if isinstance(runs, StepFailed) else ""
            return self._judge_by_half(comparison, half_gap, error or "float64 does not fit")
        difference = first_difference(*runs, TOLERANCE)
        in_float64 = replace(comparison, precision="fp64")
        if difference is not None and self.candidate_run.is_compiled:
            return self._judge_by_half(comparison, half_gap, "a compiled model still casts to float32 inside")
        if difference is not None:
            return self._explain(job, in_float64, difference, TOLERANCE)
        if epsilon:
            return self._judge_by_half(comparison, half_gap, "float64 agrees, and autocast does not change float64")
        return replace(in_float64, alike="up to rounding", notes=(*comparison.notes, *self._rounding_notes(half_gap)))

    def _rounding_notes(self, half_gap: float) -> tuple[str, ...]:
        """Return a note if rounding alone makes the first step differ in more than half of the digits."""
        gap = largest_gap_of_first_step(self.first_run, self.candidate_run)
        if gap <= half_gap:
            return ()
        return (
            f"In float64 the two agree. As stored, they differ by {gap:.1g}, more than half of the digits: rounding "
            "changes choices, or one of the two computes in a lower precision.",
        )

    def _judge_by_half(self, comparison: Equivalence, allowed: float, reason: str) -> Equivalence:
        """Judge by whether half of the digits agree, since float64 does not decide, for ``reason``."""
        noted_comparison = replace(
            comparison, notes=(*comparison.notes, f"Judged by half of the digits, {allowed:.1g}: {reason}.")
        )
        difference = first_difference(self.first_run, self.candidate_run, allowed)
        if difference is None:
            return replace(noted_comparison, alike="as far as memopt can tell")
        return self._explain(self.job, noted_comparison, difference, allowed)

    def _explain(
        self, job: FollowJob, comparison: Equivalence, difference: FirstDifference, tolerance: float
    ) -> Equivalence:
        """Run the differing step again while watching it, and name the module and the likely cause."""
        self.sides.progress.stage("looking for the cause")
        runs = self.sides.run_both(replace(job, steps=difference.step + 1, watched_step=difference.step))
        cause = (
            self._find_cause(job, runs, difference.gaps, tolerance)
            if isinstance(runs, tuple)
            else cause_of_gaps(difference.gaps)
        )
        return replace(comparison, alike="not", differs_in_step=difference.step + 1, gaps=difference.gaps, cause=cause)

    def _find_cause(
        self, job: FollowJob, runs: tuple[FollowedSteps, FollowedSteps], gaps: Sequence[TensorGap], tolerance: float
    ) -> Cause | None:
        reference_run, candidate_run = runs
        if frozen := _cause_by_freezing(reference_run, candidate_run, gaps):
            return frozen
        pair = Pair(
            reference=reference_run.steps[-1], candidate=candidate_run.steps[-1], gaps=gaps, tolerance=tolerance
        )
        cause = cause_of(pair)
        if job.mode == "as saved":
            return cause or _cause_by_mode(reference_run, candidate_run)
        if candidate_run.is_compiled:
            return self._cause_by_compiled_drawing(job, gaps, tolerance) or cause
        if cause is not None:
            return cause
        in_backward = cause_in_backward(pair) if _is_backward_alone(gaps) else None
        if in_backward and not pair.candidate.draws_in_backward:
            return in_backward
        drawing = _cause_by_drawing(gaps)
        if drawing is None or any(gap.name.startswith("the random") for gap in gaps):
            return drawing
        if reference_run.draws or candidate_run.draws:
            eval_runs = self.sides.run_both(replace(job, mode="eval"))
            if isinstance(eval_runs, tuple) and self._agree(eval_runs, tolerance):
                return drawing
        return in_backward

    def _cause_by_compiled_drawing(self, job: FollowJob, gaps: Sequence[TensorGap], tolerance: float) -> Cause | None:
        """Return the explanation of a compiled candidate's gaps by random numbers; ``None`` if there is none.

        The candidate is run again with the random numbers of the uncompiled model.  If it agrees then, the cause is
        harmless.  If only forward agrees, backward recomputes with other numbers, and the gradients are wrong: the two
        must not be confused, lest users dismiss wrong gradients as different random numbers.
        """
        runs = self.sides.run_both(replace(job, compiled="same random numbers"))
        if not isinstance(runs, tuple) or not (runs[0].draws or runs[1].draws):
            return None
        if self._agree(runs, tolerance):
            return Cause(text=DRAWS_IN_BACKWARD if self._has_wrong_gradients(job, gaps, tolerance) else DRAWS_COMPILED)
        difference = first_difference(*runs, self._allowed_difference(runs, tolerance))
        assert difference is not None, "runs that do not agree have a first difference"
        if not _is_backward_alone(difference.gaps):
            return None
        eval_runs = self.sides.run_both(replace(job, mode="eval"))
        is_drawn = isinstance(eval_runs, tuple) and self._agree(eval_runs, tolerance)
        return Cause(text=DRAWS_IN_BACKWARD) if is_drawn else None

    def _has_wrong_gradients(self, job: FollowJob, gaps: Sequence[TensorGap], tolerance: float) -> bool:
        """Return whether a compiled candidate whose random numbers differ, hence ``gaps``, has wrong gradients too.

        Under a memory budget, PyTorch may recompute the operators that make a compiled model's random numbers.
        """
        runs = None if _is_backward_alone(gaps) else self.sides.run_budgeted(job)
        difference = None if runs is None else first_difference(*runs, self._allowed_difference(runs, tolerance))
        return _is_backward_alone(gaps if difference is None else difference.gaps)

    def _agree(self, runs: tuple[FollowedSteps, FollowedSteps], tolerance: float) -> bool:
        return first_difference(*runs, self._allowed_difference(runs, tolerance)) is None

    def _allowed_difference(self, runs: tuple[FollowedSteps, FollowedSteps], tolerance: float) -> float:
        return max(tolerance, half_of_digits(runs[0], 0.0))

    def _judge_in_own_modes(self, comparison: Equivalence) -> Equivalence:
        """Return ``comparison``; if the sides came with different modules in eval mode, compare them in these modes."""
        noted_comparison = replace(
            comparison, notes=(*comparison.notes, *_mode_notes(self.first_run, self.candidate_run))
        )
        if not comparison.passed or set(self.first_run.evaluating) == set(self.candidate_run.evaluating):
            return noted_comparison
        self.sides.progress.stage("comparing in the modes in which they were given")
        own_modes_job = replace(self.job, mode="as saved")
        runs = self.sides.run_both(own_modes_job)
        if not isinstance(runs, tuple):
            return noted_comparison
        allowed = max(half_of_digits(runs[0], EPSILONS.get(self.sides.precision, 0.0)), 2 * comparison.worst)
        difference = first_difference(*runs, allowed)
        return (
            noted_comparison
            if difference is None
            else self._explain(own_modes_job, noted_comparison, difference, allowed)
        )


def _noise(first_run: FollowedSteps, second_run: FollowedSteps) -> float:
    """Return the noise of the reference: twice the largest gap between two of its runs (atomic sums on a GPU vary).

    Raises :class:`StepError` if the gap is larger than such sums explain, since no comparison would mean anything.
    """
    difference = first_difference(first_run, second_run, half_of_digits(first_run, 0.0))
    if difference is not None:
        raise StepError(
            f"the reference's own step is not repeatable: {difference.gaps[0].name} differs between two runs from one "
            "seed",
            hint="Draw random numbers from PyTorch's, NumPy's or Python's global generators, which memopt seeds.",
        )
    return 2 * largest_gap(first_run, second_run)


def _mode_notes(reference: FollowedSteps, candidate: FollowedSteps) -> tuple[str, ...]:
    """Return a note on modules that were given in eval mode, in one of the two models or in parts of both."""
    reference_paths, candidate_paths = set(reference.evaluating), set(candidate.evaluating)
    differing = sorted(reference_paths ^ candidate_paths)
    if differing:
        side = "the reference" if differing[0] in reference_paths else "the candidate"
        return (f"{differing[0] or 'The model'} was given in eval mode only in {side}.",)
    if reference_paths and "" not in reference_paths:
        return (
            f"{min(reference_paths)} was given in eval mode, but models are compared in training mode. If you train it "
            "in eval mode, compare functions that make a step (memopt_cli.Step), which keep the modes.",
        )
    return ()


def _cause_by_drawing(gaps: Sequence[TensorGap]) -> Cause | None:
    """Return the explanation of an eager candidate's gaps by different random numbers; ``None`` if there is none.

    If the outputs differ, forward uses other numbers; if only gradients differ, recomputation in backward does.
    """
    if any(gap.name.startswith("output") for gap in gaps):
        return Cause(text=DRAWS)
    return Cause(text=REDRAWS) if _is_backward_alone(gaps) else None


def _is_backward_alone(gaps: Sequence[TensorGap]) -> bool:
    """Return whether the outputs agree, but not all gradients that both sides have."""
    has_gradient = any(gap.name.startswith("gradient") and not gap.missing for gap in gaps)
    return has_gradient and not any(gap.name.startswith("output") for gap in gaps)


def _cause_by_freezing(reference: FollowedSteps, candidate: FollowedSteps, gaps: Sequence[TensorGap]) -> Cause | None:
    """Return the first parameter that is frozen only in the candidate, as the cause, if the outputs agree."""
    if any(gap.name.startswith("output") for gap in gaps):
        return None
    names = {f"gradient of {name}" for name in set(candidate.frozen) - set(reference.frozen)}
    name = next((gap.name for gap in gaps if gap.name in names and gap.missing == "candidate"), "")
    return Cause(module=name.removeprefix("gradient of "), text=FREEZING) if name else None


def _cause_by_mode(reference: FollowedSteps, candidate: FollowedSteps) -> Cause:
    """Return the outermost module that one of them has in eval mode as the cause."""
    path = min(set(reference.evaluating) ^ set(candidate.evaluating))
    side = "reference" if path in reference.evaluating else "candidate"
    return Cause(module=path, text=eval_text(side))


def _compare_hooks(reference: FollowedSteps, candidate: FollowedSteps) -> tuple[str, tuple[str, ...]]:
    """Return the differences in calls of shared hooks, and notes on hooks that recomputation calls once more."""
    notes: dict[str, None] = {}
    for reference_step, candidate_step in zip(reference.steps, candidate.steps, strict=True):
        reference_calls, candidate_calls = reference_step.hooks, candidate_step.hooks
        shared = set(reference_calls) & set(candidate_calls)
        orders = [
            [*dict.fromkeys(name for name in names if name in shared)] for names in (reference_calls, candidate_calls)
        ]
        missing = next((name for name in reference_calls if name not in shared), "")
        if missing:
            return f"the hook {missing} is never called", ()
        if orders[0] != orders[1]:
            return f"the hooks {', '.join(orders[0])} are called in a different order: {', '.join(orders[1])}", ()
        for name in orders[0]:
            times = f"called {candidate_calls.count(name)} times per step instead of {reference_calls.count(name)}"
            if candidate_calls.count(name) < reference_calls.count(name):
                return f"the hook {name} is {times}", ()
            if candidate_calls.count(name) > reference_calls.count(name):
                notes[f"The hook {name} is {times}, in recomputations too."] = None
    return "", (*notes,)[:1]

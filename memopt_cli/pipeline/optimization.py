"""``memopt optimize``: load, measure, search, verify; what was found is kept, and the rest follows."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import MeasurementError, NothingFitsError, OptionError, Terminated, UsageError
from memopt_cli.measure.jobs import Data, Traced
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.batch_probes import SESSION_LOST, replaceable
from memopt_cli.pipeline.climb import Climb
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.goal import GoalSearch, budget_bytes, check_pick
from memopt_cli.pipeline.kept import Kept
from memopt_cli.pipeline.narrowing import agreeing
from memopt_cli.pipeline.prepare import Prepared, opening_of, prepare
from memopt_cli.pipeline.profiling import record_step
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.pipeline.summary import Findings
from memopt_cli.pipeline.verification import MeasuredSteps, verified, verified_by_fingerprints
from memopt_cli.plan.interface import CountedPlan, ModuleTree, NotTried, Probes
from memopt_cli.plan.planner import Planner
from memopt_cli.plan.policy import Resolved, Selection, chosen, resolve
from memopt_cli.plan.targets import asked_for, left_out, outermost
from memopt_cli.progress import Ask, Progress
from memopt_cli.records import (
    Counted,
    Failure,
    Fingerprint,
    LevelRow,
    Measurement,
    OptimizeRequest,
    OptimizeResult,
    Outlook,
    OutOfMemory,
    ParetoPoint,
    Plan,
    SearchGoal,
    SearchOptions,
    StepFailed,
    StepTrace,
    Verification,
    describe,
)
from memopt_cli.units import format_bytes
from memopt_cli.write import check_targets, output_paths

_SEARCH_S, _SEARCH_STEPS = 10, 10
"""A search for levels ends after so many seconds and so many steps, if it is not said how long it may take."""

_Count = Callable[[Plan], Counted | Failure | NotTried]


def optimize(request: OptimizeRequest, *, progress: Progress, ask: Ask | None) -> OptimizeResult:
    """Search for the plan of the level asked for, measure it, prove it, and write the four files.

    Raises :class:`MemoptError` as long as there is no plan; what fails later is in the result.  A plan that fails
    verification is reported and not written.
    """
    started = time.monotonic()
    resolved = resolve(request.search)
    if request.goal != SearchGoal() and resolved.options.level == 0:
        raise OptionError(
            "--budget, --frontier and --pick search for a plan, which level 0 does not", hint="Raise --level."
        )
    paths = output_paths(request.source.location, request.output, plan_only=request.plan_only)
    if not request.dry_run and request.goal.applies:
        check_targets(paths.all(), force=request.force)
    try:
        prepared = prepare(opening_of(request, request.settings), progress=progress, ask=ask)
        found = find_plan(request, resolved, prepared, progress)
    except KeyboardInterrupt as err:
        why = f": {err}" if str(err) else ""
        raise type(err)(f"interrupted before a plan was verified; nothing was written{why}") from err
    kept = Kept(request=request, prepared=prepared, found=found, paths=paths, progress=progress, started=started)
    return kept.result()


def find_plan(request: OptimizeRequest, resolved: Resolved, prepared: Prepared, progress: Progress) -> Findings:
    """Search, measure and verify; writes nothing.

    A plan that fails verification is among the findings, too.  Raises :class:`MemoptError`.
    """
    notes = [*resolved.notes, *prepared.notes]
    if not resolved.options.targets and resolved.options.modules is None:
        prepared = replace(prepared, subject=replace(prepared.subject, layer_runs=True))
    job = _Job(request=request, options=resolved.options, prepared=prepared, progress=progress, notes=notes)
    rows = job.search()
    best, verification = job.verify(rows) if request.goal.applies else (rows[0], None)
    return Findings(
        resolved=resolved,
        asked_codecs=prepared.facts.asked_codecs,
        model_format=prepared.facts.format,
        device=prepared.subject.settings.device,
        plan=best.plan,
        applied_level=best.level,
        by_goal=request.goal != SearchGoal(),
        selection=job.selection,
        rows=rows,
        verification=verification,
        skipped=job.skipped,
        notes=job.notes,
        budget_bytes=job.budget_bytes,
        frontier=job.frontier,
        interrupted=job.interrupted,
        faster=job.faster,
        smaller=job.smaller,
    )


def find_levels(request: OptimizeRequest, resolved: Resolved, prepared: Prepared, progress: Progress) -> list[LevelRow]:
    """Search, and measure the last level's plan; verifies nothing.  Raises :class:`MemoptError`."""
    return _Job(request=request, options=resolved.options, prepared=prepared, progress=progress).search()


def applied_row(rows: Sequence[LevelRow], chosen: LevelRow | None) -> LevelRow:
    """The row whose plan is applied: the chosen one, unless it raises the measured allocated peak of the original.

    Raises :class:`MeasurementError` if no level could be run.
    """
    measured = [row for row in (rows[0], chosen) if row is not None and isinstance(row.outcome, Measurement)]
    best = min(reversed(measured), key=_allocated, default=None)
    if best is None:
        failure = rows[-1].outcome
        assert failure is not None
        assert not isinstance(failure, Measurement)
        raise MeasurementError(
            f"no plan up to level {rows[-1].level} could be run: {describe(failure)}",
            hint="Try a smaller batch (-i, or --dim B=1 where the shape says B), or a machine with more memory.",
        )
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What a search starts from, and what it may ask."""

    traced: Traced
    first: CountedPlan
    probes: SearchProbes
    planner: Planner
    notes: int
    """How many there were when it began."""


@dataclass(slots=True)
class _Job:
    """One run of :func:`optimize`: what the stages need of each other."""

    request: OptimizeRequest
    options: SearchOptions
    prepared: Prepared
    progress: Progress
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    selection: Selection | None = None
    budget_bytes: int | None = None
    frontier: list[ParetoPoint] = field(default_factory=list)
    interrupted: bool = False
    applied: LevelRow | None = None
    """Of the levels, that whose plan is to be applied."""
    faster: Outlook | None = None
    smaller: Outlook | None = None
    measured: dict[Plan, Measurement | Failure] = field(default_factory=dict)
    left: dict[Plan, Fingerprint | Failure] = field(default_factory=dict)
    """By the measured steps."""

    def search(self) -> list[LevelRow]:
        """Measure the original, then search and measure what was found."""
        self.progress.stage("level 0")
        started = time.monotonic()
        search: _Search | None = None
        try:
            with contextlib.ExitStack() as sessions:
                session = sessions.enter_context(replaceable(self.session, self._session_lost))
                original = self._measure_in(session(), Plan())
                if not isinstance(original, Measurement | OutOfMemory):
                    raise_failure(original)
                if isinstance(original, OutOfMemory):  # the next full step might be killed as well
                    sessions.close()
                    open_session = functools.partial(self.session, "small batch")
                    session = sessions.enter_context(replaceable(open_session, self._session_lost))
                rows = [_original_row(original, None, started)]
                if self.options.level == 0:
                    return rows
                search = self._start(session, original)
                predicted = search.first if search.traced.has_dry_runs else None
                rows[0] = _original_row(original, predicted, started)
                rows += self._seek(search, rows[0])
        except KeyboardInterrupt as err:  # on its way here it has ended the subprocess
            if search is None or not self.request.interruptible or isinstance(err, Terminated):
                raise
            rows = [rows[0], *self._seek_again(search, rows[0])]
        self.notes += self._obstacles(search.probes)
        return rows

    def _start(self, session: Callable[[], Session], original: Measurement | Failure) -> _Search:
        consequence = "every plan is run to be counted"
        traced = record_step(session(), Plan(), original, self.notes, consequence=consequence)
        start = session().count(Plan(), fake=traced.has_dry_runs)
        if not isinstance(start, Counted):
            raise_failure(start, "a step of the model could not be counted: ")
        if not isinstance(original, Measurement):
            self.notes.append(
                f"The original does not fit here; its peak of "
                f"{format_bytes(start.allocated_peak_bytes)} is predicted on tensors without data."
            )
        first = CountedPlan(plan=Plan(), counted=start)
        probes = SearchProbes(
            session,
            first,
            fake=traced.has_dry_runs,
            limit_s=self._search_limit_s(original),
            allow_inexact=self.options.allow_inexact,
        )
        planner = Planner(traced.trace, first, self._probes(probes, first), self.options)
        return _Search(traced=traced, first=first, probes=probes, planner=planner, notes=len(self.notes))

    def _search_limit_s(self, original: Measurement | Failure) -> float | None:
        """Who asks for a budget, the frontier or the least peak at any price waits for it."""
        is_bounded = self.request.goal == SearchGoal() and self.options.max_slowdown is not None
        if self.request.search_limit_s is not None or not is_bounded or not isinstance(original, Measurement):
            return self.request.search_limit_s
        return _SEARCH_S + _SEARCH_STEPS * min(original.step_times_s)

    def _seek(self, search: _Search, original: LevelRow) -> list[LevelRow]:
        if self.request.goal == SearchGoal():
            return self._climb(search, original)
        try:
            return self._meet_goal(search, original)
        except (NothingFitsError, UsageError) as err:
            hints = [err.hint, *self._obstacles(search.probes)]
            raise type(err)(err.message, hint="\n".join(filter(None, hints))) from err

    def _seek_again(self, search: _Search, original: LevelRow) -> list[LevelRow]:
        """The same search as far as it came, without anything more being tried.

        Raises :class:`KeyboardInterrupt` if it had found nothing.
        """
        if not search.probes.improved:
            raise KeyboardInterrupt
        self.progress.note("The search is interrupted: what it has found is measured and verified. Ctrl-C again: stop.")
        search.probes.end("the search was interrupted")
        self.interrupted = True
        self.skipped.clear()
        del self.notes[search.notes :]
        try:
            rows = self._seek(search, original)
        except NothingFitsError as err:
            raise KeyboardInterrupt(err.message) from err
        if self.request.goal == SearchGoal() and applied_row([original, *rows], self.applied).plan.is_empty:
            raise KeyboardInterrupt
        return rows

    def _meet_goal(self, search: _Search, original: LevelRow) -> list[LevelRow]:
        """The fastest plan within a budget, or the plans between least time and least memory."""
        goal, level, planner = self.request.goal, self.options.level, search.planner
        started = time.monotonic()
        planned = GoalSearch(
            planner=planner,
            measure=self.measure,
            progress=self.progress,
            level=level,
            dry_run=search.traced.has_dry_runs,
            original_s=original.outcome.step_s if isinstance(original.outcome, Measurement) else math.inf,
            most_slowdown=self.request.search.get("max_slowdown") or math.inf,
        )
        rows: list[LevelRow] = []
        self.progress.stage("frontier" if goal.frontier else "budget")
        found = planned.thinned(planner.frontier(level)) if goal.frontier else []
        if goal.pick is not None:
            check_pick(goal.pick, len(found))
        if goal.budget is not None:
            peak = _allocated(original) if isinstance(original.outcome, Measurement) else search.first.peak_bytes
            self.budget_bytes = budget_bytes(goal.budget, peak)
            rows.append(planned.within(self.budget_bytes))
        if goal.frontier:
            self.frontier = planned.frontier(found, original)
        if goal.pick is not None:
            rows.append(planned.row_of(self.frontier[goal.pick - 1], started))
        self._choose(search, rows[-1].plan if rows else Plan(), by_goal=True)
        return rows

    def _climb(self, search: _Search, original: LevelRow) -> list[LevelRow]:
        """A row for every level."""
        climb = Climb(
            planner=search.planner,
            original=original,
            original_bytes=search.first.peak_bytes,
            options=self.options,
            measure=self.measure,
            progress=self.progress,
            dry_run=search.traced.has_dry_runs,
            measure_all=self.request.measure_levels or not search.traced.has_dry_runs,
        )
        rows = climb.rows()
        self.notes += climb.notes
        self.skipped += climb.skipped
        self.applied = climb.applied
        self._choose(search, applied_row([original, *rows], self.applied).plan)
        return rows

    def _choose(self, search: _Search, plan: Plan, *, by_goal: bool = False) -> None:
        """Say which of the candidates are segments, and why modules that were asked for are none."""
        tree = ModuleTree(search.traced.trace)
        asked = asked_for(tree, self.options)
        candidates = len(asked) if asked is not None else sum(not module.refusal for module in tree)
        segments = outermost([tree[segment.path] for segment in plan.segments])
        self.selection = chosen(candidates, segments, self.options, by_goal=by_goal)
        self.notes += left_out(tree, self.options)
        for failed, failure in [*search.planner.failures.items()][:1]:
            more = f", and {len(search.planner.failures) - 1} more" if len(search.planner.failures) > 1 else ""
            self.notes.append(f"A plan of {len(failed.segments)} segments could not run{more}: {describe(failure)}.")
        self.faster, self.smaller = search.planner.neighbours(plan)

    def _obstacles(self, probes: SearchProbes) -> Iterator[str]:
        """What kept the search from plans of a lower peak: norms that need all processes, and its time."""
        for path, reason in probes.refusals.items():
            inner = (norm for norm in self.prepared.facts.sync_norms if not path or f"{norm}.".startswith(f"{path}."))
            if any(inner):
                yield f"'{path or '(root)'}' does not run in chunks: {reason}."
        if probes.over:
            yield f"{probes.over}: a longer one may find a better plan"

    def _session_lost(self) -> None:
        self.notes.append(SESSION_LOST)

    def _probes(self, probes: SearchProbes, original: CountedPlan) -> Probes:
        """What the search may ask, with its progress shown."""
        reporter = _Reporter(self.progress, original.peak_bytes)

        def trace(plan: Plan) -> StepTrace | Failure | NotTried:
            traced = probes.trace(plan)
            return traced.trace if isinstance(traced, Traced) else traced

        return Probes(
            count=reporter.watching(probes.count),
            chunking=probes.chunking,
            report=reporter.report,
            trace=trace,
            late=probes.late,
        )

    def measure(self, plan: Plan) -> Measurement | Failure:
        """Measure in a subprocess of its own; every plan once."""
        known = self.measured.get(plan)
        if known is not None:
            return known
        with self.session() as session:
            return self._measure_in(session, plan)

    def _measure_in(self, session: Session, plan: Plan) -> Measurement | Failure:
        found = session.measure(plan, warm_up=self.options.warmup_in_profile_workers)
        self.measured[plan] = found
        if isinstance(found, Measurement):
            self.left[plan] = session.fingerprint()
        return found

    def verify(self, rows: list[LevelRow]) -> tuple[LevelRow, Verification]:
        """The row to apply, verified.

        Where the model cannot run in float64, in which chunks are verified, that is the best row without chunks.
        """
        fits = isinstance(rows[0].outcome, Measurement)
        asked_for = self.request.goal != SearchGoal()
        best = rows[-1] if asked_for else applied_row(rows, self.applied)
        if not isinstance(best.outcome, Measurement):
            assert best.outcome is not None
            raise_failure(best.outcome, "the plan that was asked for could not be measured: ")
        found = self._verify(best, fits=fits)
        if isinstance(found, StepFailed) and _has_chunks(best) and not asked_for:
            self.notes.append(f"Level {best.level} is not applied, its chunks cannot be verified: {found.message}")
            best = self._without_chunks(rows)
            found = self._verify(best, fits=fits)
        if not isinstance(found, Verification):
            raise_failure(found, "verification could not be run: ")
        return (best, found) if found.passed or asked_for else self._narrowed(rows, best, found, fits=fits)

    def _without_chunks(self, rows: list[LevelRow]) -> LevelRow:
        """The best row whose plan runs nothing in chunks."""
        at = max(at for at, row in enumerate(rows) if not _has_chunks(row))
        if rows[at].outcome is None:
            rows[at] = replace(rows[at], outcome=self.measure(rows[at].plan))
        self.faster = self.smaller = None
        return applied_row(rows, rows[at])

    def _narrowed(
        self, rows: list[LevelRow], best: LevelRow, failed: Verification, *, fits: bool
    ) -> tuple[LevelRow, Verification]:
        """The row without the segments that differ, in place of it, verified; the failure where that does not help."""
        self.progress.stage("finding what differs")
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(self.session())]

            def verify(plan: Plan) -> Verification | None:
                if sessions[-1].ended:
                    sessions.append(stack.enter_context(self.session()))
                found = sessions[-1].verify(plan, failed.batch, dims=failed.dims, further=True)
                return found if isinstance(found, Verification) else None

            plan, left_out = agreeing(best.plan, verify)
        row = rows[0]
        if plan.segments or plan.packed:
            row = replace(best, plan=plan, outcome=self.measure(plan), predicted_tensor_peak_bytes=None)
            row = replace(row, predicted_allocated_peak_bytes=None, predicted_slowdown=None)
            self.faster = self.smaller = None
            rows[rows.index(best)] = row
            row = applied_row(rows, row)
        found = self._verify(row, fits=fits)
        if not isinstance(found, Verification) or not found.passed:
            return best, failed
        self.notes += [
            f"'{path or '(root)'}' is not a segment: with it {reason}." for path, reason in sorted(left_out.items())
        ]
        return row, found

    def _verify(self, best: LevelRow, *, fits: bool) -> Verification | Failure:
        prepared, plan, timeout_s, original = self.prepared, best.plan, self.request.timeout_s, Plan()
        left = self.left.get(original), self.left.get(plan)
        step = self.measured.get(original)
        if isinstance(left[0], Fingerprint) and isinstance(left[1], Fingerprint) and isinstance(step, Measurement):
            steps = MeasuredSteps(original=left[0], planned=left[1], original_s=step.step_s)
            return verified_by_fingerprints(prepared, plan, steps, timeout_s, self.progress)
        return verified(prepared, plan, timeout_s, self.progress, fits=fits)

    def session(self, data: Data = "full size") -> Session:
        """A fresh profiling subprocess, and what it may run."""
        return self.prepared.session(self.request.timeout_s, data)


class _Reporter:
    """Tells progress what is tried, with the peaks: ``segments: 8 · 380.1 MiB → 341.7 MiB``."""

    def __init__(self, progress: Progress, start_bytes: int) -> None:
        self._progress = progress
        self._best_bytes = start_bytes
        self._tried = 0

    def report(self, text: str) -> None:
        """Tell what is tried next, which takes a while."""
        self._progress.update(self._tried, None, f"{text} · {format_bytes(self._best_bytes)}")

    def watching(self, count: _Count) -> _Count:
        """The same counter, with its answers told to the progress."""

        def counted(plan: Plan) -> Counted | Failure | NotTried:
            found = count(plan)
            if isinstance(found, NotTried):
                return found
            self._tried += 1
            peak = found.allocated_peak_bytes if isinstance(found, Counted) else None
            tried = f"segments: {len(plan.segments)}" + (", saved packed" if plan.packed else "")
            self._progress.update(self._tried, None, f"{tried} · {self._compared(peak)}")
            self._best_bytes = min(self._best_bytes, peak or self._best_bytes)
            return found

        return counted

    def _compared(self, peak_bytes: int | None) -> str:
        """A peak beside the least so far; an arrow to a new least."""
        if peak_bytes is None:
            return "cannot run"
        least, shown = format_bytes(self._best_bytes), format_bytes(peak_bytes)
        return f"{least} → {shown}" if peak_bytes < self._best_bytes else f"{shown}, the least is {least}"


def _has_chunks(row: LevelRow) -> bool:
    return any(segment.chunks > 1 for segment in row.plan.segments)


def _allocated(row: LevelRow) -> int:
    assert isinstance(row.outcome, Measurement)
    return row.outcome.allocated_peak_bytes


def _original_row(outcome: Measurement | Failure, predicted: CountedPlan | None, started: float) -> LevelRow:
    return LevelRow(
        level=0,
        plan=Plan(),
        outcome=outcome,
        predicted_tensor_peak_bytes=predicted.counted.tensor_peak_bytes if predicted else None,
        predicted_allocated_peak_bytes=predicted.peak_bytes if predicted else None,
        dry_runs=0,
        search_s=time.monotonic() - started,
    )

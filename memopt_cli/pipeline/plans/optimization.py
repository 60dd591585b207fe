"""Run ``memopt optimize``: load the model, measure it, search a plan, verify it, write the files, recommend a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memopt_cli.errors import NothingFitsError, Terminated, UsageError
from memopt_cli.files.outputs import output_paths
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.batch_advice import NO_BATCH, begin_advice, predicted
from memopt_cli.pipeline.batches.batch_probes import check_varied
from memopt_cli.pipeline.heads import heads_notes
from memopt_cli.pipeline.own_checkpoints import without_own_checkpoints
from memopt_cli.pipeline.plans.by_length import find_by_length
from memopt_cli.pipeline.plans.climb import Climb
from memopt_cli.pipeline.plans.compiled import FastestCompiled, SmallestCompiled, SpreadCompiled
from memopt_cli.pipeline.plans.elsewhere import find_elsewhere
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.goal import GoalSearch, budget_bytes, check_pick, without_beaten
from memopt_cli.pipeline.plans.in_backward import IN_BACKWARD, InBackwardPlans
from memopt_cli.pipeline.plans.kept import Kept
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.proof import Prover, applied_row
from memopt_cli.pipeline.plans.sent import how_to_train, with_place
from memopt_cli.pipeline.plans.shown import check_frontier_target, check_original, check_shown, with_shown_plans
from memopt_cli.pipeline.plans.started_search import StartedSearch, start_search
from memopt_cli.pipeline.prepare import Prepared, opening_of, prepare
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    STEP,
    Dropped,
    LevelRow,
    Measurement,
    NotRun,
    OptimizeRequest,
    OptimizeResult,
    ParetoPoint,
    Plan,
    ShownFrontier,
    Verification,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.plan.targets import describe_selection, refusal_notes
from memopt_cli.text.documents import quoted_path
from memopt_cli.text.units import exact_bytes
from memopt_cli.text.writing import check_targets

_FEW = 0.03
"""Share of the original's step time up to which a plan within a budget counts as fast enough.

For a slower plan, a search whose time was over says that a longer one may find a better plan."""


def optimize(request: OptimizeRequest, *, progress: Progress, ask: Ask | None) -> OptimizeResult:
    """Search for the plan that ``request`` asks for, measure it, verify it, and write the four files.

    Raises :class:`MemoptError` for a failure before a plan is found; later failures are part of the result.  A plan
    that fails verification is reported and not written.
    """
    started = time.monotonic()
    request = with_shown_plans(request)
    if request.goal.needs_frontier and request.shown is None and not request.dry_run:
        check_frontier_target(request)
    paths = output_paths(request.source.location, request.output, plan_only=request.plan_only)
    if not request.dry_run and request.goal.applies:
        check_targets(paths.all(), force=request.force)
    try:
        card, layout, backend = request.card, request.layout, request.backend
        opening = opening_of(request, request.settings, card=card, layout=layout, backend=backend)
        prepared = prepare(opening, progress=progress, ask=ask)
        check_shown(request, prepared)
        found = find(request, prepared)
    except KeyboardInterrupt as err:
        why = f": {err}" if str(err) else ""  # set where an interrupted search had found nothing that fits
        raise type(err)(f"interrupted before a plan was verified; nothing was written{why}") from err
    if prepared.facts.format == STEP:
        paths = replace(paths, plan_only=True)
    kept = Kept(request=request, prepared=prepared, found=found, paths=paths, started=started)
    return kept.result()


def find(request: OptimizeRequest, prepared: Prepared) -> Findings:
    """Find a plan for ``prepared``, by runs here or by estimates; for a range of a dimension, find a plan by length.

    If the model checkpoints by itself, its own checkpointing is turned off first, where possible.  The findings may
    hold a plan that fails verification; nothing is written.  Raises :class:`MemoptError`.
    """
    prepared = without_own_checkpoints(prepared, measures=request.runs)
    prepared = with_place(request, prepared)
    options = request.search.options
    chooses = not options.targets and options.modules is None
    prepared = replace(prepared, subject=replace(prepared.subject, tries_rows=False, layer_runs=chooses))
    find_plan = find_here if request.runs else find_elsewhere
    if request.dim_range is None:
        found = find_plan(request, prepared)
    else:
        found = find_by_length(request, request.dim_range, prepared, find_plan=find_plan)
    found.notes += [*heads_notes(found.plan), *prepared.heard]
    return found


def find_here(request: OptimizeRequest, prepared: Prepared) -> Findings:
    """Find a plan for ``prepared`` at the sizes of its inputs: search, measure and verify."""
    options = request.search.options
    measurements = PlanMeasurements(prepared=prepared, warm_up=options.warmup_in_profile_workers)
    found = Findings.begun(request, prepared)
    job = _Job(request, measurements, found, Prover(measurements=measurements, found=found))
    found.rows = job.search()
    best = found.rows[0]
    if request.goal.applies:
        best, found.verification = job.proven()
    found.plan, found.applied_level = best.plan, best.level
    found.notes += [IN_BACKWARD] * best.plan.in_backward
    found.notes += how_to_train(best.plan, prepared.subject.offload_folder)
    return found


@dataclass(slots=True)
class _Job:
    """One run of :func:`find_here`, with the state that its stages share."""

    request: OptimizeRequest
    measurements: PlanMeasurements
    found: Findings
    """The findings so far."""
    prover: Prover
    applied: LevelRow | None = None
    """The row of the level whose plan is to be applied; `None`: the original's."""

    @property
    def prepared(self) -> Prepared:
        """The model without a plan."""
        return self.measurements.prepared

    def search(self) -> list[LevelRow]:
        """Measure the original, search, and measure the plans found; return a row for each level."""
        self.prepared.progress.stage("level 0: measuring the original")
        started = time.monotonic()
        search: StartedSearch | None = None
        try:
            with Sessions(self.prepared, "full size", self.found.notes) as sessions:
                original = self.measurements.original_in(sessions, started)
                if self.found.resolved.options.level == 0:
                    return [original]
                if self.request.shown is not None:
                    check_original(self.request, original.outcome)
                    return self._picked(self.request.shown, original)
                search = start_search(self.request, self.found, sessions, original)
                rows = [search.original, *self._search_plans(search)]
                if search.traced.has_dry_runs:
                    self._begin_advice(rows, sessions)
        except KeyboardInterrupt as err:  # leaving the sessions has ended their subprocess
            if search is None or self._is_the_end(err):
                raise
            rows = [search.original, *self._rows_so_far(search)]
        rows[0] = replace(rows[0], outcome=self.measurements.measure(ORIGINAL))  # it may have been timed again in turns
        self.found.notes += search.obstacles(self.prepared.facts.sync_norms)
        return rows

    def proven(self) -> tuple[LevelRow, Verification]:
        """Return what :meth:`Prover.prove` does; begin that anew after Ctrl-C, so that the plan found is not lost.

        A second Ctrl-C ends it, and so does the first if that plan has failed, since none of its parts is proven yet.
        """
        try:
            return self.prover.prove(self.applied)
        except KeyboardInterrupt as err:
            has_searched = self.request.shown is None and any(not row.plan.is_empty for row in self.found.rows)
            if not has_searched or self.prover.has_failed or self._is_the_end(err):
                raise
            self.prepared.progress.interrupted("Interrupted: the plan that was found is verified. Ctrl-C again: stop.")
            self.found.interrupted = True
            return self.prover.prove(self.applied)

    def _is_the_end(self, interruption: KeyboardInterrupt) -> bool:
        """Tell whether ``interruption`` ends the command: the second Ctrl-C, or the first where none is expected."""
        return self.found.interrupted or not self.request.interruptible or isinstance(interruption, Terminated)

    def _picked(self, shown: ShownFrontier, original: LevelRow) -> list[LevelRow]:
        """Measure the plan picked from the ``shown`` frontier, and return two rows: the original's and the plan's."""
        assert self.request.goal.pick is not None, "else nothing is read"
        point = shown.points[self.request.goal.pick - 1]
        self.prepared.progress.stage("measuring the plan that was picked")
        row = replace(point, outcome=self.measurements.measure(point.plan)).row(shown.options.level)
        row = self.measurements.confirm(row)
        self.found.frontier = [self._as_timed(point, row) for point in shown.points]
        return [replace(original, outcome=self.measurements.measure(ORIGINAL)), row]

    def _begin_advice(self, rows: list[LevelRow], sessions: Sessions) -> None:
        """Begin the search for the batch that fits, where ``request`` asks for it; Ctrl-C ends only this.

        It begins in ``sessions``, those of the plan search, which have recorded the step already: another recording
        would take as long as a few dry runs.
        """
        request, prepared = self.request, self.prepared
        row = rows[-1] if self.found.by_goal else applied_row(rows, self.applied)
        is_wanted = request.recommend_batch and request.goal.applies and request.dim_range is None
        is_wanted = is_wanted and row.plan.compile is None
        if not is_wanted or not isinstance(row.outcome, Measurement):
            return
        try:
            check_varied(prepared)
            prepared.progress.stage("estimating the batch that fits")
            begun = begin_advice(request, prepared, row.plan, row.outcome, sessions)
            if request.confirm_batch:
                begun.search.foresee()
            else:
                predicted(begun.search)
            self.found.advice = begun
        except UsageError:  # the advice says so
            return
        except KeyboardInterrupt as err:
            if self._is_the_end(err):
                raise
            prepared.progress.interrupted(NO_BATCH)
            self.found.interrupted = True

    def _search_plans(self, search: StartedSearch) -> list[LevelRow]:
        """Search level by level, or for a budget or the frontier; if nothing fits, add what would help to the hint."""
        if not self.found.by_goal:
            return self._search_levels(search)
        try:
            return self._meet_goal(search)
        except (NothingFitsError, UsageError) as err:
            longer = "A longer search may find a better plan." if search.probes.over else ""
            hints = [err.hint, *search.obstacles(self.prepared.facts.sync_norms), longer, *self._explained()]
            message = "; ".join(filter(None, [err.message, search.probes.over]))
            raise type(err)(message, hint="\n".join(filter(None, hints))) from err

    def _explained(self) -> Iterator[str]:
        """Yield the command that explains why the step does not fit into the budget, where the shell can give it."""
        if self.found.budget_bytes is not None and self.request.flags is not None and self.request.dim_range is None:
            location, memory = quoted_path(self.request.source.location), exact_bytes(self.found.budget_bytes)
            command = " ".join((f"memopt explain {location}", *self.request.flags, f"--memory {memory}"))
            yield f"Who holds what when, and which other changes fit: {command}"

    def _rows_so_far(self, search: StartedSearch) -> list[LevelRow]:
        """Answer an interrupted ``search`` from what it has tried so far, without trying anything more.

        Raises :class:`KeyboardInterrupt` if it had found no plan.
        """
        if not search.probes.improved(search.first):
            raise KeyboardInterrupt
        self.prepared.progress.interrupted(
            "The search is interrupted: what it has found is measured and verified. Ctrl-C again: stop."
        )
        search.probes.end("the search was interrupted")
        self.found.interrupted = True
        self.found.skipped.clear()
        self.found.dropped.clear()
        self.found.compiled.clear()
        del self.found.notes[search.notes :]
        del self.found.details[search.details :]
        try:
            rows = self._search_plans(search)
        except NothingFitsError as err:
            raise KeyboardInterrupt(err.message) from err
        if not self.found.by_goal and applied_row([search.original, *rows], self.applied).plan.is_empty:
            raise KeyboardInterrupt
        return rows

    def _meet_goal(self, search: StartedSearch) -> list[LevelRow]:
        """Return one row, of the fastest plan within the budget or the one picked; none for ``--frontier`` alone."""
        goal, most_slowdown, started = self.request.goal, self.request.search.asked_slowdown, time.monotonic()
        planned = GoalSearch(
            search=search,
            measurements=self.measurements,
            in_backward=self._plans_in_backward(search, most_slowdown or math.inf),
            most_slowdown=most_slowdown,
        )
        rows: list[LevelRow] = []
        shows = goal.needs_frontier
        if goal.pick is not None and not goal.frontier:
            self.found.notes.append(
                f"No plans of `--frontier` are kept beside the model: `--pick {goal.pick}` searched."
            )
        self.prepared.progress.stage("searching the frontier" if shows else "searching within the budget")
        found = planned.worth_showing() if shows else []
        if goal.pick is not None and self.request.backend is None:  # compiled steps are added later
            check_pick(goal.pick, len(found))
        if goal.budget is not None:
            measured = search.original.outcome
            whole = measured if isinstance(measured, Measurement) else search.first
            self.found.budget_bytes = budget_bytes(goal.budget, whole.allocated_peak_bytes)
            rows.append(self._within_or_own(planned, self.found.budget_bytes))
        if shows:
            self.found.frontier, beaten = without_beaten(self._with_compiled(planned, planned.frontier(found)))
            self.found.details += filter(None, [beaten])
        if goal.pick is not None:
            check_pick(goal.pick, len(self.found.frontier))
            rows.append(planned.row_of(self.found.frontier[goal.pick - 1], started))
        rows[-1:] = [self.measurements.confirm(row) for row in rows[-1:]]
        self.found.frontier = [self._as_timed(point, *rows[-1:]) for point in self.found.frontier]
        self._choose(search, rows[-1].plan.eager if rows else Plan())
        self._say_time_is_over(search, lambda: shows or (rows[-1].predicted_slowdown or math.inf) > 1 + _FEW)
        return rows

    def _say_time_is_over(self, search: StartedSearch, may_improve: Callable[[], bool]) -> None:
        """Say that the time of ``search`` was over: in a note if a longer search ``may_improve`` the answer.

        Otherwise it is a mere detail, since users took the note for a failure.
        """
        over = search.probes.over
        if over and may_improve():
            self.found.notes.append(f"{over}: a longer one may find a better plan")
        elif over:
            self.found.details.append(f"{over}: a longer one would hardly find a better plan")

    def _within_or_own(self, planned: GoalSearch, budget_bytes: int) -> LevelRow:
        """Return the row of the fastest plan within ``budget_bytes``, or the original's if only its checkpoints are."""
        try:
            return self._within(planned, budget_bytes)
        except NothingFitsError:
            own, row = self.found.own_checkpoints, planned.search.original
            if own is None or own.allocated_peak_bytes > budget_bytes or not isinstance(row.outcome, Measurement):
                raise
            return replace(row, level=planned.search.options.level)

    def _within(self, planned: GoalSearch, budget_bytes: int) -> LevelRow:
        """Return the row of the fastest plan within ``budget_bytes``; with ``--compile`` among compiled ones too."""
        if self.request.backend is None or self.found.interrupted:
            return planned.within(budget_bytes)
        eager: LevelRow | None = None
        nothing: NothingFitsError | None = None
        try:
            eager = self.measurements.confirm(planned.within(budget_bytes))
        except NothingFitsError as error:
            nothing = error
        compiled = FastestCompiled(
            backend=self.request.backend,
            budget_bytes=budget_bytes,
            most_slowdown=planned.most_slowdown or math.inf,
            search=planned.search,
            measurements=self.measurements,
            verify=self.prover.verify,
        )
        best = compiled.answer(eager)
        self.prover.known |= compiled.verifications
        if nothing is not None and best is None:
            nothing.hint = "\n".join([nothing.hint, *compiled.failures()])
            raise nothing
        found = best or eager
        assert found is not None, "else nothing fits"
        return found

    def _with_compiled(self, planned: GoalSearch, eager: list[ParetoPoint]) -> list[ParetoPoint]:
        """Return the ``eager`` points, with ``--compile`` also those of verified compiled steps, fastest first."""
        if self.request.backend is None or self.found.interrupted:
            return eager
        if not self.found.compiled:  # with ``--budget``, they were measured already
            compiled = SpreadCompiled(
                backend=self.request.backend,
                most_slowdown=planned.most_shown,
                search=planned.search,
                measurements=self.measurements,
                verify=self.prover.verify,
            )
            compiled.measure()
            self.prover.known |= compiled.verifications
        original = self.measurements.known(ORIGINAL)
        original_s = None if original is None else original.step_s
        points = eager + [
            ParetoPoint(plan=row.plan, outcome=row.outcome, original_step_s=original_s)
            for row in self.found.compiled
            if row.plan.compile is not None and not row.dropped
        ]
        return sorted(points, key=_by_time)

    def _search_levels(self, search: StartedSearch) -> list[LevelRow]:
        """Search level by level, and return a row for every level from 1 on."""
        climb = Climb(
            search=search,
            measurements=self.measurements,
            measure_all=self.request.measure_levels or not search.traced.has_dry_runs,
        )
        rows = climb.rows()
        self.applied = self._compiled(search, rows, self._in_backward(search, rows, climb.applied))
        self._choose(search, applied_row([search.original, *rows], self.applied).plan)
        self._say_time_is_over(search, climb.may_go_lower)
        return rows

    def _in_backward(self, search: StartedSearch, rows: list[LevelRow], applied: LevelRow | None) -> LevelRow | None:
        """Return the ``applied`` row, with the optimizer in backward if that lowers its peak; update ``rows`` too.

        Where that was not asked for, a note says what it would save.
        """
        if applied is None:
            return applied
        row = replace(applied, plan=applied_row([search.original, *rows], applied).plan)
        known, most_slowdown = search.planner.dry_runs.get(row.plan), search.options.max_slowdown or math.inf
        assert known is not None, "the planner has found it"
        plans = self._plans_in_backward(search, most_slowdown)
        found = plans.of_level(row, known)
        if not search.options.optimizer_in_backward and self.prepared.subject.settings.may_update_in_backward:
            self.found.notes += filter(None, [plans.offer(known)])
        if found is None:  # time the row again: the attempt above may have timed the original anew
            timed = replace(applied, outcome=self.measurements.measure(applied.plan))
            found = self.measurements.confirm(timed, most_slowdown)
        rows[rows.index(applied)] = found
        return found

    def _compiled(self, search: StartedSearch, rows: list[LevelRow], applied: LevelRow | None) -> LevelRow | None:
        """Return the ``applied`` row, or with ``--compile`` a compiled step that peaks lower; update ``rows`` too."""
        if self.request.backend is None or self.found.interrupted:
            return applied
        compiled = SmallestCompiled(
            backend=self.request.backend,
            most_slowdown=search.options.max_slowdown or math.inf,
            search=search,
            measurements=self.measurements,
            verify=self.prover.verify,
        )
        best = compiled.answer(applied or search.original)
        self.prover.known |= compiled.verifications
        if best is None or (best.plan.compile is None and applied is None):
            return applied
        rows[rows.index(applied) if applied in rows and best.plan.compile is None else -1] = best
        return best

    def _plans_in_backward(self, search: StartedSearch, most_slowdown: float) -> InBackwardPlans:
        return InBackwardPlans(
            count=search.counted_late,
            measurements=self.measurements,
            fault=self.prover.fault,
            most_slowdown=most_slowdown,
            drop=self.found.drop,
            is_allowed=search.options.optimizer_in_backward,
        )

    def _as_timed(self, point: ParetoPoint, applied: LevelRow | None = None) -> ParetoPoint:
        """Return ``point`` with the latest times, if it is the original or the ``applied`` plan.

        Those two are timed in turns at the end, so that the frontier and the row that is applied show the same times.
        """
        original, timed = self.measurements.measure(ORIGINAL), applied.plan if applied else ORIGINAL
        if not isinstance(original, Measurement) or point.plan not in (ORIGINAL, timed):
            return point
        outcome = self.measurements.measure(point.plan)
        return replace(point, outcome=outcome, original_step_s=original.step_s)

    def _choose(self, search: StartedSearch, plan: Plan) -> None:
        """Record which modules are segments of ``plan``, why requested ones are not, and the neighbouring plans."""
        modules, by_goal = search.traced.trace.modules, self.found.by_goal
        self.found.selection = describe_selection(modules, plan, search.options, by_goal=by_goal)
        self.found.notes += refusal_notes(self.found.selection.refusals)
        failures = search.planner.dry_runs.failures
        for failed, failure in [*failures.items()][:1]:  # the first dry run that failed, before any plan was dropped
            dropped = Dropped(plan=failed, peak_bytes=None, original_bytes=None, why=NotRun(failure=failure))
            self.found.dropped.insert(0, dropped)
        refused = [dropped.plan for dropped in self.found.dropped]
        self.found.faster, self.found.smaller = search.planner.neighbours(plan, refused)


def _by_time(point: ParetoPoint) -> tuple[bool, float]:
    """Return a key that sorts points of a frontier: the original first, then by slowdown."""
    return not point.plan.is_empty, point.slowdown or point.predicted_slowdown or math.inf

"""``memopt optimize``: load the model, measure it, find a plan, verify it, write the files, recommend a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memopt_cli.errors import NothingFitsError, UsageError
from memopt_cli.files.outputs import output_paths
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.batch_advice import NO_BATCH, advise_by_dry_runs, begin_advice
from memopt_cli.pipeline.batches.batch_probes import check_varied
from memopt_cli.pipeline.heads import heads_notes
from memopt_cli.pipeline.own_checkpoints import without_own_checkpoints
from memopt_cli.pipeline.plans.budget_errors import require_parameters_fit
from memopt_cli.pipeline.plans.by_length import find_by_length
from memopt_cli.pipeline.plans.climb import Climb
from memopt_cli.pipeline.plans.compiled_search import Compiled, FastestCompiled, SmallestCompiled, SpreadCompiled
from memopt_cli.pipeline.plans.elsewhere import find_elsewhere
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.frontier import check_pick, without_beaten
from memopt_cli.pipeline.plans.goal import GoalSearch, budget_in_bytes
from memopt_cli.pipeline.plans.in_backward import IN_BACKWARD_NOTE, InBackwardPlans
from memopt_cli.pipeline.plans.offload_place import offload_folder_notes, with_place
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.pipeline.plans.proof import Prover, row_to_apply
from memopt_cli.pipeline.plans.result_writer import ResultWriter
from memopt_cli.pipeline.plans.shown import check_frontier_target, check_original, check_shown, with_shown_plans
from memopt_cli.pipeline.plans.started_search import StartedSearch, start_search
from memopt_cli.pipeline.plans.worth import judge_measurement
from memopt_cli.pipeline.prepare import PreparedModel, load_request_for, prepare
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.terms import command_line
from memopt_cli.records import (
    STEP,
    DroppedPlan,
    LevelRow,
    Measurement,
    NotRun,
    OptimizeRequest,
    OptimizeResult,
    ParetoPoint,
    Plan,
    ShownFrontier,
    StepPeaks,
    Verification,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.plan.targets import describe_selection, loop_notes, refusal_notes
from memopt_cli.text.units import exact_bytes, format_bytes
from memopt_cli.text.writing import check_targets

_FAST_ENOUGH_SHARE = 0.03
"""A plan within a budget is fast enough if its step takes longer than the original's by at most this share.

For a slower plan, a search ended by its time limit notes that a longer search may find a better plan."""

_MAX_PROOF_TOLERANCE = 1e-3
"""Maximum tolerance of fingerprints that prove chunks, relative to a tensor's norm."""


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
        load_request = load_request_for(request, request.settings, card=card, layout=layout, backend=backend)
        prepared = prepare(load_request, progress=progress, ask=ask)
        check_shown(request, prepared)
        findings = find_plan(request, prepared)
    except KeyboardInterrupt as err:
        reason = f": {err}" if str(err) else ""  # set where an interrupted search had found nothing that fits
        raise type(err)(f"interrupted before a plan was verified; nothing was written{reason}") from err
    if prepared.facts.format == STEP:
        paths = replace(paths, plan_only=True)
    writer = ResultWriter(request=request, prepared=prepared, findings=findings, paths=paths, started=started)
    return writer.result()


def find_plan(request: OptimizeRequest, prepared: PreparedModel) -> Findings:
    """Find a plan for ``prepared``, by runs here or by estimates; for a range of a dimension, find a plan by length.

    If the model checkpoints by itself, its own checkpointing is turned off first, where possible.  The findings may
    hold a plan that fails verification; nothing is written.
    """
    prepared = without_own_checkpoints(prepared, measures=request.runs)
    prepared = with_place(request, prepared)
    options = request.search.options
    chooses = not options.targets and options.modules is None
    prepared = replace(prepared, subject=replace(prepared.subject, tries_rows=False, layer_runs=chooses))
    find_at_sizes = find_here if request.runs else find_elsewhere
    if request.dim_range is None:
        findings = find_at_sizes(request, prepared)
    else:
        findings = find_by_length(request, request.dim_range, prepared, find_plan=find_at_sizes)
    findings.notes += [*heads_notes(findings.plan), *prepared.messages]
    return findings


def find_here(request: OptimizeRequest, prepared: PreparedModel) -> Findings:
    """Find a plan for ``prepared`` at the sizes of its inputs: search, measure and verify."""
    options = request.search.options
    measurements = PlanMeasurements(prepared=prepared, warm_up=options.warmup_in_profile_workers)
    findings = Findings.begin(request, prepared)
    job = _PlanSearch(request, measurements, findings, Prover(measurements=measurements, findings=findings))
    findings.rows = job.search()
    row = findings.rows[0]
    if request.goal.applies:
        row, findings.verification = job.prove()
    findings.plan, findings.applied_level = _marked_as_compared(row.plan, findings), row.level
    if row.plan.in_backward:
        findings.notes.append(IN_BACKWARD_NOTE)
    findings.notes += offload_folder_notes(row.plan, prepared.subject.offload_folder)
    return findings


def _marked_as_compared(plan: Plan, findings: Findings) -> Plan:
    """Return ``plan`` with a mark on its chunks if its verification compared them with the whole at full size.

    The fingerprints of measured steps count if they had to agree in more digits than bfloat16 has.
    """
    from memopt_cli.runtime.segment_config import describe_chunks  # imports torch, which commands start without

    verification, shapes = findings.verification, findings.input_shapes
    if verification is None or not verification.passed or verification.whole:
        return plan
    steps = verification.measured
    if not verification.full_size and (steps is None or steps.by_rounding or steps.tolerance > _MAX_PROOF_TOLERANCE):
        return plan
    compared = (
        replace(segment, compared=describe_chunks(segment.chunks, segment.axis, shapes[segment.path]))
        if segment.chunks > 1 and not segment.through_loss and shapes.get(segment.path)
        else segment
        for segment in plan.segments
    )
    return replace(plan, segments=tuple(compared))


@dataclass(slots=True)
class _PlanSearch:
    """The search for a plan, and its proof: call :meth:`search` first, which sets :attr:`applied` for :meth:`prove`."""

    request: OptimizeRequest
    measurements: PlanMeasurements
    findings: Findings
    """Findings so far."""
    prover: Prover
    applied: LevelRow | None = None
    """Row of the level whose plan is to be applied; ``None`` for the original."""

    @property
    def prepared(self) -> PreparedModel:
        """Model without a plan."""
        return self.measurements.prepared

    def search(self) -> list[LevelRow]:
        """Measure the original, search, and measure the plans found; return a row for each level."""
        self.prepared.progress.stage("level 0: measuring the original")
        started = time.monotonic()
        search: StartedSearch | None = None
        try:
            with Sessions(self.prepared, "full size", self.findings.notes) as sessions:
                original = self.measurements.original_in(sessions, started)
                if self.findings.resolved.options.level == 0:
                    return [original]
                if self.request.shown is not None:
                    check_original(self.request, original.outcome)
                    return self._measure_picked(self.request.shown, original)
                search = start_search(self.request, self.findings, sessions, original)
                rows = [search.original, *self._search_plans(search)]
                if search.traced.has_dry_runs:
                    self._begin_advice(rows, sessions)
        except KeyboardInterrupt:  # leaving the sessions has ended their subprocess
            if search is None or self._ends_command:
                raise
            rows = [search.original, *self._rows_so_far(search)]
        # The original may have been timed again, alternating with a plan.
        rows[0] = replace(rows[0], outcome=self.measurements.measure(ORIGINAL))
        self.findings.notes += search.obstacles(self.prepared.facts.sync_norms)
        return rows

    def prove(self) -> tuple[LevelRow, Verification]:
        """Return the result of :meth:`Prover.prove`; after Ctrl-C, begin again, so that the plan found is not lost.

        A second Ctrl-C ends the command.  So does the first if the plan has failed, since none of its parts is proven
        yet.
        """
        try:
            return self.prover.prove(self.applied)
        except KeyboardInterrupt:
            has_searched = self.request.shown is None and any(not row.plan.is_empty for row in self.findings.rows)
            if not has_searched or self.prover.has_failed or self._ends_command:
                raise
            self.prepared.progress.interrupted("Interrupted: the plan that was found is verified. Ctrl-C again: stop.")
            self.findings.interrupted = True
            return self.prover.prove(self.applied)

    @property
    def _ends_command(self) -> bool:
        """Whether Ctrl-C or another signal ends the command now: a second one, or the first if it may not interrupt."""
        return self.findings.interrupted or not self.request.interruptible

    def _measure_picked(self, frontier: ShownFrontier, original: LevelRow) -> list[LevelRow]:
        """Measure the plan picked from ``frontier``, and return two rows: the original's and the plan's."""
        assert self.request.goal.pick is not None, "called only with `--pick`"
        point = frontier.points[self.request.goal.pick - 1]
        self.prepared.progress.stage("measuring the plan that was picked")
        row = replace(point, outcome=self.measurements.measure(point.plan)).row(frontier.options.level)
        row = self.measurements.confirm(row)
        self.findings.frontier = [self._with_latest_times(point, row) for point in frontier.points]
        return [replace(original, outcome=self.measurements.measure(ORIGINAL)), row]

    def _begin_advice(self, rows: list[LevelRow], sessions: Sessions) -> None:
        """Begin the search for the batch that fits, where ``request`` asks for it; Ctrl-C ends only this.

        It begins in the ``sessions`` of the plan search, which have recorded the step already: another recording
        would take as long as a few dry runs.
        """
        request, prepared = self.request, self.prepared
        row = rows[-1] if self.findings.by_goal else row_to_apply(rows, self.applied)
        is_wanted = request.recommend_batch and request.goal.applies and request.dim_range is None
        is_wanted = is_wanted and row.plan.compile is None
        if not is_wanted or not isinstance(row.outcome, Measurement):
            return
        try:
            check_varied(prepared)
            prepared.progress.stage("estimating the batch that fits")
            advice = begin_advice(request, prepared, row.plan, row.outcome, sessions)
            if request.confirm_batch:
                advice.search.dry_run_ahead()
            else:
                advise_by_dry_runs(advice.search)
            self.findings.advice = advice
        except UsageError:  # the advice says so
            return
        except KeyboardInterrupt:
            if self._ends_command:
                raise
            prepared.progress.interrupted(NO_BATCH)
            self.findings.interrupted = True

    def _search_plans(self, search: StartedSearch) -> list[LevelRow]:
        """Search level by level, or for a budget or the frontier; if nothing fits, add what would help to the hint."""
        if not self.findings.by_goal:
            return self._search_levels(search)
        try:
            return self._meet_goal(search)
        except (NothingFitsError, UsageError) as err:
            longer = "A longer search may find a better plan." if search.probes.over else ""
            hints = [err.hint, *search.obstacles(self.prepared.facts.sync_norms), longer, *self._explain_commands()]
            message = "; ".join(filter(None, [err.message, search.probes.over, self._carried_peak(search)]))
            err.message, err.hint = message, "\n".join(filter(None, hints))
            err.args = (message,)
            raise

    def _carried_peak(self, search: StartedSearch) -> str:
        """Return the peak under the model's present plan, which it keeps, as text; empty if it has none."""
        counted = None if self.prepared.carried.is_empty else search.count_late(self.prepared.carried)
        peak = format_bytes(counted.allocated_peak_bytes) if isinstance(counted, StepPeaks) else ""
        return peak and f"the plan on the model takes about {peak}"

    def _explain_commands(self) -> Iterator[str]:
        """Yield the command that explains why the step does not fit into the budget, where the shell can give it."""
        if self.findings.budget_bytes is not None and self.request.flags is not None:
            backward_flag = "--optimizer-in-backward" if self.request.search.options.optimizer_in_backward else ""
            flags = [*self.request.flags, backward_flag, f"--memory {exact_bytes(self.findings.budget_bytes)}"]
            if (varied := self.request.dim_range) is not None:  # explain takes a size: the one that does not fit
                size = f"--dim {varied.symbol}={self.prepared.subject.spec.dims[varied.symbol]}"
                flags = [size if flag.startswith("--dim") and ":" in flag else flag for flag in flags]
            command = command_line("explain", self.request.source.location, flags)
            yield f"To see which modules hold the memory, and which other changes fit: {command}"

    def _rows_so_far(self, search: StartedSearch) -> list[LevelRow]:
        """Answer an interrupted ``search`` from what it has tried so far, without trying anything more.

        Raises :class:`KeyboardInterrupt` if it had found no plan.
        """
        if not search.probes.has_improved(search.original_dry_run):
            raise KeyboardInterrupt
        self.prepared.progress.interrupted(
            "The search is interrupted: what it has found is measured and verified. Ctrl-C again: stop."
        )
        search.probes.end("the search was interrupted")
        self.findings.interrupted = True
        self.findings.skipped.clear()
        self.findings.dropped.clear()
        self.findings.compiled.clear()
        del self.findings.notes[search.notes_before :]
        del self.findings.details[search.details_before :]
        try:
            rows = self._search_plans(search)
        except NothingFitsError as err:
            raise KeyboardInterrupt(err.message) from err
        if not self.findings.by_goal and row_to_apply([search.original, *rows], self.applied).plan.is_empty:
            raise KeyboardInterrupt
        return rows

    def _meet_goal(self, search: StartedSearch) -> list[LevelRow]:
        """Return one row, of the fastest plan within the budget or the one picked; none for ``--frontier`` alone."""
        goal = self.request.goal
        max_slowdown = self.request.search.asked_slowdown
        started = time.monotonic()
        goal_search = GoalSearch(
            search=search,
            measurements=self.measurements,
            in_backward=self._plans_in_backward(search, max_slowdown or math.inf),
            max_slowdown=max_slowdown,
        )
        rows: list[LevelRow] = []
        has_frontier = goal.needs_frontier
        if goal.pick is not None and not goal.frontier:
            self.findings.notes.append(
                f"There is no frontier file next to the model, so `--pick {goal.pick}` searched again."
            )
        self.prepared.progress.stage("searching the frontier" if has_frontier else "searching within the budget")
        priced_plans = goal_search.worth_showing() if has_frontier else []
        if goal.pick is not None and self.request.backend is None:  # compiled steps are added later
            check_pick(goal.pick, len(priced_plans))
        if goal.budget is not None:
            original_outcome = search.original.outcome
            original_peak = original_outcome if isinstance(original_outcome, Measurement) else search.original_dry_run
            self.findings.budget_bytes = budget_in_bytes(goal.budget, original_peak.allocated_peak_bytes)
            require_parameters_fit(self.findings.budget_bytes, search.original_dry_run)
            rows.append(self._find_within_or_own(goal_search, self.findings.budget_bytes))
        if has_frontier:
            self.findings.frontier, beaten_sentence = without_beaten(
                self._add_compiled_points(goal_search, goal_search.frontier(priced_plans))
            )
            self.findings.details += filter(None, [beaten_sentence])
        if goal.pick is not None:
            check_pick(goal.pick, len(self.findings.frontier))
            rows.append(goal_search.row_of(self.findings.frontier[goal.pick - 1], started))
        rows[-1:] = [self.measurements.confirm(row) for row in rows[-1:]]
        self.findings.frontier = [self._with_latest_times(point, *rows[-1:]) for point in self.findings.frontier]
        self._choose(search, rows[-1].plan.eager if rows else Plan())
        self._report_time_limit(
            search, lambda: has_frontier or (rows[-1].predicted_slowdown or math.inf) > 1 + _FAST_ENOUGH_SHARE
        )
        return rows

    def _report_time_limit(self, search: StartedSearch, may_improve: Callable[[], bool]) -> None:
        """Report that the time limit has ended ``search``, in a note if a longer search ``may_improve`` the answer.

        Otherwise it goes into a detail, since users took the note for a failure.
        """
        over = search.probes.over[:1].upper() + search.probes.over[1:]
        if over and may_improve():
            self.findings.notes.append(f"{over}: a longer search may find a better plan.")
        elif over:
            self.findings.details.append(f"{over}: a longer search would hardly find a better plan.")

    def _find_within_or_own(self, goal_search: GoalSearch, budget_bytes: int) -> LevelRow:
        """Return the row of the fastest plan within ``budget_bytes``, or the original's if only its checkpoints are."""
        try:
            return self._find_within(goal_search, budget_bytes)
        except NothingFitsError:
            own, row = self.findings.own_checkpoints, goal_search.search.original
            if own is None or own.allocated_peak_bytes > budget_bytes or not isinstance(row.outcome, Measurement):
                raise
            return replace(row, level=goal_search.search.options.level)

    def _find_within(self, goal_search: GoalSearch, budget_bytes: int) -> LevelRow:
        """Return the row of the fastest plan within ``budget_bytes``; with ``--compile`` among compiled ones too."""
        if self.request.backend is None or self.findings.interrupted:
            return goal_search.within(budget_bytes)
        eager: LevelRow | None = None
        error: NothingFitsError | None = None
        try:
            eager = self.measurements.confirm(goal_search.within(budget_bytes))
        except NothingFitsError as err:
            error = err
        compiled = self._compiled_search(FastestCompiled, goal_search.search, goal_search.max_slowdown or math.inf)
        best = compiled.answer(eager)
        if error is not None and best is None:
            error.hint = "\n".join([error.hint, *compiled.failures()])
            raise error
        row = best or eager
        assert row is not None, "without a plan that fits, the error was raised"
        return row

    def _add_compiled_points(self, goal_search: GoalSearch, eager: list[ParetoPoint]) -> list[ParetoPoint]:
        """Return the ``eager`` points, and with ``--compile`` points of verified compiled steps, fastest first."""
        if self.request.backend is None or self.findings.interrupted:
            return eager
        if not self.findings.compiled:  # ``--budget`` has measured them already
            self._compiled_search(SpreadCompiled, goal_search.search, goal_search.max_shown_slowdown).measure()
        original = self.measurements.known(ORIGINAL)
        original_s = None if original is None else original.step_s
        points = eager + [
            ParetoPoint(plan=row.plan, outcome=row.outcome, original_step_s=original_s)
            for row in self.findings.compiled
            if row.plan.compile is not None and not row.dropped
        ]
        return sorted(points, key=lambda p: (not p.plan.is_empty, p.slowdown or p.predicted_slowdown or math.inf))

    def _search_levels(self, search: StartedSearch) -> list[LevelRow]:
        """Search level by level, and return a row for every level from 1 on."""
        climb = Climb(
            search=search,
            measurements=self.measurements,
            measure_all=self.request.measure_levels or not search.traced.has_dry_runs,
        )
        rows = climb.rows()
        self.applied = self._add_compiled(search, rows, self._add_in_backward(search, rows, climb.applied))
        self._choose(search, row_to_apply([search.original, *rows], self.applied).plan)
        self._report_time_limit(search, climb.may_go_lower)
        return rows

    def _add_in_backward(
        self, search: StartedSearch, rows: list[LevelRow], applied: LevelRow | None
    ) -> LevelRow | None:
        """Return the ``applied`` row, with the optimizer in backward if that lowers its peak; update ``rows`` too.

        Where that was not requested, a note has the saving.  Return ``None`` if the row's latest times are too long.
        """
        if applied is None:
            return applied
        row = replace(applied, plan=row_to_apply([search.original, *rows], applied).plan)
        priced = search.planner.dry_runs.get(row.plan)
        max_slowdown = search.options.max_slowdown or math.inf
        assert priced is not None, "the planner found the applied plan by a dry run"
        plans = self._plans_in_backward(search, max_slowdown)
        timed_row = plans.of_level(row, priced)
        if not search.options.optimizer_in_backward and self.prepared.subject.settings.may_update_in_backward:
            self.findings.notes += filter(None, [plans.offer(priced)])
        if timed_row is None:  # time the row again: the attempt above may have timed the original again
            retimed = replace(applied, outcome=self.measurements.measure(applied.plan))
            timed_row = self.measurements.confirm(retimed, max_slowdown)
        rows[rows.index(applied)] = timed_row
        is_new = timed_row.plan not in self.findings.accepted_before
        original = self.measurements.measure(ORIGINAL)
        dropped = judge_measurement(timed_row, original, max_slowdown, counts_error=is_new)
        if dropped is None:
            return timed_row
        self.findings.drop(dropped)
        return None

    def _add_compiled(self, search: StartedSearch, rows: list[LevelRow], applied: LevelRow | None) -> LevelRow | None:
        """Return the ``applied`` row, or with ``--compile`` a compiled step that peaks lower; update ``rows`` too."""
        if self.request.backend is None or self.findings.interrupted:
            return applied
        compiled = self._compiled_search(SmallestCompiled, search, search.options.max_slowdown or math.inf)
        best = compiled.answer(applied or search.original)
        if best is None or (best.plan.compile is None and applied is None):
            return applied
        rows[rows.index(applied) if applied in rows and best.plan.compile is None else -1] = best
        return best

    def _compiled_search(self, cls: type[Compiled], search: StartedSearch, max_slowdown: float) -> Compiled:
        """Return a search of class ``cls`` for the compiler of ``--compile``; it shares the prover's verifications."""
        assert self.request.backend is not None, "called only with `--compile`"
        return cls(
            backend=self.request.backend,
            max_slowdown=max_slowdown,
            search=search,
            measurements=self.measurements,
            verify=self.prover.verify,
            verifications=self.prover.known,
        )

    def _plans_in_backward(self, search: StartedSearch, max_slowdown: float) -> InBackwardPlans:
        return InBackwardPlans(
            count=search.count_late,
            measurements=self.measurements,
            fault=self.prover.verify_and_explain,
            max_slowdown=max_slowdown,
            drop=self.findings.drop,
            is_allowed=search.options.optimizer_in_backward,
        )

    def _with_latest_times(self, point: ParetoPoint, applied: LevelRow | None = None) -> ParetoPoint:
        """Return ``point`` with the latest times, if it is the original or the ``applied`` plan.

        Those two are timed in alternation at the end: then the frontier and the applied row show the same times.
        """
        original = self.measurements.measure(ORIGINAL)
        applied_plan = applied.plan if applied else ORIGINAL
        if not isinstance(original, Measurement) or point.plan not in (ORIGINAL, applied_plan):
            return point
        outcome = self.measurements.measure(point.plan)
        return replace(point, outcome=outcome, original_step_s=original.step_s)

    def _choose(self, search: StartedSearch, plan: Plan) -> None:
        """Record which modules are segments of ``plan``, why requested ones are not, and the neighbouring plans."""
        modules, by_goal = search.traced.trace.modules, self.findings.by_goal
        self.findings.selection = describe_selection(modules, plan, search.options, by_goal=by_goal)
        self.findings.notes += refusal_notes(self.findings.selection.refusals)
        if not plan.segments:
            self.findings.notes += loop_notes(modules)
        failures = search.planner.dry_runs.failures
        for failed, failure in [*failures.items()][:1]:  # the first dry run that failed, before any plan was dropped
            dropped = DroppedPlan(plan=failed, peak_bytes=None, original_bytes=None, why=NotRun(failure=failure))
            self.findings.dropped.insert(0, dropped)
        refused = [dropped.plan for dropped in self.findings.dropped]
        self.findings.faster, self.findings.smaller = search.planner.neighbours(plan, refused)

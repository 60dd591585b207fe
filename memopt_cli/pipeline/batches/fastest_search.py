"""Finding the pair of a batch and a plan that trains fastest, for ``memopt recommend-batch --search``.

A plan makes each sample slower, but lets a larger batch fit, which makes each sample faster.  To find the best pair
without running them all:

1. Run the original to find its best batch, and record its step at two batches.
2. From these two records, compute the step at any batch, with or without a plan.  A planner proposes the fastest plan
   at larger and larger batches.
3. Find by dry runs the largest batch of each of the most promising plans.
4. Run the best pairs, choose the fastest, and verify it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import NothingFitsError, VerificationError
from memopt_cli.files.memopt_files import fastest_data
from memopt_cli.files.outputs import pair_paths
from memopt_cli.measure.jobs import ORIGINAL, Data, TraceAnswer, TraceJob
from memopt_cli.pipeline.batches.batch_cases import Case, CaseSearch
from memopt_cli.pipeline.batches.batch_probes import BatchProbes, check_varied, limit_text, optimizer_state_notes
from memopt_cli.pipeline.batches.pair_runs import PairRuns, best_original, finalists, rank_pairs
from memopt_cli.pipeline.batches.pricing import Pricing
from memopt_cli.pipeline.batches.recommendation import accumulation_notes, batch_file, call_of, check_inputs
from memopt_cli.pipeline.batches.scaled_models import ScaledModels
from memopt_cli.pipeline.batches.trials import Trials
from memopt_cli.pipeline.heads import heads_notes
from memopt_cli.pipeline.own_checkpoints import without_own_checkpoints
from memopt_cli.pipeline.prepare import PreparedModel, file_header, load_request_for, prepare
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.verification import fault_in, verify_plan
from memopt_cli.records import (
    BatchProbe,
    BatchRequest,
    DroppedPlan,
    Failure,
    FastestTraining,
    ModelCall,
    OutOfMemory,
    PairRun,
    Plan,
    SearchOptions,
    Verification,
    describe,
)
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.batch_size.memory_limit import compute_limits
from memopt_cli.search.batch_size.pair_search import PairSearch
from memopt_cli.search.batch_size.peak_model import PeakModel, Predict
from memopt_cli.search.batch_size.runs import Limits
from memopt_cli.search.plan.dry_runs import TimeIsUp
from memopt_cli.search.plan.scaled import ScaledStep
from memopt_cli.text.units import exact_bytes, format_bytes
from memopt_cli.text.writing import check_targets, content, note_existing_plan, write_all

_MAX_RUNS = 8
"""Maximum number of runs, the original's included."""
_MAX_ORIGINAL_RUNS = 4
"""Maximum number of runs of the original, unless its best batch needs one more."""
_MIN_DRY_RUN_BATCH = 4
"""Minimum batch of dry runs: smaller ones do not show along which axes modules can run in chunks."""


_CHECKPOINTS_OFF_NOTE = (
    "Batches without a plan also run with the model's own checkpointing off: turn it off in your script if one of them "
    "is the answer."
)


def fastest_prepared(request: BatchRequest, prepared: PreparedModel) -> FastestTraining:
    """Find the pair that trains fastest for ``prepared``; nothing is written.

    Raises :class:`MemoptError`, among them :class:`NothingFitsError` if no batch fits with any plan.
    """
    assert request.search is not None, "called only with `--search`"
    started, resolved = time.monotonic(), request.search
    check_inputs(request.dim_range, prepared)
    check_varied(prepared)
    without_checkpoints = without_own_checkpoints(prepared, measures=False)
    checkpoint_notes = [] if without_checkpoints is prepared else [_CHECKPOINTS_OFF_NOTE]
    prepared = without_checkpoints
    if not resolved.options.targets:
        prepared = replace(prepared, subject=replace(prepared.subject, layer_runs=True))
    limits = compute_limits(
        request.memory, prepared.subject.settings.device, request.longest_step_s, request.multiple_of
    )
    limits = replace(limits, max_samples=request.global_batch)
    notes = [*resolved.notes, *prepared.notes, *checkpoint_notes, *optimizer_state_notes(prepared)]
    # Dry runs, and trials of modules in chunks, need a few samples.
    prepared_for_dry_runs = prepared.at(max(prepared.batch, _MIN_DRY_RUN_BATCH))
    session = Sessions(prepared_for_dry_runs, "small batch", notes)
    job = _FastestSearch(
        request=request, options=resolved.options, prepared=prepared, limits=limits, session=session, notes=notes
    )
    try:
        with session:
            job.search()
    except KeyboardInterrupt:  # leaving the session has ended its subprocess
        if not job.runs.usable():
            raise
        prepared.progress.interrupted("The search is interrupted: the best so far is verified. Ctrl-C again: stop.")
        job.interrupted = True
    return replace(job.answer(), spent_s=time.monotonic() - started)


@dataclass(slots=True, kw_only=True)
class _FastestSearch:
    request: BatchRequest
    options: SearchOptions
    prepared: PreparedModel
    limits: Limits
    session: Sessions
    notes: list[str]
    interrupted: bool = False
    untried: str = ""
    """Reason why no plan was tried."""
    call: ModelCall = ModelCall()
    probes: SearchProbes = field(init=False)
    trials: Trials = field(init=False)
    runs: PairRuns = field(init=False)
    pricing: Pricing | None = None
    pairs: list[tuple[Plan, int]] = field(default_factory=list)
    """Priced plans, each with the largest batch at which it was the fastest of those that fit."""
    dry_runs: list[BatchProbes] = field(default_factory=list)
    """Dry runs of each plan."""
    dropped: list[DroppedPlan] = field(default_factory=list)
    """Plans that train faster than the answer but fail verification."""

    def __post_init__(self) -> None:
        self.probes = SearchProbes(self.session, limit_s=self.request.search_limit_s)
        self.trials = Trials(prepared=self.prepared, limit_bytes=self.limits.budget_bytes)
        self.runs = PairRuns(
            trials=self.trials,
            limits=self.limits,
            global_batch=self.request.global_batch,
            micro_batches=self.prepared.subject.settings.micro_batches,
        )

    def search(self) -> None:
        """Run the original at its best batches, then the plans that may train faster."""
        with contextlib.suppress(TimeIsUp):
            self._run_all()
        if self.probes.is_late():
            self.notes.append(f"{self.probes.over[:1].upper()}{self.probes.over[1:]}.")

    def _run_all(self) -> None:
        """Run the original, then the plans, then the best pairs again.

        Raises :class:`TimeIsUp` if the time limit is reached in the runs of the original.
        """
        self.call = call_of(self.session)
        case = self._run_original_batches()
        if not self.probes.is_late():
            first_batch = max(self.prepared.batch, _MIN_DRY_RUN_BATCH, self.limits.multiple_of)
            step = self.trials.step(first_batch)
            self.notes += self.trials.notes.get(max(self.trials.records, default=0), [])
            if isinstance(step, ScaledStep):
                self._price_and_run(step, case)
            else:
                self.untried = f"the step could not be recorded at a second batch size ({step})"
                self.notes.append(f"No plan was tried: {self.untried}.")
        if not self.probes.is_late():
            self._run_finalists()

    def _price_and_run(self, step: ScaledStep, case: Case) -> None:
        """Price plans at larger batches by ``step``, and run those that may train faster."""
        self.prepared.progress.stage("pricing plans at larger batches")
        pricing = self.pricing = Pricing(
            models=ScaledModels(step=step, record=self._record, runs=self.trials.successful_runs),
            probes=self.probes,
            options=self.options,
            progress=self.prepared.progress,
        )
        priced_ratio = _priced_ratio(self.trials, pricing)
        search = PairSearch(
            limits=self.limits,
            fastest=lambda batch: pricing.fastest(batch, int(self.limits.budget_bytes / priced_ratio)),
            predict=lambda plan: self._predict(plan, pricing),
            ratio=case.search.model.measured_ratio() if case.search.model.predict else priced_ratio,
            room_share=_usable_share(case.search.model, self.limits.budget_bytes),
            step_s=pricing.step_s,
            update_s=pricing.models.update_s,
            samples_per_s=self.runs.samples_per_s,
            is_growth_known=lambda: pricing.growth_known,
            usable_batch=self.runs.largest_usable,
            run=self.trials.run,
            runs_left=lambda: _MAX_RUNS - self.trials.count,
            is_over=self.probes.is_late,
        )
        pairs = self.pairs = search.price(self.runs.largest_usable(case.search.runs.best))
        self.prepared.progress.stage("running the plans that may be faster")
        search.try_pairs(pairs, max((pair.samples_per_s or 0.0 for pair in self.runs.usable()), default=0.0))
        if not self.runs.usable() and not self.probes.is_late():
            unit = self.limits.multiple_of
            plan = pricing.least(unit)
            search.try_pairs([] if plan.is_empty else [(plan, unit)], 0.0)

    def _run_finalists(self) -> None:
        """Run the best pairs once more, as a busy machine may have changed their order."""
        pairs = finalists(self.runs.all(), max_pairs=_MAX_RUNS - self.trials.count)
        if pairs:
            self.prepared.progress.stage("running the best again")
        for pair in pairs:
            self.trials.run_again(pair.plan, pair.batch)

    def _run_original_batches(self) -> Case:
        """Run the original at its largest batch, and at smaller ones while they are faster."""
        case = Case(planned=False, plan=ORIGINAL, dims={})
        search = CaseSearch(
            prepared=self.prepared,
            notes=self.notes,
            limits=self.limits,
            max_runs=_MAX_ORIGINAL_RUNS,
            run=self._run_original,
        )
        try:
            search.find_batches([case], self.session)
        finally:
            self.dry_runs += [batch_search.probes for batch_search in search.searched]
        largest = case.search.runs.best
        if largest:
            self.prepared.progress.stage("finding the fastest batch")
            best, *smaller = dict.fromkeys(
                filter(None, map(self.runs.largest_usable, (largest, largest // 2, largest // 4)))
            )
            # Rounding to a part of the global batch may give a new batch: allow a run for it.
            if best not in case.search.runs:
                search.max_runs = max(search.max_runs, search.runs + 1)
            search.run_more(case, lambda batch_search: batch_search.also_run([best]))
            search.run_more(case, lambda batch_search: batch_search.find_faster(smaller, max_runs=search.left))
        return case

    def _run_original(self, batch: int) -> BatchProbe | Failure:
        """Run the original at ``batch``.  Raises :class:`TimeIsUp` after the time limit, if there is an answer."""
        if self.probes.is_late() and self.runs.usable():
            raise TimeIsUp
        return self.trials.run(ORIGINAL, batch)

    def _record(self, plan: Plan, batch: int) -> TraceAnswer | Failure:
        is_run = isinstance(self.trials.outcomes.get((ORIGINAL, batch)), BatchProbe)
        data: Data = "full size" if is_run else "small batch"
        return self.prepared.at(batch).ask(TraceJob(plan=plan, fake=True), data)

    def _predict(self, plan: Plan, pricing: Pricing) -> Predict:
        """Return a function from a batch to the peak of ``plan``: by dry runs if possible, else by ``pricing``."""
        probes = BatchProbes(session=self.session, plan=plan, progress=self.prepared.progress)
        self.dry_runs.append(probes)
        if math.isfinite(self.dry_runs[0].predict(self.prepared.batch)):
            return probes.predict
        return functools.partial(pricing.peak_bytes, plan)

    def answer(self) -> FastestTraining:
        """Return the best pair whose plan passes verification.  Raises :class:`NothingFitsError` if no run fits."""
        pairs = self.runs.all()
        chosen, verification = self._choose_verified(pairs)
        accumulation = self.runs.accumulation(pairs[chosen].batch)
        if accumulation is not None:
            self.notes += accumulation_notes(accumulation, self.prepared.facts, self.call)
        if pairs[chosen].late:
            longest_s = self.limits.longest_step_s
            self.notes.append(
                f"No step took {longest_s:g} s or less (`--longest-step`): the recommended batch has the shortest step."
            )
        self.notes += heads_notes(pairs[chosen].plan)
        if pairs[chosen].plan == ORIGINAL:
            faults = [dropped.plan for dropped in self.dropped]
            larger = [(plan, batch) for plan, batch in self.pairs if plan not in faults]
            self.notes += larger_batch_notes(larger, pairs, self.limits.budget_bytes)
        if self.interrupted:
            self.notes.append("The search was interrupted: further runs might have given a better answer.")
        return FastestTraining(
            header=file_header(self.prepared.at(pairs[chosen].batch)),
            budget_bytes=self.limits.budget_bytes,
            limit=limit_text(self.limits, self.prepared),
            runs=tuple(pairs),
            chosen=chosen,
            original=best_original(pairs),
            level=self.options.level,
            accumulation=accumulation,
            verification=verification,
            priced=0 if self.pricing is None else self.pricing.priced,
            dry_runs=sum(len(probes.dry_runs) for probes in self.dry_runs),
            times_run=self.trials.count,
            notes=tuple(dict.fromkeys((*self.notes, *self.prepared.messages))),
            files=(),
            spent_s=0.0,
            step=self.prepared.subject.settings,
            call=self.call,
            interrupted=self.interrupted,
            dropped=tuple(self.dropped),
        )

    def _choose_verified(self, pairs: list[PairRun]) -> tuple[int, Verification | None]:
        for index in rank_pairs(pairs):
            plan, batch = pairs[index].plan, pairs[index].batch
            if plan == ORIGINAL:
                return index, None
            verification = verify_plan(self.prepared.at(batch), plan, fits=False)
            if isinstance(verification, Verification) and verification.passed:
                return index, verification
            self._drop(pairs[index], verification)
        if self.dropped:
            reason = self.dropped[-1].why
            raise VerificationError(f"a plan was found that fits, but {reason.because}", hint=reason.remedy)
        raise self._nothing_fits()

    def _drop(self, pair: PairRun, outcome_of_verification: Verification | Failure) -> None:
        """Record that the plan of ``pair`` would be the answer, but fails verification."""
        reason, outcome = fault_in(outcome_of_verification), pair.outcome
        assert reason is not None, "the plan failed verification"
        peak_bytes = outcome.allocated_peak_bytes if isinstance(outcome, BatchProbe) else None
        self.dropped.append(DroppedPlan(plan=pair.plan, peak_bytes=peak_bytes, original_bytes=None, why=reason))

    def _nothing_fits(self) -> NothingFitsError:
        unit = self.limits.multiple_of
        text = f"not even a batch of {unit} fits in {self.limits.text}"
        if self.probes.is_late():
            text += f" without a plan, and {self.probes.over}"
            return NothingFitsError(text, hint="Raise `--search-time` or `--memory`.")
        if self.pricing is None:
            text += f" without a plan, and none was tried: {self.untried}"
            return NothingFitsError(text, hint="Raise `--memory`, or use smaller inputs.")
        hint = "Raise `--memory` or `--level`, or use smaller inputs."
        plan = self.pricing.least(unit)
        run = self.trials.outcomes.get((plan, unit))
        if run is not None and not isinstance(run, BatchProbe):
            return NothingFitsError(
                f"{text} with any plan that was found; the smallest plan fails: {describe(run)}", hint=hint
            )
        priced_bytes = self.pricing.peak_bytes(plan, unit) * _priced_ratio(self.trials, self.pricing)
        smallest = (
            f"is about {format_bytes(priced_bytes)}"
            if run is None
            else f"took {format_bytes(run.allocated_peak_bytes)}"
        )
        return NothingFitsError(f"{text} with any plan that was found; the smallest {smallest}", hint=hint)


def larger_batch_notes(priced: Sequence[tuple[Plan, int]], runs: Sequence[PairRun], budget_bytes: int) -> Iterator[str]:
    """Yield a sentence on the largest batch in ``priced``, if it is larger than every batch of ``runs`` that fits.

    The answer has no plan, as that is faster; a user may want the larger batch all the same.
    """
    batch = max((batch for _, batch in priced), default=0)
    if batch > max((run.batch for run in runs if run.usable), default=0):
        yield (
            f"A larger batch is predicted to fit with a plan: about {batch}. `memopt optimize` at that batch, with "
            f"`--budget {exact_bytes(budget_bytes)}`, finds its plan."
        )


def recommend_fastest(request: BatchRequest, *, progress: Progress, ask: Ask | None) -> FastestTraining:
    """Find the pair of a batch and a plan that trains fastest, and write both to files.

    Raises :class:`MemoptError`, among them :class:`UsageError` if a file exists and may not be replaced.
    """
    batch_path, plan_path = pair_paths(request.source.location, request.output)
    check_targets([batch_path, plan_path], force=request.force)
    prepared = prepare(load_request_for(request, request.step), progress=progress, ask=ask)
    training = fastest_prepared(request, prepared)
    if training.answer.plan.is_empty:
        files = {batch_path: batch_file(training.header, fastest_data(training, None))}
        training = replace(training, notes=(*training.notes, *note_existing_plan(plan_path)))
    else:
        files = {
            batch_path: batch_file(training.header, fastest_data(training, plan_path.name)),
            plan_path: content(plan_yaml(training.header, training.answer.plan, training.level)),
        }
    return replace(training, files=write_all(files, force=request.force))


def _usable_share(model: PeakModel, within_bytes: int) -> float:
    """Return the share of the memory to plan for.

    It is below 1 if the original ran out of memory although its predicted peak fits.
    """
    peaks_out_of_memory = [model.peak_bytes(batch) for batch, run in model.runs.items() if isinstance(run, OutOfMemory)]
    largest_fitting = max((run.allocated_peak_bytes for run in model.runs.fitting), default=0)
    return (
        largest_fitting / within_bytes
        if largest_fitting and any(peak <= within_bytes for peak in peaks_out_of_memory)
        else 1.0
    )


def _priced_ratio(trials: Trials, pricing: Pricing) -> float:
    """Return the ratio of the measured peak to the priced one, at the original's largest batch."""
    runs = (run for plan, run in trials.successful_runs() if plan == ORIGINAL)
    largest = max(runs, key=lambda run: run.batch, default=None)
    return 1.0 if largest is None else largest.allocated_peak_bytes / pricing.peak_bytes(ORIGINAL, largest.batch)

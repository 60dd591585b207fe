"""Predicting on how many ranks a step fits, and the largest batch of each rank, for ``recommend-batch --ranks``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from memopt_cli.errors import NothingFitsError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.inputs.spec_text import ranks_asked
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.batch_probes import (
    BatchProbes,
    check_varied,
    limit_text,
    loop_warning,
    optimizer_state_notes,
)
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.prepare import PreparedModel, file_header, load_request_for, prepare
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    BatchRequest,
    Failure,
    NoBatchFits,
    NotPredicted,
    Plan,
    RankBatch,
    RankLayout,
    RanksRecommendation,
    RanksRow,
    StepFailed,
    StepPeaks,
    describe,
    make_prediction,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.batch_size.memory_limit import limits_elsewhere
from memopt_cli.search.batch_size.runs import Limits
from memopt_cli.text.units import format_count


def recommend_ranks(request: BatchRequest, *, progress: Progress, ask: Ask | None) -> RanksRecommendation:
    """Predict the largest batch of one rank for each layout of ``request``.

    Raises :class:`MemoptError`, among them :class:`NothingFitsError` if the smallest batch fits nowhere.
    """
    plan = read_plan(request.plan_path)[1] if request.plan_path is not None else None
    load_request = load_request_for(request, request.settings, layout=request.layouts[-1])
    prepared = prepare(replace(load_request, plan=plan or ORIGINAL), progress=progress, ask=ask)
    return recommend_ranks_prepared(request, prepared, plan)


def recommend_ranks_prepared(request: BatchRequest, prepared: PreparedModel, plan: Plan | None) -> RanksRecommendation:
    """Predict the largest batches of ``prepared`` on each layout, without a plan and with ``plan``."""
    started = time.monotonic()
    if plan is not None:
        plan.require_eager("batches are predicted without a compiler")
    check_varied(prepared)
    limits = limits_elsewhere(request.memory, request.card, request.multiple_of)
    job = _RanksSearch(
        request=request,
        prepared=replace(prepared, subject=replace(prepared.subject, card=request.card)),
        limits=limits,
        notes=[*prepared.notes, *optimizer_state_notes(prepared, "twice the bytes of a rank's parameters")],
    )
    interrupted = False
    try:
        for layout in request.layouts:
            job.rows += job.find_rows(layout, plan)
    except KeyboardInterrupt:  # leaving the session has ended its subprocess
        if not job.fitting:
            raise
        interrupted = True
        job.notes.append("The search was interrupted before all numbers of ranks were tried.")
    job.check()
    return RanksRecommendation(
        header=file_header(prepared),
        limit=limit_text(limits, prepared),
        rows=tuple(job.rows),
        fewest_ranks=job.fitting[0].layout.ranks,
        notes=(*job.notes, *prepared.messages),
        dry_runs=job.dry_runs,
        spent_s=time.monotonic() - started,
        interrupted=interrupted,
        card="" if request.card is None else request.card.name,
    )


@dataclass(slots=True, kw_only=True)
class _RanksSearch:
    request: BatchRequest
    prepared: PreparedModel
    limits: Limits
    notes: list[str]
    rows: list[RanksRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    dry_runs: int = 0

    @property
    def fitting(self) -> list[RanksRow]:
        """Rows in which a batch fits."""
        return [row for row in self.rows if isinstance(row.outcome, RankBatch)]

    def find_rows(self, layout: RankLayout, plan: Plan | None) -> Iterator[RanksRow]:
        """Yield a row for ``layout`` without a plan, and one under ``plan``, if there is one."""
        for candidate in [ORIGINAL] if plan is None else [ORIGINAL, plan]:
            suffix = " under the plan" if candidate is plan else ""
            self.prepared.progress.stage(f"finding the batch that fits on {format_count(layout.ranks, 'rank')}{suffix}")
            answer = self._find_largest(layout, candidate, self._first_batch(planned=candidate is plan))
            outcome = answer if isinstance(answer, RankBatch | NoBatchFits) else self._failed_outcome(answer)
            yield RanksRow(layout=layout, planned=candidate is plan, outcome=outcome)

    def _failed_outcome(self, failure: Failure) -> NotPredicted:
        """Return ``failure`` as the outcome of a row.

        Raises :class:`MemoptError` if the number of ranks did not cause it, unless a batch was found already.
        """
        if not isinstance(failure, StepFailed) and not self.fitting:
            raise_failure(failure)
        self.failures.append(failure)
        return NotPredicted(reason=describe(failure))

    def check(self) -> None:
        """Raise :class:`MemoptError` if no row has a batch that fits."""
        if self.fitting:
            return
        rows_without_batch = [row for row in self.rows if isinstance(row.outcome, NoBatchFits)]
        if not rows_without_batch:
            raise_failure(self.failures[0])
        row = rows_without_batch[-1]
        assert isinstance(row.outcome, NoBatchFits)
        suffix = " under the plan" if row.planned else ""
        ranks = format_count(row.layout.ranks, "rank")
        more_ranks = "" if row.layout.parallel == "ddp" else "more ranks, "  # in ddp, each rank has the whole model
        raise NothingFitsError(
            f"not even a batch of {row.outcome.batch} on each rank{suffix} fits in {self.limits.text} on {ranks}: "
            f"{row.outcome.reason}",
            hint=f"Use more `--memory`, {more_ranks}smaller inputs, or with `--plan` a plan for these ranks.",
        )

    def _first_batch(self, *, planned: bool) -> int:
        """Return the batch to predict first: the one found on fewer ranks, else the described one, rounded."""
        outcomes = [row.outcome for row in self.rows if row.planned is planned]
        batches = [outcome.batch for outcome in outcomes if isinstance(outcome, RankBatch | NoBatchFits)]
        unit = self.limits.multiple_of
        return batches[-1] if batches else max(unit, self.prepared.batch // unit * unit)

    def _find_largest(self, layout: RankLayout, plan: Plan, start: int) -> RankBatch | NoBatchFits | Failure:
        """Return the largest batch that fits on both the first and the last rank of ``layout``.

        Each rank is searched up to the batch that the other allows, until both allow the same.
        """
        largest_by_rank: dict[int, tuple[int, StepPeaks]] = {}
        ranks, batch = ranks_asked(layout, None), None
        while ranks_to_search := [
            rank for rank in ranks if rank not in largest_by_rank or largest_by_rank[rank][0] != batch
        ]:
            limits = replace(self.limits, max_samples=batch)
            largest = self._find_largest_of_rank(
                layout, ranks_to_search[0], plan, start if batch is None else batch, limits
            )
            if not isinstance(largest, tuple):
                return largest
            largest_by_rank[ranks_to_search[0]] = largest
            batch = largest[0]
        assert batch is not None
        predictions = tuple(make_prediction(largest_by_rank[rank][1], layout, rank, plan) for rank in ranks)
        peaks = [largest_by_rank[rank][1].allocated_peak_bytes for rank in ranks]
        largest_rank = predictions[peaks.index(max(peaks))]
        return RankBatch(
            batch=batch,
            global_batch=batch * largest_rank.data_ranks * self.request.settings.micro_batches,
            peak_bytes=max(peaks),
            exchanged_bytes=largest_rank.exchanged_bytes,
            ranks=predictions,
        )

    def _find_largest_of_rank(
        self, layout: RankLayout, rank: int, plan: Plan, start: int, limits: Limits
    ) -> tuple[int, StepPeaks] | NoBatchFits | Failure:
        subject = replace(self.prepared.subject, layout=layout, rank=rank)
        prepared = replace(self.prepared, subject=subject)
        with Sessions(prepared, "none", self.notes) as session:
            place = f"rank {rank} of {layout.ranks}"
            probes = BatchProbes(session=session, plan=plan, progress=self.prepared.progress, place=place)
            first_dry_run = probes.count(start)
            if not isinstance(first_dry_run, StepPeaks):
                return first_dry_run
            search = probes.search(start, limits)
            try:
                while True:
                    outcome = search.outcome()
                    if isinstance(outcome, NoBatchFits):
                        return outcome
                    batch = search.model.largest_within(limits.budget_bytes)
                    dry_run = probes.count(batch)  # the search may have interpolated this peak: check it
                    if isinstance(dry_run, StepPeaks) and dry_run.allocated_peak_bytes <= limits.budget_bytes:
                        return batch, dry_run
            finally:
                self.dry_runs += len(probes.dry_runs)
                if (warning := loop_warning(probes)) and warning not in self.notes:
                    self.notes.append(warning)

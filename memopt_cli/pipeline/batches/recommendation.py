"""Finding the largest and the fastest batch that fit, each confirmed by a run, for ``memopt recommend-batch``."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memopt_cli.errors import MemoptError, NothingFitsError, UsageError
from memopt_cli.files.memopt_files import batch_yaml, read_plan, recommended_data, replicas_data
from memopt_cli.files.outputs import check_outputs, output_paths
from memopt_cli.inputs.batch_axis import BATCH, with_batch
from memopt_cli.measure.jobs import ORIGINAL, CallJob, ProbeJob
from memopt_cli.pipeline.batches.batch_cases import Case, CaseSearch
from memopt_cli.pipeline.batches.batch_probes import check_varied, limit_text, optimizer_state_notes
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.prepare import LEFT_OUT_NOTE, PreparedModel, file_header, load_request_for, prepare_with_plan
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    Accumulation,
    AdaptiveSizing,
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    BatchRecommendation,
    BatchRequest,
    BatchShaping,
    CompilePlan,
    DimRange,
    FileHeader,
    LengthBatching,
    ModelCall,
    ModelFacts,
    NoBatchFits,
    Plan,
    to_data,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.batch_size.accumulation import accumulate, make_accumulation
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.batch_size.length_comparison import RUNS, compare_lengths, size_of_length_symbol
from memopt_cli.search.batch_size.length_strategies import read_lengths
from memopt_cli.search.batch_size.memory_limit import compute_limits, limits_elsewhere
from memopt_cli.text.documents import quoted_flag
from memopt_cli.text.units import format_bytes, format_copies
from memopt_cli.text.writing import Fill, content, write_all


def recommend_batch(request: BatchRequest, *, progress: Progress, ask: Ask | None) -> BatchRecommendation:
    """Find the batch that fits into the memory of ``request``, and write the batch configuration if it gives a path.

    Raises :class:`MemoptError`, among them :class:`NothingFitsError` if not even the smallest batch fits.
    """
    plan = read_plan(request.plan_path)[1] if request.plan_path is not None else None
    lengths = read_lengths(request.lengths_path) if request.lengths_path is not None else []
    if request.output is not None:
        check_outputs([Path(request.output)], request.source.location, force=request.force)
    load_request = load_request_for(
        request, request.step, card=request.card, fake=request.fake, backend=request.backend
    )
    load_request = replace(
        load_request, plan=plan or ORIGINAL, replicas=request.replicas is not None, dim_range=request.dim_range
    )
    prepared = prepare_with_plan(load_request, progress=progress, ask=ask)  # fails if the plan does not suit the model
    if plan is None and request.replicas is None and prepared.carried == ORIGINAL:
        prepared = replace(prepared, notes=(*prepared.notes, *_unused_plan_notes(request, prepared.facts)))
    return recommend_prepared(request, prepared, plan, lengths)


def _unused_plan_notes(request: BatchRequest, facts: ModelFacts) -> Iterator[str]:
    """Yield a note on how to use the plan next to the model, if ``memopt optimize`` wrote one for exactly this model.

    The plan is not used by default: its file may have come with the model, and the user may train without it.
    """
    location = request.source.location
    path = output_paths(location, None).plan
    with contextlib.suppress(OSError, MemoptError):  # the user has not named it: no error
        header, plan = read_plan(path)
        is_for_this_model = header.sha256 == facts.sha256 and (facts.sha256 is not None or header.model == location)
        is_usable = plan.compile is None or not (request.backend or request.uncompiled)
        if is_for_this_model and is_usable and plan != ORIGINAL:
            flag = quoted_flag("--plan", str(path))
            yield f"The plan in {path} is not used. Add `{flag}` to see also which batch fits under the plan."


_ESTIMATED_NOTE = "Nothing was run: peaks are estimates in blocks of the allocator of {}, without kernel workspaces."
_PREDICTED_NOTE = "Nothing was run: peaks are tensor peaks, predicted without data and without kernel workspaces."


def recommend_prepared(
    request: BatchRequest, prepared: PreparedModel, plan: Plan | None, lengths: Sequence[int]
) -> BatchRecommendation:
    """Find the batch that fits for ``prepared``, without a plan and with ``plan``, and for sequences of ``lengths``.

    ``plan``: ``None`` stands for the plan that the model carries, if any.
    """
    started, note = time.monotonic(), LEFT_OUT_NOTE
    if plan is None and request.replicas is None and prepared.carried != ORIGINAL:
        plan = prepared.carried
        note = "The model carries a plan: a batch is sought without the plan and with it."
    prepared = prepared.without_carried(note)
    if plan is not None and request.uncompiled:
        plan.require_eager(f"{request.uncompiled} measures or predicts steps without a compiler")
    if plan is not None and request.backend is not None:
        plan.require_eager("`--compile` compiles it as well")
    check_inputs(request.dim_range, prepared)
    check_varied(prepared)
    longest = size_of_length_symbol(lengths, prepared.subject.spec, request.dim_range) if lengths else {}
    notes = [*prepared.notes, *optimizer_state_notes(prepared)]
    device = prepared.subject.settings.device
    if request.card is not None:
        limits = limits_elsewhere(request.memory, request.card, request.multiple_of)
        prepared = replace(prepared, subject=replace(prepared.subject, card=request.card))
        notes.append(_ESTIMATED_NOTE.format(request.card.name))
    elif request.fake:
        limits = compute_limits(request.memory, device, math.inf, request.multiple_of)
        limits = replace(limits, runnable_bytes=0, probes=0)
        notes.append(_PREDICTED_NOTE)
    else:
        limits = compute_limits(request.memory, device, request.longest_step_s, request.multiple_of)
    search = CaseSearch(
        prepared=prepared,
        notes=notes,
        limits=limits,
        max_runs=limits.probes - RUNS * bool(lengths),
        replicas=request.replicas.sizes() if request.replicas is not None else (),
    )
    job = _Recommender(request=request, prepared=prepared, longest=longest, search=search)
    try:
        with contextlib.ExitStack() as folders, Sessions(prepared, prepared.dry_data, notes) as session:
            search.prepared = prepared.with_compiler_cache(folders)
            recommendation = job.recommend(session, plan, lengths)
    except KeyboardInterrupt:  # the subprocess has ended by now
        if not job.proven:
            raise
        recommendation = job.so_far()
    if request.output is not None:
        file = batch_file(recommendation.header, _recommended_data(recommendation))
        recommendation = replace(recommendation, files=write_all({Path(request.output): file}, force=request.force))
    return replace(recommendation, spent_s=time.monotonic() - started)


@dataclass(slots=True, kw_only=True)
class _Recommender:
    request: BatchRequest
    prepared: PreparedModel
    longest: dict[str, int]
    """Dimension -> its size in the longest of the user's sequences, at which the batch must fit; empty without any."""
    search: CaseSearch
    call: ModelCall = ModelCall()
    cases: Sequence[Case] = ()
    """All cases to search, also those whose search has not begun."""
    length_runs: int = 0
    """Number of runs made to compare ways to batch sequences."""

    def recommend(self, session: Sessions, plan: Plan | None, lengths: Sequence[int]) -> BatchRecommendation:
        """Search the batch of each case, make the further runs that the answer needs, and return the answer."""
        self.call = call_of(session)
        sizes: Sequence[dict[str, int]] = [{}]
        if self.request.dim_range is not None:
            sizes = [{self.request.dim_range.symbol: size} for size in self.request.dim_range.sizes()]
        sizes = [size | self.longest for size in sizes]
        plans = [ORIGINAL] if plan is None else [ORIGINAL, plan]
        if self.request.backend is not None:
            plans = [replace(p, compile=CompilePlan(backend=self.request.backend)) for p in plans]
        self.cases = cases = [
            Case(planned=index > 0, plan=p, dims=dims) for index, p in enumerate(plans) for dims in sizes
        ]
        self.search.find_batches(cases, session)
        if len(sizes) == 1 and not lengths and self.request.runs:
            self._run_smaller_batches(cases)
        main = self._main_case(cases)
        accumulation = self._accumulation(main)
        if accumulation is not None and main.search.runs.fitting:
            self.search.run_more(main, lambda search: search.also_run([accumulation.batch]))
        strategies = self._compare(lengths, main, session) if lengths else ()
        return self._answer(cases, main, accumulation, strategies)

    @property
    def proven(self) -> bool:
        """Whether some batch was run and fits."""
        return any(case.fits for case in self.search.searched)

    def so_far(self) -> BatchRecommendation:
        """Return the answer that the runs before an interruption give, without further runs."""
        for case in self.search.searched:
            if case.copies is not None and case.copies.fitting and case.settled is None:
                case.settle(case.copies.advice("the interruption"))
            case.search.interrupt()
        self.search.runs = sum(len(case.search.runs) for case in self.search.searched)
        self.length_runs = 0
        self.search.notes.append("The search was interrupted: further runs might have given a better answer.")
        cases = [case for case in reversed(self.search.searched) if case.search.runs.fitting]
        if untried := [case.text.strip() or "without the plan" for case in self.cases if case not in cases]:
            self.search.notes.append(f"Nothing was run yet that fits {', '.join(untried)}: this has no row.")
        main = self._main_case(cases)
        return replace(self._answer(cases, main, self._accumulation(main), ()), interrupted=True)

    def _answer(
        self,
        cases: Sequence[Case],
        main: Case,
        accumulation: Accumulation | None,
        strategies: tuple[LengthBatching, ...],
    ) -> BatchRecommendation:
        if accumulation is not None:
            if main.search.runs.fitting and accumulation.batch not in main.search.runs:
                self.search.notes.append(f"Batch {accumulation.batch} was not run, but a larger batch was.")
            facts, was_run = self.prepared.facts, self.request.runs
            self.search.notes += accumulation_notes(accumulation, facts, self.call, was_run=was_run)
        return BatchRecommendation(
            header=file_header(self.prepared),
            objective=self.request.aim,
            limit=limit_text(self.search.limits, self.prepared),
            rows=tuple(case.row() for case in cases),
            chosen=cases.index(main),
            batch=self._chosen_batch(main),
            verified=bool(main.search.runs.fitting),
            accumulation=accumulation,
            lengths=strategies,
            notes=(*self.search.notes, *self.prepared.messages),
            probes=self.search.runs
            + self.length_runs
            + sum(len(case.replicas.probes) - 1 for case in cases if case.replicas is not None),
            dry_runs=sum(len(case.probes.dry_runs) for case in cases),
            files=(),
            spent_s=0.0,
            step=self.prepared.subject.settings,
            call=self.call,
            plan=self.request.plan_path or "",
            card="" if self.request.card is None else self.request.card.name,
            backend=self.request.backend or "",
        )

    def _main_case(self, cases: Sequence[Case]) -> Case:
        """Return the recommended case, one at the largest size: see :attr:`BatchRecommendation.chosen`.

        Cases with a run come before those with an estimate; of two equally good cases, the one under the plan wins.
        """
        outcomes = [(case, case.search.outcome()) for case in reversed(cases)]
        for kind in (BatchAdvice, BatchEstimate):
            if cases_of_kind := [case for case, outcome in outcomes if isinstance(outcome, kind)]:
                rivals = [case for case in cases_of_kind if case.dims == cases_of_kind[0].dims]
                return max(rivals, key=self._rating)
        smallest = outcomes[-1][1]
        assert isinstance(smallest, NoBatchFits)
        copies = f" for {format_copies(cases[0].probes.replicas)}" if self.request.replicas else ""
        planned = (case.search.outcome() for case in cases[1:] if case.planned and case.dims == cases[0].dims)
        plan_failure = next((outcome.reason for outcome in planned if isinstance(outcome, NoBatchFits)), "")
        reasons = f"{smallest.reason}; under the plan, {plan_failure}" if plan_failure else smallest.reason
        # With these, a batch of 1 may take more than a larger one in a single pass.
        if self.prepared.subject.settings.micro_batches > 1:
            reasons += ", with the gradients of earlier micro-batches in memory"
        raise NothingFitsError(
            f"not even a batch of {smallest.batch}{copies}{cases[0].text} fits in {self.search.limits.text}: {reasons}",
            hint="Raise `--memory`, use smaller inputs"
            + (". See memopt explain." if plan_failure else ", or add `--plan` with a plan of memopt optimize."),
        )

    def _rating(self, case: Case) -> float:
        """Return the rating of ``case``: samples a second for ``throughput``, else the samples of a step that fits."""
        if self.request.aim == "throughput" and case.search.runs.fitting:
            return case.search.runs.fastest.samples_per_s
        outcome = case.search.outcome()
        batch = self._chosen_batch(case)
        # This machine may be too small to run steps that fit into the memory asked about.
        if isinstance(outcome, BatchAdvice) and self.search.limits.runnable_bytes < self.search.limits.budget_bytes:
            batch = outcome.estimated_batch
        return batch * case.probes.replicas

    def _run_smaller_batches(self, cases: Sequence[Case]) -> None:
        """Run smaller batches of the cases that may be recommended, since a smaller batch may train faster."""
        is_max = self.request.aim == "max"
        candidates = [self._main_case(cases)] if is_max else [case for case in cases if case.search.runs.fitting]
        unit = self.request.multiple_of
        for cases_left, case in zip(range(len(candidates), 0, -1), candidates, strict=True):
            self.prepared.progress.stage(f"finding the fastest batch{case.text}")
            runs = self.search.left - (self.request.global_batch is not None)
            best = case.search.runs.fitting[-1].batch // unit if case.search.runs.fitting else 0
            faster = [best // 2 * unit, best // 4 * unit] if best else []
            self.search.run_more(
                case, functools.partial(BatchSearch.find_faster, batches=faster, max_runs=-(-runs // cases_left))
            )

    def _accumulation(self, main: Case) -> Accumulation | None:
        """Return the number of passes in a step of the optimizer; ``None`` for one pass and no global batch."""
        batch = self._chosen_batch(main)
        global_batch = self.request.global_batch
        if global_batch is None:
            return make_accumulation(batch, self.request.settings.micro_batches)
        return accumulate(global_batch, batch, self.request.multiple_of)

    def _compare(self, lengths: Sequence[int], main: Case, session: Sessions) -> tuple[LengthBatching, ...]:
        """Compare ways to batch sequences of ``lengths``, by runs at several lengths.

        Raises :class:`MemoptError` if one of the runs fails.
        """
        self.prepared.progress.stage("comparing ways to batch sequences")
        ((symbol, longest),) = self.longest.items()

        def probe(size: int, steps: int) -> BatchProbe:
            run = main.search.runs.get(size) if steps == longest else None
            if run is None:
                self.length_runs += 1
                self.prepared.progress.update(0, None, f"running batch {size}, {symbol}={steps}")
                run = session().ask(ProbeJob(plan=main.plan, batch=size, dims={**main.dims, symbol: steps}))
            return require_answer(run, f"batch {size} of {steps} steps, which `--lengths` needs, could not be run: ")

        batch, runnable = (
            self._chosen_batch(main),
            main.search.runs.fitting[-1].batch if main.search.runs.fitting else 1,
        )
        return compare_lengths(
            lengths,
            batch=batch,
            runnable=min(batch, runnable),
            budget_bytes=self.search.limits.budget_bytes,
            seed=self.request.settings.seed,
            probe=probe,
        )

    def _chosen_batch(self, main: Case) -> int:
        outcome = main.search.outcome()
        assert not isinstance(outcome, NoBatchFits)
        if isinstance(outcome, BatchEstimate):
            return outcome.batch
        return outcome.fastest_batch if self.request.aim == "throughput" else outcome.recommended_batch


def call_of(session: Sessions) -> ModelCall:
    """Return the call of the model; a default if the model does not run, for which the search has the reason."""
    answer = session().ask(CallJob())
    return answer if isinstance(answer, ModelCall) else ModelCall()


def accumulation_notes(
    accumulation: Accumulation, facts: ModelFacts, call: ModelCall, *, was_run: bool = True
) -> Iterator[str]:
    """Yield notes on the differences of accumulation from the steps that were run, and from one large batch."""
    start = "Every step was run with" if was_run else "The peaks are of a step with"
    text = f"{start} the gradients of earlier passes in memory, as in accumulation."
    if accumulation.steps == 1:
        text += f" A single pass has none before it, so its peak is up to {format_bytes(facts.trainable_bytes)} lower."
    yield text
    if accumulation.batch * accumulation.steps != accumulation.global_batch:
        yield (
            f"No number of equal passes from {accumulation.steps} to {2 * accumulation.steps} makes up "
            f"{accumulation.global_batch} samples; {accumulation.steps} × {accumulation.batch} are "
            f"{accumulation.batch * accumulation.steps}."
        )
    yield from one_batch_notes(accumulation, facts, call)


def one_batch_notes(accumulation: Accumulation, facts: ModelFacts, call: ModelCall) -> Iterator[str]:
    """Yield warnings where batch normalization, or a loss of ``call``, makes accumulation differ from one batch."""
    if accumulation.steps == 1:
        return
    if call.loss == "of targets":  # the user's own, such as a Dice loss over the batch
        yield "Accumulation trains as one large batch does only if the loss is a mean over samples."
    if facts.batch_norms:
        yield (
            f"The model has batch normalization, whose statistics cover {accumulation.batch} samples, not "
            f"{accumulation.global_batch}, so accumulation is not the same training step as one large batch."
        )


def check_inputs(dim_range: DimRange | None, prepared: PreparedModel) -> None:
    """Raise :class:`UsageError` for inputs with a fixed batch, or without the range's symbol in their shapes."""
    spec = prepared.subject.spec
    with_batch(spec, prepared.batch + 1)
    if dim_range is None:
        return
    if dim_range.symbol == BATCH:
        raise UsageError(
            f"{BATCH} cannot have a range, since the command looks for its size",
            hint=f"Set its size: `--dim {BATCH}=8`.",
        )
    symbols = {size for tensor in spec.tensors for size in tensor.shape if isinstance(size, str)}
    if spec.tensors and dim_range.symbol not in symbols:
        raise UsageError(
            f"{dim_range.symbol} is not a dimension of the inputs, whose symbols are: "
            f"{', '.join(sorted(symbols)) or 'none'}",
            hint=f"Name it in a shape, for example `-i Bx{dim_range.symbol}@int64=0..32000`.",
        )


def batch_file(header: FileHeader, recommended: Mapping[str, Any]) -> Fill:
    """Return the content of a ``*.batch.yaml``: a configuration of the ``recommended`` batch size, and its evidence."""
    shaping = BatchShaping(adaptive_sizing=AdaptiveSizing(max_batch_size=recommended["batch_size"]))
    return content(batch_yaml(header, shaping=to_data(shaping), recommended=recommended))


def _recommended_data(recommendation: BatchRecommendation) -> Mapping[str, Any]:
    row = recommendation.rows[recommendation.chosen]
    data: dict[str, Any] = {}
    if isinstance(row.outcome, BatchAdvice):
        data |= recommended_data(row.outcome, recommendation.batch)
        if row.replicas is not None:
            data |= replicas_data(row.replicas)
    data |= {"batch_size": recommendation.batch, "verified": recommendation.verified}
    if recommendation.backend:
        data["compile"] = recommendation.backend
    if recommendation.accumulation is not None:
        data["accumulation"] = to_data(recommendation.accumulation)
    if recommendation.lengths:
        data["lengths"] = to_data(recommendation.lengths)
    if len(recommendation.rows) > 1:
        data["rows"] = to_data(recommendation.rows)
    return data

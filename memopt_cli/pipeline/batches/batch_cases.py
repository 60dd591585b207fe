"""Searching the largest batch of each case of a recommendation: a plan, or none, at given sizes of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import StepError
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.batches.batch_probes import (
    BatchProbes,
    fixed_batch_reason,
    limiting_note,
    loop_warning,
    one_batch_error,
)
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import BatchProbe, BatchRow, Failure, OutOfMemory, Plan, ReplicaAdvice, StepPeaks, describe
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.batch_size.replicas import ReplicaSearch
from memopt_cli.search.batch_size.runs import Limits
from memopt_cli.text.units import format_copies

_LOOP_TIME_SHARE = 0.02
"""If the model loops over its batch, steps may take at most this share of ``--longest-step``.

A larger batch is hardly faster then, and takes long to run: a GRU cell over 850 rows trained 170 samples a second, over
7,076 rows 115, and six runs took ten minutes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Case:
    """A plan and sizes of the inputs, with the search for their largest batch."""

    planned: bool
    plan: Plan
    dims: dict[str, int]
    probes: BatchProbes = field(init=False)
    search: BatchSearch = field(init=False)
    copies: ReplicaSearch | None = None
    settled: ReplicaAdvice | None = None
    """Number of copies that train fastest at the described batch; ``None`` if not searched, or if none fits."""

    @property
    def fits(self) -> bool:
        """Whether some batch, or some number of copies, was run and fits."""
        return bool(self.search.runs.fitting or (self.copies is not None and self.copies.fitting))

    def settle(self, advice: ReplicaAdvice) -> None:
        """Fix the number of copies to the fastest in ``advice``, whose run counts as the first of the batch search."""
        self.settled, self.probes.replicas = advice, advice.fastest
        self.search.runs[self.search.batch] = advice.best

    def settle_on_fewest(self) -> None:
        """Fix the number of copies to the fewest, which do not fit at the described batch, to search a smaller one."""
        assert self.copies is not None
        ((self.probes.replicas, self.search.runs[self.search.batch]),) = self.copies.outcomes.items()

    @property
    def replicas(self) -> ReplicaAdvice | None:
        """Number of copies that train fastest, each at its largest batch if none fits at the described one."""
        if self.settled is not None or self.copies is None or not self.search.runs.fitting:
            return self.settled
        reason = f"at batch {self.search.batch} {format_copies(self.probes.replicas)} would take more"
        return ReplicaAdvice(
            fastest=self.probes.replicas,
            probes=(self.search.runs.fitting[-1],),
            limited_by=f"{self.search.runs.limits.name}, {reason}",
        )

    def row(self) -> BatchRow:
        """Return the row of the report: the batch that fits, according to the runs so far."""
        return BatchRow(planned=self.planned, dims=self.dims, outcome=self.search.outcome(), replicas=self.replicas)

    @property
    def text(self) -> str:
        """Case as text, `` at S=128 under the plan``, or nothing."""
        sizes = "".join(f" at {symbol}={size}" for symbol, size in self.dims.items())
        return sizes + (" under the plan" if self.planned else "")


@dataclass(slots=True, kw_only=True)
class CaseSearch:
    """A search of several cases, one after another, with a limit on all their runs together."""

    prepared: PreparedModel
    notes: list[str]
    limits: Limits
    max_runs: int
    """Maximum number of runs to find the batches that fit, in all cases together."""
    replicas: Sequence[int] = ()
    """Numbers of copies to choose from; empty: a single model is trained."""
    run: Callable[[int], BatchProbe | Failure] | None = None
    """A function that runs a batch, as in :attr:`BatchProbes.run`."""
    runs: int = 0
    searched: list[Case] = field(default_factory=list)
    """Cases whose search has begun, the last first."""

    def find_batches(self, cases: Sequence[Case], session: Callable[[], Session]) -> None:
        """Search ``cases``, the last first; each passes the ratio of measured peaks to dry runs on to the next.

        The last cases are those with the plan and with long sequences, which need their runs most if runs are scarce.
        """
        ratio = 1.0
        for cases_left, case in zip(range(len(cases), 0, -1), reversed(cases), strict=True):
            self.prepared.progress.stage(f"finding the batch that fits{case.text}")
            is_compiled = case.plan.compile is not None
            case.probes = BatchProbes(
                session=(lambda: self.prepared) if is_compiled else session,  # compiled: a fresh process for each batch
                plan=case.plan,
                progress=self.prepared.progress,
                dims=case.dims,
                limit_bytes=self.limits.budget_bytes,
                run=self.run,
            )
            batch, multiple = self.prepared.batch, self.limits.multiple_of
            run_count = max(-(-(self.max_runs - self.runs) // cases_left), 0 if self.runs else min(2, self.max_runs))
            limits = replace(self.limits, probes=run_count)
            case.search = case.probes.search(max(multiple, batch // multiple * multiple), limits, ratio)
            self.searched.append(case)
            if refusal := fixed_batch_reason(case.search, self.prepared):
                raise StepError(refusal, hint="Pass the tensor that it refers to as an input, one for each batch.")
            if self.replicas:
                self._find_copies(case)
            self._limit_loop(case)
            case.search.find()
            self._require_runs(case)
            if failure := case.probes.failure_in_words(case.search.model.limiting_dry_run()):
                self.notes.append(limiting_note(failure, case.text))
            self.runs += len(case.search.runs)
            ratio = case.search.model.measured_ratio() if case.search.model.predict else 1.0

    def _limit_loop(self, case: Case) -> None:
        """Detect a step that loops over its batch; add a note, and limit its runs to short steps."""
        runs, model = case.search.runs, case.search.model
        if model.predict is not None:
            # This costs nothing: the search needs these dry runs.
            predicted_batch = model.largest_within(runs.limits.budget_bytes)
            if predicted_batch and runs.limits.probes:
                warning = f"Dry runs predict that about batch {predicted_batch} fits{case.text}; runs confirm it."
                self.prepared.progress.note(warning)
        if not (warning := loop_warning(case.probes)):
            return
        if runs.limits.probes:
            longest_s = _LOOP_TIME_SHARE * runs.limits.longest_step_s
            name = "a fiftieth of `--longest-step`"
            runs.limits = replace(runs.limits, longest_step_s=longest_s, time_name=name)
            warning += f" Its steps are kept to {longest_s:g} s, {name}."
        if warning not in self.notes:
            self.notes.append(warning)

    def _find_copies(self, case: Case) -> None:
        """Find the fastest number of copies, and search ``case`` with it."""
        self.prepared.progress.stage(f"finding the number of copies{case.text}")
        batch = case.search.batch
        case.copies = ReplicaSearch(
            probe=lambda copies: replace(case.probes, replicas=copies).probe(batch), limits=self.limits, batch=batch
        )
        answer = case.copies.fastest(self.replicas)
        if isinstance(answer, Failure):
            raise_failure(answer, f"{format_copies([*case.copies.outcomes][-1])} with batch {batch}: ")
        if isinstance(answer, ReplicaAdvice):
            case.settle(answer)
        else:
            case.settle_on_fewest()
        self.prepared.progress.stage(f"finding the batch that fits{case.text}")

    def _require_runs(self, case: Case) -> None:
        """Raise :class:`MemoptError` if no batch of ``case`` ran, and memory is not the reason."""
        failures = [run for run in case.search.runs.values() if not isinstance(run, BatchProbe)]
        other_failures = [failure for failure in failures if not isinstance(failure, OutOfMemory)]
        if other_failures and not case.search.runs.measured:
            raise_failure(other_failures[0])
        if case.search.model.predict is None and not case.search.runs:
            limit, hint = f"{self.max_runs} runs are the limit", "Use a range of fewer sizes for `--dim`."
            if not self.max_runs:
                limit, hint = "nothing is to be run", "Run it on that device, without `--for` or `--fake`."
            raise StepError(
                f"the step cannot run on tensors without data, so nothing is known{case.text} without a run, and "
                f"{limit}",
                hint=hint,
            )
        if refusal := case.search.refusal():
            raise one_batch_error(case.search.batch, refusal, case.text)
        if case.search.model.predict is None:
            self.notes.append(self._no_dry_runs_note(case))

    def _no_dry_runs_note(self, case: Case) -> str:
        """Return a sentence on why ``case`` has no dry runs."""
        reason, because = "Dry runs do not know compiled steps", ""
        if case.plan.compile is None:
            dry_run = case.probes.count(case.search.batch)
            reason = "Dry runs fail"
            because = f": {describe(dry_run)}" if not isinstance(dry_run, StepPeaks) else ""
        return f"{reason}{case.text}, so peaks are extrapolated from runs alone{because}."

    @property
    def left(self) -> int:
        """Number of runs that may still be made."""
        return self.max_runs - self.runs

    def run_more(self, case: Case, run: Callable[[BatchSearch], None]) -> None:
        """Continue the finished search of ``case`` by ``run``, within the runs that are left."""
        search, runs_before = case.search, len(case.search.runs)
        search.runs.limits = replace(search.runs.limits, probes=runs_before + self.left)
        run(search)
        self.runs += len(search.runs) - runs_before

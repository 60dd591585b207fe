"""Running and dry-running a step at one batch after another in profiling subprocesses, to find the largest batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from memopt_cli.errors import StepError, UsageError
from memopt_cli.inputs.batch_axis import check_batch
from memopt_cli.measure.jobs import CountJob, Job, ProbeJob, ReplicasJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import STEP, BatchProbe, Failure, Plan, StepFailed, StepPeaks, describe
from memopt_cli.records.progress import Progress
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.batch_size.lines import fit_line, interpolate
from memopt_cli.search.batch_size.runs import Limits
from memopt_cli.text.units import format_bytes

_MAX_OPERATORS = 50_000
"""Maximum number of operators that a dry run may have; so many take half a minute on a slow core."""


def check_varied(prepared: PreparedModel) -> None:
    """Raise :class:`UsageError` for a model, or for inputs, whose batch cannot be varied."""
    if prepared.facts.fixed_sizes:
        raise UsageError(
            f"torch.export fixed every size in {prepared.subject.source.location}, the batch size included",
            hint="Export it again with dynamic_shapes={'x': {0: torch.export.Dim('batch')}}, x being its input.",
        )
    check_batch(prepared.subject.spec, prepared.batch)


def fixed_batch_reason(search: BatchSearch, prepared: PreparedModel) -> str:
    """Return why dimension 0 of the inputs seems not to be the batch, if the batch cannot be varied.

    Example: a model holds the edges of one graph as indices, and its inputs have one row for each node.  With more rows
    it runs, pointlessly; with fewer it fails, as edges point at missing rows.  So the model is tried on fewer rows.
    """
    largest_indices = {name: largest for name, largest in prepared.facts.indices.items() if largest < search.batch}
    if not largest_indices:
        return ""
    name = max(largest_indices, key=lambda name: largest_indices[name])
    refusal = search.smaller_refusal(largest_indices[name])
    if not refusal:
        return ""
    return (
        f"'{name}' of the model seems to point at rows of the inputs, so dimension 0 is not the batch: with "
        f"{largest_indices[name]} of the {search.batch} described, {refusal}"
    )


def one_batch_error(batch: int, failure: StepFailed, case_text: str = "") -> StepError:
    """Return the error for a step that runs at ``batch`` only, with its ``failure`` at other batches.

    ``case_text``: the case, such as `` at S=128``.
    """
    if failure.in_loss:
        return StepError(
            f"the step runs at batch {batch} only{case_text}, as if the loss held {batch} targets: {failure.message}",
            hint="Let the loss take as many targets as there are samples, targets[: len(output)], and hold at least as "
            "many as the largest batch has.",
        )
    return StepError(
        f"the model runs at batch {batch} only{case_text}: {failure.message}",
        hint="Use x.shape[0] in its code, not a fixed batch size, and export it with dynamic_shapes.",
    )


def limiting_note(failure: str, case_text: str = "") -> str:
    """Return a sentence on a ``failure`` in a dry run that limits the batch, though memory may suffice.

    ``case_text``: the case, such as `` at S=128``.
    """
    hint = " Let the loss hold as many targets as the largest batch has." if failure.startswith("the loss") else ""
    return f"No larger batch is considered{case_text}, though memory may suffice: {failure}.{hint}"


def loop_warning(probes: BatchProbes) -> str:
    """Return a warning that the step loops over its batch; empty if it does not seem to."""
    if probes.operators_per_sample < 1:
        return ""
    small, large = min(probes.operators), max(probes.operators)
    return (
        f"The step runs {probes.operators[small]} operators at batch {small} and {probes.operators[large]} at batch "
        f"{large}: the model loops over its batch. If dimension 0 is time, name the batch in the shape: "
        "`-i 16xBx32 --dim B=4`."
    )


def optimizer_state_notes(prepared: PreparedModel, adamw: str = "") -> tuple[str, ...]:
    """Return a sentence on the optimizer's state, which no peak includes if no optimizer was named.

    ``adamw``: the size of AdamW's state, as text; empty to compute it for the state of all parameters.
    """
    settings, facts = prepared.subject.settings, prepared.facts
    if settings.optimizer or facts.format == STEP or not facts.trainable_bytes:
        return ()
    adamw = adamw or format_bytes(2 * facts.trainable_bytes)
    return (f"No optimizer is counted; AdamW's state would add {adamw}. Name yours, or none, with `--optimizer`.",)


def limit_text(limits: Limits, prepared: PreparedModel) -> str:
    """Return the budget of ``limits`` as text, followed by the memory that it leaves out."""
    if not optimizer_state_notes(prepared):
        return limits.text
    return f"{limits.text}, without an optimizer's state, which `--optimizer adamw` counts"


@dataclass(slots=True, kw_only=True)
class BatchProbes:
    """A cache of dry runs, and a source of runs, at any batch of one plan and one set of input sizes."""

    session: Callable[[], Session | PreparedModel]
    plan: Plan
    progress: Progress
    dims: dict[str, int] = field(default_factory=dict)
    """Symbol of a dimension -> its size, where it differs from the described inputs."""
    limit_bytes: int | None = None
    """Memory of the device to emulate, in bytes; ``None`` for the memory of this device."""
    replicas: int = 1
    """Number of copies of the model that are trained together."""
    run: Callable[[int], BatchProbe | Failure] | None = None
    """A function that runs a batch, if the caller also records it; by default :class:`ProbeJob` runs it."""
    dry_runs: dict[int, float] = field(default_factory=dict)
    """Batch -> peak of one copy in bytes by a dry run; for a card of ``--for``, in blocks of its allocator."""
    operators: dict[int, int] = field(default_factory=dict)
    """Batch, of more than one sample -> number of operators in its dry run."""
    inferred: dict[int, float] = field(default_factory=dict)
    """Batch -> peak in bytes read off a line through dry runs at other batches, without a dry run at this one."""
    place: str = ""
    """Words that progress shows with a batch, such as "rank 0 of 8"."""
    _counted: dict[int, StepPeaks | Failure] = field(default_factory=dict)

    def search(self, batch: int, limits: Limits, ratio: float = 1.0) -> BatchSearch:
        """Return a search that starts at ``batch``, with dry runs where the model can be run without data.

        Compiled steps have no dry runs.
        """
        is_data_free = self.plan.compile is None and math.isfinite(self.predict(batch))
        return BatchSearch(
            batch=batch,
            probe=self.probe,
            predict=self.predict if is_data_free else None,
            limits=limits,
            ratio=ratio if is_data_free else 1.0,
        )

    def predict(self, batch: int) -> float:
        """Return the peak at ``batch`` in bytes by a dry run, or by a line through others; infinite if it fails.

        A step that loops over its batch runs more operators the larger the batch.  Where a dry run would take too long,
        the peak is read off the line through the two largest batches that had one.
        """
        return self.replicas * self._predict_one_copy(batch)

    def _predict_one_copy(self, batch: int) -> float:
        if batch in self.inferred:
            return self.inferred[batch]
        if batch not in self.dry_runs:
            interpolated = self._extrapolate(batch) if self._is_too_long(batch) else interpolate(self.dry_runs, batch)
            if interpolated is not None:
                return self.inferred.setdefault(batch, interpolated)
            self.count(batch)
        return self.dry_runs[batch]

    def count(self, batch: int) -> StepPeaks | Failure:
        """Return the dry run of one copy at ``batch``, even where a line through others predicts its peak."""
        if batch not in self._counted:
            self.progress.update(0, None, f"batch {self._sizes_in_words(batch)}, without data")
            dry_run = self.session().ask(CountJob(plan=self.plan, fake=True, batch=batch, dims=self.dims))
            self._counted[batch] = dry_run
            self.inferred.pop(batch, None)
            self.dry_runs[batch] = dry_run.allocated_peak_bytes if isinstance(dry_run, StepPeaks) else math.inf
            if isinstance(dry_run, StepPeaks) and batch > 1:  # a single sample may take an operator less than two
                self.operators[batch] = dry_run.operators
        return self._counted[batch]

    def failure_in_words(self, batch: int | None) -> str:
        """Return that the dry run at ``batch`` failed, and the first line of its error; empty for no batch."""
        run = self._counted.get(batch or 0)
        if run is None or isinstance(run, StepPeaks):
            return ""
        what = "the loss" if isinstance(run, StepFailed) and run.in_loss else "a dry run"
        error = describe(run).splitlines()[0].removeprefix("the loss failed: ").removesuffix(".")
        return f"{what} fails at batch {batch}: {error}"

    @property
    def operators_per_sample(self) -> float:
        """Number of operators that each further sample adds; 0 while unknown.

        It stays unknown under a plan with chunks or compressors, since their operators vary: a batch smaller than the
        number of chunks runs in fewer of them, and small tensors are not packed.
        """
        is_packed = self.plan.packs or any(segment.compressor != "null" for segment in self.plan.everywhere)
        if len(self.operators) < 2 or self.plan.has_chunks or is_packed:
            return 0.0
        (small_batch, operators_at_small), *_, (large_batch, operators_at_large) = sorted(self.operators.items())
        return (operators_at_large - operators_at_small) / (large_batch - small_batch)

    def _is_too_long(self, batch: int) -> bool:
        if self.operators_per_sample <= 0:
            return False
        largest = max(self.operators)
        return self.operators[largest] + self.operators_per_sample * (batch - largest) > _MAX_OPERATORS

    def _extrapolate(self, batch: int) -> float:
        intercept, slope = fit_line([(size, self.dry_runs[size]) for size in sorted(self.operators)[-2:]])
        return intercept + slope * batch

    def probe(self, batch: int) -> BatchProbe | Failure:
        """Run a step at ``batch``, and return its allocated peak and its time."""
        if self.run is not None:
            return self.run(batch)
        self.progress.update(0, None, f"running batch {self._sizes_in_words(batch)}")
        answer = self.session().ask(self._job(batch))
        peak = format_bytes(answer.allocated_peak_bytes) if isinstance(answer, BatchProbe) else "cannot run"
        self.progress.update(0, None, f"batch {self._sizes_in_words(batch)} · {peak}")
        return answer

    def _job(self, batch: int) -> Job[BatchProbe]:
        plan, dims, limit_bytes = self.plan, self.dims, self.limit_bytes
        if self.replicas == 1:
            return ProbeJob(plan=plan, batch=batch, dims=dims, limit_bytes=limit_bytes)
        return ReplicasJob(plan=plan, batch=batch, dims=dims, limit_bytes=limit_bytes, replicas=self.replicas)

    def _sizes_in_words(self, batch: int) -> str:
        copies = f"{self.replicas} × " if self.replicas > 1 else ""
        sizes = [str(batch), *(f"{symbol}={size}" for symbol, size in self.dims.items())]
        return copies + ", ".join(filter(None, [*sizes, self.place]))

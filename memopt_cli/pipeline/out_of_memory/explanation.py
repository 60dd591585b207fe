"""Find which tensors hold the memory when it runs out, and try changes that make the step fit, for ``memopt explain``.

It starts from an error in a log, a snapshot of PyTorch's allocator, a model, or several of these.  With a model, a step
is recorded to find the first instant at which more is allocated than there is memory; the changes are then run.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from memopt_cli.errors import MemoptError, NothingFitsError, UsageError
from memopt_cli.files.outputs import output_paths
from memopt_cli.measure.jobs import ORIGINAL, CountJob, Measured, MeasureJob, SnapshotJob, Subject, Traced, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.batches.recommendation import norm_notes, recommend_prepared
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.memory.profiling import record_step
from memopt_cli.pipeline.memory.step_peaks import allocated_peak, first_beyond, is_alive, live_bytes
from memopt_cli.pipeline.out_of_memory.oom_text import read_oom
from memopt_cli.pipeline.own_checkpoints import own_checkpoints_notes, without_own_checkpoints
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.optimization import find
from memopt_cli.pipeline.prepare import Opening, Prepared, file_header, prepare
from memopt_cli.records import (
    STEP,
    BatchAdvice,
    BatchRequest,
    Budget,
    Counted,
    ExplainRequest,
    Explanation,
    Holder,
    Measurement,
    ModelSource,
    OptimizeRequest,
    OutOfMemoryText,
    Plan,
    SearchGoal,
    SearchOverrides,
    SnapshotFacts,
    StepSettings,
    StepTrace,
    StorageTrace,
    Suggestion,
    break_down,
    describe,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.batch_size.capacity import runnable_bytes
from memopt_cli.search.batch_size.memory_limit import limits_of
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.documents import quoted_path, read_end
from memopt_cli.text.units import exact_bytes, format_bytes

_SHARE: Final = 0.9
"""Share of the device's free memory that counts as the limit, where neither the user nor an error gives one."""
_MAX_LOG_BYTES: Final = 16 << 20
"""Maximum number of bytes read from the end of a log, where the last failure is."""
_BY_ERROR: Final = "what tensors held and what was free, by the error"
_MORE: Final = (
    "Name the model as well, with the inputs of a step (memopt explain model.pt `-i 64x3x224x224`, and `--optimizer` "
    "if you train with one), and what would fit is tried."
)
_KEPT: Final = 200
"""Maximum number of modules, or of lines of code, that are listed as holders of memory."""
_LEVEL: Final = 4
"""Level of the search for a plan: the highest, as the step must fit by any means."""
_SEARCH_S: Final = 30.0
"""Time limit of the search for a plan, in seconds."""
_LONGEST_STEP_S: Final = 60.0
"""Longest step that the search for micro-batches runs, in seconds."""
_ROOMY: Final = 0.8
"""Share of this machine's memory up to which a step, by its predicted peak, is run to record it."""
_LONGEST_LOOK_S: Final = 20.0
"""Time limit, in seconds, of a step that is run for its kernel workspaces alone: they hardly change the answer."""


def explain(request: ExplainRequest, *, progress: Progress, ask: Ask | None = None) -> Explanation:
    """Read the error or snapshot, if given, find the instant at which memory runs out, and try changes that fit.

    Raises :class:`MemoptError`.
    """
    started = time.monotonic()
    error = _error_of(request.log_path) if request.log_path is not None else None
    snapshot = _snapshot_of(request) if request.snapshot_path is not None else None
    asked = error.asked_bytes if error else snapshot.asked_bytes if snapshot else 0
    if request.source is not None:
        opening = Opening(
            source=request.source, spec=request.spec, settings=request.settings, timeout_s=request.timeout_s
        )
        prepared = prepare(opening, progress=progress, ask=ask)
        reported = _reported_limit(error, snapshot) if request.memory is None else None
        found = _explained(request, prepared, *(reported or _limit_here(request, prepared)))
        if asked and found.instant is None:
            found = replace(found, counted_as=_counted_as(prepared))
            # The step fits into the memory here, but it ran out of memory elsewhere: that limit is not known.
            if request.memory is None and reported is None:
                found = replace(found, limit_bytes=0, limit="")
    elif snapshot is not None:
        found = _of_snapshot(snapshot)
    elif error is not None:
        found = _of_error(error)
    else:
        raise UsageError("there is no model to explain", hint="Name it, or give `--log FILE` or `--snapshot FILE`.")
    return replace(
        found,
        notes=(*found.notes, *_fragmented(error)),
        asked_bytes=asked,
        raised_at=error.line if error else "",
        lines=snapshot.lines[:_KEPT] if snapshot else found.lines,
        spent_s=time.monotonic() - started,
    )


def _of_snapshot(snapshot: SnapshotFacts) -> Explanation:
    """Explain ``snapshot`` alone: without a model, no change can be tried."""
    return Explanation(
        header=None,
        limit_bytes=snapshot.reserved_bytes + snapshot.free_bytes,
        limit="what the snapshot tells",
        needed_bytes=snapshot.allocated_bytes,
        notes=(_MORE,),
    )


def _of_error(error: OutOfMemoryText) -> Explanation:
    """Explain ``error`` by the numbers in its message alone."""
    numbers = (
        f"By the error, tensors held {format_bytes(error.allocated_bytes)}, PyTorch's allocator held "
        f"{format_bytes(error.reserved_bytes)} that no tensor used, and {format_bytes(error.free_bytes)} were free."
    )
    return Explanation(
        header=None,
        limit_bytes=error.available_bytes,
        limit=_BY_ERROR,
        needed_bytes=error.allocated_bytes,
        notes=(numbers, _MORE) if error.available_bytes else (_MORE,),
    )


def _counted_as(prepared: Prepared) -> str:
    """Return words on how the step was counted, for a step that fits here though a run of it ran out of memory."""
    settings = prepared.subject.settings
    given = {"`--optimizer`": settings.optimizer not in ("", "none"), "`--loss`": settings.loss is not None}
    missing = [] if prepared.facts.format == STEP else [flag for flag, is_given in given.items() if not is_given]
    without = f", without {' and '.join(missing)}" if missing else ""
    return (
        f"the step was counted at batch {prepared.batch}{without}: describe it as it was run. What else the process "
        "held, such as another model or results that keep their graph, is not counted"
    )


# ---------------------------------------------------------------------------------------------- errors and snapshots


def _error_of(path: str) -> OutOfMemoryText:
    try:
        text = read_end(path, _MAX_LOG_BYTES).decode(errors="replace")
    except OSError as err:
        raise UsageError(f"{path} cannot be read: {err.strerror}", hint="Check the path.") from err
    found = read_oom(text)
    if found is None:
        raise UsageError(
            f"{path} has no out-of-memory message",
            hint='PyTorch\'s begins with "CUDA out of memory. Tried to allocate".',
        )
    return found


def _fragmented(error: OutOfMemoryText | None) -> tuple[str, ...]:
    if error is None or error.reserved_bytes < error.asked_bytes:
        return ()
    return (
        f"PyTorch's allocator held {format_bytes(error.reserved_bytes)} that no tensor used, in pieces that were too "
        "small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them.",
    )


def _snapshot_of(request: ExplainRequest) -> SnapshotFacts:
    assert request.snapshot_path is not None
    with Session(Subject(source=ModelSource(location=request.snapshot_path)), request.timeout_s) as session:
        return required(session.ask(SnapshotJob(path=str(Path(request.snapshot_path).absolute()))))


def _limit_here(request: ExplainRequest, prepared: Prepared) -> tuple[int, str]:
    """Return the memory limit in bytes by the request, or else by the device, and its name."""
    memory = _SHARE if request.memory is None else request.memory
    limits = limits_of(memory, prepared.subject.settings.device, _LONGEST_STEP_S)
    return limits.budget_bytes, limits.name


def _reported_limit(error: OutOfMemoryText | None, snapshot: SnapshotFacts | None) -> tuple[int, str] | None:
    """Return the memory limit in bytes that the error or the snapshot gives, and its source; ``None`` for neither."""
    if error is not None and error.available_bytes:
        return error.available_bytes, _BY_ERROR
    if snapshot is not None and snapshot.asked_bytes:
        return snapshot.allocated_bytes + snapshot.free_bytes, "what tensors held and what was free, by the snapshot"
    return None


# ---------------------------------------------------------------------------------------------- the recorded step


def _recorded(prepared: Prepared) -> tuple[StepTrace, list[str]]:
    """Record the step, and return the record and notes on it.

    The step may be the one that does not fit, so it is recorded without data, with the workspaces of a few samples.  If
    this machine has the memory, the full step is run and recorded as well: with more samples, kernels take other
    workspaces, and some models run other operators.
    """
    notes: list[str] = []
    with prepared.session("small batch") as session:
        traced = record_step(session, ORIGINAL, None, notes)
    device = prepared.subject.settings.device
    if traced.trace.allocated_peak_bytes < _ROOMY * runnable_bytes(device):
        look_s = prepared.timeout_s if traced.unknown else min(prepared.timeout_s, _LONGEST_LOOK_S)
        whole = replace(prepared, timeout_s=look_s).ask(TraceJob(plan=ORIGINAL, fake=True))
        if isinstance(whole, Traced):
            return whole.trace, [*(f"{reason}." for reason in whole.unknown), *own_checkpoints_notes(whole.checkpoints)]
    return traced.trace, notes


def _explained(request: ExplainRequest, prepared: Prepared, limit_bytes: int, limit: str) -> Explanation:
    prepared.progress.stage("recording a step")
    trace, notes = _recorded(prepared)
    live = live_bytes(trace)
    needed = allocated_peak(trace, live)
    instant = first_beyond(trace, live, limit_bytes)
    where = instant or needed
    alive = [s for s in trace.storages if is_alive(s, where.op)]
    made = [s for s in alive if s.kind in ("activations", "temporaries")]
    trial = _Trial(request, prepared, limit_bytes)
    stays = _stays(trace, in_backward=request.optimizer_in_backward)
    return Explanation(
        header=file_header(prepared),
        limit_bytes=limit_bytes,
        limit=limit,
        needed_bytes=needed.allocated_bytes,
        instant=instant,
        line=trace.ops[where.op].line if where.op >= 0 else "",  # empty in backward too
        breakdown=break_down((s.kind, s.nbytes) for s in alive),
        modules=_held_by(made, lambda s: s.module),
        lines=_held_by(made, lambda s: trace.ops[s.born].line if s.born >= 0 else ""),
        suggestions=trial.suggestions(stays) if instant is not None else (),
        refused=tuple(trial.refused),
        notes=(*prepared.notes, *notes, *trial.notes, *prepared.heard),
    )


def _stays(trace: StepTrace, *, in_backward: bool) -> int:
    """Return the bytes that no change lowers: those alive before the step, and the gradients that it leaves.

    Inputs do not count, since micro-batches split them, nor do gradients if an optimizer ``in_backward`` frees them.
    """
    left = [s for s in trace.storages if s.died is None and (s.born < 0 or s.kind == "gradients")]
    may_go = ("inputs", "gradients") if in_backward else ("inputs",)
    return sum(s.nbytes for s in left if s.kind not in may_go)


def _held_by(storages: list[StorageTrace], name: Callable[[StorageTrace], str]) -> tuple[Holder, ...]:
    held: dict[str, int] = defaultdict(int)
    for storage in storages:
        held[name(storage)] += storage.nbytes
    most = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Holder(name=name, nbytes=nbytes) for name, nbytes in most[:_KEPT])


# ---------------------------------------------------------------------------------------------- what would fit


def _in_words(plan: Plan) -> str:
    in_backward, plan = plan.in_backward, plan.longest
    count = len(plan.segments)
    parts = (
        f"a plan of {count} segment{'s' * (count != 1)}" * (count > 0),
        "a plan that packs saved tensors" * (plan.packed and not count),
        "the optimizer in backward" * in_backward,
    )
    return ", ".join(filter(None, parts)) or "the step as it is"


class _Trial:
    """A trial of the changes that may make a step fit, each by a run at full size."""

    def __init__(self, request: ExplainRequest, prepared: Prepared, limit_bytes: int) -> None:
        self._request, self._prepared, self._limit_bytes = request, prepared, limit_bytes
        self.refused: list[str] = []
        self.notes: list[str] = []

    def suggestions(self, stays_bytes: int) -> tuple[Suggestion, ...]:
        """Return the changes that make the step fit, fastest first; autocast, which rounds, comes last.

        If no single change fits, a plan and micro-batches are tried together.  ``stays_bytes``: see :func:`_stays`.
        """
        if stays_bytes >= self._limit_bytes:
            taken = format_bytes(stays_bytes)
            is_offered = not self._request.optimizer_in_backward and self._request.settings.may_update_in_backward
            self.refused.append(
                f"memopt cannot make it fit: parameters, gradients, optimizer state and buffers take {taken}."
                + " `--optimizer-in-backward` frees each gradient as soon as it is used." * is_offered
            )
            return ()
        found = [
            *self._attempted("A plan", self._plan),
            *self._attempted("A plan that sends tensors away", lambda: self._plan(sends=True)),
            *self._attempted("Micro-batches", lambda: self._accumulated(ORIGINAL, "")),
            *self._attempted("Autocast to bfloat16", self._autocast),
        ]
        if not found and self._prepared.batch > 1:  # no single change fits
            found = [*self._attempted("A plan and micro-batches", self._both)]
        return tuple(sorted(found, key=lambda said: (said.change == "autocast", said.seconds)))

    def _attempted(self, name: str, attempt: Callable[[], Iterator[Suggestion]]) -> Iterator[Suggestion]:
        try:
            yield from attempt()
        except MemoptError as error:
            self.refused.append(f"{name}: {error.message}.")

    def _plan(self, *, sends: bool = False) -> Iterator[Suggestion]:
        """Yield the fastest plan within the limit, with an optimizer in backward where that helps.

        With ``sends``, plans may send tensors to another place; a plan that does not is left to the call without it.
        """
        place = "disk" if self._prepared.subject.settings.device == "cpu" else "host"
        goal = SearchGoal(budget=Budget(nbytes=self._limit_bytes))
        found = self._search(self._prepared, goal, offload=place if sends else "none")
        if sends and not found.plan.sends:
            return
        row = next(row for row in found.rows if row.plan == found.plan)
        measured = row.outcome
        assert isinstance(measured, Measurement), "it is within the budget"
        rounds = found.verification is not None and not found.verification.is_to_the_bit
        text = _in_words(found.plan) + ", equal within rounding" * rounds
        flags = [f"--level {_LEVEL} --budget {exact_bytes(self._limit_bytes)}"]
        if found.plan.in_backward:
            flags.append("--optimizer-in-backward")
        if sends:
            text += f", sending {format_bytes(measured.elsewhere_bytes)} to the {place}"
            text += f" at {row.predicted_slowdown:.2f} times the step (predicted)" if row.predicted_slowdown else ""
            flags.append(f"--offload {place}")
        yield Suggestion(
            change="offload" if sends else "optimizer in backward" if found.plan.in_backward else "plan",
            text=text,
            command=self._typed("optimize", *flags),
            plan=found.plan,
            predicted_bytes=row.predicted_allocated_peak_bytes,
            peak_bytes=measured.allocated_peak_bytes,
            seconds=measured.step_s,
        )

    def _search(
        self, prepared: Prepared, goal: SearchGoal, max_slowdown: float | None = None, offload: str = "none"
    ) -> Findings:
        """Search a plan, which may send tensors to the place ``offload``.

        Raises :class:`NothingFitsError` if its results differ from the original's.
        """
        known = prepared.notes
        prepared = without_own_checkpoints(prepared, measures=False)
        self.notes += [note for note in prepared.notes if note not in (*known, *self.notes)]
        subject = prepared.subject
        options = SearchOverrides(
            level=_LEVEL,
            max_slowdown=max_slowdown,
            offload=offload,
            optimizer_in_backward=self._request.optimizer_in_backward and subject.settings.may_update_in_backward,
        )
        asked = OptimizeRequest(
            source=subject.source,
            spec=subject.spec,
            settings=subject.settings,
            search=resolve(options),
            goal=goal,
            recommend_batch=False,
            search_limit_s=_SEARCH_S,
        )
        found = find(asked, prepared)
        if found.verification is not None and not found.verification.passed:
            raise NothingFitsError(f"the plan that was found is not exact: {found.verification.difference}")
        return found

    def _both(self) -> Iterator[Suggestion]:
        """Yield micro-batches under the plan with the lowest peak."""
        self._require_one_pass()
        plan = self._search(self._accumulating(), SearchGoal(), max_slowdown=math.inf).plan
        yield from self._accumulated(plan, f"{_in_words(plan)} and ")

    def _accumulated(self, plan: Plan, also: str) -> Iterator[Suggestion]:
        """Yield micro-batches that fit under ``plan``, whose accumulated gradients replace those of the whole batch.

        ``also``: words that name the plan in front of them.
        """
        self._require_one_pass()
        prepared = self._accumulating()
        subject = prepared.subject
        asked = BatchRequest(
            source=subject.source,
            spec=subject.spec,
            settings=self._prepared.subject.settings,
            memory=self._limit_bytes,
            global_batch=self._prepared.batch,
            longest_step_s=_LONGEST_STEP_S,
        )
        found = recommend_prepared(asked, prepared, None if plan == ORIGINAL else plan, ())
        row = found.rows[found.chosen]
        if found.interrupted:
            raise KeyboardInterrupt
        runs = row.outcome.probes if isinstance(row.outcome, BatchAdvice) else ()
        made = found.accumulation
        run = next((run for run in runs if made is not None and run.batch == made.batch), None)
        if run is None or made is None or run.batch >= self._prepared.batch:  # not split at all
            return
        self.notes += norm_notes(made, self._prepared.facts)
        steps = -(-self._prepared.batch // run.batch)
        yield Suggestion(
            change="micro-batches",
            text=f"{also * row.planned}{steps} micro-batches of {run.batch}",
            command=self._recommends(planned=row.planned),
            plan=plan if row.planned else ORIGINAL,
            batch=run.batch,
            predicted_bytes=None,
            peak_bytes=run.allocated_peak_bytes,
            seconds=steps * run.step_s,
        )

    def _autocast(self) -> Iterator[Suggestion]:
        """Yield autocast to bfloat16."""
        settings = self._prepared.subject.settings
        self._require_step_of_ours()
        if settings.precision not in ("stored", "fp32"):
            raise UsageError(f"the step is run in {settings.precision} already")
        cast = self._with(replace(settings, precision="bf16"))
        self._prepared.progress.stage("trying bfloat16")
        counted = cast.ask(CountJob(plan=ORIGINAL, fake=True), "small batch")
        if isinstance(counted, Counted) and counted.allocated_peak_bytes > self._limit_bytes:
            raise NothingFitsError(f"needs about {format_bytes(counted.allocated_peak_bytes)}")
        measured = cast.ask(MeasureJob(plan=ORIGINAL))
        if not isinstance(measured, Measured):
            raise NothingFitsError(describe(measured))
        peak_bytes = measured.measurement.allocated_peak_bytes
        if peak_bytes > self._limit_bytes:
            raise NothingFitsError(f"needs {format_bytes(peak_bytes)}")
        yield Suggestion(
            change="autocast",
            text="forward and loss under autocast to bfloat16, which rounds",
            command=f'with torch.autocast("{settings.device.partition(":")[0]}", dtype=torch.bfloat16): …',
            predicted_bytes=counted.allocated_peak_bytes if isinstance(counted, Counted) else None,
            peak_bytes=peak_bytes,
            seconds=measured.measurement.step_s,
        )

    def _with(self, settings: StepSettings) -> Prepared:
        """Return the model with a step of other ``settings``."""
        return replace(self._prepared, subject=replace(self._prepared.subject, settings=settings))

    def _accumulating(self) -> Prepared:
        """Return the model with a step that is one of several accumulated passes."""
        return self._with(replace(self._prepared.subject.settings, micro_batches=2))

    def _require_one_pass(self) -> None:
        """Refuse a step that is not one pass over several samples.  Raises :class:`UsageError`."""
        self._require_step_of_ours()
        if self._prepared.batch == 1:
            raise UsageError("the batch has one sample, which cannot be split")
        if self._prepared.subject.settings.micro_batches > 1:
            raise UsageError("the step accumulates already")

    def _require_step_of_ours(self) -> None:
        """Refuse a step of the user's own, whose code fixes batch and precision.  Raises :class:`UsageError`."""
        if self._prepared.facts.format == STEP:
            raise UsageError("change a step of your own in its code")

    def _recommends(self, *, planned: bool) -> str:
        """Return the command that finds the micro-batches; if ``planned``, after the command that writes the plan."""
        flags = f"--memory {exact_bytes(self._limit_bytes)} --global-batch {self._prepared.batch}"
        if not planned:
            return self._typed("recommend-batch", flags)
        plan = output_paths(self._prepared.subject.source.location, None, plan_only=True).plan
        found = self._typed("optimize", f"--level {_LEVEL} --max-slowdown none --plan-only --accumulate 2")
        return f"{found} && {self._typed('recommend-batch', f'{flags} --plan {quoted_path(str(plan))}')}"

    def _typed(self, command: str, *flags: str) -> str:
        """Return the line that runs a ``command`` of memopt on this step; empty ``flags`` are left out."""
        location = quoted_path(self._prepared.subject.source.location)
        return " ".join((f"memopt {command} {location}", *self._request.flags, *filter(None, flags)))

"""What each command does, stage by stage.  The only place that knows the order."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import BinaryIO, NoReturn

import torch

from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.batching.advice import advise
from memopt_cli.batching.capacity import device_capacity
from memopt_cli.errors import MeasurementError, MemoptError, StepError, UnsafeFileError, UsageError
from memopt_cli.loading import load_model
from memopt_cli.loading.input_spec import BATCH, batch_of, find_spec
from memopt_cli.measure.jobs import Subject, Traced
from memopt_cli.measure.runner import Session
from memopt_cli.plan.interface import Candidate, ModuleTree, Probes
from memopt_cli.plan.strategies import STRATEGIES
from memopt_cli.progress import Ask, Progress, WantedGlobal
from memopt_cli.records import (
    SCHEMA_VERSION,
    BatchAdvice,
    BatchProbe,
    Counted,
    Crashed,
    Failure,
    FileHeader,
    InputSpec,
    LevelRow,
    LoadedModel,
    Measurement,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    OptimizeResult,
    OutOfMemory,
    Plan,
    StepFailed,
    TimedOut,
    Trust,
    Verification,
    describe,
    to_data,
)
from memopt_cli.runtime import reset_hidden_state, segment_of
from memopt_cli.spec_text import format_tensor
from memopt_cli.units import format_bytes
from memopt_cli.write import (
    OutputPaths,
    batch_yaml,
    check_targets,
    output_paths,
    plan_yaml,
    read_plan,
    summary_json,
    write_all,
)

Outcome = Measurement | OutOfMemory | TimedOut | Crashed | StepFailed

_STEP_NAMES = {1: "level1_gc", 2: "level2_spatial_split", 3: "level3_temporal_split", 4: "level4_greedy_unwrap"}
_TRUSTED_ERROR = 0.01
"""A dry run of the original that is further off, relative to its measured tensor peak, is not believed."""
_LONGEST_ADVICE_RUN_S = 20.0
"""The run that verifies a batch recommendation is to take no longer."""


def optimize(request: OptimizeRequest, *, progress: Progress, ask: Ask | None) -> OptimizeResult:
    """Search for the plan of the level asked for, measure it, prove it, and write the four files.

    Raises :class:`MemoptError`; a plan that fails verification is reported and not written.
    """
    started = time.monotonic()
    paths = output_paths(request.source.location, request.output)
    if not request.dry_run:
        check_targets(paths.all(), force=request.force)
    progress.stage("loading")
    loaded, spec = _load(request, ask)
    for note in loaded.notes:
        progress.note(note)
    settings = replace(request.settings, device=resolve_device(request.settings.device))
    subject = Subject(source=loaded.source, spec=spec, settings=settings)
    job = _Job(request=request, loaded=loaded, subject=subject, progress=progress, notes=[_inputs_note(spec)])
    progress.note(job.notes[0])
    rows = job.search()
    best, verification = job.verify(rows)
    advice = job.advise(best) if verification.passed else None
    result = OptimizeResult(
        header=_header(subject, loaded), summary=_summary(job, rows, best, verification, advice), files=()
    )
    result.summary.spent_s = time.monotonic() - started
    if verification.passed and not request.dry_run:
        progress.stage("writing")
        written = _write(paths, result, loaded, batch=batch_of(spec), force=request.force)
        result = replace(result, files=written)
    return result


def apply(
    source: ModelSource, plan_path: str, *, output: str | None, force: bool, ask: Ask | None = None
) -> tuple[str, ...]:
    """Put a plan made elsewhere onto a model and write the optimized model; returns the path written."""
    target = output_paths(source.location, output).model
    check_targets([target], force=force)
    _, plan = read_plan(plan_path)
    loaded = load_model(source, ask)
    return write_all({target: _model_writer(loaded, plan)}, force=force)


def resolve_device(text: str) -> str:
    """``auto``, ``cpu`` or ``cuda[:N]`` -> a device that exists.  Raises :class:`UsageError`."""
    if text == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if text == "cpu":
        return text
    index = int(text.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {text}: PyTorch sees {torch.cuda.device_count()} CUDA devices",
            hint="Use --device cpu, or check the driver and the PyTorch build.",
        )
    return f"cuda:{index}"


def applied_row(rows: Sequence[LevelRow]) -> LevelRow:
    """The row whose plan is applied: no level may raise the measured allocated peak of the one it builds on.

    Raises :class:`MeasurementError` if no level could be run.
    """
    best: LevelRow | None = None
    for row in rows:
        if isinstance(row.outcome, Measurement) and (best is None or _allocated(row) <= _allocated(best)):
            best = row
    if best is None:
        failure = rows[-1].outcome
        assert not isinstance(failure, Measurement)
        raise MeasurementError(
            f"no plan up to level {rows[-1].level} could be run: {describe(failure)}",
            hint="Try a smaller batch (--dim B=1), or a machine with more memory.",
        )
    return best


def _load(request: OptimizeRequest, ask: Ask | None) -> tuple[LoadedModel, InputSpec]:
    """The model and its inputs; what the user vouched for when asked goes to the subprocesses too."""
    vouched: list[str] = []

    def ask_and_remember(wanted: Sequence[WantedGlobal]) -> bool:
        allowed = ask is not None and ask(wanted)
        vouched.extend(item.name for item in wanted if allowed)
        return allowed

    loaded = load_model(request.source, ask_and_remember if ask else None)
    trust: Trust = loaded.source.trust
    trust = replace(trust, globals=(*trust.globals, *vouched))
    loaded = replace(loaded, source=replace(loaded.source, trust=trust))
    if any(segment_of(module) for module in loaded.module.modules()):
        remove_plan(loaded.module)
        loaded = replace(loaded, notes=(*loaded.notes, "The file carries a plan already; it was taken off first."))
    return loaded, find_spec(loaded.source, loaded.module, request.spec)


def _inputs_note(spec: InputSpec) -> str:
    """What the step is fed and who said so, a guess above all."""
    inputs = ", ".join(map(format_tensor, spec.tensors)) or spec.data_file or spec.script
    sizes = "".join(f", {symbol}={size}" for symbol, size in spec.dims.items())
    batch = "; dimension 0 is taken as the batch" if spec.tensors and BATCH not in spec.dims else ""
    return f"Inputs: {inputs}{sizes} ({spec.source}){batch}."


# ---------------------------------------------------------------------------------------------- one optimization


@dataclass(slots=True)
class _Job:
    """One run of :func:`optimize`: what the stages need of each other."""

    request: OptimizeRequest
    loaded: LoadedModel
    subject: Subject
    progress: Progress
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    candidates: int = 0
    """Called modules that can be segments."""

    def search(self) -> list[LevelRow]:
        """Measure the original, then improve and measure level by level."""
        self.progress.stage("level 0")
        started = time.monotonic()
        original = self.measure(Plan(level=0))
        if not isinstance(original, Measurement | OutOfMemory):
            _raise(original)
        rows = [_row(Plan(level=0), original, None, 0, started)]
        if self.request.search.level == 0:
            return rows
        with contextlib.ExitStack() as sessions:
            session = self._replaceable(sessions)
            traced = self._trace(session(), original)
            count = functools.cache(lambda plan: session().count(plan, fake=traced.fake))
            start = count(Plan(level=0))
            if not isinstance(start, Counted):
                _raise(start, "a step of the model could not be counted: ")
            first = Candidate(plan=Plan(level=0), counted=start)
            rows[0] = _row(first.plan, original, first if traced.fake else None, 0, started)
            if not isinstance(original, Measurement):
                self.notes.append(
                    f"The original does not fit here; its peak of "
                    f"{format_bytes(start.allocated_peak_bytes)} is predicted on tensors without data."
                )
            self._climb(session, traced, first, count, rows)
        return rows

    def _climb(
        self,
        session: Callable[[], Session],
        traced: Traced,
        best: Candidate,
        count: Callable[[Plan], Counted | Failure],
        rows: list[LevelRow],
    ) -> None:
        tree = ModuleTree(traced.trace)
        self.candidates = sum(not module.refusal for module in tree)
        chunking = functools.cache(lambda path: session().chunking(path))
        for strategy in STRATEGIES[: self.request.search.level]:
            self.progress.stage(f"level {strategy.level}")
            started = time.monotonic()
            reporter = _Reporter(self.progress, strategy.level, best.peak_bytes)
            probes = Probes(count=reporter.watching(count), chunking=chunking, report=reporter.report)
            improvement = strategy.improve(best, tree, self.request.search, probes)
            self.notes.extend(improvement.notes)
            changed = improvement.best.plan.segments != best.plan.segments
            best = replace(improvement.best, plan=replace(improvement.best.plan, level=strategy.level))
            if changed:
                self.progress.update(improvement.tried, improvement.tried, "measuring the best plan")
            outcome = self.measure(best.plan) if changed else rows[-1].outcome
            row = _row(best.plan, outcome, best if traced.fake else None, improvement.tried, started)
            if not changed:
                measured = next(r.level for r in reversed(rows) if not r.note)
                row = replace(row, note=f"the plan of level {measured}, measured there")
                self.skipped.append(f"level{strategy.level}:no_improving_candidate")
            rows.append(row)

    def _replaceable(self, sessions: contextlib.ExitStack) -> Callable[[], Session]:
        """A subprocess that lives across probes; the next one where a probe killed it."""
        current = sessions.enter_context(self.session())

        def session() -> Session:
            nonlocal current
            if current.ended:
                self.notes.append("A trial ended its profiling subprocess; the search went on in another.")
                current = sessions.enter_context(self.session())
            return current

        return session

    def _trace(self, session: Session, original: Outcome) -> Traced:
        """The recorded step: on tensors without data if they tell the truth, so that plans need not be run."""
        traced = session.trace(fake=True)
        if isinstance(traced, Traced) and traced.fake and isinstance(original, Measurement):
            predicted, measured = traced.trace.tensor_peak_bytes, original.tensor_peak_bytes
            if abs(predicted - measured) > _TRUSTED_ERROR * measured:
                self.notes.append(
                    f"On tensors without data the model takes {format_bytes(predicted)} instead of the measured "
                    f"{format_bytes(measured)} (its kernels differ there); every plan is run to be counted."
                )
                traced = session.trace(fake=False)
        if not isinstance(traced, Traced):
            _raise(traced, "a step of the model could not be recorded: ")
        if traced.note:
            self.notes.append(traced.note)
        return traced

    def measure(self, plan: Plan) -> Measurement | Failure:
        """Measure in a subprocess of its own."""
        with self.session() as session:
            return session.measure(plan)

    def verify(self, rows: list[LevelRow]) -> tuple[LevelRow, Verification]:
        """The row to apply, verified.

        Where the model cannot run in float64, in which chunks are verified, that is the best row without chunks.
        """
        fits = isinstance(rows[0].outcome, Measurement)
        best = applied_row(rows)
        found = self._verify(best, fits=fits)
        if isinstance(found, StepFailed) and _has_chunks(best):
            self.notes.append(f"Level {best.level} is not applied, its chunks cannot be verified: {found.message}")
            best = applied_row([row for row in rows if not _has_chunks(row)])
            found = self._verify(best, fits=fits)
        if not isinstance(found, Verification):
            _raise(found, "verification could not be run: ")
        return best, found

    def _verify(self, best: LevelRow, *, fits: bool) -> Verification | Failure:
        """At full size where the original fits, else at the largest half, quarter … that does."""
        batch = batch_of(self.subject.spec)
        size = batch if fits else max(1, batch // 2)
        while True:
            self.progress.stage(f"verifying at batch {size}")
            with self.session() as session:
                found = session.verify(best.plan, size)
            if size == 1 or not isinstance(found, OutOfMemory):
                return found
            size = max(1, size // 2)

    def advise(self, best: LevelRow) -> BatchAdvice | None:
        """How large a batch the plan allows on this device."""
        self.progress.stage("finding the batch that fits")
        capacity = device_capacity(self.subject.settings.device)

        def probe(batch: int) -> BatchProbe | Failure:
            self.progress.update(0, None, f"batch {batch}")
            with self.session() as session:
                return session.probe(best.plan, batch)

        advice = advise(
            batch_of(self.subject.spec),
            probe,
            device_bytes=capacity.device_bytes,
            device_limit=capacity.limited_by,
            longest_run_s=min(_LONGEST_ADVICE_RUN_S, self.request.timeout_s),
        )
        if advice is None:
            self.notes.append("No batch recommendation: the inputs could not be run at other batch sizes.")
        return advice

    def session(self) -> Session:
        """A fresh profiling subprocess."""
        return Session(self.subject, self.request.timeout_s)


class _Reporter:
    """Tells progress what is tried, with the peaks: ``split features.1 · 380.1 MiB → 341.7 MiB``."""

    def __init__(self, progress: Progress, level: int, start_bytes: int) -> None:
        self._progress = progress
        self._level = level
        self._best_bytes = start_bytes
        self._tried = 0
        self._trying = ""

    def report(self, text: str) -> None:
        """Remember what is tried next."""
        self._trying = text

    def watching(self, count: Callable[[Plan], Counted | Failure]) -> Callable[[Plan], Counted | Failure]:
        """The same counter, with its answers told to the progress."""

        def counted(plan: Plan) -> Counted | Failure:
            found = count(plan)
            self._tried += 1
            peak = found.allocated_peak_bytes if isinstance(found, Counted) else None
            shown = format_bytes(peak) if peak is not None else "cannot run"
            line = f"{self._trying} · {format_bytes(self._best_bytes)} → {shown}"
            self._progress.update(self._tried, None, line)
            self._best_bytes = min(self._best_bytes, peak or self._best_bytes)
            return found

        return counted


def _has_chunks(row: LevelRow) -> bool:
    return any(segment.chunks > 1 for segment in row.plan.segments)


def _allocated(row: LevelRow) -> int:
    assert isinstance(row.outcome, Measurement)
    return row.outcome.allocated_peak_bytes


def _row(plan: Plan, outcome: Outcome, predicted: Candidate | None, tried: int, started: float) -> LevelRow:
    return LevelRow(
        level=plan.level,
        plan=plan,
        outcome=outcome,
        predicted_tensor_peak_bytes=predicted.counted.tensor_peak_bytes if predicted else None,
        predicted_allocated_peak_bytes=predicted.peak_bytes if predicted else None,
        candidates=tried,
        search_s=time.monotonic() - started,
    )


def _raise(failure: Failure, context: str = "") -> NoReturn:
    if isinstance(failure, StepFailed):
        kinds: dict[int, type[MemoptError]] = {2: UsageError, 4: UnsafeFileError}
        raise kinds.get(failure.exit_code, StepError)(context + failure.message, hint=failure.hint)
    hints: dict[type[Failure], str] = {
        TimedOut: "Raise --timeout, or give smaller inputs.",
        OutOfMemory: "Give smaller inputs, as with --dim B=1, or use a machine with more memory.",
        Crashed: "Take one training step of the model in plain Python: it should end the same way.",
    }
    tail = f"\n{failure.output_tail}" if isinstance(failure, Crashed) and failure.output_tail else ""
    raise MeasurementError(context + describe(failure) + tail, hint=hints[type(failure)])


# ---------------------------------------------------------------------------------------------- results


def _summary(
    job: _Job, rows: list[LevelRow], best: LevelRow, verification: Verification, advice: BatchAdvice | None
) -> MemOptSummary:
    options, segments = job.request.search, best.plan.segments
    chunked = [s for s in segments if s.chunks > 1]
    packed = [s for s in segments if s.compressor != "null"]
    level1 = next((row.plan.segments for row in rows if row.level == 1), ())
    measured = best.outcome if isinstance(best.outcome, Measurement) else None
    improved = {row.level for row in rows if row.level <= best.level and not row.note}
    return MemOptSummary(
        profile=None,
        checkpoint_budget=None,
        prefer=None,
        device=job.subject.settings.device,
        requested_level=options.level,
        applied_level=best.level,
        compress_x=options.compress_x,
        allow_expensive_profiling=True,
        applied_steps=[name for level, name in _STEP_NAMES.items() if level in improved],
        skipped_steps=job.skipped,
        notes=[*job.loaded.notes, *job.notes],
        gc_wrap_count=len(level1),
        bit_compressor_count=sum(s.compressor == "bit" for s in segments),
        null_compressor_count=len(segments) - len(packed),
        spatial_split_count=_changed(rows, 2),
        temporal_split_count=_changed(rows, 3),
        unwrap_count=_changed(rows, 4),
        gc_container_count=len(segments),
        tcgc_container_count=len(chunked),
        options=to_data(options),
        gc_candidate_count=job.candidates,
        gc_selected_count=len(level1),
        gc_selection_policy="explicit_targets" if options.targets else "least_predicted_peak",
        gc_selected_modules=[s.path for s in level1],
        gc_selection_explanation=_explanation(job, len(level1)),
        recommendation=_recommendation(rows, best),
        peak_memory_mb=measured.allocated_peak_bytes / 2**20 if measured else None,
        total_gc_count=len(segments),
        total_sliding_count=len(chunked),
        compressed_layers=len(packed),
        skipped_errors=sum(not isinstance(row.outcome, Measurement) for row in rows),
        levels=rows,
        plan=best.plan,
        verification=verification,
        advice=advice,
        model_format=job.loaded.format,
    )


def _changed(rows: list[LevelRow], level: int) -> int:
    """How many segments a level added, changed or removed."""
    plans = {row.level: set(row.plan.segments) for row in rows}
    if level not in plans:
        return 0
    before, after = {s.path for s in plans[level - 1]}, {s.path for s in plans[level]}
    return len(plans[level] - plans[level - 1]) or len(before - after)


def _explanation(job: _Job, selected: int) -> str:
    if job.request.search.targets:
        return f"{selected} outermost modules match {', '.join(job.request.search.targets)}."
    return f"{selected} of {job.candidates} called modules: the set with the lowest predicted peak."


def _recommendation(rows: list[LevelRow], best: LevelRow) -> str:
    if len(rows) == 1:
        return "Nothing was searched; --level 1 and above may save memory."
    if not best.plan.segments:
        return "No plan lowered the measured peak of this step; with larger inputs one may."
    if best.level < 4 and rows[-1].level < 4:
        return f"--level {rows[-1].level + 1} may save more."
    return ""


def _header(subject: Subject, loaded: LoadedModel) -> FileHeader:
    return FileHeader(
        schema_version=SCHEMA_VERSION,
        memopt=version("memopt"),
        torch=str(torch.__version__),
        model=subject.source.location,
        sha256=loaded.sha256,
        spec=subject.spec,
        seed=subject.settings.seed,
        device=subject.settings.device,
    )


def _write(
    paths: OutputPaths, result: OptimizeResult, loaded: LoadedModel, *, batch: int, force: bool
) -> tuple[str, ...]:
    header, summary = result.header, result.summary
    assert summary.plan is not None
    contents = {
        paths.summary: summary_json(header, summary),
        paths.plan: plan_yaml(header, summary.plan),
        paths.batch: batch_yaml(header, summary.advice, measured_batch=batch),
    }
    writers = {path: functools.partial(_write_bytes, content) for path, content in contents.items()}
    return write_all({paths.model: _model_writer(loaded, summary.plan), **writers}, force=force)


def _write_bytes(content: bytes, stream: BinaryIO) -> None:
    stream.write(content)


def _model_writer(loaded: LoadedModel, plan: Plan) -> Callable[[BinaryIO], None]:
    """Writes the model with the plan installed, without what earlier steps left on it."""
    model = apply_plan(loaded.module, plan)
    reset_hidden_state(model)
    return functools.partial(torch.save, model)

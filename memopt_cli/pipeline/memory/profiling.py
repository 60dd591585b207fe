"""``memopt profile``: record one step, and measure it if it may be run, to show where its memory and time go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from memopt_cli.errors import StepError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.measure.jobs import ORIGINAL, MeasureAnswer, MeasureJob, TraceAnswer, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.memory.step_peaks import allocated_peak, is_alive, live_bytes, phase_peaks, saved_tensors
from memopt_cli.pipeline.own_checkpoints import own_checkpoints_notes
from memopt_cli.pipeline.prediction import predicted_ranks
from memopt_cli.pipeline.prepare import PreparedModel, file_header, load_request_for, prepare
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    STEP,
    CompiledStep,
    CompilePlan,
    DeviceProfile,
    Failure,
    Measurement,
    ModuleUse,
    OutOfMemory,
    Plan,
    ProfileRequest,
    RankLayout,
    StepProfile,
    StepTrace,
    StorageTrace,
    TimeUse,
    TimeUseName,
    ancestry,
    break_down,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.search.estimation import add_seconds, estimate
from memopt_cli.text.units import format_apart

_TRUSTED_ERROR = 0.01
"""Dry runs are trusted if the tensor peak of one differs from the measured one by at most this share."""


def profile(request: ProfileRequest, *, progress: Progress, ask: Ask | None) -> StepProfile:
    """Find where the memory of one training step goes, by measurement and from a record of every operator.

    Raises :class:`MemoptError`; a step that does not fit is estimated, as with ``fake``, and so is one for a card.
    """
    plan = read_plan(request.plan_path)[1] if request.plan_path is not None else ORIGINAL
    fake = request.fake or request.card is not None
    card, layout, backend = request.card, request.layout, request.backend
    load_request = load_request_for(request, request.settings, card=card, layout=layout, fake=fake, backend=backend)
    prepared = prepare(load_request, progress=progress, ask=ask)
    if request.layout is not None:
        return _profile_ranks(request, request.layout, prepared, plan)
    return profile_prepared(request, prepared, plan)


def _profile_ranks(request: ProfileRequest, layout: RankLayout, prepared: PreparedModel, plan: Plan) -> StepProfile:
    """Profile the largest of the requested ranks; of equally large ones, the first."""
    notes = list(prepared.notes)
    predicted = predicted_ranks(prepared, layout, plan, rank=request.rank, card=request.card)
    with predicted as (session, ranks):
        prepared.progress.stage("recording a step")
        traced = record_step(session, plan, None, notes)
    return replace(_profile(prepared, plan, None, traced, notes, request.card), ranks=ranks)


def profile_prepared(request: ProfileRequest, prepared: PreparedModel, plan: Plan) -> StepProfile:
    """Profile the step of a ``prepared`` model on one device: measured if ``request`` runs it, else estimated.

    A compiled step is profiled without the compiler, and also measured with it.  Raises :class:`StepError` for a step
    of the user's own that should be compiled: only its own code can do that.
    """
    compile_plan = plan.compile if request.backend is None else CompilePlan(backend=request.backend)
    plan, card = plan.eager, request.card
    if compile_plan is not None and prepared.facts.format == STEP:
        raise StepError("your own step calls its models itself", hint="Compile them in its function.")
    notes = list(prepared.notes)
    with Sessions(prepared, "full size" if request.runs else prepared.dry_data, notes) as sessions:
        measurement = _measure(sessions(), plan, prepared.progress, notes) if request.runs else None
        if isinstance(measurement, OutOfMemory):
            notes.append("The step does not fit here: its peak is predicted on tensors without data.")
            sessions.smaller()
        prepared.progress.stage("recording a step")
        traced = record_step(sessions(), plan, measurement, notes, sessions=sessions)
    if not request.runs and plan.has_chunks:
        notes.append("memopt does not try here whether modules can run in chunks; one that cannot runs whole.")
    if card is not None:
        traced = replace(traced, trace=add_seconds(traced.trace, card))
    compiled = (
        _measure_compiled(prepared, replace(plan, compile=compile_plan), notes)
        if compile_plan is not None and request.runs
        else None
    )
    return replace(_profile(prepared, plan, measurement, traced, notes, card), compiled=compiled)


def _measure_compiled(prepared: PreparedModel, plan: Plan, notes: list[str]) -> CompiledStep | None:
    """Measure the step under ``plan``, a compiled one; if it does not fit, return ``None`` and add a note."""
    assert plan.compile is not None, "the caller's plan compiles the model"
    prepared.progress.stage("measuring a compiled step")
    answer = prepared.ask(MeasureJob(plan=plan))
    if isinstance(answer, OutOfMemory):
        notes.append("The compiled step does not fit here.")
        return None
    measured = require_answer(answer, f"compiled by {plan.compile.backend}: ")
    notes += broken_notes(measured)
    return CompiledStep(
        backend=plan.compile.backend,
        allocated_peak_bytes=measured.measurement.allocated_peak_bytes,
        step_s=measured.measurement.step_s,
        broken=measured.graph_break,
    )


def broken_notes(measured: MeasureAnswer) -> tuple[str, ...]:
    """Return a note on why the compiled model of a measurement is not one graph, if it is not."""
    if not measured.graph_break:
        return ()
    return (f"PyTorch cannot compile the model as one graph; parts of it, or all, run as is: {measured.graph_break}.",)


def _measure(session: Session, plan: Plan, progress: Progress, notes: list[str]) -> Measurement | OutOfMemory:
    progress.stage("measuring a step")
    answer = session.ask(MeasureJob(plan=plan))
    if isinstance(answer, OutOfMemory):
        return answer
    measured = require_answer(answer)
    notes.extend(measured.not_as_planned)
    return measured.measurement


def record_step(
    session: Session,
    plan: Plan,
    measurement: Measurement | Failure | None,
    notes: list[str],
    *,
    sessions: Sessions | None = None,
    consequence: str = "it was recorded on real ones",
) -> TraceAnswer:
    """Record the step under ``plan``, and check dry runs by ``measurement``: the tensor peaks must match.

    If it does not, the step is recorded on real tensors, and a note gives both peaks and the ``consequence``.
    ``sessions``: the owner of ``session``, which switches to small batches if recording at full size fails though the
    plan fits: kernel workspaces are recorded by a full step of the original, which may not fit.
    """
    job = TraceJob(plan=plan, fake=True)
    traced = session.ask(job)
    was_measured = isinstance(measurement, Measurement)
    if sessions is not None and was_measured and (isinstance(traced, OutOfMemory) or session.ended):
        session = sessions.smaller()
        traced = session.ask(job)
    if isinstance(traced, TraceAnswer) and traced.dry_run_bytes is not None and isinstance(measurement, Measurement):
        predicted_bytes = traced.dry_run_bytes
        measured_bytes = measurement.tensor_peak_bytes
        if abs(predicted_bytes - measured_bytes) > _TRUSTED_ERROR * measured_bytes:
            peaks = sorted([predicted_bytes, measured_bytes])
            peak_texts = dict(zip(peaks, format_apart(*peaks), strict=True))
            notes.append(
                f"On tensors without data the step has a tensor peak of {peak_texts[predicted_bytes]} instead of the "
                f"measured {peak_texts[measured_bytes]}; {consequence}. You need to do nothing."
            )
            data_job = replace(job, fake=False)
            traced = session.ask(data_job) if traced.fake else replace(traced, dry_run_bytes=None)
    traced = require_answer(traced, "a step of the model could not be recorded: ")
    if traced.note:
        notes.append(f"{traced.note}; {consequence}.")
    notes.extend(f"{reason}." for reason in traced.unknown)
    notes.extend(own_checkpoints_notes(traced.checkpoints))
    return traced


def _profile(
    prepared: PreparedModel,
    plan: Plan,
    measurement: Measurement | OutOfMemory | None,
    traced: TraceAnswer,
    notes: list[str],
    card: DeviceProfile | None,
) -> StepProfile:
    trace = scaled_to_measurement(measurement, traced.trace)
    live = live_bytes(trace)
    peak = allocated_peak(trace, live)
    alive = [s for s in trace.storages if is_alive(s, peak.op)]
    return StepProfile(
        header=file_header(prepared),
        plan=plan,
        measurement=measurement,
        fake=traced.fake,
        tensor_peak_bytes=trace.tensor_peak_bytes,
        peak=peak,
        breakdown=break_down((s.kind, s.nbytes) for s in alive),
        workspace_bytes=peak.allocated_bytes - live[peak.op + 1],
        modules=_modules(trace, alive),
        saved=saved_tensors(trace, plan.at(prepared.subject.spec.dims)),
        phases=phase_peaks(trace, live),
        live_bytes=live,
        flops=sum(op.flops for op in trace.ops),
        times=tuple(_time_uses(trace, measurement)),
        notes=(*notes, *prepared.messages),
        trace=trace,
        estimate=None if card is None else estimate(trace, card),
    )


def scaled_to_measurement(measurement: Measurement | Failure | None, trace: StepTrace) -> StepTrace:
    """Scale the times of operators in ``trace`` down, if they add up to more than the step of ``measurement``.

    Operators are timed one by one in a single step, which on a busy machine takes longer than the fastest of many.
    """
    total = sum(op.seconds for op in trace.ops)
    if not isinstance(measurement, Measurement) or total <= measurement.step_s:
        return trace
    share = measurement.step_s / total
    return replace(trace, ops=tuple(replace(op, seconds=op.seconds * share) for op in trace.ops))


def _time_uses(trace: StepTrace, measurement: Measurement | OutOfMemory | None) -> Iterator[TimeUse]:
    """Yield the parts of the time of the step in ``trace``, the model's parts first; nothing if it was not timed.

    The rest of the step of ``measurement`` is the time in which no operator runs: Python, and waiting.
    """
    seconds: dict[tuple[TimeUseName, str | None], float] = defaultdict(float)
    for op in trace.ops:
        if op.packs:
            seconds["packing and copies", None] += op.seconds
        elif op.recomputes is not None:
            seconds["recomputation", op.recomputes] += op.seconds
        else:
            seconds[op.phase, None] += op.seconds
    total = sum(seconds.values())
    if total and isinstance(measurement, Measurement) and measurement.step_s > total:
        seconds["outside operators", None] = measurement.step_s - total
    for (name, segment), seconds_spent in seconds.items() if total else ():
        yield TimeUse(name=name, segment=segment, seconds=seconds_spent)


def _modules(trace: StepTrace, alive: Iterable[StorageTrace]) -> tuple[ModuleUse, ...]:
    held_bytes: dict[str, int] = defaultdict(int)
    for s in alive:
        if s.kind in ("activations", "temporaries"):
            for path in ancestry(s.module):
                held_bytes[path] += s.nbytes
    seconds: dict[str, float] = defaultdict(float)
    for op in trace.ops:
        for path in ancestry(op.module):
            seconds[path] += op.seconds
    return tuple(
        ModuleUse(
            path=module.path,
            class_name=module.class_name,
            calls=module.calls,
            held_bytes=held_bytes[module.path],
            saved_bytes=module.saved_bytes,
            seconds=seconds[module.path],
        )
        for module in trace.modules
    )

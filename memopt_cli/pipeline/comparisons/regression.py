"""``memopt baseline``, ``check`` and ``compare``: writing down what a step needs, and comparing it with a later one.

A baseline may have come with the model.  So ``check`` neither runs code nor reads other files that only the baseline
names: the user must name them again.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memopt_cli.errors import BaselineError, UnsafeFileError
from memopt_cli.files.memopt_files import baseline_json, read_measured, read_plan
from memopt_cli.files.outputs import check_outputs
from memopt_cli.measure.devices import resolve_device
from memopt_cli.measure.jobs import ConditionsJob, MeasureJob, RecordJob, TraceJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.comparisons.baselines import MAX_SAVED_TENSORS, comparable_terms, compare
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.fingerprints.imports import code_in_words
from memopt_cli.pipeline.memory.step_peaks import instant_at, is_alive, live_bytes, saved_tensors
from memopt_cli.pipeline.prediction import predicted_ranks
from memopt_cli.pipeline.prepare import PreparedModel, file_header, load_request_for, prepare_with_plan
from memopt_cli.pipeline.terms import command_line, differences, step_flags
from memopt_cli.records import (
    BUILT_IN,
    RECORDED,
    Baseline,
    BaselineRequest,
    BaselineResult,
    CheckRequest,
    Comparison,
    Conditions,
    InputSpec,
    Measurement,
    ModuleBytes,
    PeakPlace,
    Plan,
    RankLayout,
    RankPrediction,
    ShorterStep,
    StepMemory,
    StepSettings,
    StepTrace,
)
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.text.documents import kept_below, quoted_flag, quoted_path
from memopt_cli.text.optimizer_text import MadeOptimizer, parse_optimizer
from memopt_cli.text.units import format_count
from memopt_cli.text.writing import content, write_all

_MAX_FLAG_CHARACTERS = 1000


def baseline(request: BaselineRequest, *, progress: Progress, ask: Ask | None) -> BaselineResult:
    """Measure a training step and write what it needs."""
    check_outputs([Path(request.output)], request.source.location, force=request.force)
    load_request = load_request_for(request, request.settings, layout=request.layout)
    prepared = prepare_with_plan(load_request, progress=progress, ask=ask)
    return record_prepared(request, prepared)


def record_prepared(request: BaselineRequest, prepared: PreparedModel) -> BaselineResult:
    """Measure the step of a ``prepared`` model and write its baseline, whose path was checked before."""
    code = code_in_words(request.source.location, prepared.facts.modules)
    step = _CheckedStep(prepared, _plan(request.plan_path, prepared), request.layout)
    with step.session() as (session, rank):
        recorded = Baseline(
            header=replace(file_header(prepared), model=request.source.location),
            conditions=replace(require_answer(session.ask(ConditionsJob())), layout=request.layout),
            memory=step.memory(session, rank),
            plan_path=request.plan_path or "",
        )
    spec = prepared.subject.spec
    recorded = replace(recorded, shorter=step.shorter(_shorter_lengths(step.plan, spec)))
    (file,) = write_all({Path(request.output): content(baseline_json(recorded))}, force=request.force)
    notes = (*([f"Code: {code}."] if code else []), *_left_out(step.plan, spec), *prepared.messages)
    return BaselineResult(baseline=recorded, file=file, notes=notes)


def check(request: CheckRequest, *, progress: Progress, ask: Ask | None) -> Comparison:
    """Measure the step of a baseline again, once, in a fresh subprocess, and judge it by the limits.

    Raises :class:`BaselineError` before anything is measured if the baseline is missing or was recorded under other
    conditions, and :class:`MemoptError` if the step cannot be measured.
    """
    before, request, settings = step_of_baseline(request)
    load_request = load_request_for(request, settings, layout=request.layout)
    prepared = prepare_with_plan(load_request, progress=progress, ask=ask)
    return check_prepared(request, before, prepared)


def step_of_baseline(request: CheckRequest) -> tuple[Baseline, CheckRequest, StepSettings]:
    """Return the baseline of ``request``, the request completed from it, and the settings of the step.

    Raises :class:`BaselineError` if the file is not a baseline, and :class:`UnsafeFileError` if it names code.
    """
    before = read_measured(request.baseline_path, _typed_step(request))
    if before.conditions is None:
        raise BaselineError(
            f"{request.baseline_path} is a summary of memopt optimize, not a baseline",
            hint="Record one with `memopt baseline MODEL -i SHAPE -o FILE`, and name it with `--baseline FILE`.",
        )
    _refuse_named_code(request, before, before.conditions)
    settings = _settings(request, before.conditions.settings)
    layout = request.layout or before.conditions.layout  # a baseline's layout that is code was refused
    spec = _spec(request.spec, before.header.spec)
    return before, replace(request, layout=layout, spec=spec), settings


def _typed_step(request: CheckRequest) -> str:
    """Return model and step of ``request`` as typed, with a placeholder for inputs; empty without a command line."""
    if request.flags is None:
        return ""
    inputs = () if request.spec is not None and request.spec.has_inputs else ("-i SHAPE",)
    return " ".join((quoted_path(request.source.location), *inputs, *request.flags))


def check_prepared(request: CheckRequest, before: Baseline, prepared: PreparedModel) -> Comparison:
    """Check a model that is ready, as :func:`check` does."""
    code = code_in_words(request.source.location, prepared.facts.modules)
    _require_same_model(request, before, prepared)
    step = _CheckedStep(prepared, _plan(request.plan_path, prepared), request.layout)
    header = file_header(prepared)
    planned_memory = replace(before.memory, plan=step.plan)
    after = replace(before, header=replace(header, model=request.source.location), memory=planned_memory)
    with prepared.session(prepared.dry_data) as session:
        after = replace(after, conditions=replace(require_answer(session.ask(ConditionsJob())), layout=request.layout))
    _require_same_terms(request, before, after)
    _require_plan(request, before, after)
    with step.session() as (session, rank):
        memory = step.memory(session, rank)
    shorter = step.shorter((old.dim, old.size) for old in before.shorter)
    comparison = compare(before, replace(after, memory=memory, shorter=shorter), request.limits)
    return replace(comparison, code=code, notes=tuple(prepared.messages))


def compare_files(before: str, after: str) -> Comparison:
    """Compare two baselines, or summaries of ``memopt optimize``; nothing is measured.

    Raises :class:`BaselineError` for a file that is missing or is neither.
    """
    return compare(read_measured(before), read_measured(after))


def _refuse_named_code(request: CheckRequest, before: Baseline, conditions: Conditions) -> None:
    """Refuse a baseline that would run code or read files outside its folder, unless the user names them again.

    A baseline is data that may have come with the model.
    """
    spec, missing = before.header.spec, {}
    has_typed_inputs = request.spec is not None and request.spec.has_inputs
    if conditions.settings.loss and not request.loss:
        missing["--loss"] = conditions.settings.loss
    optimizer = parse_optimizer(conditions.settings.optimizer)
    if isinstance(optimizer, MadeOptimizer) and not request.optimizer:
        missing["--optimizer"] = optimizer.reference
    if spec.script and not has_typed_inputs:
        missing["--input-script"] = spec.script
    layout = conditions.layout
    if layout is not None and request.layout is None and layout.parallel not in BUILT_IN:
        missing |= _layout_flags(layout)
    if missing:
        raise _unsafe_error(request, "code", missing)
    if spec.data_file and not has_typed_inputs and not kept_below(spec.data_file, Path(request.baseline_path).parent):
        raise _unsafe_error(request, "a file that is not in its folder", {"--input-data": spec.data_file})


def _unsafe_error(request: CheckRequest, named_thing: str, missing: dict[str, str]) -> UnsafeFileError:
    flags = " ".join(quoted_flag(flag, value) for flag, value in missing.items())
    return UnsafeFileError(
        f"{request.baseline_path} names {named_thing}, which you must give yourself: "
        f"{', '.join(value[:200] for value in missing.values())}",
        hint=f"If it is yours, add: `{flags}`" if len(flags) <= _MAX_FLAG_CHARACTERS else "Record your own baseline.",
    )


def _settings(request: CheckRequest, before: StepSettings) -> StepSettings:
    return replace(
        before,
        device=request.device or _same_device(before.device),
        precision=request.precision or before.precision,
        loss=request.loss,  # code, never taken from the baseline
        optimizer=request.optimizer or before.optimizer,
        seed=before.seed if request.seed is None else request.seed,
    )


def _same_device(device: str) -> str:
    """Return the kind of ``device``, ``cpu`` or ``cuda``.  Raises :class:`BaselineError` if there is none here."""
    kind = device.partition(":")[0]
    if kind == "cuda" and resolve_device("auto") == "cpu":
        raise BaselineError(
            f"the baseline was recorded on {device}, and PyTorch sees no CUDA device here",
            hint="Check on a machine with a GPU, or keep a second baseline for the CPU: record it with `--device cpu` "
            "and `-o FILE`.",
        )
    return kind


def _spec(typed: InputSpec | None, recorded: InputSpec) -> InputSpec:
    """Return the inputs ``typed`` by the user, else the baseline's; dimensions alone resize the baseline's inputs.

    The baseline's script must be typed, since it is code, but not its sizes.
    """
    if typed and typed.script and recorded.script and Path(typed.script).name == Path(recorded.script).name:
        untyped = tuple(name for name in recorded.dims if name not in typed.dims)
        return replace(typed, dims=recorded.dims | typed.dims, optional_dims=(*typed.optional_dims, *untyped))
    if typed and typed.has_inputs:
        return typed
    inputs = InputSpec(tensors=recorded.tensors, dims=recorded.dims, data_file=recorded.data_file, source=RECORDED)
    if typed is None:
        return inputs
    return replace(inputs, dims=recorded.dims | typed.dims, optional_dims=typed.optional_dims)


def _require_same_model(request: CheckRequest, before: Baseline, prepared: PreparedModel) -> None:
    """Refuse a model if both its class and its file name differ from the baseline's; one of the two may change."""
    location = request.source.location
    class_name = prepared.facts.class_name
    root = next((module.class_name for module in before.memory.modules if not module.path), class_name)
    if root != class_name and Path(location).name != Path(before.header.model).name:
        raise BaselineError(
            f"{request.baseline_path} is not comparable: it is of a different model, {root} of {before.header.model}; "
            f"{location} holds {class_name}",
            hint=f"If {root} has a different name now, record its baseline again. Otherwise keep one for each model: "
            "record it with `memopt baseline MODEL -i SHAPE -o FILE`, and name it with `--baseline FILE`.",
        )


def _require_same_terms(request: CheckRequest, before: Baseline, after: Baseline) -> None:
    unlike = differences(comparable_terms(before), comparable_terms(after))
    unnamed_step = next((step for step in before.shorter if step.dim not in after.header.spec.dims), None)
    if unnamed_step is not None and not unlike:
        raise BaselineError(
            f"{request.baseline_path} is not comparable: it also has a step at {unnamed_step.name}, but the inputs "
            f"name no {unnamed_step.dim}",
            hint="Leave the inputs out (the baseline has them), or name the dimension in their shapes.",
        )
    if unlike:
        differences_text = "; ".join(f"{d.name}: {d.before} in the baseline, {d.after} now" for d in unlike)
        raise BaselineError(
            f"{request.baseline_path} is not comparable: {differences_text}",
            hint="Check the step that was recorded, or record the step that you want to check.\n"
            + _rerecord_hint(request, after),
        )


def _require_plan(request: CheckRequest, before: Baseline, after: Baseline) -> None:
    """Refuse a baseline if one of the two steps has a plan from ``--plan`` and the other has none.

    A model that carried its plan, and has lost it, is compared: its step changed.
    """
    planned, plan = before.memory.plan, after.memory.plan
    if before.plan_path and plan.is_empty and not planned.is_empty:
        contrast = f"it was recorded under {_plan_in_words(planned)}, and this step has no plan"
        remedy = f"Add the plan: `{quoted_flag('--plan', before.plan_path)}`."
    elif request.plan_path and planned.is_empty and not plan.is_empty:
        contrast = f"it was recorded without a plan, and this step has {_plan_in_words(plan)}"
        remedy = "Check without `--plan`, or record the step that you want to check."
    else:
        return
    raise BaselineError(
        f"{request.baseline_path} is not comparable: {contrast}", hint=f"{remedy}\n{_rerecord_hint(request, after)}"
    )


def _plan_in_words(plan: Plan) -> str:
    count = len(plan.longest.segments)
    return f"a plan of {format_count(count, 'segment')}" if count else "a plan"


def _rerecord_hint(request: CheckRequest, after: Baseline) -> str:
    """Return the hint with the command that records the checked step, ``after``."""
    source = request.source
    plan = request.plan_path
    conditions = after.conditions
    flags = [
        quoted_flag("--weights", source.weights) if source.weights else "",
        source.typed_trust.flags,
        *(step_flags(after.header.spec, conditions.settings) if conditions else []),
        *(quoted_flag(*flag) for flag in _layout_flags(request.layout).items()),
        quoted_flag("--plan", plan) if plan else "",
        quoted_flag("-o", request.baseline_path),
        "--force",
    ]
    return f"Record the step that is checked here: `{command_line('baseline', source.location, flags)}`"


def _layout_flags(layout: RankLayout | None) -> dict[str, str]:
    if layout is None:
        return {}
    mesh = ",".join(f"{name}={length}" for name, length in layout.mesh.items())
    return {"--parallel": layout.parallel, "--ranks": str(layout.ranks), "--mesh": mesh}


def _plan(path: str | None, prepared: PreparedModel) -> Plan:
    return prepared.carried if path is None else read_plan(path)[1]


def _shorter_lengths(plan: Plan, spec: InputSpec) -> list[tuple[str, int]]:
    """Return the largest size of each range of a plan by length that is shorter than the inputs, with its dimension."""
    if plan.by is None:
        return []
    longest = spec.dims.get(plan.by.dim, 0)
    return [(plan.by.dim, part.up_to) for part in plan.ranges if part.up_to < longest]


def _left_out(plan: Plan, spec: InputSpec) -> Iterator[str]:
    """Yield a note on the lengths of a plan by length that are not recorded."""
    if plan.by is None:
        return
    dim, last = plan.by.dim, plan.ranges[-1].up_to
    longest = spec.dims.get(dim)
    if longest is None:
        yield (
            f"The plan has ranges of {dim}, and no input names {dim}, so only the length of these inputs is recorded. "
            f"To record all, describe the inputs as text, such as Bx{dim}x64, with {dim}={last}."
        )
    elif longest < last:
        yield f"Nothing is recorded beyond {dim}={longest}, and the plan goes up to {last}."


@dataclass(frozen=True, slots=True)
class _CheckedStep:
    """A step of a model under a plan, which is measured, or predicted for one rank of a layout."""

    prepared: PreparedModel
    plan: Plan
    layout: RankLayout | None

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[Session, RankPrediction | None]]:
        """Yield a session in which to measure the step; with ranks, the largest rank's session, and its prediction."""
        if self.layout is None:
            with self.prepared.session("small batch") as session:  # a full step of the original may not fit
                yield session, None
            return
        predicted = predicted_ranks(self.prepared, self.layout, self.plan)
        with predicted as (session, ranks):
            yield session, max(ranks, key=lambda rank: rank.tensor_peak_bytes)

    def shorter(self, lengths: Iterable[tuple[str, int]]) -> tuple[ShorterStep, ...]:
        """Measure the step at each of ``lengths``, pairs of a dimension and its size."""
        steps = []
        for dim, size in lengths:
            sized = replace(self, prepared=self.prepared.with_size(dim, size))
            self.prepared.progress.stage(f"{dim}={size}")
            with sized.session() as (session, rank):
                memory = sized.memory(session, rank)
            steps.append(ShorterStep(dim=dim, size=size, memory=replace(memory, plan=self.plan.at({dim: size}))))
        return tuple(steps)

    def memory(self, session: Session, rank: RankPrediction | None) -> StepMemory:
        """Measure and record the step in ``session``; with a ``rank``, record it and take the bytes predicted."""
        peaks: Measurement | StepTrace
        trace: StepTrace | None
        if rank is None:
            self.prepared.progress.stage("measuring a step")
            peaks = measurement = require_answer(session.ask(MeasureJob(plan=self.plan))).measurement
            breakdown, step_s = measurement.breakdown, measurement.step_s
            trace = None
            if self.plan.compile is None:  # compiled code hides its operators and what they save
                self.prepared.progress.stage("recording a step")
                trace = require_answer(
                    session.ask(RecordJob(plan=self.plan)), "a step of the model could not be recorded: "
                )
        else:
            self.prepared.progress.stage("recording a step")
            answer = session.ask(TraceJob(plan=self.plan, fake=True))
            peaks = trace = require_answer(answer, "a step of the rank could not be recorded: ").trace
            breakdown, step_s = rank.breakdown, 0.0
        memory = StepMemory(
            plan=self.plan,
            tensor_peak_bytes=peaks.tensor_peak_bytes,
            allocated_peak_bytes=peaks.allocated_peak_bytes,
            step_s=step_s,
            breakdown=breakdown,
            elsewhere_bytes=peaks.elsewhere_bytes if isinstance(peaks, Measurement) else 0,  # ranks send nothing
        )
        if trace is None:
            return memory
        live = live_bytes(trace)
        peak = instant_at(trace, live, live.index(max(live)))
        return replace(
            memory,
            peak=PeakPlace(op=peak.name, module=peak.module, phase=peak.phase),
            modules=_modules(trace, peak.op),
            saved=saved_tensors(trace, self.plan.longest)[:MAX_SAVED_TENSORS],
        )


def _modules(trace: StepTrace, op: int) -> tuple[ModuleBytes, ...]:
    """Return the bytes that each module holds, without its children's, after operator ``op`` has run."""
    bytes_by_module: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for storage in trace.storages:
        if is_alive(storage, op):
            bytes_by_module[storage.module][storage.kind] += storage.nbytes
    traces = {module.path: module for module in trace.modules}
    return tuple(
        ModuleBytes(
            path=path,
            class_name=traces[path].class_name if path in traces else "",
            output_bytes=traces[path].output_bytes if path in traces else 0,
            held_bytes=dict(bytes_by_module[path]),
        )
        for path in dict.fromkeys((*traces, *bytes_by_module))
    )

"""Formatting and reading the files that memopt writes: plans, summaries, frontiers, baselines, batch configurations.

For each kind of file, a function ``*_yaml`` or ``*_json`` returns the bytes, and a function ``read_*`` reads them back.
A file may have come with a stranger's model, so everything that is read is checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from memopt_cli.errors import BaselineError, OptionError, UsageError, for_message, shorten
from memopt_cli.inputs.spec_text import check_layout, check_spec
from memopt_cli.records import (
    MAX_RANGES,
    SCHEMA_VERSION,
    Baseline,
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    FastestTraining,
    FileHeader,
    Measurement,
    MemOptSummary,
    Plan,
    PredictedStep,
    ReplicaAdvice,
    SearchOptions,
    ShorterStep,
    ShownFrontier,
    StepMemory,
    from_data,
    refuse_unknown,
    to_data,
    to_short_data,
)
from memopt_cli.records.plan_file import PARALLEL, PREDICTED, TURNS_OFF, header_data
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.documents import (
    MAX_BYTES,
    json_text,
    printable_data,
    quoted_path,
    read_bytes,
    read_json,
    read_mapping,
    yaml_text,
)
from memopt_cli.text.spelling import on_command_line

_PLAN_OR_PATH = "Pass a memopt_cli.Plan, such as the .plan of a result, or the path of its file."
_PLAN_HINT = "Use a *.plan.yaml that memopt optimize wrote, with its header."
_POSITIVE_FIELDS = ("step_times_s", "original_step_s", "predicted_slowdown")
_MAX_LEVELS = 200  # modules in a baseline may be nested this deep
_FRONTIER_HINT = "`memopt optimize --frontier --force` writes it again."
_HEADER_KEYS = [f.name for f in fields(FileHeader)]


def summary_json(header: FileHeader, summary: MemOptSummary) -> bytes:
    """Return the content of ``*.summary.json``: the keys of ``header``, then ``summary``."""
    return on_command_line(json_text({**to_data(header), "summary": to_data(summary)})).encode()


def read_plan(path: str | os.PathLike[str]) -> tuple[FileHeader, Plan]:
    """Read a plan and its header from a ``*.plan.yaml`` file.

    Parameters
    ----------
    path:
        The file.

    Returns
    -------
    The header, which names the source of the plan, and the plan.

    Raises
    ------
    UsageError
        If the file cannot be read, is not a plan, has an unknown or missing key or a value of the wrong type, or was
        written by a later memopt.
    """
    data = _plan_data(path)
    plan_keys = [f.name for f in fields(Plan)]
    header = _read_header({key: data[key] for key in data if key in _HEADER_KEYS}, str(path))
    return header, from_data(Plan, {key: data[key] for key in data if key in plan_keys}, where=str(path))


def load_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """Return ``plan`` itself, or the plan in its file if ``plan`` is a path.

    Raises :class:`OptionError` for anything else, and the errors of :func:`read_plan`.
    """
    if not isinstance(plan, Plan | str | os.PathLike):
        raise OptionError(f"plan is {for_message(plan)}", hint=_PLAN_OR_PATH)
    return plan if isinstance(plan, Plan) else read_plan(plan)[1]


def read_prediction(path: str | os.PathLike[str]) -> PredictedStep | None:
    """Read the estimate for another device from the plan's file at ``path``; ``None`` if it has none.

    Raises :class:`UsageError` if the file cannot be read.
    """
    data = _plan_data(path).get(PREDICTED)
    return None if data is None else from_data(PredictedStep, data, where=f"{path}.{PREDICTED}")


def _plan_data(path: str | os.PathLike[str]) -> dict[str, Any]:
    data = read_mapping(Path(path), _PLAN_HINT)
    version = data.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{path} is not a plan: its schema_version is {shorten(version)}", hint=_PLAN_HINT)
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema_version {version}; this memopt reads up to {SCHEMA_VERSION}", hint="Upgrade memopt."
        )
    known_keys = [*_HEADER_KEYS, "level", *(f.name for f in fields(Plan)), PREDICTED, PARALLEL, TURNS_OFF]
    refuse_unknown(data, known_keys, str(path))
    return data


def _read_header(data: Mapping[str, Any], where: str) -> FileHeader:
    """Read the header of a file; its inputs are checked as strictly as typed ones."""
    header = from_data(FileHeader, data, where=where)
    try:
        check_spec(header.spec)
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", hint=err.hint) from err
    return header


def frontier_json(shown: ShownFrontier) -> bytes:
    """Return the content of ``*.frontier.json``: the keys of the header, then the other fields of ``shown``."""
    data = to_data(shown)
    return json_text({**data.pop("header"), **data}).encode()


def read_frontier(path: Path) -> ShownFrontier:
    """Read the plans that ``--frontier`` showed from the file at ``path``.

    Raises :class:`FileNotFoundError` if there is no file, and :class:`UsageError` for one that memopt did not write.
    """
    try:
        header, parts = _read_parts(path, since=2)
        shown = _measurable(from_data(ShownFrontier, {"header": to_data(header), **parts}, where="the file"))
        options: Any = {f.name: getattr(shown.options, f.name) for f in fields(SearchOptions)}
        resolve(options)  # refuses values that no option takes
        if shown.options.level < 1:
            raise UsageError(f"its level is {shown.options.level}, which finds no plans")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, UsageError) as err:
        raise UsageError(
            f"{path} does not hold the plans of a frontier: {_reason_unreadable(err)}",
            hint=_FRONTIER_HINT,
        ) from err
    if any(point.plan.by is not None for point in shown.points):
        raise UsageError(
            f"{path} holds a plan by length, which no frontier has",
            hint=_FRONTIER_HINT,
        )
    return shown


def read_header(path: Path) -> FileHeader:
    """Read the header of memopt's JSON file at ``path``, such as a summary: the model, and its inputs.

    Raises :class:`OSError` and :class:`ValueError`, among them :class:`UsageError`, for any other file.
    """
    return _read_parts(path, since=1)[0]


def baseline_json(baseline: Baseline) -> bytes:
    """Return the content of a baseline file: the header's keys, then the parts of ``baseline``."""
    parts = {"conditions": to_data(baseline.conditions), "memory": to_data(baseline.memory)}
    parts |= {"shorter": to_data(baseline.shorter)} if baseline.shorter else {}
    parts |= {"plan_path": baseline.plan_path} if baseline.plan_path else {}
    return json_text({**to_data(baseline.header), **parts}).encode()


def read_measured(path: str | os.PathLike[str], step: str = "") -> Baseline:
    """Read the needs of a step from a baseline or from a ``*.summary.json``.

    ``step``: the model and its step as typed, for the command that records a missing file; empty if unknown.

    Raises :class:`BaselineError` for a file that is missing, is neither, or was written by a later memopt.
    """
    try:
        header, parts = _read_parts(path, since=1)
        if "summary" in parts:
            summary = from_data(MemOptSummary, parts["summary"], where="summary")
            shorter = tuple(_shorter_steps(summary))
            return _measurable(
                Baseline(header=header, conditions=None, memory=_step_of_summary(summary), shorter=shorter)
            )
        return _require_comparable(
            _measurable(from_data(Baseline, {"header": to_data(header), **parts}, where="the file"))
        )
    except FileNotFoundError as err:
        raise BaselineError(f"there is no baseline at {path}", hint=_record_hint(path, step)) from err
    except (OSError, ValueError, UsageError) as err:
        hint = _record_hint("FILE", step)
        if _was_baseline(path):
            hint = _record_hint(path, step, "--force") + " Add the flags of the step, such as `--optimizer`."
        raise BaselineError(f"{path} is not a baseline: {_reason_unreadable(err)}", hint=hint) from err


def _record_hint(path: str | os.PathLike[str], step: str, *more: str) -> str:
    file = " ".join((quoted_path(str(path)), *more))
    recording = f"`memopt baseline {step} -o {file}`" if step else f"`memopt baseline MODEL -i SHAPE -o {file}`"
    return f"Record one with {recording}."


def _was_baseline(path: str | os.PathLike[str]) -> bool:
    """Return whether the broken file at ``path`` is a baseline of memopt's, which a new one may replace."""
    try:
        return b'"conditions": {' in read_bytes(path, MAX_BYTES)
    except OSError:
        return False


def _read_parts(path: str | os.PathLike[str], *, since: int) -> tuple[FileHeader, dict[str, Any]]:
    """Return the header and the other values of the JSON at ``path``, of a schema version from ``since`` on.

    Raises :class:`OSError`, :class:`ValueError`, and :class:`UsageError`, whose message calls the file "the file".
    """
    content = read_bytes(path, MAX_BYTES)
    if re.search(rb"^<<<<<<< ", content, re.MULTILINE):  # no JSON: its texts have no line breaks
        raise UsageError("it has a merge conflict")
    data = printable_data(read_json(content))
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or not since <= version <= SCHEMA_VERSION:
        raise UsageError(f"its schema_version is {shorten(version)}, and this memopt reads {since} to {SCHEMA_VERSION}")
    data = _upgrade(data) if version == 1 else data
    header = _read_header({key: data[key] for key in data if key in _HEADER_KEYS}, "the file")
    return header, {key: data[key] for key in data if key not in _HEADER_KEYS}


def _reason_unreadable(err: OSError | ValueError | UsageError) -> object:
    return err.message if isinstance(err, UsageError) else getattr(err, "strerror", None) or err


def _measurable(record: _Record) -> _Record:
    """Return ``record`` if its numbers can have been measured.  Raises :class:`UsageError` that names a wrong one.

    No bytes and no seconds may be negative, and there must be at least one step, which takes time.
    """
    pending: list[tuple[str, Any]] = [("", record)]
    while pending:
        name, value = pending.pop()
        if is_dataclass(value):
            pending += [(f.name, getattr(value, f.name)) for f in fields(value)]
        elif isinstance(value, Mapping):
            pending += [(name, item) for item in value.values()]
        elif isinstance(value, list | tuple):
            if name in _POSITIVE_FIELDS and not value:
                raise UsageError(f"its {name} is empty")
            pending += [(name, item) for item in value]
        elif isinstance(value, int | float):
            if name in _POSITIVE_FIELDS and value <= 0:
                raise UsageError(f"its {name} is {value}; it must be above 0")
            if name.endswith(("_bytes", "_s")) and value < 0:
                raise UsageError(f"its {name} is {value}; it cannot be negative")
    return record


def _require_comparable(baseline: Baseline) -> Baseline:
    """Return ``baseline``.  Raises :class:`UsageError` if memopt could not have recorded it.

    Comparing looks for renames at every level of every path, so thousands of levels would keep memopt busy for minutes.
    """
    layout = None if baseline.conditions is None else baseline.conditions.layout
    if layout is not None:
        check_layout(layout)
    _check_shorter(baseline)
    memories = (baseline.memory, *(step.memory for step in baseline.shorter))
    counted = (memory for memory in memories if memory.peak is not None and layout is None)
    for memory in counted:
        total = sum(to_data(memory.breakdown).values())
        if total != memory.tensor_peak_bytes:
            raise UsageError(
                f"its categories add up to {total} bytes, not to its tensor peak of {memory.tensor_peak_bytes}: was it "
                "edited?"
            )
    deepest = max((module.path.count(".") for memory in memories for module in memory.modules), default=0)
    if deepest > _MAX_LEVELS:
        raise UsageError(f"its modules are nested {deepest} levels deep; memopt compares at most {_MAX_LEVELS}")
    return baseline


def _check_shorter(baseline: Baseline) -> None:
    """Raise :class:`UsageError` if ``baseline`` has shorter steps that memopt does not record, or too many of them."""
    sizes = [step.size for step in baseline.shorter]
    are_shorter = all(0 < step.size < baseline.header.spec.dims.get(step.dim, 0) for step in baseline.shorter)
    if not are_shorter or sizes != sorted({*sizes}) or len({step.dim for step in baseline.shorter}) > 1:
        raise UsageError("the sizes of its shorter steps do not ascend to the size of its inputs")
    if len(sizes) > MAX_RANGES:
        raise UsageError(f"it has {len(sizes)} shorter steps; memopt compares at most {MAX_RANGES}")


def _upgrade(data: Any) -> Any:
    """Convert JSON of schema version 1 to the current keys; keys that no longer exist are dropped."""
    if isinstance(data, list):
        return [_upgrade(item) for item in data]
    if not isinstance(data, dict):
        return data
    values = {key: _upgrade(value) for key, value in data.items()}
    if "segments" in values:  # a plan
        values.pop("level", None)
    if "predicted_tensor_peak_bytes" in values:  # a level
        values.pop("note", None)
        values = {"dry_runs" if key == "candidates" else key: value for key, value in values.items()}
    if "accumulates" in values:  # the settings of a step
        values["micro_batches"] = 2 if values.pop("accumulates") is True else 1
    return values


_Record = TypeVar("_Record")


def _step_of_summary(summary: MemOptSummary) -> StepMemory:
    """Return the measured step of the applied level.  Raises :class:`UsageError` if it was not measured."""
    outcomes = (row.outcome for row in summary.levels if row.level == summary.applied_level)
    measured = next((outcome for outcome in outcomes if isinstance(outcome, Measurement)), None)
    if measured is None:
        raise UsageError(f"it is a summary whose level {summary.applied_level} has no measurement")
    return _as_measured(summary.plan or Plan(), measured)


def _shorter_steps(summary: MemOptSummary) -> Iterator[ShorterStep]:
    """Yield a step for each range of a plan by length except the longest."""
    by = None if summary.plan is None else summary.plan.by
    if by is not None:
        for row in summary.ranges[:-1]:
            if row.outcome is None:
                raise UsageError(f"it is a summary whose range up to {by.dim}={row.up_to} was not measured")
            yield ShorterStep(dim=by.dim, size=row.up_to, memory=_as_measured(row.plan, row.outcome))


def _as_measured(plan: Plan, measured: Measurement) -> StepMemory:
    return StepMemory(
        plan=plan,
        tensor_peak_bytes=measured.tensor_peak_bytes,
        allocated_peak_bytes=measured.allocated_peak_bytes,
        step_s=measured.step_s,
        breakdown=measured.breakdown,
        elsewhere_bytes=measured.elsewhere_bytes,
    )


def batch_yaml(header: FileHeader, *, shaping: Mapping[str, Any], recommended: Mapping[str, Any]) -> bytes:
    """Return the content of ``*.batch.yaml``: ``batch_shaping`` configures batches, ``recommended`` explains them."""
    return yaml_text({**header_data(header), "batch_shaping": dict(shaping), "recommended": dict(recommended)}).encode()


def recommended_data(advice: BatchAdvice | BatchEstimate | None, described: int) -> dict[str, Any]:
    """Return ``advice`` as the mapping below ``recommended``; sizes in bytes, times in seconds.

    ``described``: the batch of the inputs, whose step was measured.  It takes the place of a recommendation if memory
    does not limit the batch, or if there is no advice.
    """
    if advice is None:
        return {"batch_size": described, "verified": True, "limited_by": "the given batch: no other is recommended"}
    if isinstance(advice, BatchEstimate):
        batch, limited_by = advice.batch, "memory, predicted by dry runs"
        if not advice.is_limited_by_memory:
            batch = described
            limited_by = f"the given batch: about {advice.batch} is predicted to fit, but {advice.because}"
        return {
            "batch_size": batch,
            "verified": batch == described,
            "limited_by": limited_by,
            "estimated_batch_size": advice.batch,
            "predicted_peak_bytes": advice.predicted_peak_bytes,
            "budget_bytes": advice.budget_bytes,
        }
    fit = {"intercept_bytes": advice.intercept_bytes, "bytes_per_sample": advice.slope_bytes}
    return {
        "batch_size": advice.recommended_batch,
        "verified": True,  # an advice recommends only a batch that was run
        "fastest_batch_size": advice.fastest_batch,
        "estimated_batch_size": advice.estimated_batch,
        "limited_by": on_command_line(advice.limited_by),
        "budget_bytes": advice.budget_bytes,
        "device_bytes": advice.device_bytes,
        **({"peak_fit": fit} if advice.slope_bytes > 0 else {}),  # no line fits a peak that falls with the batch
        "probes": to_short_data(advice.probes),
    }


def fastest_data(fastest: FastestTraining, plan: str | None) -> dict[str, Any]:
    """Return the fastest pair as the mapping below ``recommended``; ``plan``: path of the file of its plan."""
    answer = fastest.answer
    assert isinstance(answer.outcome, BatchProbe), "the answer is a pair that was run"
    data: dict[str, Any] = {
        "batch_size": answer.batch,
        "verified": True,
        **({} if plan is None else {"plan": plan}),
        "samples_per_s": answer.samples_per_s,
        "step_s": answer.outcome.step_s,
        "allocated_peak_bytes": answer.outcome.allocated_peak_bytes,
        "budget_bytes": fastest.budget_bytes,
    }
    if fastest.accumulation is not None:
        data["accumulation"] = to_data(fastest.accumulation)
    if fastest.original is not None:
        original = fastest.runs[fastest.original]
        data["original"] = {"batch_size": original.batch, "samples_per_s": original.samples_per_s}
    return data


def replicas_data(advice: ReplicaAdvice) -> dict[str, Any]:
    """Return the keys for a number of copies below ``recommended``; ``route`` is the class that ran the copies."""
    route = next(probe.route for probe in advice.probes if probe.replicas == advice.fastest)
    return {
        "replicas": advice.fastest,
        "route": route,
        "replicas_limited_by": on_command_line(advice.limited_by),
        "replica_probes": to_short_data(advice.probes),
    }

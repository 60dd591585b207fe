"""Measuring a step together with the other ranks of a real process group, for ``memopt measure``, as one of them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from memopt_cli.errors import MemoptError, RankLostError, UsageError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.files.outputs import check_outputs
from memopt_cli.inputs.spec_text import is_factory
from memopt_cli.measure.devices import resolve_device
from memopt_cli.measure.jobs import ORIGINAL, GroupJob, Subject
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.prediction import predicted_ranks
from memopt_cli.pipeline.prepare import NAME_BUILDER_HINT, header_of, inputs_note, load_request_for, prepare
from memopt_cli.records import (
    GroupMeasurement,
    MeasureRequest,
    Plan,
    RankLost,
    RankPrediction,
    RanksMeasured,
    StepFailed,
    to_data,
)
from memopt_cli.records.progress import Progress
from memopt_cli.text.documents import json_text
from memopt_cli.text.spelling import on_command_line
from memopt_cli.text.writing import content, write_all


def measure(request: MeasureRequest, *, progress: Progress) -> GroupMeasurement:
    """Measure a step on every rank, and return the measurements of all; the first rank also predicts and reports them.

    Raises :class:`MemoptError` for a step that fails; if a rank fails before it waits for others, on all ranks.  Raises
    :class:`RankLostError` if another rank is gone.
    """
    started = time.monotonic()
    targets = [Path(request.output)] if request.output and request.rank == 0 else []
    check_outputs(targets, request.source.location, force=request.force)
    plan = read_plan(request.plan_path)[1] if request.plan_path is not None else ORIGINAL
    plan.require_eager("ranks are measured without a compiler")
    settings = replace(request.settings, device=_rank_device(request))
    ranks_measured = _measure_in_group(replace(request, settings=settings), plan, progress)
    notes = [inputs_note(ranks_measured.spec)]
    predicted = (
        _predict_first_rank(replace(request, spec=ranks_measured.spec), plan, notes, progress)
        if request.rank == 0
        else None
    )
    measurement = GroupMeasurement(
        header=header_of(Subject(source=request.source, spec=ranks_measured.spec, settings=settings), sha256=None),
        layout=request.layout,
        plan=plan,
        plan_digest=ranks_measured.plan_digest,
        ranks=ranks_measured.ranks,
        tensor_peak_bytes=max(rank.tensor_peak_bytes for rank in ranks_measured.ranks),
        allocated_peak_bytes=max(rank.allocated_peak_bytes for rank in ranks_measured.ranks),
        step_s=max(rank.step_s for rank in ranks_measured.ranks),
        predicted=predicted,
        notes=tuple(notes),
        spent_s=time.monotonic() - started,
    )
    write_all(
        {path: content(on_command_line(json_text(to_data(measurement))).encode()) for path in targets},
        force=request.force,
    )
    return measurement


def _rank_device(request: MeasureRequest) -> str:
    """Return the device of this rank, for CUDA by its local rank.

    Raises :class:`UsageError` unless the model is a function, for a missing device, and for one shared by all ranks.
    """
    if not is_factory(request.source.location):
        raise UsageError(
            f"{request.source.location} is not a function that builds the model, and every rank must build its own",
            hint=NAME_BUILDER_HINT,
        )
    if ":" in request.settings.device:
        raise UsageError(
            f"`--device {request.settings.device}` is one device, but every rank has its own",
            hint="Write `--device cuda` or cpu; LOCAL_RANK gives each rank its own device.",
        )
    device = resolve_device(request.settings.device)
    return resolve_device(f"cuda:{request.local_rank}") if device.startswith("cuda") else device


def _measure_in_group(request: MeasureRequest, plan: Plan, progress: Progress) -> RanksMeasured:
    progress.stage(f"measuring on {request.layout.ranks} ranks")
    subject = Subject(source=request.source, settings=request.settings, layout=request.layout, rank=request.rank)
    with Session(subject, request.timeout_s) as session:
        answer = session.ask(GroupJob(plan=plan, spec=request.spec, timeout_s=request.timeout_s))
    if not isinstance(answer, RanksMeasured | RankLost):
        context = f"rank {request.rank} of {request.layout.ranks}: "  # a failed step names its rank itself
        raise_failure(answer, "" if isinstance(answer, StepFailed) else context)
    if isinstance(answer, RankLost):
        raise RankLostError(answer.reason, hint=answer.hint)
    return answer


def _predict_first_rank(
    request: MeasureRequest, plan: Plan, notes: list[str], progress: Progress
) -> RankPrediction | None:
    """Predict the first rank's step in a process without a group; ``None``, and a note, where that fails."""
    settings = replace(request.settings, device="cpu")  # tensors have the same bytes there
    load_request = load_request_for(request, settings, layout=request.layout)
    try:
        prepared = replace(prepare(load_request, progress=Progress(), ask=None), progress=progress)
        with predicted_ranks(prepared, request.layout, plan, rank=0) as (_, predictions):
            return predictions[0]
    except MemoptError as err:
        notes.append(f"Not predicted: {err.message}.")
        return None

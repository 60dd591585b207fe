"""``memopt apply``: put a plan that was made earlier onto a model, and write the model."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.errors import VerificationError
from memopt_cli.files.memopt_files import read_plan, read_prediction
from memopt_cli.files.outputs import output_paths
from memopt_cli.measure.jobs import DescribeJob
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.heads import heads_notes
from memopt_cli.pipeline.own_checkpoints import suspended_notes
from memopt_cli.pipeline.plans.confirmation import confirm, differing_settings, with_predicted_settings
from memopt_cli.pipeline.plans.in_backward import IN_BACKWARD_NOTE
from memopt_cli.pipeline.prepare import (
    PreparedModel,
    inputs_of_file,
    load_request_for,
    model_writer,
    open_model,
    prepare,
    reader_notes,
)
from memopt_cli.pipeline.verification import verify_plan
from memopt_cli.records import CHANGES_NOTHING, STEP, ApplyRequest, ApplyResult, FileHeader, Plan, Verification
from memopt_cli.records.progress import Ask, Progress
from memopt_cli.text.writing import check_targets, write_all


def apply(request: ApplyRequest, *, progress: Progress, ask: Ask | None = None) -> ApplyResult:
    """Put the plan of ``request`` onto its model, verify and confirm it if asked to, and write the optimized model.

    The user's own step is only tried: there is no model to write.

    Raises :class:`MemoptError`, among them :class:`VerificationError` if the plan changes what the model computes.
    """
    header, plan = read_plan(request.plan_path)
    target = output_paths(request.source.location, request.output).model
    check_targets([target], force=request.force)
    if request.verify or request.confirm:
        prepared, result = _try_out(request, header, plan, progress, ask)
        source, facts = prepared.subject.source, prepared.facts
    else:
        source, facts = open_model(request.source, DescribeJob(inputs=False), request.timeout_s, ask=ask)
        for note in facts.notes:
            progress.note(note)
        result = ApplyResult(files=())
    is_tried_step = facts.format == STEP and (request.verify or request.confirm)  # it has no file: the trial is all
    targets = {} if is_tried_step else {target: model_writer(source, plan, request.timeout_s)}
    files = write_all(targets, force=request.force)
    about_plan = [CHANGES_NOTHING] * plan.is_empty + [IN_BACKWARD_NOTE] * plan.in_backward + heads_notes(plan)
    about_model = (*suspended_notes(facts.checkpoint_switches, plan), *reader_notes(facts.format, target))
    for note in (*about_plan, *about_model):  # only now, as the plan may not suit the model
        progress.note(note)
    return replace(result, files=files)


def _try_out(
    request: ApplyRequest, header: FileHeader, plan: Plan, progress: Progress, ask: Ask | None
) -> tuple[PreparedModel, ApplyResult]:
    """Verify and confirm ``plan`` as ``request`` asks, on the inputs in the plan's file unless others are given."""
    predicted = read_prediction(request.plan_path) if request.confirm else None
    if request.spec is None:
        request = replace(request, spec=inputs_of_file(header.spec, request.plan_path))
    settings = with_predicted_settings(request.settings, predicted)
    load_request = replace(load_request_for(request, settings), plan=plan.of_model)
    prepared = prepare(load_request, progress=progress, ask=ask)
    confirmation = None
    if request.confirm:
        differs = differing_settings(prepared.subject, predicted, header)
        confirmation = confirm(prepared, plan, predicted, differs)
    *shorter, verification = _verify_all(prepared, plan.of_model) if request.verify else [None]
    shorter_verifications = tuple(verification for verification in shorter if verification is not None)
    result = ApplyResult(files=(), verification=verification, shorter=shorter_verifications, confirmation=confirmation)
    return prepared, result


def _verify_all(prepared: PreparedModel, plan: Plan) -> list[Verification]:
    """Verify ``plan`` at the sizes of the inputs; verify a plan by length at the largest size of each range.

    If the shapes of the inputs do not name the plan's dimension, inputs cannot be resized, and their own size is tried.
    """
    if plan.by is None or plan.by.dim not in prepared.subject.spec.dims:
        return [_require_verified(prepared, plan)]
    sizes = [prepared.with_size(plan.by.dim, part.up_to) for part in plan.ranges]
    return [_require_verified(sized, plan) for sized in sizes]


def _require_verified(prepared: PreparedModel, plan: Plan) -> Verification:
    verification = require_answer(verify_plan(prepared, plan), "verification could not be run: ")
    if not verification.passed:
        raise VerificationError(
            f"with the plan {verification.difference}, at {verification.sizes}",
            hint="Nothing was written; make a plan for this model and these inputs with memopt optimize.",
        )
    return verification

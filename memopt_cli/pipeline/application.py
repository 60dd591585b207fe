"""``memopt apply``: a plan made elsewhere, onto this model."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.contents import read_plan
from memopt_cli.errors import VerificationError
from memopt_cli.measure.jobs import DescribeJob
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.in_backward import IN_BACKWARD
from memopt_cli.pipeline.prepare import inputs_of_file, open_model, opening_of, prepare, saved_model
from memopt_cli.pipeline.verification import verified
from memopt_cli.progress import Ask, Progress
from memopt_cli.records import ApplyRequest, ApplyResult, ModelSource, Plan, Verification
from memopt_cli.write import check_targets, output_paths, write_all


def apply(request: ApplyRequest, *, progress: Progress, ask: Ask | None = None) -> ApplyResult:
    """Put a plan made elsewhere onto a model and write the optimized model, compared with the original if asked to.

    Raises :class:`MemoptError`, a :class:`VerificationError` if the two differ.
    """
    header, plan = read_plan(request.plan_path)
    if plan.in_backward:
        progress.note(IN_BACKWARD)
    target = output_paths(request.source.location, request.output).model
    check_targets([target], force=request.force)
    if request.verify and request.spec is None:  # those of the step that it was made for
        request = replace(request, spec=inputs_of_file(header.spec, request.plan_path))
    if request.verify:
        source, verification = _verified(request, plan.of_model, progress, ask)
    else:
        source, facts = open_model(request.source, DescribeJob(inputs=False), request.timeout_s, ask=ask)
        for note in facts.notes:
            progress.note(note)
        verification = None
    files = write_all({target: saved_model(source, plan, request.timeout_s)}, force=request.force)
    return ApplyResult(files=files, verification=verification)


def _verified(
    request: ApplyRequest, plan: Plan, progress: Progress, ask: Ask | None
) -> tuple[ModelSource, Verification]:
    prepared = prepare(opening_of(request, request.settings, plan=plan), progress=progress, ask=ask)
    found = verified(prepared, plan, request.timeout_s, progress)
    if not isinstance(found, Verification):
        raise_failure(found, "verification could not be run: ")
    if not found.passed:
        raise VerificationError(
            f"with the plan {found.difference}, at batch {found.batch}",
            hint="Nothing was written; make a plan for this model and these inputs with memopt optimize.",
        )
    return prepared.subject.source, found

"""Verifying a plan: comparing its step with the original's, at full size or at the largest size that can be run.

A full comparison keeps all tensors of both steps, which may not fit, and takes several steps.  So the measured steps
leave fingerprints, a few numbers for each tensor, which are compared at full size, and a full comparison follows on
fewer samples.  Only if the fingerprints differ is the full comparison made at full size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memopt_cli.errors import MemoptError
from memopt_cli.inputs.batch_axis import BATCH
from memopt_cli.measure.jobs import RoundedJob, Sizes, SizesJob, VerifyJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.equivalence import StepCache, compare_prepared
from memopt_cli.pipeline.fingerprints.causes import DRAWS_COMPILED
from memopt_cli.pipeline.fingerprints.steps import EPSILONS, compare_fingerprints
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import (
    Differs,
    Failure,
    Fingerprint,
    FingerprintCheck,
    FurtherCheck,
    NotRun,
    OutOfMemory,
    Plan,
    StepFailed,
    Verification,
    describe,
)

_STEPS_COMPARED = 3
"""Number of steps, of the original and of the plan together, that a full comparison takes."""
_QUICK_S = 1.0
"""Time in seconds that the steps of a full comparison should take; for a longer step, fewer samples are compared."""
_CONSECUTIVE_STEPS = 3
"""Number of consecutive compiled steps that are compared."""
_FEW_SAMPLES = 2
"""Batch at which a plan is verified where the step does not run at full size, as with ``--for``."""


def verify_plan(prepared: PreparedModel, plan: Plan, *, fits: bool = True) -> Verification | Failure:
    """Verify ``plan`` at full size if the original ``fits``, else at the largest half, quarter … of the batch."""
    size = prepared.batch if fits else max(1, prepared.batch // 2)
    while True:
        prepared.progress.stage(f"verifying at batch {size}")
        outcome = _verify_at(prepared, plan, Sizes(batch=size))
        if size == 1 or not isinstance(outcome, OutOfMemory):
            if plan.compile is None or not isinstance(outcome, Verification) or not outcome.passed:
                return outcome
            return verify_compiled(prepared, plan, outcome)
        size = max(1, size // 2)


def verify_compiled(
    prepared: PreparedModel,
    plan: Plan,
    verification: Verification,
    reference: PreparedModel | None = None,
    cache: StepCache | None = None,
) -> Verification | Failure:
    """Compare compiled steps under ``plan`` with steps compiled without segments and memory budget.

    Both sides are compiled, since a compiler changes the order of sums and the random numbers.
    ``verification``: the verification of the segments without a compiler, which is returned with this check added.
    ``reference``: the model as prepared for the side without segments, ``None`` for ``prepared``.  ``cache``: a cache
    of the reference's steps.
    """
    assert plan.compile is not None, "the caller's plan compiles the model"
    backend = plan.compile.backend
    plain = Plan(compile=replace(plan.compile, activation_memory_budget=None))
    if plan == plain:
        return verification
    try:
        comparison = compare_prepared(
            replace(reference or prepared, carried=plain), replace(prepared, carried=plan), _CONSECUTIVE_STEPS, cache
        )
    except MemoptError as error:
        return StepFailed.from_error(error, error.hint)
    check = FurtherCheck(name=f"compiled by {backend}", batch=comparison.batch, compared=comparison.compared)
    verification = replace(verification, further=(*verification.further, check))
    # Segments may break the model into different graphs, whose random numbers differ in forward: no fault of the plan.
    draws_differ = comparison.cause is not None and comparison.cause.text == DRAWS_COMPILED
    if comparison.passed or (draws_differ and plan.compile.activation_memory_budget is None):
        return verification
    gap = comparison.gaps[0] if comparison.gaps else None
    return replace(
        verification,
        passed=False,
        worst_name=gap.name if gap is not None else "the compiled step",
        worst_difference=gap.apart if gap is not None else math.inf,
        detail=comparison.failed or comparison.hooks,
        differs_in=f"where {backend} compiles it"
        + (f" ({comparison.cause.text})" if comparison.cause is not None else ""),
    )


def verify_on_few_samples(prepared: PreparedModel, plan: Plan) -> Verification | Failure:
    """Verify ``plan`` on two samples, or at the smallest sizes at which all its chunks run."""
    prepared.progress.stage("verifying a few samples")
    sizes = _sizes_for(prepared, plan, min(_FEW_SAMPLES, prepared.batch))
    outcome = _verify_at(prepared, plan, sizes) if isinstance(sizes, Sizes) else None
    if outcome is None or isinstance(outcome, OutOfMemory) or _proves_nothing(outcome):
        return verify_plan(prepared, plan, fits=False)
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Fingerprints of the measured steps of the original and of a plan."""

    original: Fingerprint
    planned: Fingerprint
    original_s: float
    """Time of a step of the original, in seconds."""


def verify_by_fingerprints(prepared: PreparedModel, plan: Plan, measured: MeasuredSteps) -> Verification | Failure:
    """Verify ``plan`` by the fingerprints of its ``measured`` steps at full size, and fully on fewer samples.

    Chunks change the order of sums, so their fingerprints may differ as much as the original's do when its parameters
    are rounded.  If they differ by more, or the model cannot run with rounded parameters, the full comparison is made
    at full size: see :func:`verify_plan`.
    """
    check, agrees = check_fingerprints(measured, plan, prepared)
    if not agrees and not plan.has_chunks:
        return verify_plan(prepared, plan)
    rounding = 0.0 if agrees else check.worst_difference
    gradients = (tensor for tensor in measured.original.tensors if tensor.name.startswith("gradient"))
    in_bfloat16 = any(tensor.kind.startswith("torch.bfloat16 ") for tensor in gradients)
    with prepared.session() as session:
        if not agrees:
            prepared.progress.stage("verifying at full size")
            rounded = session.ask(RoundedJob())
            if isinstance(rounded, Fingerprint):
                check, agrees = check_fingerprints(measured, plan, prepared, rounded)
        if agrees:
            prepared.progress.stage("verifying")
            share = _QUICK_S / (_STEPS_COMPARED * measured.original_s)
            sizes = _sizes_for(session, plan, max(1, min(prepared.batch, int(prepared.batch * share))))
            sizes = sizes if isinstance(sizes, Sizes) else Sizes(batch=prepared.batch)
            outcome = _verify_at(prepared, plan, sizes, measured.original_s, session)
            if isinstance(outcome, Verification) and not _proves_nothing(outcome):
                return replace(outcome, measured=check, rounding=rounding, in_bfloat16=in_bfloat16)
    outcome = verify_plan(prepared, plan)
    if not isinstance(outcome, Verification):
        return outcome
    return replace(outcome, rounding=rounding, in_bfloat16=in_bfloat16)


def fault_in(outcome: Verification | Failure) -> Differs | NotRun | None:
    """Return why the plan fails whose verification ended with ``outcome``; ``None`` if it passes."""
    if isinstance(outcome, Verification):
        return None if outcome.passed else Differs(verification=outcome)
    return NotRun(failure=outcome, in_verification=True)


def check_fingerprints(
    measured: MeasuredSteps, plan: Plan, prepared: PreparedModel, rounded: Fingerprint | None = None
) -> tuple[FingerprintCheck, bool]:
    """Compare the ``measured`` fingerprints, bit for bit, or in norm for a plan with chunks; return whether they agree.

    ``rounded``: the fingerprint of a step of the original with rounded parameters.
    """
    subject = prepared.subject
    dims = dict(subject.spec.dims)
    return compare_fingerprints(
        measured.original,
        measured.planned,
        batch=dims.pop(BATCH, prepared.batch),
        dims=dims,
        exact=not plan.has_chunks,
        epsilon=EPSILONS.get(subject.settings.precision, 0.0),
        rounded=rounded,
    )


def _sizes_for(session: Session | PreparedModel, plan: Plan, batch: int) -> Sizes | Failure:
    """Return ``batch`` as sizes, or for a plan in chunks the smallest sizes at which all its chunks run."""
    return session.ask(SizesJob(plan=plan)) if plan.has_chunks else Sizes(batch=batch)


def _proves_nothing(outcome: Verification | Failure) -> bool:
    """Return whether ``outcome`` at a smaller size proves nothing: chunks did not run that may run at full size."""
    return isinstance(outcome, Verification) and outcome.whole and not outcome.full_size


def _verify_at(
    prepared: PreparedModel, plan: Plan, sizes: Sizes, original_step_s: float = 0.0, session: Session | None = None
) -> Verification | Failure:
    """Verify ``plan`` at ``sizes`` in ``session``, or in a fresh one if there is none or it dies.

    If only the further steps end the subprocess, the first step decides, and the further ones are reported as skipped.
    """
    job = VerifyJob(plan=plan, batch=sizes.batch, dims=sizes.dims, further_steps=True, original_step_s=original_step_s)
    answer = (session or prepared).ask(job)
    if isinstance(answer, Verification | StepFailed):
        return answer
    first_step_outcome = prepared.ask(replace(job, further_steps=False))
    if not isinstance(first_step_outcome, Verification) or not first_step_outcome.passed or plan.is_empty:
        return first_step_outcome
    skipped_check = FurtherCheck(name="in later steps", batch=sizes.batch, not_tried=describe(answer), skipped=True)
    return replace(first_step_outcome, further=(skipped_check, *first_step_outcome.further))

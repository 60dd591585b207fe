"""Verify a plan: compare its step with the original's, at full size or at the largest size that can be run.

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
from memopt_cli.pipeline.equivalence import Known, compare_prepared
from memopt_cli.pipeline.fingerprints.causes import RANDOM_COMPILED
from memopt_cli.pipeline.fingerprints.steps import EPSILONS, compared
from memopt_cli.pipeline.prepare import Prepared
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

_STEPS = 3
"""The number of steps, of the original and of the plan together, that a full comparison takes."""
_QUICK_S = 1.0
"""Time in seconds that the steps of a full comparison should take; for a longer step, fewer samples are compared."""
_CONSECUTIVE = 3
"""The number of consecutive compiled steps that are compared."""
_FEW = 2
"""The batch at which a plan is verified where the step does not run at full size, as with ``--for``."""


def verified(prepared: Prepared, plan: Plan, *, fits: bool = True) -> Verification | Failure:
    """Verify ``plan`` at full size if the original ``fits``, else at the largest half, quarter … of the batch."""
    size = prepared.batch if fits else max(1, prepared.batch // 2)
    while True:
        prepared.progress.stage(f"verifying at batch {size}")
        found = _verified_at(prepared, plan, Sizes(batch=size))
        if size == 1 or not isinstance(found, OutOfMemory):
            if plan.compile is None or not isinstance(found, Verification) or not found.passed:
                return found
            return verified_compiled(prepared, plan, found)
        size = max(1, size // 2)


def verified_compiled(
    prepared: Prepared,
    plan: Plan,
    found: Verification,
    reference: Prepared | None = None,
    known: Known | None = None,
) -> Verification | Failure:
    """Compare compiled steps under ``plan`` with steps compiled without segments and memory budget.

    Both sides are compiled, since a compiler sums in another order and draws other random numbers than eager mode.
    ``found``: the verification of the segments without a compiler, which is returned with this check added.
    ``reference``: the model as prepared for the side without segments, ``None`` for ``prepared``.  ``known``: a cache
    of the reference's steps.
    """
    assert plan.compile is not None, "else there is nothing to compare"
    backend, plain = plan.compile.backend, Plan(compile=replace(plan.compile, activation_memory_budget=None))
    if plan == plain:
        return found
    try:
        told = compare_prepared(
            replace(reference or prepared, carried=plain), replace(prepared, carried=plan), _CONSECUTIVE, known
        )
    except MemoptError as error:
        return StepFailed.of(error, error.hint)
    check = FurtherCheck(name=f"compiled by {backend}", batch=told.batch, compared=told.compared)
    found = replace(found, further=(*found.further, check))
    # Segments may break the model into other graphs, which draw other random numbers in forward: that is no fault.
    is_drawn = told.cause is not None and told.cause.text == RANDOM_COMPILED
    if told.passed or (is_drawn and plan.compile.activation_memory_budget is None):
        return found
    gap = told.gaps[0] if told.gaps else None
    return replace(
        found,
        passed=False,
        worst_name=gap.name if gap is not None else "the compiled step",
        worst_difference=gap.apart if gap is not None else math.inf,
        detail=told.failed or told.hooks,
        differs_in=f"where {backend} compiles it" + (f" ({told.cause.text})" if told.cause is not None else ""),
    )


def verified_small(prepared: Prepared, plan: Plan) -> Verification | Failure:
    """Verify ``plan`` on two samples, or at the smallest sizes at which all its chunks run."""
    prepared.progress.stage("verifying a few samples")
    sizes = _small(prepared, plan, min(_FEW, prepared.batch))
    found = _verified_at(prepared, plan, sizes) if isinstance(sizes, Sizes) else None
    if found is None or isinstance(found, OutOfMemory) or _says_nothing(found):
        return verified(prepared, plan, fits=False)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Fingerprints of the measured steps of the original and of a plan."""

    original: Fingerprint
    planned: Fingerprint
    original_s: float
    """The time of a step of the original, in seconds."""


def verified_by_fingerprints(prepared: Prepared, plan: Plan, measured: MeasuredSteps) -> Verification | Failure:
    """Verify ``plan`` by the fingerprints of its ``measured`` steps at full size, and fully on fewer samples.

    Chunks change the order of sums, so their fingerprints may differ as much as the original's do when its parameters
    are rounded.  If they differ by more, or the model cannot run with rounded parameters, the full comparison is made
    at full size: see :func:`verified`.
    """
    check = agreement(measured, plan, prepared)
    if check is None and not plan.has_chunks:
        return verified(prepared, plan)
    with prepared.session() as session:
        if check is None:
            prepared.progress.stage("verifying at full size")
            rounded = session.ask(RoundedJob())
            check = agreement(measured, plan, prepared, rounded) if isinstance(rounded, Fingerprint) else None
        if check is not None:
            prepared.progress.stage("verifying")
            share = _QUICK_S / (_STEPS * measured.original_s)
            sizes = _small(session, plan, max(1, min(prepared.batch, int(prepared.batch * share))))
            sizes = sizes if isinstance(sizes, Sizes) else Sizes(batch=prepared.batch)
            found = _verified_at(prepared, plan, sizes, measured.original_s, session)
            if isinstance(found, Verification) and not _says_nothing(found):
                return replace(found, measured=check)
    return verified(prepared, plan)


def fault_in(found: Verification | Failure) -> Differs | NotRun | None:
    """Return why a plan fails, given the outcome ``found`` of its verification; ``None`` if it passes."""
    if isinstance(found, Verification):
        return None if found.passed else Differs(verification=found)
    return NotRun(failure=found, in_verification=True)


def agreement(
    measured: MeasuredSteps, plan: Plan, prepared: Prepared, rounded: Fingerprint | None = None
) -> FingerprintCheck | None:
    """Compare the ``measured`` fingerprints, to the bit, or in norm for a plan with chunks; ``None`` if they differ.

    ``rounded``: the fingerprint of a step of the original with rounded parameters.
    """
    subject = prepared.subject
    dims = dict(subject.spec.dims)
    check, agrees = compared(
        measured.original,
        measured.planned,
        batch=dims.pop(BATCH, prepared.batch),
        dims=dims,
        exact=not plan.has_chunks,
        epsilon=EPSILONS.get(subject.settings.precision, 0.0),
        rounded=rounded,
    )
    return check if agrees else None


def _small(session: Session | Prepared, plan: Plan, batch: int) -> Sizes | Failure:
    """Return ``batch`` as sizes, or for a plan in chunks the smallest sizes at which all its chunks run."""
    return session.ask(SizesJob(plan=plan)) if plan.has_chunks else Sizes(batch=batch)


def _says_nothing(found: Verification | Failure) -> bool:
    """Return whether a smaller size proves nothing, as chunks that may run at full size did not run at it."""
    return isinstance(found, Verification) and found.whole and not found.full_size


def _verified_at(
    prepared: Prepared, plan: Plan, sizes: Sizes, asked_s: float = 0.0, session: Session | None = None
) -> Verification | Failure:
    """Verify ``plan`` at ``sizes`` in ``session``, or in a fresh one if there is none or it dies.

    If only the further steps end the subprocess, the first step decides, and the further ones are reported as skipped.
    """
    job = VerifyJob(plan=plan, batch=sizes.batch, dims=sizes.dims, further=True, asked_s=asked_s)
    found = (session or prepared).ask(job)
    if isinstance(found, Verification | StepFailed):
        return found
    alone = prepared.ask(replace(job, further=False))
    if not isinstance(alone, Verification) or not alone.passed or plan.is_empty:
        return alone
    lost = FurtherCheck(name="in later steps", batch=sizes.batch, not_tried=describe(found), skipped=True)
    return replace(alone, further=(lost, *alone.further))

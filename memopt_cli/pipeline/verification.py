"""A plan against the original, at the size of its step or at the largest that can be run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt_cli.inputs.batch_axis import BATCH
from memopt_cli.measure.jobs import RoundedJob, Sizes, SizesJob, VerifyJob
from memopt_cli.measure.runner import Session
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
"""Of the plain model and with the plan together, to compare the recorded step of an exact plan ..."""
_QUICK_S = 1.0
"""... which is taken at the size that was asked for if they take no longer, else of fewer samples."""
_FEW = 2
"""Samples of a step that is compared where a full one is not to be run."""


def verified(prepared: Prepared, plan: Plan, *, fits: bool = True) -> Verification | Failure:
    """At full size where the original fits, else at the largest half, quarter … that does.

    The steps that follow are left out where they, and not the recorded one, end the subprocess.
    """
    size = prepared.batch if fits else max(1, prepared.batch // 2)
    while True:
        prepared.progress.stage(f"verifying at batch {size}")
        found = _verified_at(prepared, plan, Sizes(batch=size))
        if size == 1 or not isinstance(found, OutOfMemory):
            return found
        size = max(1, size // 2)


def verified_small(prepared: Prepared, plan: Plan) -> Verification | Failure:
    """At two samples, or the least sizes at which all chunks run, where a full step is not to be run here."""
    prepared.progress.stage("verifying a few samples")
    sizes = _small(prepared, plan, min(_FEW, prepared.batch))
    found = _verified_at(prepared, plan, sizes) if isinstance(sizes, Sizes) else None
    if found is None or isinstance(found, OutOfMemory) or _says_nothing(found):
        return verified(prepared, plan, fits=False)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What the measured steps left, of the original and of a plan."""

    original: Fingerprint
    planned: Fingerprint
    original_s: float
    """Time of a step."""


def verified_by_fingerprints(prepared: Prepared, plan: Plan, measured: MeasuredSteps) -> Verification | Failure:
    """By what the measured steps left, at full size, and by a comparison in full of a step that is quick.

    That is one of fewer samples, or of a plan in chunks the least at which all of these run.  Where fingerprints of
    chunks differ, so may those of the original where its parameters are rounded otherwise.  Where they differ by more,
    or the model takes no such step, all is compared at full size: see :func:`verified`.
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
    """Return what speaks against a plan; ``None`` if it passes."""
    if isinstance(found, Verification):
        return None if found.passed else Differs(verification=found)
    return NotRun(failure=found, in_verification=True)


def agreement(
    measured: MeasuredSteps, plan: Plan, prepared: Prepared, rounded: Fingerprint | None = None
) -> FingerprintCheck | None:
    """What was compared, to the bit or with chunks in norm; ``None`` where something differs.

    ``rounded``: what a step of the original leaves whose parameters are rounded otherwise.
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
    """So many samples; of a plan in chunks the least sizes at which all of these run."""
    return session.ask(SizesJob(plan=plan)) if plan.has_chunks else Sizes(batch=batch)


def _says_nothing(found: Verification | Failure) -> bool:
    """Whether chunks did not run that do at full size, perhaps."""
    return isinstance(found, Verification) and found.whole and not found.full_size


def _verified_at(
    prepared: Prepared, plan: Plan, sizes: Sizes, asked_s: float = 0.0, session: Session | None = None
) -> Verification | Failure:
    """``session``: that is to answer; without one, or where it cannot, a fresh one does."""
    job = VerifyJob(plan=plan, batch=sizes.batch, dims=sizes.dims, further=True, asked_s=asked_s)
    found = (session or prepared).ask(job)
    if isinstance(found, Verification | StepFailed):
        return found
    alone = prepared.ask(replace(job, further=False))
    if not isinstance(alone, Verification) or not alone.passed or plan.is_empty:
        return alone
    lost = FurtherCheck(name="in later steps", batch=sizes.batch, not_tried=describe(found), skipped=True)
    return replace(alone, further=(lost, *alone.further))

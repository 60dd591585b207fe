"""A plan against the original, at the size of its step or at the largest that can be run."""

from __future__ import annotations

from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.progress import Progress
from memopt_cli.records import Failure, OutOfMemory, Plan, StepFailed, Verification


def verified(
    prepared: Prepared, plan: Plan, timeout_s: float, progress: Progress, *, fits: bool = True
) -> Verification | Failure:
    """At full size where the original fits, else at the largest half, quarter … that does.

    The steps that follow are left out where they, and not the recorded one, end the subprocess.
    """
    size = prepared.batch if fits else max(1, prepared.batch // 2)
    while True:
        progress.stage(f"verifying at batch {size}")
        with prepared.session(timeout_s) as session:
            found = session.verify(plan, size, further=True)
        if not isinstance(found, Verification | StepFailed):
            with prepared.session(timeout_s) as session:
                found = session.verify(plan, size)
        if size == 1 or not isinstance(found, OutOfMemory):
            return found
        size = max(1, size // 2)

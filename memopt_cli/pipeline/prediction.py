"""What one rank of many needs, predicted in a process of its own: process groups are global."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.measure.jobs import CountJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.records import Counted, Layout, Plan, RankPrediction, StepSettings, predicted


def predicted_here(settings: StepSettings, layout: Layout) -> StepSettings:
    """The settings of a step that is predicted, which is done on the CPU.

    Raises :class:`UsageError` for another device.
    """
    if settings.device.startswith("cuda"):
        raise UsageError(
            f"--device {settings.device} runs the step, and one of {layout.ranks} ranks is predicted on the CPU",
            hint="Leave --device out: tensors have the same bytes there.",
        )
    return replace(settings, device="cpu")


def predict(session: Session, layout: Layout, rank: int, plan: Plan) -> RankPrediction:
    """The step of the rank that a session is.  Raises :class:`MemoptError`."""
    counted = session.ask(CountJob(plan=plan, fake=True))
    if not isinstance(counted, Counted):
        raise_failure(counted)
    return predicted(counted, layout, rank, plan)

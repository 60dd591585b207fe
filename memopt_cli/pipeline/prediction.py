"""Predicting the memory of single ranks of many, each in its own subprocess.

PyTorch's process group is global, so one process can imitate one rank only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.inputs.spec_text import ranks_asked
from memopt_cli.measure.jobs import CountJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import require_answer
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import DeviceProfile, Plan, RankLayout, RankPrediction, make_prediction


@contextlib.contextmanager
def predicted_ranks(
    prepared: PreparedModel,
    layout: RankLayout,
    plan: Plan,
    *,
    rank: int | None = None,
    card: DeviceProfile | None = None,
) -> Iterator[tuple[Session, tuple[RankPrediction, ...]]]:
    """Predict ``rank``, by default the first and the last; yield the session of the largest, and the predictions."""
    plan.require_eager("a rank is predicted without a compiler")
    predictions: dict[int, RankPrediction] = {}
    with contextlib.ExitStack() as sessions:
        session_by_rank = {}
        for number in ranks_asked(layout, rank):
            prepared.progress.stage(f"predicting rank {number} of {layout.ranks}")
            subject = replace(prepared.subject, layout=layout, rank=number, card=card)
            session = replace(prepared, subject=subject).session("none")
            session_by_rank[number] = sessions.enter_context(session)
            predictions[number] = predict_one_rank(session_by_rank[number], layout, number, plan)
        largest = max(predictions, key=lambda number: predictions[number].tensor_peak_bytes)
        yield session_by_rank[largest], tuple(predictions.values())


def predict_one_rank(session: Session, layout: RankLayout, rank: int, plan: Plan) -> RankPrediction:
    """Predict the step of ``rank``, for which ``session`` was opened."""
    return make_prediction(require_answer(session.ask(CountJob(plan=plan, fake=True))), layout, rank, plan)

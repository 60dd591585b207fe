"""Predict the memory of single ranks of many, each in a subprocess of its own.

PyTorch's process group is global, so one process can imitate one rank only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.inputs.spec_text import ranks_asked
from memopt_cli.measure.jobs import CountJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.records import DeviceProfile, Layout, Plan, RankPrediction, predicted


@contextlib.contextmanager
def predicted_ranks(
    prepared: Prepared, layout: Layout, plan: Plan, *, rank: int | None = None, card: DeviceProfile | None = None
) -> Iterator[tuple[Session, tuple[RankPrediction, ...]]]:
    """Predict ``rank``, or if ``None`` the first and the last; yield the session of the largest, and the predictions.

    Raises :class:`MemoptError`.
    """
    plan.required_eager("a rank is predicted without a compiler")
    found: dict[int, RankPrediction] = {}
    with contextlib.ExitStack() as sessions:
        opened = {}
        for each in ranks_asked(layout, rank):
            prepared.progress.stage(f"predicting rank {each} of {layout.ranks}")
            subject = replace(prepared.subject, layout=layout, rank=each, card=card)
            session = replace(prepared, subject=subject).session("none")
            opened[each] = sessions.enter_context(session)
            found[each] = predict(opened[each], layout, each, plan)
        largest = max(found, key=lambda each: found[each].tensor_peak_bytes)
        yield opened[largest], tuple(found.values())


def predict(session: Session, layout: Layout, rank: int, plan: Plan) -> RankPrediction:
    """Predict the step of ``rank``, for which ``session`` was opened.  Raises :class:`MemoptError`."""
    return predicted(required(session.ask(CountJob(plan=plan, fake=True))), layout, rank, plan)

"""Predictions of what one rank of many needs, each in a subprocess, since process groups are global."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import is_factory, ranks_asked
from memopt_cli.measure.jobs import CountJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import required
from memopt_cli.pipeline.prepare import Opening, Prepared
from memopt_cli.records import DeviceProfile, Layout, Plan, RankPrediction, predicted


def without_data(opening: Opening, layout: Layout) -> Opening:
    """Return ``opening`` as it is predicted for ``layout``: on the CPU, with parameters that are never allocated.

    Raises :class:`UsageError` for a GPU, and for a model whose parameters exist already.
    """
    location, device = opening.source.location, opening.settings.device
    if not is_factory(location):
        raise UsageError(
            f"{location} has parameters already, but one of {layout.ranks} ranks is predicted from a model without "
            "data",
            hint="Name what builds the model: package.module:callable, or file.py:function.",
        )
    if device.startswith("cuda"):
        raise UsageError(
            f"--device {device} runs the step, but one of {layout.ranks} ranks is predicted on the CPU",
            hint="Leave --device out: tensors have the same bytes there.",
        )
    return replace(opening, settings=replace(opening.settings, device="cpu"), data="none")


@contextlib.contextmanager
def predicted_ranks(
    prepared: Prepared, layout: Layout, plan: Plan, *, rank: int | None = None, card: DeviceProfile | None = None
) -> Iterator[tuple[Session, tuple[RankPrediction, ...]]]:
    """Predict ``rank``, or if ``None`` the first and the last; yield the session of the largest, and the predictions.

    Raises :class:`MemoptError`.
    """
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

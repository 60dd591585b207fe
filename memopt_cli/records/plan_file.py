"""Content of a plan's file, and the saving of a plan that is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memopt_cli.errors import UsageError
from memopt_cli.records.device import PredictedStep
from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import RankLayout
from memopt_cli.records.plan import Plan, SegmentPlan
from memopt_cli.records.wire import to_data, to_short_data
from memopt_cli.text.documents import why_unreadable, yaml_text
from memopt_cli.text.writing import content, write_all

# Keys of a plan's file for people only: a plan is applied without them.
PREDICTED = "predicted"
"""Key of the predictions for a step under the plan."""
PARALLEL = "parallel"
"""Key of the layout of ranks for which the plan was found."""
TURNS_OFF = "turns_off"
"""Key of the model's attributes, for its own checkpointing, that the plan turns off."""


def save_plan(plan: Plan, path: Path, *, force: bool) -> None:
    """Write ``plan`` to ``path``, with a header that names no model and no inputs, since a plan knows neither.

    Raises :class:`UsageError` for a plan whose file could not be read again, and the errors of :func:`write_all`.
    """
    header = FileHeader.make("(in memory)", InputSpec(source="Plan.save"), device="(not recorded)")
    text = plan_yaml(header, plan)
    if reason := why_unreadable(text):
        raise UsageError(
            f"the plan is not saved, since memopt could not read its file: {reason}",
            hint="Save a plan with fewer segments or ranges.",
        )
    write_all({path: content(text)}, force=force)


def plan_yaml(
    header: FileHeader,
    plan: Plan,
    level: int | None = None,
    predicted: PredictedStep | None = None,
    layout: RankLayout | None = None,
    turns_off: Sequence[str] = (),
) -> bytes:
    """Return the content of ``*.plan.yaml``: the keys of ``header``, the ``level`` of a search, and ``plan``.

    For people, the file also has the estimate for another device (``predicted``), the ``layout`` of the ranks that the
    plan was found for (``parallel``) and the attributes of the model that the plan turns off (``turns_off``).
    Applying the plan needs none of these.
    """
    plan_data = {**({} if level is None else {"level": level}), **to_short_data(plan)}
    if plan.ranges:
        plan_data["ranges"] = [
            {**to_short_data(part), **({"segments": _segments_data(part.segments)} if part.segments else {})}
            for part in plan.ranges
        ]
    else:
        plan_data["segments"] = _segments_data(plan.segments)
    data_for_people = {PREDICTED: predicted, PARALLEL: layout}
    data_for_people = {name: to_data(value) for name, value in data_for_people.items() if value is not None}
    off = {TURNS_OFF: list(turns_off)} if turns_off else {}
    return yaml_text({**header_data(header), **off, **plan_data, **data_for_people}).encode()


def _segments_data(segments: Sequence[SegmentPlan]) -> list[dict[str, Any]]:
    return [{"path": segment.path, **to_short_data(segment)} for segment in segments]


def header_data(header: FileHeader) -> dict[str, Any]:
    """Convert ``header`` like :func:`to_data`; its inputs without fields that have their default."""
    return {**to_data(header), "spec": to_short_data(header.spec)}

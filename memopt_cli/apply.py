"""Put a plan onto a model, and take it off again."""

from __future__ import annotations

from torch import nn

from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import SegmentConfig, install_segment, remove_segment, segment_of


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """Install every segment of ``plan`` on ``model``, in place; returns the model.

    All or nothing: raises :class:`PlanError` that names the first module which is missing or cannot be a segment,
    and leaves the model as it was.
    """
    installed: list[nn.Module] = []
    try:
        installed.extend(_install(model, segment) for segment in plan.segments)
    except PlanError:
        for module in installed:
            remove_segment(module)
        raise
    return model


def remove_plan(model: nn.Module) -> nn.Module:
    """Make every segment of ``model`` a plain module again, in place; returns the model."""
    for module in list(model.modules()):
        if segment_of(module) is not None:
            remove_segment(module)
    return model


def _install(model: nn.Module, segment: SegmentPlan) -> nn.Module:
    try:
        module = model.get_submodule(segment.path)
    except AttributeError as error:
        raise PlanError(
            f"the plan names module '{segment.path}', which {type(model).__name__} does not have",
            hint="A plan fits the model it was made for; make a new one with memopt optimize.",
        ) from error
    config = SegmentConfig(
        compressor=segment.compressor,
        chunks=segment.chunks,
        axis=segment.axis,
        seq_inputs=segment.seq_inputs,
        seq_outputs=segment.seq_outputs,
        spatial_split=segment.spatial_split,
    )
    try:
        install_segment(module, config)
    except ValueError as reason:
        raise PlanError(f"module '{segment.path or '(root)'}' cannot be a segment: {reason}") from reason
    return module

"""Put a plan onto a model, and take it off again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan, from_data
from memopt_cli.runtime import (
    Run,
    SegmentConfig,
    add_runs,
    find_part,
    install_segment,
    named_parts,
    remove_runs,
    remove_segment,
    segment_of,
)
from memopt_cli.runtime.in_backward import (
    has_in_backward,
    install_in_backward,
    optimizers_in_backward,
    remove_in_backward,
)
from memopt_cli.runtime.private_torch import original_of

_SHARED = [field.name for field in fields(SegmentPlan) if field.name != "path"]
"""What an entry of a plan and the segment that it becomes both say, by the same names."""


def apply_plan(model: nn.Module, plan: Plan, optimizer: Optimizer | None = None) -> nn.Module:
    """Install every segment of ``plan`` on ``model``, in place; returns the model.

    ``optimizer``: the one that a plan with ``in_backward`` runs there.  In a wrapper the model within is meant, as
    everywhere here: see :func:`unwrapped`.

    All or nothing: raises :class:`PlanError` that names the first module which is missing or cannot be a segment, or
    says why the optimizer cannot run in backward, and leaves the model as it was.
    """
    if plan.in_backward and optimizer is None:
        raise PlanError(
            "the plan runs the optimizer in backward, and there is none",
            hint="Give it: memopt_cli.apply_plan(model, plan, optimizer=optimizer).",
        )
    _install_all(unwrapped(model), plan, optimizer)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within wrappers that only run it: ``DistributedDataParallel``, ``DataParallel``, ``torch.compile``.

    FSDP2 wraps nothing: it changes the model itself.
    """
    runs = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    within: Any = model.module if runs else original_of(model)
    return model if within is model else unwrapped(within)


def _install_all(model: nn.Module, plan: Plan, optimizer: Optimizer | None) -> None:
    installed: dict[nn.Module, str] = {}
    runs: list[Run] = []
    try:
        for segment in plan.segments:
            runs += _add_runs(model, segment.path)
        if plan.packed and not any(segment.path == "" for segment in plan.segments):
            installed[_installed(model, "(root)", SegmentConfig(recompute=False))] = ""
        for segment in plan.segments:
            installed[_install(model, segment, installed)] = segment.path
        if plan.in_backward and optimizer is not None:
            _run_in_backward(optimizer, model)
    except BaseException:
        for module in installed:
            remove_segment(module)
        remove_runs(model, runs)
        raise


def plan_of(model: nn.Module) -> Plan:
    """The plan that is installed on ``model``."""
    model = unwrapped(model)
    installed = {path: config for path, module in named_parts(model) if (config := segment_of(module))}
    segments = (
        from_data(SegmentPlan, {"path": path, **{name: getattr(config, name) for name in _SHARED}})
        for path, config in installed.items()
        if config.recompute
    )
    packed = any(not config.recompute for config in installed.values())
    return Plan(segments=tuple(segments), packed=packed, in_backward=has_in_backward(model))


def remove_plan(model: nn.Module) -> nn.Module:
    """Make all of ``model`` plain again, in place, and its optimizer, too; returns the model."""
    remove_segments(model)
    remove_runs(unwrapped(model))
    return model


@contextlib.contextmanager
def taken_off(model: nn.Module) -> Iterator[Plan]:
    """Within, ``model`` is plain, without the plan that it carries, which this gives.

    Where what is done then fails, the plan is on it again, and nothing else is.
    """
    carried, optimizers = plan_of(model), list(optimizers_in_backward(model))
    try:
        remove_plan(model)
        yield carried
    except BaseException:
        remove_plan(model)
        apply_plan(model, carried.of_model)
        for optimizer in optimizers:
            install_in_backward(optimizer, model)
        raise


def remove_segments(model: nn.Module) -> None:
    """As :func:`remove_plan`; runs of layers stay, as the modules that they are."""
    model = unwrapped(model)
    remove_in_backward(model)
    for _, module in list(named_parts(model)):
        if segment_of(module) is not None:
            remove_segment(module)


def _run_in_backward(optimizer: Optimizer, model: nn.Module) -> None:
    try:
        install_in_backward(optimizer, model)
    except ValueError as reason:
        raise in_backward_error(optimizer, reason) from reason


def in_backward_error(optimizer: Optimizer, reason: ValueError) -> PlanError:
    """Says that an optimizer cannot run in backward, and why."""
    return PlanError(
        f"{type(optimizer).__name__} cannot run in backward: it {reason}",
        hint="Take in_backward out of the plan, or train with another optimizer.",
    )


def _add_runs(model: nn.Module, path: str) -> list[Run]:
    try:
        return add_runs(model, path)
    except AttributeError as error:
        raise PlanError(
            f"the plan names module '{path}', which {type(model).__name__} does not have",
            hint="A plan fits the model it was made for; make a new one with memopt optimize.",
        ) from error
    except ValueError as reason:
        raise PlanError(
            f"module '{path}' cannot be a segment: {reason}",
            hint=f"Change the entry of '{path}' in the plan, or remove it.",
        ) from reason


def _install(model: nn.Module, segment: SegmentPlan, installed: dict[nn.Module, str]) -> nn.Module:
    name = segment.path or "(root)"
    module = find_part(model, segment.path)
    if module in installed:
        same = "twice" if installed[module] == segment.path else f"twice, the first time as '{installed[module]}'"
        raise PlanError(f"the plan names module '{name}' {same}", hint="Keep one of the two entries.")
    return _installed(module, name, SegmentConfig(**{field: getattr(segment, field) for field in _SHARED}))


def _installed(module: nn.Module, name: str, config: SegmentConfig) -> nn.Module:
    try:
        install_segment(module, replace(config, path=name))
    except ValueError as reason:
        hint = f"Change the entry of '{name}' in the plan, or remove it."
        if segment_of(module) is not None:
            hint = "Take off the plan that the model has: memopt_cli.remove_plan(model)."
        raise PlanError(f"module '{name}' cannot be a segment: {reason}", hint=hint) from reason
    return module

"""Installing a plan on a model, reading which plan is installed, and removing it.

A plan becomes segments on modules (:mod:`memopt_cli.runtime.container`), runs of layers grouped as one module, an
optimizer that runs in backward, and compilation; ``apply_plan`` puts all of these on a model or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

import torch
from torch import nn
from torch.optim import Optimizer

from memopt_cli.errors import PlanError
from memopt_cli.records import InputDimension, Plan, PlanRange, SegmentPlan, from_data
from memopt_cli.runtime import (
    ConfigsByLength,
    LengthOf,
    Run,
    SegmentConfig,
    add_runs,
    find_part,
    install_segment,
    named_parts,
    remove_runs,
    remove_segment,
    segment_of,
    settings_of,
    takes_argument,
)
from memopt_cli.runtime.in_backward import (
    has_in_backward,
    install_in_backward,
    optimizers_in_backward,
    remove_in_backward,
)
from memopt_cli.text.paths import module_name
from memopt_cli.training.compiling import (
    compile_model,
    compiled_as,
    compiles_by_plan,
    require_uncompiled,
    stop_compiling,
)
from memopt_cli.training.own_checkpoints import resume, suspend, warn_if_on
from memopt_cli.training.user_step import StepModels
from memopt_cli.training.wrappers import unwrap

_SEGMENT_FIELDS = [field.name for field in fields(SegmentPlan) if field.name != "path"]
"""Fields that an entry of a plan shares with the configuration of its segment."""
_REMOVE_FIRST = "Take that plan off before you apply another: memopt_cli.remove_plan(model)"


def apply_plan(model: nn.Module, plan: Plan, optimizer: Optimizer | None = None) -> nn.Module:
    """Install every segment of ``plan`` on ``model``, in place: all of them, or none if one fails.

    A plan with ``compile`` has the model compiled as well, as ``model.compile(...)`` does, when it is next called.
    While the model has a plan, its own checkpointing is switched off, if an attribute controls that: see
    :mod:`memopt_cli.training.own_checkpoints`.

    Parameters
    ----------
    model:
        The model.  If it is a wrapper such as ``nn.DataParallel``, the plan goes on the wrapped model.
    plan:
        The plan; its paths name the model's modules.
    optimizer:
        The optimizer, which a plan with ``in_backward`` runs in backward; other plans do not need it.

    Returns
    -------
    The same ``model``.

    Raises
    ------
    PlanError
        If a module is missing or cannot be a segment, the optimizer cannot run in backward, or the model cannot be
        compiled.  The model is then as it was before.
    UsageError
        If PyTorch has no backend of the name in the plan.  The model is as it was before.
    """
    if plan.in_backward and optimizer is None:
        raise PlanError(
            "the plan runs the optimizer in backward, but no optimizer is given",
            hint="Pass it: memopt_cli.apply_plan(model, plan, optimizer=optimizer).",
        )
    if plan.compile is not None:
        require_uncompiled(model)
    _install_all(unwrap(model), plan, optimizer)
    return model


def _install_all(model: nn.Module, plan: Plan, optimizer: Optimizer | None) -> None:
    """Put all of ``plan`` on ``model``; if a part fails, undo the earlier parts, the latest first."""
    with contextlib.ExitStack() as undo:
        if not plan.of_model.eager.is_empty:
            if isinstance(model, torch.jit.ScriptModule):
                raise PlanError(
                    "the model is TorchScript, as torch.jit.load returns it, and its modules cannot be changed",
                    hint="Load its file by memopt_cli.load('script.pt') instead, and apply the plan to that model.",
                )
            suspend(model)
        undo.callback(resume, model)
        runs: list[Run] = []
        undo.callback(remove_runs, model, runs)
        for segment in plan.everywhere:
            runs += _add_runs(model, segment.path)
        for module, config in (_by_length if plan.ranges else _segment_configs)(model, plan).items():
            _install_segment(module, config)
            undo.callback(remove_segment, module)
        if plan.compile is not None:
            compile_model(model, plan.compile)
            undo.callback(stop_compiling, model)
        if plan.in_backward and optimizer is not None:
            with refusing_in_backward(optimizer):
                install_in_backward(optimizer, model)
        if plan.compile is None and not compiles_by_plan(model):
            stop_compiling(model)  # removes settings of an earlier plan, which torch.load or a copy took over
        warn_if_on(model)
        undo.pop_all()  # nothing failed: keep all parts


def _segment_configs(model: nn.Module, plan: Plan) -> dict[nn.Module, SegmentConfig]:
    configs: dict[nn.Module, SegmentConfig] = {}
    paths: dict[nn.Module, str] = {}
    handles_saves = plan.packed or plan.place != "device"
    if handles_saves and not any(segment.path == "" for segment in plan.segments):
        configs[model] = SegmentConfig(recompute=False, packs=plan.packed, place=plan.place, path=module_name(""))
    for segment in plan.segments:
        module, name = find_part(model, segment.path), module_name(segment.path)
        if module in paths:
            same = "twice" if paths[module] == segment.path else f"twice, the first time as '{paths[module]}'"
            raise PlanError(f"the plan names module '{name}' {same}", hint="Keep one of the two entries.")
        paths[module] = segment.path
        configs[module] = SegmentConfig(**{field: getattr(segment, field) for field in _SEGMENT_FIELDS}, path=name)
    return configs


def _by_length(model: nn.Module, plan: Plan) -> dict[nn.Module, ConfigsByLength]:
    """Return each module's configurations by length, for a plan with ranges; the root is always among the modules."""
    assert plan.by is not None, "called only for plans with ranges"
    if any(isinstance(settings_of(module), ConfigsByLength) for _, module in named_parts(model)):
        raise PlanError("a part of the model has a plan by length already", hint=_REMOVE_FIRST)
    length = LengthOf(name=plan.by.dim, argument=plan.by.argument, axis=plan.by.axis)
    for argument in length.axes:
        if not takes_argument(model, argument):
            raise PlanError(
                f"the plan reads the argument {argument!r}, which forward of {type(model).__name__} does not take",
                hint="In the plan's by section, set argument to an argument's name, or its position from 0.",
            )
    up_to = tuple(part.up_to for part in plan.ranges)
    parts = [_segment_configs(model, part.plan) for part in plan.ranges]
    configs_by_module: dict[nn.Module, ConfigsByLength] = {}
    for module in dict.fromkeys((model, *(module for part in parts for module in part))):
        configs = tuple(part.get(module) for part in parts)
        path = module_name("") if module is model else next(config.path for config in configs if config is not None)
        length_of = length if module is model else None  # only the root reads the length, for all modules
        configs_by_module[module] = ConfigsByLength(up_to=up_to, configs=configs, length=length_of, path=path)
    return configs_by_module


def plan_of(model: nn.Module) -> Plan:
    """Return the plan that is installed on ``model``.

    Parameters
    ----------
    model:
        The model, with a plan or without.  If it is a wrapper, the wrapped model is examined.

    Returns
    -------
    The plan that ``apply_plan`` installed; an empty one if there is none.
    """
    model = unwrap(model)
    in_backward = has_in_backward(model)
    installed = {path: module for path, module in named_parts(model) if settings_of(module) is not None}
    root = settings_of(model)
    # A part taken out of a model with a plan by length does not know the length, so its plan is the longest range's.
    if not isinstance(root, ConfigsByLength) or root.length is None:
        configs = {path: config for path, module in installed.items() if (config := segment_of(module)) is not None}
        return replace(_make_plan(configs), in_backward=in_backward, compile=compiled_as(model))
    ranges = []
    for index, up_to in enumerate(root.up_to):
        part = _make_plan({path: c for path, m in installed.items() if (c := _in_range(m, index)) is not None})
        ranges.append(PlanRange(up_to=up_to, segments=part.segments, packed=part.packed, place=part.place))
    by = InputDimension(dim=root.length.name, argument=root.length.argument, axis=root.length.axis)
    return Plan(by=by, ranges=tuple(ranges), in_backward=in_backward)


def _in_range(module: nn.Module, index: int) -> SegmentConfig | None:
    settings = settings_of(module)
    return settings.configs[index] if isinstance(settings, ConfigsByLength) else settings


def _make_plan(installed: Mapping[str, SegmentConfig]) -> Plan:
    """Return the plan for ``installed``, path -> configuration; the inverse of :func:`_segment_configs`."""
    segments = (
        from_data(SegmentPlan, {"path": path, **{name: getattr(config, name) for name in _SEGMENT_FIELDS}})
        for path, config in installed.items()
        if config.recompute
    )
    outside = next((config for config in installed.values() if not config.recompute), None)
    if outside is None:
        return Plan(segments=tuple(segments))
    return Plan(segments=tuple(segments), packed=outside.packs, place=outside.place)


def remove_plan(model: nn.Module) -> nn.Module:
    """Remove the plan of ``model``, in place: segments, runs of layers, the optimizer in backward, and compilation.

    Parameters
    ----------
    model:
        The model, with a plan or without.

    Returns
    -------
    The same ``model``.
    """
    remove_segments(model)
    remove_runs(unwrap(model))
    return model


@contextlib.contextmanager
def replacing_plan(model: nn.Module) -> Iterator[Plan]:
    """Remove the plan of ``model``, yield it, and restore it unless the ``with`` block installs another."""
    with restoring_plan(model) as plan:
        optimizers = list(optimizers_in_backward(model))
        remove_plan(model)
        yield plan
        if plan_of(model).is_empty:
            _reinstall(model, plan, optimizers)


@contextlib.contextmanager
def restoring_plan(model: nn.Module) -> Iterator[Plan]:
    """Yield the plan of ``model``; if the ``with`` block fails, install that plan again, in place of any new plan."""
    plan, optimizers = plan_of(model), list(optimizers_in_backward(model))
    try:
        yield plan
    except BaseException:
        remove_plan(model)
        _reinstall(model, plan, optimizers)
        raise


def _reinstall(model: nn.Module, plan: Plan, optimizers: list[Optimizer]) -> None:
    apply_plan(model, plan.of_model)
    for optimizer in optimizers:
        install_in_backward(optimizer, model)


def remove_segments(model: nn.Module) -> None:
    """Remove the segments of ``model`` like :func:`remove_plan`, but leave its runs of layers grouped."""
    model = unwrap(model)
    resume(model)
    remove_in_backward(model)
    stop_compiling(model)
    for _, module in list(named_parts(model)):
        if settings_of(module) is not None:
            remove_segment(module)


@contextlib.contextmanager
def refusing_in_backward(optimizer: Optimizer) -> Iterator[None]:
    """Raise :class:`PlanError` for a ``ValueError`` in the ``with`` block: why ``optimizer`` cannot run in backward."""
    try:
        yield
    except ValueError as reason:
        raise PlanError(
            f"{type(optimizer).__name__} cannot run in backward: it {reason}",
            hint="Take in_backward out of the plan, or train with another optimizer.",
        ) from reason


def _add_runs(model: nn.Module, path: str) -> list[Run]:
    try:
        return add_runs(model, path)
    except AttributeError as error:
        hint = "A plan fits the model it was made for; make a new one with memopt optimize."
        names = [name for name, _ in model.named_modules() if name]
        parts = path.partition("-")[0].split(".")  # the first of a run's
        is_step = isinstance(model, StepModels)
        if (inner := next((name for name in names if f"{name}.{path}" in names), None)) is not None:
            before = (
                "to that model" if is_step else f"before the model is wrapped, or to model.get_submodule('{inner}')"
            )
            hint = f"{inner} has it: apply the plan {before}."
        prefixes = [f"{name}." for name, _ in model.named_children()] if is_step else [""]
        starts = (n for n in range(1, len(parts)) if any(p + ".".join(parts[n:]) in names for p in prefixes))
        outer = ".".join(parts[: next(starts, 0)])
        if outer.isidentifier():
            call = f'memopt_cli.apply_plan({{"{outer}": model}}, plan)'
            hint = f"In a plan of a step, paths begin with the name of a model. If '{outer}' is this one: {call}."
        elif outer and not is_step:
            hint = (
                f"Without '{outer}.', the model has it. If the plan was made for a model that wraps this one, such as "
                "a PeftModel, apply it to that model; otherwise make a new one with memopt optimize."
            )
        owner = "the step" if is_step else type(model).__name__
        raise PlanError(f"the plan names module '{path}', which {owner} does not have", hint=hint) from error
    except ValueError as reason:
        raise PlanError(
            f"module '{path}' cannot be a segment: {reason}",
            hint=f"Change the entry of '{path}' in the plan, or remove it.",
        ) from reason


def _install_segment(module: nn.Module, config: SegmentConfig | ConfigsByLength) -> None:
    try:
        install_segment(module, config)
    except ValueError as reason:
        if settings_of(module) is not None:
            raise PlanError(
                "the model has a plan already, which memopt_cli.plan_of(model) returns", hint=_REMOVE_FIRST
            ) from reason
        hint = f"Change the entry of '{config.path}' in the plan, or remove it."
        if isinstance(config, ConfigsByLength) and config.length is not None and not any(config.configs):
            hint = "A plan by length looks at the inputs of the whole model; use a plan without ranges."
        raise PlanError(f"module '{config.path}' cannot be a segment: {reason}", hint=hint) from reason

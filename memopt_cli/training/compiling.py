"""Compilation of a model by ``torch.compile``, in place, with the settings of a plan (``compile:``)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from memopt_cli.errors import PlanError, UsageError
from memopt_cli.records import CompilePlan, from_data, to_data
from memopt_cli.runtime.module_state import COMPILED_CALL, COMPILED_KEY
from memopt_cli.runtime.private_torch import is_compiled, make_uncached_call, within_budget
from memopt_cli.training.wrappers import split_wrappers

_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def compile_model(model: nn.Module, how: CompilePlan) -> None:
    """Set up ``model`` to be compiled with the settings ``how`` at its next call, like ``model.compile(...)``.

    That method silently leaves a model of a PyTorch class, such as an ``nn.Sequential``, uncompiled: the compiler
    skips functions in PyTorch's files until it reaches one of another file: here in :func:`make_uncached_call`.

    A memory budget holds only for this model.  Raises :class:`UsageError` for a backend unknown to PyTorch, and
    :class:`PlanError` for a mode unknown to inductor.
    """
    require_backend(how.backend)
    backend: Any = how.backend
    try:
        if how.activation_memory_budget is not None:
            backend = within_budget(how.backend, how.mode, how.activation_memory_budget)
        mode = how.mode if backend is how.backend else None
        compiled = torch.compile(make_uncached_call(model), backend=backend, mode=mode)
    except (ValueError, RuntimeError) as reason:  # RuntimeError for an unknown mode
        raise PlanError(f"the model cannot be compiled: {reason}", hint="Change compile in the plan.") from reason

    def call(*args: Any, **kwargs: Any) -> Any:
        # A text of all hooks: when they change, PyTorch compiles again and sees them.
        return compiled(str([[*vars(model)[name]] for name in _HOOKS]), *args, **kwargs)

    vars(model)[COMPILED_CALL] = call
    vars(model)[COMPILED_KEY] = to_data(how)


def require_uncompiled(model: nn.Module) -> None:
    """Raise :class:`PlanError` if ``model``, or the model inside its wrappers, is compiled already."""
    if is_compiled(split_wrappers(model, keep_compiled=True)[1]):
        raise PlanError(
            "the plan compiles the model, but the model is compiled already",
            hint="Apply the plan to the model before torch.compile, or take compile out of the plan.",
        )


def require_backend(backend: str) -> None:
    """Raise :class:`UsageError` if ``torch.compile`` has no ``backend`` of that name."""
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join([*torch.compiler.list_backends(), "aot_eager"])
        raise UsageError(f"torch.compile has no backend {backend!r} here", hint=f"Known backends: {usual}, and others.")


def compiled_as(model: nn.Module) -> CompilePlan | None:
    """Return the settings that the plan of ``model`` compiles it with, or ``None`` if it has no such plan.

    A model read from a file has the settings before it is compiled again.  Raises :class:`UsageError` for settings in
    a file that no plan can have.
    """
    stored = vars(model).get(COMPILED_KEY)
    return None if stored is None else from_data(CompilePlan, stored, where="compile in the model's plan")


def compile_again(model: nn.Module) -> None:
    """Compile ``model``, which was read from a file or copied, if its plan compiles it."""
    how = compiled_as(model)
    if how is not None and not is_compiled(model):
        compile_model(model, how)


def compiles_by_plan(model: nn.Module) -> bool:
    """Return whether ``model`` has a compiled call that a plan made; a model from a file, or a copy, has none."""
    return getattr(vars(model).get(COMPILED_CALL), "__module__", "") == __name__


def stop_compiling(model: nn.Module) -> None:
    """Undo a plan's :func:`compile_model` on ``model``; leave a call that the user had compiled."""
    if compiles_by_plan(model):
        vars(model).pop(COMPILED_CALL)
    vars(model).pop(COMPILED_KEY, None)

"""Compilation of a model by ``torch.compile``, in place, as a plan says."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from memopt_cli.errors import PlanError, UsageError
from memopt_cli.records import CompilePlan, from_data, to_data
from memopt_cli.runtime.module_state import COMPILED_CALL, COMPILED_KEY
from memopt_cli.runtime.private_torch import call_of_its_own, is_compiled, within_budget
from memopt_cli.training.wrappers import peeled


def compile_model(model: nn.Module, how: CompilePlan) -> None:
    """Have ``model`` compiled when it is next called, as ``model.compile(...)`` does, with the settings of ``how``.

    That method leaves a model of PyTorch's own classes, such as an ``nn.Sequential``, uncompiled without a word: the
    compiler skips PyTorch's files until it meets a function of another one.  Here that is in :func:`call_of_its_own`.

    A memory budget holds for this model alone.  Raises :class:`UsageError` for a backend that is not there, and
    :class:`PlanError` for a mode that inductor does not have.
    """
    require_backend(how.backend)
    backend: Any = how.backend
    try:
        if how.activation_memory_budget is not None:
            backend = within_budget(how.backend, how.mode, how.activation_memory_budget)
        mode = how.mode if backend is how.backend else None
        compiled = torch.compile(call_of_its_own(model), backend=backend, mode=mode)
    except (ValueError, RuntimeError) as reason:  # an unknown mode is the second
        raise PlanError(f"the model cannot be compiled: {reason}", hint="Change compile in the plan.") from reason

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(_hooks_on(model), *args, **kwargs)

    vars(model)[COMPILED_CALL] = call
    vars(model)[COMPILED_KEY] = to_data(how)


def _hooks_on(model: nn.Module) -> str:
    """Return which hooks ``model`` has: where they are others, PyTorch compiles anew, and sees them."""
    return str([[*vars(model)[name]] for name in _HOOKS])


_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def require_uncompiled(model: nn.Module) -> None:
    """Raise :class:`PlanError` where ``model``, or the model in its wrappers, is compiled already."""
    if is_compiled(peeled(model, keep_compiled=True)[1]):
        raise PlanError(
            "the plan compiles the model, which is compiled already",
            hint="Apply the plan to the model before torch.compile, or take compile out of the plan.",
        )


def require_backend(backend: str) -> None:
    """Raise :class:`UsageError` where ``torch.compile`` has no ``backend`` of that name."""
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join([*torch.compiler.list_backends(), "aot_eager"])
        raise UsageError(f"torch.compile has no backend {backend!r} here", hint=f"It has {usual}, and others.")


def compiled_as(model: nn.Module) -> CompilePlan | None:
    """Return the settings with which a plan compiles ``model``, or did before it was saved; ``None`` for no such plan.

    Raises :class:`UsageError` for settings in a file that no plan has.
    """
    said = vars(model).get(COMPILED_KEY)
    return None if said is None else from_data(CompilePlan, said, where="compile in the model's plan")


def compile_again(model: nn.Module) -> None:
    """Compile ``model``, which was read from a file or copied, if it has a plan that says so."""
    how = compiled_as(model)
    if how is not None and not is_compiled(model):
        compile_model(model, how)


def compiles_by_plan(model: nn.Module) -> bool:
    """Tell whether a plan compiles ``model`` when it is called: neither a file nor a copy has the compiled call."""
    return getattr(vars(model).get(COMPILED_CALL), "__module__", "") == __name__


def stop_compiling(model: nn.Module) -> None:
    """Undo what a plan's :func:`compile_model` did to ``model``; leave a call that the user had compiled."""
    if compiles_by_plan(model):
        vars(model).pop(COMPILED_CALL)
    vars(model).pop(COMPILED_KEY, None)

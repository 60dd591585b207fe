"""The optimizer of a training step (``--optimizer``): one of PyTorch's, or the user's own.

Its learning rate is zero, so that a step moves no parameter and all measured steps are equal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memopt_cli.errors import UsageError, first_line, type_in_words
from memopt_cli.text.optimizer_text import CLOSURE_REASON, NamedOptimizer, OptimizerChoice

OptimizerMaker = Callable[[nn.Module], Optimizer | None]
"""Function that makes the optimizer of a model, or of a copy without data; ``None`` for a step without optimizer."""

_DEFAULTS = {"SGD": {"momentum": 0.9}}
"""Class -> arguments that differ from PyTorch's defaults: without momentum, SGD has no state."""


def no_optimizer(model: nn.Module) -> None:
    """Return no optimizer for ``model``."""


def optimizer_maker(choice: OptimizerChoice, function: Callable[..., Any] | None = None) -> OptimizerMaker:
    """Return the maker of the optimizer in ``choice``; ``function`` is the user's own, if one was chosen."""
    if function is not None:
        return functools.partial(_call_maker, function)
    if isinstance(choice, NamedOptimizer):
        return functools.partial(_make_named, choice)
    return no_optimizer


def _make_named(choice: NamedOptimizer, model: nn.Module) -> Optimizer:
    make = getattr(torch.optim, choice.class_name, None)
    if make is None:
        raise UsageError(
            f"PyTorch {torch.__version__} has no optimizer {choice.class_name}", hint="Name another `--optimizer`."
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 0.0, **_DEFAULTS.get(choice.class_name, {}), **_implementation(choice, make, parameters)}
    try:
        return make(parameters, **options)  # type: ignore[no-any-return]
    except ValueError as err:
        raise UsageError(
            f"{choice.class_name} refuses the model's parameters: {first_line(err)}",
            hint="Name another `--optimizer`, or your own function that passes it the parameters that it takes.",
        ) from err


def _implementation(choice: NamedOptimizer, make: Any, parameters: list[nn.Parameter]) -> dict[str, bool]:
    """Return the argument that selects the implementation; without data PyTorch would choose a different default."""
    if choice.implementation == "for-loop":
        return {"foreach": False}
    if choice.implementation != "default":
        return {choice.implementation: True}
    on_cuda = bool(parameters) and all(p.device.type == "cuda" for p in parameters)
    return {"foreach": True} if on_cuda and "foreach" in inspect.signature(make).parameters else {}


def _call_maker(function: Callable[..., Any], model: nn.Module) -> Optimizer:
    """Return the optimizer that the user's ``function`` makes, with a learning rate of 0.

    Raises :class:`UsageError` if the function fails or its optimizer cannot be used.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        optimizer = function(model)
    except (Exception, SystemExit) as err:  # the user's code may raise anything
        raise UsageError(
            f"`--optimizer`: {name} failed: {first_line(err)}",
            hint="It is called with the model as its only argument; plain Python raises the same error.",
        ) from err
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"`--optimizer`: {name} returned {type_in_words(optimizer)}, not a torch.optim.Optimizer",
            hint="Let it return the optimizer that it makes, without a scheduler or a list around it.",
        )
    if wants_closure(optimizer):
        raise UsageError(
            f"`--optimizer`: {closure_refusal(optimizer)}", hint="Choose an optimizer that steps without a closure."
        )
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group.get("lr"), torch.Tensor) else 0.0
        if any(id(parameter) not in parameter_ids for parameter in group["params"]):
            raise UsageError(
                f"`--optimizer`: {name} updates tensors that are not parameters of its model",
                hint="Build it from the model that is passed in, as in lambda model: AdamW(model.parameters()).",
            )
    return optimizer


def closure_refusal(optimizer: Optimizer) -> str:
    """Return the message that refuses ``optimizer``, because its step takes a closure."""
    return CLOSURE_REASON.format(type(optimizer).__name__)


def wants_closure(optimizer: Optimizer) -> bool:
    """Return whether the signature of the step of ``optimizer`` requires a closure, or it is LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    is_required = closure is not None and closure.default is inspect.Parameter.empty
    return isinstance(optimizer, torch.optim.LBFGS) or is_required

"""The verification of an optimizer that runs in backward: compares it with the same optimizer run after backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memopt_cli.errors import StepError
from memopt_cli.records import FurtherCheck
from memopt_cli.runtime.state import StartingState
from memopt_cli.training.step import TrainingStep, reset_step
from memopt_cli.verification.effects import clone_tensors, copy_model, copy_state, difference, generators_kept
from memopt_cli.verification.further_steps import CheckResult

Install = Callable[[nn.Module, Optimizer], object]

_UPDATES = 3
LEARNING_RATE = 1e-3
"""Learning rate of optimizers that are to move parameters."""
NAME = f"in {_UPDATES} updates in backward"


def compare_updates(
    step: TrainingStep, plain: Install, in_backward: Install, *, batch: int
) -> tuple[FurtherCheck, CheckResult]:
    """Compare parameters, buffers and the optimizer's state after a few steps with ``plain`` and with ``in_backward``.

    Each of the two functions puts the plan on a copy of the model and on its optimizer.  The results must be equal to
    the bit.  Raises :class:`StepError` if the model cannot be copied or has no optimizer, and whatever its steps raise.
    """
    reference = _state_after_updates(step, plain)
    worst = difference(reference, _state_after_updates(step, in_backward))
    return FurtherCheck(name=NAME, batch=batch, compared=worst.compared), CheckResult(NAME, worst)


def _state_after_updates(step: TrainingStep, install: Install) -> dict[str, Tensor]:
    """Return parameters, optimizer state, buffers and other module state after a few steps, by name.

    A copy of the model takes the steps, on which ``install`` puts a plan.
    """
    model = copy_model(step.model)
    optimizer = step.make_optimizer(model)
    if optimizer is None:
        raise StepError("there is no optimizer that could run in backward", hint="Name it with `--optimizer`.")
    set_learning_rate(optimizer)
    start = StartingState(model)
    install(model, optimizer)
    with generators_kept():
        for _ in range(_UPDATES):
            args, kwargs = clone_tensors((step.args, step.kwargs))
            copied = replace(step, model=model, optimizer=optimizer, args=args, kwargs=kwargs)
            reset_step(copied, start)
            copied.take()
    parameters = {f"parameter {name}": p.detach() for name, p in model.named_parameters()}
    return parameters | _optimizer_state(optimizer) | copy_state(model)


def set_learning_rate(optimizer: Optimizer) -> None:
    """Set the rate of ``optimizer``, made for measurements with a rate of zero, to :data:`LEARNING_RATE`."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        group["lr"] = torch.full_like(rate, LEARNING_RATE) if isinstance(rate, Tensor) else LEARNING_RATE


def _optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {
        f"the optimizer's {name} of parameter {index}": value
        for index, state in states.items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }

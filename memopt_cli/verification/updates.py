"""The verification of an optimizer that runs in backward: compares it with the same optimizer run after backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memopt_cli.errors import StepError, first_line
from memopt_cli.records import FurtherCheck
from memopt_cli.runtime.module_state import copy_of
from memopt_cli.runtime.state import StartingState
from memopt_cli.training.step import Step, begin
from memopt_cli.verification.effects import cloned, difference, generators_kept, state_of
from memopt_cli.verification.further_steps import CheckResult

Install = Callable[[nn.Module, Optimizer], object]

_UPDATES = 3
RATE = 1e-3
"""Learning rate of optimizers that are to move parameters."""
NAME = f"in {_UPDATES} updates in backward"


def compare_updates(
    step: Step, plain: Install, in_backward: Install, *, batch: int
) -> tuple[FurtherCheck, CheckResult]:
    """Compare parameters, buffers and the optimizer's state after a few steps with ``plain`` and with ``in_backward``.

    Each of the two puts the plan on a copy of the model and on its optimizer.  They must be equal to the bit.  Raises
    :class:`StepError` if the model cannot be copied or has no optimizer, and whatever its steps raise.
    """
    reference = _effects(step, plain)
    worst = difference(reference, _effects(step, in_backward))
    return FurtherCheck(name=NAME, batch=batch, compared=worst.compared), CheckResult(NAME, worst)


def _effects(step: Step, install: Install) -> dict[str, Tensor]:
    """Return parameters, optimizer state, buffers and state after a few steps of a copy of the model, by name."""
    try:
        model = copy_of(step.model)
    except Exception as error:  # the model's own classes may do anything
        raise StepError(f"the model cannot be copied ({first_line(error)})") from error
    optimizer = step.make_optimizer(model)
    if optimizer is None:
        raise StepError("there is no optimizer that could run in backward", hint="Name it with `--optimizer`.")
    set_rate(optimizer)
    start = StartingState(model)
    install(model, optimizer)
    with generators_kept():
        for _ in range(_UPDATES):
            args, kwargs = cloned((step.args, step.kwargs))
            copied = replace(step, model=model, optimizer=optimizer, args=args, kwargs=kwargs)
            begin(copied, start)
            copied.take()
    parameters = {f"parameter {name}": p.detach() for name, p in model.named_parameters()}
    return parameters | _state(optimizer) | state_of(model)


def set_rate(optimizer: Optimizer) -> None:
    """Set the learning rate of ``optimizer`` to :data:`RATE`; it was made for measurements, with a rate of zero."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, Tensor) else RATE


def _state(optimizer: Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {
        f"the optimizer's {name} of parameter {index}": value
        for index, state in states.items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }

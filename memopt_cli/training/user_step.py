"""A user's own training step: its models, its optimizers, and the function that takes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memopt_cli.errors import OptionError, type_in_words
from memopt_cli.runtime import group_layers
from memopt_cli.runtime.module_state import RUNS_KEY
from memopt_cli.runtime.private_torch import buffers_of
from memopt_cli.training.optimizers import closure_refusal, wants_closure

_EXAMPLE = 'For example: memopt_cli.Step(models={"net": net}, optimizers=[optimizer], run=train_step).'


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step, the result of a function such as ``train.py:make_step``.

    Raises ``OptionError`` (a ``ValueError``) for a name that no plan could use, and for an optimizer with a closure or
    with a tensor of no listed model.
    """

    models: Mapping[str, nn.Module]
    """Name -> model, for all models of the step.  Paths in plans begin with the name: ``generator.block1``."""
    run: Callable[..., Any]
    """Function that takes one step on the inputs: forwards, backwards and optimizers' steps, in any number.  It returns
    a tensor, or a container of tensors, that depends on the step, such as its losses."""
    optimizers: Sequence[Optimizer] = ()
    """Optimizers whose ``step`` the function calls."""

    def __post_init__(self) -> None:
        _check_models(self.models)
        parameter_ids = {id(parameter) for model in self.models.values() for parameter in model.parameters()}
        for optimizer in self.optimizers:
            _check_optimizer(optimizer, parameter_ids)
        if not callable(self.run):
            raise OptionError(f"run is {type_in_words(self.run)}, which cannot be called", hint=_EXAMPLE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step on the inputs ``args`` and ``kwargs``."""
        return self.run(*args, **kwargs)


def _check_models(models: Mapping[str, nn.Module]) -> None:
    if not isinstance(models, Mapping) or not models:
        raise OptionError("models must be a mapping of names to modules, with at least one of them", hint=_EXAMPLE)
    for name, model in models.items():
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.Module, name):
            raise OptionError(f"a model cannot be named {name!r}", hint="Write a plain name, such as generator.")
        if not isinstance(model, nn.Module):
            raise OptionError(f"the model {name!r} is {type_in_words(model)}, not a torch.nn.Module", hint=_EXAMPLE)


def _check_optimizer(optimizer: Optimizer, parameter_ids: set[int]) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizers holds {type_in_words(optimizer)}, not a torch.optim.Optimizer", hint=_EXAMPLE)
    if wants_closure(optimizer):
        raise OptionError(closure_refusal(optimizer), hint="Choose an optimizer that steps without a closure.")
    if any(id(parameter) not in parameter_ids for group in optimizer.param_groups for parameter in group["params"]):
        raise OptionError(
            f"{kind} updates a tensor that is a parameter of no model of the step",
            hint="List every model that is trained in models.",
        )


class StepModels(nn.Module):
    """The models of a step as one module, on which plans are installed; its ``forward`` is never called.

    The objects that a step's function refers to cannot be copied.  So to copy this module, the function that made the
    step is called again, and the new models are given the parameters and buffers of the old.
    """

    # Slots keep these attributes out of ``vars(module)``, which is restored before every job: steps may change it.
    __slots__ = ("_device", "_make", "_moved", "leaves", "step", "waiting")

    def __init__(self, step: Step, make: Callable[[], Step], device: str = "cpu") -> None:
        """Gather the models of ``step``, which are on ``device``; ``make`` makes the step once more."""
        super().__init__()
        self._make = make
        self._device = device
        self.step = step
        self.leaves: frozenset[str] | None = None
        """Names of the parameters that have gradients at the end of a step; ``None`` before the first step."""
        self._moved: dict[nn.Parameter, Tensor] = {}
        """Parameter that a step changes without its optimizers -> its value before the step."""
        self.waiting = {id(optimizer) for optimizer in step.optimizers}
        """Ids of the optimizers that have not updated yet; updates that a scaler skips do not count."""
        for name, model in step.models.items():
            self.add_module(name, model)

    @property
    def has_updated(self) -> bool:
        """Whether an optimizer has updated; true for a step without optimizers."""
        return not self.step.optimizers or len(self.waiting) < len(self.step.optimizers)

    def learn(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """Learn from a first step which gradients it leaves, and which parameters it changed.

        ``before`` has the values of the parameters before that step, except parameters without data.
        """
        self.leaves = frozenset(name for name, p in self.named_parameters() if p.grad is not None)
        self._moved = {p: value for p, value in before.items() if not torch.equal(p, value)}

    def restore_moved(self) -> None:
        """Restore parameters that a step changes without its optimizers, such as a mean teacher's."""
        with torch.no_grad():
            for parameter, value in self._moved.items():
                parameter.copy_(value)

    def on_device(self, device: str) -> StepModels:
        """Return the models on ``device``: these models if they are there already, otherwise new ones."""
        return self if device == self._device else self._make_on(device).to(device)

    def make_again(self) -> StepModels:
        """Make the models once more, with layers grouped in runs if these models have such runs."""
        models = self._make_on(self._device)
        if any(RUNS_KEY in vars(module) for module in self.modules()):
            group_layers(models)
        return models

    def _make_on(self, device: str) -> StepModels:
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            return StepModels(self._make(), self._make, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepModels:
        copy = self.make_again()
        with torch.no_grad():
            for (_, parameter), (_, copied) in zip(self.named_parameters(), copy.named_parameters(), strict=True):
                copied.data = parameter.detach().clone()
            for module, other in zip(self.modules(), copy.modules(), strict=True):
                for name, buffer in buffers_of(module).items():
                    buffers_of(other)[name] = None if buffer is None else buffer.detach().clone()
        copy.train(self.training)
        for module, other in zip(self.modules(), copy.modules(), strict=True):
            other.training = module.training
        return copy


def join_models(model: nn.Module | Step | Mapping[str, nn.Module]) -> nn.Module:
    """Return the module that a plan is installed on: ``model``, or all models of a step or of a mapping as one."""
    if isinstance(model, nn.Module):
        return model
    step = model if isinstance(model, Step) else Step(models=model, run=_not_run)
    return StepModels(step, lambda: step)


def _not_run() -> None:
    raise AssertionError("models that are given by name have no step")

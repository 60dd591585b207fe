"""A training step of the user's own: its models, its optimizers, and the function that takes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memopt_cli.errors import OptionError
from memopt_cli.runtime import group_layers
from memopt_cli.runtime.module_state import RUNS_KEY
from memopt_cli.runtime.private_torch import buffers_of
from memopt_cli.training.optimizers import closure_refusal, wants_closure


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a function such as ``train.py:make_step`` returns.

    Raises :class:`OptionError` (a :class:`ValueError`) for a name that no plan could use, and for an optimizer that
    wants a closure or updates a tensor of no listed model.
    """

    models: Mapping[str, nn.Module]
    """By the names that plans use: ``generator`` for ``generator.block1``.  All that the step runs, frozen ones too."""
    run: Callable[..., Any]
    """Takes one step on the inputs: forward, backward, and the optimizers' steps, as many as it likes.  It returns a
    tensor, or a container of tensors, that tells what it did: its losses, say."""
    optimizers: Sequence[Optimizer] = ()
    """Those whose ``step`` it calls."""

    def __post_init__(self) -> None:
        _check_models(self.models)
        known = {id(parameter) for model in self.models.values() for parameter in model.parameters()}
        for optimizer in self.optimizers:
            _check_optimizer(optimizer, known)
        if not callable(self.run):
            raise OptionError(f"run is a {type(self.run).__name__}, which cannot be called", hint=_EXAMPLE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        return self.run(*args, **kwargs)


_EXAMPLE = 'Write for example memopt_cli.Step(models={"net": net}, optimizers=[optimizer], run=train_step).'


def _check_models(models: Mapping[str, nn.Module]) -> None:
    if not isinstance(models, Mapping) or not models:
        raise OptionError("models is not a mapping of names to modules, or an empty one", hint=_EXAMPLE)
    for name, model in models.items():
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.Module, name):
            raise OptionError(f"a model cannot be named {name!r}", hint="Write a plain name, such as generator.")
        if not isinstance(model, nn.Module):
            raise OptionError(f"the model {name!r} is a {type(model).__name__}, no torch.nn.Module", hint=_EXAMPLE)


def _check_optimizer(optimizer: Optimizer, known: set[int]) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizers holds a {kind}, not a torch.optim.Optimizer", hint=_EXAMPLE)
    if wants_closure(optimizer):
        raise OptionError(closure_refusal(optimizer), hint="Take an optimizer that steps without a closure.")
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise OptionError(
            f"{kind} updates a tensor that is a parameter of no model of the step",
            hint="List every model that is trained in models.",
        )


class StepModels(nn.Module):
    """The models of a step as one, whose ``forward`` nobody calls: what plans are made for, and installed on.

    A copy of it is made by the function that made the step, anew, and is given the parameters and buffers of this one:
    what a step's function refers to cannot be copied along.
    """

    # No entries of ``vars(module)``, which holds what steps may change and every job finds as it was.
    __slots__ = ("_device", "_leaves", "_make", "_moved", "_step", "_waiting")

    def __init__(self, step: Step, make: Callable[[], Step], device: str = "cpu") -> None:
        """``make`` makes it once more; ``device``: where it is."""
        super().__init__()
        self._make = make
        self._device = device
        self._step = step
        self._leaves: frozenset[str] | None = None
        self._moved: dict[nn.Parameter, Tensor] = {}
        self._waiting = {id(optimizer) for optimizer in step.optimizers}
        for name, model in self._step.models.items():
            self.add_module(name, model)

    @property
    def step(self) -> Step:
        """The step that they are of."""
        return self._step

    @property
    def leaves(self) -> frozenset[str] | None:
        """Names of the parameters that have gradients when a step has ended; ``None``: none was taken yet."""
        return self._leaves

    @property
    def waiting(self) -> Set[int]:
        """Ids of the optimizers that no step has used yet, or whose every update a scaler has skipped."""
        return self._waiting

    @property
    def has_updated(self) -> bool:
        """Whether any has stepped, or there is none."""
        return not self._step.optimizers or len(self._waiting) < len(self._step.optimizers)

    def note_update(self, optimizer: Optimizer) -> None:
        """One steps."""
        self._waiting.discard(id(optimizer))

    def learn(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """A first step has ended; ``before``: the values that parameters had, nothing of those without data."""
        self._leaves = frozenset(name for name, p in self.named_parameters() if p.grad is not None)
        self._moved = {p: value for p, value in before.items() if not torch.equal(p, value)}

    def restore_moved(self) -> None:
        """Put the parameters back that a step moves by other means than its optimizers: a mean teacher's."""
        with torch.no_grad():
            for parameter, value in self._moved.items():
                parameter.copy_(value)

    def on(self, device: str) -> StepModels:
        """The same on a device; made there anew, if they are elsewhere."""
        return self if device == self._device else self._made_on(device).to(device)

    def anew(self) -> StepModels:
        """The same, made once more."""
        made = self._made_on(self._device)
        if any(RUNS_KEY in vars(module) for module in self.modules()):
            group_layers(made)
        return made

    def _made_on(self, device: str) -> StepModels:
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            return StepModels(self._make(), self._make, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepModels:
        made = self.anew()
        with torch.no_grad():
            for (_, parameter), (_, copied) in zip(self.named_parameters(), made.named_parameters(), strict=True):
                copied.data = parameter.detach().clone()
            for module, other in zip(self.modules(), made.modules(), strict=True):
                for name, buffer in buffers_of(module).items():
                    buffers_of(other)[name] = None if buffer is None else buffer.detach().clone()
        made.train(self.training)
        for module, other in zip(self.modules(), made.modules(), strict=True):
            other.training = module.training
        return made


def models_of(model: nn.Module | Step | Mapping[str, nn.Module]) -> nn.Module:
    """What a plan is installed on: of a step, or of models by name, these as one."""
    if isinstance(model, nn.Module):
        return model
    step = model if isinstance(model, Step) else Step(models=model, run=_not_run)
    return StepModels(step, lambda: step)


def _not_run() -> None:
    raise AssertionError("models that are given by name have no step")

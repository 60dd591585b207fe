"""Loops over a whole sequence, online and through time, and a time step that is compiled as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_cli.errors import MemoptError
from memopt_cli.online.states import states_of

Loss = Callable[[Any, Any], Tensor]
"""Function of a step's output and the target that returns a scalar."""


def accumulate_online(model: nn.Module, inputs: Iterable[Tensor], target: object, loss: Loss) -> Tensor:
    """Run ``model``, an online algorithm, over a sequence, and add the gradients of the summed loss to ``.grad``.

    Memory does not grow with the number of steps.

    Parameters
    ----------
    model:
        Online algorithm, or a ``Vmap`` of one, whose states were reset.
    inputs:
        One tensor per time step; from a generator, they need not be in memory all at once.
    target:
        Target of every step.
    loss:
        Function of a step's output and ``target`` that returns a scalar.

    Returns
    -------
    The mean loss of a step.

    Raises
    ------
    MemoptError
        If there are no steps.
    """
    total, steps = torch.zeros(()), 0
    for x in inputs:
        step_loss = _learn_step(model, x, target, loss)
        total, steps = total + step_loss if steps else step_loss, steps + 1
    return total / _require_steps(steps)


def _learn_step(model: nn.Module, x: Tensor, target: object, loss: Loss) -> Tensor:
    # A function of its own, so that its graph, which holds the traces before this step, is freed before the next step.
    step_loss = loss(model(x), target)
    step_loss.backward()
    return step_loss.detach()


def accumulate_through_time(model: nn.Module, inputs: Iterable[Tensor], target: object, loss: Loss) -> Tensor:
    """Run ``model`` over a sequence, and add the gradients of the summed loss by back-propagation through time.

    Memory grows with every step.

    Parameters
    ----------
    model:
        Model of one time step, whose states were reset.
    inputs:
        One tensor per time step.
    target:
        Target of every step.
    loss:
        Function of a step's output and ``target`` that returns a scalar.

    Returns
    -------
    The mean loss of a step.

    Raises
    ------
    MemoptError
        If there are no steps.
    """
    losses = [loss(model(x), target) for x in inputs]
    total = torch.stack(losses).sum() if losses else torch.zeros(())
    mean = total.detach() / _require_steps(len(losses))
    total.backward()
    for state in states_of(model).values():
        state.value = state.value.detach()
    return mean


class CompiledStep:
    """One time step, forward and backward, as one compiled graph: call it in a loop.

    The step is recorded with ``make_fx`` on the shapes of the example, traces, ``vmap`` and backward included, and
    compiled by ``torch.compile``.  Each call advances the states and adds to ``.grad``, like the step itself.
    """

    def __init__(self, model: nn.Module, loss: Loss, x: Tensor, target: Tensor, *, backend: str = "inductor") -> None:
        """Compile a step of ``model``, an algorithm or a ``Vmap`` of one, with states initialized for ``x``."""
        self._model, self._loss = model, loss
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        detached = {name: p.detach() for name, p in self._parameters.items()}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        # A lambda, since make_fx would count the ``self`` of a bound method.
        graph = make_fx(lambda *step: self._run(*step))(detached, buffers, x, target)
        self._compiled = torch.compile(graph, backend=backend)

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        """Take a step on ``x``, and return its loss."""
        buffers = dict(self._model.named_buffers())
        detached = {name: p.detach() for name, p in self._parameters.items()}
        loss, gradients, new_buffers = self._compiled(detached, buffers, x, target)
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for name, value in new_buffers.items():
            path, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(path), attribute, value)
        step_loss: Tensor = loss
        return step_loss

    def _run(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, target: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        tensors = {**leaves, **buffers}
        loss = self._loss(functional_call(self._model, tensors, (x,)), target)
        per_leaf = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(leaves, per_leaf, strict=True) if g is not None}
        return loss.detach(), gradients, {name: tensors[name].detach() for name in buffers}


def _require_steps(steps: int) -> int:
    if not steps:
        raise MemoptError("the sequence has no steps", hint="Pass inputs of at least one time step.")
    return steps

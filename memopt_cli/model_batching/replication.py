"""Making a training step of many copies of a model from a step of one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memopt_cli.model_batching.module import BatchModule
from memopt_cli.runtime.tree import join_tensors, map_leaves, split_tensors
from memopt_cli.training.step import TrainingStep, loss_entry


def replicated_step(step: TrainingStep, models: int, example: TrainingStep) -> tuple[TrainingStep, str]:
    """Return ``step`` as taken by ``models`` copies of its model at once, and the name of the route that runs them.

    Each copy gets the step's inputs and has its own loss; the sum of the losses is differentiated.  The route is chosen
    on the inputs of ``example``, which should be small, since choosing takes several times the memory of a step.  State
    that the model keeps in attributes is reset before every step.  Raises :class:`~memopt_cli.errors.UsageError`, with
    the name of the module that cannot be batched.
    """
    batched = BatchModule(step.model, models)
    args, kwargs = _repeat_inputs((example.args, example.kwargs), models)
    with torch.no_grad():
        batched(*args, **kwargs)
    gc.collect()  # traced graphs of the routes that were tried are reference cycles, which hold memory until then
    (chosen,) = [trial for trial in batched.trials if trial.used]
    batched.register_forward_pre_hook(lambda *_: batched.reset())
    args, kwargs = _repeat_inputs((step.args, step.kwargs), models)
    optimizer = step.make_optimizer(batched)
    loss = _sum_losses(step.loss)
    return replace(step, model=batched, args=args, kwargs=kwargs, loss=loss, optimizer=optimizer), chosen.name


def _repeat_inputs(inputs: Any, models: int) -> Any:
    def repeat(leaf: Any) -> Any:
        return leaf.detach().expand(models, *leaf.shape).clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(repeat, inputs)


def _sum_losses(loss: Callable[[Any], Tensor] | None) -> Callable[[Any], Any]:
    """Return a function that sums the models' losses, by ``loss`` or as the models return them.

    If there is no loss, the function returns the output.
    """

    def sum_losses(output: Any) -> Any:
        tensors, skeleton = split_tensors(output)
        outputs = [join_tensors(piece, skeleton) for piece in zip(*(t.unbind(0) for t in tensors), strict=True)]
        losses = [value for model_output in outputs if (value := (loss or loss_entry)(model_output)) is not None]
        return torch.stack(losses).sum() if losses else output

    return sum_losses

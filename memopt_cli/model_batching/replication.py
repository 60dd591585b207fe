"""Make a training step of many copies of a model from a step of one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memopt_cli.model_batching.module import BatchModule
from memopt_cli.runtime.tree import join_tensors, map_leaves, split_tensors
from memopt_cli.training.step import Step, loss_entry


def replicated_step(step: Step, models: int, example: Step) -> tuple[Step, str]:
    """Return ``step`` as taken by ``models`` copies of its model at once, and the name of the route that runs them.

    Each copy gets the step's inputs and has its own loss; the sum of the losses is differentiated.  The route is chosen
    on the inputs of ``example``, which should be small, since choosing takes several times the memory of a step.  State
    that the model keeps in attributes is reset before every step.  Raises :class:`~memopt_cli.errors.UsageError` that
    names the module that cannot be batched.
    """
    batched = BatchModule(step.model, models)
    args, kwargs = _for_each((example.args, example.kwargs), models)
    with torch.no_grad():
        batched(*args, **kwargs)
    gc.collect()  # traced graphs of the routes that were tried are reference cycles, which hold memory until then
    (used,) = [trial for trial in batched.trials if trial.used]
    batched.register_forward_pre_hook(lambda *_: batched.reset())
    args, kwargs = _for_each((step.args, step.kwargs), models)
    optimizer = step.make_optimizer(batched)
    together = replace(step, model=batched, args=args, kwargs=kwargs, loss=_summed(step.loss), optimizer=optimizer)
    return together, used.name


def _for_each(inputs: Any, models: int) -> Any:
    """Return ``inputs`` with every tensor once for each model, (models, …)."""

    def repeated(leaf: Any) -> Any:
        return leaf.detach().expand(models, *leaf.shape).clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(repeated, inputs)


def _summed(loss: Callable[[Any], Tensor] | None) -> Callable[[Any], Any]:
    """Return a function that sums the models' losses: those of ``loss``, or those that the models return.

    If there is no loss, it returns the output.
    """

    def of_all(output: Any) -> Any:
        tensors, skeleton = split_tensors(output)
        each = [join_tensors(piece, skeleton) for piece in zip(*(t.unbind(0) for t in tensors), strict=True)]
        losses = [value for one in each if (value := (loss or loss_entry)(one)) is not None]
        return torch.stack(losses).sum() if losses else output

    return of_all

"""Running a module of a traced graph for all models at once: by a kernel, the user's own batch module, or ``vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from memopt_cli.model_batching.extension import AbstractBatchModule
from memopt_cli.model_batching.kernels import attention, linear, recurrent
from memopt_cli.model_batching.kernels.linear import Kernels
from memopt_cli.model_batching.mapping import map_models, refuse_kept_tensors

_ELEMENTWISE = (
    *(nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.LeakyReLU, nn.Mish, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh),
    *(nn.Dropout, nn.Identity),
)

KERNELS: Kernels = {
    **dict.fromkeys(_ELEMENTWISE, lambda module, x: module(x)),
    # Never in place: the input is a view of a product, and an in-place write to a view makes backward copy the whole.
    nn.ReLU: lambda module, x: F.relu(x),
    **linear.KERNELS,
    **recurrent.KERNELS,
    **attention.KERNELS,
}
"""The kernel of each type of module that has one; a module of any other type runs under ``vmap``."""


def find_kernel(module: nn.Module) -> Callable[..., Any] | None:
    """Return the kernel of ``module``, or ``None`` if there is none for its class and settings."""
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return None
    return KERNELS.get(type(module))


def run_custom(module: AbstractBatchModule, *inputs: Any) -> Any:
    """Run ``module``, the user's batch module, on ``inputs`` merged to (image·model, …), the model fastest."""
    merged = (x.transpose(0, 1).flatten(0, 1) if isinstance(x, Tensor) else x for x in inputs)
    output = module(*merged)
    if isinstance(output, tuple):
        return tuple(_models_first(x, module.batch) for x in output)
    return _models_first(output, module.batch)


def mapped(module: nn.Module) -> Callable[..., Any]:
    """Return a function that runs ``module``, with its stacked tensors, under ``vmap``."""
    has_run = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        state = dict(module.named_parameters()) | dict(module.named_buffers())

        def run_model(tensors: dict[str, Tensor], model_args: Any, model_kwargs: Any) -> Any:
            if not state:
                return module(*model_args, **model_kwargs)
            return functional_call(module, tensors, model_args, model_kwargs)

        axes = tuple(_axis(a) for a in args), {key: _axis(a) for key, a in kwargs.items()}
        output = map_models(run_model, (0 if state else None, *axes), state, args, kwargs)
        if not has_run:
            refuse_kept_tensors(module)
            has_run = True
        return output

    return run


def _axis(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_axis(v) for v in value)
    return 0 if isinstance(value, Tensor) else None


def _models_first(merged: Tensor, models: int) -> Tensor:
    return torch.unflatten(merged, 0, (-1, models)).transpose(0, 1)

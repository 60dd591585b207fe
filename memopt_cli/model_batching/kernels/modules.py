"""Which kernel runs which type of module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from memopt_cli.model_batching.extension import AbstractBatchModule
from memopt_cli.model_batching.kernels import attention, linear, normalization, recurrent
from memopt_cli.model_batching.kernels.convolution import convolution_kernels
from memopt_cli.model_batching.kernels.functions import over_images
from memopt_cli.model_batching.kernels.interface import Convolutions, Kernels, ModuleKernel
from memopt_cli.model_batching.mapping import map_models, refuse_kept_tensors


def kernels_of(convolutions: Convolutions) -> Kernels:
    """The kernel of each module type that has one; another module runs under ``vmap``."""
    return (
        _PASS_THROUGH
        | linear.KERNELS
        | normalization.KERNELS
        | recurrent.KERNELS
        | attention.KERNELS
        | convolution_kernels(convolutions)
    )


def run_custom(module: AbstractBatchModule, *inputs: Any) -> Any:
    """A batch module of the user's: its data are merged, (image·model, …), the model fastest."""
    merged = (x.transpose(0, 1).flatten(0, 1) if isinstance(x, Tensor) else x for x in inputs)
    output = module(*merged)
    if isinstance(output, tuple):
        return tuple(_models_first(x, module.batch) for x in output)
    return _models_first(output, module.batch)


def run_mapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module that has no kernel, under ``vmap`` over its stacked tensors."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())

    def one(tensors: dict[str, Tensor], given: Any, named: Any) -> Any:
        return functional_call(module, tensors, given, named)

    axes = tuple(_axis(a) for a in args), {key: _axis(a) for key, a in kwargs.items()}
    output = map_models(one, (0 if state else None, *axes), state, args, kwargs)
    refuse_kept_tensors(module)
    return output


def _axis(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_axis(v) for v in value)
    return 0 if isinstance(value, Tensor) else None


def _models_first(merged: Tensor, models: int) -> Tensor:
    return torch.unflatten(merged, 0, (-1, models)).transpose(0, 1)


# ---------------------------------------------------------------------------------------------- without parameters


def _call(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def _images(dimensions: int) -> Callable[..., Any]:
    return lambda module, x: over_images(module, x, dimensions)


def _up(dimension: int) -> int:
    return dimension + 1 if dimension >= 0 else dimension


_ELEMENTWISE: tuple[type[nn.Module], ...] = (
    *(nn.ELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid, nn.ReLU6, nn.SELU),
    *(nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
    *(nn.Threshold, nn.Dropout, nn.AlphaDropout, nn.Identity),
)

_OF_IMAGES: tuple[tuple[type[nn.Module], ...], ...] = (
    (nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.Dropout1d),
    (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout2d),
    (nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d, nn.Dropout3d),
)

_PASS_THROUGH: Kernels = {
    **dict.fromkeys(_ELEMENTWISE, ModuleKernel(_call)),
    **{kind: ModuleKernel(_images(d)) for d, kinds in enumerate(_OF_IMAGES, start=1) for kind in kinds},
    # In place it would write into a view of a convolution's output, whose gradient is then a copy of the whole.
    nn.ReLU: ModuleKernel(lambda module, x: F.relu(x)),
    nn.Flatten: ModuleKernel(lambda module, x: x.flatten(_up(module.start_dim), _up(module.end_dim))),
    nn.Unflatten: ModuleKernel(lambda module, x: x.unflatten(_up(module.dim), module.unflattened_size)),
    nn.Softmax: ModuleKernel(lambda module, x: x.softmax(_up(module.dim))),
    nn.LogSoftmax: ModuleKernel(lambda module, x: x.log_softmax(_up(module.dim))),
}

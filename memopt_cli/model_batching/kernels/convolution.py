"""Convolutions and transposed convolutions in one to three dimensions: the models as groups of one convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.model_batching.kernels.interface import Convolutions, Kernels, ModuleKernel
from memopt_cli.model_batching.layout import fold_channels, unfold_channels
from memopt_cli.runtime.private_torch import output_padding, padding_of

PLAIN: dict[str, Callable[..., Tensor]] = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}
TRANSPOSED: dict[str, Callable[..., Tensor]] = {
    "conv_transpose1d": F.conv_transpose1d,
    "conv_transpose2d": F.conv_transpose2d,
    "conv_transpose3d": F.conv_transpose3d,
}
_GROUPS_AT = 3
"""Position of ``groups`` after input, weight and bias, in all six functions."""


def convolution(name: str, how: Convolutions) -> Callable[..., Tensor]:
    """``F.<name>`` of each model: x (models, images, channels, …), weight (models, …), bias (models, out channels)."""
    function = (PLAIN | TRANSPOSED)[name]

    def per_model(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        biases = [None] * len(x) if bias is None else bias.unbind(0)
        parts = zip(x.unbind(0), weight.unbind(0), biases, strict=True)
        return torch.stack([function(xg, wg, bg, *args, **kwargs) for xg, wg, bg in parts])

    def grouped(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        models = len(x)
        if x.dim() < weight.dim():  # no dimension of images
            return grouped(x.unsqueeze(1), weight, bias, *args, **kwargs).squeeze(1)
        args, kwargs = _with_groups(models, args, kwargs)
        biases = None if bias is None else bias.flatten()
        return unfold_channels(function(fold_channels(x), weight.flatten(0, 1), biases, *args, **kwargs), models)

    def by_size(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (per_model if weight.numel() < x.numel() else grouped)(x, weight, *args, **kwargs)

    return grouped if how == "grouped" else by_size


def convolution_kernels(how: Convolutions) -> Kernels:
    """Kernels of the convolution modules."""
    kernels: Kernels = {}
    for dimensions, (plain, transposed) in enumerate(_MODULES, start=1):
        kernels[plain] = ModuleKernel(_module_kernel(convolution(f"conv{dimensions}d", how)))
        kernels[transposed] = ModuleKernel(_transposed_kernel(convolution(f"conv_transpose{dimensions}d", how)))
    return kernels


_MODULES: list[tuple[type[nn.Module], type[nn.Module]]] = [
    (nn.Conv1d, nn.ConvTranspose1d),
    (nn.Conv2d, nn.ConvTranspose2d),
    (nn.Conv3d, nn.ConvTranspose3d),
]


def _module_kernel(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(module: Any, x: Tensor) -> Tensor:
        padding = module.padding
        if module.padding_mode != "zeros":
            x, padding = _padded(x, module), 0
        return convolve(x, module.weight, module.bias, module.stride, padding, module.dilation, module.groups)

    return run


def _transposed_kernel(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(module: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        extra = output_padding(module, x[0], output_size)
        return convolve(
            x, module.weight, module.bias, module.stride, module.padding, extra, module.groups, module.dilation
        )

    return run


def _padded(x: Tensor, module: Any) -> Tensor:
    images = x.dim() - len(module.kernel_size) - 1
    padded = F.pad(x.flatten(0, images - 1), padding_of(module), mode=module.padding_mode)
    return torch.unflatten(padded, 0, x.shape[:images])


def _with_groups(models: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments after the bias, with ``models`` times as many groups."""
    if len(args) > _GROUPS_AT:
        return (*args[:_GROUPS_AT], args[_GROUPS_AT] * models, *args[_GROUPS_AT + 1 :]), kwargs
    return args, kwargs | {"groups": kwargs.get("groups", 1) * models}

"""Normalizations: the models as further channels, where a norm treats channels (or groups of them) apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from memopt_cli.model_batching.kernels.interface import Kernels, ModuleKernel
from memopt_cli.model_batching.layout import fold_channels, unfold_channels
from memopt_cli.runtime.private_torch import check_dimensions, dimensions_of_one_sample


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` of each model: x (models, images, channels, …), the others (models, channels).

    The running statistics are updated in place.
    """
    mean, var = _written(running_mean, training), _written(running_var, training)
    folded = F.batch_norm(fold_channels(x), mean, var, _flat(weight), _flat(bias), training, momentum, eps)
    return unfold_channels(folded, len(x))


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``F.group_norm`` of each model: x (models, images, channels, …)."""
    folded = F.group_norm(fold_channels(x), num_groups * len(x), _flat(weight), _flat(bias), eps)
    return unfold_channels(folded, len(x))


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm`` of each model: x (models, images, channels, …)."""
    mean, var = _written(running_mean, use_input_stats), _written(running_var, use_input_stats)
    folded = F.instance_norm(fold_channels(x), mean, var, _flat(weight), _flat(bias), use_input_stats, momentum, eps)
    return unfold_channels(folded, len(x))


def layer_norm(
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm`` of each model: x (models, …, *normalized_shape), weight (models, *normalized_shape)."""
    normal = F.layer_norm(x, normalized_shape, None, None, eps)
    if weight is None:
        return normal if bias is None else normal + _over(bias, x)
    scale = _over(weight, x)
    return normal * scale if bias is None else torch.addcmul(_over(bias, x), normal, scale)


def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``F.rms_norm`` of each model."""
    normal = F.rms_norm(x, normalized_shape, None, eps)
    return normal if weight is None else normal * _over(weight, x)


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten(0, 1)


def _written(statistics: Tensor | None, written: bool) -> Tensor | None:
    """Running statistics, flat.

    The kernels write them without raising their version, by which a segment knows what it must put back.
    """
    if written and statistics is not None:
        increment_version(statistics)
    return _flat(statistics)


def _over(tensor: Tensor, x: Tensor) -> Tensor:
    """(models, *inner) as (models, 1, …, 1, *inner), to broadcast over ``x``."""
    return tensor.view(len(tensor), *[1] * (x.dim() - tensor.dim()), *tensor.shape[1:])


def _batch_norm(module: Any, x: Tensor) -> Tensor:
    """What ``nn.BatchNorm*`` does with its counter and its running statistics, per model."""
    check_dimensions(module, x[0])
    training = module.training or module.running_mean is None
    counts = module.training and module.track_running_stats and module.num_batches_tracked is not None
    if counts:
        module.num_batches_tracked.add_(1)
    mean, var = (module.running_mean, module.running_var) if not training or module.training else (None, None)
    if module.momentum is None and counts:
        return _cumulative(module, x)
    return batch_norm(x, mean, var, module.weight, module.bias, training, module.momentum or 0.0, module.eps)


def _cumulative(module: Any, x: Tensor) -> Tensor:
    """``momentum=None``, a cumulative average: every model weighs its new statistics with its own count."""
    mean, var = torch.zeros_like(module.running_mean), torch.ones_like(module.running_var)
    output = batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    share = (1.0 / module.num_batches_tracked.to(mean.dtype)).unsqueeze(1)
    module.running_mean.lerp_(mean, share)
    module.running_var.lerp_(var, share)
    return output


def _instance_norm(module: Any, x: Tensor) -> Tensor:
    if x.dim() - 1 == dimensions_of_one_sample(module):
        return _instance_norm(module, x.unsqueeze(1)).squeeze(1)
    use_input = module.training or not module.track_running_stats
    statistics = module.running_mean, module.running_var
    return instance_norm(x, *statistics, module.weight, module.bias, use_input, module.momentum or 0.0, module.eps)


def _group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    return group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


def _layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def _rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, module.normalized_shape, module.weight, module.eps)


KERNELS: Kernels = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ModuleKernel(_batch_norm)),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), ModuleKernel(_instance_norm)),
    nn.GroupNorm: ModuleKernel(_group_norm),
    nn.LayerNorm: ModuleKernel(_layer_norm),
    nn.RMSNorm: ModuleKernel(_rms_norm),
}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}

"""Functions and tensor methods on batched tensors: what is elementwise runs as it is, dimensions move up by one.

Whatever has no rule here runs under ``vmap``, which has one for nearly everything but costs more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt_cli.model_batching.kernels import attention, convolution, linear, normalization
from memopt_cli.model_batching.kernels.interface import Convolutions
from memopt_cli.model_batching.layout import fold_images
from memopt_cli.model_batching.mapping import map_models
from memopt_cli.runtime.private_torch import tree_leaves


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a traced graph."""

    name: str
    function: Callable[..., Any]
    args: Any
    """For each positional argument, nested as the arguments are: whether it is batched; ``None`` for a constant."""
    kwargs: Any

    def mapped(self, *args: Any, **kwargs: Any) -> Any:
        """The call under ``vmap``."""
        axes = _axes(self.args), _axes(self.kwargs)
        return map_models(lambda a, k: self.function(*a, **k), axes, args, kwargs)


Rule = Callable[[Call], Callable[..., Any]]
"""Makes the operation to run in a call's place, from what is known before it runs."""


def operation_of(call: Call, convolutions: Convolutions) -> Callable[..., Any]:
    """What runs in the place of ``call``."""
    if not call.args:
        return call.mapped  # its input has a keyword
    kernel = _KERNELS.get(call.name)
    if call.name.startswith("conv") and call.name in convolution.PLAIN | convolution.TRANSPOSED:
        kernel = convolution.convolution(call.name, convolutions)
    if kernel is not None and _tensors_agree(call):
        return kernel
    rule = _RULES.get(call.name)
    return call.mapped if rule is None or kernel is not None else rule(call)


def is_shape_query(call: Call) -> bool:
    """Whether the answer is the same for every model: a shape, a dtype, a device."""
    return call.name in _QUERIES


# ---------------------------------------------------------------------------------------------- rules


def _pointwise(call: Call) -> Callable[..., Any]:
    if any(tree_leaves(call.kwargs)) or any(isinstance(flag, list | tuple | dict) for flag in call.args):
        return call.mapped
    if len(call.args) == 1:
        return call.function

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [(a, f) for a, f in zip(args, call.args, strict=True) if isinstance(a, Tensor)]
        if len(tensors) == 1:
            return call.function(*args, **kwargs)
        rank = max(a.dim() - bool(f) for a, f in tensors)
        aligned = (_aligned(a, rank) if f else a for a, f in zip(args, call.args, strict=True))
        return call.function(*aligned, **kwargs)

    return run


def _matmul(call: Call) -> Callable[..., Any]:
    def run(a: Tensor, b: Tensor) -> Any:
        ranks = [t.dim() - bool(f) for t, f in zip((a, b), call.args, strict=True)]
        if min(ranks) < 2:
            return call.mapped(a, b)
        a, b = (_aligned(t, max(ranks)) if f else t for t, f in zip((a, b), call.args, strict=True))
        return torch.matmul(a, b)

    return run if len(call.args) == 2 and not call.kwargs else call.mapped


def _along(position: int, *keywords: str, default: int | tuple[int, ...] | None = None) -> Rule:
    """Rule for functions that take ``len(keywords)`` dimensions, from ``position`` on; by default all are reduced."""
    count = len(keywords)

    def rule(call: Call) -> Callable[..., Any]:
        first, *others = call.args
        if not all(tree_leaves(first)) or any(tree_leaves((others, call.kwargs))):
            return call.mapped
        fallback = (default,) if isinstance(default, int) else default

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [*args[position : position + count]]
            before, after = args[:position], args[position + count :]
            for index, keyword in enumerate(keywords[len(given) :], start=len(given)):
                given.append(kwargs.get(keyword, fallback and fallback[index]))
            moved = [_moved(dimension) for dimension in given]
            if None in moved:
                return call.mapped(*args, **kwargs)
            named = {key: value for key, value in kwargs.items() if key not in keywords}
            return call.function(*before, *moved, *after, **named)

        return run

    return rule


def _variadic(change: Callable[[Tensor, tuple[Any, ...]], Any]) -> Rule:
    """Rule for methods whose sizes or dimensions come one by one or as one sequence."""

    def rule(call: Call) -> Callable[..., Any]:
        first, *others = call.args
        if first is not True or any(tree_leaves(others)) or call.kwargs:
            return call.mapped

        def run(x: Tensor, *given: Any) -> Any:
            return change(x, tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else given)

        return run

    return rule


def _reshaped(x: Tensor, shape: tuple[Any, ...]) -> Any:
    return x.reshape(len(x), *shape)


def _expanded(x: Tensor, sizes: tuple[Any, ...]) -> Any:
    return _aligned(x, len(sizes)).expand(len(x), *sizes)


def _permuted(x: Tensor, dimensions: tuple[Any, ...]) -> Any:
    return x.permute(0, *(d + 1 if d >= 0 else d for d in dimensions))


def _images(dimensions: int) -> Rule:
    """Rule for functions of images with so many spatial dimensions: the models become further images."""

    def rule(call: Call) -> Callable[..., Any]:
        first, *others = call.args
        if first is not True or any(tree_leaves((others, call.kwargs))):
            return call.mapped

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return over_images(lambda images: call.function(images, *args, **kwargs), x, dimensions)

        return run

    return rule


def over_images(function: Callable[[Tensor], Any], x: Tensor, dimensions: int) -> Any:
    """``function`` on (models·images, channels, …); x may have no dimension of images."""
    if x.dim() < dimensions + 3:
        return function(x)
    folded, unfold = fold_images(x)
    output = function(folded)
    return tuple(map(unfold, output)) if isinstance(output, tuple) else unfold(output)


def _item(call: Call) -> Callable[..., Any]:
    if call.args[0] is not True or any(tree_leaves(call.args[1])):
        return call.mapped

    def run(x: Any, index: Any) -> Any:
        if not isinstance(x, Tensor):
            return x[index]
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor | list) for part in parts):
            return call.mapped(x, index)
        return x[(slice(None), *parts)]

    return run


def _attribute(call: Call) -> Callable[..., Any]:
    def run(x: Any, name: str) -> Any:
        if not isinstance(x, Tensor) or name not in ("T", "H", "grad", "data"):
            return getattr(x, name)
        return call.mapped(x, name)

    return run


def _unchanged(call: Call) -> Callable[..., Any]:
    return lambda x, *_, **__: x  # a layout in memory means nothing here


# ---------------------------------------------------------------------------------------------- queries


def query(call: Call) -> Callable[..., Any]:
    """What one model would be told about its own tensor."""
    return _QUERIES[call.name]


def _shape_of(x: Tensor, dim: int | None = None) -> Any:
    return x.shape[1:] if dim is None else x.shape[1:][dim]


_QUERIES: dict[str, Callable[..., Any]] = {
    "size": _shape_of,
    "shape": _shape_of,
    "dim": lambda x: x.dim() - 1,
    "ndim": lambda x: x.dim() - 1,
    "numel": lambda x: x[0].numel(),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "is_floating_point": lambda x: x.is_floating_point(),
    "get_device": lambda x: x.get_device(),
}


# ---------------------------------------------------------------------------------------------- tables


_ELEMENTWISE = (
    "abs acos add asin atan atan2 bernoulli bitwise_and bitwise_or bitwise_not bool ceil celu clamp clamp_max "
    "clamp_min clone cos cosh detach div double dropout elu eq erf exp expm1 float floor floor_divide fmod ge gelu "
    "gt half hardsigmoid hardswish hardtanh iadd isub imul itruediv int invert isfinite isnan isinf le leaky_relu "
    "lerp log log10 log1p log2 logical_and logical_not logical_or logical_xor logsigmoid long lt masked_fill "
    "maximum minimum mish mod mul ne neg ones_like pow rand_like randn_like reciprocal relu relu6 remainder round "
    "rsqrt rsub selu sigmoid sign silu sin sinh softplus softsign sqrt square sub tan tanh tanhshrink threshold to "
    "truediv trunc type_as where zeros_like softshrink hardshrink alpha_dropout and_ or_ xor eq_ add_ sub_ mul_ "
    "div_ relu_ sigmoid_ tanh_ clamp_"
).split()

_POOLS = [f"{prefix}_pool" for prefix in ("max", "avg", "lp", "adaptive_max", "adaptive_avg")]

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _pointwise),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod"), _along(1, "dim")),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "argmax", "argmin", "all", "any"), _along(1, "dim")),
    **dict.fromkeys(("max", "min", "prod", "logsumexp", "std", "var", "unsqueeze", "squeeze"), _along(1, "dim")),
    **dict.fromkeys(("chunk", "split"), _along(2, "dim", default=0)),
    **dict.fromkeys(("cat", "concat", "stack", "unbind"), _along(1, "dim", default=0)),
    **dict.fromkeys(("select", "narrow"), _along(1, "dim")),
    **dict.fromkeys(("transpose", "swapaxes"), _along(1, "dim0", "dim1")),
    "flatten": _along(1, "start_dim", "end_dim", default=(0, -1)),
    **dict.fromkeys(("view", "reshape"), _variadic(_reshaped)),
    "expand": _variadic(_expanded),
    "permute": _variadic(_permuted),
    "contiguous": _unchanged,
    "getitem": _item,
    "getattr": _attribute,
    **{f"{pool}{d}d": _images(d) for pool in _POOLS for d in (1, 2, 3)},
    **{f"dropout{d}d": _images(d) for d in (1, 2, 3)},
}

_KERNELS: dict[str, Callable[..., Any]] = {
    **linear.FUNCTIONS,
    **normalization.FUNCTIONS,
    **attention.FUNCTIONS,
}


def _tensors_agree(call: Call) -> bool:
    """Whether every argument that could be a tensor is batched: kernels take no tensor that models share."""
    return False not in tree_leaves((call.args, call.kwargs))


def _axes(flags: Any) -> Any:
    if flags is None or isinstance(flags, bool):
        return 0 if flags else None
    if isinstance(flags, dict):
        return {key: _axes(value) for key, value in flags.items()}
    return type(flags)(_axes(flag) for flag in flags)


def _aligned(x: Tensor, rank: int) -> Tensor:
    """A batched tensor with so many dimensions per model, new ones of length 1 in front."""
    missing = rank + 1 - x.dim()
    return x.view(len(x), *[1] * missing, *x.shape[1:]) if missing > 0 else x


def _moved(dimension: Any) -> Any:
    if isinstance(dimension, tuple | list):
        return [_moved(d) for d in dimension] or None
    if isinstance(dimension, bool) or not isinstance(dimension, int):
        return None
    return dimension + 1 if dimension >= 0 else dimension

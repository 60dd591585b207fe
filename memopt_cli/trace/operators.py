"""Facts about a call of an operator: the tensors it modifies, whether it uses random numbers, how much it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memopt_cli.runtime.private_torch import has_schema, schema_of, tree_leaves
from memopt_cli.text.units import dtype_name

_aten = torch.ops.aten
_STATISTICS = ("running_mean", "running_var")
"""Arguments that batch norm writes in training mode, although its schema does not show it."""


def operator_name(func: Any) -> str:
    """Return the name of ``func`` without its overload: ``aten::convolution``."""
    name: str = func.name()
    return name.partition(".")[0]


@functools.cache
def is_bookkeeping(func: Any) -> bool:
    """Return whether ``func`` is not counted as an operator; some such calls are seen on fake tensors only."""
    return func is _aten.detach.default or func.name().startswith("prim::")


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of ``func`` writes in place."""
    names = _written_names(func)
    if not names:
        return []
    arguments = {**dict(zip(_parameters(func), args, strict=False)), **kwargs}
    if names is _STATISTICS and not (arguments.get("training") or arguments.get("train")):
        return []
    return [leaf for name in names for leaf in tree_leaves(arguments.get(name)) if isinstance(leaf, Tensor)]


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``func`` uses a random generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    # Fused attention has the tag as well, but is random only with dropout.
    arguments = {**dict(zip(_parameters(func), args, strict=False)), **kwargs}
    rates = [arguments.get(name, 0) for name in ("dropout_p", "dropout") if name in _parameters(func)]
    return not rates or any(rates)


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Count the floating-point operations of products, convolutions, attention and recurrent layers; 0 for others.

    A multiply-add counts as two, as in ``torch.utils.flop_counter``.
    """
    formula = _FLOPS.get(getattr(func, "overloadpacket", None))
    return int(formula(*args, **kwargs, out_val=output)) if formula else 0


def find_dtype(leaves: Iterable[Any]) -> str:
    """Return the dtype (``bfloat16``) of the first floating-point or complex tensor in ``leaves``, else ""."""
    dtypes = (leaf.dtype for leaf in leaves if isinstance(leaf, Tensor))
    floating = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return next(map(dtype_name, floating), "")


@functools.cache
def _parameters(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(func).arguments) if has_schema(func) else ()


@functools.cache
def _written_names(func: Any) -> tuple[str, ...]:
    if not has_schema(func):
        return ()
    declared = [a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    if not declared and {"running_mean", "running_var"} <= {*_parameters(func)}:
        is_forward = not operator_name(func).endswith("_backward")
        return _STATISTICS if is_forward else ()
    return tuple(declared)


def _recurrent_flops(passes: int) -> Callable[..., int]:
    """Return the flop formula of a recurrent layer, in which each row of ``[T, B, …]`` meets every weight."""

    def flops(x: Tensor, *rest: Any, out_val: Any) -> int:
        leaves = (leaf for leaf in tree_leaves(rest[:4]) if isinstance(leaf, Tensor))
        weights = sum(leaf.numel() for leaf in leaves if leaf.dim() == 2)
        return 2 * passes * x.shape[0] * x.shape[1] * weights

    return flops


_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
    _aten.mkldnn_rnn_layer: _recurrent_flops(1),
    _aten.mkldnn_rnn_layer_backward: _recurrent_flops(2),
    _aten._cudnn_rnn: _recurrent_flops(1),
    _aten._cudnn_rnn_backward: _recurrent_flops(2),
}

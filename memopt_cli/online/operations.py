"""Tagging weights for eligibility traces, and the operations that use tagged weights.

An operation is affine in its weight: ``y = sum_k rows(z)[..., k] * weight[..., k] + bias``.  A trace of a linear,
convolutional or elementwise weight uses nothing else of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.errors import UsageError
from memopt_cli.runtime.private_torch import convolve, padding_of

TraceKind = Literal["full", "approx", "adaptive"]
"""Kind of trace that :class:`HybridTrace` keeps for a weight: full, in two factors, or whichever is smaller."""

_TAG = "_eligibility_trace"

M = TypeVar("M", bound=nn.Module)
L = TypeVar("L", bound=nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


class ElementWise(nn.Module):
    """A parameter that acts on each neuron by itself, such as a leak, a threshold or a gain; tagged from the start.

    Calling the module returns the parameter, expanded to ``shape``: the shape, per sample, of the state it acts on.
    """

    def __init__(self, initial: Tensor, shape: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial)
        shape = initial.shape if shape is None else shape
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        setattr(self, _TAG, "adaptive")

    def forward(self) -> Tensor:
        """Return the parameter expanded to ``shape``, to be broadcast over a batch."""
        return self.weight.expand(self.shape)


class Operation(Protocol):
    """The action of the weight of one kind of module on tensors with a leading batch axis."""

    @property
    def weight(self) -> Tensor | None:
        """Current weight of the module; ``None`` for an elementwise parameter, which counts as a bias."""

    @property
    def bias(self) -> Tensor | None:
        """Current bias of the module, or ``None``."""

    def apply(self, z: Tensor | None, batch: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``y``, ``[B, ...]``, for the input ``z``."""

    def rows(self, z: Tensor, /) -> Tensor:
        """Return the inputs of the ``K`` weights of each output, broadcastable to ``[*y.shape, K]``."""

    def weight_gradient(self, z: Tensor, cotangent: Tensor, /) -> Tensor:
        """Return ``sum cotangent * dy/dweight`` over the batch, in the weight's shape."""

    def contract(self, cotangent: Tensor, trace: Tensor, /) -> Tensor:
        """Return ``sum cotangent * trace`` over all axes except channels, for a ``trace [*y.shape, K]``."""

    def bias_gradient(self, cotangent: Tensor) -> Tensor:
        """Return ``sum cotangent`` over all outputs that share a bias, in the bias's shape."""


@dataclass(frozen=True, slots=True)
class _Layer(Generic[L]):
    """A layer with a weight and a bias."""

    module: L

    @property
    def weight(self) -> Tensor | None:
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias


class LinearOperation(_Layer[nn.Linear]):
    """A linear layer: ``z [B, ..., I]``, ``weight [O, I]`` -> ``y [B, ..., O]``."""

    def apply(self, z: Tensor | None, batch: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert z is not None
        assert weight is not None
        return F.linear(z, weight, bias)

    def rows(self, z: Tensor) -> Tensor:
        return z.unsqueeze(-2)

    def weight_gradient(self, z: Tensor, cotangent: Tensor) -> Tensor:
        return cotangent.reshape(-1, cotangent.shape[-1]).t() @ z.reshape(-1, z.shape[-1])

    def contract(self, cotangent: Tensor, trace: Tensor) -> Tensor:
        return torch.einsum("no,noi->oi", cotangent.flatten(0, -2), trace.flatten(0, -3))

    def bias_gradient(self, cotangent: Tensor) -> Tensor:
        return cotangent.flatten(0, -2).sum(0)


class ConvOperation(_Layer[nn.Conv1d | nn.Conv2d | nn.Conv3d]):
    """A convolution: ``z [B, I, *size]``, ``weight [O, I / groups, *kernel]`` -> ``y [B, O, *positions]``."""

    def apply(self, z: Tensor | None, batch: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert z is not None
        assert weight is not None
        y: Tensor = convolve(self.module, z, weight, bias)
        return y

    def rows(self, z: Tensor) -> Tensor:
        """Return the patches of ``z``: ``[B, O or 1, *positions, K]`` with ``K = I / groups * prod(kernel)``."""
        conv = self.module
        windows = self._pad(z)
        for axis, (size, stride, dilation) in enumerate(
            zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), start=2
        ):
            windows = windows.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        grouped = torch.unflatten(windows, 1, (conv.groups, -1)).movedim(2, 2 + len(conv.kernel_size))
        patches = grouped.flatten(2 + len(conv.kernel_size))
        return patches if conv.groups == 1 else patches.repeat_interleave(conv.out_channels // conv.groups, dim=1)

    def weight_gradient(self, z: Tensor, cotangent: Tensor) -> Tensor:
        conv, zeros = self.module, [0] * len(self.module.kernel_size)
        arguments: tuple[Any, ...] = (conv.stride, zeros, conv.dilation, False, zeros, conv.groups)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            cotangent.contiguous(), self._pad(z), conv.weight.detach(), None, *arguments, [False, True, False]
        )
        weight_gradient: Tensor = gradient
        return weight_gradient

    def contract(self, cotangent: Tensor, trace: Tensor) -> Tensor:
        flat = torch.einsum("bcp,bcpk->ck", cotangent.flatten(2), trace.flatten(2, -2))
        return flat.reshape(self.module.weight.shape)

    def bias_gradient(self, cotangent: Tensor) -> Tensor:
        return cotangent.flatten(2).sum((0, 2))

    def _pad(self, z: Tensor) -> Tensor:
        mode = self.module.padding_mode
        return F.pad(z, padding_of(self.module), mode="constant" if mode == "zeros" else mode)


class ElementWiseOperation:
    """An elementwise parameter, which has no input: ``y [B, *shape]`` is the parameter itself."""

    weight: Tensor | None = None

    def __init__(self, module: ElementWise) -> None:
        self.module = module

    @property
    def bias(self) -> Tensor | None:
        return self.module.weight

    def apply(self, z: Tensor | None, batch: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return bias.expand(batch, *self.module.shape)

    def _need_input(self, *_: Tensor) -> Tensor:
        raise AssertionError("an elementwise parameter multiplies no input")

    rows = weight_gradient = contract = _need_input

    def bias_gradient(self, cotangent: Tensor) -> Tensor:
        return cotangent.sum_to_size(self.module.weight.shape)


def make_operation(module: nn.Module) -> Operation:
    """Return the operation of ``module``, a layer that can carry a trace."""
    if isinstance(module, nn.Linear):
        return LinearOperation(module)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return ConvOperation(module)
    assert isinstance(module, ElementWise)
    return ElementWiseOperation(module)


def traced(module: M, kind: TraceKind = "adaptive") -> M:
    """Tag every weight of ``module`` that can carry an eligibility trace, and return ``module``.

    Parameters
    ----------
    module:
        Linear or convolutional layer or :class:`ElementWise` parameter, or a module that holds some.
    kind:
        Kind of trace in :class:`HybridTrace`: ``full``, ``approx`` (factored), or ``adaptive`` for the smaller.  Other
        algorithms do not read it.

    Returns
    -------
    ``module``, so that a layer can be tagged where it is made.

    Raises
    ------
    UsageError
        If no weight in ``module`` can carry a trace.
    """
    if kind not in ("full", "approx", "adaptive"):
        raise UsageError(f"unknown kind {kind!r}", hint='Pass "full", "approx" or "adaptive".')
    layers = list(traceable_layers(module))
    if not layers:
        raise UsageError(
            f"{type(module).__name__} has no weight that can carry a trace",
            hint="Tag nn.Linear, nn.Conv1d/2d/3d, or wrap a parameter of the neuron in ElementWise.",
        )
    for layer in layers:
        setattr(layer, _TAG, kind)
    return module


def untraced(module: M) -> M:
    """Take the tag off every weight of ``module``, and return ``module``.

    Parameters
    ----------
    module:
        Module whose weights get only the gradient of each time step.

    Returns
    -------
    ``module``.
    """
    for layer in traceable_layers(module):
        setattr(layer, _TAG, None)
    return module


def trace_kind(module: nn.Module) -> TraceKind | None:
    """Return the kind of trace that the tag of ``module`` names; ``None`` if there is no tag."""
    kind: TraceKind | None = getattr(module, _TAG, None)
    return kind


def has_tags(model: nn.Module) -> bool:
    """Return whether any weight of ``model`` was given to :func:`traced` or :func:`untraced`."""
    return any(hasattr(module, _TAG) for module in model.modules())


def traceable_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in ``module`` whose weights can carry traces."""
    forwards = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
    for layer in module.modules():
        if isinstance(layer, ElementWise) or type(layer).forward in forwards:
            yield layer


def weights_per_output(operation: Operation) -> int:
    """Return ``K``, the number of weights that each output of ``operation`` sums over."""
    return 0 if operation.weight is None else math.prod(operation.weight.shape[1:])

"""The shapes of batches that a model accepts, declared by the model, or implied by its first layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import BatchShapeError
from memopt_cli.records import from_data
from memopt_cli.text.units import dtype_name

_CONDITIONS: dict[str, tuple[Callable[[int, int], bool], str]] = {
    "fixed": (operator.eq, ""),
    "minimum": (operator.ge, "at least "),
    "maximum": (operator.le, "at most "),
    "divisible_by": (lambda size, bound: size % bound == 0, "a multiple of "),
}
"""Field of :class:`ShapeRequirements` -> a check of a size against the field's value, and its words in messages."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRequirements:
    """Conditions on the shape of a batch; axes may be negative, counted from the last."""

    ndim: tuple[int, ...] = ()
    """Allowed numbers of dimensions, batch included; empty if any number is allowed."""
    fixed: dict[int, int] = field(default_factory=dict)
    """Axis -> its only allowed size."""
    minimum: dict[int, int] = field(default_factory=dict)
    """Axis -> its minimum size."""
    maximum: dict[int, int] = field(default_factory=dict)
    """Axis -> its maximum size."""
    divisible_by: dict[int, int] = field(default_factory=dict)
    """Axis -> divisor of its size."""
    dtype: str | None = None
    """Name of a torch dtype without the prefix; ``None`` for any."""
    values_below: int | None = None
    """Exclusive upper bound of integer inputs (rows of an embedding).  With ``None``, values are 0 and 1."""

    def issues(self, shape: Sequence[int], dtype: str | None = None) -> list[str]:
        """Return a sentence for each condition that ``shape`` or ``dtype`` fails.  ``dtype=None`` is not checked."""
        issues = []
        if self.ndim and len(shape) not in self.ndim:
            allowed = " or ".join(map(str, self.ndim))
            issues.append(f"the batch has {len(shape)} dimensions; the model takes {allowed}")
        for field_name, (is_met, words) in _CONDITIONS.items():
            for axis, bound in getattr(self, field_name).items():
                issues += _axis_issues(shape, axis, is_met, words, bound)
        if self.dtype is not None and dtype not in (None, self.dtype):
            issues.append(f"the dtype is {dtype}; the model takes {self.dtype}")
        return issues


def as_requirements(source: ShapeRequirements | Mapping[str, Any] | nn.Module | None) -> ShapeRequirements:
    """Return the requirements in ``source``: a record, its plain values, or a model; no requirements for ``None``.

    Raises :class:`~memopt_cli.errors.UsageError` for an unknown key or a value of the wrong type.
    """
    if source is None:
        return ShapeRequirements()
    if isinstance(source, ShapeRequirements):
        return source
    if isinstance(source, nn.Module):
        return infer_requirements(source)
    return from_data(ShapeRequirements, source, where="model_requirements")


def infer_requirements(model: nn.Module) -> ShapeRequirements:
    """Return ``model.get_shape_requirements()`` if the method exists, else the requirements of the first layer.

    The first layer is the first linear, convolutional, recurrent or embedding layer in order of registration; a model
    without such a layer accepts anything.
    """
    declared = getattr(model, "get_shape_requirements", None)
    if callable(declared):
        return as_requirements(declared())
    requirements = map(_layer_requirements, model.modules())
    return next((r for r in requirements if r is not None), ShapeRequirements())


def sample_input(shape: Sequence[int], requirements: ShapeRequirements, device: str | torch.device) -> Tensor:
    """Return a random batch of ``shape``, with the dtype and range in ``requirements``; every call returns the same."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, requirements.dtype or "float32")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator).to(device, dtype)
    return torch.randint(0, requirements.values_below or 2, tuple(shape), generator=generator).to(device, dtype)


def sequence_axis(shape: Sequence[int]) -> int | None:
    """Return the axis of the sequence in ``shape``: 1 in three dimensions, 2 in four; ``None`` in others."""
    return {3: 1, 4: 2}.get(len(shape))


def _layer_requirements(layer: nn.Module) -> ShapeRequirements | None:
    if isinstance(layer, nn.Embedding):
        return ShapeRequirements(dtype="int64", values_below=layer.num_embeddings)
    if isinstance(layer, nn.Linear):
        return ShapeRequirements(fixed={-1: layer.in_features}, dtype=dtype_name(layer.weight.dtype))
    if isinstance(layer, nn.RNNBase):
        return ShapeRequirements(ndim=(3,), fixed={-1: layer.input_size}, dtype=dtype_name(layer.weight_hh_l0.dtype))
    if isinstance(layer, nn.RNNCellBase):
        return ShapeRequirements(fixed={-1: layer.input_size}, dtype=dtype_name(layer.weight_hh.dtype))
    if isinstance(layer, _CONVOLUTIONS):
        spatial = len(layer.kernel_size)
        minimum = {2 + i: _min_size(layer, i) for i in range(spatial)}
        return ShapeRequirements(
            ndim=(spatial + 2,), fixed={1: layer.in_channels}, minimum=minimum, dtype=dtype_name(layer.weight.dtype)
        )
    return None


def _min_size(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, i: int) -> int:
    """Return the smallest size of spatial dimension ``i``: the span of the dilated kernel minus the padding."""
    span = layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
    return 1 if isinstance(layer.padding, str) else max(1, span - 2 * int(layer.padding[i]))


def _axis_issues(
    shape: Sequence[int], axis: int, is_met: Callable[[int, int], bool], words: str, bound: int
) -> list[str]:
    if not -len(shape) <= axis < len(shape):
        return [f"the batch has no axis {axis} (shape {tuple(shape)}), which must be {words}{bound}"]
    return [] if is_met(shape[axis], bound) else [f"axis {axis} has size {shape[axis]}; it must be {words}{bound}"]


def require_batch_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` as a tuple.  Raises :class:`BatchShapeError` if it is empty or a size is not positive."""
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        raise BatchShapeError(f"{tuple(shape)} is not a batch shape", hint="Pass positive sizes, the batch first.")
    return tuple(shape)

"""Checking batch shapes against a model and the hardware, and estimating their cost in a sequence of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn

from memopt_cli.batching.requirements import ShapeRequirements, as_requirements, require_batch_shape, sequence_axis
from memopt_cli.errors import BatchShapeError
from memopt_cli.records import ShapeValidation, from_data

_TILE_SIZE = 8
"""Size whose multiples matrix units work on (NVIDIA, "Matrix Multiplication Background": 8 for 16 bits)."""
_LONG_SEQUENCE = 1024
"""Sequence length from which attention's squared term is worth a warning."""
_FLOAT_BYTES = 4  # a float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareLimits:
    """Limits of the hardware, or of the serving system; ``None`` if unlimited."""

    max_batch_size: int | None = None
    max_seq_len: int | None = None


class OperationCost(TypedDict):
    """Cost of one operation on the whole batch, forward only."""

    operation: str
    flops: int
    bytes: int
    """Bytes read and written, in float32, weights included."""


class PerformanceImplications(TypedDict):
    """Costs of a sequence of operations."""

    operations: list[OperationCost]
    bottleneck: str | None
    """Operation that takes longest, or ``None`` if no operation is known."""
    warnings: list[str]
    unknown_operations: list[str]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a batch of features: sequences (batch · time), positions in each, and features of each position."""

    sequences: int
    positions: int
    features: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.positions


def _cost_of_products(s: _Sizes, weights: int) -> tuple[int, int]:
    """Return FLOPs of matrix products of all tokens with ``weights`` weights, and the elements moved."""
    return 2 * s.tokens * weights, 2 * s.tokens * s.features + weights


def _attention(s: _Sizes) -> tuple[int, int]:
    """Return FLOPs and elements moved of four projections and ``S²`` pairs of positions, with one head's scores."""
    flops, elements = _cost_of_products(s, 4 * s.features**2)
    pairs = s.sequences * s.positions**2
    return flops + 4 * pairs * s.features, elements + 2 * pairs


def _elementwise(s: _Sizes, flops: int) -> tuple[int, int]:
    return flops * s.tokens * s.features, 2 * s.tokens * s.features


_OPERATIONS: dict[str, Callable[[_Sizes], tuple[int, int]]] = {
    "embedding": lambda s: _elementwise(s, 0),
    "linear": lambda s: _cost_of_products(s, s.features**2),
    "feedforward": lambda s: _cost_of_products(s, 8 * s.features**2),  # to four times the width and back
    "attention": _attention,
    "convolution": lambda s: _cost_of_products(s, 3 * s.features**2),  # kernel of 3
    "recurrent": lambda s: _cost_of_products(s, 8 * s.features**2),  # an LSTM: 4 gates of input and hidden state
    "normalization": lambda s: _elementwise(s, 8),
    "spiking": lambda s: _elementwise(s, 5),  # leak, add, compare, reset
}


class BatchShapeValidator:
    """Checks batch shapes with the strictness that ``config`` sets."""

    def __init__(self, *, config: ShapeValidation | None = None) -> None:
        self._config = config or ShapeValidation()

    def validate_batch_shape(
        self,
        tensor_shape: Sequence[int],
        model_requirements: ShapeRequirements | Mapping[str, Any] | nn.Module | None = None,
        hardware_limits: Mapping[str, int] | None = None,
        *,
        dtype: str | None = None,
    ) -> tuple[bool, list[str]]:
        """Return whether a batch of ``tensor_shape`` (batch first) can be used, and sentences on problems.

        ``model_requirements``: see :class:`~memopt_cli.batching.requirements.ShapeRequirements`; a model's are
        inferred.  ``hardware_limits``: ``max_batch_size`` and ``max_seq_len`` (axis 1 in 3 dimensions, 2 in 4).
        Sentences that begin with ``performance:`` do not make a shape invalid.  In strict mode an invalid shape raises
        :class:`BatchShapeError`; an unknown key always raises :class:`~memopt_cli.errors.UsageError`.
        """
        shape = require_batch_shape(tensor_shape)
        limits = from_data(HardwareLimits, hardware_limits or {}, where="hardware_limits")
        issues = as_requirements(model_requirements).issues(shape, dtype)
        if self._config.hardware_checks:
            issues += _limit_issues(shape, limits)
        if issues and self._config.strict_mode:
            raise BatchShapeError(
                f"a batch of shape {shape} is not valid: {'; '.join(issues)}",
                hint="Change the shape, or set strict_mode=False to get these sentences returned.",
            )
        notes = [f"performance: {note}" for note in _slow_sizes(shape)] if self._config.performance_validation else []
        return not issues, issues + notes

    def check_performance_implications(
        self, batch_shape: Sequence[int], operation_sequence: Sequence[str], *, flops_per_byte: float = 10.0
    ) -> PerformanceImplications:
        """Return the cost of each operation on features of ``batch_shape``, ``(batch, …, dim)``, and the slowest one.

        An operation takes as long as its arithmetic or its memory traffic, whichever is longer (roofline model,
        Williams et al. 2009); ``flops_per_byte`` is the balance of the machine.  Known operations: embedding,
        linear, feedforward (4 × wide), attention, convolution (kernel 3), recurrent (LSTM), normalization, spiking
        (LIF).
        """
        sizes = _token_sizes(require_batch_shape(batch_shape))
        costs = [
            OperationCost(operation=name, flops=flops, bytes=_FLOAT_BYTES * elements)
            for name in operation_sequence
            if name in _OPERATIONS
            for flops, elements in [_OPERATIONS[name](sizes)]
        ]
        unknown = [name for name in dict.fromkeys(operation_sequence) if name not in _OPERATIONS]
        slowest = max(costs, key=lambda c: max(c["flops"] / flops_per_byte, c["bytes"]), default=None)
        warnings = _slow_sizes(tuple(batch_shape)) if self._config.performance_validation else []
        if (
            self._config.performance_validation
            and "attention" in operation_sequence
            and sizes.positions >= _LONG_SEQUENCE
        ):
            share = 4 * sizes.sequences * sizes.positions**2 * sizes.features / _attention(sizes)[0]
            warnings.append(
                f"attention: {share:.0%} of its FLOPs grow with the square of {sizes.positions} positions; "
                "a shorter sequence saves more than a smaller batch"
            )
        warnings += [f"unknown operation '{name}'; known: {', '.join(_OPERATIONS)}" for name in unknown]
        return PerformanceImplications(
            operations=costs,
            bottleneck=slowest["operation"] if slowest else None,
            warnings=warnings,
            unknown_operations=unknown,
        )


def _limit_issues(shape: tuple[int, ...], limits: HardwareLimits) -> list[str]:
    issues = []
    axis = sequence_axis(shape)
    if limits.max_batch_size is not None and shape[0] > limits.max_batch_size:
        issues.append(f"the batch size {shape[0]} is above the limit of {limits.max_batch_size}")
    if limits.max_seq_len is not None and axis is not None and shape[axis] > limits.max_seq_len:
        issues.append(f"the sequence length {shape[axis]} is above the limit of {limits.max_seq_len}")
    return issues


def _slow_sizes(shape: tuple[int, ...]) -> list[str]:
    if shape[0] % _TILE_SIZE == 0:
        return []
    multiple = math.ceil(shape[0] / _TILE_SIZE) * _TILE_SIZE
    return [f"the batch size {shape[0]} is not a multiple of {_TILE_SIZE}; {multiple} would use the same matrix tiles"]


def _token_sizes(shape: tuple[int, ...]) -> _Sizes:
    axis = sequence_axis(shape)
    positions = shape[axis] if axis is not None else 1
    features = shape[-1] if len(shape) > 1 else 1
    return _Sizes(math.prod(shape) // (positions * features), positions, features)

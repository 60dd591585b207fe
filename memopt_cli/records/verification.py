"""Comparisons of the optimized model with the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

NOT_FINITE: Final = "not finite"
"""Part of the kind of a tensor with NaN or infinity in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrint:
    """The fingerprint of a tensor that a step left."""

    name: str
    kind: str
    """Dtype, shape and layout; digests of the places of a sparse tensor's values, and of NaN and infinities."""
    bits: str
    """Digest of its kind and bits."""
    elements: int
    epsilon: float
    """Machine epsilon of its dtype; 0 if it is not floating."""
    norm: float
    """Root of the sum of squares of its finite elements, in float64; 0 if it is not floating."""
    projections: tuple[float, ...]
    """Weighted sums of its finite elements, in float64, which differ between two tensors by about as much as these
    do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The fingerprint of a measured step: its outputs, gradients, buffers, state and generators."""

    tensors: tuple[TensorPrint, ...]
    put_off: tuple[str, ...]
    """Outputs whose values were not computed."""
    repeats: bool
    """Whether another step of the same plan, from the same state and seed, left the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherCheck:
    """A step after the recorded one, varied in one way, and compared in the same way."""

    name: str
    """End of a sentence: ``in eval mode``."""
    batch: int
    compared: int = 0
    """Number of tensors compared."""
    not_tried: str = ""
    """Reason why it was left out, such as a failure of the original, or long steps; empty if it was tried."""
    skipped: bool = False
    """Whether it was left out although the original might succeed: for time or memory, or because it cannot be
    copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintCheck:
    """The comparison of the measured steps with the plan and without, by fingerprints, at the size asked for."""

    batch: int
    dims: dict[str, int]
    """Sizes of other symbols."""
    compared: int
    """Number of tensors compared."""
    equal: int
    """Number of tensors equal to the bit."""
    tolerance: float
    """Allowed difference, relative to the norm, of the tensor that differed most beside its own allowance."""
    worst_name: str
    """Name of that tensor; empty if none differed."""
    worst_difference: float
    """Its distance from the original's, divided by the norm of that, by projections."""
    by_rounding: bool = False
    """Whether ``tolerance`` comes from rounding: up to ten times the change of the original's own step where every
    parameter is rounded differently, capped; otherwise it is half of the digits."""

    @property
    def sizes(self) -> str:
        """Sizes in words: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of the optimized model with the original on the same inputs."""

    passed: bool
    exact: bool
    """Whether equality to the bit was required (a plan without chunks), and not ``tolerance`` (relative)."""
    precision: str
    """Precision of the comparison, as in ``--precision``; ``fp64`` with chunks."""
    tolerance: float
    compared: int
    """Number of tensors compared: outputs, gradients, buffers, state."""
    worst_name: str
    """Name of the tensor that differed most; empty if none differed."""
    worst_difference: float
    """Largest difference relative to the largest magnitude of the original tensor."""
    batch: int
    """Batch size the comparison ran at."""
    full_size: bool
    """Whether ``batch`` and ``dims`` are the sizes that were asked for."""
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols that the comparison ran at."""
    measured: FingerprintCheck | None = None
    """Comparison of the measured steps, which agree; ``None`` where none were compared, or they did not."""
    detail: str = ""
    """Error of the step with the plan, where the original raises none; empty if there is none."""
    inexact: tuple[str, ...] = ()
    """Segments that are inexact, as the user allowed: their batch norms were compared at fixed statistics."""
    further: tuple[FurtherCheck, ...] = ()
    """Checks of further steps; empty if the recorded step differed, or was all that was asked for."""
    whole: bool = False
    """Whether a segment with chunks ran whole, because of something that its first chunk did."""
    differs_in: str = ""
    """Name of the further check that failed; empty if the recorded step itself did, or none."""

    @property
    def is_to_the_bit(self) -> bool:
        """Whether all tensors, those of the measured steps included, have the same bits."""
        return self.exact and (self.measured is None or self.measured.equal == self.measured.compared)

    @property
    def sizes(self) -> str:
        """Sizes in words: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)

    @property
    def difference(self) -> str:
        """Largest difference in words: ``output[0] differs by 0.5 in eval mode``."""
        where = f" {self.differs_in}" if self.differs_in else ""
        if self.detail:
            return f"{self.worst_name} fails{where} ({self.detail})"
        return f"{self.worst_name or 'its output'} differs by {self.worst_difference:.2g}{where}"


def _sizes_in_words(batch: int, dims: Mapping[str, int]) -> str:
    return ", ".join([f"batch {batch}", *(f"{symbol}={size}" for symbol, size in dims.items())])

"""The results of verification: comparisons of the step under a plan with the original's, and fingerprints of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TOLERANCE: Final = 1e-9
"""Two steps are equal if they differ by at most this, relatively, in float64."""
NOT_FINITE: Final = "not finite"
"""Part of :attr:`TensorPrint.kind` for a tensor that holds NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrint:
    """The fingerprint of a tensor that a step left."""

    name: str
    kind: str
    """Dtype, shape and layout, with digests of the positions of a sparse tensor's values, and of NaN and infinities."""
    bits: str
    """Digest of the tensor's kind and bits."""
    elements: int
    epsilon: float
    """Machine epsilon of the dtype; 0 if the tensor is not floating."""
    norm: float
    """Root of the sum of squares of the finite elements, in float64; 0 if the tensor is not floating."""
    projections: tuple[float, ...]
    """Weighted sums of the finite elements, in float64: for two tensors about as far apart as the tensors are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The fingerprint of a measured step: its outputs, gradients, buffers, state and generators."""

    tensors: tuple[TensorPrint, ...]
    put_off: tuple[str, ...]
    """Names of outputs without computed values, such as the outputs of chunks that run through the loss."""
    repeats: bool
    """Whether a second step of the same plan, from the same state and seed, left the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherCheck:
    """A step after the recorded one, varied in one way, and compared in the same way."""

    name: str
    """The variation, as the end of a sentence: ``in eval mode``."""
    batch: int
    compared: int = 0
    """Number of tensors compared."""
    not_tried: str = ""
    """Reason why the check was left out, such as a failure of the original, or long steps."""
    skipped: bool = False
    """Whether the check was left out to save time or memory, or because the model cannot be copied, and not because
    the original fails it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintCheck:
    """The comparison, by fingerprints, of the measured steps with the plan and without, at full size."""

    batch: int
    dims: dict[str, int]
    """Sizes of other symbols."""
    compared: int
    """Number of tensors compared."""
    equal: int
    """Number of bit-identical tensors."""
    tolerance: float
    """Allowed distance, relative to the norm, of the tensor that came nearest to its allowance or exceeded it most."""
    worst_name: str
    """Name of that tensor; empty if no tensor differed."""
    worst_difference: float
    """Distance of that tensor from the original's by projections, divided by the norm of the original's."""
    by_rounding: bool = False
    """Whether ``tolerance`` comes from rounding: up to ten times the change in the original's own step if every
    parameter is rounded up or down, with a cap.  Otherwise it is half of the digits."""

    @property
    def sizes(self) -> str:
        """Sizes as text: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of the optimized model with the original on the same inputs."""

    passed: bool
    exact: bool
    """Whether tensors had to be bit-identical, as without chunks; otherwise their distance may be ``tolerance``."""
    precision: str
    """Precision of the comparison, as in ``--precision``; ``fp64`` with chunks."""
    tolerance: float
    compared: int
    """Number of tensors compared: outputs, gradients, buffers, state."""
    worst_name: str
    """Name of the tensor that differed most; empty if no tensor differed."""
    worst_difference: float
    """Largest difference relative to the largest magnitude of the original tensor."""
    batch: int
    """Batch size the comparison ran at."""
    full_size: bool
    """Whether ``batch`` and ``dims`` are the sizes that the inputs describe."""
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols that the comparison ran at."""
    measured: FingerprintCheck | None = None
    """Comparison of the measured steps, if they agree; ``None`` if they do not, or were not compared."""
    rounding: float = 0.0
    """Distance of a tensor of the measured steps from the original's, relative to its norm, if it is more than half of
    the digits, such as after a flipped spike; 0 if it is not, or the steps were not compared as they were measured."""
    in_bfloat16: bool = False
    """Whether a gradient of the measured steps, and so its parameter, is of bfloat16, which has two to three digits."""
    detail: str = ""
    """Error of the step with the plan, where the original raises none; empty if there is none."""
    inexact: tuple[str, ...] = ()
    """Segments that are inexact, as the user allowed: their batch norms were compared at fixed statistics."""
    further: tuple[FurtherCheck, ...] = ()
    """Checks of further steps; empty if the recorded step differed, or if only that was to be compared."""
    whole: bool = False
    """Whether a segment with chunks ran whole, since its first chunk did something that chunks must not do."""
    differs_in: str = ""
    """Name of the further check that failed; empty if all passed, or if the recorded step itself differed."""

    @property
    def is_bit_exact(self) -> bool:
        """Whether all tensors have the same bits, in the measured steps as well."""
        return self.exact and (self.measured is None or self.measured.equal == self.measured.compared)

    @property
    def sizes(self) -> str:
        """Sizes as text: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)

    @property
    def difference(self) -> str:
        """Largest difference as text: ``output[0] differs by 0.5 in eval mode``."""
        place = f" {self.differs_in}" if self.differs_in else ""
        if self.detail:
            return f"{self.worst_name} fails{place} ({self.detail})"
        return f"{self.worst_name or 'its output'} differs by {self.worst_difference:.2g}{place}"


def _sizes_in_words(batch: int, dims: Mapping[str, int]) -> str:
    return ", ".join([f"batch {batch}", *(f"{symbol}={size}" for symbol, size in dims.items())])

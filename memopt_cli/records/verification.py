"""The optimized model against the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

NOT_FINITE: Final = "not finite"
"""In the kind of a tensor that is so in some place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPrint:
    """What tells a tensor that a step left from another one, in its place."""

    name: str
    kind: str
    """Its dtype, shape and layout; digests of where a sparse one has values, and of where what is not finite is."""
    bits: str
    """A digest of its kind and bits."""
    elements: int
    epsilon: float
    """Of its dtype; 0 of one that is not floating."""
    norm: float
    """The root of the sum of squares, in float64, of what is finite; 0 of one that is not floating."""
    projections: tuple[float, ...]
    """Weighted sums of its finite elements, in float64: those of two tensors differ as far as these do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Of a measured step: its outputs, gradients of parameters, buffers, state and generators."""

    tensors: tuple[TensorPrint, ...]
    put_off: tuple[str, ...]
    """Outputs whose values were not computed."""
    repeats: bool
    """Another step of the same plan, from the same state and seed, left the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherCheck:
    """A step after the recorded one, varied in one way, and compared as that was."""

    name: str
    """As it ends a sentence: ``in eval mode``."""
    batch: int
    compared: int = 0
    """Number of tensors compared."""
    not_tried: str = ""
    """Why it was left out: what the original cannot do, or that its steps are long; empty if it was tried."""
    skipped: bool = False
    """It was left out though the original may be able to: for its time or memory, or no second model could be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintCheck:
    """The measured step with the plan against that of the original, by their fingerprints, at the size asked for."""

    batch: int
    dims: dict[str, int]
    """Sizes of other symbols."""
    compared: int
    """Number of tensors."""
    equal: int
    """Of these, the same to the bit."""
    tolerance: float
    """Relative to the norm; what was allowed to the tensor that differed most for what it may."""
    worst_name: str
    """That tensor; empty if none differed."""
    worst_difference: float
    """Its distance from that of the original, over the norm of that, as projections tell it."""
    by_rounding: bool = False
    """``tolerance`` is not half of the digits, but ten times what the original's own step changes where every parameter
    is rounded otherwise, or the most that this allows.
    """

    @property
    def sizes(self) -> str:
        """In words: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The optimized model against the original on the same inputs."""

    passed: bool
    exact: bool
    """Compared bit for bit (a plan without chunks) or within ``tolerance`` (relative)."""
    precision: str
    """``--precision`` of the comparison; ``fp64`` with chunks."""
    tolerance: float
    compared: int
    """Number of tensors compared: outputs, gradients, buffers, state."""
    worst_name: str
    """The tensor that differed most; empty if none differed."""
    worst_difference: float
    """Largest difference relative to the largest magnitude of the original tensor."""
    batch: int
    """Batch size the comparison ran at."""
    full_size: bool
    """``batch`` and ``dims`` are the sizes that were asked for."""
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols that the comparison ran at."""
    measured: FingerprintCheck | None = None
    """The measured steps, which agree; ``None`` where none were compared, or they did not."""
    detail: str = ""
    """What the step with the plan raised, where the original raises nothing."""
    inexact: tuple[str, ...] = ()
    """Segments that are not exact, as asked for: their batch norms were compared at fixed statistics."""
    further: tuple[FurtherCheck, ...] = ()
    """What follows the recorded step; none where that differed, or was all that was asked for."""
    whole: bool = False
    """A segment that is to run in chunks ran whole, because of what the first of them did."""
    differs_in: str = ""
    """The name of the further check that failed; empty if the recorded step itself did, or none."""

    @property
    def sizes(self) -> str:
        """Those of the comparison, in words: ``batch 8, S=256``."""
        return _sizes_in_words(self.batch, self.dims)

    @property
    def difference(self) -> str:
        """What differed most, and where: ``output[0] differs by 0.5 in eval mode``."""
        where = f" {self.differs_in}" if self.differs_in else ""
        if self.detail:
            return f"{self.worst_name} fails{where} ({self.detail})"
        return f"{self.worst_name or 'its output'} differs by {self.worst_difference:.2g}{where}"


def _sizes_in_words(batch: int, dims: Mapping[str, int]) -> str:
    return ", ".join([f"batch {batch}", *(f"{symbol}={size}" for symbol, size in dims.items())])

"""What to do at each module of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

CompressorName = Literal["null", "boolean", "uint8", "bit", "sparse", "two-valued", "index", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """How a module is cut into chunks that compute the same as the whole."""

    axis: int = 0
    """Dimension of inputs and outputs along which the chunks are cut."""
    seq_inputs: int = 1
    """How many leading positional arguments are cut; later ones are states, or passed whole."""
    seq_outputs: int = 1
    """How many leading outputs are concatenated; later ones are states that the next chunk receives."""
    batch_statistics: bool = False
    """A first pass over the chunks gathers the statistics that batch norms inside normalize by."""
    inexact: bool = False
    """Batch norms inside normalize each by its chunk's own statistics.  Not what the whole computes: it must be asked
    for."""

    def applied(self, segment: SegmentPlan, chunks: int) -> SegmentPlan:
        """The segment in so many chunks, cut by this rule."""
        return replace(segment, chunks=chunks, **{f.name: getattr(self, f.name) for f in fields(ChunkRule)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan(ChunkRule):
    """What to do at one module: make it a segment, perhaps run in chunks.

    :class:`memopt_cli.runtime.SegmentConfig` has these fields once more: see there.
    """

    path: str
    """Module path as in ``named_modules``; empty for the root."""
    compressor: CompressorName = "null"
    """Codec of the stored input tensors; ``own`` is the module's ``x_compressor``."""
    chunks: int = 1
    """Number of chunks; 1 means the whole input at once, and that the rule is none."""
    spatial_split: bool = False
    """Each module that ``__spatial_split__`` returns is a segment of its own."""
    keep: tuple[str, ...] = ()
    """Operators, by the names of :attr:`OpTrace.name`, whose outputs are kept (``aten::convolution#2``: of the second
    call that the segment makes outside of segments in it); all others are recomputed."""
    through_loss: bool = False
    """Of chunks of a linear layer: each runs on through the cross-entropy that its output goes to, to its gradients;
    neither the whole output nor the gradient of it ever exists."""
    recompute_states: bool = False
    """Of chunks: the states that the module hands from one to the next in its attributes are recomputed, not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Module path -> what to do there."""

    segments: tuple[SegmentPlan, ...] = ()
    """In the order of first call."""
    packed: bool = False
    """What is saved for backward outside of segments is packed where that is lossless; nothing is run again for it."""
    in_backward: bool = False
    """The optimizer steps each parameter as soon as its gradient is whole, which is then freed."""

    @property
    def is_empty(self) -> bool:
        """The model stays as it is, and so does its optimizer."""
        return not self.segments and not self.packed and not self.in_backward

    @property
    def of_model(self) -> Plan:
        """What of it is done to the model, whatever the optimizer does."""
        return replace(self, in_backward=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A module cannot run in chunks, and why."""

    reason: str

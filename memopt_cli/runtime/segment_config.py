"""How a segment runs, and by what a module is known to be one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """How a segment runs: what an entry of a plan says of it, by the same names.

    A record of the runtime's own, beside the plan's (``memopt_cli.records.SegmentPlan``): a saved model holds these
    fields by name and is loaded with nothing but torch and this folder, and a plan is read without torch.
    """

    compressor: str = "null"
    """Name of the codec of the stored input tensors, a key of :data:`~memopt_cli.runtime.compressor.COMPRESSORS`, or
    ``own``: the module's ``x_compressor``."""
    chunks: int = 1
    """Number of chunks forward is cut into; 1 is the whole input."""
    axis: int = 0
    """Dimension along which the chunks are cut; a negative one counts from the last."""
    seq_inputs: int = 1
    """How many leading positional arguments are cut; the following ones are states, or passed whole."""
    seq_outputs: int = 1
    """How many leading outputs are concatenated; the following ones are states for the next chunk."""
    spatial_split: bool = False
    """Each module that ``__spatial_split__`` returns is checkpointed on its own."""
    recompute: bool = True
    """If not, what is saved inside is packed instead, outside of segments that lie in it."""
    keep: tuple[str, ...] = ()
    """Operators whose outputs are kept, not recomputed: ``aten::convolution``, or ``aten::convolution#2`` for those of
    the second call alone.  Those in segments that lie within are these segments' own business, and are not counted.
    Under ``torch.compile`` all are recomputed."""
    batch_statistics: bool = False
    """Of chunks: batch norms inside normalize by the statistics of all chunks, which are gathered first."""
    through_loss: bool = False
    """Of chunks of a linear layer: they run on through the cross-entropy of its output, which never exists whole."""
    inexact: bool = False
    """Of chunks: batch norms inside normalize by those of each chunk, which is known and wanted."""
    recompute_states: bool = False
    """Of chunks: what the module hands from one to the next in its attributes is made again in backward.  In another
    segment, whose recomputation makes it again, and under ``torch.compile`` this is nothing."""
    path: str = field(default="", compare=False)
    """Where it is in the plan: messages name it so."""


class Installed:
    """Base of the mixins that memopt puts on modules."""

    _original: ClassVar[type[nn.Module]]

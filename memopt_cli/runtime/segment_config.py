"""The settings of a segment, and the base class that marks a module as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from memopt_cli.runtime.places.interface import PlaceName


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """The settings of a segment, under the names that they have in an entry of a plan.

    The runtime has its own record, apart from the plan's (``memopt_cli.records.SegmentPlan``): a saved model holds
    these fields by name and is loaded with nothing but torch and this folder, and a plan is read without torch.
    """

    compressor: str = "null"
    """Name of the compressor of the stored input tensors, a key of :data:`~memopt_cli.runtime.compressor.COMPRESSORS`,
    or ``own``: the module's ``x_compressor``."""
    chunks: int = 1
    """Number of chunks forward is cut into; 1 is the whole input."""
    axis: int = 0
    """Dimension along which the chunks are cut; a negative one counts from the last."""
    seq_inputs: int = 1
    """Number of leading positional arguments that are cut; later arguments are states, or passed whole."""
    seq_outputs: int = 1
    """Number of leading outputs that are concatenated; later outputs are states for the next chunk."""
    spatial_split: bool = False
    """Whether each module that ``__spatial_split__`` returns is checkpointed on its own."""
    recompute: bool = True
    """Whether the module is recomputed; if not, tensors saved in it, outside inner segments, are packed."""
    keep: tuple[str, ...] = ()
    """Operators whose outputs are kept, not recomputed: ``aten::convolution``, or ``aten::convolution#2`` for the
    outputs of the second call only.  Calls in other segments inside this one are not counted.  Under
    ``torch.compile`` all outputs are recomputed."""
    batch_statistics: bool = False
    """Whether batch norms in chunks normalize by the statistics of all chunks, which are gathered first."""
    through_loss: bool = False
    """Whether the chunks of a linear layer run on through the cross-entropy of its output, which never exists whole."""
    inexact: bool = False
    """Whether batch norms in chunks may normalize by the statistics of their own chunk, which changes the result."""
    place: PlaceName = "device"
    """Name of the place where its stored inputs and kept outputs wait, one of
    :data:`~memopt_cli.runtime.places.interface.PLACES`; if it is not recomputed, where its saved tensors wait."""
    packs: bool = True
    """Whether saved tensors are packed, if it is not recomputed; if not, they are only sent to their place."""
    recompute_states: bool = False
    """Whether the states that chunks pass on in attributes are recomputed in backward.  It has no effect inside another
    segment, whose recomputation includes them, and under ``torch.compile``."""
    compared: str = field(default="", compare=False)
    """The chunks that ``optimize`` compared with the whole, as :func:`describe_chunks` describes them; empty if it did
    not.  The first forward on such chunks needs no trial in full size, which takes more memory than the plan's peak."""
    path: str = field(default="", compare=False)
    """The path in the plan, the segment's name in messages."""


def describe_chunks(chunks: int, axis: int, shape: Sequence[int]) -> str:
    """Describe ``chunks`` along ``axis`` of an input of ``shape``, such as ``2 along axis 0 of 16x64x64``."""
    return f"{chunks} along axis {axis} of {'x'.join(map(str, shape))}"


class Installed:
    """Base of the mixins that memopt puts on modules."""

    _original: ClassVar[type[nn.Module]]

"""What to do at each module of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from memopt_cli.errors import UsageError

MOST_RANGES = 100
"""Of a plan by length: each is measured by itself."""

CompressorName = Literal["null", "boolean", "uint8", "bit", "sparse", "two-valued", "index", "parts", "own"]


MOST_NORMS = 2
"""Batch norms in a module that is worth running in chunks: each costs one more pass over them, there and back."""


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
    """For each batch norm inside, a pass over the chunks first gathers the statistics that it normalizes by."""
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

    @property
    def gathers(self) -> bool:
        """Whether its chunks gather the statistics of the whole batch."""
        return self.batch_statistics and self.chunks > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDimension:
    """A dimension of an input of the model, whose size may differ from step to step.

    Raises :class:`UsageError` for a position that is none, and without a symbol.
    """

    dim: str
    """Its symbol, ``S``."""
    argument: int | str
    """Of the model's forward: position from 0, or name."""
    axis: int
    """Of the tensor that is given there; a negative one counts from the last."""

    def __post_init__(self) -> None:
        if isinstance(self.argument, int) and self.argument < 0:
            raise UsageError(f"the argument {self.argument} is no position", hint="Positions count from 0.")
        if not self.dim.strip():
            raise UsageError("the dimension has no symbol", hint="Write for example dim: S.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRange:
    """What to do at each module while a dimension is no larger than a bound, and larger than that of the range before.

    Its fields are those of a :class:`Plan`.
    """

    up_to: int
    """The largest size."""
    segments: tuple[SegmentPlan, ...] = ()
    packed: bool = False

    @property
    def plan(self) -> Plan:
        """The same for a step of that size."""
        return Plan(segments=self.segments, packed=self.packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Module path -> what to do there.

    Raises :class:`UsageError` for ranges that do not ascend, of no dimension, or beside segments for every size.
    """

    segments: tuple[SegmentPlan, ...] = ()
    """In the order of first call."""
    packed: bool = False
    """What is saved for backward outside of segments is packed where that is lossless; nothing is run again for it."""
    in_backward: bool = False
    """The optimizer steps each parameter as soon as its gradient is whole, which is then freed."""
    by: InputDimension | None = None
    """Whose size says which of the ranges is meant; the model's root looks at it in every forward."""
    ranges: tuple[PlanRange, ...] = ()
    """From the shortest to the longest; the last one is meant beyond its bound, too."""

    def __post_init__(self) -> None:
        if (self.by is None) != (not self.ranges):
            raise UsageError("a plan has ranges, and says by which dimension, or neither", hint=_BY)
        if self.ranges and (self.segments or self.packed):
            raise UsageError("a plan has ranges, or segments for inputs of any size, not both", hint=_BY)
        bounds = [part.up_to for part in self.ranges]
        if len(bounds) > MOST_RANGES:
            raise UsageError(f"a plan has {len(bounds)} ranges, and no more than {MOST_RANGES} are measured", hint=_BY)
        if bounds != sorted(set(bounds)) or min(bounds, default=1) < 1:
            raise UsageError(f"the bounds of ranges must ascend from 1, not {', '.join(map(str, bounds))}", hint=_BY)

    @property
    def is_empty(self) -> bool:
        """The model stays as it is, and so does its optimizer."""
        return not self.everywhere and not self.packs and not self.in_backward

    def at(self, sizes: Mapping[str, int]) -> Plan:
        """Of one by length, what is done while dimensions have these sizes, the longest if its is not told."""
        size = sizes.get(self.by.dim) if self.by is not None else None
        if size is None:
            return self.longest
        return next((part.plan for part in self.ranges if size <= part.up_to), self.longest)

    @property
    def longest(self) -> Plan:
        """Of one by length, what is done at the longest; else all of it."""
        return self.ranges[-1].plan if self.ranges else self

    @property
    def everywhere(self) -> tuple[SegmentPlan, ...]:
        """The segments, of all ranges."""
        return (*self.segments, *(segment for part in self.ranges for segment in part.segments))

    @property
    def has_chunks(self) -> bool:
        """Whether a segment runs in chunks, in any range."""
        return any(segment.chunks > 1 for segment in self.everywhere)

    @property
    def packs(self) -> bool:
        """Whether anything is packed outside of segments, in any range."""
        return self.packed or any(part.packed for part in self.ranges)

    @property
    def of_model(self) -> Plan:
        """What of it is done to the model, whatever the optimizer does."""
        return replace(self, in_backward=False)


_BY = "Write for example by: {dim: S, argument: input_ids, axis: 1} and ranges: [{up_to: 512}, {up_to: 2048, …}]."


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A module cannot run in chunks, and why."""

    reason: str

"""Plans: which modules of a model become segments, how each stores its inputs and runs in chunks, and where they wait.

The fields of these classes are the keys of ``*.plan.yaml`` files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, cast

from memopt_cli.errors import UsageError
from memopt_cli.text.spelling import with_python_spelling

MAX_RANGES = 100
"""Maximum number of ranges of a plan by length; each is measured by itself."""

CompressorName = Literal["null", "boolean", "uint8", "bit", "sparse", "two-valued", "index", "parts", "own"]
"""Name of a compressor: a key of ``COMPRESSORS`` in ``runtime/compressor.py``, or ``own``."""
PlaceName = Literal["device", "host", "disk"]
"""Place where stored tensors wait for backward: on the device, in host memory, or in a file."""

CHANGES_NOTHING: Final = "The plan changes nothing: it has no segments, and packs, sends and compiles nothing."
"""Warning for an empty plan that is put on a model."""
MAX_NORMS = 2
"""Maximum number of batch norms in a module that runs in chunks: each costs another pass over all chunks, in forward
and in backward."""
BUDGETED: Final = ("inductor", "aot_eager", "aot_eager_decomp_partition")
"""Backends of ``torch.compile`` that respect ``activation_memory_budget``: PyTorch's partitioner reads it."""
_RANGES_HINT = "For example: by: {dim: S, argument: input_ids, axis: 1} and ranges: [{up_to: 512}, {up_to: 2048, …}]."


class _ShortRepr:
    """Prints a record without the fields that have their default: ``Plan(packed=True)``."""

    __slots__ = ()

    def __repr__(self) -> str:
        changed = [f for f in fields(cast(Any, self)) if f.default is MISSING or getattr(self, f.name) != f.default]
        changed.sort(key=lambda f: f.default is not MISSING)  # the path of a segment comes first
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChunkRule(_ShortRepr):
    """How to cut the inputs of a module into chunks, so that running them one by one computes the same as the whole."""

    axis: int = 0
    """Dimension along which the first ``seq_inputs`` inputs are cut, and the first ``seq_outputs`` outputs joined."""
    seq_inputs: int = 1
    """Number of leading positional arguments that are cut; later arguments are states, or passed whole."""
    seq_outputs: int = 1
    """Number of leading outputs that are concatenated; later outputs are states that the next chunk receives."""
    batch_statistics: bool = False
    """Whether passes over the chunks first gather, for each batch norm inside, the statistics of the whole batch."""
    inexact: bool = False
    """Whether batch norms inside normalize by the statistics of each chunk, which changes the result and is done only
    on request."""

    def applied(self, segment: SegmentPlan, chunks: int) -> SegmentPlan:
        """Return ``segment`` in ``chunks`` chunks, cut by this rule."""
        return replace(segment, chunks=chunks, **{f.name: getattr(self, f.name) for f in fields(ChunkRule)})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SegmentPlan(ChunkRule):
    """An entry of a plan, which makes one module a segment, perhaps run in chunks.

    ``memopt_cli.runtime.SegmentConfig`` has the same fields, since the runtime imports nothing from here.
    """

    path: str
    """Module path as in ``named_modules``; empty for the root."""
    compressor: CompressorName = "null"
    """Compressor of the stored input tensors; ``own`` is the module's ``x_compressor``."""
    chunks: int = 1
    """Number of chunks; with 1 the input runs whole, and the fields of :class:`ChunkRule` have no effect."""
    spatial_split: bool = False
    """Whether each module that ``__spatial_split__`` returns is a separate segment."""
    keep: tuple[str, ...] = ()
    """Operators whose outputs are kept, by :attr:`OpTrace.name`; all others are recomputed.  ``aten::convolution#2`` is
    the second such call in the segment, not counting calls in inner segments."""
    place: PlaceName = "device"
    """Place where the segment's stored inputs, packed, and kept outputs wait for backward."""
    through_loss: bool = False
    """Whether each chunk of a linear layer runs on through the following cross-entropy to its gradients, so that
    neither the whole output nor its gradient ever exists."""
    recompute_states: bool = False
    """Whether states that one chunk passes to the next in attributes are recomputed instead of held."""
    compared: str = field(default="", compare=False)
    """Chunks that ``optimize`` compared with the whole, such as ``2 along axis 0 of 16x64x64``; empty if it did not."""

    @property
    def gathers(self) -> bool:
        """Whether the segment's chunks gather the statistics of the whole batch."""
        return self.batch_statistics and self.chunks > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDimension:
    """A dimension of inputs of the model, whose size may differ from step to step.

    Raises :class:`UsageError` for a negative position, for an empty symbol, and unless each argument has an axis.
    """

    dim: str
    """Symbol of the dimension, ``S``."""
    argument: int | str | tuple[int | str, ...]
    """Argument of the model's forward, as a position from 0 or a name; of several arguments, one for each axis."""
    axis: int | tuple[int, ...]
    """Axis of that argument, negative from the end; one for each of several arguments, whose largest size counts."""

    def __post_init__(self) -> None:
        arguments = self.argument if isinstance(self.argument, tuple) else (self.argument,)
        for argument in arguments:
            if isinstance(argument, int) and argument < 0:
                raise UsageError(
                    f"argument: {argument} is negative", hint="Use a position from 0, or the argument's name."
                )
        if isinstance(self.argument, tuple) and (
            not isinstance(self.axis, tuple) or not 0 < len(arguments) == len(self.axis)
        ):
            raise UsageError(
                "by: a list of arguments needs a list of as many axes",
                hint="For example: argument: [source, target], axis: [1, 1].",
            )
        if not self.dim.strip():
            raise UsageError("the dimension has no symbol", hint="For example: dim: S.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanRange(_ShortRepr):
    """The plan for a range of sizes of one dimension: above the bound of the range before, and up to its own.

    The other fields are as in a :class:`Plan`.
    """

    up_to: int
    """Largest size in the range."""
    segments: tuple[SegmentPlan, ...] = ()
    packed: bool = False
    place: PlaceName = "device"

    @property
    def plan(self) -> Plan:
        """Plan for a step of a size in the range."""
        return Plan(segments=self.segments, packed=self.packed, place=self.place)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompilePlan(_ShortRepr):
    """The settings of ``torch.compile`` for the model as a whole.

    Raises :class:`UsageError` for a memory budget outside 0 to 1, or that the backend does not read, and for a mode
    of any backend but inductor.
    """

    backend: str
    """Backend: ``inductor``, ``aot_eager`` or another that PyTorch knows by name."""
    mode: str | None = None
    """Mode of inductor, such as ``max-autotune``; ``None`` for its default."""
    activation_memory_budget: float | None = None
    """PyTorch's memory budget: share, 0 to 1, of the bytes saved for backward that may stay (the rest is recomputed);
    ``None`` for the process's setting, 1 unless it was changed."""

    def __post_init__(self) -> None:
        budget = self.activation_memory_budget
        if budget is not None and not 0 <= budget <= 1:
            raise UsageError(
                f"the activation_memory_budget is {budget:g}; it must be from 0 to 1",
                hint="1 keeps all that PyTorch saves for backward; leave it out for the default.",
            )
        if budget is not None and self.backend not in BUDGETED:
            raise UsageError(
                f"the backend {self.backend} does not read activation_memory_budget",
                hint=f"Leave it out, or take {BUDGETED[0]}.",
            )
        if self.mode is not None and self.backend != "inductor":
            raise UsageError(f"the backend {self.backend} has no modes", hint="Leave mode out, or take inductor.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(_ShortRepr):
    """Module path -> what to do there.

    Raises ``UsageError`` for ranges that do not ascend, have no dimension, or are given together with segments for
    every size or with ``compile``.
    """

    segments: tuple[SegmentPlan, ...] = ()
    """Segments in the order of first call."""
    packed: bool = False
    """Whether tensors saved for backward outside segments are packed where that is lossless."""
    place: PlaceName = "device"
    """Place where tensors saved for backward outside segments wait, packed if :attr:`packed`."""
    in_backward: bool = False
    """Whether the optimizer updates each parameter, and frees its gradient, as soon as the gradient is complete."""
    by: InputDimension | None = None
    """Dimension whose size selects the range, in every forward; ``None`` for a plan without ranges."""
    ranges: tuple[PlanRange, ...] = ()
    """Ranges from the shortest to the longest; the last one also acts beyond its bound."""
    compile: CompilePlan | None = None
    """Settings of ``torch.compile``, which compiles the model with its segments; ``None`` if it is not compiled."""

    def __post_init__(self) -> None:
        if (self.by is None) != (not self.ranges):
            fault = "ranges, but no 'by', the dimension that they divide" if self.ranges else "'by', but no ranges"
            raise UsageError(f"the plan has {fault}", hint=_RANGES_HINT)
        if self.ranges and (self.segments or self.packed or self.place != "device"):
            raise UsageError(
                "a plan has ranges, and in addition segments, packed or place for inputs of any size",
                hint="Move segments, packed and place into the ranges.",
            )
        if self.ranges and self.compile is not None:
            raise UsageError(
                "a plan with ranges cannot compile the model: every length would be compiled again",
                hint="Leave compile out, or write a plan for one length.",
            )
        bounds = [part.up_to for part in self.ranges]
        if len(bounds) > MAX_RANGES:
            raise UsageError(
                f"a plan has {len(bounds)} ranges; memopt measures at most {MAX_RANGES}", hint="Join some of them."
            )
        if bounds != sorted(set(bounds)) or min(bounds, default=1) < 1:
            raise UsageError(
                f"the bounds of ranges must ascend from 1, not {', '.join(map(str, bounds))}", hint=_RANGES_HINT
            )

    def __bool__(self) -> bool:
        """Return whether the plan changes something, so that ``if plan_of(model):`` is false for an empty plan."""
        return not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether the model and its optimizer stay as they are."""
        return (
            not self.everywhere and not self.packs and not self.sends and not self.in_backward and self.compile is None
        )

    def at(self, sizes: Mapping[str, int]) -> Plan:
        """Return the plan for ``sizes`` of dimensions; without the plan's dimension, the plan of the longest range."""
        size = sizes.get(self.by.dim) if self.by is not None else None
        if size is None:
            return self.longest
        return next((part.plan for part in self.ranges if size <= part.up_to), self.longest)

    @property
    def longest(self) -> Plan:
        """Plan of the longest range; the plan itself if it has no ranges."""
        return self.ranges[-1].plan if self.ranges else self

    @property
    def everywhere(self) -> tuple[SegmentPlan, ...]:
        """Segments of all ranges."""
        return (*self.segments, *(segment for part in self.ranges for segment in part.segments))

    @property
    def has_chunks(self) -> bool:
        """Whether a segment runs in chunks, in any range."""
        return any(segment.chunks > 1 for segment in self.everywhere)

    @property
    def packs(self) -> bool:
        """Whether anything is packed outside segments, in any range."""
        return self.packed or any(part.packed for part in self.ranges)

    @property
    def sends(self) -> bool:
        """Whether anything waits elsewhere than on the device, in any range."""
        outside = (self.place, *(part.place for part in self.ranges))
        return any(place != "device" for place in (*outside, *(segment.place for segment in self.everywhere)))

    @property
    def of_model(self) -> Plan:
        """Plan without its part for the optimizer."""
        return replace(self, in_backward=False)

    @property
    def eager(self) -> Plan:
        """Plan without compiling."""
        return replace(self, compile=None)

    @with_python_spelling
    def save(self, output: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save the plan to ``output``, which ``apply_plan``, ``read_plan`` and ``memopt apply`` read.

        ``force``: replace a file that is there.  Raises ``UsageError`` for a file that may not be replaced, and for a
        plan too large to be read again, and ``WriteError`` for a folder or a disk that cannot be written to.
        """
        from memopt_cli.records.plan_file import save_plan  # it imports this file

        save_plan(self, Path(output), force=force)

    def require_eager(self, reason: str) -> Plan:
        """Return the plan.  Raises ``UsageError`` for ``reason`` if the plan compiles the model."""
        if self.compile is not None:
            raise UsageError(
                f"the plan compiles the model ({self.compile.backend}), and {reason}",
                hint="Leave compile out of the plan.",
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer that a module cannot run in chunks, and why."""

    reason: str

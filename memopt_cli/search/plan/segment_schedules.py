"""Segments that a plan may put on a block, whole or in chunks, packed or not; each is priced as a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from memopt_cli.records import ChunkRule, SegmentPlan
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.search.plan.cost_model import chunk_counts, cut_by, longest_share
from memopt_cli.search.plan.keeping import candidate_sets, keep_names, names_single_calls
from memopt_cli.search.plan.replay import chunk_state_bytes
from memopt_cli.search.plan.schedules import NO_COUNTS, Counts, Schedule, SegmentLimits, add_counts, count_cuts

SharedPermissions = tuple[bool, bool, int, bool, SegmentLimits]
"""Permissions that are equal for all blocks: see :attr:`PlanPermissions.shared`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPermissions:
    """Permissions of a search: what a plan may do."""

    targets: Callable[[str], bool] = lambda path: True
    """Returns whether the module at a path may be a segment."""
    chunkable: Callable[[str], bool] = lambda path: True
    """Returns whether the module at a path may be tried in chunks."""
    nested: bool = True
    """Whether segments may lie in other segments."""
    compress: bool = True
    chunks: Mapping[str, tuple[ChunkRule, int]] = field(default_factory=dict)
    """Path -> the rule for running the module there in chunks, and the length of the axis that is cut."""
    may_cut: bool = True
    """Whether more modules may be tried in chunks."""
    chunk_factor: int = 2
    """Factor between numbers of chunks: 2, 4, 8 …"""
    packed: bool = False
    """Whether tensors that autograd saves outside segments are packed."""
    keep: bool = True
    """Whether outermost segments may keep the outputs of costly calls."""
    limits: SegmentLimits = field(default_factory=SegmentLimits)

    @property
    def shared(self) -> SharedPermissions:
        """Permissions that apply to all blocks; other permissions are part of a block's kind or context."""
        return self.nested, self.compress, self.chunk_factor, self.keep, self.limits


@dataclass(frozen=True, slots=True)
class Context:
    """Segments and packing around a block, on which its schedules depend."""

    packed: bool = False
    """Whether the block lies in no segment, and tensors that autograd saves there are packed."""
    recomputed: bool = False
    """Whether the block lies in a segment."""
    kept: frozenset[int] = frozenset()
    """Indices of the costly calls in the block whose outputs the innermost segment around them keeps."""

    def narrow_to(self, block: Block) -> Context:
        """Return this context for ``block``, without kept calls outside the block."""
        return replace(self, kept=self.kept & {c.op for c in block.costly}) if self.kept else self


class Segments:
    """Makes the segments of one search."""

    def __init__(self, allowed: PlanPermissions) -> None:
        self._allowed = allowed

    def sets_to_keep(self, block: Block, context: Context) -> list[frozenset[int]]:
        """List the sets of costly calls whose outputs a segment on ``block`` may keep.

        An inner segment keeps none: the outer segment would recompute the calls all the same.
        """
        may_keep = self._allowed.keep and not context.recomputed
        return candidate_sets([c for c in block.costly if c.op < block.recomputation.stop]) if may_keep else []

    def schedules_on(
        self, block: Block, inside: Schedule, kept: frozenset[int], context: Context, *, is_counted: bool
    ) -> Iterator[Schedule]:
        """Yield schedules with a segment on ``block``, whose parts run by the schedule ``inside``.

        ``kept`` are the costly calls whose outputs the segment keeps, ``context`` the segments around the block, and
        ``is_counted`` whether the segment counts towards :attr:`SegmentLimits.segments`.
        """
        packs = self._allowed.compress and block.packed_input_bytes < block.input_bytes
        plain = SegmentPlan(path=block.path, compressor=block.compressor if packs else "null")
        if kept:
            plain = replace(plain, keep=keep_names(block.costly, kept, [s.path for s in inside.segments()]))
        peak = max(inside.peak_bytes + block.unsaved_input_bytes, block.forward_bytes + inside.held_bytes)
        unpacked = replace(plain, compressor="null") if plain.compressor == "parts" else plain
        chunked = () if names_single_calls(plain.keep) else self._in_chunks(block, plain, context)
        for segment in dict.fromkeys((plain, unpacked, *chunked)):
            if segment.batch_statistics and (kept or inside.has_segments):
                # A norm in an inner segment cannot take part in the statistics of all chunks, and each of several
                # passes over the chunks would keep its own outputs.
                continue
            packed = segment.compressor != "null"
            # During backward the packed input exists together with the unpacked one.
            packed_bytes = block.packed_input_bytes if packed else 0
            stored = inside.held_bytes + (packed_bytes if packed else block.input_bytes)
            states, _ = chunk_state_bytes(segment, block.state_bytes)
            counts = self._counts(segment, inside, is_counted=is_counted)
            if not self._allowed.limits.admit(counts):
                continue
            is_whole = segment.chunks == 1
            highest = peak + packed_bytes if is_whole else stored + self._peak_in_chunks(block, segment, peak)
            recomputation_s = block.recomputation.seconds + block.recomputation.overhead_s(segment)
            added_s = recomputation_s + inside.added_s + (block.packing_s if packed else 0.0)
            yield Schedule(
                stored + states,
                max(stored + states, highest),
                added_s,
                segment=segment,
                parts=(inside,),
                has_segments=True,
                counts=counts,
            )

    def _counts(self, segment: SegmentPlan, inside: Schedule, *, is_counted: bool) -> Counts:
        if not self._allowed.limits.are_set:
            return NO_COUNTS
        cuts = count_cuts(segment.chunks, self._allowed.chunk_factor)
        return add_counts(Counts(int(is_counted), int(inside.has_segments), cuts), inside.counts)

    def _in_chunks(self, block: Block, plain: SegmentPlan, context: Context) -> Iterator[SegmentPlan]:
        """Yield the segment ``plain`` on ``block`` in every number of chunks worth a try; none if it may not be cut."""
        if block.path not in self._allowed.chunks:
            return
        rule, length = self._allowed.chunks[block.path]
        for chunks in chunk_counts(length, self._allowed.chunk_factor):
            segment = cut_by(rule, plain, chunks, block.input_shape)
            yield segment
            if block.state_bytes and not context.recomputed:
                yield replace(segment, recompute_states=True)

    def _peak_in_chunks(self, block: Block, segment: SegmentPlan, peak_bytes: int) -> int:
        """Return the peak of ``block`` cut as in ``segment``, without its stored input; uncut it is ``peak_bytes``.

        The output and its gradient are never cut.  The peak is the largest of three sums, in the order of the code:

        - during backward: one chunk's share, and either the states or the chunks of the input's gradient, for backward
          frees states while it makes such chunks;
        - at the end of backward: the chunks of the input's gradient, and the whole gradient;
        - at the end of forward: the chunks of the output, and the whole output.
        """
        kept_bytes, backward_bytes = chunk_state_bytes(segment, block.state_bytes)
        _, length = self._allowed.chunks[block.path]
        share = int(max(0, peak_bytes - block.resident_bytes) * longest_share(segment.chunks, length))
        return block.resident_bytes + max(
            block.output_bytes + max(block.all_input_bytes, backward_bytes) + share,
            block.output_bytes + 2 * block.all_input_bytes,
            kept_bytes + 2 * block.output_bytes,
        )

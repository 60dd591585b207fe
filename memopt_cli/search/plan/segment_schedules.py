"""Segments that a plan may put on a block, each as a schedule: its bytes and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from memopt_cli.records import ChunkRule, SegmentPlan
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.search.plan.cost_model import chunk_counts, cut_by, longest_share
from memopt_cli.search.plan.keeping import choices, keep_names, numbered
from memopt_cli.search.plan.replay import chunk_state_bytes
from memopt_cli.search.plan.schedules import Limits, Schedule, Spent, cuts, together

Means = tuple[bool, bool, int, bool, Limits]
"""Permissions that are equal for all blocks: see :attr:`Allowed.means`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Permissions of a search: what a plan may do."""

    targets: Callable[[str], bool] = lambda path: True
    """Says of a path whether its module may be a segment."""
    chunkable: Callable[[str], bool] = lambda path: True
    """Says of a path whether its module may be asked to run in chunks."""
    nested: bool = True
    """Whether segments may lie in other segments."""
    compress: bool = True
    chunks: Mapping[str, tuple[ChunkRule, int]] = field(default_factory=dict)
    """Path -> how that module may run in chunks, and the length of the axis."""
    may_cut: bool = True
    """Whether more modules may be asked to run in chunks."""
    chunk_factor: int = 2
    packed: bool = False
    """Whether tensors that autograd saves outside of segments are packed."""
    keep: bool = True
    """Whether outermost segments may keep the outputs of costly calls."""
    limits: Limits = field(default_factory=Limits)

    @property
    def means(self) -> Means:
        """Permissions that decide about the schedules of a block, beside its kind and its context."""
        return self.nested, self.compress, self.chunk_factor, self.keep, self.limits


@dataclass(frozen=True, slots=True)
class Context:
    """Circumstances in which a block runs."""

    packed: bool = False
    """Whether it lies in no segment, and what autograd saves is packed."""
    recomputed: bool = False
    """Whether it lies in a segment."""
    kept: frozenset[int] = frozenset()
    """Indices of the costly calls in the block whose outputs the innermost segment around them keeps."""

    def of(self, block: Block) -> Context:
        """Return the context of ``block``, a part of this one."""
        return replace(self, kept=self.kept & {c.op for c in block.costly}) if self.kept else self


class Segments:
    """Makes the segments of one search."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed

    def keeps(self, block: Block, around: Context) -> list[frozenset[int]]:
        """List the sets of costly calls that ``block`` may keep as a segment.

        An inner segment keeps none: the outer one would run them again all the same.
        """
        may_keep = self._allowed.keep and not around.recomputed
        return choices([c for c in block.costly if c.op < block.rerun.stop]) if may_keep else []

    def around(
        self, block: Block, inside: Schedule, kept: frozenset[int], around: Context, *, counts: bool
    ) -> Iterator[Schedule]:
        """Yield the segments around ``inside``, a schedule of its parts: as a whole, and in chunks.

        ``counts`` says whether the segment counts towards :attr:`Limits.segments`.
        """
        packs = self._allowed.compress and block.packed_input_bytes < block.input_bytes
        plain = SegmentPlan(path=block.path, compressor=block.compressor if packs else "null")
        if kept:
            plain = replace(plain, keep=keep_names(block.costly, kept, [s.path for s in inside.segments()]))
        peak = max(inside.peak_bytes, block.forward_bytes + inside.held_bytes)
        unpacked = replace(plain, compressor="null") if plain.compressor == "parts" else plain
        chunked = () if numbered(plain.keep) else self._in_chunks(block, plain, around)
        for segment in dict.fromkeys((plain, unpacked, *chunked)):
            if segment.batch_statistics and (kept or inside.has_segments):
                # A norm in an inner segment cannot take part in the statistics of all chunks, and each of several
                # passes over the chunks would keep outputs of its own.
                continue
            packed = segment.compressor != "null"
            beside = block.packed_input_bytes if packed else 0  # beside the input itself, unpacked again for backward
            stored = inside.held_bytes + (beside if packed else block.input_bytes)
            states, _ = chunk_state_bytes(segment, block.state_bytes)
            spent = self._spent(segment, inside, counts=counts)
            if not self._allowed.limits.admit(spent):
                continue
            highest = peak + beside if segment.chunks == 1 else stored + self._peak_in_chunks(block, segment, peak)
            again_s = block.rerun.seconds + block.rerun.overhead_s(segment)
            added = again_s + inside.added_s + (block.packing_s if packed else 0.0)
            yield Schedule(
                stored + states,
                max(stored + states, highest),
                added,
                segment=segment,
                parts=(inside,),
                has_segments=True,
                spent=spent,
            )

    def _spent(self, segment: SegmentPlan, inside: Schedule, *, counts: bool) -> Spent:
        if not self._allowed.limits.hold:
            return ()
        own = int(counts), int(inside.has_segments), cuts(segment.chunks, self._allowed.chunk_factor)
        return together(own, inside.spent) if any(own) else inside.spent

    def _in_chunks(self, block: Block, plain: SegmentPlan, around: Context) -> Iterator[SegmentPlan]:
        if block.path not in self._allowed.chunks:
            return
        rule, length = self._allowed.chunks[block.path]
        for chunks in chunk_counts(length, self._allowed.chunk_factor):
            segment = cut_by(rule, plain, chunks, block.input_shape)
            yield segment
            if block.state_bytes and not around.recomputed:
                yield replace(segment, recompute_states=True)

    def _peak_in_chunks(self, block: Block, segment: SegmentPlan, peak_bytes: int) -> int:
        """Return the peak of ``block`` in chunks, without its input; as a whole it has ``peak_bytes``.

        Its output and the gradient of that are whole throughout.  Backward uses up the states of the chunks while it
        makes the pieces of the input's gradient; at its end the pieces and the gradient joined of them are alive
        together, as the pieces of the output and the output are at the end of forward.
        """
        between, in_backward = chunk_state_bytes(segment, block.state_bytes)
        _, length = self._allowed.chunks[block.path]
        share = int(max(0, peak_bytes - block.resident_bytes) * longest_share(segment.chunks, length))
        return block.resident_bytes + max(
            block.output_bytes + max(block.given_bytes, in_backward) + share,
            block.output_bytes + 2 * block.given_bytes,
            between + 2 * block.output_bytes,
        )

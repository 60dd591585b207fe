"""Segments that a plan may put on a block, and what each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from memopt_cli.records import ChunkRule, SegmentPlan
from memopt_cli.search.plan.block_tree import Block
from memopt_cli.search.plan.cost_model import chunk_counts, cut_by, longest_share
from memopt_cli.search.plan.keeping import choices, keep_names, numbered
from memopt_cli.search.plan.replay import chunk_state_bytes
from memopt_cli.search.plan.ways import Limits, Spent, Way, cuts, together

Means = tuple[bool, bool, int, bool, Limits]
"""See :attr:`Allowed.means`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a plan may do."""

    targets: Callable[[str], bool] = lambda path: True
    """Which modules may be segments, among those that can."""
    chunkable: Callable[[str], bool] = lambda path: True
    """Which of them may be asked whether they can run in chunks."""
    nested: bool = True
    """Whether segments may lie in others."""
    compress: bool = True
    chunks: Mapping[str, tuple[ChunkRule, int]] = field(default_factory=dict)
    """Modules that may run in chunks: how, and the length of the axis."""
    may_cut: bool = True
    """Whether others may be asked whether they can."""
    chunk_factor: int = 2
    packed: bool = False
    """What is saved outside of segments is packed."""
    keep: bool = True
    """Whether segments that lie in no other may keep the outputs of costly calls."""
    limits: Limits = field(default_factory=Limits)

    @property
    def means(self) -> Means:
        """All that the ways of a block depend on, beside what lies around it and the kind that it is of."""
        return self.nested, self.compress, self.chunk_factor, self.keep, self.limits


@dataclass(frozen=True, slots=True)
class Around:
    """Where a block lies."""

    packed: bool = False
    """In no segment, and what is saved is packed."""
    recomputed: bool = False
    """In a segment."""
    kept: frozenset[int] = frozenset()
    """Costly calls in the block, and in no segment nearer to them, whose outputs the segment keeps."""

    def of(self, block: Block) -> Around:
        """The same for a part of it."""
        return replace(self, kept=self.kept & {c.op for c in block.costly}) if self.kept else self


class Segments:
    """Of one search."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed

    def keeps(self, block: Block, around: Around) -> list[frozenset[int]]:
        """What a segment may keep: nothing where an outer one would run it again all the same."""
        may_keep = self._allowed.keep and not around.recomputed
        return choices([c for c in block.costly if c.op < block.rerun.stop]) if may_keep else []

    def around(self, block: Block, inside: Way, kept: frozenset[int], around: Around, *, counts: bool) -> Iterator[Way]:
        """A segment around a way of its inside, whole or in chunks.

        ``counts``: among the segments that lie in no other, of which there may be a limit.
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
                continue  # a norm in a segment within cannot take part; of several passes each would keep its own
            packed = segment.compressor != "null"
            beside = block.packed_input_bytes if packed else 0  # of its input, which is whole where backward needs it
            stored = inside.held_bytes + (beside if packed else block.input_bytes)
            states, _ = chunk_state_bytes(segment, block.state_bytes)
            spent = self._spent(segment, inside, counts=counts)
            if not self._allowed.limits.admit(spent):
                continue
            highest = peak + beside if segment.chunks == 1 else stored + self._peak_in_chunks(block, segment, peak)
            again_s = block.rerun.seconds + block.rerun.overhead_s(segment)
            added = again_s + inside.added_s + (block.packing_s if packed else 0.0)
            yield Way(
                stored + states,
                max(stored + states, highest),
                added,
                segment=segment,
                parts=(inside,),
                has_segments=True,
                spent=spent,
            )

    def _spent(self, segment: SegmentPlan, inside: Way, *, counts: bool) -> Spent:
        if not self._allowed.limits.hold:
            return ()
        own = int(counts), int(inside.has_segments), cuts(segment.chunks, self._allowed.chunk_factor)
        return together(own, inside.spent) if any(own) else inside.spent

    def _in_chunks(self, block: Block, plain: SegmentPlan, around: Around) -> Iterator[SegmentPlan]:
        if block.path not in self._allowed.chunks:
            return
        rule, length = self._allowed.chunks[block.path]
        for chunks in chunk_counts(length, self._allowed.chunk_factor):
            segment = cut_by(rule, plain, chunks, block.input_shape)
            yield segment
            if block.state_bytes and not around.recomputed:
                yield replace(segment, recompute_states=True)

    def _peak_in_chunks(self, block: Block, segment: SegmentPlan, peak_bytes: int) -> int:
        """Most bytes, beside its input, of a block that runs in chunks; ``peak_bytes`` are those it takes as a whole.

        Its output, and the gradient of that, are whole throughout.  In backward states are used up while the pieces of
        the input's gradient are made; in the end these stand beside the whole, as those of the output do in forward.
        """
        between, in_backward = chunk_state_bytes(segment, block.state_bytes)
        _, length = self._allowed.chunks[block.path]
        share = int(max(0, peak_bytes - block.resident_bytes) * longest_share(segment.chunks, length))
        return block.resident_bytes + max(
            block.output_bytes + max(block.given_bytes, in_backward) + share,
            block.output_bytes + 2 * block.given_bytes,
            between + 2 * block.output_bytes,
        )

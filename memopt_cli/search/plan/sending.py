"""Predictions for plans that send tensors to host memory or a file: when each is freed, and how long copies delay.

:mod:`memopt_cli.runtime.places.schedule` sets the order.  Tensors are sent in parcels: one for each segment, with what
the segment stores, and one for every four saves outside segments.  A parcel is freed on the device (*given up*) once
the next parcel is complete, and its fetch begins when backward needs the next parcel::

    forward     1 complete      2 complete: 1 is given up                 3 complete: 2 is given up
    backward                    3 is needed: the fetch of 2 begins        2 is needed: the fetch of 1 begins
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from memopt_cli.records import PlaceName, Plan, SegmentPlan
from memopt_cli.text.paths import is_within

MIN_SENT_BYTES: Final = 1 << 16
"""Minimum bytes of a tensor that is sent."""
SAVES_OF_A_PARCEL: Final = 4
"""Saves outside segments that make a parcel."""
LINK_BYTES_PER_S: Final = 1e9
"""Assumed rate of copies to and from a place, in bytes per second, where it was not measured."""
NEVER_NEEDED: Final = sys.maxsize
"""Value of :attr:`SentParcel.needed_at` for a parcel to which nothing has been added."""
SEND_S: Final = 0.3e-3
"""Minimum seconds to send a tensor and to get it back, however small it is."""


@dataclass(slots=True, eq=False)
class SentParcel:
    """Tensors that are sent together; times are instants of a replayed step."""

    complete_at: int
    """Instant at which the last tensor of the parcel is stored."""
    needed_at: int
    """Instant at which backward needs the parcel."""
    given_up_at: int | None = None
    """Instant at which the parcel is given up; ``None`` if never, like the last parcel."""
    fetch_at: int = 0
    """Instant at which the fetch of the parcel begins."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that is given up, and fetched later."""

    parcel: SentParcel
    stored: int
    """Instant at which the tensor's copy begins."""
    nbytes: int


def schedule_parcels(parcels: Sequence[SentParcel]) -> None:
    """Set when each of ``parcels`` is given up and fetched: when the next parcel is complete, and needed."""
    next_complete, next_needed = None, NEVER_NEEDED
    for parcel in sorted(parcels, key=lambda parcel: parcel.complete_at, reverse=True):
        parcel.given_up_at = next_complete
        parcel.fetch_at = min(next_needed, parcel.needed_at)
        next_complete = parcel.complete_at
        next_needed = next_needed if parcel.needed_at == NEVER_NEEDED else parcel.needed_at


def waits_s(
    tensors: Sequence[SentTensor], elapsed: Sequence[float], out_bytes_per_s: float, in_bytes_per_s: float
) -> float:
    """Return the seconds that a step waits for copies of ``tensors``, made one after another in each direction.

    ``elapsed`` has the seconds before each instant of the step, without waits.  When a parcel is given up, the step
    waits for its copies out; when backward needs a parcel, for its copies in.  Each wait delays all later instants.
    """
    sizes: dict[SentParcel, int] = {}
    for tensor in tensors:
        sizes[tensor.parcel] = sizes.get(tensor.parcel, 0) + tensor.nbytes
    # Instant, kind, parcel, bytes.  The kinds are in the order in which events of one instant happen: 0 give up (wait
    # for the copy out), 1 begin a copy out, 2 begin a copy in, 3 use (wait for the copy in).
    events: list[tuple[int, int, SentParcel, int]] = [(t.stored, 1, t.parcel, t.nbytes) for t in tensors]
    for parcel, nbytes in sizes.items():
        assert parcel.given_up_at is not None, "the last parcel, which stays, has no sent tensors"
        given_up, fetch = (parcel.given_up_at, 0, parcel, 0), (parcel.fetch_at, 2, parcel, nbytes)
        events += [given_up, fetch, (parcel.needed_at, 3, parcel, 0)]
    delay_s = 0.0
    free_s = {True: 0.0, False: 0.0}  # when the link is free, for copies out (True) and in (False)
    done_s: dict[tuple[SentParcel, bool], float] = {}
    for instant, kind, parcel, nbytes in sorted(events, key=lambda event: event[:2]):
        now_s, is_out = elapsed[instant] + delay_s, kind < 2
        if kind in (1, 2):
            rate = out_bytes_per_s if is_out else in_bytes_per_s
            free_s[is_out] = done_s[parcel, is_out] = max(free_s[is_out], now_s) + nbytes / rate
        else:
            delay_s += max(0.0, done_s.get((parcel, is_out), 0.0) - now_s)
    return delay_s


def sending_variants(plan: Plan, place: PlaceName) -> Iterator[Plan]:
    """Yield ``plan`` with tensors sent to ``place``: the inputs of segments, saves outside segments, and both."""
    segments = tuple(_send_inputs(segment, plan, place) for segment in plan.segments)
    if segments != plan.segments:
        yield replace(plan, segments=segments)
    if not plan.packed:  # with packing and sending outside segments, a dry run is not exact
        yield replace(plan, place=place)
        if segments != plan.segments:
            yield replace(plan, segments=segments, place=place)


def fewer_sent(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with the inputs of one segment, or the saves outside segments, kept on the device."""
    for index, segment in enumerate(plan.segments):
        if segment.place != "device":
            segments = (*plan.segments[:index], replace(segment, place="device"), *plan.segments[index + 1 :])
            yield replace(plan, segments=segments)
    if plan.place != "device":
        yield replace(plan, place="device")


def _send_inputs(segment: SegmentPlan, plan: Plan, place: PlaceName) -> SegmentPlan:
    """Return ``segment`` of ``plan`` with its inputs sent to ``place``, or unchanged if it cannot send them."""
    is_inner = any(is_within(segment.path, other.path) for other in plan.segments if other is not segment)
    if is_inner or segment.chunks > 1 or segment.through_loss or segment.spatial_split:
        return segment
    return replace(segment, place=place)

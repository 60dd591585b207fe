"""Estimates of a step on a device that is not here: its allocator is simulated, its time is a roofline's.  No torch."""

from memopt_cli.search.estimation.allocator import CachingAllocator, Lifetime, NoRoomError, lifetimes, replay
from memopt_cli.search.estimation.roofline import operator_s, timed
from memopt_cli.search.estimation.step import estimate, library_blocks, needed_bytes, replayed

__all__ = [
    "CachingAllocator",
    "Lifetime",
    "NoRoomError",
    "estimate",
    "library_blocks",
    "lifetimes",
    "needed_bytes",
    "operator_s",
    "replay",
    "replayed",
    "timed",
]

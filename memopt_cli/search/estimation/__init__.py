"""Estimates of a step on a device that is not here: peaks by a simulated allocator, times by a roofline.  No torch."""

from memopt_cli.search.estimation.allocator import CachingAllocator, Lifetime, NoRoomError, lifetimes, replay
from memopt_cli.search.estimation.roofline import add_seconds, operator_s
from memopt_cli.search.estimation.step import estimate, library_blocks, needed_bytes, replay_lives

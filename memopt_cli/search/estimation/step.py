"""The estimate of a recorded step on a device that is not here (``--for``): its peaks, its time, whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memopt_cli.records import DeviceEstimate, DeviceProfile, OpTrace, StepTrace
from memopt_cli.search.estimation.allocator import CachingAllocator, Lifetime, NoRoomError, lifetimes, replay


def estimate(trace: StepTrace, device: DeviceProfile) -> DeviceEstimate:
    """Estimate both peaks and the time of ``trace``, whose operators have their seconds on ``device``."""
    lives = [*lifetimes(trace.storages), *library_blocks(trace.ops, device)]
    allocator = replay_lives(lives, device)
    return DeviceEstimate(
        device=device.name,
        memory_bytes=device.memory_bytes,
        allocated_peak_bytes=allocator.allocated_peak_bytes,
        reserved_peak_bytes=allocator.reserved_peak_bytes,
        fits=_has_room(lives, device, allocator),
        step_s=sum(op.seconds for op in trace.ops),
    )


def replay_lives(lives: Sequence[Lifetime], device: DeviceProfile) -> CachingAllocator:
    """Return the allocator of ``device``, without a bound on its memory, after steps with blocks of these ``lives``."""
    allocator = CachingAllocator(device.allocator)
    replay(allocator, lives)
    return allocator


def needed_bytes(lives: Sequence[Lifetime], device: DeviceProfile) -> int:
    """Return the allocated peak of ``lives`` on ``device``; if they do not fit, the bytes that it would reserve."""
    allocator = replay_lives(lives, device)
    fits = _has_room(lives, device, allocator)
    return allocator.allocated_peak_bytes if fits else allocator.reserved_peak_bytes


def library_blocks(ops: Iterable[OpTrace], device: DeviceProfile) -> list[Lifetime]:
    """Return the workspaces of cuBLAS, one each for forward and backward, since each thread has a handle."""
    phases = {op.phase for op in ops if op.flops} & {"forward", "backward"}
    return [Lifetime(nbytes=device.library_bytes, born=-1, died=None) for _ in phases if device.library_bytes]


def _has_room(lives: Sequence[Lifetime], device: DeviceProfile, endless: CachingAllocator) -> bool:
    """Return whether ``device`` has room for ``lives``; ``endless`` is its allocator without a bound on memory."""
    if endless.reserved_peak_bytes <= device.memory_bytes:
        return True
    try:
        replay(CachingAllocator(device.allocator, device.memory_bytes), lives)
    except NoRoomError:
        return False
    return True

"""What a recorded step needs on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memopt_cli.records import DeviceEstimate, DeviceProfile, OpTrace, StepTrace
from memopt_cli.search.estimation.allocator import CachingAllocator, Lifetime, NoRoomError, lifetimes, replay


def estimate(trace: StepTrace, device: DeviceProfile) -> DeviceEstimate:
    """Both peaks and the time of a step whose operators have the seconds of that device."""
    lives = [*lifetimes(trace.storages), *library_blocks(trace.ops, device)]
    allocator = replayed(lives, device)
    return DeviceEstimate(
        device=device.name,
        memory_bytes=device.memory_bytes,
        allocated_peak_bytes=allocator.allocated_peak_bytes,
        reserved_peak_bytes=allocator.reserved_peak_bytes,
        fits=_fits(lives, device, allocator),
        step_s=sum(op.seconds for op in trace.ops),
    )


def replayed(lives: Sequence[Lifetime], device: DeviceProfile) -> CachingAllocator:
    """The device's allocator after steps with these blocks, had it no end of memory."""
    allocator = CachingAllocator(device.allocator)
    replay(allocator, lives)
    return allocator


def needed_bytes(lives: Sequence[Lifetime], device: DeviceProfile) -> int:
    """The allocated peak; where the device's allocator finds no room, what it would reserve: more than there is."""
    allocator = replayed(lives, device)
    fits = _fits(lives, device, allocator)
    return allocator.allocated_peak_bytes if fits else allocator.reserved_peak_bytes


def library_blocks(ops: Iterable[OpTrace], device: DeviceProfile) -> list[Lifetime]:
    """What the matrix library keeps: forward and backward run in threads of their own, each with its handle."""
    phases = {op.phase for op in ops if op.flops} & {"forward", "backward"}
    return [Lifetime(nbytes=device.library_bytes, born=-1, died=None) for _ in phases if device.library_bytes]


def _fits(lives: Sequence[Lifetime], device: DeviceProfile, endless: CachingAllocator) -> bool:
    """Whether the device has room for these blocks, of which one with no end of memory is known."""
    if endless.reserved_peak_bytes <= device.memory_bytes:
        return True
    try:
        replay(CachingAllocator(device.allocator, device.memory_bytes), lives)
    except NoRoomError:
        return False
    return True

"""The limits of a search for a batch, from ``--memory`` and the device: what it may run, and what it may recommend."""

from __future__ import annotations

import math

from memopt_cli.errors import UsageError
from memopt_cli.records import Budget, DeviceProfile
from memopt_cli.search.batch_size.capacity import device_capacity, free_capacity, runnable_bytes
from memopt_cli.search.batch_size.runs import TARGET_SHARE, Limits
from memopt_cli.text.units import exact_bytes, format_bytes

_AIMED_TIME_SHARE = 0.9
"""Share of the longest step that the predicted time of a run may take: times vary, and a run that takes longer is in
vain."""


def compute_limits(memory: int | float, device: str, longest_step_s: float, multiple_of: int = 1) -> Limits:
    """Return the limits on ``device`` for a budget of ``memory``: an int in bytes, a float as a share of free bytes."""
    whole = device_capacity(device)
    free = free_capacity(device) if isinstance(memory, float) else whole
    budget, name = _budget(memory, free.device_bytes, free.limited_by)
    return Limits(
        budget_bytes=budget,
        device_bytes=whole.device_bytes,
        runnable_bytes=runnable_bytes(device),
        name=name,
        longest_step_s=longest_step_s,
        aim=_AIMED_TIME_SHARE,
        multiple_of=multiple_of,
    )


def limits_of_device(device: str, longest_step_s: float, *, aim: float, budget: Budget | None) -> Limits:
    """Return the limits on ``device`` without ``--memory``.

    The budget is :data:`TARGET_SHARE` of the device's whole memory, or ``budget`` if that is less: a user who
    optimizes within 200 MiB asks what fits into 200 MiB.
    """
    capacity = device_capacity(device)
    budget_bytes, name = _budget(TARGET_SHARE, capacity.device_bytes, capacity.limited_by)
    if budget is not None and budget.nbytes is not None and budget.nbytes < budget_bytes:
        budget_bytes = budget.nbytes
        name = f"`--budget {exact_bytes(budget.nbytes)}`"
    return Limits(
        budget_bytes=budget_bytes,
        device_bytes=capacity.device_bytes,
        runnable_bytes=budget_bytes,
        name=name,
        longest_step_s=longest_step_s,
        aim=aim,
    )


def limits_elsewhere(memory: int | float, card: DeviceProfile | None, multiple_of: int) -> Limits:
    """Return the limits on a device that this machine lacks: no step runs.

    ``memory`` is an int in bytes, or a float as a share of the memory of ``card``.  Raises :class:`UsageError` if the
    card has less.
    """
    assert card is not None or isinstance(memory, int), "a share is of the memory of a card"
    whole_bytes, whole = (0, "") if card is None else (card.memory_bytes, f"the memory of {card.name}")
    budget, name = _budget(memory, whole_bytes, whole)
    if card is not None and budget > card.memory_bytes:
        raise UsageError(
            f"{card.name} has {format_bytes(card.memory_bytes)} for a process, less than {exact_bytes(budget)}",
            hint="Lower `--memory`, or choose a larger card.",
        )
    return Limits(
        budget_bytes=budget,
        device_bytes=budget if card is None else card.memory_bytes,
        runnable_bytes=0,
        name=name,
        longest_step_s=math.inf,
        multiple_of=multiple_of,
        probes=0,
    )


def _budget(memory: int | float, whole_bytes: int, whole: str) -> tuple[int, str]:
    """Return the bytes of ``memory``, an int in bytes or a float as a share of ``whole_bytes``, and its name."""
    if isinstance(memory, float):
        return int(whole_bytes * memory), f"{100 * memory:g} % of {whole}"
    return memory, f"`--memory {exact_bytes(memory)}`"

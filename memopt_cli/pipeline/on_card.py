"""``--for``: a step estimated for a device that is not here."""

from __future__ import annotations

from dataclasses import replace

from memopt_cli.errors import UsageError
from memopt_cli.records import DeviceProfile, StepSettings


def recorded_here(settings: StepSettings, card: DeviceProfile | None) -> StepSettings:
    """The settings of a step that is recorded for a card, which is done on the CPU.

    Raises :class:`UsageError` for a device of its own.
    """
    if card is None:
        return settings
    if settings.device.startswith("cuda"):
        raise UsageError(
            f"--device {settings.device} runs the step, and --for {card.name} estimates it for a device elsewhere",
            hint="Keep one of them.",
        )
    return replace(settings, device="cpu")

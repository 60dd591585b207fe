"""``memopt selftest``: what holds on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.baseline import Conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestRow:
    """One promise, tried."""

    name: str
    """What was run: ``attention, bf16``."""
    promise: str
    """What is to hold: ``the same gradients``."""
    seen: str
    """What was found, or why it could not be."""
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestReport:
    """All that ``memopt selftest`` tried."""

    memopt: str
    torch: str
    platform: str
    """Operating system and processor."""
    cuda: str
    """Version of CUDA that PyTorch was built with, and of the driver; empty without a GPU."""
    conditions: Conditions
    rows: tuple[SelftestRow, ...]
    spent_s: float
    interrupted: bool = False
    """Something was still to be tried."""

    @property
    def failed(self) -> tuple[SelftestRow, ...]:
        """What did not hold."""
        return tuple(row for row in self.rows if not row.holds)

"""The result of ``memopt selftest``, which tries memopt's promises on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.baseline import Conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestRow:
    """One promise that was tried."""

    name: str
    """Name of the model that was run: ``attention, bf16``."""
    promise: str
    """Promise: ``the same gradients``."""
    seen: str
    """Text of what the test found, or the reason why there is none."""
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestReport:
    """The result of ``memopt selftest``."""

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
    """Whether the self-test was interrupted before everything was tried."""

    @property
    def failed(self) -> tuple[SelftestRow, ...]:
        """Promises that did not hold."""
        return tuple(row for row in self.rows if not row.holds)

"""Ways to learn sequences, compared."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from memopt_cli.records.header import FileHeader

StrategyName = Literal["bptt", "plan", "online"]
"""Ways to learn sequences: back-propagation through time, the same under a plan, and online learning."""

OnlineRule = Literal["D-RTRL", "ES-D-RTRL"]

STRATEGIES: tuple[StrategyName, ...] = typing.get_args(StrategyName)

ONLINE_RULES: tuple[OnlineRule, ...] = typing.get_args(OnlineRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAgreement:
    """A gradient of online learning against that of back-propagation through time, all parameters as one vector."""

    rule: OnlineRule
    steps: int
    """Time steps of the sequence that both were taken of."""
    cosine: float
    relative_error: float
    """Norm of the difference over that of the latter."""
    exact: bool
    """The relative error is that of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPoint:
    """Memory of a training step of so many time steps."""

    steps: int
    allocated_peak_bytes: int
    measured: bool
    """If not, it is by the line through those that were."""
    step_s: float | None
    """Wall time of the whole sequence; ``None`` if it was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCurve:
    """One way to learn sequences."""

    strategy: StrategyName
    label: str
    """The strategy, and its rule if it has one."""
    points: tuple[StrategyPoint, ...]
    """By the number of steps; empty if it cannot be run."""
    slope_bytes: float | None
    """Bytes per time step; ``None``: not known, as fewer than two sizes could be measured."""
    exact: bool | None
    """Its gradient is that of back-propagation through time; ``None``: not known."""
    remark: str
    """How that is known, or why it cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """What ``memopt recommend-batch --strategy`` found."""

    header: FileHeader
    symbol: str
    batch: int
    budget_bytes: int
    limit: str
    """The memory limit, and what sets it."""
    curves: tuple[StrategyCurve, ...]
    notes: tuple[str, ...]
    spent_s: float

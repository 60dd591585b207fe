"""The results of ``memopt recommend-batch --strategy``, which compares ways to learn sequences by their memory."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from memopt_cli.records.header import FileHeader

StrategyName = Literal["bptt", "plan", "online"]
"""Strategy to learn sequences: backpropagation through time, the same under a plan, or online learning."""

OnlineRule = Literal["D-RTRL", "ES-D-RTRL"]

STRATEGIES: tuple[StrategyName, ...] = typing.get_args(StrategyName)

ONLINE_RULES: tuple[OnlineRule, ...] = typing.get_args(OnlineRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAgreement:
    """The agreement of online learning's gradient with the gradient of backpropagation through time, as vectors."""

    rule: OnlineRule
    steps: int
    """Time steps of the sequence that both gradients are for."""
    cosine: float
    relative_error: float
    """Norm of the difference, divided by the norm of the gradient through time."""
    exact: bool
    """Whether the relative error is within rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyPoint:
    """The memory of a training step with a number of time steps."""

    steps: int
    allocated_peak_bytes: int
    measured: bool
    """Whether the point was measured; otherwise it lies on the line through measured points."""
    step_s: float | None
    """Wall time of the whole sequence; ``None`` if it was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCurve:
    """The memory of one strategy to learn sequences."""

    strategy: StrategyName
    label: str
    """Text of the strategy, with its rule if it has one."""
    points: tuple[StrategyPoint, ...]
    """Points by the number of steps; empty if the strategy cannot be run."""
    slope_bytes: float | None
    """Bytes per time step; ``None`` if fewer than two sizes could be measured."""
    exact: bool | None
    """Whether the strategy has the gradient of backpropagation through time; ``None`` if unknown."""
    remark: str
    """Evidence for ``exact``, or the reason why the strategy cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyComparison:
    """The result of ``memopt recommend-batch --strategy``."""

    header: FileHeader
    symbol: str
    batch: int
    budget_bytes: int
    limit: str
    """Memory limit and its source, as text for a report."""
    curves: tuple[StrategyCurve, ...]
    notes: tuple[str, ...]
    spent_s: float

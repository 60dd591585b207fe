"""What to search for, and within what limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

Profile = Literal["safe", "balanced", "memory", "exhaustive"]

Preference = Literal["speed", "balanced", "memory"]

SelectionPolicy = Literal[
    "no_candidates",
    "explicit_zero_budget",
    "zero_ratio_budget",
    "all_candidates",
    "budget_covers_all",
    "fallback_module_order",
    "largest_input_activations",
    "least_predicted_peak",
    "fastest_within_budget",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Limits and switches of the search, as :func:`memopt_cli.search.plan.policy.resolve` settled them."""

    level: int = 3
    targets: tuple[str, ...] = ()
    """``--target``: class names or path globs; empty: memopt chooses, unless there are ``modules``."""
    modules: tuple[str, ...] | None = None
    """Paths of the only modules that may become segments."""
    parts: tuple[str, ...] | None = None
    """Paths of the only ones, of what lies in those, that may from level 2 on; ``None``: all."""
    chunkable: tuple[str, ...] | None = None
    """Paths of the only modules that may run in chunks; ``None``: all that can."""
    compress_x: bool = True
    temporal_split_factor: int = 2
    """How many chunks a temporal split makes of one."""
    max_split_rounds: int | None = None
    """How many segments may have others in them, and how often chunks may be multiplied; ``None``: no limit."""
    max_candidates_per_round: int | None = None
    """Modules that are asked for chunks, and changes of a plan that are tried, in a round; ``None``: no limit."""
    warmup_in_main_process: bool = True
    """One step of the optimized model in the process that goes on to train it."""
    warmup_in_profile_workers: bool = True
    """One step before the timed ones of a measurement, and not among them."""
    prefer: Preference | None = None
    profile: Profile | None = None
    """The one that was asked for, or that ``prefer`` stands for."""
    allow_expensive_profiling: bool = True
    checkpoint_budget: Preference | None = None
    """The one that was asked for, or that ``prefer`` stands for."""
    max_gc_wrapped_modules: int | None = None
    """The most segments that lie in no other; ``None``: no limit; 0 or less: none."""
    gc_target_budget_ratio: float | None = None
    """The same as a share of the candidates; ``None``: all of them; 0 or less: none."""
    allow_inexact: bool = False
    """Chunks may have batch statistics of their own where the whole's cannot be gathered."""
    max_slowdown: float | None = None
    """The longest step of a level's plan, over that of the original; ``None``: no limit."""


class SearchOverrides(TypedDict, total=False):
    """What was asked for of :class:`SearchOptions`; a profile or a default decides what is left out or ``None``."""

    level: int | None
    targets: tuple[str, ...]
    modules: tuple[str, ...] | None
    parts: tuple[str, ...] | None
    chunkable: tuple[str, ...] | None
    compress_x: bool | None
    temporal_split_factor: int
    max_split_rounds: int | None
    max_candidates_per_round: int | None
    warmup_in_main_process: bool | None
    warmup_in_profile_workers: bool | None
    prefer: Preference | None
    profile: Profile | None
    allow_expensive_profiling: bool | None
    checkpoint_budget: Preference | None
    max_gc_wrapped_modules: int | None
    gc_target_budget_ratio: float | None
    allow_inexact: bool
    max_slowdown: float | None
    """Infinite: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Most bytes that the measured allocated peak may have; one of the two is set."""

    nbytes: int | None = None
    share: float | None = None
    """Of the original's."""

    @classmethod
    def of(cls, amount: float) -> Budget:
        """Of bytes, or of a share, which is a float."""
        return cls(nbytes=amount) if isinstance(amount, int) else cls(share=amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGoal:
    """What to look for in place of the lowest peak of a level."""

    budget: Budget | None = None
    """The fastest plan within it."""
    frontier: bool = False
    """Plans from the fastest to the smallest."""
    pick: int | None = None
    """Which of those to apply, from 1, if ``frontier``; ``None``: none."""

    @property
    def applies(self) -> bool:
        """Whether a plan is chosen, not shown alone."""
        return self.budget is not None or self.pick is not None or not self.frontier

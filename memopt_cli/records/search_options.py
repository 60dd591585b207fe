"""The goal of a search for plans, its limits, and the options that it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from memopt_cli.records.plan import PlaceName

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
    """Limits and switches of a search, as :func:`memopt_cli.search.plan.policy.resolve` returns them."""

    level: int = 3
    targets: tuple[str, ...] = ()
    """Class names or path globs (``--target``); empty if memopt chooses, or if ``modules`` are given."""
    modules: tuple[str, ...] | None = None
    """Paths of the only modules that may become segments; ``None`` for all."""
    parts: tuple[str, ...] | None = None
    """Paths of the only parts of those modules that may become segments from level 2 on; ``None`` for all."""
    chunkable: tuple[str, ...] | None = None
    """Paths of the only modules that may run in chunks; ``None`` for all that can."""
    compress_x: bool = True
    temporal_split_factor: int = 2
    """Number of chunks that a temporal split makes of one."""
    max_split_rounds: int | None = None
    """Maximum number of segments with others in them, and of multiplications of chunks; ``None`` if unlimited."""
    max_candidates_per_round: int | None = None
    """Maximum number of modules tried in chunks, and of changes of a plan tried, in a round; ``None`` if unlimited."""
    warmup_in_main_process: bool = True
    """Whether the process that goes on to train the model takes one step of the optimized model first."""
    warmup_in_profile_workers: bool = True
    """Whether a measurement takes one more step before the timed ones."""
    prefer: Preference | None = None
    profile: Profile | None = None
    """Profile from the user, or from ``prefer``; ``None`` if neither is given."""
    allow_expensive_profiling: bool = True
    checkpoint_budget: Preference | None = None
    """Budget from the user, or from ``prefer``; ``None`` if neither is given."""
    max_gc_wrapped_modules: int | None = None
    """Maximum number of outermost segments; ``None`` for no limit, 0 or less for no segment."""
    gc_target_budget_ratio: float | None = None
    """Maximum number of outermost segments, as a share of the candidates; ``None`` and 0 or less as in
    :attr:`max_gc_wrapped_modules`."""
    allow_inexact: bool = False
    """Whether chunks may use their own batch statistics where the whole batch's statistics cannot be gathered."""
    max_slowdown: float | None = None
    """Longest step of a level's plan, divided by the original's; ``None`` if unlimited."""
    offload: str = "none"
    """Place where plans may send stored tensors, as ``--offload`` spells it: ``disk:FOLDER``."""
    host_memory: int | None = None
    """Maximum number of bytes that plans may send to host memory; ``None`` for what that place takes."""
    optimizer_in_backward: bool = False
    """Whether plans may run the optimizer in backward, after which the training script finds no gradients."""

    @property
    def sends_to(self) -> tuple[PlaceName | None, str | None]:
        """Place and folder that :attr:`offload` names; ``None`` if memopt chooses the place, or there is no folder."""
        place, _, folder = self.offload.partition(":")
        names: dict[str, PlaceName | None] = {"auto": None, "none": "device", "host": "host", "disk": "disk"}
        return names[place], folder or None


class SearchOverrides(TypedDict, total=False):
    """The :class:`SearchOptions` that the user gave; a profile or a default decides missing ones, and ``None``."""

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
    """Infinity for no limit."""
    offload: str | None
    host_memory: int | None
    optimizer_in_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSearch:
    """The options that a search uses, and how they came about."""

    options: SearchOptions
    requested_level: int
    """Level from the user, or from the profile."""
    notes: tuple[str, ...] = ()
    """Notes on every option that another option has decided."""
    asked_slowdown: float | None = None
    """Slowdown that the user gave; ``None`` if not given, so budgets and frontiers use their own defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bound on the measured allocated peak: either ``nbytes`` or ``share`` is set."""

    nbytes: int | None = None
    share: float | None = None
    """Share of the original's allocated peak."""

    @classmethod
    def from_amount(cls, amount: float) -> Budget:
        """Return the budget of ``amount``: an ``int`` is bytes, a ``float`` a share."""
        return cls(nbytes=amount) if isinstance(amount, int) else cls(share=amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGoal:
    """The goal of a search; by default it is the lowest peak that the level allows."""

    budget: Budget | None = None
    """Budget that the fastest plan must keep to; ``None`` without a budget."""
    frontier: bool = False
    """Whether to find and show plans from the fastest to the smallest."""
    pick: int | None = None
    """Plan of the frontier to apply, from 1; ``None`` if not given."""

    @property
    def needs_frontier(self) -> bool:
        """Whether the search must find a frontier: to show it, or to pick a plan of it."""
        return self.frontier or self.pick is not None

    @property
    def applies(self) -> bool:
        """Whether a plan is applied, and not only shown."""
        return self.budget is not None or self.pick is not None or not self.frontier

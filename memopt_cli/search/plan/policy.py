"""The options of a search, resolved from what the user gave; and the choice of segments at level 1.

``resolve`` applies profiles (``--profile safe``), preferences (``prefer``) and checkpoint budgets.  ``select`` chooses
among the candidates.  The rest words the explanations in a summary.  SpikingJelly's memory optimization has the same
presets, precedence and names, so that a word means the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memopt_cli.errors import OptionError
from memopt_cli.records import (
    ModuleTrace,
    Preference,
    Profile,
    ResolvedSearch,
    SearchOptions,
    SearchOverrides,
    SelectionPolicy,
)
from memopt_cli.text.options import OPTIONS, check_option
from memopt_cli.text.values import Real, ValueKind, Whole

DEFAULT_SLOWDOWN = 1.33
"""Default limit on the slowdown of a level's plan: one more forward is about a third of a step."""

PROFILES: dict[Profile, SearchOverrides] = {
    "safe": SearchOverrides(
        level=1,
        max_split_rounds=0,
        max_candidates_per_round=0,
        warmup_in_main_process=False,
        warmup_in_profile_workers=False,
        allow_expensive_profiling=False,
    ),
    "balanced": SearchOverrides(
        level=2,
        max_split_rounds=1,
        max_candidates_per_round=1,
        warmup_in_main_process=False,
        warmup_in_profile_workers=False,
        allow_expensive_profiling=False,
    ),
    "memory": SearchOverrides(level=3, max_split_rounds=2, max_candidates_per_round=2, warmup_in_main_process=False),
    "exhaustive": SearchOverrides(level=4),
}
"""Profile -> the options whose defaults it changes; an option that the user gives overrides its profile."""

CHECKPOINT_BUDGETS: dict[Preference, float] = {"speed": 0.5, "balanced": 0.75, "memory": 1.0}
"""Checkpoint budget -> the share of the candidates that become segments."""

PROFILE_OF: dict[Preference, Profile] = {"speed": "safe", "balanced": "balanced", "memory": "memory"}
"""Value of ``prefer`` -> the profile that it selects; it also selects the checkpoint budget of the same name."""


# ------------------------------------------------------------------------------------------------ options
_CHECKED = {name for name, option in OPTIONS.items() if isinstance(option.kind, ValueKind)}
"""Options whose values the table of options can check."""
_WIDER_RANGES: dict[str, ValueKind] = {
    "gc_target_budget_ratio": Real(maximum=1),
    "max_candidates_per_round": Whole(0),
    "max_gc_wrapped_modules": Whole(),
}
"""Option -> a wider range for SpikingJelly's calls, where 0 or less means none; the command line refuses 0 and less."""
_EXPLANATIONS: dict[SelectionPolicy, str] = {
    "no_candidates": "No module that the step calls matches and can be a segment.",
    "explicit_zero_budget": "max_gc_wrapped_modules={limit} selects none of {n} candidates.",
    "zero_ratio_budget": "gc_target_budget_ratio={ratio} selects none of {n} candidates.",
    "all_candidates": "All {n} candidates are selected: nothing limits their number.",
    "budget_covers_all": "All {n} candidates are selected: the budget covers them.",
    "fallback_module_order": "The first {k} of {n} candidates in the model's order: their inputs are not known.",
    "largest_input_activations": "The {k} of {n} candidates with the largest inputs.",
    "least_predicted_peak": "{k} of {n} candidates: the set with the lowest predicted peak.",
    "fastest_within_budget": "{k} of {n} candidates: the fastest plan found for this peak.",
}
STEP_NAMES = {1: "level1_gc", 2: "level2_spatial_split", 3: "level3_temporal_split", 4: "level4_greedy_unwrap"}
"""Level -> its name among the applied steps of a summary."""
_PREFER_ADVICE: dict[Preference, str] = {
    "speed": "With prefer=speed little is recomputed; if memory is still short, prefer=balanced saves more.",
    "balanced": "If memory is still short, prefer=memory saves more; if steps are too slow, try prefer=speed.",
    "memory": "With prefer=memory every candidate may be recomputed; if steps are too slow, try prefer=balanced.",
}
_BUDGET_ADVICE: dict[str | None, str] = {
    "speed": "checkpoint_budget=speed leaves half of the candidates as they are; balanced or memory saves more.",
    "memory": "checkpoint_budget=memory recomputes every candidate; with balanced or speed, a step takes less time.",
}
_PROFILE_ADVICE: dict[str, str] = {
    "safe": "profile=safe stops at level 1; profile=balanced or memory also splits the heaviest segments.",
    "exhaustive": "profile=exhaustive searches without limits; profile=memory comes close in less time.",
}


def resolve(overrides: SearchOverrides, *, has_inputs: bool = True) -> ResolvedSearch:
    """Resolve ``overrides``: single options override the profile; profile and checkpoint budget override ``prefer``.

    ``has_inputs``: whether there are inputs to run the model on, which levels above 1 need to be measured.
    Raises :class:`OptionError` for a value out of its range, and for a level above 1 without inputs.  If that level
    comes from a profile, level 1 is used instead.
    """
    overridden: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    for name in overridden.keys() & _CHECKED:
        overridden[name] = check_option(name, overridden[name], _WIDER_RANGES.get(name))
    notes = _apply_preference(overridden)
    profile = overridden.get("profile")
    options = SearchOptions(
        **{"max_slowdown": DEFAULT_SLOWDOWN, **(PROFILES[profile] if profile else {}), **overridden}
    )
    requested = options.level
    if requested > 1 and not has_inputs:
        if profile is None:
            raise OptionError(
                f"level {requested} measures the model, and needs a dummy_input to run it on",
                hint="Pass dummy_input=(x, …), or level=1.",
            )
        options = replace(options, level=1)
        notes.append(
            f"Level 1 is used instead of level {requested}, which is measured and needs inputs to run the model on. "
            "Pass dummy_input=(x, …) for a higher level."
        )
    if options.max_slowdown == math.inf:
        options = replace(options, max_slowdown=None)
    options = _limit_profiling(_apply_budget(options, notes), overridden, notes)
    slowdown = overridden.get("max_slowdown")
    return ResolvedSearch(options=options, requested_level=requested, notes=tuple(notes), asked_slowdown=slowdown)


def _apply_preference(overridden: dict[str, Any]) -> list[str]:
    """Add to ``overridden`` the profile and checkpoint budget of its ``prefer``, unless set; return a note on each."""
    preference = overridden.get("prefer")
    if preference is None:
        return []
    preset = {"profile": PROFILE_OF[preference], "checkpoint_budget": preference}
    added = {name: value for name, value in preset.items() if name not in overridden}
    overridden.update(added)
    return [f"prefer={preference} sets {name}={value}." for name, value in added.items()]


def _apply_budget(options: SearchOptions, notes: list[str]) -> SearchOptions:
    """Return ``options`` with the share of candidates of their checkpoint budget, unless they have another limit."""
    budget = options.checkpoint_budget
    if budget is None:
        return options
    for limit in ("max_gc_wrapped_modules", "gc_target_budget_ratio"):
        if getattr(options, limit) is not None:
            notes.append(f"checkpoint_budget={budget} has no effect, since {limit} is given.")
            return options
    ratio = CHECKPOINT_BUDGETS[budget]
    notes.append(f"checkpoint_budget={budget} makes segments of at most {ratio:.0%} of the candidates.")
    return replace(options, gc_target_budget_ratio=ratio)


def _limit_profiling(options: SearchOptions, overridden: Mapping[str, Any], notes: list[str]) -> SearchOptions:
    """Return ``options`` limited to one round of one candidate, unless they allow expensive profiling."""
    if options.allow_expensive_profiling or options.level <= 1:
        return options
    bounds: dict[str, Any] = {
        "max_split_rounds": 1,
        "max_candidates_per_round": 1,
        "warmup_in_profile_workers": False,
    }
    for name, bound in bounds.items():
        if overridden.get(name, bound) != bound:
            notes.append(f"{name} is {bound} instead of {overridden[name]}, since allow_expensive_profiling is False.")
    return replace(options, **bounds)


# ------------------------------------------------------------------------------------------------ candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The modules to become segments, and the rule by which they were chosen."""

    policy: SelectionPolicy
    candidates: int
    """Number of modules that could be selected."""
    selected: tuple[ModuleTrace, ...]
    """Selected modules in the order of first call."""
    explanation: str
    """Sentence on what was selected, and why."""
    named: tuple[ModuleTrace, ...] = ()
    """Outermost modules that the user named, selected or not."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Path that the user named -> why the module there cannot be a candidate."""

    @property
    def considered(self) -> tuple[ModuleTrace, ...]:
        """Modules that the user named, then all other selected modules."""
        return (*self.named, *(m for m in self.selected if m not in self.named))


def select(candidates: Sequence[ModuleTrace], options: SearchOptions) -> Selection:
    """Select as many of ``candidates`` as ``options`` allow, those with the largest input first.

    An input is as large as the first positional tensor of the first call, in bytes.  Equal inputs, and inputs of
    unknown size, go by the order of first call.  ``max_gc_wrapped_modules`` is a number, and ``gc_target_budget_ratio``
    means ``max(1, ceil(n · ratio))`` of n candidates.  The smaller of both holds; 0 or less selects none.
    """
    count = len(candidates)
    limit = max_segments(options, count)
    ranked = sorted(candidates, key=lambda m: (-m.first_input_bytes, m.order))[: count if limit is None else limit]
    selected = sorted(ranked, key=lambda m: m.order)
    return _selection(_policy(candidates, options, limit), count, selected, options)


def _selection(
    policy: SelectionPolicy, candidates: int, selected: Sequence[ModuleTrace], options: SearchOptions
) -> Selection:
    ratio = options.gc_target_budget_ratio
    explanation = _EXPLANATIONS[policy].format(
        n=candidates,
        k=len(selected),
        limit=options.max_gc_wrapped_modules,
        ratio="" if ratio is None else f"{ratio:g}",
    )
    return Selection(policy=policy, candidates=candidates, selected=tuple(selected), explanation=explanation)


def describe_choice(
    candidates: int, segments: Sequence[ModuleTrace], options: SearchOptions, *, by_goal: bool = False
) -> Selection:
    """Describe the ``segments`` that a search chose: for the least peak, or (``by_goal``) for a budget or frontier."""
    policy: SelectionPolicy = "fastest_within_budget" if by_goal else "least_predicted_peak"
    if not candidates:
        policy = "no_candidates"
    elif max_segments(options, candidates) == 0:
        policy = _none_allowed(options)
    return _selection(policy, candidates, segments, options)


def max_segments(options: SearchOptions, candidates: int) -> int | None:
    """Return the number of ``candidates`` that may become segments; ``None`` if ``options`` set no limit."""
    limits = []
    if options.max_gc_wrapped_modules is not None:
        limits.append(max(0, options.max_gc_wrapped_modules))
    ratio = options.gc_target_budget_ratio
    if ratio is not None:
        # Rounded first: 0.07 · 100 is 7.000000000000001, which is not to become 8.
        limits.append(max(1, math.ceil(round(candidates * ratio, 9))) if ratio > 0 else 0)
    return min(limits, default=None)


def _policy(candidates: Sequence[ModuleTrace], options: SearchOptions, limit: int | None) -> SelectionPolicy:
    if not candidates:
        return "no_candidates"
    if limit is None:
        return "all_candidates"
    if not limit:
        return _none_allowed(options)
    if limit >= len(candidates):
        return "budget_covers_all"
    if not any(m.first_input_bytes for m in candidates):
        return "fallback_module_order"
    return "largest_input_activations"


def _none_allowed(options: SearchOptions) -> SelectionPolicy:
    is_count_zero = options.max_gc_wrapped_modules is not None and options.max_gc_wrapped_modules <= 0
    return "explicit_zero_budget" if is_count_zero else "zero_ratio_budget"


# ------------------------------------------------------------------------------------------------ words for the summary


def skipped_step(level: int, *, segments: int, tried: int, options: SearchOptions) -> str:
    """Return the code for why ``level`` changed nothing in a plan of ``segments`` segments, after ``tried`` plans."""
    reason = "no_improving_candidate"
    if level > 1 and not segments:
        reason = "no_gccontainers"
    elif not tried and options.max_split_rounds != 0:
        reason = {2: "no_spatial_candidates", 3: "no_temporal_candidates"}.get(level, reason)
    return f"level{level}:{reason}"


def recommend(options: SearchOptions, selection: Selection | None, *, measured: str, generic: str) -> str:
    """Advise what to try next; the most specific option that was given decides.

    ``measured``: a sentence on the measurement, to follow the advice.  ``generic``: the advice if no option has its
    own.  Either may be empty.
    """
    advice = _specific_advice(options, selection) or generic
    return " ".join(sentence for sentence in (advice, measured) if sentence)


def _specific_advice(options: SearchOptions, selection: Selection | None) -> str:
    if selection is not None and selection.policy == "no_candidates":
        return "No module can become a segment: name other classes of modules, or let memopt choose them."
    if options.prefer is not None:
        return _PREFER_ADVICE[options.prefer]
    budget = options.checkpoint_budget
    if budget in _BUDGET_ADVICE and options.gc_target_budget_ratio == CHECKPOINT_BUDGETS.get(budget or "speed"):
        return _BUDGET_ADVICE[budget]  # no explicit limit overruled it
    return _PROFILE_ADVICE.get(options.profile or "", "")

"""Every value of the tables: presets, precedence, budgets, selections, skipped steps, recommendations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.errors import OptionError, UsageError
from memopt_cli.records import ModuleTrace, SearchOptions, SearchOverrides
from memopt_cli.search.plan import policy
from memopt_cli.search.plan.policy import Selection, max_segments, recommend, resolve, select, skipped_step
from tests.zoo.records import a_module


def resolved(*, has_inputs: bool = True, **asked: Any) -> SearchOptions:
    return resolve(SearchOverrides(**asked), has_inputs=has_inputs).options


def notes(*, has_inputs: bool = True, **asked: Any) -> tuple[str, ...]:
    return resolve(SearchOverrides(**asked), has_inputs=has_inputs).notes


# ---------------------------------------------------------------------------------------------- profiles


@pytest.mark.parametrize(
    ("profile", "level", "rounds", "candidates", "main", "workers", "expensive"),
    [
        ("safe", 1, 0, 0, False, False, False),
        ("balanced", 2, 1, 1, False, False, False),
        ("memory", 3, 2, 2, False, True, True),
        ("exhaustive", 4, None, None, True, True, True),
        (None, 3, None, None, True, True, True),
    ],
)
def test_a_profile_sets(
    profile: Any,
    level: int,
    rounds: int | None,
    candidates: int | None,
    main: bool,
    workers: bool,
    expensive: bool,
) -> None:
    assert resolve(SearchOverrides(profile=profile)).notes == ()
    assert resolved(profile=profile) == SearchOptions(
        profile=profile,
        level=level,
        max_split_rounds=rounds,
        max_candidates_per_round=candidates,
        warmup_in_main_process=main,
        warmup_in_profile_workers=workers,
        allow_expensive_profiling=expensive,
        compress_x=True,
        max_slowdown=1.33,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("level", 2),
        ("level", 0),
        ("compress_x", False),
        ("max_split_rounds", 7),
        ("max_split_rounds", 0),
        ("max_candidates_per_round", 9),
        ("warmup_in_main_process", False),
        ("warmup_in_profile_workers", False),
        ("temporal_split_factor", 3),
        ("targets", ("Linear",)),
        ("modules", ("a", "b")),
    ],
)
def test_what_is_asked_for_wins_over_the_profile(name: str, value: Any) -> None:
    assert getattr(resolved(profile="exhaustive", **{name: value}), name) == value
    assert resolved(profile="exhaustive", **{name: value}) == replace(resolved(profile="exhaustive"), **{name: value})


@pytest.mark.parametrize(("asked", "settled"), [(None, 1.33), (1, 1), (2.5, 2.5), (math.inf, None)])
def test_how_slow_a_step_may_be(asked: float | None, settled: float | None) -> None:
    assert resolved(max_slowdown=asked).max_slowdown == settled


def test_expensive_profiling_can_be_allowed_and_forbidden() -> None:
    assert resolved(profile="balanced", allow_expensive_profiling=True, max_split_rounds=5).max_split_rounds == 5
    assert resolved(profile="exhaustive", allow_expensive_profiling=False).allow_expensive_profiling is False


@pytest.mark.parametrize("level", [2, 3, 4])
def test_without_expensive_profiling_the_search_is_bounded_whatever_is_asked_for(level: int) -> None:
    asked = {"max_split_rounds": 5, "max_candidates_per_round": 6, "warmup_in_profile_workers": True}
    options = resolved(level=level, allow_expensive_profiling=False, **asked)
    assert (options.max_split_rounds, options.max_candidates_per_round) == (1, 1)
    assert options.warmup_in_profile_workers is False
    assert options.warmup_in_main_process is True
    assert notes(level=level, allow_expensive_profiling=False, **asked) == (
        "max_split_rounds is 1 instead of 5, since allow_expensive_profiling is False.",
        "max_candidates_per_round is 1 instead of 6, since allow_expensive_profiling is False.",
        "warmup_in_profile_workers is False instead of True, since allow_expensive_profiling is False.",
    )
    assert notes(level=level, allow_expensive_profiling=False) == ()
    assert resolved(profile="safe", level=level).max_split_rounds == 1


@pytest.mark.parametrize("level", [0, 1])
def test_up_to_level_1_nothing_is_bounded(level: int) -> None:
    options = resolved(level=level, allow_expensive_profiling=False, max_split_rounds=5)
    assert (options.max_split_rounds, options.warmup_in_profile_workers) == (5, True)


# ---------------------------------------------------------------------------------------------- prefer and budgets


def budget_note(budget: str, ratio: float) -> str:
    return f"checkpoint_budget={budget} makes segments of at most {ratio:.0%} of the candidates."


@pytest.mark.parametrize(
    ("prefer", "profile", "ratio"), [("speed", "safe", 0.5), ("balanced", "balanced", 0.75), ("memory", "memory", 1.0)]
)
def test_prefer_stands_for_a_profile_and_a_budget(prefer: Any, profile: Any, ratio: float) -> None:
    options = resolved(prefer=prefer)
    assert (options.profile, options.checkpoint_budget, options.gc_target_budget_ratio) == (profile, prefer, ratio)
    assert options.level == resolved(profile=profile).level
    assert notes(prefer=prefer) == (
        f"prefer={prefer} sets profile={profile}.",
        f"prefer={prefer} sets checkpoint_budget={prefer}.",
        budget_note(prefer, ratio),
    )


def test_an_explicit_profile_or_budget_wins_over_prefer() -> None:
    options = resolved(prefer="speed", profile="exhaustive")
    assert (options.profile, options.level, options.checkpoint_budget) == ("exhaustive", 4, "speed")
    assert notes(prefer="speed", profile="exhaustive") == (
        "prefer=speed sets checkpoint_budget=speed.",
        budget_note("speed", 0.5),
    )
    options = resolved(prefer="speed", checkpoint_budget="memory")
    assert (options.profile, options.checkpoint_budget, options.gc_target_budget_ratio) == ("safe", "memory", 1.0)
    assert notes(prefer="speed", checkpoint_budget="memory") == (
        "prefer=speed sets profile=safe.",
        budget_note("memory", 1.0),
    )
    assert notes(prefer="speed", profile="memory", checkpoint_budget="memory") == (budget_note("memory", 1.0),)


@pytest.mark.parametrize(("budget", "ratio"), [("speed", 0.5), ("balanced", 0.75), ("memory", 1.0)])
def test_a_budget_is_a_ratio(budget: Any, ratio: float) -> None:
    assert resolved(checkpoint_budget=budget).gc_target_budget_ratio == ratio
    assert notes(checkpoint_budget=budget) == (budget_note(budget, ratio),)
    assert resolved(checkpoint_budget=budget).profile is None


@pytest.mark.parametrize("limit", [{"max_gc_wrapped_modules": 3}, {"gc_target_budget_ratio": 0.2}])
def test_a_budget_gives_way_to_an_explicit_limit(limit: dict[str, Any]) -> None:
    options = resolved(checkpoint_budget="memory", **limit)
    assert options == replace(resolved(**limit), checkpoint_budget="memory")
    assert notes(checkpoint_budget="memory", **limit) == (
        f"checkpoint_budget=memory has no effect, since {next(iter(limit))} is given.",
    )


# ---------------------------------------------------------------------------------------------- without inputs


@pytest.mark.parametrize("level", [2, 3, 4])
def test_levels_above_1_need_inputs(level: int) -> None:
    with pytest.raises(ValueError, match=f"level {level} measures the model, and needs a dummy_input"):
        resolve(SearchOverrides(level=level), has_inputs=False)


@pytest.mark.parametrize("asked", [{"profile": "exhaustive"}, {"prefer": "memory"}, {"profile": "safe", "level": 2}])
def test_a_profile_falls_back_to_level_1(asked: dict[str, Any]) -> None:
    with_inputs = resolve(SearchOverrides(**asked))
    found = resolve(SearchOverrides(**asked), has_inputs=False)
    assert found.options.level == 1
    assert found.requested_level == with_inputs.options.level > 1
    note = f"Level 1 is used instead of level {found.requested_level}, which is measured"
    assert any(text.startswith(note) for text in found.notes)
    assert not any(text.startswith("Level 1 is used") for text in with_inputs.notes)


@pytest.mark.parametrize("asked", [{"level": 1}, {"level": 0}, {"profile": "safe"}])
def test_levels_0_and_1_need_none(asked: dict[str, Any]) -> None:
    assert resolve(SearchOverrides(**asked), has_inputs=False) == resolve(SearchOverrides(**asked))


# ---------------------------------------------------------------------------------------------- out of range


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("level", 9, "level is 9.*from 0 to 4"),
        ("level", -1, "level is -1"),
        ("gc_target_budget_ratio", 5.0, "gc_target_budget_ratio is 5"),
        ("gc_target_budget_ratio", 1.001, "gc_target_budget_ratio is 1.001"),
        ("gc_target_budget_ratio", math.nan, "gc_target_budget_ratio is nan"),
        ("temporal_split_factor", 1, "temporal_split_factor is 1.*at least 2"),
        ("max_split_rounds", -1, "max_split_rounds is -1.*at least 0"),
        ("max_slowdown", 0.9, "max_slowdown is 0.9.*at least 1"),
        ("max_slowdown", math.nan, "max_slowdown is nan"),
        ("max_candidates_per_round", -2, "max_candidates_per_round is -2"),
        ("profile", "fast", "profile is 'fast'.*safe, balanced, memory, exhaustive"),
        ("prefer", "safe", "prefer is 'safe'.*speed, balanced, memory"),
        ("checkpoint_budget", "all", "checkpoint_budget is 'all'"),
    ],
)
def test_a_value_out_of_its_range_is_an_error(name: str, value: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){said}") as error:
        resolve(SearchOverrides(**{name: value}))
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, UsageError)
    assert error.value.exit_code == 2


# ---------------------------------------------------------------------------------------------- which candidates


def module(path: str, order: int, first_input_bytes: int) -> ModuleTrace:
    """Module whose states and later calls, which are in ``input_bytes``, are not what counts."""
    return a_module(path, order=order, input_bytes=10**6, first_input_bytes=first_input_bytes)


CANDIDATES = [
    module(name, order, size) for order, (name, size) in enumerate(zip("abcde", [5, 9, 7, 9, 1], strict=True))
]


def chosen(candidates: list[ModuleTrace] = CANDIDATES, **limits: Any) -> tuple[str, str]:
    """The policy, and the paths selected."""
    selection = select(candidates, SearchOptions(**limits))
    assert selection.candidates == len(candidates)
    return selection.policy, "".join(m.path for m in selection.selected)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, ("all_candidates", "abcde")),
        ({"max_gc_wrapped_modules": 5}, ("budget_covers_all", "abcde")),
        ({"max_gc_wrapped_modules": 99}, ("budget_covers_all", "abcde")),
        ({"gc_target_budget_ratio": 1.0}, ("budget_covers_all", "abcde")),
        ({"gc_target_budget_ratio": 0.81}, ("budget_covers_all", "abcde")),
        ({"max_gc_wrapped_modules": 0}, ("explicit_zero_budget", "")),
        ({"max_gc_wrapped_modules": -3}, ("explicit_zero_budget", "")),
        ({"max_gc_wrapped_modules": 0, "gc_target_budget_ratio": 0.0}, ("explicit_zero_budget", "")),
        ({"gc_target_budget_ratio": 0.0}, ("zero_ratio_budget", "")),
        ({"gc_target_budget_ratio": -1.0}, ("zero_ratio_budget", "")),
        ({"max_gc_wrapped_modules": 3, "gc_target_budget_ratio": 0.0}, ("zero_ratio_budget", "")),
        ({"max_gc_wrapped_modules": 1}, ("largest_input_activations", "b")),
        ({"max_gc_wrapped_modules": 2}, ("largest_input_activations", "bd")),
        ({"max_gc_wrapped_modules": 3}, ("largest_input_activations", "bcd")),
        ({"gc_target_budget_ratio": 0.01}, ("largest_input_activations", "b")),
        ({"gc_target_budget_ratio": 0.4}, ("largest_input_activations", "bd")),
        ({"gc_target_budget_ratio": 0.5}, ("largest_input_activations", "bcd")),
        ({"gc_target_budget_ratio": 0.75}, ("largest_input_activations", "abcd")),
        ({"max_gc_wrapped_modules": 2, "gc_target_budget_ratio": 0.75}, ("largest_input_activations", "bd")),
        ({"max_gc_wrapped_modules": 4, "gc_target_budget_ratio": 0.4}, ("largest_input_activations", "bd")),
    ],
)
def test_selection(limits: dict[str, Any], expected: tuple[str, str]) -> None:
    assert chosen(**limits) == expected


@pytest.mark.parametrize("limits", [{}, {"max_gc_wrapped_modules": 0}, {"gc_target_budget_ratio": 0.5}])
def test_no_candidates(limits: dict[str, Any]) -> None:
    assert chosen([], **limits) == ("no_candidates", "")


def test_without_known_inputs_the_order_of_the_model_decides() -> None:
    unknown = [replace(m, first_input_bytes=0) for m in reversed(CANDIDATES)]
    assert chosen(unknown, max_gc_wrapped_modules=2) == ("fallback_module_order", "ab")
    assert chosen(unknown, max_gc_wrapped_modules=5) == ("budget_covers_all", "abcde")


def test_a_share_is_not_rounded_up_by_floating_point() -> None:
    hundred = [module(f"m{n}", n, n) for n in range(100)]
    assert len(select(hundred, SearchOptions(gc_target_budget_ratio=0.07)).selected) == 7


@given(st.integers(1, 40), st.none() | st.integers(-2, 45), st.none() | st.integers(-2, 20))
def test_the_smaller_limit_holds(count: int, limit: int | None, twentieths: int | None) -> None:
    ratio = None if twentieths is None else twentieths / 20
    candidates = [module(f"m{n}", n, n % 5) for n in range(count)]
    selected = select(candidates, SearchOptions(max_gc_wrapped_modules=limit, gc_target_budget_ratio=ratio)).selected
    by_share = count if twentieths is None else max(1, -(-count * twentieths // 20)) if twentieths > 0 else 0
    by_count = count if limit is None else max(0, min(limit, count))
    assert len(selected) == min(by_share, by_count)
    least = min((m.first_input_bytes for m in selected), default=0)
    assert all(m in selected or m.first_input_bytes <= least for m in candidates) or not selected


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "All 5 candidates"),
        ({"max_gc_wrapped_modules": 8}, "the budget covers them"),
        ({"max_gc_wrapped_modules": 0}, "max_gc_wrapped_modules=0 selects none of 5"),
        ({"gc_target_budget_ratio": 0.0}, "gc_target_budget_ratio=0 selects none of 5"),
        ({"max_gc_wrapped_modules": 2}, "The 2 of 5 candidates with the largest inputs"),
    ],
)
def test_a_selection_explains_itself(limits: dict[str, Any], said: str) -> None:
    assert said in select(CANDIDATES, SearchOptions(**limits)).explanation


def test_memopts_own_choice_explains_itself() -> None:
    own = policy.describe_choice(9, CANDIDATES[:2], SearchOptions())
    assert (own.policy, own.candidates, len(own.selected)) == ("least_predicted_peak", 9, 2)
    assert own.explanation == "2 of 9 candidates: the set with the lowest predicted peak."
    by_goal = policy.describe_choice(9, CANDIDATES[:2], SearchOptions(), by_goal=True)
    assert by_goal.explanation == "2 of 9 candidates: the fastest plan found for this peak."
    assert policy.describe_choice(0, [], SearchOptions()).policy == "no_candidates"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_gc_wrapped_modules": 0}, "explicit_zero_budget"),
        ({"max_gc_wrapped_modules": -1, "gc_target_budget_ratio": 0.5}, "explicit_zero_budget"),
        ({"gc_target_budget_ratio": 0.0}, "zero_ratio_budget"),
        ({"max_gc_wrapped_modules": 1}, "least_predicted_peak"),
    ],
)
def test_memopts_own_choice_says_why_it_is_none(limits: dict[str, Any], expected: str) -> None:
    own = policy.describe_choice(9, [], SearchOptions(**limits))
    assert own.policy == expected
    assert "9 candidates" in own.explanation


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, None),
        ({"max_gc_wrapped_modules": 3}, 3),
        ({"max_gc_wrapped_modules": -3}, 0),
        ({"gc_target_budget_ratio": 0.4}, 2),
        ({"gc_target_budget_ratio": 0.01}, 1),
        ({"gc_target_budget_ratio": 0.0}, 0),
        ({"max_gc_wrapped_modules": 1, "gc_target_budget_ratio": 0.4}, 1),
    ],
)
def test_how_many_segments_are_allowed(limits: dict[str, Any], most: int | None) -> None:
    assert max_segments(SearchOptions(**limits), 5) == most


# ---------------------------------------------------------------------------------------------- what is said of it


@pytest.mark.parametrize(
    ("level", "segments", "tried", "rounds", "expected"),
    [
        (2, 0, 0, None, "level2:no_gccontainers"),
        (3, 0, 0, None, "level3:no_gccontainers"),
        (4, 0, 0, None, "level4:no_gccontainers"),
        (2, 3, 0, None, "level2:no_spatial_candidates"),
        (3, 3, 0, None, "level3:no_temporal_candidates"),
        (2, 3, 5, None, "level2:no_improving_candidate"),
        (3, 3, 5, None, "level3:no_improving_candidate"),
        (2, 3, 0, 0, "level2:no_improving_candidate"),  # there may be candidates: none was to be tried
        (4, 3, 3, None, "level4:no_improving_candidate"),
        (1, 0, 4, None, "level1:no_improving_candidate"),
    ],
)
def test_skipped_steps(level: int, segments: int, tried: int, rounds: int | None, expected: str) -> None:
    options = SearchOptions(max_split_rounds=rounds)
    assert skipped_step(level, segments=segments, tried=tried, options=options) == expected


NONE = select([], SearchOptions())
SOME = select(CANDIDATES, SearchOptions())
MEASURED = "Measured: 9 MiB → 3 MiB, step 1 s → 2 s."
EVERYTHING: dict[str, Any] = {"prefer": "speed", "checkpoint_budget": "memory", "profile": "safe"}


@pytest.mark.parametrize(
    ("asked", "selection", "said"),
    [
        (EVERYTHING, NONE, "No module can become a segment"),
        (EVERYTHING, SOME, "prefer=speed"),
        ({"prefer": "balanced"}, SOME, "prefer=memory"),
        ({"prefer": "memory"}, SOME, "prefer=memory"),
        ({"checkpoint_budget": "speed", "profile": "safe"}, SOME, "checkpoint_budget=speed"),
        ({"checkpoint_budget": "memory", "profile": "exhaustive"}, SOME, "checkpoint_budget=memory"),
        ({"checkpoint_budget": "balanced", "profile": "safe"}, SOME, "profile=safe"),
        ({"checkpoint_budget": "speed", "profile": "safe", "max_gc_wrapped_modules": 3}, SOME, "profile=safe"),
        ({"profile": "safe"}, SOME, "profile=safe"),
        ({"profile": "exhaustive"}, SOME, "profile=exhaustive"),
        ({"profile": "balanced"}, SOME, "GENERIC"),
        ({"profile": "memory"}, SOME, "GENERIC"),
        ({"checkpoint_budget": "balanced"}, SOME, "GENERIC"),
        ({}, SOME, "GENERIC"),
        ({}, None, "GENERIC"),
    ],
)
def test_recommendations_by_priority(asked: dict[str, Any], selection: Selection | None, said: str) -> None:
    text = recommend(resolved(**asked), selection, measured=MEASURED, generic="GENERIC.")
    assert said in text.removesuffix(MEASURED)
    assert text.endswith(f" {MEASURED}")
    assert recommend(resolved(**asked), selection, measured="", generic="GENERIC.") == text.removesuffix(f" {MEASURED}")


def test_where_there_is_nothing_to_recommend_the_numbers_stand_alone() -> None:
    assert recommend(SearchOptions(), SOME, measured=MEASURED, generic="") == MEASURED

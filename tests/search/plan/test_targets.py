"""Which modules may become segments, as they are named: by class, by path or by object."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt_cli.errors import UsageError
from memopt_cli.records import ModuleTrace, SearchOptions, SegmentPlan
from memopt_cli.search.plan.levels import allowed_at
from memopt_cli.search.plan.schedules import SegmentLimits
from memopt_cli.search.plan.targets import (
    find_named_modules,
    find_outermost,
    find_refusals,
    loop_notes,
    match_targets,
    plain_segment,
    refusal_notes,
)
from tests.zoo.records import a_module


def module(path: str, class_name: str = "Layer", refusal: str = "") -> ModuleTrace:
    return a_module(
        path,
        class_name,
        input_bytes=8,
        input_shape=(8, 4),
        packed_input_bytes=1,
        compressor="bit",
        output_bytes=1,
        saved_bytes=100,
        refusal=refusal,
    )


def in_order(*modules: ModuleTrace) -> tuple[ModuleTrace, ...]:
    """Adds the root."""
    return tuple(replace(m, order=i) for i, m in enumerate((module("", "Net"), *modules)))


BLOCKS = in_order(
    module("a"),
    module("a.x", "Attention"),
    module("a.y", "Mlp"),
    module("b", "Other"),
    module("b.x", "Attention", refusal="it is parametrized"),
    module("b.y", "Mlp"),
)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("Attention",), ["a.x"]),
        (("Mlp", "Attention"), ["a.x", "a.y", "b.y"]),
        (("a",), ["a"]),
        (("?",), ["a", "b"]),
        (("*.y",), ["a.y", "b.y"]),
        (("a.y", "a"), ["a"]),
        (("Net",), [""]),
        (("Net", "Mlp"), [""]),
    ],
)
def test_targets_asked_for(targets: tuple[str, ...], expected: list[str]) -> None:
    assert [m.path for m in match_targets(BLOCKS, targets)] == expected
    assert find_named_modules(BLOCKS, SearchOptions(targets=targets)) == match_targets(BLOCKS, targets)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Conv2d", "target 'Conv2d' matches no module that the training step calls .*Attention, Layer, Mlp, Net"),
        ("mlp", "target 'mlp' matches no module"),
        ("b.x", "target 'b.x' matches 'b.x', which cannot be a segment: it is parametrized"),
    ],
)
@pytest.mark.parametrize("level", [1, 4])
def test_targets_that_match_nothing(level: int, target: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        allowed_at(level, SearchOptions(targets=("a", target)), BLOCKS, SegmentLimits())


@pytest.mark.parametrize(
    ("modules", "expected"),
    [(None, None), ((), []), (("b.y", "a.x", "a"), ["a", "b.y"]), (("b.x", "b.z"), [])],
)
def test_modules_asked_for_by_path(modules: tuple[str, ...] | None, expected: list[str] | None) -> None:
    found = find_named_modules(BLOCKS, SearchOptions(modules=modules))
    assert (None if found is None else [m.path for m in found]) == expected


def test_targets_come_before_modules() -> None:
    found = find_named_modules(BLOCKS, SearchOptions(targets=("b",), modules=("a",)))
    assert found is not None
    assert [m.path for m in found] == ["b"]


@pytest.mark.parametrize(
    ("level", "allowed"), [(1, ["b", "a.y"]), (2, ["b", "b.x", "b.y", "a.y"]), (4, ["b", "b.x", "b.y", "a.y"])]
)
def test_from_level_2_on_what_lies_in_a_target_is_one(level: int, allowed: list[str]) -> None:
    means = allowed_at(level, SearchOptions(targets=("b", "a.y")), BLOCKS, SegmentLimits())
    assert {m.path for m in BLOCKS if means.targets(m.path)} == {*allowed}


def test_without_targets_every_module_is_one() -> None:
    means = allowed_at(1, SearchOptions(), BLOCKS, SegmentLimits())
    assert all(means.targets(m.path) for m in BLOCKS)


def test_what_was_asked_for_and_cannot_be_is_noted() -> None:
    (note,) = refusal_notes(find_refusals(BLOCKS, SearchOptions(modules=("a", "b.x", "c"))))
    assert note == "These modules cannot be segments: 'b.x' (it is parametrized), 'c' (the step never calls it)."
    (note,) = refusal_notes(find_refusals(BLOCKS, SearchOptions(modules=("c", "d", "e", "f", "g"))))
    assert note.endswith("and 2 more.")
    assert refusal_notes(find_refusals(BLOCKS, SearchOptions(modules=("a",)))) == []


def test_a_loop_over_several_layers_is_noted() -> None:
    root, *layers = in_order(module("conv"), module("cell"), module("cell.spike"), module("fc"))
    looped = [root, *(replace(layer, calls=10) for layer in layers)]
    (note,) = loop_notes(looped)
    assert note.startswith("forward calls conv, cell, fc at least 10 times each, as a loop over time steps does.")
    assert note.endswith("(docs/spiking.md has an example).")
    assert loop_notes([*looped[:-1], replace(layers[-1], calls=1)]) == []
    assert loop_notes(looped[:-1]) == []  # two layers alone


def test_the_outermost_are_in_the_order_of_first_call() -> None:
    by_path = {m.path: m for m in BLOCKS}
    chosen = [by_path[path] for path in ("b", "a.y", "a.x", "b.y")]
    assert [m.path for m in find_outermost(chosen)] == ["a.x", "a.y", "b"]


@pytest.mark.parametrize(("compress", "compressor"), [(True, "bit"), (False, "null")])
def test_inputs_are_packed_if_that_is_wanted(compress: bool, compressor: str) -> None:
    assert plain_segment(BLOCKS[1], compress) == SegmentPlan(path="a", compressor=compressor)

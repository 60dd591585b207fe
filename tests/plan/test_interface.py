"""The called modules of a step, as a tree."""

from __future__ import annotations

import pytest

from memopt_cli.plan.interface import ModuleTree, is_within
from memopt_cli.records import ModuleTrace, StepTrace


def tree_of(*paths: str, calls: int = 1) -> ModuleTree:
    modules = (
        ModuleTrace(
            path=path,
            class_name="Layer",
            calls=calls,
            order=order,
            forward_s=0.0,
            input_bytes=0,
            input_shape=(),
            packed_input_bytes=0,
            compressor="null",
            output_bytes=0,
            saved_bytes=12,
        )
        for order, path in enumerate(("", *paths))
    )
    return ModuleTree(StepTrace(modules=tuple(modules), tensor_peak_bytes=0, resident_bytes=0, batch=1))


def test_children_are_the_nearest_called_modules() -> None:
    tree = tree_of("a", "a.list.0", "a.list.1", "holder.x", "ab")
    assert [m.path for m in tree.children("")] == ["a", "holder.x", "ab"]
    assert [m.path for m in tree.children("a")] == ["a.list.0", "a.list.1"]
    assert tree.children("ab") == []
    assert "a" in tree
    assert "a.list" not in tree


def test_every_called_module_is_in_the_tree_once() -> None:
    tree = tree_of("a", "a.x", "b")
    assert [m.path for m in tree] == ["", "a", "a.x", "b"]
    assert tree["a.x"].path == "a.x"
    with pytest.raises(KeyError):
        tree["a.y"]


def test_of_what_a_module_saves_one_call_has_its_share() -> None:
    assert tree_of("a", calls=4).saved_at_once("a") == 3


@pytest.mark.parametrize(
    ("path", "ancestor", "within"),
    [("a.b", "a", True), ("a", "a", True), ("a", "", True), ("", "", True), ("ab", "a", False), ("a", "a.b", False)],
)
def test_what_lies_within(path: str, ancestor: str, within: bool) -> None:
    assert is_within(path, ancestor) is within

"""The called modules of a step, and which lies in which."""

from __future__ import annotations

import pytest

from memopt_cli.plan.interface import ModuleTree, is_within
from memopt_cli.records import ModuleTrace, StepTrace


def tree_of(*paths: str) -> ModuleTree:
    modules = (
        ModuleTrace(
            path=path,
            class_name="Layer",
            calls=1,
            order=order,
            forward_s=0.0,
            input_bytes=0,
            input_shape=(),
            packed_input_bytes=0,
            compressor="null",
            output_bytes=0,
            saved_bytes=0,
        )
        for order, path in enumerate(("", *paths))
    )
    return ModuleTree(StepTrace(modules=tuple(modules), tensor_peak_bytes=0, resident_bytes=0, batch=1))


def test_every_called_module_is_in_the_tree_once() -> None:
    tree = tree_of("a", "a.x", "b")
    assert [m.path for m in tree] == ["", "a", "a.x", "b"]
    assert tree["a.x"].path == "a.x"
    with pytest.raises(KeyError):
        tree["a.y"]


@pytest.mark.parametrize(
    ("path", "ancestor", "within"),
    [("a.b", "a", True), ("a", "a", True), ("a", "", True), ("", "", True), ("ab", "a", False), ("a", "a.b", False)],
)
def test_what_lies_within(path: str, ancestor: str, within: bool) -> None:
    assert is_within(path, ancestor) is within

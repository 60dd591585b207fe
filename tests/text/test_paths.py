"""Paths in messages, and many paths in few rows."""

from __future__ import annotations

import pytest

from memopt_cli.text.paths import gather_paths, is_within, quote_module


def test_paths_that_differ_in_one_number_are_one_row() -> None:
    held = {"": 5, "blocks.0.mlp": 4, "blocks.1.mlp": 4, "blocks.0.attn": 7, "head": 6, "fc1": 1, "fc2": 1}
    assert list(gather_paths(held).items()) == [
        ("blocks.*.mlp (×2)", 8),
        ("blocks.0.attn", 7),
        ("head", 6),
        ("", 5),
        ("fc1", 1),
        ("fc2", 1),
    ]


def test_the_model_itself_has_a_name_in_messages() -> None:
    assert [quote_module(path) for path in ("", "blocks.0")] == ["'(root)'", "'blocks.0'"]


@pytest.mark.parametrize(
    ("path", "ancestor", "within"),
    [("a.b", "a", True), ("a", "a", True), ("a", "", True), ("", "", True), ("ab", "a", False), ("a", "a.b", False)],
)
def test_what_lies_within(path: str, ancestor: str, within: bool) -> None:
    assert is_within(path, ancestor) is within

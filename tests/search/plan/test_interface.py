"""Which modules lie in which."""

from __future__ import annotations

import pytest

from memopt_cli.search.plan.interface import is_within


@pytest.mark.parametrize(
    ("path", "ancestor", "within"),
    [("a.b", "a", True), ("a", "a", True), ("a", "", True), ("", "", True), ("ab", "a", False), ("a", "a.b", False)],
)
def test_what_lies_within(path: str, ancestor: str, within: bool) -> None:
    assert is_within(path, ancestor) is within

"""Which tests are marked as ones that start processes."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_one_that_starts_nothing_is_not_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("process") is None


def test_one_that_starts_a_process_is_marked(request: pytest.FixtureRequest) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert request.node.get_closest_marker("process") is not None

"""How tests are collected by several workers at once: each would do all the work of the others again."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Make ten thousand objects that stay, without looking for garbage among them all the time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 50)
    try:
        return (yield)
    finally:
        gc.set_threshold(*before)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let every other worker begin with the last file: from the middle on, it finds compiled what others have met."""
    report = yield
    if isinstance(collector, pytest.Dir) and _is_odd(os.environ.get("PYTEST_XDIST_WORKER", "gw0")):
        report.result.reverse()
    return report


def in_order(items: list[pytest.Item]) -> None:
    """All workers must find the same tests in the same order."""
    items.sort(key=lambda item: str(item.path))


def _is_odd(worker: str) -> bool:
    return int(worker.removeprefix("gw")) % 2 == 1

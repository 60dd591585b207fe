from __future__ import annotations

import pytest

from memopt_cli import ranks
from memopt_cli.measure.local import LocalSession


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """``predict_rank`` in this process, which has imported what shards models. A subprocess says the same, as a test of
    predictions shows.
    """
    monkeypatch.setattr(ranks, "Session", LocalSession)

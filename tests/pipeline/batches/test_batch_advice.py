"""The batch that ``memopt optimize`` recommends by dry runs."""

from __future__ import annotations

import math

import pytest

from memopt_cli.pipeline.batches.batch_advice import advise_by_dry_runs
from memopt_cli.records import BatchEstimate, BatchProbe
from memopt_cli.search.batch_size.batch_search import BatchSearch
from memopt_cli.search.batch_size.runs import Limits


@pytest.mark.parametrize(
    ("step_s", "budget_bytes", "because"),
    [
        (0.15, 18_000, ""),
        (0.8, 90_000, "its step would take about 1 min 12 s"),
        (90.0, 900, ""),
        (0.15, 1_500_000, "it is more than 1000 times the given batch"),
    ],
)
def test_a_batch_larger_than_anybody_trains_with_is_not_limited_by_memory(
    step_s: float, budget_bytes: int, because: str
) -> None:
    limits = Limits(budget_bytes=budget_bytes, device_bytes=1 << 30, runnable_bytes=1 << 30, name="", longest_step_s=1)
    search = BatchSearch(
        batch=10, probe=lambda _: pytest.fail("it ran"), predict=lambda batch: 100.0 * batch, limits=limits
    )
    search.runs[10] = BatchProbe(batch=10, allocated_peak_bytes=1000, step_s=step_s)
    advice = advise_by_dry_runs(search)
    assert isinstance(advice, BatchEstimate)
    assert math.isclose(advice.batch, budget_bytes / 100, rel_tol=0.01)
    assert (advice.because, advice.is_limited_by_memory) == (because, not because)

"""The cost model's sums of plans on one rank of many are what dry runs count there."""

from __future__ import annotations

import pytest

from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import CountJob, Subject, TraceJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.records import InputSpec, ModelSource, Plan, RankLayout, SegmentPlan, StepPeaks, StepSettings
from memopt_cli.search.plan.cost_model import CostModel
from tests.training.sharded.cases import BOTH, FULLY_SHARDED, REPLICATED, SEGMENTS, Case

PLANS = {
    "all blocks": SEGMENTS,
    "one block": Plan(segments=SEGMENTS.segments[1:2]),
    "parts that gather nothing": Plan(segments=tuple(SegmentPlan(path=f"blocks.{i}.attention") for i in range(3))),
}


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("case", "apart"),
    [(FULLY_SHARDED, 1e-3), (BOTH, 0.02), (REPLICATED[0], 1e-3)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_sums_are_what_dry_runs_count(case: Case, apart: float) -> None:
    subject = Subject(
        source=ModelSource(location="of a test"),
        spec=InputSpec(tensors=(parse_tensor(case.inputs),), source="a test"),
        settings=StepSettings(device="cpu"),
        data="none",
        layout=RankLayout(ranks=case.ranks, parallel="test.py:shard", mesh=case.mesh),
    )
    with LocalSession(subject, 60, case.build, {"test.py:shard": case.shard}) as session:
        traced = session.ask(TraceJob(plan=Plan(), fake=True))
        sums = CostModel(traced.trace)
        for name, plan in PLANS.items():
            counted = session.ask(CountJob(plan=plan, fake=True))
            assert isinstance(counted, StepPeaks)
            assert sums.predict(plan).allocated_peak_bytes == pytest.approx(counted.allocated_peak_bytes, rel=apart), (
                name
            )
            assert counted.allocated_peak_bytes < sums.peak_bytes, name

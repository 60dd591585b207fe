"""A plan that differs, without the segments that make it differ."""

from __future__ import annotations

import pytest

from memopt_cli.pipeline.plans.narrowing import agreeing_part
from memopt_cli.records import LeftOut, Plan, SegmentPlan, Verification
from tests.zoo.records import verified


def verification(*, passed: bool) -> Verification:
    return verified(
        passed=passed,
        compared=1,
        worst_name="" if passed else "gradient of a",
        worst_difference=0.0 if passed else 0.5,
        batch=2,
    )


def plan(count: int, *, packed: bool = False) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(count)), packed=packed)


@pytest.mark.parametrize("faulty", [{3}, {0, 7}, {1, 2, 6}, set(range(8))])
def test_those_at_fault_are_left_out(faulty: set[int]) -> None:
    runs = []

    def verify(tried: Plan) -> Verification:
        runs.append(tried)
        return verification(passed=not faulty & {int(segment.path) for segment in tried.segments})

    kept, left_out = agreeing_part(plan(8), verify)
    assert {int(segment.path) for segment in kept.segments} == {*range(8)} - faulty
    assert left_out == tuple(LeftOut(segment=str(i), difference="gradient of a differs by 0.5") for i in sorted(faulty))
    assert len(runs) <= 1 + 8 * len(faulty)


def test_two_that_differ_together_are_parted() -> None:
    kept, left_out = agreeing_part(
        plan(4), lambda tried: verification(passed=not {"1", "2"} <= {s.path for s in tried.segments})
    )
    assert {s.path for s in kept.segments} == {"0", "1"}
    beside = "together with others gradient of a differs by 0.5"
    assert left_out == (LeftOut(segment="2", difference=beside), LeftOut(segment="3", difference=beside))


def test_packing_is_left_out_by_itself() -> None:
    kept, left_out = agreeing_part(plan(2, packed=True), lambda tried: verification(passed=not tried.packed))
    assert (len(kept.segments), kept.packed) == (2, False)
    assert left_out == (LeftOut(segment=None, difference="gradient of a differs by 0.5"),)


def test_a_step_that_cannot_be_run_is_at_fault() -> None:
    _, left_out = agreeing_part(plan(1), lambda tried: None)
    assert left_out == (LeftOut(segment="0", difference="its step cannot be run"),)

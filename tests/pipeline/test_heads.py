"""What is said of heads that run through their loss."""

from __future__ import annotations

import pytest

from memopt_cli.pipeline.heads import heads_notes
from memopt_cli.records import Plan, SegmentPlan


def head(path: str) -> SegmentPlan:
    return SegmentPlan(path=path, chunks=4, through_loss=True)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(segments=(SegmentPlan(path="0", chunks=4),)), ""),
        (
            Plan(segments=(SegmentPlan(path="0"), head("head"))),
            "'head' runs in chunks through its loss, so its logits are not kept",
        ),
        (Plan(segments=(head("a"), head("b"))), "'a', 'b' run in chunks through their loss, so their logits are"),
    ],
)
def test_a_head_through_its_loss_is_named(plan: Plan, said: str) -> None:
    assert [note[: len(said)] for note in heads_notes(plan)] == [said] * bool(said)

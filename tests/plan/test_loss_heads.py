"""Chunks of a language model: which heads run through their losses, feed-forward blocks, and that searches use both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.chunking import capture_call, find_rule
from memopt_cli.plan.interface import Candidate, ModuleTree, NotTried, Probes
from memopt_cli.plan.loss_heads import loss_heads, with_heads
from memopt_cli.plan.planner import Planner, Priced
from memopt_cli.plan.search import Allowed
from memopt_cli.plan.strategies.greedy_unwrap import GreedyUnwrap
from memopt_cli.plan.strategies.temporal_split import TemporalSplit
from memopt_cli.records import Counted, Plan, Refused, SearchOptions, SegmentPlan, StepSettings, StepTrace
from memopt_cli.step import Step
from memopt_cli.trace import FakeStep
from memopt_cli.verify import verify

VOCABULARY = 600


class LanguageModel(nn.Module):
    """``loss`` makes the output of the logits and labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], object], hidden: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32)) for _ in range(4))
        )
        self.head = nn.Linear(32, VOCABULARY)
        self.loss = loss

    def forward(self, ids: Tensor) -> object:
        return self.loss(self.head(self.blocks(self.tokens(ids))), ids)


def alone(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def hugging_face(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    shifted = logits.float()[..., :-1, :].contiguous()
    return {"loss": F.cross_entropy(shifted.view(-1, VOCABULARY), labels[..., 1:].reshape(-1)), "logits": logits}


class Subject:
    """A step on tensors without data."""

    def __init__(self, loss: Callable[[Tensor, Tensor], object], hidden: int = 96) -> None:
        ids = torch.randint(VOCABULARY, (8, 64))
        self.fake = FakeStep(Step(model=LanguageModel(loss, hidden), args=(ids,), kwargs={}, settings=StepSettings()))
        self.tree = ModuleTree(self.record(Plan(level=0)))
        self.probes = Probes(
            count=self.count,
            chunking=lambda path: Refused(reason="no"),
            report=lambda line: None,
            trace=self.record,
        )
        self.start = Candidate(plan=Plan(level=0), counted=self.count(Plan(level=0)))

    def record(self, plan: Plan) -> StepTrace:
        apply_plan(self.fake.step.model, plan)
        try:
            return self.fake.record(batch=8)
        finally:
            remove_plan(self.fake.step.model)

    def count(self, plan: Plan) -> Counted:
        apply_plan(self.fake.step.model, plan)
        try:
            return self.fake.count()
        finally:
            remove_plan(self.fake.step.model)


@pytest.mark.parametrize("loss", [alone, hugging_face])
def test_the_head_of_a_language_model_is_found(loss: Callable[[Tensor, Tensor], object]) -> None:
    # 512 rows: four chunks of 128, though the logits are 19 times as large as the input.
    assert loss_heads(Subject(loss).tree) == (SegmentPlan(path="head", chunks=4, through_loss=True),)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: logits,
        lambda logits, labels: alone(logits, labels) + logits.logsumexp(-1).square().mean(),
        lambda logits, labels: {"loss": alone(logits, labels), "best": logits.argmax(-1)},
        lambda logits, labels: alone(logits / 2, labels),
    ],
)
def test_logits_that_others_read_are_made(loss: Callable[[Tensor, Tensor], object]) -> None:
    assert loss_heads(Subject(loss).tree) == ()


@pytest.mark.parametrize("loss", [alone, hugging_face])
def test_level_3_takes_the_head_first(loss: Callable[[Tensor, Tensor], object]) -> None:
    subject = Subject(loss)
    found = TemporalSplit().improve(subject.start, subject.tree, SearchOptions(), subject.probes)
    assert [s.path for s in found.best.plan.segments] == ["head"]
    assert found.best.peak_bytes < 0.7 * subject.start.peak_bytes
    asked = SearchOptions(targets=("blocks.0",))
    assert TemporalSplit().improve(subject.start, subject.tree, asked, subject.probes).best is subject.start


@pytest.mark.parametrize(("both", "kept"), [(0.5, ["one", "other"]), (1.0, [])])
def test_heads_that_stand_equally_high_go_together(
    both: float, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(alone)
    heads = tuple(SegmentPlan(path=path, chunks=4, through_loss=True) for path in ("one", "worse", "other"))
    monkeypatch.setattr("memopt_cli.plan.loss_heads.loss_heads", lambda tree: heads)

    def count(plan: Plan) -> Counted:
        paths = {segment.path for segment in plan.segments}
        share = 2.0 if "worse" in paths else both if len(paths) == 2 else 1.0
        counted = subject.start.counted
        return replace(counted, allocated_peak_bytes=int(share * counted.allocated_peak_bytes))

    found = with_heads(subject.start, subject.tree, replace(subject.probes, count=count))
    assert [segment.path for segment in found.best.plan.segments] == kept
    assert found.tried == 3


def test_a_planner_builds_on_the_head_through_its_loss() -> None:
    subject = Subject(alone)
    heads = loss_heads(subject.tree)
    ground = subject.record(Plan(level=3, segments=heads))
    planners = [
        Planner(trace, subject.probes, Allowed(), may_chunk=False, level=4, heads=used)
        for trace, used in ((subject.tree.trace, ()), (ground, heads))
    ]
    without, with_head = (planner.least(subject.start.peak_bytes) for planner in planners)
    assert without is not None
    assert with_head is not None
    assert with_head.peak_bytes < 0.7 * without.peak_bytes
    frontier = planners[1].frontier(Priced(candidate=subject.start, slowdown=1.0))
    assert frontier[0].candidate.plan.segments in ((), heads)
    assert all(heads[0] in priced.candidate.plan.segments for priced in frontier[1:])
    for priced in frontier:
        assert subject.count(priced.candidate.plan).allocated_peak_bytes == priced.peak_bytes


def test_level_4_prices_on_the_step_with_the_head_through_its_loss() -> None:
    """On the original step the logits are the peak, and hide what a block keeps."""
    subject = Subject(alone, hidden=256)
    blocks = tuple(SegmentPlan(path=f"blocks.{i}") for i in range(4))
    plan = Plan(level=3, segments=(*blocks, *loss_heads(subject.tree)))
    begun = Candidate(plan=plan, counted=subject.count(plan))
    found = GreedyUnwrap().improve(begun, subject.tree, SearchOptions(level=4), subject.probes).best
    assert found.peak_bytes <= begun.peak_bytes
    assert [s.keep for s in found.plan.segments] == [(), (), (), ("aten::addmm#1",), ()]
    assert subject.count(found.plan).allocated_peak_bytes == found.peak_bytes


def test_level_4_keeps_nothing_where_the_step_with_the_head_cannot_be_recorded() -> None:
    subject = Subject(alone, hidden=256)
    plan = Plan(level=3, segments=(SegmentPlan(path="blocks.3"), *loss_heads(subject.tree)))
    begun = Candidate(plan=plan, counted=subject.count(plan))
    asked: list[Plan] = []

    def trace(plan: Plan) -> NotTried:
        asked.append(plan)
        return NotTried(reason="time is up")

    probes = replace(subject.probes, trace=trace)
    found = GreedyUnwrap().improve(begun, subject.tree, SearchOptions(level=4), probes).best
    assert not any(segment.keep for segment in found.plan.segments)
    assert asked == [Plan(level=3, segments=loss_heads(subject.tree))]


def test_feed_forward_blocks_run_in_chunks_where_heads_no_longer_stand_at_the_peak() -> None:
    """That a block is independent along the batch is found by trying; the whole plan is verified."""
    subject = Subject(alone, hidden=1024)
    heads = loss_heads(subject.tree)
    ground = subject.record(Plan(level=3, segments=heads))
    ids = torch.randint(VOCABULARY, (8, 64))
    step = Step(model=LanguageModel(alone, hidden=1024).train(), args=(ids,), kwargs={}, settings=StepSettings())
    probes = replace(subject.probes, chunking=lambda path: find_rule(*capture_call(step, path)))
    high = subject.start.peak_bytes
    whole = Planner(ground, subject.probes, Allowed(), may_chunk=False, level=4, heads=heads).least(high)
    found = Planner(ground, probes, Allowed(), may_chunk=True, level=4, heads=heads).least(high)
    assert whole is not None
    assert found is not None
    assert found.peak_bytes < whole.peak_bytes
    plan = found.candidate.plan
    assert any(s.chunks > 1 and s.path.startswith("blocks") for s in plan.segments)
    checked = verify(step, plan, lambda m: apply_plan(m, plan), remove_plan, batch=8, full_size=True)
    assert checked.passed, checked
    assert checked.tolerance == 1e-9

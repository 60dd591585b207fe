"""Chunks of a language model: which heads run through their losses, feed-forward blocks, and that searches use both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.records import OpTrace, Plan, SegmentPlan, StepSettings, StepTrace
from memopt_cli.search.plan.cost_model import copy_times
from memopt_cli.search.plan.interface import NotTried
from memopt_cli.search.plan.loss_heads import add_heads, loss_heads
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.chunking import capture_call, find_rule
from memopt_cli.verification.recorded_step import verify_step
from tests.search.plan.subjects import Subject

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


def subject_of(loss: Callable[[Tensor, Tensor], object], hidden: int = 96) -> Subject:
    return Subject(LanguageModel(loss, hidden), torch.randint(VOCABULARY, (8, 64)))


def find_heads(subject: Subject) -> tuple[SegmentPlan, ...]:
    return loss_heads(subject.trace)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [alone, hugging_face])
def test_the_head_of_a_language_model_is_found(loss: Callable[[Tensor, Tensor], object]) -> None:
    # 512 rows: four chunks of 128, though the logits are 19 times as large as the input.
    assert find_heads(subject_of(loss)) == (SegmentPlan(path="head", chunks=4, through_loss=True),)


@pytest.mark.slow
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
    assert find_heads(subject_of(loss)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [alone, hugging_face])
def test_level_3_takes_the_head_first(loss: Callable[[Tensor, Tensor], object]) -> None:
    subject = subject_of(loss)
    plans = subject.planner(level=3)
    (head,) = find_heads(subject)
    assert head not in plans.least(2).plan.segments
    found = plans.least(3)
    assert head in found.plan.segments
    assert found.level == 3
    assert found.peak_bytes < 0.7 * subject.original.allocated_peak_bytes
    assert subject.dry_run(found.plan) == found.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"targets": ("blocks.0",)}, {"modules": ("blocks.0",)}, {"max_split_rounds": 0}])
def test_where_other_modules_or_no_chunks_are_asked_for_the_head_stays(asked: dict[str, Any]) -> None:
    plans = subject_of(alone).planner(**asked)
    plans.least(4)
    assert not any(s.through_loss for found in plans.dry_runs.up_to(4) for s in found.plan.segments)


@pytest.mark.slow
@pytest.mark.parametrize(("both", "kept"), [(0.5, ["one", "other"]), (1.0, [])])
def test_heads_that_stand_equally_high_go_together(
    both: float, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(alone)
    heads = tuple(SegmentPlan(path=path, chunks=4, through_loss=True) for path in ("one", "worse", "other"))
    monkeypatch.setattr("memopt_cli.search.plan.loss_heads.loss_heads", lambda trace: heads)
    tried: list[Plan] = []

    def count_peak(plan: Plan) -> float:
        tried.append(plan)
        paths = {segment.path for segment in plan.segments}
        return 1000.0 * (2.0 if "worse" in paths else both if len(paths) == 2 else 1.0)

    found = add_heads(Plan(), 1000, subject.trace, count_peak)
    assert [segment.path for segment in found.segments] == kept
    assert len(tried) == 3


def test_a_head_that_cannot_run_through_its_loss_stays() -> None:
    subject = subject_of(alone)
    assert add_heads(Plan(), 1000, subject.trace, lambda plan: math.inf) == Plan()


def test_a_head_takes_the_place_of_the_segments_in_it() -> None:
    subject = subject_of(alone)
    (head,) = find_heads(subject)
    start = Plan(segments=(SegmentPlan(path="head"), SegmentPlan(path="blocks")))
    tried: list[Plan] = []

    def count_peak(plan: Plan) -> float:
        tried.append(plan)
        return math.inf

    add_heads(start, 1000, subject.trace, count_peak)
    assert [plan.segments for plan in tried] == [(SegmentPlan(path="blocks"), head)]


@pytest.mark.slow
def test_a_planner_builds_on_the_head_through_its_loss() -> None:
    subject = subject_of(alone)
    (head,) = find_heads(subject)
    frontier = subject.planner().frontier(4)
    assert frontier[-1].peak_bytes < 0.7 * subject.planner().least(2).peak_bytes
    assert head in frontier[-1].plan.segments
    assert any(head in priced.plan.segments and len(priced.plan.segments) > 1 for priced in frontier)
    for priced in frontier:
        assert subject.dry_run(priced.plan) == priced.peak_bytes


@pytest.mark.slow
def test_level_4_prices_on_the_step_with_the_head_through_its_loss() -> None:
    """On the original step the logits are the peak, and hide what a block keeps."""
    subject = subject_of(alone, hidden=256)
    blocks = tuple(SegmentPlan(path=f"blocks.{i}") for i in range(4))
    budget = subject.dry_run(Plan(segments=(*blocks, *find_heads(subject))))
    three, four = (subject.planner(level=level).within(level, budget) for level in (3, 4))
    assert four.peak_bytes <= budget
    assert four.slowdown <= three.slowdown
    assert find_heads(subject)[0] in four.plan.segments


def test_the_smallest_plan_without_the_head_is_tried_with_it_wherever_a_search_begins() -> None:
    """Within a budget the step with the head is recorded first, and what sums of it miss was never tried."""
    plans = subject_of(alone).planner(level=3)
    heads = plans._level_search(3).space.proposals.heads
    assert heads
    found, plain = plans.least(3), plans.dry_runs.smallest(2).plan
    assert plain.segments
    both = plans.dry_runs.get(replace(plain, segments=(*plain.segments, *heads)))
    assert found.peak_bytes <= both.peak_bytes


@pytest.mark.slow
def test_the_step_with_the_head_is_recorded_once() -> None:
    subject = subject_of(alone)
    asked: list[Plan] = []

    def trace(plan: Plan) -> StepTrace:
        asked.append(plan)
        return subject.record(plan)

    plans = subject.planner_asking(replace(subject.probes(), trace=trace))
    plans.least(4)
    plans.frontier(4)
    assert asked == [Plan(segments=find_heads(subject))]


@pytest.mark.slow
def test_where_the_step_with_the_head_cannot_be_recorded_the_head_alone_may_be_in_a_plan() -> None:
    subject = subject_of(alone)
    probes = replace(subject.probes(), trace=lambda plan: NotTried(reason="time is up"))
    found = subject.planner_asking(probes).least(4)
    assert find_heads(subject)[0] in found.plan.segments
    assert subject.dry_run(found.plan) == found.peak_bytes


@pytest.mark.slow
def test_feed_forward_blocks_run_in_chunks_where_heads_no_longer_stand_at_the_peak() -> None:
    """That a block is independent along the batch is found by trying; the whole plan is verified."""
    subject = subject_of(alone, hidden=1024)
    ids = torch.randint(VOCABULARY, (8, 64))
    step = TrainingStep(
        model=LanguageModel(alone, hidden=1024).train(), args=(ids,), kwargs={}, settings=StepSettings()
    )
    whole = subject.planner().least(4)
    found = subject.planner(lambda path: find_rule(*capture_call(step, path))).least(4)
    assert found.peak_bytes < whole.peak_bytes
    plan = found.plan
    assert any(s.chunks > 1 and s.path.startswith("blocks") for s in plan.segments)
    checked = verify_step(step, plan, lambda m: apply_plan(m, plan), remove_plan, batch=8, full_size=True)
    assert checked.passed, checked
    assert checked.tolerance == 1e-9


def test_a_machine_that_is_faster_in_the_second_recording_does_not_make_the_head_faster() -> None:
    """All operators took half as long in the second recording, in which the head ran twice as many of its own."""

    def step(head: Sequence[str], seconds: float) -> StepTrace:
        names = ("aten::mm", "aten::add", *head)
        ops = tuple(OpTrace(name=name, module="", phase="forward", seconds=seconds) for name in names)
        return StepTrace(modules=(), tensor_peak_bytes=0, resident_bytes=0, batch=1, ops=ops)

    first, second = step(["aten::softmax"], 1.0), step(["aten::chunk", "aten::chunk"], 0.5)
    timed, slowdown = copy_times(second, first)
    assert [op.seconds for op in timed.ops] == [1.0] * 4
    assert slowdown == 4 / 3
    assert copy_times(step([], 0.0), step([], 0.0))[1] == 1.0

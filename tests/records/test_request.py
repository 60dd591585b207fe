"""A request exists only if its options go together, whoever makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memopt_cli.errors import OptionError
from memopt_cli.records import (
    BatchRequest,
    Budget,
    DimRange,
    ModelSource,
    OptimizeRequest,
    RankLayout,
    ResolvedSearch,
    SearchGoal,
    SearchOverrides,
    StepSettings,
)
from memopt_cli.search.estimation.cards import CARDS
from memopt_cli.search.plan.policy import resolve

SOURCE = ModelSource(location="model.pt")
CARD = CARDS["t4-16gb"]
LAYOUT = RankLayout(ranks=2, parallel="fsdp", mesh={"dp": 2})
RANGE = DimRange(symbol="S", low=8, high=64)
BUDGET, FRONTIER = SearchGoal(budget=Budget(nbytes=1024)), SearchGoal(frontier=True)


def searching(**asked: Any) -> ResolvedSearch:
    return resolve(SearchOverrides(**asked))


IN_BACKWARD, ADAMW = searching(optimizer_in_backward=True), StepSettings(optimizer="adamw")


def optimizing(**asked: Any) -> OptimizeRequest:
    return OptimizeRequest(source=SOURCE, spec=None, **{"search": searching(), **asked})


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"search": searching(level=0), "goal": BUDGET}, "but level 0 does not search"),
        ({"lengths": {8: 1}}, "`--lengths` gives the lengths of the inputs"),
        ({"dim_range": RANGE}, "a range of S needs a budget that the plans meet"),
        ({"dim_range": RANGE, "goal": FRONTIER}, "`--frontier` cannot be combined with a range"),
        ({"dim_range": RANGE, "goal": replace(FRONTIER, pick=1)}, "`--pick` cannot be combined with a range"),
        ({"dim_range": RANGE, "goal": BUDGET, "card": CARD, "unverified": True}, "`--unverified` is for one step"),
        ({"unverified": True}, "`--unverified` is for a step that is not run here"),
        ({"card": CARD, "goal": FRONTIER}, "`--frontier` needs steps that run, but `--for t4-16gb`"),
        ({"layout": LAYOUT, "measure_levels": True}, "`--measure-levels` needs steps that run, but `--ranks`"),
        ({"layout": LAYOUT, "record_steps": True}, r"`--html` \(or `--snapshot`\) needs steps"),
        ({"layout": LAYOUT, "goal": BUDGET, "dim_range": RANGE}, "`--dim` with a range needs steps"),
        ({"search": IN_BACKWARD}, "lets an optimizer run in backward, but none is named"),
        (
            {"search": IN_BACKWARD, "settings": replace(ADAMW, micro_batches=2)},
            "in-backward` cannot be combined with `--accumulate`",
        ),
        (
            {"search": IN_BACKWARD, "settings": replace(ADAMW, clip_norm=1.0)},
            "in-backward` cannot be combined with `--clip-norm`",
        ),
        (
            {"search": IN_BACKWARD, "settings": replace(ADAMW, precision="fp16")},
            "cannot be combined with `--precision fp16`",
        ),
        ({"search": IN_BACKWARD, "settings": ADAMW, "card": CARD}, "`--optimizer-in-backward` needs steps that run"),
        (
            {"search": IN_BACKWARD, "settings": ADAMW, "goal": BUDGET, "dim_range": RANGE},
            "`--optimizer-in-backward` cannot be combined with a range",
        ),
        ({"backend": "inductor", "search": searching(level=0)}, "level 0 does not search"),
        ({"backend": "inductor", "confirm_batch": True}, "without a compiler"),
        ({"backend": "inductor", "goal": BUDGET, "dim_range": RANGE}, "compiled again at every size"),
        ({"backend": "inductor", "card": CARD}, "`--compile` measures compiled steps, but `--for` runs none here"),
    ],
)
def test_what_an_optimization_cannot_be_asked(asked: dict[str, Any], refusal: str) -> None:
    with pytest.raises(OptionError, match=refusal):
        optimizing(**asked)


def test_an_optimization_runs_here_unless_it_is_for_a_device_or_ranks_elsewhere() -> None:
    assert optimizing(dim_range=RANGE, goal=BUDGET, lengths={8: 1}, record_steps=True, measure_levels=True).runs
    assert not optimizing(card=CARD, dim_range=RANGE, goal=BUDGET, record_steps=True).runs
    assert not optimizing(layout=LAYOUT, unverified=True).runs


def recommending(**asked: Any) -> BatchRequest:
    return BatchRequest(source=SOURCE, spec=None, **asked)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"search": searching(level=0)}, "level 0 allows none"),
        ({"search": searching(), "objective": "max"}, "`--objective max` cannot be combined with it"),
        ({"search": searching(), "replicas": RANGE}, "`--replicas` cannot be combined with it"),
        ({"card": CARD, "replicas": RANGE}, "`--replicas` needs steps that run, but no step runs for t4"),
        ({"card": CARD, "lengths_path": "l.txt"}, "`--lengths` needs steps that run"),
        ({"card": CARD, "strategies": ("bptt",), "dim_range": RANGE}, "`--strategy` needs steps"),
        ({"card": CARD, "search": searching()}, "`--search` needs steps that run, but no step runs for t4"),
        ({"fake": True, "objective": "throughput"}, "`--objective throughput` needs steps that run, .* without data"),
        ({"layouts": (LAYOUT,), "longest_step_s": 3.0}, "`--longest-step` needs steps .* on many ranks"),
        ({"layouts": (LAYOUT,)}, "memopt cannot tell the memory of a rank's device"),
        ({"layouts": (LAYOUT,), "card": CARD, "global_batch": 8}, "`--global-batch` cannot be used with `--ranks`"),
        ({"strategies": ("bptt",)}, "`--strategy` tabulates memory over time steps"),
        ({"strategies": ("bptt",), "dim_range": RANGE, "plan_path": "p.yaml"}, "does not use `--plan`"),
        ({"replicas": RANGE, "dim_range": RANGE}, "`--replicas` cannot be combined with a range of `--dim`"),
        ({"backend": "eager", "search": searching()}, "compiled steps, but `--search` measures or predicts others"),
        ({"backend": "eager", "replicas": RANGE}, "`--compile` measures compiled steps, but `--replicas`"),
        ({"backend": "eager", "lengths_path": "l.txt"}, "`--compile` measures compiled steps, but `--lengths`"),
        ({"backend": "eager", "dim_range": RANGE}, "`--compile` measures compiled steps, but `--dim` with a range"),
        ({"backend": "eager", "card": CARD}, "`--compile` measures compiled steps, but `--for`"),
        ({"backend": "eager", "fake": True}, "`--compile` measures compiled steps, but `--fake`"),
        ({"replicas": RANGE, "lengths_path": "l.txt"}, "`--replicas` cannot be combined with `--lengths`"),
        ({"global_batch": 512, "settings": StepSettings(micro_batches=4)}, "but `--accumulate 4` sets that number"),
    ],
)
def test_what_a_recommendation_cannot_be_asked(asked: dict[str, Any], refusal: str) -> None:
    with pytest.raises(OptionError, match=refusal):
        recommending(**asked)


def test_the_aim_of_a_recommendation_is_the_largest_batch_and_of_copies_the_fastest() -> None:
    assert recommending().aim == "max"
    assert recommending(replicas=RANGE).aim == "throughput"
    assert recommending(replicas=RANGE, objective="max").aim == "max"


def test_a_global_batch_is_made_up_of_passes() -> None:
    settings = StepSettings(seed=3)
    assert recommending(settings=settings).step == settings
    assert recommending(settings=settings, global_batch=8).step == replace(settings, micro_batches=2)

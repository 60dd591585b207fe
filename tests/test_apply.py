"""A plan goes onto a model whole or not at all, and comes off without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt_cli
from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import GCContainer, SegmentConfig, TCGCContainer, segment_of


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.ModuleList([nn.Linear(4, 4)]))


def plan(*paths: str) -> Plan:
    return Plan(level=1, segments=tuple(SegmentPlan(path=path) for path in paths))


def test_every_field_reaches_the_segment() -> None:
    model = net()
    segments = (
        SegmentPlan(path="0", compressor="bit", chunks=3, axis=1, seq_inputs=2, seq_outputs=4),
        SegmentPlan(path="1", compressor="sparse", spatial_split=True),
    )
    assert apply_plan(model, Plan(level=3, segments=segments)) is model
    assert segment_of(model[0]) == SegmentConfig(compressor="bit", chunks=3, axis=1, seq_inputs=2, seq_outputs=4)
    assert segment_of(model[1]) == SegmentConfig(compressor="sparse", spatial_split=True)
    assert isinstance(model[0], TCGCContainer)
    assert not isinstance(model[1], TCGCContainer)


def test_root_and_nested_targets() -> None:
    model = apply_plan(net()[:2], plan("", "1", "1.0"))
    assert all(isinstance(m, GCContainer) for m in (model, model[1], model[1][0]))
    assert segment_of(model[0]) is None
    model(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("0", "1.7"), "the plan names module '1.7', which Sequential does not have"),
        (("0", "nowhere.at.all"), "the plan names module 'nowhere.at.all'"),
        (("0", "2"), "module '2' cannot be a segment: ModuleList has no forward"),
        (("1", "0", "1"), "module '1' cannot be a segment: it is a segment already"),
    ],
)
def test_all_or_nothing(paths: tuple[str, ...], message: str) -> None:
    model = net()
    before = [(type(m), sorted(vars(m))) for m in model.modules()]
    with pytest.raises(PlanError) as error:
        apply_plan(model, plan(*paths))
    assert message in str(error.value)
    assert [(type(m), sorted(vars(m))) for m in model.modules()] == before


def test_a_failed_plan_leaves_an_earlier_one_alone() -> None:
    model = apply_plan(net(), plan("1"))
    with pytest.raises(PlanError):
        apply_plan(model, plan("0", "1"))
    assert segment_of(model[1]) is not None
    assert segment_of(model[0]) is None


def test_an_unknown_compressor_is_named() -> None:
    bad = Plan(level=1, segments=(SegmentPlan(path="0", compressor="zip"),))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="module '0' cannot be a segment: unknown compressor 'zip'"):
        apply_plan(net(), bad)


def test_the_root_is_named() -> None:
    with pytest.raises(PlanError, match=r"module '\(root\)' cannot be a segment"):
        apply_plan(nn.ModuleList(), plan(""))


def test_removal_restores_the_classes() -> None:
    model = net()
    before = [(type(m), sorted(vars(m))) for m in model.modules()]
    apply_plan(model, plan("", "0", "1", "1.0"))
    assert remove_plan(model) is model
    assert [(type(m), sorted(vars(m))) for m in model.modules()] == before
    assert remove_plan(model) is model


def test_it_is_public() -> None:
    assert memopt_cli.apply_plan is apply_plan

"""Baseline against measurement, on records made by hand: verdicts at the limit, causes, renames, like with like."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.pipeline import renames
from memopt_cli.pipeline.comparisons.baselines import MAX_SAVED_TENSORS, comparable_terms, compare, judge
from memopt_cli.pipeline.renames import find_renames
from memopt_cli.records import (
    METRICS,
    Baseline,
    Breakdown,
    Change,
    Comparison,
    Conditions,
    InputDimension,
    InputSpec,
    ModuleBytes,
    PeakPlace,
    Plan,
    PlanChange,
    PlanRange,
    Rename,
    SavedGrowth,
    SavedTensor,
    SegmentPlan,
    ShorterStep,
    StepMemory,
    StepSettings,
    TensorSpec,
)
from tests.zoo.records import a_header

NOTHING = dict.fromkeys((f"{kind}_bytes" for kind in METRICS[4:]), 0)
SETTINGS = StepSettings()
PEAK = parse_limit("peak:0")


def a_module(path: str, class_name: str = "Linear", output: int = 10, **held: int) -> ModuleBytes:
    return ModuleBytes(path=path, class_name=class_name, output_bytes=output, held_bytes=held)


def a_saved(nbytes: int, module: str = "head", op: str = "aten::mm") -> SavedTensor:
    return SavedTensor(
        nbytes=nbytes, made_by="aten::relu", module=module, op=op, savers=1, compressor="null", packed_bytes=nbytes
    )


def a_baseline(*modules: ModuleBytes, peak: int = 1000, settings: StepSettings = SETTINGS, **memory: Any) -> Baseline:
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 8}, source="here")
    header = a_header(sha256="ab", spec=spec)
    made: dict[str, Any] = {
        "plan": Plan(),
        "tensor_peak_bytes": peak,
        "allocated_peak_bytes": peak,
        "step_s": 0.5,
        "breakdown": Breakdown(**NOTHING),
        "peak": PeakPlace(op="aten::mm", module="head", phase="backward"),
        "modules": modules,
    }
    return Baseline(
        header=header,
        conditions=Conditions(
            settings=settings, backend=("mkldnn",), device_name="a processor", python="3.11.1", threads=4
        ),
        memory=StepMemory(**(made | memory)),
    )


@pytest.mark.parametrize(
    ("limit", "before", "after", "exceeded"),
    [
        ("peak:0", 100, 100, False),
        ("peak:0", 100, 101, True),
        ("peak:0", 100, 1, False),
        ("peak:29%", 100, 129, False),  # in floating point 29 % of 100 are less than 29
        ("peak:29%", 100, 130, True),
        ("peak:0%", 100, 101, True),
        ("peak:150%", 100, 250, False),
        ("peak:1KiB", 100, 1124, False),
        ("peak:1KiB", 100, 1125, True),
        ("buffers:5%", 0, 1, True),
        ("peak:0", 2**60, 2**60 + 1, True),
        ("step:50ms", 0.5, 0.55, False),
        ("step:50ms", 0.5, 0.56, True),
        ("step:20%", 0.5, 0.61, True),
    ],
)
def test_growth_up_to_the_limit_is_within_it(limit: str, before: float, after: float, exceeded: bool) -> None:
    parsed = parse_limit(limit)
    assert judge(parsed, Change(metric=parsed.metric, before=before, after=after)).exceeded is exceeded


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(0, 300))
def test_percentages_are_exact(before: int, after: int, percent: int) -> None:
    verdict = judge(parse_limit(f"peak:{percent}%"), Change(metric="peak", before=before, after=after))
    assert verdict.exceeded is (100 * (after - before) > percent * before)


def test_every_metric_is_judged_by_its_own_value() -> None:
    sizes = {name: 100 + rank for rank, name in enumerate(NOTHING)}
    old = a_baseline()
    new = a_baseline(peak=1001, allocated_peak_bytes=2000, step_s=0.75, breakdown=Breakdown(**sizes), elsewhere_bytes=7)
    found = compare(old, new, [parse_limit(f"{metric}:{'0s' if metric == 'step' else 0}") for metric in METRICS])
    assert len(found.exceeded) == len(METRICS)
    values = {change.metric: change.after for change in found.changes}
    assert values == {
        "peak": 1001,
        "allocated": 2000,
        "step": 0.75,
        "offloaded": 7,
        **{name.removesuffix("_bytes"): size for name, size in sizes.items()},
    }


def test_each_limit_is_a_limit_of_its_own() -> None:
    found = compare(a_baseline(peak=1000), a_baseline(peak=1060), list(map(parse_limit, ("peak:5%", "peak:64B"))))
    assert [verdict.exceeded for verdict in found.verdicts] == [True, False]
    assert [verdict.limit.text for verdict in found.exceeded] == ["peak:5%"]


def by_length(shorter: dict[int, int], peak: int = 1000) -> Baseline:
    """Peaks at shorter inputs."""
    longest = a_baseline(peak=peak)
    steps = (ShorterStep(dim="S", size=size, memory=a_baseline(peak=now).memory) for size, now in shorter.items())
    return replace(longest, shorter=tuple(steps))


def test_a_limit_is_one_at_every_length_that_both_have() -> None:
    found = compare(by_length({16: 100, 64: 500, 128: 800}), by_length({16: 100, 64: 600, 96: 9999}), [PEAK])
    assert [part.at for part in found.parts] == ["", "S=16", "S=64"]
    assert [(verdict.at, verdict.exceeded) for part in found.parts for verdict in part.verdicts] == [
        ("", False),
        ("S=16", False),
        ("S=64", True),
    ]
    assert [verdict.at for verdict in found.exceeded] == ["S=64"]
    assert found.shorter[1].after.spec.dims == {"B": 8, "S": 64}
    assert [(d.name, d.before, d.after) for d in found.unlike] == [
        ("shorter inputs", "S=16, S=64, S=128", "S=16, S=64, S=96")
    ]


def test_a_plan_by_length_is_compared_where_it_is_measured() -> None:
    ranges = (PlanRange(up_to=64, segments=(SegmentPlan(path="a"),)), PlanRange(up_to=128, packed=True))
    plan = Plan(by=InputDimension(dim="B", argument=0, axis=0), ranges=ranges)
    found = compare(a_baseline(plan=plan), a_baseline(plan=Plan()))
    assert found.plan == PlanChange(dropped=("a",))  # the inputs are of 8


def test_terms_tell_sizes_and_not_symbols() -> None:
    old = a_baseline()
    same = InputSpec(tensors=(TensorSpec(shape=(8, 3)),), source="elsewhere")
    assert comparable_terms(replace(old, header=replace(old.header, spec=same))) == comparable_terms(old)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"precision": "bf16"}, "precision"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"loss": "l.py:f"}, "loss"),
    ],
)
def test_another_step_is_unlike(changed: dict[str, Any], name: str) -> None:
    (difference,) = compare(a_baseline(), a_baseline(settings=StepSettings(**changed))).unlike
    assert difference.name == name
    assert difference.after == changed[name]


@pytest.mark.parametrize(
    ("header", "name"), [({"device": "cuda:0"}, "device kind"), ({"seed": 1}, "seed"), ({"spec": None}, "inputs")]
)
def test_another_origin_is_unlike(header: dict[str, Any], name: str) -> None:
    old = a_baseline()
    spec = replace(old.header.spec, dims={"B": 9})
    new = replace(old, header=replace(old.header, **{k: v if v is not None else spec for k, v in header.items()}))
    assert [difference.name for difference in compare(old, new).unlike] == [name]


def test_another_cuda_device_is_of_the_same_kind() -> None:
    old, new = (replace(a_baseline(), header=replace(a_baseline().header, device=f"cuda:{i}")) for i in range(2))
    assert compare(old, new).unlike == ()


def test_versions_and_machines_are_told() -> None:
    old = a_baseline()
    assert old.conditions is not None
    new = replace(
        old, header=replace(old.header, torch="2.14"), conditions=replace(old.conditions, threads=8, backend=())
    )
    found = compare(old, new)
    assert [(d.name, d.before, d.after) for d in found.surroundings] == [
        ("torch", "2.13.0", "2.14"),
        ("threads", "4", "8"),
    ]
    assert [(d.name, d.before, d.after) for d in found.unlike] == [("backend", "mkldnn", "none")]


def test_modules_by_growth() -> None:
    old = a_baseline(a_module("a", parameters=10), a_module("b", activations=50), a_module("c", buffers=1))
    new = a_baseline(a_module("a", parameters=15), a_module("b", activations=20), a_module("d", "Conv2d", gradients=3))
    found = compare(old, new)
    assert [(m.path, m.before_bytes, m.after_bytes, m.growth_bytes) for m in found.modules] == [
        ("a", 10, 15, {"parameters": 5}),
        ("d", 0, 3, {"gradients": 3}),
        ("c", 1, 0, {"buffers": -1}),
        ("b", 50, 20, {"activations": -30}),
    ]


def test_bytes_that_change_their_category_are_a_change() -> None:
    (change,) = compare(a_baseline(a_module("a", parameters=4)), a_baseline(a_module("a", buffers=4))).modules
    assert change.growth_bytes == {"parameters": -4, "buffers": 4}


def test_new_tensors_are_those_without_a_counterpart() -> None:
    old = a_baseline(saved=(a_saved(30), a_saved(20), a_saved(20)))
    new = a_baseline(saved=(a_saved(40), a_saved(30, op="aten::mul"), a_saved(20), a_saved(20), a_saved(20)))
    found = compare(old, new)
    assert found.new_saved == (a_saved(30, op="aten::mul"), a_saved(20))
    assert found.grown_saved == (SavedGrowth(saved=a_saved(40), before_bytes=30),)


def test_a_tensor_too_small_for_the_baseline_is_not_called_new() -> None:
    old = a_baseline(saved=tuple(a_saved(100 + i) for i in reversed(range(MAX_SAVED_TENSORS))))
    new = a_baseline(saved=(*old.memory.saved[1:], a_saved(99, op="aten::mul")))
    assert compare(old, new).new_saved == ()


def test_plans() -> None:
    old = Plan(segments=(SegmentPlan(path="a"), SegmentPlan(path="b"), SegmentPlan(path="c")))
    new = Plan(segments=(SegmentPlan(path="c"), SegmentPlan(path="b", chunks=2), SegmentPlan(path="d")))
    found = compare(a_baseline(plan=old), a_baseline(plan=new)).plan
    assert found == PlanChange(dropped=("a",), added=("d",), changed=("b",))
    packed = a_baseline(plan=Plan(packed=True))
    assert compare(packed, a_baseline()).plan == PlanChange(packing="dropped")
    assert compare(a_baseline(), packed).plan == PlanChange(packing="added")


def test_a_plan_that_sends_no_longer_is_named() -> None:
    sent = a_baseline(plan=Plan(segments=(SegmentPlan(path="a", place="disk"),), place="disk"))
    kept = a_baseline(plan=Plan(segments=(SegmentPlan(path="a"),)))
    assert compare(sent, kept).plan == PlanChange(sending="dropped", changed=("a",))
    assert compare(kept, sent).plan == PlanChange(sending="added", changed=("a",))


def test_where_the_peak_is() -> None:
    moved = PeakPlace(op="aten::mm", module="body", phase="backward")
    assert compare(a_baseline(), a_baseline(peak=1)).peak_moved is False
    found = compare(a_baseline(), replace(a_baseline(), memory=replace(a_baseline().memory, peak=moved)))
    assert found.peak_moved
    assert found.peak_after == moved


def test_without_a_record_nothing_is_said_of_modules() -> None:
    old = a_baseline(a_module("a", parameters=4), saved=(a_saved(3),))
    summary = replace(
        old,
        conditions=None,
        memory=StepMemory(
            plan=Plan(),
            tensor_peak_bytes=900,
            allocated_peak_bytes=900,
            step_s=1,
            breakdown=Breakdown(**NOTHING),
        ),
    )
    found = compare(summary, old)
    assert (found.modules, found.new_saved, found.peak_moved) == ((), (), False)
    assert found.changes[0].before == 900


def blocks(stem: str, count: int = 3) -> list[ModuleBytes]:
    inner = [
        module
        for i in range(count)
        for module in (
            a_module(f"{stem}.{i}", "Block", 80),
            a_module(f"{stem}.{i}.fc", "Linear", 40, parameters=16),
            a_module(f"{stem}.{i}.act", "ReLU", 40, activations=40),
        )
    ]
    return [a_module(stem, "Sequential", 80 * count), *inner]


def renamed(old: list[ModuleBytes], new: list[ModuleBytes]) -> Comparison:
    return compare(a_baseline(*old), a_baseline(*new))


def test_a_renamed_branch_is_one_rename_and_no_change() -> None:
    found = renamed([a_module(""), *blocks("features")], [a_module(""), *blocks("body.backbone")])
    assert found.renames == (Rename(before="features", after="body.backbone", modules=10),)
    assert found.modules == ()


def test_a_model_put_into_another() -> None:
    found = renamed([a_module("", "Net"), *blocks("features")], [a_module("", "Wrapper"), *blocks("net.features")])
    assert found.renames == (Rename(before="", after="net", modules=10),)
    back = renamed([a_module("", "Wrapper"), *blocks("net.features")], [a_module("", "Net"), *blocks("features")])
    assert back.renames == (Rename(before="net", after="", modules=10),)


def test_a_module_renamed_and_widened_is_told_at_its_new_path() -> None:
    new = blocks("backbone")
    new[5] = replace(new[5], output_bytes=60, held_bytes={"parameters": 24})
    found = renamed(blocks("features"), new)
    assert found.renames == (Rename(before="features", after="backbone", modules=10),)
    (change,) = found.modules
    assert (change.path, change.was) == ("backbone.1.fc", "features.1.fc")
    assert change.growth_bytes == {"parameters": 8}


def test_the_state_of_the_optimizer_is_not_the_root_modules() -> None:
    old = a_baseline(a_module("", "Net", inputs=100, optimizer=800, temporaries=8))
    new = a_baseline(a_module("", "Net", inputs=100, optimizer=1600, temporaries=9))
    step, root = compare(old, new).modules
    assert (step.path, step.class_name) == ("(the step)", "inputs, optimizer")
    assert (step.before_bytes, step.after_bytes, step.growth_bytes) == (900, 1700, {"optimizer": 800})
    assert (root.path, root.class_name, root.growth_bytes) == ("", "Net", {"temporaries": 1})


def test_a_block_fewer_under_another_name() -> None:
    found = renamed(blocks("features", 4), blocks("backbone", 3))
    assert found.renames == (Rename(before="features", after="backbone", modules=10),)
    assert [(m.path, m.after_bytes) for m in found.modules] == [("features.3.fc", 0), ("features.3.act", 0)]


def test_another_class_is_no_rename() -> None:
    old = [a_module("a", "Linear", 10, parameters=4)]
    assert find_renames(old, [a_module("b", "Conv2d", 10, parameters=4)]) == ((), {})
    assert find_renames(old, [a_module("b", "Linear", 10, parameters=4)])[1] == {"a": "b"}


def test_in_a_renamed_part_the_class_may_be_renamed_too() -> None:
    old = [a_module("up.0", "ConvBlock", 10), a_module("up.0.conv", "Conv2d", 10, parameters=4)]
    new = [a_module("decoder.0", "DoubleConv", 10), a_module("decoder.0.conv", "Conv2d", 10, parameters=4)]
    renames, moves = find_renames(old, new)
    assert renames == (Rename(before="up", after="decoder", modules=2),)
    assert moves == {"up.0": "decoder.0", "up.0.conv": "decoder.0.conv"}
    new[0] = a_module("decoder.0", "DoubleConv", 20)
    assert "up.0" not in find_renames(old, new)[1]


def test_a_module_with_no_equal_is_renamed_if_it_is_the_only_one_of_its_class() -> None:
    old = [a_module("rnn", "GRU", 10, parameters=4), *blocks("head", 1)]
    new = [a_module("temporal", "GRU", 20, parameters=8), *blocks("head", 1)]
    found = renamed(old, new)
    assert found.renames == (Rename(before="rnn", after="temporal", modules=1),)
    (change,) = found.modules
    assert (change.path, change.was, change.before_bytes, change.after_bytes) == ("temporal", "rnn", 4, 8)
    assert find_renames(old, [*new, a_module("second", "GRU", 30, parameters=9)]) == ((), {})


def test_what_stays_in_its_place_is_not_renamed() -> None:
    old = [a_module("a", parameters=4)]
    assert find_renames(old, [*old, a_module("b", parameters=4)]) == ((), {})
    assert find_renames([*old, a_module("b", parameters=4)], old) == ((), {})


def test_a_rename_moves_neither_the_peak_nor_tensors_nor_segments() -> None:
    plan = Plan(segments=(SegmentPlan(path="features.0"),))
    place = PeakPlace(op="aten::mm", module="features.0.fc", phase="backward")
    old = a_baseline(*blocks("features"), saved=(a_saved(5, "features.0.act"),), plan=plan)
    new = a_baseline(
        *blocks("backbone"),
        saved=(a_saved(5, "backbone.0.act"),),
        plan=Plan(segments=(SegmentPlan(path="backbone.0"),)),
    )
    old = replace(old, memory=replace(old.memory, peak=place))
    new = replace(new, memory=replace(new.memory, peak=replace(place, module="backbone.0.fc")))
    found = compare(old, new)
    assert (found.new_saved, found.plan, found.peak_moved) == ((), PlanChange(), False)


def scattered(count: int) -> tuple[list[str], list[str]]:
    """Every module moved into another one of its own."""
    return [f"x{i}" for i in range(count)], [f"p{i}.x{i}" for i in range(count)]


def gathered(count: int) -> tuple[list[str], list[str]]:
    """Every module moved out of one of its own."""
    return [f"p{i}.x{i}" for i in range(count)], [f"x{i}" for i in range(count)]


def crossed(count: int) -> tuple[list[str], list[str]]:
    """Every branch was spread over every other one."""
    side = math.isqrt(count)
    pairs = [(i, j) for i in range(side) for j in range(side)]
    return [f"a{i}.b{j}.x{i}" for i, j in pairs], [f"c{j}.d{i}.y{i}{j}" for i, j in pairs]


@pytest.mark.parametrize("paths", [scattered, gathered, crossed])
def test_looking_for_renames_takes_hardly_more_than_in_proportion(
    paths: Callable[[int], tuple[list[str], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    plain = renames._replace_prefix

    def counted(*given: str) -> str:
        nonlocal calls
        calls += 1
        return plain(*given)

    monkeypatch.setattr(renames, "_replace_prefix", counted)
    spent = []
    for count in (400, 1600):
        calls = 0
        old, new = ([a_module(path) for path in side] for side in paths(count))
        find_renames(old, new)
        spent.append(calls)
    assert spent[1] < 9 * max(spent[0], 400)  # four times as many: 16 times as much, if each is compared with each


@given(st.lists(st.sampled_from("abcd"), max_size=6), st.lists(st.sampled_from("abcd"), max_size=6))
def test_no_two_modules_become_one(before: list[str], after: list[str]) -> None:
    old, new = ([a_module(".".join(names[: i + 1])) for i in range(len(names))] for names in (before, after))
    renames, moves = find_renames(old, new)
    assert len(set(moves.values())) == len(moves) == sum(rename.modules for rename in renames)
    assert moves.keys() <= {m.path for m in old} - {m.path for m in new}
    assert set(moves.values()) <= {m.path for m in new} - {m.path for m in old}

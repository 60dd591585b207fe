"""Shapes against models and limits, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memopt_cli.batching.requirements import ShapeRequirements, infer_requirements, sample_input
from memopt_cli.batching.validator import BatchShapeValidator
from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.records import ShapeValidation

EVERY = ShapeRequirements(
    ndim=(3,), fixed={-1: 16}, minimum={1: 2}, maximum={1: 9}, divisible_by={1: 3}, dtype="float32"
)


def issues_of(shape: tuple[int, ...], wanted: Any = None, limits: Any = None, **options: Any) -> list[str]:
    config = ShapeValidation(**{"performance_validation": False, **options})
    valid, issues = BatchShapeValidator(config=config).validate_batch_shape(shape, wanted, limits)
    assert valid == (not issues)
    return issues


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 6, 16), []),
        ((8, 6, 17), ["axis -1 has size 17; it must be 16"]),
        ((8, 1, 16), ["axis 1 has size 1; it must be at least 2", "axis 1 has size 1; it must be a multiple of 3"]),
        ((8, 12, 16), ["axis 1 has size 12; it must be at most 9"]),
        ((8, 5, 16), ["axis 1 has size 5; it must be a multiple of 3"]),
        ((8, 6, 1, 16), ["the batch has 4 dimensions; the model takes 3"]),
    ],
)
def test_each_requirement(shape: tuple[int, ...], expected: list[str]) -> None:
    assert issues_of(shape, EVERY) == expected


def test_requirements_can_be_plain_values() -> None:
    assert issues_of((4, 3), {"fixed": {1: 5}}) == ["axis 1 has size 3; it must be 5"]
    assert issues_of((4,), {"minimum": {2: 5}}) == ["the batch has no axis 2 (shape (4,)), which must be at least 5"]
    with pytest.raises(UsageError, match="unknown key 'fix'"):
        issues_of((4, 3), {"fix": {1: 5}})


def test_the_dtype_is_checked_where_it_is_given() -> None:
    validator = BatchShapeValidator()
    assert validator.validate_batch_shape((8, 3), {"dtype": "int64"}) == (True, [])
    assert validator.validate_batch_shape((8, 3), {"dtype": "int64"}, dtype="float32") == (
        False,
        ["the dtype is float32; the model takes int64"],
    )


def test_hardware_limits() -> None:
    limits = {"max_batch_size": 128, "max_seq_len": 2048}
    assert issues_of((128, 2048, 8), None, limits) == issues_of((128, 9999, 2048, 8), None, limits) == []
    assert issues_of((129, 8), None, limits) == ["the batch size 129 is above the limit of 128"]
    assert issues_of((8, 2049, 8), None, limits) == ["the sequence length 2049 is above the limit of 2048"]
    assert issues_of((8, 2, 2049, 8), None, limits) == ["the sequence length 2049 is above the limit of 2048"]
    assert issues_of((129, 2049, 8), None, limits, hardware_checks=False) == []
    with pytest.raises(UsageError, match="unknown key 'max_batch'"):
        issues_of((8, 8), None, {"max_batch": 3})


def test_strict_mode_raises() -> None:
    with pytest.raises(ValueError, match=r"a batch of shape \(8, 3\) is not valid: axis 1 has size 3; it must be 5"):
        issues_of((8, 3), {"fixed": {1: 5}}, strict_mode=True)
    assert issues_of((8, 5), {"fixed": {1: 5}}, strict_mode=True) == []


def test_slow_sizes_are_noted_but_valid() -> None:
    note = "performance: the batch size 12 is not a multiple of 8; 16 would use the same matrix tiles"
    assert BatchShapeValidator().validate_batch_shape((12, 4)) == (True, [note])
    assert issues_of((12, 4)) == []


@pytest.mark.parametrize("shape", [(), (0, 3), (2, -1), (2.0, 3)])
def test_impossible_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(BatchShapeError, match="is not a batch shape"):
        BatchShapeValidator().validate_batch_shape(shape)


MODELS: list[tuple[nn.Module, tuple[int, ...], tuple[int, ...]]] = [
    (nn.Linear(5, 2), (4, 5), (4, 6)),
    (nn.Sequential(nn.ReLU(), nn.Conv1d(3, 2, 5)), (4, 3, 5), (4, 3, 4)),
    (nn.Conv2d(3, 2, 3, dilation=2, padding=1), (4, 3, 3, 3), (4, 3, 3, 2)),
    (nn.Conv2d(3, 2, 3, padding="same"), (4, 3, 1, 1), (4, 2, 1, 1)),
    (nn.Conv3d(3, 2, 2), (4, 3, 2, 2, 2), (4, 3, 2, 2, 1)),
    (nn.LSTM(5, 2, batch_first=True), (4, 3, 5), (4, 3, 6)),
    (nn.GRUCell(5, 2), (4, 5), (4, 6)),
]


@pytest.mark.parametrize(("model", "right", "wrong"), MODELS)
def test_the_first_layer_says_what_it_takes(model: nn.Module, right: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    requirements = infer_requirements(model)
    assert requirements.issues(right) == []
    assert requirements.issues(wrong)
    model(sample_input(right, requirements, "cpu"))
    with pytest.raises(RuntimeError):
        model(sample_input(wrong, requirements, "cpu"))


def test_an_embedding_takes_its_rows() -> None:
    model = nn.Embedding(3, 2)
    requirements = infer_requirements(model)
    sample = sample_input((50, 4), requirements, "cpu")
    assert sample.dtype == torch.int64
    assert set(sample.flatten().tolist()) == {0, 1, 2}
    assert requirements.issues((4,), "float32") == ["the dtype is float32; the model takes int64"]


def test_the_dtype_of_a_layer_is_that_of_its_weight() -> None:
    assert infer_requirements(nn.Linear(2, 2).double()).dtype == "float64"
    assert infer_requirements(nn.ReLU()) == ShapeRequirements()


def test_a_model_may_say_it_itself() -> None:
    class Declared(nn.Linear):
        def get_shape_requirements(self) -> dict[str, Any]:
            return {"maximum": {0: 2}}

    assert issues_of((3, 99), Declared(5, 2)) == ["axis 0 has size 3; it must be at most 2"]


def test_flops_agree_with_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    batch, seq, dim = 2, 8, 16
    modules = {
        "linear": nn.Linear(dim, dim),
        "feedforward": nn.Sequential(nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)),
        "convolution": nn.Conv1d(dim, dim, 3, padding=1),
    }
    for name, module in modules.items():
        x = torch.randn(batch, dim, seq) if name == "convolution" else torch.randn(batch, seq, dim)
        with FlopCounterMode(display=False) as counter:
            module(x)
        (cost,) = BatchShapeValidator().check_performance_implications((batch, seq, dim), [name])["operations"]
        assert cost["flops"] == counter.get_total_flops()


def test_attention_overtakes_with_the_sequence() -> None:
    validator = BatchShapeValidator()
    sequence = ["embedding", "attention", "feedforward"]
    short = validator.check_performance_implications((8, 64, 512), sequence)
    long = validator.check_performance_implications((8, 8192, 512), sequence)
    assert (short["bottleneck"], long["bottleneck"]) == ("feedforward", "attention")
    assert short["warnings"] == []
    assert len(long["warnings"]) == 1
    assert "89% of its FLOPs" in long["warnings"][0]


def test_unknown_operations_are_named() -> None:
    check = BatchShapeValidator().check_performance_implications((8, 4), ["linear", "warp", "warp"])
    assert check["unknown_operations"] == ["warp"]
    assert check["warnings"][0].startswith("unknown operation 'warp'; known: embedding, linear,")
    assert [cost["operation"] for cost in check["operations"]] == ["linear"]
    assert BatchShapeValidator().check_performance_implications((8, 4), [])["bottleneck"] is None


def test_without_performance_validation_there_are_no_warnings() -> None:
    quiet = BatchShapeValidator(config=ShapeValidation(performance_validation=False))
    assert quiet.check_performance_implications((7, 4096, 8), ["attention"])["warnings"] == []
    assert len(BatchShapeValidator().check_performance_implications((7, 4096, 8), ["attention"])["warnings"]) == 2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_shape_has_a_cost(shape: list[int]) -> None:
    known = ["embedding", "linear", "feedforward", "attention", "convolution", "recurrent", "normalization", "spiking"]
    check = BatchShapeValidator().check_performance_implications(shape, known)
    assert [cost["operation"] for cost in check["operations"]] == known
    assert all(cost["bytes"] > 0 for cost in check["operations"])

"""What the calls for live models are given, right and wrong."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli import ranks
from memopt_cli.api.arguments import check_budget, check_inputs_argument, check_lengths, check_names
from memopt_cli.api.shown import OptimizationReport
from memopt_cli.cli.options import StepOptions
from memopt_cli.errors import OptionError, UsageError
from memopt_cli.pipeline.terms import SETTING_FLAGS, step_terms
from memopt_cli.records import Budget, StepSettings

MODEL, X = nn.Linear(4, 4), torch.ones(2, 4)
RANGE = {"inputs": "SxFx4", "dims": {"F": 2, "S": (4, 8)}, "budget": 0.5}
ADAMW = torch.optim.AdamW(MODEL.parameters())
SETTINGS = {"precision": "bf16", "loss": "a.py:f", "optimizer": "sgd", "micro_batches": 2, "clip_norm": 1.0, "seed": 1}
"""Field of :class:`StepSettings` -> a value other than the default."""
STEP_CALLS = (
    *(memopt_cli.optimize, memopt_cli.frontier, memopt_cli.profile, memopt_cli.recommend_batch, memopt_cli.baseline),
    *(ranks.predict_rank, ranks.recommend_ranks, ranks.plan_rank),
)


@pytest.mark.parametrize("call", [StepOptions, *STEP_CALLS], ids=lambda call: call.__name__)
def test_every_setting_of_a_step_is_an_argument(call: Callable[..., Any]) -> None:
    arguments = {flag.removeprefix("--").replace("-", "_") for flag in SETTING_FLAGS.values()}
    assert arguments - inspect.signature(call).parameters.keys() == set()


@pytest.mark.parametrize("name", [field.name for field in fields(StepSettings) if field.name != "device"])
def test_every_setting_of_a_step_is_compared_except_its_seed(name: str) -> None:
    changed = replace(StepSettings(), **{name: SETTINGS[name]})
    assert (step_terms(changed) == step_terms(StepSettings())) is (name == "seed")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"inputs": [1, 2]}, OptionError, "inputs is a list"),
        ({"inputs": None}, OptionError, "inputs is None"),
        ({"inputs": ()}, OptionError, "the inputs have no batch: there is no tensor"),
        ({"inputs": {}}, OptionError, "the inputs have no batch"),
        ({"inputs": torch.tensor(1.0)}, OptionError, "the first tensor is a scalar"),
        ({"inputs": "Bx3"}, UsageError, "dimensions without a size: B"),
        (
            {"inputs": "BxS", "dims": {"B": 8, "T": 3}},
            UsageError,
            r'size: S\nDid you mean dims=\{"S": 3\}, not .*"T": 3',
        ),
        ({"model": "net.pt"}, OptionError, r"model is 'net.pt', .*\n.* memopt_cli.load\(path\)"),
        ({"inputs": "Bx3", "dims": {"B": 0}}, OptionError, r"dims\['B'\] is 0"),
        ({"inputs": "Bx3", "dims": "B=3"}, OptionError, "dims is 'B=3'"),
        ({"dims": {"B": 4}}, OptionError, "the inputs are tensors, which have sizes already"),
        ({"dims": {"B": (4, 8)}}, OptionError, "the inputs are tensors, which have sizes already"),
        ({**RANGE, "budget": None}, OptionError, "a range of S needs a budget that the plans meet at all its sizes"),
        ({**RANGE, "dims": {"S": (8, 4)}}, OptionError, r"the range of S, \(8, 4\), is empty"),
        ({**RANGE, "dims": {"S": (1, 4, 8)}}, OptionError, "the range of S has 3 sizes; it must have two"),
        ({**RANGE, "dims": {"S": (0, 8)}}, OptionError, "an end of the range of S is 0"),
        ({**RANGE, "dims": {"S": (4, "8")}}, OptionError, "an end of the range of S is '8'"),
        ({**RANGE, "dims": {"S": range(4, 8)}}, OptionError, r"dims\['S'\] is a range"),
        ({**RANGE, "dims": {"F": 2, "S": [4, 8], "T": (4, 8)}}, OptionError, "two dimensions have a range: S and T"),
        ({**RANGE, "dims": {"F": 2, "S": 8, "T": (4, 8)}}, UsageError, "no input has a dimension T"),
        (
            {**RANGE, "inputs": "BxSx4", "dims": {"B": (1, 2), "S": 4}},
            UsageError,
            "cannot depend on the batch, B",
        ),
        ({**RANGE, "dims": {"F": 2, "S": 8}, "lengths": [8]}, OptionError, "no dimension has a range"),
        ({**RANGE, "lengths": []}, OptionError, "lengths has no length that occurs"),
        ({**RANGE, "lengths": {8: 0}}, OptionError, "lengths has no length that occurs"),
        ({**RANGE, "lengths": [4, 0]}, OptionError, "a length is 0"),
        ({**RANGE, "lengths": [4, 5.5]}, OptionError, "a length is 5.5"),
        ({**RANGE, "lengths": {4: -1}}, OptionError, r"lengths\[4\] is -1"),
        ({**RANGE, "lengths": 8}, OptionError, "lengths is 8"),
        ({**RANGE, "lengths": torch.ones(2, 2)}, OptionError, "a length is a list"),
        ({**RANGE, "lengths": [4, 16]}, UsageError, "lengths has the length 16, outside the range S=4:8"),
        ({**RANGE, "lengths": "nowhere.txt"}, UsageError, "cannot read lengths from nowhere.txt"),
        ({"budget": 1.5}, OptionError, "budget is 1.5\nUse bytes or a share up to 1"),
        ({"budget": 0}, OptionError, "budget is 0\n"),
        ({"budget": True}, OptionError, "budget is True\n"),
        ({"budget": math.nan}, OptionError, "budget is nan\n"),
        ({"budget": b"8GiB"}, OptionError, "budget is b'8GiB'\n"),
        ({"budget": [1]}, OptionError, "budget is a list\n"),
        ({"budget": "0%"}, UsageError, "'0%'"),
        ({"budget": "lots"}, UsageError, "lots"),
        ({"budget": 0.5, "level": 0}, OptionError, "level 0 does not"),
        ({"level": 7}, OptionError, "level is 7"),
        ({"level": "3"}, OptionError, "level is '3'"),
        ({"level": True}, OptionError, "level is True"),
        ({"max_slowdown": "none"}, OptionError, "max_slowdown is 'none'\nUse a number of at least 1, or math.inf"),
        ({"max_slowdown": 0.5}, OptionError, "max_slowdown is 0.5"),
        ({"max_slowdown": math.nan}, OptionError, "max_slowdown is nan"),
        ({"target": 3}, OptionError, "target is 3"),
        ({"search_time": -1}, OptionError, "search_time is -1"),
        ({"search_time": math.nan}, OptionError, "search_time is nan"),
        ({"optimizer": "no such"}, UsageError, "no such"),
        ({"optimizer": ADAMW}, OptionError, "optimizer is an AdamW"),
        ({"optimizer": torch.optim.AdamW}, OptionError, "optimizer is the class AdamW"),
        ({"loss": nn.MSELoss}, OptionError, "loss is the class MSELoss"),
        ({"loss": "cross_entropy"}, OptionError, "loss is 'cross_entropy'\nPass a function of"),
        ({"loss": 3}, OptionError, "loss is 3"),
        ({"accumulate": 0}, OptionError, "accumulate is 0"),
        ({"accumulate": 1.5}, OptionError, "accumulate is 1.5"),
        ({"clip_norm": -1}, OptionError, "clip_norm is -1\nUse a finite number above 0"),
        ({"clip_norm": math.inf}, OptionError, "clip_norm is inf"),
        ({"precision": "int8"}, OptionError, "precision is 'int8'"),
        ({"precision": torch.bfloat16}, OptionError, "precision is a dtype"),
        ({"device": "gpu"}, UsageError, "unknown device 'gpu'"),
        ({"device": "cuda:999"}, UsageError, "there is no device cuda:999"),
        ({"seed": -1}, OptionError, "seed is -1"),
        ({"model": "model.pt"}, OptionError, "model is 'model.pt'"),
        ({"model": nn.Linear}, OptionError, "model is the class Linear"),
        (
            {"model": memopt_cli.Step(models={"net": MODEL}, optimizers=[ADAMW], run=print)},
            OptionError,
            "model is a Step",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memopt_cli.optimize(**{"model": MODEL, "inputs": X, **given})


@pytest.mark.parametrize(
    "given",
    [[64, 80, 64], {80: 1, 64: 2, 16: 0}, torch.tensor([64, 64, 80]), numpy.array([64, 80, 64]), iter((80, 64, 64))],
)
def test_lengths_are_counted(given: Any) -> None:
    assert check_lengths(given) == {64: 2, 80: 1}


def test_a_range_is_for_optimize_alone() -> None:
    for command in (memopt_cli.frontier, memopt_cli.profile, memopt_cli.recommend_batch, memopt_cli.baseline):
        with pytest.raises(OptionError, match=r"dims\['S'\] is a tuple; it must be one size"):
            command(MODEL, "BxSx4", dims={"B": 2, "S": (4, 8)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": 0}, "memory is 0\n"),
        ({"multiple_of": 0}, "multiple_of is 0"),
        ({"global_batch": 2.5}, "global_batch is 2.5"),
        ({"objective": "most"}, "objective is 'most'"),
        ({"longest_step": math.nan}, "longest_step is nan"),
        ({"plan": 3}, "plan is 3"),
        (
            {"plan": OptimizationReport(result=None)},
            "plan is an OptimizationReport\nPass a memopt_cli.Plan, such as the .plan of a result",
        ),
        ({"inputs": (X, 0.5)}, "an input is a float"),
    ],
)
def test_what_is_wrong_of_a_batch_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        memopt_cli.recommend_batch(**{"model": MODEL, "inputs": X, **given})


def test_a_check_that_could_not_fail_is_refused() -> None:
    with pytest.raises(OptionError, match="fail_on is empty"):
        memopt_cli.check(MODEL, X, fail_on=[])
    with pytest.raises(UsageError, match="'peak'"):
        memopt_cli.check(MODEL, X, fail_on="peak")


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("8 GiB", Budget(nbytes=8 * 2**30)),
        ("60 %", Budget(share=0.6)),
        (1.0, Budget(share=1.0)),
        (2, Budget(nbytes=2)),
        (numpy.int64(2**33), Budget(nbytes=2**33)),
        (numpy.float32(0.5), Budget(share=0.5)),
        (torch.tensor(0.5), Budget(share=0.5)),
        (torch.tensor(3), Budget(nbytes=3)),
        (None, None),
    ],
)
def test_a_budget_is_bytes_or_a_share(given: Any, budget: Budget | None) -> None:
    assert check_budget(given) == budget


@pytest.mark.parametrize("text", ["0.6", "1e9", "-5%", "150%", ""])
def test_text_that_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError):
        check_budget(text)


@pytest.mark.parametrize(
    ("given", "found"),
    [("Block", ("Block",)), (nn.Linear, ("Linear",)), (["0", nn.Tanh], ("0", "Tanh")), ((), ())],
)
def test_one_name_or_several(given: Any, found: tuple[str, ...]) -> None:
    assert check_names("target", given) == found


@pytest.mark.parametrize("given", [(X,), {"input": X}])
def test_values_are_taken_as_they_are(given: Any) -> None:
    assert check_inputs_argument(given, None) is given
    taken = check_inputs_argument(X, None)
    assert isinstance(taken, tuple)
    assert isinstance(taken[0], Tensor)

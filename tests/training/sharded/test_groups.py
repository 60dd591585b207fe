"""Ranks of a real group that gloo joins: they agree, or all fail; one searches, and all have its plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import memopt_cli
from memopt_cli.errors import OptionError
from memopt_cli.measure import processes
from memopt_cli.runtime.private_torch import start_fake_group
from tests.training.sharded.cases import in_group
from tests.training.sharded.together import Net, agreements, searches

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two found; started once for all tests."""
    return in_group(2, everything, tmp_path_factory.mktemp("group"))


def everything() -> dict[str, Any]:
    with processes.keep_server():  # what a rank forks its subprocesses from, for all searches
        return agreements() | searches()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("all", ([0, 10], [0, 10])),
        ("each", (0, 1)),
        ("first", ("of 0", "of 0")),
        ("failing", ("PlanError: rank 1 of 2: it has no layer", "PlanError: it has no layer")),
        (
            "foreign",
            ("ZeroDivisionError: by nought", "MeasurementError: rank 0 of 2: ZeroDivisionError: by nought"),
        ),
        ("alike", ("UsageError: nothing works", "UsageError: nothing works")),
        (
            "alone",
            (
                "StepError: rank 0 of 2: ZeroDivisionError: by nought",
                "StepError: rank 1 of 2: ZeroDivisionError: by nought",
            ),
        ),
    ],
)
def test_ranks_agree(what: str, expected: tuple[object, object], ranks: list[dict[str, Any]]) -> None:
    assert tuple(rank[what] for rank in ranks) == expected


def test_a_rank_whose_model_rejects_its_input_says_which_part(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        told = rf"InputsRejectedError: rank {number} of 2: module '[\w.]*first\.0' \(Linear\) rejected its input 2x15"
        assert re.match(told, rank["misfit"])


def test_what_is_to_be_the_same_is_compared(ranks: list[dict[str, Any]]) -> None:
    assert len({rank["same"] for rank in ranks}) == 1
    (told,) = {rank["other"] for rank in ranks}
    assert told.startswith("UsageError: rank 1 has a different plan from rank 0: its digest is ")


def test_one_rank_searches_and_all_have_its_plan(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["plan"]["segments"]
    assert second["plan"] == first["plan"]
    assert second["summary"] == first["summary"]


def test_inputs_of_other_ranks_do_not_matter(ranks: list[dict[str, Any]]) -> None:
    (applied, found), other = (rank["optimized"] for rank in ranks)
    assert applied["segments"]
    assert applied == found
    assert other == (applied, found)


def test_what_fails_on_one_rank_fails_on_all_and_leaves_all_models_as_they_were(ranks: list[dict[str, Any]]) -> None:
    refused, differing, unfit = ([rank[what] for rank in ranks] for what in ("refused", "differing", "unfit"))
    assert "level" in refused[0]
    assert refused[1] == refused[0].replace("OptionError: ", "OptionError: rank 0 of 2: ")
    assert all("rank 1 has a different model from rank 0" in told for told in differing)
    assert unfit[1].startswith("PlanError: module 'first' cannot be a segment")
    assert unfit[0] == unfit[1].replace("PlanError: ", "PlanError: rank 1 of 2: ")
    assert all(rank["kept"] and rank["unfit kept"] for rank in ranks)


@pytest.mark.parametrize(("group", "reason"), [(None, ""), ("world", "not a group of this process"), (3, "is an int")])
def test_what_is_no_group_is_refused(group: Any, reason: str) -> None:
    model = Net()
    if group is None:
        memopt_cli.spikingjelly.memory_optimization(model, nn.Linear, level=1)
        return
    start_fake_group(0, 2)
    try:
        with pytest.raises(OptionError, match=reason):
            memopt_cli.spikingjelly.memory_optimization(model, nn.Linear, level=1, process_group=group)
    finally:
        dist.destroy_process_group()


def test_a_process_without_a_group_is_told_so() -> None:
    with pytest.raises(OptionError, match="this process has no group"):
        memopt_cli.optimize(Net(), "4x16", process_group=object())  # type: ignore[arg-type]

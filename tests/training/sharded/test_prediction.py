"""One rank of many, predicted in one process, takes the same bytes as real processes joined by gloo."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memopt_cli.errors import MemoptError, StepError, UsageError
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure.jobs import CountJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.ranks import predict_rank, recommend_ranks
from memopt_cli.records import Counted, InputSpec, ModelSource, Plan, RankLayout, RankPrediction, StepSettings
from memopt_cli.runtime.private_torch import start_fake_group
from memopt_cli.training.sharded.spread import find_repeated_blocks
from tests.rows import quick
from tests.training.sharded import models, wrong
from tests.training.sharded.cases import (
    FOUR,
    FULLY_SHARDED,
    REPLICATED,
    SEGMENTS,
    THREE,
    TWO,
    Case,
    counted_really,
)

pytestmark = pytest.mark.process
Found = dict[str, list[Counted]]
First = Callable[[Case], RankPrediction]


COMBINED = {
    "2: fsdp, adamw, clipped, accumulating",
    "2: fsdp, bf16, segments",
    "2: fsdp, no mesh, kept",
    "2: fsdp, convolutional, segments",
    "2: tensor parallel, segments",
    "3: fsdp, uneven, segments",
}
"""Between them they have all that the others of two and three ranks have; real groups of four take long to start."""
REPLICATED_COMBINED = {"2: ddp, segments", "2: ddp, views, adamw", "2: ddp, convolutional"}


def label(case: Case) -> str:
    return f"{case.ranks}: {case.name}"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Found]:
    """Ranks -> what they counted, of the cases that are asked for; started once for all tests."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {label(given["case"]) for given in params if isinstance(given.get("case"), Case)}
    several = {2: (*TWO, *REPLICATED), 3: THREE, 4: FOUR}
    wanted = {ranks: tuple(case for case in cases if label(case) in asked) for ranks, cases in several.items()}
    return {ranks: counted_really(cases, tmp_path_factory.mktemp("ranks")) for ranks, cases in wanted.items() if cases}


@pytest.fixture(scope="module")
def first() -> First:
    """What is predicted of the first rank of a case; once for all tests."""
    found: dict[str, RankPrediction] = {}

    def predicted(case: Case) -> RankPrediction:
        if label(case) not in found:
            found[label(case)] = case.predicted()
        return found[label(case)]

    return predicted


@pytest.mark.usefixtures("here")
@pytest.mark.slow
@pytest.mark.parametrize("case", quick([*TWO, *THREE, *FOUR], COMBINED, label), ids=label)
def test_the_first_rank_is_predicted_to_the_byte(case: Case, real: dict[int, Found], first: First) -> None:
    counted, found = real[case.ranks][case.name][0], first(case)
    assert found.tensor_peak_bytes == counted.tensor_peak_bytes
    assert found.resident_bytes == counted.resident_bytes
    assert found.breakdown == counted.breakdown
    assert found.collectives == counted.collectives


@pytest.mark.usefixtures("here")
@pytest.mark.slow
@pytest.mark.parametrize("case", quick(REPLICATED, REPLICATED_COMBINED, label), ids=label)
def test_replicas_are_predicted_within_a_thousandth(case: Case, real: dict[int, Found], first: First) -> None:
    counted, found = real[case.ranks][case.name][0], first(case)
    assert found.tensor_peak_bytes == pytest.approx(counted.tensor_peak_bytes, rel=1e-3)
    assert found.resident_bytes == counted.resident_bytes
    reduced = [each for each in found.collectives if each.kind == "all-reduce"]
    assert reduced == [each for each in counted.collectives if each.kind == "all-reduce"]


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_rank_with_less_is_padded(first: First) -> None:
    """Three ranks share what does not divide by three: the last has least, in a storage as large as the others'."""
    uneven = THREE[1]
    assert any(parameter.shape[0] % 3 for parameter in uneven.build().parameters())
    assert uneven.predicted(rank=2).resident_bytes == first(uneven).resident_bytes


def test_a_subprocess_predicts_the_same() -> None:
    """What it can import is predicted there, and other functions here."""
    here = FULLY_SHARDED.predicted(loss=lambda output: output)
    assert predict_rank(FULLY_SHARDED.build, FULLY_SHARDED.inputs, ranks=2, parallelize=FULLY_SHARDED.shard) == replace(
        here, layout=replace(here.layout, mesh={"dp": 2})
    )
    assert not dist.is_initialized()


def test_a_rank_whose_code_was_changed_is_predicted_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changed_rank.py").write_text(
        "from torch import nn\nN = 1\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.linear = nn.Linear(64, 64)\n"
        "    def forward(self, x):\n        for _ in range(N): x = self.linear(x).sin()\n        return x\n"
        "def build(): return Net()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("changed_rank")
    as_written = predict_rank(module.build, "16x64", ranks=2, parallelize="ddp")
    monkeypatch.setattr(module, "N", 30)
    assert (
        predict_rank(module.build, "16x64", ranks=2, parallelize="ddp").tensor_peak_bytes > as_written.tensor_peak_bytes
    )
    found = recommend_ranks(module.build, "Bx64", dims={"B": 16}, ranks=2, parallelize="ddp", memory="1GiB")
    assert any("N in this process differs from the one in changed_rank.py" in note for note in found.result.notes)


@pytest.mark.usefixtures("here")
def test_segments_need_no_more_collectives_and_no_more_bytes(first: First) -> None:
    """Those that gather parameters for a recomputation gather them for backward as well."""
    plain, planned = first(FULLY_SHARDED), replace(FULLY_SHARDED, plan=SEGMENTS).predicted()
    assert planned.collectives == plain.collectives
    assert planned.tensor_peak_bytes < plain.tensor_peak_bytes


@pytest.mark.usefixtures("here")
def test_a_built_in_way_is_that_of_a_script(first: First) -> None:
    """``fsdp`` shards the blocks of a list, and the rest."""
    ours = predict_rank(FULLY_SHARDED.build, FULLY_SHARDED.inputs, ranks=2, parallelize="fsdp")
    theirs = first(FULLY_SHARDED)
    assert replace(ours, layout=theirs.layout) == theirs


@pytest.mark.usefixtures("here")
def test_a_forgotten_block_is_seen(first: First) -> None:
    forgotten = replace(FULLY_SHARDED, shard=models.shard_but_one)
    assert forgotten.predicted().tensor_peak_bytes > first(FULLY_SHARDED).tensor_peak_bytes


@pytest.mark.usefixtures("here")
def test_more_ranks_need_less_each(first: First) -> None:
    peaks = [first(FULLY_SHARDED), *(replace(FULLY_SHARDED, mesh={"dp": ranks}).predicted() for ranks in (4, 16))]
    assert [p.tensor_peak_bytes for p in peaks] == sorted((p.tensor_peak_bytes for p in peaks), reverse=True)
    assert {p.collectives[0].kind for p in peaks} == {"all-gather"}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("2: fsdp, no mesh, kept", 2),
        ("2: tensor parallel, segments", 1),
        ("4: fsdp × tp, segments", 2),
        ("4: hsdp, segments", 4),
        ("2: ddp, segments", 2),
    ],
)
def test_ranks_that_have_samples_of_their_own(name: str, ranks: int, first: First) -> None:
    (case,) = (case for case in (*TWO, *FOUR, *REPLICATED) if label(case) == name)
    assert first(case).data_ranks == ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", [TWO[2], REPLICATED[0], REPLICATED[5]], ids=label)
def test_a_rank_is_made_once_for_all_sizes_of_its_batch(case: Case) -> None:
    def session() -> LocalSession:
        subject = Subject(
            source=ModelSource(location="of a test"),
            spec=InputSpec(tensors=(parse_tensor(case.inputs),), source="a test"),
            settings=StepSettings(device="cpu", optimizer=case.optimizer, clip_norm=case.clip_norm),
            data="none",
            layout=RankLayout(ranks=case.ranks, parallel="test.py:shard", mesh=case.mesh),
        )
        return LocalSession(subject, 60, case.build, {"test.py:shard": case.shard})

    small, large = (CountJob(plan=case.plan, fake=True, batch=batch) for batch in (2, 7))
    with session() as one:
        made_for_it, grown, shrunk = (one.ask(job) for job in (small, large, small))
    assert isinstance(grown, Counted)
    assert shrunk == made_for_it
    with session() as another:
        assert another.ask(large) == grown


@pytest.mark.parametrize(
    ("function", "exit_code", "reason"),
    [
        (wrong.nothing, 2, "returned nothing, not an nn.Module"),
        (wrong.whole, 2, "left every parameter of Transformer whole"),
        (wrong.another_model, 2, "must return the model that it was given, and returned another one"),
        (wrong.failing, 2, "LookupError: no such layer"),
        (wrong.another_group, 2, "failed: "),
        (wrong.exchanged_group, 2, "made its own process group"),
        (wrong.older, 3, "FSDP1"),
        (wrong.compiled, 3, "returns a compiled model, which cannot be predicted"),
        (wrong.hooked, 3, "with register_comm_hook cannot be predicted"),
        pytest.param(
            *(wrong.batched, 3, "with bucket_cap_mb_list cannot be predicted"),
            marks=pytest.mark.skipif(
                "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
                reason="this PyTorch has no bucket_cap_mb_list",
            ),
        ),
        (wrong.engine, 3, "DeepSpeedEngine cannot be predicted"),
        (wrong.stage, 3, "PipelineStage cannot be predicted"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.usefixtures("here")
def test_what_cannot_be_predicted_has_a_reason_and_no_number(function: Any, exit_code: int, reason: str) -> None:
    case = replace(FULLY_SHARDED, shard=function)
    with pytest.raises(MemoptError) as raised:
        case.predicted()
    assert raised.value.exit_code == exit_code
    assert reason in raised.value.message
    assert not dist.is_initialized()


@pytest.mark.usefixtures("here")
def test_a_replica_whose_parameter_has_no_gradient_takes_no_second_step() -> None:
    with pytest.raises(StepError, match="a parameter had no gradient"):
        replace(FULLY_SHARDED, build=models.partly, shard=wrong.replicated).predicted()


@pytest.mark.usefixtures("here")
def test_a_model_may_change_its_dtype_as_it_is_built(first: First) -> None:
    halved = replace(FULLY_SHARDED, build=models.halved).predicted()
    assert halved.breakdown.parameters_bytes * 2 == first(FULLY_SHARDED).breakdown.parameters_bytes


@pytest.mark.usefixtures("here")
def test_a_forward_that_depends_on_values() -> None:
    with pytest.raises(StepError, match="cannot be predicted: on tensors without data it fails"):
        replace(FULLY_SHARDED, build=models.of_data).predicted()


@pytest.mark.usefixtures("here")
def test_an_optimizer_in_backward_is_not_predicted() -> None:
    with pytest.raises(StepError, match="in backward cannot be predicted"):
        replace(FULLY_SHARDED, plan=Plan(in_backward=True), optimizer="sgd").predicted()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ranks": 4, "mesh": {"dp": 2, "tp": 3}}, "the mesh has 2 × 3 = 6 ranks, not 4"),
        ({"ranks": 2, "rank": 2}, "there is no rank 2 of 2"),
        ({"ranks": 2, "parallelize": "ddp", "mesh": {"a": 2, "b": 1}}, "ddp takes a mesh of at most 1 axis, not of 2"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 2, "parallelize": None}, "parallelize is None, not a function"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        predict_rank(FULLY_SHARDED.build, FULLY_SHARDED.inputs, **{"parallelize": "fsdp", **given})


def test_a_process_with_a_group_of_its_own_predicts_nothing() -> None:
    start_fake_group(0, 2)
    try:
        with pytest.raises(UsageError, match="a process group already"):
            FULLY_SHARDED.predicted(loss=lambda output: output)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_repeated_blocks() -> None:
    net = models.transformer()
    assert find_repeated_blocks(net) == list(net.blocks)  # type: ignore[call-overload]
    images = models.convolutional()
    assert find_repeated_blocks(images) == list(images[3])  # type: ignore[index]
    assert find_repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    twice = nn.ModuleList([models.transformer(), models.transformer()])
    assert find_repeated_blocks(twice) == list(twice)

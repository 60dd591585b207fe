"""A plan whose steps each leave more memory than the last is refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import StepError
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.timed import measure
from memopt_cli.measure.jobs import ORIGINAL, MeasureJob, Subject
from memopt_cli.records import InputSpec, ModelSource, Plan, SegmentPlan, StepSettings, TensorSpec
from memopt_cli.runtime import is_recomputing
from tests.zoo.models import GIVEN, Parts

HOARD = "hoard_of_a_test"
WIDTH = 512


class Hoarder(Parts, linear=lambda: nn.Linear(8, WIDTH), always=GIVEN):
    """Keeps what it computes in a place that memopt does not find, in every run or in recomputations alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).sigmoid().tanh()
        if self.always or is_recomputing():
            importlib.import_module(HOARD).kept.append(hidden.detach())
        return hidden.square().sum(1)  # square saves something: a recomputation does not end before it


def bench(tmp_path: Path, model: nn.Module) -> Bench:
    subject = Subject(
        source=ModelSource(location=str(tmp_path / "net.pt")),
        spec=InputSpec(tensors=(TensorSpec(shape=("B", 8)),), dims={"B": 64}, source="here"),
        settings=StepSettings(),
    )
    return Bench(subject, build=lambda: model)


@pytest.fixture
def hoard(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    module = ModuleType(HOARD)
    vars(module)["kept"] = kept = list[Tensor]()
    monkeypatch.setitem(sys.modules, HOARD, module)
    return kept


@pytest.mark.usefixtures("hoard")
def test_a_plan_under_which_steps_leave_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"each step leaves 128\.0 KiB more memory behind than the one before"):
        measure(bench(tmp_path, nn.Sequential(Hoarder(always=False))), job(Plan(segments=(SegmentPlan(path="0"),))))


@pytest.mark.usefixtures("hoard")
def test_a_model_that_does_so_by_itself_is_measured(tmp_path: Path) -> None:
    model = nn.Sequential(Hoarder(always=True), nn.Unflatten(0, (8, 8)), nn.Sequential(nn.Sigmoid(), nn.Tanh()))
    for plan in (ORIGINAL, Plan(segments=(SegmentPlan(path="2"),))):
        measured = measure(bench(tmp_path, model), job(plan)).measurement
        assert measured.allocated_peak_bytes >= 2 * 64 * WIDTH * torch.float32.itemsize


def job(plan: Plan) -> MeasureJob:
    return MeasureJob(plan=plan, warm_up=True)

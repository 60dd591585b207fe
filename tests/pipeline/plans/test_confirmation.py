"""``memopt apply --confirm``: the estimate that a plan's file carries, held against a step that is run."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.files.memopt_files import read_plan, read_prediction
from memopt_cli.measure.jobs import MeasureAnswer, Subject
from memopt_cli.pipeline.plans.confirmation import confirm, differing_settings, with_predicted_settings
from memopt_cli.records import (
    ApplyResult,
    Confirmation,
    DeviceEstimate,
    InputSpec,
    ModelSource,
    Plan,
    PredictedStep,
    SegmentPlan,
    StepSettings,
    TensorSpec,
)
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.records.progress import Progress
from memopt_cli.report.text import TextReport
from tests.zoo.records import a_header, answered, measured

MIB = 2**20
ESTIMATE = DeviceEstimate(
    device="a100-40gb",
    memory_bytes=40 * 2**30,
    allocated_peak_bytes=90 * MIB,
    reserved_peak_bytes=110 * MIB,
    fits=True,
    step_s=0.002,
)
STEP = PredictedStep(estimate=ESTIMATE, settings=StepSettings(optimizer="adamw", micro_batches=2, clip_norm=1.0))
HEADER = a_header(spec=InputSpec(tensors=(TensorSpec(shape=("B", 32)),), dims={"B": 8}, source="-i"))
MEASURED = measured(100 * MIB, 0.004, tensor_peak_bytes=80 * MIB, backend="torch.cuda", batch=8)
PLAN = Plan(segments=(SegmentPlan(path="0"),))


def written(tmp_path: Path, step: PredictedStep | None) -> Path:
    path = tmp_path / "net.plan.yaml"
    path.write_bytes(plan_yaml(HEADER, PLAN, 3, step))
    return path


@pytest.mark.parametrize("step", [STEP, None])
def test_a_plan_carries_its_prediction(step: PredictedStep | None, tmp_path: Path) -> None:
    path = written(tmp_path, step)
    assert read_plan(path)[1] == PLAN
    assert read_prediction(path) == step


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        ("step_s", float("nan"), "step_s is nan"),
        ("step_s", -1.0, "step_s is -1"),
        ("allocated_peak_bytes", -5, "allocated_peak_bytes is -5"),
        ("allocated_peak_bytes", "much", "must be int"),
        ("device", 3, "must be text"),
        ("more", 3, "unknown key 'more'"),
    ],
)
def test_a_prediction_that_is_none(at: str, value: Any, why: str, tmp_path: Path) -> None:
    path = written(tmp_path, STEP)
    data = yaml.safe_load(path.read_text())
    data["predicted"]["estimate"][at] = value
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(UsageError) as error:
        read_prediction(path)
    assert why in error.value.message
    assert "predicted.estimate" in error.value.message


def test_the_step_is_that_of_the_prediction_unless_it_is_said() -> None:
    asked = StepSettings(device="cuda:0", precision="bf16", micro_batches=4)
    assert with_predicted_settings(asked, None) == asked
    assert with_predicted_settings(asked, STEP) == StepSettings(
        device="cuda:0", precision="bf16", micro_batches=4, optimizer="adamw", clip_norm=1.0
    )


@pytest.mark.parametrize(
    ("field", "code"),
    [
        *(("loss", code) for code in ("evil.py:f", "loss.pyc:run", "loss.so:run", "loss:run")),
        *(("optimizer", code) for code in ("evil.py:f", "evil.py:f (in memory)")),
    ],
)
def test_a_plan_names_no_code(field: str, code: str) -> None:
    step = replace(STEP, settings=replace(StepSettings(), **{field: code}))
    with pytest.raises(UsageError, match=rf"`--{field} .*, but memopt runs no code that only a plan names"):
        with_predicted_settings(StepSettings(), step)
    mine = replace(StepSettings(), **{field: "mine.py:f"})
    assert with_predicted_settings(mine, step) == mine


def test_what_is_not_as_it_was() -> None:
    subject = Subject(source=ModelSource(location="net.pt"), spec=HEADER.spec, settings=STEP.settings)
    assert differing_settings(subject, STEP, HEADER) == ()
    assert differing_settings(replace(subject, settings=replace(STEP.settings, device="cuda:0")), STEP, HEADER) == ()
    other = replace(subject, settings=StepSettings(clip_norm=1.0), spec=replace(HEADER.spec, dims={"B": 9}))
    assert differing_settings(other, STEP, HEADER) == ("optimizer", "accumulate", "inputs")
    assert differing_settings(other, None, HEADER) == ()


def shown(**fields: Any) -> list[str]:
    stream = io.StringIO()
    found = Confirmation(
        **{
            "device": "cuda:0",
            "measurement": MEASURED,
            "predicted": ESTIMATE,
            **fields,
        }
    )
    TextReport().show(ApplyResult(files=("net.memopt.pt",), confirmation=found), stream)
    return stream.getvalue().splitlines()


def test_the_report() -> None:
    lines = shown(allocated_off=-0.1, reserved_off=0.1, step_off=-0.5, unlike=("inputs",))
    assert lines == [
        "estimated for a100-40gb, and measured on cuda:0:",
        "  allocated peak: 90.0 MiB estimated, 100.0 MiB measured; the estimate is 10.0% too low",
        "  reserved peak: 110.0 MiB estimated, 100.0 MiB measured; the estimate is 10.0% too high",
        "  step: 2.0 ms estimated, 4.0 ms measured; the estimate is 50.0% too low",
        "the step differs from the estimated step in: inputs",
        "wrote net.memopt.pt",
    ]


def test_the_report_of_a_cpu_confirms_nothing() -> None:
    lines = shown(device="cpu", allocated_off=-0.1, step_off=-0.5)
    assert not any("reserved" in line for line in lines)
    assert "this device is not a100-40gb, so nothing is confirmed; run this there, with `--device cuda:0`" in lines


def test_the_report_says_what_is_not_in_it() -> None:
    for predicted in (None, ESTIMATE):
        assert "No optimizer." in shown(predicted=predicted, allocated_off=0.0, step_off=0.0, notes=("No optimizer.",))


def test_the_report_without_a_prediction() -> None:
    (line, _) = shown(predicted=None)
    assert line.startswith("measured on cuda:0: allocated peak 100.0 MiB, step 4.0 ms; the plan predicts nothing")


@pytest.mark.usefixtures("in_process")
def test_a_step_is_run_and_held_against_the_estimate(memopt: Callable[..., Any]) -> None:
    torch.save(nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.Tanh()), nn.Linear(64, 4)), "net.pt")
    written(Path(), STEP)
    done = memopt("apply", "net.pt", "net.plan.yaml", "--confirm", "--json", "--device", "cpu")
    found = json.loads(done.out)["confirmation"]
    peak = found["measurement"]["allocated_peak_bytes"]
    assert found["predicted"]["device"] == "a100-40gb"
    assert found["allocated_off"] == (90 * MIB - peak) / peak
    assert found["reserved_off"] is None
    assert found["unlike"] == []
    assert not found["confirms"]  # on a CPU
    assert found["notes"] == []
    assert found["measurement"]["breakdown"]["optimizer_bytes"] > 0  # adamw, as predicted
    assert "net.memopt.pt" in done.changed


@pytest.mark.parametrize(("flags", "is_said"), [((), True), (("--optimizer", "adamw"), False)])
@pytest.mark.usefixtures("in_process")
def test_a_plan_that_names_no_optimizer_is_confirmed_without_one_and_says_so(
    flags: tuple[str, ...], is_said: bool, memopt: Callable[..., Any]
) -> None:
    torch.save(nn.Sequential(nn.Sequential(nn.Linear(32, 64), nn.Tanh()), nn.Linear(64, 4)), "net.pt")
    written(Path(), None)
    done = memopt("apply", "net.pt", "net.plan.yaml", "--confirm", *flags)
    assert done.code == 0, done.err
    assert ("No optimizer is counted; AdamW's state would add" in done.out) == is_said


def test_what_a_gpu_measures_of_that_step_confirms_the_estimate() -> None:
    subject = Subject(source=ModelSource(location="net.pt"), spec=HEADER.spec, settings=STEP.settings)
    asked: Any = Asked(replace(subject, settings=replace(STEP.settings, device="cuda:0")))
    assert confirm(asked, PLAN, STEP, ()).confirms
    assert not confirm(asked, PLAN, STEP, ("inputs",)).confirms
    assert not confirm(asked, PLAN, None, ()).confirms
    on_cpu: Any = Asked(subject)
    assert not confirm(on_cpu, PLAN, STEP, ()).confirms


class Asked:
    """A prepared model whose step takes what it is told to."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.facts, self.progress = subject, SimpleNamespace(trainable_bytes=0), Progress()
        self.messages: dict[str, None] = {}

    def ask(self, job: object) -> MeasureAnswer:
        return answered(MEASURED)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("command", ["apply --confirm", "profile --plan"])
def test_a_segment_that_runs_whole_is_told_of(memopt: Callable[..., Any], command: str) -> None:
    torch.save(nn.Sequential(nn.Linear(33, 64), CumulativeSum()), "net.pt")
    header = plan_yaml(HEADER, Plan(segments=(SegmentPlan(path="1", chunks=2),)), 3)
    Path("net.plan.yaml").write_bytes(header)
    name, flag = command.split()
    files = ("net.plan.yaml", flag) if name == "apply" else (flag, "net.plan.yaml")
    done = memopt(name, "net.pt", *files, "-i", "4x33", "--allow-package", "tests")
    assert done.code == 0, done.err
    assert "CumulativeSum at '1'" in done.out
    assert "it runs whole from now on." in done.out


class CumulativeSum(nn.Module):
    """Along the batch: chunks differ from the whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


@pytest.mark.usefixtures("in_process")
def test_nothing_is_written_where_the_step_does_not_run(memopt: Callable[..., Any]) -> None:
    torch.save(nn.Sequential(nn.Sequential(nn.Linear(33, 64), nn.Tanh())), "net.pt")
    written(Path(), None)
    done = memopt("apply", "net.pt", "net.plan.yaml", "--confirm")
    assert done.code == 3, done.err
    assert done.changed <= {"net.plan.yaml"}


@pytest.mark.parametrize("device", ["a100\nverified", "\x1b[31m", "", 61 * "x"])
def test_an_estimate_for_a_device_whose_name_is_no_line(device: str) -> None:
    with pytest.raises(UsageError, match="it must be one line of 1 to 60 characters"):
        replace(ESTIMATE, device=device)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"clip_norm": -3.0}, "clip_norm is -3"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
    ],
)
def test_settings_of_no_step(setting: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        StepSettings(**setting)

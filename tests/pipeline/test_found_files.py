"""A plan and a baseline are data, which may have come with the model: the command line alone names code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import UsageError
from memopt_cli.records import FileHeader, InputSpec, Plan, TensorSpec, to_data
from memopt_cli.write import plan_yaml, read_measured

Memopt = Any

HEADER = FileHeader(
    schema_version=1,
    memopt="0",
    torch="2",
    model="model.pt",
    sha256=None,
    spec=InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 2}, source="here"),
    seed=0,
    device="cpu",
)

SPECS: dict[str, dict[str, Any]] = {
    "a script": {"script": "{folder}/evil.py:make"},
    "a script and sizes": {"script": "{folder}/evil.py:make", "dims": {"B": 2}},
    "tensors and a script": {"tensors": [{"shape": [2, 3]}], "script": "{folder}/evil.py:make"},
    "sizes that may be left out": {"script": "{folder}/evil.py:make", "dims": {"B": 2}, "optional_dims": ["B"]},
    "a file and a script": {"data_file": "inputs.pt", "script": "{folder}/evil.py:make"},
    "tensors and a file": {"tensors": [{"shape": [2, 3]}], "data_file": "{folder}/elsewhere.pt"},
    "a file that is elsewhere": {"data_file": "{folder}/elsewhere.pt"},
}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a script lies that leaves a trace when it runs, and a file of inputs that the model would reject."""
    made = tmp_path_factory.mktemp("elsewhere")
    (made / "evil.py").write_text(
        f"open({str(made / 'canary')!r}, 'w')\nimport torch\ndef make(B=2): return torch.ones(B, 3)\n"
        "def loss(y): return y.sum()\n"
    )
    torch.save(torch.ones(2, 5), made / "elsewhere.pt")
    return made


def spec_of(name: str, folder: Path) -> dict[str, Any]:
    text = json.dumps({**SPECS[name], "source": "--input"}).replace("{folder}", str(folder))
    found: dict[str, Any] = json.loads(text)
    return found


def write_plan(spec: dict[str, Any]) -> None:
    data = {**to_data(HEADER), "spec": spec, "level": 1, "packed": True}
    Path("p.yaml").write_text(json.dumps(data))  # which is YAML, too


def record(memopt: Memopt) -> dict[str, Any]:
    """A baseline of the model, as it was written."""
    assert memopt("baseline", "model.pt", "-i", "2x3", "-q").code == 0
    found: dict[str, Any] = json.loads(Path("memopt-baseline.json").read_text())
    return found


RUN = {
    "apply": "apply model.pt p.yaml --verify --force",
    "apply with a size": "apply model.pt p.yaml --verify --force --dim B=2",
    "recommend-batch": "recommend-batch model.pt --plan p.yaml --longest-step 0.01",
    "profile": "profile model.pt --plan p.yaml",
    "baseline": "baseline model.pt --plan p.yaml -o other.json",
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("command", RUN)
def test_no_plan_runs_code_or_reads_another_file(
    command: str, spec: str, memopt: Memopt, folder: Path, in_process: None
) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "model.pt")
    write_plan(spec_of(spec, folder))
    done = memopt(*RUN[command].split(), "-q")
    assert not (folder / "canary").exists()
    described_twice = len(SPECS[spec].keys() & {"tensors", "data_file", "script"}) > 1
    if described_twice:
        assert done.code == 2
        assert "described twice" in done.err
    else:
        assert done.code in (0, 2), done.err  # 2: a size of inputs that nothing was said of
        assert "elsewhere" not in done.err


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("given", [(), ("--dim", "B=2")])
def test_no_baseline_runs_code_or_reads_another_file(
    spec: str, given: tuple[str, ...], memopt: Memopt, folder: Path, in_process: None
) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "model.pt")
    data = record(memopt)
    Path("memopt-baseline.json").write_text(json.dumps({**data, "spec": spec_of(spec, folder)}))
    done = memopt("check", "model.pt", *given, "-q")
    assert done.code in (4, 5)
    assert memopt("compare", "memopt-baseline.json", "memopt-baseline.json").code in (0, 5)
    assert not (folder / "canary").exists()


def test_no_baseline_names_a_loss(memopt: Memopt, folder: Path, in_process: None) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "model.pt")
    data = record(memopt)
    data["conditions"]["settings"]["loss"] = f"{folder}/evil.py:loss"
    Path("memopt-baseline.json").write_text(json.dumps(data))
    assert memopt("check", "model.pt", "-q").code == 4
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    ("model", "flags"),
    [("faulty:Fine", ["--code-path", "{user_code}"]), ("model.pt", ["--no-sandbox"]), ("model.pt", [])],
    ids=["code of the user's", "not confined", "confined"],
)
def test_in_no_kind_of_subprocess_either(
    model: str, flags: list[str], memopt: Memopt, folder: Path, user_code: str
) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "model.pt")
    flags = [flag.format(user_code=user_code) for flag in flags]
    for spec in ("tensors and a script", "a script and sizes"):
        write_plan(spec_of(spec, folder))
        memopt("apply", model, "p.yaml", "--verify", "--force", "-q", *flags)
        assert not (folder / "canary").exists()


def test_the_tensors_of_a_plan_are_what_it_is_verified_on(memopt: Memopt, in_process: None) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "model.pt")
    plan = Plan(level=1)
    Path("p.yaml").write_bytes(plan_yaml(HEADER, plan))
    done = memopt("apply", "model.pt", "p.yaml", "--verify")
    assert done.code == 0, done.err
    assert "Inputs: Bx3, B=2 (p.yaml)" in done.err


@pytest.mark.parametrize("pair", [("tensors", "script"), ("tensors", "data_file"), ("data_file", "script")])
def test_inputs_are_described_once(pair: tuple[str, str], memopt: Memopt) -> None:
    values: dict[str, Any] = {"tensors": (TensorSpec(shape=(2,)),), "data_file": "x.pt", "script": "x.py:f"}
    with pytest.raises(UsageError, match=f"described twice, by {pair[0]} and {pair[1]}"):
        InputSpec(**{name: values[name] for name in pair}, source="")


def test_a_baseline_that_describes_the_inputs_twice_is_none(memopt: Memopt, in_process: None) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    data = record(memopt)
    data["spec"]["script"] = "x.py:f"
    Path("b.json").write_text(json.dumps(data))
    with pytest.raises(Exception, match=r"the file\.spec: the inputs are described twice"):
        read_measured("b.json")

"""A plan and a baseline are data, which may have come with the model: the command line alone names code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import check_spec
from memopt_cli.records import InputSpec, Plan, TensorSpec, to_data
from memopt_cli.records.plan_file import plan_yaml
from tests.zoo.records import a_header

Memopt = Any

HEADER = a_header(spec=InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 2}, source="here"))

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
    return json.loads(text)


def write_plan(spec: dict[str, Any]) -> None:
    data = {**to_data(HEADER), "spec": spec, "level": 1, "packed": True}
    Path("p.yaml").write_text(json.dumps(data))  # which is YAML, too


def record(memopt: Memopt) -> dict[str, Any]:
    """A baseline of the model, as it was written."""
    assert memopt("baseline", "model.pt", "-i", "2x3", "-q").code == 0
    return json.loads(Path("memopt-baseline.json").read_text())


RUN = {
    "apply": "apply model.pt p.yaml --verify --force",
    "apply with a size": "apply model.pt p.yaml --verify --force --dim B=2",
    "recommend-batch": "recommend-batch model.pt --plan p.yaml --longest-step 0.01",
    "profile": "profile model.pt --plan p.yaml",
    "baseline": "baseline model.pt --plan p.yaml -o other.json",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "spec"),
    [
        *(("apply", spec) for spec in SPECS),
        *((command, spec) for command in list(RUN)[1:] for spec in ("a script and sizes", "a file that is elsewhere")),
    ],
)
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


@pytest.mark.slow
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


@pytest.mark.parametrize("setting", ["loss", "optimizer"])
def test_no_baseline_names_a_function(setting: str, memopt: Memopt, folder: Path, in_process: None) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "model.pt")
    data = record(memopt)
    data["conditions"]["settings"][setting] = f"{folder}/evil.py:loss"
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
    plan = Plan()
    Path("p.yaml").write_bytes(plan_yaml(HEADER, plan, 3))
    done = memopt("apply", "model.pt", "p.yaml", "--verify")
    assert done.code == 0, done.err
    assert "Inputs: Bx3, B=2 (p.yaml)" in done.err


@pytest.mark.parametrize("pair", [("tensors", "script"), ("tensors", "data_file"), ("data_file", "script")])
def test_inputs_are_described_once(pair: tuple[str, str], memopt: Memopt) -> None:
    values: dict[str, Any] = {"tensors": (TensorSpec(shape=(2,)),), "data_file": "x.pt", "script": "x.py:f"}
    with pytest.raises(UsageError, match=f"described twice, by {pair[0]} and {pair[1]}"):
        InputSpec(**{name: values[name] for name in pair}, source="")


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.update(tensor_peak_bytes=-5),
        lambda memory: memory.update(step_s=-0.5),
        lambda memory: memory["breakdown"].update(inputs_bytes=-1),
        lambda memory: memory["modules"][0]["held_bytes"].update(inputs=-1),
    ],
)
def test_no_step_needs_less_than_nothing(change: Callable[[Any], None], memopt: Memopt, in_process: None) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    data = record(memopt)
    Path("a.json").write_text(json.dumps(data))
    change(data["memory"])
    Path("b.json").write_text(json.dumps(data))
    done = memopt("compare", "a.json", "b.json")
    assert done.code == 5
    assert "b.json is not a baseline: its " in done.err
    assert "it cannot be negative" in done.err


NO_TENSORS: dict[str, dict[str, Any]] = {
    "a negative size": {"shape": [4, -8]},
    "a huge size": {"shape": [2**62, 8]},
    "sizes that are huge together": {"shape": [2**32, 2**32]},
    "a size that is no name": {"shape": ["\x1b[31m", 8]},
    "a size that is no whole number": {"shape": [4.5, 8]},
    "very many dimensions": {"shape": [1] * 100_000},
    "a few dimensions too many": {"shape": [1] * 65},
    "a function of torch": {"dtype": "load"},
    "an attribute of torch": {"dtype": "__dict__"},
    "a dtype that cannot be filled": {"dtype": "qint8"},
    "a dtype that is none": {"dtype": "nope"},
    "values that are none": {"values": "abc"},
    "a rate that is none": {"values": "spikes:x"},
    "a rate that is no number": {"values": "spikes:nan"},
    "a rate above 1": {"values": "spikes:2"},
    "an empty range": {"values": "5..2"},
    "a range without end": {"values": "0.." + "9" * 5000},
    "a name that is none": {"name": "x y"},
    "an empty name": {"name": ""},
    "a very long name": {"name": " " * 10**6},
}


def with_tensor(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What a file says, of an input that is another."""
    tensor = {"name": None, "shape": [2, 3], "dtype": "float32", "values": "normal"} | changes
    return {**data, "spec": {"source": "here", "tensors": [tensor]}}


def assert_short(done: Any) -> None:
    """One error for people, which does not quote the whole file."""
    assert done.err.startswith("error: ")
    assert "Error:" not in done.err
    assert len(done.err) < 1000, done.err[:2000]


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_TENSORS)
def test_inputs_of_a_file_are_looked_at_as_those_that_are_typed(name: str, memopt: Memopt, in_process: None) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    header = with_tensor(to_data(HEADER), NO_TENSORS[name])
    if "shape" in NO_TENSORS[name] and len(NO_TENSORS[name]["shape"]) < 1000:  # no YAML is that long
        write_plan(header["spec"])
        done = memopt("apply", "model.pt", "p.yaml", "--verify", "-q")
        assert done.code == 2
        assert_short(done)
    memory = {"plan": {"level": 0}, "tensor_peak_bytes": 1, "allocated_peak_bytes": 1, "step_s": 1.0}
    Path("b.json").write_text(json.dumps({**header, "conditions": None, "memory": memory}))
    for command in (("check", "model.pt", "--baseline", "b.json"), ("compare", "b.json", "b.json")):
        done = memopt(*command, "-q") if command[0] == "check" else memopt(*command)
        assert done.code == 5
        assert_short(done)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NO_TENSORS if "range without" not in name and "dims" not in name])
def test_so_are_those_beside_a_model(name: str, memopt: Memopt, in_process: None) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    tensor = {"shape": [2, 3]} | NO_TENSORS[name]
    Path("model.inputs.yaml").write_text(json.dumps({"inputs": [tensor]}))
    done = memopt("optimize", "model.pt", "-q")
    assert done.code == 2
    assert_short(done)


@pytest.mark.parametrize("typed", ["x".join(["1"] * 65), "99999999999x99999999999", "Bx99999999999", "x" * 10**5])
def test_so_are_those_that_are_typed(typed: str, memopt: Memopt) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    done = memopt("optimize", "model.pt", "-i", typed, "--dim", "B=99999999999", "-q")
    assert done.code == 2
    assert_short(done)


LONG = "a" * 10**6
QUOTED: dict[str, Any] = {
    "a version": {"schema_version": LONG},
    "a spec": {"spec": LONG},
    "a list": {"spec": [LONG] * 3},
    "a key": {LONG: 1},
    "a key deep within": {"spec": {"source": "x", "dims": {LONG: "x"}}},
    "a dimension": {"spec": {"source": "x", "dims": {"B " + LONG: 1}}},
    "a number": {"seed": LONG},
    "a mapping": {"seed": {LONG: [LONG]}},
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_message_quotes_a_piece_of_a_file(name: str, memopt: Memopt) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    data = {**to_data(HEADER), "level": 0, **QUOTED[name]}
    text = json.dumps(data)
    Path("b.json").write_text(text)
    assert_short(memopt("compare", "b.json", "b.json"))
    Path("p.yaml").write_text(text.replace(LONG, LONG[:300_000]))
    assert_short(memopt("apply", "model.pt", "p.yaml", "-q"))


@pytest.mark.parametrize(
    "text", [f"level: !{LONG[:900_000]} 1", f"? {LONG[:900_000]}\n: !!int x", "a: b\n" * 2 + "c: ]"]
)
def test_neither_does_one_of_what_is_no_yaml(text: str, memopt: Memopt) -> None:
    torch.save(nn.Linear(3, 3), "model.pt")
    Path("p.yaml").write_text(text)
    done = memopt("apply", "model.pt", "p.yaml", "-q")
    assert done.code == 2
    assert_short(done)
    Path("memopt.yaml").write_text(text)
    assert_short(memopt("optimize", "model.pt", "-q"))


def test_an_input_that_is_empty_may_be_one() -> None:
    check_spec(InputSpec(tensors=(TensorSpec(shape=("B", 0)),), dims={"B": 2}, source=""))

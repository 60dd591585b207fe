"""``memopt baseline``, ``check`` and ``compare``: flags to one request, exit codes, and every format."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from memopt_cli.cli.app import main
from memopt_cli.errors import StepError
from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.records import (
    BaselineRequest,
    CheckRequest,
    InputSpec,
    ModelSource,
    StepSettings,
    TensorSpec,
    Trust,
)

FLAGS = (
    "-i Bx3 --dim B=8 --plan p.plan.yaml --device cuda:1 --precision fp64 --loss l.py:f --optimizer adamw "
    "--seed 7 --timeout 12.5 --weights w.pt --code-path train.py --allow-package a --allow-global c.D -q"
)
TYPED = Trust(packages=("a",), globals=("c.D",), code_paths=("train.py",))
SOURCE = ModelSource(
    location="model.pt",
    weights="w.pt",
    trust=TYPED,
    typed_trust=TYPED,
)
SPEC = InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 8}, source="--input")


def test_defaults(requests: list[Any]) -> None:
    assert main(["baseline", "model.pt"]) == 3
    assert main(["check", "model.pt"]) == 3
    source = ModelSource(location="model.pt")
    assert requests == [
        BaselineRequest(source=source, spec=None, settings=StepSettings(device="auto")),
        CheckRequest(source=source, baseline_path="memopt-baseline.json", limits=(parse_limit("peak:0"),), flags=()),
    ]


def test_every_flag_of_baseline_arrives(requests: list[Any]) -> None:
    assert main(["baseline", "model.pt", *FLAGS.split(), "-o", "b.json", "--force"]) == 3
    settings = StepSettings(device="cuda:1", precision="fp64", loss="l.py:f", optimizer="adamw", seed=7)
    assert requests == [
        BaselineRequest(
            source=SOURCE,
            spec=SPEC,
            settings=settings,
            plan_path="p.plan.yaml",
            output="b.json",
            force=True,
            timeout_s=12.5,
        )
    ]


def test_every_flag_of_check_arrives(requests: list[Any]) -> None:
    limits = ("peak:5%", "peak:64MiB", "step:20%")
    flags = [part for limit in limits for part in ("--fail-on", limit)]
    assert main(["check", "model.pt", *FLAGS.split(), "--baseline", "b.json", *flags]) == 3
    assert [replace(request, flags=None) for request in requests] == [
        CheckRequest(
            source=SOURCE,
            baseline_path="b.json",
            limits=tuple(map(parse_limit, limits)),
            spec=SPEC,
            device="cuda:1",
            precision="fp64",
            loss="l.py:f",
            optimizer="adamw",
            seed=7,
            plan_path="p.plan.yaml",
            timeout_s=12.5,
        )
    ]


@pytest.mark.parametrize("form", ["table", "json", "md", "github", "junit"])
def test_what_could_not_be_checked_is_red_in_every_format(
    form: str, requests: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "model.pt", "--format", form]) == 3
    out, err = capsys.readouterr()
    assert "error: enough" in err
    starts = {
        "table": "",
        "json": '{\n  "error": "enough",\n  "hint": ""\n}',
        "github": "::error title=",
        "junit": "<?xml",
    }
    assert out.startswith(starts.get(form, "### memopt: model.pt was not checked"))
    assert bool(out) is (form != "table")
    if form == "junit":
        suite = ET.fromstring(out.encode()).find("testsuite")
        assert (suite.get("errors"), suite.get("failures")) == ("1", "0")


@pytest.mark.parametrize("form", ["table", "json", "md", "github", "junit"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nett.py:build", "--format", "FORM"), "there is no file 'nett.py'"),
        (("--format", "FORM", "nett.py:build", "--fail-on", "paek:1%"), "there is no file 'nett.py'"),
        (("model.pt", "--fail-on", "paek:1%", "--format", "FORM"), "unknown metric 'paek'"),
        (("model.pt", "--fial-on", "peak:1%", "--format", "FORM"), "--fial-on"),
        (("model.pt", "--timeout", "soon", "--format", "FORM"), "soon"),
        (("--format", "FORM"), "MODEL"),
    ],
)
def test_wrong_arguments_are_red_in_every_format(
    form: str, arguments: tuple[str, ...], reason: str, requests: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *(form if each == "FORM" else each for each in arguments)]) == 2
    out, err = capsys.readouterr()
    assert reason in err
    assert bool(out) is (form != "table")
    model = next((each for each in arguments if each in ("model.pt", "nett.py:build")), "the model")
    match form:
        case "json":
            assert reason in json.loads(out)["error"]
        case "github":
            title = model.replace(":", "%3A")
            assert out.startswith(f"::error title=memopt%3A {title} was not checked::")
            assert reason in out
        case "junit":
            suite = ET.fromstring(out.encode()).find("testsuite")
            assert suite is not None
            assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
            case = suite.find("testcase")
            assert case is not None
            assert case.get("classname") == f"memopt.{model}"
        case "md":
            assert out.replace("`", "").startswith(f"### memopt: {model} was not checked")


@pytest.mark.parametrize("form", ["table", "json", "md", "github", "junit"])
@pytest.mark.parametrize(("candidate", "code"), [("w.pt", 3), ("nett.py:build", 2)])
def test_what_could_not_be_verified_is_red_in_every_format(
    form: str, candidate: str, code: int, requests: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "model.pt", candidate, "--format", form]) == code
    out, err = capsys.readouterr()
    assert ("enough" if code == 3 else "there is no file 'nett.py'") in err
    match form:
        case "table":
            assert not out
        case "json":
            assert json.loads(out)["error"] in err
        case "github":
            title = candidate.replace(":", "%3A")
            assert out.startswith(f"::error title=memopt%3A {title} was not checked::")
        case "md":
            assert out.replace("`", "").startswith(f"### memopt: {candidate} was not checked")
        case "junit":
            (suite,) = ET.fromstring(out.encode())
            assert (suite.get("name"), suite.get("errors")) == ("memopt verify", "1")
            (case,) = suite.iter("testcase")
            assert (case.get("classname"), case.get("name")) == (f"memopt.{candidate}", "verify")


def test_an_error_that_nobody_foresaw_is_reported_once(
    requests: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: Any, *, progress: Any, ask: Any) -> None:
        raise TypeError("odd")

    monkeypatch.setattr(sys.modules["memopt_cli.pipeline"], "check", fail)
    assert main(["check", "model.pt", "--format", "json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"] == "unexpected TypeError: odd"


@pytest.mark.parametrize("form", ["table", "json", "md", "github", "junit"])
def test_a_ci_system_obeys_no_reason(
    form: str, requests: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Any, *, progress: Any, ask: Any) -> None:
        raise StepError("no\n::error::x\n##vso[y]")

    monkeypatch.setattr(sys.modules["memopt_cli.pipeline"], "check", refuse)
    assert main(["check", "model.pt", "--format", form]) == 3
    out, err = capsys.readouterr()
    assert "##vso[" not in out + err
    commands = [line for line in (out + err).splitlines() if line.lstrip().startswith("::")]
    assert [line.partition("::no")[0] for line in commands] == ["::error title=memopt%3A model.pt was not checked"] * (
        form == "github"
    )


def test_a_missing_baseline_is_recorded_with_what_was_typed(
    memopt: Callable[..., Any], in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.pt").touch()
    Path("l.py").touch()
    done = memopt("check", "net.pt", "-i", "4x64", "--loss", "l.py:f", "--baseline", "no.json", "--fail-on", "peak:1%")
    assert done.code == 5
    assert "Record one with memopt baseline net.pt --input 4x64 --loss l.py:f -o no.json." in done.err
    done = memopt("check", "net.pt")
    assert "Record one with memopt baseline net.pt -i SHAPE -o memopt-baseline.json." in done.err


def save_net(path: Path, width: int) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 4)), path)


@pytest.fixture
def recorded(memopt: Callable[..., Any], in_process: None, tmp_path: Path) -> Callable[..., Any]:
    """A folder with a model and its baseline."""
    save_net(tmp_path / "net.pt", 64)
    done = memopt("baseline", "net.pt", "-i", "512x64", "-q")
    assert done.code == 0, done.err
    assert done.changed == {"memopt-baseline.json"}
    assert done.out.startswith("tensor peak ")
    return memopt


@pytest.mark.slow
def test_exit_codes(recorded: Callable[..., Any], tmp_path: Path) -> None:
    assert recorded("check", "net.pt").code == 0
    save_net(tmp_path / "net.pt", 96)
    done = recorded("check", "net.pt", "-q")
    assert done.code == 1
    assert done.out.startswith("regression: tensor peak ")
    assert done.out.count("\n") == 1
    assert not done.err
    assert not done.changed
    assert recorded("check", "net.pt", "--fail-on", "peak:90%").code == 0
    assert recorded("check", "net.pt", "--fail-on", "peak:90%", "--fail-on", "parameters:0").code == 1
    assert recorded("check", "net.pt", "--precision", "bf16").code == 5
    assert recorded("check", "net.pt", "--baseline", "elsewhere.json").code == 5
    assert recorded("check", "net.pt", "-i", "512x63").code == 5
    assert recorded("baseline", "net.pt", "-i", "512x64").code == 2  # it exists
    Path("net.pt").write_bytes(b"")
    assert recorded("check", "net.pt").code == 3


@pytest.mark.slow
def test_the_summary_page_of_github(
    recorded: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert recorded("check", "net.pt", "--format", "github").out.startswith(
        "::notice title=memopt%3A net.pt,file=memopt-baseline.json,line=1::no regr"
    )
    save_net(tmp_path / "net.pt", 96)
    done = recorded("check", "net.pt", "--format", "github")
    assert (done.code, done.out.count("::error")) == (1, 1)
    text = page.read_text()
    assert text.startswith("before\n### memopt: net.pt\n")
    assert text.count("### memopt") == 2


@pytest.mark.slow
def test_two_files(recorded: Callable[..., Any], tmp_path: Path) -> None:
    save_net(tmp_path / "net.pt", 96)
    assert recorded("baseline", "net.pt", "-i", "512x64", "-o", "b.json").code == 0
    done = recorded("compare", "memopt-baseline.json", "b.json")
    assert done.code == 0
    assert done.out.startswith("tensor peak ")
    assert json.loads(recorded("compare", "memopt-baseline.json", "b.json", "--json").out)["verdicts"] == []
    assert recorded("compare", "memopt-baseline.json", "b.json", "--format", "md").out.startswith("### memopt")
    assert recorded("compare", "memopt-baseline.json", "missing.json").code == 5


@pytest.mark.process
def test_in_a_fresh_process(spawn_memopt: Callable[..., Any], memopt: Callable[..., Any], tmp_path: Path) -> None:
    save_net(tmp_path / "net.pt", 64)
    assert memopt("baseline", "net.pt", "-i", "512x64").code == 0
    done = spawn_memopt(tmp_path, "check", "net.pt", "--fail-on", "peak:0", "--fail-on", "activations:0")
    assert done.code == 0, done.err
    assert "measuring a step" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/dev/zero", "../there.pt", "link.pt"])
def test_a_baseline_names_no_file_elsewhere(recorded: Callable[..., Any], where: str) -> None:
    import torch

    Path("link.pt").symlink_to("/dev/null")
    data = json.loads(Path("memopt-baseline.json").read_text())
    data["spec"] |= {"tensors": [], "dims": {}, "data_file": where}
    Path("memopt-baseline.json").write_text(json.dumps(data))
    done = recorded("check", "net.pt")
    assert done.code == 4
    assert (
        f"memopt-baseline.json names a file that is not in its folder, which you must give yourself: {where}"
        in done.err
    )
    assert f"hint: If it is yours, add: --input-data {where}\n" in done.err
    torch.save(torch.zeros(512, 64), "other.pt")
    assert recorded("check", "net.pt", "--input-data", "other.pt").code == 5
    assert recorded("check", "net.pt", "--input-data", "none.pt").code == 2


@pytest.mark.slow
def test_inputs_beside_a_baseline(recorded: Callable[..., Any]) -> None:
    import torch

    torch.save(torch.ones(2, 64), "x.pt")
    assert recorded("baseline", "net.pt", "--input-data", "x.pt", "--force").code == 0
    assert recorded("check", "net.pt").code == 0


def test_the_command_that_is_offered_records_the_step_that_was_checked(recorded: Callable[..., Any]) -> None:
    step = ("-i", "Bx64", "--dim", "B=16", "--optimizer", "adamw", "--seed", "3")
    refused = recorded("check", "net.pt", *step)
    assert refused.code == 5
    command = refused.err.rpartition("Record the step that is checked here: memopt ")[2].split()
    assert recorded(*command).code == 0
    assert recorded("check", "net.pt").code == 0
    assert recorded("check", "net.pt", *step).code == 0


def test_a_script_is_found_from_another_folder_with_the_sizes_of_the_baseline(recorded: Callable[..., Any]) -> None:
    Path("make.py").write_text("import torch\ndef inputs(batch=2, width=64):\n    return torch.ones(batch, width)\n")
    sizes = ("--dim", "batch=4", "--dim", "width=64")
    assert recorded("baseline", "net.pt", "--input-script", "make.py:inputs", *sizes, "--force").code == 0
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    step = ("check", "../net.pt", "--baseline", "../memopt-baseline.json", "--input-script", "../make.py:inputs")
    assert recorded(*step).code == 0
    refused = recorded(*step, "--dim", "batch=8")
    assert "make.py:inputs B=4 width=64 in the baseline, make.py:inputs B=8 width=64 now" in refused.err


def test_a_peak_that_was_raised_by_hand_is_refused(recorded: Callable[..., Any]) -> None:
    file = Path("memopt-baseline.json")
    data = json.loads(file.read_text())
    data["memory"]["tensor_peak_bytes"] *= 2
    file.write_text(json.dumps(data))
    refused = recorded("check", "net.pt")
    assert refused.code == 5
    assert "is not a baseline: its categories add up to " in refused.err


def test_a_missing_baseline_is_recorded_where_it_was_looked_for(memopt: Callable[..., Any]) -> None:
    assert "memopt baseline MODEL -i SHAPE -o 'my nets.json'" in memopt("compare", "my nets.json", "b.json").err

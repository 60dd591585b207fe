"""``--html`` and ``--snapshot``: checked before the work begins, written when it is done."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.cli.app import main
from memopt_cli.cli.report_files import ReportFiles
from memopt_cli.records import OpTrace, RecordedSteps, StepTrace, StorageTrace

FLAGS = ["--html", "r.html", "--snapshot", "s.pickle"]


@pytest.fixture
def recording(pipeline: Any) -> Any:
    """The stand-in, with a recorded step in its result."""
    op = OpTrace(name="aten::mm", module="", phase="forward")
    kept = StorageTrace(nbytes=4096, kind="activations", module="", born=0, died=None, freed=None)
    trace = StepTrace(
        modules=(),
        tensor_peak_bytes=4096,
        resident_bytes=0,
        batch=1,
        ops=(op,),
        storages=(kept,),
        allocated_peak_bytes=4096,
    )
    pipeline.result = replace(pipeline.result, steps=RecordedSteps(original=trace, optimized=trace))
    return pipeline


def test_both_are_written(recording: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    assert main(["optimize", "model.pt", *FLAGS]) == 0
    assert recording.requests[0].record_steps
    assert "aten::mm" in Path("r.html").read_text()
    (events,) = pickle.loads(Path("s.pickle").read_bytes())["device_traces"]
    assert events[0]["size"] == 4096
    assert capsys.readouterr().out.endswith("\nwrote r.html\nwrote s.pickle\n")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_every_form_names_options_as_they_are_typed(
    form: list[str], recording: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    summary = replace(recording.result.summary, notes=["Raise `--max-slowdown 2`."])
    recording.result = replace(recording.result, summary=summary)
    assert main(["optimize", "model.pt", "--html", "r.html", *form]) == 0
    for said in (capsys.readouterr().out, Path("r.html").read_text()):
        assert "Raise --max-slowdown 2." in said


def test_no_step_is_recorded_unasked(optimize: Callable[..., Any]) -> None:
    before = set(Path().iterdir())
    assert not optimize().record_steps
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("command", ["optimize", "profile"])
def test_a_file_that_exists_is_kept(recording: Any, command: str) -> None:
    Path("s.pickle").write_text("mine")
    assert main([command, "model.pt", "--snapshot", "s.pickle"]) == 2
    assert recording.requests == []
    assert Path("s.pickle").read_text() == "mine"
    if command == "optimize":
        assert main([command, "model.pt", "--snapshot", "s.pickle", "--force"]) == 0
        assert Path("s.pickle").read_bytes() != b"mine"


@pytest.mark.parametrize("command", ["optimize", "profile"])
def test_a_missing_library_is_told_first(
    recording: Any, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([command, "model.pt", *FLAGS]) == 2
    assert recording.requests == []
    assert "pip install 'memopt[html]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_files_of_a_real_run(memopt: Callable[..., Any]) -> None:
    import torch
    from torch import nn

    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid(), nn.Tanh()) for _ in range(4)]
    torch.save(nn.Sequential(*blocks), "net.pt")
    search = "optimize net.pt -i 512x64 --level 1 --max-slowdown none --dry-run --json".split()
    done = memopt(*search, "--snapshot", "s.pickle")
    assert done.changed == {"s.pickle"}
    result = json.loads(done.out)
    before, after = (row["outcome"]["tensor_peak_bytes"] for row in result["summary"]["levels"])
    assert after < before
    measured = result["summary"]["levels"][-1]["outcome"]["allocated_peak_bytes"]
    assert peak_of(Path("s.pickle")) == pytest.approx(measured, rel=0.02)


def peak_of(snapshot: Path) -> int:
    live = peak = 0
    (events,) = pickle.loads(snapshot.read_bytes())["device_traces"]
    for event in events:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        peak = max(peak, live)
    return peak


def test_a_path_that_is_no_text(pipeline: Any) -> None:
    files = ReportFiles(html="r.html", snapshot=None, force=False)
    assert files.write(lambda: "mod\udcff.pt") == ("r.html",)
    assert Path("r.html").read_text() == "mod\\udcff.pt"


@pytest.mark.parametrize(
    "flags", [("baseline", "-o"), ("recommend-batch", "-o"), ("profile", "--snapshot"), ("optimize", "--html")]
)
def test_no_report_is_written_over_the_model(
    flags: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with ``--force`` either: it was replaced."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def build(): ...\n")
    command, flag = flags
    assert main([command, "train.py:build", "-i", "2x2", flag, "train.py", "--force"]) == 2
    assert "train.py is the model itself" in capsys.readouterr().err
    assert Path("train.py").read_text() == "def build(): ...\n"

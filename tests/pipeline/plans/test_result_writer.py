"""What was found is on the disk before anything follows from it, and stays there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import memopt_cli
from memopt_cli.errors import MeasurementError, UnsafeFileError
from memopt_cli.measure.answers import without_steps
from memopt_cli.measure.jobs import VerifyJob
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.plans import result_writer
from memopt_cli.records import Crashed, ModelSource, Plan, Trust
from memopt_cli.text.writing import write_all

pytestmark = pytest.mark.usefixtures("in_process")

Memopt = Callable[..., Any]

STEP = "-i 256x32 --level 1 --max-slowdown none".split()


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))


@pytest.fixture
def net() -> nn.Module:
    """In ``net.pt``; segments pay."""
    model = nn.Sequential(layer(), layer(), layer())
    torch.save(model, "net.pt")
    return model


@pytest.fixture
def step() -> list[str]:
    """The same with inputs of a file, which cannot be resized: no batch is searched for."""
    torch.save([torch.randn(256, 32)], "inputs.pt")
    return ["--input-data", "inputs.pt", *STEP[2:]]


def names(*ends: str) -> set[str]:
    return {f"net.memopt.{end}" for end in ends}


PLAN = names("plan.yaml", "summary.json")


@pytest.mark.slow
def test_the_plan_is_there_before_anything_follows(
    memopt: Memopt, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[str]] = []
    save, advise = result_writer.model_writer, result_writer.advise
    monkeypatch.setattr(result_writer, "model_writer", lambda *given: found.append({*os.listdir()}) or save(*given))
    monkeypatch.setattr(result_writer, "advise", lambda *given: found.append({*os.listdir()}) or advise(*given))
    done = memopt("optimize", "net.pt", *STEP)
    assert done.code == 0, done.err
    assert found == [{"net.pt", *PLAN}, {"net.pt", *PLAN, "net.memopt.pt"}]
    assert done.changed == PLAN | names("pt", "batch.yaml")
    batch = yaml.safe_load(Path("net.memopt.batch.yaml").read_text())["recommended"]
    assert batch["estimated_batch_size"] > 256
    assert batch["predicted_peak_bytes"] <= batch["budget_bytes"]
    assert "running batch" not in done.err
    _, plan = memopt_cli.read_plan("net.memopt.plan.yaml")
    assert memopt_cli.plan_of(memopt_cli.load("net.memopt.pt")).segments == plan.segments


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["faulty:CannotBeSaved", pytest.param("leaky:build", marks=pytest.mark.exhaustive)],  # fails in torch.save, too
)
def test_a_model_that_cannot_be_saved(model: str, memopt: Memopt, user_code: str) -> None:
    if model.startswith("leaky"):
        pytest.importorskip("snntorch")
    name = model.partition(":")[0]
    command = ["optimize", model, *STEP, "--code-path", user_code, "-o", f"{name}.memopt.pt"]
    plan_path = f"{name}.memopt.plan.yaml"
    done = memopt(*command)
    assert done.code == 3
    assert done.changed == {plan_path, f"{name}.memopt.summary.json"}
    assert "error: the model could not be saved: " in done.err
    assert "memopt_cli.apply_plan(model, " in done.err
    assert f"The verified plan is in {plan_path}.\n" in done.err
    assert f"wrote {name}.memopt.summary.json, .plan.yaml in " in done.out

    done = memopt(*command, "--plan-only", "--force", "--no-recommend-batch")
    assert (done.code, f"{name}.memopt.pt" in done.changed) == (0, False), done.err


def test_a_plan_that_does_not_suit_the_model_is_not_explained(memopt: Memopt) -> None:
    torch.save(nn.Sequential(nn.Linear(4, 4)), "net.pt")
    memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="head", chunks=2, through_loss=True),)).save("plan.yaml")
    done = memopt("apply", "net.pt", "plan.yaml")
    assert "error: the plan names module 'head', which Sequential does not have" in done.err
    assert "runs in chunks through its loss" not in done.err


@pytest.mark.parametrize("name", ["user_net", "profile"])  # the second is a module of Python's
def test_a_model_of_a_file_is_saved_if_it_can_be_loaded_again(
    name: str, spawn_memopt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self): super().__init__(nn.Linear(4, 4))"
    (tmp_path / f"{name}.py").write_text(code)
    memopt_cli.Plan(segments=(memopt_cli.SegmentPlan(path="0"),)).save(tmp_path / "plan.yaml")
    done = spawn_memopt(tmp_path, "apply", f"{name}.py:Net", "plan.yaml", "-o", "out.pt")
    if name == "profile":
        assert (done.code, done.changed) == (3, set())
        assert "profile.py has the name of another module" in done.err
    else:
        assert done.code == 0, done.err
        monkeypatch.setattr(sys, "path", [*sys.path])
        loaded = memopt_cli.load(tmp_path / "out.pt", trust=Trust(code_paths=(str(tmp_path / "user_net.py"),)))
        assert isinstance(loaded, sys.modules.pop("user_net").Net)


@pytest.mark.slow
def test_the_line_that_loads_the_model_works_in_any_folder(memopt: Memopt, net: nn.Module, step: list[str]) -> None:
    done = memopt("optimize", "net.pt", *step, "--code-path", ".")
    assert done.out.endswith(f"trust=memopt_cli.Trust(code_paths=({str(Path.cwd())!r},)))\n"), done.err


@pytest.mark.slow
def test_a_model_of_a_class_in_a_file_is_loaded_with_the_folder_of_its_code(
    spawn_memopt: Memopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = tmp_path / "inputs.pt"
    torch.save([torch.randn(256, 32)], inputs)  # inputs of a file cannot be resized: no batch is searched for
    Path("code").mkdir()
    Path("code/user_layer.py").write_text(
        "from torch import nn\n\n\nclass Layer(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))\n"
    )
    Path("code/user_net.py").write_text(
        "from torch import nn\nfrom user_layer import Layer\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(Layer(), Layer(), Layer())\n"
    )
    done = spawn_memopt(tmp_path, "optimize", "code/user_net.py:Net", "--input-data", str(inputs), *STEP[2:])
    assert done.code == 0, done.err
    line = done.out.splitlines()[-1].removeprefix("use it: ")
    ran = subprocess.run(
        [sys.executable, "-c", f"import memopt_cli; {line}; print(type(model))"], capture_output=True, text=True
    )
    assert ran.stdout == "<class 'user_net.Net'>\n", ran.stderr


@pytest.mark.slow
def test_a_plan_alone_leaves_a_model_of_that_name_alone(memopt: Memopt, net: nn.Module, step: list[str]) -> None:
    Path("net.memopt.pt").write_text("mine")
    assert memopt("optimize", "net.pt", *step).code == 2
    done = memopt("optimize", "net.pt", *step, "--plan-only")
    assert (done.code, done.changed) == (0, PLAN | names("batch.yaml"))
    exec(done.out.splitlines()[-1].removeprefix("use it: "), {"memopt_cli": memopt_cli, "model": net})
    assert memopt_cli.plan_of(net).segments == memopt_cli.read_plan("net.memopt.plan.yaml")[1].segments


@pytest.mark.slow
def test_a_model_that_stays_as_it_is_is_not_copied(memopt: Memopt) -> None:
    """Unless its name is given, or a model of an earlier run is there, whose plan is another by now."""
    torch.save(nn.Linear(4, 4), "net.pt")
    command = ("optimize", "net.pt", "-i", "2x4", "--level", "0", "--no-recommend-batch")
    done = memopt(*command)
    assert (done.code, done.changed) == (0, names("summary.json", "batch.yaml"))
    assert "use it: " not in done.out
    assert "is left as it is" not in done.out
    assert memopt(*command, "-o", "named.pt").changed == {"named.pt", "named.summary.json", "named.batch.yaml"}
    Path("net.memopt.pt").write_text("of an earlier run")
    Path("net.memopt.plan.yaml").write_text("of an earlier run")
    done = memopt(*command, "--force")
    assert done.changed == names("pt", "summary.json")  # the batch is the same
    assert isinstance(memopt_cli.load("net.memopt.pt"), nn.Linear)
    assert "\nnet.memopt.plan.yaml was written by an earlier run and is left as it is.\n" in done.out
    assert Path("net.memopt.plan.yaml").read_text() == "of an earlier run"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_a_file_that_has_come_to_exist_meanwhile(
    flags: tuple[str, ...], memopt: Memopt, net: nn.Module, step: list[str], answered: Callable[..., None]
) -> None:
    """It costs neither its owner's content nor the plan."""

    def meanwhile(session: Session, job: VerifyJob, ask: Callable[..., Any]) -> Any:
        Path("net.memopt.pt").write_text("theirs")
        return ask(job)

    answered(VerifyJob, meanwhile)
    done = memopt("optimize", "net.pt", *step, *flags)
    assert done.code == 0, done.err
    if flags:
        assert done.changed == PLAN | names("pt", "batch.yaml")
    else:
        assert done.changed == {"net.memopt.pt"} | {
            f"net.memopt-2.{end}" for end in ("pt", "plan.yaml", "summary.json", "batch.yaml")
        }
        assert Path("net.memopt.pt").read_text() == "theirs"
        assert "Files of net.memopt appeared meanwhile, so these are named net.memopt-2." in done.out


@pytest.mark.slow
def test_ctrl_c_before_a_plan_is_verified_keeps_nothing(
    memopt: Memopt, user_code: str, answered: Callable[..., None]
) -> None:
    """Pressed while the plan that failed is narrowed: none of its parts has been proven as a whole."""
    asked = []

    def pressed(session: Session, job: VerifyJob, ask: Callable[..., Any]) -> Any:
        asked.append(job.plan)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return ask(job)

    answered(VerifyJob, pressed)
    done = memopt("optimize", "faulty:one_sees_backward", *STEP, "--code-path", user_code)
    assert (done.code, done.out, done.changed) == (130, "", set())


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_what_fails_in_the_advice_costs_the_advice_alone(
    flags: tuple[str, ...], memopt: Memopt, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise memopt_cli.errors.MeasurementError("no more", hint="Less.")

    monkeypatch.setattr(result_writer, "advise", fail)
    done = memopt("optimize", "net.pt", *STEP, *flags)
    assert (done.code, ", same bits in " in done.out) == (3, True)
    assert done.changed == (set() if flags else PLAN | names("pt"))
    where = "" if flags else "      The verified plan is in net.memopt.plan.yaml.\n"
    assert done.err.endswith(f"error: no more\nhint: Less.\n{where}")


class Attack:
    """Runs a program as soon as it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch canary",)


@pytest.mark.parametrize("sandbox", [True, False])
def test_what_a_subprocess_returns_in_place_of_the_model(
    sandbox: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not written; but for what is not confined, which could write it by itself."""
    monkeypatch.chdir(tmp_path)
    torch.save(layer(), "net.pt")
    monkeypatch.setattr(without_steps, "write_model", lambda model, plan, file: torch.save(Attack(), file))
    source = ModelSource(location="net.pt", trust=Trust(sandbox=sandbox))
    with contextlib.nullcontext() if not sandbox else pytest.raises(UnsafeFileError, match=RETURNED):
        write_all({Path("out.pt"): result_writer.model_writer(source, Plan(), 60.0)}, force=False)
    assert {path.name for path in Path().iterdir()} == {"net.pt", *(() if sandbox else ("out.pt",))}


RETURNED = "^no model is written: the subprocess returned something that is not an optimized model: .*posix.system runs"


def test_nobody_is_sent_to_run_elsewhere_what_crashed_here() -> None:
    """A file may have made the subprocess crash where it is confined."""
    with pytest.raises(MeasurementError, match="killed by SIGSEGV") as error:
        raise_failure(Crashed(reason="killed by SIGSEGV", output_tail=""))
    assert error.value.hint.startswith("If you trust the model, ")

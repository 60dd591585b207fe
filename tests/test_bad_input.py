"""Bad input: one clear sentence that names the cause and the next step, the right exit code, and nothing written."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from memopt_cli.records import SCHEMA_VERSION, TYPED, FileHeader, InputSpec, Plan, TensorSpec
from memopt_cli.records.plan_file import plan_yaml

Memopt = Callable[..., Any]


class Vandal:
    """Its pickle runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.fixture
def folder(memopt: Memopt, tmp_path: Path, user_code: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file that the table below names."""
    monkeypatch.syspath_prepend(user_code)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    torch.save(model, "good.pt")
    torch.save(model.state_dict(), "weights.pt")
    torch.save(nn.Sequential(nn.Linear(3, 4), nn.Tanh()).half(), "half.pt")
    torch.save(Vandal(), "vandal.pt")
    Path("legacy_vandal.pt").write_bytes(pickle.dumps(Vandal()))
    torch.save(importlib.import_module("faulty").Fine(), "fine.pt")
    _save_as_of_a_lost_module("lost.pt")
    good = Path("good.pt").read_bytes()
    Path("empty.pt").touch()
    Path("truncated.pt").write_bytes(good[: len(good) // 2])
    Path("random.pt").write_bytes(random.Random(0).randbytes(4096))
    Path("taken.pt").write_text("somebody's")
    Path("config.yaml").write_text("lvl: 3\n")
    functions = "def mean(output): return output.mean()", "def endless(output): return output.mean() / 0"
    functions += "def against(output, target): ...", "from torch.nn import CrossEntropyLoss", ""
    Path("loss.py").write_text("\n".join(functions))
    Path("plan.yaml").write_text("segments: [\n")
    os.mkdir("a_folder")
    Path("graph.onnx").write_bytes(ONNX)
    for pointer in ("pointer.pt", "pointer.safetensors"):
        Path(pointer).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    Path("net.py").write_text(
        "from torch import nn\ndef _own(): ...\ndef build(): return nn.Linear(3, 4)\nclass Net: ...\n"
    )
    Path("broken.py").write_text("def\n")
    for folder, names in (("one_file", ["model"]), ("shards", ["a", "b"])):
        os.mkdir(folder)
        for name in names:
            save_file(nn.Linear(3, 4).state_dict(), f"{folder}/{name}.safetensors")
    return tmp_path


def _save_as_of_a_lost_module(path: str) -> None:
    """A model whose class lived in a module that is not installed any more."""
    torch.save(importlib.import_module("faulty").Fine(), "with_module.pt")
    with zipfile.ZipFile("with_module.pt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"faulty", b"lostpk") if name.endswith("data.pkl") else data)
    os.unlink("with_module.pt")


ONNX = b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\0"

BEFORE_A_STEP = [
    # command, exit code, what the message says
    ("optimize missing.pt", 2, ["there is no file 'missing.pt'"]),
    ("optimize a_folder", 2, ["'a_folder' is a folder"]),
    ("optimize empty.pt", 3, ["empty.pt is empty"]),
    (
        "optimize truncated.pt",
        3,
        ["truncated.pt cannot be read: it is truncated, as after an interrupted save or download\n"],
    ),
    ("optimize random.pt", 3, ["random.pt", "not a model saved by torch.save"]),
    ("inspect plan.yaml", 2, ["'plan.yaml' is YAML, not a saved model"]),
    ("compare good.pt plan.yaml", 5, ["good.pt is not a baseline: it is not JSON"]),
    ("compare plan.yaml good.pt", 5, ["plan.yaml is not a baseline: it is not JSON"]),
    ("optimize weights.pt", 3, ["2 tensors but no model", "build.py:build --weights weights.pt; build.py is a file"]),
    ("optimize weights.pt -q", 3, ["The whole command: memopt optimize build.py:build --weights weights.pt -q"]),
    (
        "optimize weights.pt --code-path loss.py --code-path net.py",
        3,
        [
            "Name what builds the model: net.py:build --weights weights.pt\n",
            "The whole command: memopt optimize net.py:build --weights weights.pt --code-path loss.py "
            "--code-path net.py\n",
        ],
    ),
    (
        "optimize one_file/model.safetensors --code-path net.py",
        3,
        ["The whole command: memopt optimize net.py:build --weights"],
    ),
    ("optimize lost.pt --code-path net.py", 3, ["read without it: net.py:build --weights lost.pt\n"]),
    ("optimize lost.pt --code-path loss.py", 3, ["--code-path loss.py has no module lostpk", "--weights lost.pt"]),
    ("optimize https://a.b/model.pt", 2, ["memopt downloads nothing", "curl -LO https://a.b/model.pt"]),
    ("optimize goood.pt", 2, ["Did you mean good.pt?"]),
    ("optimize graph.onnx", 3, ["graph.onnx is an ONNX graph", "torch.save(model, path)"]),
    ("optimize pointer.pt", 3, ["pointer.pt is a pointer of Git LFS", "git lfs pull"]),
    ("optimize net:build --weights pointer.safetensors", 3, ["is a pointer of Git LFS", "git lfs pull"]),
    ("optimize net.py", 2, ["'net.py' is Python code", "without arguments: net.py:build. It defines build, Net.\n"]),
    ("optimize broken.py", 2, ["'broken.py' is Python code", "without arguments: broken.py:NAME.\n"]),
    ("optimize net.py:buildd", 2, ["net.py has no function buildd", "Did you mean build?\n"]),
    ("optimize net.py:nothing", 2, ["net.py has no function nothing", "It defines build, Net."]),
    ("profile a_folder", 2, ["without config.json", "build.py:build --weights FOLDER/model.safetensors; build.py is"]),
    (
        "optimize one_file",
        2,
        ["of weights without config.json", "build.py:build --weights one_file/model.safetensors;"],
    ),
    ("optimize net.py:build --weights shards", 2, ["'shards' is a folder with 2 files of weights: a.safetensors, b."]),
    ("optimize net.py:build --weights a_folder", 2, ["'a_folder' is a folder with 0 files of weights\n"]),
    ("optimize vandal.pt", 4, ["vandal.pt was not loaded", "posix.system", "attack"]),
    ("optimize legacy_vandal.pt", 4, ["posix.system", "attack"]),
    ("optimize fine.pt", 4, ["faulty.Fine", "--allow-package faulty"]),
    ("optimize lost.pt", 3, ["lostpk.Fine", "cannot be imported", "--code-path FOLDER", "--code-path"]),
    ("optimize lost.pt --allow-package lostpk", 3, ["lostpk.Fine", "cannot be imported", "--code-path FOLDER"]),
    ("optimize good.pt --code-path nowhere.py", 2, ["--code-path", "there is no file 'nowhere.py'"]),
    ("optimize good.pt --code-path plan.yaml", 2, ["'plan.yaml' is neither a folder nor a Python file"]),
    (
        "optimize good.pt --code-path train.ipynb",
        2,
        ["notebook", "nbconvert --to script train.ipynb (or in its menu", "and name train.py"],
    ),
    ("optimize good.pt --loss train.ipynb:mean", 2, ["--loss", "nbconvert", "name train.py:mean"]),
    ("optimize good.pt --optimizer train.ipynb:make", 2, ["--optimizer", "nbconvert", "name train.py:make"]),
    ("profile good.pt --ranks 2 --parallel train.ipynb:f", 2, ["--parallel", "nbconvert", "name train.py:f"]),
    ("optimize train.ipynb", 2, ["nbconvert", "name train.py:FUNCTION"]),
    ("optimize train.ipynb:make", 2, ["nbconvert", "name train.py:make"]),
    ("optimize nowhere:build", 2, ["importing nowhere failed", "--code-path"]),
    ("optimize faulty:build", 2, ["faulty", "build"]),
    ("optimize faulty:Fine --weights good.pt", 3, ["good.pt"]),
    ("optimize faulty:Fine --weights missing.pt", 2, ["--weights", "there is no file 'missing.pt'"]),
    ("optimize good.pt -i 2xx3", 2, ["2xx3"]),
    ("optimize good.pt -i Bx3", 2, ["without a size: B", "--dim B=8"]),
    ("optimize good.pt -i Bx3 --dim batch=4", 2, ["without a size: B", "Did you mean --dim B=4, not --dim batch=4?"]),
    ("optimize good.pt -i 2xHxW --dim H=3 -i BxTxW", 2, ["without a size: W, B, T", "--dim W=8 --dim B=8 --dim T=8"]),
    ("optimize good.pt -i 2x3@float33", 2, ["float33"]),
    ("optimize good.pt -i 2x3=loud", 2, ["loud"]),
    ("optimize good.pt -i 2x3 --dim B", 2, ["'B'"]),
    ("optimize good.pt --input-data missing.npz", 2, ["--input-data", "there is no file 'missing.npz'"]),
    ("optimize good.pt --input-data a_folder", 2, ["--input-data", "'a_folder' is a folder, not a file"]),
    ("optimize good.pt --loss a_folder:mean", 2, ["'a_folder:mean'"]),
    ("explain --snapshot a_folder", 2, ["--snapshot", "'a_folder' is a folder, not a file"]),
    ("explain good.pt --log a_folder", 2, ["--log", "'a_folder' is a folder, not a file"]),
    ("apply good.pt a_folder", 2, ["'a_folder' is a folder, not a file"]),
    ("optimize good.pt --level 5", 2, ["5", "0 to 4"]),
    ("optimize good.pt --precision fp12", 2, ["fp12", "bf16"]),
    ("optimize good.pt --optimizer lion", 2, ["lion", "adamw"]),
    ("optimize good.pt --device cuda:0", 2, ["cuda:0", "Use the CPU"]),
    ("optimize good.pt --device abacus", 2, ["abacus"]),
    ("optimize good.pt -i 2x3 -o taken.pt", 2, ["taken.pt exists", "--force"]),
    ("optimize good.pt -i 2x3 -o taken.pt --html taken.pt --loss missing.py:f", 2, ["there is no file 'missing.py'"]),
    ("optimize good.pt --snapshot taken.pt -i 2xx3", 2, ["2xx3"]),
    ("apply good.pt random.pt -o taken.pt", 2, ["random.pt is a binary file", "*.plan.yaml"]),
    ("optimize good.pt -i 2x3 -o a_folder", 2, ["a_folder is a folder"]),
    ("optimize good.pt -i 2x3 -o no/such/folder/out.pt", 3, ["no folder no/such/folder"]),
    ("optimize good.pt --config config.yaml", 2, ["config.yaml", "unknown key 'lvl'", "Did you mean level?"]),
    ("optimize good.pt --config missing.yaml", 2, ["missing.yaml"]),
    ("optimize good.pt --config random.pt", 2, ["random.pt is a binary file", "level: 4"]),
    ("optimize good.pt --input-script missing.py:make", 2, ["there is no file 'missing.py'"]),
    ("optimize good.pt --input-script loss.py:make", 2, ["--input-script", "loss.py has no function make"]),
    ("apply good.pt missing.yaml", 2, ["missing.yaml"]),
    ("apply good.pt plan.yaml", 2, ["plan.yaml"]),
    ("apply good.pt config.yaml", 2, ["config.yaml is not a plan"]),
    ("frobnicate good.pt", 2, ["frobnicate"]),
]

IN_A_STEP = [
    (
        "optimize faulty:ConvNet -i 2x5x8x8",
        3,
        ["module '0.0' (Conv2d) rejected its input 2x5x8x8@float32", "such as -i 2x1x64x64"],
    ),
    (
        "optimize half.pt -i 2x3",
        3,
        ["'0' (Linear) rejected its input 2x3@float32", "float16: give", "-i 2x3@float16, or", "--precision fp32."],
    ),
    (
        "optimize faulty:make_step -i 2x5x8x8",
        3,
        ["module 'net.0.0' (Conv2d) rejected its input", "Use inputs that run accepts, one -i for each"],
    ),
    ("optimize good.pt -i inputs:2x3x8x8", 3, ["Forward names no argument inputs; did you mean input?"]),
    ("optimize good.pt -i x:2x3", 3, ["Forward names no argument x; it names input."]),
    (
        "optimize faulty:Raises -i 2x3",
        3,
        ["forward of Raises raised ValueError: the model's own", "faulty.py, line 68)"],
    ),
    ("optimize faulty:Detached -i 2x3", 3, ["nothing to differentiate", "--loss"]),
    ("profile faulty:ReadsAParameter -i 2x3 --fake", 3, ["ReadsAParameter() failed", "leave it out"]),
    ("optimize faulty:NotANumber -i 2x3", 3, ["NaN", "values"]),
    ("optimize faulty:FailsInBackward -i 2x3", 3, ["forward works but backward fails", "inplace"]),
    ("optimize good.pt -i 2x3 --target Conv2d --level 1", 2, ["Conv2d", "--target"]),
    ("optimize good.pt -i 2x3 --loss missing.py:mean", 2, ["missing.py"]),
    ("optimize good.pt -i 2x3 --loss loss.py:median", 2, ["loss.py has no function median"]),
    ("optimize good.pt -i 2x3 --loss loss.py:endless", 3, ["the loss is NaN or infinite", "Check the input values"]),
    ("optimize good.pt -i 2x3 --loss loss.py:against", 3, ["the loss failed", "'target'", "the model's output"]),
    (
        "optimize good.pt -i 2x3 --loss loss.py:CrossEntropyLoss",
        3,
        ["CrossEntropyLoss, is a class", "def loss(output): return CrossEntropyLoss()(output, targets[: len(output)])"],
    ),
]


@pytest.mark.parametrize(("command", "code", "said"), BEFORE_A_STEP + IN_A_STEP, ids=lambda value: str(value)[:60])
def test_bad_input(command: str, code: int, said: list[str], memopt: Memopt, folder: Path, user_code: str) -> None:
    done = memopt(*command.split(), *(["--code-path", user_code] if "faulty:" in command else []))
    assert done.code == code
    assert_clear(done, said)
    assert done.changed == set()


@pytest.fixture
def plan(memopt: Memopt, folder: Path, in_process: None) -> str:
    """A plan without segments, as a file, whose text tests replace."""
    header = FileHeader(
        schema_version=SCHEMA_VERSION,
        memopt="0",
        torch="2",
        model="good.pt",
        sha256=None,
        spec=InputSpec(tensors=(TensorSpec(shape=(2, 3)),), source=TYPED),
        seed=0,
        device="cpu",
    )
    Path("good.plan.yaml").write_bytes(plan_yaml(header, Plan(), 1))
    return "good.plan.yaml"


@pytest.mark.slow
def test_a_plan_of_another_model(memopt: Memopt, plan: str) -> None:
    text = Path(plan).read_text()
    assert "segments: []" in text
    Path(plan).write_text(text.replace("segments: []", "segments: [{path: blocks.3}]"))
    done = memopt("apply", "good.pt", plan)
    assert done.code == 3
    assert_clear(done, ["the plan names module 'blocks.3', which Sequential does not have", "memopt optimize"])
    assert done.changed == set()


@pytest.mark.slow
def test_a_plan_that_changes_nothing(memopt: Memopt, plan: str) -> None:
    done = memopt("apply", "good.pt", plan)
    assert (done.code, done.changed) == (0, {"good.memopt.pt"})
    assert "The plan changes nothing: it has no segments" in done.err


@pytest.mark.slow
def test_a_plan_goes_onto_a_model_that_has_lazy_layers_still(memopt: Memopt, plan: str) -> None:
    torch.save(nn.Sequential(nn.Tanh(), nn.LazyLinear(3)), "lazy.pt")
    Path(plan).write_text(Path(plan).read_text().replace("segments: []", "segments: [{path: '0'}]"))
    done = memopt("apply", "lazy.pt", plan, "--trust-pickle")
    assert done.code == 0, done.err
    assert done.changed == {"lazy.memopt.pt"}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["0-9", "1-0", "0-x"])
def test_a_plan_of_layers_that_are_not_there(run: str, memopt: Memopt, plan: str) -> None:
    Path(plan).write_text(Path(plan).read_text().replace("segments: []", f"segments: [{{path: {run}}}]"))
    for command in (f"apply good.pt {plan}", f"recommend-batch good.pt -i Bx3 --dim B=2 --plan {plan}"):
        done = memopt(*command.split())
        assert done.code == 3
        assert_clear(done, [f"the plan names module '{run}', which Sequential does not have"])
        assert "finding" not in done.err


def test_a_refused_pickle_has_run_nothing(memopt: Memopt, folder: Path) -> None:
    for name in ("vandal.pt", "legacy_vandal.pt"):
        assert memopt("optimize", name, "--allow-package", "posix", "--allow-global", "nt.system").code == 4
    assert not Path("ran").exists()
    with contextlib.suppress(Exception):  # the sentinel works: unchecked, the file does run its command
        torch.load("vandal.pt", weights_only=False)
    assert Path("ran").exists()


@pytest.mark.parametrize("arguments", ["optimize missing.pt", "optimize random.pt", "frobnicate"])
def test_as_a_program(arguments: str, folder: Path, memopt: Memopt, spawn_memopt: Memopt) -> None:
    """The same code and message as in this process."""
    done = spawn_memopt(folder, *arguments.split())
    here = memopt(*arguments.split())
    assert (done.code, done.out, done.err) == (here.code, here.out, here.err)


def assert_clear(done: Any, said: list[str]) -> None:
    """Nothing on stdout; one line ``error: …``, perhaps a hint, and none of Python's or torch's noise."""
    assert done.out == ""
    assert done.err.count("error: ") == 1
    message = done.err.partition("error: ")[2]
    assert "\nhint: " in message or "not valid YAML" in message
    for words in said:
        assert words in message
    for noise in ("Traceback", 'File "', "WeightsUnpickler", "<class", "0x"):
        assert noise not in message

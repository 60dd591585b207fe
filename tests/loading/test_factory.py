"""Models built by the user's own code, and filled with weights."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import py_compile
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from memopt_cli.errors import FileFormatError, MemoptError, StepError, UnsafeFileError, UsageError
from memopt_cli.loading import factory, load_model
from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.pickles.nodes import Global
from memopt_cli.loading.user_code import UserCode
from memopt_cli.loading.user_function import user_function
from memopt_cli.measure.answers.without_steps import write_model
from memopt_cli.records import ModelSource, Plan, Trust
from memopt_cli.runtime.private_torch import is_fake
from memopt_cli.trace import built_without_data, fake_mode

CODE = """
from torch import nn

def make():
    return nn.Linear(2, 3)

def wrong():
    return 3

def failing():
    raise ValueError("no luck")

def huge():
    return nn.Linear(2**45, 3)

def with_size(size):
    return nn.Linear(size, 3)

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "user_factory.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    sys.modules.pop("user_factory", None)


def test_a_script_that_fails_as_it_trains_is_asked_for_a_guard(folder: Path) -> None:
    (folder / "user_training.py").write_text(f"{CODE}\nfailing()")
    with pytest.raises(UsageError, match=r"running user_training.py failed: ValueError: no luck") as raised:
        load_model(ModelSource(location="user_training.py:make"))
    assert raised.value.hint.endswith('trains or saves belongs under if __name__ == "__main__":.')


_TRAINS = f"""{CODE}
import torch
net = make()
net(torch.ones(1, 2)).sum().backward()
try:
    torch.optim.SGD(net.parameters(), 0.1).step()
except Exception:
    pass
torch.save(net.state_dict(), "w.pth")
"""


@pytest.mark.parametrize("location", ["user_training.py:make", "user_training:make", "user_build.py:make"])
def test_a_script_that_trains_where_it_is_imported_is_stopped_before_it_saves(folder: Path, location: str) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), "w.pth")
    before = Path("w.pth").read_bytes()
    (folder / "user_training.py").write_text(_TRAINS)
    (folder / "user_build.py").write_text("def make():\n    from user_training import make\n    return make()")
    sys.modules.pop("user_training", None)
    with pytest.raises(MemoptError, match=r"imported trains a model; .* first step \(.*user_training.py, line 25\)"):
        load_model(ModelSource(location=location, weights="w.pth"))
    assert Path("w.pth").read_bytes() == before
    with pytest.raises(MemoptError, match="imported trains a model"):
        UserCode(("user_training.py",)).run_scripts()
    net = nn.Linear(2, 3)
    torch.optim.SGD(net.parameters(), 0.1).step()  # outside the import


@pytest.mark.parametrize(
    "line",
    [
        "torch.save(make().state_dict(), 'w.pth')",
        "open('w.pth', 'w').close()",
        "try:\n    1 / 0\nexcept:\n    torch.save(make().state_dict(), 'w.pth')",
    ],
    ids=["saves", "truncates", "saves after an error"],
)
def test_a_script_that_writes_over_a_file_where_it_is_imported_is_stopped(folder: Path, line: str) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), "w.pth")
    before = Path("w.pth").read_bytes()
    (folder / "user_saving.py").write_text(f"{CODE}\nimport torch\ntorch.save(1, 'new.pth')\n{line}")
    with pytest.raises(MemoptError, match=r"imported writes over w.pth; memopt stopped it .*user_saving.py, line"):
        load_model(ModelSource(location="user_saving.py:make", weights="w.pth"))
    assert Path("w.pth").read_bytes() == before
    assert Path("new.pth").exists()
    torch.save(1, "w.pth")  # outside the import
    (folder / "user_building.py").write_text(
        "import torch\ndef make():\n    torch.save(1, 'w.pth')\n    return torch.nn.ReLU()"
    )
    for _ in range(2):  # each subprocess builds the model
        load_model(ModelSource(location="user_building.py:make"))


@pytest.mark.process
def test_what_a_script_that_is_stopped_saves_at_its_exit_is_not_written(folder: Path) -> None:
    (folder / "w.pth").write_text("weights")
    (folder / "user_saving.py").write_text(
        f"{CODE}\nimport atexit, torch\natexit.register(torch.save, 1, 'w.pth')\n"
        "try:\n    open('w.pth', 'w')\nfinally:\n    torch.save(1, 'w.pth')"
    )
    command = [sys.executable, "-m", "memopt_cli", "profile", "user_saving.py:make", "-i", "4x2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "imported writes over w.pth" in done.stderr
    assert (folder / "w.pth").read_text() == "weights"


@pytest.mark.parametrize("location", ["user_training.py:make", "user_training:make"])
@pytest.mark.parametrize(
    ("line", "reason", "hint"),
    [
        ("def oops(:", "SyntaxError: invalid syntax", "The same error appears in plain Python: correct that line."),
        ("from math import tau_", "ImportError", "The same error appears in plain Python: correct that line."),
        ("import user_missing", "ModuleNotFoundError", "Add the folder that has user_missing"),
        ("import user_kws.old", "ModuleNotFoundError", "user_kws has no module old; it has deep, layers."),
        ("import user_kws.deep.old", "ModuleNotFoundError", "user_kws.deep has no module old."),
        ("import user_blocks.old", "ModuleNotFoundError", "Add the folder that has user_blocks"),
        ("import json; json.loads('')", "JSONDecodeError", "A script is imported for what it defines"),
    ],
)
def test_an_error_of_an_imported_file_names_its_line(
    folder: Path, location: str, line: str, reason: str, hint: str
) -> None:
    (folder / "user_training.py").write_text("\nfrom user_blocks import make")
    (folder / "user_blocks.py").write_text(f"\n\n{line}")
    (folder / "user_kws" / "deep").mkdir(parents=True)
    for name in ("__init__", "layers", "deep/__init__"):
        (folder / "user_kws" / f"{name}.py").touch()
    sys.modules.pop("user_training", None)
    with pytest.raises(MemoptError, match=f"failed: {reason}.* \\({folder}/user_blocks.py, line 3\\)\n") as raised:
        load_model(ModelSource(location=location))
    assert raised.value.hint.startswith(hint)


def test_a_package_in_src_is_named_with_its_folder(folder: Path) -> None:
    (folder / "src" / "user_missing").mkdir(parents=True)
    (folder / "user_training.py").write_text("import user_missing.net")
    with pytest.raises(MemoptError) as raised:
        load_model(ModelSource(location="user_training.py:make"))
    assert raised.value.hint.startswith("Add the folder that has user_missing: `--code-path src`.")


@pytest.mark.parametrize("location", ["user_training.py:make", "user_training:make"])
def test_a_script_sees_no_arguments_of_memopt(location: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memopt", "profile"])
    parser = f"{CODE}\nimport argparse\nparser = argparse.ArgumentParser()\n"
    (folder / "user_training.py").write_text(f"{parser}parser.parse_args()\n")
    assert isinstance(load_model(ModelSource(location=location)).module, nn.Linear)
    sys.modules.pop("user_training", None)
    (folder / "user_training.py").write_text(f"{parser}parser.add_argument('data')\nparser.parse_args()\n")
    with pytest.raises(MemoptError, match=r"sys.exit\(2\): .*error: .* required: data \(") as raised:
        load_model(ModelSource(location=location))
    assert "code that parses arguments" in raised.value.hint
    assert sys.argv == ["memopt", "profile"]


def test_a_factory_in_the_current_folder() -> None:
    loaded = load_model(ModelSource(location="user_factory:make"))
    assert isinstance(loaded.module, nn.Linear)
    assert (loaded.format, loaded.sha256) == ("factory", None)


@pytest.mark.parametrize("without_data", [False, True])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_weights_fill_it(ending: str, without_data: bool) -> None:
    weights = nn.Linear(2, 3).state_dict()
    save_file(weights, "weights.safetensors")
    torch.save(weights, "weights.pt")
    source = ModelSource(location="user_factory:make", weights=f"weights.{ending}")
    with built_without_data(fake_mode()) if without_data else contextlib.nullcontext():
        weight = next(load_model(source).module.parameters())
    assert is_fake(weight) if without_data else torch.equal(weight, weights["weight"])


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"weight": torch.ones(4, 2), "bias": torch.ones(3)}, "1 of a different shape (weight is 4x2, not 3x2)"),
        ({"weight": torch.ones(3, 2)}, "1 missing (bias)"),
        ({"bias": torch.ones(3), "w": torch.ones(1)}, "1 missing (weight), 1 unexpected (w)"),
        ({f"module.{i}": torch.ones(1) for i in range(5)}, "5 unexpected (module.0, module.1, module.2, …)"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, weights: dict[str, torch.Tensor], reason: str) -> None:
    torch.save(weights, folder / "weights.pt")
    for mode in (contextlib.nullcontext(), built_without_data(fake_mode())):
        with mode, pytest.raises(FileFormatError, match="does not fit Linear") as error:
            load_model(ModelSource(location="user_factory:make", weights="weights.pt"))
        assert reason in error.value.message


PREFIXES = ["", "module.", "_orig_mod.", "model.", "module._orig_mod."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("entry", ["", "state_dict", "model"])
def test_weights_are_found_in_a_checkpoint_and_under_prefixes(folder: Path, prefix: str, entry: str) -> None:
    weights = {prefix + name: tensor for name, tensor in nn.Linear(2, 3).state_dict().items()}
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    around = {entry: weights, "optimizer": optimizer, "hyper_parameters": argparse.Namespace(run=print), "epoch": 3}
    torch.save(around if entry else weights, folder / "weights.pt")
    loaded = load_model(ModelSource(location="user_factory:make", weights="weights.pt"))
    assert torch.equal(loaded.module.state_dict()["weight"], weights[f"{prefix}weight"])
    others = "'optimizer', 'hyper_parameters', 'epoch'"
    where = (
        f"The weights are the entry '{entry}' of weights.pt. The checkpoint's other entries are not copied: {others}."
    )
    assert where in loaded.notes or not entry
    assert any(prefix.replace("_orig_mod.", "") in note for note in loaded.notes) or not prefix


def test_weights_around_the_model_are_named_and_left_out(folder: Path) -> None:
    """As those of the loss of a Lightning module, whose state dict has the model's weights under ``net.``."""
    around = nn.ModuleDict({"net": nn.Linear(2, 3), "criterion": nn.Embedding(3, 1)})
    torch.save({"state_dict": around.state_dict()}, folder / "weights.pt")
    loaded = load_model(ModelSource(location="user_factory:make", weights="weights.pt"))
    assert torch.equal(loaded.module.state_dict()["weight"], around.state_dict()["net.weight"])
    assert "Weights of the file that are not the model's are left out: criterion.weight." in loaded.notes


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["net.weight", "net.bias", "net.last.weight"], "1 unexpected (last.weight)"),
        (["first_weight", "first_bias", "x"], "2 missing (weight, bias), 3 unexpected"),
    ],
)
def test_weights_of_which_some_may_be_the_models_are_refused(folder: Path, names: list[str], reason: str) -> None:
    tensors = nn.Linear(2, 3).state_dict()
    torch.save({name: tensors["bias" if "bias" in name else "weight"] for name in names}, folder / "weights.pt")
    with pytest.raises(FileFormatError, match="does not fit Linear") as error:
        load_model(ModelSource(location="user_factory:make", weights="weights.pt"))
    assert reason in error.value.message


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_of_several_prefixes_one_is_named(folder: Path, ending: str) -> None:
    """As of a Lightning module that keeps a moving average of its network."""
    net, average = nn.Linear(2, 3), nn.Linear(2, 3)
    around = nn.ModuleDict({"net": net, "ema": nn.ModuleDict({"module": average}), "loss": nn.Embedding(3, 1)})
    torch.save({"state_dict": around.state_dict()}, "weights.ckpt")
    save_file(around.state_dict(), "weights.safetensors")
    source = ModelSource(location="user_factory:make", weights=f"weights.{ending}")
    with pytest.raises(UsageError, match=r"has weights for Linear under '(net|ema.module).' and under") as error:
        load_model(source)
    keys = sorted(re.findall(r"`--key (\S+)`", error.value.hint))  # the order is the file's
    assert [key.removeprefix("state_dict.") for key in keys] == ["ema.module", "net"]
    for key, chosen in zip(keys, [average, net], strict=True):
        assert torch.equal(load_model(replace(source, key=key)).module.state_dict()["weight"], chosen.weight)
    for wrong_key in ("state_dict.ne", "ema.mod"):
        with pytest.raises(UsageError, match=f"has no .* '{wrong_key}'"):
            load_model(replace(source, key=wrong_key))


def test_of_several_state_dicts_one_is_named(folder: Path) -> None:
    first, second = nn.Linear(2, 3).state_dict(), nn.Linear(2, 3).state_dict()
    torch.save({"state_dict": first, "ema": {"shadow": second}, "other": {"x": torch.ones(1)}}, folder / "weights.pt")
    source = ModelSource(location="user_factory:make", weights="weights.pt")
    assert torch.equal(load_model(source).module.state_dict()["weight"], first["weight"])
    assert "'state_dict', 'ema.shadow'" in load_model(source).notes[0]
    named = load_model(replace(source, key="ema.shadow"))
    assert torch.equal(named.module.state_dict()["weight"], second["weight"])
    with pytest.raises(UsageError, match="no entry 'emma'") as error:
        load_model(replace(source, key="emma"))
    assert "'state_dict', 'ema', 'other'" in error.value.hint


NET = """
import torch
from torch import nn

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.again = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("cache", torch.ones(5), persistent=False)
"""


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("around", ["", "checkpoint", "DataParallel", "compiled", "compiled part"])
def test_a_model_whose_class_is_gone_gives_its_weights(folder: Path, around: str, protocol: int) -> None:
    (folder / "user_factory.py").write_text(NET.format(name="Renamed"))
    (folder / "user_gone.py").write_text(NET.format(name="Net"))
    sys.path.insert(0, str(folder))
    model = importlib.import_module("user_gone").Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    saved = {
        "": model,
        "checkpoint": {"net": model, "optimizer": optimizer.state_dict()},
        "DataParallel": nn.DataParallel(model),
        "compiled": torch.compile(model),
        "compiled part": nn.ModuleDict({"net": torch.compile(model)}),
    }
    torch.save(saved[around], "whole.pt", pickle_protocol=protocol)
    del sys.modules["user_gone"]
    (folder / "user_gone.py").unlink()
    with pytest.raises(MemoptError) as error:
        load_model(ModelSource(location="whole.pt"))
    if around != "compiled part":  # PyTorch's compiler is in that file: it is refused before the class is sought
        assert "build.py:build `--weights whole.pt`" in error.value.hint
        assert "from net import Net; def build(): return Net()" in error.value.hint
    filled = load_model(ModelSource(location="user_factory:Renamed", weights="whole.pt")).module.state_dict()
    assert filled.keys() == model.state_dict().keys()
    assert all(torch.equal(filled[name], tensor) for name, tensor in model.state_dict().items())


def test_the_modules_of_a_model_that_lead_back_to_it_are_no_endless_list(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model._modules["0"]._modules["up"] = model
    torch.save(model, folder / "whole.pt")
    with pytest.raises(FileFormatError, match="nested deeper than 100"):
        load_model(ModelSource(location="user_factory:make", weights="whole.pt"))


@pytest.mark.parametrize("kind", ["TorchScript", "torch.export"])
def test_a_model_with_its_code_is_given_as_the_model(folder: Path, kind: str) -> None:
    if kind == "TorchScript":
        torch.jit.script(nn.Linear(2, 3)).save("whole.pt")
    else:
        torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),)), "whole.pt")
    with pytest.raises(FileFormatError, match=f"{kind}: a model with its code") as error:
        load_model(ModelSource(location="user_factory:make", weights="whole.pt"))
    assert error.value.hint == "Use whole.pt as the model, without `--weights`."


@pytest.mark.parametrize("as_weights", [False, True])
@pytest.mark.parametrize("what", ["the state of an optimizer", "one tensor (3)"])
def test_files_that_hold_neither_a_model_nor_weights(folder: Path, what: str, as_weights: bool) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(torch.ones(3) if "tensor" in what else optimizer.state_dict(), folder / "other.pt")
    source = ModelSource(location="other.pt")
    if as_weights:
        source = ModelSource(location="user_factory:make", weights="other.pt")
    with pytest.raises(FileFormatError, match=f"other.pt holds {re.escape(what)}") as error:
        load_model(source)
    assert "--weights" not in error.value.hint


@pytest.mark.parametrize("weights", ["weights", "model"])
@pytest.mark.parametrize("as_weights", [False, True])
def test_the_key_of_an_optimizer_names_the_entry_that_holds_the_weights(
    folder: Path, weights: str, as_weights: bool
) -> None:
    model = nn.Linear(2, 3)
    saved = model.state_dict() if weights == "weights" else model
    checkpoint = {weights: saved, "optimizer": torch.optim.AdamW(model.parameters()).state_dict(), "epoch": 3}
    torch.save(checkpoint, folder / "last.pt")
    source = ModelSource(location="last.pt", key="optimizer")
    if as_weights:
        source = ModelSource(location="user_factory:make", weights="last.pt", key="optimizer")
    with pytest.raises(UsageError, match=f"of last.pt .* the model's weights are in '{weights}'") as error:
        load_model(source)
    assert error.value.hint == f"Use `--key {weights}`, or leave `--key` out."


def test_several_state_dicts_none_of_which_fits(folder: Path) -> None:
    torch.save({"a": {"x": torch.ones(1)}, "b": {"y": torch.ones(1)}}, folder / "weights.pt")
    with pytest.raises(FileFormatError, match="2 state dicts, and none fits: 'a', 'b'"):
        load_model(ModelSource(location="user_factory:make", weights="weights.pt"))


def test_weights_given_as_the_model_say_what_to_type() -> None:
    save_file(nn.Linear(2, 3).state_dict(), "weights.safetensors")
    with pytest.raises(FileFormatError, match="holds 2 tensors but no model") as error:
        load_model(ModelSource(location="weights.safetensors"))
    assert "build.py:build `--weights weights.safetensors`" in error.value.hint


def test_weights_are_data_only(folder: Path) -> None:
    torch.save({"state_dict": nn.Linear(2, 3).state_dict(), "b": eval}, folder / "weights.pt")
    with pytest.raises(UnsafeFileError, match="eval") as error:
        load_model(ModelSource(location="user_factory:make", weights="weights.pt"))
    assert "--allow" not in error.value.hint  # it would not be heeded


def test_weights_that_are_no_state_dict(folder: Path) -> None:
    torch.save([1], folder / "weights.pt")
    with pytest.raises(FileFormatError, match="no state dict"):
        load_model(ModelSource(location="user_factory:make", weights="weights.pt"))


@pytest.mark.parametrize(
    ("location", "error", "message", "hint"),
    [
        ("user_factory:number", UsageError, "nothing callable named number", "Name a class or a function"),
        ("user_factory:missing", UsageError, "nothing callable named missing", "Name a class or a function"),
        ("user_factory:wrong", UsageError, "returned an int", "Let it return the model"),
        (
            "user_factory:failing",
            FileFormatError,
            r"user_factory:failing\(\) failed: .*no luck",
            "plain Python calls it",
        ),
        ("user_factory:with_size", FileFormatError, r"failed: TypeError", "without arguments"),
        ("user_factory:huge", FileFormatError, r"user_factory:huge\(\) failed: ", "memopt profile --fake"),
        ("no_such_module:make", UsageError, "no_such_module", "--code-path"),
    ],
)
def test_factories_that_cannot_be_used(location: str, error: type[MemoptError], message: str, hint: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_model(ModelSource(location=location))
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["run.pyc", "run.so", "run", "run.PY"])
def test_only_python_files_are_run(name: str, folder: Path) -> None:
    """Python would also run compiled code, and libraries of machine code."""
    (folder / "run.py").write_text("raise SystemExit('it ran')")
    py_compile.compile("run.py", cfile=str(folder / name))
    with pytest.raises(UsageError, match="is not a Python file"):
        user_function(f"{folder / name}:run", "--loss")


@pytest.mark.parametrize("name", ["folder.py", "pipe.py", "zero.py", "missing.py"])
def test_what_is_run_is_a_file(name: str, folder: Path) -> None:
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    (folder / "zero.py").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="there is no file"):
        user_function(f"{folder / name}:run", "--loss")


@pytest.mark.parametrize(
    "weight", [torch.ones(3, 2).to_sparse(), torch.empty(3, 2, device="meta"), torch.ones(3, 2).to_sparse_csr()]
)
def test_weights_of_another_kind_are_named(weight: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"weight": weight, "bias": torch.ones(3)}
    monkeypatch.setattr(factory, "_state_dict_in", lambda *given: ((), found))
    Path("weights.pt").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"does not fit Linear: 1 of a different kind \(weight\)"):
        factory.fill(nn.Linear(2, 3), ModelFile(path="weights.pt", data=b""))


@pytest.mark.parametrize("on_path", [False, True])
@pytest.mark.parametrize("flag", ["MODEL", "--loss"])
def test_a_file_imports_from_its_own_folder_before_the_current_one(flag: str, on_path: bool, folder: Path) -> None:
    """As Python does for a script; else two versions of a project, compared from the folder of one, are the same."""
    sys.path[:0] = ["", str(folder), str(folder / "old")] if on_path else []
    for where in (folder, folder / "old"):
        where.mkdir(exist_ok=True)
        (where / "user_parts.py").write_text(f"from torch import nn\nclass Part(nn.Linear): home = {where.name!r}")
    (folder / "old/user_train.py").write_text("from user_parts import Part\ndef make(): return Part(2, 3)")
    try:
        if flag == "MODEL":
            made = load_model(ModelSource(location="old/user_train.py:make")).module
        else:
            made = user_function("old/user_train.py:make", flag)()
        assert made.home == "old"
    finally:
        for name in ("user_parts", "memopt_user_user_train"):
            sys.modules.pop(name, None)


def test_a_package_of_the_current_folder_hides_none_of_the_files(folder: Path) -> None:
    """Python prefers a package with an ``__init__.py`` in any folder of ``sys.path`` to one without."""
    for where in (folder, folder / "old"):
        (where / "user_ops").mkdir(parents=True)
        (where / "user_ops/scale.py").write_text(f"home = {where.name!r}")
    (folder / "user_ops/__init__.py").touch()
    (folder / "user_beside.py").touch()
    (folder / "old/user_train.py").write_text(
        "import user_beside\nfrom user_ops import scale\nfrom torch import nn\n"
        "def make(): return nn.ParameterDict({scale.home: 1.0})"
    )
    try:
        assert list(load_model(ModelSource(location="old/user_train.py:make")).module) == ["old"]
    finally:
        for name in ("user_ops.scale", "user_ops", "user_beside", "user_train", "memopt_user_user_train"):
            sys.modules.pop(name, None)


def test_of_an_installed_module_and_one_in_the_current_folder_the_code_path_chooses(folder: Path) -> None:
    (folder / "installed").mkdir()
    (folder / "installed/user_factory.py").write_text(CODE)
    sys.path.append(str(folder / "installed"))
    with pytest.raises(UsageError, match=r"user_factory is installed, as .*, and another is in this folder") as raised:
        load_model(ModelSource(location="user_factory:make"))
    assert "`--code-path .`" in raised.value.hint
    for code_path in (".", "installed"):
        del sys.modules["user_factory"]
        load_model(ModelSource(location="user_factory:make", trust=Trust(code_paths=(code_path,))))
        assert Path(str(sys.modules["user_factory"].__file__)).parent == (folder / code_path).resolve()


def test_a_file_that_another_imports_runs_once(folder: Path) -> None:
    """So a function of that knows the classes of the model: what spreads it over ranks, or its loss."""
    (folder / "user_blocks.py").write_text(
        "from torch import nn\nclass Block(nn.Linear): pass\ndef make(): return Block(2, 3)"
    )
    (folder / "user_spread.py").write_text(
        "import user_blocks\nfrom user_blocks import Block\ndef is_block(model): return isinstance(model, Block)"
    )
    model = load_model(ModelSource(location=f"{folder / 'user_blocks.py'}:make")).module
    try:
        assert user_function(f"{folder / 'user_spread.py'}:is_block", "--parallel")(model)
        (folder / "user_blocks.py").write_text("class Block: pass\nclass Other: pass")
        del sys.modules["user_blocks"]
        import user_blocks  # type: ignore[import-not-found]

        assert hasattr(user_blocks, "Other")
    finally:
        for name in ("user_blocks", "user_spread", "memopt_user_user_blocks", "memopt_user_user_spread"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "held", ["Net()", "with_part(Settings())", "with_part(double)"], ids=["class", "part", "function"]
)
def test_a_model_of_a_file_without_a_name_of_its_own_is_not_saved(held: str, folder: Path) -> None:
    """The file would be read as code of a module that nobody can import."""
    (folder / "random.py").write_text(
        "from torch import nn\nclass Net(nn.Linear): __init__ = lambda self: nn.Linear.__init__(self, 2, 3)\n"
        "class Settings: pass\ndef double(x): return 2 * x\ndef with_part(part):\n    net = nn.Linear(2, 3)\n"
        f"    net.part = part\n    return net\ndef make(): return {held}\n"
    )
    model = load_model(ModelSource(location="random.py:make")).module
    try:
        with pytest.raises(StepError, match=r"random\.py has the name of another module"):
            write_model(model, Plan(), io.BytesIO())
    finally:
        sys.modules.pop("memopt_user_random")


def test_a_file_with_a_dash_in_its_name_is_found_by_its_folder(folder: Path) -> None:
    (folder / "my-net.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    try:
        assert UserCode((str(folder),)).find_definition(Global("my-net", "Net")).__module__ == "my-net"
    finally:
        sys.modules.pop("my-net", None)

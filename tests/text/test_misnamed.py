"""Files that are given as a model and are none: what to type instead."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from memopt_cli.text import misnamed
from memopt_cli.text.misnamed import (
    build_hint,
    builder_in,
    file_refusal,
    missing_refusal,
    moved_hint,
    other_class_hint,
    weights_in,
)


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return file.getvalue()


@pytest.mark.parametrize(
    ("path", "data", "what"),
    [
        ("model.onnx", b"", "ONNX"),
        ("page.pt", b"\n<!DOCTYPE html>\n<html>", "a web page: the download failed"),
        ("pointer.pt", b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("gpt/config.json", b"{}", "is JSON, not a saved model Use its folder, gpt/."),
        ("model.safetensors.index.json", b"{}", "is JSON, not a saved model"),
        ("a b.plan.yaml", b"", "is a plan, not a saved model Name the model that it is for: `memopt apply MODEL 'a b"),
        ("net.batch.yaml", b"", "is YAML, not a saved model"),
        ("photos.zip", zipped("a.png"), "without a model It contains a.png."),
    ],
)
def test_files_of_another_kind_are_named(path: str, data: bytes, what: str) -> None:
    assert what in " ".join(file_refusal(path, data) or ())


def test_a_class_may_have_a_base_of_very_many_parts(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("class Net(a" + ".a" * 900 + ".Module):\n    pass\n")
    assert f"{path}:Net" in " ".join(file_refusal(str(path), b"class") or ())


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"PK", zipped("whole/data.pkl")])
def test_files_that_may_be_models_are_left_to_the_reader(data: bytes) -> None:
    assert file_refusal("model.pt", data) is None


def test_what_is_not_there_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("whole.pt").touch()
    assert missing_refusal("https://a.b/model.pt")[1].endswith("curl -LO https://a.b/model.pt")
    assert missing_refusal("whole.ptt")[1] == "Did you mean whole.pt?"
    Path("qwen").mkdir()
    assert missing_refusal("qwenn/")[1] == missing_refusal("qwenn")[1] == "Did you mean qwen/?"
    assert 'from_pretrained("google/vit-base").save_pretrained("vit-base")' in missing_refusal("google/vit-base")[1]
    assert missing_refusal("other.pt")[1] == ""


def test_the_only_file_of_weights_in_a_folder_is_taken(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin"):
        (tmp_path / name).touch()
    assert weights_in(str(tmp_path)) == f"{tmp_path}/pytorch_model.bin"
    (tmp_path / "model.safetensors").touch()
    assert weights_in(str(tmp_path)) == f"{tmp_path}/model.safetensors"


def test_weights_beside_their_configuration_are_named_by_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert build_hint(f"{tmp_path}/model.safetensors").endswith(f"use the folder, {tmp_path}/.")
    assert "build.py:build" in build_hint("model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert build_hint("model.safetensors").endswith("use the folder, ./.")


NET = """
class BaseModule(nn.Module):
    def __init__(self): self.stem = nn.Linear(2, 2)
class Net(BaseModule):
    def __init__(self, width=2):
        self.blocks: nn.Module = nn.Linear(2, 2)
        self.register_buffer("scale", None)
class Loss(nn.Module):
    def __init__(self): self.margin = nn.Parameter()
class Other(nn.Module): ...
"""
NAMES = ("stem.weight", "blocks.0.weight", "scale")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_the_class_with_the_attributes_of_the_weights_builds_the_model(prefix: str, tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(NET)
    names = [f"{prefix}{name}" for name in NAMES]
    assert builder_in(build_hint("sd.pt", [str(source)], names), "sd.pt") == f"{source}:Net"
    assert other_class_hint(f"{source}:Loss", names) == f"Did you mean {source}:Net?"
    assert other_class_hint(f"{source}:Net", ["layer.weight"]) == f"{source} also defines BaseModule, Loss, Other."


def test_files_that_cannot_be_imported_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    for number in range(misnamed._MAX_SOURCES):
        (tmp_path / ".cache" / f"{number}.py").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "net.py").write_text(NET)
    assert builder_in(build_hint("sd.pt", [str(tmp_path)], NAMES), "sd.pt") == "own.net:Net"


def test_a_script_is_asked_for_a_model_that_needs_no_arguments_and_not_for_its_loss(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text(
        "class Net(nn.Module):\n    def __init__(self, width=8, *, deep=False): ...\n"
        "class Wide(nn.Module):\n    def __init__(self, width): ...\n"
        "class Deep(nn.Module):\n    def __init__(self, *, depth): ...\n"
        "class Data(Dataset): ...\n"
        "class Loss(nn.Module):\n    def __init__(self, gamma=2.0): self.ce = nn.CrossEntropyLoss()\n"
    )
    _, hint = file_refusal(str(source), b"") or ("", "")
    assert f"without arguments: {source}:Net." in hint


@pytest.mark.parametrize("others", ["", "class Loss(nn.Module): ...\n"])
def test_a_class_that_needs_arguments_is_made_in_a_file_to_write(others: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NET.replace("width=2", "width, *, depth, deep=False") + others)
    hint = build_hint("sd.pt", [f"{tmp_path}/train.py"], NAMES)
    assert hint.endswith("two lines: from train import Net; def build(): return Net(width=…, depth=…)")
    assert builder_in(hint, "sd.pt") == "build.py:build"


def test_a_builder_is_named_as_a_shell_reads_it_and_found_again_in_its_hint(tmp_path: Path) -> None:
    source = tmp_path / "it's mine: a b.py"
    source.write_text("raise RuntimeError\ndef make_model(): ...\n")
    hint = build_hint("my model.pt", [str(tmp_path), "nowhere.py", str(source)])
    assert builder_in(hint, "my model.pt") == f"{source}:make_model"
    assert builder_in(hint, "model.pt") == ""
    assert builder_in(build_hint("model.pt", []), "model.pt") == "build.py:build"


@pytest.mark.parametrize(
    ("source", "builder"),
    [("net.py", "net.py:Net"), ("lab/net.py", "lab.net:Net"), ("lab/vision/net.py", "lab.vision.net:Net")],
)
def test_a_class_in_a_folder_is_named(
    source: str, builder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(source).parent.mkdir(parents=True, exist_ok=True)
    Path(source).write_text(NET)
    Path("a.py").write_text("def build(config): ...\nclass Unlike(nn.Module): ...")
    for folder in ("lab/vision/deep", ".venv"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "net.py").write_text(NET.replace("Net(", "Hidden("))
    assert builder_in(build_hint("sd.pt", ["."], NAMES), "sd.pt") == builder
    assert moved_hint("whole.pt", ["."], "oldlab.nets.Net").endswith(f"{builder} `--weights whole.pt`")
    assert "from net import Hidden;" in moved_hint("whole.pt", ["."], "oldlab.nets.Hidden")
    Path(source).write_text(NET.replace("width=2", "width"))
    module = builder.removesuffix(":Net").removesuffix(".py")
    for hint in (build_hint("sd.pt", ["."], NAMES), moved_hint("whole.pt", ["."], "oldlab.nets.Net")):
        assert hint.endswith(f"from {module} import Net; def build(): return Net(width=…)")


def test_a_hint_on_a_moved_class_names_it() -> None:
    assert "from net import TCN; def build(): return TCN()" in moved_hint("tcn.pt", [], "oldlab.nets.tcn.TCN")
    for hostile in ("", "a.b c", f"a.{'b' * 1000}"):
        assert "from net import Net; def build(): return Net()" in moved_hint("tcn.pt", [], hostile)

"""``memopt inspect``: what is in a file, without running any of it and without the user's classes."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.loading import load_model
from memopt_cli.records import ModelSource
from memopt_cli.runtime import SegmentConfig, install_segment
from tests.loading.archives import with_weights_in_one_pickle

Memopt = Callable[..., Any]

SIZES = {"parameters": 3 * 4 + 4 + 2 * 4 + 4 * 4, "parameter_bytes": 4 * 40, "buffer_bytes": 4 * 4 + 4 * 4 + 8}


class Net(nn.Module):
    """A parameter, buffers, shared weights, a plain tensor, and children."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.body(x)))


def save_pickle(model: nn.Module) -> None:
    torch.save(model, "model.pt")


def save_legacy(model: nn.Module) -> None:
    torch.save(model, "model.pt", _use_new_zipfile_serialization=False)


def save_script(model: nn.Module) -> None:
    torch.jit.save(torch.jit.script(model), "model.pt")


def save_trace(model: nn.Module) -> None:
    torch.jit.save(torch.jit.trace(model, torch.ones(2, 3)), "model.pt")


def save_exported(model: nn.Module) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(torch.export.export(model, (torch.ones(2, 3),), dynamic_shapes=shapes), "model.pt")


def save_exported_by_2_8(model: nn.Module) -> None:
    save_exported(model)
    path = Path("model.pt")
    path.write_bytes(with_weights_in_one_pickle(path.read_bytes()))


def inspected(memopt: Memopt, path: str = "model.pt") -> dict[str, Any]:
    done = memopt("inspect", path, "--json")
    assert (done.code, done.err, done.changed) == (0, "", set())
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("saved", "what", "counted"),
    [
        (torch.zeros(3, 4), "pickled tensor (zip)", "1 tensor, 12 items, 48 B"),
        ({"weight": torch.zeros(3), "bias": torch.zeros(1)}, "pickled state dict (zip)", "2 tensors, 4 items, 16 B"),
        ({"model": {"w": torch.zeros(2)}}, "pickled container of tensors (zip)", "1 tensor, 2 items, 8 B"),
    ],
)
def test_tensors_alone_are_told_as_what_they_are(saved: Any, what: str, counted: str, memopt: Memopt) -> None:
    torch.save(saved, "saved.pt")
    lines = memopt("inspect", "saved.pt").out.splitlines()
    assert lines[0].startswith(f"saved.pt: {what}, ")
    assert counted in lines


def test_a_checkpoint_is_summed_by_part_and_listed_with_v(memopt: Memopt) -> None:
    """A checkpoint has hundreds of tensors; their list told nobody what the file is."""
    weights = {f"blocks.{number}.weight": torch.zeros(4, 4) for number in range(20)}
    state = {number: {"exp_avg": torch.zeros(4, 4), "step": torch.zeros(())} for number in range(20)}
    head = torch.zeros(100, 4)
    optimizer = {"state": state, "param_groups": []}
    torch.save(
        {"model": weights | {"head.weight": head, "tied.weight": head}, "optimizer": optimizer, "epoch": 3},
        "checkpoint.pt",
    )
    lines = [line.split() for line in memopt("inspect", "checkpoint.pt").out.splitlines()]
    first = lines.index(["part", "tensors", "size"])
    assert lines[first + 1 : first + 5] == [
        ["model.head", "1", "1.6", "KiB"],
        ["optimizer.state", "40", "1.3", "KiB"],
        ["model.blocks", "20", "1.2", "KiB"],
        ["model.tied", "1", "0", "B"],
    ]
    largest = lines.index(["largest", "tensors", "shape", "dtype", "size"])
    assert lines[largest + 1][:2] == ["model.head.weight", "100×4"]
    out = memopt("inspect", "checkpoint.pt").out
    assert "62 tensors, 1,060 items, 4.1 KiB; -v lists them all" in out
    assert "Its entries are 'model', 'optimizer', 'epoch'; none of them is a module." in out
    whole = memopt("inspect", "checkpoint.pt", "-v").out
    assert all(name in whole for name in ("optimizer.state.19.step", "model.blocks.19.weight"))
    assert "lists them all" not in whole


def test_code_is_run_by_another_command(memopt: Memopt) -> None:
    Path("train.py").write_text("def make_model(): ...")
    done = memopt("inspect", "train.py:make_model")
    assert (done.code, done.changed) == (2, set())
    assert done.err.endswith("hint: Use a saved file, or run the model: memopt profile train.py:make_model\n")


def test_a_file_with_many_parts_lists_the_largest_parts(memopt: Memopt) -> None:
    torch.save({f"word{number}": torch.zeros(number + 1) for number in range(30)}, "words.pt")
    out = memopt("inspect", "words.pt").out
    rows = [line.split() for line in out.splitlines() if re.match(r"word\d|…", line)]
    assert rows[0] == ["word29", "1", "120", "B"]
    assert rows[12] == ["…", "18", "more", "18", "684", "B"]


def test_a_model_in_a_container_is_told_with_what_to_do(memopt: Memopt) -> None:
    torch.save({"model": Net(), "epoch": 3}, "model.pt")
    found = inspected(memopt)
    assert found["format"] == "pickled container of a module (zip)"
    assert {item["path"].partition(".")[0] for item in found["modules"]} == {"model"}
    assert found["notes"][0] == "Its module is the entry 'model'."


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (save_pickle, "pickled module (zip)"),
        (save_legacy, "pickled module (legacy)"),
        (save_script, "TorchScript (scripted)"),
        (save_trace, "TorchScript (traced)"),
        (save_exported, "exported program (torch.export)"),
        (save_exported_by_2_8, "exported program (torch.export)"),
    ],
)
def test_each_format_tells_the_same_model(save: Callable[[nn.Module], None], name: str, memopt: Memopt) -> None:
    model = Net()
    save(model)
    found = inspected(memopt)
    assert found["format"] == name
    assert found["size_bytes"] == Path("model.pt").stat().st_size
    assert {key: found[key] for key in SIZES} == SIZES
    modules = {item["path"]: item["class_name"].rpartition(".")[2] for item in found["modules"]}
    assert modules == {path: type(module).__name__ for path, module in model.named_modules()}
    tensors = {item["name"]: item for item in found["tensors"]}
    expected = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert {name: tuple(item["shape"]) for name, item in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert {name: item["dtype"] for name, item in tensors.items()} == {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in expected.items()
    }
    assert {name for name, item in tensors.items() if item["kind"] == "buffer"} == dict(model.named_buffers()).keys()
    assert found["tied"] == [["first.weight", "second.weight"]]


@pytest.mark.parametrize(("save", "shape"), [(save_trace, [2, 3]), (save_exported, [None, 3])])
def test_example_inputs(save: Callable[[nn.Module], None], shape: list[Any], memopt: Memopt) -> None:
    save(Net())
    (example,) = inspected(memopt)["inputs"]
    assert example["dtype"] == "float32"
    assert [size if isinstance(size, int) else None for size in example["shape"]] == shape


def test_a_class_that_is_nowhere_to_be_found(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = types.ModuleType("gone_models")
    kind = type("Gone", (Net,), {"__module__": "gone_models"})
    gone.Gone = kind  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gone_models", gone)
        save_pickle(kind())
    found = inspected(memopt)
    assert found["modules"][0]["class_name"] == "gone_models.Gone"
    assert found["parameters"] == 40
    verdicts = {item["name"]: (item["verdict"], item["flag"]) for item in found["globals"]}
    assert verdicts["gone_models.Gone"] == ("missing", "--code-path FOLDER")
    assert verdicts["torch.nn.modules.linear.Linear"] == ("allowed", "")


def test_the_first_line_has_the_reason_of_a_refusal(memopt: Memopt) -> None:
    model = nn.Sequential()
    model.add_module("a\nb", nn.Linear(2, 2))
    save_pickle(model)
    first = memopt("inspect", "model.pt").out.splitlines()[1]
    assert first.startswith("not safe: torch.nn.modules.container.Sequential has a module named 'a")


@pytest.mark.parametrize("save", [save_pickle, save_script, save_exported])
def test_a_damaged_record_is_an_error(save: Callable[[nn.Module], None], memopt: Memopt) -> None:
    model = Net()
    with torch.no_grad():
        model.first.weight.fill_(1.2345)
    save(model)
    path = Path("model.pt")
    data, stored = path.read_bytes(), model.first.weight.detach().numpy().tobytes()
    assert stored in data
    path.write_bytes(data.replace(stored, bytes(len(stored))))
    done = memopt("inspect", "model.pt")
    assert done.code == 3
    assert " is missing or damaged" in done.err


def test_a_class_of_the_current_folder_is_not_missing(
    tmp_path: Path, spawn_memopt: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not imported either: the installed program has that folder on no path."""
    source = "from torch import nn\nclass Own(nn.Tanh): pass\nopen('imported', 'a')\n"
    (tmp_path / "own_models.py").write_text(source)
    own = types.ModuleType("own_models")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "own_models", own)
        patch.chdir(tmp_path)
        exec(source, vars(own))
        torch.save(own.Own(), "model.pt")
    (tmp_path / "imported").unlink()
    inspected = spawn_memopt(tmp_path, "inspect", "model.pt")
    loaded = spawn_memopt(tmp_path, "optimize", "model.pt")
    assert (loaded.code, inspected.changed | loaded.changed) == (4, set())
    assert "--code-path ." in inspected.out
    assert "--code-path ." in loaded.err


def test_verdicts_come_with_the_flag_that_changes_them(memopt: Memopt, user_code: str) -> None:
    sys.path.append(user_code)  # put back by the fixture
    torch.save(nn.Sequential(__import__("faulty").Fine()), "model.pt")
    verdicts = {item["name"]: (item["verdict"], item["flag"]) for item in inspected(memopt)["globals"]}
    assert verdicts["faulty.Fine"] == ("needs trust", "--allow-package faulty")
    assert memopt("inspect", "model.pt").out.count("--allow-package faulty") == 1


def test_segments_and_tensors_that_nobody_registered(memopt: Memopt) -> None:
    model = Net()
    model.first.mem = torch.zeros(5)
    install_segment(model.body, SegmentConfig())
    save_pickle(model)
    found = inspected(memopt)
    assert [item["path"] for item in found["modules"] if item["segment"]] == ["body"]
    assert next(item for item in found["modules"] if item["path"] == "body")["class_name"].endswith(".Sequential")
    assert {item["name"]: item["kind"] for item in found["tensors"]}["first.mem"] == "attribute"
    assert "body Sequential (segment)" in memopt("inspect", "model.pt").out


@pytest.mark.parametrize("save", [save_script, save_exported])
def test_a_lifted_model_is_told_like_the_one_that_was_lifted(save: Callable[[nn.Module], None], memopt: Memopt) -> None:
    save(Net())
    model = load_model(ModelSource(location="model.pt")).module
    install_segment(model.body, SegmentConfig())
    save_pickle(model)
    found = inspected(memopt)
    assert found["format"] == "pickled module (zip)"
    assert {key: found[key] for key in SIZES} == SIZES
    assert found["tied"] == [["first.weight", "second.weight"]]
    modules = {item["path"]: (item["class_name"], item["segment"]) for item in found["modules"]}
    assert modules.keys() == dict(Net().named_modules()).keys()
    assert modules["body"] == ("torch.nn.modules.container.Sequential", True)
    assert modules["first"] == ("Linear", False)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weights_alone(name: str, memopt: Memopt) -> None:
    state = nn.Linear(3, 4).state_dict()
    if name.endswith(".pt"):
        torch.save(state, name)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, name, metadata={"made": "by\x1b[2J hand"})
    found = inspected(memopt, name)
    assert (found["modules"], found["parameters"], found["parameter_bytes"]) == ([], 16, 64)
    lines = memopt("inspect", name).out.splitlines()
    assert any(line.split() == ["weight", "4×3", "float32", "48", "B"] for line in lines)
    assert "2 tensors, 16 items, 64 B" in lines
    assert all(line.isprintable() for line in lines)


def test_the_tree_folds_what_is_alike(memopt: Memopt) -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(6)]
    torch.save(nn.Sequential(*blocks, nn.Sequential(nn.Linear(2, 3), nn.ReLU())), "model.pt")
    out = memopt("inspect", "model.pt").out
    tree = [line.rstrip() for line in out.partition("own tensors")[2].partition("\n\n")[0].splitlines()[1:]]
    assert tree == [
        "Sequential                           45  180 B",
        "├── 0 Sequential                      6   24 B",
        "│   ├── 0 Linear                      6   24 B  weight 2×2, bias 2",
        "│   └── 1 ReLU                        0      –",
        "├── … 5 more like it: 1 … 5",
        "└── 6 Sequential                      9   36 B",
        "    ├── 0 Linear                      9   36 B  weight 3×2, bias 3",
        "    └── 1 ReLU                        0      –",
    ]
    assert "45 parameters, 180 B" in out


def test_the_sizes_are_those_of_the_loaded_model(memopt: Memopt) -> None:
    model = nn.Sequential(
        nn.LSTM(3, 4, num_layers=2), nn.Embedding(5, 6, dtype=torch.float64), nn.Conv2d(2, 3, 3).half()
    )
    model[1].weight.requires_grad_(False)
    save_pickle(model)
    found = inspected(memopt)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["parameter_bytes"] == sum(p.nbytes for p in model.parameters())
    trainable = {item["name"] for item in found["tensors"] if item["trainable"]}
    assert trainable == {name for name, p in model.named_parameters() if p.requires_grad}
    assert found["tied"] == []


@pytest.mark.parametrize("location", ["missing.pt", "faulty:Fine"])
def test_locations_that_are_no_files(location: str, memopt: Memopt) -> None:
    done = memopt("inspect", location)
    assert (done.code, done.out) == (2, "")
    assert location in done.err

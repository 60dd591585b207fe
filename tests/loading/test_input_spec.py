"""Where input specs come from and what is made of them (their text form: tests/inputs/test_spec_text.py)."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UnsafeFileError, UsageError
from memopt_cli.inputs.batch_axis import with_batch
from memopt_cli.inputs.spec_text import format_tensor, parse_tensor
from memopt_cli.loading.input_spec import (
    batch_of,
    find_spec,
    guessed_spec,
    make_inputs,
    range_like,
    read_spec_file,
)
from memopt_cli.records import InputSpec, ModelSource
from memopt_cli.runtime.private_torch import is_fake
from memopt_cli.trace import fake_mode


def spec(*texts: str, **fields: Any) -> InputSpec:
    return InputSpec(tensors=tuple(map(parse_tensor, texts)), source="--input", **fields)


def made(spec: InputSpec, seed: int = 0, dtype: torch.dtype | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return make_inputs(spec, seed=seed, device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("model", "beside"),
    [
        ("resnet.v2.pt", "resnet.v2"),
        ("resnet.v3.pt", "the example inputs"),
        ("resnet.memopt.pt", "the example inputs"),
        ("lstm.memopt.pt", "lstm.memopt"),
    ],
)
def test_inputs_of_another_model_are_not_taken(tmp_path: Path, model: str, beside: str) -> None:
    for name in ("resnet", "resnet.v2", "lstm", "lstm.memopt"):
        (tmp_path / f"{name}.inputs.yaml").write_text("inputs: [2x3]")
    carried = InputSpec(tensors=(parse_tensor("4x3"),), source="the example inputs")
    found = find_spec(ModelSource(location=str(tmp_path / model)), nn.Linear(3, 3), None, carried)
    assert found.source.removeprefix(str(tmp_path) + "/").removesuffix(".inputs.yaml") == beside


@pytest.mark.parametrize("model", ["net.pt", "net.memopt.pt", "net.traced.ts", "net.traced.memopt.pt"])
def test_inputs_of_the_model_that_another_is_of(tmp_path: Path, model: str) -> None:
    (tmp_path / "net.inputs.yaml").write_text("inputs: [7x3]")
    found = find_spec(ModelSource(location=str(tmp_path / model)), nn.Linear(3, 3), None)
    assert found.source.endswith("net.inputs.yaml")
    other = find_spec(ModelSource(location=str(tmp_path / "net.v2.pt")), nn.Linear(3, 3), None)
    assert other.source.startswith("a guess")


def test_what_is_given_wins_over_the_file_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.inputs.yaml").write_text("inputs: [{shape: [2, 3]}]")
    source = ModelSource(location=str(tmp_path / "model.pt"))
    assert find_spec(source, nn.Linear(3, 1), spec("4x5")).tensors[0].shape == (4, 5)
    found = find_spec(source, nn.Linear(9, 1), None)
    assert found.tensors[0].shape == (2, 3)
    assert found.source.endswith("model.inputs.yaml")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 4, 3), (2, 3, 256)),
        (nn.Conv2d(3, 4, 3), (2, 3, 64, 64)),
        (nn.Conv3d(1, 4, 3), (2, 1, 16, 32, 32)),
        (nn.Linear(7, 2), (2, 7)),
        (nn.LSTM(5, 2), (16, 2, 5)),
        (nn.GRU(5, 2, batch_first=True), (2, 16, 5)),
        (nn.LSTMCell(5, 2), (2, 5)),
        (nn.Embedding(9, 4), (2, 16)),
    ],
)
def test_a_guess_from_the_first_layer_fits_it(layer: nn.Module, shape: tuple[int, ...]) -> None:
    found = find_spec(ModelSource(location="model.pt"), nn.Sequential(nn.Dropout(), layer), None)
    assert found.tensors[0].shape == shape
    assert found.source == f"a guess from 1 ({type(layer).__name__})"
    args, kwargs = made(found)
    layer(*args, **kwargs)


class Configured(nn.Module):
    """As models of transformers are: a configuration, the name of the main input, labels among the arguments."""

    def __init__(self, main_input: str, **config: object) -> None:
        super().__init__()
        self.main_input_name, self.config = main_input, SimpleNamespace(**config)
        self.embedding = nn.Embedding(9, 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.embedding(input_ids)


class Masked(Configured):
    """A model of tokens that takes a mask of padding."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        return self.embedding(input_ids)


class MaskedForCausalLM(Masked):
    pass


def tiny(kind: str, main_input: str, **config: object) -> nn.Module:
    """A module whose class is named after its ``kind``."""
    return type(f"Tiny{kind}", (Configured,), {})(main_input, **config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "tensors", "dims"),
    [
        (
            tiny("ForCausalLM", "input_ids", vocab_size=9, max_position_embeddings=131072),
            "input_ids:BxS@int64=0..9 labels:BxS@int64=0..9",
            {"B": 2, "S": 1024},
        ),
        (
            tiny("ForTokenClassification", "input_ids", vocab_size=9, max_position_embeddings=514, num_labels=5),
            "input_ids:BxS@int64=0..9 labels:BxS@int64=0..5",
            {"B": 2, "S": 512},
        ),
        (
            tiny("ForSequenceClassification", "input_ids", vocab_size=9, n_positions=64, num_labels=1),  # a regression
            "input_ids:BxS@int64=0..9",
            {"B": 2, "S": 64},
        ),
        (
            tiny("ForSequenceClassification", "pixel_values", image_size=32, num_labels=7),
            "pixel_values:Bx3x32x32 labels:B@int64=0..7",
            {"B": 2},
        ),
        (
            MaskedForCausalLM("input_ids", vocab_size=9, n_positions=64),
            "input_ids:BxS@int64=0..9 attention_mask:BxS@int64=padded labels:BxS@int64=0..9",
            {"B": 2, "S": 64},
        ),
        (
            Masked("pixel_values", image_size=32),
            "pixel_values:Bx3x32x32",
            {"B": 2},
        ),
        (tiny("Model", "input_ids", vocab_size=9), "input_ids:BxS@int64=0..9", {"B": 2, "S": 1024}),
    ],
)
def test_a_guess_by_a_configuration(module: nn.Module, tensors: str, dims: dict[str, int]) -> None:
    found = guessed_spec(module)
    assert found.is_guess
    assert found.source == f"a guess from the configuration of {type(module).__name__}"
    assert " ".join(map(format_tensor, found.tensors)) == tensors
    assert found.dims == dims


def test_a_guess_by_what_timm_says_that_a_model_was_made_for() -> None:
    module = nn.Conv2d(3, 4, 3)
    vars(module)["pretrained_cfg"] = {"input_size": (3, 224, 224)}
    found = guessed_spec(module)
    assert found is not None
    assert [format_tensor(tensor) for tensor in found.tensors] == ["Bx3x224x224"]


@pytest.mark.parametrize(
    "module",
    [tiny("Model", "input_ids", vocab_size="many"), tiny("Model", "input_features", vocab_size=9)],
)
def test_a_configuration_of_another_kind_leaves_the_guess_to_the_layers(module: nn.Module) -> None:
    found = guessed_spec(module)
    assert found.source == "a guess from embedding (Embedding)"


@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        (nn.Conv2d(3, 4, 3), {"kernel_size": 3}),
        (nn.Conv2d(3, 4, 3), {"kernel_size": (1,) * 7}),
        (nn.Conv2d(3, 4, 3), {"in_channels": "x\x1b[2J"}),
        (nn.Linear(3, 4), {"in_features": None}),
        (nn.LSTM(3, 4), {"input_size": [3]}),
        (nn.Embedding(3, 4), {"num_embeddings": -5}),
        (nn.Embedding(3, 4), {"num_embeddings": 10**30}),
    ],
)
def test_a_layer_with_other_settings_tells_nothing(layer: nn.Module, settings: dict[str, Any]) -> None:
    vars(layer).update(settings)
    found = find_spec(ModelSource(location="model.pt"), nn.Sequential(layer, nn.Linear(7, 2)), None)
    assert found.tensors[0].shape == (2, 7)


def test_no_guess_shows_the_line_to_type() -> None:
    with pytest.raises(UsageError) as error:
        find_spec(ModelSource(location="model.pt"), nn.ReLU(), None)
    assert "such as `-i 8x128`" in error.value.hint


def test_a_symbol_without_a_size_names_the_flag() -> None:
    with pytest.raises(UsageError, match="S") as error:
        find_spec(ModelSource(location="m.pt"), nn.ReLU(), spec("BxS", dims={"B": 2}))
    assert "--dim S=128" in error.value.hint


def test_a_spec_file(tmp_path: Path) -> None:
    path = tmp_path / "model.inputs.yaml"
    path.write_text(
        "inputs: [{name: ids, shape: [B, S], dtype: int64, values: 0..9}, {shape: BxS}]\ndims: {B: 8, S: 4}"
    )
    found = read_spec_file(path)
    assert found.tensors == (parse_tensor("ids:BxS@int64=0..9"), parse_tensor("BxS"))
    assert found.dims == {"B": 8, "S": 4}


@pytest.mark.parametrize(
    "text",
    [
        "inputs: [{shape: [2], size: 3}]",
        "input: []",
        "inputs: []",
        "inputs: [{dtype: int64}]",
        "inputs: [{shape: [2], dtype: int65}]",
        "inputs: [{shape: [2], values: odd}]",
        "inputs: [{shape: [-2]}]",
        "inputs: [{shape: [2], name: 3}]",
        "inputs: [{shape: [2]}]\ndims: [3]",
        "inputs: [{shape: [2]}]\ndims: {B: x}",
        "[1",
        "!!python/object/apply:os.system [true]",
        "just text",
    ],
)
def test_a_wrong_spec_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.inputs.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"model\.inputs\.yaml"):
        read_spec_file(path)


def test_the_same_seed_makes_the_same_inputs_and_leaves_the_global_rng_alone() -> None:
    described = spec("2x3", "x:4=uniform")
    state = torch.get_rng_state()
    (first,), named = made(described, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(named) == ["x"]
    assert torch.equal(first, made(described, 1)[0][0])
    assert not torch.equal(first, made(described, 2)[0][0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("values", ["normal", "uniform", "zeros", "ones", "spikes:0.5", "-3..4"])
def test_floating_values(dtype: str, values: str) -> None:
    tensor = made(spec(f"500@{dtype}={values}"))[0][0]
    assert tensor.dtype == getattr(torch, dtype)
    real = tensor.real.float() if tensor.is_complex() else tensor.float()
    if values in ("zeros", "ones", "spikes:0.5"):
        assert set(real.tolist()) == {"zeros": {0.0}, "ones": {1.0}, "spikes:0.5": {0.0, 1.0}}[values]
    else:
        assert real.std() > 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@int64=2..5", {2, 3, 4}),
        ("@int64=-100,0..3", {-100, 0, 1, 2}),
        ("@bool", {0, 1}),
        ("@uint8", {0, 1}),
    ],
)
def test_integer_values(text: str, expected: set[int]) -> None:
    assert set(made(spec(f"200{text}"))[0][0].int().tolist()) == expected


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ([3, -100, 1, -100], "-100,1..4"),
        ([-2, -100, 1], "-100..2"),
        ([-100, -100], "-100..-99"),
        ([5, 2], "2..6"),
        ([], "0..1"),
    ],
)
def test_values_like_those_given(given: list[int], values: str) -> None:
    assert range_like(torch.tensor(given, dtype=torch.long)) == values


def test_not_all_numbers_stand_apart() -> None:
    """The mean of a loss that ignores all labels is NaN."""
    labels = spec("1@int64=-100,0..3")
    assert all(made(labels, seed)[0][0].item() >= 0 for seed in range(100))


def test_a_number_apart_must_suit_the_dtype() -> None:
    with pytest.raises(UsageError, match=r"uint8 cannot hold -100\.\.-99"):
        parse_tensor("4@uint8=-100,0..5")


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
@pytest.mark.parametrize(
    ("shape", "zeros"),
    [
        ("4x6", [0, 1, 2, 3]),
        ("6x4", [0, 1, 2, 0, 1, 2]),
        ("1x5", [1]),
        ("5", [1]),
        ("2x2x4", [0, 1, 2, 0]),
        ("3x1", [0] * 3),
    ],
)
def test_a_padded_mask_has_a_row_of_ones_and_rows_that_end_with_zeros(shape: str, zeros: list[int], dtype: str) -> None:
    mask = made(spec(f"{shape}@{dtype}=padded"))[0][0]
    assert mask.dtype == getattr(torch, dtype)
    rows = mask.reshape(len(zeros), -1).int().tolist()
    assert rows == [[1] * (len(row) - end) + [0] * end for row, end in zip(rows, zeros, strict=True)]
    assert mask.shape == tuple(map(int, shape.split("x")))


def test_a_scalar_cannot_be_padded() -> None:
    with pytest.raises(UsageError, match="has no dimension to pad"):
        find_spec(ModelSource(location="m.pt"), nn.ReLU(), spec("[]@int64=padded"))


def test_only_floating_tensors_are_cast() -> None:
    args, _ = made(spec("2", "2@int64"), dtype=torch.float64)
    assert [t.dtype for t in args] == [torch.float64, torch.int64]


def test_a_dry_run_is_given_the_numbers_that_a_step_is_given() -> None:
    inputs = spec("4x8", "x:4x8@int64=0..100", "mask:4x8@bool=padded", "y:1000000000x4@int64=0..9")
    small = replace(inputs, tensors=inputs.tensors[:3])
    _, real = made(small)
    with fake_mode():
        (x,), named = made(inputs)
    assert is_fake(x)
    assert is_fake(named["y"])  # would be 32 GB
    for name in ("x", "mask"):
        assert not is_fake(named[name])
        assert torch.equal(named[name], real[name])


def test_data_files(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(3, 2)
    torch.save([tensor, {"k": tensor}], tmp_path / "list.pt")
    torch.save({"x": tensor}, tmp_path / "dict.pt")
    torch.save(tensor, tmp_path / "one.pt")
    np.savez(tmp_path / "array.npz", x=tensor.numpy())
    found = {p.name: made(InputSpec(data_file=str(p), source="--input-data")) for p in tmp_path.iterdir()}
    assert torch.equal(found["list.pt"][0][1]["k"], tensor)
    assert torch.equal(found["dict.pt"][1]["x"], tensor)
    assert torch.equal(found["one.pt"][0][0], tensor)
    assert torch.equal(found["array.npz"][1]["x"], tensor)
    assert batch_of(InputSpec(data_file=str(tmp_path / "list.pt"), source="")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pt", "npz"])
def test_data_files_of_more_inputs_than_any_model_takes(ending: str, tmp_path: Path) -> None:
    path, held = str(tmp_path / f"many.{ending}"), {f"x{i}": torch.ones(1) for i in range(1001)}
    torch.save(held, path) if ending == "pt" else np.savez(path, **held)
    with pytest.raises(FileFormatError, match=r"many\.\w+ holds 1001 inputs"):
        made(InputSpec(data_file=path, source="--input-data"))


def test_data_files_without_data(tmp_path: Path) -> None:
    torch.save([torch.ones(2, device="meta")], tmp_path / "meta.pt")
    with pytest.raises(FileFormatError, match=r"holds a tensor of the meta device, which has no data"):
        made(InputSpec(data_file=str(tmp_path / "meta.pt"), source="--input-data"))
    for name, held in {"number": [torch.tensor(1.0)], "empty": {}, "text": "x"}.items():
        torch.save(held, tmp_path / f"{name}.pt")
        with pytest.raises(UsageError, match="gives no tensor with a batch") as raised:
            batch_of(InputSpec(data_file=str(tmp_path / f"{name}.pt"), source="--input-data"))
        assert "--dim" not in raised.value.hint


def test_arrays_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(2))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError) as raised:
        made(InputSpec(data_file=str(tmp_path / "x.npz"), source="--input-data"))
    assert raised.value.message == f"{tmp_path / 'x.npz'} needs NumPy, which is not installed"


def test_a_safetensors_data_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch").save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert torch.equal(made(InputSpec(data_file=str(tmp_path / "x.safetensors"), source=""))[1]["x"], torch.ones(2))


def test_data_files_run_no_code(tmp_path: Path) -> None:
    torch.save(print, tmp_path / "bad.pt")
    with pytest.raises(UnsafeFileError):
        made(InputSpec(data_file=str(tmp_path / "bad.pt"), source=""))
    with pytest.raises(UsageError, match="unknown ending"):
        made(InputSpec(data_file=__file__, source=""))
    with pytest.raises(UsageError, match="cannot be read"):
        made(InputSpec(data_file="missing.pt", source=""))


SCRIPT = """
import torch

def make(batch, S, steps=3, *rest, **more):
    return torch.randn(batch, S, steps)

def named(batch):
    return {"x": torch.ones(batch)}

def failing():
    raise ValueError("no luck")
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/zero", "unknown ending"),
        ("pipe", "unknown ending"),
        ("zero.pt", "cannot be read: it is not a regular file"),
        ("a\0.pt", "cannot be read: no file can have this name"),
        ("a.pt", "cannot be read: No such file"),
    ],
)
def test_data_files_that_have_no_end(path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "zero.pt")
    with pytest.raises(UsageError, match=why):
        made(InputSpec(data_file=path, source="the baseline"))


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(FileFormatError, match=r"pipe\.npz"):
        made(InputSpec(data_file=str(tmp_path / "pipe.npz"), source="the baseline"))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    data = io.BytesIO()
    np.savez(data, x=np.ones(2))
    receiver, sender = os.pipe()
    os.write(sender, data.getvalue())
    os.close(sender)
    (tmp_path / "x.npz").symlink_to(f"/proc/self/fd/{receiver}")
    assert made(InputSpec(data_file=str(tmp_path / "x.npz"), source="--input-data"))[1]["x"].shape == (2,)
    os.close(receiver)


@pytest.mark.parametrize(
    "text", ['["\\ud800"]', '["\\udbff\\udfff"]', '{"\\ud800": 1}', "[{shape: ['\\e']}]", '["\\e[2J"]']
)
def test_what_is_said_of_a_spec_file_can_be_printed(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.inputs.yaml").write_text(f"inputs: {text}\ndims: {{}}")
    with pytest.raises(UsageError, match=r"model\.inputs\.yaml") as caught:
        read_spec_file(tmp_path / "model.inputs.yaml")
    assert f"{caught.value.message}{caught.value.hint}".isprintable()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "inputs.py"
    path.write_text(SCRIPT)
    return path


def test_scripts_are_given_the_sizes_that_they_name(script: Path) -> None:
    described = InputSpec(script=f"{script}:make", dims={"B": 2, "S": 5}, source="")
    assert made(described)[0][0].shape == (2, 5, 3)
    assert torch.equal(made(described)[0][0], made(described)[0][0])
    assert made(replace(described, dims={"B": 2, "S": 5, "T": 7}))[0][0].shape == (2, 5, 7)
    assert made(with_batch(InputSpec(script=f"{script}:named", dims={"B": 2}, source=""), 6))[1]["x"].shape == (6,)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("inputs.py:named", "needs the size of batch"),
        ("inputs.py:failing", "no luck"),
        ("inputs.py:missing", "has no function missing"),
        ("missing.py:make", "there is no file"),
    ],
)
def test_scripts_that_cannot_be_used(script: Path, function: str, message: str) -> None:
    given = InputSpec(script=str(script.with_name(function)), source="")
    with pytest.raises(UsageError, match=message):
        made(given)
    if message != "no luck":  # found before it is called
        with pytest.raises(UsageError, match=message):
            find_spec(ModelSource(location="net.pt"), nn.Linear(3, 3), given)


def test_a_size_that_a_script_does_not_take(script: Path) -> None:
    with pytest.raises(UsageError, match=r"takes no S; its arguments are \(batch\)"):
        made(InputSpec(script=f"{script}:named", dims={"B": 2, "S": 5}, source=""))


@pytest.mark.parametrize("optional", ["S", "B", "batch"])
def test_a_script_is_not_given_what_it_need_not_take(script: Path, optional: str) -> None:
    given = InputSpec(script=f"{script}:named", dims={"B": 2, optional: 2}, optional_dims=(optional,), source="")
    found = find_spec(ModelSource(location="net.pt"), nn.Linear(3, 3), given)
    assert found == replace(given, dims={"B": 2}, optional_dims=())
    assert made(found)[1]["x"].shape == (2,)


@pytest.mark.parametrize("typed", ["B", "batch"])
def test_the_batch_of_a_script_may_have_the_name_of_its_argument(script: Path, typed: str) -> None:
    given = InputSpec(script=f"{script}:named", dims={typed: 2}, source="")
    found = find_spec(ModelSource(location="net.pt"), nn.Linear(3, 3), given)
    assert made(with_batch(found, 6))[1]["x"].shape == (6,)


def test_a_size_that_no_input_has(tmp_path: Path) -> None:
    """It is an error where it was typed; a config file may be shared with models that have it."""
    source = ModelSource(location=str(tmp_path / "net.pt"))
    (tmp_path / "net.inputs.yaml").write_text("inputs: [Bx3]\ndims: {B: 4}\n")
    shared = InputSpec(dims={"B": 5, "S": 2}, optional_dims=("B", "S"), source="memopt.yaml")
    assert find_spec(source, nn.Linear(3, 3), shared).dims == {"B": 5}
    typed_too = replace(shared, optional_dims=("S",), source="--dim")
    assert find_spec(source, nn.Linear(3, 3), typed_too).dims == {"B": 5}
    with pytest.raises(UsageError, match=r"no input has a dimension S; they are Bx3 \(.*net.inputs.yaml\)"):
        find_spec(source, nn.Linear(3, 3), replace(shared, optional_dims=("B",), source="--dim"))
    with pytest.raises(UsageError, match=r"no input has a dimension B; they are 2x3 \(a guess from"):
        find_spec(ModelSource(location="other.pt"), nn.Linear(3, 3), InputSpec(dims={"B": 5}, source="--dim"))


def test_the_batch_is_the_symbol_or_dimension_0() -> None:
    assert batch_of(spec("TxBx3", dims={"T": 5, "B": 7})) == 7
    assert batch_of(spec("4x3", "2x3")) == 4
    with pytest.raises(UsageError, match="batch size"):
        batch_of(InputSpec(source=""))


def test_another_batch() -> None:
    assert with_batch(spec("TxB", dims={"T": 5, "B": 7}), 2).dims == {"T": 5, "B": 2}
    resized = with_batch(spec("4x3", "4", "5x4"), 9)
    assert [t.shape for t in resized.tensors] == [(9, 3), (9,), (5, 4)]
    with pytest.raises(UsageError, match="cannot be resized"):
        with_batch(InputSpec(data_file="x.pt", source=""), 2)


def test_a_script_takes_sizes_by_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torch\n\ndef make(samples):\n    return torch.ones(samples, 3)\n")
    spec = InputSpec(script=f"{tmp_path}/own.py:make", dims={"samples": 5}, source="--input-script")
    assert made(spec)[0][0].shape == (5, 3)
    assert batch_of(spec) == 5
    (tmp_path / "none.py").write_text("def make():\n    return {}\n")
    with pytest.raises(UsageError, match="gives no tensor with a batch"):
        batch_of(InputSpec(script=f"{tmp_path}/none.py:make", source="--input-script"))

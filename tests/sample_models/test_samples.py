from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from sample_models.__main__ import NAMES, main, write_sample

SMALL = {
    "spiking_vgg": {"T": 3, "B": 2},
    "lif_rnn": {"T": 5, "B": 4},
    "resnet": {"B": 2},
    "gpt": {"B": 2, "S": 16},
    "char_rnn": {"T": 4, "B": 3},
}
OUTPUT_SHAPES = {
    "spiking_vgg": (2, 10),
    "lif_rnn": (5, 4, 10),
    "resnet": (2, 10),
    "gpt": (),
    "char_rnn": (3, 18),
}


def fill(shape: list[int], dtype: str, values: str) -> Tensor:
    """A tensor as the input spec describes it."""
    kind, _, rate = values.partition(":")
    if kind == "spikes":
        return (torch.rand(shape) < float(rate)).to(getattr(torch, dtype))
    if ".." in values:
        low, high = map(int, values.split(".."))
        return torch.randint(low, high, shape, dtype=getattr(torch, dtype))
    return {"uniform": torch.rand, "normal": torch.randn}[kind](shape)


def run(name: str, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """The model's output on inputs of its own spec at a small size."""
    torch.manual_seed(1)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for entry in importlib.import_module(f"sample_models.{name}").INPUTS["inputs"]:
        shape = [int(SMALL[name].get(size, size)) for size in entry["shape"].split("x")]
        tensor = fill(shape, entry["dtype"], entry["values"])
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if "name" in entry:
            kwargs[entry["name"]] = tensor
        else:
            args.append(tensor)
    return model(*args, **kwargs)


def build(name: str) -> nn.Module:
    return importlib.import_module(f"sample_models.{name}").build()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_reaches_every_parameter(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    output = run(name, model, dtype)
    assert output.shape == OUTPUT_SHAPES[name]
    assert output.dtype == dtype
    output.backward(torch.randn_like(output))
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_written_file_holds_the_model(name: str, tmp_path: Path) -> None:
    path = write_sample(name, tmp_path)
    copy = torch.load(path, weights_only=False)
    torch.testing.assert_close(run(name, copy), run(name, build(name)), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_needs_module_classes_only(name: str, tmp_path: Path) -> None:
    """What a careful loader allows: no function and no other class is imported by the pickle."""
    for qualified in torch.serialization.get_unsafe_globals_in_checkpoint(str(write_sample(name, tmp_path))):
        module, _, attribute = qualified.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), attribute), nn.Module), qualified


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_spec_beside_the_file_is_the_models_own(name: str, tmp_path: Path) -> None:
    write_sample(name, tmp_path)
    spec = yaml.safe_load((tmp_path / f"{name}.inputs.yaml").read_text())
    assert spec == importlib.import_module(f"sample_models.{name}").INPUTS
    assert set(spec["dims"]) == set(SMALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_building_leaves_the_callers_random_numbers_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = build(name).state_dict(), build(name).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "suffixes"), [([], {".pt"}), (["--programs"], {".pt", ".ts", ".pt2"})])
def test_programs_are_written_when_they_are_asked_for(
    flags: list[str], suffixes: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sample_models", "char_rnn", "--folder", str(tmp_path), *flags])
    main()
    assert {path.suffix for path in tmp_path.iterdir()} == {".yaml", *suffixes}

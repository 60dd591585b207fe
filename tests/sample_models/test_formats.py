"""The sample models scripted, traced and exported: each format trains in the memory of the model that was pickled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from memopt_cli.loading import load_model
from memopt_cli.loading.input_spec import find_spec, make_inputs
from memopt_cli.records import ModelSource, StepSettings, Trust
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.lifted.module import LiftedModule
from memopt_cli.trace import count
from memopt_cli.training.step import Step
from sample_models.__main__ import write_programs
from sample_models.char_rnn import CharRNN
from sample_models.gpt import GPT
from sample_models.lif_rnn import LIFRNN
from sample_models.resnet import ResNet
from sample_models.spiking_vgg import SpikingVGG
from tests.rows import quick

SUFFIXES = (".pt", ".ts", ".traced.ts", ".pt2")
SMALL: dict[str, tuple[Callable[[], nn.Module], str, dict[str, int]]] = {
    "spiking_vgg": (lambda: SpikingVGG(widths=(4,) * 8), "TxBx2x48x48", {"T": 2, "B": 4}),
    "lif_rnn": (lambda: LIFRNN(neurons=64), "TxBx100", {"T": 5, "B": 32}),
    "resnet": (lambda: ResNet((1, 2), width=8), "Bx3x64x64", {"B": 8}),
    "gpt": (lambda: GPT(vocabulary=50, context=16, width=32, heads=2, blocks=3), "BxS", {"B": 16, "S": 16}),
    "char_rnn": (lambda: CharRNN(hidden=16), "TxBx57", {"T": 6, "B": 32}),
}

SEGMENTS = {
    "spiking_vgg": r"blocks\.\d",
    "lif_rnn": "cell",
    "resnet": r"stages\.\d\.\d",
    "gpt": r"blocks\.\d",
    "char_rnn": "",
}
"""Pattern of the paths that become segments; none of an LSTM's, which gains nothing."""


@pytest.fixture(scope="module", params=quick(SMALL, {*SMALL} - {"spiking_vgg"}))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small version of a sample model in every format; the path of ``NAME.pt``."""
    make, shape, dims = SMALL[request.param]
    path = tmp_path_factory.mktemp("formats") / f"{request.param}.pt"

    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()

    tokens: dict[str, Any] = {"shape": shape, "dtype": "int64", "values": "0..50"}
    inputs = [tokens | {"name": n} for n in ("input_ids", "targets")] if request.param == "gpt" else [{"shape": shape}]
    path.with_suffix(".inputs.yaml").write_text(yaml.safe_dump({"inputs": inputs, "dims": dims}))
    torch.save(build(), path)
    write_programs(build, path)
    return path


def step_of(path: Path) -> Step:
    """A training step of the model in a file."""
    loaded = load_model(ModelSource(location=str(path), trust=Trust(packages=("sample_models",))))
    spec = find_spec(loaded.source, loaded.module, None, loaded.example_spec)
    args, kwargs = make_inputs(spec, seed=0, device="cpu", dtype=None)
    return Step(model=loaded.module.train(), args=args, kwargs=kwargs, settings=StepSettings())


def gradients(step: Step) -> dict[str, Tensor]:
    torch.manual_seed(0)
    step.backward(step.forward())
    return {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_every_format_is_lifted_whole_and_gives_the_same_gradients(files: Path) -> None:
    expected = gradients(step_of(files))
    assert expected
    for suffix in SUFFIXES[1:]:
        step = step_of(files.with_suffix(suffix))
        assert all(isinstance(m, LiftedModule) for m in step.model.modules()), suffix
        actual = gradients(step)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_every_format_trains_in_the_memory_of_the_pickled_model(files: Path) -> None:
    expected = peaks(step_of(files), SEGMENTS[files.stem])
    assert (expected[1] < expected[0]) == bool(SEGMENTS[files.stem])
    for suffix in SUFFIXES[1:]:
        actual = peaks(step_of(files.with_suffix(suffix)), SEGMENTS[files.stem])
        assert all(peak <= 1.03 * other for peak, other in zip(actual, expected, strict=True)), (
            suffix,
            actual,
            expected,
        )


def peaks(step: Step, segments: str) -> tuple[int, int]:
    """Tensor peak of the step as it is, and with segments on the modules of these paths."""
    original = count(step).tensor_peak_bytes
    for path, module in list(step.model.named_modules()):
        if path and re.fullmatch(segments, path):
            install_segment(module, SegmentConfig())
    return original, count(step).tensor_peak_bytes

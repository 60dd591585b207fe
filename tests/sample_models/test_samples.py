from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from sample_models.__main__ import NAMES, main, write_sample
from sample_models.char_rnn import LETTERS
from sample_models.gpt import GPT
from sample_models.lif_rnn import DECAY, LIFCell, triangular_spike
from sample_models.spiking_vgg import LIF, ConvBlock, MultiStep, SpikingVGG

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


def test_an_unknown_name_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sample_models", "vgg"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no sample model is called vgg; there are spiking_vgg, lif_rnn" in capsys.readouterr().err


def spike_train(*shape: int) -> Tensor:
    torch.manual_seed(2)
    return (torch.rand(shape) < 0.2).to(torch.float64)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_block_in_two_pieces_of_time_is_the_block(cut: int) -> None:
    # In eval mode: in training, batch normalization sees all time steps at once.
    block = ConvBlock(2, 8, pool=True).double().eval()
    block.synapse.layer[-1].running_var.fill_(0.01)  # near the truth, so that neurons fire
    frames = spike_train(6, 2, 2, 8, 8)
    whole = block(frames)
    whole.sum().backward()
    gradients = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    block.neuron.reset()
    pieces = torch.cat([block(frames[:cut]), block(frames[cut:])])
    pieces.sum().backward()
    assert whole.any()
    assert torch.equal(pieces, whole)
    torch.testing.assert_close([p.grad for p in block.parameters()], gradients, rtol=1e-12, atol=1e-12)


def test_without_a_reset_neurons_remember() -> None:
    neuron = MultiStep(LIF())
    currents = torch.full((3, 1, 4), 0.6)
    first = neuron(currents)
    assert not torch.equal(neuron(currents), first)
    neuron.reset()
    assert torch.equal(neuron(currents), first)


def test_lif_follows_its_equation() -> None:
    # potential: 0.8, 1.2 (spikes), 0.6 + 0.8 - 1 = 0.4, 1.0 (not above threshold), 1.3 (spikes)
    spikes = MultiStep(LIF())(torch.full((5, 1), 0.8, dtype=torch.float64))
    assert spikes.flatten().tolist() == [0, 1, 0, 0, 1]


@pytest.mark.slow
def test_the_vgg_starts_each_call_from_rest() -> None:
    model = SpikingVGG().eval()
    frames = spike_train(3, 1, 2, 48, 48).float()
    assert torch.equal(model(frames), model(frames))


@pytest.mark.slow
def test_every_layer_of_the_vgg_spikes() -> None:
    rates: dict[str, float] = {}
    model = build("spiking_vgg")
    for path, module in model.named_modules():
        if isinstance(module, MultiStep):
            module.register_forward_hook(lambda _m, _i, spikes, path=path: rates.update({path: spikes.mean().item()}))
    run("spiking_vgg", model)
    assert len(rates) == 8
    assert all(0.02 < rate < 0.5 for rate in rates.values()), rates


def test_a_neuron_that_has_run_without_gradient_pickles() -> None:
    neuron = MultiStep(LIF())
    with torch.no_grad():
        neuron(torch.rand(3, 2, 4))
    buffer = io.BytesIO()
    torch.save(neuron, buffer)
    buffer.seek(0)
    copy = torch.load(buffer, weights_only=False)
    assert torch.equal(copy.neuron.mem, neuron.neuron.mem)
    assert copy(torch.ones(1, 2, 4)).shape == (1, 2, 4)


def slope(function: Any, x: list[float]) -> list[float]:
    points = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    spikes = function(points)
    assert set(spikes.tolist()) <= {0, 1}
    spikes.sum().backward()
    return points.grad.tolist()


def test_surrogate_gradients() -> None:
    assert slope(triangular_spike, [-2.0, -0.5, 0.0, 0.5, 1.0]) == pytest.approx([0, 0.15, 0.3, 0.15, 0])
    assert slope(LIF.spike_grad, [0.0, 1 / torch.pi, -1 / torch.pi]) == pytest.approx([1, 0.5, 0.5])


def test_the_cell_decays_after_a_soft_reset() -> None:
    cell = LIFCell(inputs=2, neurons=3).double()
    nn.init.zeros_(cell.weight)
    spikes = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    potential = torch.tensor([[0.5, 1.5, -1.0]], dtype=torch.float64)
    fired, after = cell(torch.ones(1, 2, dtype=torch.float64), spikes, potential)
    torch.testing.assert_close(after, DECAY * torch.tensor([[0.5, 0.5, -1.0]], dtype=torch.float64))
    assert not fired.any()


def test_the_recurrent_weights_have_the_variance_they_should() -> None:
    weight = build("lif_rnn").cell.weight
    assert weight[:100].var().item() == pytest.approx(2 / 100, rel=0.05)
    assert weight[100:].var().item() == pytest.approx(2 / 200, rel=0.05)


def test_gpt_gives_logits_or_the_loss() -> None:
    model = GPT(vocabulary=50, context=8, width=12, heads=3, blocks=2)
    tokens, targets = torch.randint(0, 50, (2, 2, 8))
    logits = model(tokens)
    assert logits.shape == (2, 8, 50)
    expected = F.cross_entropy(logits.reshape(-1, 50), targets.reshape(-1))
    torch.testing.assert_close(model(tokens, targets), expected)


def test_gpt_does_not_look_ahead() -> None:
    model = GPT(vocabulary=50, context=8, width=12, heads=3, blocks=2).eval()
    tokens = torch.randint(0, 50, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_char_rnn_gives_probabilities() -> None:
    names = torch.eye(len(LETTERS))[[LETTERS.index(letter) for letter in "Shyam"]].unsqueeze(1)
    scores = build("char_rnn")(names)
    assert scores.shape == (1, 18)
    assert scores.exp().sum().item() == pytest.approx(1, abs=1e-5)

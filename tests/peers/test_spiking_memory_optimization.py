"""What SpikingJelly's own tests of ``memopt`` check, less those of its profiling, which needs CUDA."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.errors import OptionError
from memopt_cli.runtime import segment_of
from memopt_cli.runtime.compressor import (
    BitSpikeCompressor,
    BooleanSpikeCompressor,
    NullSpikeCompressor,
    SparseSpikeCompressor,
    Uint8SpikeCompressor,
)
from memopt_cli.spikingjelly import apply_gc, get_module_and_parent, resolve_device


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(6, width)
        self.back = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.back(torch.relu(self.linear(x))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(6, 6), Block(12), Block())


X = (torch.rand(4, 6) > 0.5).float()


def wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if segment_of(module) is not None]


# ------------------------------------------------------------------ which modules become segments


def test_matching_modules_become_segments_and_keep_names_and_gradients() -> None:
    plain, model = net(), net()
    assert apply_gc(model, Block, (X,), device="cpu") is model
    assert wrapped(model) == ["0", "2", "3"]
    assert model.state_dict().keys() == plain.state_dict().keys()
    for each in (plain, model):
        each(X).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 3),
        ({"max_gc_wrapped_modules": 2}, 2),
        ({"max_gc_wrapped_modules": 0}, 0),
        ({"gc_target_budget_ratio": 0.5}, 2),
        ({"gc_target_budget_ratio": 0.01}, 1),
        ({"max_gc_wrapped_modules": 1, "gc_target_budget_ratio": 1.0}, 1),
        ({"checkpoint_budget": "speed"}, 2),
        ({"checkpoint_budget": "memory"}, 3),
    ],
)
def test_limits_say_how_many_and_the_smaller_one_wins(limits: dict[str, object], count: int) -> None:
    model, summary = apply_gc(net(), Block, (X,), device="cpu", return_summary=True, **limits)
    assert len(wrapped(model)) == summary["gc_wrap_count"] == count
    assert summary["gc_candidate_count"] == 3
    assert summary["gc_selected_modules"] == wrapped(model)


@pytest.mark.parametrize("limits", [{"gc_target_budget_ratio": 5.0}, {"checkpoint_budget": "much"}])
def test_a_limit_out_of_range_is_refused(limits: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        apply_gc(net(), Block, (X,), device="cpu", **limits)


def test_nothing_to_wrap_is_said() -> None:
    _, summary = apply_gc(net(), nn.Conv2d, (X,), device="cpu", return_summary=True)
    assert summary["gc_wrap_count"] == 0
    assert summary["skipped_steps"]


def test_a_level_above_one_wants_inputs() -> None:
    with pytest.raises(ValueError, match="dummy_input"):
        memopt_cli.spikingjelly.memory_optimization(net(), Block, level=2)


# ------------------------------------------------------------------ segments


def test_a_segment_copies_and_pickles() -> None:
    model = apply_gc(net(), Block, (X,), device="cpu")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert wrapped(twin) == wrapped(model)
        assert torch.equal(twin(X), model(X))


def test_the_input_and_its_need_of_a_gradient_stay_as_they_are() -> None:
    model, x = apply_gc(net(), Block, (X,), device="cpu"), X.clone()
    model(x).sum().backward()
    assert not x.requires_grad
    assert torch.equal(x, X)


def test_a_path_leads_to_a_module_its_parent_and_its_name() -> None:
    model = net()
    assert get_module_and_parent(model, "2.linear") == (model[2].linear, model[2], "linear")
    with pytest.raises(ValueError, match="has no parent"):
        get_module_and_parent(model, "")


# ------------------------------------------------------------------ codecs


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        (NullSpikeCompressor, torch.randn(3, 7)),
        (BooleanSpikeCompressor, torch.randint(0, 2, (3, 7)).float()),
        (BitSpikeCompressor, torch.randint(0, 2, (3, 7)).half()),
        (Uint8SpikeCompressor, torch.randint(0, 256, (3, 7)).float()),
        (SparseSpikeCompressor, (torch.rand(3, 7) > 0.9).float()),
        (BitSpikeCompressor, torch.tensor([2.0, 0.3, 1.0])),
        (Uint8SpikeCompressor, torch.tensor([-1.0, 300.0, 4.5])),
    ],
)
def test_a_codec_gives_back_what_it_was_given_and_stores_raw_what_it_could_not(codec: type, values: Tensor) -> None:
    compressor = codec()
    found = compressor.decompress(compressor.compress(values))
    assert found.dtype is values.dtype
    assert torch.equal(found, values)


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize("rank", ["x", "-1", "2", "1.0"])
def test_a_local_rank_without_a_device_is_refused(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("MV2_COMM_WORLD_LOCAL_RANK", rank)
    with pytest.raises(ValueError, match="there are 2 CUDA devices"):
        resolve_device()
    monkeypatch.setenv("MV2_COMM_WORLD_LOCAL_RANK", "1")
    assert resolve_device() == "cuda:1"


def test_without_cuda_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert resolve_device() == "cpu"

"""Behaviour of GPUs alone: their libraries' own random numbers, streams, threads of backward, and allocator."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.verification.effects import bit_equal
from tests.zoo.models import GIVEN, Parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

WIDTH = 64


class Recurrent(Parts, layer=GIVEN):
    """A recurrent layer's output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Leaky(Parts, linear=lambda: nn.Linear(WIDTH, WIDTH), v=lambda: torch.zeros(())):
    """A neuron whose membrane stays from step to step."""

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.v.to(x) * 0.5 + self.linear(x)
        out = self.v.sigmoid()
        self.v = self.v.detach()
        return out


class Attention(Parts, project=lambda: nn.Linear(WIDTH, 3 * WIDTH)):
    """Scaled dot products with dropout, in half precision by one of PyTorch's fused kernels."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True).transpose(1, 2).flatten(2)


class OnSide(Parts, block=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU()), stream=None):
    """A layer whose forward runs on a stream of its own."""

    def forward(self, x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = self.block(x)
        torch.cuda.current_stream().wait_stream(stream)
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8), nn.ReLU()),
    "LSTM": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)),
    "LSTM with dropout": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)),
    "GRU with dropout": lambda: Recurrent(nn.GRU(WIDTH, WIDTH, num_layers=3, dropout=0.2, batch_first=True)),
    "RNN with dropout": lambda: Recurrent(nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)),
    "membrane": lambda: nn.Sequential(Leaky(), nn.Linear(WIDTH, WIDTH), Leaky()),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True),
    "stream": OnSide,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv2d(2, 4, 3), nn.GELU(), nn.Dropout2d(0.5)),
}
AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "float32": contextlib.nullcontext,
    "bf16": lambda: torch.autocast("cuda", torch.bfloat16),
    "fp16": lambda: torch.autocast("cuda", torch.float16),
}
PLANS = {
    "segment": Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="1"))),
    "segment around all": Plan(segments=(SegmentPlan(path="0"),)),
    "packed": Plan(packed=True),
    "nested": Plan(segments=(SegmentPlan(path=""), SegmentPlan(path="0")), packed=True),
}


def trained(model: nn.Module, around: str, steps: int = 3) -> dict[str, Tensor]:
    """Return what three steps leave behind."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler(enabled=around == "fp16")
    found = {}
    for step in range(steps):
        x = torch.randn(8, 8, WIDTH, device="cuda", requires_grad=True)
        with AROUND[around]():
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        found |= {
            f"{step} gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        found |= {f"{step} input": x.grad, f"{step} loss": loss.detach(), f"{step} random": torch.cuda.get_rng_state()}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found |= {f"{step} {name}": value.clone() for name, value in model.state_dict().items()}
    return found


@pytest.fixture(autouse=True)
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_plan_changes_nothing(kind: str, plan: str, around: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(MODELS[kind](), nn.Linear(WIDTH, 8) if kind != "convolution" else nn.Flatten()).cuda()
    expected = trained(copy.deepcopy(plain), around)
    again = trained(copy.deepcopy(plain), around)
    if not bit_equal(expected, again):
        pytest.skip("differs from run to run")
    found = trained(memopt_cli.apply_plan(copy.deepcopy(plain), PLANS[plan]), around)
    differs = [name for name in expected if not bit_equal({name: expected[name]}, {name: found[name]})]
    assert not differs, differs[:4]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["segment", "segment around all"])
def test_segments_elsewhere_leave_the_dropout_of_a_recurrent_layer_alone(plan: str) -> None:
    """A GPU's generator that is put back has cuDNN draw a new seed, unless that is prevented."""
    torch.manual_seed(0)
    plain = nn.Sequential(MODELS["dropout"](), MODELS["LSTM with dropout"](), MODELS["LSTM with dropout"]()).cuda()
    expected = trained(copy.deepcopy(plain), "float32")
    found = trained(memopt_cli.apply_plan(copy.deepcopy(plain), PLANS[plan]), "float32")
    differs = [name for name in expected if not bit_equal({name: expected[name]}, {name: found[name]})]
    assert not differs, differs[:4]


def test_a_recurrent_layer_with_dropout_runs_plainly() -> None:
    model = memopt_cli.apply_plan(nn.Sequential(MODELS["LSTM with dropout"]()).cuda(), PLANS["segment around all"])
    with pytest.warns(UserWarning, match="Recurrent at '0' has a recurrent layer with dropout, for which cuDNN has"):
        model(torch.randn(8, 8, WIDTH, device="cuda"))

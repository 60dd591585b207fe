"""Models as people train them: adapters, quantized, tied and frozen weights, experts that are chosen among equals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.trace import count_step
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.effects import bit_equal, effects
from tests.search.plan.subjects import Subject

WIDTH, ROWS = 16, 64


class Adapted(nn.Module):
    """A frozen linear layer beside a product of two thin ones that are trained, as LoRA has it."""

    def __init__(self, base: nn.Linear | Quantized) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))  # type: ignore[no-any-return]


class Quantized(nn.Module):
    """Weights in eight bits, with a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale)


class Experts(nn.Module):
    """Each row goes to two of four experts by a router whose scores are equal for many."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(mixer() for _ in range(4))
        with torch.no_grad():
            self.router.weight[1:].copy_(self.router.weight[:1].clone())
            self.router.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(len(x), 4).scatter(1, chosen, scores)
        return sum((weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)), x)


class Tied(nn.Module):
    """What reads the tokens writes them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.blocks = nn.Sequential(*(mixer() for _ in range(4)))
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x.abs().mul(9).long().sum(1) % ROWS)))  # type: ignore[no-any-return]


def mixer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def frozen_below() -> nn.Sequential:
    return nn.Sequential(*(mixer().requires_grad_(i > 1) for i in range(4)))


def frozen_above() -> nn.Sequential:
    return nn.Sequential(*(mixer().requires_grad_(i < 2) for i in range(4)))


def peft_model() -> nn.Module:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"], lora_dropout=0.1)
    return peft.get_peft_model(whole, adapters)


def stacked(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Sequential(make(), nn.Tanh(), mixer()) for _ in range(3)))


ZOO: dict[str, Callable[[], nn.Module]] = {
    "adapters": stacked(lambda: Adapted(nn.Linear(WIDTH, WIDTH))),
    "adapters on int8": stacked(lambda: Adapted(Quantized())),
    "experts": stacked(Experts),
    "tied": Tied,
    "frozen below": frozen_below,
    "frozen above": frozen_above,
    "peft": peft_model,
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = ZOO[name]().train()
    if name == "peft":
        tokens = torch.randint(50, (8, 32))
        return model, {"input_ids": tokens, "labels": tokens}
    return model, {("x" if name == "tied" else "input"): torch.randn(ROWS, WIDTH)}


def step_under(plan: Plan, model: nn.Module, inputs: dict[str, Any]) -> TrainingStep:
    planned = copy.deepcopy(model)
    apply_plan(planned, plan)
    return TrainingStep(model=planned, args=(), kwargs=inputs, settings=StepSettings())


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_plans_save_and_gradients_are_exact(name: str) -> None:
    model, inputs = made(name)
    subject = Subject(model, **inputs)
    everything = Plan(segments=tuple(SegmentPlan(path=path) for path in outermost(subject.usable)))
    plain, *planned = (
        step_under(plan, model, inputs) for plan in (Plan(), everything, subject.planner(level=2).least(2).plan)
    )
    trained = [f"gradient of {name}" for name, p in model.named_parameters() if p.requires_grad]
    expected = effects(plain)
    assert {*trained} <= {*expected}
    assert all(bit_equal(expected, effects(step)) for step in planned)
    assert count_step(planned[-1]).tensor_peak_bytes < count_step(plain).tensor_peak_bytes


def outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]

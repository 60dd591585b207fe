"""Steps that searches and the cost model are tried on, counted by dry runs."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.records import (
    ChunkRule,
    Plan,
    Refused,
    SearchOptions,
    SegmentPlan,
    StepPeaks,
    StepSettings,
    StepTrace,
)
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.planner import Planner
from memopt_cli.text.paths import is_within
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep
from sample_models import gpt, resnet
from tests.zoo.models import GIVEN, Parts

Chunking = Callable[[str], ChunkRule | Refused]


class Chain(nn.Module):
    """Blocks one after another, as most networks are."""

    def __init__(self, blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Steps(nn.Module):
    """One cell, called once for every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 64)
        self.readout = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 64)
        for step in x:
            state = self.cell(step, state)
        return self.readout(state)


class Subject:
    """A step on tensors without data, recorded and ready to be counted under plans."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        step = TrainingStep(model=model, args=args, kwargs=kwargs, settings=StepSettings(), loss=None, optimizer=None)
        self.real = step
        self.fake = FakeStep(step)
        self._counted: dict[Plan, StepPeaks] = {}
        self.trace: StepTrace = self.fake.record(batch=1)
        self.usable = [m.path for m in self.trace.modules if m.path and not m.refusal and m.saved_bytes]
        self.model = CostModel(self.trace)

    @functools.cached_property
    def original(self) -> StepPeaks:
        return self.count(Plan())

    def dry_run(self, plan: Plan) -> int:
        return self.count(plan).allocated_peak_bytes

    def count(self, plan: Plan) -> StepPeaks:
        """What was counted before is answered from memory."""
        if plan not in self._counted:
            with self._applied(plan):
                self._counted[plan] = self.fake.count()
        return self._counted[plan]

    def record(self, plan: Plan) -> StepTrace:
        with self._applied(plan):
            return self.fake.record(batch=1)

    def planner(self, chunking: Chunking | None = None, *, level: int = 4, **options: Any) -> Planner:
        """Without ``chunking`` no module may run in chunks."""
        return self.planner_asking(self.probes(chunking), level=level, **options)

    def planner_asking(self, probes: Probes, *, level: int = 4, **options: Any) -> Planner:
        return Planner(self.trace, self.original, probes, SearchOptions(level=level, **options))

    def probes(self, chunking: Chunking | None = None) -> Probes:
        return Probes(
            count=self.count,
            chunking=chunking or (lambda path: Refused(reason="no")),
            report=lambda line: None,
            trace=self.record,
        )

    @contextlib.contextmanager
    def _applied(self, plan: Plan) -> Iterator[None]:
        apply_plan(self.fake.step.model, plan)
        try:
            yield
        finally:
            remove_plan(self.fake.step.model)

    def error(self, plan: Plan) -> float:
        return self.model.predict(plan).allocated_peak_bytes / self.dry_run(plan) - 1


def segments(*paths: str, chunks: int = 1, axis: int = 0) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=p, chunks=chunks, axis=axis, inexact=chunks > 1) for p in paths))


def tiny_gpt() -> Subject:
    return Subject(gpt.GPT(vocabulary=400, width=64, heads=2, blocks=4), torch.randint(0, 400, (4, 64)))


def rule_along(axis: int) -> ChunkRule:
    return ChunkRule(axis=axis, seq_inputs=1, seq_outputs=1, inexact=True)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "chain": lambda: Subject(Chain(), torch.randn(4, 16, 24, 24)),
    "resnet": lambda: Subject(resnet.ResNet((2, 2, 2, 2)), torch.randn(2, 3, 64, 64)),
    "gpt": tiny_gpt,
    "steps": lambda: Subject(Steps(), torch.randn(12, 32, 32)),
}


class Carrying(Parts, v=None):
    """What it leaves from step to step is as large as a step of its output."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for frame in x:
            self.v = torch.tanh(frame if self.v is None else 0.5 * self.v + frame)
            outputs.append(self.v.sin().exp().sin())
        return torch.stack(outputs)


class Carriers(Parts, blocks=lambda: nn.Sequential(*(Carrying() for _ in range(4)))):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.v = None
        return self.blocks(x).mean()


def carriers() -> Subject:
    return Subject(Carriers(), torch.randn(10, 4, 256, requires_grad=True))


def carrying(chunks: int, recompute_states: bool) -> Plan:
    every = (SegmentPlan(path=f"blocks.{i}", chunks=chunks, recompute_states=recompute_states) for i in range(4))
    return Plan(segments=tuple(every))


class Leaking(nn.Module):
    """Elementwise all through, as a spiking neuron is: a state goes from step to step of the first axis."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        outputs = []
        for step in x:
            state = 0.5 * state + torch.sigmoid(step)
            outputs.append(torch.tanh(state))
        return torch.stack(outputs)


class Skip(Parts, branch=GIVEN, merge=GIVEN):
    """What goes in and what comes out of a branch, side by side, and as wide as before again."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(torch.cat([x, self.branch(x)], dim=1 if x.dim() == 4 else -1))


def drawn(seed: int) -> Subject:
    """A small step as chance has it: layers nested up to three deep, on images or on sequences."""
    chance = random.Random(seed)
    width, on_images = chance.choice([8, 16]), seed % 2 == 0

    def mix(inputs: int, outputs: int) -> nn.Module:
        return nn.Conv2d(inputs, outputs, 3, padding=1) if on_images else nn.Linear(inputs, outputs)

    def layer(depth: int) -> nn.Module:
        kind = chance.choice(["mix", "mix", "relu", "norm", "leak", *["wide", "nest", "skip"] * (depth < 2)])
        if kind == "nest":
            return nn.Sequential(*(layer(depth + 1) for _ in range(chance.randint(2, 3))))
        if kind == "skip":
            return Skip(layer(depth + 1), mix(2 * width, width))
        if kind == "wide":
            return nn.Sequential(mix(width, 4 * width), chance.choice([nn.ReLU(), nn.Tanh()]), mix(4 * width, width))
        plain = {"relu": nn.ReLU, "leak": Leaking}
        norm = nn.BatchNorm2d(width) if on_images else nn.BatchNorm1d(16)
        return plain[kind]() if kind in plain else mix(width, width) if kind == "mix" else norm

    model = nn.Sequential(*(layer(0) for _ in range(chance.randint(3, 5))))
    shape = (chance.choice([4, 6]), width, 12, 12) if on_images else (chance.choice([4, 12]), 16, width)
    return Subject(model, torch.randn(shape))


def without_norms(subject: Subject) -> Chunking:
    """Modules run in chunks of the batch but for those in which it is averaged over."""
    norms = [m.path for m in subject.trace.modules if m.class_name.startswith("BatchNorm")]

    def chunking(path: str) -> ChunkRule | Refused:
        if any(is_within(norm, path) for norm in norms):
            return Refused(reason="batch statistics")
        return ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)

    return chunking

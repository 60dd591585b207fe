"""Of many equal chunks a dry run runs few: its peaks must be those of a dry run that runs them all."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.records import Plan, SegmentPlan, StepPeaks, StepSettings
from memopt_cli.runtime import stand_ins
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep
from sample_models import gpt
from tests.rows import quick
from tests.zoo.models import Parts

ALL = 10**6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU())


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, padding=1))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Tanh())


class Residual(Parts, inner=mlp, drop=lambda: nn.Dropout(0.5)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(x))


class Shortened(Parts, linear=lambda: nn.Linear(16, 16)):
    """Its output is half as long as its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))[::2].contiguous()


class Passing(nn.Module):
    """What it returns is what it was given, in part."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :8], torch.sin(x)


class Passed(Parts, passing=Passing, linear=lambda: nn.Linear(24, 16)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat(self.passing(x), dim=1)))


class Summing(nn.Module):
    """The gradient of its input takes no memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


class Moving(Parts, calls=0, linear=lambda: nn.Linear(16, 16)):
    """Each call leaves it otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.cat([torch.tanh(self.linear(x))] * (1 + self.calls % 3), dim=1)[:, :16].exp()


class Hooked(nn.Module):
    """Its backward leaves the gradients of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = mlp(), list[Tensor]()
        self.inner.register_full_backward_hook(lambda _, inputs, outputs: self.seen.append(outputs[0].clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Handing(Parts, lstm=lambda: nn.LSTM(8, 8)):
    """A recurrent layer, whose states go from chunk to chunk."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output.sin()


class Both(nn.Module):
    """Takes two tensors that are cut, and one that is not."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return (x * y).sin() * scale


class Crossed(Parts, first=lambda: nn.Linear(16, 16), both=Both, scale=lambda: nn.Parameter(torch.ones(16))):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.both(y, y.exp(), self.scale).tanh()


class Attention(Parts, qkv=lambda: nn.Linear(16, 48), out=lambda: nn.Linear(16, 16)):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transposed(Parts, linear=lambda: nn.Linear(16, 16)):
    """Its output lies in memory with the first dimension last."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x).t().contiguous()).t()


def step_of(model: nn.Module, *args: Any, optimizer: str = "", precision: Any = "stored") -> FakeStep:
    make = optimizer_maker(parse_optimizer(optimizer))
    return FakeStep(
        TrainingStep(
            model=model,
            args=args,
            kwargs={},
            settings=StepSettings(precision=precision, optimizer=optimizer),
            loss=None,
            optimizer=make(model),
            make_optimizer=make,
        )
    )


@pytest.fixture
def all_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, no chunk is left out any longer."""
    return lambda: monkeypatch.setattr(stand_ins, "_MIN_REPLACED_CHUNKS", ALL)


@contextlib.contextmanager
def applied(step: FakeStep, plan: Plan) -> Iterator[None]:
    apply_plan(step.step.model, plan, step.step.optimizer)
    try:
        yield
    finally:
        remove_plan(step.step.model)


def told(step: FakeStep, plan: Plan) -> StepPeaks:
    """All that is counted but who holds what, which of a stand-in is its module, and how many operators ran."""
    with applied(step, plan):
        return replace(step.count(), holders=(), operators=0)


def runs(step: FakeStep, plan: Plan, path: str) -> int:
    """How often a module ran, to count a plan."""
    ran = 0

    def running(*_: object) -> None:
        nonlocal ran
        ran += 1

    with applied(step, plan):
        handle = step.step.model.get_submodule(path).register_forward_hook(running)
        step.count()
        handle.remove()
    return ran


def cut(*paths: str, chunks: int, **more: Any) -> Plan:
    return Plan(segments=tuple(SegmentPlan(path=path, chunks=chunks, **more) for path in paths))


@dataclass(frozen=True)
class Case:
    block: Callable[[], nn.Module]
    shape: tuple[int, ...]
    inner: str = ""
    """Path of the segment in a block."""
    rule: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, chunks: int, *blocks: int) -> Plan:
        return cut(*(f"{n}{self.inner}" for n in blocks), chunks=chunks, inexact=True, **self.rule)

    def step(self, **more: Any) -> FakeStep:
        return step_of(nn.Sequential(*(self.block() for _ in range(3))), torch.randn(self.shape), **more)


CASES = {
    "mlp": Case(mlp, (28, 16)),
    "residual": Case(Residual, (28, 16)),
    "images": Case(images, (28, 4, 6, 6)),
    "normalized": Case(normalized, (28, 4, 6, 6)),
    "attention": Case(Attention, (28, 5, 16)),
    "transposed": Case(Transposed, (28, 16)),
    "crossed": Case(Crossed, (28, 16), ".both", {"seq_inputs": 2}),
    "shortened": Case(Shortened, (56, 16)),
    "summing": Case(lambda: nn.Sequential(nn.Linear(1, 8), Summing()), (28, 1), ".1"),
    "passing": Case(Passed, (28, 16), ".passing", {"seq_outputs": 2}),
    "moving": Case(Moving, (28, 16)),
    "hooked": Case(Hooked, (28, 16)),
    "handing": Case(Handing, (28, 3, 8), ".lstm"),
    "packed": Case(mlp, (28, 16), rule={"compressor": "bit"}),
    "kept": Case(mlp, (28, 16), rule={"keep": ("aten::addmm",)}),
}

QUICK = {(name, 9) for name in CASES} | {("mlp", 27)}
"""The more chunks there are, the longer it takes to run them all."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), quick(itertools.product(CASES, (9, 27)), QUICK))
def test_peaks_are_those_of_all_chunks(name: str, chunks: int, all_run: Callable[[], None]) -> None:
    case = CASES[name]
    step, plan = case.step(), case.plan(chunks, 1, 2)
    found = told(step, plan)
    all_run()
    assert found == told(step, plan)


OTHER_STEPS = [
    ("adamw", "stored", "mlp"),
    ("", "bf16", "mlp"),
    ("adamw", "stored", "normalized"),
    ("", "bf16", "normalized"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "precision", "name"), quick(OTHER_STEPS, (OTHER_STEPS[0], OTHER_STEPS[3])))
def test_of_other_steps_too(name: str, optimizer: str, precision: Any, all_run: Callable[[], None]) -> None:
    case = CASES[name]
    step = case.step(optimizer=optimizer, precision=precision)
    plans = [case.plan(9, 0, 1, 2), *([replace(case.plan(9, 1), in_backward=True)] * bool(optimizer))]
    found = [told(step, plan) for plan in plans]
    all_run()
    assert found == [told(step, plan) for plan in plans]


NESTED = {
    "chunks in a segment": (SegmentPlan(path="1"), SegmentPlan(path="1.inner", chunks=9)),
    "a segment in chunks": (SegmentPlan(path="1", chunks=9), SegmentPlan(path="1.inner")),
    "chunks in chunks": (SegmentPlan(path="1", chunks=3), SegmentPlan(path="1.inner", chunks=20)),
    "chunks that keep, in a segment": (SegmentPlan(path="1"), SegmentPlan(path="1.inner", chunks=9, compressor="bit")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTED)
def test_of_segments_in_others(name: str, all_run: Callable[[], None]) -> None:
    step, plan = CASES["residual"].step(), Plan(segments=NESTED[name])
    found = told(step, plan)
    all_run()
    assert found == told(step, plan)


@pytest.mark.slow
def test_few_of_equal_chunks_run() -> None:
    """Three on either side of each stand-in, of the longer and of the shorter ones, in forward and in recomputation."""
    step = CASES["mlp"].step()
    assert runs(step, CASES["mlp"].plan(27, 1), "1.0") == 2 * (1 + 6)  # one of two samples, 26 of one
    assert runs(step, CASES["mlp"].plan(18, 1), "1.0") == 2 * (6 + 6)  # ten of two samples, eight of one


@pytest.mark.slow
def test_consecutive_layers_in_chunks(all_run: Callable[[], None]) -> None:
    """They run in a module that is made when the plan is applied."""
    step, plan = CASES["mlp"].step(), cut("0-1", chunks=28)
    assert runs(step, plan, "0.0") == 2 * 6
    found = told(step, plan)
    all_run()
    assert found == told(step, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kept", "packed", "normalized"])
def test_few_run_of_chunks_that_hold_more_than_their_outputs(name: str) -> None:
    step, first = CASES[name].step(), "1.0"
    assert runs(step, CASES[name].plan(28, 1), first) == 2 * 6


@pytest.mark.slow
def test_what_moves_on_runs_in_all_its_chunks() -> None:
    step = CASES["moving"].step()
    runs(step, CASES["moving"].plan(27, 1), "1.linear")
    assert runs(step, CASES["moving"].plan(27, 1), "1.linear") == 2 * 27, "what was learned of it is kept"


def test_steps_on_data_run_in_all_their_chunks() -> None:
    model = nn.Sequential(mlp(), mlp(), mlp())
    step = step_of(model, torch.randn(28, 16))
    apply_plan(model, CASES["mlp"].plan(27, 1))
    ran = 0

    def running(*_: object) -> None:
        nonlocal ran
        ran += 1

    model[1][0].register_forward_hook(running)
    model(torch.randn(28, 16)).sum().backward()
    assert ran == 2 * 27
    step.count()


@pytest.mark.slow
def test_recorded_steps_run_in_all_their_chunks() -> None:
    step, plan = CASES["mlp"].step(), CASES["mlp"].plan(27, 1)
    with applied(step, plan):
        trace = step.record(28)
    assert sum(call.path == "1.0" for call in trace.calls) == 27


@pytest.mark.slow
def test_language_models(all_run: Callable[[], None]) -> None:
    """With the head through its loss, which has no part in it, and with blocks cut along the batch."""
    model = gpt.GPT(vocabulary=50, width=16, heads=2, blocks=2)
    step = step_of(model, torch.randint(0, 50, (24, 8)))
    plan = cut("blocks.0", "blocks.1", chunks=12)
    found = told(step, plan)
    all_run()
    assert found == told(step, plan)

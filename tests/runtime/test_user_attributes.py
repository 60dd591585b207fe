"""Attributes by which a user's module describes itself: ``x_compressor``, ``__spatial_split__``, ``n_seq_inputs`` …"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.records import ChunkRule, Plan, SearchOptions, SegmentPlan, StepPeaks, StepSettings
from memopt_cli.runtime import BitSpikeCompressor, SegmentConfig, install_segment, refusal
from memopt_cli.runtime.compressor import OwnCompressor, declared_compressor
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.planner import Planner
from memopt_cli.search.plan.targets import match_targets
from memopt_cli.trace import count_step, record
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.chunking import capture_call, find_rule
from tests.zoo.models import GIVEN, Parts

WIDTH = 32


class Halves:
    """A compressor of the user's own: float32 in two bytes each, which only some values survive."""

    calls = 0

    def compress(self, x: Tensor) -> dict[str, Any]:
        Halves.calls += 1
        return {"half": x.to(torch.float16), "dtype": x.dtype}

    def decompress(self, packed: dict[str, Any]) -> Tensor:
        return packed["half"].to(packed["dtype"])


class Block(nn.Module):
    """A segment of two stages, over a sequence and a membrane."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        for name, value in said.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Splitting(Block):
    def __spatial_split__(self) -> tuple[nn.Module, ...]:
        return self.first, self.second


def spikes(*shape: int) -> Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(0)) < 0.3).float()


# ---------------------------------------------------------------------------------------------- x_compressor


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (BitSpikeCompressor(), "bit"),
        ("BitSpikeCompressor", "bit"),
        ("Uint8SpikeCompressor", "uint8"),
        ("BooleanSpikeCompressor", "boolean"),
        ("SparseSpikeCompressor", "sparse"),
        ("NullSpikeCompressor", "null"),
        (type("BitSpikeCompressor", (), {})(), "bit"),
        (Halves(), "own"),
        (None, None),
    ],
)
def test_the_compressor_that_a_module_asks_for(said: Any, name: str | None) -> None:
    assert declared_compressor(Block(x_compressor=said)) == name


@pytest.mark.parametrize("said", ["ZipCompressor", 3, object(), "bit "])
def test_a_compressor_that_nobody_knows_refuses_the_segment(said: Any) -> None:
    block = Block(x_compressor=said)
    assert "its x_compressor is" in refusal(block)
    assert "BitSpikeCompressor" in refusal(block)
    with pytest.raises(ValueError, match="its x_compressor is"):
        install_segment(block, SegmentConfig())
    with pytest.raises(UsageError, match=r"matches '0', which cannot be a segment: its x_compressor is"):
        match_targets(record(step_of(nn.Sequential(block)), 8, contents=True).modules, ["Block"])


def test_a_compressor_of_the_users_own_in_a_step(judge: Any) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), Block(x_compressor=Halves()))
    for x in (spikes(8, WIDTH), torch.randn(8, WIDTH)):
        judge(nn.Sequential(net[2]), {"0": SegmentConfig(compressor="own")}, x)  # exact for halves, raw for the rest
        judge(net, {"2": SegmentConfig(compressor="own")}, x)
    assert judge.recomputations == 8
    assert Halves.calls >= 8


def test_a_compressor_of_the_users_own_is_not_asked_about_nothing() -> None:
    block = Block(x_compressor=Halves())
    install_segment(block, SegmentConfig(compressor="own"))
    before = Halves.calls
    block(torch.empty(0, WIDTH)).sum().backward()
    assert Halves.calls == before


def test_what_a_compressor_of_the_users_own_would_round_is_kept_raw() -> None:
    compressor = OwnCompressor(Halves())
    exact, rounded = spikes(64), torch.full((64,), 0.1)
    assert not compressor.compress(exact).raw
    assert compressor.compress(exact).nbytes == 64 * 2
    assert compressor.compress(rounded).raw
    strided = spikes(4, 16).t()
    assert compressor.decompress(compressor.compress(strided)).stride() == strided.stride()
    for x in (exact, rounded, strided, torch.tensor([-0.0, 1.0])):
        assert torch.equal(compressor.decompress(compressor.compress(x)), x)


class Reshaping(Halves):
    def decompress(self, packed: dict[str, Any]) -> Tensor:
        return super().decompress(packed).flatten()


def test_a_compressor_that_loses_the_shape_is_not_used() -> None:
    assert OwnCompressor(Reshaping()).compress(spikes(4, 4)).raw


class Flat:
    """A compressor that is told the shape, and given whatever ``compress`` returned: SpikingJelly's signature."""

    def compress(self, s_seq: Tensor) -> Tensor:
        return s_seq.to(torch.float16).flatten()

    def decompress(self, s_seq: Tensor, shape: torch.Size) -> Tensor:
        return s_seq.to(torch.float32).reshape(shape)


class Named(Flat):
    """Its second parameter is its own affair."""

    def decompress(self, s_seq: Tensor, shape: tuple[int, ...] = (8, WIDTH)) -> Tensor:
        return super().decompress(s_seq, torch.Size(shape))


class Optional(Flat):
    def decompress(self, s_seq: Tensor, shape: torch.Size | None = None) -> Tensor:  # type: ignore[override]
        return s_seq.to(torch.float32).reshape(shape or ())


@pytest.mark.parametrize("said", [Flat(), Named(), Optional()], ids=["required", "with a default", "called shape"])
def test_a_compressor_that_wants_the_shape_is_given_it(said: Any, judge: Any) -> None:
    compressor, x = OwnCompressor(said), spikes(8, WIDTH)
    packed = compressor.compress(x)
    assert (packed.raw, packed.nbytes) == (False, x.nbytes // 2)
    assert torch.equal(compressor.decompress(packed), x)
    judge(nn.Sequential(Block(x_compressor=said)), {"0": SegmentConfig(compressor="own")}, x)


def test_a_compressor_of_the_users_own_is_copied_and_saved_with_the_module() -> None:
    block = Block(x_compressor=Halves())
    install_segment(block, SegmentConfig(compressor="own"))
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for other in (copy.deepcopy(block), torch.load(file, weights_only=False)):
        before = Halves.calls
        other(spikes(8, WIDTH)).sum().backward()
        assert Halves.calls == before + 1
        assert other.x_compressor is not block.x_compressor


# ---------------------------------------------------------------------------------------------- __spatial_split__


@pytest.mark.parametrize("kind", [list, tuple])
def test_stages(kind: Callable[..., Any], judge: Any) -> None:
    block = Splitting()
    type(block).__spatial_split__ = lambda self: kind((self.first, self.second))  # type: ignore[method-assign]
    judge(nn.Sequential(block), {"0": SegmentConfig(spatial_split=True, compressor="bit")}, spikes(8, WIDTH))
    assert judge.recomputations == 2 * 2


@pytest.mark.parametrize("stages", [[], None, [1], "ab", nn.ModuleList([nn.Tanh()])])
def test_stages_that_are_none(stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Splitting, "__spatial_split__", lambda _: stages)
    block = Splitting()
    install_segment(block, SegmentConfig(spatial_split=True))
    with pytest.raises(TypeError, match=r"__spatial_split__ of \w+ must return a list or tuple of modules"):
        block(spikes(8, WIDTH))


# ---------------------------------------------------------------------------------------------- the levels


class Membranes(nn.Module):
    """Takes a sequence and a membrane of its length, gives both: only its own word tells them apart."""

    n_seq_inputs = 1
    n_outputs = 1
    x_compressor = "BitSpikeCompressor"

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.rand(4 * WIDTH, WIDTH))
        self.narrow = nn.Parameter(torch.rand(WIDTH, 4 * WIDTH))

    def forward(self, x: Tensor, membrane: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in (x @ self.wide.t()).sigmoid() @ self.narrow.t():
            membrane = 0.5 * membrane + step
            outputs.append(membrane.sigmoid())
        return torch.stack(outputs), membrane


class Net(Parts, split=lambda: Splitting(x_compressor=Halves()), cell=Membranes):
    def forward(self, x: Tensor) -> Tensor:
        sequence, membrane = self.cell(self.split(x), x.new_zeros(x.shape[1:]))
        return sequence * membrane


def step_of(model: nn.Module, *shape: int) -> TrainingStep:
    return TrainingStep(model=model, args=(spikes(*(shape or (8, WIDTH))),), kwargs={}, settings=StepSettings())


def climbed(step: TrainingStep, level: int, *targets: str, tried: list[Plan] | None = None) -> Plan:
    """Return the plan of a level, with every probe run for real in this process."""

    def probe(plan: Plan) -> StepPeaks:
        if tried is not None:
            tried.append(plan)
        apply_plan(step.model, plan)
        try:
            return count_step(step)
        finally:
            remove_plan(step.model)

    def chunking(path: str) -> Any:
        return find_rule(*capture_call(step, path))

    options = SearchOptions(level=level, targets=targets)
    probes = Probes(count=probe, chunking=chunking, report=lambda _: None)
    return Planner(record(step, 8, contents=True), probe(Plan()), probes, options).least(level).plan


class Spikes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Firing(nn.Module):
    """A layer whose output survives every compressor, and is kept by nothing but its readers."""

    def forward(self, x: Tensor) -> Tensor:
        return Spikes.apply(x)


def before_others(*layers: nn.Module) -> nn.Sequential:
    """So that what these save is not needed yet when the peak is reached."""
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "compressor", "share"), [(Halves(), "own", 2), ("BitSpikeCompressor", "bit", 32), (None, "bit", 32)]
)
def test_level_1_packs_as_the_module_asks(said: Any, compressor: str, share: int) -> None:
    step = step_of(before_others(nn.Linear(WIDTH, WIDTH), Firing(), Block(x_compressor=said)), 512, WIDTH)
    assert climbed(step, 1, "Block").segments == (SegmentPlan(path="2", compressor=compressor),)
    traces = {m.path: m for m in record(step, 512, contents=True).modules}
    assert traces["2"].packed_input_bytes == traces["2"].input_bytes / share


def test_of_several_inputs_those_are_packed_that_survive_it() -> None:
    traces = {m.path: m for m in record(step_of(Net(), 8, 8, WIDTH), 8, contents=True).modules}
    assert traces["split"].packed_input_bytes == traces["split"].input_bytes / 2  # spikes survive as halves
    raw, membrane = 8 * 8 * WIDTH * 4, 8 * WIDTH // 8
    assert traces["cell"].packed_input_bytes == raw + membrane  # only the membrane starts out as zeros


def test_a_compressor_that_holds_nothing_is_not_tried_at_every_step() -> None:
    net = before_others(nn.Linear(WIDTH, WIDTH), Block(x_compressor="BitSpikeCompressor"))
    assert climbed(step_of(net, 512, WIDTH), 1, "Block").segments == (SegmentPlan(path="1"),)


class Stage(Parts, layers=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        first, _, second, _ = self.layers
        x = torch.tanh(nn.functional.linear(x, first.weight, first.bias))
        return nn.functional.linear(x, second.weight, second.bias).sigmoid()


class Stages(Splitting):
    """Calls none of its modules: only its own word says where it may be split."""

    def forward(self, x: Tensor) -> Tensor:
        return Stage(self.second).forward(Stage(self.first).forward(x))

    def __spatial_split__(self) -> tuple[nn.Module, ...]:
        return Stage(self.first), Stage(self.second)


def test_level_2_splits_as_the_module_says() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Firing(), Stages(), nn.Linear(WIDTH, WIDTH), Firing(), Stages())
    split = SegmentPlan(path="2", compressor="bit", spatial_split=True)
    for level in (1, 2):
        tried: list[Plan] = []
        climbed(step_of(net, 512, WIDTH), level, "Stages", tried=tried)
        assert any(plan.segments == (replace(split, spatial_split=False),) for plan in tried)
        assert any(plan.segments == (split,) for plan in tried) is (level == 2)


@pytest.mark.slow
def test_level_3_cuts_what_the_module_declares_a_sequence() -> None:
    net = Net()
    square = step_of(net, WIDTH, WIDTH, WIDTH)  # sequence, batch and membrane are all of one length
    assert find_rule(*capture_call(square, "cell")) == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
    plan = climbed(square, 3, "Splitting", "Membranes")
    cut = next(s for s in plan.segments if s.path == "cell")
    assert cut.chunks > 1
    assert (cut.axis, cut.seq_inputs, cut.seq_outputs) == (0, 1, 1)
    apply_plan(net, plan)
    net(spikes(WIDTH, WIDTH, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())

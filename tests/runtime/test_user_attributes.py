"""What a user's module says of itself: ``x_compressor``, ``__spatial_split__``, ``n_seq_inputs``, ``n_outputs``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.apply import apply_plan, remove_plan
from memopt_cli.chunking import capture_call, find_rule
from memopt_cli.errors import PlanError
from memopt_cli.plan.interface import Candidate, ModuleTree, Probes
from memopt_cli.plan.strategies import STRATEGIES
from memopt_cli.plan.strategies.segments import matching_targets
from memopt_cli.records import ChunkRule, Counted, Plan, SearchOptions, SegmentPlan, StepSettings
from memopt_cli.runtime import BitSpikeCompressor, SegmentConfig, install_segment, refusal, segment_of
from memopt_cli.runtime.compressor import OwnCompressor, declared_compressor
from memopt_cli.step import Step
from memopt_cli.trace import count, record

WIDTH = 32


class Halves:
    """A codec of the user's own: float32 in two bytes each, which only some values survive."""

    calls = 0

    def compress(self, x: Tensor) -> dict[str, Any]:
        Halves.calls += 1
        return {"half": x.to(torch.float16), "dtype": x.dtype}

    def decompress(self, packed: dict[str, Any]) -> Tensor:
        restored: Tensor = packed["half"].to(packed["dtype"])
        return restored


class Block(nn.Module):
    """A segment of two stages, over a sequence and a membrane."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        for name, value in said.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x))
        return output


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
def test_the_codec_that_a_module_asks_for(said: Any, name: str | None) -> None:
    assert declared_compressor(Block(x_compressor=said)) == name


@pytest.mark.parametrize("said", ["ZipCompressor", 3, object(), "bit "])
def test_a_codec_that_nobody_knows_refuses_the_segment(said: Any) -> None:
    block = Block(x_compressor=said)
    assert "its x_compressor is" in refusal(block)
    assert "BitSpikeCompressor" in refusal(block)
    with pytest.raises(ValueError, match="its x_compressor is"):
        install_segment(block, SegmentConfig())
    with pytest.raises(PlanError, match=r"matches '0', which cannot be a segment: its x_compressor is"):
        matching_targets(ModuleTree(record(step_of(nn.Sequential(block)), 8, contents=True)), ["Block"])


def test_a_codec_of_the_users_own_in_a_step(judge: Any) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), Block(x_compressor=Halves()))
    for x in (spikes(8, WIDTH), torch.randn(8, WIDTH)):
        judge(nn.Sequential(net[2]), {"0": SegmentConfig(compressor="own")}, x)  # exact for halves, raw for the rest
        judge(net, {"2": SegmentConfig(compressor="own")}, x)
    assert judge.recomputations == 8
    assert Halves.calls >= 8


def test_what_a_codec_of_the_users_own_would_round_is_kept_raw() -> None:
    codec = OwnCompressor(Halves())
    exact, rounded = spikes(64), torch.full((64,), 0.1)
    assert not codec.compress(exact).raw
    assert codec.compress(exact).nbytes == 64 * 2
    assert codec.compress(rounded).raw
    strided = spikes(4, 16).t()
    assert codec.decompress(codec.compress(strided)).stride() == strided.stride()
    for x in (exact, rounded, strided, torch.tensor([-0.0, 1.0])):
        assert torch.equal(codec.decompress(codec.compress(x)), x)


class Reshaping(Halves):
    def decompress(self, packed: dict[str, Any]) -> Tensor:
        return super().decompress(packed).flatten()


def test_a_codec_that_loses_the_shape_is_not_used() -> None:
    assert OwnCompressor(Reshaping()).compress(spikes(4, 4)).raw


def test_a_codec_of_the_users_own_is_copied_and_saved_with_the_module() -> None:
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
    with pytest.raises(TypeError, match="__spatial_split__ must return a list or tuple of modules"):
        block(spikes(8, WIDTH))


# ---------------------------------------------------------------------------------------------- the levels


class Membranes(nn.Module):
    """Takes a sequence and a membrane of its length, gives both: only its own word tells them apart."""

    n_seq_inputs = 1
    n_outputs = 1
    x_compressor = "BitSpikeCompressor"

    def __init__(self) -> None:
        super().__init__()
        self.drive = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Sigmoid(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, membrane: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in self.drive(x):
            membrane = 0.5 * membrane + step
            outputs.append(membrane.sigmoid())
        return torch.stack(outputs), membrane


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Splitting(x_compressor=Halves())
        self.cell = Membranes()

    def forward(self, x: Tensor) -> Tensor:
        sequence, membrane = self.cell(self.split(x), x.new_zeros(x.shape[1:]))
        return sequence * membrane


def step_of(model: nn.Module, *shape: int) -> Step:
    return Step(model=model, args=(spikes(*(shape or (8, WIDTH))),), kwargs={}, settings=StepSettings())


def climbed(step: Step, level: int, *targets: str) -> Plan:
    """The plan of a level, every probe run for real in this process."""

    def probe(plan: Plan) -> Counted:
        apply_plan(step.model, plan)
        try:
            return count(step)
        finally:
            remove_plan(step.model)

    def chunking(path: str) -> Any:
        return find_rule(*capture_call(step, path))

    tree = ModuleTree(record(step, 8, contents=True))
    options = SearchOptions(level=level, targets=targets)
    probes = Probes(count=probe, chunking=chunking, report=lambda _: None)
    best = Candidate(plan=Plan(level=0), counted=probe(Plan(level=0)))
    for strategy in STRATEGIES[:level]:
        best = strategy.improve(best, tree, options, probes).best
    return best.plan


def test_level_1_packs_as_the_module_asks() -> None:
    step = step_of(Net(), 8, 8, WIDTH)
    assert climbed(step, 1, "Splitting", "Membranes").segments == (
        SegmentPlan(path="split", compressor="own"),
        SegmentPlan(path="cell", compressor="bit"),
    )
    traces = {m.path: m for m in record(step, 8, contents=True).modules}
    assert traces["split"].packed_input_bytes == traces["split"].input_bytes / 2  # spikes survive as halves
    raw, membrane = 8 * 8 * WIDTH * 4, 8 * WIDTH // 8
    assert traces["cell"].packed_input_bytes == raw + membrane  # only the membrane starts out as zeros


def test_a_codec_that_holds_nothing_is_not_tried_at_every_step() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(x_compressor="BitSpikeCompressor"))
    assert climbed(step_of(net, 256, WIDTH), 1, "Block").segments == (SegmentPlan(path="1"),)


def test_level_2_splits_as_the_module_says() -> None:
    plan = climbed(step_of(nn.Sequential(nn.Identity(), Splitting(x_compressor=Halves())), 256, WIDTH), 2, "Splitting")
    assert plan.segments == (SegmentPlan(path="1", compressor="own", spatial_split=True),)


def test_level_3_cuts_what_the_module_declares_a_sequence() -> None:
    net = Net()
    square = step_of(net, 8, 8, WIDTH)  # sequence, batch and membrane are all of one length
    assert find_rule(*capture_call(square, "cell")) == ChunkRule(axis=0, seq_inputs=1, seq_outputs=1)
    plan = climbed(square, 3, "Splitting", "Membranes")
    cut = next(s for s in plan.segments if s.path == "cell")
    assert cut.chunks > 1
    assert (cut.axis, cut.seq_inputs, cut.seq_outputs) == (0, 1, 1)
    apply_plan(net, plan)
    assert segment_of(net.split) is not None
    net(spikes(8, 8, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())

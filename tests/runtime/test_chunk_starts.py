"""States between chunks that are made again in backward: the same as when they are held, in less memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import PlanError
from memopt_cli.records import Plan, SegmentPlan, StepSettings
from memopt_cli.runtime import SegmentConfig, chunk_starts
from memopt_cli.runtime.module_state import find_matrices
from memopt_cli.trace import count_step
from memopt_cli.trace.fake import FakeStep
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from sample_models.spiking_vgg import ConvBlock, MultiStep
from tests.zoo.models import GIVEN, Parts

LENGTH = 9


class Membrane(nn.Module):
    """A leaky sum over time in an attribute, made anew or modified in place, and the steps it has seen in a buffer."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("steps", torch.zeros(()))
        self.v: Tensor | None = None
        self.in_place = in_place
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """``[T, ...]``."""
        outputs = []
        for frame in x:
            if self.v is None:
                self.v = torch.zeros_like(frame)
            if self.in_place:
                with torch.no_grad():
                    self.v.mul_(0.7).add_(frame)
                v = self.v.clone()
            else:
                v = self.v = self.decay * self.v + frame
            self.steps += 1
            self.forwards += 1
            outputs.append(torch.tanh(v * self.decay + frame) * self.steps.clone())
        return torch.stack(outputs)


class Starting(Parts, block=GIVEN):
    """From rest every step."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, MultiStep):
                module.reset()
            if isinstance(module, Membrane):
                module.v = None
        return self.block(x)


class Asking(Membrane):
    """Its membrane decays otherwise while it learns."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._of_one(frame) for frame in x.split(1)])

    def _of_one(self, frame: Tensor) -> Tensor:
        y = super().forward(frame)
        assert self.v is not None
        self.v = self.v * (0.5 if torch.is_grad_enabled() and frame.requires_grad and self.v.requires_grad else 0.9)
        return y


class Silent(Membrane):
    """Its membrane stays the same tensor while nothing comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Silent, self).forward(f) if f.any() else self.v[None] * 1 for f in x.split(1)])


def frames() -> Tensor:
    return torch.randn(LENGTH, 2, 3).requires_grad_()


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 5, LENGTH])
@pytest.mark.parametrize("in_place", [False, True])
def test_it_is_the_same(exactly: Any, chunks: int, in_place: bool) -> None:
    config = SegmentConfig(chunks=chunks, recompute_states=True)
    exactly(Starting(nn.Sequential(Membrane(in_place=in_place), nn.Linear(3, 3))), {"block": config}, frames(), steps=3)
    assert exactly.recomputations == 3 * chunks


def test_in_the_mode_of_the_forward_it_repeats(exactly: Any) -> None:
    config = SegmentConfig(chunks=4, recompute_states=True)
    exactly(Starting(nn.Sequential(Asking(), nn.Linear(3, 3))), {"block": config}, frames())


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1, 5])
def test_a_state_that_has_not_moved_is_not_made_again(exactly: Any, first: int) -> None:
    """The membrane is the one from before up to frame ``first``, and moves, or is at rest again, later."""
    x = frames().detach()
    x[:first], x[first + 1 : first + 3] = 0, 0
    net = nn.Sequential(nn.Identity(), Silent())
    net[1].v = torch.ones(2, 3)
    exactly(net, {"1": SegmentConfig(chunks=LENGTH, recompute_states=True)}, x.requires_grad_(), steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["null", "bit"])
def test_through_batch_statistics(exactly: Any, compressor: str) -> None:
    config = SegmentConfig(chunks=4, batch_statistics=True, recompute_states=True, compressor=compressor)
    x = (torch.rand(LENGTH, 2, 2, 6, 6) < 0.4).to(torch.float64).requires_grad_()
    exactly(Starting(ConvBlock(2, 4, pool=False)), {"block": config}, x, steps=3)


def test_in_another_segment_that_one_makes_them_again(exactly: Any) -> None:
    configs = {"block": SegmentConfig(), "block.0": SegmentConfig(chunks=3, recompute_states=True)}
    exactly(Starting(nn.Sequential(Membrane(), nn.Linear(3, 3))), configs, frames(), steps=2)


def test_a_second_backward_makes_them_again() -> None:
    plain, optimized = (Starting(Membrane()) for _ in range(2))
    apply_plan(optimized, Plan(segments=(SegmentPlan(path="block", chunks=4, recompute_states=True),)))
    found = []
    for net in (plain, optimized):
        torch.manual_seed(0)
        x = frames()
        y = net(x).square().sum()
        found.append([torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4, 8, 16, 64])
def test_forwards_and_states_grow_with_the_logarithm(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Membrane()
    net = Starting(block)
    apply_plan(net, Plan(segments=(SegmentPlan(path="block", chunks=chunks, recompute_states=True),)))
    x = torch.randn(chunks, 2, 3, requires_grad=True)
    y = net(x)
    assert block.forwards == chunks
    made: list[int] = []
    monkeypatch.setattr(chunk_starts, "find_matrices", lambda module: made.append(1) or find_matrices(module))
    y.sum().backward()
    again = len(made)  # chunks that were run for their states alone
    assert chunks - 1 <= again <= chunks * math.log2(chunks) / 2 + 1


@pytest.mark.slow
def test_states_are_not_held_between_forward_and_backward() -> None:
    peaks = []
    for recompute_states in (False, True):
        step = TrainingStep(
            model=nn.Sequential(Membrane(), Membrane()),
            args=((torch.rand(16, 64, 64) < 0.5).float().requires_grad_(),),
            kwargs={},
            settings=StepSettings(),
        )
        fake = FakeStep(step)
        segment = SegmentPlan(path="0", chunks=16, recompute_states=recompute_states)
        apply_plan(fake.step.model, Plan(segments=(segment,)))
        peaks.append(fake.count().tensor_peak_bytes)
        apply_plan(step.model, Plan(segments=(segment,)))
        assert count_step(step).tensor_peak_bytes == peaks[-1]
    assert peaks[0] - peaks[1] > 8 * 64 * 64 * 4


class Noisy(Membrane):
    """Draws, and its state does not depend on it: then it would run whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape[1:])


def test_states_that_depend_on_chance_cannot_be_made_again() -> None:
    net = Starting(Noisy())
    apply_plan(net, Plan(segments=(SegmentPlan(path="block", chunks=3, recompute_states=True),)))
    with pytest.raises(RuntimeError, match="Set recompute_states to false in the plan"):
        net(frames())


def test_it_takes_chunks() -> None:
    with pytest.raises(PlanError, match="needs two chunks or more"):
        apply_plan(Starting(Membrane()), Plan(segments=(SegmentPlan(path="block", recompute_states=True),)))

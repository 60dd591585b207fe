"""The phases of a step: which there are, and what each needs, predicted and measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import StepError
from memopt_cli.measure.allocated import StepAllocations, measure_allocated
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.timed import measure
from memopt_cli.measure.jobs import MeasureJob, Subject
from memopt_cli.records import InputSpec, ModelSource, PhasePeak, Plan, StepSettings, TensorSpec
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.trace import FakeStep, count_step
from memopt_cli.trace.log import resident_bytes
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep, make_scaler
from tests.zoo.models import Parts


class Loss(Parts, layers=lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))):
    """Layers whose parameters outweigh what a step keeps for backward, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()  # type: ignore[no-any-return]


def step_of(optimizer: str, **settings: Any) -> TrainingStep:
    model, make = Loss(), optimizer_maker(parse_optimizer(optimizer))
    given = StepSettings(optimizer=optimizer, **settings)
    made = make(model)
    return TrainingStep(
        model=model,
        args=(torch.randn(16, 256),),
        kwargs={},
        settings=given,
        optimizer=made,
        make_optimizer=make,
        scaler=make_scaler(given),
    )


def warmed(step: TrainingStep) -> TrainingStep:
    """With the optimizer's state made."""
    step.take()
    step.reset_gradients()
    return step


def measured(step: TrainingStep) -> StepAllocations:
    return measure_allocated(step.take, "cpu", resident_bytes(step))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "none"},
        {"optimizer": "sgd"},
        {"optimizer": "adamw"},
        {"optimizer": "adamw:foreach"},
        {"optimizer": "adamw:fused", "clip_norm": 1.0},
        {"optimizer": "adamw", "clip_norm": 1.0, "micro_batches": 4},
        {"optimizer": "adamw", "precision": "bf16"},
        {"optimizer": "sgd", "precision": "fp16", "clip_norm": 0.5},
        {"optimizer": "adamw", "precision": "fp16"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_every_phase_is_predicted_within_a_hundredth(settings: dict[str, Any]) -> None:
    step = warmed(step_of(**settings))
    allocated = measured(step)
    dry = {peak.phase: peak.allocated_peak_bytes for peak in FakeStep(step).count(allocated.workspaces).phases}
    counted = {peak.phase: peak.allocated_peak_bytes for peak in count_step(step, allocated.workspaces).phases}
    assert list(dry) == list(counted) == list(allocated.phases)
    assert dry == pytest.approx(allocated.phases, rel=0.01)
    assert counted == pytest.approx(allocated.phases, rel=0.01)


def test_a_step_has_the_phases_that_it_takes() -> None:
    plain = step_of("none")
    assert [peak.phase for peak in count_step(plain).phases] == ["forward", "backward"]
    clipped = replace(step_of("sgd"), settings=StepSettings(clip_norm=1.0))
    assert [peak.phase for peak in count_step(clipped).phases] == ["forward", "backward", "clip", "update"]


def test_the_largest_phase_is_the_peak() -> None:
    counted = count_step(warmed(step_of("adamw:foreach")))
    assert max(peak.tensor_peak_bytes for peak in counted.phases) == counted.tensor_peak_bytes
    assert max(counted.phases, key=lambda peak: peak.tensor_peak_bytes).phase == "update"


def test_gradients_are_clipped() -> None:
    step = replace(step_of("none"), settings=StepSettings(clip_norm=1e-3))
    step.take()
    norms = [p.grad.norm() for p in step.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm() <= 1.001e-3


def test_float16_scales_the_loss_and_unscales_the_gradients() -> None:
    step = step_of("sgd", precision="fp16")
    step.take()
    scaled = [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
    step.model.zero_grad()
    plain = replace(step, scaler=None, settings=replace(step.settings, precision="stored"), optimizer=None)
    plain.take()
    for one, parameter in zip(scaled, step.model.parameters(), strict=True):
        assert (one - parameter.grad).norm() <= 0.05 * parameter.grad.norm()


def test_a_step_whose_gradients_are_not_finite_is_skipped() -> None:
    step = step_of("adamw", precision="fp16")
    broken = replace(step, args=(torch.full((16, 256), torch.inf),))
    broken.take()
    assert not step.optimizer.state
    step.model.zero_grad()
    step.take()
    assert step.optimizer.state


class Steep(Loss):
    """Its gradients overflow float16 at the scales that a scaler tries first."""

    factor = 1e3

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.layers(x).float().square().sum()  # type: ignore[no-any-return]


class Steepest(Steep):
    """Steep even at a scale of 1."""

    factor = 1e7


def bench(tmp_path: Path, model: nn.Module, **settings: Any) -> Bench:
    subject = Subject(
        source=ModelSource(location=str(tmp_path / "net.pt")),
        spec=InputSpec(tensors=(TensorSpec(shape=("B", 256)),), dims={"B": 16}, source="here"),
        settings=StepSettings(**settings),
    )
    return Bench(subject, build=lambda: model)


@pytest.mark.slow
def test_a_scaler_has_found_its_scale_when_a_step_is_measured(tmp_path: Path) -> None:
    at = bench(tmp_path, Steep(), optimizer="adamw", precision="fp16")
    with at.restored():
        found = measure(at, MeasureJob(plan=Plan())).measurement
    assert at.optimizer.state
    dry = {peak.phase: peak.tensor_peak_bytes for peak in FakeStep(at.step()).count().phases}
    assert dry == pytest.approx({peak.phase: peak.tensor_peak_bytes for peak in found.phases}, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Steep, Steepest])
def test_what_a_measured_step_leaves_is_finite(model: type[nn.Module], tmp_path: Path) -> None:
    at = bench(tmp_path, model(), optimizer="adamw", precision="fp16")
    with at.restored():
        left = measure(at, MeasureJob(plan=Plan())).fingerprint
    assert all(math.isfinite(number) for tensor in left.tensors for number in tensor.projections)


class Endless(Loss):
    """Finite, of a gradient that is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.layers[0].bias * 0).sqrt().sum()  # type: ignore[operator]


@pytest.mark.slow
def test_gradients_that_are_never_finite_are_named(tmp_path: Path) -> None:
    at = bench(tmp_path, Endless(), optimizer="adamw", precision="fp16")
    with at.restored(), pytest.raises(StepError, match="a GradScaler skips every update"):
        measure(at, MeasureJob(plan=Plan()))


def test_a_peak_is_raised_by_what_is_above_it() -> None:
    peak = PhasePeak(phase="forward", tensor_peak_bytes=5, allocated_peak_bytes=7)
    assert peak.raised(4, 6) is peak
    assert peak.raised(6, 6) == PhasePeak(phase="forward", tensor_peak_bytes=6, allocated_peak_bytes=7)


IN_BACKWARD = Plan(in_backward=True)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw:foreach", "adamw:fused"])
def test_an_optimizer_in_backward_is_predicted_within_a_hundredth(optimizer: str) -> None:
    step = warmed(step_of(optimizer))
    fake = FakeStep(step)
    for one in (step, fake.step):
        apply_plan(one.model, IN_BACKWARD, one.optimizer)
    allocated = measured(step)
    dry = {peak.phase: peak.allocated_peak_bytes for peak in fake.count(allocated.workspaces).phases}
    counted = {peak.phase: peak.allocated_peak_bytes for peak in count_step(step, allocated.workspaces).phases}
    assert list(dry) == list(counted) == list(allocated.phases) == ["forward", "backward"]
    assert dry == pytest.approx(allocated.phases, rel=0.01)
    assert counted == pytest.approx(allocated.phases, rel=0.01)


def test_a_gradient_in_backward_is_freed_before_the_next() -> None:
    step = step_of("sgd")
    step.model.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    step = warmed(replace(step, optimizer=step.make_optimizer(step.model)))
    parameters, layer = (sum(p.nbytes for p in m.parameters()) for m in (step.model, nn.Linear(256, 256)))
    plain = count_step(step).tensor_peak_bytes
    apply_plan(step.model, IN_BACKWARD, step.optimizer)
    assert count_step(step).tensor_peak_bytes <= plain - parameters + 2 * layer

"""Recomputations that compute something else, for a reason that nothing sees: they are told of."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import SegmentConfig, install_segment, is_recomputing, samples
from memopt_cli.runtime.samples import sampling_off
from memopt_cli.runtime.segment_run import SegmentRun
from tests.zoo.models import GIVEN, Parts
from tests.zoo.watching import silent

SYSTEM = random.SystemRandom()
TOLD = r"uses random numbers or state that memopt cannot restore \(a tensor of shape \(.*\) had other values when it "

UNSEEN: dict[str, Callable[[], Any]] = {
    "time": lambda: [time.perf_counter_ns() % 10_007 for _ in range(4)],
    "urandom": lambda: list(os.urandom(4)),
    "secrets": lambda: [secrets.randbelow(10**6) for _ in range(4)],
    "uuid": lambda: [uuid.uuid4().int % 10_007 for _ in range(4)],
    "of the system": lambda: [SYSTEM.random() for _ in range(4)],
    "seeded anew": lambda: np.random.default_rng().random(4),
    "by a name that is put together": lambda: torch.rand(4, generator=globals()["GENER" + "ATOR"]),
}
"""What nothing can put back, or find; four numbers, as one agrees within rounding once in three thousand times."""

GENERATOR = torch.Generator()


class Reading(Parts, linear=lambda: nn.Linear(4, 4), read=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * torch.as_tensor(self.read(), dtype=torch.float32)


def _planned(*layers: nn.Module, path: str = "1") -> nn.Module:
    plan = Plan(segments=(SegmentPlan(path=path),))
    return memopt_cli.apply_plan(nn.Sequential(nn.Linear(4, 4), *layers), plan)


def _step(model: nn.Module) -> Tensor:
    output: Tensor = model(torch.ones(2, 4))
    output.square().sum().backward()
    return output


@pytest.mark.parametrize("path", ["1", ""])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_sees_is_told_of(name: str, path: str) -> None:
    model = _planned(Reading(UNSEEN[name]), path=path)
    with pytest.warns(UserWarning, match=TOLD + ".*the gradients of this step are wrong.*runs without recomputation"):
        _step(model)
    ran: list[str] = []
    model[1].linear.register_forward_hook(lambda *_: ran.append("forward"))
    with silent():
        _step(model)
    assert ran == ["forward"]


@pytest.mark.parametrize("name", UNSEEN)
def test_an_error_instead_if_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "on_unsafe", "raise")
    with pytest.raises(RuntimeError, match=TOLD + ".*take this module out of the plan"):
        _step(_planned(Reading(UNSEEN[name])))


LATE = "MEMOPT_TEST_BEGINS_TO_DIFFER"


def late() -> float:
    """Differ from forward in a recomputation, once an environment variable says so."""
    return float(LATE in os.environ and is_recomputing())


def test_a_module_that_begins_to_differ_late_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _planned(Reading(late))
    _step(model)
    monkeypatch.setenv(LATE, "1")
    with pytest.warns(UserWarning, match=TOLD):
        _step(model)


class Growing(Parts, linear=lambda: nn.Linear(4, 4)):
    """Saves more when it begins to differ."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        if LATE in os.environ:
            y = y.sin().sin().sin() + late()
        return y.sin()


def test_a_module_that_begins_to_differ_in_what_it_did_not_save_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _planned(Growing())
    _step(model)
    monkeypatch.setenv(LATE, "1")
    with pytest.warns(UserWarning, match=TOLD):
        _step(model)


def test_where_looking_would_wait_for_a_device_that_is_told_at_the_sixteenth_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SegmentRun, "_last_activation", lambda run: None)
    model = _planned(Reading(late))
    with silent():
        _step(model)
        monkeypatch.setenv(LATE, "1")
        for _ in range(samples._TURN_FACTOR - 2):
            _step(model)
    with pytest.warns(UserWarning, match=TOLD):
        _step(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("relative", "is_told"), [(1e-6, False), (0.2, True)])
def test_rounding_is_no_difference(dtype: torch.dtype, relative: float, is_told: bool) -> None:
    model = Reading(lambda: 1 + relative * is_recomputing()).to(dtype)
    install_segment(model, SegmentConfig())
    expected = pytest.warns(UserWarning, match=TOLD) if is_told else contextlib.nullcontext()
    with expected:
        model(torch.ones(2, 4, dtype=dtype)).abs().sum().backward()


def test_where_all_is_compared_nothing_is_sampled(recwarn: pytest.WarningsRecorder) -> None:
    with sampling_off():
        _step(_planned(Reading(UNSEEN["urandom"])))
    assert not recwarn.list


@pytest.mark.parametrize(
    "layer",
    [
        nn.RReLU(),
        nn.RReLU().eval(),
        nn.Sequential(nn.RReLU().eval(), nn.Linear(4, 4)),
        nn.Dropout(),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.TransformerEncoderLayer(4, 2, 4), nn.Flatten()),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.filterwarnings("error")
def test_what_is_saved_before_it_is_written_is_no_difference(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer, nn.Tanh()), layer)
    for part in (model, model[1]):
        install_segment(part, SegmentConfig())
    _step(model)
    assert model[0].weight.grad is not None


def test_values_that_are_no_numbers_are_no_difference(recwarn: pytest.WarningsRecorder) -> None:
    _step(_planned(Reading(lambda: float("nan"))))
    _step(_planned(Reading(lambda: float("inf"))))
    assert not recwarn.list


class Noting(torch.autograd.Function):
    """Saves a factor for backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None


class Late(nn.Module):
    """Saves a tensor and fills it then, as RReLU does; in the first run it happens to hold the same before."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.full_like(x, 3.0 if is_recomputing() else 2.0)
        y: Tensor = Noting.apply(x, factor)
        factor.data.fill_(2.0)
        return y.sin()


def test_memory_that_held_the_same_before_it_was_written_is_no_difference(recwarn: pytest.WarningsRecorder) -> None:
    _step(_planned(Late()))
    assert not recwarn.list

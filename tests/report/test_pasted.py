"""Lines to paste run, and take the step that was measured."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import StepSettings
from memopt_cli.report.pasted import LOSS, loop_lines, training_settings

RATE = 0.5


def gradient_of(model: nn.Module, batches: list[tuple[Tensor, Tensor]], step: StepSettings) -> Tensor:
    """Of all parameters, by a step that is written out here."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(step.precision)
    model = copy.deepcopy(model)
    for inputs, targets in batches:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / len(batches)).backward()
    if step.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), step.clip_norm)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("steps", "precision", "clip_norm"), [*itertools.product([1, 4], ["stored", "bf16", "fp16"], [None, 0.01])]
)
def test_the_loop_takes_the_step_that_was_measured(steps: int, precision: Any, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    step = StepSettings(precision=precision, clip_norm=clip_norm, micro_batches=steps)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    loader = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(steps)]
    expected = gradient_of(model, loader, step)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    names = {"torch": torch, "model": model, "loader": loader, "loss_function": nn.functional.mse_loss}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=RATE)
    exec("\n".join(loop_lines(LOSS, steps, step, "cpu:0")), names)
    taken = (before - nn.utils.parameters_to_vector(model.parameters()).detach()) / RATE
    torch.testing.assert_close(taken, expected, rtol=1e-2 if precision == "fp16" else 1e-3, atol=1e-5)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (StepSettings(), ["accumulate_grad_batches=1)", "gradient_accumulation_steps=1)"]),
        (StepSettings(precision="bf16"), ['accumulate_grad_batches=1, precision="bf16-mixed")', "steps=1, bf16=True)"]),
        (StepSettings(precision="fp16"), ['precision="16-mixed")', "fp16=True)", "torch.autocast"]),
        (StepSettings(precision="fp64"), ['precision="64-true")', "model.double()"]),
        (StepSettings(precision="fp32"), ["model.float()"]),
        (StepSettings(clip_norm=1.0), ["gradient_clip_val=1)", "max_grad_norm=1)", "clip_grad_norm_"]),
    ],
)
def test_every_setting_of_the_step_is_pasted(step: StepSettings, said: list[str]) -> None:
    lines = "\n".join(training_settings(8, 1, step, "cuda:0"))
    assert [text for text in said if text not in lines] == []
    assert ("for " in lines) == (step.clip_norm is not None or step.precision in ("bf16", "fp16"))

"""Outputs without data have the strides of real ones, also where the gradient is a transposed tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.records import StepSettings
from memopt_cli.runtime.private_torch import FakeTensorMode
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace import FakeStep, count_step
from memopt_cli.trace.real_storages import corrected_output
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "last two transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}
BACKWARD: dict[str, tuple[Any, Callable[[Tensor, Tensor], Any]]] = {
    "layer norm": (
        aten.native_layer_norm_backward.default,
        lambda g, x: (g, x, [8], *torch.ones(2, 2, 4, 8, 1), torch.ones(8), None, [True, True, False]),
    ),
    "log_softmax": (aten._log_softmax_backward_data.default, lambda g, x: (g, x, 1, torch.float32)),
    "softmax": (aten._softmax_backward_data.default, lambda g, x: (g, x, 1, torch.float32)),
    "mse": (aten.mse_loss_backward.default, lambda g, x: (g, g, x, 0)),
    "elu": (aten.elu_backward.default, lambda g, x: (g, 1.0, 1.0, 1.0, False, x)),
    "hardswish": (aten.hardswish_backward.default, lambda g, x: (g, x)),
    "gelu": (aten.gelu_backward.default, lambda g, x: (g, x)),
    "silu": (aten.silu_backward.default, lambda g, x: (g, x)),
}


@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_have_the_strides_of_real_ones(name: str, layout: str, gradient: str) -> None:
    func, arguments = BACKWARD[name]

    def strides() -> list[tuple[int, ...]]:
        args = arguments(LAYOUTS[gradient](torch.ones(2, 4, 8, 8)), LAYOUTS[layout](torch.ones(2, 4, 8, 8)))
        return [tensor.stride() for tensor in tensors_of(corrected_output(func, args, func(*args)))]

    real = strides()
    with FakeTensorMode():
        assert strides() == real


class Pooled(
    Parts,
    first=lambda: nn.Linear(8, 8),
    norm=lambda: nn.LayerNorm(8),
    last=lambda: nn.Linear(64, 4),
):
    """Averages tokens behind a layer norm, as Swin does: the norm's gradient comes transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).transpose(1, 2).mul(2))  # type: ignore[no-any-return]


def test_a_norm_whose_gradient_is_transposed_has_the_peak_of_a_real_step() -> None:
    step = TrainingStep(model=Pooled(), args=(torch.randn(16, 64, 8),), kwargs={}, settings=StepSettings())
    assert FakeStep(step).count().tensor_peak_bytes == count_step(step).tensor_peak_bytes

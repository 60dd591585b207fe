"""A Sequential in a TorchScript file or an exported program is one again, so that its layers can be grouped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.loading import load
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.training.apply import apply_plan
from memopt_cli.verification.effects import bit_equal
from tests.zoo.watching import saved_bytes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Net(nn.Module):
    """A convolutional network with its layers in one Sequential, and one of the layers named from outside."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Sequential(nn.Conv2d(i, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for i in (3, 8, 8))
        self.features: Any = nn.Sequential(*(layer for layers in convolutions for layer in layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.features(x).mean((2, 3))) + self.features[0].weight.sum()
        return output


def _script(net: nn.Module, path: Path) -> None:
    torch.jit.save(torch.jit.script(net), str(path))


def _trace(net: nn.Module, path: Path) -> None:
    torch.jit.save(torch.jit.trace(net, (torch.randn(2, 3, 12, 12),)), str(path))


def _export(net: nn.Module, path: Path) -> None:
    torch.export.save(torch.export.export(net, (torch.randn(2, 3, 12, 12),)), path)


@pytest.mark.parametrize("save", [_script, _trace, _export])
def test_a_run_of_layers_can_be_a_segment(save: Callable[[nn.Module, Path], None], tmp_path: Path) -> None:
    save(Net(), tmp_path / "net.pt2")
    model = load(tmp_path / "net.pt2")
    paths = ("features.0-2", "features.3-5", "features.6-8")
    planned = apply_plan(copy.deepcopy(model), Plan(segments=tuple(SegmentPlan(path=path) for path in paths)))
    x = torch.randn(2, 3, 12, 12)
    assert bit_equal({"output": model(x)}, {"output": planned(x)})
    assert saved_bytes(lambda: planned(x)) < saved_bytes(lambda: model(x))
    assert list(model.state_dict()) == list(planned.state_dict()) == list(Net().state_dict())


class ReadsMode(Net):
    """A network that reads an attribute of its Sequential."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.features(x)
        return y + 1 if self.features.training else y


class Twice(nn.Sequential):
    """Another class of that name, which calls each layer twice."""

    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = module(module(input))
        return input


Twice.__name__ = Twice.__qualname__ = "Sequential"


def test_a_sequential_that_is_more_than_one_stays_lifted(tmp_path: Path) -> None:
    for net, x in ((ReadsMode(), torch.randn(2, 3, 12, 12)), (Twice(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))):
        _script(net, tmp_path / "net.pt")
        model = load(tmp_path / "net.pt")
        assert bit_equal({"output": net(x)}, {"output": copy.deepcopy(model)(x)})

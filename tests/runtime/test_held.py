"""A segment's forward holds what it saves until it ends, but for what it has dropped by then."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn

from memopt_cli.records import StepSettings
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.trace import count_step
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts


class Dropping(Parts, linear=lambda: nn.Linear(64, 64), kept=list):
    """Most of its graphs are of no use: only their values are, and nobody keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            inner = self.linear(x).exp()
            saved = ref(inner.untyped_storage())
            x = x + inner.square().detach()
            del inner
            self.kept.append(saved() is not None)
        return self.linear(x).tanh()


def test_what_a_node_that_ends_in_forward_saved_goes_with_it() -> None:
    model = Dropping()
    install_segment(model, SegmentConfig())
    model(torch.randn(3, 64)).sum().backward()
    assert not any(model.kept)


def test_the_first_forward_takes_no_more_than_without_a_segment() -> None:
    model = nn.Sequential(Dropping())
    plain = forward_peak(model)
    install_segment(model[0], SegmentConfig())
    assert forward_peak(model) <= plain


def forward_peak(model: nn.Module) -> int:
    step = TrainingStep(model=model, args=(torch.randn(64, 64),), kwargs={}, settings=StepSettings())
    return next(phase.tensor_peak_bytes for phase in count_step(step).phases if phase.phase == "forward")

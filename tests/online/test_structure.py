from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online import D_RTRL, Batching, init_all_states, traced, untraced
from memopt_cli.online.finding import find_structure
from memopt_cli.online.neurons import LIF
from memopt_cli.online.structure import Structure
from tests.online.networks import BATCH, CLASSES, HIDDEN, INPUTS, Adaptive, Layered, Recurrent, lif_net


def structure(net: nn.Module, x: Tensor | None = None) -> Structure:
    x = torch.rand(BATCH, INPUTS) if x is None else x
    init_all_states(net, len(x))
    return find_structure(net, [x], batched=True)


def reached(found: Structure) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    return {use.path: [(g.cell, g.names) for g in groups] for use, groups in found.groups.items()}


def test_a_weight_reaches_the_states_of_its_cell() -> None:
    assert reached(structure(lif_net())) == {"syn": [("cell", ("v",))]}
    net = Recurrent(Adaptive(HIDDEN), Adaptive.get_spike)
    assert reached(structure(net)) == {"syn": [("cell", ("v", "a"))]}


def test_paths_end_at_the_next_state_and_at_the_next_traced_weight() -> None:
    found = structure(Layered())
    assert reached(found) == {
        "below": [("first", ("v",))],
        "between": [("second", ("v",))],
        "within": [("second", ("v",))],
    }
    stacked = nn.Sequential(
        traced(nn.Linear(INPUTS, HIDDEN)), nn.Tanh(), traced(nn.Linear(HIDDEN, HIDDEN)), LIF(HIDDEN)
    )
    found = structure(stacked)
    assert reached(found) == {"2": [("3", ("v",))]}
    assert "another traced weight" in found.untraced_reasons["0"]


def test_only_a_tagged_weight_carries_a_trace() -> None:
    net = lif_net()
    untraced(net.syn)
    assert reached(structure(net)) == {}
    traced(net)  # the readout too
    assert reached(structure(net)) == {"syn": [("cell", ("v",))], "out.linear": [("out", ("r",))]}


def test_a_traced_weight_without_a_state_after_it_has_the_gradient_of_its_step() -> None:
    net = nn.Sequential(lif_net(), traced(nn.Linear(CLASSES, 2)))
    init_all_states(net, BATCH)
    algorithm = D_RTRL(net, mode=Batching())
    algorithm.compile_graph(torch.rand(BATCH, INPUTS))
    assert list(algorithm.untraced) == ["1"]
    algorithm(torch.rand(BATCH, INPUTS)).sum().backward()
    assert net[1].weight.grad.norm() > 0


def test_inputs_made_of_the_last_steps_states_alone_are_constants() -> None:
    assert {use.path for use in structure(lif_net()).constant_uses} == {"syn"}
    assert {use.path for use in structure(Layered()).constant_uses} == {"below", "within"}


def test_what_mixes_neurons_is_refused() -> None:
    class Normalizing(LIF):
        def forward(self, y: Tensor) -> Tensor:
            return super().forward(y - y.mean(dim=-1, keepdim=True))

    class Inhibiting(LIF):
        def forward(self, y: Tensor) -> Tensor:
            return super().forward(y - self.v.sum(dim=-1, keepdim=True))

    for cell in (Normalizing(HIDDEN), Inhibiting(HIDDEN)):
        with pytest.raises(MemoptError, match="neuron by neuron"):
            structure(Recurrent(cell, LIF.get_spike))
    pooled = nn.Sequential(traced(nn.Conv1d(1, 2, 3)), nn.AvgPool1d(2), LIF((2, 2)))
    with pytest.raises(MemoptError, match=r"0 .* neuron by neuron"):
        structure(pooled, torch.rand(BATCH, 1, 6))
    untraced(pooled[0])
    assert reached(structure(pooled, torch.rand(BATCH, 1, 6))) == {}

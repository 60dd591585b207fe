"""Gradients of online learning against back-propagation through time on the cut graph, in float64: BrainScale's own
test, over compositions of cells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.errors import MemoptError
from memopt_cli.online import (
    D_RTRL,
    ES_D_RTRL,
    LIF,
    Batching,
    OnlineAlgorithm,
    Vmap,
    init_all_states,
    traced,
    untraced,
    vmap_new_states,
)
from tests.online.compositions import (
    COMPOSITIONS,
    KeptInAnAttribute,
    Network,
    Scaled,
    Synapse,
    SynapseAndNeuron,
    cut_graph_gradients,
    weight,
)
from tests.online.networks import BATCH, CLASSES, DECAY, HIDDEN, INPUTS, learn, relative, sequence

EXACT = 1e-12


@pytest.fixture(params=COMPOSITIONS)
def net(request: pytest.FixtureRequest) -> Network:
    torch.manual_seed(1)
    return COMPOSITIONS[request.param]().double()


def online(net: nn.Module, **settings: object) -> OnlineAlgorithm:
    init_all_states(net, BATCH)
    algorithm = D_RTRL(net, mode=Batching(), **settings)
    algorithm.compile_graph(sequence()[0][0])
    return algorithm


def test_d_rtrl_is_back_propagation_through_time_on_the_cut_graph(net: Network) -> None:
    inputs, labels = sequence()
    found = learn(online(net), inputs, labels)
    assert relative(found, cut_graph_gradients(net, inputs, labels)) <= EXACT


@pytest.mark.parametrize("window", [2, 4, 8])
def test_windows_differentiate_every_path_within(net: Network, window: int) -> None:
    inputs, labels = sequence()
    found = learn(online(net, vjp_method="multi-step"), inputs.split(window), labels)
    assert relative(found, cut_graph_gradients(net, inputs, labels, window)) <= EXACT


def test_automatic_batching_gives_the_same(net: Network) -> None:
    inputs, labels = sequence()
    expected, algorithm = learn(online(net), inputs, labels), D_RTRL(net)

    @vmap_new_states(axis_size=BATCH)
    def init() -> None:
        init_all_states(net)
        algorithm.compile_graph(inputs[0, 0])

    init()
    if isinstance(net, KeptInAnAttribute):
        with pytest.raises(MemoptError, match=r"model\.neu\.last was written"):
            Vmap(algorithm)(inputs[0])
    else:
        assert relative(learn(Vmap(algorithm), inputs, labels), expected) <= EXACT


def test_the_first_gradient_of_es_d_rtrl_is_that_of_d_rtrl(net: Network) -> None:
    inputs, labels = sequence()
    expected = learn(online(net), inputs[:1], labels)
    algorithm = ES_D_RTRL(net, 0.9, mode=Batching())
    init_all_states(net, BATCH)
    algorithm.compile_graph(inputs[0])
    torch.testing.assert_close(learn(algorithm, inputs[:1], labels), expected, rtol=0, atol=EXACT)


def test_es_d_rtrl_filters_a_synapse_and_its_neuron_together() -> None:
    net = SynapseAndNeuron().double()
    (inputs, labels), decay = sequence(), 0.9
    w, b, out = net.w.weight.detach(), net.w.bias.detach(), net.out
    g, v, of_g, of_v = (inputs.new_zeros(BATCH, HIDDEN) for _ in range(4))
    e_x = inputs.new_zeros(BATCH, INPUTS)
    expected = torch.zeros_like(w)
    for t, x in enumerate(inputs):
        leak = DECAY * (1 - (0.3 * (1 - (v - 1).abs())).clamp_min(0))
        g, v = 0.7 * g + x @ w.t() + b, DECAY * (v - (v >= 1).double())
        v = v + g
        scores = (v >= 1).double() @ out.weight.detach().t() + out.bias.detach()
        of_scores = (scores.softmax(1) - F.one_hot(labels, CLASSES)) / BATCH
        learning = (of_scores @ out.weight.detach()) * (0.3 * (1 - (v - 1).abs())).clamp_min(0)
        e_x = decay * e_x + x
        of_g, of_v = decay * 0.7 * of_g + (1 - decay), decay * (0.7 * of_g + leak * of_v) + (1 - decay)
        expected += (learning * of_v / (1 - decay ** (t + 1))).t() @ e_x
    init_all_states(net, BATCH)
    algorithm = ES_D_RTRL(net, decay, mode=Batching())
    algorithm.compile_graph(inputs[0])
    found = learn(algorithm, inputs, labels)["w.weight"]
    assert relative({"w": found}, {"w": expected}) <= EXACT


# ------------------------------------------------------------------ what traces cannot follow


class Normalized(Network):
    """Between synapse and neuron stands what mixes neurons."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.syn, self.between, self.neu = Synapse(), between, LIF(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.between(self.syn(self.w(x)))))


def test_what_mixes_neurons_between_two_cells_is_refused_and_a_weight_there_is_not() -> None:
    norm = Normalized(nn.LayerNorm(HIDDEN)).double()
    with pytest.raises(
        MemoptError, match=r"syn\.g \(7,\) does not reach neu\.v, \(7,\) per sample, neuron by"
    ) as raised:
        online(norm)
    assert "put a linear layer in between" in str(raised.value.hint)
    mended = Normalized(nn.Sequential(nn.LayerNorm(HIDDEN), weight(HIDDEN, HIDDEN))).double()
    inputs, labels = sequence()
    assert relative(learn(online(mended), inputs, labels), cut_graph_gradients(mended, inputs, labels)) <= EXACT
    untraced(norm.w)
    assert online(norm).untraced == {}


class Skipping(Network):
    """Spikes reach the next neurons both as they are and through a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.between = LIF(HIDDEN), LIF(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.first(self.w(x))
        return self.out(self.second(spikes + self.between(spikes)))


def test_a_path_beside_a_weight_wants_the_weight_to_be_tagged() -> None:
    net = Skipping().double()
    with pytest.raises(
        MemoptError, match=r"what first returns reaches second\.v through a weight without a tag"
    ) as raised:
        online(net)
    assert "tag that weight with traced()" in str(raised.value.hint)
    traced(net.between)
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT


class Inhibited(Network):
    """What the last step left comes back as it is and, beside this step's spikes, through a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.joint = LIF(HIDDEN), LIF(HIDDEN), weight(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.below(self.w(x) - 0.3 * torch.relu(self.above.v))
        return self.out(self.above(self.joint(torch.cat([spikes, self.past(self.above.v)], -1))))


def test_a_state_that_enters_a_weight_and_another_cell_wants_to_be_detached_before_the_weight() -> None:
    net = Inhibited().double()
    with pytest.raises(MemoptError, match=r"above\.v, as the last step left it, enters a weight") as raised:
        online(net)
    assert "detach() it there" in str(raised.value.hint)
    net.past = Tensor.detach
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT


class ScaledAndSeen(Network):
    """A cell with a parameter of its own reads a weight's output, and so does the network's output."""

    def __init__(self) -> None:
        super().__init__()
        self.neu = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        return self.out(self.neu(y)) + torch.tanh(y)[..., :CLASSES]


def test_a_factored_trace_refuses_what_only_a_full_one_can_tell_apart() -> None:
    net = ScaledAndSeen().double()
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT
    with pytest.raises(MemoptError, match="the output of w is read by a cell with other parameters") as raised:
        ES_D_RTRL(net, 0.9, mode=Batching()).compile_graph(inputs[0])
    assert "use D_RTRL" in str(raised.value.hint)

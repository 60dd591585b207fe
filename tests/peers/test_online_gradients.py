"""Gradients of online learning against back-propagation through time on the cut graph, in float64: BrainScale's own
test, over compositions of cells."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from memopt_cli.errors import MemoptError
from memopt_cli.online import (
    D_RTRL,
    ES_D_RTRL,
    LIF,
    ElementWise,
    OnlineAlgorithm,
    OverTime,
    Vmap,
    declare_state,
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
    weight,
)
from tests.online.networks import (
    BATCH,
    CLASSES,
    DECAY,
    HIDDEN,
    INPUTS,
    automatic,
    cut_graph_gradients,
    learn,
    manual,
    relative,
    sequence,
    through_time,
    uncut,
)
from tests.zoo.models import GIVEN

EXACT = 1e-12


@pytest.fixture(params=COMPOSITIONS)
def net(request: pytest.FixtureRequest) -> Network:
    torch.manual_seed(1)
    return COMPOSITIONS[request.param]().double()


def online(net: nn.Module, **settings: object) -> OnlineAlgorithm:
    return manual(functools.partial(D_RTRL, **settings), net, sequence()[0][0])


def es(net: nn.Module, x: Tensor) -> OnlineAlgorithm:
    return manual(lambda model, **mode: ES_D_RTRL(model, 0.9, **mode), net, x)


@pytest.mark.slow
def test_d_rtrl_is_back_propagation_through_time_on_the_cut_graph(net: Network) -> None:
    inputs, labels = sequence()
    found = learn(online(net), inputs, labels)
    assert relative(found, cut_graph_gradients(net, inputs, labels)) <= EXACT


@pytest.mark.parametrize("steps", [1, 2])
def test_short_sequences_are_exact_too(net: Network, steps: int) -> None:
    (inputs, labels) = sequence()
    found, expected = learn(online(net), inputs[:steps], labels), cut_graph_gradients(net, inputs[:steps], labels)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():  # some are zero, and those of one step are not rounded alike
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=EXACT * max(1.0, float(gradient.norm())))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3, 8])
def test_windows_differentiate_every_path_within(net: Network, window: int) -> None:
    inputs, labels = sequence()
    found = learn(online(net, vjp_method="multi-step"), inputs.split(window), labels)
    assert relative(found, cut_graph_gradients(net, inputs, labels, window, within=uncut)) <= EXACT


@pytest.mark.slow
def test_automatic_batching_gives_the_same(net: Network) -> None:
    inputs, labels = sequence()
    expected, algorithm = learn(online(net), inputs, labels), automatic(D_RTRL, net, inputs[0])
    if isinstance(net, KeptInAnAttribute):
        with pytest.raises(MemoptError, match=r"model\.neu\.last was written"):
            algorithm(inputs[0])
    else:
        assert relative(learn(algorithm, inputs, labels), expected) <= EXACT


@pytest.mark.slow
def test_the_first_gradient_of_es_d_rtrl_is_that_of_d_rtrl(net: Network) -> None:
    inputs, labels = sequence()
    expected = learn(online(net), inputs[:1], labels)
    torch.testing.assert_close(learn(es(net, inputs[0]), inputs[:1], labels), expected, rtol=0, atol=EXACT)


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
    found = learn(es(net, inputs[0]), inputs, labels)["w.weight"]
    assert relative({"w": found}, {"w": expected}) <= EXACT


class Normalized(Network, syn=Synapse, between=GIVEN, neu=lambda: LIF(HIDDEN)):
    """Between synapse and neuron stands what mixes neurons."""

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


class Skipping(
    Network, first=lambda: LIF(HIDDEN), second=lambda: LIF(HIDDEN), between=lambda: nn.Linear(HIDDEN, HIDDEN)
):
    """Spikes reach the next neurons both as they are and through a weight."""

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.first(self.w(x))
        return self.out(self.second(spikes + self.between(spikes)))


def test_a_path_beside_a_weight_wants_the_weight_to_be_tagged() -> None:
    net = Skipping().double()
    with pytest.raises(
        MemoptError, match=r"a tensor that first returns reaches second\.v through a weight without a tag"
    ) as raised:
        online(net)
    assert "Tag that weight with traced()" in str(raised.value.hint)
    traced(net.between)
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT


class Inhibited(
    Network, below=lambda: LIF(HIDDEN), above=lambda: LIF(HIDDEN), joint=lambda: weight(2 * HIDDEN, HIDDEN)
):
    """What the last step left comes back as it is and, beside this step's spikes, through a weight."""

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.below(self.w(x) - 0.3 * torch.relu(self.above.v))
        return self.out(self.above(self.joint(torch.cat([spikes, self.past(self.above.v)], -1))))


def test_a_state_that_enters_a_weight_and_another_cell_wants_to_be_detached_before_the_weight() -> None:
    net = Inhibited().double()
    with pytest.raises(MemoptError, match=r"above\.v of the last step enters a weight") as raised:
        online(net)
    assert "Call detach() on it where" in str(raised.value.hint)
    net.past = Tensor.detach
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT


class ScaledAndSeen(Network, neu=Scaled):
    """A cell with a parameter of its own reads a weight's output, and so does the network's output."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        return self.out(self.neu(y)) + torch.tanh(y)[..., :CLASSES]


def test_a_factored_trace_refuses_what_only_a_full_one_can_tell_apart() -> None:
    net = ScaledAndSeen().double()
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT
    with pytest.raises(MemoptError, match="the output of w is read by a cell that has parameters") as raised:
        es(net, inputs[0])
    assert "Use D_RTRL" in str(raised.value.hint)


class Cell(nn.Module):
    """A cell whose step is given."""

    g: Tensor

    def __init__(self, step: Callable[[Cell, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.slow: Tensor | float = 0.0
        self.leak = ElementWise(torch.linspace(0.5, 0.9, HIDDEN))
        declare_state(self, "g", HIDDEN)

    def forward(self, y: Tensor) -> Tensor:
        return self.step(self, y)


def of_an_attribute(cell: Cell, y: Tensor) -> Tensor:
    cell.g = 0.7 * cell.g + y
    cell.slow = 0.9 * cell.slow + cell.g
    return cell.g + cell.slow


def by_its_attribute(cell: Cell, y: Tensor) -> Tensor:
    cell.g = cell.leak.weight * cell.g + y
    return cell.g


def complex_decay(cell: Cell, y: Tensor) -> Tensor:
    cell.g = (0.6 + 0.5j) * cell.g + y
    return cell.g.real


def mixed_where_large(cell: Cell, y: Tensor) -> Tensor:
    cell.g = 0.9 * cell.g + y + torch.relu(cell.g.roll(1, -1) - 5)
    return cell.g


class OfCell(Network):
    def __init__(self, step: Callable[[Cell, Tensor], Tensor]) -> None:
        super().__init__()
        self.cell = Cell(step)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.cell(self.w(x))))


class Sharing(Network):
    """A module without a tag shares a traced weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.between = LIF(HIDDEN), LIF(HIDDEN), nn.Linear(INPUTS, HIDDEN)
        self.between.weight = self.w.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(self.w(x)) + self.second(self.between(x)))


class WrittenLater(Network, syn=Synapse):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.syn(self.w(x))))
        self.syn.g = self.syn.g * (x[..., :1] > 1)
        return scores


class Reparametrized(Network):
    def __init__(self, change: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.syn = Synapse()
        change(self.w)
        traced(self.w)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.syn(self.w(x))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OfCell(of_an_attribute), r"cell\.slow is carried from one time step to the next, and is not a"),
        (lambda: OfCell(by_its_attribute), r"the weight of cell\.leak reaches cell\.g without a call of cell\.leak"),
        (lambda: OfCell(complex_decay), r"cell\.g is complex"),
        (lambda: OfCell(mixed_where_large), r"cell\.g \(7,\) does not reach cell\.g, \(7,\) per sample, neuron by"),
        (Sharing, r"the weight of w reaches second\.v without a call of w"),
        (WrittenLater, r"syn\.g is written after its cell has been called"),
        (lambda: Reparametrized(spectral_norm), "the weight of w is computed again at each read, and differs"),
        (lambda: Reparametrized(nn.utils.weight_norm), "a hook computes the weight of w again before each call"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_what_no_trace_tells_of_is_refused_by_name(make: Callable[[], Network], message: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(MemoptError, match=message) as raised:
        online(make().double())
    assert raised.value.hint


def test_a_weight_that_is_computed_from_parameters_is_learnt_exactly() -> None:
    net = Reparametrized(weight_norm).double()
    inputs, labels = sequence()
    found = learn(online(net), inputs, labels)
    assert relative(found, through_time(net, inputs, labels)) <= EXACT  # nothing recurs: nothing is cut


class Sometimes(Network):
    """Some steps do what the first one did not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.step = _SOMETIMES[what]
        self.syn, self.above = Synapse(), Synapse(0.9)
        self.other, self.plain = weight(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.step(self, x, float(x[0, 0] < 1))))


_SOMETIMES: dict[str, Callable[[Sometimes, Tensor, float], Tensor]] = {
    "another weight": lambda net, x, more: net.syn(net.w(x) + (net.other(x) if more else 0)),
    "a weight again": lambda net, x, more: net.syn(net.w(x) + (net.w(x.flip(-1)) if more else 0)),
    "another cell": lambda net, x, more: net.syn(net.w(x)) + (net.above(net.other(x)) if more else 0),
    "a cell reads what another leaves": lambda net, x, more: _beside_above(net, net.syn(net.w(x)), more),
    "a cell reads what another held": lambda net, x, more: _above(net, net.syn.g if more else None, x),
    "a cell reads its input past a weight": lambda net, x, more: _past_a_weight(net, net.syn(net.w(x)), more),
    "a cell reads a state past a weight": lambda net, x, more: _past_a_weight(net, net.syn.g, more) + net.syn(net.w(x)),
    "that of a followed cell": lambda net, x, more: _past_a_weight(net, net.syn.g, more, x) + net.syn(net.w(x)),
    "the output reads a state": lambda net, x, more: _beside(net.syn.g, net.syn(net.w(x)), more),
    "the output reads a weight's output": lambda net, x, more: _beside(y := net.w(x), net.syn(y), more),
    "a state is written in place": lambda net, x, more: _written(net, more).syn(net.w(x)),
    "a cell is given its own state": lambda net, x, more: net.syn(net.w(x) + (0.3 * net.syn.g if more else 0)),
}


def _above(net: Sometimes, read: Tensor | None, x: Tensor) -> Tensor:
    above: Tensor = net.above(torch.zeros_like(net.syn.g) if read is None else torch.tanh(read))
    return above + net.syn(net.w(x))


def _beside_above(net: Sometimes, g: Tensor, more: float) -> Tensor:
    above: Tensor = net.above(torch.tanh(g) if more else torch.zeros_like(g))
    return above + g


def _past_a_weight(net: Sometimes, read: Tensor, more: float, x: Tensor | None = None) -> Tensor:
    input = net.plain(net.past(read)) + (read if more else 0)
    return net.above(input if x is None else input + net.other(x))


def _beside(read: Tensor, g: Tensor, more: float) -> Tensor:
    return g + (torch.tanh(read) if more else 0)


def _written(net: Sometimes, more: float) -> Sometimes:
    if more:
        net.syn.g.mul_(0.5)
    return net


def sometimes(what: str) -> Sometimes:
    torch.manual_seed(1)
    net = Sometimes(what).double()
    untraced(net.plain)
    return net


_REFUSED = {
    "another weight": "other is called, which was not so in the step that compile_graph ran",
    "a weight again": "w is called 2 times, which was not so",
    "another cell": "(above|other) is called, which was not so",
    "a cell reads what another leaves": "above reads an output of syn, which was not so",
    "a cell reads what another held": r"above reads syn\.g, which was not so",
    "a cell reads its input past a weight": "above reads an output of syn past the weight that it entered, which was",
    "a cell reads a state past a weight": r"above reads syn\.g past the weight that it entered, which was not so",
    "that of a followed cell": r"above reads syn\.g past the weight that it entered, which was not so",
    "a state is written in place": r"syn\.g is written outside its cell, which was not so",
}
_REFUSED_BUT_IN_WINDOWS = {
    "the output reads a state": r"syn\.g is read outside its cell, which was not so",
    "the output reads a weight's output": "the output of w is read outside its cell, which was not so",
}


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize(("what", "message"), (_REFUSED | _REFUSED_BUT_IN_WINDOWS).items())
def test_a_step_that_does_more_than_the_first_one_is_refused_or_exact(what: str, message: str, window: int) -> None:
    net = sometimes(what)
    inputs, labels = sequence()
    assert inputs[0, 0, 0] > 1
    if window and what in _REFUSED_BUT_IN_WINDOWS:  # nothing is cut there
        found = learn(online(net, vjp_method="multi-step"), inputs.split(window), labels)
        assert relative(found, cut_graph_gradients(net, inputs, labels, window, within=uncut)) <= EXACT
        return
    algorithm = online(net, vjp_method="multi-step" if window else "single-step")
    with pytest.raises(MemoptError, match=message) as raised:
        learn(algorithm, inputs.split(window) if window else inputs, labels)
    assert "Let every step take the same path" in str(raised.value.hint)


def test_a_cell_may_be_given_its_own_state_in_some_steps() -> None:
    net = sometimes("a cell is given its own state")
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_state_may_enter_a_frozen_weight_in_every_step(frozen: str) -> None:
    net = sometimes("that of a followed cell")
    net.step = lambda net, x, more: _SOMETIMES["that of a followed cell"](net, x, 0.0)
    net.plain.get_parameter(frozen).requires_grad_(False)
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT


class EntersAlways(Network):
    """Its state enters a weight in every step, beside trainable numbers if ``scaled``."""

    reads_it = False
    """In this step the output is of the state, too."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.w, self.neu = weight(INPUTS + HIDDEN, HIDDEN), LIF(HIDDEN)
        self.scale = nn.Parameter(torch.ones(1)) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        v = self.neu.v
        spikes: Tensor = self.neu(self.w(torch.cat([self.scale * x, v], dim=-1)))
        return self.out(spikes + v if self.reads_it else spikes)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("in_lanes", [False, True])
def test_a_state_that_enters_a_weight_and_is_read_past_it_in_some_steps_is_refused(
    scaled: bool, in_lanes: bool
) -> None:
    net = EntersAlways(scaled).double()
    inputs, labels = sequence()
    algorithm = automatic(D_RTRL, net, inputs[0]) if in_lanes else online(net)
    learn(algorithm, inputs, labels)  # all steps are as the first one
    net.reads_it = True
    with pytest.raises(
        MemoptError, match=r"neu\.v is read outside its cell, which was not so in the step that"
    ) as raised:
        learn(algorithm, inputs, labels)
    assert "Let every step take the same path" in str(raised.value.hint)


@pytest.mark.parametrize("make", [es, functools.partial(manual, D_RTRL)], ids=["ES_D_RTRL", "D_RTRL"])
def test_states_without_their_traces_are_not_begun_anew(make: Callable[..., OnlineAlgorithm]) -> None:
    net = SynapseAndNeuron().double()
    inputs, labels = sequence()
    algorithm = make(net, inputs[0])
    first = learn(algorithm, inputs, labels)
    for change in (lambda: init_all_states(net, BATCH), lambda: net.syn.g[2:].zero_()):
        algorithm.reset_state(BATCH)
        assert relative(learn(algorithm, inputs, labels), first) == 0
        change()
        with pytest.raises(MemoptError, match=r"syn\.g was written after the last step, and the traces were") as raised:
            algorithm(inputs[0])
        assert "reset_state" in str(raised.value.hint)


def test_lanes_are_begun_anew_together_with_their_traces() -> None:
    net = SynapseAndNeuron().double()
    inputs, labels = sequence()
    algorithm = D_RTRL(net)

    @vmap_new_states(axis_size=BATCH)
    def init() -> None:
        init_all_states(net)
        algorithm.compile_graph(inputs[0, 0])

    init()
    first = learn(Vmap(algorithm), inputs, labels)
    init()  # makes no traces: the graph is compiled
    with pytest.raises(MemoptError, match=r"syn\.g was written after the last step"):
        Vmap(algorithm)(inputs[0])
    vmap_new_states(axis_size=BATCH)(algorithm.reset_state)()
    assert relative(learn(Vmap(algorithm), inputs, labels), first) == 0


def test_a_sequence_within_a_step_starts_and_ends_there() -> None:
    class Within(Network):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Sequential(weight(INPUTS, HIDDEN), Synapse())
            self.inner, self.w, self.neu = OverTime(inner), weight(HIDDEN, HIDDEN), LIF(HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.neu(self.w(torch.tanh(self.inner(torch.stack([x, x.flip(-1)]))[-1]))))

    net = Within().double()
    inputs, labels = sequence()
    assert relative(learn(online(net), inputs, labels), cut_graph_gradients(net, inputs, labels)) <= EXACT

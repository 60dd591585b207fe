from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.online import (
    D_RTRL,
    ES_D_RTRL,
    Batching,
    HybridTrace,
    OnlineAlgorithm,
    init_all_states,
    traced,
    untraced,
)
from memopt_cli.online.algorithm import parse_decay_or_rank
from memopt_cli.online.neurons import LIF, LeakyRateReadout, kaiming_normal_
from tests.online.networks import (
    BATCH,
    CLASSES,
    DECAY,
    HIDDEN,
    INPUTS,
    Adaptive,
    ConvNet,
    Recurrent,
    automatic,
    cosine,
    cut_graph_gradients,
    gradients,
    learn,
    lif_net,
    manual,
    relative,
    sequence,
    through_time,
)
from tests.zoo.watching import silent

EXACT = 1e-12


def es(model: nn.Module, **settings: object) -> ES_D_RTRL:
    return ES_D_RTRL(model, 0.9, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("make", [D_RTRL, es], ids=["D_RTRL", "ES_D_RTRL"])
def test_one_window_is_plain_back_propagation_through_time(make: Callable[..., OnlineAlgorithm]) -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    multi = manual(lambda m, **k: make(m, vjp_method="multi-step", **k), net, inputs[0])
    assert relative(learn(multi, [inputs], labels), through_time(net, inputs, labels)) <= EXACT


@pytest.mark.parametrize("cell", [LIF, Adaptive])
def test_convolutions_carry_traces(cell: type[nn.Module]) -> None:
    net = ConvNet(cell((4, 3, 3))).double()  # no recurrence through weights: nothing is cut
    inputs, labels = sequence(2, 5, 5)
    found = learn(manual(D_RTRL, net, inputs[0]), inputs, labels)
    assert relative(found, through_time(net, inputs, labels)) <= EXACT


def test_without_recurrence_and_with_a_readout_without_memory_nothing_is_cut() -> None:
    net = lif_net().double()
    net.out.decay = 0.0
    with torch.no_grad():
        net.syn.weight[:, INPUTS:] = 0
    inputs, labels = sequence()
    found = learn(manual(D_RTRL, net, inputs[0]), inputs, labels)
    whole = through_time(net, inputs, labels)
    for g in (found, whole):  # the gradient of the recurrent weights themselves stays cut
        g["syn.weight"] = g["syn.weight"][:, :INPUTS]
    assert relative(found, whole) <= EXACT


def test_a_traced_readout_follows_its_memory() -> None:
    net = lif_net().double()
    traced(net.out.linear)
    with torch.no_grad():
        net.syn.weight[:, INPUTS:] = 0
    inputs, labels = sequence()
    found = learn(manual(D_RTRL, net, inputs[0]), inputs, labels)
    assert (
        relative({"w": found["out.linear.weight"]}, {"w": through_time(net, inputs, labels)["out.linear.weight"]})
        <= EXACT
    )


def test_a_plain_parameter_of_a_cell_sees_one_step_at_a_time() -> None:
    class Threshold(LIF):
        def __init__(self) -> None:
            super().__init__(HIDDEN)
            self.threshold = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, y: Tensor) -> Tensor:
            self.v = self.decay * self.v + y
            return torch.sigmoid(self.v - self.threshold)

    net = Recurrent(Threshold(), lambda c: c.v).double()
    inputs, labels = sequence()
    found = learn(manual(D_RTRL, net, inputs[0]), inputs, labels)
    assert (
        relative(found, cut_graph_gradients(net, inputs, labels)) <= EXACT
    )  # the threshold acts within its step alone


def test_a_plain_parameter_that_a_traced_state_depends_on_is_named() -> None:
    class Learnt(LIF):
        def __init__(self) -> None:
            super().__init__(HIDDEN)
            self.beta = nn.Parameter(torch.tensor(0.9))

        def forward(self, y: Tensor) -> Tensor:
            self.v = self.beta * self.v + y
            return self.v

    net = nn.Sequential(traced(nn.Linear(INPUTS, HIDDEN)), Learnt(), nn.Linear(HIDDEN, CLASSES))
    init_all_states(net)
    with pytest.warns(UserWarning, match=r"states depend on 1\.beta, which no trace follows"):
        D_RTRL(net).compile_graph(torch.rand(INPUTS))
    net[1].beta.requires_grad_(False)
    with silent():
        D_RTRL(net).compile_graph(torch.rand(INPUTS))


def test_losses_may_be_summed_before_one_backward() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    algorithm = manual(D_RTRL, net, inputs[0])
    torch.stack([F.cross_entropy(algorithm(x), labels) for x in inputs]).sum().backward()
    assert relative(gradients(net), cut_graph_gradients(net, inputs, labels)) <= EXACT


def es_by_hand(
    net: Recurrent, inputs: Tensor, labels: Tensor, decay: float, divisor: Callable[[int], float]
) -> dict[str, Tensor]:
    """The specification's equations for LIF neurons, written out."""
    w, b, w_out = (p.detach() for p in (net.syn.weight, net.syn.bias, net.out.linear.weight))
    v, e_f, r = inputs.new_zeros(BATCH, HIDDEN), inputs.new_zeros(BATCH, HIDDEN), inputs.new_zeros(BATCH, CLASSES)
    e_x = inputs.new_zeros(BATCH, INPUTS + HIDDEN)
    slope = lambda u: (0.3 * (1 - u.abs())).clamp_min(0)  # noqa: E731
    sums = {
        "syn.weight": torch.zeros_like(w),
        "syn.bias": torch.zeros_like(b),
        "out.linear.weight": torch.zeros_like(w_out),
    }
    for t, x in enumerate(inputs):
        s = (v >= 1).double()
        z, jacobian = torch.cat([x, s], dim=1), DECAY * (1 - slope(v - 1))
        v = DECAY * (v - s) + z @ w.t() + b
        s = (v >= 1).double()
        r = DECAY * r + s @ w_out.t()
        of_r = (r.softmax(1) - F.one_hot(labels, CLASSES)) / BATCH
        learning = (of_r @ w_out) * slope(v - 1)
        e_x = decay * e_x + z
        e_f = decay * jacobian * e_f + (1 - decay)
        of_y = learning * e_f / divisor(t)
        sums["syn.weight"] += of_y.t() @ e_x
        sums["syn.bias"] += of_y.sum(0)
        sums["out.linear.weight"] += of_r.t() @ s
    return sums


@pytest.mark.parametrize(
    ("correction", "divisor"),
    [("reference", lambda t: 1 - 0.1 ** (t + 1)), ("exact", lambda t: 1 - 0.9 ** (t + 1)), ("none", lambda t: 1.0)],
)
def test_es_d_rtrl_is_its_equations(correction: str, divisor: Callable[[int], float]) -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    found = learn(manual(lambda m, **k: es(m, correction=correction, **k), net, inputs[0]), inputs, labels)
    assert relative(found, es_by_hand(net, inputs, labels, 0.9, divisor)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("correction", "closeness"), [("reference", 0.99), ("exact", 0.98)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_es_d_rtrl_points_where_d_rtrl_points(seed: int, correction: str, closeness: float) -> None:
    torch.manual_seed(seed)
    net = Wide().double()
    inputs, labels = torch.rand(16, 32, 100).double(), torch.randint(0, 10, (32,))
    approximate = learn(manual(lambda m, **k: es(m, correction=correction, **k), net, inputs[0]), inputs, labels)
    exact, whole = learn(manual(D_RTRL, net, inputs[0]), inputs, labels), through_time(net, inputs, labels)
    for name in ("syn.weight", "syn.bias"):
        assert cosine(approximate, exact, name) >= closeness
    assert cosine(approximate, whole, "syn.weight") >= 0.93


class Wide(nn.Module):
    """The reference network, with fewer neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.neu, self.syn, self.out = LIF(80), traced(nn.Linear(180, 80)), LeakyRateReadout(80, 10)
        with torch.no_grad():
            kaiming_normal_(self.syn.weight[:, :100])
            kaiming_normal_(self.syn.weight[:, 100:])
            self.syn.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.neu(self.syn(torch.cat([x, self.neu.get_spike()], dim=-1))))


@pytest.mark.parametrize(("given", "decay", "rank"), [(0.9, 0.9, 19), (19, 0.9, 19), (1, 0.0, 1), (0.5, 0.5, 3)])
def test_decay_and_rank(given: float, decay: float, rank: int) -> None:
    found = parse_decay_or_rank(given)
    assert found == (pytest.approx(decay), rank)


def test_rank_one_forgets_at_once_and_has_no_correction_of_the_references_kind() -> None:
    with pytest.raises(UsageError, match="divide by"):
        ES_D_RTRL(lif_net(), 1, correction="reference")
    net = lif_net().double()
    inputs, labels = sequence()
    found = learn(manual(lambda m, **k: ES_D_RTRL(m, 1, **k), net, inputs[0]), inputs, labels)
    assert relative(found, es_by_hand(net, inputs, labels, 0.0, lambda t: 1.0)) <= EXACT


def test_a_second_derivative_is_refused() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    loss = F.cross_entropy(manual(es, net, inputs[0])(inputs[0]), labels)
    with pytest.raises(MemoptError, match="second derivative"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("given", [0.0, 1.0, 1.5, -3, 0, True, "0.9"])
def test_what_is_no_decay_and_no_rank(given: object) -> None:
    with pytest.raises(UsageError, match="decay_or_rank"):
        ES_D_RTRL(lif_net(), given)


@pytest.mark.parametrize(("make", "dtype", "tolerance"), [(es, torch.float64, EXACT), (D_RTRL, torch.float32, 1e-5)])
def test_manual_and_automatic_batching_agree(
    make: Callable[..., OnlineAlgorithm], dtype: torch.dtype, tolerance: float
) -> None:
    net, (inputs, labels) = lif_net().to(dtype), sequence()
    inputs = inputs.to(dtype)
    expected = learn(manual(make, net, inputs[0]), inputs, labels)
    assert relative(learn(automatic(make, net, inputs[0]), inputs, labels), expected) <= tolerance


def test_windows_are_batched_automatically() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    make = lambda m, **k: D_RTRL(m, vjp_method="multi-step", **k)  # noqa: E731
    expected = learn(manual(make, net, inputs[0]), inputs.split(4), labels)
    algorithm = automatic(make, net, inputs[0])
    algorithm.in_axes = algorithm.out_axes = 1
    assert relative(learn(algorithm, inputs.split(4), labels), expected) <= EXACT


def test_one_sample_without_a_batch_axis() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    expected = learn(manual(D_RTRL, net, inputs[0, :1]), inputs[:, :1], labels[:1])
    init_all_states(net)
    algorithm = D_RTRL(net)
    algorithm.compile_graph(inputs[0, 0])
    assert relative(learn(algorithm, inputs[:, 0], labels[0]), expected) <= EXACT


def test_a_new_sequence_starts_anew() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    algorithm = manual(es, net, inputs[0])
    first = learn(algorithm, inputs, labels)
    assert relative(learn(algorithm, inputs, labels), first) > 1e-3  # states and traces went on
    algorithm.reset_state(BATCH)
    assert relative(learn(algorithm, inputs, labels), first) == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [D_RTRL, es], ids=["D_RTRL", "ES_D_RTRL"])
def test_an_optimizer_may_step_after_every_time_step(make: Callable[..., OnlineAlgorithm]) -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    algorithm = manual(make, net, inputs[0])
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        algorithm.reset_state(BATCH)
        for x in inputs:
            optimizer.zero_grad()
            loss = F.cross_entropy(algorithm(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    ratio = sum(losses[-len(inputs) :]) / sum(losses[: len(inputs)])
    assert ratio < 0.85


def test_no_graph_is_left_on_the_model() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    algorithm = manual(es, net, inputs[0])
    learn(algorithm, inputs[:4], labels)
    twin = copy.deepcopy(algorithm)
    expected = learn(algorithm, inputs[4:], labels)
    assert relative(learn(twin, inputs[4:], labels), expected) == 0


def test_traces_go_on_without_gradients() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    algorithm = manual(D_RTRL, net, inputs[0])
    with torch.no_grad():
        assert not algorithm(inputs[0]).requires_grad
    after = learn(algorithm, inputs[1:2], labels)
    algorithm.reset_state(BATCH)
    algorithm(inputs[0])
    assert relative(after, learn(algorithm, inputs[1:2], labels)) == 0


def test_compiling_again_does_nothing_and_leaves_no_mark() -> None:
    net = lif_net().double()
    inputs, _ = sequence()
    algorithm = manual(lambda m, **k: es(m, correction="reference", **k), net, inputs[0])
    algorithm(inputs[0])
    state, drawn, unseen = net.cell.v.clone(), torch.get_rng_state(), float(algorithm.unseen)
    algorithm.compile_graph(inputs[0])
    assert torch.equal(net.cell.v, state)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert float(algorithm.unseen) == unseen == pytest.approx(0.1)


def test_compiling_leaves_the_model_as_it_was() -> None:
    norm = nn.BatchNorm1d(INPUTS)
    net = nn.Sequential(norm, nn.Dropout(0.5), lif_net())
    init_all_states(net, BATCH)
    drawn = torch.get_rng_state()
    es(net, mode=Batching()).compile_graph(torch.rand(BATCH, INPUTS, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(INPUTS))
    assert not net[2].cell.v.any()


def test_the_traces_of_a_weight() -> None:
    net = lif_net().double()
    inputs, _ = sequence()
    full, factored = manual(D_RTRL, net, inputs[0]), manual(es, net, inputs[0])
    shapes = sorted(tuple(t.shape) for t in full.get_etrace_of(net.syn.weight).values())
    assert shapes == [(BATCH, HIDDEN), (BATCH, HIDDEN, INPUTS + HIDDEN)]
    shapes = sorted(tuple(t.shape) for t in factored.get_etrace_of(net.syn.weight).values())
    assert shapes == [(BATCH, HIDDEN), (BATCH, INPUTS + HIDDEN)]
    with pytest.raises(MemoptError, match="no eligibility trace"):
        full.get_etrace_of(net.out.linear.weight)


def test_a_hybrid_keeps_what_is_smaller_unless_told_otherwise() -> None:
    def kinds(algorithm: OnlineAlgorithm) -> list[str]:
        return [type(trace).__name__ for trace in algorithm.traces]

    make = lambda m, **k: HybridTrace(m, 0.9, **k)  # noqa: E731
    net, inputs = lif_net().double(), sequence()[0]
    assert kinds(manual(make, net, inputs[0])) == ["FactoredTrace"]
    traced(net.syn, "full")
    assert kinds(manual(make, net, inputs[0])) == ["FullTrace"]
    depthwise = nn.Sequential(traced(nn.Conv1d(4, 4, 1, groups=4)), LIF((4, 9))).double()
    x = torch.rand(BATCH, 4, 9).double()
    assert kinds(manual(make, depthwise, x)) == ["FullTrace"]
    traced(depthwise[0], "approx")
    assert kinds(manual(make, depthwise, x)) == ["FactoredTrace"]


def test_a_hybrid_of_full_traces_is_d_rtrl() -> None:
    net = lif_net().double()
    traced(net.syn, "full")
    inputs, labels = sequence()
    found = learn(manual(lambda m, **k: HybridTrace(m, 0.9, **k), net, inputs[0]), inputs, labels)
    assert relative(found, learn(manual(D_RTRL, net, inputs[0]), inputs, labels)) == 0


def test_a_frozen_weight_gets_no_gradient_and_its_bias_does() -> None:
    net = lif_net().double()
    inputs, labels = sequence()
    expected = cut_graph_gradients(net, inputs, labels)
    net.syn.weight.requires_grad_(False)
    del expected["syn.weight"]
    assert relative(learn(manual(D_RTRL, net, inputs[0]), inputs, labels), expected) <= EXACT


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(BATCH, INPUTS + 1), "compiled for"),
        (torch.zeros(BATCH + 1, INPUTS), "state v of LIF has shape"),
        (torch.zeros(()), "has no batch axis"),
        ([0.0], "inputs"),
    ],
)
def test_wrong_inputs_are_refused(x: object, message: str) -> None:
    algorithm = manual(es, lif_net(), torch.zeros(BATCH, INPUTS))
    with pytest.raises(MemoptError, match=message):
        algorithm(x)


def test_a_model_that_was_not_seen_is_refused() -> None:
    with pytest.raises(MemoptError, match="compile_graph"):
        D_RTRL(lif_net())(torch.zeros(INPUTS))


def test_states_for_one_sample_do_not_do_for_a_batch() -> None:
    with pytest.raises(MemoptError, match="batch_size"):
        D_RTRL(lif_net(), mode=Batching()).compile_graph(torch.zeros(BATCH, INPUTS))


def test_a_model_of_which_no_weight_is_tagged_warns() -> None:
    def compiled(net: nn.Module) -> None:
        init_all_states(net)
        D_RTRL(net).compile_graph(torch.rand(INPUTS))

    with pytest.warns(
        UserWarning, match="no weight of Sequential is tagged, so each of them gets only the gradient of each step"
    ):
        compiled(nn.Sequential(nn.Linear(INPUTS, HIDDEN), LIF(HIDDEN)))
    with silent():
        compiled(nn.Sequential(traced(nn.Linear(INPUTS, HIDDEN)), LIF(HIDDEN)))
        compiled(nn.Sequential(untraced(nn.Linear(INPUTS, HIDDEN)), LIF(HIDDEN)))


@pytest.mark.parametrize(
    "make",
    [
        lambda net: D_RTRL(net, vjp_method="two-step"),
        lambda net: ES_D_RTRL(net, 0.9, correction="some"),
        lambda net: D_RTRL(net, mode="batching"),
        lambda net: D_RTRL(net, mode=Batching),
        lambda net: D_RTRL(net.forward),
    ],
)
def test_unknown_settings_are_refused(make: Callable[[nn.Module], OnlineAlgorithm]) -> None:
    with pytest.raises(UsageError, match="Pass"):
        make(lif_net())

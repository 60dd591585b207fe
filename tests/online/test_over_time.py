"""A model of one time step over whole sequences: the same outputs and gradients, and online when it can be."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import snntorch
import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, UsageError
from memopt_cli.online import LIF, OverTime, init_all_states, states_of, traced, untraced
from memopt_cli.online.learning import compare_gradients, learn_online
from memopt_cli.online.operations import trace_kind
from memopt_cli.online.over_time import step_model
from memopt_cli.records import ONLINE_RULES, ChunkRule, OnlineRule, Plan, SegmentPlan, StepSettings
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.chunking import find_rule
from memopt_cli.verification.effects import difference, effects
from sample_models import spiking_vgg
from tests.online.networks import BATCH, CLASSES, HIDDEN, INPUTS, lif_net, sequence
from tests.zoo.models import Parts


def feedforward(neuron: nn.Module) -> nn.Sequential:
    """No recurrence but that of each neuron with itself, and a readout without memory: nothing is cut."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), neuron, nn.Linear(HIDDEN, CLASSES)).double()


def leaky() -> nn.Module:
    return snntorch.Leaky(0.8, init_hidden=True)


def step_of(model: nn.Module, inputs: Tensor) -> TrainingStep:
    return TrainingStep(model=model, args=(inputs,), kwargs={}, settings=StepSettings())


def test_a_sequence_is_its_steps_from_fresh_states() -> None:
    net, inputs = lif_net().double(), sequence()[0]
    init_all_states(net, BATCH)
    expected = torch.stack([net(x) for x in inputs])
    whole = OverTime(net)
    assert torch.equal(whole(inputs), expected)
    assert torch.equal(whole(inputs), expected)
    assert not any(state.value.requires_grad for state in states_of(whole).values())


@pytest.mark.parametrize(
    "inputs", [(), (torch.ones(3),), (torch.ones(0, 2, 3),), ("x",), (torch.ones(4, 2, 3), torch.ones(5, 2, 3))]
)
def test_what_is_no_sequence_is_refused(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="not sequences of the same number of steps") as raised:
        OverTime(LIF(3))(*inputs)
    assert "[T, B, ...]" in str(raised.value.hint)


def test_declared_states_pickle_as_plain_data() -> None:
    net = pickle.loads(pickle.dumps(OverTime(feedforward(LIF(HIDDEN)))))
    assert list(states_of(net)) == ["model.1.v"]
    assert net(sequence()[0]).shape == (8, BATCH, CLASSES)


@pytest.mark.parametrize("make", [leaky, lambda: spiking_vgg.LIF(0.7)], ids=["snnTorch's Leaky", "the sample's LIF"])
def test_states_that_a_neuron_keeps_to_itself_are_found(make: object) -> None:
    net, inputs = feedforward(make()).float(), sequence()[0].float()  # snnTorch's spikes are float32
    expected = OverTime(net)(inputs)
    step = step_model(OverTime(net), (inputs[0],))
    assert [(path, state.shape) for path, state in states_of(step).items()] == [("1.mem", (HIDDEN,))]
    assert torch.equal(OverTime(step)(inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [leaky, lambda: LIF(HIDDEN)], ids=["snnTorch's Leaky", "LIF"])
def test_where_nothing_is_cut_d_rtrl_is_exact(make: object) -> None:
    """Compared in float64 also where a model and its inputs are float32, which they are again afterwards."""
    step = step_of(OverTime(feedforward(make()).float()), sequence()[0].float())
    found = compare_gradients(step, "D-RTRL")
    assert found.exact
    assert found.relative_error <= 1e-12
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    approximate = compare_gradients(step, "ES-D-RTRL")
    assert not approximate.exact
    assert 0.9 < approximate.cosine < 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ONLINE_RULES)
def test_recurrence_through_weights_is_cut(rule: OnlineRule) -> None:
    found = compare_gradients(step_of(OverTime(lif_net().double()), sequence()[0]), rule)
    assert not found.exact
    assert 0.5 < found.cosine < 1


def test_a_loss_of_sequences_is_given_one_step_at_a_time_online() -> None:
    shapes = []

    def loss(output: Tensor) -> Tensor:
        shapes.append(tuple(output.shape))
        return output.square().sum()

    step = step_of(OverTime(feedforward(LIF(HIDDEN))), sequence()[0])
    step = TrainingStep(model=step.model, args=step.args, kwargs={}, settings=step.settings, loss=loss)
    assert compare_gradients(step, "D-RTRL").relative_error <= 1e-12
    assert shapes == [(8, BATCH, CLASSES)] + 8 * [(1, BATCH, CLASSES)]


def test_the_mean_of_a_sequence_is_not_the_sum_of_those_of_its_steps() -> None:
    step = step_of(OverTime(feedforward(LIF(HIDDEN))), sequence()[0])
    found = compare_gradients(replace(step, loss=torch.mean), "D-RTRL")
    assert not found.exact
    assert (found.cosine, found.relative_error) == pytest.approx((1, 7))


def test_tags_are_kept_where_there_are_some() -> None:
    net, inputs = feedforward(LIF(HIDDEN)), sequence()[0]
    step_model(OverTime(net), (inputs[0],))
    assert trace_kind(net[0]) == trace_kind(net[2]) == "adaptive"
    tagged = feedforward(LIF(HIDDEN))
    traced(tagged[0], "full")
    step_model(OverTime(tagged), (inputs[0],))
    assert (trace_kind(tagged[0]), trace_kind(tagged[2])) == ("full", None)


class Mixing(LIF):
    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y - y.mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.LSTM(INPUTS, HIDDEN), "LSTM runs its time steps within its own forward"),
        (OverTime(nn.Linear(INPUTS, HIDDEN)), "carries nothing from one time step to the next"),
        (OverTime(nn.Sequential(nn.Linear(INPUTS, HIDDEN), Mixing(HIDDEN))), "neuron by neuron"),
        (OverTime(nn.Linear(INPUTS + 1, HIDDEN)), "cannot run one time step"),
        (OverTime(LIF(INPUTS)), "no weight that can carry a trace"),
    ],
)
def test_what_cannot_be_run_online_says_why(model: nn.Module, reason: str) -> None:
    inputs = torch.rand(BATCH, INPUTS)
    with pytest.raises(MemoptError, match=reason) as raised:
        learn_online(step_of(model, inputs[None]), "D-RTRL", lambda number: (inputs,))
    assert raised.value.hint


def test_an_untraced_model_is_learnt_one_step_at_a_time() -> None:
    net = lif_net().double()
    traced(net.syn)
    untraced(net)
    assert trace_kind(net.syn) is None


class Keeping(Parts, mem=None):
    """A neuron that keeps its potential in an attribute, and says how to forget it."""

    def reset_mem(self) -> None:
        self.mem = None

    def forward(self, x: Tensor) -> Tensor:
        self.mem = x if self.mem is None else 0.8 * self.mem + x
        return torch.tanh(self.mem)


NEURONS = pytest.mark.parametrize(
    "make", [leaky, lambda: LIF(HIDDEN), Keeping], ids=["snnTorch's Leaky", "LIF", "kept in an attribute"]
)


@NEURONS
def test_the_states_that_are_left_can_be_copied(make: Callable[[], nn.Module]) -> None:
    net = OverTime(feedforward(make()).float())
    output = net(sequence()[0].float())
    assert torch.equal(copy.deepcopy(net)(sequence()[0].float()), output)


@pytest.mark.slow
@NEURONS
@pytest.mark.parametrize("axis", [0, 1, -3])
@pytest.mark.parametrize("recompute_states", [False, True])
def test_chunks_are_exact_along_time_and_along_the_batch(
    make: Callable[[], nn.Module], axis: int, recompute_states: bool
) -> None:
    whole, inputs = OverTime(feedforward(make()).float()), sequence()[0].float()
    segment = SegmentPlan(path="", chunks=3, axis=axis, recompute_states=recompute_states)
    chunked = apply_plan(copy.deepcopy(whole), Plan(segments=(segment,)))
    for _ in range(2):  # the second sequence starts afresh, too
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it does not run whole
            expected, found = (effects(step_of(net, inputs)) for net in (whole, chunked))
        assert any("state" in name or "buffer" in name for name in expected)
        assert difference(expected, found).relative < 1e-5


@pytest.mark.slow
@NEURONS
def test_a_model_of_sequences_around_it_is_chunked_likewise(make: Callable[[], nn.Module]) -> None:
    whole = nn.Sequential(OverTime(feedforward(make()).float()), nn.Linear(CLASSES, 2))
    inner, outer = SegmentPlan(path="0"), SegmentPlan(path="", chunks=4, axis=0)
    chunked = apply_plan(copy.deepcopy(whole), Plan(segments=(outer, inner)))
    inputs = sequence()[0].float()
    worst = difference(effects(step_of(whole, inputs)), effects(step_of(chunked, inputs)))
    assert worst.relative < 1e-5


@pytest.mark.slow
@NEURONS
def test_a_temporal_split_is_found(make: Callable[[], nn.Module]) -> None:
    rule = find_rule(OverTime(feedforward(make()).float()), (torch.randn(8, BATCH, INPUTS),), {})
    assert isinstance(rule, ChunkRule)
    assert (rule.axis, rule.seq_inputs, rule.seq_outputs) == (0, 1, 1)


@pytest.mark.parametrize("path", ["model", "model.1"])
def test_a_single_step_of_a_cell_runs_whole(path: str) -> None:
    """In chunks its samples would get each other's state."""
    inputs = sequence()[0].float()
    whole = OverTime(feedforward(leaky()).float())
    chunked = apply_plan(copy.deepcopy(whole), Plan(segments=(SegmentPlan(path=path, chunks=BATCH, axis=0),)))
    with pytest.warns(UserWarning, match="changes its .* once a call"):
        found = effects(step_of(chunked, inputs))
    assert difference(found, effects(step_of(whole, inputs))).relative < 1e-6


def test_a_single_step_of_a_cell_whose_state_is_of_all_samples_runs_whole() -> None:
    """A chunk of it fails, where state and input do not fit."""
    inputs = sequence()[0].float()
    whole = OverTime(feedforward(LIF(HIDDEN)).float())
    chunked = apply_plan(copy.deepcopy(whole), Plan(segments=(SegmentPlan(path="model", chunks=2, axis=0),)))
    with pytest.warns(UserWarning, match=r"fails on a chunk \(The size of tensor .*: it runs whole from now on"):
        found = effects(step_of(chunked, inputs))
    assert difference(found, effects(step_of(whole, inputs))).relative < 1e-6


@pytest.mark.slow
def test_a_single_step_of_what_keeps_nothing_runs_in_chunks_of_its_samples() -> None:
    inputs = sequence()[0]
    whole = OverTime(nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh()).double())
    segment = SegmentPlan(path="model", chunks=2, axis=0, batch_statistics=True)
    chunked = apply_plan(copy.deepcopy(whole), Plan(segments=(segment,)))
    assert difference(effects(step_of(chunked, inputs)), effects(step_of(whole, inputs))).relative < 1e-9

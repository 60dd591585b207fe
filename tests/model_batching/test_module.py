"""``BatchModule``: its data orders, its states, its routes and their choice, and what it refuses."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import memopt_cli
from memopt_cli import apply_plan
from memopt_cli.errors import UsageError
from memopt_cli.model_batching import (
    AbstractBatchModule,
    BatchModule,
    batch_loss,
    comparison,
    register_batch_module,
    selection,
    timing,
)
from memopt_cli.model_batching.kernels import linear, modules
from memopt_cli.model_batching.routes import fused as fused_route
from memopt_cli.model_batching.routes.fused import FusedRoute
from memopt_cli.model_batching.routes.interface import RouteName
from memopt_cli.model_batching.routes.vmap import VmapRoute
from memopt_cli.pipeline.plans.application import apply
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, file_header, prepare
from memopt_cli.records import ApplyRequest, ModelSource, Plan, SegmentPlan, StepSettings, Trust
from memopt_cli.records.plan_file import plan_yaml
from memopt_cli.records.progress import Progress
from memopt_cli.spikingjelly import memory_optimization
from memopt_cli.trace import count_step
from memopt_cli.training.apply import plan_of, remove_segments
from memopt_cli.training.step import TrainingStep
from tests.zoo.models import Parts

ROUTES: tuple[RouteName, ...] = ("fused", "vmap", "loop")
routes = pytest.mark.parametrize("route", ROUTES)
G, B = 3, 4


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def images(*shape: int) -> Tensor:
    return torch.randn(G, B, *(shape or (5,)), generator=torch.Generator().manual_seed(3))


def different(model: nn.Module, **options: Any) -> BatchModule:
    """Models of different weights."""
    batched = BatchModule(model, G, **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in batched.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return batched


@routes
def test_every_data_order_holds_the_same_models(route: RouteName) -> None:
    batched, given = different(small(), route=route), images()
    expected = batched(given)
    assert expected.shape == (G, B, 2)
    assert torch.equal(batched(given.transpose(0, 1), data_order="b g"), expected.transpose(0, 1))
    assert torch.equal(batched(given.flatten(0, 1), data_order="(g b)"), expected.flatten(0, 1))
    merged = batched(given.transpose(0, 1).flatten(0, 1), data_order="(b g)")
    last_bit = {"rtol": 4 * torch.finfo(torch.float32).eps, "atol": 1e-7}  # on some processors strides change it
    assert_close(merged, expected.transpose(0, 1).flatten(0, 1), **last_bit)
    split = batched(given.transpose(0, 1).flatten(0, 1), data_order="(b g)", output_order="g b")
    assert_close(split, expected, **last_bit)


def test_an_input_without_the_models_is_refused_with_its_shape() -> None:
    with pytest.raises(UsageError, match=r"\(4, 5\).*does not hold 3 models"):
        BatchModule(small(), G)(torch.randn(4, 5))
    with pytest.raises(UsageError, match=r"\(4, 5\).*'\(g b\)'.*multiple of 3"):
        BatchModule(small(), G)(torch.randn(4, 5), data_order="(g b)")
    with pytest.raises(UsageError, match="unknown data order 'g'"):
        BatchModule(small(), G)(images(), data_order="g")  # type: ignore[arg-type]


class Several(Parts, linear=lambda: nn.Linear(5, 2)):
    """Two inputs, a keyword, an option, and outputs that are not all tensors."""

    def forward(self, a: Tensor, b: Tensor | None = None, *, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        hidden = self.linear(a) if b is None else self.linear(a) + self.linear(b)
        return {"hidden": hidden * scale, "sum": hidden.sum(), "mask": mask}


@routes
def test_several_inputs_and_outputs_pass_through(route: RouteName) -> None:
    batched, a = different(Several(), route=route), images()
    found = batched(a, images().flip(0), scale=2.0, mask=a > 0)
    alone = Several()
    alone.load_state_dict(batched.state_dicts()[1])
    wanted = alone(a[1], images().flip(0)[1], scale=2.0)
    torch.testing.assert_close(found["hidden"][1], wanted["hidden"])
    torch.testing.assert_close(found["sum"][1], wanted["sum"])
    assert torch.equal(found["mask"], a > 0)
    assert batched(a)["mask"] is None  # another structure of arguments


def test_state_dictionaries_go_in_and_come_out() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    states = [copy.deepcopy(m).state_dict() for m in (nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)),) * G]
    for g, state in enumerate(states):
        state["1.running_mean"] += g
    batched = BatchModule(model, G)
    batched.load_state_dicts(states)
    for found, wanted in zip(batched.state_dicts(), states, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) for k in wanted)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in found.values())  # a file holds one model only


def test_one_state_dictionary_goes_into_every_model_and_missing_ones_are_zero() -> None:
    batched, state = BatchModule(small(), G), small().state_dict()
    batched.load_state_dicts(state)
    assert all(torch.equal(s["0.weight"], state["0.weight"]) for s in batched.state_dicts())
    batched.load_state_dicts([state], batch_strict=False)
    assert [bool(s["0.weight"].any()) for s in batched.state_dicts()] == [True, False, False]
    with pytest.raises(UsageError, match="2 state dictionaries for 3 models") as few:
        batched.load_state_dicts([state, state])
    assert "batch_strict=False" in few.value.hint
    with pytest.raises(UsageError, match="4 state dictionaries for 3 models") as many:
        batched.load_state_dicts([state] * 4, batch_strict=False)
    assert many.value.hint == "Pass one for all models, or one for each."
    with pytest.raises(UsageError, match=r"same keys: 0\.bias"):
        batched.load_state_dicts([state, {k: v for k, v in state.items() if k != "0.bias"}, state])


def test_the_model_itself_is_left_alone() -> None:
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batched = BatchModule(model, G)
    batched(images()).sum().backward()
    with torch.no_grad():
        batched.models.get_parameter("0.weight").zero_()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model[0].weight.grad is None  # type: ignore[index]


@routes
def test_a_copy_and_a_pickle_compute_the_same(route: RouteName) -> None:
    batched = different(small(), route=route)
    expected = batched(images())
    expected.sum().backward()
    for other in (copy.deepcopy(batched), pickle.loads(pickle.dumps(batched))):
        assert torch.equal(other(images()), expected)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))


@routes
@pytest.mark.parametrize("chosen", range(G))
def test_backward_of_one_model_gives_the_others_exactly_zero(route: RouteName, chosen: int) -> None:
    batched = different(convolutional(), route=route)
    given = images(1, 5, 5).requires_grad_()
    losses = batch_loss(batched(given), torch.randint(0, 4, (G, B)), G, F.cross_entropy)
    losses[chosen].backward()
    for tensor in (given, *batched.parameters()):
        assert tensor.grad is not None
        for g in range(G):
            assert bool(tensor.grad[g].any()) == (g == chosen)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def trained_apart(batched: BatchModule, make: Any, given: Tensor, targets: Tensor) -> list[dict[str, Tensor]]:
    """The models of ``batched``, each trained three steps alone."""
    states = []
    for g, state in enumerate(batched.state_dicts()):
        model = convolutional().double()
        model.load_state_dict(state)
        optimizer = make(list(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(given[g]), targets[g]).backward()
            optimizer.step()
        states.append(model.state_dict())
    return states


def train_together(batched: BatchModule, make: Any, given: Tensor, targets: Tensor) -> None:
    optimizer = make(list(batched.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        batch_loss(batched(given), targets, G, F.cross_entropy).sum().backward()
        optimizer.step()


def largest_gap(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((f[k] - w[k]).abs().max()) for f, w in pairs for k in w)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_stacked_models_as_it_trains_each(name: str) -> None:
    batched = different(convolutional().double(), route="fused")
    given, targets = images(1, 5, 5).double(), torch.randint(0, 4, (G, B))
    wanted = trained_apart(batched, OPTIMIZERS[name], given, targets)
    train_together(batched, OPTIMIZERS[name], given, targets)
    assert largest_gap(batched.state_dicts(), wanted) < 1e-10


def test_changed_attributes_are_seen_after_choosing_again() -> None:
    batched, ones = BatchModule(nn.Sequential(nn.Dropout(0.5)), 2, route="loop"), torch.ones(2, 100)
    assert (batched(ones) == 0).any()
    batched.models.get_submodule("0").p = 0.0  # type: ignore[assignment]
    batched.choose_again()
    assert torch.equal(batched(ones), ones)


@routes
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5)], ids=str)
def test_dropout_differs_from_model_to_model_and_keeps_its_rate(route: RouteName, layer: nn.Module) -> None:
    batched = BatchModule(nn.Sequential(layer), 2, route=route)
    ones = torch.ones(2, 50, 80, 2, 2, requires_grad=True)
    output = batched(ones)
    dropped = output.flatten(3)[..., 0] != output.max()
    assert 0.45 < dropped.float().mean() < 0.55
    assert 0.4 < (dropped[0] != dropped[1]).float().mean() < 0.6
    if isinstance(layer, nn.Dropout2d):
        assert torch.equal(output.amax((-1, -2)), output.amin((-1, -2)))
    batched.eval()
    assert torch.equal(batched(ones), ones)


def test_functional_dropout_follows_the_mode() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    batched, ones = BatchModule(Drops(), 2, route="fused"), torch.ones(2, 100, requires_grad=True)
    assert not torch.equal(batched(ones)[0], batched(ones)[1])
    assert torch.equal(batched.eval()(ones), ones)
    assert not torch.equal(batched.train()(ones)[0], batched(ones)[1])


def test_the_fastest_route_that_computes_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fused": 3.0, "vmap": 1.0, "loop": 2.0}
    monkeypatch.setattr(timing, "_timer", lambda name, _: lambda: seconds[name])
    batched = BatchModule(small(), G, example_inputs=(images(),))
    assert [(t.name, t.step_s) for t in batched.trials] == list(seconds.items())
    assert [t.name for t in batched.trials if t.used] == ["vmap"]
    assert type(batched._routes[batched._mode()]).__name__ == "VmapRoute"


class Seen(nn.Module):
    """Notes the inputs that it is given, by the loop and by nobody else: it cannot be traced."""

    shapes: list[tuple[int, ...]] = []  # noqa: RUF012

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        self.linear, self.least = nn.Linear(5, 2), least

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        if x.shape[0] < self.least:
            raise ValueError("too few samples")
        return self.linear(x)


@pytest.mark.parametrize(("least", "sizes"), [(1, {3}), (10, {3, 50})])
def test_routes_are_compared_on_few_samples_if_these_are_an_input(least: int, sizes: set[int]) -> None:
    Seen.shapes.clear()
    batched = BatchModule(Seen(least), G, route="vmap", example_inputs=(torch.randn(G, 50, 5),))
    assert {shape[-2] for shape in Seen.shapes} == sizes
    assert [t.used for t in batched.trials] == [True]


def test_routes_are_timed_on_the_whole_if_a_few_samples_are_no_input() -> None:
    Seen.shapes.clear()
    batched = BatchModule(Seen(10), G, example_inputs=(torch.randn(G, 50, 5),))
    assert {t.name: t.refused for t in batched.trials if t.name != "fused"} == {"vmap": "", "loop": ""}
    assert all(not math.isnan(t.step_s) for t in batched.trials if t.name != "fused")


def test_a_named_route_is_compared_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(timing, "_timer")
    batched = BatchModule(convolutional(), G, route="fused", example_inputs=(images(1, 5, 5),))
    (trial,) = batched.trials
    assert trial.used
    assert trial.difference < 1e-10


def test_without_a_check_the_first_call_finds_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(selection, "Reference")
    monkeypatch.delattr(selection, "time_routes")
    batched = BatchModule(small(), G, check=False, example_inputs=(images(),))
    assert not batched.trials
    batched(images())
    assert [(t.name, t.used) for t in batched.trials] == [("fused", True), ("vmap", False), ("loop", False)]
    assert all(t.step_s != t.step_s and t.difference != t.difference for t in batched.trials)  # NaN
    recurrent = BatchModule(nn.GRU(5, 4), G, check=False, route="vmap")
    with pytest.raises(UsageError, match=r"the vmap route cannot run GRU: .*gru"):
        recurrent(images(4, 5))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # as the model itself says it
        BatchModule(small(), G, check=False)(images(3))


def test_a_route_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(run: Callable[..., Any]) -> Callable[..., None]:
        def fails_at_its_end(*given: Any) -> None:
            run(*given)
            raise RuntimeError("no such kernel")

        return fails_at_its_end

    for route in (FusedRoute, VmapRoute):
        monkeypatch.setattr(route, "__call__", failing(route.__call__))
    net, x = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)), torch.randn(G, 5, 4)
    found = []
    for batched in (BatchModule(net, G, check=False), BatchModule(net, G, route="loop")):
        torch.manual_seed(1)
        found.append([batched(x), *batched.buffers()])
        assert [trial.name for trial in batched.trials if trial.used] == ["loop"]
        assert {trial.refused for trial in batched.trials if not trial.used} <= {"RuntimeError: no such kernel"}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_steps_that_take_long_are_timed_on_few_models_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[int, int]] = []

    def timer(name: str, given: comparison.TrialInputs) -> Callable[[], float]:
        size = (given.models, given.args[0].shape[1])
        assert size[0] == given.args[0].shape[0] == given.tree[0].weight.shape[0]  # type: ignore[index, union-attr]

        def step() -> float:
            timed.append(size)
            return math.prod(size) * seconds

        return step

    monkeypatch.setattr(timing, "_timer", timer)
    for seconds, sizes in ((0.1, {(2, 3)}), (1e-6, {(2, 3), (G, 50)})):  # noqa: B007
        timed.clear()
        BatchModule(small(), G, example_inputs=(torch.randn(G, 50, 5),))
        assert set(timed) == sizes
    for seconds, samples, takes_several in ((0.03, 6, False), (0.03, 50, True)):
        timed.clear()
        batched = BatchModule(small(), G, example_inputs=(torch.randn(G, samples, 5),))
        assert set(timed) == {(2, 3)}
        assert (len(timed) > len(batched.trials)) == takes_several
        assert all(trial.step_s == 6 * seconds for trial in batched.trials)


@pytest.mark.parametrize(("share", "samples", "tried"), [(0.0, 1000, False), (1e6, 1000, True), (0.0, 3, False)])
def test_another_route_is_compared_where_that_is_short_beside_a_step(
    share: float, samples: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_MIN_COMPARISON_S", 0.0)
    monkeypatch.setattr(comparison, "_MAX_COMPARISON_S", 1e6)
    monkeypatch.setattr(comparison, "_COMPARISON_SHARE", share)
    batched = BatchModule(small(), G, example_inputs=(torch.randn(G, samples, 5),))
    assert ["not tried" not in trial.refused for trial in batched.trials] == [True, tried, True]


def timers(*taken: tuple[float, ...]) -> tuple[dict[int, Callable[[], float]], list[int]]:
    """Steps that take so many seconds in turn, and how often each was taken."""
    calls = [0] * len(taken)

    def step(index: int, seconds: tuple[float, ...]) -> Callable[[], float]:
        def run() -> float:
            calls[index] += 1
            return seconds[calls[index] % len(seconds)]

        return run

    return {index: step(index, seconds) for index, seconds in enumerate(taken)}, calls


def test_a_route_is_timed_by_its_median_and_while_it_is_in_the_race() -> None:
    steps, calls = timers((0.3,), (0.09, 0.13, 0.14), (0.11, 0.11, 0.9))  # behind, a lucky one, a disturbed one
    assert timing._median_seconds(steps, dict.fromkeys(steps, 0.1), limit_s=2.0) == {0: 0.3, 1: 0.13, 2: 0.11}
    assert calls[0] == 2
    assert calls[1] == calls[2] > 2


def test_steps_that_take_long_are_not_taken_again() -> None:
    steps: dict[int, Callable[[], float]] = {0: lambda: 1 / 0, 1: lambda: 1 / 0}
    assert timing._median_seconds(steps, {0: 0.9, 1: 0.8}, limit_s=1.0) == {0: 0.9, 1: 0.8}


def test_the_loop_alone_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second step of its models may fail, where what they keep has a graph still."""
    timed: list[str] = []
    monkeypatch.setattr(timing, "_timer", lambda name, _: timed.append(name))
    batched = different(Stateful(), example_inputs=(images(),))
    assert [(t.name, math.isnan(t.step_s)) for t in batched.trials if not t.refused] == [("loop", True)]
    assert not timed


def test_a_model_whose_steps_all_fail_raises_its_own_error() -> None:
    class Float64Alone(Parts, linear=lambda: nn.Linear(5, 2)):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.double())

    with pytest.raises(RuntimeError, match="same dtype"):
        BatchModule(Float64Alone(), G)(images())


def test_a_route_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda rows, weight, bias: torch.bmm(rows, weight.mT) + bias.unsqueeze(1) * (1 + 1e-8)  # noqa: E731
    monkeypatch.setattr(linear, "product_with", wrong)
    batched = BatchModule(small(), G, example_inputs=(images(),))
    fused = next(t for t in batched.trials if t.name == "fused")
    assert "differs from the loop's" in fused.refused
    assert 1e-10 < fused.difference < 1e-6
    with pytest.raises(UsageError, match=r"the fused route cannot run Sequential.*differs"):
        BatchModule(small(), G, route="fused", example_inputs=(images(),))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.001


def test_a_route_with_other_gradients_or_statistics_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear.product_with
    monkeypatch.setattr(linear, "product_with", lambda *a: WrongGradient.apply(right(*a)))
    (fused, *_) = BatchModule(small(), G, example_inputs=(images(),)).trials
    assert "gradient" in fused.refused
    monkeypatch.undo()
    monkeypatch.setattr(fused_route, "mapped", lambda module: modules.mapped(copy.deepcopy(module)))
    (fused, *_) = BatchModule(nn.BatchNorm1d(5), G, example_inputs=(images(),)).trials
    assert "buffer" in fused.refused


@pytest.mark.slow
def test_trying_the_routes_leaves_no_trace() -> None:
    batched = BatchModule(nn.Sequential(convolutional(), nn.Dropout(0.5)), G)
    before = [s.copy() for s in batched.state_dicts()]
    torch.manual_seed(5)
    random = torch.get_rng_state()
    batched._select((images(1, 5, 5),), {})
    assert torch.equal(torch.get_rng_state(), random)
    assert largest_gap(batched.state_dicts(), before) == 0.0
    assert all(p.grad is None for p in batched.parameters())


class Stateful(Parts, linear=lambda: nn.Linear(5, 2), membrane=None):
    """Keeps its membrane in an attribute, as spiking neurons do."""

    def forward(self, x: Tensor) -> Tensor:
        current = self.linear(x)
        self.membrane = current if self.membrane is None else 0.9 * self.membrane.detach() + current
        return self.membrane


def test_state_in_attributes_is_kept_per_model_by_the_loop() -> None:
    batched = different(Stateful())
    alone = Stateful()
    alone.load_state_dict(batched.state_dicts()[2])
    for _ in range(3):
        torch.testing.assert_close(batched(images())[2], alone(images()[2]))
    refused = {t.name: t.refused for t in batched.trials}
    assert [t.name for t in batched.trials if t.used] == ["loop"]
    assert "keeps state in attributes" in refused["fused"]
    assert "keeps state in attributes" in refused["vmap"]
    assert refused["loop"] == ""


def test_reset_forgets_what_the_models_keep() -> None:
    batched = different(nn.Sequential(Stateful(), nn.BatchNorm1d(2)))
    first = batched(images())
    means = batched.state_dicts()[0]["1.running_mean"]
    assert not torch.equal(batched(images()), first)
    batched.reset()
    assert torch.equal(batched(images()), first)
    assert not torch.equal(batched.state_dicts()[0]["1.running_mean"], means)  # statistics are no such state


def test_spikingjelly_resets_a_batched_network() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    functional = pytest.importorskip("spikingjelly.activation_based.functional")
    net = nn.Sequential(nn.Linear(5, 6), neuron.LIFNode(step_mode="m"), nn.Linear(6, 2))
    batched = BatchModule(net, G)
    outputs = []
    for _ in range(2):
        outputs.append(batched(3 * images()))
        outputs[-1].sum().backward()  # without a reset, through the graph of the first step again
        functional.reset_net(batched)
    assert torch.equal(*outputs)


def test_state_in_a_part_that_cannot_be_traced_is_not_fused() -> None:
    class Checking(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x.shape) == 2
            return super().forward(x)

    (fused, *_) = BatchModule(nn.Sequential(Checking()), G, example_inputs=(images(),)).trials
    assert "keeps state in attributes" in fused.refused


def test_a_buffer_that_is_assigned_anew_is_stacked() -> None:
    class Averages(Parts, weight=lambda: nn.Parameter(torch.ones(5)), mean=lambda: nn.Buffer(torch.zeros(5))):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            return x * self.weight + self.mean

    batched = BatchModule(Averages(), G)
    batched(images())
    batched(images())
    torch.testing.assert_close(batched.state_dicts()[1]["mean"], 1.5 * images()[1].mean(0))


@pytest.mark.parametrize(
    ("draw", "refusals"),
    [
        (
            lambda x: torch.rand(x.size(1)),
            "rand makes numbers|cannot be traced: rand",
        ),  # PyTorch 2.8 traces no such call
        (lambda x: torch.rand(5), "uses random numbers in its own code"),
    ],
    ids=["of a size that is traced", "of a size that is known"],
)
def test_random_numbers_of_a_models_own_are_not_fused(draw: Callable[[Tensor], Tensor], refusals: str) -> None:
    class Noisy(Parts, linear=lambda: nn.Linear(5, 2)):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + draw(x))

    batched = BatchModule(Noisy(), G, example_inputs=(images(),))
    assert re.search(refusals, batched.trials[0].refused)
    same = images()[:1].expand(G, B, 5)
    output = batched(same)
    assert not torch.equal(output[0], output[1])


def test_hooks_are_run_by_the_other_routes() -> None:
    seen: list[torch.Size] = []
    model = small()
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))  # type: ignore[index]
    batched = BatchModule(model, G, example_inputs=(images(),))
    assert "module '0' has hooks" in batched.trials[0].refused
    seen.clear()
    batched(images())
    assert set(seen) == {(B, 6)}


def test_the_trials_tell_why_vmap_cannot_run_a_recurrent_layer() -> None:
    batched = BatchModule(nn.GRU(5, 2), G, example_inputs=(images(),))
    assert {t.name: bool(t.refused) for t in batched.trials} == {"fused": False, "vmap": True, "loop": False}
    assert "gru" in batched.trials[1].refused


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


PLAN = Plan(segments=(SegmentPlan(path="first"), SegmentPlan(path="second", chunks=2, axis=0)))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["fused", "loop"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_segments_work_inside_a_batched_model(route: RouteName, when: str) -> None:
    plain = BatchModule(Chain().double(), G, route=route)
    carrying = BatchModule(apply_plan(Chain(), PLAN).double() if when == "before" else Chain().double(), G, route=route)
    if when == "after":
        carrying(images().double())
        apply_plan(carrying.models, PLAN)
    carrying.load_state_dict(plain.state_dict())
    calls: list[int] = []
    found = []
    for batched in (plain, carrying):
        batched.models.get_submodule("second.1").p = 0.0  # type: ignore[assignment]
        given = images().double().requires_grad_()
        output = batched(given)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: calls.append(t.numel()) or t, lambda t: t):
            output = batched(given)
        output.square().sum().backward()
        found.append([output, given.grad, *(p.grad for p in batched.parameters()), *batched.buffers()])
        calls.append(-1)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    first, second = " ".join(map(str, calls)).split(" -1")[:2]
    assert len(second.split()) < len(first.split())  # what is recomputed is not saved


class Flat(nn.Module):
    """No module between its layers and the whole: what is recomputed is a run of layers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [(nn.Conv2d(a, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for a in (3, 4, 4, 4, 4, 4)]
        self.features = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((-1, -2))


RUNS = Plan(segments=tuple(SegmentPlan(path=f"features.{path}") for path in ("0-2", "3-8", "3-8.4", "9-14")))
FEWER_RUNS = Plan(segments=(SegmentPlan(path="features.0-2"),))


def step_of(batched: BatchModule) -> tuple[list[Tensor], int]:
    """What one step leaves, in float64, and its tensor peak."""
    given = images(3, 12, 12).double().requires_grad_()
    step = TrainingStep(model=batched, args=(given,), kwargs={}, settings=StepSettings(device="cpu"))
    batched.zero_grad()
    output = batched(given)
    output.square().sum().backward()
    left = [output.detach(), given.grad, *(p.grad for p in batched.parameters()), *map(torch.clone, batched.buffers())]
    return left, count_step(step).tensor_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("route", "when"), [("fused", "before"), ("loop", "after")])
def test_runs_of_layers_are_recomputed_inside_a_batched_model(route: RouteName, when: str) -> None:
    plain = BatchModule(Flat().double(), G, route=route)
    carrying = BatchModule(apply_plan(Flat().double(), RUNS) if when == "before" else Flat().double(), G, route=route)
    carrying.load_state_dict(plain.state_dict())
    expected, whole = step_of(plain)
    if when == "after":
        apply_plan(carrying.models, RUNS)
    found, peak = step_of(carrying)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert peak < 0.8 * whole


@pytest.mark.slow
def test_other_runs_are_met_by_the_next_call() -> None:
    batched = BatchModule(apply_plan(Flat().double(), RUNS), G, route="fused")
    _, least = step_of(batched)
    remove_segments(batched.models)  # the Sequential has the same runs still
    _, whole = step_of(batched)
    apply_plan(batched.models, FEWER_RUNS)
    _, between = step_of(batched)
    assert least < between < whole


class Stages(nn.Sequential):
    def __spatial_split__(self) -> list[nn.Module]:
        return [self[:1], self[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("route", ["fused", "loop"])
def test_a_spatially_split_segment_works_inside_a_batched_model(route: RouteName) -> None:
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)]
    plain = different(nn.Sequential(*layers), route="loop")
    plan = Plan(segments=(SegmentPlan(path="", spatial_split=True),))
    split = BatchModule(apply_plan(Stages(*layers), plan), G, route=route)
    split.load_state_dict(plain.state_dict())
    for batched in (plain, split):
        batched(images()).square().sum().backward()
    for a, b in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("route", ["fused", "loop"])
def test_a_head_that_runs_through_its_loss_meets_it_whole(route: RouteName) -> None:
    targets, plain = torch.randint(0, 2, (G, B)), different(small(), route="loop")
    plan = Plan(segments=(SegmentPlan(path="2", chunks=2, through_loss=True),))
    carrying = BatchModule(apply_plan(small(), plan), G, route=route)
    carrying.load_state_dict(plain.state_dict())
    for batched in (plain, carrying):
        batch_loss(batched(images()), targets, G, F.cross_entropy).sum().backward()
    for a, b in zip(plain.parameters(), carrying.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_vmap_refuses_segments_with_the_reason() -> None:
    with pytest.raises(UsageError, match="the vmap route cannot run Chain: module 'first' is a segment"):
        BatchModule(apply_plan(Chain(), PLAN), G, route="vmap", example_inputs=(images(),))


def test_a_segment_in_what_cannot_be_traced_is_refused_by_name() -> None:
    class Untraceable(Parts, inner=lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh())):
        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda y, _: self.inner(y), range(len(x)), x)  # a proxy has no length

    model = apply_plan(nn.Sequential(Untraceable()), Plan(segments=(SegmentPlan(path="0.inner"),)))
    batched = BatchModule(model, G, example_inputs=(images(),))
    refused = {trial.name: trial.refused for trial in batched.trials}
    assert "module '0.inner' is a segment, and checkpoints" in refused["fused"]
    assert not refused["loop"]


def test_level_1_goes_onto_a_batched_model() -> None:
    batched = different(small(), route="fused")
    expected = batched(images())
    assert memory_optimization(batched, nn.Linear, level=1) is batched
    assert [segment.path for segment in plan_of(batched).segments] == ["models.0", "models.2"]
    torch.testing.assert_close(batched(images()), expected)


def test_a_batched_model_is_not_measured_and_the_reason_says_what_to_do() -> None:
    batched = BatchModule(Chain(), G)
    with pytest.raises(UsageError, match=r"module '\(root\)' is a BatchModule") as refused:
        memory_optimization(batched, nn.Linear, (images(),), level=2)
    assert "Optimize the model that it batches" in refused.value.hint


@pytest.mark.process
def test_a_file_of_a_batched_model_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Sequential(BatchModule(small(), G)), tmp_path / "batched.pt")
    source = ModelSource(location=str(tmp_path / "batched.pt"), trust=Trust(pickle=True))
    with pytest.raises(UsageError, match="module '0' is a BatchModule"):
        prepare(load_request(source), progress=Progress(), ask=None)


@pytest.mark.process
@pytest.mark.parametrize("ran", [False, True])
def test_a_plan_of_one_model_goes_onto_a_file_of_a_batched_model(ran: bool, tmp_path: Path) -> None:
    batched = different(small())
    if ran:
        batched(images())
    torch.save(batched, tmp_path / "batched.pt")
    subject = prepare_small(tmp_path)
    plan = Plan(segments=(SegmentPlan(path="0"), SegmentPlan(path="2")))
    (tmp_path / "p.plan.yaml").write_bytes(plan_yaml(file_header(subject), plan, 3))
    source = ModelSource(location=str(tmp_path / "batched.pt"))  # trusted as other modules of memopt are
    request = ApplyRequest(source=source, plan_path=str(tmp_path / "p.plan.yaml"))
    (written,) = apply(request, progress=Progress()).files
    carrying = memopt_cli.load(written)
    assert [segment.path for segment in plan_of(carrying).segments] == ["models.0", "models.2"]
    torch.testing.assert_close(carrying(images()), batched(images()))
    assert {trial.name for trial in carrying.trials if not trial.refused} == {"fused", "loop"}


def load_request(source: ModelSource) -> LoadRequest:
    return LoadRequest(source=source, spec=None, settings=StepSettings(device="cpu"), timeout_s=300)


def prepare_small(folder: Path) -> PreparedModel:
    torch.save(small(), folder / "one.pt")
    source = ModelSource(location=str(folder / "one.pt"))
    return prepare(load_request(source), progress=Progress(), ask=None)


class Scale(Parts, factor=lambda: nn.Parameter(torch.ones(())), offset=lambda: nn.Buffer(torch.full((5,), 2.0))):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset if x.mean() > -1e9 else x  # cannot be traced, nor mapped


class BatchScale(AbstractBatchModule):
    base_class = Scale

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.factor = nn.Parameter(torch.empty(batch))
        self.register_shared_buffer("offset", torch.zeros(5))

    def forward(self, merged: Tensor) -> Tensor:
        images = len(merged) // self.batch
        return merged * self.factor.repeat(images).unsqueeze(1) + self.offset


@pytest.fixture
def registered() -> None:
    register_batch_module(BatchScale)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("route", ["fused", "loop"])
def test_a_registered_batch_module_runs_in_place_of_its_own(route: RouteName) -> None:
    batched = BatchModule(nn.Sequential(nn.Linear(5, 5), Scale()), G, route=route)
    assert isinstance(batched.models[1], BatchScale)  # type: ignore[index]
    states = batched.state_dicts()
    for g, state in enumerate(states):
        state["1.factor"].fill_(g)
    batched.load_state_dicts(states)
    output = batched(images())
    output.sum().backward()
    for g, state in enumerate(batched.state_dicts()):
        alone = nn.Sequential(nn.Linear(5, 5), Scale())
        alone.load_state_dict(state)
        wanted = alone(images()[g])
        wanted.sum().backward()
        torch.testing.assert_close(output[g], wanted)
        for name, parameter in alone.named_parameters():
            gradient = batched.models.get_parameter(name).grad
            torch.testing.assert_close(gradient[g], parameter.grad)


@pytest.mark.usefixtures("registered")
def test_a_shared_buffer_must_be_the_same_in_every_state() -> None:
    batched = BatchModule(Scale(), G)
    assert batched.models.get_buffer("offset").shape == (5,)
    states = batched.state_dicts()
    states[1]["offset"] += 1
    with pytest.raises(UsageError, match="'offset' is shared"):
        batched.load_state_dicts(states)


class Doubled(BatchScale):
    def forward(self, merged: Tensor) -> Tensor:
        return super().forward(merged) * 2


class OfTheFirst(BatchScale):
    def forward(self, merged: Tensor) -> Tensor:
        return merged * self.factor[0] + self.offset


@pytest.mark.parametrize("wrong", [Doubled, OfTheFirst])
def test_a_wrong_batch_module_is_found_out(wrong: type[AbstractBatchModule]) -> None:
    register_batch_module(wrong)
    with pytest.raises(UsageError, match="differs from the loop's"):
        BatchModule(Scale(), G, route="fused", example_inputs=(images(),))


def test_a_batch_module_with_other_parameters_is_refused() -> None:
    class Renamed(AbstractBatchModule):
        base_class = Scale

    register_batch_module(Renamed)
    with pytest.raises(UsageError, match=r"Renamed at '\(root\)' has 'factor' of shape None.*\(3,\)"):
        BatchModule(Scale(), G)
    with pytest.raises(UsageError, match="Scale is not an AbstractBatchModule"):
        register_batch_module(Scale)  # type: ignore[type-var]


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (scripted, "ScriptModule"),
        (lambda: nn.LazyLinear(3), "not initialized"),
        (lambda: nn.Embedding(3, 2, sparse=True), "sparse gradients"),
        (lambda: nn.SyncBatchNorm(3), "several devices"),
    ],
)
def test_what_no_route_can_run_is_refused_by_name(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(UsageError, match=f"module '0' .*cannot be batched: .*{reason}"):
        BatchModule(nn.Sequential(make()), G)


def test_outputs_of_different_shapes_are_refused() -> None:
    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    with pytest.raises(UsageError, match="different shapes"):
        BatchModule(Selects(), G)(images())

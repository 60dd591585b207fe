"""The state of a module advances once a step, and each recomputation starts where its forward started."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime import SegmentConfig, install_segment, is_recomputing, reset_hidden_state
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.runtime.state import StartingState, has_recurrent_dropout
from tests.zoo.models import GIVEN, Loop, Parts
from tests.zoo.segments import with_segments

PLAIN = SegmentConfig()


class Membranes(NamedTuple):
    v: Tensor
    i: Tensor


class Keeper(nn.Module):
    """Keeps something, lets it change what it computes, and changes it; ``advance`` returns a factor."""

    def __init__(self, kept: Any, advance: Callable[[Keeper, Tensor], Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept, self.advance = kept, advance
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        output: Tensor = self.after((y * self.advance(self, y)).tanh())
        self.seen += 1
        return output


def counter(m: Keeper, y: Tensor) -> int:
    m.kept += 1
    return m.kept


def counter_dict(m: Keeper, y: Tensor) -> int:
    m.kept["calls"] += 1
    return m.kept["calls"]


def history(m: Keeper, y: Tensor) -> int:
    m.kept.append(1)
    return len(m.kept)


def visited(m: Keeper, y: Tensor) -> int:
    m.kept.add(len(m.kept))
    return len(m.kept)


def list_of_tensors(m: Keeper, y: Tensor) -> Tensor:
    m.kept.append(y if not m.kept else m.kept[-1] * 0.5 + y)
    return m.kept[-1]


def dict_of_tensors(m: Keeper, y: Tensor) -> Tensor:
    m.kept["v"] = y if "v" not in m.kept else m.kept["v"] * 0.5 + y
    return m.kept["v"]


def nested(m: Keeper, y: Tensor) -> Tensor:
    m.kept["layers"][0]["v"] = m.kept["layers"][0]["v"] * 0.5 + y
    return m.kept["layers"][0]["v"]


def membrane(m: Keeper, y: Tensor) -> Tensor:
    m.kept = y if m.kept is None else m.kept * 0.5 + y
    return m.kept


def pair(m: Keeper, y: Tensor) -> Tensor:
    m.kept = (m.kept[0] * 0.5 + y, m.kept[1] + 1)
    return m.kept[0] * m.kept[1]


def named_pair(m: Keeper, y: Tensor) -> Tensor:
    m.kept = Membranes(m.kept.v * 0.5 + y, m.kept.i)
    m.kept.i.add_(1)
    return m.kept.v * m.kept.i.clone()


def in_place(m: Keeper, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.kept.mul_(0.5).add_(y.mean())
    return m.kept.clone()


def in_place_in_tuple(m: Keeper, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.kept[0].add_(1)
    return m.kept[0].clone()


def read_then_in_place(m: Keeper, y: Tensor) -> Tensor:
    if m.seen % 3:  # of three calls, the first only reads it
        with torch.no_grad():
            m.kept.mul_(0.5).add_(y.mean())
    return m.kept.clone()


def in_place_with_a_graph(m: Keeper, y: Tensor) -> Tensor:
    m.kept = y * 0 if m.kept is None else m.kept
    m.kept.mul_(y.sin()).add_(y)
    return m.kept.clone()


def buffer(m: Keeper, y: Tensor) -> Tensor:
    return m.seen + 1


def own_generator(m: Keeper, y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=m.kept)


def as_another_dtype(m: Keeper, y: Tensor) -> Tensor:
    with torch.no_grad():
        m.kept[0].mul_(0.5)
    return m.kept[1].abs().sum()


def new_attribute(m: Keeper, y: Tensor) -> int:
    m.last = getattr(m, "last", 0) + 1  # type: ignore[assignment]
    return m.last


def removed_attribute(m: Keeper, y: Tensor) -> int:
    if hasattr(m, "kept"):
        del m.kept
        return 2
    return 3


KEPT: list[tuple[Any, Callable[[Keeper, Tensor], Any]]] = [
    (0, counter),
    (Counter(), counter_dict),
    ([], history),
    (deque(maxlen=2), history),
    (set(), visited),
    ([], list_of_tensors),
    ({}, dict_of_tensors),
    ({"layers": [{"v": torch.zeros(4)}]}, nested),
    (None, membrane),
    ((torch.zeros(4), 0), pair),
    (Membranes(torch.zeros(5, 4), torch.ones(5, 4)), named_pair),
    (torch.ones(4), in_place),
    (torch.ones(5, 4), in_place),
    ((torch.ones(5, 4),), in_place_in_tuple),
    (torch.ones(5, 4), read_then_in_place),
    (None, in_place_with_a_graph),
    (None, buffer),
    (torch.Generator().manual_seed(1), own_generator),
    ([pairs := torch.rand(4, 2), torch.view_as_complex(pairs)], as_another_dtype),
    ([octets := torch.rand(4, 3), octets.view(torch.uint8)[1:, 2:-1]], as_another_dtype),
    (None, new_attribute),
    (None, removed_attribute),
]
IDS = [f"{kind.__name__}-{type(kept).__name__}-{i}" for i, (kept, kind) in enumerate(KEPT)]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("kept", "advance"), KEPT, ids=IDS)
def test_state_in_an_attribute(judge: Any, kept: Any, advance: Callable[[Keeper, Tensor], Any], times: int) -> None:
    net = judge(Loop(Keeper(kept, advance), times), {"block": PLAIN}, torch.randn(5, 4), steps=2)
    assert net.block.seen == 2 * times
    # What the second call writes and the first only read is not copied before: that call keeps what it saves.
    surprised = advance is read_then_in_place and times == 1
    assert judge.recomputations == 2 * times - surprised


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "advance"), KEPT, ids=IDS)
def test_state_in_nested_segments(judge: Any, kept: Any, advance: Callable[[Keeper, Tensor], Any]) -> None:
    inner = nn.Sequential(Keeper(kept, advance), nn.BatchNorm1d(4))
    net = judge(Loop(nn.Sequential(inner, nn.Tanh()), 2), {"block": PLAIN, "block.0.0": PLAIN}, torch.randn(5, 4))
    assert net.block[0][0].seen == 2 * 2
    assert net.block[0][1].num_batches_tracked == 2 * 2


class Scheduled(nn.Module):
    """Its caller tells it which time step it is, as batch norm through time needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.t = nn.Linear(4, 4), 0
        self.scales = nn.Parameter(torch.randn(3, 4))
        self.current = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scales[self.t] + self.current).tanh()


class Scheduling(Parts, first=lambda: nn.Linear(4, 4), block=Scheduled):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for t in range(3):
            self.block.t, self.block.current = t, torch.full((4,), float(t))
            x = self.block(x)
        return x


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 0


@dataclass
class Plain:
    factor: int = 0


def raise_factor(kept: Any) -> int:
    kept.factor += 1
    return int(kept.factor)


def raise_first(kept: Any) -> int:
    kept[0] += 1
    return int(kept[0])


def append(kept: Any) -> int:
    kept.append(1)
    return len(kept)


def add(kept: set[int]) -> int:
    kept.add(len(kept))
    return len(kept)


def count(kept: dict[str, int]) -> int:
    kept["calls"] = kept.get("calls", 0) + 1
    return kept["calls"]


class Late(Parts, before=lambda: nn.Linear(4, 4), after=lambda: nn.Linear(4, 4), kept=GIVEN, change=GIVEN, calls=0):
    """Changes what it keeps from the third call on, and computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.before(x).tanh()
        return self.after(y * self.change(self.kept) if self.calls > 2 else y)


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (Plain(), raise_factor),
        (Slotted(), raise_factor),
        ([], append),
        (deque(), append),
        (set(), add),
        ({}, count),
        (Counter(), count),
        (random.Random(1), lambda kept: kept.randrange(2, 9)),
        (np.random.default_rng(1), lambda kept: int(kept.integers(2, 9))),
        (np.random.RandomState(1), lambda kept: int(kept.randint(2, 9))),
        (torch.Generator().manual_seed(1), lambda kept: int(torch.randint(2, 9, (), generator=kept))),
        (np.zeros(3), raise_first),
        (bytearray(3), raise_first),
        ([Plain()], lambda kept: raise_factor(kept[0])),
        ((Slotted(), 1), lambda kept: raise_factor(kept[0])),
        ({"a": deque()}, lambda kept: append(kept["a"])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_first_changed_in_a_later_call(judge: Any, kept: Any, change: Callable[[Any], int]) -> None:
    judge(Loop(Late(kept, change), 1), {"block": PLAIN}, torch.randn(5, 4), steps=6)


def test_an_attribute_that_the_caller_changes_between_calls(judge: Any) -> None:
    judge(Scheduling(), {"block": PLAIN}, torch.randn(5, 4))
    assert judge.recomputations == 2 * 3


def test_what_another_changes_in_place_before_backward_is_told() -> None:
    block = Keeper(torch.ones(5, 4), lambda m, y: m.kept)
    install_segment(block, PLAIN)
    output = block(torch.randn(5, 4)).sum()
    block.kept.add_(1)
    with pytest.raises(RuntimeError, match=r"tensor of shape \(5, 4\) that Keeper reads was modified in place"):
        output.backward()


def test_lists_that_others_hold_too_stay_the_same_object() -> None:
    log: list[int] = []
    block = Keeper(log, history)
    install_segment(block, PLAIN)
    block(torch.randn(5, 4)).sum().backward()
    assert block.kept is log
    assert log == [1]


def test_parameters_and_children_are_no_state() -> None:
    class Growing(Parts, inner=lambda: nn.Linear(4, 4)):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                self.inner.weight.grad_was_here = True  # type: ignore[attr-defined]
            return self.inner(x).tanh()

    block = Growing()
    weight = block.inner.weight
    install_segment(block, PLAIN)
    block(torch.randn(5, 4)).sum().backward()
    assert block.inner.weight is weight
    assert weight.grad is not None
    assert list(ModuleState(block).tensors()) == []


def test_copies_of_unchanged_tensors_are_dropped() -> None:
    block = nn.BatchNorm2d(4)
    block.register_buffer("large", torch.ones(50, 50))
    start = StartingState(block)
    with torch.no_grad():
        block(torch.randn(3, 4, 2, 2))
    start.end_forward()
    assert start._held is not None
    assert [held.copy is not None for held in start._held.tensors.values()] == [True] * 3  # statistics and counter


@pytest.mark.parametrize(("layer", "kept"), [(nn.Tanh(), 1), (nn.Dropout(0.5), 2)])
def test_where_the_generators_stand_is_held_once(layer: nn.Module, kept: int) -> None:
    block, x = nn.Sequential(nn.Linear(4, 4), layer), torch.randn(5, 4)
    first = StartingState(block)
    block(x)
    second = StartingState(block)
    positions = [start._generators._positions[torch.device("cpu")] for start in (first, second)]
    assert len({id(position) for position in positions}) == kept


class Forking(Parts, inner=lambda: nn.Linear(4, 4)):
    """Draws, and leaves the generator where it stood."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            mask = torch.rand_like(x)
        return (self.inner(x) * mask).tanh()


def test_a_forward_that_draws_without_moving_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # others may draw, and are not to draw the same again
    plain = Forking()
    optimized = with_segments(plain, PLAIN)
    x = torch.randn(5, 4)
    for net in (plain, optimized):
        torch.manual_seed(0)
        output = net(x)
        torch.rand(3)  # others draw before backward
        output.sum().backward()
    assert torch.equal(plain.inner.weight.grad, optimized.inner.weight.grad)


class Scaled(Parts, inner=lambda: nn.Linear(4, 4), scale=lambda: torch.full((4,), 2.0, requires_grad=True)):
    """Reads a vector that requires a gradient and is no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale).tanh()


def test_a_vector_of_the_state_that_requires_a_gradient() -> None:
    block = Scaled()
    install_segment(block, PLAIN)
    block(torch.randn(5, 4)).sum().backward()
    assert block.scale.grad is not None


def test_restore_undoes_everything() -> None:
    block = Keeper({"a": [torch.zeros(3)]}, history)
    block.eval()
    state = ModuleState(block)
    block.kept["a"].append(1)
    block.kept["b"] = 2
    block.other = 3  # type: ignore[assignment]
    block.seen = torch.ones(())
    block.train()
    state.restore()
    assert list(block.kept) == ["a"]
    assert len(block.kept["a"]) == 1
    assert not hasattr(block, "other")
    assert block.seen == 0
    assert not block.training


def test_hidden_state_with_a_graph_is_detached() -> None:
    class Views(Parts, inner=lambda: nn.Linear(4, 4), mem=None):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.mem = {"view": y[0], "pair": Membranes(y * 2, y * 3), "list": [y.exp()], "split": y.unbind(0)}
            return y

    net = nn.Sequential(Views())
    net(torch.randn(5, 4))
    with pytest.raises(RuntimeError):
        copy.deepcopy(net)
    value = net[0].mem["view"].clone()
    reset_hidden_state(net)
    assert all(t.grad_fn is None for t in ModuleState(net).tensors())
    assert torch.equal(net[0].mem["view"], value)
    assert isinstance(net[0].mem["pair"], Membranes)
    copy.deepcopy(net)
    pickle.dumps(net[0].mem)


def test_neurons_are_reset_their_own_way() -> None:
    class Memory(Parts, _memories=lambda: {"v": 3.0}):
        def reset(self) -> None:
            self._memories["v"] = 0.0

    class Other(Parts, mem=lambda: torch.ones(3)):
        def reset(self) -> None:
            raise AssertionError("not a neuron's reset")

        def reset_mem(self) -> None:
            self.mem = torch.zeros(3)

    net = nn.Sequential(Memory(), Other())
    reset_hidden_state(net)
    assert net[0]._memories == {"v": 0.0}
    assert not net[1].mem.any()


def test_snntorch_neurons(judge: Any) -> None:
    snntorch = pytest.importorskip("snntorch")
    for kind in (snntorch.Leaky, snntorch.Synaptic):
        settings = {"alpha": 0.8} if kind is snntorch.Synaptic else {}
        neuron = kind(beta=0.9, init_hidden=True, **settings)
        judge(Loop(nn.Sequential(nn.Linear(4, 4), neuron), 3), {"block": PLAIN}, torch.randn(5, 4) * 3)


class Scripted(Parts, norm=lambda: nn.BatchNorm1d(4), calls=0, membrane=lambda: torch.zeros(4), history=lambda: [0]):
    """Keeps a number, tensors, a list and batch statistics, all within a program."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.membrane = 0.5 * self.membrane + x.detach().mean(0)
        normed: Tensor = self.norm(x)
        return (normed * self.membrane).tanh() * float(len(self.history))


def with_a_script() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(4, 4, bias=False)  # of a bias before a batch norm the gradient is 0, but for rounding
    return nn.Sequential(first, torch.jit.script(Scripted()), nn.Linear(4, 4))  # type: ignore[no-untyped-call]


def test_what_scripts_within_keep_advances_once(judge: Any) -> None:
    plain, segment = with_a_script(), with_a_script()
    install_segment(segment, PLAIN)
    judge.tolerance = 1e-5  # in a segment a script runs as it is written: its executor does not merge formulas
    judge.compare(plain, segment, torch.randn(6, 4), steps=3)
    assert judge.recomputations == 3
    for model in (plain, segment):
        assert (model[1].calls, model[1].history, model[1].norm.num_batches_tracked) == (3, [0, 1, 2, 3], 3)


def test_a_script_whose_parameter_is_written_before_backward() -> None:
    segment = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.Tanh())  # type: ignore[no-untyped-call]
    install_segment(segment, PLAIN)
    output = segment(torch.randn(2, 4))
    with torch.no_grad():
        segment[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"the parameter weight of shape .* was modified in place"):
        output.sum().backward()


def test_parametrizations_that_are_cached_in_forward_alone() -> None:
    """The first call computes the weight, the second finds it; backward runs where nothing is cached."""
    gradients = []
    for installs in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())
        if installs:
            install_segment(model, PLAIN)
        x = torch.randn(3, 4)
        with torch.nn.utils.parametrize.cached():
            output = model(model(x))
        output.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert not torch.nn.utils.parametrize._cache
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (lambda: nn.LSTM(3, 3, 2, dropout=0.5), True),
        (lambda: torch.jit.script(nn.GRU(3, 3, 2, dropout=0.5)), True),
        (lambda: type("Own", (nn.LSTM,), {})(3, 3, 2, dropout=0.5), True),
        (lambda: nn.LSTM(3, 3, 2, dropout=0.5).eval(), False),
        (lambda: nn.RNN(3, 3, 2), False),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_recurrent_dropout_is_found(layer: Callable[[], nn.Module], draws: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer())
    assert has_recurrent_dropout(model) is draws


class Collecting(Parts, layers=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seen=0):
    """Collects the outputs of its layers by hooks that it adds in its first forward, as models of transformers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        collected: list[Tensor] = []
        if not hasattr(self, "has_hooks"):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.collected.append(output))
            self.has_hooks = True
        self.collected = collected
        self.seen += 1
        return self.layers(x), len(collected)


def test_a_model_that_adds_hooks_once_has_them_once_from_its_starting_state_on() -> None:
    model, x = Collecting(), torch.ones(2, 4)
    start = StartingState(model)
    for _ in range(3):
        start.restore()
        assert model(x)[1] == 2
        assert model.seen == 1

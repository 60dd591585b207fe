"""Forwards that do something for the first time in a later call, when the first one has shown what to watch."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import random as of_python
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.random as of_numpy
import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime import SegmentConfig, install_segment
from tests.zoo.models import GIVEN, Overwriting, Parts, counter

PLAIN = SegmentConfig()
HELD = {"NumPy": np.random}
LATER = 2
"""Calls before anything happens."""


class Later(nn.Module):
    """Scales by what ``change`` gives, from the third call on."""

    def __init__(self, change: Callable[[Later, Tensor], Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.change, self.calls, self.rate = change, 0, 0.0
        self.state: Any = {"h": [1]}
        self.function: Callable[[], float] = one
        self.pair = torch.ones(5, 4), "of a tensor and a string"
        self.register_buffer("rows", torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.before(x).tanh()
        factor = self.change(self, y) if self.calls > LATER else 1
        return self.after(y * factor).tanh()


def one() -> float:
    return 1.0


@dataclass
class Counting:
    """Counts what it is asked."""

    asked: int = 0
    log: list[int] = field(default_factory=list)

    def ask(self) -> int:
        self.asked += 1
        self.log.append(self.asked)
        return len(self.log)


class Method:
    """A decorator that counts the calls of a method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return lambda: self.function(instance, self)


class Decorated(Later):
    @Method
    def counted(self, method: Method) -> int:
        method.calls += 1
        return method.calls


def ordered(module: Later, y: Tensor) -> int:
    """Use a dictionary as an ordered set."""
    module.state.pop(next(iter(module.state)))
    module.state[module.calls] = None
    return sum(key for key in module.state if isinstance(key, int))


def new_list(module: Later, y: Tensor) -> int:
    if module.calls == LATER + 1:
        module.state["h"] = [2]
    module.state["h"].append(1)
    return len(module.state["h"])


def new_function(module: Later, y: Tensor) -> float:
    if module.function is one:
        module.function = counter()
    return module.function()


def new_object(module: Later, y: Tensor) -> int:
    if not isinstance(module.state, Counting):
        module.state = Counting()
    return module.state.ask()


def written_in_a_tuple(module: Later, y: Tensor) -> Tensor:
    with torch.no_grad():
        module.pair[0].add_(1)
    return module.pair[0]


def backward_within(module: Later, y: Tensor) -> int:
    y.sum().backward(retain_graph=True)
    return 1


CHANGES: dict[str, Callable[[Later, Tensor], Any]] = {
    "keys of a dictionary": ordered,
    "a list in a dictionary": new_list,
    "a function with a variable around it": new_function,
    "an object of another class": new_object,
    "a tensor in a tuple": written_in_a_tuple,
    "backward in forward": backward_within,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:.*calls backward in its forward")
def test_it_is_repeated_or_kept(judge: Any, name: str) -> None:
    judge(nn.Sequential(nn.Linear(4, 4), Later(CHANGES[name])), {"1": PLAIN}, torch.randn(5, 4), steps=6)


def test_a_method_that_an_object_decorates() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Decorated(lambda m, y: m.counted()))  # type: ignore[attr-defined]
    Decorated.__dict__["counted"].calls = 0
    factors = []
    for planned in (False, True):
        Decorated.__dict__["counted"].calls = net[1].calls = 0
        if planned:
            install_segment(net[1], PLAIN)
        for _ in range(5):
            net(torch.randn(5, 4)).sum().backward()
        factors.append(Decorated.__dict__["counted"].calls)
    assert factors == [3, 3]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: float(np.random.rand()),
        lambda: of_python.uniform(0, 1),
        lambda: float(of_numpy.uniform()),
        lambda: float(HELD["NumPy"].uniform()),
    ],
)
@pytest.mark.parametrize("by_itself", [True, False])
def test_global_generators_of_others(draw: Callable[[], float], by_itself: bool) -> None:
    """A schedule turns drop path on."""
    drop = Later(lambda m, y: 1.0 if m.rate == 0 and not by_itself else 0.5 + draw())
    net = nn.Sequential(nn.Linear(4, 4), drop)

    def schedule(model: nn.Module, step: int) -> None:
        model[1].rate = 0.5 * (step > 2)  # type: ignore[index]

    gradients = []
    for planned in (False, True):
        if planned:
            install_segment(net[1], PLAIN)
        random.seed(0)
        np.random.seed(0)
        drop.calls = 0
        net.zero_grad()
        for step in range(6):
            schedule(net, step)
            net(torch.ones(5, 4)).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


class Asking(Parts, linear=lambda: nn.Linear(4, 4)):
    """Scales, if it has an attribute that says by how much."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).tanh() * getattr(self, "factor", 1.0)).tanh()


def test_an_attribute_that_is_removed_before_backward() -> None:
    """The attribute is the last one, so that all others stay in their places."""
    net, x, gradients = Asking(), torch.randn(5, 4), []
    for planned in (False, True):
        if planned:
            install_segment(net, PLAIN)
        net.factor = 2.0
        net(x).sum().backward()
        output = net(x)
        del net.factor
        gradients += torch.autograd.grad(output.sum(), net.linear.weight)
    assert torch.equal(*gradients)
    assert not hasattr(net, "factor")


class Noisy(Parts, linear=lambda: nn.Linear(4, 4)):
    """Ends in an operator that saves its noise before it draws it, where it is told to."""

    def forward(self, x: Tensor, noisy: bool) -> Tensor:
        y = self.linear(x)
        return torch.rrelu(y, training=True) if noisy else y.relu()


def test_noise_that_no_earlier_call_drew() -> None:
    net, gradients = Noisy(), []
    for planned in (False, True):
        if planned:
            install_segment(net, PLAIN)
        torch.manual_seed(0)
        net.zero_grad()
        for step in range(6):
            net(torch.randn(50, 4), step > LATER).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


class Given(Parts, linear=lambda: nn.Linear(4, 4)):
    """Scales by what it is given."""

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        y = self.linear(x).tanh()
        if isinstance(given, Iterator):
            y = y * next(given)
        elif callable(given):
            y = y * given()
        return self.linear(y).tanh()


@pytest.mark.parametrize("make", [counter, lambda: (n for n in range(1, 9)), lambda: itertools.count(1)])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.filterwarnings("ignore:.*may move it on")
def test_an_argument_that_counts(make: Callable[[], Any], first: int) -> None:
    torch.manual_seed(0)
    net, gradients = Given(), []
    for planned in (False, True):
        if planned:
            install_segment(net, PLAIN)
        net.zero_grad()
        for step in range(5):
            net(torch.ones(5, 4, requires_grad=True), make() if step >= first else None).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


class Sentinel(Later):
    """Has a value of no meaning where there is nothing yet."""

    nothing = object()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.state is self.nothing:
            self.state = torch.zeros(4)
        output: Tensor = y * (1 + self.state)
        self.state = self.state + 0.5
        return output


def test_a_value_that_is_asked_for_by_its_identity() -> None:
    sentinel = Sentinel(lambda m, y: 1)
    sentinel.state = Sentinel.nothing
    gradients = []
    for planned in (False, True):
        if planned:
            install_segment(sentinel, PLAIN)
        sentinel.state, sentinel.calls = Sentinel.nothing, 0
        sentinel.zero_grad()
        for _ in range(3):
            sentinel(torch.ones(5, 4, requires_grad=True)).sum().backward()
        gradients.append([p.grad.clone() for p in sentinel.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_what_writes_over_its_input_is_recomputed_from_its_second_call_on(judge: Any) -> None:
    judge(nn.Sequential(nn.Linear(4, 4), Overwriting()), {"1": PLAIN}, torch.randn(5, 4), steps=4)
    assert judge.recomputations == 3


class Catching(Parts, linear=lambda: nn.Linear(4, 4)):
    """Goes on where its last operator fails."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sigmoid()
        try:
            output: Tensor = y.tanh()
        except Exception:
            output = y.sin()
        return output


def test_a_forward_that_catches_any_exception_stays_a_segment(judge: Any) -> None:
    judge(nn.Sequential(nn.Linear(4, 4), Catching()), {"1": PLAIN}, torch.randn(5, 4), steps=4)
    assert judge.recomputations == 4


def test_what_changes_first_in_the_very_call_that_cannot_run_again_is_an_error() -> None:
    def change(module: Later, y: Tensor) -> Any:
        module.rows.add_(1)
        return torch.func.grad(lambda x: x.square().sum())(torch.ones(4))

    net = Later(change)
    install_segment(net, PLAIN)
    x = torch.ones(5, 4, requires_grad=True)
    for _ in range(LATER):
        net(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"torch\.func and changed something that it did not change before"):
        net(x)


def test_models_of_a_class_that_refers_to_them_are_freed() -> None:
    def made() -> weakref.ref[nn.Module]:
        class Local(Parts, linear=lambda: nn.Linear(4, 4)):
            def forward(self, x: Tensor) -> Tensor:
                assert model is not None
                return self.linear(x).tanh()  # type: ignore[no-any-return]

        model = nn.Sequential(nn.Linear(4, 4), Local())
        install_segment(model[1], PLAIN)
        model(torch.randn(2, 4)).sum().backward()
        return weakref.ref(model)

    alive = [made() for _ in range(3)]
    gc.collect()
    assert [one() for one in alive] == [None] * 3


class Trying(Parts, inner=GIVEN):
    """Runs what fails at first, and then again."""

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError):
            self.inner(x[:, :3])
        return self.inner(x)  # type: ignore[no-any-return]


class Moved(Parts, linear=lambda: nn.Linear(4, 4), running=lambda: nn.Buffer(torch.ones(4, 4))):
    """Writes its buffer without raising the version of that."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        output: Tensor = y.sin() * self.running.sum()
        self.running.data.copy_(0.9 * self.running)
        return output


def test_nothing_is_learned_of_a_call_that_failed() -> None:
    torch.manual_seed(0)
    net, gradients = Trying(Moved()), []
    for planned in (False, True):
        if planned:
            install_segment(net.inner, PLAIN)
        net.inner.running.fill_(1)
        net.zero_grad()
        for step in range(4):
            net.train(step % 2 == 0)  # a mode that is another has the next call watched
            net(torch.ones(5, 4)).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


class DrawsThenDifferentiates(Parts, linear=lambda: nn.Linear(4, 4), draw=GIVEN, source=GIVEN):
    """Draws from ``source``, or from what it is given, and then computes a gradient, at which its segment gives up."""

    def forward(self, x: Tensor, source: Any = None) -> Tensor:
        x = x * self.draw(self.source if source is None else source)
        return torch.func.grad(lambda t: self.linear(t).tanh().sum())(x)


SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "Python's generator": (lambda: random.Random(0), lambda source: source.random()),
    "NumPy's generator": (lambda: np.random.default_rng(0), lambda source: source.random()),
    "NumPy's old generator": (lambda: np.random.RandomState(0), lambda source: source.random_sample()),
    "an iterator": (lambda: iter([1.0, 2.0, 3.0]), next),
    "an iterator that ends": (lambda: iter([1.0]), lambda source: next(source, 7.0) + next(source, 7.0)),
    "a counter": (lambda: itertools.count(1.0), next),
    "a cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
}
GIVES_UP = pytest.mark.filterwarnings("ignore:.* computes gradients by torch.func")


@GIVES_UP
@pytest.mark.parametrize("name", SOURCES)
def test_what_a_given_up_call_has_moved_is_put_back(name: str) -> None:
    make, draw = SOURCES[name]
    model, x = DrawsThenDifferentiates(draw, make()), torch.ones(2, 4)
    plain = copy.deepcopy(model)
    install_segment(model, PLAIN)
    for _ in range(2):
        assert torch.equal(model(x), plain(x))


@GIVES_UP
def test_a_generator_that_others_hold_stays_the_one_that_it_was() -> None:
    make, draw = SOURCES["Python's generator"]
    model = DrawsThenDifferentiates(draw, make())
    source = model.source
    install_segment(model, PLAIN)
    model(torch.ones(2, 4))
    once = make()
    once.random()
    assert model.source is source
    assert source.getstate() == once.getstate()


@GIVES_UP
@pytest.mark.parametrize("name", SOURCES)
def test_what_a_given_up_call_was_given_is_put_back_or_an_error(name: str) -> None:
    make, draw = SOURCES[name]
    model, x, given = DrawsThenDifferentiates(draw, None), torch.ones(2, 4), make()
    plain, beside = copy.deepcopy(model), make()
    install_segment(model, PLAIN)
    if name in ("NumPy's generator", "an iterator that ends", "a counter", "a cycle"):
        with pytest.raises(RuntimeError, match=r"has advanced its argument, a \w+, which cannot be restored"):
            model(x, given)
        return
    for _ in range(2):
        assert torch.equal(model(x, given), plain(x, beside))

"""Iterators and random generators that a module holds, wherever they stand when it first runs."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from memopt_cli.runtime import SegmentConfig, install_segment
from tests.zoo.models import Holding
from tests.zoo.watching import silent

NUMBERS = [float(n) for n in range(1, 40)]


class Box:
    def __init__(self, *held: Any) -> None:
        self.held = held[0] if len(held) == 1 else held


def endless() -> Iterator[float]:
    """Its frame looks alike at every number."""
    numbers = deque(NUMBERS)
    while True:
        yield numbers[0]
        numbers.rotate(-1)


def counting() -> Iterator[float]:
    for _ in itertools.repeat(None):
        yield 2.0


def alike() -> Iterator[float]:
    """Says the same number a few times, and then another; only the loop's iterator knows when."""
    for number in [NUMBERS[0]] * 3 + NUMBERS:
        yield abs(number)


def handing_on() -> Iterator[float]:
    yield from alike()


def squares() -> Iterator[float]:
    return (n * n for n in NUMBERS)


def deferring() -> Callable[[], float]:
    numbers = iter(NUMBERS)
    return lambda: next(numbers)


def with_default() -> Callable[[], float]:
    def read(numbers: Iterator[float] = iter(NUMBERS)) -> float:  # noqa: B008
        return next(numbers)

    return read


def pairs() -> tuple[Iterator[float], Iterator[tuple[float, float]]]:
    numbers = iter(NUMBERS)
    return numbers, zip(numbers, numbers, strict=False)


def product(held: Any) -> float:
    one, two = next(held)
    return float(one + 10 * two)


READ: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a list": (lambda: iter(NUMBERS), next),
    "a list, backwards": (lambda: reversed(NUMBERS), next),
    "a range": (lambda: iter(range(30)), next),
    "a dict": (lambda: iter(dict.fromkeys(NUMBERS)), next),
    "a set": (lambda: iter({*range(20)}), next),
    "items": (lambda: iter(dict(enumerate(NUMBERS)).items()), product),
    "text": (lambda: iter("123456789"), next),
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "cycle of a generator": (lambda: itertools.cycle(n for n in (1.0, 2.0, 3.0)), next),
    "islice": (lambda: itertools.islice(itertools.count(), 1, 100, 3), next),
    "enumerate": (lambda: enumerate(NUMBERS), product),
    "zip": (lambda: zip(NUMBERS, NUMBERS[3:], strict=False), product),
    "zip of one twice": (lambda: zip(*[iter(NUMBERS)] * 2, strict=False), product),
    "one beside a zip of it": (pairs, lambda held: next(held[0]) + product(held[1])),
    "map": (lambda: map(abs, NUMBERS), next),
    "filter": (lambda: filter(None, NUMBERS), next),
    "chain": (lambda: itertools.chain([1.0], NUMBERS), next),
    "accumulate": (lambda: itertools.accumulate(NUMBERS), next),
    "combinations": (lambda: itertools.combinations(NUMBERS, 2), product),
    "tee": (lambda: itertools.tee(NUMBERS)[1], next),
    "pairwise": (lambda: itertools.pairwise(NUMBERS), product),
    "starmap": (lambda: itertools.starmap(max, enumerate(NUMBERS)), next),
    "callable": (lambda: iter(functools.partial(next, iter(NUMBERS)), None), next),
    "generator": (squares, next),
    "endless generator": (endless, next),
    "generator that counts": (counting, next),
    "generator of equals": (alike, next),
    "generator of another": (handing_on, next),
    "map of a generator": (lambda: map(abs, alike()), next),
    "loader": (lambda: iter(DataLoader(NUMBERS, batch_size=1)), next),  # type: ignore[arg-type]
    "in a tuple in an object": (lambda: Box(1, (2, iter(NUMBERS))), lambda box: next(box.held[1][1])),
    "in a list in a tuple": (lambda: ([iter(NUMBERS)],), lambda held: next(held[0][0])),
    "in a tuple in a list in an object": (lambda: Box([(iter(NUMBERS),)]), lambda box: next(box.held[0][0])),
    "in a set in an object": (lambda: Box({iter(NUMBERS)}), lambda box: next(next(iter(box.held)))),
    "around a function": (deferring, lambda read: read()),
    "default of a function": (with_default, lambda read: read()),
    "its method": (lambda: iter(NUMBERS).__next__, lambda read: read()),
    "random": (lambda: random.Random(1), lambda held: held.gauss(0, 1)),
    "its method gauss": (lambda: random.Random(1).gauss, lambda draw: draw(0, 1)),
    "its method random": (lambda: random.Random(1).random, lambda draw: draw()),
    "NumPy's": (lambda: np.random.default_rng(1), lambda held: held.integers(100, dtype=np.int32)),
    "NumPy's method": (lambda: np.random.default_rng(1).random, lambda draw: draw(dtype=np.float32)),
    "NumPy's old": (lambda: np.random.RandomState(1), lambda held: held.randn()),
    "PyTorch's": (lambda: torch.Generator().manual_seed(1), lambda held: torch.randn((), generator=held).item()),
}
"""What is held, and how a number is read from it."""
STUCK = {
    "generator": "the generator <genexpr>",
    "cycle of a generator": "the generator <genexpr>",
    "endless generator": "the generator endless",
    "generator that counts": "the generator counting",
    "generator of equals": "the generator alike",
    "generator of another": "the generator handing_on",
    "map of a generator": "the generator alike",
    "loader": r"an iterator \(_SingleProcessDataLoaderIter\)",
    "pairwise": r"an iterator \(pairwise\)",
}
"""Those of which Python makes no copies, and what is said of them."""


def _trained(name: str, moved: int, config: SegmentConfig | None) -> list[Tensor]:
    make, read = READ[name]
    torch.manual_seed(0)
    model = Holding(make(), read)
    for _ in range(moved):
        read(model.held)
    if config:
        install_segment(model, config)
    outputs = []
    for _ in range(4):
        outputs.append(model(torch.ones(2, 4)))
        outputs[-1].sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(output.detach() for output in outputs), torch.tensor(float(read(model.held))), *gradients]


@pytest.mark.parametrize("moved", [0, 4])
@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:Holding holds")
def test_what_is_held_moves_on_once_a_step(name: str, moved: int) -> None:
    plain, optimized = (_trained(name, moved, config) for config in (None, SegmentConfig()))
    assert len(plain) == len(optimized) == 7
    assert all(map(torch.equal, plain, optimized))


@pytest.mark.parametrize("moved", [0, 4])
@pytest.mark.parametrize("name", sorted(READ.keys() - STUCK.keys()))
def test_what_is_held_and_not_moved_is_no_reason_to_run_plainly(name: str, moved: int) -> None:
    make, read = READ[name]
    held = make()
    for _ in range(moved):
        read(held)
    model = Holding(held, lambda _: 2.0)
    install_segment(model, SegmentConfig())
    calls = Counter[str]()
    model.linear.register_forward_hook(lambda *_: calls.update(["forward"]))
    with silent():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert calls["forward"] == 4


@pytest.mark.parametrize("name", STUCK)
def test_what_cannot_be_copied_is_told(name: str) -> None:
    told = f"Holding holds {STUCK[name]}, and may move it on, which a recomputation cannot repeat"
    with pytest.warns(UserWarning, match=told):
        _trained(name, 1, SegmentConfig())

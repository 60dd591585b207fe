"""State that forward changes and no module holds: globals, class attributes, defaults and closures."""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime.frozen import find_objects
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.variables import find_variables
from tests.runtime import globals_of_another
from tests.runtime.conftest import same_bits
from tests.zoo.models import GIVEN, Parts, counter

GENERATOR = torch.Generator()
BY_NAME, LISTED = {"one": torch.Generator()}, [torch.Generator()]
IN_CONTEXT: contextvars.ContextVar[torch.Generator] = contextvars.ContextVar("IN_CONTEXT")
NUMBER_IN_CONTEXT = contextvars.ContextVar("NUMBER_IN_CONTEXT", default=0.0)
LOCAL = threading.local()
PYTHONS, NUMPYS = random.Random(), np.random.default_rng()
COUNT: Iterator[float] = itertools.count()
TABLE, ARRAY, SEEN, TOLD, QUEUE = torch.zeros(3), np.zeros(3), list[int](), dict[str, float](), deque([1.0, 2.0, 3.0])
calls = 0.0


class Own:
    """A counter of a class."""

    generator = torch.Generator()
    calls = 0.0

    @classmethod
    def called(cls) -> float:
        cls.calls += 1
        return cls.calls


class Held:
    """A counter of an object."""

    def __init__(self) -> None:
        self.calls = 0.0

    def __call__(self) -> float:
        self.calls += 1
        return self.calls * self.more

    @property
    def more(self) -> float:
        return torch.rand((), generator=GENERATOR).item()


HELD = Held()


def by_default(generator: torch.Generator = torch.Generator()) -> Tensor:  # noqa: B008
    return torch.rand(4, generator=generator)


def through_others() -> Tensor:
    return by_default()


def counted() -> float:
    counted.calls = getattr(counted, "calls", 0.0) + 1  # type: ignore[attr-defined]
    return counted.calls  # type: ignore[attr-defined,no-any-return]


def global_counter() -> float:
    global calls
    calls += 1
    return calls


def counter_of_another() -> float:
    globals_of_another.calls += 1
    return globals_of_another.calls


def imported_within() -> Tensor:
    from tests.runtime.globals_of_another import generator

    return torch.rand(4, generator=generator)


AROUND = counter()


@functools.lru_cache(maxsize=0)
def wrapped() -> float:
    return torch.rand((), generator=GENERATOR).item()


def appended() -> int:
    SEEN.append(1)
    return len(SEEN)


def written(table: Any) -> float:
    table += 1
    return float(table.sum())


def told() -> float:
    TOLD["calls"] = TOLD.get("calls", 0.0) + 1
    return TOLD["calls"]


def rotated() -> float:
    QUEUE.rotate(1)
    return QUEUE[0]


def counted_in_context() -> float:
    NUMBER_IN_CONTEXT.set(NUMBER_IN_CONTEXT.get() + 1)
    return NUMBER_IN_CONTEXT.get()


READ: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(4, generator=GENERATOR),
    "bernoulli": lambda: torch.empty(4).bernoulli_(generator=GENERATOR),
    "randperm": lambda: torch.randperm(4, generator=GENERATOR),
    "normal": lambda: torch.empty(4).normal_(generator=GENERATOR),
    "exponential": lambda: torch.empty(4).exponential_(generator=GENERATOR),
    "multinomial": lambda: torch.multinomial(torch.ones(4), 1, generator=GENERATOR),
    "in a dict": lambda: torch.rand(4, generator=BY_NAME["one"]),
    "in a list": lambda: torch.rand(4, generator=LISTED[0]),
    "of a class": lambda: torch.rand(4, generator=Own.generator),
    "of another module": lambda: torch.rand(4, generator=globals_of_another.generator),
    "imported within": imported_within,
    "in a context": lambda: torch.rand(4, generator=IN_CONTEXT.get()),
    "of a thread": lambda: torch.rand(4, generator=LOCAL.generator),
    "a default": through_others,
    "wrapped": wrapped,
    "Python's": lambda: PYTHONS.random(),
    "NumPy's": lambda: NUMPYS.random(),
    "a count": lambda: next(COUNT),
    "a counter": global_counter,
    "a counter of another module": counter_of_another,
    "a counter of a class": Own.called,
    "a counter of a function": counted,
    "a counter around a function": lambda: AROUND(),
    "a counter in a context": counted_in_context,
    "an object": HELD,
    "a list": appended,
    "a dict": told,
    "a deque": rotated,
    "a tensor": lambda: written(TABLE),
    "an array": lambda: written(ARRAY),
}
"""What forward reads, and so moves on."""


def _begin() -> None:
    """All of it stands where it stood at first."""
    global PYTHONS, NUMPYS, COUNT, AROUND, calls
    LOCAL.generator = torch.Generator()
    IN_CONTEXT.set(torch.Generator())
    of_default = by_default.__defaults__[0]  # type: ignore[index]
    generators = (GENERATOR, BY_NAME["one"], LISTED[0], Own.generator, of_default, globals_of_another.generator)
    for generator in (*generators, LOCAL.generator, IN_CONTEXT.get()):
        generator.manual_seed(1)
    PYTHONS, NUMPYS, COUNT, AROUND = random.Random(1), np.random.default_rng(1), itertools.count(1.0), counter()
    calls = globals_of_another.calls = Own.calls = HELD.calls = counted.calls = 0.0  # type: ignore[attr-defined,assignment]
    NUMBER_IN_CONTEXT.set(0.0)
    TABLE.zero_(), ARRAY.fill(0), SEEN.clear(), TOLD.clear()
    QUEUE.clear(), QUEUE.extend((1.0, 2.0, 3.0))


class Reading(Parts, linear=lambda: nn.Linear(4, 4), read=GIVEN):
    """Scales by what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.as_tensor(self.read(), dtype=torch.float32)).sin()


def _trained(model: nn.Module, read: Callable[[], Any]) -> list[Tensor]:
    _begin()
    left = []
    for _ in range(3):
        output = model(torch.ones(2, 4))
        output.square().sum().backward()
        left += [output, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*left, torch.as_tensor(read())]


@pytest.mark.slow
@pytest.mark.parametrize("paths", [("1",), ("",), ("", "1")], ids=" and ".join)
@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("error")
def test_what_no_module_holds_is_read_again_from_where_it_stood(name: str, paths: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Reading(READ[name]))
    expected = _trained(model, READ[name])
    model.zero_grad()
    memopt_cli.apply_plan(model, Plan(segments=tuple(SegmentPlan(path=path) for path in paths)))
    ran: list[nn.Module] = []
    model[1].linear.register_forward_hook(lambda module, *_: ran.append(module))
    found = _trained(model, READ[name])
    assert len(ran) >= 6
    assert len(found) == len(expected)
    assert all(map(same_bits, expected, found))


class Naming(nn.Module):
    """Its own code names the generator, in a module that is typed in by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def test_a_global_of_a_module_that_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = types.ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", typed)
    code = "def forward(self, x):\n    return (self.linear(x) * torch.rand(4, generator=G)).sin()"
    exec(code, vars(typed) | {"torch": torch, "G": GENERATOR, "__name__": "typed"}, found := {})  # type: ignore[var-annotated]
    kind = type("Typed", (Naming,), {"forward": found["forward"], "__module__": "typed"})
    torch.manual_seed(0)
    model = kind()
    expected = _trained(model, lambda: GENERATOR.get_state())
    model.zero_grad()
    memopt_cli.apply_plan(model, Plan(segments=(SegmentPlan(path=""),)))
    assert all(map(same_bits, expected, _trained(model, lambda: GENERATOR.get_state())))


def test_libraries_are_not_followed() -> None:
    assert find_variables(nn.Linear) == ()
    assert find_variables(random.Random) == ()
    names = {name for found in find_variables(Reading) for name in found.read()}
    assert "torch" not in names


def test_a_name_that_is_defined_meanwhile_is_taken_away_again() -> None:
    def define() -> float:
        global calls_made
        calls_made = globals().get("calls_made", 0.0) + 1
        return float(calls_made)

    start = StartingState(Reading(define))
    define()
    start.restore()
    assert "calls_made" not in globals()


class Shared:
    """Another thread may write to it at any time."""

    def __init__(self) -> None:
        self.lock, self.items = threading.Lock(), [1]


def test_what_is_shared_with_other_threads_is_not_looked_at() -> None:
    assert not any(isinstance(part, Shared) for part in find_objects([Shared()]))

"""Segments whose forward does what no recomputation can repeat: they say so, and train on as plain modules."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memopt_cli
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.runtime import SegmentConfig, install_segment
from tests.runtime.conftest import train
from tests.zoo.models import GIVEN, Overwriting, Parts
from tests.zoo.segments import with_segments

PLAIN = SegmentConfig()


class Bank:
    """A memory, a row for each call."""

    def __init__(self) -> None:
        self.rows, self.next = torch.zeros(64, 512), 0


class _Reading(Parts, linear=lambda: nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.factor()).sin()

    def factor(self) -> Tensor:
        raise NotImplementedError


class Generating(_Reading):
    """Reads a generator, which nothing can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.make()

    def make(self) -> Iterator[float]:
        for number in range(1, 50):
            yield float(number)

    def factor(self) -> Tensor:
        return torch.tensor(next(self.numbers))

    def __deepcopy__(self, memo: Any) -> Generating:
        other = Generating()
        other.load_state_dict(self.state_dict())
        return other


class Banking(_Reading, bank=Bank):
    """Fills a memory in an object, a row a call."""

    def factor(self) -> Tensor:
        self.bank.next += 1
        self.written()[self.bank.next] = self.bank.next
        return self.bank.rows.sum().clone() / 512

    def written(self) -> Tensor:
        return self.bank.rows


class BankingAside(Banking):
    """A bank that is written past the count of writes."""

    def written(self) -> Tensor:
        return self.bank.rows.data


class Teacher(_Reading, teacher=lambda: nn.Linear(4, 4).requires_grad_(False)):
    """Moves the parameters of one layer towards another's."""

    def factor(self) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        return self.teacher.weight.sum()


class MomentumTeacher(Teacher):
    """A teacher that is updated as in contrastive learning: past the count of writes."""

    def factor(self) -> Tensor:
        self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.linear.weight.data * 0.1
        return self.teacher.weight.sum()


class Scaling(_Reading):
    """Looks up rows that a largest norm scales: rounding leaves some above it, to be scaled once more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 200, max_norm=100.0)
        self.table.weight.data.mul_(30)

    def factor(self) -> Tensor:
        return (self.table(torch.arange(50)) * self.table(torch.arange(49, -1, -1))).mean()


class CallingBackward(_Reading):
    """Adds to the gradients of its parameters, of a loss of its own."""

    def factor(self) -> Tensor:
        if torch.is_grad_enabled():
            self.linear(torch.ones(1, 4)).square().sum().backward()
        return torch.ones(())


KINDS = {
    CallingBackward: "calls backward in its forward, which adds to the gradients of its parameters",
    Scaling: "writes to its parameter weight in place",
    Generating: "holds the generator make, and may move it on",
    MomentumTeacher: "writes to its parameter weight in place",
    Teacher: "writes to its parameter weight in place",
}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    torch.manual_seed(0)
    return request.param


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), kind(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return train(model, (torch.ones(2, 4),), {}, 3, lambda _: None)


def _assert_equal(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.parametrize("paths", [["1"], [""], ["", "1"], ["", "1", "2"]], ids=" and ".join)
def test_trains_on_as_without_a_plan(kind: Callable[[], nn.Module], paths: list[str]) -> None:
    model = _model(kind)
    optimized = with_segments(model, PLAIN, *paths)
    expected = _trained(model)
    with pytest.warns(UserWarning, match=f"{KINDS[kind]}, .* it runs without recomputation from now on"):  # type: ignore[index]
        found = _trained(optimized)
    _assert_equal(expected, found)


class Checkpointed(Parts, inner=GIVEN):
    """A checkpoint of the user's own: it repeats what it can, and the writes that it does not put back."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._twice, x, use_reentrant=False)

    def _twice(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).sin()).square()


@pytest.mark.parametrize("paths", [["1"], ["1.inner"], ["1.inner", "1.inner.1"], ["", "1.inner"]], ids=" and ".join)
def test_in_a_checkpoint_of_the_users_own(kind: Callable[[], nn.Module], paths: list[str]) -> None:
    inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), kind())
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(inner))
    optimized = with_segments(model, PLAIN, *paths)
    expected = _trained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _trained(optimized)
    _assert_equal(expected, found)


def test_in_chunks(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    twice = with_segments(model, SegmentConfig(chunks=2))
    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="runs without recomputation"):
        found = twice(x)
    assert torch.equal(found, torch.cat([model(x[:1]), model(x[1:])]))
    found.sum().backward()


def test_only_what_was_seen_runs_plainly(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(Teacher(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for part in model:
        install_segment(part, PLAIN)
    ran: list[str] = []
    model[0].linear.register_forward_hook(lambda *_: ran.append("the first"))
    model[1][0].register_forward_hook(lambda *_: ran.append("the second"))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert [str(w.message).split()[0] for w in recwarn] == ["Teacher"]
    assert ran == ["the first", "the second", "the second"] * 2


class Taking(Parts, linear=lambda: nn.Linear(4, 4)):
    """Takes a number from a generator that it is given."""

    def forward(self, x: Tensor, numbers: Iterator[float]) -> Tensor:
        return (self.linear(x) * next(numbers)).sin()


class Giving(Parts, inner=Taking):
    """Makes a generator in its own forward: it can run again, and what lies in it cannot."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = (float(n) for n in range(1, 9))
        return self.inner(self.inner(x, numbers), numbers)


class Outermost(Parts, giving=Giving):
    def forward(self, x: Tensor) -> Tensor:
        return self.giving(x) + self.giving(2 * x).tanh()


@pytest.mark.parametrize("paths", [["giving", "giving.inner"], ["", "giving", "giving.inner"]], ids=" and ".join)
def test_a_segment_within_that_alone_cannot_run_again(paths: list[str], recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = Outermost()
    optimized = with_segments(model, PLAIN, *paths)
    _assert_equal(_trained(model), _trained(optimized))
    assert [str(w.message).split()[0] for w in recwarn] == ["Taking"]


@pytest.mark.parametrize("kind", [Banking, BankingAside])
@pytest.mark.filterwarnings("error")
def test_a_memory_in_an_object_is_put_back(kind: type[Banking]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), kind())
    optimized = with_segments(model, PLAIN, "1")
    _assert_equal(_trained(model), _trained(optimized))


@pytest.mark.parametrize("kind", ["quantized", "conjugate", "large"])
def test_a_tensor_in_an_object_whose_bits_are_not_looked_at(kind: str) -> None:
    rows = {
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(1 << 17), 0.1, 0, torch.quint8),
        "conjugate": lambda: torch.ones(1 << 14, dtype=torch.complex64).conj(),
        "large": lambda: torch.ones(1 << 20),
    }[kind]()
    model = Banking()
    model.factor = lambda: torch.ones(())  # type: ignore[method-assign]
    model.bank.rows = rows
    install_segment(model, PLAIN)
    model(torch.ones(2, 4)).sum().backward()
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize("path", ["1", ""])
def test_a_plan_s_path_is_named(path: str) -> None:
    model = memopt_cli.apply_plan(nn.Sequential(nn.Linear(4, 4), Teacher()), Plan(segments=(SegmentPlan(path=path),)))
    copied = pickle.loads(pickle.dumps(model))
    named = "Teacher at '1'" if path else r"Sequential at '\(root\)'"
    for net in (model, copied):
        with pytest.warns(UserWarning, match=f"{named} writes to its parameter weight in place"):
            net(torch.ones(2, 4))


def test_an_error_instead_if_asked(kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "on_unsafe", "raise")
    model = kind()
    install_segment(model, PLAIN)
    with pytest.raises(RuntimeError, match=f"{KINDS[kind]}, .*; take this module out of the plan"):  # type: ignore[index]
        model(torch.ones(2, 4))


def test_a_way_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "on_unsafe", "ignore")
    model = Teacher()
    install_segment(model, PLAIN)
    with pytest.raises(ValueError, match="on_unsafe is 'ignore'; it must be one of: warn, raise"):
        model(torch.ones(2, 4))


class Around(Parts, first=lambda: nn.Linear(4, 4), second=Overwriting):
    """Reads what its second layer has written over its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid() + 0
        return self.second(x) + x


def test_an_input_that_forward_writes_over_is_copied_from_then_on(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = Around()
    optimized = with_segments(model, PLAIN, "second")
    _assert_equal(_trained(model), _trained(optimized))
    assert not recwarn.list


def test_what_is_kept_after_all_must_not_be_written() -> None:
    model = nn.Sequential(Teacher(), nn.Tanh())
    install_segment(model, PLAIN)
    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="runs without recomputation"):
        output = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(2, 4\) needed for backward has been modified by an inplace"):
        output.sum().backward()


class Projecting(Parts, linear=lambda: nn.Linear(4, 4)):
    """A module that runs one operator or another, by how its input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Turning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(3, *x.shape).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:Sequential writes")
def test_the_input_of_a_segment_within_lies_in_memory_as_it_did() -> None:
    model = nn.Sequential(Teacher(), Turning(), Projecting())
    plain = copy.deepcopy(model)
    for part in (model, model[2]):
        install_segment(part, PLAIN)
    x = torch.randn(4, 4)
    for net in (plain, model):
        with saved_tensors_hooks(lambda t: t.contiguous(), lambda kept: kept):
            output = net(x)
        output.sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)

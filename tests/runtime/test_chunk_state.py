"""State that a whole forward moves once, and every chunk once more: a segment notices, and runs whole."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, spectral_norm

import memopt_cli
from memopt_cli.records import Plan, Refused, SegmentPlan
from memopt_cli.runtime import SegmentConfig, install_segment
from memopt_cli.runtime.chunk_state import _is_alike
from memopt_cli.verification.chunking import find_rule
from tests.runtime.conftest import train
from tests.zoo.models import Checkpointed, Parts
from tests.zoo.segments import with_segments
from tests.zoo.watching import silent

CHUNKS = SegmentConfig(chunks=3)


class Averaging(Parts, linear=lambda: nn.Linear(4, 4), centre=lambda: nn.Buffer(torch.zeros(4))):
    """An average over calls of what goes through, as of a codebook or a teacher's centre."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.write(0.9 * self.centre + 0.1 * y.flatten(0, -2).mean(0))
        return (y - self.centre).tanh()

    def write(self, value: Tensor) -> None:
        self.centre.copy_(value)


class Assigning(Averaging):
    def write(self, value: Tensor) -> None:
        self.centre = value


class Counting(Parts, linear=lambda: nn.Linear(4, 4), calls=0):
    """A number of calls, in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.linear(x) / self.calls).tanh()


class Warming(Counting, factor=0.5):
    """A factor that grows with every call, as a number."""

    def forward(self, x: Tensor) -> Tensor:
        self.factor += 0.1 * (1 - self.factor)
        return (self.linear(x) * self.factor).tanh()


class Listing(Parts, linear=lambda: nn.Linear(4, 4), norms=lambda: [torch.ones(2)]):
    """The norms of the latest calls, in a list."""

    def forward(self, x: Tensor) -> Tensor:
        self.norms[0] = 0.5 * self.norms[0] + x.detach().norm()
        return (self.linear(x) / self.norms[0].sum()).tanh()


def _old_norm() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh())


def _new_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())


def _observed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), FakeQuantize(MovingAverageMinMaxObserver), nn.Tanh())


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "spectral norm, old": (_old_norm, r"0.weight(_[uv])?"),
    "spectral norm": (_new_norm, "0.parametrizations.weight.0._[uv]"),
    "fake quantization": (_observed, "1.activation_post_process.(max|min)_val"),
    "average": (Averaging, "centre"),
    "average assigned": (Assigning, "centre"),
    "count": (Counting, "calls"),
    "number": (Warming, "factor"),
    "list": (Listing, "norms.0"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], str]:
    torch.manual_seed(0)
    return KINDS[request.param]


def _model(block: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), block, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def _trained(model: nn.Module, length: int = 7) -> dict[str, Tensor]:
    return train(model, (torch.linspace(-2, 3, 4 * length).view(length, 4),), {}, 3, lambda _: None)


def _differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 3])
@pytest.mark.parametrize("around", [[], [""]], ids=["alone", "nested"])
def test_it_runs_whole(kind: tuple[Callable[[], nn.Module], str], around: list[str], length: int) -> None:
    make, name = kind
    model = _model(make())
    optimized = copy.deepcopy(model)
    segments = (*(SegmentPlan(path=path) for path in around), SegmentPlan(path="1", chunks=3))
    memopt_cli.apply_plan(optimized, Plan(segments=segments))
    expected = _trained(model, length)
    with pytest.warns(
        UserWarning, match=rf"at '1' changes its {name} once a call, .* it runs whole from now on"
    ) as said:
        found = _trained(optimized, length)
    assert len(said) == 1
    assert _differing(expected, found) == []


def test_it_is_recomputed_still(kind: tuple[Callable[[], nn.Module], str]) -> None:
    block = kind[0]()
    install_segment(block, CHUNKS)
    x = torch.linspace(-1, 1, 24).view(6, 4)
    with pytest.warns(UserWarning, match="it runs whole from now on"):
        block(x).sum().backward()
    lengths: list[int] = []
    next(m for m in block.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(
        lambda _, args: lengths.append(len(args[0]))
    )
    block(x).sum().backward()
    assert lengths == [6, 6]


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Averaging, Counting, lambda: spectral_norm(nn.Linear(4, 4))])
def test_in_a_checkpoint_of_the_users_own(kind: Callable[[], nn.Module], reentrant: bool) -> None:
    """One that runs in backward alone has segments in it; in another they run plainly, as it runs them again."""

    torch.manual_seed(0)
    inner = nn.Sequential(kind(), nn.Tanh())
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)), reentrant=reentrant)
    whole = with_segments(model, SegmentConfig(), "block.1")
    install_segment(model.block[1], CHUNKS)
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="runs whole") if reentrant else contextlib.nullcontext():
        found = train(model, (x,), {}, 3, lambda _: None)
    torch.testing.assert_close(found, train(whole, (x,), {}, 3, lambda _: None))


def test_an_error_instead_if_asked(kind: tuple[Callable[[], nn.Module], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memopt_cli, "on_unsafe", "raise")
    block = kind[0]()
    install_segment(block, CHUNKS)
    calls = list[int]()
    *_, within = block.modules()
    within.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    with pytest.raises(RuntimeError, match="once for each chunk; take this module out of the plan"):
        block(torch.linspace(-1, 1, 24).view(6, 4))
    assert 6 not in calls, "it is an error before the whole runs"


@pytest.mark.slow
def test_planning_refuses_it(kind: tuple[Callable[[], nn.Module], str], recwarn: pytest.WarningsRecorder) -> None:
    rule = find_rule(kind[0](), (torch.randn(6, 5, 4),), {})
    assert isinstance(rule, Refused)
    assert not [w for w in recwarn if "runs whole" in str(w.message)]


def test_a_norm_that_is_added_after_steps_in_chunks() -> None:
    torch.manual_seed(0)
    model = _model(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    optimized = memopt_cli.apply_plan(copy.deepcopy(model), Plan(segments=(SegmentPlan(path="1", chunks=3),)))
    for net in (model, optimized):
        with silent():
            net(torch.ones(6, 4)).sum().backward()
        net.zero_grad()  # chunks add up in another order
        torch.manual_seed(1)
        parametrizations.spectral_norm(net[1][0])
    expected = _trained(model)
    with pytest.warns(UserWarning, match="runs whole"):
        found = _trained(optimized)
    assert _differing(expected, found) == []


def test_an_observer_that_is_turned_on_later() -> None:
    torch.manual_seed(0)
    block = _observed()
    block[1].disable_observer()
    model = _model(block)
    optimized = memopt_cli.apply_plan(copy.deepcopy(model), Plan(segments=(SegmentPlan(path="1", chunks=3),)))
    for net in (model, optimized):
        with silent():
            net(torch.ones(6, 4)).sum().backward()
        net.zero_grad()
        net[1][1].enable_observer()
    expected = _trained(model)
    with pytest.warns(UserWarning, match="runs whole"):
        found = _trained(optimized)
    assert _differing(expected, found) == []


def test_a_copy_notices_anew() -> None:
    block = Averaging()
    install_segment(block, CHUNKS)
    for net in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        with pytest.warns(UserWarning, match="runs whole"):
            net(torch.ones(6, 4))


class Membrane(nn.Module):
    """A neuron over time steps: its state moves once a step, as the count of them does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("v", torch.zeros(2, 4))
        self.memories: dict[str, Any] = {"trace": torch.zeros(2, 4), "steps": 0}

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for step in x:
            self.v = 0.5 * self.v + self.linear(step)
            self.memories["trace"] = 0.9 * self.memories["trace"] + self.v
            self.memories["steps"] += 1
            outputs.append((self.v + self.memories["trace"]).tanh())
        return torch.stack(outputs)


def _extremes() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), MinMaxObserver(), nn.Tanh())


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(2), nn.Tanh())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (Membrane, CHUNKS),
        (lambda: nn.LSTM(4, 4), CHUNKS),
        (_extremes, CHUNKS),
        (_normed, SegmentConfig(chunks=3, batch_statistics=True)),
        (_normed, SegmentConfig(chunks=3, inexact=True)),
    ],
    ids=["membrane", "lstm", "extremes", "gathered", "inexact"],
)
@pytest.mark.parametrize("steps", [3, 7])
def test_what_moves_with_the_sequence_stays_in_chunks(
    make: Callable[[], nn.Module], config: SegmentConfig, steps: int, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    block = make()
    lengths: list[int] = []
    for inner in block.children():
        if isinstance(inner, nn.Linear):
            inner.register_forward_pre_hook(lambda _, args: lengths.append(len(args[0])))
            break
    install_segment(block, config)
    for _ in range(3):
        block(torch.randn(steps, 2, 4))
        for module in block.modules():
            if isinstance(module, Membrane):
                module.v = module.v.detach()
                module.memories["trace"] = module.memories["trace"].detach()
    assert not [str(w.message) for w in recwarn if "runs whole" in str(w.message)]
    assert all(length < steps for length in lengths)


def test_what_is_tried_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    block = Membrane()
    calls: list[bool] = []
    block.linear.register_forward_hook(lambda *_: calls.append(memopt_cli.runtime.is_recomputing()))
    plain = copy.deepcopy(block)
    install_segment(block, CHUNKS)
    x = torch.randn(6, 2, 4)
    position = torch.get_rng_state()
    torch.testing.assert_close(block(x), plain(x))
    assert torch.equal(torch.get_rng_state(), position)
    assert block.memories["steps"] == 6
    assert torch.equal(block.v, plain.v)
    assert calls.count(False) == 6 + 6, "hooks are told which runs are the first"


def test_a_batch_of_equal_samples_does_not_settle_it() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), FakeQuantize(MovingAverageMinMaxObserver))
    install_segment(block, CHUNKS)
    with silent():
        block(torch.ones(6, 4))
    with pytest.warns(UserWarning, match="runs whole"):
        block(torch.randn(6, 4))


@pytest.mark.parametrize(
    ("before", "whole", "halves", "verdict"),
    [
        (0, 1, 2, False),
        (0, 2, 2, True),
        (None, 2.5, 2.5, True),
        (0.5, 0.55, 0.6, False),
        (None, torch.ones(2), torch.ones(3), False),
        (torch.zeros(2), torch.ones(2), torch.ones(2) + 1e-7, True),
        (torch.zeros(2), torch.ones(2), torch.ones(2) * 1.01, False),
        (torch.tensor(torch.inf), torch.tensor(2.0), torch.tensor(2.1), False),
        (torch.ones(2), torch.ones(2) + 1e-4, torch.ones(2) + 2e-4, False),
        (torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.long), True),
        (torch.tensor(True), torch.tensor(False), torch.tensor(True), False),
        (torch.zeros(0), torch.zeros(0), torch.zeros(0), True),
        (None, None, 1, False),
    ],
)
def test_alike(before: Any, whole: Any, halves: Any, verdict: bool) -> None:
    assert _is_alike(before, whole, halves) is verdict


# ---------------------------------------------------------------------------------------------- arguments


class Masked(Parts, linear=lambda: nn.Linear(4, 4)):
    """Its mask, if there is one, is of the whole batch."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x).tanh()
        return y if mask is None else y * mask


def test_a_mask_that_comes_with_a_later_batch() -> None:
    model = Masked()
    chunked = with_segments(model, CHUNKS)
    x, mask = torch.randn(6, 4), torch.rand(6, 1)
    chunked(x).sum().backward()
    model(x).sum().backward()
    with pytest.warns(UserWarning, match=r"gets mask whole with every chunk, and fails on a chunk .* runs whole"):
        chunked(x, mask=mask).sum().backward()
    model(x, mask=mask).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, chunked.linear.weight.grad)


def test_an_error_of_the_whole_stays_what_it_is(recwarn: pytest.WarningsRecorder) -> None:
    model = Masked()
    install_segment(model, CHUNKS)
    with pytest.raises(RuntimeError, match=r"\(7\)"):
        model(torch.randn(6, 4), mask=torch.rand(7, 1))
    assert not recwarn.list


class KeyCache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(Masked):
    """Attends to all keys that are in the cache; where it draws, what it computes is not compared."""

    def forward(self, x: Tensor, cache: KeyCache | None = None, *, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x)
        cache.keys.append(y)
        return nn.functional.dropout(y * sum(key.mean() for key in cache.keys))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_cache_that_every_chunk_would_fill(by_name: bool) -> None:
    model = Caching()
    chunked = with_segments(model, CHUNKS)
    x, caches = torch.randn(6, 4), (KeyCache(), KeyCache())
    name = "cache" if by_name else "2"
    reason = rf"writes to its argument {name}, a KeyCache, .*train with use_cache=False\): it runs whole"
    for net, cache in zip((model, chunked), caches, strict=True):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match=reason) if net is chunked else warnings.catch_warnings():
            y = net(x, cache=cache) if by_name else net(x, cache)
        y.sum().backward()
    assert torch.equal(model.linear.weight.grad, chunked.linear.weight.grad)
    assert torch.equal(*(torch.cat(cache.keys) for cache in caches))

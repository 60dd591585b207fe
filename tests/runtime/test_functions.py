"""Functions as segments: the same outputs, gradients and states, and less kept meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime import checkpoint, to_gc_function
from memopt_cli.trace import StorageLog


class Trainer:
    """Holds a model and runs it in a method."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def step(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return self.net(x) * scale + shift


class Calling(nn.Module):
    """A model whose forward runs its network by a function that wraps it."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._call = net, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(Trainer(self.net).step, *args, **kwargs)


def network(drop: float = 0.5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Dropout(drop), nn.Tanh(), nn.Linear(5, 3))


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def converted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return to_gc_function("BitSpikeCompressor", function)(*args, **kwargs)


def decorated(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    @to_gc_function()
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call(*args, **kwargs)


def decorated_without_brackets(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    @to_gc_function
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("call", [checkpoint, converted, decorated, decorated_without_brackets])
def test_the_modules_that_a_function_uses_advance_once(judge: Any, call: Callable[..., Any]) -> None:
    net, x = network(), torch.randn(6, 3)
    judge.compare(Calling(copy.deepcopy(net), plainly), Calling(net, call), x, 2.0, shift=1.0)
    assert judge.recomputations == 2


def test_in_chunks_with_the_statistics_of_the_whole(exactly: Any) -> None:
    net, x = network(drop=0), torch.randn(6, 3)

    def chunked(function: Callable[..., Any], x: Tensor) -> Any:
        return checkpoint(function, x, chunks=3)

    exactly.compare(Calling(copy.deepcopy(net), plainly), Calling(net, chunked), x)


def weighed(w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(a @ w), torch.tanh(b @ w) * a.sum(-1, keepdim=True)


@pytest.mark.parametrize("time_dim", [0, 1, -3])
@pytest.mark.parametrize("chunked_args", [(1, 2), (2, 1)])
def test_the_arguments_that_are_named_are_cut(chunked_args: tuple[int, ...], time_dim: int) -> None:
    w, a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 3), (7, 4, 3), (7, 4, 3)))
    seen = []

    def function(w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(a.shape[time_dim])
        return weighed(w, a, b)

    given = {"chunks": 3, "chunked_args": chunked_args, "time_dim": time_dim}
    outputs = checkpoint(function, w, a, b, **given)
    lengths, expected = seen[:], weighed(w, a, b)
    assert sum(lengths) == a.shape[time_dim]
    assert len(lengths) == 3
    pull = [torch.randn_like(out) for out in expected]
    for ours, theirs in zip(
        (*outputs, *torch.autograd.grad(outputs, (w, a, b), pull)),
        (*expected, *torch.autograd.grad(expected, (w, a, b), pull)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_saved_inside_is_not_kept() -> None:
    w = torch.randn(64, 64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.tanh(x @ w)
        return x

    def kept(call: Callable[[], Tensor]) -> int:
        with StorageLog(lambda: "") as log:
            output = call()
            assert output.requires_grad
            return log.storages.live_bytes

    x = torch.randn(512, 64)
    assert kept(lambda: checkpoint(function, x)) < kept(lambda: function(x)) / 3


def test_nothing_to_recompute_without_gradients() -> None:
    calls = []
    with torch.no_grad():
        assert checkpoint(lambda x: calls.append(1) or x + 1, torch.zeros(2)).tolist() == [1, 1]
    assert calls == [1]


def test_a_decorated_function_keeps_its_name() -> None:
    assert to_gc_function(None, weighed).__name__ == "weighed"
    assert to_gc_function(None)(weighed).__doc__ == weighed.__doc__


A, B = torch.zeros(7, 4, 3), torch.zeros(3, 4, 3)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: checkpoint(weighed, A, A, A, chunks=2, chunked_args=(5,)), "there are 3 positional arguments"),
        (lambda: checkpoint(weighed, A, A, B, chunks=2, chunked_args=(1, 2)), r"one length .* are \(7, 4, 3\), \(3"),
        (
            lambda: checkpoint(torch.add, 2.0, A, chunks=2),
            "must be tensors of one length along time_dim=0, but are float",
        ),
        (lambda: checkpoint(torch.tanh, A, chunks=2, time_dim=3), "must be tensors of one length along time_dim=3"),
        (
            lambda: checkpoint(torch.add, A, A, chunks=2, chunked_args=(0, 0)),
            "must name at least one argument, and none twice",
        ),
        (lambda: checkpoint(torch.add, A, A, chunks=2, chunked_args=()), "at least one"),
        (lambda: checkpoint(torch.add, A, A, chunks=0), "chunks must be 1 or more, not 0"),
        (lambda: checkpoint(torch.add, A, A, chunks="2"), "chunks must be a whole number, not '2'"),  # type: ignore[arg-type]
        (lambda: to_gc_function(None, 3), "3 is not a function"),  # type: ignore[arg-type]
        (lambda: checkpoint(torch.add, A, A, compressor=3), "its x_compressor is 3"),
        (lambda: checkpoint(lambda x: {"x": x}, A, chunks=2), "it returned: dict"),
        (lambda: checkpoint(torch.sum, A, chunks=2), "it returned: 0-D tensor"),
    ],
)
def test_what_cannot_be_says_why(call: Callable[[], object], reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        call()

"""``torch.compile`` of models with segments: captured whole, or left to a checkpoint that is not compiled."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from memopt_cli.runtime import SegmentConfig, compiled, install_segment
from memopt_cli.runtime.lifted.module import LiftedModule, make_module
from memopt_cli.runtime.private_torch import WRITES_TWICE
from tests.rows import quick
from tests.zoo.models import Checkpointed, Parts
from tests.zoo.segments import with_segments

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BIT = SegmentConfig(compressor="bit")


class Counting(Parts, inner=lambda: nn.Linear(4, 4), membrane=lambda: torch.zeros(4), calls=0):
    """State in attributes, which the compiler cannot trace within a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        self.membrane = 0.5 * self.membrane.detach() + self.inner(x).mean(0)
        self.calls += 1
        return (x * self.membrane).sin() * self.calls


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def left_behind(model: nn.Module, x: Tensor) -> list[Any]:
    """Return outputs, gradients and state of two steps."""
    found: list[Any] = []
    for _ in range(2):
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        found += [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*found, *model.buffers(), *((m.membrane, m.calls) for m in model.modules() if isinstance(m, Counting))]


def pair(block: nn.Module, config: SegmentConfig) -> tuple[nn.Module, nn.Module]:
    """Return a model, and a copy in which ``block`` is a segment."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), block)
    optimized = with_segments(plain, config, "1")
    return plain, optimized


@pytest.mark.slow
@pytest.mark.parametrize(("make", "config"), [(norm, BIT), (norm, SegmentConfig(chunks=3)), (batch_norm, BIT)])
def test_exported_it_is_a_plain_module(make: Callable[[], nn.Module], config: SegmentConfig) -> None:
    """By ``torch.export`` as it is by default, with gradients enabled."""
    plain, optimized = pair(make(), config)
    x = torch.randn(6, 4)
    programs = [torch.export.export(model, (x,)).module() for model in (plain, optimized)]
    for expected, found in zip(*(left_behind(program, x) for program in programs), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "config", "whole"),
    [
        (norm, BIT, True),
        (norm, SegmentConfig(chunks=3), False),
        (batch_norm, BIT, True),
        (Counting, BIT, False),
    ],
)
def test_the_same_step(make: Callable[[], nn.Module], config: SegmentConfig, whole: bool) -> None:
    """``whole``: one graph, segment included.  Graphs are differentiated ahead of time, which needs no C++ compiler."""
    plain, optimized = pair(make(), config)
    x = torch.randn(6, 4)
    expected = left_behind(plain, x)
    found = left_behind(torch.compile(optimized, backend="aot_eager", fullgraph=whole), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    plain, optimized = pair(nn.Sequential(batch_norm(), Counting()), BIT)
    x = torch.randn(6, 4)
    expected = left_behind(plain, x)
    torch.testing.assert_close(left_behind(torch.compile(optimized), x), expected)


@pytest.mark.slow
def test_dropout_keeps_its_mask() -> None:
    _, optimized = pair(nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)), BIT)
    compiled = torch.compile(optimized[1], backend="aot_eager")
    x = torch.ones(1000, requires_grad=True)
    output = compiled(x)
    output.sum().backward()
    assert torch.equal(output == 0, x.grad == 0)


class Drawing(Parts, layers=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))):
    """A layer that draws between layers that save."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sigmoid()


def as_it_is(graph: Any, inputs: Any) -> Any:
    """Return the graph as it is, as an unknown backend does that compiles nothing."""
    return graph.forward


Place = Callable[[nn.Module, Any], nn.Module]


def root(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def outer(model: nn.Module, backend: Any) -> nn.Module:
    model[1].compile(backend=backend)
    return model


def inner(model: nn.Module, backend: Any) -> nn.Module:
    model[1][1].compile(backend=backend)
    return model


def forward_of_inner(model: nn.Module, backend: Any) -> nn.Module:
    model[1][1].forward = torch.compile(model[1][1].forward, backend=backend)
    return model


PLACES = [(Drawing, root), (batch_norm, outer), (batch_norm, inner), (Drawing, forward_of_inner)]
COMPILED = [(make, place, backend) for backend in ("eager", "aot_eager", as_it_is) for make, place in PLACES]
PROVEN = {
    *((Drawing, root, "aot_eager"), (batch_norm, outer, "eager"), (batch_norm, inner, "aot_eager")),
    (Drawing, forward_of_inner, as_it_is),
}
"""Every place, and every compiler."""


@pytest.mark.slow
@pytest.mark.parametrize(("make", "place", "backend"), quick(COMPILED, PROVEN))
def test_segments_in_segments(make: Callable[[], nn.Module], place: Place, backend: Any) -> None:
    """A compiler that does not differentiate ahead would draw and count again in backward."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), make(), nn.Sigmoid()))
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    expected = left_behind(copy.deepcopy(plain), x)
    for paths in (("1",), ("1", "1.1")):
        optimized = copy.deepcopy(plain)
        for path in paths if place is not forward_of_inner else paths[:1]:
            install_segment(optimized.get_submodule(path), SegmentConfig())
        torch._dynamo.reset()
        torch.manual_seed(1)
        torch.testing.assert_close(left_behind(place(optimized, backend), x), expected)


@pytest.mark.slow
def test_a_checkpoint_of_the_users_own_around() -> None:
    """Which draws again itself where the compiler does not differentiate ahead, unless a segment is in it."""

    plain = nn.Sequential(nn.Linear(4, 4), Checkpointed(Drawing()))
    optimized = with_segments(plain, SegmentConfig(), "1.block")
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    expected = left_behind(plain, x)
    torch.manual_seed(1)
    torch.testing.assert_close(left_behind(torch.compile(optimized, backend="eager"), x), expected)


def test_one_graph_without_differentiation_ahead() -> None:
    """The plain model survives it, so the segment runs plainly, and says so."""
    plain, optimized = pair(Drawing(), SegmentConfig(path="1"))
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    expected = left_behind(plain, x)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="Drawing at '1' runs without recomputation.*fullgraph"):
        found = left_behind(torch.compile(optimized, backend="eager", fullgraph=True), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_segments_are_not_compiled_where_a_checkpoint_would_write_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "WRITES_TWICE", True)
    plain, optimized = pair(batch_norm(), SegmentConfig(path="1"))
    x = torch.randn(6, 4)
    expected = left_behind(plain, x)
    with pytest.warns(UserWarning, match="runs without recomputation.*fullgraph"):
        found = left_behind(torch.compile(optimized, backend="aot_eager", fullgraph=True), x)
    torch.testing.assert_close(found, expected)


class CountingCalls(Parts, inner=lambda: nn.Linear(4, 4), calls=lambda: nn.Buffer(torch.zeros(()))):
    """State that chunks would move once each, which compiled chunks have no way to notice."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.inner(x).tanh()


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh())


@pytest.mark.slow
@pytest.mark.parametrize("make", [CountingCalls, spectral_norm])
def test_state_that_moves_once_a_call(make: Callable[[], nn.Module]) -> None:
    plain, optimized = pair(make(), SegmentConfig(chunks=3))
    x = torch.randn(6, 4)
    expected = left_behind(plain, x)
    with pytest.warns(UserWarning, match="once a call.*runs whole"):
        found = left_behind(torch.compile(optimized, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(WRITES_TWICE, reason="segments are not compiled: they would write to buffers twice")
def test_the_segment_is_not_dropped() -> None:
    """A compiled step keeps for backward no more than a segment keeps."""
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
    )
    optimized = copy.deepcopy(plain)
    for block in optimized:
        install_segment(block, SegmentConfig())
    kept = []
    for model in (plain, optimized):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        kept.append(_kept_bytes(compiled, torch.randn(100, 64)))
    parameters_and_inputs = sum(p.nbytes for p in plain.parameters()) + 3 * 100 * 64 * 4
    assert kept[1] <= parameters_and_inputs < kept[0]


def _kept_bytes(model: Any, x: Tensor) -> int:
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(sizes)


def test_functions_that_autograd_calls_within_a_compiled_part_are_not_compiled() -> None:
    graphs: list[list[Any]] = [[], []]
    for planned, found in enumerate(graphs):
        torch.compiler.reset()
        plain, optimized = pair(
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)), SegmentConfig()
        )
        model = optimized if planned else plain

        def backend(graph: Any, _: Any, found: list[Any] = found) -> Any:
            found.append([node.target for node in graph.graph.nodes])
            return graph.forward

        model[1][1].compile(backend=backend)  # type: ignore[index]
        model(torch.ones(2, 4)).sum().backward()
    assert graphs[0] == graphs[1]


@pytest.mark.exhaustive
def test_compiled_autograd() -> None:
    """Backward alone is compiled: segments that ran in eager mode are recomputed there, and keep nothing before."""
    plain, optimized = pair(nn.Sequential(norm(), Counting()), BIT)
    x = torch.randn(6, 4)
    plain(x).square().sum().backward()
    output = optimized(x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        output.square().sum().backward()
    for a, b in zip(plain.parameters(), optimized.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert optimized[1][1].calls == 1


class Doubled(nn.Module):
    """Uses one of Python's builtins."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x if all(size > 0 for size in x.shape) and isinstance(x, Tensor) else x


@pytest.mark.slow
def test_lifted_modules_are_compiled() -> None:
    """Globals of generated code, and builtins of what it calls, within other modules and around them."""

    def lifted(*nodes: tuple[Any, ...]) -> LiftedModule:
        method = ("forward", ((0, "x", ()),), tuple(("y", True) for _ in range(3)), ((), nodes, (2,)))
        return make_module((1, "Program", (method,), ()), ())

    outer = lifted(
        ("call", (("first",), "forward"), (0,), (1,), ()), ("call", (("second",), "forward"), (1,), (2,), ())
    )
    outer.first = lifted(
        ("operator", "aten::relu", (0,), (1,), ()), ("operator", "aten::mul.Scalar", (1, (2.0,)), (2,), ())
    )
    outer.second = Doubled()
    x = torch.randn(3, requires_grad=True)
    for model in (outer, nn.Sequential(outer)):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


class Recurrent(Parts, lstm=lambda: nn.LSTM(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y.square()


@pytest.mark.slow
def test_a_recurrent_layer_alone_is_compiled() -> None:
    """The compiler leaves it to Python, and must not look into what a segment then does."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Recurrent())
    optimized = with_segments(plain, SegmentConfig(), "1.lstm")
    x = torch.randn(6, 2, 4)
    expected = left_behind(plain, x)
    optimized[1].lstm.compile(backend="eager")
    torch.testing.assert_close(left_behind(optimized, x), expected)

"""What a dry run makes again from notes is what PyTorch made the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from memopt_cli.runtime.private_torch import FakeTensorMode, memory_of
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace import remembered
from memopt_cli.trace.remembered import RememberingDryRun

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ x.mT,
    "a convolution": lambda x: F.conv2d(x[None], torch.ones(4, 2, 3, 3)),
    "a convolution, channels last": lambda x: F.conv2d(
        x[None].contiguous(memory_format=torch.channels_last), torch.ones(4, 2, 3, 3)
    ),
    "a view": lambda x: x[1:, ::2],
    "a transposed view": lambda x: x.mT[1:],
    "an unsafe view": lambda x: torch.ops.aten._unsafe_view.default(x, [10, 6]),
    "views in a list": lambda x: x.split(2, 1),
    "views of each": lambda x: x.unbind(1),
    "an unsafe split": lambda x: torch.ops.aten.unsafe_split.Tensor(x, 2, 1),
    "two results": lambda x: x.max(1),
    "a result and none": lambda x: torch.ops.aten.native_layer_norm.default(x, [6], None, None, 1e-5),
    "in place": lambda x: x.add_(1),
    "in place, of a view": lambda x: x[0].mul_(x[1]),
    "into another": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "several, in place": lambda x: torch._foreach_add_([x, x * 2], 1.0),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a comparison": lambda x: x > 0,
    "complex, conjugated": lambda x: torch.view_as_complex(x.view(2, 5, 3, 2)).conj() * 2,
    "a new tensor": lambda x: torch.zeros(3, 2, dtype=torch.int16),
    "nothing": lambda x: x[:0] * 2,
}


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RememberingDryRun, "_cache", {})


def described(x: Tensor, made: Any) -> Any:
    """What a result is, and what of it is in the storage of ``x``."""
    kind = type(made) if isinstance(made, list | tuple) else None
    return kind, [
        (
            *(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.is_conj(), t.requires_grad),
            *(t is x, memory_of(t) == memory_of(x), t.untyped_storage().nbytes()),
        )
        for t in tensors_of(made)
    ]


def outcome(mode: FakeTensorMode, call: Callable[[Tensor], Any]) -> Any:
    with mode, torch.no_grad():
        x = torch.zeros(2, 5, 6)
        return described(x, call(x))


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_pytorch_makes(name: str) -> None:
    plain = outcome(FakeTensorMode(), CALLS[name])
    assert [outcome(RememberingDryRun(), CALLS[name]) for _ in range(3)] == [plain] * 3


def test_gradients_are_those_of_pytorch() -> None:
    def gradients(mode: FakeTensorMode) -> Any:
        with mode:
            x, weight = torch.zeros(4, 6, requires_grad=True), torch.zeros(3, 6, requires_grad=True)
            parts = F.linear(x, weight).tanh().chunk(2, 1)
            torch.cat([*parts, parts[0].exp()], 1).sum().backward()
            return described(x, [x.grad, weight.grad])

    plain = gradients(FakeTensorMode())
    assert [gradients(RememberingDryRun()) for _ in range(3)] == [plain] * 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x.long() * 1, lambda x: x.long() * 1.0),
        (lambda x: torch.full((2,), True), lambda x: torch.full((2,), 1)),
        (lambda x: torch.full((2,), 1), lambda x: torch.full((2,), 1.0)),
        (lambda x: x.sum(1), lambda x: x.sum(1, keepdim=True)),
        (lambda x: x.mT + 1, lambda x: x.view(2, 6, 5) + 1),
        (lambda x: x.split([1, 4], 1), lambda x: x.split([4, 1], 1)),
    ],
)
def test_other_arguments_make_another(first: Callable[[Tensor], Any], second: Callable[[Tensor], Any]) -> None:
    plain = [outcome(FakeTensorMode(), call) for call in (first, second)]
    assert plain[0] != plain[1]
    assert [outcome(RememberingDryRun(), call) for call in (first, second) * 2] == plain * 2


def test_the_default_dtype_makes_another() -> None:
    def made() -> list[torch.dtype]:
        with RememberingDryRun(), torch.no_grad():
            x = torch.ones(2, dtype=torch.int64)
            return [torch.zeros(2).dtype, (x / 2).dtype]

    assert made() == [torch.float32] * 2
    torch.set_default_dtype(torch.float64)
    try:
        assert made() == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_number_that_is_known_stays_known() -> None:
    with RememberingDryRun():
        found = [torch.tensor(value) * 2 for value in (1, 2, 3)]
        assert [int(tensor) for tensor in found] == [2, 4, 6]


def test_what_has_been_noted_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    plain = FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda self, func, *given: (asked.append(func), plain(self, func, *given))[1]
    )
    for _ in range(2):
        with RememberingDryRun(), torch.no_grad():
            asked.clear()
            torch.zeros(3, 4).mul(2).t().split(2)
    assert {func.namespace for func in asked} <= {"prim"}  # they ask for the device


def test_the_cache_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MAX_ENTRIES", 10)
    with RememberingDryRun():
        for size in range(50):
            assert torch.zeros(size).shape == (size,)
    assert 0 < len(RememberingDryRun._cache) <= 10

"""What a step left, told from what another left by few numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.pipeline.fingerprints.steps import compare_fingerprints
from memopt_cli.records import Fingerprint, FingerprintCheck, Plan, SegmentPlan, from_data, to_data
from memopt_cli.training.apply import apply_plan
from memopt_cli.verification.effects import tensors_on
from memopt_cli.verification.fingerprint import fingerprint, mark_repeatable, tensors_after_step
from tests.zoo.models import Parts

LONG = 100_000
"""Elements: several pieces."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of(name: str = "gradient of w", **tensors: Tensor | None) -> Fingerprint:
    """Of tensors under a name, or under their own."""
    return replace(fingerprint({name if key == "x" else key: t for key, t in tensors.items()}), repeats=True)


def check(one: Fingerprint, other: Fingerprint, **settings: Any) -> tuple[FingerprintCheck, bool]:
    return compare_fingerprints(one, other, batch=1, dims={}, **{"exact": False} | settings)


def swapped(x: Tensor) -> Tensor:
    """The first two pieces, and the last two elements, have changed places."""
    return torch.cat([x[1 << 14 : 2 << 14], x[: 1 << 14], x[2 << 14 : -2], x[-1:], x[-2:-1]])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one of many": lambda x: x.clone().index_fill_(0, torch.tensor([LONG - 1]), 5.0),
    "twice": lambda x: 2 * x,
    "another sign": lambda x: -x,
    "another order": lambda x: x.flip(0),
    "pieces in another order": swapped,
    "a part is missing": lambda x: torch.cat([x[: LONG // 2], torch.zeros(LONG // 2)]),
    "one in a hundred": lambda x: x * (1 + 0.01 * (drawn(LONG, seed=1) > 2)),
}


@pytest.mark.parametrize("scale", [1e160, 1e300])
def test_numbers_whose_squares_are_too_large_are_compared(scale: float) -> None:
    """As memory that nothing was written to may hold."""
    x = scale * drawn(100).double()
    assert not check(of(x=x), of(x=-x))[1]
    assert check(of(x=x), of(x=x.clone()))[1]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("exact", [True, False])
def test_a_change_is_noticed(change: Callable[[Tensor], Tensor], exact: bool) -> None:
    x = drawn(LONG)
    found, agrees = check(of(x=x), of(x=change(x)), exact=exact)
    assert not agrees
    assert (found.worst_name, found.compared, found.equal) == ("gradient of w", 1, 0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_distance_is_about_right(change: Callable[[Tensor], Tensor]) -> None:
    x = drawn(LONG)
    found, _ = check(of(x=x), of(x=change(x)))
    true = float((x - change(x)).norm() / x.norm())
    assert true / 3 < found.worst_difference < 3 * true


def test_rounding_is_allowed_in_norm_and_not_to_the_bit() -> None:
    x = drawn(LONG)
    other = (x.double() * (1 + 1e-6 * drawn(LONG, seed=1))).float()
    found, agrees = check(of(x=x), of(x=other))
    assert agrees
    assert 0 < found.worst_difference < found.tolerance == math.sqrt(torch.finfo(torch.float32).eps)
    assert not check(of(x=x), of(x=other), exact=True)[1]


def test_half_precision_allows_more_to_all() -> None:
    x, other = drawn(LONG), drawn(LONG) * (1 + 1e-2 * drawn(LONG, seed=1))
    assert not check(of(x=x), of(x=other))[1]
    assert check(of(x=x), of(x=other), epsilon=torch.finfo(torch.bfloat16).eps)[1]


@pytest.mark.parametrize(
    ("planned", "rounded", "agrees"),
    [
        (1e-3, 0.0, False),
        (2e-3, 1e-4, False),
        (1e-3, 1e-3, True),
        (1e-2, 1e-2, True),
        (5e-2, 1e-2, True),
        (3e-1, 8e-2, False),
        (5e-2, 2e-1, False),  # such a step tells nothing
        (5e-2, math.inf, False),
    ],
)
def test_so_much_is_allowed_as_rounding_the_parameters_changes(planned: float, rounded: float, agrees: bool) -> None:
    x = drawn(LONG)
    moved = of(x=x * (1 + rounded * drawn(LONG, seed=2)))
    other = of(x=x * (1 + planned * drawn(LONG, seed=1)))
    found, agreed = check(of(x=x), other, rounded=moved)
    assert agreed == agrees
    assert found.by_rounding == (0 < rounded < 0.1)
    assert not check(of(x=x), other, rounded=moved, exact=True)[1]
    assert not check(of(x=x), other)[1]


def test_what_is_allowed_to_one_tensor_is_not_to_another() -> None:
    x, y = drawn(LONG), drawn(LONG, seed=3)
    noise = 1 + 1e-2 * drawn(LONG, seed=1)
    one, moved = of(x=x, y=y), of(x=x * noise, y=y)
    assert check(one, of(x=x * noise, y=y), rounded=moved)[1]
    found, agrees = check(one, of(x=x, y=y * noise), rounded=moved)
    assert (found.worst_name, agrees) == ("y", False)
    assert not check(one, of(x=x, y=y), rounded=of(x=x))[0].worst_name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(0), torch.zeros(0, 1)),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 2.0])),
        (torch.tensor([1.0 + 2.0j]), torch.tensor([1.0 - 2.0j])),
    ],
)
def test_bits_shape_and_dtype_count(one: Tensor, other: Tensor) -> None:
    assert check(of(x=one), of(x=one.clone()), exact=True)[1]
    for exact in (True, False):
        assert not check(of(x=one), of(x=other), exact=exact)[1]


@pytest.mark.parametrize("x", [drawn(40, 50).t(), drawn(40)[::2], drawn(1).expand(40), drawn(50, 3)[:, 1], drawn()])
def test_how_it_lies_in_memory_does_not_count(x: Tensor) -> None:
    (one,), (other,) = of(x=x).tensors, of(x=x.contiguous()).tensors
    assert one == other


def test_a_sparse_gradient_is_looked_at_as_it_is() -> None:
    index, values = torch.tensor([[3, 1, 3]]), drawn(3, 2)
    one = torch.sparse_coo_tensor(index, values, (1 << 30, 2))  # dense it would be 8 GiB
    assert check(of(x=one), of(x=one.coalesce()), exact=True)[1]
    assert not check(of(x=one), of(x=torch.sparse_coo_tensor(index + 1, values, (1 << 30, 2))))[1]


def test_what_is_missing_or_added_is_a_difference() -> None:
    x = drawn(3)
    assert not check(of(a=x, b=x), of(a=x))[1]
    found, agrees = check(of(a=x), of(a=x, b=x))
    assert not agrees
    assert (found.worst_name, found.worst_difference) == ("b", math.inf)


def test_an_output_that_was_put_off_is_not_compared() -> None:
    found, agrees = check(of(a=drawn(3), b=drawn(4)), of(a=drawn(3), b=None))
    assert agrees
    assert found.compared == 1


def test_a_gradient_of_rounding_alone_is_measured_by_the_others() -> None:
    large = drawn(100)
    one, other = (of(**{"gradient of a": large, "gradient of b": 1e-8 * drawn(9, seed=n)}) for n in (1, 2))
    assert check(one, other)[1]
    one, other = (of(**{"gradient of a": large, "buffer b": 1e-8 * drawn(9, seed=n)}) for n in (1, 2))
    assert not check(one, other)[1]


def test_a_step_that_does_not_repeat_agrees_with_none() -> None:
    found = of(x=drawn(3))
    assert not check(found, replace(found, repeats=False))[1]
    assert not check(replace(found, repeats=False), found)[1]


def test_it_goes_over_the_wire() -> None:
    found = of(x=torch.tensor([1.0, math.nan]), b=None)
    assert str(from_data(Fingerprint, json.loads(json.dumps(to_data(found))))) == str(found)


class Net(Parts, body=lambda: nn.Linear(4, 4), norm=lambda: nn.BatchNorm1d(4), memory=None):
    def forward(self, x: Tensor) -> Tensor:
        self.memory = torch.rand(2)
        return self.norm(self.body(x))


def test_all_that_a_step_leaves_is_looked_at() -> None:
    net = Net()
    output = net(drawn(3, 4))
    output.sum().backward()
    left = tensors_after_step(net, output)
    assert {name.partition(" ")[0] for name in left} == {"output[0]", "gradient", "buffer", "state", "the"}
    assert len(left) == 1 + 4 + 3 + 1 + 1
    assert left["gradient of body.weight"] is net.body.weight.grad
    assert left.keys() - tensors_on(net).keys() == {"output[0]"}
    once = fingerprint(left)
    assert mark_repeatable(once, fingerprint(tensors_on(net))).repeats
    net.norm.running_mean += 1  # type: ignore[operator]
    assert not mark_repeatable(once, fingerprint(tensors_on(net))).repeats


def test_logits_that_nobody_reads_are_not_computed_to_look_at_them() -> None:
    head = nn.Linear(4, 6)
    apply_plan(head, Plan(segments=(SegmentPlan(path="", chunks=2, through_loss=True),)))
    logits = head(drawn(5, 4))
    nn.functional.cross_entropy(logits, torch.arange(5)).backward()
    found = fingerprint(tensors_after_step(head, logits))
    assert found.put_off == ("output[0]",)
    assert not logits.is_computed

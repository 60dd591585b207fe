"""What torchmb's users call besides ``BatchModule``: its orders of data, and the test of a model of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching import (
    AbstractBatchModule,
    BatchModule,
    extension,
    inner_batch_size,
    merge_batch,
    split_batch,
    test_batched_model,
    test_model_batching,
)
from tests.zoo.models import Parts

MODELS, IMAGES = 3, 4
X = torch.randn(MODELS, IMAGES, 5)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 2))


def test_merged_data_has_the_model_fastest() -> None:
    merged = merge_batch(X)
    assert torch.equal(merged[:MODELS], X[:, 0])
    assert inner_batch_size(merged, MODELS) == IMAGES


@pytest.mark.slow
@pytest.mark.parametrize("order", ["g b", "b g", "(g b)", "(b g)"])
def test_what_is_split_is_merged_again(order: Any) -> None:
    merged = merge_batch(X)
    split = split_batch(merged, MODELS, order)
    assert torch.equal(merge_batch(split, order, batch=MODELS), merged)
    models = BatchModule(net(), MODELS, route="loop").eval()
    torch.testing.assert_close(models(split, data_order=order, output_order="g b"), models(X))


def test_a_batched_model_takes_and_leaves_merged_data() -> None:
    models = BatchModule(net(), MODELS, route="loop").eval()
    expected = models(X)
    merged = merge_batch(X)
    torch.testing.assert_close(models(merged, merge=False), expected)
    assert torch.equal(models(X, split=False), merge_batch(expected))
    torch.testing.assert_close(models(merged, merge=False, split=False), merge_batch(expected))


def test_in_place_the_model_shares_the_first_copy() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    models = BatchModule(model, MODELS, True, route="loop")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    models.load_state_dicts([net().state_dict() for _ in range(MODELS)])
    models(X)
    first = models.state_dicts()[0]
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())
    assert int(model[1].num_batches_tracked) == 1


def test_a_model_that_can_be_batched_passes_and_stays_as_it_was() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    test_model_batching(model, [(IMAGES, 5)], MODELS)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("restore_state", [True, False])
def test_a_batched_model_gets_its_weights_back(restore_state: bool) -> None:
    model = net()
    models = BatchModule(model, MODELS, route="loop")
    before = models.state_dicts()
    test_batched_model(models, model, [(IMAGES, 5)], restore_state=restore_state)
    same = [
        torch.equal(a, b)
        for one, other in zip(before, models.state_dicts(), strict=True)
        for a, b in zip(one.values(), other.values(), strict=True)
    ]
    assert all(same) == restore_state
    assert all(module.training for module in models.modules())


def test_a_difference_names_the_model_and_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    models = BatchModule(net(), MODELS, route="loop")
    forward = BatchModule.forward

    def wrong(self: BatchModule, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = forward(self, *args, **kwargs)
        output[2] += 0.5
        return output

    monkeypatch.setattr(BatchModule, "forward", wrong)
    with pytest.raises(
        AssertionError, match=r"output 0 of model 2 differs by 5\.0e-01 from the output of the model by itself"
    ):
        test_batched_model(models, net(), [(IMAGES, 5)])


class Scale(Parts, weight=lambda: nn.Parameter(torch.ones(5))):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class BatchScale(AbstractBatchModule):
    """As the README of torchmb shows it: merged data, the model fastest."""

    base_class = Scale

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.weight = nn.Parameter(torch.ones(batch, 5))

    def forward(self, merged: Tensor) -> Tensor:
        return merge_batch(split_batch(merged, self.batch) * self.weight[:, None])


def test_a_module_of_ones_own_may_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extension._batch_classes, Scale, BatchScale)
    test_model_batching(nn.Sequential(nn.Linear(5, 5), Scale()), [(IMAGES, 5)], MODELS)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: merge_batch(X.flatten(0, 1), "(g b)"), "does not show the number of models"),
        (lambda: merge_batch(X[0, 0]), "does not show the number of models"),
        (lambda: merge_batch(X, "bg"), "unknown data order 'bg'"),
        (lambda: split_batch(X.flatten(0, 1), 5), "does not hold 5 models"),
        (lambda: inner_batch_size(X.flatten(0, 1), 5), "does not hold 5 models"),
        (lambda: inner_batch_size(X.flatten(0, 1), 0), "batch=0 is not a number of models"),
        (lambda: BatchModule(net(), 2.5), "batch=2.5 is not a number of models"),  # type: ignore[arg-type]
        (lambda: BatchModule(net().forward, 2), "model is a method"),  # type: ignore[arg-type]
        (lambda: BatchModule(net(), 2, route="fast"), "unknown route 'fast'"),  # type: ignore[arg-type]
        (lambda: split_batch(X.flatten(0, 1), 3, "gb"), "unknown data order 'gb'"),
        (lambda: test_model_batching(net(), (IMAGES, 5)), "input_shapes"),
    ],
)
def test_what_makes_no_sense_says_why(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as raised:
        call()
    assert raised.value.hint

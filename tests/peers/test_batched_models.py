"""What torchmb's own tests check: layers, networks, losses and state of many models at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt_cli.errors import UsageError
from memopt_cli.model_batching import (
    BatchModule,
    batch_accuracy,
    batch_loss,
    batch_topk,
    inner_batch_size,
    merge_batch,
    split_batch,
    test_model_batching,
)

MODELS, IMAGES = 4, 6


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.one(x)), 2)
        scores: Tensor = self.head(F.relu(self.two(x)).flatten(1))
        return scores


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.groups = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.short, self.head = nn.Conv2d(2, 4, 1, bias=False), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.groups(self.norm(self.conv(x))) + self.short(x))
        scores: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(7, 5, bias=False)), (7,)),
    "LeNet": (LeNet, (1, 12, 12)),
    "residual": (Residual, (2, 5, 5)),
}


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    make, shape = NETWORKS[request.param]
    return make().double(), torch.randn(MODELS, IMAGES, *shape, dtype=torch.float64)


def many(model: nn.Module) -> tuple[BatchModule, list[nn.Module]]:
    """A batch of models of different weights, and each of them alone."""
    alone = [copy.deepcopy(model) for _ in range(MODELS)]
    with torch.no_grad():
        for parameter in (p for single in alone for p in single.parameters()):
            parameter.add_(0.2 * torch.randn_like(parameter))
    batched = BatchModule(model, MODELS)
    batched.load_state_dicts([single.state_dict() for single in alone])
    return batched, alone


def test_state_goes_in_and_comes_out_as_it_was(case: tuple[nn.Module, Tensor]) -> None:
    batched, alone = many(case[0])
    for found, single in zip(batched.state_dicts(), alone, strict=True):
        assert found.keys() == single.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in single.state_dict().items())


@pytest.mark.slow
def test_a_step_of_nesterov_with_weight_decay_is_that_of_each_model(case: tuple[nn.Module, Tensor]) -> None:
    (model, images), targets = case, torch.randint(0, 5, (MODELS, IMAGES))
    batched, alone = many(model)
    given = images.clone().requires_grad_()
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}
    together = torch.optim.SGD(batched.parameters(), **options)
    losses = batch_loss(batched(given), targets, MODELS, F.cross_entropy)
    losses.sum().backward()
    together.step()
    for g, (single, state) in enumerate(zip(alone, batched.state_dicts(), strict=True)):
        own = images[g].clone().requires_grad_()
        loss = F.cross_entropy(single(own), targets[g])
        loss.backward()
        torch.optim.SGD(single.parameters(), **options).step()
        torch.testing.assert_close(losses[g], loss)
        torch.testing.assert_close(given.grad[g], own.grad)
        torch.testing.assert_close(state, dict(single.state_dict()))


@pytest.mark.slow
def test_backward_of_one_model_leaves_the_others_without_gradient(case: tuple[nn.Module, Tensor]) -> None:
    batched, _ = many(case[0])
    batched(case[1])[1].square().sum().backward()
    for parameter in batched.parameters():
        assert parameter.grad[1].any()
        assert not parameter.grad[[0, 2, 3]].any()


@pytest.mark.slow
def test_a_batched_model_passes_its_own_test_and_a_wrong_one_does_not(case: tuple[nn.Module, Tensor]) -> None:
    model, images = case
    test_model_batching(model.float(), [tuple(images.shape[1:])], batch=3, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits"])
def test_losses_are_those_of_each_model(loss: str, reduction: str) -> None:
    scores = torch.randn(MODELS, IMAGES, 5, dtype=torch.float64)
    by_class = loss in ("cross_entropy", "nll_loss")
    targets = torch.randint(0, 5, (MODELS, IMAGES)) if by_class else torch.rand_like(scores)
    function = getattr(F, loss)
    found = batch_loss(scores, targets, MODELS, function, reduction)  # type: ignore[arg-type]
    alone = [function(s, t, reduction=reduction) for s, t in zip(scores, targets, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone))


def test_class_weights_divide_the_mean() -> None:
    scores, targets = torch.randn(MODELS, IMAGES, 3), torch.randint(0, 3, (MODELS, IMAGES))
    options = {"weight": torch.tensor([1.0, 5.0, 0.2]), "ignore_index": 2}
    found = batch_loss(scores, targets, MODELS, F.cross_entropy, **options)
    alone = [F.cross_entropy(s, t, **options) for s, t in zip(scores, targets, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone), equal_nan=True)


def test_accuracies_are_counted_for_each_model() -> None:
    scores = torch.tensor([[[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]])
    targets = torch.tensor([[0, 1], [2, 2]])
    assert batch_topk(scores, targets, 2, (1, 2)).tolist() == [[0.5, 0.0], [1.0, 0.0]]
    assert batch_accuracy(scores, targets, 2, (1, 3), count=True).tolist() == [[1, 0], [2, 2]]


@pytest.mark.parametrize("order", ["g b", "b g", "(g b)", "(b g)"])
def test_merging_is_undone_by_splitting(order: str) -> None:
    shape = {"g b": (MODELS, IMAGES), "b g": (IMAGES, MODELS)}.get(order, (MODELS * IMAGES,))
    tensor = torch.arange(MODELS * IMAGES * 2).reshape(*shape, 2)
    merged = merge_batch(tensor, order, batch=MODELS)  # type: ignore[arg-type]
    assert merged.shape == (MODELS * IMAGES, 2)
    assert inner_batch_size(merged, MODELS) == IMAGES
    assert torch.equal(split_batch(merged, MODELS, order), tensor)  # type: ignore[arg-type]


def test_what_holds_no_models_is_refused() -> None:
    with pytest.raises(UsageError, match="has no 4 models in it"):
        split_batch(torch.zeros(7, 2), MODELS)

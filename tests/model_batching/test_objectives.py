"""Losses, accuracies and clipping of many models against those of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching import batch_accuracy, batch_loss, batch_topk, clip_grad_norm_per_model

G, B, C = 3, 6, 5
CLASSES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 1, 2, 2, 3, 3], [4, 4, 4, 0, 0, 1]])
WEIGHT = torch.tensor([0.1, 1.0, 2.0, 0.5, 3.0])


def scores(*shape: int) -> Tensor:
    return torch.randn(G, *(shape or (B, C)), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


LOSSES: list[tuple[Callable[..., Tensor], Tensor, Tensor, dict[str, Any]]] = [
    (F.cross_entropy, scores(), CLASSES, {}),
    (F.cross_entropy, scores(), CLASSES, {"weight": WEIGHT.double(), "ignore_index": 4}),
    (F.cross_entropy, scores(), CLASSES, {"label_smoothing": 0.1}),
    (F.cross_entropy, scores(), scores().softmax(-1), {}),
    (F.nll_loss, scores().log_softmax(-1), CLASSES, {"weight": WEIGHT.double()}),
    (F.mse_loss, scores(), scores().flip(0), {}),
    (F.l1_loss, scores(B), scores(B).flip(0), {}),
    (F.smooth_l1_loss, scores(), scores().flip(0), {"beta": 0.5}),
    (F.binary_cross_entropy_with_logits, scores(), (scores().flip(0) > 0).double(), {}),
    (F.kl_div, scores().log_softmax(-1), scores().flip(0).softmax(-1), {}),
    (F.multi_margin_loss, scores(), CLASSES, {}),
    (F.soft_margin_loss, scores(), scores().sign(), {}),
]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("loss", "inputs", "targets", "options"), LOSSES)
def test_a_loss_is_that_of_each_model_alone(
    loss: Callable[..., Tensor], inputs: Tensor, targets: Tensor, options: dict[str, Any], reduction: Any
) -> None:
    together = inputs.clone().requires_grad_()
    found = batch_loss(together, targets, G, loss, reduction, **options)
    alone = inputs.clone().requires_grad_()
    wanted = torch.stack([loss(i, t, reduction=reduction, **options) for i, t in zip(alone, targets, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(together.grad, alone.grad, rtol=1e-10, atol=1e-12)


def test_class_weights_and_ignored_targets_enter_the_mean() -> None:
    """A plain mean over images would give about twice the loss here."""
    found = batch_loss(scores(), CLASSES, G, F.cross_entropy, "mean", weight=WEIGHT.double(), ignore_index=4)
    each = batch_loss(scores(), CLASSES, G, F.cross_entropy, "none", weight=WEIGHT.double(), ignore_index=4)
    assert not torch.allclose(found, each.mean(dim=1), rtol=0.05)


def test_a_regression_loss_is_one_value_per_model() -> None:
    assert batch_loss(scores(), scores(), G, F.mse_loss, "mean").shape == (G,)


def test_a_loss_module_may_be_given() -> None:
    module = nn.CrossEntropyLoss(weight=WEIGHT.double(), reduction="sum")
    found = batch_loss(scores(), CLASSES, G, module, "mean")
    torch.testing.assert_close(found, batch_loss(scores(), CLASSES, G, F.cross_entropy, weight=WEIGHT.double()))
    assert module.reduction == "sum"
    with pytest.raises(UsageError, match="Linear has no reduction"):
        batch_loss(scores(), CLASSES, G, nn.Linear(1, 1))


def test_merged_data_give_the_same_losses() -> None:
    merged = scores().transpose(0, 1).flatten(0, 1), CLASSES.T.flatten()
    found = batch_loss(*merged, G, F.cross_entropy, "mean", data_order="(b g)")
    torch.testing.assert_close(found, batch_loss(scores(), CLASSES, G, F.cross_entropy))
    each = batch_loss(*merged, G, F.cross_entropy, "none", data_order="(b g)")
    assert each.shape == (G * B,)
    torch.testing.assert_close(each[1], F.cross_entropy(scores()[1, :1], CLASSES[1, :1]))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(UsageError, match="'average'"):
        batch_loss(scores(), CLASSES, G, F.cross_entropy, "average")  # type: ignore[arg-type]


def test_top_k_counts_the_images_whose_class_is_among_the_best() -> None:
    perfect = F.one_hot(CLASSES, C).double()
    second = perfect + 2 * F.one_hot((CLASSES + 1) % C, C)
    mixed = torch.stack([perfect[0], second[1], torch.cat([perfect[2, :3], second[2, 3:]])])
    found = batch_topk(mixed, CLASSES, G, (1, 2))
    assert found.tolist() == [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0]]
    assert batch_accuracy(mixed, CLASSES, G, (1,), count=True).tolist() == [[6, 0, 3]]
    with pytest.raises(UsageError, match="between 1 and the number of classes, 5"):
        batch_topk(mixed, CLASSES, G, (1, 6))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_per_model_is_clipping_each_model(norm_type: float) -> None:
    gradients = [scores(B, C) * torch.tensor([0.01, 1.0, 5.0]).view(G, 1, 1), scores()[:, 0, 0] * 3]
    stacked = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(stacked, gradients, strict=True):
        parameter.grad = gradient.clone()
    apart = [[nn.Parameter(p.detach()[g].clone()) for p in stacked] for g in range(G)]
    for g, model in enumerate(apart):
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient[g].clone()
    found = clip_grad_norm_per_model(stacked, 1.0, norm_type)
    wanted = [nn.utils.clip_grad_norm_(model, 1.0, norm_type) for model in apart]
    torch.testing.assert_close(found, torch.stack(wanted))
    for g, model in enumerate(apart):
        for parameter, alone in zip(stacked, model, strict=True):
            torch.testing.assert_close(parameter.grad[g], alone.grad)

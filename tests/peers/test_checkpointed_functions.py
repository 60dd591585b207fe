"""What PyTorch's own tests of ``torch.utils.checkpoint`` check, of functions as segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.runtime.functions import checkpoint
from tests.zoo.watching import saved_bytes


def gradients(run: Callable[[Callable[..., Any], Tensor], Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of a model's parameters and its input, where ``run`` calls ``checkpoint``, or the model itself."""
    found = []
    for call in (checkpoint, lambda function, *args, **kwargs: function(*args, **kwargs)):
        model.zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        run(call, given).backward()
        found.append([given.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    return found[0]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 4), nn.Sigmoid())


X = torch.rand(3, 6)


def test_gradients_are_those_of_the_function_with_random_numbers_drawn_again(model: nn.Sequential) -> None:
    assert len(gradients(lambda call, x: call(model, x).sum(), model, X)) == 5


def test_segments_may_be_nested_and_follow_one_another(model: nn.Sequential) -> None:
    def outer(call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(model[3:], call(lambda y: call(model[:2], y) * 2, x)).sum()

    gradients(outer, model, X)


def test_an_input_may_want_no_gradient_and_arguments_may_be_no_tensors(model: nn.Sequential) -> None:
    def scaled(x: Tensor, options: dict[str, Any], nothing: None, *, by: float) -> tuple[Tensor, str]:
        return model(x) * options["scale"] * by, "seen"

    def run(call: Callable[..., Any], x: Tensor) -> Tensor:
        output, word = call(scaled, x.detach(), {"scale": 2.0}, None, by=0.5)
        assert word == "seen"
        return output.sum() + x.sum()

    gradients(run, model, X)


def test_part_of_the_outputs_may_want_no_gradient(model: nn.Sequential) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = model(x)
        return y, y.detach() * 2, y.argmax(-1)

    def run(call: Callable[..., Any], x: Tensor) -> Tensor:
        y, constant, index = call(both, x)
        assert not constant.requires_grad
        assert not index.requires_grad
        return (y * constant).sum()

    gradients(run, model, X)


def test_without_gradients_the_function_simply_runs(model: nn.Sequential) -> None:
    with torch.no_grad():
        assert not checkpoint(model.eval(), X).requires_grad
    model.requires_grad_(False)
    assert not checkpoint(model, X).requires_grad


def test_autocast_of_the_forward_holds_in_the_recomputation(model: nn.Sequential) -> None:
    def run(call: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = call(model, x)
        assert y.dtype is torch.bfloat16
        return y.float().sum()

    gradients(run, model, X)


def test_backward_may_be_asked_twice_of_a_graph_that_is_kept(model: nn.Sequential) -> None:
    x = X.clone().requires_grad_()
    loss = checkpoint(model.eval(), x).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_a_second_derivative_is_that_of_the_function(model: nn.Sequential) -> None:
    def second(call: Callable[..., Any], x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(call(model, x).sum(), x, create_graph=True)
        return first.square().sum()

    gradients(second, model.eval(), X)


def test_gradients_of_single_inputs_are_found() -> None:
    a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
    (found,) = torch.autograd.grad(checkpoint(lambda p, q: (p * q.sin()).sum(), a, b), b)
    torch.testing.assert_close(found, a.detach() * b.detach().cos())
    assert a.grad is None


def test_an_error_of_the_function_is_its_own() -> None:
    def failing(x: Tensor) -> Tensor:
        raise ZeroDivisionError("of the function")

    with pytest.raises(ZeroDivisionError, match="of the function"):
        checkpoint(failing, X.clone().requires_grad_())


def test_batch_statistics_advance_once() -> None:
    norm, plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    checkpoint(lambda x: norm(x).square(), X.clone().requires_grad_()).sum().backward()
    plain(X)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    assert int(norm.num_batches_tracked) == 1


def test_what_is_saved_for_backward_is_the_input_alone() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)))
    x = X.clone().requires_grad_()
    assert saved_bytes(lambda: checkpoint(layers, x)) < saved_bytes(lambda: layers(x))

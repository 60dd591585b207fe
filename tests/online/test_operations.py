from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt_cli.errors import UsageError
from memopt_cli.online import ElementWise, traced, untraced
from memopt_cli.online.operations import make_operation, trace_kind, weights_per_output

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear over positions": (lambda: nn.Linear(4, 3), (2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (4, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1)), (2, 7, 6)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), (4, 5, 5)),
    "dilated": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2), (2, 6, 6)),
    "reflecting": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2, stride=2), (2, 4, 5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_operation_is_the_sum_of_its_rows_and_knows_its_gradients(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make().double()
    operation, z = make_operation(layer), torch.rand(3, *shape, dtype=torch.float64)
    y = layer(z)
    torch.testing.assert_close(operation.apply(z, 3, layer.weight, layer.bias), y)

    channels = 1 if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) else -1
    weight = layer.weight.flatten(1)  # [O, K], put where the output has its channels
    placed = weight.view(-1, *[1] * (y.dim() - 2), weight.shape[1]) if channels == 1 else weight
    bias = layer.bias.view(-1, *[1] * (y.dim() - 2)) if channels == 1 else layer.bias
    torch.testing.assert_close((operation.rows(z) * placed).sum(-1) + bias, y)
    assert weights_per_output(operation) == weight.shape[1]

    cotangent = torch.rand_like(y)
    of_weight, of_bias = torch.autograd.grad(y, [layer.weight, layer.bias], cotangent)
    torch.testing.assert_close(operation.weight_gradient(z, cotangent), of_weight)
    torch.testing.assert_close(operation.bias_gradient(cotangent), of_bias)
    trace = operation.rows(z).expand(*y.shape, weight.shape[1])
    torch.testing.assert_close(operation.contract(cotangent, trace), of_weight)


@pytest.mark.parametrize("initial", [torch.tensor(0.5), torch.rand(3), torch.rand(2, 1)])
def test_an_elementwise_parameter_is_expanded_to_the_states_shape(initial: torch.Tensor) -> None:
    layer = ElementWise(initial, (2, 3))
    operation = make_operation(layer)
    assert layer().shape == (2, 3)
    y = operation.apply(None, 4, None, layer.weight)
    assert y.shape == (4, 2, 3)
    cotangent = torch.rand_like(y)
    (expected,) = torch.autograd.grad(y, layer.weight, cotangent)
    torch.testing.assert_close(operation.bias_gradient(cotangent), expected)


def test_tags() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Conv1d(1, 1, 1))
    assert [trace_kind(m) for m in net] == [None, None, None]
    assert [trace_kind(m) for m in traced(net, "full")] == ["full", None, "full"]
    untraced(net[0])
    assert [trace_kind(m) for m in net] == [None, None, "full"]
    assert trace_kind(ElementWise(torch.ones(1))) == "adaptive"


def test_what_cannot_be_tagged() -> None:
    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    for layer in (nn.ReLU(), nn.LSTM(1, 1), Other(1, 1)):
        with pytest.raises(UsageError, match="can carry a trace"):
            traced(layer)
    with pytest.raises(UsageError, match="unknown kind 'some'"):
        traced(nn.Linear(1, 1), "some")  # type: ignore[arg-type]

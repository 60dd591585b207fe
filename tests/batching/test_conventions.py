"""(batch, time, seq, dim): each sequence processed alone equals all of them flattened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt_cli.batching.conventions import StatefulAdapter, flatten_sequences, unflatten_sequences
from memopt_cli.errors import BatchShapeError
from tests.zoo.models import Parts

DIM = 3


class Accumulator(nn.Module):
    """Keeps its state inside and wants to know the batch size, as the guide recommends."""

    def reset(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.total = x if self.total is None else self.total * 0.5 + x
        return self.total


class Returned(Parts, linear=lambda: nn.Linear(DIM, 2)):
    """Takes and returns two states."""

    def forward(
        self, x: Tensor, slow: Tensor | None = None, fast: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        slow = y if slow is None else 0.9 * slow + y
        fast = y if fast is None else 0.2 * fast + y
        return slow - fast, slow, fast


def snntorch_layer(name: str, **options: Any) -> Callable[[], nn.Module]:
    snntorch = pytest.importorskip("snntorch")
    return lambda: getattr(snntorch, name)(**options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "stateless": lambda: nn.Linear(DIM, 2),
    "inside": Accumulator,
    "returned": Returned,
    "lstm cell": lambda: nn.LSTMCell(DIM, 2),
    "gru cell": lambda: nn.GRUCell(DIM, 2),
    "leaky": lambda: snntorch_layer("Leaky", beta=0.8, threshold=0.5)(),
    "leaky inside": lambda: snntorch_layer("Leaky", beta=0.8, threshold=0.5, init_hidden=True)(),
    "leaky both": lambda: snntorch_layer("Leaky", beta=0.8, threshold=0.5, init_hidden=True, output=True)(),
    "synaptic": lambda: snntorch_layer("Synaptic", alpha=0.7, beta=0.8, threshold=0.5)(),
}


def run(adapter: StatefulAdapter, x: Tensor) -> Tensor:
    adapter.reset(x.shape[0])
    return adapter(x)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_each_sequence_alone_equals_all_flattened(kind: str, batch: int) -> None:
    torch.manual_seed(0)
    adapter = StatefulAdapter(LAYERS[kind]())
    x = torch.randn(batch, 5, 3, DIM)
    whole = run(adapter, x)
    assert whole.shape[:3] == (batch, 5, 3)
    for b in range(batch):
        for s in range(3):
            alone = run(adapter, x[b : b + 1, :, s : s + 1])
            assert torch.allclose(whole[b, :, s], alone[0, :, 0], atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "stateless"])
def test_reset_forgets_and_time_counts(kind: str) -> None:
    torch.manual_seed(0)
    adapter = StatefulAdapter(LAYERS[kind]())
    x = torch.randn(2, 6, 3, DIM)
    whole = run(adapter, x)
    assert torch.equal(run(adapter, x), whole)
    assert not torch.equal(adapter(x), whole)  # the state goes on
    adapter.reset(2)
    halves = torch.cat([adapter(x[:, :3]), adapter(x[:, 3:])], dim=1)
    assert torch.allclose(halves, whole, atol=1e-6)


def test_flattening_is_the_inverse_of_unflattening_and_no_plain_reshape() -> None:
    x = torch.randn(2, 5, 3, DIM)
    flat = flatten_sequences(x)
    assert flat.shape == (5, 6, DIM)
    assert torch.equal(flat[1], x[:, 1].reshape(6, DIM))
    assert not torch.equal(flat[1], x.reshape(5, 6, DIM)[1])
    assert torch.equal(unflatten_sequences(flat, 2), x)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(BatchShapeError, match="not \\(batch, time, seq, dim\\)"):
        flatten_sequences(torch.zeros(2, 3, 4))
    with pytest.raises(BatchShapeError, match="cannot be split into a batch of 4"):
        unflatten_sequences(torch.zeros(5, 6, DIM), 4)
    adapter = StatefulAdapter(nn.Linear(DIM, 2))
    with pytest.raises(BatchShapeError, match=r"reset\(2\)"):
        adapter(torch.zeros(2, 5, 3, DIM))
    adapter.reset(3)
    with pytest.raises(BatchShapeError, match="2 samples; the adapter was reset for 3"):
        adapter(torch.zeros(2, 5, 3, DIM))
    with pytest.raises(BatchShapeError, match="at least 1"):
        adapter.reset(0)

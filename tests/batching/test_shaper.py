"""Reshaping and layout: values never change, and no copy passes the threshold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from memopt_cli.batching.shaper import MemoryAwareShaper
from memopt_cli.errors import BatchShapeError, MemoryBudgetError, UsageError
from memopt_cli.records import MemoryAwareShaping, OptimizationHints


def test_a_view_costs_nothing(memory: Any) -> None:
    memory.base = memory.capacity  # not a byte is left
    x = torch.arange(24.0)
    y = MemoryAwareShaper(memory=memory).reshape_with_memory_check(x, (2, -1, 4))
    assert y.shape == (2, 3, 4)
    assert y.data_ptr() == x.data_ptr()


def test_a_copy_must_fit(memory: Any) -> None:
    x = torch.randn(4, 6).t()
    shaper = MemoryAwareShaper(memory=memory)
    assert torch.equal(shaper.reshape_with_memory_check(x, (24,)), x.reshape(24))
    memory.base = 805
    with pytest.raises(MemoryBudgetError, match=r"takes 96 B; with 805 B in use, that passes 90% of 1000 B") as raised:
        shaper.reshape_with_memory_check(x, (24,))
    assert raised.value.hint == "Use a smaller batch, or free tensors, or raise memory_threshold."
    assert MemoryAwareShaper(0.95, memory=memory).reshape_with_memory_check(x, (24,)).shape == (24,)
    configured = MemoryAwareShaper(config=MemoryAwareShaping(memory_threshold=0.95), memory=memory)
    assert configured.reshape_with_memory_check(x, (24,)).shape == (24,)
    memory.base = 905
    with pytest.raises(MemoryBudgetError, match="passes 100% of 1000 B") as raised:
        MemoryAwareShaper(1.0, memory=memory).reshape_with_memory_check(x, (24,))
    assert raised.value.hint == "Use a smaller batch, or free tensors."
    with pytest.raises(UsageError, match="memory_threshold"):
        MemoryAwareShaper(1.5)


def test_gradients_are_preserved_unless_told_otherwise() -> None:
    x = torch.randn(2, 6, requires_grad=True)
    y = MemoryAwareShaper().reshape_with_memory_check(x, (3, 4))
    (y * torch.arange(12.0).reshape(3, 4)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(12.0).reshape(2, 6))
    assert not MemoryAwareShaper().reshape_with_memory_check(x, (3, 4), preserve_gradients=False).requires_grad
    detaching = MemoryAwareShaper(config=MemoryAwareShaping(preserve_gradients=False))
    assert not detaching.reshape_with_memory_check(x, (3, 4)).requires_grad
    assert detaching.reshape_with_memory_check(x, (3, 4), preserve_gradients=True).requires_grad


@pytest.mark.parametrize("shape", [(5, 5), (-1, -1), (7, -1), (0, -1), (-2, -12), (25,)])
def test_elements_must_match(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="24 elements"):
        MemoryAwareShaper().reshape_with_memory_check(torch.zeros(2, 12), shape)


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((2, 3, 4, 5), torch.channels_last),
        ((2, 3, 4, 5, 6), torch.channels_last_3d),
        ((2, 3, 4), torch.contiguous_format),
    ],
)
def test_convolutions_want_channels_last(shape: tuple[int, ...], form: torch.memory_format) -> None:
    x = torch.randn(shape).transpose(0, 1)
    y = MemoryAwareShaper().optimize_tensor_layout(x, "convolution")
    assert isinstance(y, Tensor)
    assert torch.equal(x, y)
    assert y.is_contiguous(memory_format=form)


def test_attention_wants_contiguous_memory() -> None:
    x = torch.randn(2, 3, 4).transpose(1, 2)
    y = MemoryAwareShaper().optimize_tensor_layout(x, "attention")
    assert isinstance(y, Tensor)
    assert torch.equal(x, y)
    assert y.is_contiguous()
    assert not x.is_contiguous()


def test_recurrent_layers_want_packed_sequences() -> None:
    x, lengths = torch.randn(3, 5, 2, requires_grad=True), [2, 5, 3]
    packed = MemoryAwareShaper().optimize_tensor_layout(x, "recurrent", lengths=lengths)
    assert isinstance(packed, PackedSequence)
    padded, found = pad_packed_sequence(packed, batch_first=True)
    assert found.tolist() == lengths
    for row, original, length in zip(padded, x, lengths, strict=True):
        assert torch.equal(row[:length], original[:length])
    padded.sum().backward()
    assert x.grad.sum() == 2 * sum(lengths)


def test_lengths_are_never_guessed() -> None:
    shaper = MemoryAwareShaper()
    x = torch.randn(3, 5, 2)
    x[0, 2:] = 0
    for _ in range(2):
        assert shaper.optimize_tensor_layout(x, "recurrent") is x
    assert shaper.notes == ["recurrent: no lengths given, so the tensor is contiguous instead of packed"]


def test_hints_override() -> None:
    hints = OptimizationHints(convolution="contiguous", attention="channels_last", recurrent="contiguous")
    shaper = MemoryAwareShaper(config=MemoryAwareShaping(optimization_hints=hints))
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = shaper.optimize_tensor_layout(x, "convolution")
    assert isinstance(y, Tensor)
    assert y.is_contiguous()
    assert shaper.optimize_tensor_layout(x, "attention") is x
    assert isinstance(shaper.optimize_tensor_layout(torch.randn(3, 5, 2), "recurrent", lengths=[1, 2, 5]), Tensor)
    shaper.optimize_tensor_layout(torch.randn(3, 5, 2), "attention")
    assert shaper.notes == ["attention: channels_last needs 4 or 5 dimensions; a tensor of 3 is contiguous"]


def test_a_layout_must_fit(memory: Any) -> None:
    memory.base = 850
    with pytest.raises(MemoryBudgetError):
        MemoryAwareShaper(memory=memory).optimize_tensor_layout(torch.randn(2, 3, 4, 5), "convolution")
    with pytest.raises(MemoryBudgetError):
        MemoryAwareShaper(memory=memory).optimize_tensor_layout(torch.randn(3, 5, 2), "recurrent", lengths=[5, 5, 5])


@pytest.mark.parametrize("lengths", [[1, 2], [0, 1, 2], [1, 2, 6], [[1], [2], [3]]])
def test_lengths_must_fit(lengths: Any) -> None:
    with pytest.raises(BatchShapeError, match="do not fit"):
        MemoryAwareShaper().optimize_tensor_layout(torch.randn(3, 5, 2), "recurrent", lengths=lengths)


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="unknown operation 'pooling'"):
        MemoryAwareShaper().optimize_tensor_layout(torch.zeros(math.prod((2,)), 2), "pooling")

"""Sorted, padded, packed, nested and back; and the same numbers out of every way to batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_packed_sequence
from torch.utils.data import DataLoader

from memopt_cli.batching.sequences import (
    collate_nested,
    collate_packed,
    collate_padded,
    inverse_order,
    length_order,
    nest,
    pack,
    pad,
    padding_report,
    sort_by_length,
    unnest,
    unpack,
    unpad,
    unsort,
)
from memopt_cli.errors import BatchShapeError
from memopt_cli.search.batch_size.samplers import TokenBudgetSampler

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def sequences_of(lengths: list[int], *sizes: int, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(n, *sizes, generator=generator, **options) for n in lengths]


INVERSES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "sort": lambda sequences: unsort(sort_by_length(sequences)),
    "pad": lambda sequences: unpad(pad(sequences)),
    "pad with a value": lambda sequences: unpad(pad(sequences, value=-1.0, total_length=12)),
    "pack": lambda sequences: unpack(pack(sequences)),
    "nest": lambda sequences: unnest(nest(sequences)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", INVERSES)
@given(lengths=LENGTHS, sizes=st.sampled_from([(), (1,), (3,), (2, 2)]))
def test_there_and_back(way: str, lengths: list[int], sizes: tuple[int, ...]) -> None:
    sequences = sequences_of(lengths, *sizes)
    back = INVERSES[way](sequences)
    assert len(back) == len(sequences)
    assert all(torch.equal(a, b) for a, b in zip(sequences, back, strict=True))


@given(LENGTHS)
def test_sorting_is_stable_and_longest_first(lengths: list[int]) -> None:
    order = length_order(lengths).tolist()
    assert order == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assert torch.equal(length_order(lengths)[inverse_order(length_order(lengths))], torch.arange(len(lengths)))


@given(LENGTHS)
def test_padding_and_mask(lengths: list[int]) -> None:
    padded = pad(sequences_of(lengths, 2), value=7.0)
    assert padded.data.shape == (len(lengths), max(lengths), 2)
    assert padded.mask.sum(1).tolist() == lengths == padded.lengths.tolist()
    assert (padded.data[~padded.mask] == 7).all()
    assert torch.equal(torch.cat(unpad(padded)), padded.data[padded.mask])


def test_the_packed_form_is_step_by_step() -> None:
    packed = pack([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7, 8])])
    assert packed.batch_sizes.tolist() == [2, 2, 2, 1, 1]
    assert packed.data.tolist() == [4, 1, 5, 2, 6, 3, 7, 8]


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_padded_and_one_by_one_agree(kind: Callable[..., nn.Module]) -> None:
    """In float64 to 1e-10: outputs, hidden state in the original order, and gradients."""
    torch.manual_seed(0)
    net = kind(3, 5, batch_first=True).double()
    sequences = sequences_of([4, 9, 1, 6], 3, dtype=torch.float64)
    weights = torch.randn(4, 9, 5, dtype=torch.float64)

    packed_out, packed_hidden = net(pack(sequences))
    out, _ = pad_packed_sequence(packed_out, batch_first=True)
    from_packed = gradients(net, (out * weights).sum())

    padded = pad(sequences)
    padded_out = net(padded.data)[0]
    from_padded = gradients(net, (padded_out * padded.mask[..., None] * weights).sum())

    alone = [net(sequence[None]) for sequence in sequences]
    from_alone = gradients(
        net, sum(((o[0] * w[: len(o[0])]).sum() for (o, _), w in zip(alone, weights, strict=True)), torch.zeros(()))
    )

    for i, (sequence_out, state) in enumerate(alone):
        assert torch.allclose(out[i, : len(sequences[i])], sequence_out[0], atol=1e-10, rtol=0)
        for batched, single in zip(as_tuple(packed_hidden), as_tuple(state), strict=True):
            assert torch.allclose(batched[:, i], single[:, 0], atol=1e-10, rtol=0)
    for a, b, c in zip(from_packed, from_padded, from_alone, strict=True):
        assert torch.allclose(a, b, atol=1e-10, rtol=0)
        assert torch.allclose(a, c, atol=1e-10, rtol=0)
        assert a.abs().max() > 1e-3


def as_tuple(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_over_nested_equals_one_by_one() -> None:
    sequences = sequences_of([4, 2, 7], 2, 8, dtype=torch.float64)  # (length, heads, dim)
    x = nest(sequences).transpose(1, 2)
    out = nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    for sequence, row in zip(sequences, unnest(out), strict=True):
        y = sequence.transpose(0, 1)
        alone = nn.functional.scaled_dot_product_attention(y, y, y).transpose(0, 1)
        assert torch.allclose(row, alone, atol=1e-10)


def test_gradients_reach_nested_sequences() -> None:
    sequences = [s.requires_grad_() for s in sequences_of([2, 3], 4)]
    (nest(sequences) * 2).values().sum().backward()
    assert all(s.grad is not None and (s.grad == 2).all() for s in sequences)


def test_collating_in_a_data_loader() -> None:
    data = [(sequence, len(sequence)) for sequence in sequences_of([3, 1, 4, 1, 5, 9, 2, 6], 2)]
    sampler = TokenBudgetSampler([len(s) for s, _ in data], 12)
    for collate, lengths_in in (
        (collate_padded, lambda batch: batch.mask.sum(1)),
        (collate_packed, lambda batch: torch.tensor([len(s) for s in unpack(batch)])),
        (collate_nested, lambda batch: torch.tensor([len(s) for s in unnest(batch)])),
    ):
        seen: list[int] = []
        for batch, labels in DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=0):  # type: ignore[arg-type]
            assert torch.equal(lengths_in(batch), labels)
            seen += labels.tolist()
        assert sorted(seen) == [1, 1, 2, 3, 4, 5, 6, 9]


@pytest.mark.parametrize("collate", [collate_padded, collate_packed, collate_nested])
def test_samples_without_labels(collate: Callable[[Any], Any]) -> None:
    sequences = [torch.randn(length, 2) for length in (3, 5)]
    alone, (beside, labels) = collate(sequences), collate([(x, 1) for x in sequences])
    assert type(alone) is type(beside)
    assert labels.tolist() == [1, 1]
    with pytest.raises(BatchShapeError, match=r"neither all sequences nor all pairs \(sequence, label\)"):
        collate([sequences[0], (sequences[1], 1)])
    with pytest.raises(BatchShapeError, match="there are no sequences"):
        collate([])


@given(st.lists(st.lists(st.integers(1, 30), max_size=6), max_size=6))
def test_the_padding_report_counts(batches: list[list[int]]) -> None:
    report = padding_report(batches)
    padded = [[max(batch)] * len(batch) for batch in batches if batch]
    assert report.positions == sum(map(sum, padded))
    assert report.tokens == sum(map(sum, batches))
    assert (report.sequences, report.batches) == (sum(map(len, batches)), len(padded))
    assert 0 <= report.waste < 1
    assert report.waste == pytest.approx(1 - report.tokens / max(1, report.positions) if padded else 0)


@pytest.mark.parametrize("way", [sort_by_length, pad, pack, nest])
@pytest.mark.parametrize(
    ("sequences", "complaint"),
    [
        ([], "no sequences"),
        ([torch.zeros(2), torch.zeros(0)], r"sequence 1 has shape \(0,\): no steps"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"sequence 1 has shape \(2, 4\), the first \(2, 3\)"),
        ([torch.tensor(1.0)], r"sequence 0 has shape \(\)"),
    ],
)
def test_what_cannot_be_batched_is_refused(way: Callable[..., Any], sequences: list[Tensor], complaint: str) -> None:
    with pytest.raises(BatchShapeError, match=complaint):
        way(sequences)


def test_padding_to_less_than_the_longest_is_refused() -> None:
    with pytest.raises(BatchShapeError, match="does not fit into total_length 2"):
        pad([torch.zeros(3)], total_length=2)

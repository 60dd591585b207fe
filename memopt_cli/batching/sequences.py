"""Sequences of different lengths as one batch: sorted, padded, packed or nested, and taken apart again.

A sequence is a tensor ``(length, …)`` of at least one step; all of a batch have the same sizes after the first.
Padding costs ``1 - sum(lengths) / (N * max(lengths))`` of the positions; packing and nesting cost none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence, unpack_sequence
from torch.utils.data import default_collate

from memopt_cli.errors import BatchShapeError

Sample = tuple[Tensor, Any]
"""A sequence and its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedSequences:
    """Sequences from the longest to the shortest; equal ones keep their order."""

    sequences: tuple[Tensor, ...]
    order: Tensor
    """``(N,)``: where each one stood before; ``labels[order]`` puts labels into the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSequences:
    """Sequences in one tensor, the batch first."""

    data: Tensor
    """``(N, T, …)``, filled up after each sequence's end."""
    lengths: Tensor
    """``(N,)``, on the CPU, as ``torch.nn.utils.rnn`` wants it."""

    @property
    def mask(self) -> Tensor:
        """``(N, T)``, true where a sequence is; on the data's device."""
        return mask_of(self.lengths.to(self.data.device), self.data.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingReport:
    """What padding costs, over all batches."""

    batches: int
    sequences: int
    tokens: int
    """Positions of sequences: the sum of lengths."""
    positions: int
    """Positions of padded batches: the sum of ``N * max(lengths)``."""

    @property
    def waste(self) -> float:
        """Share of positions that are padding, 0 to 1."""
        return 1 - self.tokens / self.positions if self.positions else 0.0


# ---------------------------------------------------------------------------------------------- and back


def sort_by_length(sequences: Sequence[Tensor]) -> SortedSequences:
    """The longest first; the inverse is :func:`unsort`."""
    order = length_order([len(sequence) for sequence in _checked(sequences)])
    return SortedSequences(sequences=tuple(sequences[i] for i in order.tolist()), order=order)


def unsort(ordered: SortedSequences) -> list[Tensor]:
    """The sequences as they stood before :func:`sort_by_length`."""
    return [ordered.sequences[i] for i in inverse_order(ordered.order).tolist()]


def length_order(lengths: Sequence[int] | Tensor) -> Tensor:
    """``(N,)`` -> indices from the longest to the shortest; equal lengths keep their order."""
    return torch.argsort(torch.as_tensor(lengths), descending=True, stable=True)


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``: ``x[order][inverse_order(order)]`` is ``x``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def pad(sequences: Sequence[Tensor], *, value: float = 0.0, total_length: int | None = None) -> PaddedSequences:
    """Fill up with ``value`` to the longest, or to ``total_length`` steps; the inverse is :func:`unpad`."""
    lengths = torch.tensor([len(sequence) for sequence in _checked(sequences)])
    data = pad_sequence(list(sequences), batch_first=True, padding_value=value)
    missing = 0 if total_length is None else total_length - data.shape[1]
    if missing < 0:
        raise BatchShapeError(f"a sequence of {data.shape[1]} steps does not fit into total_length {total_length}")
    if missing:
        filling = data.new_full((data.shape[0], missing, *data.shape[2:]), value)
        data = torch.cat([data, filling], dim=1)
    return PaddedSequences(data=data, lengths=lengths)


def unpad(padded: PaddedSequences) -> list[Tensor]:
    """The sequences without what they were filled up with: views."""
    return [row[:length] for row, length in zip(padded.data, padded.lengths.tolist(), strict=True)]


def pack(sequences: Sequence[Tensor]) -> PackedSequence:
    """Step by step without padding, for PyTorch's recurrent layers; the inverse is :func:`unpack`.

    A recurrent layer returns its hidden state in the order of ``sequences``.
    """
    return pack_sequence(list(_checked(sequences)), enforce_sorted=False)


def unpack(packed: PackedSequence) -> list[Tensor]:
    """The sequences in the order they were packed in."""
    return unpack_sequence(packed)


def nest(sequences: Sequence[Tensor]) -> Tensor:
    """A nested tensor ``(N, *, …)`` of jagged layout; gradients reach the sequences.  The inverse is :func:`unnest`.

    Attention and linear layers take it; PyTorch's recurrent layers do not (use :func:`pack`).
    """
    return torch.nested.as_nested_tensor(list(_checked(sequences)), layout=torch.jagged)


def unnest(nested: Tensor) -> list[Tensor]:
    """The sequences of a nested tensor."""
    return list(nested.unbind())


def mask_of(lengths: Tensor, steps: int) -> Tensor:
    """Lengths ``(N,)`` -> ``(N, steps)``, true before each one's end."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


# ---------------------------------------------------------------------------------------------- for a DataLoader


def collate_padded(samples: Sequence[Sample] | Sequence[Tensor]) -> Any:
    """Samples ``(sequence, label)`` -> ``(sequences padded with zeros, with their mask, labels (N, …))``.

    Of samples that are sequences without labels: the sequences alone.
    """
    return _collated(samples, pad)


def collate_packed(samples: Sequence[Sample] | Sequence[Tensor]) -> Any:
    """Samples ``(sequence, label)`` -> ``(packed sequence, labels (N, …))``, labels in the order of the samples.

    Of samples that are sequences without labels: the packed sequence alone.
    """
    return _collated(samples, pack)


def collate_nested(samples: Sequence[Sample] | Sequence[Tensor]) -> Any:
    """Samples ``(sequence, label)`` -> ``(nested (jagged) tensor, labels (N, …))``.

    Of samples that are sequences without labels: the nested tensor alone.
    """
    return _collated(samples, nest)


def padding_report(batches: Iterable[Sequence[int]]) -> PaddingReport:
    """What padding costs for the lengths of each batch.

    With a sampler: ``padding_report([lengths[i] for i in batch] for batch in sampler)``.
    """
    listed = [list(batch) for batch in batches if len(batch)]
    return PaddingReport(
        batches=len(listed),
        sequences=sum(map(len, listed)),
        tokens=sum(map(sum, listed)),
        positions=sum(len(batch) * max(batch) for batch in listed),
    )


def _collated(samples: Sequence[Sample] | Sequence[Tensor], join: Callable[[Sequence[Tensor]], Any]) -> Any:
    sequences = [sample for sample in samples if isinstance(sample, Tensor)]
    if len(sequences) == len(samples):
        return join(sequences)
    pairs = [sample for sample in samples if isinstance(sample, tuple | list) and len(sample) == 2]
    if len(pairs) < len(samples):
        raise BatchShapeError(
            "the samples are neither all sequences nor all pairs (sequence, label)",
            hint="Give (sequence, label) for each, with everything else in the label.",
        )
    return join([sequence for sequence, _ in pairs]), default_collate([label for _, label in pairs])


def _checked(sequences: Sequence[Tensor]) -> Sequence[Tensor]:
    if not len(sequences):
        raise BatchShapeError("there are no sequences to batch", hint="Give at least one.")
    for i, sequence in enumerate(sequences):
        if sequence.dim() < 1 or not len(sequence):
            raise BatchShapeError(
                f"sequence {i} has shape {tuple(sequence.shape)}: no steps", hint="Leave empty sequences out."
            )
        if sequence.shape[1:] != sequences[0].shape[1:]:
            raise BatchShapeError(
                f"sequence {i} has shape {tuple(sequence.shape)}, the first {tuple(sequences[0].shape)}",
                hint="Sequences may differ in their first size only.",
            )
    return sequences

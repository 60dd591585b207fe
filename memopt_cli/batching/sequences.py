"""Batching sequences of different lengths: sorted, padded, packed or nested, and taken apart again.

A sequence is a tensor ``(length, …)`` of at least one step; all sequences of a batch have equal sizes after the first.
Padding wastes ``1 - sum(lengths) / (N * max(lengths))`` of the positions; packing and nesting waste none.
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
    """Sequences sorted from the longest to the shortest; sequences of equal length keep their order."""

    sequences: tuple[Tensor, ...]
    order: Tensor
    """Index of each sequence before sorting, ``(N,)``; ``labels[order]`` puts labels into the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSequences:
    """Sequences in one tensor, the batch first."""

    data: Tensor
    """Sequences, ``(N, T, …)``, each filled up after its end."""
    lengths: Tensor
    """Length of each sequence, ``(N,)``, on the CPU, as ``torch.nn.utils.rnn`` wants it."""

    @property
    def mask(self) -> Tensor:
        """Mask, ``(N, T)``, true at the positions of sequences and false in the padding; on the data's device."""
        return make_length_mask(self.lengths.to(self.data.device), self.data.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingReport:
    """The cost of padding, over all batches."""

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


# ---------------------------------------------------------------------------------------------- there and back


def sort_by_length(sequences: Sequence[Tensor]) -> SortedSequences:
    """Sort ``sequences``, the longest first; :func:`unsort` undoes it."""
    order = length_order([len(sequence) for sequence in _check_sequences(sequences)])
    return SortedSequences(sequences=tuple(sequences[i] for i in order.tolist()), order=order)


def unsort(ordered: SortedSequences) -> list[Tensor]:
    """Return the sequences of ``ordered`` as they stood before :func:`sort_by_length`."""
    return [ordered.sequences[i] for i in inverse_order(ordered.order).tolist()]


def length_order(lengths: Sequence[int] | Tensor) -> Tensor:
    """Return the indices of ``lengths`` from the longest to the shortest; equal lengths keep their order."""
    return torch.argsort(torch.as_tensor(lengths), descending=True, stable=True)


def inverse_order(order: Tensor) -> Tensor:
    """Return the permutation that undoes ``order``: ``x[order][inverse_order(order)]`` is ``x``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def pad(sequences: Sequence[Tensor], *, value: float = 0.0, total_length: int | None = None) -> PaddedSequences:
    """Fill ``sequences`` up with ``value`` to the longest, or to ``total_length`` steps; :func:`unpad` undoes it."""
    lengths = torch.tensor([len(sequence) for sequence in _check_sequences(sequences)])
    data = pad_sequence(list(sequences), batch_first=True, padding_value=value)
    missing = 0 if total_length is None else total_length - data.shape[1]
    if missing < 0:
        raise BatchShapeError(
            f"a sequence of {data.shape[1]} steps does not fit into total_length {total_length}",
            hint="Raise total_length, or cut the sequence.",
        )
    if missing:
        filling = data.new_full((data.shape[0], missing, *data.shape[2:]), value)
        data = torch.cat([data, filling], dim=1)
    return PaddedSequences(data=data, lengths=lengths)


def unpad(padded: PaddedSequences) -> list[Tensor]:
    """Return the sequences in ``padded`` without the padding, as views."""
    return [row[:length] for row, length in zip(padded.data, padded.lengths.tolist(), strict=True)]


def pack(sequences: Sequence[Tensor]) -> PackedSequence:
    """Pack ``sequences`` step by step, without padding, for PyTorch's recurrent layers; :func:`unpack` undoes it.

    A recurrent layer returns its hidden state in the order of ``sequences``.
    """
    return pack_sequence(list(_check_sequences(sequences)), enforce_sorted=False)


def unpack(packed: PackedSequence) -> list[Tensor]:
    """Return the sequences in ``packed``, in the order in which they were packed."""
    return unpack_sequence(packed)


def nest(sequences: Sequence[Tensor]) -> Tensor:
    """Return ``sequences`` as a nested tensor ``(N, *, …)`` of jagged layout; :func:`unnest` undoes it.

    Gradients reach the sequences.  Attention and linear layers take nested tensors; PyTorch's recurrent layers do not
    (use :func:`pack`).
    """
    return torch.nested.as_nested_tensor(list(_check_sequences(sequences)), layout=torch.jagged)


def unnest(nested: Tensor) -> list[Tensor]:
    """Return the sequences in ``nested``."""
    return list(nested.unbind())


def make_length_mask(lengths: Tensor, steps: int) -> Tensor:
    """Return a mask ``(N, steps)``, true before the end of each of the ``lengths``, ``(N,)``."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


# ---------------------------------------------------------------------------------------------- for a DataLoader


def collate_padded(samples: Sequence[Sample] | Sequence[Tensor]) -> Any:
    """Collate ``samples`` into sequences padded with zeros, for a ``DataLoader``.

    Parameters
    ----------
    samples:
        Sequences ``(length, …)``, or pairs of a sequence and its label.

    Returns
    -------
    :class:`PaddedSequences`, which have a mask.  For pairs: a tuple of them and the collated labels ``(N, …)``.

    Raises
    ------
    BatchShapeError
        If a sequence is empty, if its sizes after the first differ between sequences, or if only some samples have
        labels.
    """
    return _collate(samples, pad)


def collate_packed(samples: Sequence[Sample] | Sequence[Tensor]) -> Any:
    """Collate ``samples`` into a packed sequence, for PyTorch's recurrent layers and a ``DataLoader``.

    Parameters
    ----------
    samples:
        Sequences ``(length, …)``, or pairs of a sequence and its label.

    Returns
    -------
    A ``PackedSequence``.  For pairs: a tuple of it and the collated labels ``(N, …)``, in the order of the samples.

    Raises
    ------
    BatchShapeError
        As :func:`collate_padded`.
    """
    return _collate(samples, pack)


def collate_nested(samples: Sequence[Sample] | Sequence[Tensor]) -> Any:
    """Collate ``samples`` into a nested (jagged) tensor, for attention and linear layers and a ``DataLoader``.

    Parameters
    ----------
    samples:
        Sequences ``(length, …)``, or pairs of a sequence and its label.

    Returns
    -------
    A nested tensor ``(N, *, …)``.  For pairs: a tuple of it and the collated labels ``(N, …)``.

    Raises
    ------
    BatchShapeError
        As :func:`collate_padded`.
    """
    return _collate(samples, nest)


def padding_report(batches: Iterable[Sequence[int]]) -> PaddingReport:
    """Return the cost of padding ``batches``, each a list of the lengths of its sequences.

    With a sampler: ``padding_report([lengths[i] for i in batch] for batch in sampler)``.
    """
    filled = [list(batch) for batch in batches if len(batch)]
    return PaddingReport(
        batches=len(filled),
        sequences=sum(map(len, filled)),
        tokens=sum(map(sum, filled)),
        positions=sum(len(batch) * max(batch) for batch in filled),
    )


def _collate(samples: Sequence[Sample] | Sequence[Tensor], join: Callable[[Sequence[Tensor]], Any]) -> Any:
    sequences = [sample for sample in samples if isinstance(sample, Tensor)]
    if len(sequences) == len(samples):
        return join(sequences)
    pairs = [sample for sample in samples if isinstance(sample, tuple | list) and len(sample) == 2]
    if len(pairs) < len(samples):
        raise BatchShapeError(
            "the samples are neither all sequences nor all pairs (sequence, label)",
            hint="Pass (sequence, label) for each sample, with everything else in the label.",
        )
    return join([sequence for sequence, _ in pairs]), default_collate([label for _, label in pairs])


def _check_sequences(sequences: Sequence[Tensor]) -> Sequence[Tensor]:
    if not len(sequences):
        raise BatchShapeError("there are no sequences to batch", hint="Pass at least one.")
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

"""Reshaping tensors and changing their memory layout, with a check first that a copy fits into a share of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from memopt_cli.batching.memory import MemoryMeter, choose_meter
from memopt_cli.errors import BatchShapeError, MemoryBudgetError
from memopt_cli.records import MemoryAwareShaping, TensorLayout
from memopt_cli.runtime.private_torch import CHANNELS_LAST
from memopt_cli.text.units import format_bytes

OPERATIONS = ("attention", "convolution", "recurrent")


class MemoryAwareShaper:
    """Reshapes tensors and changes their layout; a copy must fit below ``memory_threshold``, a share of capacity.

    ``memory_threshold`` replaces the value in ``config``.  ``memory`` reads the bytes in use; ``None`` for the
    tensor's device.
    """

    def __init__(
        self,
        memory_threshold: float | None = None,
        *,
        config: MemoryAwareShaping | None = None,
        memory: MemoryMeter | None = None,
    ) -> None:
        config = config or MemoryAwareShaping()
        self._config = config if memory_threshold is None else replace(config, memory_threshold=memory_threshold)
        self._memory = memory
        self.notes: list[str] = []
        """Notes on layouts of ``optimization_hints`` that could not be used, each once."""

    def reshape_with_memory_check(
        self, tensor: Tensor, target_shape: Sequence[int], preserve_gradients: bool | None = None
    ) -> Tensor:
        """Return ``tensor`` in ``target_shape`` (one size may be -1): a view if possible, else a copy if a copy fits.

        ``preserve_gradients``: ``True`` keeps the result in the autograd graph, ``False`` detaches it, and ``None``
        does as configured.  Raises :class:`BatchShapeError` (a ``ValueError``) if the numbers of elements differ, and
        :class:`MemoryBudgetError` if a copy would exceed the threshold.
        """
        shape = _resolved_shape(tensor, target_shape)
        keeps_graph = self._config.preserve_gradients if preserve_gradients is None else preserve_gradients
        source = tensor if keeps_graph else tensor.detach()
        try:
            return source.view(shape)
        except RuntimeError:  # no view has these strides
            self._require_room(tensor.nbytes, tensor)
            return source.reshape(shape)

    def optimize_tensor_layout(
        self, tensor: Tensor, operation_type: str, *, lengths: Sequence[int] | Tensor | None = None
    ) -> Tensor | PackedSequence:
        """Return ``tensor`` laid out in memory for ``operation_type``; values stay the same.

        ``attention`` gives contiguous memory.  ``convolution`` gives channels last for 4 and 5 dimensions, contiguous
        memory for others.  ``recurrent`` gives a :class:`PackedSequence` of a ``(batch, seq, …)`` tensor if ``lengths``
        (N, in any order) are given, else contiguous memory and a note.  Lengths are never guessed from zeros.  The
        configuration's ``optimization_hints`` may name other layouts.  Raises :class:`BatchShapeError` for an unknown
        operation, and :class:`MemoryBudgetError` if a copy would exceed the threshold.
        """
        if operation_type not in OPERATIONS:
            raise BatchShapeError(f"unknown operation '{operation_type}'", hint=f"Known: {', '.join(OPERATIONS)}.")
        layout: TensorLayout = getattr(self._config.optimization_hints, operation_type)
        if layout == "packed_sequence" and lengths is not None:
            return self._pack(tensor, lengths)
        if layout == "packed_sequence":
            self._note(f"{operation_type}: no lengths given, so the tensor is contiguous instead of packed")
        return self._pad_or_copy(tensor, layout, operation_type)

    def _pack(self, tensor: Tensor, lengths: Sequence[int] | Tensor) -> PackedSequence:
        lengths = torch.as_tensor(lengths, device="cpu")
        longest = tensor.shape[1] if tensor.dim() > 1 else 0
        if lengths.shape != tensor.shape[:1] or int(lengths.min()) < 1 or int(lengths.max()) > longest:
            raise BatchShapeError(
                f"lengths {lengths.tolist()} do not fit a batch of shape {tuple(tensor.shape)}",
                hint="Pass one length per sequence, from 1 to the size of axis 1.",
            )
        elements = int(lengths.sum()) * math.prod(tensor.shape[2:])
        self._require_room(elements * tensor.element_size(), tensor)
        return pack_padded_sequence(tensor, lengths, batch_first=True, enforce_sorted=False)

    def _pad_or_copy(self, tensor: Tensor, layout: TensorLayout, operation: str) -> Tensor:
        form = CHANNELS_LAST.get(tensor.dim()) if layout == "channels_last" else torch.contiguous_format
        if form is None:
            self._note(f"{operation}: channels_last needs 4 or 5 dimensions; a tensor of {tensor.dim()} is contiguous")
            form = torch.contiguous_format
        if not tensor.is_contiguous(memory_format=form):
            self._require_room(tensor.nbytes, tensor)
        return tensor.contiguous(memory_format=form)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _require_room(self, extra_bytes: int, tensor: Tensor) -> None:
        memory = self._memory or choose_meter(tensor.device)
        used_bytes, capacity_bytes = memory.used_bytes(), memory.capacity_bytes()
        if used_bytes + extra_bytes > self._config.memory_threshold * capacity_bytes:
            raise MemoryBudgetError(
                f"a copy of a tensor of shape {tuple(tensor.shape)} takes {format_bytes(extra_bytes)}; with "
                f"{format_bytes(used_bytes)} in use, that passes {self._config.memory_threshold:.0%} of "
                f"{format_bytes(capacity_bytes)}",
                hint="Use a smaller batch, or free tensors"
                f"{', or raise memory_threshold' if self._config.memory_threshold < 1 else ''}.",
            )


def _resolved_shape(tensor: Tensor, target_shape: Sequence[int]) -> tuple[int, ...]:
    """Fill in the -1 of ``target_shape``; raise :class:`BatchShapeError` if ``tensor`` does not fit."""
    try:
        return tuple(torch.empty(tensor.shape, device="meta").reshape(tuple(target_shape)).shape)
    except RuntimeError as error:
        raise BatchShapeError(
            f"a tensor of shape {tuple(tensor.shape)} ({tensor.numel()} elements) cannot become {tuple(target_shape)}",
            hint="The numbers of elements must be equal; one size may be -1.",
        ) from error

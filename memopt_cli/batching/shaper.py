"""Reshaping tensors and changing their memory layout, with a check first that a copy fits into a share of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from memopt_cli.batching.memory import MemoryMeter, meter_of
from memopt_cli.errors import BatchShapeError, MemoryBudgetError, UsageError
from memopt_cli.records import MemoryAwareShaping, TensorLayout
from memopt_cli.text.units import format_bytes

OPERATIONS = ("attention", "convolution", "recurrent")
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class MemoryAwareShaper:
    """Reshapes tensors and changes their layout; a copy must fit below ``memory_threshold``, a share of capacity.

    ``memory_threshold`` replaces the configuration's; ``memory`` reads the bytes in use, by default of the tensor's
    device.
    """

    def __init__(
        self,
        memory_threshold: float | None = None,
        *,
        config: MemoryAwareShaping | None = None,
        memory: MemoryMeter | None = None,
    ) -> None:
        config = config or MemoryAwareShaping()
        self._threshold = config.memory_threshold if memory_threshold is None else memory_threshold
        if not 0 < self._threshold <= 1:
            raise UsageError(f"memory_threshold is {self._threshold!r}; it must be a share above 0 and at most 1")
        self._config = config
        self._memory = memory
        self.notes: list[str] = []
        """Notes on layouts of ``optimization_hints`` that could not be used, each once."""

    def reshape_with_memory_check(
        self, tensor: Tensor, target_shape: Sequence[int], preserve_gradients: bool | None = None
    ) -> Tensor:
        """Return ``tensor`` in ``target_shape`` (one size may be -1): a view if possible, else a copy if that fits.

        ``preserve_gradients``: ``True`` keeps the result in the autograd graph, ``False`` detaches it, and ``None``
        does what is configured.  Raises :class:`BatchShapeError` (a ``ValueError``) if the numbers of elements differ,
        and :class:`MemoryBudgetError` if a copy would exceed the threshold.
        """
        shape = resolved_shape(tensor, target_shape)
        self._require_room(self.predict_extra_bytes(tensor, shape), tensor)
        keep = self._config.preserve_gradients if preserve_gradients is None else preserve_gradients
        return (tensor if keep else tensor.detach()).reshape(shape)

    def predict_extra_bytes(self, tensor: Tensor, target_shape: Sequence[int]) -> int:
        """Return the bytes that reshaping ``tensor`` would allocate: 0 for a view, else the size of a copy."""
        try:
            tensor.detach().view(resolved_shape(tensor, target_shape))
        except RuntimeError:
            return tensor.numel() * tensor.element_size()
        return 0

    def optimize_tensor_layout(
        self, tensor: Tensor, operation_type: str, *, lengths: Sequence[int] | Tensor | None = None
    ) -> Tensor | PackedSequence:
        """Return ``tensor`` laid out in memory for ``operation_type``; values stay the same.

        ``attention`` gives contiguous memory.  ``convolution`` gives channels last for 4 and 5 dimensions, contiguous
        memory for others.  ``recurrent`` gives a :class:`PackedSequence` of a ``(batch, seq, …)`` tensor if ``lengths``
        (N, in any order) are given, else contiguous memory and a note.  Lengths are never guessed from zeros;
        :func:`lengths_from_padding` does so on request.  The configuration's ``optimization_hints`` may name other
        layouts.  Raises :class:`BatchShapeError` for an unknown operation, and :class:`MemoryBudgetError` if a copy
        would exceed the threshold.
        """
        if operation_type not in OPERATIONS:
            raise BatchShapeError(f"unknown operation '{operation_type}'", hint=f"Known: {', '.join(OPERATIONS)}.")
        layout: TensorLayout = getattr(self._config.optimization_hints, operation_type)
        if layout == "packed_sequence" and lengths is not None:
            return self._packed(tensor, lengths)
        if layout == "packed_sequence":
            self._note(f"{operation_type}: no lengths given, so the tensor is contiguous instead of packed")
        return self._dense(tensor, layout, operation_type)

    def _packed(self, tensor: Tensor, lengths: Sequence[int] | Tensor) -> PackedSequence:
        lengths = torch.as_tensor(lengths, device="cpu")
        longest = tensor.shape[1] if tensor.dim() > 1 else 0
        if lengths.shape != tensor.shape[:1] or int(lengths.min()) < 1 or int(lengths.max()) > longest:
            raise BatchShapeError(
                f"lengths {lengths.tolist()} do not fit a batch of shape {tuple(tensor.shape)}",
                hint="Give one length per sequence, from 1 to the size of axis 1.",
            )
        elements = int(lengths.sum()) * math.prod(tensor.shape[2:])
        self._require_room(elements * tensor.element_size(), tensor)
        return pack_padded_sequence(tensor, lengths, batch_first=True, enforce_sorted=False)

    def _dense(self, tensor: Tensor, layout: TensorLayout, operation: str) -> Tensor:
        form = _CHANNELS_LAST.get(tensor.dim()) if layout == "channels_last" else torch.contiguous_format
        if form is None:
            self._note(f"{operation}: channels_last needs 4 or 5 dimensions; a tensor of {tensor.dim()} is contiguous")
            form = torch.contiguous_format
        if not tensor.is_contiguous(memory_format=form):
            self._require_room(tensor.numel() * tensor.element_size(), tensor)
        return tensor.contiguous(memory_format=form)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _require_room(self, extra_bytes: int, tensor: Tensor) -> None:
        if not extra_bytes:
            return
        memory = self._memory or meter_of(tensor.device)
        used, capacity = memory.used_bytes(), memory.capacity_bytes()
        if used + extra_bytes > self._threshold * capacity:
            raise MemoryBudgetError(
                f"a copy of {tuple(tensor.shape)} takes {format_bytes(extra_bytes)}: with {format_bytes(used)} in use "
                f"it passes {self._threshold:.0%} of {format_bytes(capacity)}",
                hint="Use a smaller batch, free tensors, or raise memory_threshold.",
            )


def resolved_shape(tensor: Tensor, target_shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``target_shape`` with its -1 filled in.

    Raises :class:`BatchShapeError` if the elements of ``tensor`` cannot fill it.
    """
    unknown = [i for i, size in enumerate(target_shape) if size == -1]
    known = math.prod(size for size in target_shape if size != -1)
    valid = len(unknown) <= 1 and all(size >= -1 for size in target_shape)
    if valid and not unknown and known == tensor.numel():
        return tuple(target_shape)
    if valid and unknown and known and tensor.numel() % known == 0:
        return tuple(tensor.numel() // known if size == -1 else size for size in target_shape)
    raise BatchShapeError(
        f"a tensor of shape {tuple(tensor.shape)} ({tensor.numel()} elements) cannot become {tuple(target_shape)}",
        hint="The numbers of elements must be equal; one size may be -1.",
    )


def lengths_from_padding(tensor: Tensor) -> Tensor:
    """Return the lengths (N,) of the sequences in ``tensor``, ``(batch, seq, …)``, up to the last step with a non-zero.

    Lengths are at least 1.  A sequence that really ends in zeros seems shorter, so memopt never calls this by itself.
    """
    filled = tensor.flatten(2).ne(0).any(dim=2) if tensor.dim() > 2 else tensor.ne(0)
    steps = torch.arange(1, tensor.shape[1] + 1, device=tensor.device)
    return (filled * steps).amax(dim=1).clamp(min=1).cpu()

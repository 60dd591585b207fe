"""Tensors of the whole batch, seen from within a model that is written for one sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from memopt_cli.online.lanes import Act, with_batch_axis


class WholeBatch:
    """Runs functions on the tensors of the whole batch; the model sees them all, or one lane of a ``vmap``."""

    def __init__(self, *, is_seen: bool) -> None:
        """``is_seen``: the model sees a batch, not one sample."""
        self._is_seen = is_seen
        self._witness = torch.empty(0)
        self.size = 1
        """Samples in the batch, within :meth:`lift`."""

    @contextmanager
    def like(self, witness: Tensor) -> Iterator[None]:
        """Within, tensors are batched as ``witness``, an input of the model, is."""
        self._witness = witness
        try:
            yield
        finally:
            self._witness = torch.empty(0)

    def lift(self, act: Act, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run ``act`` on the tensors of the whole batch, ``[B, ...]``, which the witness shows."""
        if self._is_seen:
            self.size = self._witness.shape[0]
            return act(*tensors)

        def seen(witness: Tensor, *whole: Tensor) -> tuple[Tensor, ...]:
            self.size = witness.shape[0]
            return act(*whole)

        return with_batch_axis(seen, self._witness, *tensors)

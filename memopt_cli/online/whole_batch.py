"""Access to the tensors of the whole batch from within a model that is written for one sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from memopt_cli.online.lanes import Act, with_batch_axis


class WholeBatch:
    """A runner of functions on whole batches, whether the model sees these or one lane of a ``vmap``."""

    def __init__(self, *, is_seen: bool) -> None:
        """Say by ``is_seen`` whether the model sees the batch, or else one sample."""
        self._is_seen = is_seen
        self._witness = torch.empty(0)
        self.size = 1
        """Number of samples in the batch, inside :meth:`lift`."""

    @contextmanager
    def like(self, witness: Tensor) -> Iterator[None]:
        """Take ``witness``, an input of the model, inside the block for how tensors are batched."""
        self._witness = witness
        try:
            yield
        finally:
            self._witness = torch.empty(0)

    def lift(self, act: Act, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run ``act`` on ``tensors`` of all samples, ``[B, ...]``, and return its results as the model sees them."""
        if self._is_seen:
            self.size = self._witness.shape[0]
            return act(*tensors)

        def seen(witness: Tensor, *whole: Tensor) -> tuple[Tensor, ...]:
            self.size = witness.shape[0]
            return act(*whole)

        return with_batch_axis(seen, self._witness, *tensors)

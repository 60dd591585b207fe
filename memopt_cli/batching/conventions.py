"""The canonical shape ``(batch, time, seq, dim)``, and an adapter for layers that take one time step.

Time lies between batch and seq, so reshaping to ``(batch * seq, dim)`` is right only for a single step ``x[:, t]``.  To
get ``(time, batch * seq, dim)`` for all steps, the axes must be permuted first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import BatchShapeError
from memopt_cli.runtime.module_state import reset_hidden_state

State = tuple[Any, ...]
"""Values that a layer returns after its output, and takes again at the next time step."""


def flatten_sequences(x: Tensor) -> Tensor:
    """Return ``x``, ``(batch, time, seq, dim)``, as ``(time, batch * seq, dim)``: a row for each sequence position.

    Parameters
    ----------
    x:
        Tensor ``(batch, time, seq, dim)``.

    Returns
    -------
    Tensor ``(time, batch * seq, dim)``, for layers that step through time.

    Raises
    ------
    BatchShapeError
        If ``x`` does not have four dimensions.
    """
    batch, time, seq, dim = _canonical_sizes(x)
    return x.permute(1, 0, 2, 3).reshape(time, batch * seq, dim)


def unflatten_sequences(x: Tensor, batch: int) -> Tensor:
    """Undo :func:`flatten_sequences`: return ``x``, ``(time, batch * seq, dim)``, as ``(batch, time, seq, dim)``.

    Parameters
    ----------
    x:
        Tensor ``(time, batch * seq, dim)``; a layer may have changed ``dim``.
    batch:
        Number of samples in ``x``.

    Returns
    -------
    Tensor ``(batch, time, seq, dim)``.

    Raises
    ------
    BatchShapeError
        If the number of rows is not a multiple of ``batch``.
    """
    if x.dim() != 3 or batch < 1 or x.shape[1] % batch:
        raise BatchShapeError(
            f"{tuple(x.shape)} cannot be split into a batch of {batch}", hint="Pass a tensor (time, batch * seq, dim)."
        )
    time, rows, dim = x.shape
    return x.reshape(time, batch, rows // batch, dim).permute(1, 0, 2, 3)


class StatefulAdapter(nn.Module):
    """A module that runs a layer of one time step over all steps of ``(batch, time, seq, dim)``.

    The layer takes ``(batch * seq, dim)``, a row for each sequence position of each sample, and returns as many rows
    with its own ``dim``.  Its state may be

    - kept inside the layer (snnTorch with ``init_hidden=True``, SpikingJelly), which takes only the input;
    - returned, ``(output, *state)`` (snnTorch's ``Leaky``, ``Synaptic``), and passed in again at the next step if
      ``forward`` takes it;
    - the state of PyTorch's cells (``LSTMCell``, ``GRUCell``, ``RNNCell``);
    - none.

    Call :meth:`reset` before each run through time; otherwise the state continues from the last run, for the same
    number of rows.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._takes_state = _takes_state(layer)
        self._batch_size: int | None = None
        self._state: State = ()

    def reset(self, batch_size: int) -> None:
        """Reset the state, inside the layer as well; the next input must have ``batch_size`` samples."""
        if batch_size < 1:
            raise BatchShapeError(f"batch_size is {batch_size}; it must be at least 1")
        self._batch_size = batch_size
        self._state = ()
        reset_layer(self.layer, batch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs for ``x``: ``(batch, time, seq, dim)``, with the ``dim`` of the layer."""
        batch = _canonical_sizes(x)[0]
        if batch != self._batch_size:
            raise BatchShapeError(
                f"the batch has {batch} samples; the adapter was reset for {self._batch_size}",
                hint=f"Call reset({batch}) first.",
            )
        return unflatten_sequences(torch.stack([self._step(step) for step in flatten_sequences(x)]), batch)

    def _step(self, x: Tensor) -> Tensor:
        result = self.layer(x, *self._state) if self._takes_state else self.layer(x)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        if isinstance(self.layer, nn.RNNCellBase):
            self._state = (result,)
        elif isinstance(result, tuple):
            self._state = result[1:]
        return output


def reset_layer(layer: nn.Module, batch_size: int) -> None:
    """Reset the hidden state of ``layer``: by its ``reset(batch_size)`` or ``reset()``, or as its library does."""
    for module in layer.modules():
        reset: Callable[..., Any] | None = getattr(type(module), "reset", None)
        if callable(reset):
            takes_batch = len(inspect.signature(reset).parameters) > 1
            reset(module, batch_size) if takes_batch else reset(module)
    reset_hidden_state(layer)


def _takes_state(layer: nn.Module) -> bool:
    """Return whether the forward of ``layer`` takes its state as an argument after the input."""
    if getattr(layer, "init_hidden", False):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(layer.forward).parameters.values()
    return len([p for p in parameters if p.kind in positional]) > 1


def _canonical_sizes(x: Tensor) -> tuple[int, int, int, int]:
    if x.dim() != 4:
        raise BatchShapeError(
            f"a tensor of shape {tuple(x.shape)} is not (batch, time, seq, dim)",
            hint="Pass a tensor with these four dimensions.",
        )
    batch, time, seq, dim = x.shape
    return batch, time, seq, dim

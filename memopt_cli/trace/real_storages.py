"""Storages that operators make of real tensors and not of fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt_cli.runtime.private_torch import is_fake
from memopt_cli.trace.recurrent import with_two_biases, with_workspace

_aten = torch.ops.aten


def as_on_real_tensors(func: Any, args: Any, output: Any) -> Any:
    """The output of an operator; of fake tensors with the storages that it has of real ones."""
    correct = _CORRECTIONS.get(func)
    return correct(args, output) if correct else output


def _in_elements(args: Any, output: Any) -> Any:
    """A loss that was reduced, in the storage of all its elements, where the kernel wrote these first."""
    if not is_fake(output) or output.dim():
        return output
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return output.new_empty(shape).resize_(())


_CORRECTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.mkldnn_rnn_layer.default: with_workspace,
    _aten.mkldnn_rnn_layer_backward.default: with_two_biases,
    **dict.fromkeys(
        (
            _aten.mse_loss.default,
            _aten.smooth_l1_loss.default,
            _aten.soft_margin_loss.default,
            _aten.binary_cross_entropy.default,
        ),
        _in_elements,
    ),
}

"""PyTorch's functions that trust the arguments that a layer hands on, behind a check.

The layer may be anybody's, on inputs that came with it.
"""

from __future__ import annotations

import torch

from memopt_cli.runtime.lifted.arguments import guarded
from memopt_cli.runtime.private_torch import replace_weight_norm


def guard_kernels() -> None:
    """Have these functions look at their arguments in this process, whatever calls them.

    They then raise :class:`~memopt_cli.runtime.lifted.arguments.ArgumentError`.
    """
    aten = torch.ops.aten
    torch.ctc_loss = guarded(torch.ctc_loss, aten.ctc_loss.Tensor)
    torch.embedding_bag = guarded(torch.embedding_bag, aten.embedding_bag.padding_idx)
    replace_weight_norm(lambda function: guarded(function, aten._weight_norm.default))

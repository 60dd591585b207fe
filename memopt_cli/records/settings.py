"""How a training step is run."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from memopt_cli.errors import UsageError
from memopt_cli.text.optimizer_text import parse_optimizer

Precision = Literal["stored", "fp32", "bf16", "fp16", "fp64"]

PRECISIONS: tuple[str, ...] = typing.get_args(Precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How one training step is run."""

    device: str = "cpu"
    """``cpu`` or ``cuda:N`` (already resolved)."""
    precision: Precision = "stored"
    """``stored`` keeps the file's dtypes; ``fp32`` and ``fp64`` cast; ``bf16`` and ``fp16`` run under autocast."""
    loss: str | None = None
    """``file.py:function``, called with the model's output; ``None``: see
    :func:`memopt_cli.training.step.seeds_of_backward`."""
    optimizer: str = ""
    """Whose state counts, as :func:`~memopt_cli.text.optimizer_text.parse_optimizer` takes it; empty: nobody named
    one."""
    micro_batches: int = 1
    """Of a step of the optimizer.  Of several, the last is run: it adds to the gradients of the others."""
    clip_norm: float | None = None
    """The gradients are clipped to this norm of all of them; ``None``: they are not."""
    seed: int = 0

    def __post_init__(self) -> None:
        parse_optimizer(self.optimizer)
        if self.micro_batches < 1:
            raise UsageError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm is {self.clip_norm:g}; it must be above 0")

"""The settings of a training step: device, precision, loss, optimizer, accumulation, clipping, seed."""

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
    """The settings with which one training step is run."""

    device: str = "cpu"
    """Device, ``cpu`` or ``cuda:N`` (never ``auto``)."""
    precision: Precision = "stored"
    """Precision: ``stored`` keeps the file's dtypes, ``fp32`` and ``fp64`` cast, ``bf16`` and ``fp16`` use autocast."""
    loss: str | None = None
    """Function ``file.py:function``, called with the model's output; ``None`` for the rules of
    :func:`memopt_cli.training.step.seeds_of_backward`."""
    optimizer: str = ""
    """Optimizer of the step, as :func:`~memopt_cli.text.optimizer_text.parse_optimizer` reads it; empty for none."""
    micro_batches: int = 1
    """Number of micro-batches in a step of the optimizer.  Only the last is run; it adds to gradients that exist."""
    clip_norm: float | None = None
    """Norm of all gradients together to which they are clipped; ``None`` for no clipping."""
    seed: int = 0

    def __post_init__(self) -> None:
        parse_optimizer(self.optimizer)
        if self.micro_batches < 1:
            raise UsageError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm is {self.clip_norm:g}; it must be above 0")

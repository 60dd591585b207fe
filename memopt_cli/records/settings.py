"""The settings of a training step: device, precision, loss, optimizer, accumulation, clipping, seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt_cli.errors import OptionError, UsageError
from memopt_cli.text.optimizer_text import NoOptimizer, parse_optimizer

Precision = Literal["stored", "fp32", "bf16", "fp16", "fp64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings of one training step."""

    device: str = "cpu"
    """Device, ``cpu`` or ``cuda:N`` (never ``auto``)."""
    precision: Precision = "stored"
    """Precision: ``stored`` keeps the file's dtypes, ``fp32`` and ``fp64`` cast, ``bf16`` and ``fp16`` use autocast."""
    loss: str | None = None
    """Function ``file.py:function``, called with the model's output; ``None`` for the rules of
    :func:`memopt_cli.training.step.seeds_of_backward`."""
    optimizer: str = ""
    """Optimizer of the step, as :func:`~memopt_cli.text.optimizer_text.parse_optimizer` reads it; empty if none."""
    micro_batches: int = 1
    """Number of micro-batches in a step of the optimizer.  Only the last is run; it adds to existing gradients."""
    clip_norm: float | None = None
    """Maximum total gradient norm (``clip_grad_norm_``); ``None`` without clipping."""
    seed: int = 0

    def __post_init__(self) -> None:
        parse_optimizer(self.optimizer)
        if self.micro_batches < 1:
            raise UsageError(f"micro_batches is {self.micro_batches}; it must be 1 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm is {self.clip_norm:g}; it must be above 0")

    @property
    def all_gradients_flag(self) -> str:
        """The flag, as typed, that makes the step need all gradients at once; empty if no flag does."""
        needing = {
            "`--accumulate`": self.micro_batches > 1,
            "`--clip-norm`": self.clip_norm is not None,
            "`--precision fp16`": self.precision == "fp16",
        }
        return next((flag for flag, needs in needing.items() if needs), "")

    @property
    def has_optimizer(self) -> bool:
        """Whether the step ends with an update."""
        return not isinstance(parse_optimizer(self.optimizer), NoOptimizer)

    @property
    def may_update_in_backward(self) -> bool:
        """Whether the step has an optimizer that can use each gradient separately, as soon as backward makes it."""
        return self.has_optimizer and not self.all_gradients_flag

    def check_in_backward(self) -> None:
        """Raise :class:`OptionError` if the step has no optimizer, or one that cannot run in backward."""
        if not self.has_optimizer:
            raise OptionError(
                "`--optimizer-in-backward` lets an optimizer run in backward, but none is named",
                hint="Add the optimizer that you train with: `--optimizer adamw`.",
            )
        if self.all_gradients_flag:
            raise OptionError(
                f"`--optimizer-in-backward` cannot be combined with {self.all_gradients_flag}, which needs all "
                "gradients at once",
                hint="Remove one of them.",
            )

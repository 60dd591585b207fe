"""Choosing the batch size: by trial steps before training, or during training by a control law on the memory in use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memopt_cli.batching.memory import MemoryMeter, choose_meter, usage_share
from memopt_cli.batching.observations import BatchBounds, Losses, Usages
from memopt_cli.batching.requirements import infer_requirements, require_batch_shape, sample_input
from memopt_cli.batching.trial import Trial, try_step
from memopt_cli.errors import MemoryBudgetError, UsageError
from memopt_cli.records import AdaptiveSizing
from memopt_cli.text.units import format_bytes

DANGER_SHARE = 0.95
"""The batch is halved immediately, even between two intervals, if it uses this share of capacity."""
_SHRINK_RATIO = 1.05
"""The batch shrinks if the usage is more than this many times the target."""
_GROW_RATIO = 0.9
"""The batch may grow if the usage is less than this share of the target."""
_MAX_GROWTH_FACTOR = 1.25
"""The batch grows by at most this factor per interval; a batch below 4, which would stay as it is, by one."""
_MAX_THROUGHPUT_LOSS = 0.2
"""A growth that costs more than this share of the throughput is undone."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """A growth of the batch whose throughput is still to be judged."""

    old_batch: int
    """Batch size before the growth."""
    old_throughput: float | None
    """Samples per second at that size; ``None`` if unknown."""


class AdaptiveBatchSizer:
    """Adapts the batch size, so that a step's peak stays near ``target_memory_usage`` of the device's capacity.

    ``target_memory_usage`` (a share) replaces the value in ``config``.  ``memory`` reads capacity and peaks;
    by default, the device's own meter does.  ``effective_batch_size`` is the number of samples per update, which
    gradient accumulation keeps constant.  With ``distributed`` every call of :meth:`adapt_batch_size` is a collective:
    all ranks take the smallest size that any rank asks for.
    """

    def __init__(
        self,
        target_memory_usage: float | None = None,
        *,
        config: AdaptiveSizing | None = None,
        initial_batch_size: int = 16,
        effective_batch_size: int | None = None,
        device: str | torch.device = "cpu",
        memory: MemoryMeter | None = None,
        distributed: bool = False,
    ) -> None:
        config = config or AdaptiveSizing()
        if target_memory_usage is not None:
            config = replace(config, target_memory_usage=target_memory_usage)
        if effective_batch_size is not None and effective_batch_size < 1:
            raise UsageError(f"effective_batch_size is {effective_batch_size}; it must be at least 1")
        self._config = config
        self._target_share = config.target_memory_usage
        self._device = str(device)
        self._own_memory = memory
        self._memory = memory or choose_meter(device)
        self._distributed = distributed
        self._effective = effective_batch_size
        self.start_from(initial_batch_size)

    def start_from(self, batch_size: int) -> None:
        """Begin again at ``batch_size``, clamped to the limits, and forget all observations."""
        self._batch = max(self._config.min_batch_size, min(batch_size, self._config.max_batch_size))
        self._reason = "initial size"
        self._calls = 0
        self._is_measuring = False
        self._has_run_out = False
        self._usages = Usages(self._config.performance_window)
        self._highest_share = 0.0  # the largest share of capacity since the last change
        self._throughputs: list[float] = []
        self._losses = Losses(self._config.performance_window)
        self._growth: _Growth | None = None
        self._bounds = BatchBounds(self._config)
        self._capacity_bytes: int | None = None
        self._memory.restart()

    @property
    def batch_size(self) -> int:
        """Samples per step."""
        return self._batch

    @property
    def reason(self) -> str:
        """Reason for the last change of the size."""
        return self._reason

    @property
    def accumulation_steps(self) -> int:
        """Number of steps whose gradients make one update: ``ceil(effective / batch)``, or 1 without ``effective``."""
        return math.ceil(self._effective / self._batch) if self._effective else 1

    def get_optimal_batch_size(
        self,
        model: nn.Module,
        input_shape: Sequence[int],
        device: str | torch.device = "cpu",
        *,
        make_input: Callable[[int], Tensor] | None = None,
    ) -> int:
        """Run steps of ``model`` to find the largest batch, within the limits, that stays within the memory target.

        ``input_shape`` starts with the batch, which is only the first guess.  A step is forward, and backward if the
        model is in training mode.  From the guess the size is doubled (or halved) until a step exceeds the target or
        the memory, then bisected; the model is not changed.  ``make_input(batch)`` makes the inputs; ``None`` for
        random inputs of the first layer's dtype.  Raises :class:`MemoryBudgetError` if the smallest batch does not fit.
        """
        shape = require_batch_shape(input_shape)
        self._device = str(device)
        self._memory = self._own_memory or choose_meter(device)
        requirements = infer_requirements(model)
        make = make_input or (lambda batch: sample_input((batch, *shape[1:]), requirements, device))
        budget_bytes = self._target_share * self._memory.capacity_bytes()
        low, high = self._config.min_batch_size, self._config.max_batch_size

        def fits(batch: int) -> bool:
            trial = try_step(model, lambda: make(batch), self._memory, self._device, backward=model.training)
            return isinstance(trial, Trial) and trial.peak_bytes <= budget_bytes

        largest = largest_fitting(fits, max(low, min(shape[0], high)), low, high)
        if largest is None:
            raise MemoryBudgetError(
                f"a step at batch {self._config.min_batch_size} does not fit in {format_bytes(budget_bytes)} "
                f"({self._target_share:.0%} of {format_bytes(self._memory.capacity_bytes())})",
                hint="Make the step smaller with memopt optimize"
                f"{', or lower min_batch_size' if low > 1 else ''}"
                f"{', or raise target_memory_usage' if self._target_share < 1 else ''}.",
            )
        self.start_from(largest)
        return largest

    def adapt_batch_size(
        self,
        current_loss: float | None = None,
        current_memory_usage: float | None = None,
        performance_metrics: Mapping[str, float] | None = None,
    ) -> int:
        """Return the size of the next batch, after a step of ``current_loss`` that used ``current_memory_usage``.

        ``current_memory_usage`` is the step's peak, as :func:`~memopt_cli.batching.memory.usage_share` reads it.
        Do not give allocated memory divided by its maximum.  With ``None``, the peak is measured.
        ``performance_metrics`` may hold ``throughput`` in samples per second.

        The control law models the usage of a batch ``B`` as ``u(B) = a + c B``, fitted to the latest usage of each
        size.  (With one size, ``a`` is 0; if memory is measured, ``a`` is also known from the memory in use between
        steps.)

        - At 95 % of capacity, or for a loss that is not finite, the size is halved immediately.
        - Otherwise the size changes every ``adaptation_interval`` calls.  Above 1.05 times the target it becomes
          ``floor(B (target - a) / (u - a))``, at which the model expects the target.
        - Below 0.9 times the target, and if the loss is at most 1.5 times its average, it grows to that size, but at
          most by a factor of 1.25 (or one sample).
        - A growth that cost more than 20 % of the throughput is undone, and not tried again for five intervals.
        - If the capacity changes, the size follows immediately, by the same formula.
        """
        if not self._config.enabled:
            return self._batch
        self._calls += 1
        if self._has_run_out:  # the readings of memory and throughput belong to the step that failed
            self._has_run_out = False
            return self._change_size(self._batch, self._reason)
        capacity_changed = current_memory_usage is None and self._follow_capacity()
        share = self._observe(current_memory_usage, performance_metrics or {})
        batch, reason = self._decide(share, current_loss, capacity_changed=capacity_changed)
        self._losses.add(current_loss)
        return self._change_size(batch, reason)

    def report_out_of_memory(self) -> int:
        """Halve the size, because the last step ran out of memory, and return it; it does not grow for five intervals.

        The next :meth:`adapt_batch_size` ignores the readings of the failed step; in a distributed run, it also sends
        the size to the other ranks.
        """
        self._set_batch(self._bounds.clamp(self._batch // 2, self._calls), "out of memory")
        self._bounds.cap(self._batch, self._calls)
        self._has_run_out = True
        return self._batch

    def _decide(self, share: float, loss: float | None, *, capacity_changed: bool) -> tuple[int, str]:
        if loss is not None and not math.isfinite(loss):
            return self._batch // 2, f"the loss is {loss}"
        if share >= max(DANGER_SHARE, _SHRINK_RATIO * self._target_share) and not capacity_changed:
            return self._batch // 2, f"usage {share:.0%}"
        if self._calls % self._config.adaptation_interval and not capacity_changed:
            return self._batch, ""
        self._usages.add(self._batch, self._calls, self._highest_share)
        batch, reason = self._apply_law(self._highest_share, loss)
        self._begin_interval()
        return batch, reason

    def _apply_law(self, share: float, loss: float | None) -> tuple[int, str]:
        """Return the size by the control law for a batch that used ``share`` of the capacity, and the reason."""
        throughput = fmean(self._throughputs) if self._throughputs else None
        growth, self._growth = self._growth, None
        old_throughput = growth.old_throughput if growth else None
        if growth and old_throughput and throughput and throughput < (1 - _MAX_THROUGHPUT_LOSS) * old_throughput:
            self._bounds.cap(growth.old_batch, self._calls)
            return growth.old_batch, f"growth cut throughput from {old_throughput:.3g} to {throughput:.3g} samples/s"
        batch_at_target = self._usages.batch_at(self._target_share, self._calls, self._batch, share)
        batch = int(min(batch_at_target, self._config.max_batch_size))
        if share > _SHRINK_RATIO * self._target_share:
            return batch, f"usage {share:.0%} above the target {self._target_share:.0%}"
        if share < _GROW_RATIO * self._target_share and not self._losses.is_spike(loss):
            batch = min(batch, max(self._batch + 1, int(_MAX_GROWTH_FACTOR * self._batch)))
            if self._bounds.clamp(batch, self._calls) > self._batch:
                self._growth = _Growth(self._batch, throughput)
                return batch, f"usage {share:.0%} below the target {self._target_share:.0%}"
        return self._batch, ""

    def _observe(self, memory_usage: float | None, metrics: Mapping[str, float]) -> float:
        if unknown := set(metrics) - {"throughput"}:
            raise UsageError(f"unknown performance metric '{min(unknown)}'", hint="Known: throughput (samples/s).")
        capacity_bytes = self._memory.capacity_bytes()
        self._is_measuring = memory_usage is None
        if memory_usage is None:
            share = self._memory.peak_bytes() / capacity_bytes
        else:
            share = usage_share(memory_usage, capacity_bytes)
        self._highest_share = max(self._highest_share, share)
        if "throughput" in metrics:
            self._throughputs.append(metrics["throughput"])
        return share

    def _follow_capacity(self) -> bool:
        """Convert shares of an earlier capacity into shares of the current one, and return whether it changed."""
        old_bytes, self._capacity_bytes = self._capacity_bytes, self._memory.capacity_bytes()
        if old_bytes is None or old_bytes == self._capacity_bytes:
            return False
        factor = old_bytes / self._capacity_bytes
        self._usages.rescale(factor)
        self._highest_share = max(self._highest_share * factor, self._usages.expected(self._calls, self._batch))
        return True

    def _change_size(self, batch: int, reason: str) -> int:
        """Change to ``batch``, within the bounds and as all ranks agree, and return the size."""
        own_batch = self._bounds.clamp(batch, self._calls)
        agreed_batch = agree_on_batch_size(own_batch, self._device) if self._distributed else own_batch
        if agreed_batch != own_batch:
            self._growth = None
            reason = "another rank needs a smaller batch"
        self._set_batch(agreed_batch, reason)
        return self._batch

    def _set_batch(self, batch: int, reason: str) -> None:
        if batch == self._batch:
            return
        if batch < self._batch:
            self._growth = None
        self._batch, self._reason = batch, reason
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._highest_share = 0.0
        self._throughputs.clear()
        self._memory.restart()
        if self._is_measuring:  # memory in use between two steps is the usage of a batch of 0 samples
            self._usages.add(0, self._calls, self._memory.used_bytes() / self._memory.capacity_bytes())


def largest_fitting(fits: Callable[[int], bool], guess: int, low: int, high: int) -> int | None:
    """Return the largest size in ``[low, high]`` for which ``fits`` is true, or ``None`` if ``low`` does not fit.

    Every size that fits must be smaller than every size that does not.  Sizes are doubled from ``guess`` until a size
    does not fit (or halved until a size fits), then bisected, with at most ``log2(high / low) + log2(high - low) + 3``
    calls.
    """
    fitting, failing, size = low - 1, high + 1, guess
    while failing - fitting > 1:
        if fits(size):
            fitting = size
            size = min(2 * size, high) if failing > high else (fitting + failing) // 2
        else:
            failing = size
            size = max(size // 2, low) if fitting < low else (fitting + failing) // 2
    return fitting if fitting >= low else None


def agree_on_batch_size(batch_size: int, device: str | torch.device = "cpu") -> int:
    """Return the smallest ``batch_size`` among all ranks of the default process group; every rank must call it.

    ``device`` is the rank's own device, on which NCCL needs tensors; other backends use the CPU.
    Raises :class:`UsageError` if no process group was initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("there is no process group", hint="Call torch.distributed.init_process_group first.")
    smallest = torch.tensor(batch_size, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest)

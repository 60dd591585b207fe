"""Sizer, shaper, monitor and validator in one: the batch size follows the memory in use while a model trains or infers.

Example: a loader yields 64 samples at a time, and 40 fit.  The manager gives out 40, keeps 24 for the next call, and
gives out 40 of the 88 that it has then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from memopt_cli.batching.dataset import STRATEGIES, Collate, DatasetRun, Strategy, collate_inputs
from memopt_cli.batching.memory import MemoryMeter, choose_meter
from memopt_cli.batching.monitor import PerformanceMonitor, Trend
from memopt_cli.batching.rows import RowQueue, count_rows
from memopt_cli.batching.shaper import MemoryAwareShaper
from memopt_cli.batching.sizer import AdaptiveBatchSizer
from memopt_cli.batching.validator import BatchShapeValidator
from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.records import BatchShaping
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.text.units import dtype_name

logger = logging.getLogger("memopt_cli.batching")


class ManagerStatus(TypedDict):
    """The state of a run, as :meth:`BatchShapeManager.get_status` returns it."""

    current_batch_size: int
    memory_usage: float
    """Share of the device's capacity that the last recorded batch used.  Before the first record: the share in use."""
    performance_trend: Trend
    pending_samples: int
    """Number of rows that the manager has taken in and not yet given out."""
    accumulation_steps: int
    reason: str
    """Reason for the last change of the batch size."""


class ShapedBatch(TypedDict):
    """A batch of inputs and targets, ``(batch, …)`` each."""

    inputs: Any
    targets: Any


class BatchShapeManager:
    """A buffer between a loader and a model: takes batches in, and gives their rows out in batches that fit in memory.

    Each row is given out exactly once, and in order.

    Rows beyond the current size wait for the next call; :meth:`flush` gives out the last rows.  With :meth:`batches`,
    no more than one batch of rows ever waits.

    ``memory_target`` (share of capacity) replaces the target in ``config``.  In ``inference_mode`` trials have no
    backward.  ``memory`` reads capacity and peaks; by default it is the meter of ``device``.  Inputs are laid out in
    memory for ``operation_type`` (attention, convolution, recurrent).  ``effective_batch_size`` and ``distributed``:
    see :class:`AdaptiveBatchSizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cpu",
        memory_target: float | None = None,
        inference_mode: bool = False,
        *,
        config: BatchShaping | None = None,
        memory: MemoryMeter | None = None,
        operation_type: str | None = None,
        effective_batch_size: int | None = None,
        distributed: bool = False,
    ) -> None:
        config = config or BatchShaping()
        sizing = config.adaptive_sizing
        if memory_target is not None:
            sizing = replace(sizing, target_memory_usage=memory_target)
        self._model = model
        self._device = str(device)
        self._is_inference = inference_mode
        self._sizing = sizing
        self._memory = memory or choose_meter(device)
        self._new_sizer = functools.partial(
            AdaptiveBatchSizer,
            effective_batch_size=effective_batch_size,
            device=self._device,
            memory=self._memory,
            distributed=distributed,
        )
        self.monitor = PerformanceMonitor(config=config.performance_monitoring, memory=self._memory)
        self.shaper = MemoryAwareShaper(config=config.memory_aware_shaping, memory=self._memory)
        self.validator = BatchShapeValidator(config=config.validation)
        self.sizer = self._new_sizer(config=sizing, initial_batch_size=16)
        self._is_ready = inference_mode
        self._queue = RowQueue()
        self._last_rows = 0
        self._is_last_shaped = False  # whether the last batch was given out as a dict of inputs and targets
        self._last_metrics: dict[str, float | None] = {}
        self._operation = operation_type
        self._validated_shapes: set[tuple[int, ...]] = set()  # the shapes of single samples

    def initialize_for_training(
        self,
        initial_batch_size: int = 16,
        max_batch_size: int | None = None,
        adaptation_interval: int | None = None,
    ) -> None:
        """Begin a run at ``initial_batch_size`` samples; call this before the first batch.

        ``max_batch_size`` and ``adaptation_interval`` replace the values in the configuration unless they are ``None``.
        Raises :class:`UsageError` for an inference manager, and for a size outside the limits.
        """
        if self._is_inference:
            raise UsageError("this manager is for inference", hint="Make one without inference_mode to train.")
        sizing = replace(
            self._sizing,
            max_batch_size=self._sizing.max_batch_size if max_batch_size is None else max_batch_size,
            adaptation_interval=(
                self._sizing.adaptation_interval if adaptation_interval is None else adaptation_interval
            ),
        )
        if not sizing.min_batch_size <= initial_batch_size <= sizing.max_batch_size:
            raise UsageError(
                f"initial_batch_size {initial_batch_size} is outside {sizing.min_batch_size} to {sizing.max_batch_size}"
            )
        self._sizing = sizing
        self.sizer = self._new_sizer(config=sizing, initial_batch_size=initial_batch_size)
        self._is_ready = True

    def process_batch(self, input_batch: Any, training_step: int = 0, current_loss: float | None = None) -> Any:
        """Take ``input_batch`` in, and return the oldest waiting rows: at least one, at most the current size.

        The rows have the structure of ``input_batch``, and are on the device.  ``current_loss`` is the loss of the last
        step, or ``None`` before the first step.
        """
        self._require_ready()
        self._queue.put(input_batch)
        self._adapt_size(training_step, current_loss, None)
        return self._give_out()

    def adapt_and_process_batch(
        self, batch: Any, step: int, current_metrics: Mapping[str, float | None] | None = None
    ) -> ShapedBatch:
        """Take ``batch``, ``(inputs, targets)`` or a dict of these names, in, and return the oldest waiting rows.

        ``current_metrics`` may hold the last step's ``loss`` and ``memory`` (as
        :func:`~memopt_cli.batching.memory.usage_share` reads it).  A missing metric is taken from the last
        :meth:`update_metrics`, or measured.  Without :meth:`initialize_for_training` the first batch begins the run, at
        its own size unless a limit forbids it.
        """
        metrics = dict(current_metrics or {})
        if unknown := set(metrics) - {"loss", "memory"}:
            raise UsageError(f"unknown metric '{min(unknown)}'", hint="Known: loss, memory.")
        pair = _inputs_and_targets(batch)
        if not self._is_ready:
            low, high = self._sizing.min_batch_size, self._sizing.max_batch_size
            self.initialize_for_training(initial_batch_size=min(max(count_rows(pair), low), high))
        self._queue.put(pair)
        self._adapt_size(step, metrics.get("loss"), metrics.get("memory"))
        inputs, targets = self._give_out()
        self._is_last_shaped = True
        return ShapedBatch(inputs=inputs, targets=targets)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the rows of ``loader`` in batches of the current size, several for a large batch of the loader.

        The last batch may be smaller.  Call :meth:`update_metrics` after each step.
        """
        self._require_ready()
        step = 0
        for batch in loader:
            self._queue.put(batch)
            while len(self._queue) >= self.sizer.batch_size:
                self._adapt_size(step, None, None)
                if len(self._queue) < self.sizer.batch_size:
                    break  # the batch size has just grown beyond the waiting rows
                yield self._give_out()
                step += 1
        yield from self.flush()

    def flush(self) -> Iterator[Any]:
        """Yield the waiting rows in batches of at most the current size; pairs come as ``(inputs, targets)``."""
        while len(self._queue):
            yield self._give_out()

    def update_metrics(self, loss: float | None, processing_time: float, memory_usage: float | None = None) -> None:
        """Record the step on the last batch: its ``loss``, its ``processing_time`` in seconds, its ``memory_usage``.

        ``memory_usage``: as :func:`~memopt_cli.batching.memory.usage_share` reads it; by default the measured peak.
        """
        if not self._last_rows:
            raise UsageError("no batch was given out yet", hint="Call process_batch first.")
        usage = self._memory.peak_bytes() if memory_usage is None else memory_usage
        self.monitor.record_batch(self._last_rows, processing_time, usage, loss)
        self._last_metrics = {"loss": loss, "memory": memory_usage, "throughput": self._last_rows / processing_time}

    def report_out_of_memory(self, batch: Any = None) -> int:
        """Halve the batch size, because the last step ran out of memory, and return it.

        ``batch``: the batch of that step; its rows are given out again next.  With ``None``, they are skipped.
        """
        size = self.sizer.report_out_of_memory()
        if batch is not None:
            self._queue.put_first(_inputs_and_targets(batch) if self._is_last_shaped else batch)
        logger.debug("out of memory: batch size %d", size)
        return size

    def process_large_dataset(
        self,
        dataset: Iterable[Any] | Dataset[Any],
        batch_size_strategy: Strategy = "memory_adaptive",
        max_concurrent_batches: int = 4,
        *,
        collate: Collate = collate_inputs,
    ) -> Any:
        """Return the model's outputs for every sample of ``dataset``, in order, in evaluation mode.

        The outputs equal the outputs of a plain loop over the samples, concatenated along dimension 0, on the CPU.
        Samples are inputs or pairs ``(input, target)``; ``collate`` may take others.  A batch that runs out of memory
        is halved and tried again.  Strategies: ``memory_adaptive`` follows the target, ``fixed`` keeps the size,
        ``throughput`` doubles it as long as that is 5 % faster per sample and stays below the target.  A thread makes
        batches ahead, so that at most ``max_concurrent_batches`` are in memory at a time.

        Raises :class:`MemoryBudgetError` if the smallest batch runs out of memory.
        """
        if batch_size_strategy not in STRATEGIES:
            raise UsageError(f"unknown strategy '{batch_size_strategy}'", hint=f"Known: {', '.join(STRATEGIES)}.")
        if max_concurrent_batches < 1:
            raise UsageError(f"max_concurrent_batches is {max_concurrent_batches}; it must be at least 1")
        self.sizer.start_from(self.sizer.batch_size)
        run = DatasetRun(
            model=self._model,
            device=self._device,
            sizer=self.sizer,
            monitor=self.monitor,
            memory=self._memory,
            strategy=batch_size_strategy,
            max_resident=max_concurrent_batches,
            target_share=self._sizing.target_memory_usage,
            collate=collate,
        )
        return run.results(dataset)

    def get_status(self) -> ManagerStatus:
        """Return the state of the run: batch size, memory, trend, waiting rows."""
        records = self.monitor.records
        used_share = self._memory.used_bytes() / self._memory.capacity_bytes()
        return ManagerStatus(
            current_batch_size=self.sizer.batch_size,
            memory_usage=records[-1].memory_share if records else used_share,
            performance_trend=self.monitor.get_performance_analysis()["performance_trend"],
            pending_samples=len(self._queue),
            accumulation_steps=self.sizer.accumulation_steps,
            reason=self.sizer.reason,
        )

    def enable_debug_mode(self) -> None:
        """Write every decision to the log ``memopt_cli.batching``; to standard error if no handler is set up."""
        logger.setLevel(logging.DEBUG)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())

    def log_detailed_metrics(self) -> None:
        """Write status, analysis, recommendations and notes to the log ``memopt_cli.batching``, one line each."""
        lines = {**self.get_status(), **self.monitor.get_performance_analysis()}
        for name, value in lines.items():
            logger.info("%s: %s", name, f"{value:.4g}" if isinstance(value, float) else value)
        for text in [*self.monitor.get_optimization_recommendations(), *self.shaper.notes]:
            logger.info("recommendation: %s", text)

    def _require_ready(self) -> None:
        if not self._is_ready:
            raise UsageError("the manager is not initialized", hint="Call initialize_for_training first.")

    def _adapt_size(self, step: int, loss: float | None, memory: float | None) -> None:
        """Adapt the size to the cost of the last batch, if there was one, and log the decision."""
        if not self._last_rows:
            return
        old_size = self.sizer.batch_size
        throughput = self._last_metrics.get("throughput")
        size = self.sizer.adapt_batch_size(
            self._last_metrics.get("loss") if loss is None else loss,
            self._last_metrics.get("memory") if memory is None else memory,
            {} if throughput is None else {"throughput": throughput},
        )
        self._last_rows = 0
        self._last_metrics = {}
        logger.debug("step %d: batch size %d", step, size)
        if size != old_size:
            logger.debug("step %d: batch size %d -> %d (%s)", step, old_size, size, self.sizer.reason)

    def _give_out(self) -> Any:
        if not len(self._queue):
            raise BatchShapeError("the batch has no samples, and no rows are waiting", hint="Pass at least one sample.")
        batch = self._queue.take(self.sizer.batch_size)
        self._is_last_shaped = False
        self._last_rows = tensors_of(batch)[0].shape[0]
        self._check_shape(tensors_of(batch)[0])
        return map_leaves(self._move_to_device, batch)

    def _check_shape(self, inputs: Tensor) -> None:
        shape = tuple(inputs.shape)
        if shape[1:] in self._validated_shapes:
            return
        self._validated_shapes.add(shape[1:])
        dtype = dtype_name(inputs.dtype)
        _, issues = self.validator.validate_batch_shape(shape, self._model, dtype=dtype)
        for issue in issues:
            logger.log(logging.DEBUG if issue.startswith("performance:") else logging.WARNING, "%s: %s", shape, issue)

    def _move_to_device(self, tensor: Tensor) -> Any:
        """Return ``tensor`` on the device, laid out in memory for ``operation_type``."""
        tensor = tensor.to(self._device)
        if self._operation is None or tensor.dim() < 3:
            return tensor
        return self.shaper.optimize_tensor_layout(tensor, self._operation)


def _inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping) and set(batch) == {"inputs", "targets"}:
        return batch["inputs"], batch["targets"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise BatchShapeError(
        "the batch has no inputs and targets", hint='Pass (inputs, targets) or {"inputs": …, "targets": …}.'
    )

"""Running a model over a dataset for inference: every sample once, in order, in batches that follow memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from memopt_cli.batching.memory import MemoryMeter
from memopt_cli.batching.monitor import PerformanceMonitor
from memopt_cli.batching.rows import concatenate, count_rows, slice_rows
from memopt_cli.batching.sizer import AdaptiveBatchSizer
from memopt_cli.batching.trial import catch_out_of_memory
from memopt_cli.errors import BatchShapeError, MemoryBudgetError, UsageError
from memopt_cli.records import OutOfMemory
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.step import synchronize

Strategy = Literal["memory_adaptive", "fixed", "throughput"]
Collate = Callable[[Sequence[Any]], Any]
"""Function that joins samples into one batch, a structure of tensors for the model."""

STRATEGIES: tuple[Strategy, ...] = ("memory_adaptive", "fixed", "throughput")
_MIN_SPEEDUP = 1.05
"""A doubled size stays if throughput rises by at least this factor."""
_TIMED_BATCHES = 2
"""Number of batches that are timed at each size.  The first warms up, and the fastest counts."""


@dataclass(slots=True, kw_only=True)
class DatasetRun:
    """One pass of a model over a dataset."""

    model: nn.Module
    device: str
    sizer: AdaptiveBatchSizer
    monitor: PerformanceMonitor
    memory: MemoryMeter
    strategy: Strategy
    max_resident: int
    """Maximum number of batches of inputs in memory at a time: one in the model, and others that a thread makes."""
    target_share: float
    """Maximum share of capacity that a doubled batch may use under the strategy ``throughput``."""
    collate: Collate
    _rates: list[float] = field(default_factory=list)
    _best: tuple[int, float] | None = None
    """Size and samples per second before the last doubling."""
    _is_climbing: bool = True

    def results(self, dataset: Iterable[Any] | Dataset[Any]) -> Any:
        """Return the model's outputs for all samples of ``dataset``, concatenated along dimension 0, on the CPU."""
        outputs = []
        with evaluation_mode(self.model), torch.no_grad():
            for batch in prefetch(dataset, self.collate, lambda: self.sizer.batch_size, self.max_resident):
                outputs += self._process(batch)
                del batch  # else two batches would be alive while the next one is made
        if not outputs:
            raise UsageError("the dataset is empty: there is nothing to process")
        return concatenate(outputs)

    def _process(self, batch: Any) -> list[Any]:
        """Return the outputs for ``batch``: one entry for each piece that fits in memory."""
        outputs: list[Any] = []
        start = 0
        rows = count_rows(batch)
        while start < rows:
            stop = min(rows, start + self.sizer.batch_size)
            started = time.perf_counter()
            output = self._forward(slice_rows(batch, start, stop))
            if isinstance(output, OutOfMemory):
                self._shrink(stop - start)
                continue
            outputs.append(output)
            self._record(stop - start, max(time.perf_counter() - started, 1e-9))
            start = stop
        return outputs

    def _forward(self, piece: Any) -> Any | OutOfMemory:
        def run() -> Any:
            output = self.model(map_leaves(lambda tensor: tensor.to(self.device), piece))
            synchronize(self.device)
            return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, output)

        output = catch_out_of_memory(run, self.device)
        if isinstance(output, OutOfMemory) or (tensors_of(output) and count_rows(output) == count_rows(piece)):
            return output
        raise BatchShapeError(
            f"the model gave outputs of shapes {[tuple(t.shape) for t in tensors_of(output)]} for "
            f"{count_rows(piece)} samples",
            hint="Its outputs must be tensors with the batch as their first dimension.",
        )

    def _shrink(self, rows: int) -> None:
        old_batch = self.sizer.batch_size
        self._is_climbing = False
        if self.sizer.report_out_of_memory() == old_batch:
            raise MemoryBudgetError(
                f"out of memory at {rows} samples, and the batch size cannot go below {old_batch}",
                hint="Use a device with more memory, or smaller samples"
                f"{', or lower min_batch_size' if old_batch > 1 else ''}.",
            )

    def _record(self, rows: int, elapsed_s: float) -> None:
        rate = rows / elapsed_s
        self.monitor.record_batch(rows, elapsed_s, self.memory.peak_bytes())
        if self.strategy == "memory_adaptive":
            self.sizer.adapt_batch_size(performance_metrics={"throughput": rate})
        elif self.strategy == "throughput" and self._is_climbing and rows == self.sizer.batch_size:
            self._double_size(rate)

    def _double_size(self, rate: float) -> None:
        """Record ``rate``; double the size as long as that raises throughput and fits, then stay with the best size."""
        self._rates.append(rate)
        if len(self._rates) < _TIMED_BATCHES:
            return
        size, rate = self.sizer.batch_size, max(self._rates)
        self._rates.clear()
        if self._best and rate < _MIN_SPEEDUP * self._best[1]:
            self._is_climbing = False
            self.sizer.start_from(self._best[0])
            return
        self._best = (size, rate)
        has_room = 2 * self.memory.peak_bytes() <= self.target_share * self.memory.capacity_bytes()
        if has_room:
            self.sizer.start_from(2 * size)
        self._is_climbing = has_room and self.sizer.batch_size > size


def collate_inputs(samples: Sequence[Any]) -> Any:
    """Return one batch of the inputs in ``samples``, each an input or a pair ``(input, target)``."""
    return default_collate([sample[0] if isinstance(sample, tuple | list) else sample for sample in samples])


def prefetch(
    dataset: Iterable[Any] | Dataset[Any], collate: Collate, size: Callable[[], int], max_resident: int
) -> Iterator[Any]:
    """Yield batches of the samples of ``dataset`` in order, at most ``max_resident`` alive, made ahead by one thread.

    ``size()`` is called before each batch.  The caller must drop a batch before asking for the next batch.
    """
    samples = iter(_samples(dataset))
    futures: deque[Future[Any]] = deque()

    def make(rows: int) -> Any:
        chunk = list(islice(samples, rows))
        return collate(chunk) if chunk else None

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="memopt-dataset") as thread:
        try:
            while True:
                while len(futures) < max_resident:
                    futures.append(thread.submit(make, size()))
                batch = futures.popleft().result()
                if batch is None:
                    return
                yield batch
                del batch
        finally:
            thread.shutdown(cancel_futures=True)


def _samples(dataset: Any) -> Iterator[Any]:
    # A map-style dataset need not raise IndexError, without which iterating over it would never end.
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[i] for i in range(len(dataset)))
    return iter(dataset)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode in the ``with`` block, and every module back into its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

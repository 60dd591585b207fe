"""A model over a whole dataset: as a plain loop does it, whatever memory does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from memopt_cli.batching.manager import BatchShapeManager
from memopt_cli.errors import BatchShapeError, MemoryBudgetError, UsageError
from memopt_cli.records import AdaptiveSizing, BatchShaping

STRATEGIES = ("memory_adaptive", "fixed", "throughput")


def manager_of(model: nn.Module, memory: Any, **sizing: Any) -> BatchShapeManager:
    config = BatchShaping(adaptive_sizing=AdaptiveSizing(**{"adaptation_interval": 2, **sizing}))
    return BatchShapeManager(model, memory_target=0.9, inference_mode=True, config=config, memory=memory)


def numbered(samples: int) -> Tensor:
    return torch.arange(4.0 * samples).reshape(samples, 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_those_of_a_plain_loop(memory: Any, metered: Callable[..., nn.Module], strategy: Any) -> None:
    model = metered()
    data = numbered(301)
    results = manager_of(model, memory).process_large_dataset(
        dataset=TensorDataset(data, torch.arange(301)), batch_size_strategy=strategy, max_concurrent_batches=4
    )
    model.eval()
    assert torch.allclose(results, torch.cat([model(row[None]) for row in data]), rtol=1e-5)
    assert not results.requires_grad


@pytest.mark.slow
@settings(max_examples=40)
@given(
    samples=st.integers(1, 200),
    fails_above=st.integers(1, 40),
    resident=st.integers(1, 5),
    strategy=st.sampled_from(STRATEGIES),
)
def test_running_out_of_memory_loses_and_repeats_nothing(
    fake_memory: Callable[..., Any], samples: int, fails_above: int, resident: int, strategy: Any
) -> None:
    memory = fake_memory(fails_above=fails_above)

    class Identity(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            memory.step(len(x))
            return x + 0.5

    results = manager_of(Identity(), memory).process_large_dataset(
        range(samples), strategy, resident, collate=torch.tensor
    )
    assert results.tolist() == [i + 0.5 for i in range(samples)]


def test_out_of_memory_halves_the_batch(memory: Any, metered: Callable[..., nn.Module]) -> None:
    memory.fails_above = 5
    manager_of(metered(), memory).process_large_dataset(numbered(32), "fixed")
    assert memory.seen == [16, 8, *[4] * 8]


def test_a_sample_that_does_not_fit_is_an_error(memory: Any, metered: Callable[..., nn.Module]) -> None:
    memory.fails_above = 3
    with pytest.raises(MemoryBudgetError, match="at 4 samples, and the batch size cannot go below 4") as raised:
        manager_of(metered(), memory, min_batch_size=4).process_large_dataset(numbered(32))
    assert "lower min_batch_size" in raised.value.hint
    memory.fails_above = 0
    with pytest.raises(MemoryBudgetError, match="cannot go below 1") as raised:
        manager_of(metered(), memory).process_large_dataset(numbered(32))
    assert raised.value.hint == "Use a device with more memory, or smaller samples."


def test_the_adaptive_strategy_follows_the_target(memory: Any, metered: Callable[..., nn.Module]) -> None:
    manager = manager_of(metered(), memory)
    manager.process_large_dataset(numbered(3000), max_concurrent_batches=1)
    assert 60 <= manager.sizer.batch_size <= 80 == (0.9 * 1000 - 100) / 10
    assert memory.base + memory.per_sample * max(memory.seen) <= 900


def test_the_fixed_strategy_keeps_the_size(memory: Any, metered: Callable[..., nn.Module]) -> None:
    manager_of(metered(), memory).process_large_dataset(numbered(70), "fixed")
    assert memory.seen == [16, 16, 16, 16, 6]


def test_the_throughput_strategy_stops_where_doubling_does_not_pay(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that says what a batch took: no time up to 32 samples, in proportion above."""
    from memopt_cli.batching import dataset

    now = [0.0]
    monkeypatch.setattr(dataset.time, "perf_counter", lambda: now[0])

    class Clocked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            memory.step(len(x))
            now[0] += max(1.0, len(x) / 32)
            return x

    memory.per_sample = 1
    manager = manager_of(Clocked(), memory)
    manager.process_large_dataset(numbered(1000), "throughput", 1)
    assert manager.sizer.batch_size == 32
    assert max(memory.seen) == 64


def test_doubling_stays_below_the_target(memory: Any, metered: Callable[..., nn.Module]) -> None:
    manager_of(metered(), memory).process_large_dataset(numbered(2000), "throughput", 1)
    assert memory.base + memory.per_sample * max(memory.seen) <= 900


def test_every_mode_is_put_back(memory: Any, metered: Callable[..., nn.Module]) -> None:
    model = metered()
    model.norm.eval()
    statistics = model.norm.running_mean.clone()
    manager = manager_of(model, memory)
    manager.process_large_dataset(numbered(20))
    assert (model.training, model.linear.training, model.norm.training) == (True, True, False)
    assert torch.equal(model.norm.running_mean, statistics)
    memory.fails_above = 0
    with pytest.raises(MemoryBudgetError):
        manager.process_large_dataset(numbered(20))
    assert model.training


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_batches_are_resident_than_allowed(memory: Any, limit: int) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most, ran = [0], [0]
    made = threading.Condition()

    def collate(samples: Any) -> Tensor:
        batch: Tensor = default_collate(samples)
        with made:
            alive.append(weakref.ref(batch))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            made.notify_all()
        return batch

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran[0] += 1
            with made:  # until all that may be made ahead is
                assert made.wait_for(lambda: len(alive) >= min(13, ran[0] + limit - 1), timeout=60)
                most[0] = max(most[0], sum(ref() is not None for ref in alive))
            return x * 2

    gc.collect()
    manager = manager_of(Watching(), memory, max_batch_size=16)
    manager.process_large_dataset(numbered(200), "fixed", limit, collate=collate)
    assert most[0] == limit
    assert len(alive) == 13


def test_iterable_datasets_and_structured_outputs(memory: Any) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(numbered(37))

    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"sum": x.sum(1), "parts": (x, x[:, :1])}

    results = manager_of(Two(), memory).process_large_dataset(Stream())
    assert torch.equal(results["sum"], numbered(37).sum(1))
    assert torch.equal(results["parts"][0], numbered(37))


def test_a_map_style_dataset_without_an_end(memory: Any) -> None:
    class Squares(Dataset[Tensor]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(float(index**2))

    results = manager_of(nn.Identity(), memory).process_large_dataset(Squares())
    assert results.tolist() == [i**2 for i in range(20)]


def test_failures_of_the_dataset_and_the_model_come_through(memory: Any) -> None:
    def samples() -> Iterator[Tensor]:
        yield from numbered(20)
        raise LookupError("sample 20 is missing")

    with pytest.raises(LookupError, match="sample 20"):
        manager_of(nn.Identity(), memory).process_large_dataset(samples())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        manager_of(nn.Linear(3, 1), memory).process_large_dataset(numbered(8))


def test_what_cannot_be_processed_is_refused(memory: Any) -> None:
    manager = manager_of(nn.Identity(), memory)
    with pytest.raises(UsageError, match="dataset is empty"):
        manager.process_large_dataset([])
    with pytest.raises(UsageError, match="unknown strategy 'fast'"):
        manager.process_large_dataset(numbered(8), "fast")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_concurrent_batches is 0"):
        manager.process_large_dataset(numbered(8), max_concurrent_batches=0)

    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(0)

    with pytest.raises(BatchShapeError, match=r"outputs of shapes \[\(4,\)\] for 8 samples"):
        manager_of(Pooled(), memory).process_large_dataset(numbered(8))

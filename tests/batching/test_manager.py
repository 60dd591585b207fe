"""Every row exactly once and in order, while the size follows memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from memopt_cli.batching.manager import BatchShapeManager
from memopt_cli.errors import BatchShapeError, UsageError
from memopt_cli.records import BatchShaping, from_data


def manager_of(memory: Any, initial: int = 4, interval: int = 2, **options: Any) -> BatchShapeManager:
    manager = BatchShapeManager(nn.Linear(1, 1), memory=memory, **options)
    manager.initialize_for_training(initial_batch_size=initial, max_batch_size=64, adaptation_interval=interval)
    return manager


def numbered(start: int, rows: int) -> tuple[Tensor, Tensor]:
    values = torch.arange(start, start + rows, dtype=torch.float32)
    return values[:, None], values.long()


def loader(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [numbered(start, size) for start, size in zip(starts, sizes, strict=True)]


def test_rows_beyond_the_size_are_carried_over(memory: Any) -> None:
    manager = manager_of(memory, 4, 100)
    given_out = [manager.process_batch(batch, step)[1].tolist() for step, batch in enumerate(loader(6, 3, 2))]
    assert given_out == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    manager.process_batch(numbered(11, 6), 3)
    assert manager.get_status()["pending_samples"] == 2
    assert [targets.tolist() for _, targets in manager.flush()] == [[15, 16]]
    assert list(manager.flush()) == []


def test_a_batch_without_samples_gives_out_those_that_wait_or_is_refused(memory: Any) -> None:
    manager = manager_of(memory, 4, 100)
    with pytest.raises(BatchShapeError, match="no samples, and no rows are waiting"):
        manager.adapt_and_process_batch(numbered(0, 0), 0)
    manager.process_batch(numbered(0, 5))
    assert manager.process_batch(numbered(5, 0))[1].tolist() == [4]


@pytest.mark.parametrize(("rows", "begun"), [(6, 6), (200, 128)])
def test_the_training_loop_as_the_guide_prints_it(memory: Any, rows: int, begun: int) -> None:
    """It makes the manager and goes on to the batches."""
    model = nn.Linear(1, 2)
    manager = BatchShapeManager(model=model, device="cpu", memory_target=0.8, memory=memory)
    loss, seen = torch.tensor(1.0), 0
    for step, batch in enumerate(loader(rows, rows)):
        metrics = {"loss": loss.item(), "memory": 0.85}
        adapted = manager.adapt_and_process_batch(batch=batch, step=step, current_metrics=metrics)
        loss = nn.functional.cross_entropy(model(adapted["inputs"]), adapted["targets"] % 2)
        loss.backward()
        manager.update_metrics(loss=loss.item(), processing_time=0.01, memory_usage=0.85)
        assert len(adapted["inputs"]) == begun
        seen += len(adapted["inputs"])
    assert seen == 2 * begun
    assert manager.get_status()["current_batch_size"] == begun


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 9), max_size=12),
    usages=st.lists(st.sampled_from([0.1, 0.5, 0.8, 0.97]), min_size=1, max_size=5),
    streamed=st.booleans(),
)
def test_every_row_once_whatever_the_size_does(
    fake_memory: Callable[..., Any], sizes: list[int], usages: list[float], streamed: bool
) -> None:
    manager = manager_of(fake_memory(), 4, 1)
    given_out: list[list[int]] = []

    def step(batch: Any) -> None:
        given_out.append(batch[1].tolist())
        assert batch[0].flatten().tolist() == batch[1].tolist()
        assert 1 <= len(given_out[-1]) <= manager.sizer.batch_size
        manager.update_metrics(1.0, 0.1, usages[len(given_out) % len(usages)])

    if streamed:
        for batch in manager.batches(loader(*sizes)):
            step(batch)
    else:
        for i, batch in enumerate(loader(*sizes)):
            step(manager.process_batch(batch, i))
        for batch in manager.flush():
            step(batch)
    assert [row for rows in given_out for row in rows] == list(range(sum(sizes)))


def test_streaming_never_runs_behind(memory: Any) -> None:
    manager = manager_of(memory, 4)
    for _ in manager.batches(loader(32, 32, 5)):
        assert manager.get_status()["pending_samples"] < 32 + 4


def test_a_batch_that_ran_out_of_memory_is_given_out_again(memory: Any) -> None:
    manager = manager_of(memory, 8)
    first = manager.process_batch(numbered(0, 10))
    assert manager.report_out_of_memory(first) == 4
    assert manager.process_batch(numbered(10, 1))[1].tolist() == [0, 1, 2, 3]
    assert [targets.tolist() for _, targets in manager.flush()] == [[4, 5, 6, 7], [8, 9, 10]]
    shaped = manager.adapt_and_process_batch(numbered(11, 2), 0)
    manager.report_out_of_memory(shaped)
    assert [targets.tolist() for _, targets in manager.flush()] == [[11, 12]]
    named = manager.process_batch({"inputs": torch.arange(2), "targets": torch.arange(2)})
    manager.report_out_of_memory(named)
    assert [batch["inputs"].tolist() for batch in manager.flush()] == [[0], [1]]


def test_any_structure_of_tensors(memory: Any) -> None:
    manager = manager_of(memory, 2)
    batch = {"x": torch.arange(3), "more": [torch.arange(6).view(3, 2), (torch.arange(3),)]}
    first = manager.process_batch(batch)
    (rest,) = manager.flush()
    assert first["x"].tolist() + rest["x"].tolist() == [0, 1, 2]
    assert rest["more"][0].tolist() == [[4, 5]]
    assert isinstance(rest["more"][1], tuple)


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ((torch.zeros(3), torch.zeros(4)), "must be the same"),
        (torch.tensor(1.0), "must be the same"),
        ((), "must be the same"),
        ({"x": torch.zeros(3), "names": ["a", "b", "c"]}, "of type str"),
    ],
)
def test_what_is_no_batch_is_refused(memory: Any, batch: Any, complaint: str) -> None:
    with pytest.raises(BatchShapeError, match=complaint):
        manager_of(memory).process_batch(batch)


def test_inputs_and_targets_must_be_told_apart(memory: Any) -> None:
    shaped = manager_of(memory).adapt_and_process_batch({"inputs": torch.zeros(2, 1), "targets": torch.ones(2)}, 0)
    assert (shaped["inputs"].shape, shaped["targets"].shape) == ((2, 1), (2,))
    with pytest.raises(BatchShapeError, match="no inputs and targets"):
        manager_of(memory).adapt_and_process_batch(torch.zeros(2), 0)


def test_nothing_is_learnt_before_the_first_step(memory: Any) -> None:
    manager = manager_of(memory, 8, 1)
    manager.process_batch(numbered(0, 8), 0, current_loss=math.nan)
    assert manager.sizer.batch_size == 8
    manager.process_batch(numbered(0, 8), 1, current_loss=math.nan)
    assert manager.sizer.batch_size == 4


def test_measured_memory_is_used_where_none_is_given(memory: Any) -> None:
    manager = manager_of(memory, 16, 1)
    for batch in manager.batches(loader(*[16] * 60)):
        memory.step(len(batch[1]))
        manager.update_metrics(1.0, 0.01 * len(batch[1]))
    assert manager.get_status()["memory_usage"] == pytest.approx(0.74, abs=0.1)
    assert manager.sizer.batch_size == 64 <= (0.8 * 1000 - 100) / 10


def test_the_documented_options_reach_the_parts(memory: Any) -> None:
    config = from_data(
        BatchShaping,
        {
            "adaptive_sizing": {"max_batch_size": 5, "min_batch_size": 3, "target_memory_usage": 0.5},
            "memory_aware_shaping": {"memory_threshold": 0.05},
            "performance_monitoring": {"metrics_window": 2},
            "validation": {"strict_mode": True},
        },
        where="batch_shaping",
    )
    manager = BatchShapeManager(nn.Linear(1, 1), config=config, memory=memory, effective_batch_size=20)
    manager.initialize_for_training(5)
    assert manager.get_status()["accumulation_steps"] == 4
    for _ in range(3):
        manager.process_batch(numbered(0, 3))
        manager.update_metrics(1.0, 1.0, 0.99)
    assert manager.sizer.batch_size == 3
    assert len(manager.monitor.records) == 2
    with pytest.raises(BatchShapeError, match="axis -1 has size 2; it must be 1"):
        manager.process_batch((torch.zeros(3, 2), torch.zeros(3)))
    with pytest.raises(UsageError, match="initial_batch_size 6 is outside 3 to 5"):
        manager.initialize_for_training(6)


def test_memory_target_wins_over_the_configuration(memory: Any) -> None:
    shrunk = {}
    for target in (None, 0.4):
        manager = manager_of(memory, 32, 1, memory_target=target)
        manager.process_batch(numbered(0, 32))
        manager.update_metrics(1.0, 1.0, 0.8)
        manager.process_batch(numbered(0, 32))
        shrunk[target] = manager.sizer.batch_size
    assert shrunk == {None: 32, 0.4: 16}


def test_inputs_are_laid_out_for_an_operation(memory: Any) -> None:
    images = torch.randn(4, 3, 5, 5)
    memory.capacity = 10**6
    inputs, targets = manager_of(memory, operation_type="convolution").process_batch((images, torch.arange(4)))
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(inputs, images)
    assert targets.tolist() == [0, 1, 2, 3]


def test_order_of_calls_is_enforced(memory: Any) -> None:
    manager = BatchShapeManager(nn.Linear(1, 1), memory=memory)
    with pytest.raises(UsageError, match="not initialized"):
        manager.process_batch(numbered(0, 2))
    with pytest.raises(UsageError, match="no batch was given out"):
        manager.update_metrics(1.0, 1.0)
    with pytest.raises(UsageError, match="for inference"):
        BatchShapeManager(nn.Linear(1, 1), inference_mode=True, memory=memory).initialize_for_training()
    with pytest.raises(UsageError, match="unknown metric 'memry'"):
        manager_of(memory).adapt_and_process_batch(numbered(0, 2), 0, {"memry": 0.1})


def test_status_and_trend(memory: Any) -> None:
    manager = manager_of(memory)
    assert manager.get_status() == {
        "current_batch_size": 4,
        "memory_usage": 0.1,
        "performance_trend": "insufficient_data",
        "pending_samples": 0,
        "accumulation_steps": 1,
        "reason": "initial size",
    }
    for seconds in (1.0, 1.0, 0.5, 0.5):
        manager.process_batch(numbered(0, 4))
        manager.update_metrics(None, seconds, 0.8)
    assert manager.get_status()["performance_trend"] == "improving"


@pytest.fixture
def quiet_log() -> Any:
    log = logging.getLogger("memopt_cli.batching")
    before = (log.level, list(log.handlers))
    yield log
    log.setLevel(before[0])
    log.handlers[:] = before[1]


def test_debug_mode_logs_every_decision(memory: Any, caplog: pytest.LogCaptureFixture, quiet_log: Any) -> None:
    manager = manager_of(memory, 8, 1)

    def steps() -> list[str]:
        caplog.clear()
        for _ in range(2):
            manager.process_batch(numbered(0, 8), 7)
            manager.update_metrics(1.0, 1.0, 0.96)
        return caplog.messages

    assert steps() == []
    manager.enable_debug_mode()
    assert "step 7: batch size 2 -> 1 (usage 96%)" in steps()


def test_detailed_metrics_are_logged(memory: Any, caplog: pytest.LogCaptureFixture, quiet_log: Any) -> None:
    manager = manager_of(memory)
    manager.process_batch(numbered(0, 4))
    manager.update_metrics(2.0, 0.5, 0.96)
    manager.enable_debug_mode()
    manager.log_detailed_metrics()
    assert {"current_batch_size: 4", "avg_throughput: 8", "memory_usage: 0.96"} <= set(caplog.messages)
    assert any("smaller batch or gradient checkpointing" in text for text in caplog.messages)


def test_a_shape_that_does_not_suit_the_model_is_a_warning(memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(memory)
    for _ in range(2):
        manager.process_batch(torch.zeros(4, 3))
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "(4, 3): axis -1 has size 3; it must be 1"
    ]

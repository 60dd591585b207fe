"""The control law on a device that tests make up, one rule at a time; and on simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memopt_cli.batching.sizer import AdaptiveBatchSizer, agree_on_batch_size, largest_fitting
from memopt_cli.errors import MemoryBudgetError, UsageError
from memopt_cli.records import AdaptiveSizing

INTERVAL = 4


def make_sizer(memory: Any, batch: int = 32, **options: Any) -> AdaptiveBatchSizer:
    config = AdaptiveSizing(**{"adaptation_interval": INTERVAL, "max_batch_size": 1000, **options})
    return AdaptiveBatchSizer(config=config, initial_batch_size=batch, memory=memory)


def adapt(sizer: AdaptiveBatchSizer, usage: float | None = None, loss: float | None = 1.0, **metrics: float) -> int:
    """One interval of like steps; the size after it."""
    return [sizer.adapt_batch_size(loss, usage, metrics) for _ in range(INTERVAL)][-1]


def test_nothing_changes_between_intervals(memory: Any) -> None:
    sizer = make_sizer(memory)
    sizes = [sizer.adapt_batch_size(1.0, 0.1) for _ in range(INTERVAL)]
    assert sizes == [32] * (INTERVAL - 1) + [40]


def test_a_new_size_is_judged_by_its_own_usage(memory: Any) -> None:
    sizer = make_sizer(memory)
    assert adapt(sizer, 0.9) == 28
    assert adapt(sizer, 0.75) == 28


@pytest.mark.parametrize(
    ("batch", "usage", "expected"),
    [
        (32, 0.9, int(32 * 0.8 / 0.9)),  # the first shrink is proportional
        *((32, usage, 32) for usage in (0.721, 0.8, 0.839)),  # within the band
        *((32, usage, size) for usage, size in ((0.70, 36), (0.5, 40), (0.0, 40))),  # a quarter at most
        (1, 0.01, 2),  # too small for a quarter
    ],
)
def test_one_interval_of_like_steps(memory: Any, batch: int, usage: float, expected: int) -> None:
    assert adapt(make_sizer(memory, batch), usage) == expected


def test_two_sizes_make_an_affine_model(memory: Any) -> None:
    sizer = make_sizer(memory, 40)
    grown = adapt(sizer, 0.2 + 0.01 * 40)  # u = 0.2 + 0.01 B
    assert grown == 50
    assert adapt(sizer, 0.2 + 0.01 * 50) == 60 == round((0.8 - 0.2) / 0.01)
    assert adapt(sizer, 0.8) == 60


@pytest.mark.parametrize("usage", [0.95, 1.0])
def test_danger_halves_at_once(memory: Any, usage: float) -> None:
    assert make_sizer(memory).adapt_batch_size(1.0, usage) == 16


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_halves_at_once(memory: Any, loss: float) -> None:
    sizer = make_sizer(memory)
    assert sizer.adapt_batch_size(loss, 0.5) == 16
    assert "loss" in sizer.reason


def test_a_loss_spike_stops_growth_and_no_loss_does_not(memory: Any) -> None:
    sizer = make_sizer(memory)
    for loss in (1.0, 1.0, 1.0, 1.6):
        size = sizer.adapt_batch_size(loss, 0.1)
    assert size == 32
    assert adapt(make_sizer(memory), 0.1, loss=None) == 40
    assert adapt(make_sizer(memory), 0.1, loss=-5.0) == 40


def test_growth_that_costs_throughput_is_taken_back_for_five_intervals(memory: Any) -> None:
    sizer = make_sizer(memory)
    assert adapt(sizer, 0.1, throughput=100.0) == 40
    assert adapt(sizer, 0.1, throughput=79.0) == 32
    assert "throughput" in sizer.reason
    assert [adapt(sizer, 0.1, throughput=100.0) for _ in range(5)] == [32, 32, 32, 32, 40]


def test_growth_that_costs_little_throughput_stays(memory: Any) -> None:
    sizer = make_sizer(memory)
    adapt(sizer, 0.1, throughput=100.0)
    assert adapt(sizer, 0.1, throughput=81.0) == 50


def test_out_of_memory_halves_and_caps(memory: Any) -> None:
    sizer = make_sizer(memory)
    assert sizer.report_out_of_memory() == 16
    assert [adapt(sizer, 0.1) for _ in range(5)] == [16, 16, 16, 16, 20]


def test_the_reading_of_a_failed_step_does_not_count(memory: Any) -> None:
    sizer = make_sizer(memory)
    sizer.report_out_of_memory()
    assert sizer.adapt_batch_size(1.0, 1.0) == 16
    assert sizer.adapt_batch_size(1.0, 1.0) == 8


def test_sizes_stay_within_the_limits(memory: Any) -> None:
    sizer = make_sizer(memory, 32, min_batch_size=30, max_batch_size=33)
    assert adapt(sizer, 0.1) == 33
    assert sizer.adapt_batch_size(math.nan, 0.5) == 30
    assert make_sizer(memory, 500, max_batch_size=33).batch_size == 33


def test_bytes_are_read_as_bytes(memory: Any) -> None:
    assert make_sizer(memory).adapt_batch_size(1.0, 950.0) == 16  # of 1000
    for usage in (-0.1, math.nan):
        with pytest.raises(UsageError, match="memory usage"):
            make_sizer(memory).adapt_batch_size(1.0, usage)


def test_an_unknown_metric_is_an_error(memory: Any) -> None:
    with pytest.raises(UsageError, match="'troughput'"):
        make_sizer(memory).adapt_batch_size(1.0, 0.5, {"troughput": 1.0})


def test_gradient_accumulation_keeps_the_effective_batch(memory: Any) -> None:
    sizer = AdaptiveBatchSizer(memory=memory, initial_batch_size=48, effective_batch_size=128)
    assert sizer.accumulation_steps == 3
    sizer.adapt_batch_size(math.nan)
    assert (sizer.batch_size, sizer.accumulation_steps) == (24, 6)
    assert AdaptiveBatchSizer(memory=memory).accumulation_steps == 1


def test_disabled_sizing_keeps_the_size(memory: Any) -> None:
    sizer = make_sizer(memory, enabled=False)
    assert [sizer.adapt_batch_size(math.nan, 0.99), adapt(sizer, 0.1)] == [32, 32]


def test_the_argument_wins_over_the_configured_target(memory: Any) -> None:
    for argument, expected in ((None, 32), (0.4, 16)):
        sizer = AdaptiveBatchSizer(argument, memory=memory, config=AdaptiveSizing(adaptation_interval=INTERVAL))
        sizer.start_from(32)
        assert adapt(sizer, 0.8) == expected
    with pytest.raises(UsageError, match="target_memory_usage"):
        AdaptiveBatchSizer(0.0)


def test_the_window_forgets_sizes(memory: Any) -> None:
    """With a short window only the present size is known: the shrink is proportional."""
    shrunk = {}
    for window in (1, 50):
        sizer = make_sizer(memory, 40, performance_window=window)
        adapt(sizer, 0.6)
        shrunk[window] = adapt(sizer, 0.9)
    assert shrunk[1] == int(50 * 0.8 / 0.9)
    assert shrunk[50] == int(50 * (0.8 + 0.6) / (0.9 + 0.6))  # u = -0.6 + 0.03 B


def run(memory: Any, sizer: AdaptiveBatchSizer, steps: int) -> list[float]:
    """Steps that measure themselves; the share that each one's peak was of the capacity at its time."""
    shares = []
    for _ in range(steps):
        memory.step(sizer.batch_size)
        shares.append((memory.base + memory.per_sample * sizer.batch_size) / memory.capacity)
        sizer.adapt_batch_size(1.0)
    return shares


def test_the_target_is_reached_and_kept(memory: Any) -> None:
    sizer = make_sizer(memory, 4)
    shares = run(memory, sizer, 100)
    assert 0.72 <= shares[-1] <= 0.84
    assert max(shares) <= 0.84


def test_a_lowered_limit_is_answered_before_the_next_step(memory: Any) -> None:
    sizer = make_sizer(memory, 64)
    run(memory, sizer, 20)
    memory.capacity = 500
    assert sizer.adapt_batch_size(1.0) <= (0.8 * 500 - 100) / 10
    assert max(run(memory, sizer, 40)) <= 0.84


@pytest.mark.slow
@given(
    base=st.integers(0, 500),
    per_sample=st.integers(1, 100),
    lowered=st.integers(600, 2000),
    start=st.integers(1, 200),
)
def test_no_run_settles_above_its_target(
    fake_memory: Callable[..., Any], base: int, per_sample: int, lowered: int, start: int
) -> None:
    memory = fake_memory(capacity=2000, base=base, per_sample=per_sample)
    sizer = make_sizer(memory, start)
    run(memory, sizer, 60)
    memory.capacity = lowered
    shares = run(memory, sizer, 60)
    assert shares[-1] <= 0.84 + 1e-9 or sizer.batch_size == 1


@pytest.mark.parametrize("guess", [1, 8, 70, 100, 128])
def test_the_largest_batch_within_the_target_is_found(
    memory: Any, metered: Callable[..., nn.Module], guess: int
) -> None:
    memory.per_sample = 7
    sizer = AdaptiveBatchSizer(0.8, memory=memory)
    model = metered().eval()
    assert sizer.get_optimal_batch_size(model, (guess, 4), "cpu") == 100 == (800 - 100) // 7
    assert sizer.batch_size == 100
    assert len(memory.seen) <= 16


def test_out_of_memory_bounds_the_search(memory: Any, metered: Callable[..., nn.Module]) -> None:
    memory.fails_above = 41
    assert AdaptiveBatchSizer(memory=memory).get_optimal_batch_size(metered().eval(), (16, 4)) == 41


def test_limits_bound_the_search(memory: Any, metered: Callable[..., nn.Module]) -> None:
    config = AdaptiveSizing(min_batch_size=80, max_batch_size=100)
    memory.per_sample = 1
    assert AdaptiveBatchSizer(config=config, memory=memory).get_optimal_batch_size(metered(), (2, 4)) == 100
    assert min(memory.seen) >= 80
    memory.per_sample = 100
    with pytest.raises(MemoryBudgetError, match=r"batch 80 does not fit in 800 B \(80% of 1000 B\)") as raised:
        AdaptiveBatchSizer(config=config, memory=memory).get_optimal_batch_size(metered(), (2, 4))
    assert "or lower min_batch_size, or raise target_memory_usage." in raised.value.hint
    memory.per_sample = 2000
    with pytest.raises(MemoryBudgetError, match=r"batch 1 does not fit in 1000 B") as raised:
        AdaptiveBatchSizer(target_memory_usage=1.0, memory=memory).get_optimal_batch_size(metered().eval(), (2, 4))
    assert raised.value.hint == "Make the step smaller with memopt optimize."


def test_trials_leave_the_model_as_it_was(memory: Any, metered: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(metered(), nn.Dropout())
    model[0].linear.eval()
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    AdaptiveBatchSizer(memory=memory).get_optimal_batch_size(model, (16, 4))
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (model.training, model[0].linear.training, model[0].norm.training) == (True, False, True)


def test_backward_is_part_of_a_trial_in_training_mode_only(memory: Any, metered: Callable[..., nn.Module]) -> None:
    model = metered()
    gradients: list[int] = []
    model.linear.weight.register_hook(lambda g: gradients.append(1))
    AdaptiveBatchSizer(memory=memory).get_optimal_batch_size(model.eval(), (16, 4))
    assert not gradients
    AdaptiveBatchSizer(memory=memory).get_optimal_batch_size(model.train(), (16, 4))
    assert gradients


def test_inputs_of_an_embedding_are_made_for_it(memory: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))
    sizer = AdaptiveBatchSizer(memory=memory, config=AdaptiveSizing(max_batch_size=8))
    assert sizer.get_optimal_batch_size(model, (2, 4)) == 8


def test_other_errors_of_the_model_are_not_taken_for_memory(memory: Any, metered: Callable[..., nn.Module]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        AdaptiveBatchSizer(memory=memory).get_optimal_batch_size(metered(), (4, 5))


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.integers(1, 300))
def test_bisection_finds_the_largest(low: int, extra: int, largest: int, guess: int) -> None:
    high = low + extra
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= largest

    found = largest_fitting(fits, max(low, min(guess, high)), low, high)
    assert found == (min(largest, high) if largest >= low else None)
    assert len(asked) == len(set(asked)) <= math.log2(high / low) + math.log2(high - low + 1) + 3


def test_agreement_needs_a_process_group() -> None:
    with pytest.raises(UsageError, match="no process group"):
        agree_on_batch_size(4)

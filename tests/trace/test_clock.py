"""What is timed on a device besides operators, and what becomes of their times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt_cli.records import StepSettings
from memopt_cli.trace import segment_overhead, time_operators
from memopt_cli.trace.clock import Clock, OperatorTime, scale_to, shortest_times
from memopt_cli.training.step import TrainingStep


def test_operators_share_the_time_of_a_step_that_takes_less_than_they_do_one_by_one() -> None:
    times = (OperatorTime("aten::addmm", 3.0), OperatorTime("aten::relu", 1.0))
    assert scale_to(times, step_s=2.0) == (OperatorTime("aten::addmm", 1.5), OperatorTime("aten::relu", 0.5))
    assert scale_to(times, step_s=5.0) == times


def test_an_operator_has_its_shortest_time_in_the_steps_that_ran_the_same_operators() -> None:
    first = [OperatorTime("aten::zeros_like", 0.1), OperatorTime("aten::addmm", 0.1)]
    slow_start = [OperatorTime("aten::addmm", 5.0), OperatorTime("aten::relu", 1.0)]
    slow_end = [OperatorTime("aten::addmm", 3.0), OperatorTime("aten::relu", 4.0)]
    assert shortest_times([first, slow_start, slow_end]) == (slow_end[0], slow_start[1])


def test_what_is_run_to_learn_a_segments_overhead_draws_no_random_numbers_and_takes_longer_than_nothing() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert segment_overhead("cpu") > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_operators_take_no_longer_together_than_the_step() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))).cuda()
    settings = StepSettings(device="cuda:0")
    step = TrainingStep(model=layers, args=(torch.ones(4, 8, device="cuda:0"),), kwargs={}, settings=settings)
    with Clock("cuda:0") as clock:
        step.take()
    assert sum(timed.seconds for timed in time_operators(step)) < sum(timed.seconds for timed in clock.times)
    assert segment_overhead("cuda:0") > 0

"""Compare a plan by length with the plan of the longest inputs, over an epoch of gpt with inputs of many lengths.

    python benchmarks/lengths.py [--budget 50%] [--batch 4] [--steps 60]

``memopt optimize --dim S=32:256 --lengths FILE --budget BUDGET`` finds the plan.  Then both plans train a copy of the
model, step by step in turns on the same inputs, whose lengths differ from step to step.  The allocated peak is measured
at every length that occurs, on the model that switches.

Wanted: no peak above the budget; an epoch at least 10 % shorter; and switching, by which modules choose their settings
for the length before forward, in at most 1 % of a step of the shortest inputs.  Times need a machine that does nothing
else; peaks repeat to the byte.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.results import table, this_command, write_section
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure import processes
from memopt_cli.measure.allocated import measure_allocated
from memopt_cli.pipeline import optimize
from memopt_cli.records import (
    Budget,
    DimRange,
    InputSpec,
    MemOptSummary,
    ModelSource,
    OptimizeRequest,
    Plan,
    RangeRow,
    SearchGoal,
    SearchOverrides,
    StepSettings,
)
from memopt_cli.records.progress import Progress
from memopt_cli.report.optimization import in_words
from memopt_cli.runtime import ConfigsByLength, settings_of
from memopt_cli.runtime.container import _run_by_length
from memopt_cli.runtime.lengths import at_length
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.units import format_bytes, format_seconds, parse_bytes
from memopt_cli.trace import resident_bytes
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.step import TrainingStep
from sample_models import gpt

LOW, HIGH, UNIT = 32, 256, 16
"""Shortest and longest inputs in tokens; lengths are multiples of the third number."""
WANTED_SHARE, WANTED_SWITCHING = 0.9, 0.01
"""Largest time of an epoch as a share of the other plan's, and of switching as a share of a step."""


def skewed(steps: int) -> list[int]:
    """Return the lengths of ``steps`` inputs, log-normally distributed: most are short, a few have the full length."""
    drawn = random.Random(0)
    rounded = (UNIT * round(drawn.lognormvariate(4.3, 0.6) / UNIT) for _ in range(steps - 1))
    return [*(min(HIGH, max(LOW, length)) for length in rounded), HIGH]


def find(lengths: list[int], budget: str, batch: int) -> MemOptSummary:
    """Return the summary of ``memopt optimize`` for a range of lengths."""
    share = float(budget.removesuffix("%")) / 100 if budget.endswith("%") else parse_bytes(budget)
    tensors = tuple(parse_tensor(f"{name}:BxS@int64=0..8000") for name in ("input_ids", "targets"))
    request = OptimizeRequest(
        source=ModelSource(location="sample_models.gpt:build"),
        spec=InputSpec(tensors=tensors, dims={"B": batch, "S": HIGH}, source="this benchmark"),
        settings=StepSettings(device="cpu"),
        search=resolve(SearchOverrides()),
        goal=SearchGoal(budget=Budget.from_amount(share)),
        dim_range=DimRange(symbol="S", low=LOW, high=HIGH),
        lengths=Counter(lengths),
        dry_run=True,
        recommend_batch=False,
    )
    with processes.keep_server():
        return optimize(request, progress=Progress(), ask=None).summary


def inputs_of(length: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return random token ids and targets, which depend on ``length`` alone."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 8000, (2, batch, length), generator=generator).unbind()  # type: ignore[return-value]


def take(model: nn.Module, length: int, batch: int) -> None:
    """Run forward, backward and an update."""
    model(*inputs_of(length, batch)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-3)
    model.zero_grad()


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that ``run`` takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def epochs(lengths: list[int], plans: list[Plan], batch: int) -> list[float]:
    """Return the seconds of an epoch with each of ``plans``, which take turns in changing order."""
    models = [apply_plan(gpt.build(), plan) for plan in plans]
    order = list(enumerate(models))
    spent = [0.0] * len(models)
    for _, model in order:
        take(model, HIGH, batch)  # warms up, untimed
    for length in random.Random(1).sample(lengths, len(lengths)):
        order.reverse()
        for index, model in order:
            spent[index] += timed(functools.partial(take, model, length, batch))
    return spent


def peak_bytes(model: nn.Module, length: int, batch: int) -> int:
    """Return the allocated peak in bytes of a step that adds to gradients, as memopt measures it."""
    step = TrainingStep(model=model, args=inputs_of(length, batch), kwargs={}, settings=StepSettings(device="cpu"))
    step.reset_gradients()
    return measure_allocated(step.take, "cpu", resident_bytes(step)).peak_bytes


def switching_share(plan: Plan, batch: int, rounds: int = 200) -> float:
    """Return the time of choosing settings by length, as a share of a step of the shortest inputs."""
    model, inputs = apply_plan(gpt.build(), plan), inputs_of(LOW, batch)
    asked = [module for module in model.modules() if isinstance(settings_of(module), ConfigsByLength)]

    def ask() -> None:
        with at_length(LOW), torch.no_grad():  # without gradients no segment recomputes: only the choice is timed
            for module in asked:
                _run_by_length(module, lambda *_: None, inputs, {})

    step_s = min(timed(lambda: take(model, LOW, batch)) for _ in range(5))
    return min(timed(ask) for _ in range(rounds)) / step_s


def _row(row: RangeRow) -> list[str]:
    assert row.outcome is not None
    ratio = "–" if row.slowdown is None else f"{row.slowdown:.2f}×"
    peak, step = format_bytes(row.outcome.allocated_peak_bytes), format_seconds(row.outcome.step_s)
    return [f"{row.low} to {row.up_to}", f"{row.share:.0%}", peak, step, ratio, in_words(row.plan)]


def main() -> int:
    """Measure, and write the section; return 1 if a result is not as wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    lengths = skewed(options.steps)
    summary = find(lengths, options.budget, options.batch)
    plan, budget = summary.plan, summary.budget_bytes
    assert plan is not None
    assert budget is not None
    if not plan.ranges:
        print("the search found no ranges")
        return 1
    model = apply_plan(gpt.build(), plan)
    peaks = {length: peak_bytes(model, length, options.batch) for length in sorted(Counter(lengths))}
    by_length_s, longest_s = epochs(lengths, [plan, plan.longest], options.batch)
    switching = switching_share(plan, options.batch)
    within, share = max(peaks.values()) <= budget, by_length_s / longest_s
    worst = max(peaks, key=lambda length: peaks[length])
    median = sorted(lengths)[len(lengths) // 2]
    lines = [
        f"{len(lengths)} steps of batch {options.batch}, S from {LOW} to {HIGH}, median {median}.",
        f"Highest allocated peak of the {len(peaks)} lengths: {format_bytes(peaks[worst])}, at S={worst}; "
        f"the budget is {format_bytes(budget)}. Within it: {'yes' if within else 'no'}.",
        f"Epoch: {format_seconds(by_length_s)}, with the plan of the longest alone {format_seconds(longest_s)}: "
        f"{share:.2f} of it. At least 10 % shorter: {'yes' if share <= WANTED_SHARE else 'no'}.",
        f"Switching: {switching:.3%} of a step at S={LOW}. "
        f"At most 1 %: {'yes' if switching <= WANTED_SWITCHING else 'no'}.",
    ]
    header = ["S", "share of steps", "allocated peak", "step", "ratio", "plan"]
    text = "\n".join(f"- {line}" for line in lines) + "\n\n" + table(header, [_row(row) for row in summary.ranges])
    write_section("Plans by length: gpt", this_command(), text)
    print(text)
    return 0 if within and share <= WANTED_SHARE and switching <= WANTED_SWITCHING else 1


if __name__ == "__main__":
    sys.exit(main())

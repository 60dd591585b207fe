"""Compare memopt's plans with the usual ways to save memory, and predicted with measured peaks.

    python benchmarks/plans.py [MODEL ...] [--case CASE] [--rounds 5] [--threads 2] [--seconds 60] [--level 4] ...

Models: gpt, resnet, spiking_vgg, lif_rnn, char_rnn (``make samples``) and spikingjelly_vgg.  Cases, each a section of
``benchmarks/RESULTS.md``, named by the models:

contest    peak and step time of the unchanged model, ``checkpoint`` on every block, ``torch.compile`` with activation
           memory budgets, SpikingJelly's levels on its VGG, and memopt's levels and budgets with the defaults of
           ``memopt optimize``: a step takes at most 1.33 times as long with a level, any time with a budget.
accuracy   the peak of five plans for each model, by the cost model, by a dry run and measured.
shortlist  the lowest peak among the six plans that the cost model ranks first, and among all plans of a long search.
budgets    whether the plans for ten budgets stay within them; stores these plans and the fastest of a long search.
steps      step times of the plans that the case budgets stored, taken in turns.
growth     the time of a search on models of 64, 256 and 1024 layers.

Peaks repeat to the byte.  The cases contest, steps and growth measure time, and need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.contest import HEAT, Contestant, contest, contest_table, left_out, make_step, take
from benchmarks.planning import LEVEL, SPIKINGJELLY, Bench, LongSearch, bench, prepared
from benchmarks.results import table, this_command, write_section
from memopt_cli.errors import NothingFitsError
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import Subject
from memopt_cli.pipeline.plans.goal import GoalSearch
from memopt_cli.pipeline.plans.in_backward import InBackwardPlans
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.pipeline.plans.plan_measurements import PlanMeasurements
from memopt_cli.records import (
    Budget,
    Failure,
    LevelRow,
    Measurement,
    OptimizeRequest,
    Plan,
    Refused,
    SearchGoal,
    SearchOptions,
    SearchOverrides,
    StepPeaks,
    StepSettings,
    from_data,
    to_data,
)
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.planner import Planner
from memopt_cli.search.plan.policy import resolve
from memopt_cli.trace import FakeStep
from memopt_cli.training.apply import apply_plan, remove_plan
from memopt_cli.training.step import TrainingStep

BLOCKS = {
    "gpt": "Block",
    "resnet": "Bottleneck",
    "spiking_vgg": "ConvBlock",
    "lif_rnn": "LIFCell",
    "char_rnn": "LSTM",
    SPIKINGJELLY: "Block",
}
"""Classes that a user would checkpoint by hand, by model."""
COMPILE_BUDGETS = (0.5, 0.2, 0.0)
"""Values of PyTorch's ``activation_memory_budget``."""
SHARES = (0.8, 0.6, 0.44)
"""Budgets for memopt, as shares of the original's peak."""
KEPT = Path("build/budgets")
"""Folder for the plans that the case ``budgets`` finds."""
TURN_S = 0.2
"""Seconds of a plan's turn, which has as many steps as fit."""
FIVE, TEN = 5, 10
LAYERS = (64, 256, 1024)
"""Layers of the models of the case ``growth``."""


# ---------------------------------------------------------------------------------------------- contest


def as_it_is(step: TrainingStep) -> nn.Module:
    """Return the model of ``step`` unchanged."""
    return step.model


def every_block(step: TrainingStep, class_name: str) -> nn.Module:
    """Checkpoint every module of class ``class_name``, as users do by hand."""
    for module in step.model.modules():
        if type(module).__name__ == class_name:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return step.model


def compiled(step: TrainingStep, budget: float) -> nn.Module:
    """Compile the model with PyTorch's activation memory ``budget``, and take the first step, which compiles."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget
    model = torch.compile(step.model)
    assert isinstance(model, nn.Module)
    take(replace(step, model=model))
    return model


def planned(step: TrainingStep, plan: Plan) -> nn.Module:
    """Apply memopt's ``plan`` to the model."""
    return apply_plan(step.model, plan)


def spikingjelly(step: TrainingStep, level: int) -> nn.Module:
    """Return the model that SpikingJelly's search makes at ``level``."""
    from benchmarks.spikingjelly_vgg import search

    return search(step, level)


def contestants(name: str, highest: int, *, compilers: bool) -> Iterator[Contestant]:
    """Yield the ways to take the step of the model ``name``."""
    subject = prepared(name).subject
    one = functools.partial(Contestant, subject=subject)
    yield one("as it is", prepare=as_it_is)
    yield one("`checkpoint` on every block", prepare=functools.partial(every_block, class_name=BLOCKS[name]))
    if compilers and shutil.which("g++"):
        for share in COMPILE_BUDGETS:
            yield one(f"`torch.compile`, budget {share}", prepare=functools.partial(compiled, budget=share))
    levels = optimized(name, highest, SearchGoal())
    for end, row in enumerate(levels[1:], 2):
        if name == SPIKINGJELLY:
            yield one(f"SpikingJelly level {row.level}", prepare=functools.partial(spikingjelly, level=row.level))
        yield of_memopt(f"memopt level {row.level}", subject, levels[:end])
    for share in SHARES:
        try:
            rows = optimized(name, LEVEL, SearchGoal(budget=Budget(share=share)))
        except NothingFitsError as error:
            print(f"memopt budget {share:.0%}: {error}", file=sys.stderr, flush=True)
            continue
        yield of_memopt(f"memopt budget {share:.0%}", subject, rows)


def of_memopt(name: str, subject: Subject, rows: Sequence[LevelRow]) -> Contestant:
    """Return the contestant with the plan of the last row; its search took the time of all ``rows``.

    Rows with equal plans share one measurement, whose time counts once.
    """
    measured = {row.outcome for row in rows if isinstance(row.outcome, Measurement)}
    return Contestant(
        name,
        subject,
        functools.partial(planned, plan=rows[-1].plan),
        search_s=sum(row.search_s for row in rows),
        measuring_s=sum(m.spent_s for m in measured),
    )


def optimized(name: str, level: int, goal: SearchGoal) -> list[LevelRow]:
    """Return the rows of ``memopt optimize`` for a level or a budget; the first is the original."""
    ready = prepared(name)
    request = OptimizeRequest(
        source=ready.subject.source,
        spec=None,
        search=resolve(SearchOverrides(level=level)),
        goal=goal,
        dry_run=True,
        recommend_batch=False,
        measure_levels=True,
    )
    return find_plan(request, ready).rows


def contests(names: Sequence[str], options: argparse.Namespace) -> None:
    """Write a section for every model, anew after each group of contestants."""
    for name in names:
        ways = contestants(name, options.level, compilers=options.compile)
        for ran, failed in contest(ways, options.rounds, options.threads):
            text = (
                f"{options.threads} threads; every way in a process of its own, {HEAT} at a time in turns with the "
                f"model as it is. Steps: medians of {options.rounds} rounds, of the model as it is of all. Ratios: to "
                "its step of the same round, median; across those few only ratios compare. *Found in*: of memopt's "
                "plans everything, from the measurement of the original to that of the plan, PyTorch's import left "
                "out; a level comes after those below it.\n\n"
            )
            text += contest_table(ran) + left_out(failed)
            write_section(f"Plans: contest on {name}", this_command(), text)
            print(contest_table(ran), flush=True)


# ---------------------------------------------------------------------------------------------- accuracy


def accuracy(names: Sequence[str], options: argparse.Namespace) -> None:
    """Compare the peaks of five plans for each model: the planner's, or random ones where it has fewer."""
    rows, dry_errors, model_errors = [], [], []
    header = ["", "plan", "cost model", "dry run", "measured", "model to dry run", "dry run to measured"]
    for name in names:
        with bench(name) as one:
            planner = one.planner()
            own = [planner.within(LEVEL, limit) for limit in one.budgets(planner, FIVE)]
            for priced in LongSearch(one, [p.plan for p in own if p]).first(FIVE):
                plan, dry = priced.plan, priced.peak_bytes
                measured, model = one.measured_peak(plan), one.model.predict(plan).allocated_peak_bytes
                dry_errors.append(abs(dry / measured - 1))
                model_errors.append(abs(model / dry - 1))
                peaks = [f"{peak / 2**20:.1f} MiB" for peak in (model, dry, measured)]
                off = [f"{model / dry - 1:+.2%}", f"{dry / measured - 1:+.2%}"]
                rows.append([name, _described(plan), *peaks, *off])
                print(*rows[-1], flush=True)
        errors = f"{_spread('Dry run to measured', dry_errors)} {_spread('Cost model', model_errors)}"
        write_section(
            f"Plans: accuracy of the predicted peak, {', '.join(names)}",
            this_command(),
            f"{table(header, rows)}\n\n{errors}",
        )
        print(errors)


def _described(plan: Plan) -> str:
    chunked = sum(segment.chunks > 1 for segment in plan.segments)
    packed = ", packed" if plan.packed else ""
    return f"{len(plan.segments)} segments" + (f", {chunked} in chunks" if chunked else "") + packed


def _spread(what: str, errors: Sequence[float]) -> str:
    return f"{what}: median error {statistics.median(errors):.2%}, worst {max(errors):.2%} of {len(errors)}."


# ---------------------------------------------------------------------------------------------- shortlist


def shortlist(names: Sequence[str], options: argparse.Namespace) -> None:
    """Compare the cost model's choice among all plans of a long search with the best of them."""
    rows = []
    header = ["", "plans", "lowest", "of the six", "the planner's", "six to lowest", "planner's to lowest"]
    text = (
        f"A random local search of {options.seconds:g} s a model by dry runs, which start from the planner's plans. "
        "*The six*: those of all its plans that the cost model puts first.\n\n"
    )
    for name in names:
        with bench(name) as one:
            planner = one.planner()
            limits = one.budgets(planner, FIVE)
            start = [priced.plan for limit in limits if (priced := planner.within(LEVEL, limit))]
            found = LongSearch(one, start).run(options.seconds)
            best = min(priced.peak_bytes for priced in found)
            ranked = sorted(found, key=lambda p: one.model.predict(p.plan).allocated_peak_bytes)
            six = min(priced.peak_bytes for priced in ranked[:6])
            own = min(priced.peak_bytes for priced in found if priced.plan in start)
        mib = [f"{peak / 2**20:.1f} MiB" for peak in (best, six, own)]
        rows.append([name, str(len(found)), *mib, f"{six / best - 1:+.2%}", f"{own / best - 1:+.2%}"])
        print(*rows[-1], flush=True)
        write_section(
            f"Plans: the cost model's shortlist, {', '.join(names)}", this_command(), text + table(header, rows)
        )


# ---------------------------------------------------------------------------------------------- budgets


def budgets(names: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the plans for ten budgets of each model, from one recorded step, and store plans for the case steps."""
    rows = []
    header = ["", "ten budgets", "violated", "most used", "median used", "plans of the long search"]
    text = (
        "Peaks are those of one real step in a process of its own. What `memopt optimize --budget` does, but with one "
        "recorded step and one planner for the ten budgets of a model, and without heads that run through their loss. "
        f"Long search: {options.seconds:g} s.\n\n"
    )
    for name in names:
        with bench(name) as one:
            planner = one.planner()
            limits = one.budgets(planner, TEN)
            search = GoalSearch(
                search=replace(one.search, planner=planner),
                measurements=OneStepEach(prepared=one.prepared, warm_up=False, bench=one),
                in_backward=no_optimizer(one),
            )
            own = [search.within(limit).plan for limit in limits]
            found = LongSearch(one, own).run(options.seconds)
            kept, used = [], []
            for limit, plan in zip(limits, own, strict=True):
                used.append(one.measured_peak(plan) / limit)
                fitting = sorted((p for p in found if p.peak_bytes <= limit), key=lambda p: p.slowdown)
                others = [p.plan for p in fitting[:2]]
                kept.append({"budget_bytes": limit, "plan": plan, "others": others})
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{name}.json").write_text(json.dumps(to_data(kept)))
        over = sum(share > 1 for share in used)
        between = f"{limits[0] / 2**20:.1f} … {limits[-1] / 2**20:.1f} MiB"
        rows.append([name, between, str(over), f"{max(used):.1%}", f"{statistics.median(used):.1%}", str(len(found))])
        print(*rows[-1], flush=True)
        write_section(f"Plans: ten budgets, {', '.join(names)}", this_command(), text + table(header, rows))


@dataclass(slots=True, kw_only=True)
class OneStepEach(PlanMeasurements):
    """Measurements of one step for each plan, without its time."""

    bench: Bench

    def measure(self, plan: Plan) -> Measurement | Failure:
        return self.bench.measure(plan)

    def confirm(self, row: LevelRow, max_slowdown: float = math.inf) -> LevelRow:
        return row


def no_optimizer(one: Bench) -> InBackwardPlans:
    """Return a search of plans with the optimizer in backward that is switched off: the step has no optimizer."""
    return InBackwardPlans(
        count=one.probes.count,
        measurements=OneStepEach(prepared=one.prepared, warm_up=False, bench=one),
        fault=lambda _: None,
        max_slowdown=math.inf,
        drop=lambda dropped: None,
        is_allowed=False,
    )


def steps(names: Sequence[str], options: argparse.Namespace) -> None:
    """Time the steps of the stored plans in one process; plans for the same budget take turns."""
    rows = []
    header = ["", "plans", "median", "worst of ten budgets"]
    text = (
        "The planner's step over that of the fastest plan of the long search for the same budget (the two that the "
        f"cost model puts first, and the planner's own); medians of {options.rounds} turns within a budget, each "
        f"of as many steps as take {TURN_S} s.\n\n"
    )
    for name in names:
        kept = json.loads((KEPT / f"{name}.json").read_text())
        step = make_step(prepared(name).subject)
        groups = [[from_data(Plan, plan) for plan in (entry["plan"], *entry["others"])] for entry in kept]
        timed = [_times(step, plans, options.rounds) for plans in groups]
        ratios = [times[plans[0]] / min(times.values()) for times, plans in zip(timed, groups, strict=True)]
        rows.append([name, str(sum(map(len, timed))), f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}"])
        print(*rows[-1], " ".join(f"{ratio:.3f}" for ratio in ratios), flush=True)
        write_section(
            f"Plans: steps within ten budgets, {', '.join(names)}", this_command(), text + table(header, rows)
        )


def _times(step: TrainingStep, plans: Sequence[Plan], rounds: int) -> dict[Plan, float]:
    """Return the median seconds of a step under each plan, taken in turns."""
    times: dict[Plan, list[float]] = {plan: [] for plan in plans}
    for turn in range(rounds + 1):
        for plan, taken in times.items():
            apply_plan(step.model, plan)
            taken.append(_step_s(step))
            remove_plan(step.model)
            if not turn:
                taken.clear()
    return {plan: statistics.median(taken) for plan, taken in times.items()}


def _step_s(step: TrainingStep) -> float:
    """Return the mean seconds of as many steps as :data:`TURN_S` allows, at least one."""
    started, steps, spent_s = time.perf_counter(), 0, 0.0
    while spent_s < TURN_S:
        take(step)
        steps, spent_s = steps + 1, time.perf_counter() - started
    return spent_s / steps


# ---------------------------------------------------------------------------------------------- growth


class Layer(nn.Module):
    """Residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, width]`` to the same shape."""
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def growth(names: Sequence[str], options: argparse.Namespace) -> None:
    """Time the search of a plan for half of the activation peak, by dry runs alone."""
    rows = []
    header = ["layers", "operators", "recorded in", "search", "one plan priced", "dry runs", "in all", "peak of it"]
    for layers in LAYERS:
        started = time.perf_counter()
        model = nn.Sequential(*(Layer(64) for _ in range(layers))).train()
        fake = FakeStep(TrainingStep(model=model, args=(torch.randn(512, 64),), kwargs={}, settings=StepSettings()))
        trace = fake.record(512)
        original = fake.count()
        recorded_s = time.perf_counter() - started
        seconds: list[float] = []
        planner = Planner(
            trace,
            original,
            _dry_runs(fake, original, seconds),
            SearchOptions(level=2),
        )
        budget = (trace.resident_bytes + trace.allocated_peak_bytes) // 2
        started = time.perf_counter()
        found = planner.within(2, budget)
        total_s = time.perf_counter() - started
        assert found is not None
        started = time.perf_counter()
        CostModel(trace).predict(found.plan)
        price_s = time.perf_counter() - started
        cells = [total_s - sum(seconds), price_s, sum(seconds), total_s]
        share = f"{found.peak_bytes / trace.allocated_peak_bytes:.2f}"
        rows.append([str(layers), str(len(trace.ops)), f"{recorded_s:.1f} s", *(f"{s:.2f} s" for s in cells), share])
        print(*rows[-1], flush=True)
        write_section("Plans: growth with the number of layers", this_command(), table(header, rows))


def _dry_runs(fake: FakeStep, original: StepPeaks, seconds: list[float]) -> Probes:
    def count(plan: Plan) -> StepPeaks:
        if not plan.segments:
            return original
        started = time.perf_counter()
        apply_plan(fake.step.model, plan)
        counted = fake.count()
        remove_plan(fake.step.model)
        seconds.append(time.perf_counter() - started)
        return counted

    return Probes(count=count, chunking=lambda path: Refused(reason="not asked"), report=lambda text: None)


# ---------------------------------------------------------------------------------------------- the command line


CASES: dict[str, Callable[[Sequence[str], argparse.Namespace], None]] = {
    "contest": contests,
    "accuracy": accuracy,
    "shortlist": shortlist,
    "budgets": budgets,
    "steps": steps,
    "growth": growth,
}


def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *BLOCKS], metavar="MODEL")
    parser.add_argument("--case", choices=CASES, help="all of them, one after another, if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", type=int, default=LEVEL, help="the highest level of memopt and SpikingJelly")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the long search, for each model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with processes.keep_server(early=True):
        for case in [options.case] if options.case else CASES:
            CASES[case](options.models or list(BLOCKS), options)


if __name__ == "__main__":
    main()

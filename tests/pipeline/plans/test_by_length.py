"""``memopt optimize --dim S=LOW:HIGH``: a plan for each range, each within the budget at its largest length."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from torch import nn

import memopt_cli
from memopt_cli.errors import NothingFitsError
from memopt_cli.files.memopt_files import read_plan
from memopt_cli.measure.jobs import MeasureJob
from memopt_cli.measure.local import LocalSession
from memopt_cli.pipeline.plans import by_length
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.records import (
    Budget,
    DimRange,
    InputSpec,
    LevelRow,
    MemOptSummary,
    Plan,
    SearchGoal,
    SegmentPlan,
    TensorSpec,
    TimedOut,
    from_data,
)
from memopt_cli.runtime.lengths import ConfigsByLength
from memopt_cli.search.plan.bounds import Work, inner_bounds
from memopt_cli.search.plan.policy import resolve
from memopt_cli.trace import count_step
from memopt_cli.training.apply import plan_of
from tests.zoo.models import deep_net
from tests.zoo.records import a_row, measured, summary_of, verified

Memopt = Callable[..., Any]
LOW, HIGH = 16, 512
LENGTHS = (*[16] * 30, *[40] * 40, *[90] * 30, *[200] * 20, *[330] * 6, *[500] * 2)
"""Skewed: most are short."""


@pytest.fixture
def optimize(memopt: Memopt, in_process: None) -> Memopt:
    """``memopt optimize`` of a net whose inputs vary in length, profiling in this process."""
    torch.manual_seed(0)
    torch.save(deep_net(), "net.pt")
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))

    def run(*arguments: str, spec: tuple[str, ...] = ("-i", "BxSx64", "--dim", "B=4")) -> Any:
        return memopt("optimize", "net.pt", *spec, *arguments, "--no-recommend-batch")

    return run


RANGE = ("--dim", f"S={LOW}:{HIGH}")
BY_SEGMENTS = ("--budget", "80%", "--level", "1")
"""What segments reach by themselves: the search ends soon."""


@pytest.mark.slow
def test_every_range_meets_the_budget_at_its_largest_length(optimize: Memopt, memopt: Memopt) -> None:
    known = ("--lengths", "lengths.txt", "--budget", "60%", "--max-split-rounds", "1")
    done = optimize(*RANGE, *known, "--html", "r.html")
    assert done.code == 0, done.err
    summary = from_data(MemOptSummary, json.loads(Path("net.memopt.summary.json").read_text())["summary"])
    rows, plan, budget = summary.ranges, summary.plan, summary.budget_bytes
    assert plan is not None
    assert budget is not None
    assert [row.up_to for row in rows] == [part.up_to for part in plan.ranges]
    assert [row.plan for row in rows] == [part.plan for part in plan.ranges]
    assert [row.low for row in rows] == [LOW, *(row.up_to + 1 for row in rows[:-1])]
    assert 2 <= len(rows) <= 4
    assert rows[-1].up_to == HIGH
    assert rows[0].plan == Plan()
    assert sum(row.share for row in rows) == pytest.approx(1)
    for row in rows:
        assert row.outcome.allocated_peak_bytes <= budget
        assert row.plan.is_empty or (row.verification is not None and row.verification.passed)
    original = rows[-1].original
    assert original.allocated_peak_bytes > budget
    longest = next(row for row in summary.levels if row.level == summary.applied_level)
    assert longest.plan == rows[-1].plan
    page = Path("r.html").read_text()
    assert f"all else on this page is of S={HIGH}." in page
    assert all(f"<td>{row.up_to}</td>" in page for row in rows)

    # What is written is the plan, and acts as the rows say.
    assert read_plan("net.memopt.plan.yaml")[1] == plan
    assert (plan.by.dim, plan.by.argument, plan.by.axis) == ("S", 0, 1)
    assert yaml.safe_load(Path("net.memopt.plan.yaml").read_text())["spec"]["dims"]["S"] == HIGH
    model = memopt_cli.load("net.memopt.pt")
    assert plan_of(model) == plan
    from memopt_cli.records import StepSettings
    from memopt_cli.training.step import TrainingStep

    for row in rows:
        step = TrainingStep(
            model=model, args=(torch.randn(4, row.up_to, 64),), kwargs={}, settings=StepSettings(device="cpu")
        )
        assert count_step(step).tensor_peak_bytes == row.outcome.tensor_peak_bytes

    # The report has a row for each range.
    lines = done.out.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("S from"))
    assert lines[heading + 1].split()[:2] == ["16", lines[heading + 1].split()[1]]
    assert "no plan" in lines[heading + 1]

    # It goes onto another copy, and each range is verified there.
    torch.save(deep_net(), "other.pt")
    applied = memopt("apply", "other.pt", "net.memopt.plan.yaml", "--verify", "-o", "out.pt")
    assert applied.code == 0, applied.err
    assert applied.out.count("verified: ") == len(plan.ranges)
    assert plan_of(memopt_cli.load("out.pt")) == plan


@pytest.mark.slow
def test_where_the_original_fits_there_are_no_ranges(optimize: Memopt) -> None:
    summary = summary_of(optimize(*RANGE, "--budget", "8GiB", "--json"))
    assert summary.plan == Plan()
    assert summary.ranges == []
    assert "The original fits at every S that was run: no ranges are needed." in summary.notes


@pytest.mark.slow
def test_without_lengths_all_are_alike(optimize: Memopt) -> None:
    done = optimize(*RANGE, *BY_SEGMENTS, "--json", "--dry-run")
    summary = summary_of(done)
    assert done.changed == set()
    assert any("All lengths count as equally frequent" in note for note in summary.notes)
    assert all(row.inside for row in summary.ranges)
    assert summary.ranges[-1].up_to == HIGH


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_longest_keeps_it(
    sent: signal.Signals, optimize: Memopt, answered: Callable[..., None]
) -> None:
    def pressed(session: LocalSession, job: MeasureJob, ask: Callable[[MeasureJob], Any]) -> Any:
        if session._subject.spec.dims["S"] != HIGH:
            signal.raise_signal(sent)
        return ask(job)

    answered(MeasureJob, pressed)
    done = optimize(*RANGE, "--lengths", "lengths.txt", *BY_SEGMENTS)
    assert done.code == 130
    assert [part.up_to for part in read_plan("net.memopt.plan.yaml")[1].ranges] == [HIGH]
    assert plan_of(memopt_cli.load("net.memopt.pt")) == read_plan("net.memopt.plan.yaml")[1]


READS = """
import torch
from torch import nn

class Reading(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1e9 else x

def make():
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    return Reading(*(block() for _ in range(4)))
"""


@pytest.mark.slow
def test_a_model_that_reads_its_data_is_counted_by_runs(memopt: Memopt, in_process: None) -> None:
    Path("reading.py").write_text(READS)
    flags = (*"-i BxSx64 --dim B=16 --dim S=8:64 --budget 80% --level 1".split(), "--no-recommend-batch", "--json")
    summary = summary_of(memopt("optimize", "reading.py:make", *flags, "--dry-run"))
    assert summary.ranges[-1].up_to == 64
    assert all(row.outcome.allocated_peak_bytes <= (summary.budget_bytes or 0) for row in summary.ranges)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--dim", "S=512:16", "--budget", "60%"), "the range S=512:16 is empty"),
        (("--dim", "S=16:x", "--budget", "60%"), "'S=16:x' is not NAME=LOW:HIGH"),
        (("--dim", "S=16", "--dim", "T=16:64", "--budget", "60%"), "--dim T: no input has a dimension T"),
        (
            ("--dim", "S=16:64", "--budget", "60%", "--lengths", "lengths.txt"),
            "has the length 90, outside the range S=16:64",
        ),
        ((*RANGE, "--budget", "60%", "--lengths", "empty.txt"), "empty.txt holds no lengths"),
        ((*RANGE, "--budget", "60%", "--lengths", "nowhere.txt"), "cannot read lengths from nowhere.txt"),
    ],
)
def test_bad_input_is_one_sentence(flags: tuple[str, ...], said: str, optimize: Memopt) -> None:
    Path("empty.txt").write_text("\n")
    done = optimize(*flags)
    assert done.code in (2, 3), done.err
    error, hint = done.err.splitlines()[-2:]
    assert said in error
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert done.changed <= {"empty.txt"}


def test_the_batch_is_no_length(optimize: Memopt) -> None:
    done = optimize("--dim", "B=2:8", "--budget", "60%", spec=("-i", "Bx5x64"))
    assert done.code == 2
    assert "a plan by length cannot depend on the batch, B" in done.err


def test_a_model_that_does_not_run_at_another_length(optimize: Memopt) -> None:
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64 * HIGH, 4)), "net.pt")
    done = optimize(*RANGE, "--budget", "60%")
    assert done.code == 3
    assert f"the model does not run at S={LOW}: " in done.err


@pytest.mark.slow
def test_lengths_at_which_the_model_does_not_run_bound_no_range(optimize: Memopt) -> None:
    by_eight = (nn.Unflatten(1, (-1, 8)), nn.Flatten(1, 2))  # as a U-Net of four levels runs
    torch.save(nn.Sequential(*by_eight, deep_net()), "net.pt")
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in range(16, 513, 2)))
    summary = summary_of(optimize(*RANGE, *BY_SEGMENTS, "--lengths", "lengths.txt", "--json"))
    assert summary.ranges[0].plan == Plan()
    assert summary.ranges[0].up_to > 300
    assert all(row.up_to % 8 == 0 for row in summary.ranges)
    assert not any("No range ends" in note for note in summary.notes)


@pytest.mark.parametrize(("most", "largest"), [(100, 96), (95, 88), (16, 16), (15, None), (1000, 96)])
def test_a_length_that_does_not_run_is_none_that_fits(most: int, largest: int | None) -> None:
    search = searching(DimRange(symbol="S", low=16, high=104))
    near = functools.partial(search._run_near, lambda length: None if length % 8 else length, 0)
    found = by_length._largest_within(range(16, 101), near, most)
    assert found == (None if largest is None else (largest, largest))
    assert search.notes == []


def searching(varied: DimRange) -> by_length._ByLength:
    """A search that asks nothing of a model."""
    given: Any = None
    counts = {varied.high: 1.0}
    return by_length._ByLength(given, given, varied, counts, given, Work.from_counts(counts))


@pytest.mark.parametrize(
    ("low", "high", "step", "length", "largest"),
    [
        (64, 1 << 20, 1, 777_777, 777_777),
        (64, 1 << 20, 64, 777_777, 777_728),
        (10, 4106, 64, 999, 970),  # offset by the lower end
        (60, 1200, 60, 777, 720),
        (17, 100_001, 49_992, 77_777, None),
    ],
)
def test_few_lengths_are_tried_where_the_model_does_not_run(
    low: int, high: int, step: int, length: int, largest: int | None
) -> None:
    tried: list[int] = []

    def peak(length: int) -> float | None:
        tried.append(length)
        return None if (length - low) % step else 1.0

    search = searching(DimRange(symbol="S", low=low, high=high))
    run = search._run_near(peak, low, length)
    assert (None if run is None else run[0]) == largest
    assert len(tried) <= math.log2(length) + 1
    if largest is None:
        (note,) = search.notes
        assert note.startswith(f"The model does not run at S={length}, nor at the shorter lengths that were tried (")
        assert str(tried[-1]) in note


def test_a_length_with_none_shorter_to_try_is_named_alone() -> None:
    search = searching(DimRange(symbol="S", low=16, high=48))
    assert search._run_near(lambda length: None, 40, 44) is None
    assert search.notes == ["The model does not run at S=44. Name the lengths that occur with `--lengths`."]


@pytest.mark.slow
def test_what_does_not_fit_is_the_longest(optimize: Memopt) -> None:
    torch.save(deep_net(1), "net.pt")
    done = optimize(*RANGE, "--budget", "1MiB", "--level", "1")
    assert done.code == 6
    assert f"error: at S={HIGH} no plan found takes 1.0 MiB or less" in done.err
    assert "hint: End the range at a different S, usually a smaller one. Raise --budget" in done.err
    assert "No plan can make these parts of its peak smaller: " in done.err
    assert f"memopt explain net.pt --input BxSx64 --dim B=4 --dim S={HIGH} --memory 1MiB" in done.err

    done = optimize(*RANGE, "--budget", "1KiB", "--level", "1")
    assert done.code == 6
    assert "error: the parameters alone take" in done.err
    assert f"S={HIGH} the" not in done.err
    assert "End the range" not in done.err


def test_a_script_does_not_say_which_dimension_it_is(optimize: Memopt) -> None:
    Path("inputs.py").write_text("import torch\n\ndef make(batch, s):\n    return (torch.randn(batch, s, 64),)\n")
    done = optimize(*RANGE, "--budget", "60%", spec=("--input-script", "inputs.py:make", "--dim", "B=4"))
    assert done.code == 2
    assert "no input has a dimension S to choose the range of the plan by" in done.err


@pytest.mark.parametrize(
    ("low", "high", "lengths"),
    [
        (64, 2048, range(64, 2049, 64)),
        (32, 64, range(32, 65, 4)),  # a U-Net that halves its input twice
        (16, 512, range(16, 513, 16)),
        (48, 1024, range(48, 1025, 16)),
        (5, 7, (5, 6, 7)),
        (1, 1000, (*range(1, 1000, 16), 1000)),
    ],
)
def test_lengths_between_the_ends_represent_a_range(low: int, high: int, lengths: Sequence[int]) -> None:
    request: Any = SimpleNamespace(lengths=None)
    assert list(by_length.lengths_of(request, DimRange(symbol="S", low=low, high=high))) == list(lengths)


def test_a_length_of_several_axes_and_inputs_is_read_at_all_of_them() -> None:
    tensors = (
        TensorSpec(shape=("B", 3, "S", "S")),
        TensorSpec(shape=("B",)),
        TensorSpec(shape=("B", "S"), name="mask"),
    )
    for number, argument, axis in ((1, 0, (2, 3)), (2, 0, (2, 3)), (3, (0, 0, "mask"), (2, 3, 1))):
        spec = InputSpec(tensors=tensors[:number], dims={"B": 1, "S": 8}, source="--input")
        dimension = by_length.dimension_of(spec, "S")
        assert (dimension.argument, dimension.axis) == (argument, axis)


def test_the_root_of_a_plan_by_length_knows_where_the_length_stands() -> None:
    by = memopt_cli.records.InputDimension(dim="S", argument=0, axis=1)
    model = memopt_cli.apply_plan(deep_net(1), Plan(by=by, ranges=(memopt_cli.records.PlanRange(up_to=4),)))
    found = vars(model)["_memopt_segment"]
    assert isinstance(found, ConfigsByLength)
    assert found.length is not None


def test_a_range_has_another_plan_than_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(level: int, plan: Plan, step_s: float) -> LevelRow:
        return a_row(level, measured(100, step_s), plan, dry_runs=0)

    def found(self: Any, length: int, budget_bytes: int | None = None) -> Any:
        segments = 2 if length == max(counts) else 1
        plan = Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(segments)))
        rows = [row(0, Plan(), 1.0), row(1, plan, 1.0 + length / 100)]
        compared = replace(
            plan, segments=tuple(replace(each, compared="2 along axis 0 of 8x8") for each in plan.segments)
        )
        verification = SimpleNamespace(passed=True)
        return SimpleNamespace(rows=rows, applied_level=1, plan=compared, verification=verification)

    counts = dict.fromkeys(range(10, 101, 10), 1.0)
    varied = DimRange(symbol="S", low=10, high=100)
    request: Any = SimpleNamespace(interruptible=True, runs=False)
    given: Any = None
    search = by_length._ByLength(request, given, varied, counts, given, Work.from_counts(counts))
    monkeypatch.setattr(by_length._ByLength, "find_at", found)
    monkeypatch.setattr(by_length._ByLength, "_range_without_plan", lambda *given: iter(()))
    monkeypatch.setattr(by_length._ByLength, "_lower_to_running", lambda self, bounds, above, **given: bounds)
    parts = search.all_ranges(by_length._range_of(100, found(search, 100)), 100)
    assert len(inner_bounds(search.work, plain=0, longest=100, slowdown=2.0)) > 1
    assert [len(part.plan.segments) for part in parts] == [1, 2]
    assert all(segment.compared for part in parts for segment in part.plan.segments)


class NeedsMoreInside(nn.Module):
    """A net that needs 32 MiB more at one length in the middle, as a convolution may need another workspace there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = deep_net()

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[1] == 330:
            x = x + 0 * torch.zeros(8 << 20).sum()
        return self.net(x)


@pytest.mark.slow
def test_a_shorter_length_above_the_budget_is_named(optimize: Memopt) -> None:
    torch.save(NeedsMoreInside(), "net.pt")
    done = optimize(*RANGE, *BY_SEGMENTS, "--lengths", "lengths.txt", "--allow-package", "tests")
    assert done.code == 6, done.err
    assert "error: no plan was found within " in done.err
    assert "The verified plan is in net.memopt.plan.yaml." in done.err
    assert ", 500, 512, the lengths that were run; above it at others: " in done.out
    assert "MiB at S=330. No plan was found that fits there" in done.out
    assert "(peak at 330)" in done.out


def test_a_range_ends_where_the_plan_of_the_longest_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(self: Any, length: int, budget_bytes: int | None = None) -> Any:
        plan = Plan(segments=(SegmentPlan(path=f"for {length}"),))
        rows = [a_row(0, measured(200, 1.0), Plan(), dry_runs=0), a_row(1, measured(90, 1.1), plan, dry_runs=0)]
        return SimpleNamespace(rows=rows, applied_level=1, plan=plan, verification=SimpleNamespace(passed=True))

    def measure(self: Any, job: MeasureJob, length: int) -> Any:
        exceeds = length in {70, 90} and job.plan.segments[0].path == "for 100"
        return measured(120 if exceeds else 80, 1.0)

    varied, given = DimRange(symbol="S", low=10, high=100), cast(Any, None)
    counts = dict.fromkeys(range(10, 101, 10), 1.0)
    request: Any = SimpleNamespace(lengths={}, interruptible=True, runs=True)
    search = by_length._ByLength(request, given, varied, counts, given, Work.from_counts(counts))
    monkeypatch.setattr(by_length._ByLength, "find_at", found)
    monkeypatch.setattr(by_length._ByLength, "_measure", measure)
    monkeypatch.setattr(by_length._ByLength, "_sessions", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(by_length._ByLength, "_peak", lambda *given: 1.0)
    ranges = [by_length._range_of(100, found(search, 100))]
    search._run_inside(ranges, 100)
    # 10, 30, 50 and 70 are run first: at 70 a range ends.  Above it 90 is run then, where another one ends.
    assert [part.up_to for part in ranges] == [70, 90, 100]
    assert [[run.length for run in part.inside] for part in ranges] == [[50, 40, 20, 10], [80], []]
    assert [by_length._over_budget(part, 100) for part in ranges] == [[], [], []]

    def interrupted(*given: Any, **limits: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(by_length._ByLength, "find_at", interrupted)
    search.prepared = cast(Any, SimpleNamespace(progress=SimpleNamespace(interrupted=lambda text: None)))
    search.notes.clear()
    original = a_row(0, measured(200, 1.0), Plan(), dry_runs=0)
    plan = Plan(segments=(SegmentPlan(path="for 100"),))
    longest = by_length._Range(up_to=100, original=original, applied=replace(original, plan=plan))
    assert search.all_ranges(longest, 100) == [longest]
    assert [run.length for run in by_length._over_budget(longest, 150)] == [100]
    assert [run.length for run in by_length._over_budget(longest, 100)] == [70, 100]
    assert search.notes == []


@pytest.mark.parametrize(
    ("above", "up_to", "counts", "lengths"),
    [
        (15, 36, None, {16, 24, 28, 32}),
        (28, 36, None, {29, 30, 32, 34}),
        (63, 2048, None, {512, 1024, 1536, 1792}),
        (28, 29, None, set()),
        (15, 512, {16: 30, 40: 40, 90: 30, 200: 20, 330: 6, 500: 2}, {16, 40, 200, 330}),
    ],
)
def test_lengths_in_use_are_run_before_others(
    above: int, up_to: int, counts: dict[int, float] | None, lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = searching(DimRange(symbol="S", low=above + 1, high=up_to))
    search.request, search.counts = cast(Any, SimpleNamespace(lengths=counts)), counts or {}
    monkeypatch.setattr(by_length._ByLength, "_sessions", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(by_length._ByLength, "_peak", lambda *given: 1.0)
    assert search._lengths_inside(above, up_to, is_fake=True) == lengths


@pytest.mark.parametrize(("least", "up_to"), [(110, [90, 100]), (130, [100])])
def test_where_no_plan_fits_the_smallest_known_is_taken(
    least: int, up_to: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(self: Any, request: Any, prepared: int) -> Any:
        if request.goal.budget.nbytes < least:
            error = NothingFitsError("no plan found takes 100 B or less")
            error.least_bytes = least
            raise error
        rows = [a_row(0, measured(200, 1.0), Plan(), dry_runs=0), a_row(1, measured(least, 1.1), SMALLEST, dry_runs=0)]
        return Findings(**FOUND, rows=rows, applied_level=1, plan=SMALLEST, verification=verified())

    varied, given = DimRange(symbol="S", low=80, high=100), cast(Any, None)
    request = SimpleNamespace(goal=SearchGoal(budget=Budget(nbytes=100)), interruptible=True)
    progress = SimpleNamespace(stage=lambda text: None)
    search = by_length._ByLength(cast(Any, request), given, varied, {}, functools.partial(found, given), given)
    search.prepared = cast(Any, SimpleNamespace(progress=progress))

    def with_budget(request: Any, nbytes: int) -> Any:
        return SimpleNamespace(**{**vars(request), "goal": SearchGoal(budget=Budget(nbytes=nbytes))})

    monkeypatch.setattr(by_length, "_with_budget", with_budget)
    monkeypatch.setattr(by_length._ByLength, "prepared_at", lambda self, length: length)
    monkeypatch.setattr(by_length._ByLength, "_measure", lambda self, job, length: measured(120, 1.0))
    longest = a_row(1, measured(90, 1.1), Plan(packed=True), dry_runs=0)
    ranges = [by_length._Range(up_to=100, original=longest, applied=longest)]
    assert search._ends_range(ranges, 0, 90, 100) is (least < 120)
    assert [part.up_to for part in ranges] == up_to
    over = [run for part in ranges for run in by_length._over_budget(part, 100)]
    assert [(run.length, run.allocated_peak_bytes) for run in over] == [(90, min(least, 120))]
    assert search.request.goal.budget == Budget(nbytes=100)


def test_a_run_that_fails_inside_a_range_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(DimRange(symbol="S", low=10, high=100))
    monkeypatch.setattr(by_length._ByLength, "_measure", lambda *given: TimedOut(limit_s=600.0))
    longest = a_row(1, measured(90, 1.1), Plan(packed=True), dry_runs=0)
    assert not search._ends_range([by_length._Range(up_to=100, original=longest, applied=longest)], 0, 50, 100)
    assert search.notes == [
        "At S=50, the plan up to S=100 could not be run: the step ran past its time limit of 600 s."
    ]


SMALLEST = Plan(segments=(SegmentPlan(path="0"),))
FOUND: dict[str, Any] = {"resolved": resolve({}), "asked_compressors": (), "model_format": "pickle", "device": "cpu"}


@pytest.mark.parametrize(
    ("peak_mib", "said"), [(70, "The original fits"), (90, "With its own checkpoints, the model fits")]
)
def test_where_only_its_own_checkpoints_fit_the_model_is_said_to_have_them(
    peak_mib: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = a_row(0, outcome=measured(peak_mib << 20, 1.0), plan=Plan())
    findings = Findings(
        resolved=resolve({}),
        asked_compressors=(),
        model_format="pickle",
        device="cpu",
        rows=[original],
        verification=verified(),
        budget_bytes=80 << 20,
        own_checkpoints=measured(60 << 20, 1.5),
    )
    monkeypatch.setattr(by_length._ByLength, "check_sizes", lambda self, dimension: None)
    monkeypatch.setattr(by_length._ByLength, "find_longest", lambda self: findings)
    subject = SimpleNamespace(
        spec=InputSpec(tensors=(TensorSpec(shape=("B", "S", 8)),), dims={"B": 1, "S": HIGH}, source="--input")
    )
    prepared: Any = SimpleNamespace(facts=SimpleNamespace(format="pickle"), subject=subject)
    request: Any = SimpleNamespace(lengths=None, dim_range=None, runs=False)
    varied = DimRange(symbol="S", low=LOW, high=HIGH)
    found = by_length.find_by_length(request, varied, prepared, find_plan=lambda request, prepared: findings)
    assert found.notes == [f"{said} at every S that was run: no ranges are needed."]

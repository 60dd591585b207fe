"""The HTML report: valid, self-contained, true to the record; and what a real browser makes of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.errors import UsageError
from memopt_cli.records import (
    BatchProbe,
    Crashed,
    Differs,
    DroppedPlan,
    FastestTraining,
    FingerprintCheck,
    InputDimension,
    Instant,
    LengthRun,
    LevelRow,
    Measurement,
    MemOptSummary,
    NotRun,
    OptimizeResult,
    OpTrace,
    OutOfMemory,
    PairRun,
    ParetoPoint,
    Plan,
    PlanRange,
    RangeRow,
    RecordedSteps,
    SavedTensor,
    SegmentPlan,
    StepProfile,
    StepTrace,
    StorageTrace,
    TimeUse,
)
from memopt_cli.report import optimization
from memopt_cli.report.fastest import headline, remarks, run_rows
from memopt_cli.report.html import fastest_page, optimize_page, profile_page, require_plotly
from memopt_cli.report.html.figure import bytes_axis
from memopt_cli.report.html.frontier import FrontierPoint, frontier, points_of
from memopt_cli.report.html.modules import kept_by_module, treemap_figure
from memopt_cli.report.html.timeline import WORKSPACE, thin_out, timeline, timeline_figure
from tests.zoo import records
from tests.zoo.records import a_breakdown, a_header, a_module, a_row, verified

pytest.importorskip("plotly")

MIB = 2**20
EVIL = "<img src=x onerror='document.title=1'>\"</script><script>document.title=1</script>%{x}"
"""A module path that would like to be more than text."""


def storage(size: int, kind: str, where: str, born: int, died: int | None) -> StorageTrace:
    return StorageTrace(nbytes=size * MIB, kind=kind, module=where, born=born, died=died, freed=died)


def a_trace(scale: int = 1) -> StepTrace:
    """Four operators; 10 + 24 + 30 + 5 MiB while the third runs, with its workspace of 5 MiB."""
    ops = (
        OpTrace(name="aten::convolution", module="body.conv", phase="forward", workspace_bytes=MIB),
        OpTrace(name="aten::relu", module=EVIL, phase="forward"),
        OpTrace(name="aten::convolution_backward", module="body.conv", phase="backward", workspace_bytes=5 * MIB),
        OpTrace(name="aten::add", module="", phase="backward"),
    )
    storages = (
        storage(10, "parameters", "body.conv", -1, None),
        storage(16 * scale, "activations", "body.conv", 0, 3),
        storage(8 * scale, "activations", EVIL, 1, 3),
        storage(2, "activations", "body.conv", 0, 1),
        storage(30, "temporaries", "body.conv", 2, 3),
        storage(10, "gradients", "body.conv", 3, None),
    )
    modules = (a_module(""), a_module("body"), a_module("body.conv", "Conv<2>"), a_module(EVIL, EVIL))
    peak = (10 + 24 * scale + 30) * MIB
    return StepTrace(
        modules=modules,
        tensor_peak_bytes=peak,
        resident_bytes=20 * MIB,
        batch=4,
        ops=ops,
        storages=storages,
        allocated_peak_bytes=peak + 5 * MIB,
    )


HEADER = a_header(model=f"models/{EVIL}.pt")
BREAKDOWN = a_breakdown(parameters_bytes=10 * MIB, activations_bytes=24 * MIB, temporaries_bytes=30 * MIB)


def measured(peak_mib: int, step_s: float) -> Measurement:
    return records.measured(peak_mib * MIB, step_s, resident_bytes=20 * MIB, breakdown=BREAKDOWN)


def a_profile() -> StepProfile:
    trace = a_trace()
    saved = SavedTensor(
        nbytes=16 * MIB,
        made_by="aten::convolution",
        module=EVIL,
        op="aten::relu",
        savers=1,
        compressor="null",
        packed_bytes=16 * MIB,
    )
    return StepProfile(
        header=HEADER,
        plan=Plan(),
        measurement=measured(69, 1.5),
        fake=True,
        tensor_peak_bytes=trace.tensor_peak_bytes,
        peak=Instant(allocated_bytes=69 * MIB, op=2, name=trace.ops[2].name, phase="backward", module="body.conv"),
        breakdown=BREAKDOWN,
        workspace_bytes=5 * MIB,
        modules=(),
        saved=(saved,),
        phases=(),
        live_bytes=(),
        flops=0,
        times=(TimeUse(name="backward", seconds=1.2), TimeUse(name="recomputation", segment=EVIL, seconds=0.3)),
        notes=(f"A note on {EVIL}.", "/a/long/path" * 20),
        trace=trace,
    )


def row(level: int, outcome: Measurement | OutOfMemory, plan: Plan | None = None) -> LevelRow:
    return a_row(level, outcome, plan or Plan(), search_s=1.0)


PLAN = Plan(
    segments=(SegmentPlan(path="body.conv", compressor="bit", chunks=4, axis=1), SegmentPlan(path=EVIL)),
)


def a_result() -> OptimizeResult:
    summary = MemOptSummary(None, None, None, "cpu", 3, 2, True, True)
    summary.levels = [row(0, measured(117, 1.0)), row(1, measured(80, 1.5), Plan(packed=True))]
    summary.levels += [row(2, measured(69, 1.25), PLAN)]
    summary.plan = PLAN
    summary.verification = verified(compared=7)
    steps = RecordedSteps(original=a_trace(scale=3), optimized=a_trace())
    return OptimizeResult(header=HEADER, summary=summary, files=(), steps=steps)


def test_the_timeline_counts_every_category_at_every_instant() -> None:
    found = timeline(a_trace())
    assert found.instants == (-1, 0, 1, 2, 3)
    in_mib = {name: tuple(value // MIB for value in values) for name, values in found.levels.items() if any(values)}
    assert in_mib == {
        "parameters": (10, 10, 10, 10, 10),
        "activations": (0, 18, 24, 24, 0),
        "temporaries": (0, 0, 0, 30, 0),
        "gradients": (0, 0, 0, 0, 10),
        WORKSPACE: (0, 1, 0, 5, 0),
    }
    assert max(found.totals) == a_trace().allocated_peak_bytes


def long_trace(count: int = 20_000) -> StepTrace:
    """Storages of many sizes that live for one operator each; one spike in the middle."""
    ops = (OpTrace(name="aten::mul", module="", phase="forward"),) * count
    sizes = [1 + i * 7919 % 1000 for i in range(count)]
    sizes[count // 3] = 5000
    lives = enumerate(sizes[:-1])
    storages = tuple(
        StorageTrace(nbytes=size, kind="activations", module="", born=i, died=i + 1, freed=i + 1) for i, size in lives
    )
    return replace(a_trace(), modules=(a_module(""),), ops=ops, storages=storages)


@pytest.mark.slow
def test_thinning_keeps_what_can_be_seen() -> None:
    whole = timeline(long_trace())
    few = thin_out(whole, max_points=200)
    assert len(few.instants) <= 202
    exact = dict(zip(whole.instants, whole.totals, strict=True))
    assert all(exact[i] == total for i, total in zip(few.instants, few.totals, strict=True))
    assert (few.instants[0], few.instants[-1]) == (whole.instants[0], whole.instants[-1])
    for start in range(0, len(whole.instants) - 200, 200):  # no shorter stretch may lose its highest or lowest
        seen = [total for i, total in zip(few.instants, few.totals, strict=True) if start - 100 <= i < start + 300]
        assert max(seen) >= max(whole.totals[start : start + 200])
        assert min(seen) <= min(whole.totals[start : start + 200])
    assert thin_out(whole, max_points=10**6) is whole


def test_hovering_tells_operator_module_phase_and_bytes() -> None:
    figure = timeline_figure(a_trace(), timeline(a_trace()), top_bytes=100 * MIB)
    outline = figure["data"][-1]
    assert outline["text"][0] == "<b>10.0 MiB</b> before the step"
    assert outline["text"][3] == "<b>69.0 MiB</b> in backward<br><b>aten::convolution_backward</b><br>body.conv"
    assert html.escape(EVIL) in outline["text"][2]
    assert "(model)" in outline["text"][4]
    (peak,) = [note for note in figure["layout"]["annotations"] if "peak" in note["text"]]
    assert (peak["x"], peak["y"], peak["text"]) == (2, 69 * MIB, "peak 69.0 MiB")


@pytest.mark.parametrize(("top", "shown"), [(69 * MIB, "60 MiB"), (1000, "800 B"), (1010 * MIB, "800 MiB"), (0, "0 B")])
def test_ticks_are_round_and_few(top: int, shown: str) -> None:
    axis = bytes_axis(top)
    assert shown in axis["ticktext"]
    assert len(axis["tickvals"]) <= 8
    assert axis["range"][1] >= top


def test_what_each_module_keeps() -> None:
    root = kept_by_module(a_trace())
    assert {m.path: m.nbytes // MIB for m in root.walk()} == {"": 24, "body": 16, "body.conv": 16, EVIL: 8}
    (trace,) = treemap_figure(root)["data"]
    sizes = dict(zip(trace["ids"], trace["values"], strict=True))
    for parent in set(trace["parents"]) - {""}:
        assert sizes[parent] == sum(v for p, v in zip(trace["parents"], trace["values"], strict=True) if p == parent)
    assert trace["values"][0] == 24 * MIB


def test_a_module_below_a_container_that_was_not_called_is_named_by_its_path() -> None:
    modules = tuple(map(a_module, ("", "downs.0", "downs.0.conv", "ups.0")))
    root = kept_by_module(replace(a_trace(), modules=modules))
    assert [module.name for module in root.walk()] == ["(model)", "downs.0", "conv", "ups.0"]


def test_small_modules_are_drawn_as_one() -> None:
    small = tuple(storage(1, "activations", f"many.{i}", 0, None) for i in range(1000))
    modules = (a_module(""), a_module("many"), *(a_module(f"many.{i}") for i in range(1000)))
    trace = replace(a_trace(), modules=modules, storages=(*small, storage(9000, "activations", "", 0, None)))
    (figure,) = treemap_figure(kept_by_module(trace))["data"]
    assert dict(zip(figure["labels"], figure["values"], strict=True))["smaller"] == 1000 * MIB
    assert len(figure["ids"]) == 4


def test_the_frontier() -> None:
    points = [
        FrontierPoint(label=label, peak_bytes=peak, step_s=step_s)
        for label, peak, step_s in (("a", 100, 1.0), ("b", 80, 1.5), ("c", 70, 1.2), ("d", 70, 1.3), ("e", 60, 2.0))
    ]
    assert [p.label for p in frontier(points)] == ["a", "c", "e"]


def test_levels_that_share_a_plan_are_one_point() -> None:
    summary = a_result().summary
    predicted = replace(row(2, measured(69, 1.25), PLAN), outcome=None, predicted_slowdown=1.2)
    packed = replace(predicted, level=1, plan=Plan(packed=True), predicted_allocated_peak_bytes=70 * MIB)
    summary.levels = [row(0, measured(80, 1.0)), packed, predicted, row(3, measured(69, 1.25), PLAN)]
    shown = [("level 0", False), ("level 1, predicted", False), ("level 2–3", True)]
    assert [(p.label, p.applied) for p in points_of(summary)] == shown


def test_a_frontier_is_shown_by_the_numbers_to_pick() -> None:
    summary = a_result().summary
    outcomes = {Plan(): measured(117, 1.0), PLAN: measured(69, 1.25), Plan(packed=True): OutOfMemory(detail="")}
    summary.frontier = [
        ParetoPoint(plan=plan, predicted_allocated_peak_bytes=1, predicted_slowdown=1.0, outcome=outcome)
        for plan, outcome in outcomes.items()
    ]
    assert [(p.label, p.applied) for p in points_of(summary)] == [("pick 1", False), ("pick 2", True)]
    summary.verification = None
    assert not any(p.applied for p in points_of(summary))


def test_the_tile_of_the_verification_says_both_sizes() -> None:
    result = a_result()
    assert result.summary.verification is not None
    assert "7 tensors, bit for bit, at batch 4<" in optimize_page(result)
    measured_steps = FingerprintCheck(
        batch=4, dims={"T": 16}, compared=6, equal=6, tolerance=0.0, worst_name="", worst_difference=0.0
    )
    result.summary.verification = replace(
        result.summary.verification, batch=1, dims={"T": 5}, full_size=False, measured=measured_steps
    )
    page = optimize_page(result)
    assert "7 tensors, bit for bit, at batch 1, T=5; 6 of the measured steps, at batch 4, T=16<" in page


def test_what_a_budget_chose_is_shown_beside_the_frontier() -> None:
    summary = a_result().summary
    original = ParetoPoint(
        plan=Plan(), predicted_allocated_peak_bytes=1, predicted_slowdown=1.0, outcome=measured(117, 1.0)
    )
    summary.frontier, summary.budget_bytes = [original], 100
    assert [(p.label, p.applied) for p in points_of(summary)] == [("pick 1", False), ("budget", True)]
    assert points_of(summary)[-1].peak_bytes == summary.levels[-1].outcome.allocated_peak_bytes  # type: ignore[union-attr]
    summary.frontier = [original, replace(original, plan=summary.plan)]  # type: ignore[arg-type]
    assert [(p.label, p.applied) for p in points_of(summary)] == [("pick 1", False), ("pick 2", True)]


class Strict(HTMLParser):
    """Fails on a tag that is closed without having been opened; remembers the rest."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "script":
            self.texts.append(data)


def text_of(page: str) -> str:
    """What a reader sees, with one space between words."""
    return " ".join(" ".join(Strict(page).texts).split())


@pytest.fixture(scope="module", params=["profile", "optimize"])
def page(request: pytest.FixtureRequest) -> str:
    return profile_page(a_profile()) if request.param == "profile" else optimize_page(a_result())


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(found.group(1)))


def test_it_is_valid_and_asks_for_nothing(page: str) -> None:
    found = Strict(page)
    assert page.startswith("<!DOCTYPE html>")
    assert found.links == ["data:,"]
    assert "default-src 'none'" in page
    assert found.tags.count("script") == 3
    assert "img" not in found.tags


def test_the_file_s_own_name_is_spelled_out() -> None:
    header = replace(HEADER, model="\x1b[31m\u202e.pt")
    page = profile_page(replace(a_profile(), header=header, notes=("\x9b31m",)))
    assert "\\x1b[31m\\u202e.pt" in page
    assert not {"\x1b", "\u202e", "\x9b"} & {*page.partition("<script")[0]}


def test_names_from_the_file_are_text(page: str) -> None:
    found = Strict(page)
    assert any(EVIL in text for text in found.texts)
    for script in re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL):
        assert "<img src=x" not in script


def test_the_data_is_the_record() -> None:
    before, after, *_ = figures_of(optimize_page(a_result())).values()
    for figure, trace in ((before, a_trace(scale=3)), (after, a_trace())):
        line = timeline(trace)
        drawn = {area["name"]: tuple(area["y"]) for area in figure["data"] if area["name"]}
        assert drawn == {name: levels for name, levels in line.levels.items() if any(levels)}
        assert tuple(figure["data"][-1]["y"]) == line.totals
    assert before["layout"]["yaxis"]["range"] == after["layout"]["yaxis"]["range"]


def test_the_plan_is_on_the_module_tree() -> None:
    text = text_of(optimize_page(a_result()))
    assert "conv Conv<2> segment 4 chunks, axis 1 packed: bit 48.0 MiB → 16.0 MiB" in text
    assert "117.0 MiB → 69.0 MiB" in text
    assert "0.59× of the original" in text
    assert "1.00 s → 1.25 s" in text


def test_modules_have_their_times_where_they_were_timed() -> None:
    result = a_result()
    assert result.steps is not None
    traces = [
        replace(trace, ops=tuple(replace(op, seconds=0.25 * times) for op in trace.ops))
        for times, trace in ((1, result.steps.original), (2, result.steps.optimized))
    ]
    steps = RecordedSteps(original=traces[0], optimized=traces[1])
    text = text_of(optimize_page(replace(result, steps=steps)))
    assert "packed: bit 48.0 MiB → 16.0 MiB, 500.0 ms → 1.00 s" in text
    assert "module by module, with the time of its operators" in text


def test_the_time_of_a_step_is_a_table_of_its_own() -> None:
    text = text_of(profile_page(a_profile()))
    assert "part time of it backward 1.20 s 80%" in text
    assert f"of {EVIL} 300.0 ms 20%" in text


def by_length() -> OptimizeResult:
    result = a_result()
    plan = Plan(
        by=InputDimension(dim="S", argument=0, axis=1),
        ranges=(PlanRange(up_to=64), PlanRange(up_to=256, segments=PLAN.segments)),
    )
    result.summary.plan = plan
    result.summary.ranges = [
        RangeRow(low=16, up_to=64, share=0.9, plan=Plan(), original=measured(50, 0.5), outcome=measured(50, 0.5)),
        RangeRow(
            low=65,
            up_to=256,
            share=0.1,
            plan=PLAN,
            original=measured(117, 1.0),
            outcome=measured(69, 1.25),
            inside=(LengthRun(length=128, allocated_peak_bytes=1 << 20),),
        ),
    ]
    return result


def test_a_plan_by_length_has_a_row_for_each_range_and_the_tree_of_the_longest() -> None:
    text = text_of(optimize_page(by_length()))
    assert "all else on this page is of S=256" in text
    assert "S from to share of steps allocated peak tensor peak step ratio plan" in text
    assert "16 64 90% 50.0 MiB 50.0 MiB 500.0 ms 1.00× no plan (run at 64 only)" in text
    assert "65 256 10% 69.0 MiB 69.0 MiB 1.25 s 1.25× 1 recomputed, 1 in chunks (1 packed)" in text
    assert "segment 4 chunks, axis 1" in text
    assert "A plan for each range" not in optimize_page(a_result())


def test_a_range_whose_times_are_in_doubt_is_marked_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt_cli.report.lines.BUSY", 0.2)
    summary = by_length().summary
    slow = measured(50, 2.0)
    recomputes = Plan(segments=(SegmentPlan(path="conv"),))
    summary.ranges[0] = replace(summary.ranges[0], plan=recomputes, original=slow, outcome=measured(50, 0.8))
    assert [row[6] for row in optimization.range_rows(summary)] == ["~0.40×", "1.25×"]
    summary.ranges[0] = replace(summary.ranges[0], outcome=replace(slow, waited=0.5, step_times_s=(0.5, 1.0, 2.0)))
    assert any("steps waited for a processor 50%" in line for line in optimization.remarks(summary))
    assert any("the steps of one plan differ by 75%" in line for line in optimization.details(summary))


def test_the_headline_of_a_plan_by_length_names_the_longest_and_the_largest_peak() -> None:
    summary = by_length().summary
    said = optimization.headline
    assert said(summary).startswith("S=256: 117.0 MiB → 69.0 MiB (")
    assert "at most" not in said(summary)
    inside = (LengthRun(length=128, allocated_peak_bytes=80 * MIB),)
    summary.ranges[1] = replace(summary.ranges[1], inside=inside)
    assert ", at most 80.0 MiB (at S=128), " in said(summary)


def test_a_profile_under_a_plan_by_length_shows_what_acts_at_its_own() -> None:
    plan = by_length().summary.plan
    assert plan is not None
    for size, is_there in ((64, False), (256, True)):
        header = replace(HEADER, spec=replace(HEADER.spec, dims={"S": size}))
        assert ("4 chunks" in profile_page(replace(a_profile(), header=header, plan=plan))) is is_there


def pair(plan: Plan, batch: int, peak: int, samples_per_s: float) -> PairRun:
    probe = BatchProbe(batch=batch, allocated_peak_bytes=peak * MIB, step_s=1.0)
    return PairRun(plan=plan, batch=batch, steps=1, outcome=probe, samples_per_s=samples_per_s, usable=True)


def searched() -> FastestTraining:
    failed = replace(pair(PLAN, 64, 0, 0.0), outcome=OutOfMemory(detail=""), samples_per_s=None, usable=False)
    return FastestTraining(
        header=HEADER,
        budget_bytes=100 * MIB,
        limit=f"100.0 MiB {EVIL}",
        runs=(pair(Plan(), 16, 90, 16.0), pair(PLAN, 32, 95, 20.0), failed),
        chosen=1,
        original=0,
        level=3,
        accumulation=None,
        verification=a_result().summary.verification,
        priced=40,
        dry_runs=5,
        times_run=3,
        notes=("A note.",),
        files=(),
        spent_s=60.0,
    )


def test_the_pairs_of_a_search() -> None:
    page = fastest_page(searched())
    (figure,) = figures_of(page).values()
    assert figure["data"][1]["x"] == [1 / 16, 1 / 20]
    assert figure["data"][1]["marker"]["symbol"] == ["circle", "star"]
    text = text_of(page)
    assert "1.25 times the original at its best batch, 16" in text
    assert "95.0 MiB limit: 100.0 MiB" in text
    assert "16 no plan 90.0 MiB 1.00 s" in text
    assert "7 tensors, bit for bit" in text
    assert "A note." in text


def a_dropped_plan() -> DroppedPlan:
    verification = a_result().summary.verification
    assert verification is not None
    failed = replace(verification, passed=False, worst_name="fc.weight", worst_difference=0.5)
    return DroppedPlan(plan=PLAN, peak_bytes=95 * MIB, original_bytes=None, why=Differs(verification=failed))


def test_a_faster_pair_that_fails_verification_is_said() -> None:
    found = replace(searched(), chosen=0, verification=None, dropped=(a_dropped_plan(),))
    said = " ".join(headline(found))
    assert "with a plan it is faster, but verification failed: fc.weight differs by 0.5, at batch 4" in said
    assert "no plan that was run is faster" not in said
    assert "verification failed" in [cells[-1] for _, cells in run_rows(found)]
    assert any(line.startswith("A plan of 95.0 MiB is not applied: verification failed") for line in remarks(found))
    unverified = NotRun(failure=Crashed(reason="killed by SIGSEGV", output_tail=""), in_verification=True)
    found = replace(found, dropped=(replace(a_dropped_plan(), why=unverified),))
    assert "could not be verified" in [cells[-1] for _, cells in run_rows(found)]


def test_a_plan_that_is_not_applied_and_the_details_of_v_are_said() -> None:
    result = a_result()
    result.summary.plan, result.summary.dropped = Plan(), [a_dropped_plan()]
    result.summary.details = ["A detail."]
    text = text_of(optimize_page(result))
    assert "A plan of 95.0 MiB is not applied: verification failed: fc.weight differs by 0.5" in text
    assert "level applied none" in text
    assert "A detail." in text


def test_without_recorded_steps_the_rest_is_there() -> None:
    (figure,) = figures_of(optimize_page(replace(a_result(), steps=None))).values()
    assert figure["data"][1]["text"] == ["level 0", "level 1", "level 2"]


def test_a_plan_that_changes_nothing_has_one_step_to_show() -> None:
    result = a_result()
    result.summary.plan = Plan()
    assert len(figures_of(optimize_page(result))) == 3


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match="plotly") as caught:
        require_plotly()
    assert caught.value.hint == "pip install 'memopt[html]'"


WATCH = """<head><script>
const said = [];
console.error = console.warn = (...parts) => said.push(parts.join(" "));
addEventListener("error", event => said.push(event.message));
addEventListener("securitypolicyviolation", event => said.push(`${event.violatedDirective} ${event.blockedURI}`));
</script>"""
LOOK = """<script>
const brightness = (element, part) =>
  getComputedStyle(element)[part].match(/[0-9]+/g).slice(0, 3).reduce((sum, n) => sum + Number(n), 0);
const seen = {};
ready.then(async () => {
  const [first, activations] = [document.getElementById("figure-0"), "button[data-category=activations]"];
  seen.paths = [...document.querySelectorAll(".plot")].map(plot => plot.querySelectorAll("path").length);
  seen.paper = brightness(document.body, "backgroundColor");
  seen.ink = brightness(document.querySelector(".xtick text"), "fill");
  seen.overflow = document.documentElement.scrollWidth - innerWidth;
  Plotly.Fx.hover(first, [{ curveNumber: first.data.length - 1, pointNumber: 3 }]);
  seen.hover = [...first.querySelectorAll(".hoverlayer text")].map(node => node.textContent).join("|");
  document.querySelector(activations).click();
  seen.visible = first.data.find(trace => trace.name === "activations").visible;
  document.documentElement.style.setProperty("--text", "rgb(1, 2, 3)");
  dark.dispatchEvent(new Event("change"));
  await new Promise(done => setTimeout(done, 500));
  seen.ink_of_another_theme = brightness(document.querySelector(".xtick text"), "fill");
}).catch(error => said.push(String(error)))
  .then(() => { document.documentElement.dataset.seen = JSON.stringify({ ...seen, said }); });
</script></body>"""


@pytest.fixture(scope="module")
def browser() -> str:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return program or pytest.skip("no chromium here")


@pytest.mark.parametrize(("width", "flags"), [(1280, []), (500, ["--force-dark-mode"])], ids=["light", "dark, narrow"])
def test_what_a_browser_makes_of_it(browser: str, page: str, width: int, flags: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(page.replace("<head>", WATCH).replace("</body>", LOOK), encoding="utf-8")
    shown = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", *flags]
    command = [browser, *shown, f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, report.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r' data-seen="([^"]*)"', done.stdout)
    assert found
    seen = json.loads(html.unescape(found[1]))
    assert seen["said"] == []
    assert seen["overflow"] <= 0
    assert all(seen["paths"])
    assert (seen["paper"] < 384) == (seen["ink"] > 384) == bool(flags)
    assert "aten::convolution_backward" in seen["hover"]
    assert "body.conv" in seen["hover"]
    assert seen["visible"] is False
    assert seen["ink_of_another_theme"] == 1 + 2 + 3

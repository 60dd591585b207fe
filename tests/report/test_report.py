"""The same result for people and for programs."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from memopt_cli.records import (
    SKIPS_LAYERS,
    ApplyResult,
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    CompiledRow,
    CompilePlan,
    Differs,
    DroppedPlan,
    FingerprintCheck,
    FurtherCheck,
    InputSpec,
    LeftOut,
    LevelRow,
    Measurement,
    MemOptSummary,
    NotRun,
    OptimizeResult,
    Outlook,
    OutOfMemory,
    ParetoPoint,
    Plan,
    Reason,
    SavesTooLittle,
    SegmentPlan,
    StepFailed,
    TensorSpec,
    TooSlow,
    Verification,
    from_data,
    to_data,
)
from memopt_cli.report.interface import Report
from memopt_cli.report.json import JsonReport
from memopt_cli.report.optimization import distinct_labels, headline, in_words
from memopt_cli.report.text import TextReport
from memopt_cli.text.spelling import on_command_line
from tests.zoo import records
from tests.zoo.records import a_header, a_row, verified

MIB = 2**20


def measured(peak_mib: float, step_s: float) -> Measurement:
    """Measurement whose tensor peak is a mebibyte less than the allocated one; 100 MiB are there before a step."""
    peak = int(peak_mib * MIB)
    return records.measured(peak, *(step_s,) * 3, tensor_peak_bytes=int((peak_mib - 1) * MIB), resident_bytes=100 * MIB)


def row(
    level: int, outcome: Measurement | OutOfMemory, plan: Plan | None = None, *, repeats: int | None = None
) -> LevelRow:
    return a_row(
        level,
        outcome,
        plan or Plan(),
        predicted_tensor_peak_bytes=300 * MIB if level else None,
        predicted_allocated_peak_bytes=310 * MIB if level else None,
        search_s=1.0,
        repeats=repeats,
    )


VERIFIED = verified(compared=83)
FURTHER = (
    FurtherCheck(name="in the next step", batch=4, compared=83),
    FurtherCheck(name="with masks changed", batch=4, not_tried="no input is a mask"),
    FurtherCheck(name="in eval mode", batch=4, compared=83),
)
LATE = FurtherCheck(name="with frozen parameters", batch=4, not_tried="it takes 3.00 s", skipped=True)
MEASURED = FingerprintCheck(
    batch=4, dims={"T": 16}, compared=82, equal=82, tolerance=0.0, worst_name="", worst_difference=0.0
)
ADVICE = BatchAdvice(
    recommended_batch=16,
    fastest_batch=16,
    estimated_batch=16,
    probes=(BatchProbe(batch=4, allocated_peak_bytes=300 * MIB, step_s=1.0),) * 3,
    intercept_bytes=1e8,
    slope_bytes=5e7,
    budget_bytes=8 * 2**30,
    device_bytes=10 * 2**30,
    limited_by="the budget",
)
SEGMENTS = (
    SegmentPlan(path="features.0", compressor="bit"),
    SegmentPlan(path="features.1", chunks=5),
    SegmentPlan(path="features.2", compressor="bit", chunks=5),
)


@pytest.fixture
def summary() -> MemOptSummary:
    return MemOptSummary(
        None,
        None,
        None,
        "cpu",
        4,
        3,
        True,
        True,
        notes=["inputs are a [guess] from conv1"],
        recommendation="Try level 4.",
        details=["Inputs: 4x3@float32 (--input)."],
        levels=[
            row(0, measured(617.9, 1.09)),
            row(1, OutOfMemory(detail="limit 400 MiB"), Plan(segments=SEGMENTS[:1])),
            row(3, measured(294.6, 1.49), Plan(segments=SEGMENTS), repeats=2),
        ],
        plan=Plan(segments=SEGMENTS),
        verification=VERIFIED,
        advice=ADVICE,
        spent_s=65.0,
    )


def result(
    summary: MemOptSummary, files: tuple[str, ...] = ("model.memopt.pt", "model.memopt.plan.yaml")
) -> OptimizeResult:
    header = a_header()
    use = "model = memopt_cli.load('model.memopt.pt')"
    return OptimizeResult(header=header, summary=summary, files=files, use=use)


def shown(report: Report, result: OptimizeResult) -> str:
    stream = io.StringIO()
    report.show(result, stream)
    return on_command_line(stream.getvalue())


DETAILED = TextReport(verbose=True)
BUSY = "the machine was busy: steps waited for a processor"
SHORT = """\
617.9 MiB → 294.6 MiB (0.48×), step 1.09 s → 1.49 s (1.37×), same bits in 83 tensors

level  plan                                       measured   step  predicted  step
0      no plan                                   617.9 MiB  1.00×
1      1 segment (1 packed)                  out of memory         310.0 MiB
3 *    1 recomputed, 2 in chunks (2 packed)      294.6 MiB  1.37×  310.0 MiB

inputs are a [guess] from conv1
wrote model.memopt.pt, .plan.yaml in 1 min 5 s
batch: 16 was run and fits 8.0 GiB of the 10.0 GiB here; limited by the budget
use it: model = memopt_cli.load('model.memopt.pt')
"""
LONG = """\
617.9 MiB → 294.6 MiB (0.48×), step 1.09 s → 1.49 s (1.37×), same bits in 83 tensors

                                                                                       tensor  activation    step
level  plan                                       measured   step  predicted  step       peak        peak    time
0      no plan                                   617.9 MiB  1.00×                   616.9 MiB   517.9 MiB  1.09 s
1      1 segment (1 packed)                  out of memory         310.0 MiB
3 *    1 recomputed, 2 in chunks (2 packed)      294.6 MiB  1.37×  310.0 MiB        293.6 MiB   194.6 MiB  1.49 s

* level 3 is applied; 4 was requested
level 1: out of memory (limit 400 MiB)
level 3: the plan of level 2
verified: 83 tensors equal bit for bit, at batch 4
Try level 4.
Inputs: 4x3@float32 (--input).
inputs are a [guess] from conv1
wrote model.memopt.pt, .plan.yaml in 1 min 5 s
batch: 16 was run and fits 8.0 GiB of the 10.0 GiB here; limited by the budget
use it: model = memopt_cli.load('model.memopt.pt')
"""


@pytest.mark.parametrize(("verbose", "expected"), [(False, SHORT), (True, LONG)])
def test_text_in_a_pipe(verbose: bool, expected: str, summary: MemOptSummary) -> None:
    lines = [line.rstrip() for line in shown(TextReport(verbose=verbose), result(summary)).splitlines()]
    assert lines == expected.splitlines()


def test_a_guess_of_the_inputs_stands_in_the_headline(summary: MemOptSummary) -> None:
    spec = InputSpec(tensors=(TensorSpec(shape=("B", 3)),), dims={"B": 2}, source="a guess from fc")
    found = result(summary)
    lines = shown(TextReport(), replace(found, header=replace(found.header, spec=spec))).splitlines()
    assert lines[0].endswith(", same bits in 83 tensors; the inputs are a guess: Bx3, B=2 (-i gives yours)")
    assert "guess" not in shown(TextReport(), found).splitlines()[0]


def test_which_of_several_state_dicts_is_used_stands_below_the_headline(summary: MemOptSummary) -> None:
    note = "The file has several state dicts ('model', 'ema'); the first is used. `--key` names another."
    lines = shown(TextReport(), result(replace(summary, notes=("another note", note)))).splitlines()
    assert lines[1] == note.replace("`", "")
    assert [lines.count(each) for each in ("another note", lines[1])] == [1, 1]


@pytest.mark.parametrize("verbose", [False, True])
def test_what_waits_elsewhere_has_a_column_of_its_own(verbose: bool, summary: MemOptSummary) -> None:
    sent = replace(measured(294.6, 1.49), elsewhere_bytes=200 << 20)
    summary.levels[-1] = replace(summary.levels[-1], outcome=sent)
    lines = shown(TextReport(verbose=verbose), result(summary)).splitlines()
    assert any(line.endswith("  elsewhere") for line in lines)
    assert any(line.startswith("3 *") and line.endswith("  200.0 MiB") for line in lines)
    summary.frontier = [a_point(sent, summary)]
    summary.verification = None
    assert "200.0 MiB" in shown(TextReport(), result(summary)).partition("pick")[2]


def a_point(outcome: Measurement, summary: MemOptSummary) -> ParetoPoint:
    assert summary.plan is not None
    return ParetoPoint(
        plan=summary.plan,
        predicted_allocated_peak_bytes=1,
        predicted_slowdown=1.0,
        outcome=outcome,
        original_step_s=1.0,
    )


def test_the_figure_of_one_step_promises_nothing_of_later_ones(summary: MemOptSummary) -> None:
    assert summary.verification is not None
    for exact in (True, False):
        summary.verification = replace(summary.verification, exact=exact)
        assert ("over many steps rounding adds up" in shown(TextReport(), result(summary))) is not exact


def test_a_step_that_rounding_changes_by_more_than_half_of_the_digits_is_told(summary: MemOptSummary) -> None:
    assert summary.verification is not None
    said = (
        "as measured, a tensor differs by 3.4% of its norm: rounding in chunks can flip a spike or the sign of a "
        "ReLU's input, so two training runs drift apart; "
    )
    for passed, count in ((True, 1), (False, 0)):
        summary.verification = replace(summary.verification, exact=False, passed=passed, rounding=0.034)
        assert shown(TextReport(), result(summary)).count(f"{said}--level 2 keeps the same bits\n") == count


def test_a_difference_of_parameters_in_bfloat16_is_put_down_to_their_rounding(summary: MemOptSummary) -> None:
    assert summary.verification is not None
    said = "a tensor differs by 1.2% of its norm: parameters are bfloat16, whose rounding is about 1%, and rounding in "
    for in_bfloat16 in (True, False):
        rounded = replace(summary.verification, exact=False, rounding=0.012, in_bfloat16=in_bfloat16)
        summary.verification = rounded
        assert (said in shown(TextReport(), result(summary))) is in_bfloat16


def test_a_peak_that_depends_on_the_data_is_said_to_do_so(summary: MemOptSummary) -> None:
    said = "the peak depends on the data: inputs packed as sparse take more memory"
    assert said not in shown(TextReport(), result(summary))
    summary.plan = Plan(segments=(SegmentPlan(path="features.0", compressor="sparse"),))
    assert said in shown(TextReport(), result(summary))


def test_a_peak_within_the_budget_does_not_look_like_the_budget(summary: MemOptSummary) -> None:
    rows = [row(0, measured(1425, 1.09)), row(3, measured(1395, 1.09))]
    close = replace(summary, levels=rows, budget_bytes=1414 << 20)
    text = shown(TextReport(), result(close))
    assert text.startswith("1.39 GiB → 1.36 GiB (0.98×)")
    assert "within the budget of 1.38 GiB" in text


def test_a_budget_is_met_by_a_step_that_skips_layers_only_as_such(summary: MemOptSummary) -> None:
    note = f"Of 'blocks.*', {SKIPS_LAYERS}: give `--seed 4`, which runs all of them."
    skipping = replace(summary, budget_bytes=2**30, notes=[note])
    said = "in the measured step, which skips layers (--seed 4 runs all of them): "
    assert shown(TextReport(), result(skipping)).startswith(f"{said}617.9 MiB → 294.6 MiB")
    stays = replace(skipping, levels=[row(0, measured(617.9, 1.09)), row(3, measured(617.9, 1.09))], plan=Plan())
    assert shown(TextReport(), result(stays)).startswith(f"{said}the model stays as it is: its peak of 617.9 MiB")


@pytest.mark.parametrize(
    ("settings", "says_so"),
    [
        ({"chunks": 1}, False),
        ({"chunks": 2}, True),
        ({"chunks": 2, "inexact": True}, False),
        ({"chunks": 2, "compared": "2 along axis 0 of 4x8"}, False),
    ],
)
def test_a_budget_says_that_the_first_step_checks_chunks(
    settings: dict[str, Any], says_so: bool, summary: MemOptSummary
) -> None:
    plan = Plan(segments=(SegmentPlan(path="blocks", **settings),))
    found = shown(TextReport(), result(replace(summary, budget_bytes=2**30, plan=plan)))
    assert "within the budget of 1.0 GiB" in found
    assert ("the first step also checks the chunks, which may take more" in found) is says_so


@pytest.mark.parametrize(
    ("compared", "says_so"),
    [("2 along axis 0 of 2x24x48x48", True), ("2 along axis 0 of 8x128x64", False), ("", False)],
)
def test_chunks_of_volumes_are_said_to_be_measured_at_one_size(
    compared: str, says_so: bool, summary: MemOptSummary
) -> None:
    """A plan for 48³ took more at 32³ than no plan, and nothing warned of it."""
    plan = Plan(segments=(SegmentPlan(path="blocks", chunks=2, compared=compared),))
    found = shown(TextReport(), result(replace(summary, plan=plan)))
    assert ("the chunks were measured at this size of the inputs only" in found) is says_so


def test_the_frontier_says_which_plans_keep_the_bits(summary: MemOptSummary) -> None:
    first, cut = a_point(measured(300, 1.0), summary), Plan(segments=SEGMENTS)
    assert cut.has_chunks
    plans = Plan(), Plan(packed=True), cut, Plan(compile=CompilePlan(backend="inductor"))
    summary.frontier, summary.verification = [replace(first, plan=plan) for plan in plans], None
    rows = shown(TextReport(), result(summary)).partition("pick")[2].splitlines()[1:5]
    assert [row.split()[8] for row in rows] == ["same", "same", "rounded", "rounded"]


def test_a_plan_that_only_adds_work_is_not_said_to_be_much_faster(summary: MemOptSummary) -> None:
    fast, slow = a_point(measured(300, 0.39), summary), a_point(measured(300, 0.9), summary)
    plain, cut = Plan(packed=True), Plan(segments=SEGMENTS)
    summary.frontier = [replace(fast, plan=plain), replace(fast, plan=cut), replace(slow, plan=plain)]
    summary.verification = None
    rows = shown(TextReport(), result(summary)).partition("pick")[2].splitlines()[1:4]
    assert [row.split()[7] for row in rows] == ["~0.39×", "0.39×", "0.90×"]


@pytest.mark.parametrize(
    ("plan", "predicted", "ratio"),
    [
        (Plan(packed=True), None, "~0.48×"),
        (Plan(segments=SEGMENTS), 1.21, "~0.48×"),
        (Plan(segments=SEGMENTS), 0.6, "0.48×"),
    ],
)
def test_a_rough_ratio_is_marked_in_the_headline_and_in_its_row(
    plan: Plan, predicted: float | None, ratio: str, summary: MemOptSummary
) -> None:
    planned = replace(row(3, measured(294.6, 0.48), plan), predicted_slowdown=predicted)
    summary.levels, summary.plan = [row(0, measured(617.9, 1.0)), planned], plan
    first, *lines = shown(TextReport(), result(summary)).splitlines()
    assert f"({ratio})" in first
    assert ratio in next(line for line in lines if line.startswith("3 *")).split()


def test_own_checkpoints_that_take_less_but_exceed_the_limit_stand_below_the_headline(summary: MemOptSummary) -> None:
    summary.own_checkpoints, summary.options = measured(149.3, 2.11), {"max_slowdown": 1.4}
    line = shown(TextReport(), result(summary)).splitlines()[1]
    assert line.startswith("the model's own checkpoints need less memory, 149.3 MiB, but their step takes 1.94 times ")
    assert line.endswith("; --max-slowdown 2 looks for a plan below them")
    for own, limit, budget in ((295.0, 1.4, None), (149.3, 2.0, None), (149.3, None, None), (149.3, 1.4, 9)):
        summary.own_checkpoints, summary.options = measured(own, 2.11), {"max_slowdown": limit}
        summary.budget_bytes = budget
        assert "own checkpoints need less memory" not in shown(TextReport(), result(summary))


def test_levels_that_give_one_plan_share_a_row(summary: MemOptSummary) -> None:
    predicted = replace(row(1, measured(300, 1.0), Plan(segments=SEGMENTS)), outcome=None, predicted_slowdown=1.25)
    summary.levels = [summary.levels[0], predicted, replace(predicted, level=2), summary.levels[-1]]
    lines = shown(TextReport(), result(summary)).splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["0", "1–3"]
    summary.levels[-1] = replace(summary.levels[-1], plan=Plan(segments=SEGMENTS[:1]))
    lines = shown(TextReport(), result(summary)).splitlines()
    assert lines[4].split() == "1–2 1 recomputed, 2 in chunks (2 packed) 310.0 MiB 1.25×".split()


def test_where_nothing_is_applied_three_lines_say_so(summary: MemOptSummary) -> None:
    unchanged = replace(summary, plan=Plan(), applied_level=0, notes=[])
    text = shown(TextReport(), replace(result(unchanged, files=("m.summary.json", "m.plan.yaml")), use=""))
    assert text.splitlines() == [
        "no plan that was found lowers the peak of 617.9 MiB, however slow: the model stays as it is",
        "wrote m.summary.json, .plan.yaml in 1 min 5 s; next time, --force replaces them",
        "batch: 16 was run and fits 8.0 GiB of the 10.0 GiB here; limited by the budget",
    ]


def test_what_no_plan_makes_smaller_is_named_where_it_is_most_of_the_peak(summary: MemOptSummary) -> None:
    unchanged = replace(summary, plan=Plan(), levels=[row(0, measured(120, 1.0))])
    assert (
        " of 120.0 MiB, 83% of which are parameters, gradients, buffers and inputs, however slow: "
        in unchanged.unchanged
    )


def test_a_smaller_plan_that_only_the_limit_rules_out_is_named_with_the_flag_that_allows_it(
    summary: MemOptSummary,
) -> None:
    summary.plan, summary.smaller = Plan(), Outlook(peak_bytes=int(61.5 * MIB), slowdown=1.6)
    summary.options = {"max_slowdown": 1.33}
    slower = "A plan of 61.5 MiB at about 1.6 times the step is predicted: --max-slowdown 1.7 allows it."
    first = shown(TextReport(), result(summary)).splitlines()[0]
    within = "no plan that was found lowers the peak of 617.9 MiB in at most 1.33 times the step"
    assert first == f"{within}: the model stays as it is. {slower}"
    reason = SavesTooLittle(saved=0.004, slowdown=1.14)
    summary.dropped = [DroppedPlan(plan=DROPPED_PLAN, peak_bytes=147, original_bytes=200, why=reason)]
    assert summary.unchanged.endswith(f"{reason.remedy} {slower}".replace("--max-slowdown 1.7", "`--max-slowdown 1.7`"))
    summary.options = {"max_slowdown": 1.7}  # it is within the limit, yet was not chosen: nothing is promised of it
    assert "61.5 MiB" not in summary.unchanged


@pytest.mark.parametrize(
    ("files", "wrote"),
    [
        (
            ("net.memopt.summary.json", "net.memopt.batch.yaml"),
            "wrote net.memopt.summary.json, .batch.yaml in 1 min 5 s; next time, --force replaces them",
        ),
        (("net.memopt.frontier.json",), "wrote net.memopt.frontier.json in 1 min 5 s"),
        ((), "nothing written in 1 min 5 s"),
    ],
)
def test_another_search_is_told_how_to_replace_the_files_that_were_written(
    files: tuple[str, ...], wrote: str, summary: MemOptSummary
) -> None:
    """A remedy such as ``--max-slowdown 1.7`` ended in "exists" when it was typed."""
    assert wrote in shown(TextReport(), result(summary, files=files)).splitlines()


@pytest.mark.parametrize(
    ("is_limited", "is_measured", "said"),
    [
        (
            True,
            False,
            "batch: up to about 37 should fit, 7.9 GiB of 8.0 GiB (predicted); --recommend-batch measures it",
        ),
        (
            True,
            True,
            "batch: 37 fits (measured), 7.9 GiB of 8.0 GiB; no larger one is predicted to",
        ),
        (
            False,
            False,
            "batch: about 37 should fit into 8.0 GiB (predicted); --recommend-batch measures it",
        ),
    ],
)
def test_a_batch_of_dry_runs_is_called_predicted_unless_it_was_measured(
    is_limited: bool, is_measured: bool, said: str, summary: MemOptSummary
) -> None:
    summary.advice = BatchEstimate(
        batch=37,
        predicted_peak_bytes=int(7.9 * 2**30),
        budget_bytes=8 * 2**30,
        is_limited_by_memory=is_limited,
        because="" if is_limited else "its step would take about 2 min 0 s",
        is_measured=is_measured,
    )
    assert said in shown(TextReport(), result(summary)).splitlines()
    summary.advice = replace(summary.advice, without_optimizer=True)
    (line,) = re.findall("^batch: .*", shown(TextReport(), result(summary)), re.MULTILINE)
    assert "without an optimizer's state" in line, "without a word of it, 37 seems to train"
    assert len(line.split()) < 25
    details = shown(DETAILED, result(summary))
    assert "which --optimizer adamw counts" in details
    why = "about 37 is predicted to fit into 8.0 GiB, but its step would take about 2 min 0 s"
    assert (why in details) is not is_limited
    assert from_data(MemOptSummary, json.loads(json.dumps(to_data(summary)))) == summary


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (None, "no plan that was found lowers the peak of 617.9 MiB, however slow: the model stays as it is"),
        (2**30, "the model stays as it is: its peak of 617.9 MiB is within the budget of 1.0 GiB"),
    ],
)
def test_a_model_that_stays_as_it_is_has_no_plan_applied(budget: int | None, said: str, summary: MemOptSummary) -> None:
    rows = [row(0, measured(617.9, 1.09)), row(3, measured(617.9, 1.09))]
    unchanged = replace(summary, levels=rows, budget_bytes=budget, plan=Plan())
    lines = shown(DETAILED, result(unchanged)).splitlines()
    assert lines[0] == said
    assert "* no plan is applied; 4 was requested" in lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(summary: MemOptSummary) -> str:
    stream = Terminal()
    TextReport().show(result(summary), stream)
    return stream.getvalue()


def test_colour_on_a_terminal_only_if_wanted(summary: MemOptSummary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in on_a_terminal(summary)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", on_a_terminal(summary))


def test_original_that_does_not_run(summary: MemOptSummary) -> None:
    summary.levels[0] = row(0, OutOfMemory(detail=""))
    text = shown(DETAILED, result(summary))
    assert text.startswith("does not run → 294.6 MiB, step 1.49 s, same bits in 83 tensors\n")
    assert "level 0: out of memory\n" in text


def test_nothing_measured(summary: MemOptSummary) -> None:
    summary.levels = [row(3, OutOfMemory(detail=""))]
    assert shown(DETAILED, result(summary)).startswith("level 3 has no measurement, ")


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"measured": replace(MEASURED, equal=70, worst_difference=2.4e-7)}, " (in one step, about 2e-07 of the norm)"),
        (
            {"measured": MEASURED, "worst_difference": 3e-16},
            " (in one step, about 3e-16 of the largest value in float64)",
        ),
        ({"rounding": 0.02, "worst_difference": 3e-16}, " (in one step, about 2e-02 of the norm)"),
        ({}, ""),
    ],
)
def test_the_headline_says_how_far_apart_rounding_leaves_tensors(
    changes: dict[str, Any], size: str, summary: MemOptSummary
) -> None:
    summary.verification = replace(VERIFIED, exact=False, precision="fp64", tolerance=1e-9, **changes)
    assert headline(summary).endswith(f"(1.37×), same within rounding{size} in 83 tensors")


@pytest.mark.parametrize(
    ("verification", "line"),
    [
        (None, "not verified"),
        (
            replace(VERIFIED, exact=False, precision="fp64", tolerance=1e-9, batch=1, full_size=False),
            "verified: 83 tensors equal within 1e-09 in float64, at batch 1, not the requested size",
        ),
        (
            replace(VERIFIED, batch=1, full_size=False, dims={"T": 5}, measured=MEASURED),
            "verified: 83 tensors equal bit for bit, at batch 1, T=5",
        ),
        (
            replace(VERIFIED, measured=MEASURED),
            "measured steps: 82 tensors equal bit for bit, at batch 4, T=16",
        ),
        (
            replace(
                VERIFIED,
                exact=False,
                measured=replace(MEASURED, equal=70, tolerance=3.5e-4, worst_name="fc.weight", worst_difference=2.4e-7),
            ),
            "measured steps: 82 tensors equal within rounding (70 bit for bit, the others to 2e-07 of their norm, "
            "3e-04 allowed), at batch 4, T=16",
        ),
        (
            replace(
                VERIFIED,
                exact=False,
                measured=replace(
                    MEASURED, equal=70, tolerance=2e-2, worst_name="w", worst_difference=9e-3, by_rounding=True
                ),
            ),
            "measured steps: 82 tensors equal within rounding (70 bit for bit, the others to 9e-03 of their norm, "
            "2e-02 allowed, at most ten times the change from rounding the parameters), at batch 4, T=16",
        ),
        (
            replace(VERIFIED, inexact=("blocks.0", "blocks.1")),
            "results differ, as --allow-inexact permits: batch norms use each chunk's own statistics in blocks.0, "
            "blocks.1 (verified with fixed statistics)",
        ),
        (
            replace(VERIFIED, passed=False, worst_name="fc.weight", worst_difference=0.5),
            "verification failed: fc.weight differs by 0.5, allowed bit for bit, at batch 4",
        ),
        (
            replace(VERIFIED, passed=False, worst_name="fc.weight", worst_difference=0.5, differs_in="in eval mode"),
            "verification failed: fc.weight differs by 0.5 in eval mode, allowed bit for bit, at batch 4",
        ),
        (
            replace(VERIFIED, further=FURTHER),
            "verified: 83 tensors equal bit for bit, at batch 4; then in the next step, in eval mode",
        ),
        (
            replace(VERIFIED, batch=8, further=FURTHER),
            "verified: 83 tensors equal bit for bit, at batch 8; then in the next step, in eval mode, of batch 4",
        ),
        (
            replace(VERIFIED, further=(*FURTHER, LATE)),
            "verified: 83 tensors equal bit for bit, at batch 4; then in the next step, in eval mode; left out: with "
            "frozen parameters (it takes 3.00 s)",
        ),
        (
            replace(VERIFIED, further=(LATE,)),
            "verified: 83 tensors equal bit for bit, at batch 4; left out: with frozen parameters (it takes 3.00 s)",
        ),
        (
            replace(VERIFIED, further=(LATE, FurtherCheck(name="at batch 2", batch=2, compared=83))),
            "verified: 83 tensors equal bit for bit, at batch 4; then at batch 2; left out: with frozen parameters (it "
            "takes 3.00 s)",
        ),
    ],
)
def test_verification_in_words(verification: Verification | None, line: str, summary: MemOptSummary) -> None:
    summary.verification = verification
    assert line in shown(DETAILED, result(summary)).splitlines()


def test_an_untested_batch_is_called_an_estimate(summary: MemOptSummary) -> None:
    summary.advice = replace(ADVICE, estimated_batch=52, limited_by="the time limit of a run")
    text = shown(DETAILED, result(summary))
    assert "limited by the time limit of a run\n" in text
    assert "extrapolated from 3 runs, a batch of about 52 would fit\n" in text
    assert "52" not in shown(TextReport(), result(summary))


def test_step_times_that_vary_are_called_rough(summary: MemOptSummary) -> None:
    steady, busy = (replace(measured(9, 1.0), step_times_s=times) for times in ((1.0, 1.1, 1.2), (1.0, 1.5, 2.0)))
    summary.levels = [row(0, steady), row(3, steady)]
    assert "rough" not in shown(DETAILED, result(summary))
    summary.levels = [row(0, busy), row(3, steady)]
    assert "the steps of one plan differ by 33% among themselves" in shown(DETAILED, result(summary))


@pytest.mark.parametrize(("waited", "lines"), [(0.19, []), (0.3, [f"{BUSY} 30% of their time, so times are rough"])])
def test_a_busy_machine_is_mentioned(
    waited: float, lines: list[str], summary: MemOptSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memopt_cli.report.lines.BUSY", 0.2)
    summary.levels = [row(0, measured(9, 1.0)), row(3, replace(measured(9, 1.0), waited=waited))]
    assert [line for line in shown(TextReport(), result(summary)).splitlines() if "busy" in line] == lines


@pytest.mark.parametrize(("beside", "said"), [((1.0, 1.1), False), ((0.3, 0.6), True)])
def test_ratios_are_to_what_the_original_took_beside_the_plan(
    beside: tuple[float, ...], said: bool, summary: MemOptSummary
) -> None:
    summary.frontier = [
        ParetoPoint(
            plan=Plan(),
            predicted_allocated_peak_bytes=9,
            predicted_slowdown=1.0,
            outcome=measured(9, 1.0),
            original_step_s=seconds,
        )
        for seconds in beside
    ]
    line = "each ratio is to the original's step as it was timed alternating with the plan: 300.0 ms to 600.0 ms"
    assert (line in shown(DETAILED, result(summary)).splitlines()) == said


def test_a_frontier_has_its_notes(summary: MemOptSummary) -> None:
    point = ParetoPoint(
        plan=Plan(), predicted_allocated_peak_bytes=9, predicted_slowdown=1.0, outcome=measured(617.9, 1.09)
    )
    summary.frontier, summary.verification = [point], None
    text = shown(DETAILED, result(summary, files=()))
    assert "nothing is applied; choose a plan with --budget, or with --pick N, which searches again" in text
    assert "inputs are a [guess] from conv1" in text


def test_a_frontier_has_compiled_steps_and_why_others_are_not_shown(summary: MemOptSummary) -> None:
    how = CompilePlan(backend="inductor")
    wrong = Plan(compile=replace(how, activation_memory_budget=0.5))
    summary.compiled = [
        CompiledRow(plan=Plan(compile=how), outcome=measured(400, 0.9)),
        CompiledRow(plan=wrong, outcome=measured(300, 0.9), dropped="wrong gradients"),
    ]
    summary.frontier = [ParetoPoint(plan=row.plan, outcome=row.outcome) for row in summary.compiled[:1]]
    summary.verification = None
    lines = shown(TextReport(), result(summary, files=())).splitlines()
    assert "not shown: compiled by inductor, memory budget 0.5: wrong gradients" in lines
    assert [line.split()[:3] for line in lines if "compiled by inductor" in line][:1] == [["1", "400.0", "MiB"]]


def test_rows_of_the_frontier_with_the_same_words_say_where_their_plans_differ() -> None:
    def chunked(path: str, chunks: int) -> SegmentPlan:
        return SegmentPlan(path=path, chunks=chunks)

    first, second = chunked("conv_fc.0-3", 20), chunked("conv_fc.0-3", 4)
    assert distinct_labels([Plan(), Plan(segments=(first,)), Plan(segments=(second,)), Plan(packed=True)]) == [
        "no plan",
        "1 in chunks: conv_fc.0-3 in 20 chunks",
        "1 in chunks: conv_fc.0-3 in 4 chunks",
        "saved tensors packed",
    ]
    other, last = chunked("head", 2), chunked("tail", 2)
    pairs = [(first, other), (first, last), (second, other)]
    assert distinct_labels([Plan(segments=pair) for pair in pairs]) == [
        "2 in chunks: conv_fc.0-3 in 20 chunks, head in 2 chunks",
        "2 in chunks: conv_fc.0-3 in 20 chunks, tail in 2 chunks",
        "2 in chunks: conv_fc.0-3 in 4 chunks, head in 2 chunks",
    ]


def test_the_frontier_shows_where_plans_with_the_same_words_differ(summary: MemOptSummary) -> None:
    plans = [Plan(segments=(SegmentPlan(path="a.0", chunks=chunks),)) for chunks in (2, 8)]
    summary.frontier = [ParetoPoint(plan=plan, outcome=measured(90, 1.0)) for plan in plans]
    summary.verification = None
    out = shown(TextReport(), result(summary))
    assert "1 in chunks: a.0 in 2 chunks" in out
    assert "1 in chunks: a.0 in 8 chunks" in out


def test_a_frontier_numbers_every_plan_from_the_original_on(summary: MemOptSummary) -> None:
    outcomes = (measured(600, 1.0), OutOfMemory(detail=""), measured(500, 1.2), measured(400, 1.8))
    summary.levels = [row(0, outcomes[0])]
    summary.frontier = [
        ParetoPoint(
            plan=Plan(packed=number > 0),
            predicted_allocated_peak_bytes=MIB,
            predicted_slowdown=1.0,
            outcome=outcome,
            original_step_s=1.0,
        )
        for number, outcome in enumerate(outcomes)
    ]
    summary.verification = None
    lines = shown(TextReport(), result(summary, files=())).splitlines()
    cells = [line.split() for line in lines if "1.0 MiB" in line]
    assert [line[:2] for line in cells] == [["1", "600.0"], ["2", "–"], ["3", "500.0"], ["4", "400.0"]]
    assert [word for line in cells for word in line if word.endswith("×")] == ["1.00×", "1.20×", "1.80×"]
    assert ["no plan" in line for line in lines if "1.0 MiB" in line] == [True, False, False, False]


def test_dry_run(summary: MemOptSummary) -> None:
    assert "\nnothing written in 1 min 5 s\n" in shown(DETAILED, result(summary, files=()))


def test_json_is_one_document_of_the_records(summary: MemOptSummary) -> None:
    data = json.loads(shown(JsonReport(), result(summary)))
    assert list(data) == ["header", "summary", "files", "use"]
    assert from_data(OptimizeResult, data) == result(summary)


@pytest.mark.parametrize(("report", "expected"), [(TextReport(), "wrote a\nwrote b\n"), (JsonReport(), None)])
def test_files_of_apply(report: Report, expected: str | None) -> None:
    stream = io.StringIO()
    report.show(ApplyResult(files=("a", "b")), stream)
    if expected is None:
        assert json.loads(stream.getvalue()) == {
            "files": ["a", "b"],
            "verification": None,
            "shorter": [],
            "confirmation": None,
        }
    else:
        assert stream.getvalue() == expected


def test_a_run_that_changes_nothing_says_so_first(summary: MemOptSummary) -> None:
    summary.applied_level, summary.plan = 0, Plan()
    assert shown(DETAILED, result(summary)).startswith("no plan that was found lowers the peak of 617.9 MiB")


def test_a_level_that_was_not_measured_shows_what_is_predicted(summary: MemOptSummary) -> None:
    predicted = replace(row(2, measured(300, 1.0)), outcome=None, predicted_slowdown=1.25)
    summary.levels.insert(2, predicted)
    lines = shown(DETAILED, result(summary)).splitlines()
    (line,) = (line for line in lines if line.startswith("2 "))
    assert line.split() == "2 no plan 310.0 MiB 1.25×".split()
    assert "~ predicted by a dry run; memopt optimize --measure-levels measures every level" in lines


@pytest.mark.parametrize(
    ("faster", "smaller", "said"),
    [
        (
            Outlook(peak_bytes=320 * MIB, slowdown=1.2),
            Outlook(peak_bytes=212 * MIB, slowdown=2.3),
            "20 % faster: 320.0 MiB; smaller: 212.0 MiB at 2.30× (predicted; --frontier, --max-slowdown none)",
        ),
        (Outlook(peak_bytes=320 * MIB, slowdown=1.2), None, "20 % faster: 320.0 MiB (predicted; --frontier)"),
        (  # of a plan that the limit allows by its prediction, and that was not applied, nothing is promised
            Outlook(peak_bytes=320 * MIB, slowdown=1.2),
            Outlook(peak_bytes=212 * MIB, slowdown=1.3),
            "20 % faster: 320.0 MiB (predicted; --frontier)",
        ),
    ],
)
def test_the_neighbours_on_the_frontier_are_told(
    faster: Outlook | None, smaller: Outlook | None, said: str, summary: MemOptSummary
) -> None:
    summary.levels[-1] = replace(summary.levels[-1], predicted_slowdown=1.5)
    summary.faster, summary.smaller = faster, smaller
    summary.options = {"max_slowdown": 1.33}
    assert said in shown(DETAILED, result(summary)).splitlines()
    point = ParetoPoint(plan=Plan(), predicted_allocated_peak_bytes=9, predicted_slowdown=1.0, outcome=measured(9, 1.0))
    summary.frontier = [point]  # all of it is shown
    assert said not in shown(DETAILED, result(summary)).splitlines()


DROPPED_PLAN = Plan(segments=SEGMENTS)
REASONS: list[tuple[Reason, str]] = [
    (
        TooSlow(slowdown=1.62, most=1.33),
        "found 147.0 MiB of 200.0 MiB, but its step takes 1.62 times as long, and 1.33 is the limit. The model stays "
        "as it is. --max-slowdown 1.8 allows it.",
    ),
    (
        SavesTooLittle(saved=0.004, slowdown=1.14),
        "found 147.0 MiB of 200.0 MiB, but it was measured to save 0.4% of the peak for a step 1.14 times as long. The "
        "model stays as it is. With a larger batch, activations are a larger share of the peak: try one.",
    ),
    (
        SavesTooLittle(saved=0.0, slowdown=1.14, is_predicted=True),
        "found 147.0 MiB of 200.0 MiB, but it is predicted to save nothing for a step 1.14 times as long. The model "
        "stays as it is. With a larger batch, activations are a larger share of the peak: try one.",
    ),
    (
        NotRun(failure=OutOfMemory(detail="")),
        "found 147.0 MiB of 200.0 MiB, but its step cannot be run: out of memory. The model stays as it is. Try a "
        "lower --level, or name other modules with --target.",
    ),
    (
        Differs(
            verification=replace(VERIFIED, passed=False, worst_name="fc.weight", worst_difference=0.5),
            left_out=(
                LeftOut(segment="features.1", difference="fc.weight differs by 0.5"),
                LeftOut(segment=None, difference="fc.weight differs by 0.25"),
            ),
        ),
        "found 147.0 MiB of 200.0 MiB, but verification failed: fc.weight differs by 0.5, at batch 4. The model stays "
        "as it is. If 'features.1' uses state that memopt cannot see (a file, a C extension), keep the state in an "
        "attribute of a module, or leave the module out with --target. Otherwise please report the difference as a "
        "bug.",
    ),
]


def dropped_for(why: Reason) -> DroppedPlan:
    return DroppedPlan(plan=DROPPED_PLAN, peak_bytes=147 * MIB, original_bytes=200 * MIB, why=why)


@pytest.mark.parametrize(("why", "said"), REASONS)
def test_a_plan_that_was_found_and_is_not_applied_is_the_headline(
    why: Reason, said: str, summary: MemOptSummary
) -> None:
    unchanged = replace(summary, plan=Plan(), applied_level=0, dropped=[dropped_for(why)])
    lines = shown(DETAILED, result(unchanged)).splitlines()
    assert lines[0] == said
    assert not any("is not applied" in line for line in lines)
    assert from_data(MemOptSummary, json.loads(json.dumps(to_data(unchanged)))) == unchanged
    if isinstance(why, Differs):
        assert "'features.1' is not a segment: as a segment, fc.weight differs by 0.5." in lines
        assert "Tensors saved outside segments are not packed: with packing, fc.weight differs by 0.25." in lines


def test_beside_a_plan_that_is_applied_it_is_a_remark(summary: MemOptSummary) -> None:
    dropped = [dropped_for(why) for why, _ in REASONS]
    lines = shown(DETAILED, result(replace(summary, dropped=dropped))).splitlines()
    assert lines[0].startswith("617.9 MiB → 294.6 MiB")
    assert sum(line.startswith("A plan of 147.0 MiB is not applied: ") for line in lines) == len(REASONS)


def test_what_failed_verification_comes_before_what_was_slow(summary: MemOptSummary) -> None:
    slow, *_, differing = [dropped_for(why) for why, _ in REASONS]
    assert replace(summary, plan=Plan(), dropped=[differing, slow]).decisive == differing
    assert replace(summary, plan=Plan(), dropped=[slow]).decisive == slow
    assert replace(summary, dropped=[slow]).decisive is None
    slower = replace(slow, why=TooSlow(slowdown=2.5, most=1.33))
    assert replace(summary, plan=Plan(), dropped=[slow, slower]).decisive == slow


def test_a_smaller_plan_that_was_too_slow_is_named(summary: MemOptSummary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt_cli.report.lines.BUSY", 0.2)
    why = TooSlow(slowdown=8.49, most=1.33, waited=0.86)
    smallest, smaller, larger = (
        DroppedPlan(plan=Plan(segments=SEGMENTS), peak_bytes=mib * MIB, original_bytes=618 * MIB, why=why)
        for mib in (150, 200, 300)
    )
    said = "A plan of 150.0 MiB is not applied: its step takes 8.49 times as long, and 1.33 is the limit."
    found = result(replace(summary, dropped=[larger, smallest, smaller]))
    lines = shown(TextReport(), found).splitlines()
    assert [line for line in lines if "is not applied" in line] == [f"{said} --max-slowdown 8.6 allows it."]
    assert any(line.startswith("the machine was busy: steps waited for a processor 86%") for line in lines)
    assert sum("A plan of 150.0 MiB" in line for line in shown(DETAILED, found).splitlines()) == 1
    hardly_smaller = replace(smaller, peak_bytes=291 * MIB)
    for dropped in (larger, hardly_smaller):
        assert "is not applied" not in shown(TextReport(), result(replace(summary, dropped=[dropped])))


def test_a_summary_in_a_shell_is_one_line(summary: MemOptSummary) -> None:
    assert repr(summary) == "<MemOptSummary: level 3 applied, 3 levels>"
    assert repr(summary.levels[-1]) == "<LevelRow: level 3, 3 segments, 294.6 MiB>"
    chosen = replace(summary, frontier=[a_point(measured(294.6, 1.49), summary)], verification=None)
    assert repr(chosen) == "<MemOptSummary: nothing applied, 3 levels, 1 plan on the frontier>"
    assert repr(chosen.frontier) == "[<ParetoPoint: 3 segments, 294.6 MiB, step 1.49×>]"


def test_an_optimizer_that_cannot_run_in_backward_is_no_plan_that_was_found(summary: MemOptSummary) -> None:
    why = NotRun(failure=StepFailed(message="it looks at all gradients"))
    dropped = DroppedPlan(plan=Plan(in_backward=True), peak_bytes=None, original_bytes=None, why=why)
    lines = shown(DETAILED, result(replace(summary, plan=Plan(), applied_level=0, dropped=[dropped]))).splitlines()
    assert lines[0] == "no plan that was found lowers the peak of 617.9 MiB, however slow: the model stays as it is"
    assert any(
        line.startswith("The optimizer does not run in backward: its step cannot be run: it looks") for line in lines
    )


def test_a_plan_that_was_asked_for_and_fails_is_not_called_applied(summary: MemOptSummary) -> None:
    why, said = REASONS[-1]
    assert isinstance(why, Differs)
    failed = replace(summary, verification=why.verification, dropped=[dropped_for(why)], budget_bytes=150 * MIB)
    lines = shown(DETAILED, result(failed)).splitlines()
    assert lines[0] == said
    assert "* no plan is applied; 4 was requested" in lines


def test_a_plan_on_a_model_in_memory_is_said_to_be_on_it(summary: MemOptSummary) -> None:
    found = replace(result(summary, files=()), in_memory=True, header=a_header(model="Net"))
    *_, searched, _, last = shown(TextReport(), found).splitlines()
    assert searched == "searched in 1 min 5 s"
    assert last == (
        'the plan is on the model; the result\'s .plan.save("Net.plan.yaml") saves it; '
        'memopt_cli.apply_plan(model, "Net.plan.yaml") applies it later'
    )


def test_a_frontier_in_memory_says_how_to_apply_a_pick(summary: MemOptSummary) -> None:
    point = ParetoPoint(plan=Plan(), outcome=measured(617.9, 1.09))
    found = replace(result(replace(summary, frontier=[point], verification=None), files=()), in_memory=True)
    last = shown(TextReport(), found).splitlines()[-1]
    use = "for plan N: memopt_cli.apply_plan(model, result.summary.frontier[N - 1].plan)"
    assert last == f"nothing is applied; {use}"


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([{}] * 8, "8 segments"),
        ([{}], "1 segment"),
        ([{"chunks": 4, "through_loss": True}], "1 through its loss"),
        (
            [{}] * 7 + [{"chunks": 4}] * 4 + [{"chunks": 4, "through_loss": True}],
            "7 recomputed, 4 in chunks, 1 through its loss",
        ),
        (
            [{"chunks": 4, "keep": ("aten::mm",)}, {"keep": ("aten::mm",)}],
            "1 recomputed, 1 in chunks (2 keeping outputs)",
        ),
    ],
)
def test_the_segments_of_a_plan_are_counted_once(segments: list[dict[str, Any]], text: str) -> None:
    assert in_words(Plan(segments=tuple(SegmentPlan(path=str(n), **s) for n, s in enumerate(segments)))) == text

"""From the rows of a search to the fields of the summary: each field, from rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.summary import summarize
from memopt_cli.records import (
    LevelRow,
    MemOptSummary,
    ModuleTrace,
    OutOfMemory,
    Plan,
    SearchOverrides,
    SegmentPlan,
)
from memopt_cli.search.plan.policy import Selection, resolve
from tests.zoo.records import a_module, a_row, measured

MIB = 2**20

A, B, C = SegmentPlan(path="a", compressor="bit"), SegmentPlan(path="b"), SegmentPlan(path="c", compressor="uint8")
B1, B2 = SegmentPlan(path="b.1", compressor="bit"), SegmentPlan(path="b.2")
B2_CHUNKED = replace(B2, chunks=4)
PLANS = {1: (A, B, C), 2: (A, B1, B2, C), 3: (A, B1, B2_CHUNKED, C), 4: (B1, B2_CHUNKED, C)}


def row(level: int, **changes: Any) -> LevelRow:
    plain = a_row(level, measured((9 - level) * MIB), Plan(segments=PLANS.get(level, ())))
    return replace(plain, **changes)


def selected(*modules: ModuleTrace) -> Selection:
    return Selection(policy="all_candidates", candidates=len(modules), selected=modules, explanation="")


def summary(
    *rows: LevelRow,
    applied: int,
    skipped: tuple[str, ...] = (),
    selection: Selection | None = None,
) -> MemOptSummary:
    plan = next(r.plan for r in rows if r.level == applied)
    resolved = resolve(SearchOverrides(level=rows[-1].level))
    return summarize(
        Findings(
            resolved=resolved,
            asked_compressors=("a",),  # it asks for its compressor itself
            model_format="module",
            device="cpu",
            plan=plan,
            applied_level=applied,
            selection=selection,
            rows=list(rows),
            skipped=list(skipped),
        ),
        spent_s=1.0,
    )


FOUR = ["level1_gc", "level2_spatial_split", "level3_temporal_split", "level4_greedy_unwrap"]


@pytest.mark.parametrize(
    ("segments", "steps"),
    [
        ((A, B), [0]),
        ((A, B, B1), [0, 1]),
        ((A, replace(B, spatial_split=True)), [0, 1]),
        ((A, B1, B2_CHUNKED), [0, 2]),
        ((A, B, B2_CHUNKED, replace(C, keep=("aten::mm",))), [0, 1, 2, 3]),
    ],
)
def test_applied_steps_are_those_whose_means_the_plan_uses(segments: tuple[SegmentPlan, ...], steps: list[int]) -> None:
    found = summary(row(0), row(4, plan=Plan(segments=segments)), applied=4)
    assert found.applied_steps == [FOUR[step] for step in steps]
    assert found.skipped_steps == []
    assert (found.requested_level, found.applied_level) == (4, 4)


def test_what_the_plan_does_is_counted() -> None:
    plan = Plan(segments=(A, B, B1, B2_CHUNKED, replace(C, keep=("aten::mm",))))
    found = summary(row(0), row(4, plan=plan), applied=4)
    assert found.gc_wrap_count == 3  # a, b and c
    assert found.spatial_split_count == 1  # b has others in it
    assert found.temporal_split_count == 1  # one of them in chunks
    assert found.unwrap_count == 1  # c keeps some of its outputs
    assert found.gc_container_count == found.total_gc_count == 5
    assert found.tcgc_container_count == found.total_sliding_count == 1
    assert found.peak_memory_mb == 5.0
    assert found.skipped_errors == 0


def test_a_module_whose_parts_are_segments_in_its_place_was_split() -> None:
    plan = Plan(segments=(A, B1, B2))
    found = summary(
        row(0), row(2, plan=plan), applied=2, selection=selected(a_module("a"), a_module("b"), a_module("c"))
    )
    assert found.spatial_split_count == 1  # b; c was left plain
    assert found.applied_steps == FOUR[:2]


@pytest.mark.parametrize("segments", [(), (B,), (SegmentPlan(path="a"),)])
def test_a_compressor_that_does_not_fit_is_noted_with_a_segment_and_without(segments: tuple[SegmentPlan, ...]) -> None:
    found = summary(row(0), row(1, plan=Plan(segments=segments)), applied=1, selection=selected(a_module("a")))
    assert found.notes == [
        "x_compressor is not used by 'a': it does not make all their inputs in this step smaller without loss, so a "
        "segment stores them as they are."
    ]
    searched = replace(selected(), named=(a_module("a"),))  # a search chose no segment of it
    again = summary(row(0), row(1, plan=Plan(segments=segments)), applied=1, selection=searched)
    assert again.notes == found.notes
    fitting = selected(a_module("a", compressor="bit"))
    again = summary(row(0), row(1, plan=Plan(segments=(B,))), applied=1, selection=fitting)
    assert again.notes == []


def test_compressors_are_counted_by_who_chose_them() -> None:
    found = summary(*map(row, range(4)), applied=3)
    counts = found.manual_compressor_count, found.bit_compressor_count, found.null_compressor_count
    assert counts == (1, 1, 1)  # a's own, b.1's, b.2's
    assert found.compressed_layers == 3  # and c's, integers


def test_a_level_without_a_better_plan_is_no_applied_step() -> None:
    again = row(2, plan=row(1).plan, repeats=1)
    found = summary(row(0), row(1), again, applied=2, skipped=("level2:no_spatial_candidates",))
    assert found.applied_steps == ["level1_gc"]
    assert found.skipped_steps == ["level2:no_spatial_candidates"]
    assert found.spatial_split_count == 0


def test_a_level_whose_plan_measured_worse_is_skipped() -> None:
    found = summary(row(0), row(1), row(2), row(3, outcome=measured(99 * MIB)), applied=2)
    assert found.applied_steps == FOUR[:1]
    assert found.skipped_steps == ["level3:no_improving_candidate"]
    assert found.temporal_split_count == 0
    assert found.peak_memory_mb == 7.0


def test_levels_that_were_not_measured_are_no_errors() -> None:
    found = summary(row(0), row(1, outcome=None), row(2), applied=2)
    assert found.skipped_errors == 0
    assert found.skipped_steps == []


def test_levels_that_could_not_be_run_are_counted() -> None:
    found = summary(row(0, outcome=OutOfMemory(detail="")), row(1), row(2), applied=2)
    assert found.skipped_errors == 1
    assert found.peak_memory_mb == 7.0
    assert "Measured" not in found.recommendation  # there is nothing to compare with


def test_a_recommendation_quotes_what_was_measured() -> None:
    found = summary(*map(row, range(3)), applied=2)
    assert found.recommendation == "Measured: 9.0 MiB → 7.0 MiB, step 1.00 s → 1.00 s."


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(0)], "Nothing was searched"),
        (
            [row(0), row(1, plan=Plan())],
            "no plan that was found lowers the peak of 9.0 MiB, however slow: the model stays as it is",
        ),
        ([row(0), row(1)], "Measured: "),
        (
            [row(0), row(1, outcome=replace(measured(8 * MIB), step_times_s=(2.0,)))],
            "Other plans, from the fastest to the smallest",
        ),
    ],
)
def test_recommendations_without_a_choice_of_the_user(rows: list[LevelRow], said: str) -> None:
    text = summary(*rows, applied=rows[-1].level).recommendation
    assert text.startswith(said)

"""A profile for people: every number from the record, at its place."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest

from memopt_cli.records import (
    PACKING,
    Instant,
    ModuleUse,
    OpTrace,
    OutOfMemory,
    PhasePeak,
    Plan,
    SavedTensor,
    StepProfile,
    StepTrace,
    TimeUse,
    from_data,
)
from memopt_cli.report.json import JsonReport
from memopt_cli.report.profiling import plot
from memopt_cli.report.text import TextReport
from tests.zoo.records import a_breakdown, a_header, measured

MIB = 2**20


def use(path: str, held: int, **fields: float) -> ModuleUse:
    seconds = fields.get("seconds", 0.0)
    return ModuleUse(
        path=path, class_name="Block", calls=1, held_bytes=held * MIB, saved_bytes=held * MIB, seconds=seconds
    )


def a_profile() -> StepProfile:
    ops = tuple(
        OpTrace(name="aten::mm", module="head", phase=phase) for phase in ("forward", "forward", "backward", "backward")
    )
    breakdown = a_breakdown(parameters_bytes=10 * MIB, activations_bytes=60 * MIB, temporaries_bytes=10 * MIB)
    return StepProfile(
        header=a_header(),
        plan=Plan(),
        measurement=measured(
            101 * MIB,
            1.5,
            1.5,
            1.5,
            tensor_peak_bytes=80 * MIB,
            breakdown=breakdown,
            phases=(
                PhasePeak(phase="forward", tensor_peak_bytes=70 * MIB, allocated_peak_bytes=72 * MIB),
                PhasePeak(phase="backward", tensor_peak_bytes=80 * MIB, allocated_peak_bytes=101 * MIB),
            ),
        ),
        fake=True,
        tensor_peak_bytes=80 * MIB,
        peak=Instant(allocated_bytes=100 * MIB, op=2, name="aten::mm", phase="backward", module="head"),
        breakdown=breakdown,
        workspace_bytes=20 * MIB,
        modules=(use("", 70), use("body", 50), use("body.deep", 40), use("head", 20)),
        saved=(
            SavedTensor(
                nbytes=32 * MIB,
                made_by="aten::relu",
                module="body",
                op="aten::convolution",
                savers=3,
                compressor="bit",
                packed_bytes=MIB,
            ),
            SavedTensor(
                nbytes=4 * MIB, made_by="", module="", op="aten::mul", savers=1, compressor="null", packed_bytes=4 * MIB
            ),
        ),
        phases=(
            PhasePeak(phase="forward", tensor_peak_bytes=70 * MIB, allocated_peak_bytes=71 * MIB),
            PhasePeak(phase="backward", tensor_peak_bytes=80 * MIB, allocated_peak_bytes=100 * MIB),
        ),
        live_bytes=(10 * MIB, 40 * MIB, 70 * MIB, 80 * MIB, 20 * MIB),
        flops=2_000_000_000,
        times=(
            TimeUse(name="forward", seconds=0.25),
            TimeUse(name="backward", seconds=0.5),
            *(TimeUse(name="recomputation", segment=f"body.{i}", seconds=0.01 * i) for i in range(10)),
            TimeUse(name="outside operators", seconds=0.3),
        ),
        notes=("Something to know.",),
        trace=StepTrace(modules=(), tensor_peak_bytes=80 * MIB, resident_bytes=10 * MIB, batch=4, ops=ops),
    )


def shown(found: StepProfile) -> list[str]:
    stream = io.StringIO()
    TextReport().show(found, stream)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_headline() -> None:
    lines = shown(a_profile())
    assert lines[0] == "allocated peak 101.0 MiB, tensor peak 80.0 MiB, step 1.50 s"
    assert lines[1] == "the peak is reached in backward of head, while aten::mm runs: operator 3 of 4"


def test_a_module_whose_name_is_a_number_is_shown_with_its_class() -> None:
    found = a_profile()
    peak, saved = replace(found.peak, module="body.2"), replace(found.saved[0], module="body.2")
    found = replace(found, modules=(*found.modules, use("body.2", 1)), peak=peak, saved=(saved,))
    lines = shown(found)
    assert " of body.2 (Block), while " in lines[1]
    assert any("  of body.2 (Block) " in line for line in lines)  # of the time of recomputation
    assert any("from relu, by convolution and 2 more  body.2 (Block)" in line for line in lines)


@pytest.mark.parametrize("missing", [None, OutOfMemory(detail="")])
def test_an_estimate_says_so(missing: OutOfMemory | None) -> None:
    lines = shown(replace(a_profile(), measurement=missing))
    assert lines[0] == "allocated peak 100.0 MiB, tensor peak 80.0 MiB: estimated, the step was not run"


def test_the_categories_that_hold_something() -> None:
    lines = shown(a_profile())
    start = lines.index("at the peak")
    assert [line.split() for line in lines[start + 1 : start + 5]] == [
        ["parameters", "10.0", "MiB", "10", "%"],
        ["activations", "60.0", "MiB", "60", "%"],
        ["temporaries", "10.0", "MiB", "10", "%"],
        ["kernel", "workspace", "20.0", "MiB", "20", "%"],
    ]


def test_the_module_tree() -> None:
    lines = shown(a_profile())
    start = next(i for i, line in enumerate(lines) if line.startswith("(model)"))
    assert [line.split()[0] for line in lines[start : start + 4]] == ["(model)", "body", "deep", "head"]
    assert [len(line) - len(line.lstrip()) for line in lines[start : start + 4]] == [0, 2, 4, 2]
    assert "70.0 MiB" in lines[start]
    assert not any(line.endswith("time") for line in lines)
    timed = replace(a_profile(), modules=(use("", 70, seconds=1.5),))
    assert any(line.startswith("(model)") and line.endswith("1.50 s") for line in shown(timed))


def test_a_module_below_a_container_that_has_no_row_is_shown_with_its_path() -> None:
    uses = use("", 70), use("downs.0", 50), use("downs.0.conv", 40), use("ups.0", 10), use("ups.1.up.0", 5)
    lines = shown(replace(a_profile(), modules=uses))
    start = next(i for i, line in enumerate(lines) if line.startswith("(model)"))
    rows = [re.split(r"  +Block|(?<=\S)  +", line)[0] for line in lines[start : start + 5]]
    assert rows == ["(model)", "  downs.0", "    conv", "  ups.0", "  ups.1.up.0"]


def test_a_large_tree_is_opened_where_most_is_held() -> None:
    blocks = [use(f"blocks.{i}", 10 + (i == 7)) for i in range(12)]
    inner = [use(f"blocks.{i}.{j}", 1) for i in range(12) for j in range(6)]
    found = replace(a_profile(), modules=(use("", 200), use("blocks", 121), *blocks, *inner))
    lines = shown(found)
    start = next(i for i, line in enumerate(lines) if line.startswith("(model)"))
    names = [line.split()[0] for line in lines[start : lines.index("", start)]]
    assert names == ["(model)", "blocks", *map(str, range(8)), *map(str, range(6)), *map(str, range(8, 12))]


def test_the_time_of_a_step_and_the_segments_that_take_most_of_it() -> None:
    lines = shown(a_profile())
    at = next(i for i, line in enumerate(lines) if line.startswith("time of the step"))
    assert lines[at + 1].split() == ["forward", "250.0", "ms", "17", "%"]
    assert lines[at + 3].split() == ["recomputation", "450.0", "ms", "30", "%"]
    assert lines[at + 4].split() == ["of", "body.9", "90.0", "ms", "6", "%"]
    assert lines[at + 12].split() == ["2", "more", "10.0", "ms", "1", "%"]
    assert lines[at + 13].split() == ["outside", "operators", "300.0", "ms", "20", "%"]
    assert not any(line.startswith("time of the step") for line in shown(replace(a_profile(), times=())))


def test_saved_tensors_and_what_they_pack_into() -> None:
    lines = shown(a_profile())
    first = next(line for line in lines if "32.0 MiB" in line)
    assert "from relu, by convolution and 2 more" in first
    assert "body" in first
    assert first.endswith("packs into 1.0 MiB (bit)")
    assert any("an input, by mul" in line for line in lines)
    assert "2 tensors, 36.0 MiB, are kept for backward; a plan that packs could spare 31.0 MiB of it" in lines
    saved = a_profile().saved
    packed = replace(a_profile(), saved=(replace(saved[0], op=PACKING, nbytes=MIB), *saved[1:]))
    assert "2 tensors, 5.0 MiB, are kept for backward, 1.0 MiB of it packed" in shown(packed)
    assert "2.0 GFLOP in products, convolutions and attention" in lines
    assert lines[-1] == "Something to know."


def test_the_plot_rises_and_falls_with_the_step() -> None:
    lines = plot(a_profile(), 72).splitlines()
    assert len(lines) == 7
    assert lines[0].strip().startswith("80.0 MiB │")
    columns = [line.partition("│")[2].ljust(5) for line in lines[:-1]]
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[i]) for row in columns) for i in range(5)]
    assert heights == [6, 24, 42, 48, 12]  # eighths of six lines, of 10, 40, 70, 80, 20 MiB
    long = replace(a_profile(), live_bytes=tuple(range(1000)))
    assert max(len(line) for line in plot(long, 72).splitlines()) == len(f"{'':>10} │") + 72


def test_the_axis_is_time_where_that_is_known() -> None:
    found = a_profile()
    ops = tuple(replace(op, seconds=s) for op, s in zip(found.trace.ops, (6.0, 0.0, 2.0, 2.0), strict=True))
    *rows, axis = plot(replace(found, trace=replace(found.trace, ops=ops)), 72).splitlines()
    columns = [line.partition("│")[2].ljust(5) for line in rows]
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[i]) for row in columns) for i in range(5)]
    assert heights == [24, 24, 24, 48, 12]  # of 40 MiB for six seconds, 80 for two, 20 for two
    assert axis.partition("└")[2] == "forba"


def test_every_phase_has_its_peak_as_predicted_and_as_measured() -> None:
    lines = [line.split() for line in shown(a_profile())]
    assert ["forward", "71.0", "MiB", "72.0", "MiB"] in lines
    assert ["backward", "100.0", "MiB", "101.0", "MiB"] in lines


def test_the_phases_are_to_scale() -> None:
    *_, axis = plot(replace(a_profile(), live_bytes=tuple(range(1000))), 72).splitlines()
    ruler = axis.partition("└")[2]
    assert ruler.index("backward") == 36
    assert len(ruler) == 72


def test_programs_get_everything() -> None:
    stream = io.StringIO()
    JsonReport().show(a_profile(), stream)
    data = json.loads(stream.getvalue())
    assert from_data(StepProfile, data) == a_profile()

"""A comparison in every form: what people read, and what GitHub and CI systems parse."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import markdown_it
import pytest

from memopt_cli.errors import MemoptError, WriteError
from memopt_cli.inputs.spec_text import parse_limit
from memopt_cli.records import (
    METRICS,
    SKIPS_LAYERS,
    Change,
    Comparison,
    Difference,
    ModuleChange,
    PeakPlace,
    PlanChange,
    Rename,
    SavedTensor,
    Verdict,
)
from memopt_cli.report.comparison import growth, headline, module_rows, reasons
from memopt_cli.report.github import GithubReport
from memopt_cli.report.json import JsonReport
from memopt_cli.report.junit import JunitReport
from memopt_cli.report.markdown import MarkdownReport
from memopt_cli.report.text import TextReport
from memopt_cli.text.documents import printable
from tests.zoo.records import a_header

MIB = 2**20


def a_comparison(*limits: str, peak: float = 14.0, **fields: Any) -> Comparison:
    sizes = {"peak": (12, peak), "allocated": (20, 22), "step": (1 / MIB, 2 / MIB), "activations": (4, 6)}
    values = {metric: sizes.get(metric, (0, 0)) for metric in METRICS}
    changes = {m: Change(metric=m, before=before * MIB, after=after * MIB) for m, (before, after) in values.items()}
    header = a_header(model="net_a.pt", sha256="ab")
    verdicts = []
    for text in limits:
        limit = parse_limit(text)
        change = changes[limit.metric]
        verdicts.append(Verdict(limit=limit, change=change, exceeded=change.after > change.before))
    made: dict[str, Any] = {
        "before": header,
        "after": header,
        "changes": tuple(changes.values()),
        "verdicts": tuple(verdicts),
        "modules": (
            ModuleChange(
                path="body.wide",
                was="old.wide",
                class_name="Linear",
                before_bytes=MIB,
                after_bytes=3 * MIB,
                growth_bytes={"parameters": MIB, "activations": MIB},
            ),
            ModuleChange(
                path="", was="", class_name="Net", before_bytes=MIB, after_bytes=0, growth_bytes={"buffers": -MIB}
            ),
        ),
        "new_saved": (
            SavedTensor(
                nbytes=2 * MIB,
                made_by="aten::relu",
                module="body.wide",
                op="aten::mm",
                savers=1,
                compressor="null",
                packed_bytes=MIB,
            ),
        ),
        "renames": (Rename(before="old", after="body", modules=1),),
        "plan": PlanChange(dropped=("a", "b", "c", "d"), changed=("",), packing="dropped", sending="added"),
        "peak_before": PeakPlace(op="aten::mm", module="old.wide", phase="backward"),
        "peak_after": PeakPlace(op="", module="", phase="forward"),
        "peak_moved": True,
        "unlike": (Difference(name="seed", before="0", after="1"),),
        "surroundings": (Difference(name="torch", before="2.6", after="2.13"),),
    }
    return Comparison(**(made | fields))


def shown(report: Any, found: Comparison) -> str:
    stream = io.StringIO()
    report.show(found, stream)
    return stream.getvalue()


def test_the_verdict() -> None:
    assert list(headline(a_comparison("peak:5%", "activations:0", "buffers:0"))) == [
        "regression: tensor peak 12.0 MiB → 14.0 MiB (+2.0 MiB, +16.7 %), past the limit peak:5%",
        "regression: activations 4.0 MiB → 6.0 MiB (+2.0 MiB, +50.0 %), past the limit activations:0",
    ]
    assert list(headline(a_comparison("buffers:0", peak=12))) == [
        "no regression: tensor peak 12.0 MiB, as before; allocated peak +2.0 MiB, +10.0 %"
    ]
    assert list(headline(a_comparison(peak=9))) == [
        "tensor peak 12.0 MiB → 9.0 MiB (−3.0 MiB, −25.0 %); allocated peak +2.0 MiB, +10.0 %"
    ]


def test_a_peak_that_grew_within_the_limits_is_not_called_as_before() -> None:
    grown = "tensor peak 12.0 MiB → 14.0 MiB (+2.0 MiB, +16.7 %); allocated peak +2.0 MiB, +10.0 %"
    assert list(headline(a_comparison("buffers:0"))) == [f"within buffers:0 (the tensor peak has no limit): {grown}"]
    within = a_comparison("peak:20%")
    verdicts = tuple(replace(verdict, exceeded=False) for verdict in within.verdicts)
    assert list(headline(replace(within, verdicts=verdicts))) == [f"within peak:20%: {grown}"]


def test_the_reasons() -> None:
    assert list(reasons(a_comparison("peak:0"))) == [
        "not like for like: seed 0 → 1",
        "plan: 4 segments dropped (a, b, c, …)",
        "plan: 1 segment changed ((root))",
        "plan: packing of what is saved dropped",
        "plan: sending away of what is saved added",
        "parameters changed: body.wide (Linear) +1.0 MiB",
        "buffers changed: (root) (Net) −1.0 MiB",
        "the tensor peak moved from backward of old.wide (mm) to what exists before the step",
        "new among the largest tensors kept for backward: 2.0 MiB, made by relu, kept by mm of body.wide",
        "renamed: old → body (1 module), which takes no memory",
        "measured elsewhere than before: torch 2.6 → 2.13",
        "record a baseline of the old model with these versions to see how much of it is theirs",
        "the model file is the same as before",
    ]
    assert list(growth(a_comparison())) == [
        "by category: activations +2.0 MiB",
        "by module: body.wide (Linear) +2.0 MiB",
    ]


def test_a_gain_is_to_be_kept() -> None:
    assert "record the baseline again to keep what was gained" in reasons(a_comparison("peak:0", peak=9))
    assert "record the baseline again to keep what was gained" not in reasons(a_comparison(peak=9))
    note = f"Of 'blocks.*', {SKIPS_LAYERS}."
    said = [*reasons(a_comparison("peak:0", peak=9, notes=(note,)))]
    assert note in said
    assert "record the baseline again to keep what was gained" not in said


def test_text() -> None:
    lines = shown(TextReport(), a_comparison("peak:0")).splitlines()
    assert lines[0].startswith("regression: ")
    rows = [line.split() for line in lines]
    assert ["tensor", "peak", "12.0", "MiB", "14.0", "MiB", "+2.0", "MiB,", "+16.7", "%"] in rows
    assert ["step", "1.00", "s", "2.00", "s", "+1.00", "s,", "+100.0", "%"] in rows
    assert "body.wide (was old.wide)" in shown(TextReport(), a_comparison())
    assert not any(row[:1] == ["gradients"] for row in rows)  # nothing before and now


def test_one_line_names_what_else_changed_beside_a_regression() -> None:
    (line,) = shown(TextReport(verdict_only=True), a_comparison("peak:0")).splitlines()
    assert line.endswith("past the limit peak:0; measured elsewhere than before: torch 2.6 → 2.13")
    assert "elsewhere" not in shown(TextReport(verdict_only=True), a_comparison("buffers:0"))


def test_a_module_whose_bytes_are_of_another_kind_now_has_no_row() -> None:
    moved = {"activations": -MIB, "gradients": MIB}
    module = ModuleChange(
        path="norm", was="", class_name="BatchNorm2d", before_bytes=MIB, after_bytes=MIB, growth_bytes=moved
    )
    assert module_rows(a_comparison(modules=(module,))) == []


def test_json_is_the_record() -> None:
    data = json.loads(shown(JsonReport(), a_comparison("peak:0")))
    assert data["regression"] is True
    assert data["renames"] == [{"before": "old", "after": "body", "modules": 1}]


def test_markdown_shows_names_as_they_are() -> None:
    text = shown(MarkdownReport(), a_comparison("peak:0"))
    assert text.startswith(
        "### memopt: `net_a.pt`\n\n**regression: tensor peak 12.0 MiB → 14.0 MiB (+2.0 MiB, +16.7 %)"
    )
    assert "- the tensor peak moved from backward of old.wide (mm) to what exists before the step\n" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in rows} == {3, 4}
    assert "| --- | ---: | ---: | ---: |" in rows


MARKUP = [
    *("@user", "#123", "owner/repo#1", "$x$", "&amp;", "https://evil.example", "www.evil.example", "me@evil.example"),
    *("a|b<i>`*", "``` `", "|", "\\", "\\|", "_a_", "~~a~~", "[a](b)", "![a](b)", ":tada:", "$`x`$", "!1", "GH-1"),
    *("a\x1b[31m\u202e", "(`a`)", "`", "Www.evil.example"),
]


@pytest.mark.parametrize("name", MARKUP)
def test_markdown_makes_nothing_of_a_name(name: str) -> None:
    module = ModuleChange(path=name, was="", class_name=name, before_bytes=1, after_bytes=2, growth_bytes={})
    found = a_comparison("peak:0", renames=(Rename(before=name, after="b", modules=1),), modules=(module,))
    stream = io.StringIO()
    MarkdownReport().refused(MemoptError(f"no {name} here"), "net.pt", stream)
    page = shown(MarkdownReport(), replace(found, after=replace(found.after, model=name))) + stream.getvalue()
    parsed = markdown_it.MarkdownIt("commonmark").enable("table").parse(page)
    inlines = [token.children or [] for token in parsed if token.type == "inline"]
    parts = [part for inline in inlines for part in inline]
    assert {part.type for part in parts} <= {"text", "code_inline", "strong_open", "strong_close"}
    links = r"[@#$&<>\[\]*_~\\|`!/]|www|:\S|\w-\w"
    assert not any(re.search(links, part.content, re.IGNORECASE) for part in parts if part.type == "text")
    texts = ["".join(part.content for part in inline) for inline in inlines]
    seen = printable(name)
    assert texts[0] == f"memopt: {seen}"
    assert texts.count(seen) == 2
    assert f"renamed: {seen} → b (1 module), which takes no memory" in texts
    assert f"no {seen} here" in texts


@pytest.mark.parametrize("report", [TextReport(), MarkdownReport(), GithubReport(None), JunitReport(), JsonReport()])
def test_a_ci_system_obeys_no_name(report: Any) -> None:
    evil = "\n::error::x\r::error::y ##vso[z] ##[w]"
    found = a_comparison("peak:0", renames=(Rename(before=evil, after="b", modules=1),))
    stream = io.StringIO(newline="")
    report.show(replace(found, after=replace(found.after, model=evil)), stream)
    report.refused(MemoptError(evil, hint=evil), evil, stream)
    obeyed = [line for line in re.split("[\r\n]", stream.getvalue()) if line.lstrip().startswith("::")]
    assert len(obeyed) == (2 if isinstance(report, GithubReport) else 0)
    assert not re.search(r"##\w*\[", stream.getvalue())


def test_github_annotations_are_one_line_each() -> None:
    lines = shown(GithubReport(None), a_comparison("peak:5%", "activations:0", "buffers:0")).splitlines()
    assert len(lines) == 1  # with the explanation once
    assert lines[0].startswith(
        "::error title=memopt%3A net_a.pt::regression: tensor peak 12.0 MiB → 14.0 MiB (+2.0 MiB"
    )
    assert "+16.7 %25), past the limit peak:5%25%0A" in lines[0]
    assert "past the limit activations:0%0Aby category: activations +2.0 MiB%0A" in lines[0]
    notice = shown(GithubReport(None), a_comparison("buffers:0"))
    assert re.fullmatch(r"::notice title=[^:,]*::within buffers:0 .*\n", notice)
    assert "%0Ameasured elsewhere than before: torch 2.6 → 2.13" in notice


def write_net(folder: Path) -> None:
    folder.mkdir()
    (folder / "net.py").write_text("import torch\n\n\nclass Net(torch.nn.Module):\n    pass\n")


@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("nets/net.py:Net", "file=nets/net.py,line=4"),
        ("nets.net:Net", "file=nets/net.py,line=4"),
        ("nets/net.py:made_elsewhere", "file=nets/net.py,line=1"),
        ("net_a.pt", "file=memopt-baseline.json,line=1"),
    ],
)
def test_a_regression_is_shown_beside_the_model(
    model: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_net(tmp_path / "nets")
    (tmp_path / "memopt-baseline.json").touch()
    found = a_comparison("peak:0")
    found = replace(found, after=replace(found.after, model=model))
    assert f",{place}::regression" in shown(GithubReport(None, "memopt-baseline.json"), found)


def test_an_error_in_the_models_code_is_shown_beside_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_net(tmp_path / "nets")
    stream = io.StringIO()
    error = MemoptError(f"forward of Net raised ValueError: oops ({tmp_path}/nets/net.py, line 8)")
    GithubReport(None).refused(error, "nets/net.py:build", stream)
    assert stream.getvalue().startswith(
        "::error title=memopt%3A nets/net.py%3Abuild was not checked,file=nets/net.py,line=8::"
    )


def test_a_command_is_one_code_span() -> None:
    stream = io.StringIO()
    error = MemoptError("no", hint="Record it: `memopt baseline net.py:Net -i 'a b' --force`, or leave `x` out.")
    MarkdownReport().refused(error, "net.py:Net", stream)
    assert "Record it: `memopt baseline net.py:Net -i 'a b' --force`, or leave `` `x` `` out." in stream.getvalue()


def test_a_limit_in_per_cent_is_one_code_span() -> None:
    assert "past the limit `peak:5%`**" in shown(MarkdownReport(), a_comparison("peak:5%"))


def test_a_summary_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    stream, page = io.StringIO(), tmp_path / "nowhere" / "page.md"
    with pytest.raises(WriteError, match=f"summary page {page} cannot be written: No such file"):
        GithubReport(str(page)).show(a_comparison("peak:0"), stream)
    assert stream.getvalue().startswith("::error")  # the annotations are out


def test_the_summary_page_is_appended_to(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shown(GithubReport(str(page)), a_comparison("peak:0"))
    GithubReport(str(page)).refused(MemoptError("no baseline", hint="Record one."), "net.pt", io.StringIO())
    refused = "### memopt: net.pt was not checked\n\nno baseline\n\nRecord one.\n"
    assert page.read_text() == shown(MarkdownReport(), a_comparison("peak:0")) + refused


def at(length: str, *limits: str, peak: int) -> Comparison:
    made = a_comparison(*limits, peak=peak)
    return replace(made, at=length, verdicts=tuple(replace(verdict, at=length) for verdict in made.verdicts))


def by_length(longest: int) -> Comparison:
    shorter = (at("S=16", "peak:5%", peak=12), at("S=64", "peak:5%", peak=20))
    return replace(a_comparison("peak:5%", peak=longest), shorter=shorter)


def test_a_regression_of_shorter_inputs_names_their_length() -> None:
    said = "regression: at S=64 tensor peak 12.0 MiB → 20.0 MiB (+8.0 MiB, +66.7 %), past the limit peak:5%"
    found = by_length(12)
    assert list(headline(found)) == [said]
    told = list(reasons(found.shorter[1]))
    assert told[0] == "plan: 4 segments dropped (a, b, c, …)"
    assert not any("model file" in reason or "measured elsewhere" in reason for reason in told)
    text = shown(TextReport(), found)
    assert text.splitlines()[0] == said
    assert "\nS=64\n" in text
    assert "\nS=16\n" not in text
    assert "#### `S=64`" in shown(MarkdownReport(), found)
    annotations = shown(GithubReport(None), found).splitlines()
    assert len(annotations) == 1
    assert annotations[0].startswith("::error title=memopt%3A net_a.pt::regression: at S=64 tensor peak 12.0 MiB")
    suite = junit(found)
    assert [(case.get("name"), len(case)) for case in suite.findall("testcase")] == [
        ("peak:5%", 0),
        ("peak:5% at S=16", 0),
        ("peak:5% at S=64", 1),
    ]
    assert json.loads(shown(JsonReport(), found))["regression"] is True


def test_without_a_regression_every_length_is_told() -> None:
    found = replace(by_length(9), shorter=(at("S=16", "peak:5%", peak=12),))
    assert list(headline(found)) == [
        "no regression: tensor peak 12.0 MiB → 9.0 MiB (−3.0 MiB, −25.0 %); allocated peak +2.0 MiB, +10.0 %",
        "no regression: at S=16 tensor peak 12.0 MiB, as before; allocated peak +2.0 MiB, +10.0 %",
    ]


NUMBER, TEXT, TIME = r"\d+(\.\d+)?", r"(?s).+", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
SCHEMA: dict[str, tuple[dict[str, str], str]] = {
    "testsuites": ({}, "(testsuite )*"),
    "testsuite": (
        {
            **dict.fromkeys(("name", "package", "hostname"), TEXT),
            "timestamp": TIME,
            "time": NUMBER,
            **dict.fromkeys(("id", "tests", "failures", "errors"), r"\d+"),
        },
        "properties (testcase )*system-out system-err ",
    ),
    "properties": ({}, "(property )*"),
    "testcase": ({"name": TEXT, "classname": TEXT, "time": NUMBER}, "((error|failure|skipped) )?"),
    "failure": ({"type": TEXT, "message": TEXT}, ""),
    "error": ({"type": TEXT, "message": TEXT}, ""),
    "system-out": ({}, ""),
    "system-err": ({}, ""),
}
"""What both common schemas accept, of Ant's reports (which requires all of these attributes, and this order) and of
Jenkins: element -> its attributes and their patterns, and its children."""


def check_schema(element: ET.Element) -> None:
    attributes, children = SCHEMA[element.tag]
    assert element.attrib.keys() == attributes.keys()
    for name, pattern in attributes.items():
        assert re.fullmatch(pattern, element.attrib[name]), name
    assert re.fullmatch(children, "".join(f"{child.tag} " for child in element))
    for child in element:
        check_schema(child)


ODD = "\x00\x1b[31m\x9b31m\u202e\ud800\r"


@pytest.mark.parametrize("report", [JunitReport(), GithubReport(None), MarkdownReport()])
def test_nothing_that_a_terminal_obeys_is_in_a_report(report: Any) -> None:
    """A file may have any name."""
    found = a_comparison("peak:0", renames=(Rename(before=ODD, after="b", modules=1),))
    found = replace(found, after=replace(found.after, model=f"{ODD}\n::error::b"))
    said = shown(report, found)
    assert all(line.isprintable() for line in said.split("\n"))
    assert not any(re.match(r"\s*::error::b", line) for line in said.split("\n"))


def junit(found: Comparison) -> ET.Element:
    root = ET.fromstring(shown(JunitReport(), found).encode())
    check_schema(root)
    suite = root.find("testsuite")
    assert suite is not None
    return suite


def test_junit_has_a_case_for_each_limit() -> None:
    suite = junit(a_comparison("peak:5%", "buffers:0"))
    times = [case.get("time") for case in suite.iter("testcase")]
    assert times == [suite.get("time"), "0"]
    assert float(times[0]) > 0
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    failed, passed = suite.findall("testcase")
    assert (failed.get("name"), passed.get("name")) == ("peak:5%", "buffers:0")
    assert failed.get("classname") == "memopt.net_a.pt"
    assert len(passed) == 0
    (failure,) = failed
    assert (failure.get("message") or "").startswith("regression: tensor peak")
    assert "plan: 4 segments dropped" in (failure.text or "")
    assert suite.findtext("system-out") == ""  # the failure says it


@pytest.mark.parametrize("name", ["a<b>&\"'", "::error::x", "##vso[x] ##[x]", ODD, "ünï\U0001f600"])
def test_junit_holds_any_name(name: str) -> None:
    found = a_comparison("buffers:0", renames=(Rename(before=name, after="b", modules=1),))
    suite = junit(replace(found, after=replace(found.after, model=name)))
    clean = printable(name)
    assert f"renamed: {clean} → b" in (suite.findtext("system-out") or "")
    assert suite[1].get("classname") == f"memopt.{clean}"


def test_junit_without_a_comparison_is_an_error() -> None:
    stream = io.StringIO()
    JunitReport().refused(MemoptError("there is no baseline"), "net.pt", stream)
    root = ET.fromstring(stream.getvalue().encode())
    check_schema(root)
    assert root.find("testsuite/testcase/error") is not None
    assert root[0].get("errors") == "1"

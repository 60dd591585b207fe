"""What a subprocess answers is not believed."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.measure import confinement, replies, wire
from memopt_cli.measure.jobs import (
    ORIGINAL,
    DescribeJob,
    MeasureJob,
    ProbeJob,
    RecordJob,
    SaveJob,
    TraceAnswer,
    TraceJob,
)
from memopt_cli.measure.runner import Session
from memopt_cli.measure.wire import SIZE
from memopt_cli.records import Crashed, Plan, SegmentPlan, StepFailed, TimedOut
from memopt_cli.text.documents import printable_data

NONSENSE = Crashed(reason="it sent an answer that memopt cannot read", output_tail="")
FAILED: dict[str, Any] = {"kind": "StepFailed", "message": "x", "hint": "", "exit_code": 3, "wanted": []}
PROBE = {"batch": 1, "allocated_peak_bytes": 1, "step_s": 1.0}
Doing = Callable[..., Session]


def sending(pieces: Iterable[bytes]) -> Callable[[int, int, int], None]:
    """What a subprocess does that sends these, and ends."""

    def send(jobs: int, replies: int, output: int) -> None:
        for piece in pieces:
            os.write(replies, piece)

    return send


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'{"kind": ["x"]}',
        b"{}",
        b"null",
        b"[" * 200_000,
        b"[" * 900 + b"]" * 900,
        b"\xff\xfe",
        b"\0",
        b"hello",
        b'{"kind": "answer", "answer": ' + b"9" * 6000 + b"}",
        b'{"kind": "answer", "answer": null}',
        json.dumps({"kind": "answer", "answer": {**PROBE, "batch": 2**63}}).encode(),
        json.dumps({"kind": "answer", "answer": {**PROBE, "batch": "1"}}).encode(),
        json.dumps({"kind": "answer", "answer": {**PROBE, "step_s": 0.0}}).encode(),
        json.dumps({"kind": "answer", "answer": {**PROBE, "step_s": float("nan")}}).encode(),
        json.dumps({"kind": "answer", "answer": {**PROBE, "more": 1}}).encode(),
        json.dumps({**FAILED, "message": 5}).encode(),
        json.dumps({**FAILED, "exit_code": 0}).encode(),
        json.dumps({**FAILED, "exit_code": 1000}).encode(),
    ],
    ids=range(19),
)
def test_nonsense_is_a_crash(line: bytes, doing: Doing) -> None:
    with doing(sending([line + b"\n"])) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == NONSENSE
        assert session.ended


@pytest.mark.parametrize("line", ['"\x7f"', '"é"'])
def test_what_is_no_printable_ascii_is_not_read(line: str) -> None:
    with pytest.raises(ValueError, match=r"memory|ascii"):
        wire.reply_in(line.encode() + b"\n", 1 << 20)


_MANY = 5000
_LINES = {
    "lists": "[],",
    "lists of one": "[1],",
    "objects": "{},",
    "objects of one": '{"a":1},',
    "objects of keys of their own": '{"%d":1.5,"a%d":1.5,"b%d":2.5,"c%d":3.5,"d%d":4.5,"e%d":5.5},',
    "numbers": "1%d.5,",
    "texts": '"%d",',
    "escapes": r'"\u001b%d",',
    "wide texts": r'"\ud83d\ude00%d",',
    "one text": None,
    "one wide text": None,
    "one of escapes": None,
    "one object": None,
}


def _line(form: str) -> str:
    match form:
        case "one text":
            return json.dumps("x" * 100 * _MANY)
        case "one wide text":
            return json.dumps("x" * 100 * _MANY + "\U0001f600")
        case "one of escapes":
            return json.dumps("\x1b\n\u202e" * 10 * _MANY)
        case "one object":
            return json.dumps({str(i): float(i) for i in range(_MANY)})
    piece = _LINES[form] or ""
    return f"[{''.join(piece.replace('%d', str(i)) for i in range(_MANY))}0]"


@pytest.mark.slow
@pytest.mark.parametrize("form", _LINES)
def test_memory_is_counted_before_it_is_taken(form: str) -> None:
    line = _line(form).encode() + b"\n"
    max_bytes = wire.memory_of(line.decode().rstrip("\n"))
    with pytest.raises(ValueError, match="memory"):
        wire.reply_in(line, max_bytes - 1)
    tracemalloc.start()
    found = wire.reply_in(line, max_bytes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == printable_data(json.loads(line))
    assert peak_bytes <= max_bytes


def test_an_answer_is_as_long_as_its_kind_is(doing: Doing) -> None:
    """That of a probe is one line, and no list of millions."""
    assert ProbeJob.max_bytes < DescribeJob.max_bytes < TraceJob.max_bytes
    line = json.dumps({"kind": "answer", "answer": {**PROBE, "more": [0] * 400_000}}).encode()
    assert len(line) < ProbeJob.max_bytes < wire.memory_of(line.decode())
    with doing(sending([line + b"\n"])) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == NONSENSE


def test_a_failure_is_believed(doing: Doing) -> None:
    with doing(sending([json.dumps(FAILED).encode() + b"\n"])) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == StepFailed(message="x")


def test_a_line_without_an_end(doing: Doing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeJob, "max_bytes", 1 << 20)
    with doing(sending(repeat(b"x" * 4096))) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == NONSENSE


def test_one_that_never_pauses_runs_out_of_time(doing: Doing) -> None:
    with doing(sending(repeat(b"x")), timeout_s=0.1) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == TimedOut(limit_s=0.1)


def test_one_that_does_not_listen_runs_out_of_time(doing: Doing) -> None:
    """To more than a pipe holds."""
    plan = Plan(segments=tuple(SegmentPlan(path=f"a.{i}") for i in range(10_000)))
    with doing(lambda *ends: signal.pause(), timeout_s=0.1) as session:
        assert session.ask(MeasureJob(plan=plan)) == TimedOut(limit_s=0.1)


@pytest.mark.parametrize(
    "pieces",
    [
        [SIZE.pack(1), b"x", SIZE.pack(0), b'{"kind": "answer", "answer": {"size_bytes": 2}}\n'],
        [SIZE.pack(0), b"[]\n"],
    ],
    ids=["of another size", "and no answer"],
)
def test_a_file(pieces: Any, doing: Doing) -> None:
    with open(os.devnull, "wb") as file, doing(sending(pieces)) as session:
        assert session.save(SaveJob(plan=ORIGINAL), file) == NONSENSE


@pytest.mark.parametrize(
    "pieces",
    [[SIZE.pack(1 << 63)], chain.from_iterable(repeat([SIZE.pack(4096), b"x" * 4096]))],
    ids=["larger than any", "without an end"],
)
def test_a_file_larger_than_the_model_can_be(
    pieces: Any, doing: Doing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement, "_MARGIN_BYTES", 1000)
    model = tmp_path / "model.pt"
    model.write_bytes(bytes(5000))
    with open(tmp_path / "made", "wb") as file, doing(sending(pieces), location=str(model)) as session:
        found = session.save(SaveJob(plan=ORIGINAL), file)
        assert isinstance(found, StepFailed)
        assert "it would take more than 20.5 KiB" in found.message
        assert file.tell() < 21_000
        assert session.ended


def test_a_file_that_comes_in_drops_runs_out_of_time(doing: Doing) -> None:
    """Each of them in time."""
    with open(os.devnull, "wb") as file, doing(sending(repeat(SIZE.pack(1) + b"x")), timeout_s=0.1) as session:
        assert session.save(SaveJob(plan=ORIGINAL), file) == TimedOut(limit_s=0.1)


_TRACE: dict[str, Any] = {
    "modules": [],
    "tensor_peak_bytes": 8,
    "resident_bytes": 8,
    "batch": 1,
    "ops": [{"name": "aten::relu", "module": "", "phase": "forward", "reads": [0], "makes": [1], "seconds": 1.0}],
    "storages": [
        {"nbytes": 8, "kind": "inputs", "module": "", "born": -1, "died": None, "freed": None},
        {"nbytes": 8, "kind": "activations", "module": "", "born": 0, "died": 1, "freed": 1, "saved_by": [0]},
    ],
    "calls": [
        {"path": "", "start": 0, "end": 1, "backward_start": 1, "backward_end": 1, "inputs": [0], "outputs": [1]},
    ],
}


def _recorded(*changes: tuple[str, str, Any]) -> Any:
    trace = json.loads(json.dumps(_TRACE))
    for part, field, value in changes:
        trace[part][-1][field] = value
    return trace


def _traced(*changes: tuple[str, str, Any]) -> bytes:
    return _answer({"trace": _recorded(*changes), "fake": True, "dry_run_bytes": 8})


def _answer(answer: Any) -> bytes:
    return json.dumps({"kind": "answer", "answer": answer}).encode()


def test_a_trace_is_read() -> None:
    found = replies.read(_traced(), TraceJob(fake=True))
    assert isinstance(found, TraceAnswer)
    assert found.trace.ops[0].name == "aten::relu"
    assert replies.read(_answer(_recorded()), RecordJob(plan=ORIGINAL)) == found.trace


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("ops", "reads", [2]),
        ("ops", "makes", [-1]),
        ("ops", "seconds", -1.0),
        ("ops", "seconds", float("nan")),
        ("ops", "workspace_bytes", -1),
        ("storages", "nbytes", -1),
        ("storages", "kind", "others"),
        ("storages", "born", 1),
        ("storages", "died", -1),
        ("storages", "freed", 3),
        ("storages", "saved_by", [1]),
        ("calls", "end", 2),
        ("calls", "backward_start", 2),
        ("calls", "inputs", [5]),
    ],
)
def test_a_trace_that_names_what_there_is_not_makes_no_sense(part: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  of any kind: all are nonsense
        replies.read(_traced((part, field, value)), TraceJob(fake=True))
    with pytest.raises(ValueError):  # noqa: PT011
        replies.read(_answer(_recorded((part, field, value))), RecordJob(plan=ORIGINAL))


@pytest.mark.parametrize(
    ("field", "value"), [("step_s", 1e300), ("allocated_peak_bytes", -1), ("batch", 0), ("replicas", -1)]
)
def test_amounts_are_such_as_there_can_be(field: str, value: Any) -> None:
    line = json.dumps({"kind": "answer", "answer": {**PROBE, field: value}}).encode()
    with pytest.raises(ValueError):  # noqa: PT011
        replies.read(line, ProbeJob(plan=ORIGINAL, batch=1))

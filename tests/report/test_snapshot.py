"""The memory snapshot: what PyTorch's own tools make of it, and what is in it."""

from __future__ import annotations

import pickle
import pickletools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from memopt_cli.records import OpTrace, StepTrace, StorageTrace
from memopt_cli.report.snapshot import snapshot, snapshot_bytes
from tests.zoo.records import a_module

READ_BY_MEMORY_VIZ = {
    *("PROTO", "FRAME", "MEMOIZE", "MARK", "STOP", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "LIST", "DICT"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("NEWTRUE", "NEWFALSE", "NONE", "SHORT_BINUNICODE", "BINUNICODE"),
}
"""The opcodes of its own reader of pickles, in torch/utils/viz/MemoryViz.js."""


def storage(nbytes: int, born: int, died: int | None, kind: str = "activations") -> StorageTrace:
    return StorageTrace(nbytes=nbytes, kind=kind, module="body.conv", born=born, died=died, freed=died)


def trace_of(storages: tuple[StorageTrace, ...], workspaces: tuple[int, ...]) -> StepTrace:
    ops = tuple(
        OpTrace(name=f"aten::op{i}", module="body.conv", phase="forward", workspace_bytes=size)
        for i, size in enumerate(workspaces)
    )
    modules = (a_module("", "Net"), a_module("body", "Sequential"), a_module("body.conv", "Conv2d"))
    return StepTrace(modules=modules, tensor_peak_bytes=0, resident_bytes=0, batch=1, ops=ops, storages=storages)


A_TRACE = trace_of(
    (
        storage(4096, -1, None, "parameters"),
        storage(0, 0, None),
        storage(1000, 0, 2),
        storage(3 << 30, 1, 3),
        storage(500, 2, None, "gradients"),
    ),
    (0, 700, 0, 0),
)


def events(found: dict[str, Any]) -> list[dict[str, Any]]:
    (trace,) = found["device_traces"]
    return [event for event in trace if event["action"] != "snapshot"]


def test_the_order_of_events() -> None:
    order = [(event["action"], event["size"], event["category"]) for event in events(snapshot(A_TRACE))]
    freed = ("free_requested", "free_completed")
    assert order == [
        ("alloc", 4096, "parameters"),
        ("alloc", 1000, "activations"),
        ("alloc", 3 << 30, "activations"),
        ("alloc", 700, "kernel workspace"),
        *((action, 700, "kernel workspace") for action in freed),
        *((action, 1000, "activations") for action in freed),
        ("alloc", 500, "gradients"),
        *((action, 3 << 30, "activations") for action in freed),
    ]


def test_a_frame_names_the_operator_and_each_module_around_it() -> None:
    _, activation, *_ = events(snapshot(A_TRACE))
    shown = [f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in activation["frames"]]
    assert shown == [
        *("body.conv:0:aten::op0", "body.conv:0:Conv2d", "body:0:Sequential", "(model):0:Net", "step:0:forward")
    ]


def test_time_is_measured_or_counted() -> None:
    assert [e["time_us"] for e in events(snapshot(A_TRACE))][:3] == [0, 1, 2]
    timed = replace(A_TRACE, ops=tuple(replace(op, seconds=0.25) for op in A_TRACE.ops))
    assert [e["time_us"] for e in events(snapshot(timed))][:3] == [0, 250_000, 500_000]


def test_what_is_left_is_in_the_segment() -> None:
    (segment,) = snapshot(A_TRACE)["segments"]
    left = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert sorted(left) == [500, 4096]
    assert segment["allocated_size"] == 4596
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


LIVES = st.tuples(st.integers(1, 5000), st.integers(-1, 8), st.integers(1, 6))


@settings(max_examples=60)
@given(lives=st.lists(LIVES, max_size=40), workspaces=st.lists(st.integers(0, 900), min_size=9, max_size=9))
def test_no_two_things_share_an_address(lives: list[tuple[int, int, int]], workspaces: list[int]) -> None:
    storages = tuple(storage(size, born, born + ops if born + ops < 9 else None) for size, born, ops in lives)
    found = snapshot(trace_of(storages, tuple(workspaces)))
    live: dict[int, int] = {}
    for event in events(found):
        start, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(end <= other or start >= other + size for other, size in live.items())
            live[start] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(start) == event["size"]
    (segment,) = found["segments"]
    left = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert left == live
    _memory_viz.segsum(found)  # adds everything up and raises if it does not


def test_the_peak_is_that_of_the_record() -> None:
    live = peak = 0
    for event in events(snapshot(A_TRACE)):
        sign = {"alloc": 1, "free_requested": 0, "free_completed": -1}[event["action"]]
        live += sign * event["size"]
        peak = max(peak, live)
    assert peak == 4096 + 1000 + (3 << 30) + 700


def test_pytorch_reads_it() -> None:
    data = snapshot_bytes(A_TRACE)
    found = pickle.loads(data)
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= READ_BY_MEMORY_VIZ
    assert "3.0GiB" in _memory_viz.trace(found)
    assert "total_allocated: 4.5KiB" in _memory_viz.segsum(found)
    assert "Conv2d" in _memory_viz.memory(found, format_flamegraph=str)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(found)
    assert "Allocator State History" in _memory_viz.segment_plot(found)


@pytest.mark.skipif(not hasattr(_memory_viz, "filter_alloc_free_pairs"), reason="this PyTorch leaves nothing out")
def test_pytorch_leaves_out_what_is_freed() -> None:
    filtered = _memory_viz.filter_alloc_free_pairs(snapshot(A_TRACE))
    assert {event["size"] for event in events(filtered)} == {4096, 500}


def test_a_viewer_of_categories_finds_the_one_it_expects() -> None:
    (trace,) = snapshot(A_TRACE)["device_traces"]
    assert "unknown" in {event["category"] for event in trace}


@pytest.mark.parametrize("ops", [(), (0, 0)])
def test_a_step_that_holds_nothing(ops: tuple[int, ...]) -> None:
    found = snapshot(trace_of((), ops))
    assert events(found) == []
    assert _memory_viz.segsum(found)

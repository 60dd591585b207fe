"""Snapshots of CUDA's allocator are read as data: who held what, and nothing runs."""

from __future__ import annotations

import itertools
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.errors import FileFormatError, MemoptError, UnsafeFileError, UsageError
from memopt_cli.loading import memory_snapshot
from memopt_cli.loading.memory_snapshot import read_snapshot
from memopt_cli.records import Holder


def frame(name: str, line: int) -> dict[str, Any]:
    return {"filename": name, "line": line, "name": "forward"}


TORCH = "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py"


_ADDRESSES = itertools.count(0x7F0000000000, 512)


def block(size: int, state: str, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "address": next(_ADDRESSES), "state": state, "frames": [*frames]}


BLOCKS: list[dict[str, Any]] = [
    block(400, "active_allocated", frame(TORCH, 125), frame("/me/a.py", 7)),
    block(100, "inactive"),
    block(300, "active_pending_free", frame("??", 0), frame("/me/a.py", 7)),
    block(200, "active_allocated"),
]
SNAPSHOT = {
    "segments": [{"device": 0, "address": 0, "total_size": 1024, "blocks": BLOCKS}],
    "device_traces": [
        [
            {"action": "alloc", "addr": 0, "size": 400, "stream": 0, "frames": []},
            {"action": "oom", "size": 64, "stream": 0, "device_free": 32, "frames": []},
        ]
    ],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
}


def written(folder: Path, data: object, protocol: int = 4) -> str:
    path = folder / "snapshot.pickle"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data, protocol))
    return str(path)


@pytest.mark.parametrize("protocol", range(6))
def test_who_held_what_by_line(tmp_path: Path, protocol: int) -> None:
    found = read_snapshot(written(tmp_path, SNAPSHOT, protocol))
    assert (found.allocated_bytes, found.reserved_bytes) == (900, 1024)
    assert (found.asked_bytes, found.free_bytes) == (64, 32)
    assert found.lines == (Holder(name="/me/a.py:7", nbytes=700), Holder(name="", nbytes=200))


def test_stacks_of_older_versions_are_in_a_history(tmp_path: Path) -> None:
    block = {"size": 8, "state": "active_allocated", "history": [{"addr": 0, "frames": [frame("/me/b.py", 3)]}]}
    data = {"segments": [{"total_size": 8, "blocks": [block]}]}
    assert read_snapshot(written(tmp_path, data)).lines == (Holder(name="/me/b.py:3", nbytes=8),)


class Runs:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"segments": [], "x": Runs()}, id="a call"),
        pytest.param({"segments": [], "x": Path("/")}, id="an object"),
        pytest.param(b"\x80\x04cbuiltins\nprint\n.", id="a name"),
        pytest.param(b"\x80\x04\x8c\x02os\x8c\x06system\x93.", id="a name from the stack"),
        pytest.param(b"\x80\x02Vx\nQ.", id="a persistent object"),
        pytest.param(b"\x80\x02}K\x01" + b"2\x86" * 60 + b"Ns.", id="a key that is pairs of pairs"),
        pytest.param(b"\x80\x02}(X\x01\x00\x00\x00aNK\x01q\x000h\x00Nu.", id="a number for a key, from the memo"),
        pytest.param(b"\x80\x02(K\x01Nd.", id="a number for a key, in a dict made at once"),
        pytest.param(b"\x80\x02" + b"]" * 110_000 + b"." + bytes(400_000), id="values that are put nowhere"),
        pytest.param(b"\x80\x02" + b"(" * 110_000 + b"." + bytes(400_000), id="marks of nothing"),
        pytest.param(b"\x80\x02](" + (b"]" * 50_000 + b"e(") * 4 + b"e.", id="more values than bytes hold"),
    ],
)
def test_nothing_else_is_read(tmp_path: Path, data: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsafeFileError, match="is not a snapshot"):
        read_snapshot(written(tmp_path, data))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"\x80\x04",
        b"\x80\x02}r\xff\xff\xff\x7f.",
        3,
        [],
        {"segments": 1},
        {"segments": [{"blocks": [{}]}]},
        {"segments": [[]]},
    ],
)
def test_what_is_no_snapshot_is_said(tmp_path: Path, data: object) -> None:
    with pytest.raises(FileFormatError):
        read_snapshot(written(tmp_path, data))


def doubled() -> list[Any]:
    """Lists in lists that as text would take more than any memory."""
    found: list[Any] = []
    for _ in range(80):
        found = [found, found]
    return found


def pair(depth: int) -> Any:
    """Pairs in pairs: a hash visits 2^depth items."""
    return (0, 0) if depth == 0 else (pair_below := pair(depth - 1), pair_below)


MANY = 3000
ONE = block(1, "active_allocated", frame("/me/a.py", 1))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"segments": [{"total_size": 1, "blocks": [ONE] * MANY}] * MANY}, id="blocks over and over"),
        pytest.param({"segments": [], "device_traces": [[{"action": "x"}] * MANY] * MANY}, id="events over and over"),
        pytest.param({"segments": [{"total_size": 1, "blocks": [{**ONE, "state": doubled()}]}]}, id="a state"),
        pytest.param(
            {"segments": [{"total_size": 1, "blocks": [block(1, "active", {"filename": doubled(), "line": 1})]}]},
            id="a name",
        ),
        pytest.param(
            {"segments": [{"total_size": 1, "device": pair(17), "blocks": [ONE] * 50_000}]}, id="a device to hash"
        ),
        pytest.param({"segments": [{"total_size": 10**30, "blocks": []}]}, id="more bytes than there can be"),
        pytest.param({"segments": [{"total_size": 1, "blocks": [{**ONE, "size": -1}]}]}, id="fewer than none"),
        pytest.param({"segments": [{"total_size": 1, "blocks": [{**ONE, "size": "9" * 9999}]}]}, id="digits"),
    ],
)
def test_what_would_take_all_memory_or_time_is_refused(tmp_path: Path, data: object) -> None:
    with pytest.raises(FileFormatError, match="is not a snapshot"):
        read_snapshot(written(tmp_path, data))


def test_a_file_of_too_many_values_or_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, SNAPSHOT)
    monkeypatch.setattr(memory_snapshot, "_MAX_OPCODES", 20)
    with pytest.raises(FileFormatError, match="more than 20 values"):
        read_snapshot(path)
    monkeypatch.setattr(memory_snapshot, "_MAX_BYTES", 20)
    with pytest.raises(UsageError, match="larger than"):
        read_snapshot(path)


NOW = 1_700_000_000_000_000


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_a_long_history_is_far_from_the_bounds(tmp_path: Path, protocol: int) -> None:
    stacks = [[frame(TORCH, line) for line in range(20)] for _ in range(5)]
    events = [
        {"action": "alloc", "addr": NOW + n * 512, "size": n * 512, "stream": 0, "time_us": NOW + n, "frames": stack}
        for n, stack in zip(range(4000), itertools.cycle(stacks), strict=False)
    ]
    data = pickle.dumps({"segments": [], "device_traces": [events]}, protocol)
    opcodes = sum(1 for _ in pickletools.genops(data))
    assert opcodes < 0.8 * len(data) / memory_snapshot._BYTES_PER_OPCODE
    assert read_snapshot(written(tmp_path, data)).lines == ()


def test_blocks_share_their_stacks(tmp_path: Path) -> None:
    stack = [frame(TORCH, line) for line in range(50)]
    blocks = [{**block(2, "active_allocated"), "frames": stack} for _ in range(500)]
    found = read_snapshot(written(tmp_path, {"segments": [{"total_size": 1000, "blocks": blocks}]}))
    assert found.lines == (Holder(name=f"{TORCH}:0", nbytes=1000),)


def test_of_several_devices_the_one_that_ran_out(tmp_path: Path) -> None:
    segments = [{"device": n, "total_size": 8, "blocks": [block(n + 1, "active_allocated")]} for n in range(3)]
    traces = [[], [{"action": "oom", "size": 5, "device_free": 3}], []]
    found = read_snapshot(written(tmp_path, {"segments": segments, "device_traces": traces}))
    assert (found.allocated_bytes, found.reserved_bytes, found.asked_bytes, found.free_bytes) == (2, 8, 5, 3)


def event(action: str, address: int, size: int, moment: int, *frames: dict[str, Any]) -> dict[str, Any]:
    """As PyTorch 2.13 writes them (torch/csrc/cuda/Module.cpp)."""
    place = "device_free" if action == "oom" else "addr"
    rest = {"stream": 0, "time_us": moment, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    return {"action": action, place: address, "size": size, "frames": [*frames], **rest}


def as_of_a_card(blocks: list[dict[str, Any]], *traces: list[dict[str, Any]], size: int = 2048) -> dict[str, Any]:
    """A snapshot of one segment, as PyTorch 2.13 makes it."""
    segment = {
        "device": 0, "address": 4096, "total_size": size, "allocated_size": 0, "active_size": 0, "requested_size": 0,
        "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "blocks": blocks,
    }  # fmt: skip
    annotation = {"stage": "START", "name": "step", "device": 0, "time_us": 3}
    settings = {"max_split_size": -1, "garbage_collection_threshold": 0.0, "roundup_power2_divisions": {"1": 0}}
    return {
        "segments": [segment],
        "device_traces": [*traces],
        "allocator_settings": settings,
        "external_annotations": [annotation],
    }


LAYER, HEAD = frame("/me/model.py", 12), frame("/me/model.py", 30)
HISTORY = [
    event("segment_alloc", 4096, 2048, 1),
    event("alloc", 4096, 512, 2, LAYER),
    event("alloc", 4608, 512, 3, frame("??", 0), HEAD),
    event("free_requested", 4608, 512, 4),
    event("free_completed", 4608, 512, 5),
    event("alloc", 4608, 1024, 6, HEAD),
    event("oom", 128, 4096, 7, frame(TORCH, 125), HEAD),
]
AFTERWARDS = [
    event("free_requested", 4608, 1024, 8, frame("/me/train.py", 3)),
    event("free_completed", 4608, 1024, 9, frame("/me/train.py", 3)),
    event("free_requested", 4096, 512, 10),
    event("free_completed", 4096, 512, 11),
    event("segment_free", 4096, 2048, 12),
    event("segment_alloc", 4096, 1024, 13),
    event("alloc", 4096, 256, 14, frame("/me/train.py", 9)),
    event("alloc", 4608, 64, 15, frame("/me/train.py", 9)),
    event("free_requested", 4608, 64, 16),
    event("free_completed", 4608, 64, 17),
    event("snapshot", 0, 0, 18),
]
THEN = [
    {**block(512, "active_allocated", LAYER), "address": 4096},
    {**block(1024, "active_allocated", HEAD), "address": 4608},
    {**block(512, "inactive"), "address": 5632},
]
LATER = [
    {**block(256, "active_allocated", frame("/me/train.py", 9)), "address": 4096},
    {**block(768, "inactive"), "address": 4352},
]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(as_of_a_card(THEN, HISTORY), id="where it ran out"),
        pytest.param(as_of_a_card(LATER, HISTORY + AFTERWARDS, size=1024), id="after the error was handled"),
        pytest.param(
            as_of_a_card(LATER, HISTORY + AFTERWARDS, [event("oom", 9, 9, 1)], size=1024), id="another before"
        ),
    ],
)
def test_who_held_what_when_it_ran_out(tmp_path: Path, data: dict[str, Any]) -> None:
    found = read_snapshot(written(tmp_path, data))
    assert found.lines == (Holder(name="/me/model.py:30", nbytes=1024), Holder(name="/me/model.py:12", nbytes=512))
    assert (found.allocated_bytes, found.reserved_bytes, found.asked_bytes, found.free_bytes) == (1536, 2048, 4096, 128)


def test_what_was_made_before_the_history_has_no_line_once_it_is_freed(tmp_path: Path) -> None:
    data = as_of_a_card(LATER, HISTORY[-1:] + AFTERWARDS, size=1024)
    assert read_snapshot(written(tmp_path, data)).lines == (Holder(name="", nbytes=1536),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "alloc", "size": 8},
        {"action": "free_completed", "addr": "4096", "size": 8},
        {"action": "free_completed", "addr": 4096, "size": -8},
        {"action": "segment_alloc", "addr": 4096, "size": 1 << 62},
        "alloc",
        {"action": "free_completed", "addr": 4096, "size": 8, "frames": 7},
    ],
)
def test_events_that_are_none(tmp_path: Path, wrong: Any) -> None:
    last = event("alloc", 4096, 8, 0)
    data = as_of_a_card(
        LATER, [{**last, "frames": [{"line": 3}]}, HISTORY[-1], wrong, event("free_completed", 4096, 8, 20)]
    )
    with pytest.raises(FileFormatError, match="is not a snapshot"):
        read_snapshot(written(tmp_path, data))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MemoptError, match="does not exist"):
        read_snapshot(str(tmp_path / "none"))

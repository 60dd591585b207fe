"""Snapshots of CUDA's allocator are read as data: who held what, and nothing runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.errors import FileFormatError, MemoptError, UnsafeFileError
from memopt_cli.loading.memory_snapshot import read_snapshot
from memopt_cli.records import Holder


def frame(name: str, line: int) -> dict[str, Any]:
    return {"filename": name, "line": line, "name": "forward"}


TORCH = "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py"


def block(size: int, state: str, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "address": 0, "state": state, "frames": [*frames]}


BLOCKS = [
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
        pytest.param(b"\x80\x02}r\xff\xff\xff\x7f.", id="a memo that is huge"),
        pytest.param(b"\x80\x02Vx\nQ.", id="a persistent object"),
    ],
)
def test_nothing_else_is_read(tmp_path: Path, data: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsafeFileError, match="is no snapshot"):
        read_snapshot(written(tmp_path, data))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "data",
    [b"", b"text", b"\x80\x04", 3, [], {"segments": 1}, {"segments": [{"blocks": [{}]}]}, {"segments": [[]]}],
)
def test_what_is_no_snapshot_is_said(tmp_path: Path, data: object) -> None:
    with pytest.raises(FileFormatError):
        read_snapshot(written(tmp_path, data))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MemoptError, match="does not exist"):
        read_snapshot(str(tmp_path / "none"))

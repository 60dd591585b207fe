"""Reading files: what has no end is not read, and what would take far more memory than its bytes is not parsed."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from memopt_cli.errors import BaselineError, UsageError
from memopt_cli.files.memopt_files import read_measured
from memopt_cli.text import documents
from memopt_cli.text.documents import kept_below, printable, quoted_flag, quoted_path, read_bytes, read_json

SPECIAL = [
    "/proc/kmsg",
    "/proc/self/maps",
    "/proc/uptime",
    "/dev/zero",
    "/dev/null",
    "/dev/tty",
]


def test_what_no_memory_holds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 200 GB was out of memory, with the advice to give smaller inputs."""
    sparse, whole = tmp_path / "sparse.pt", tmp_path / "whole.pt"
    with open(sparse, "wb") as file:
        file.truncate(1 << 20)
    whole.write_bytes(b"x" * (1 << 20))
    assert len(read_bytes(sparse)) == len(read_bytes(whole)) == 1 << 20
    monkeypatch.setattr(documents.os, "sysconf", {"SC_PHYS_PAGES": 4, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(OSError, match=r"it has 1\.0 MiB, and this machine 16\.0 KiB of memory:"):
        read_bytes(whole)
    with pytest.raises(OSError, match=r"16\.0 KiB of memory; only 0 B of it were ever written"):
        read_bytes(sparse)
    assert len(read_bytes(whole, max_bytes=1 << 20)) == 1 << 20


@pytest.mark.parametrize("path", SPECIAL)
def test_what_the_kernel_makes_up_is_not_read(path: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|No such|ermi"):
        read_bytes(path)


def test_a_file_that_says_it_is_empty_and_is_not_is_special() -> None:
    with pytest.raises(OSError, match="it is not a regular file"):
        read_bytes("/proc/self/maps")


def test_a_file_is_opened_before_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"plain")

    def swapped(*given: object) -> int:
        raise AssertionError("a name was looked at, which may mean another file later")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", swapped)
        data = read_bytes(path)
    assert data == b"plain"


def test_what_is_kept_below_a_folder_is_read_there_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    (tmp_path / "outside").write_text("outside")
    for name, content in (("file", "inside"), ("other", "inside, too")):
        Path(name).write_text(content)
    os.symlink("other", "link")
    assert not any(kept_below(path, inside) for path in ("../outside", str(tmp_path / "outside"), "file\0"))
    assert all(kept_below(path, inside) for path in ("file", "link", "missing"))
    assert (read_bytes("file"), read_bytes("link")) == (b"inside", b"inside, too")
    for name in ("file", "link", "missing"):
        Path(name).unlink(missing_ok=True)
        os.symlink("../outside", name)
        for path in (name, inside / name):
            with pytest.raises(OSError, match=f"it leads out of {inside}"):
                read_bytes(path)


def test_a_folder_an_empty_file_and_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty") == b""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_bytes(pipe) == b""
    keeper = os.open(pipe, os.O_RDWR)  # a writer is there before the reader
    writer = threading.Thread(target=lambda: (pipe.write_bytes(b"x" * 200_000), os.close(keeper)))
    writer.start()
    assert read_bytes(pipe) == b"x" * 200_000
    writer.join()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, "/dev/zero", "/proc/self/maps"):
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            read_bytes(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
@pytest.mark.parametrize("part", ["[],", "0,", "{},", '"a":0,'], ids=["lists", "numbers", "mappings", "keys"])
def test_json_of_very_many_values_is_not_parsed(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("{%s}" if ":" in part else "[%s]") % (part * 3_000_000)[:-1]

    def parsed(*given: object, **named: object) -> None:
        raise AssertionError("it was parsed")

    (tmp_path / "b.json").write_text(text)
    monkeypatch.setattr(json, "loads", parsed)
    with pytest.raises(ValueError, match="far more values"):
        read_json(text)
    with pytest.raises(BaselineError, match="far more values"):
        read_measured(tmp_path / "b.json")


@pytest.mark.slow
def test_the_bound_is_one_of_values_and_not_of_bytes() -> None:
    assert read_json(json.dumps(["x" * 10**7])) == ["x" * 10**7]
    assert len(read_json("[" + "1," * 10 + "1]")) == 11
    assert documents.MAX_BYTES > 10**7


@pytest.mark.slow
def test_a_long_text_is_made_printable_without_a_list_of_its_characters() -> None:
    text = "\x7f" * 100_000
    tracemalloc.start()
    try:
        assert printable(text) == "\\x7f" * 100_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_what_a_hint_quotes_is_no_flag() -> None:
    assert [quoted_path(name) for name in ("--trust-pickle", "a b")] == ["./--trust-pickle", "'a b'"]
    assert quoted_flag("--key", "--trust-pickle") == "--key=--trust-pickle"
    assert quoted_flag("--key", "a b") == "--key 'a b'"


def test_what_an_error_says_can_be_printed() -> None:
    """Whoever catches it may do so, and values in it come from files."""
    error = UsageError("a value \x1b[2J\u202e", hint="one\ntwo \x07")
    assert error.message == str(error).split("\n")[0] == r"a value \x1b[2J\u202e"
    assert error.hint == "one\ntwo \\x07"

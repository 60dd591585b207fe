"""A short run of the fuzz of files, and that it notices what it is for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import files
from memopt_cli.errors import UsageError
from memopt_cli.loading import load_model
from memopt_cli.records import ModelSource
from tests.rows import quick


@pytest.mark.parametrize("count", quick([20, 200], {20}))
@pytest.mark.parametrize("name", files.FORMATS)
def test_broken_files_are_read_or_refused(name: str, count: int, tmp_path: Path) -> None:
    assert files.failures(name, seed=1, count=count, keep=tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", files.FORMATS)
def test_sound_files_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for data in files.FORMATS[name].sound():
        Path(name).write_bytes(data)
        files.FORMATS[name].read(name)
        if name in ("zip.pt", "legacy.pt", "script.ts", "program.pt2"):
            load_model(ModelSource(location=name))


def _refuse(path: str) -> None:
    raise UsageError("a clear sentence")


def _say_escapes(path: str) -> None:
    error = UsageError("")
    error.message = "\x1b[2J"  # which it would have spelled out
    raise error


def _fail(path: str) -> None:
    raise ZeroDivisionError("no such luck")


def _die(path: str) -> None:
    os.kill(os.getpid(), 11)


def _take_memory(path: str) -> None:
    bytearray(2 * files._CASE_BYTES)


def _leave(path: str) -> None:
    sys.exit(3)


def _print(path: str) -> None:
    print("error: unexpected KeyError: 'x'")  # noqa: T201


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (_refuse, ""),
        (_say_escapes, "says"),
        (_fail, "ZeroDivisionError: no such luck"),
        (_die, "signal 11"),
        (_take_memory, "MemoryError"),
        (_leave, "SystemExit"),
        (_print, "unexpected KeyError"),
    ],
)
def test_what_goes_wrong_is_noticed_and_kept(
    read: Callable[[str], None], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = files.Format(lambda: [b"one two"], lambda data, draws: data + bytes([draws.randrange(9)]), read)
    monkeypatch.setitem(files.FORMATS, "words", form)
    files._sound.cache_clear()
    found = files.failures("words", seed=0, count=2, keep=tmp_path)
    assert len(found) == (2 if says else 0)
    assert all(says in line for line in found)
    assert len(list(tmp_path.iterdir())) == len(found)

"""The watch on the code of libraries while it takes the objects of a file."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.utils import patch_environment

from memopt_cli.errors import UnsafeFileError
from memopt_cli.loading.watch import suspend_watch, watch_code

DEEDS: dict[str, Callable[[], object]] = {
    "a program": lambda: subprocess.run(["true"], check=True),
    "a shell": lambda: os.system("true"),
    "a pickle": lambda: pickle.loads(b"cbuiltins\nprint\n."),
    "a connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "a file": lambda: Path("made").write_text("x"),
    "a file that is there": lambda: open("kept", "r+"),  # noqa: SIM115
    "a file removed": lambda: Path("kept").unlink(),
    "a file renamed": lambda: Path("kept").rename("other"),
    "a link": lambda: Path("link").symlink_to("kept"),
    "a folder": lambda: Path("made").mkdir(),
    "a file cut off": lambda: os.truncate("kept", 0),
    "a variable": lambda: os.environ.update(LD_PRELOAD="evil.so"),
    "a library": lambda: ctypes.CDLL("evil.so"),
    "a time": lambda: os.utime("kept", (0, 0)),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept").write_text("kept")


@pytest.mark.parametrize("name", DEEDS)
def test_what_no_model_needs_is_refused(name: str) -> None:
    with pytest.raises(UnsafeFileError, match=r"model\.pt was not loaded") as caught, watch_code("model.pt"):
        DEEDS[name]()
    assert "--trust-pickle" in caught.value.hint
    assert {path.name: path.read_text() for path in Path.cwd().iterdir()} == {"kept": "kept"}


def test_a_hint_is_of_use_where_it_is_given() -> None:
    with pytest.raises(UnsafeFileError) as caught, watch_code("folder", "Build it in code."):
        os.system("true")
    assert caught.value.hint == "Build it in code."


def test_asking_for_a_gpu_is_no_change_of_the_environment() -> None:
    with watch_code("model.pt"), patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    with pytest.raises(UnsafeFileError), watch_code("model.pt"), patch_environment(PYTORCH_NVML_BASED="1"):
        pass


def test_it_ends_with_the_block_and_holds_in_other_threads() -> None:
    with watch_code("model.pt"):
        assert Path("kept").read_text() == "kept"
        worker = threading.Thread(target=lambda: refused.append(raised()))
        refused: list[type[BaseException]] = []
        worker.start()
        worker.join()
    assert refused == [UnsafeFileError]
    Path("made").write_text("x")


def test_threads_that_ran_before_are_left_alone() -> None:
    started, go = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        started.set()
        go.wait()
        try:
            Path("log").write_text("x")
        except BaseException as err:
            failures.append(err)

    worker = threading.Thread(target=write)
    worker.start()
    started.wait()
    with watch_code("model.pt"):
        go.set()
        worker.join()
    assert failures == []
    assert Path("log").exists()


def test_what_the_user_vouched_for_does_as_it_likes() -> None:
    with watch_code("model.pt"):
        with suspend_watch():
            Path("made").write_text("x")
        with pytest.raises(UnsafeFileError):
            Path("other").write_text("x")


def raised() -> type[BaseException]:
    try:
        Path("made").write_text("x")
    except BaseException as err:
        return type(err)
    raise AssertionError("it was written")


def test_modules_are_imported_within(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("late_module.py").write_text("import ctypes, os\nos.environ['LATE'] = '3'\nctypes.CDLL(None)\nvalue = 3")
    monkeypatch.delenv("LATE", raising=False)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with watch_code("model.pt"):
        assert importlib.import_module("late_module").value == 3
    assert not Path("__pycache__").exists()
    assert not sys.dont_write_bytecode
    del sys.modules["late_module"]

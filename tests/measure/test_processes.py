"""Profiling subprocesses: copies of one process that has imported PyTorch, with the surroundings of their sessions."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memopt_cli.measure import processes
from memopt_cli.measure.jobs import Subject
from memopt_cli.measure.runner import Session
from memopt_cli.records import (
    Crashed,
    InputSpec,
    Measurement,
    ModelSource,
    OutOfMemory,
    Plan,
    StepSettings,
    TensorSpec,
    Trust,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

ORIGINAL = Plan(level=0)
MODEL = """
import atexit
import os
import sys
from pathlib import Path

import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        Path("here").write_text(os.environ.get("MEMOPT_TEST", ""))
        said = Path("said").read_text() if os.path.exists("said") else ""
        if said == "large":
            assert torch.get_num_threads() == len(os.sched_getaffinity(0))
            torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        if said == "register":
            atexit.register(Path("at the end").touch)
        if said.startswith("leave"):
            sys.exit("the last words" if said == "leave" else None)
"""


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no server, which takes long to start, is kept for all tests."""
    monkeypatch.setattr(processes, "_servers", processes._Servers())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Session]:
    """A session on a model that leaves a file in the working directory: what an environment variable says.

    Another file there says what else it does.
    """
    (tmp_path / "left_behind.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def session() -> Session:
        source = ModelSource(location="left_behind:Net", trust=Trust(code_paths=(str(tmp_path),)))
        spec = InputSpec(tensors=(TensorSpec(shape=(2, 3)),), source="here")
        return Session(Subject(source=source, spec=spec, settings=StepSettings()), 60.0)

    return session


def of(session: Session) -> tuple[int, int]:
    """Process id of its subprocess and of the process that this was forked from."""
    assert session._process is not None
    pid = session._process.pid
    return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_sessions_share_what_they_are_forked_from_and_nothing_else(start: Callable[[], Session]) -> None:
    with start() as first, start() as second:
        (one, server), (other, same) = of(first), of(second)
        assert one != other
        assert server == same
        assert isinstance(first.measure(ORIGINAL, steps=1), Measurement)
        os.kill(one, signal.SIGKILL)
        assert isinstance(first.measure(ORIGINAL, steps=1), OutOfMemory)
        assert isinstance(second.measure(ORIGINAL, steps=1), Measurement)


def test_it_has_the_folder_and_the_environment_of_its_session(
    start: Callable[[], Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in ("", "two"):
        folder = tmp_path / f"folder {said}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        if said:
            monkeypatch.setenv("MEMOPT_TEST", said)
        with start() as session:
            assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)
        assert (folder / "here").read_text() == said


@pytest.mark.usefixtures("nothing_kept")
def test_after_the_death_of_the_server_another_is_started(start: Callable[[], Session]) -> None:
    with start() as session:
        _, server = of(session)
        os.kill(server, signal.SIGKILL)
        answer = session.measure(ORIGINAL, steps=1)
        assert isinstance(answer, Crashed)
        assert answer.reason == "the process that it is forked from has ended"
    with start() as session:
        assert of(session)[1] != server
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)


def test_one_that_imports_after_the_fork(start: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU is used."""
    with start() as early:
        monkeypatch.setattr(processes, "_role", lambda device: "late")
        with start() as late:
            assert of(late)[1] != of(early)[1]
            assert "libtorch" not in Path(f"/proc/{of(late)[1]}/maps").read_text()
            assert "libtorch" in Path(f"/proc/{of(early)[1]}/maps").read_text()
            assert isinstance(late.measure(ORIGINAL, steps=1), Measurement)


def test_a_thread_that_ends_takes_its_own_server_alone(start: Callable[[], Session]) -> None:
    servers = []

    def work() -> None:
        with processes.kept(), start() as session:
            servers.append(of(session)[1])
            assert Path(f"/proc/{servers[0]}").exists()

    with start() as session:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        (gone,) = servers
        assert not Path(f"/proc/{gone}").exists()
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)


@pytest.mark.usefixtures("nothing_kept")
def test_it_is_kept_as_long_as_it_is_said(start: Callable[[], Session]) -> None:
    with processes.kept(early=True):
        with start() as first:
            _, server = of(first)
        with start() as second:
            assert of(second)[1] == server
    assert not Path(f"/proc/{server}").exists()
    with start() as third:
        assert of(third)[1] != server


def test_an_environment_that_changes_ends_no_session(
    start: Callable[[], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    with processes.kept(early=True), start() as outer:
        monkeypatch.setenv("MEMOPT_TEST", "changed")
        with start() as inner:
            assert of(inner)[1] != of(outer)[1]
        assert isinstance(outer.measure(ORIGINAL, steps=1), Measurement)


def test_threads_work_after_the_fork(start: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many as there are processors, and products that are shared out among them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("said").write_text("large")
    with start() as session:
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)


@pytest.mark.parametrize(("said", "code", "tail"), [("leave", 1, "the last words"), ("leave silently", 0, "")])
def test_what_exits_is_told(said: str, code: int, tail: str, start: Callable[[], Session]) -> None:
    Path("said").write_text(said)
    with start() as session:
        assert session.measure(ORIGINAL) == Crashed(reason=f"exit code {code}", output_tail=tail)


def test_what_is_registered_for_the_end_runs(start: Callable[[], Session], tmp_path: Path) -> None:
    Path("said").write_text("register")
    with start() as session:
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)
        assert not (tmp_path / "at the end").exists()
    assert (tmp_path / "at the end").exists()

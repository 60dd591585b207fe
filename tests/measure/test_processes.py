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
from memopt_cli.records import InputSpec, Measurement, ModelSource, OutOfMemory, Plan, StepSettings, TensorSpec, Trust

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

ORIGINAL = Plan(level=0)
MODEL = """
import os
from pathlib import Path

import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        Path("here").write_text(os.environ.get("MEMOPT_TEST", ""))
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Session]:
    """A session on a model that leaves a file in the working directory: what an environment variable says."""
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
    with start() as third:
        assert of(third)[1] == server


def test_it_has_the_folder_and_the_environment_of_its_session(
    start: Callable[[], Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in ("one", "two"):
        folder = tmp_path / said
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("MEMOPT_TEST", said)
        with start() as session:
            assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)
        assert (folder / "here").read_text() == said


def test_after_the_death_of_the_server_another_is_started(start: Callable[[], Session]) -> None:
    with start() as session:
        _, server = of(session)
        os.kill(server, signal.SIGKILL)
        assert isinstance(session.measure(ORIGINAL, steps=1), OutOfMemory)
    with start() as session:
        assert of(session)[1] != server
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)


def test_one_that_imports_after_the_fork(start: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU is used."""
    with start() as early:
        monkeypatch.setattr(processes, "_imports", lambda device: processes.LATE)
        with start() as late:
            assert of(late)[1] != of(early)[1]
            assert "libtorch" not in Path(f"/proc/{of(late)[1]}/maps").read_text()
            assert "libtorch" in Path(f"/proc/{of(early)[1]}/maps").read_text()
            assert isinstance(late.measure(ORIGINAL, steps=1), Measurement)


def test_a_thread_that_ends_takes_its_own_server_alone(start: Callable[[], Session]) -> None:
    servers = []

    def work() -> None:
        with start() as session:
            servers.append(of(session)[1])

    with start() as session:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)
        assert servers != [of(session)[1]]

"""A subprocess that somebody has taken over does with its ends of the pipes what it likes: this end goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt_cli.measure.jobs import ORIGINAL, DescribeJob, ProbeJob, Subject
from memopt_cli.measure.runner import Session
from memopt_cli.records import Crashed, ModelFacts, ModelSource, TimedOut

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="opens pipes by /proc")


def wait(jobs: int, replies: int, output: int) -> None:
    signal.pause()


class Hasty(selectors.DefaultSelector):
    """Says of a pipe that there is something to read, which the subprocess takes back before it is read: it can."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return [(key, key.events) for key in self.get_map().values()]


def test_what_takes_back_its_answer_runs_out_of_time(
    doing: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "DefaultSelector", Hasty)
    with doing(wait, timeout_s=0.1) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == TimedOut(limit_s=0.1)


def set_flags(jobs: int, replies: int, output: int) -> None:
    """Of the files that are open in both: a read by another size than a block's then fails."""
    os.write(output, b"its last words\n")
    for end in (jobs, replies, output):
        with contextlib.suppress(OSError):
            fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_DIRECT)


def test_flags_of_its_files_are_its_own(doing: Callable[..., Session]) -> None:
    with doing(set_flags) as session:
        assert session.ask(ProbeJob(plan=ORIGINAL, batch=1)) == Crashed(
            reason="exit code 1", output_tail="its last words"
        )


def stuff(jobs: int, replies: int, output: int) -> None:
    """Its own pipe of jobs, so that this end cannot write to it; and its output, with what no terminal should get."""
    os.write(output, b"\x1b[2J\x1b]0;title\x07\n" * 1000)
    os.ftruncate(output, 1 << 30)
    own = os.open(f"/proc/self/fd/{jobs}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(own, b"x" * 4096)


def test_what_it_leaves_behind_is_short_and_printable(doing: Callable[..., Session]) -> None:
    with doing(stuff) as session:
        found = session.ask(ProbeJob(plan=ORIGINAL, batch=1))
    assert isinstance(found, Crashed)
    assert all(line.isprintable() for line in found.output_tail.splitlines())
    assert len(found.output_tail) < 20_000


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Where the system says what two confined subprocesses have, that live at the same time."""
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(nn.Linear(1, 1), path)

    def session() -> Session:
        return Session(Subject(source=ModelSource(location=str(path))), 60.0)

    with session() as first, session() as second:
        for one in (first, second):
            assert isinstance(one.ask(DescribeJob()), ModelFacts)
        yield Path(f"/proc/{first.pid}"), Path(f"/proc/{second.pid}")


def test_nothing_is_open_but_its_own(confined: tuple[Path, Path]) -> None:
    """No terminal, no socket, nothing of the server's or of the other one's."""
    open_in = [sorted(os.readlink(file) for file in process.joinpath("fd").iterdir()) for process in confined]
    for files in open_in:
        null, first, second, *pipes = files
        assert (null, len(pipes), {pipe.partition(":")[0] for pipe in pipes}) == (os.devnull, 2, {"pipe"})
        assert first == second
        assert first.endswith(" (deleted)")
    assert set(open_in[0]) & set(open_in[1]) == {os.devnull}


def test_no_memory_is_shared_that_can_be_written(confined: tuple[Path, Path]) -> None:
    for process in confined:
        permissions = [line.split()[1] for line in process.joinpath("maps").read_text().splitlines()]
        assert not [found for found in permissions if "w" in found and "s" in found]

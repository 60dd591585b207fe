"""Subprocesses that die, hang, chatter or starve; Ctrl-C and SIGKILL: an answer each time, and nobody left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.measure import runner
from memopt_cli.measure.jobs import Subject
from memopt_cli.measure.runner import Session
from memopt_cli.records import (
    Counted,
    Crashed,
    InputSpec,
    Measurement,
    ModelSource,
    OutOfMemory,
    Plan,
    Refused,
    StepFailed,
    StepSettings,
    TensorSpec,
    TimedOut,
    Trust,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

ORIGINAL = Plan(level=0)
AGES_S = 60.0
"""A time limit that is not to be reached."""


@pytest.fixture
def start(user_code: str) -> Callable[..., Session]:
    """A session on one of the faulty models."""

    def session(model: str, timeout_s: float = AGES_S) -> Session:
        source = ModelSource(location=f"faulty:{model}", trust=Trust(code_paths=(user_code,)))
        spec = InputSpec(tensors=(TensorSpec(shape=(2, 3)),), source="here")
        return Session(Subject(source=source, spec=spec, settings=StepSettings()), timeout_s)

    return session


def processes_of(session_id: int) -> list[int]:
    """Living processes of a session, as Linux means it: a subprocess of memopt and all it has started."""
    return [pid for pid, state, of in map(_stat, _pids()) if of == session_id and state != "Z"]


def workers_of(parent: int) -> list[int]:
    """Living profiling subprocesses that were started by a process which may be gone."""
    wanted = b"memopt_cli.measure.worker"
    return [pid for pid in _pids() if wanted in (words := _command(pid)) and words[-1] == str(parent).encode()]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[int, str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return pid, "Z", 0
    return pid, fields[0], int(fields[3])


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pid_of(session: Session) -> int:
    assert session._process is not None
    return session._process.pid


# ---------------------------------------------------------------------------------------------- one session


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        ("Killed", OutOfMemory(detail="the profiling subprocess was killed, as the system does when memory runs out")),
        ("Crashes", Crashed(reason="killed by SIGSEGV", output_tail="")),
        ("Exits", Crashed(reason="exit code 7", output_tail="the model's last words")),
        ("ClosesItsPipe", Crashed(reason="it closed its pipe without an answer", output_tail="")),
    ],
)
def test_its_death_is_an_answer(
    model: str, answer: Any, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.5)
    with start(model) as session:
        pid = pid_of(session)
        assert session.measure(ORIGINAL) == answer
        assert processes_of(pid) == []
        # A session that has ended says so, and starts nothing.
        assert isinstance(session.measure(ORIGINAL), Crashed)
        assert isinstance(session.chunking(""), Refused)


@pytest.mark.parametrize("model", ["Sleeps", "Forks"])
def test_a_time_limit_leaves_no_orphan(model: str, start: Callable[..., Session], tmp_path: Path) -> None:
    with start(model, timeout_s=4.0) as session:
        pid = pid_of(session)
        began = time.monotonic()
        assert session.measure(ORIGINAL) == TimedOut(limit_s=4.0)
        assert time.monotonic() - began < 8
        assert wait_for(lambda: processes_of(pid) == [], 5)


def test_out_of_memory_is_an_answer_and_the_session_lives_on(start: Callable[..., Session]) -> None:
    with start("Hungry") as session:
        _, most = resource.prlimit(pid_of(session), resource.RLIMIT_AS)
        resource.prlimit(pid_of(session), resource.RLIMIT_AS, (2 << 30, most))
        answer = session.measure(ORIGINAL)
        assert isinstance(answer, OutOfMemory)
        assert "allocate" in answer.detail
        assert "alloc_cpu.cpp" not in answer.detail
        resource.prlimit(pid_of(session), resource.RLIMIT_AS, (most, most))
        counted = session.count(ORIGINAL, fake=False)
        assert isinstance(counted, Counted)
        assert counted.tensor_peak_bytes > 3 << 30


def test_what_it_prints_does_not_disturb(start: Callable[..., Session]) -> None:
    with start("Chatters") as session:
        assert isinstance(session.measure(ORIGINAL, steps=1), Measurement)


def test_the_models_own_error_is_an_answer_every_time(start: Callable[..., Session]) -> None:
    with start("Raises") as session:
        answers = [session.measure(ORIGINAL), session.count(ORIGINAL, fake=False), session.measure(ORIGINAL)]
        assert all(isinstance(answer, StepFailed) and "own complaint" in answer.message for answer in answers)


def test_an_interrupt_ends_it_at_once(start: Callable[..., Session]) -> None:
    """Without waiting for the step, which goes on for ten minutes."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    session, began = start("Sleeps"), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), session:
            session.measure(ORIGINAL)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - began < 5
    assert session._process is None
    assert workers_of(os.getpid()) == []


def test_an_unused_session_ends(start: Callable[..., Session]) -> None:
    with start("Fine") as session:
        pid = pid_of(session)
    assert processes_of(pid) == []
    assert isinstance(session.measure(ORIGINAL), Crashed)


# ---------------------------------------------------------------------------------------------- the whole program


@contextmanager
def running(arguments: str, folder: Path, user_code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``memopt`` in an empty folder."""
    with subprocess.Popen(
        [sys.executable, "-m", "memopt_cli", *arguments.split(), "--code-path", user_code],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(start):
            return
    raise AssertionError(f"it never said '{start}'")


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        ("optimize faulty:Sleeps -i 2x3 --level 0", "level 0"),  # its subprocess is still importing
        ("optimize faulty:Fine -i 2x3 --level 1", "level 1"),
        ("optimize faulty:Fine -i 2x3 --level 0", "finding the batch that fits"),
    ],
)
def test_ctrl_c_leaves_nothing(command: str, stage: str, tmp_path: Path, user_code: str) -> None:
    with running(command, tmp_path, user_code) as process:
        wait_for_line(process, stage)
        assert_interrupted(process)
    assert os.listdir(tmp_path) == []


def test_ctrl_c_in_the_middle_of_a_step(tmp_path: Path, user_code: str) -> None:
    asleep = tmp_path / "asleep"
    with running("optimize faulty:Sleeps -i 2x3", tmp_path, user_code, ASLEEP=str(asleep)) as process:
        assert wait_for(asleep.exists)
        assert workers_of(process.pid)
        assert_interrupted(process)
    assert os.listdir(tmp_path) == ["asleep"]


def test_ctrl_c_while_writing(tmp_path: Path, user_code: str) -> None:
    (tmp_path / "p.yaml").write_text(
        "{schema_version: 1, memopt: '0', torch: '2', model: m, sha256: null, spec: {source: here}, "
        "seed: 0, device: cpu, level: 0}"
    )
    with running("apply faulty:SlowToSave p.yaml", tmp_path, user_code) as process:
        assert wait_for(lambda: len(os.listdir(tmp_path)) > 1)
        assert_interrupted(process)
    assert os.listdir(tmp_path) == ["p.yaml"]


def assert_interrupted(process: subprocess.Popen[str]) -> None:
    """SIGINT ends it within seconds, with the code for it and one line."""
    process.send_signal(signal.SIGINT)
    _, diagnostics = process.communicate(timeout=10)
    assert process.returncode == 130
    assert diagnostics.endswith("error: interrupted\n")
    assert "Traceback" not in diagnostics
    # One that was interrupted at its birth finds its parent gone as soon as it has imported PyTorch.
    assert wait_for(lambda: not workers_of(process.pid))


@pytest.mark.parametrize("stage", ["importing", "asleep"])
def test_killing_memopt_kills_its_subprocess(stage: str, tmp_path: Path, user_code: str) -> None:
    asleep = tmp_path / "asleep"
    with running("optimize faulty:Sleeps -i 2x3", tmp_path, user_code, ASLEEP=str(asleep)) as process:
        assert wait_for(asleep.exists if stage == "asleep" else lambda: workers_of(process.pid))
        process.kill()
        process.wait()
        assert wait_for(lambda: not workers_of(process.pid))
    assert set(os.listdir(tmp_path)) <= {"asleep"}

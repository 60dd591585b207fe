"""Faults: an answer, the right exit code and a clear message each time; nobody and nothing half done is left behind."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from memopt_cli.cli.app import main
from memopt_cli.cli.terminal import LogProgress
from memopt_cli.measure import channel
from memopt_cli.measure.jobs import ChunkingJob, CountJob, MeasureJob, Subject
from memopt_cli.measure.local import LocalSession
from memopt_cli.measure.runner import Session
from memopt_cli.pipeline import prepare
from memopt_cli.pipeline.memory import inspection
from memopt_cli.records import (
    Crashed,
    InputSpec,
    ModelSource,
    OutOfMemory,
    Plan,
    StepPeaks,
    StepSettings,
    TensorSpec,
    TimedOut,
    Trust,
)
from memopt_cli.records.progress import Span
from tests.rows import quick

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

Memopt = Callable[..., Any]

ORIGINAL = Plan()
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
    return [pid for pid, state, of, _ in map(_stat, _pids()) if of == session_id and state != "Z"]


def workers_of(parent: int) -> list[int]:
    """Living profiling subprocesses of a process, and once it is gone what they were forked from."""
    return [pid for pid in _started_by(parent) if _stat(pid)[3] != parent]


def _started_by(parent: int) -> list[int]:
    wanted = b"memopt_cli.measure.server"
    return [pid for pid in _pids() if wanted in (words := _command(pid)) and words[-1] == str(parent).encode()]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[int, str, int, int]:
    """Id, state, session and parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return pid, "Z", 0, 0
    return pid, fields[0], int(fields[3]), int(fields[1])


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def wait_for(condition: Callable[[], object], limit_s: float = 120.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pid_of(session: Session) -> int:
    assert session.pid is not None
    return session.pid


IN_A_SUBPROCESS = [
    # what its step does, command, exit code, what the message says
    ("is killed", "optimize faulty:Killed -i 2x3 --level 0", 3, ["the profiling subprocess was killed", "memory"]),
    ("is killed", "profile faulty:Killed -i 2x3", 3, ["the profiling subprocess was killed", "memory"]),
    ("crashes", "optimize faulty:Crashes -i 2x3", 3, ["killed by SIGSEGV", "in plain Python"]),
    ("exits", "optimize faulty:Exits -i 2x3", 3, ["exit code 7", "the model's last words"]),
    ("exits, its own child does not", "optimize faulty:LeavesOneBehind -i 2x3", 3, ["exit code 7"]),
    ("closes its pipe", "optimize faulty:ClosesItsPipe -i 2x3", 3, ["closed its pipe without an answer"]),
    ("sleeps for ever", "optimize faulty:Sleeps -i 2x3 --timeout 4", 3, ["time limit of 4 s", "--timeout"]),
    ("runs out of memory", "optimize faulty:Starves -i 2x3 --level 0", 3, ["out of memory", "smaller inputs"]),
    ("raises", "optimize faulty:Raises -i 2x3", 3, ["forward of Raises raised ValueError: the model's own complaint"]),
    ("is killed", "baseline faulty:Killed -i 2x3", 3, ["the profiling subprocess was killed", "memory"]),
    ("runs out of memory", "check faulty:Starves --baseline Starves.json", 3, ["out of memory", "smaller inputs"]),
    (
        "sleeps for ever",
        "check faulty:Sleeps --baseline Sleeps.json --timeout 1",
        3,
        ["time limit of 1 s", "--timeout"],
    ),
    ("runs out of memory", "recommend-batch faulty:Starves -i 2x3 --memory 1GiB", 6, ["a batch of 1", "out of memory"]),
    ("sleeps for ever", "recommend-batch faulty:Sleeps -i 2x3 --timeout 1", 3, ["time limit of 1 s", "--timeout"]),
]

AN_ANSWER = "an answer of a subprocess"
LOADED, FILLED = "memopt_cli.pipeline.prepare.open_model", "memopt_cli.text.writing._fill"
CTRL_C = [
    # command, in which stage, just after what
    ("optimize good.pt -i 8x6 --level 4", "loading", LOADED),
    ("optimize good.pt -i 8x6 --level 4", "level 0", AN_ANSWER),
    ("optimize good.pt -i 8x6 --level 4 --max-slowdown none", "level 1", AN_ANSWER),
    ("optimize good.pt -i 8x6 --level 4 --max-slowdown none", "level 3", AN_ANSWER),
    ("optimize good.pt -i 8x6 --level 0", "verifying", AN_ANSWER),
    ("profile good.pt -i 8x6", "loading", LOADED),
    ("profile good.pt -i 8x6", "measuring", AN_ANSWER),
    ("profile good.pt -i 8x6", "recording", AN_ANSWER),
    ("apply good.pt p.yaml", "", "memopt_cli.pipeline.plans.application.open_model"),
    ("apply good.pt p.yaml", "", FILLED),
    ("inspect good.pt", "", AN_ANSWER),
    ("baseline good.pt -i 8x6", "loading", LOADED),
    ("baseline good.pt -i 8x6", "measuring", AN_ANSWER),
    ("baseline good.pt -i 8x6", "recording", AN_ANSWER),
    ("baseline good.pt -i 8x6", "", FILLED),
    ("check good.pt --baseline 8x6.json", "loading", LOADED),
    ("check good.pt --baseline 8x6.json", "measuring", AN_ANSWER),
    ("check good.pt --baseline 8x6.json", "recording", AN_ANSWER),
    ("compare 8x6.json 2x3.json", "", "memopt_cli.pipeline.comparisons.regression.read_measured"),
    ("recommend-batch good.pt -i 8x6", "loading", LOADED),
    ("recommend-batch good.pt -i 8x6", "finding the batch", AN_ANSWER),
    ("profile good.pt -i 8x6 --html p.html", "", FILLED),
]
PLAN = {"good.memopt.plan.yaml", "good.memopt.summary.json"}
CTRL_C_LATER = [
    # in which stage, just after what, the files that are there by then
    ("writing the plan", FILLED, {"good.memopt.plan.yaml"}),
    ("writing the model", FILLED, PLAN),
    ("finding the batch", AN_ANSWER, {*PLAN, "good.memopt.pt"}),
    ("recording the step", AN_ANSWER, {*PLAN, "good.memopt.pt", "good.memopt.batch.yaml"}),
]
STARTING = [
    *(("apply good.pt p.yaml -o out.pt", name) for name in ("typer", "memopt_cli.cli.app", "memopt_cli.pipeline")),
    *(("selftest --device cpu", name) for name in ("torch", "torch._C", "numpy")),
]
"""A command, and what is being imported before it has begun; most do without PyTorch in their own process."""

WRITING = [
    # command, the file it is to write, the flag that names it
    ("optimize good.pt -i 8x6 --level 0 -o good.memopt.pt", "good.memopt.pt", "-o"),
    ("apply good.pt p.yaml", "good.memopt.pt", "-o"),
    ("baseline good.pt -i 8x6", "memopt-baseline.json", "-o"),
    ("recommend-batch good.pt -i 8x6 --longest-step 0.01 -o b.yaml", "b.yaml", "-o"),
    ("profile good.pt -i 8x6 --snapshot s.pickle", "s.pickle", "--snapshot"),
]
FULL = quick(
    [(*row, room) for row in WRITING for room in (0, 100)],
    {*((*row, 100) for row in WRITING), (*WRITING[1], 0)},
)
"""A disk that is full in the middle of a file; full from the start, it is the same to every writer."""
OUTPUTS = [
    # command, files that it has written by the time it reports
    ("inspect good.pt", set()),
    ("profile good.pt -i 8x6", set()),
    ("apply good.pt p.yaml", {"good.memopt.pt"}),
    (
        "optimize good.pt -i 8x6 --level 0 -o good.memopt.pt",
        {f"good.memopt.{end}" for end in ("pt", "summary.json", "plan.yaml", "batch.yaml")},
    ),
    ("baseline good.pt -i 8x6", {"memopt-baseline.json"}),
    ("check good.pt --baseline 8x6.json", set()),
    ("compare 8x6.json 2x3.json", set()),
    ("recommend-batch good.pt -i 8x6 --longest-step 0.01", set()),
]

PLAN_TEXT = (
    "{schema_version: 1, memopt: '0', torch: '2', model: m, sha256: null, spec: {source: here}, "
    "seed: 0, device: cpu, level: 0}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of those that the tables name."""
    folder = tmp_path_factory.mktemp("files")
    blocks = [nn.Sequential(*(made for _ in range(3) for made in (nn.Linear(6, 6), nn.Tanh()))) for _ in range(3)]
    torch.save(nn.Sequential(*blocks), folder / "good.pt")
    torch.save(nn.Linear(3, 4), folder / "fine.pt")
    (folder / "p.yaml").write_text(PLAN_TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "Session", LocalSession)
        for model, shape in (("good.pt", "8x6"), ("fine.pt", "2x3")):
            assert main(["baseline", f"{folder / model}", "-i", shape, "-o", f"{folder / shape}.json", "-q"]) == 0
    recorded = json.loads((folder / "2x3.json").read_text())
    for model in ("Starves", "Sleeps"):  # of a time when they ran
        (folder / f"{model}.json").write_text(json.dumps(recorded | {"model": f"faulty:{model}"}))
    return folder


@pytest.fixture
def folder(memopt: Memopt, files: Path, tmp_path: Path) -> Path:
    """All of them in the working directory."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    os.mkdir("a_folder", 0o500)
    return tmp_path


@pytest.mark.parametrize(
    ("does", "command", "code", "said"),
    IN_A_SUBPROCESS,
    ids=[f"{row[0]}, {row[1].split()[0]}" for row in IN_A_SUBPROCESS],
)
def test_fault_in_a_subprocess(
    does: str,
    command: str,
    code: int,
    said: list[str],
    memopt: Memopt,
    folder: Path,
    user_code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_EXIT_TIMEOUT_S", 0.5)
    assert_failed(memopt(*command.split(), "--code-path", user_code), code, said)


def test_fault_megabytes_printed_by_each_forward(memopt: Memopt, user_code: str) -> None:
    done = memopt(*"baseline faulty:Chatters -i 2x3 --code-path".split(), user_code)
    assert (done.code, done.changed) == (0, {"memopt-baseline.json"}), done.err
    assert "chatter" not in done.out + done.err


CHANGED = [
    # command, which of its subprocesses finds another file, files that were written before
    ("profile good.pt -i 8x6", 2, set()),
    ("optimize good.pt -i 8x6 --level 1", 2, set()),
    ("optimize good.pt -i 8x6 --level 0 -o good.memopt.pt --no-recommend-batch", 4, PLAN),
    ("apply good.pt p.yaml", 2, set()),
    ("apply good.pt p.yaml --verify -i 8x6", 3, set()),
    ("check good.pt --baseline 8x6.json", 2, set()),
    ("recommend-batch good.pt -i 8x6", 2, set()),
]


@pytest.fixture
def any_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plan of level 0, which is found at once, written as one with segments would be."""
    monkeypatch.setattr(Plan, "is_empty", property(lambda plan: False))


@pytest.mark.usefixtures("any_plan_is_kept")
@pytest.mark.parametrize(("command", "number", "written"), CHANGED)
def test_fault_another_file_between_two_subprocesses(
    command: str, number: int, written: set[str], memopt: Memopt, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_at(number, monkeypatch, lambda: os.replace("fine.pt", "good.pt"))
    done = memopt(*command.split())
    assert (done.code, done.changed) == (3, {"good.pt", "fine.pt", *written}), done.err
    assert "error: good.pt changed while memopt ran\n" in done.err


def test_fault_other_weights_between_two_subprocesses(
    memopt: Memopt, folder: Path, user_code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("weights.pt", "others.pt"):
        torch.save({f"layer.{key}": tensor for key, tensor in nn.Linear(3, 4).state_dict().items()}, name)
    change_at(2, monkeypatch, lambda: os.replace("others.pt", "weights.pt"))
    done = memopt(*"profile faulty:Fine --weights weights.pt -i 2x3 --code-path".split(), user_code)
    assert (done.code, "error: weights.pt changed while memopt ran\n" in done.err) == (3, True), done.err


def test_fault_other_inputs_between_two_subprocesses(
    memopt: Memopt, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save([torch.zeros(8, 6)], "inputs.pt")
    torch.save([torch.ones(8, 6)], "others.pt")
    assert memopt("profile", "good.pt", "--input-data", "inputs.pt").code == 0
    change_at(2, monkeypatch, lambda: os.replace("others.pt", "inputs.pt"))
    done = memopt("profile", "good.pt", "--input-data", "inputs.pt")
    assert (done.code, "error: inputs.pt changed while memopt ran\n" in done.err) == (3, True), done.err


def test_fault_a_file_that_leads_elsewhere_once_it_was_looked_at(
    memopt: Memopt, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "inputs.pt"
    torch.save([torch.zeros(8, 6)], outside)
    shutil.copy(outside, "inputs.pt")
    Path("memopt.yaml").write_text("input-data: inputs.pt")
    os.symlink(outside, "link.pt")
    assert memopt("profile", "good.pt").code == 0
    change_at(2, monkeypatch, lambda: os.replace("link.pt", "inputs.pt"))
    done = memopt("profile", "good.pt")
    assert (done.code, f"inputs.pt cannot be read: it leads out of {folder}" in done.err) == (2, True), done.err


def change_at(number: int, monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Have files changed just before that subprocess of a command begins."""
    sessions = itertools.count(1)

    class Late(Session):
        def __enter__(self) -> Late:
            if next(sessions) == number:
                change()
            super().__enter__()
            return self

    monkeypatch.setattr(prepare, "Session", Late)


class Attended(LocalSession):
    """A real subprocess from its birth to its end; what it is asked is answered here."""

    def __enter__(self) -> Attended:
        Session.__enter__(self)
        assert pid_of(self)
        return self

    __exit__ = Session.__exit__


@pytest.mark.parametrize(("command", "stage", "moment"), CTRL_C)
def test_fault_ctrl_c(
    command: str, stage: str, moment: str, memopt: Memopt, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "Session", Attended)
    monkeypatch.setattr(inspection, "Session", Attended)
    left = press_ctrl_c(stage, moment, monkeypatch)
    assert_failed(memopt(*command.split()), 130, ["interrupted"])
    assert left == [1 if moment == AN_ANSWER else 0]


@pytest.mark.usefixtures("any_plan_is_kept")
@pytest.mark.parametrize(("stage", "moment", "written"), CTRL_C_LATER)
def test_fault_ctrl_c_once_there_is_a_plan(
    stage: str, moment: str, written: set[str], memopt: Memopt, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "Session", Attended)
    press_ctrl_c(stage, moment, monkeypatch)
    done = memopt(*"optimize good.pt -i 8x6 --level 0 -o good.memopt.pt --recommend-batch --snapshot s.pickle".split())
    assert (done.code, done.changed) == (130, written)
    assert "\nwrote good.memopt." in done.out
    assert done.err.endswith(
        "error: interrupted; what had been found is kept\nhint: The verified plan is in good.memopt.plan.yaml.\n"
    )
    assert wait_for(lambda: not workers_of(os.getpid()), 5)


def press_ctrl_c(stage: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have it pressed once, in a stage, just after a function has returned; tells how many subprocesses lived then."""
    alive: list[int] = []
    announced = ""

    def announce(progress: LogProgress, text: str, takes: Span | None = None) -> None:
        nonlocal announced
        announced = text

    owner, _, name = moment.rpartition(".")
    target: Any = importlib.import_module(owner) if owner else Attended
    name = name if owner else "ask"
    original = getattr(target, name)

    def pressed(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if announced.startswith(stage) and not alive:
            alive.append(len(workers_of(os.getpid())))
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(LogProgress, "stage", announce)
    monkeypatch.setattr(target, name, pressed)
    return alive


@pytest.mark.slow
@pytest.mark.usefixtures("any_plan_is_kept")
@pytest.mark.parametrize(("command", "file", "flag", "room"), FULL)
def test_fault_full_disk(
    command: str, file: str, flag: str, room: int, memopt: Memopt, folder: Path, in_process: None
) -> None:
    with files_no_larger_than(room):
        done = memopt(*command.split())
    first = file.replace(".memopt.pt", ".memopt.plan.yaml") if command.startswith("optimize") else file
    assert_failed(done, 3, [f"cannot write {first}: File too large", "Make room"], reported=file != first)


@pytest.mark.usefixtures("any_plan_is_kept")
def test_a_disk_too_full_for_the_model_has_the_plan(memopt: Memopt, tmp_path: Path, in_process: None) -> None:
    torch.save(nn.Linear(600, 600), "good.pt")
    with files_no_larger_than(300_000):
        done = memopt(*"optimize good.pt -i 8x600 --level 0 -o good.memopt.pt".split())
    said = ["cannot write good.memopt.pt: File too large", "Make room", "verified plan is in good.memopt.plan.yaml"]
    assert_failed(done, 3, said, written=PLAN, reported=True)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writing more fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.usefixtures("any_plan_is_kept")
@pytest.mark.parametrize(("command", "written"), OUTPUTS)
def test_fault_full_stdout(
    command: str,
    written: set[str],
    memopt: Memopt,
    folder: Path,
    in_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = memopt(*command.split())
    said = ["the output could not be written in full: No space left on device", "Free space"]
    assert_failed(done, 3, said, written=written)


def assert_failed(
    done: Any, code: int, said: list[str], *, written: set[str] | None = None, reported: bool = False
) -> None:
    """An exit code and one message; no subprocess and no file is left, but for those written in full."""
    assert done.code == code, done.out + done.err
    assert bool(done.out) == reported
    assert done.err.count("error: ") == 1
    message = done.err.partition("error: ")[2]
    for words in said:
        assert words in message
    assert "Traceback" not in message
    assert done.changed == (written or set())
    assert wait_for(lambda: not workers_of(os.getpid()), 5)


def test_its_death_is_an_answer(start: Callable[..., Session]) -> None:
    with start("Killed") as session:
        pid = pid_of(session)
        detail = "the profiling subprocess was killed (SIGKILL), most likely because memory ran out"
        assert session.ask(MeasureJob(plan=ORIGINAL)) == OutOfMemory(detail=detail)
        assert processes_of(pid) == []
        # A session that has ended says so, and starts nothing.
        assert isinstance(session.ask(MeasureJob(plan=ORIGINAL)), Crashed)
        assert isinstance(session.ask(ChunkingJob(path="")), Crashed)


def test_a_time_limit_is_an_answer(start: Callable[..., Session]) -> None:
    with start("Forks", timeout_s=4.0) as session:
        pid = pid_of(session)
        assert session.ask(MeasureJob(plan=ORIGINAL)) == TimedOut(limit_s=4.0)
        assert wait_for(lambda: processes_of(pid) == [], 5)


def test_out_of_memory_is_an_answer_and_the_session_lives_on(start: Callable[..., Session]) -> None:
    with start("Hungry") as session:
        _, most = resource.prlimit(pid_of(session), resource.RLIMIT_AS)
        resource.prlimit(pid_of(session), resource.RLIMIT_AS, (2 << 30, most))
        answer = session.ask(MeasureJob(plan=ORIGINAL))
        assert isinstance(answer, OutOfMemory)
        assert "allocate" in answer.detail
        assert "alloc_cpu.cpp" not in answer.detail
        resource.prlimit(pid_of(session), resource.RLIMIT_AS, (most, most))
        counted = session.ask(CountJob(plan=ORIGINAL, fake=False))
        assert isinstance(counted, StepPeaks)
        assert counted.tensor_peak_bytes > 3 << 30


def test_an_interrupt_ends_it_at_once(start: Callable[..., Session]) -> None:
    """Without waiting for the step, which goes on for ten minutes."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    session, began = start("Sleeps"), time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), session:
            session.ask(MeasureJob(plan=ORIGINAL))
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - began < 5
    assert session.ended
    assert workers_of(os.getpid()) == []


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


WHILE_IMPORTING = """
import runpy, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_module("memopt_cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("command", "name"), STARTING)
def test_fault_ctrl_c_while_importing(command: str, name: str, files: Path, tmp_path: Path) -> None:
    """PyTorch's import catches what is raised in it here and there, and goes on."""
    for file in ("good.pt", "p.yaml"):
        command = command.replace(file, str(files / file))
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IMPORTING.format(name=name), *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_an_ignored_ctrl_c_stays_ignored(files: Path, tmp_path: Path) -> None:
    """As of a job that a shell has put into the background."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WHILE_IMPORTING.format(name="typer")
    arguments = ["compare", str(files / "2x3.json"), str(files / "2x3.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert (
        subprocess.run([sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.DEVNULL).returncode
        == 0
    )


def test_ctrl_c_in_the_middle_of_a_step(tmp_path: Path, user_code: str) -> None:
    asleep = tmp_path / "asleep"
    with running("optimize faulty:Sleeps -i 2x3", tmp_path, user_code, ASLEEP=str(asleep)) as process:
        assert wait_for(asleep.exists)
        assert workers_of(process.pid)
        assert_interrupted(process, "interrupted before a plan was verified; nothing was written")
    assert os.listdir(tmp_path) == ["asleep"]


def test_ctrl_c_keeps_the_best_batch_that_was_run(tmp_path: Path, user_code: str) -> None:
    asleep = tmp_path / "asleep"
    command = "recommend-batch faulty:SleepsOverMuch -i 2x3 --memory 1MiB --global-batch 64 -o b.yaml"
    with running(command, tmp_path, user_code, ASLEEP=str(asleep)) as process:
        assert wait_for(asleep.exists)
        answer = assert_interrupted(process, "interrupted; the report has what was found before")
    assert "batch 2 fits, the largest that was run, limited by the interruption; " in answer
    assert "\nglobal batch 64: 32 × " in answer
    kept = yaml.safe_load((tmp_path / "b.yaml").read_text())["recommended"]
    assert (kept["batch_size"], kept["limited_by"], kept["verified"]) == (2, "the interruption", True)


def assert_interrupted(process: subprocess.Popen[str], said: str) -> str:
    """SIGINT ends it within seconds, with the code for it and one line; what it still has to say is returned."""
    process.send_signal(signal.SIGINT)
    answer, diagnostics = process.communicate(timeout=10)
    assert process.returncode == 130
    assert diagnostics.endswith(f"error: {said}\n")
    assert "Traceback" not in diagnostics
    assert wait_for(lambda: not workers_of(process.pid))
    return answer


@pytest.mark.parametrize("stage", ["importing", "asleep"])
def test_killing_memopt_kills_its_subprocess(stage: str, tmp_path: Path, user_code: str) -> None:
    asleep = tmp_path / "asleep"
    with running("optimize faulty:Sleeps -i 2x3", tmp_path, user_code, ASLEEP=str(asleep)) as process:
        assert wait_for(asleep.exists if stage == "asleep" else lambda: _started_by(process.pid))
        process.kill()
        process.wait()
        assert wait_for(lambda: not workers_of(process.pid))
    assert set(os.listdir(tmp_path)) <= {"asleep"}

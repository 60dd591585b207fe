"""Profiling subprocesses: copies of one process that has imported PyTorch, with the surroundings of their sessions."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from memopt_cli.loading.pickles.kinds.modules import imported_libraries
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import DescribeJob, MeasureAnswer, MeasureJob, Subject
from memopt_cli.measure.runner import Session, import_path
from memopt_cli.records import (
    Crashed,
    InputSpec,
    ModelFacts,
    ModelSource,
    OutOfMemory,
    Plan,
    StepFailed,
    StepSettings,
    TensorSpec,
    Trust,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

ORIGINAL = Plan()
MODEL = """
import atexit
import gc
import os
import signal
import sys
from pathlib import Path

import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        Path("here").write_text(os.environ.get("MEMOPT_TEST", ""))
        Path("malloc").write_text(os.environ.get("MALLOC_TRIM_THRESHOLD_", ""))
        said = Path("said").read_text() if os.path.exists("said") else ""
        if said == "large":
            assert torch.get_num_threads() == len(os.sched_getaffinity(0))
            torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        if said == "frozen":
            assert gc.isenabled()
            Path("frozen").write_text(str(gc.get_freeze_count()))
        if said == "register":
            atexit.register(Path("at the end").touch)
        if said == "daemon" and not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            Path("daemon").write_text(str(os.getpid()))
            while True:
                signal.pause()
        if said == "leave at once":
            sys.exit("the first words")

    def forward(self, x):
        said = Path("said").read_text() if os.path.exists("said") else ""
        if said.startswith("leave"):
            sys.exit("the last words" if said == "leave" else None)
        if said == "interrupt":
            raise KeyboardInterrupt
        return super().forward(x)
"""


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no server, which takes long to start, is kept for all tests."""
    monkeypatch.setattr(processes, "_servers", processes._Servers())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """A session on a model that leaves a file in the working directory: what an environment variable says.

    Another file there says what else it does.  One without steps spares its server an import.
    """
    (tmp_path / "left_behind.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def session(*, steps: bool = True) -> Session:
        source = ModelSource(location="left_behind:Net", trust=Trust(code_paths=(str(tmp_path),)))
        if not steps:
            return Session(Subject(source=source), 60.0)
        spec = InputSpec(tensors=(TensorSpec(shape=(2, 3)),), source="here")
        return Session(Subject(source=source, spec=spec, settings=StepSettings()), 60.0)

    return session


def of(session: Session) -> tuple[int, int]:
    """Process id of its subprocess and of the process that this was forked from."""
    pid = session.pid
    assert pid is not None
    return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_sessions_share_what_they_are_forked_from_and_nothing_else(start: Callable[..., Session]) -> None:
    with start() as first, start() as second:
        (one, server), (other, same) = of(first), of(second)
        assert one != other
        assert server == same
        assert isinstance(first.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
        os.kill(one, signal.SIGKILL)
        assert isinstance(first.ask(MeasureJob(plan=ORIGINAL, steps=1)), OutOfMemory)
        assert isinstance(second.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)


@pytest.mark.parametrize("is_set", [False, True])
def test_malloc_keeps_freed_memory_unless_the_user_has_set_it(
    is_set: bool, start: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    if is_set:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    with processes.keep_server(early=True), start() as session:
        assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
    assert ((tmp_path / "malloc").read_text() == "") == is_set


def test_it_has_the_folder_and_the_environment_of_its_session(
    start: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that changes ends no session."""

    def folder(said: str) -> Path:
        made = tmp_path / f"folder {said}"
        made.mkdir()
        monkeypatch.chdir(made)
        return made

    one = folder("one")
    with processes.keep_server(early=True), start() as outer:
        assert isinstance(outer.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
        assert (one / "here").read_text() == ""
        two = folder("two")
        monkeypatch.setenv("MEMOPT_TEST", "changed")
        with start() as inner:
            assert of(inner)[1] != of(outer)[1]
            assert isinstance(inner.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
        assert (two / "here").read_text() == "changed"
        assert isinstance(outer.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)


@pytest.mark.usefixtures("nothing_kept")
def test_a_server_lives_as_long_as_it_is_said_and_after_its_death_another_is_started(
    start: Callable[..., Session],
) -> None:
    """One test, for each of three servers takes long to start."""
    with processes.keep_server(early=True):
        with start(steps=False) as first:
            _, kept = of(first)
        with start(steps=False) as second:
            assert of(second)[1] == kept
    assert not Path(f"/proc/{kept}").exists()

    with start(steps=False) as session:
        _, killed = of(session)
        assert killed != kept
        os.kill(killed, signal.SIGKILL)
        answer = session.ask(MeasureJob(plan=ORIGINAL, steps=1))
        assert isinstance(answer, Crashed)
        assert answer.reason == "the process that it is forked from has ended"

    with start() as session:
        _, told = of(session)
        assert told != killed
        daemon = daemon_of(session)
        os.kill(told, signal.SIGTERM)  # as it is when memopt is killed: what it has started ends with it
        assert wait_for(lambda: not Path(f"/proc/{daemon}").exists())


@pytest.mark.usefixtures("nothing_kept")
def test_a_subprocess_that_is_never_started_is_an_answer(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is killed before it has forked."""
    ask = processes.ForkServer.ask

    def killed_first(server: processes.ForkServer, files: Sequence[int]) -> None:
        server._process.kill()
        server._process.wait()
        ask(server, files)

    monkeypatch.setattr(processes.ForkServer, "ask", killed_first)
    with start(steps=False) as session:
        assert session.pid is None
        answer = session.ask(MeasureJob(plan=ORIGINAL, steps=1))
        assert isinstance(answer, Crashed)
        assert answer.reason == "the process that it is forked from has ended"
        assert session.ended


def test_one_that_imports_after_the_fork(start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU is used."""
    with start() as early:
        monkeypatch.setattr(processes, "_role", lambda: "late")
        with start() as late:
            assert of(late)[1] != of(early)[1]
            assert "libtorch" not in Path(f"/proc/{of(late)[1]}/maps").read_text()
            assert "libtorch" in Path(f"/proc/{of(early)[1]}/maps").read_text()
            assert isinstance(late.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)


def test_a_thread_that_ends_takes_its_own_server_alone(start: Callable[..., Session]) -> None:
    servers = []

    def work() -> None:
        with processes.keep_server(), start(steps=False) as session:
            servers.append(of(session)[1])
            assert Path(f"/proc/{servers[0]}").exists()

    with start() as session:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        (gone,) = servers
        assert not Path(f"/proc/{gone}").exists()
        assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)


def test_threads_work_after_the_fork(start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many as there are processors, and products that are shared out among them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("said").write_text("large")
    with start() as session:
        assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)


@pytest.mark.parametrize(("said", "code", "tail"), [("leave", 1, "the last words"), ("leave silently", 0, "")])
def test_what_exits_is_told(said: str, code: int, tail: str, start: Callable[..., Session]) -> None:
    Path("said").write_text(said)
    with start() as session:
        assert session.ask(MeasureJob(plan=ORIGINAL)) == Crashed(reason=f"exit code {code}", output_tail=tail)


@pytest.mark.parametrize(
    ("said", "failure"),
    [("interrupt", "KeyboardInterrupt"), ("leave at once", "failed: it called sys.exit('the first words') (")],
)
def test_a_model_that_would_end_the_process_fails(said: str, failure: str, start: Callable[..., Session]) -> None:
    """An interruption is none of the user's, who waits in another process: its traceback was shown."""
    Path("said").write_text(said)
    with start() as session:
        found = session.ask(MeasureJob(plan=ORIGINAL))
        assert isinstance(found, StepFailed)
        assert failure in found.message
        assert not session.ended


def test_what_is_imported_is_not_looked_through_for_garbage(start: Callable[..., Session], tmp_path: Path) -> None:
    """Collecting it would take half a second each time, and a copy of the memory that the server shares."""
    (tmp_path / "said").write_text("frozen")
    with start() as session:
        assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
    assert int((tmp_path / "frozen").read_text()) > 50_000


def test_what_is_registered_for_the_end_runs(start: Callable[..., Session], tmp_path: Path) -> None:
    Path("said").write_text("register")
    with start() as session:
        assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
        assert not (tmp_path / "at the end").exists()
    assert (tmp_path / "at the end").exists()


@pytest.mark.parametrize("killed", [False, True])
def test_what_leaves_the_group_ends_too(killed: bool, start: Callable[..., Session]) -> None:
    with start() as session:
        daemon = daemon_of(session)
        if killed:
            os.kill(of(session)[0], signal.SIGKILL)
    assert not Path(f"/proc/{daemon}").exists()


def daemon_of(session: Session) -> int:
    """A process in a session of its own, whose parent has ended."""
    Path("said").write_text("daemon")
    assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
    told = Path("daemon")
    assert wait_for(lambda: told.exists() and told.read_text() != "")
    return int(told.read_text())


ASLEEP = """
import os
import time
from pathlib import Path

import torch


class Net(torch.nn.Linear):
    def forward(self, x):
        Path(os.environ["TMPDIR"], "file").touch()
        print("asleep", flush=True)
        time.sleep(60)
"""


def test_the_end_of_the_terminal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "fell_asleep.py").write_text(ASLEEP)
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)}
    monkeypatch.chdir(temporary)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.save(importlib.import_module("fell_asleep").Net(3, 3), tmp_path / "model.pt")
    command = [sys.executable, "-m", "memopt_cli", "profile", str(tmp_path / "model.pt"), "-i", "2x3"]
    heeded = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    with subprocess.Popen(
        [*command, "--allow-package", "fell_asleep"], env=environment, stderr=-1, preexec_fn=heeded
    ) as process:
        assert wait_for(lambda: any(temporary.glob("memopt-*/file")))
        process.send_signal(signal.SIGHUP)
        _, said = process.communicate()
        assert (process.returncode, said.splitlines()[-1]) == (130, b"error: interrupted")
    assert not any(temporary.glob("memopt-*"))


@pytest.mark.parametrize(("entry", "is_module"), [("", True), (".", False), ("{here}", True)])
def test_a_library_in_the_current_folder(entry: str, is_module: bool, tmp_path: Path) -> None:
    """Neither an empty entry of PYTHONPATH nor the folder's name makes it one."""
    for name in ("signal", "typer", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from here')")
    path = os.pathsep.join((entry.format(here=tmp_path), *filter(None, sys.path)))
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from memopt_cli.__main__ import main; main()"
    start = ["-m", "memopt_cli"] if is_module else ["-c", script]
    done = subprocess.run(
        [sys.executable, *start, "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true in a minute."""
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


PROBE = """
import sys
from pathlib import Path

import torch


def make():
    with Path("seen").open("a") as file:
        print("torch._dynamo" in sys.modules, file=file)
    return torch.nn.Linear(3, 3)
"""


def test_what_steps_need_is_imported_once_for_all_where_steps_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is refused, or is only to be given a plan, costs one import of PyTorch, and no compiler."""
    monkeypatch.chdir(tmp_path)
    Path("probe.py").write_text(PROBE)
    Path("refused.pt").write_bytes(b"cposix\nsystem\n(Vtouch canary\ntR.")
    monkeypatch.setenv("MEMOPT_TEST", "a server of its own")
    given = InputSpec(tensors=(TensorSpec(shape=(2, 3), dtype="float32"),), source="--input")
    source = ModelSource(location="probe.py:make")
    with processes.keep_server():
        for location, answer in (("refused.pt", StepFailed), ("probe.py:make", ModelFacts)):
            with Session(Subject(source=ModelSource(location=location)), 60) as session:
                assert isinstance(session.ask(DescribeJob(spec=given)), answer)
        with Session(Subject(source=source, spec=given), 60) as session:
            assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
    assert Path("seen").read_text() == "False\nTrue\n"


LIBRARY = """
import os
from pathlib import Path

with Path(__file__).with_name("imports").open("a") as file:
    print(os.getpid(), os.getcwd(), os.environ.get("TRITON_CACHE_DIR"), file=file)
"""
HANGING = """
import os
import time

if os.environ["HERE"] != os.getcwd():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass
"""
OF_LIBRARY = """
import os

import torch


def make():
    {setting}
    import norse

    return torch.nn.Linear(3, 3)
"""


@pytest.mark.parametrize(
    ("setting", "importing"),
    [("pass", ["loads it", "the server"]), ("os.environ['A'] = '1'", ["loads it", "measures"])],
)
def test_a_library_of_models_is_imported_once_for_all_that_come_after(
    setting: str, importing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where loading the model changes the environment, each subprocess imports the library by itself."""
    monkeypatch.chdir(tmp_path)
    if "the server" in importing:
        monkeypatch.setenv("MEMOPT_TEST", "a server of its own")
    for name, text in {"norse/__init__.py": LIBRARY, "nets.py": OF_LIBRARY.format(setting=setting)}.items():
        (tmp_path / "libraries" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "libraries" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    given = InputSpec(tensors=(TensorSpec(shape=(2, 3), dtype="float32"),), source="--input")
    source = ModelSource(location=f"{tmp_path / 'libraries' / 'nets.py'}:make")
    who: dict[str, str] = {}
    with processes.keep_server():
        with Session(Subject(source=source), 60) as session:
            child, server = of(session)
            who |= {str(child): "loads it", str(server): "the server"}
            facts = session.ask(DescribeJob(spec=given))
        assert isinstance(facts, ModelFacts)
        processes.import_libraries(facts.libraries, import_path(source), 60.0)
        with Session(Subject(source=source, spec=given), 60) as session:
            who[str(of(session)[0])] = "measures"
            assert isinstance(session.ask(MeasureJob(plan=ORIGINAL, steps=1)), MeasureAnswer)
    imports = [line.split() for line in (tmp_path / "libraries/norse/imports").read_text().splitlines()]
    assert [who[pid] for pid, _, _ in imports] == importing
    for _, folder, caches in (row for row in imports if who[row[0]] == "the server"):
        assert caches == f"{folder}/triton_cache_dir"
        assert folder != str(tmp_path)
        assert not Path(folder).exists()


def test_the_import_of_a_library_for_all_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "norse").mkdir()
    (tmp_path / "norse/__init__.py").write_text(HANGING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path))
    with processes.keep_server(early=True):
        processes.import_libraries(["norse", "norse"], [str(tmp_path), *sys.path], 0.1)
        with Session(Subject(source=ModelSource(location="missing.pt")), 60) as session:
            assert isinstance(session.ask(DescribeJob(spec=None)), StepFailed)


def test_a_subprocess_chooses_among_libraries_of_models_what_the_server_imports() -> None:
    """A hostile model may send any names; a library's examples may train when they are imported."""
    known = ["timm", "snntorch", "transformers.models.bert.modeling_bert", "spikingjelly.activation_based.neuron"]
    made_up = [
        "antigravity",
        "torch.hub",
        "timm.models.hub",
        "transformers.models.bert.modeling_bert.x",
        "transformers.x",
    ]
    assert imported_libraries([*made_up, *known]) == tuple(known)

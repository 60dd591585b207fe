"""What tests of the whole need: the command line in this process, and models that are user code."""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.collecting import pytest_collection, pytest_make_collect_report  # noqa: F401
from tests.starting import _no_process_but_of_the_marked, _watched, pytest_collection_modifyitems  # noqa: F401

settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


def quickly(arguments: tuple[str, ...]) -> list[str]:
    """The steps that run a recommended batch, up to 10 s long, would make up most of a test."""
    return [*arguments, "--longest-step", "0.01"] if "--recommend-batch" in arguments else [*arguments]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    changed: set[str]
    """Files in its folder that are new, gone or different."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """For tiny models, here and in profiling subprocesses: threads would only wait for each other."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _timed_briefly(_one_thread: None) -> Iterator[None]:
    """In this process: steps that are short, for a tenth of the time; no test looks at how long they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt_cli.measure.answers.timed._MIN_TIMED_S", 0.03)
        patch.setattr("memopt_cli.report.lines.BUSY", math.inf)  # tests may run beside anything
        yield


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test remembers anything among the files of whoever runs it."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        # One folder for all tests: another environment would start another fork server, which takes seconds.
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _nothing_remembered(_state: Path) -> None:
    """No test recalls what another one remembered."""
    shutil.rmtree(_state)
    _state.mkdir()


@pytest.fixture(scope="session", autouse=True)
def _one_import(_one_thread: None, _state: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Of PyTorch, for all profiling subprocesses, if any test starts one."""
    from memopt_cli.measure import processes

    early = any(item.get_closest_marker("process") for item in request.session.items)
    with processes.keep_server(early=early):
        yield


@pytest.fixture(autouse=True)
def _one_import_for_the_next(_one_import: None) -> Iterator[None]:
    """After a test that changes the environment, and so starts a server of its own, as well."""
    from memopt_cli.measure import processes

    servers = processes._servers
    of_all = dict(servers.kept or {})
    yield
    for role, server in of_all.items():
        if servers.kept is not None and server.serves():
            servers.kept[role] = servers.used[role] = server


@pytest.fixture(scope="session", autouse=True)
def _seldom_collected() -> Iterator[None]:
    """Garbage is looked for a seventh as often as by default; pytest, which does so five times at the end, is quick."""
    before = gc.get_threshold()
    gc.set_threshold(5_000, 20, 20)
    yield
    gc.set_threshold(*before)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect(_one_thread: None) -> None:
    """A collection of garbage looks at what a module's tests made, and not at all of PyTorch and of the other tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Of this process alone; it goes after the models of a test, which hold on to it."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget what ``torch.compile`` has compiled, before the test and after it."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def user_code() -> str:
    """Folder of modules that stand for the user's own."""
    return str(Path(__file__).parent / "user_code")


@pytest.fixture
def memopt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line in this process, in an empty folder; its profiling subprocesses are real."""
    from memopt_cli.cli.app import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def run(*arguments: str) -> Done:
        before = _files(tmp_path)
        capsys.readouterr()
        code = main(quickly(arguments))
        out, err = capsys.readouterr()
        return Done(code, out, err, _changed(before, _files(tmp_path)))

    return run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiling in this process, in a tenth of the time; what is said still goes through JSON."""
    from memopt_cli.measure import same_code
    from memopt_cli.measure.local import LocalSession
    from memopt_cli.pipeline import prepare
    from memopt_cli.pipeline.memory import inspection
    from memopt_cli.pipeline.out_of_memory import explanation

    for stage in (explanation, inspection, prepare, same_code):
        monkeypatch.setattr(stage, "Session", LocalSession)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, Callable[..., Any]], None]:
    """Have the jobs of one kind answered by a function, of the session and the job and of what asks it really."""
    from memopt_cli.measure.local import LocalSession
    from memopt_cli.measure.runner import Session

    def install(kind: type, answer: Callable[..., Any]) -> None:
        for session in (Session, LocalSession):
            monkeypatch.setattr(session, "ask", _watching(session.ask, kind, answer))

    return install


def _watching(ask: Callable[..., Any], kind: type, answer: Callable[..., Any]) -> Callable[..., Any]:
    def watched(session: Any, job: Any) -> Any:
        if isinstance(job, kind):
            return answer(session, job, lambda job: ask(session, job))
        return ask(session, job)

    return watched


@pytest.fixture(scope="module")
def spawn_memopt() -> Callable[..., Done]:
    """Run the command line in a process of its own, in a folder."""

    def run(folder: Path, *arguments: str, **options: Any) -> Done:
        code = "import sys; from memopt_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
        before = _files(folder)
        done = subprocess.run(
            [sys.executable, "-c", code, *quickly(arguments)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
        return Done(done.returncode, done.stdout, done.stderr, _changed(before, _files(folder)))

    return run


def _files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in ``folder`` by their paths, but for what Python keeps of code it imported."""
    found = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.parent.name != "__pycache__"}


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

"""What a confined process cannot do, and what it still can.

Run as a script, this file confines itself, tries everything and tells what became of it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.errors import StepError, UnsafeFileError
from memopt_cli.measure import sandbox, seccomp
from memopt_cli.runtime.lifted.operators import ScriptError

MACHINE = platform.machine()
pytestmark = pytest.mark.skipif(sys.platform != "linux" or MACHINE not in ("x86_64", "aarch64"), reason="no filter")
Act = Callable[[], Any]
ERRORS = {"refused": "EACCES", "is not there": "ENOSYS", "is not known": "ENOTTY", "too large": "EFBIG", "works": ""}


def call(x86_64: int, aarch64: int, *arguments: Any) -> None:
    """A system call by its number."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall((x86_64, aarch64)[MACHINE == "aarch64"], *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def run_from_memory() -> None:
    copy = os.memfd_create("true", 0)
    os.write(copy, Path("/bin/true").read_bytes())
    os.execve(copy, ["true"], {})


def run_in_thread() -> None:
    thread = threading.Thread(target=threading.get_native_id)
    thread.start()
    thread.join()


def run_in_child() -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def call_in_32_bits() -> None:
    """Another table of numbers: that of ``getpid`` is 20."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    pid = os.fork()
    if not pid:
        os._exit(max(-function(), 0))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:  # killed: a kernel without such calls
        raise OSError(errno.EACCES, "refused")


def refused(victim: str, terminal: int) -> dict[str, Act]:
    """What Landlock alone would mostly allow; ``terminal`` is open."""
    file, other, unix = os.open(victim, os.O_RDONLY), os.getppid(), socket.AF_UNIX
    acts: dict[str, Act] = {
        "a socket that has a path": lambda: socket.socket(unix, socket.SOCK_DGRAM).sendto(b"x", f"{victim}.socket"),
        "a pair of sockets": lambda: socket.socketpair(unix, socket.SOCK_DGRAM),
        "TCP": socket.socket,
        "MPTCP": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262),
        "UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "shared memory": lambda: call(29, 194, 0, 4096, 0o1600),
        "a semaphore": lambda: call(64, 190, 0, 1, 0o1600),
        "a queue": lambda: call(68, 186, 0, 0o1600),
        "a queue that has a name": lambda: call(240, 180, b"memopt", 0o102, 0o600, None),
        "a key": lambda: call(250, 219, 0, -3, 1),
        "limits of another": lambda: resource.prlimit(other, resource.RLIMIT_CPU),
        "priority of another": lambda: os.setpriority(os.PRIO_PROCESS, other, 0),
        "priority of all": lambda: os.setpriority(os.PRIO_USER, 0, 0),
        "processors of another": lambda: os.sched_setaffinity(other, os.sched_getaffinity(other)),
        "a handle of another": lambda: os.pidfd_open(other),
        "memory of another": lambda: os.open(f"/proc/{other}/mem", os.O_RDONLY),
        "the environment of another": Path(f"/proc/{other}/environ").read_bytes,
        "a file that another has open": lambda: os.open(f"/proc/{other}/fd/1", os.O_WRONLY | os.O_NONBLOCK),
        "a session": os.setsid,
        "a group": lambda: os.setpgid(0, 0),
        "a program": lambda: os.execv("/bin/true", ["true"]),
        "a program in memory": run_from_memory,
        "a namespace": lambda: call(272, 97, 0x10000000),
        "a clone in a namespace": lambda: call(56, 220, 0x10000011, 0, 0, 0, 0),
        "a mount": lambda: call(165, 40, b"x", b"/tmp", b"tmpfs", 0, None),
        "a ring": lambda: call(425, 425, 1, bytes(120)),
        "a mode": lambda: os.chmod(victim, 0o700),
        "a mode of what is open": lambda: os.fchmod(file, 0o700),
        "times": lambda: os.utime(victim, (0, 0)),
        "times of what is open": lambda: os.utime(file, (0, 0)),
        "an attribute": lambda: os.setxattr(victim, "user.x", b"x"),
        "an owner": lambda: os.chown(victim, -1, -1),
        "writing": lambda: os.open(victim, os.O_WRONLY),
        "emptying": lambda: os.open(victim, os.O_RDONLY | os.O_TRUNC),
        "cutting": lambda: os.truncate(victim, 0),
        "signals from a file": lambda: fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid()),
        "what is typed": lambda: os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY),
        "what is typed elsewhere": lambda: os.open(os.ttyname(terminal), os.O_RDONLY | os.O_NOCTTY),
        "writing to a terminal": lambda: os.open(os.ttyname(terminal), os.O_WRONLY | os.O_NOCTTY),
        "a terminal by way of who has it": lambda: os.open(f"/proc/self/fd/{terminal}", os.O_RDONLY | os.O_NOCTTY),
        "a terminal of its own": lambda: os.open("/dev/ptmx", os.O_RDONLY | os.O_NOCTTY),
        "messages of the kernel": lambda: os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK),
        "watching files": lambda: call(294, 26, 0),
        "watching a disk": lambda: call(300, 262, 0, os.O_RDONLY),
    }
    return acts | ({"calls in 32 bits": call_in_32_bits} if MACHINE == "x86_64" else {})


def working(victim: str, in_memory: str) -> dict[str, Act]:
    file = os.open(victim, os.O_RDONLY)
    return {
        "a file of its own": lambda: tempfile.TemporaryFile().truncate(7),
        "a thread": run_in_thread,
        "a child": run_in_child,
        "what it is": Path("/proc/self/status").read_text,
        "reading": lambda: os.pread(file, 1, 0),
        "reading what was not open": Path(victim).read_bytes,
        "reading in its folder": lambda: tempfile.NamedTemporaryFile().read(),
        "listing devices": lambda: os.listdir("/dev"),
        "random bytes": lambda: Path("/dev/urandom").open("rb").read(1),
        "writing to nowhere": lambda: Path("/dev/null").write_bytes(b"x"),
        "a file in memory": Path(in_memory).read_bytes,
        "its limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        "its processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
        "its priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0)),
        "not waiting": lambda: os.set_blocking(os.pipe()[0], False),
        "staying open": lambda: os.set_inheritable(os.dup(file), True),
        "a lock": lambda: fcntl.flock(file, fcntl.LOCK_SH),
    }


def everything(
    folder: str = "", victim: str = os.devnull, terminal: int = -1, in_memory: str = ""
) -> dict[str, dict[str, Act]]:
    """By what becomes of it."""
    size_of_block = 2
    return {
        "refused": refused(victim, terminal),
        "is not there": {
            "a clone by a structure": lambda: call(435, 435, bytes(88), 88),
            "opening by a structure": lambda: call(437, 437, -100, victim.encode(), bytes(24), 24),
        },
        "is not known": {
            "a request to a file system": lambda: fcntl.ioctl(os.open(victim, os.O_RDONLY), size_of_block, bytes(4))
        },
        "too large": {"a file": lambda: os.ftruncate(os.open(f"{folder}/large", os.O_RDWR | os.O_CREAT), 17 << 30)},
        "works": working(victim, in_memory),
    }


def outcome(act: Act) -> str:
    """The name of the error, if there is one; tried in a child, which may become another program."""
    pid = os.fork()
    if not pid:
        try:
            act()
        except OSError as error:
            os._exit(error.errno or 255)
        except BaseException:
            os._exit(255)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return errno.errorcode.get(code, str(code)) if code else ""


def main(folder: str, victim: str, in_memory: str) -> None:
    acts = everything(folder, victim, os.openpty()[1], in_memory)
    missing = sandbox.confine(folder, gpu=False)
    outcomes = {kind: {name: outcome(act) for name, act in some.items()} for kind, some in acts.items()}
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    sys.stdout.write(
        json.dumps({"missing": missing, "outcomes": outcomes, "privileges": int(effective.split()[1], 16)})
    )


def python(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a confined process found out."""
    folder, outside = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("outside")
    (outside / "victim").write_text("as it was")
    before = (outside / "victim").stat()
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as in_memory:
        found = json.loads(python(__file__, str(folder), str(outside / "victim"), in_memory.name))
    if found["missing"]:
        pytest.skip(found["missing"])
    return found | {"changed": (outside / "victim").stat().st_ctime_ns - before.st_ctime_ns}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, acts in everything().items() for n in acts])
def test_confined(kind: str, name: str, confined: Any) -> None:
    assert confined["outcomes"][kind][name] == ERRORS[kind]


def test_nothing_is_changed_outside(confined: Any) -> None:
    assert not confined["changed"]


def test_root_is_as_others_are(confined: Any) -> None:
    """But for what it may read."""
    assert confined["privileges"] & ~4 == 0


@pytest.mark.usefixtures("confined")
def test_every_call_of_the_table_is_refused() -> None:
    outcomes = python("-c", EVERY_CALL.format(machine=MACHINE))
    assert set(json.loads(outcomes).values()) == {errno.EACCES}


EVERY_CALL = """
import ctypes, json
from memopt_cli.measure import seccomp
assert not seccomp.install(gpu=False, signals=False)
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({{n: (libc.syscall(n, -1, -1, -1, -1, -1, -1), ctypes.get_errno())[1]
                   for n in seccomp._numbers(seccomp._REFUSED, "{machine}")}}))
"""


HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    path = Path("/usr/include", HEADERS[machine])
    if not path.exists():
        pytest.skip("no headers of the kernel")
    defined = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", path.read_text(), re.MULTILINE))
    source = Path(seccomp.__file__).read_text()
    column = list(HEADERS).index(machine)
    ours = {name: numbers[column] for name, *numbers in re.findall(r"\b([a-z_]\w+) (\d+|-) (\d+|-)(?=[\s\",])", source)}
    assert len(ours) > 90
    newer = {name for name, number in ours.items() if number != "-" and int(number) > max(map(int, defined.values()))}
    assert {n: ours[n] for n in ours.keys() - newer} == {n: defined.get(n, "-") for n in ours.keys() - newer}


@pytest.mark.usefixtures("confined")
def test_what_a_gpu_needs_stays_open() -> None:
    """A listening socket, through which nobody else can be reached."""
    python("-c", FOR_A_GPU)


FOR_A_GPU = """
import errno, os, socket
from memopt_cli.measure import seccomp
assert not seccomp.install(gpu=True, signals=False)

def error(act):
    try:
        act()
    except OSError as error:
        return error.errno

open_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
assert not error(lambda: open_socket.bind(b"\\0memopt-" + str(os.getpid()).encode()))
assert not error(open_socket.listen)
assert error(lambda: open_socket.connect("/x")) == errno.ENOENT
assert error(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) == errno.EACCES
assert error(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)) == errno.EACCES
"""


@pytest.mark.usefixtures("confined")
def test_threads_that_a_gpu_driver_names(tmp_path: Path) -> None:
    python("-c", NAMED_THREADS, str(tmp_path))


NAMED_THREADS = """
import os, sys, threading
from pathlib import Path
from memopt_cli.measure import sandbox
assert not sandbox.confine(sys.argv[1], gpu=True)
pause, named = threading.Event(), threading.Event()

def name_itself():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("itself")
    named.set()
    pause.wait()

thread = threading.Thread(target=name_itself, daemon=True)
thread.start()
assert named.wait(60)
for process in ("self", os.getpid()):
    name = Path(f"/proc/{process}/task/{thread.native_id}/comm")
    name.write_text("another")
    assert name.read_text() == "another\\n"
for other in ("/proc/self/comm", f"/proc/{os.getppid()}/task/{os.getppid()}/comm"):
    try:
        Path(other).write_text("refused")
    except PermissionError:
        continue
    sys.exit(other)
os._exit(0)
"""


@pytest.mark.usefixtures("confined")
def test_signals_where_landlock_knows_none() -> None:
    python("-c", SIGNALS)


SIGNALS = """
import os, signal
from memopt_cli.measure import seccomp
assert not seccomp.install(gpu=False, signals=True)
try:
    os.kill(os.getppid(), 0)
except PermissionError:
    signal.raise_signal(signal.SIGCHLD)
    os.kill(os.getpid(), 0)
    os._exit(0)
os._exit(1)
"""


@pytest.mark.usefixtures("confined")
def test_threads_that_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP names them by their numbers."""
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    python("-c", BOUND)


BOUND = """
import os, threading
from memopt_cli.measure import seccomp
assert not seccomp.install(gpu=False, signals=False)
done = []
def bind():
    os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))
    done.append(1)
thread = threading.Thread(target=bind)
thread.start()
thread.join()
assert done
"""


def test_another_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert seccomp.install(gpu=False, signals=False) == "memopt has no filter of system calls for riscv64"


if __name__ == "__main__":
    main(*sys.argv[1:])


def _raised(error: BaseException, *, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


WORDS = "unable to open file </x> in read-write mode: Permission denied (13)"


@pytest.mark.parametrize(
    ("error", "is_the_wall"),
    [
        (PermissionError(13, "Permission denied", "/nowhere"), True),
        (RuntimeError(WORDS), True),
        (RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nmore"), True),
        (_raised(StepError("its step failed"), cause=PermissionError(13, "Permission denied")), True),
        # What follows is said by the file, which would have the user take the wall down.
        (UnsafeFileError(f"model.pt was not loaded: {WORDS}"), False),
        (_raised(StepError("module 'Permission denied' rejected its input"), cause=RuntimeError("shapes")), False),
        (ScriptError(WORDS), False),
        (RuntimeError(f"The following operation failed in the TorchScript interpreter.\n{WORDS}"), False),
        (KeyError(WORDS), False),
    ],
)
def test_only_a_refusal_is_taken_for_one(error: BaseException, is_the_wall: bool) -> None:
    assert sandbox.is_refusal(error) is is_the_wall


COMPILES = """
import os, sys, tempfile
from memopt_cli.measure import sandbox
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

sandbox.confine(sys.argv[1], gpu=False)
for path in (cache_dir(), triton_cache_dir(0), tempfile.gettempdir()):
    os.makedirs(path, exist_ok=True)
    open(os.path.join(path, "compiled"), "w").close()
    print(path)
"""


@pytest.mark.usefixtures("confined")
def test_caches_of_compilers_are_in_the_folder_and_the_users_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, users = tmp_path / "own", tmp_path / "users"
    folder.mkdir()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        (users / name).mkdir(parents=True)
        monkeypatch.setenv(name, str(users / name))
    places = python("-c", COMPILES, str(folder)).split()
    assert len(places) == 3
    assert all(Path(place).is_relative_to(folder) for place in places)
    assert not [path for path in users.rglob("*") if path.is_file()]

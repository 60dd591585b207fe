"""A sandbox around a process that loads and runs a stranger's model, in addition to the checks of the file.

It is made of Linux's Landlock, a filter of system calls (:mod:`memopt_cli.measure.seccomp`) and the loss of root's
privileges; it needs no privilege itself.  A confined process can read the files that it could read before, but no
terminal; it can write only to its own folder; it starts no programs, opens no connections and does nothing to
other processes.  Nothing lifts the sandbox again.  If the kernel cannot refuse a part of this, the user is told.

Sources: https://docs.kernel.org/userspace-api/landlock.html, capabilities(7)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from memopt_cli.errors import error_chain
from memopt_cli.measure import seccomp

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
"""Numbers of Landlock's system calls, the same on every processor that Linux runs on."""
_ASK_VERSION, _BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38  # LANDLOCK_CREATE_RULESET_VERSION, …_RULE_PATH_BENEATH, prctl's

# Rights on files, LANDLOCK_ACCESS_FS_*.
_EXECUTE, _WRITE, _READ, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICES: Final = 1 << 6 | 1 << 11
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock -> the number of rights on files that it knows."""
_TCP: Final = 0b11  # to bind, and to connect
_SCOPES: Final = 0b11
"""Bits for signals, and for sockets without a name in the file system."""
_NET_FROM = 4
"""First version of Landlock with rules for connections."""
_SCOPES_FROM = 6
"""First version of Landlock with scopes."""

_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
"""Devices in ``/dev`` that libraries use.  Terminals are not among them: a process could read what the user types
there, or open a new one (``ptmx``)."""
_GPU_DEVICES: Final = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd")
_THREADS: Final = "/proc/self/task"
"""The folder to which NVIDIA's driver, since 570, writes the names of its threads, or it fails with error 304."""
COMPILER_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
CACHES: Final = (COMPILER_CACHE, "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")
"""Variables that name the folders for the caches of libraries."""

_IN_MEMORY: Final = "/dev/shm"
_MAX_FILE_BYTES: Final = 16 << 30
"""Maximum size in bytes of a file that a confined process writes; a model that it saves goes to the parent instead."""
_CAPABILITIES: Final = 0x20080522  # version 3 of the interface of capget(2)
_READ_ANYTHING: Final = 1 << 2
"""``CAP_DAC_READ_SEARCH``, which lets root read all files, confined or not."""

HINT: Final = (
    "It ran confined: it may write only to a temporary folder, and may not read a terminal, change modes or times of "
    "files, start programs, open connections or touch other processes. If you trust the model and its code: "
    "`--no-sandbox`."
)
_REFUSALS: Final = re.compile(
    r".*: Permission denied( \(13\))?|CUDA error: OS call failed or operation not supported on this OS"
)
_ERROR_CLASSES: Final = ("RuntimeError", "AcceleratorError")
"""The first lines of PyTorch's errors for a refusal, and the classes of these errors."""


_confined = False


def is_confined() -> bool:
    """Return whether this process is confined."""
    return _confined


def confine(folder: str, *, gpu: bool) -> str:
    """Confine this process to ``folder``, for good; return what the kernel cannot refuse, empty if it refuses all.

    Landlock restricts only the calling thread and threads that it starts later, so this must come before any other
    thread starts.  Temporary files and the caches of compilers go to the folder.
    """
    if sys.platform != "linux":
        return f"{platform.system()} has no Landlock"
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    now = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft, hard = (_MAX_FILE_BYTES if n == resource.RLIM_INFINITY else min(n, _MAX_FILE_BYTES) for n in now)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _give_up_privileges(libc)
    missing = _restrict_files(libc, version, folder, gpu=gpu)
    unfiltered = seccomp.install(gpu=gpu, signals=version < _SCOPES_FROM)
    global _confined
    _confined = not (missing and unfiltered)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ |= caches_in(folder)
    return "; ".join(filter(None, (missing, unfiltered)))


def caches_in(folder: str) -> dict[str, str]:
    """Return the variables that put the caches of libraries into ``folder``."""
    return {name: os.path.join(folder, name.lower()) for name in CACHES}


def _restrict_files(libc: ctypes.CDLL, version: int, folder: str, *, gpu: bool) -> str:
    """Restrict access to files by Landlock; return the reason if that fails."""
    if version < 1:
        return "this kernel has no Landlock, or it is switched off"
    rights = (1 << _RIGHTS.get(version, max(_RIGHTS.values()))) - 1
    ruleset = libc.syscall(_CREATE, *_attributes(version, rights), ctypes.c_uint32(0))
    try:
        _allow(libc, ruleset, "/", _READ_FOLDER)
        for place in _places_of_files():
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                _allow(libc, ruleset, place, _READ)
        _allow(libc, ruleset, folder, rights & ~(_EXECUTE | _MAKE_DEVICES))
        for device in _devices((*_DEVICES, *_GPU_DEVICES) if gpu else _DEVICES):
            _allow(libc, ruleset, str(device), rights & (_READ | _WRITE | _TRUNCATE | _IOCTL))
        if gpu:
            _allow(libc, ruleset, _THREADS, rights & (_WRITE | _TRUNCATE))
            # Never closed: the kernel may forget a folder that nobody has open, and the rule with it.
            os.open(_THREADS, os.O_PATH | os.O_CLOEXEC)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)):
            return f"Landlock refused: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    return ""


def _places_of_files() -> Iterator[str]:
    """Yield the folders and files in ``/`` except ``/dev``: Landlock can allow a path, but not make an exception in it.

    In ``/dev``, only ``/dev/shm`` holds ordinary files, and a model may be among them.
    """
    with os.scandir("/") as entries:
        yield from (entry.path for entry in entries if entry.name != "dev" and not entry.is_symlink())
    if os.path.isdir(_IN_MEMORY):
        yield _IN_MEMORY


def _give_up_privileges(libc: ctypes.CDLL) -> None:
    """Drop all of root's privileges but the privilege to read every file; dropping needs no privilege."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES, 0))
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, the lower halves first
    if libc.capget(header, sets) == 0:
        libc.capset(header, (ctypes.c_uint32 * 6)(sets[0] & _READ_ANYTHING, sets[1] & _READ_ANYTHING))


def is_refusal(error: BaseException) -> bool:
    """Return whether the sandbox may have caused ``error``, or an exception that caused it.

    Types decide above all: a file can choose the messages of exceptions, and must not be able to show the user
    :data:`HINT`, which names the switch that turns the sandbox off.
    """
    for cause in error_chain(error):
        first = str(cause).partition("\n")[0] if type(cause).__name__ in _ERROR_CLASSES else ""
        if isinstance(cause, PermissionError) or _REFUSALS.fullmatch(first):
            path = getattr(cause, "filename", None)
            is_unreadable = isinstance(path, str | bytes) and os.path.exists(path) and not os.access(path, os.R_OK)
            return not is_unreadable  # a file whose mode forbids reading is unreadable without a sandbox as well
    return False


def _attributes(version: int, rights: int) -> tuple[bytes, ctypes.c_size_t]:
    """Return the attributes of a ruleset that this ``version`` of Landlock knows, and their size."""
    fields = [rights]
    if version >= _NET_FROM:
        fields.append(_TCP)
    if version >= _SCOPES_FROM:
        fields.append(_SCOPES)
    return struct.pack(f"={len(fields)}Q", *fields), ctypes.c_size_t(8 * len(fields))


def _devices(patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from (path for path in Path("/dev").glob(pattern) if path.is_char_device())


def has_opened_gpu() -> bool:
    """Return whether this process has a device file of a GPU open."""
    gpus = set(_devices(_GPU_DEVICES))
    with contextlib.suppress(OSError):
        return any(file.resolve() in gpus for file in Path("/proc/self/fd").iterdir())
    return True


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(_BENEATH), rule, ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(descriptor)

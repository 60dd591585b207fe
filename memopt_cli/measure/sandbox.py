"""A second wall around a process that loads and runs somebody's file: Linux's Landlock, a filter of system calls and
the loss of privileges.  It needs none.

Confined, a process reads the files that it could read before, but no terminal, writes to a folder of its own alone,
starts no programs, opens no connections and does nothing to other processes.  Nothing lifts it again.  What a kernel
cannot refuse is said.

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

from memopt_cli.measure import seccomp

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
"""Numbers of the system calls, the same on every processor that Linux runs on."""
_ASK_VERSION, _BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38

_EXECUTE, _WRITE, _READ, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICES: Final = 1 << 6 | 1 << 11
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights on files a version of Landlock knows."""
_TCP: Final = 0b11
_SCOPES: Final = 0b11
"""Signals, and sockets without a name in the file system."""
_NET_FROM, _SCOPES_FROM = 4, 6

_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
"""Those of ``/dev`` that libraries use.  From a terminal it could take what is typed, or have one made (``ptmx``)."""
_GPU_DEVICES: Final = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd")
_THREADS: Final = "/proc/self/task"
"""NVIDIA's driver writes the names of its threads there, since 570, and ends with error 304 if it cannot."""
_CACHES: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")
"""Where libraries write what they compile or look up."""

_IN_MEMORY: Final = "/dev/shm"
_LARGEST_FILE_BYTES: Final = 16 << 30
"""Of what a process writes that is not asked to: a model that is saved goes to the parent."""
_CAPABILITIES: Final = 0x20080522
_READ_ANYTHING: Final = 1 << 2
"""``CAP_DAC_READ_SEARCH``: what root reads, it can read confined."""

HINT: Final = (
    "It ran confined: it may write to a temporary folder alone, read no terminal, change no modes or times of files, "
    "start no programs, open no connections and do nothing to other processes. If you trust the model and its code: "
    "--no-sandbox."
)
_REFUSALS: Final = re.compile(
    r".*: Permission denied( \(13\))?|CUDA error: OS call failed or operation not supported on this OS"
)
_OF_LIBRARIES: Final = ("RuntimeError", "AcceleratorError")
"""How PyTorch begins when it was refused something, and the classes by which it says so."""


_confined = False


def is_confined() -> bool:
    """Whether this process is behind the wall."""
    return _confined


def confine(folder: str, *, gpu: bool) -> str:
    """Confine this process to ``folder``, for good; why that cannot be, or empty.

    To be called before there is a second thread.  Temporary files and the caches of compilers go to the folder.
    """
    if sys.platform != "linux":
        return f"{platform.system()} has no Landlock"
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    _bound_files()
    _give_up_privileges(libc)
    missing = _restrict_files(libc, version, folder, gpu=gpu)
    unfiltered = seccomp.install(gpu=gpu, signals=version < _SCOPES_FROM)
    global _confined
    _confined = not (missing and unfiltered)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ |= {name: os.path.join(folder, name.lower()) for name in _CACHES}
    return "; ".join(filter(None, (missing, unfiltered)))


def _restrict_files(libc: ctypes.CDLL, version: int, folder: str, *, gpu: bool) -> str:
    """Put up Landlock; why that cannot be, or empty."""
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
            # Opened for good: the kernel may forget a folder that nobody has open, and the rule with it.
            os.open(_THREADS, os.O_PATH | os.O_CLOEXEC)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)):
            return f"Landlock refused: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    return ""


def _places_of_files() -> Iterator[str]:
    """List what lies in the root folder but for ``/dev``: Landlock allows what is beneath a path, and excepts nothing.

    Of ``/dev`` only the file system in memory has files, which may be a model's.
    """
    with os.scandir("/") as entries:
        yield from (entry.path for entry in entries if entry.name != "dev" and not entry.is_symlink())
    if os.path.isdir(_IN_MEMORY):
        yield _IN_MEMORY


def _bound_files() -> None:
    now = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft, hard = (_LARGEST_FILE_BYTES if n == resource.RLIM_INFINITY else min(n, _LARGEST_FILE_BYTES) for n in now)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _give_up_privileges(libc: ctypes.CDLL) -> None:
    """Those of root; nobody needs leave to have fewer."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES, 0))
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, the lower halves first
    if libc.capget(header, sets) == 0:
        libc.capset(header, (ctypes.c_uint32 * 6)(sets[0] & _READ_ANYTHING, sets[1] & _READ_ANYTHING))


def is_refusal(error: BaseException) -> bool:
    """Whether an exception, or what caused it, may be the wall's.

    Told by its type above all: most of what an exception says is the file's, and a file must not ask for :data:`HINT`.
    """
    seen: BaseException | None = error
    while seen is not None:
        says = str(seen).partition("\n")[0] if type(seen).__name__ in _OF_LIBRARIES else ""
        if isinstance(seen, PermissionError) or _REFUSALS.fullmatch(says):
            return not _is_unreadable(seen)
        seen = seen.__cause__ or seen.__context__
    return False


def _is_unreadable(error: BaseException) -> bool:
    """Whether a file has such a mode that it could not be read outside of the wall either."""
    path = getattr(error, "filename", None)
    return isinstance(path, str | bytes) and os.path.exists(path) and not os.access(path, os.R_OK)


def _attributes(version: int, rights: int) -> tuple[bytes, ctypes.c_size_t]:
    """What the rules are about, as long as the kernel knows it."""
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
    """Whether this process has a GPU's device file open, or inherited it open."""
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

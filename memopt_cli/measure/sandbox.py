"""A second wall around a process that loads and runs somebody's file: Linux's Landlock, without any privilege.

Confined, a process reads what it could read before, writes to a folder of its own alone, starts no programs and opens
no TCP connections.  Nothing lifts it again.  Older kernels refuse less, which is said.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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

_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_GPU_DEVICES: Final = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd")
_CACHES: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")
"""Where libraries write what they compile or look up."""

HINT: Final = (
    "It ran confined: it may write to a temporary folder alone, start no programs and open no connections.  "
    "If you trust the model and its code: --no-sandbox."
)


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
    if version < 1:
        return "this kernel has no Landlock, or it is switched off"
    rights = (1 << _RIGHTS.get(version, max(_RIGHTS.values()))) - 1 & ~(_READ | _READ_FOLDER)
    ruleset = libc.syscall(_CREATE, *_attributes(version, rights), ctypes.c_uint32(0))
    try:
        _allow(libc, ruleset, folder, rights & ~(_EXECUTE | _MAKE_DEVICES))
        for device in _devices(gpu=gpu):
            _allow(libc, ruleset, str(device), rights & (_WRITE | _TRUNCATE | _IOCTL))
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)):
            return f"Landlock refused: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    global _confined
    _confined = True
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ |= {name: os.path.join(folder, name.lower()) for name in _CACHES}
    return "" if version >= _NET_FROM else "this kernel confines what is written, but not connections"


def is_refusal(error: BaseException) -> bool:
    """Whether an exception, or what caused it, may be the wall's."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PermissionError) or "Permission denied" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _attributes(version: int, rights: int) -> tuple[bytes, ctypes.c_size_t]:
    """What the rules are about, as long as the kernel knows it."""
    fields = [rights]
    if version >= _NET_FROM:
        fields.append(_TCP)
    if version >= _SCOPES_FROM:
        fields.append(_SCOPES)
    return struct.pack(f"={len(fields)}Q", *fields), ctypes.c_size_t(8 * len(fields))


def _devices(*, gpu: bool) -> Iterator[Path]:
    patterns = (*_DEVICES, *(_GPU_DEVICES if gpu else ()))
    for pattern in patterns:
        yield from (path for path in Path("/dev").glob(pattern) if path.is_char_device())


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(_BENEATH), rule, ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(descriptor)

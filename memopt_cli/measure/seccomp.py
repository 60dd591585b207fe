"""A seccomp filter against the system calls that Landlock leaves open to a confined process.

Landlock does not cover sockets with a path, memory and queues with a key, limits and priorities of other processes, nor
modes, times and attributes of files.

A refused call fails with ``EACCES``, as under Landlock.  Two kinds of calls fail as if the kernel did not have them, so
that libraries fall back to an older call: calls newer than the tables below, and calls that pass their arguments in
memory (``clone3``), where a filter cannot look.  A filter sees only the numbers in registers: it cannot tell whether a
thread id belongs to this process.

The kernel runs the filter before every call, as a program of a small machine with one register: load a word (the number
of the call, or an argument), compare it, skip instructions, return a verdict.  Installing it needs no privilege.

Sources: https://docs.kernel.org/userspace-api/seccomp_filter.html; the numbers are from Linux 6.18, in
``arch/x86/entry/syscalls/syscall_64.tbl`` and, for aarch64, ``include/uapi/asm-generic/unistd.h``; the constants are in
``include/uapi``: ``linux/{seccomp,filter,bpf_common,audit,sched,fcntl}.h``, ``asm-generic/{ioctls,fcntl}.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST: Final = 469
"""Maximum number of any call that is known here.  The numbers of x32 are far above."""

_REFUSED: Final = """
  # memory, semaphores, queues and secrets that have a key or a name
    shmget 29 194  shmat 30 196  shmctl 31 195  shmdt 67 197  semget 64 190  semop 65 193  semctl 66 191
    semtimedop 220 192  msgget 68 186  msgsnd 69 189  msgrcv 70 188  msgctl 71 187  mq_open 240 180  mq_unlink 241 181
    keyctl 250 219  add_key 248 217  request_key 249 218
  # other processes
    ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440
    process_mrelease 448 448  kcmp 312 272  pidfd_open 434 434  pidfd_getfd 438 438  pidfd_send_signal 424 424
    ioprio_set 251 30  move_pages 279 239  migrate_pages 256 238
  # leaving the group that is killed as one
    setsid 112 157  setpgid 109 154
  # programs, and other ways into the kernel
    execve 59 221  execveat 322 281  io_uring_setup 425 425  io_uring_enter 426 426  io_uring_register 427 427
    bpf 321 280  userfaultfd 323 282  perf_event_open 298 241  init_module 175 105  finit_module 313 273
    delete_module 176 106  kexec_load 246 104  kexec_file_load 320 294
  # namespaces and mounts
    unshare 272 97  setns 308 268  chroot 161 51  pivot_root 155 41  mount 165 40  umount2 166 39  open_tree 428 428
    open_tree_attr 467 467  move_mount 429 429  fsopen 430 430  fsconfig 431 431  fsmount 432 432  fspick 433 433
    mount_setattr 442 442
  # notifications of what others do to files
    inotify_init 253 -  inotify_init1 294 26  inotify_add_watch 254 27  inotify_rm_watch 255 28  fanotify_init 300 262
    fanotify_mark 301 263
  # files: modes, owners, times, attributes; opening by a handle, and truncating by a path without opening
    chmod 90 -  fchmod 91 52  fchmodat 268 53  fchmodat2 452 452  chown 92 -  fchown 93 55  lchown 94 -
    fchownat 260 54  utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88  setxattr 188 5  lsetxattr 189 6
    fsetxattr 190 7  setxattrat 463 463  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
    removexattrat 466 466  file_setattr 469 469  open_by_handle_at 304 265  truncate 76 45
"""
"""Names of calls that are refused, with their numbers on x86_64 and aarch64, ``-`` if there is none."""
_MISSING: Final = "clone3 435 435  openat2 437 437"
"""Calls with arguments in memory, which fail as if they did not exist: libraries then call ``clone`` and ``openat``."""
_CONNECTING: Final = "connect 42 203"
"""The one call that makes a connection.  With a GPU, it fails as if nobody listened: NVIDIA's driver looks for a
Multi-Process Service, and works without one."""
_SOCKETS: Final = "socket 41 198  socketpair 53 199"
_LISTENING: Final = "bind 49 200  listen 50 201"
_SIGNALS: Final = "kill 62 129  tkill 200 130  tgkill 234 131  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240"
_SCHEDULING: Final = "sched_setscheduler 144 119  sched_setparam 142 118  sched_setattr 314 274"
_BINDING: Final = "sched_setaffinity 203 122"
_BINDING_VARIABLES: Final = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
"""Variables that make OpenMP bind its threads to processors; it would fail if ``sched_setaffinity`` were refused."""

_ALL: Final = 0xFFFFFFFF
"""The bits that the kernel reads of each argument checked here."""
_NAMESPACES: Final = 0x7E020000  # CLONE_NEW*
_TRUNCATE: Final = 0x200  # O_TRUNC
_UNIX, _STREAM_BITS, _STREAM = 1, 0b1011, 0b0001
"""The family of local sockets; and a mask with the value that the types 1 (stream) and 5 (packets in sequence) have
under it.  Their messages go only to the socket that they are connected with, and ``connect`` is refused."""
_IOCTLS: Final = (0x5401, 0x802C542A, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x5452)
"""Requests for the settings of a terminal, the bytes to read, blocking, and inheritance by a new program."""
_GPU: Final = (0x0000, 0x4600, 0x4B00, 0x6400)
"""Kinds of requests to nvidia-uvm, nvidia, kfd and dri."""
_FCNTLS: Final = (*range(8), 9, 11, *range(36, 39), *range(1027, 1041))
"""Commands of ``fcntl``, except the commands that choose whom to signal and that lease the file."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule that an argument of some calls may only have certain values."""

    calls: str
    """Table of the calls, in the form of :data:`_REFUSED`."""
    argument: int
    """Index of the argument."""
    allowed: tuple[tuple[int, int], ...]
    """Pairs of a mask and the value that the masked argument may have."""
    otherwise: int = errno.EACCES
    """Error for any other value."""


def install(*, gpu: bool, signals: bool) -> str:
    """Filter the system calls of this process and its children, for good; return the reason if that fails.

    ``gpu``: allow the calls that drivers of GPUs make.  ``signals``: let this process signal only itself, for kernels
    in which Landlock cannot see to that.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return f"memopt has no filter of system calls for {machine}"
    program = b"".join(_program(machine, _rules(gpu=gpu, signals=signals), gpu=gpu))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    set_filter, for_all_threads, no_mitigations = 1, 1, 4  # before Linux 5.16, mitigations would slow down the step
    call = (317, 277)[machine == "aarch64"]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: only then may a process without privileges install a filter
    if libc.syscall(call, set_filter, for_all_threads | no_mitigations, header):
        return f"the kernel accepts no filter of system calls ({os.strerror(ctypes.get_errno())})"
    return ""


def _rules(*, gpu: bool, signals: bool) -> Iterator[_Rule]:
    this = _values(0, os.getpid())
    yield _Rule("prlimit64 302 261", 0, this)
    yield _Rule("setpriority 141 140", 0, _values(0))
    yield _Rule("setpriority 141 140", 1, this)
    yield _Rule(_SCHEDULING if _BINDING_VARIABLES & os.environ.keys() else f"{_SCHEDULING} {_BINDING}", 0, this)
    yield _Rule("clone 56 220", 0, ((_NAMESPACES, 0),))
    for call, flags in (("open 2 -", 1), ("openat 257 56", 2)):
        # A file can be truncated without being opened for writing, which early versions of Landlock do not refuse.
        yield _Rule(call, flags, ((_TRUNCATE, 0), (_TRUNCATE | 3, _TRUNCATE | 1), (_TRUNCATE | 3, _TRUNCATE | 2)))
    devices = tuple((0xFF00, kind) for kind in _GPU) if gpu else ()
    yield _Rule("ioctl 16 29", 1, (*_values(*_IOCTLS), *devices), otherwise=errno.ENOTTY)
    yield _Rule("fcntl 72 25", 1, _values(*_FCNTLS))
    if gpu:
        yield _Rule(_SOCKETS, 0, _values(_UNIX))
        yield _Rule(_SOCKETS, 1, ((_STREAM_BITS, _STREAM),))
    if signals:
        yield _Rule(_SIGNALS, 0, _values(os.getpid()))


def _values(*values: int) -> tuple[tuple[int, int], ...]:
    return tuple((_ALL, value) for value in values)


def _numbers(table: str, machine: str) -> Iterator[int]:
    lines = (line for line in table.splitlines() if not line.lstrip().startswith("#"))
    words = " ".join(lines).split()
    column = 1 + tuple(_ARCHITECTURES).index(machine)
    yield from (int(number) for number in words[column::3] if number != "-")


_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06  # BPF_LD, BPF_ALU | BPF_AND, BPF_JMP …
_ERROR, _ALLOW = 0x00050000, 0x7FFF0000  # verdicts: fail with the errno in the lower bits, or run the call
_NUMBER, _ARCHITECTURE = 0, 4
"""Offsets of the number of the call and of the architecture in the data of the filter.  Arguments of 8 bytes begin
at offset 16, lower half first."""


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode an instruction; one that compares skips ``then`` or ``otherwise`` instructions."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _program(machine: str, rules: Iterable[_Rule], *, gpu: bool) -> Iterator[bytes]:
    yield from (_op(_LOAD, _ARCHITECTURE), _op(_EQUAL, _ARCHITECTURES[machine], 1))
    yield _op(_RETURN, _ERROR | errno.EACCES)  # a call of 32-bit code, whose numbers are others
    yield from (_op(_LOAD, _NUMBER), _op(_GREATER, _NEWEST, 0, 1), _op(_RETURN, _ERROR | errno.ENOSYS))
    for calls, error in (
        (_MISSING, errno.ENOSYS),
        (_CONNECTING, errno.ENOENT if gpu else errno.EACCES),
        (_REFUSED if gpu else f"{_REFUSED} {_SOCKETS} {_LISTENING}", errno.EACCES),
    ):
        for number in _numbers(calls, machine):
            yield from (_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERROR | error))
    for rule in rules:
        for number in _numbers(rule.calls, machine):
            yield from _check_of_argument(number, rule)
    yield _op(_RETURN, _ALLOW)


def _check_of_argument(number: int, rule: _Rule) -> Iterator[bytes]:
    """Yield instructions that refuse the call ``number`` unless an argument has a value that ``rule`` allows.

    They are three for each allowed value (load, mask, compare) and a return; a value that matches skips the rest.
    """
    size = 3 * len(rule.allowed) + 1
    yield from (_op(_LOAD, _NUMBER), _op(_EQUAL, number, 0, size))
    for remaining, (mask, value) in zip(range(size, 0, -3), rule.allowed, strict=False):
        yield from (_op(_LOAD, 16 + 8 * rule.argument), _op(_AND, mask), _op(_EQUAL, value, remaining - 3))
    yield _op(_RETURN, _ERROR | rule.otherwise)

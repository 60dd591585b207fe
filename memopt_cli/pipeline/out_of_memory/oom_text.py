"""Reading the out-of-memory messages of PyTorch, NumPy and the kernel from a log or a traceback.

Example: "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ... of which 1.10 GiB is free."  The wording differs
by backend and by version of PyTorch, hence several patterns for a number.  A process that the kernel ends prints
nothing itself: the message is in the log of the kernel, the shell or the cluster.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

from memopt_cli.pipeline.out_of_memory.process_limits import read_limit
from memopt_cli.records import OutOfMemoryText
from memopt_cli.text.units import format_bytes

_APPLE_UNITS: Final = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
"""Bytes in each unit that the backend of Apple's GPUs writes."""
_UNITS: Final = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, **_APPLE_UNITS}
_AMOUNT = rf"([\d.]+) ?({'|'.join(_UNITS)})"
_ASKED: Final = (
    re.compile(rf"[Tt]ried to allocate {_AMOUNT}"),  # CUDA and others
    re.compile(r"you tried to allocate (\d+) (bytes)"),  # the CPU
    re.compile(rf"Unable to allocate {_AMOUNT} for an array"),  # NumPy
    re.compile(r"[Tt]rying to allocate (\d+) (bytes)"),  # JAX
)
_KILLED: Final = (
    re.compile(r"[Oo]ut of memory: Killed process \d+ \((?P<name>[^)\n]*)\)[^\n]*?anon-rss:(?P<kib>\d+)kB"),  # Linux
    re.compile(r"(?m)line \d+: +\d+ Killed +(?P<name>\S*)"),  # a script of bash
    re.compile(r"(?m)^(?:zsh: killed +(?P<name>\S*)|\[\d+\][ +-]*(?:\d+ +)?[Kk]illed\b|Killed *$)"),  # a shell
    re.compile(r"oom[-_]kill event|OOM Killed|(?<![A-Z_])OUT_OF_MEMORY\b"),  # Slurm
)
"""Patterns of a process that was killed, with its name and its memory where they are known."""
_WORKERS: Final = (
    re.compile(r"DataLoader worker \(pid[^)\n]*\) is killed by signal: (?:(?P<killed>Killed)|Bus error)"),
    re.compile(r"bus error encountered in worker"),
)
"""Patterns of a worker process of a DataLoader that the system ended; if it was not killed, shared memory ran out."""
_IN_WORKER: Final = re.compile(r"in DataLoader worker process \d+\.\s+Original $")
"""Pattern of the text before a traceback that a worker process passed on."""
_IN_LOADING: Final = "memory ran out in a worker process of the DataLoader, while it loaded data, not in the step"
_KILLED_WORKER: Final = "the kernel killed a worker process of the DataLoader, as it does when memory runs out"
_NO_SHARED_MEMORY: Final = (
    "shared memory (/dev/shm), where the workers of the DataLoader put batches, ran out; in a container, get more by "
    "docker run --shm-size=8g"
)
_WITHOUT_NUMBERS: Final = re.compile(
    r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|std::bad_alloc|"
    r"(?m:^MemoryError\b)"
)
_OF_GPU: Final = re.compile(r"CUDA|HIP out of|GPU \d|CU(?:BLAS|DNN)_")
_TOTAL: Final = (re.compile(rf"total capaci?ty of {_AMOUNT}"), re.compile(rf"{_AMOUNT} total capacity"))
_ALLOWED: Final = (re.compile(rf"{_AMOUNT} allowed"),)
_PROCESS: Final = re.compile(rf"Process \d+ has {_AMOUNT} memory in use")
_MIN_OTHERS_SHARE: Final = 0.1
"""Minimum share of the card that other processes together must hold to be named: a desktop holds less."""
_FREE: Final = (re.compile(rf"of which {_AMOUNT} is free"), re.compile(rf"{_AMOUNT} free"))
_ALLOCATED: Final = (
    re.compile(rf"{_AMOUNT} is allocated by PyTorch"),
    re.compile(rf"{_AMOUNT} already allocated"),
    re.compile(rf"MPS allocated: {_AMOUNT}"),
)
_UNALLOCATED: Final = (re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated"),)
_MAX_ALLOWED: Final = (re.compile(rf"max allowed: {_AMOUNT}"),)
_OTHER_ALLOCATIONS: Final = (re.compile(rf"other allocations: {_AMOUNT}"),)
"""Patterns of Apple's GPUs, whose message gives no free bytes: these are the maximum less all allocations."""
_RESERVED_IN_TOTAL: Final = re.compile(rf"{_AMOUNT} reserved in total by PyTorch")
_MAX_LINE_CHARACTERS: Final = 1000
"""Maximum number of characters that belong to the message before, and from, "tried to allocate"."""
_MAX_BYTES: Final = 2**63
"""A number of bytes of at least this is taken for garbage and read as 0."""
_FRAME: Final = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)')
_MAX_FRAME_LINES: Final = 8
"""Maximum number of lines that a frame of a traceback takes, with its code and carets."""
_MAX_TRACEBACK_CHARACTERS: Final = 1 << 20
"""Maximum number of characters before the message that are searched for its traceback."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_LIBRARY: Final = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3")


def read_oom(text: str) -> OutOfMemoryText | None:
    """Read the last out-of-memory message in ``text``; ``None`` if there is none."""
    patterns = (*_ASKED, *_KILLED, *_WORKERS, _WITHOUT_NUMBERS)
    matches = [match for pattern in patterns for match in deque(pattern.finditer(text), maxlen=1)]
    if not matches:
        return None
    last = max(matches, key=lambda match: match.start())
    if last.re in _KILLED:
        fields = last.groupdict()
        nbytes = int(fields.get("kib") or 0) << 10
        where = f" at {format_bytes(nbytes)}" if nbytes else ", as it does when memory runs out"
        event = f"the kernel killed {fields.get('name') or 'the process'}{where}"
        return OutOfMemoryText(asked_bytes=0, allocated_bytes=nbytes if nbytes < _MAX_BYTES else 0, event=event)
    if last.re in _WORKERS:
        return _of_loading(_KILLED_WORKER if last.groupdict().get("killed") else _NO_SHARED_MEMORY)
    before = text[max(0, last.start() - _MAX_TRACEBACK_CHARACTERS) : last.start()]
    raised_at = _innermost_line(before)
    asked_bytes = _matched_bytes(last) if last.re in _ASKED else 0
    header = before.rfind(_TRACEBACK)
    if _IN_WORKER.search(before, max(0, header - _MAX_LINE_CHARACTERS), header):
        return _of_loading(_IN_LOADING, asked_bytes, raised_at)
    line_start = text.rfind("\n", max(0, last.start() - _MAX_LINE_CHARACTERS), last.start()) + 1 or max(
        0, last.start() - _MAX_LINE_CHARACTERS
    )
    message = text[line_start : last.start() + _MAX_LINE_CHARACTERS]
    allocated = _first_match(_ALLOCATED, message)
    free_bytes = max(0, _first_match(_MAX_ALLOWED, message) - allocated - _first_match(_OTHER_ALLOCATIONS, message))
    total = _RESERVED_IN_TOTAL.search(message)
    unallocated = max(0, _matched_bytes(total) - allocated if total else _first_match(_UNALLOCATED, message))
    free_bytes = _first_match(_FREE, message) or free_bytes
    if allowed := _first_match(_ALLOWED, message):  # a limit of the process, by set_per_process_memory_fraction
        free_bytes = max(0, min(free_bytes, allowed - allocated - unallocated))
    held_before, limit = 0, ""
    if process := read_limit(text, last.end()):
        held_before, limit = process.before_bytes, process.name
        allocated = process.size_bytes - held_before
        free_bytes = max(0, process.limit_bytes - process.size_bytes)
    return OutOfMemoryText(
        asked_bytes=asked_bytes,
        free_bytes=free_bytes,
        allocated_bytes=allocated,
        before_bytes=held_before,
        limit=limit,
        reserved_bytes=unallocated,
        line=raised_at,
        event=_other_processes(message, allocated + unallocated) if asked_bytes else f'the error is "{last[0]}"',
        is_of_gpu=_OF_GPU.search(message) is not None,
    )


def _of_loading(event: str, asked_bytes: int = 0, line: str = "") -> OutOfMemoryText:
    return OutOfMemoryText(asked_bytes=asked_bytes, event=event, line=line, is_of_loading=True)


def _other_processes(message: str, own_bytes: int) -> str:
    """Return a sentence on other processes that hold the card; empty if they hold little.

    If the message does not name its own process, the smallest that holds ``own_bytes`` counts as its own.
    """
    process_bytes = [_matched_bytes(match) for match in _PROCESS.finditer(message)]
    card_bytes = _first_match(_TOTAL, message)
    if "this process has" not in message and process_bytes:
        process_bytes.remove(min(process_bytes, key=lambda nbytes: (nbytes < own_bytes, nbytes)))
    if not process_bytes or sum(process_bytes) < _MIN_OTHERS_SHARE * card_bytes:
        return ""
    holders, end = ("another process holds", "it") if len(process_bytes) == 1 else ("other processes hold", "them")
    return (
        f"{holders} {format_bytes(sum(process_bytes))} of the {format_bytes(card_bytes)} card: "
        f"end {end}, or choose another GPU"
    )


def _first_match(patterns: tuple[re.Pattern[str], ...], text: str) -> int:
    return next((_matched_bytes(match) for pattern in patterns if (match := pattern.search(text))), 0)


def _matched_bytes(match: re.Match[str]) -> int:
    try:
        amount = float(match[1]) * _UNITS[match[2]]
    except ValueError:  # the pattern also matches 1.2.3
        return 0
    return int(amount) if amount < _MAX_BYTES else 0


def _innermost_line(text: str) -> str:
    """Return ``file:line`` of the innermost frame of the user's code in the traceback that ends ``text``.

    The result is empty if no traceback reaches the end: an earlier one belongs to a different error.
    """
    frames: list[str] = []
    end = len(text)
    for match in reversed([*_FRAME.finditer(text)]):
        if text.count("\n", match.end(), end) > _MAX_FRAME_LINES:
            break
        frames.append(f"{match['file']}:{match['line']}")
        end = match.start()
    own_frames = (frame for frame in frames if not _LIBRARY.search(frame))
    return next(own_frames, frames[0] if frames else "")

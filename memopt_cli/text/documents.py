"""Reading YAML and JSON strictly, writing them in one style, and making text safe to print.

A document may be a stranger's.  So its size, depth and numbers are bounded, and text from it is escaped before it
reaches a terminal or a CI system.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

from memopt_cli.errors import UsageError, shorten
from memopt_cli.errors import printable as printable
from memopt_cli.text.units import MAX_DIGITS, format_bytes

MAX_BYTES = 64 << 20
"""Maximum size in bytes of a document for people, such as a plan or a baseline."""
_MAX_YAML_BYTES = 1 << 20  # a longer YAML file is refused
_MAX_YAML_VALUES = 60_000
"""Maximum number of separators of a YAML file, enough for a plan of some 6000 segments; PyYAML, in Python, is slow."""
_MAX_JSON_VALUES = 2_000_000
"""Maximum number of separators of a JSON document: a value takes some 100 bytes of memory, however short it is."""
_DEEPEST = 200
"""Maximum depth of nested values, which Python walks by recursion."""
_SPECIAL: Final = "it is not a regular file"
_OBEYED: Final = re.compile(r"[^\x20-\x7e\n](?<!\w)|##(?=\w*\[)")
"""Parts of JSON text that may be unprintable, or a command for a CI system."""
_BREAKS: Final = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
COMMAND: Final = re.compile(rf"(?<![^{_BREAKS}])[^\S{_BREAKS}]*:(?=:)|##\w*(?=\[)")
"""Beginnings of commands of CI systems, without the last character: ``::error::``, ``##[error]``, ``##vso[``."""
_HALF: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Lone surrogates, except Python's for the bytes of a path that is not UTF-8."""


class _PlainLoader(yaml.SafeLoader):
    """Loads safe YAML, and refuses aliases: a few of them can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias at line {self.peek_event().start_mark.line + 1} is not accepted")  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.YAMLError(f"a key of the mapping at line {node.start_mark.line + 1} is given twice")
        return mapping

    def construct_whole_number(self, node: yaml.ScalarNode) -> int | str:
        too_large = yaml.YAMLError(f"the number at line {node.start_mark.line + 1} is too large")
        if len(node.value) > MAX_DIGITS:
            raise too_large
        if ":" in node.value:  # YAML 1.1 takes 1:32 for 92, in base 60
            return str(node.value)
        value = self.construct_yaml_int(node)
        if abs(value) >= 2**63:
            raise too_large
        return int(value)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_whole_number)


class _ExactDumper(yaml.SafeDumper):
    """Dumps safe YAML, with unprintable characters escaped in double quotes, so that text reads back equal."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_ExactDumper.add_representer(str, _ExactDumper.represent_text)


def read_bytes(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """Read a regular file or a pipe of at most ``max_bytes``; ``None`` allows as many as the machine has memory for.

    Devices are refused, since they may have no end.  Raises :class:`OSError` with a reason for people.
    """
    with _open(path) as file:
        if max_bytes is None:
            _require_room(os.fstat(file.fileno()), path)
        data = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))
    return data


def _require_room(state: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raise :class:`OSError` for a file that is larger than the machine's memory, before any of it is read."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if state.st_size <= room:
        return
    reason = f"it has {format_bytes(state.st_size)}, and this machine {format_bytes(room)} of memory"
    stored = state.st_blocks * 512
    if stored < state.st_size // 2:
        reason += f"; only {format_bytes(stored)} of it were ever written, as if a download was broken off"
    raise OSError(errno.EFBIG, reason, str(path))


def read_end(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """Read the last ``nbytes`` bytes of a regular file or a pipe.  Raises :class:`OSError` if it cannot be read."""
    with _open(path) as file:
        if file.seekable():
            file.seek(max(0, os.fstat(file.fileno()).st_size - nbytes))
        return read_tail(file, nbytes)


def read_tail(file: BinaryIO, nbytes: int) -> bytes:
    """Read ``file`` to its end, and return the last ``nbytes`` bytes; little more is held at any time."""
    end = b""
    while block := file.read(1 << 20):
        end = (end + block)[-nbytes:]
    return end


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb", opener=_open_at_once)
    except ValueError as err:  # a null character, or half a character
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from err


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, and refuse one that cannot be read to an end.

    A named pipe without a writer counts as empty.  The file is examined after it was opened: if it were examined
    by name before, another file could take its place in between.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        state = os.fstat(descriptor)
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if stat.S_ISFIFO(state.st_mode):
            os.set_blocking(descriptor, True)
        elif not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, _SPECIAL, str(path))
        elif not state.st_size:
            _refuse_content(descriptor, path)
        _require_place(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_content(descriptor: int, path: str) -> None:
    """Refuse a file of size 0 that has content all the same: the kernel's own files, which may block or never end."""
    try:
        is_empty = not os.read(descriptor, 1)
    except OSError as err:  # the kernel has nothing to read yet, or forbids it
        raise OSError(errno.EINVAL, _SPECIAL, str(path)) from err
    if not is_empty:
        raise OSError(errno.EINVAL, _SPECIAL, str(path))


def kept_below(path: str, folder: Path) -> bool:
    """Return whether ``path`` is relative and, all links followed, leads to a file below ``folder``.

    If so, the pair is recorded in :data:`places`, and later reads of the file fail once it leads elsewhere.
    """
    try:
        is_below = not os.path.isabs(path) and Path(path).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # no path, or a circle of links
        return False
    if is_below:
        places[os.path.abspath(path)] = str(folder.resolve())
    return is_below


places: Final[dict[str, str]] = {}
"""Path of a file -> the folder below which it must be whenever it is read: see :func:`kept_below`."""


def _require_place(descriptor: int, path: str) -> None:
    """Raise :class:`OSError` if an open file is not below the folder that :data:`places` has for its name."""
    folder = places.get(os.path.abspath(path))
    if folder is not None and not Path(_path_of_descriptor(descriptor)).is_relative_to(folder):
        raise OSError(
            errno.EXDEV, f"it leads out of {folder}", str(path)
        )  # not a permission error, which would have another hint


def _path_of_descriptor(descriptor: int) -> str:
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{descriptor}")


def read_yaml(path: Path, hint: str = "") -> Any:
    """Read the plain values of a YAML file.

    Raises :class:`UsageError` if it cannot be read or is not YAML; ``hint``: what the user should write into it.
    """
    try:
        data = read_bytes(path, _MAX_YAML_BYTES)
    except OSError as err:
        raise UsageError(f"cannot read {path}: {err.strerror}", hint="Check the path.") from err
    if b"\0" in data:
        raise UsageError(f"{path} is a binary file, such as a model or its weights, and not YAML", hint=hint)
    try:
        return _yaml_values(data)
    except (
        Exception
    ) as err:  # PyYAML's constructors raise whatever int(), datetime() and dict() raise; deep nesting too
        raise UsageError(f"{path} is not valid YAML: {printable(_one_line(err))}", hint=hint) from err


def _yaml_values(text: bytes) -> Any:
    if sum(map(text.count, (b",", b":", b"\n", b"[", b"{"))) > _MAX_YAML_VALUES:
        raise ValueError("it holds far more values than any memopt file")
    data = yaml.load(text, _PlainLoader)
    _check_values(data)
    return data


def why_unreadable(text: bytes) -> str:
    """Return why :func:`read_yaml` would refuse a file that holds ``text``, if it would."""
    if len(text) > _MAX_YAML_BYTES:
        return f"it is larger than {format_bytes(_MAX_YAML_BYTES)}"
    try:
        _yaml_values(text)
    except Exception as err:  # as in read_yaml
        return printable(_one_line(err))
    return ""


def read_mapping(path: Path, hint: str = "") -> dict[str, Any]:
    """Read a YAML file of keys and values, as :func:`read_yaml` does; an empty file has no keys."""
    data = read_yaml(path, hint)
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{path} must hold keys and values (key: value), not {shorten(data)}", hint=hint)
    return data


def yaml_text(data: Any) -> str:
    """Format plain values as YAML: keys in the order given, lists of scalars on one line."""
    return yaml.dump(data, Dumper=_ExactDumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)


def read_json(
    data: bytes | str, *, unique: bool = False, infinite: bool = False, max_values: int = _MAX_JSON_VALUES
) -> Any:
    """Read the plain values of a JSON document, whose numbers and depth must be reasonable.

    With ``unique``, no object may name a key twice.  With ``infinite``, ``Infinity`` and ``NaN`` are numbers.  The
    document may have ``max_values`` separators.  Raises :class:`ValueError` that describes its first fault.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        if sum(map(text.count, ",:[{")) > max_values:
            raise ValueError("it holds far more values than such a document does")
        hook, constant = _unique if unique else dict, float if infinite else _no_number
        value = json.loads(
            text, object_pairs_hook=hook, parse_int=whole_number, parse_float=_float, parse_constant=constant
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_DEEPEST}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise ValueError("it is not JSON") from err
    _check_values(value)
    return value


def json_text(data: Any) -> str:
    """Format plain values as indented JSON that any reader accepts: numbers that are not finite become ``null``.

    Characters that a terminal or a CI system would take for a command are escaped.
    """
    text = json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)
    return _OBEYED.sub(lambda found: "".join(map(_json_escape, found[0])), text) + "\n"


def _json_escape(character: str) -> str:
    if character.isprintable() and character != "#":
        return character
    units = character.encode("utf-16-be", "surrogatepass")  # JSON escapes UTF-16: two units above U+FFFF
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))


def quoted_path(path: str) -> str:
    """Quote ``path`` for a hint, so that a shell takes it for one word, and no command takes it for a flag."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def from_here(path: str | Path) -> str:
    """Return ``path`` as the user may type it: relative to the current folder, if it lies in there, else absolute."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def quoted_flag(flag: str, value: str) -> str:
    """Format a flag with its ``value`` for a hint, so that a value from a file cannot pass for another flag."""
    return f"{flag}{'=' if value.startswith('-') else ' '}{shlex.quote(value)}"


def printable_data(data: Any) -> Any:
    """Return plain values that come from a file with all of their text printable."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable_data(key): printable_data(value) for key, value in data.items()}
    return [printable_data(item) for item in data] if isinstance(data, list) else data


def no_commands(text: str) -> str:
    """Escape ``text`` so that a CI system takes none of its lines for a command."""
    return COMMAND.sub(r"\g<0>\\", text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("it names something twice")
    return dict(pairs)


def whole_number(text: str) -> int:
    """Return the whole number that ``text`` spells.  Raises :class:`ValueError` for one of more than 63 bits."""
    if len(text) > MAX_DIGITS or abs(int(text)) >= 2**63:
        raise ValueError("a number in it is too large")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError("a number in it is too large")
    return float(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} in it is not a number")


def _check_values(value: Any) -> None:
    """Raise :class:`ValueError` for values nested too deep, and for text with half a character (a lone surrogate)."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST}")
        for text in level:
            if isinstance(text, str) and (half := _HALF.search(text)):
                raise ValueError(f"{half[0]!a} in it is half a character")
        level = [
            inner
            for item in level
            if isinstance(item, dict | list | set | tuple)
            for inner in ((*item, *item.values()) if isinstance(item, dict) else item)
        ]


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {key: _finite(item) for key, item in data.items()}
    return [_finite(item) for item in data] if isinstance(data, list | tuple) else data


def _one_line(err: Exception) -> str:
    """Return the message of ``err`` on one line, shortened, since it may quote the file."""
    return abridge(" ".join(str(err).split()) or type(err).__name__, 400)


def abridge(text: str, max_length: int) -> str:
    """Return the beginning and the end of ``text``, if it has more than ``max_length`` characters."""
    return text if len(text) <= max_length else f"{text[: max_length // 2]} ... {text[-max_length // 2 :]}"

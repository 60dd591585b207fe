"""Translation of messages from the command line's words to those of Python: ``search_time`` for ``--search-time``."""

from __future__ import annotations

import contextlib
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from memopt_cli import errors
from memopt_cli.errors import MemoptError
from memopt_cli.text.options import OPTIONS, Option
from memopt_cli.text.values import Real


@contextlib.contextmanager
def said_in_python() -> Iterator[None]:
    """Let errors from the block, and those they come from, name arguments in place of flags.

    Those they come from as well, since a traceback shows them.
    """
    try:
        yield
    except BaseException as err:
        for each in _chain(err):
            if isinstance(each, MemoptError):
                each.reword(in_python)
        raise


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all errors that it comes from."""
    pending, seen = [error], set[int]()
    while pending:
        err = pending.pop()
        if id(err) not in seen:
            seen.add(id(err))
            yield err
            pending += [cause for cause in (err.__cause__, err.__context__) if cause is not None]


def warn_unchanged(why: str) -> None:
    """Warn that the calling function has left the model as it is, and ``why``; do nothing if that is empty.

    The returned model looks the same with a plan or without, and few scripts look at the summary.
    """
    if why:
        warnings.warn(in_python(why), stacklevel=_CALLER)


_CALLER: Final = 4
"""Stack level of the user's script: above :func:`warn_unchanged` are memopt's function and its wrapper."""


def notes_in_python(result: Any) -> Any:
    """Return ``result`` with its notes, or those of its summary, in Python's words."""
    if hasattr(result, "summary"):
        return replace(result, summary=notes_in_python(result.summary))
    if not hasattr(result, "notes"):
        return result
    return replace(result, notes=type(result.notes)(map(in_python, result.notes)))


def in_python(text: str) -> str:
    """Translate ``text``: ``--dim B=8`` becomes ``dims={"B": 8}``, ``memopt check`` ``memopt_cli.check``.

    A reference to a function in a file becomes "a function", and parts that concern the command line alone are left
    out. Flags without a Python argument stay, and so do flags of other programs, quotations and paths.
    """
    parts = re.split(_OTHERS, text)  # memopt's own and others' in turn
    return "".join(part if place % 2 else _own_in_python(part) for place, part in enumerate(parts))


def _own_in_python(text: str) -> str:
    text = _FOR_COMMANDS.sub("", text)
    text = _COMMAND.sub(_call, text)
    text = _FLAGS.sub(_said, text)
    text = _WRITE_FUNCTION.sub(lambda found: f"{'G' if found[1] == 'W' else 'g'}ive a function", text)
    return _ANY_FUNCTION.sub("a function", text)


_OWN_KINDS: Final = "|".join(name for name, kind in vars(errors).items() if isinstance(kind, type))
_OTHERS: Final = re.compile(rf"(\b(?!(?:{_OWN_KINDS}):)[A-Z]\w*(?:Error|Exception): [^\n]*)")
"""Errors of other code in a message, up to the end of the line, as :func:`memopt_cli.errors.first_line` quotes them."""
_FOR_COMMANDS: Final = re.compile(r"; --measure-levels\b[^.;\n]*")
_OF_FILE: Final = r"(?:file|train|FILE)\.py:(?:function|NAME)\b"
"""Stands for any function."""
_VALUE: Final = r"'[^']*'|none\b|cpu\b|cuda\b|(?=[^\s,;)]*(?:[A-Z\d=…\[]|\.\w))[^\s,;)]*[^\s,;).:]"
"""Quoted, or a word that is none of a sentence: ``B=8``, ``24GiB``, ``train.py:loss``, ``FILE``."""
_FLAG: Final = re.compile(
    rf"(?<![\w./-])(?:--(?P<long>[a-z]+(?:-[a-z]+)*)|-(?P<short>[io])\b)(?:[ =](?P<value>{_VALUE}))?"
)
_ONE: Final = re.sub(r"\?P<\w+>", "?:", _FLAG.pattern)
_FLAGS: Final = re.compile(rf"(?P<quoted>(?<!\w)'[^'\n]*'(?!\w))|{_ONE}(?: {_ONE})*")
_COMMAND: Final = re.compile(
    rf"\bmemopt (optimize|profile|recommend-batch|baseline|check|verify|apply)( MODEL| \S+ …)?((?: {_ONE})+)"
)
_WRITE_FUNCTION: Final = re.compile(rf"\b([Ww])rite {_OF_FILE}")
_ANY_FUNCTION: Final = re.compile(rf"\b{_OF_FILE}")

_OPTIONS: Final[Mapping[str, tuple[str, Option]]] = {
    flag: (key.rpartition(".")[2], option)
    for key, option in OPTIONS.items()
    for flag in (option.flags or (f"--{key.rpartition('.')[2].replace('_', '-')}",))[-1].split("/")
}
"""Flag -> the option's name, and what the table says of it; other flags belong to others, whose errors are told."""


def _said(found: re.Match[str]) -> str:
    flags = found[0]
    own = not found["quoted"] and all(f"--{flag['long']}" in _OPTIONS for flag in _FLAG.finditer(flags) if flag["long"])
    return ", ".join(_arguments(flags)) if own else flags


def _call(command: re.Match[str]) -> str:
    given = ["model", "inputs"] if command[2] else []
    name = "apply_plan" if command[1] == "apply" else command[1].replace("-", "_")
    return f"memopt_cli.{name}({', '.join([*given, *_arguments(command[3])])})"


def _arguments(flags: str) -> list[str]:
    """Translate flags to arguments: ``["level=3", 'dims={"B": 8}']`` for ``--level 3 --dim B=8``."""
    said: list[str] = []
    sizes: list[str] = []
    for found in _FLAG.finditer(flags):
        if found["long"] == "dim" and "=" in (found["value"] or ""):
            sizes.append(_size(found["value"]))
        elif found["long"] != "plan-only" or found[0] == flags:  # beside others: a function writes no model anyway
            said.append(_argument(found))
    return [*said, *([f"dims={{{', '.join(sizes)}}}"] if sizes else [])]


def _size(text: str) -> str:
    name, _, size = text.partition("=")
    return f'"{name}": ({size.replace(":", ", ")})' if ":" in size else f'"{name}": {size}'


def _argument(flag: re.Match[str]) -> str:
    name, option = _OPTIONS[f"--{flag['long'] or ('output' if flag['short'] == 'o' else 'input')}"]
    value = flag["value"]
    spelled = name if option.python is None else option.python
    if not spelled:
        return flag[0]
    if value is None or spelled.startswith("memopt_cli."):  # a function of its own
        return f"{name}=True" if option.takes is None and option.python is None else spelled
    if value == "none":
        return f"{spelled}={'math.inf' if isinstance(option.kind, Real) and option.kind.unlimited else 'None'}"
    if re.fullmatch(_OF_FILE, value):
        return f"{spelled}=function"
    return f"{spelled}={value}" if re.fullmatch(r"[\d.]+", value) else f'{spelled}="{_unquoted(value)}"'


def _unquoted(value: str) -> str:
    return "".join(shlex.split(value)) if value.startswith("'") else value

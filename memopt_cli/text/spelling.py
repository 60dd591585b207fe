"""Spelling options in messages: as flags on the command line, as arguments in Python.

Errors, hints, notes and reports name an option in backticks, as it is typed: ``Raise `--max-slowdown 2`.``  A command
prints ``Raise --max-slowdown 2.``, and a function of Python prints ``Raise max_slowdown=2.``
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from memopt_cli.errors import FileError, MemoptError, UsageError, WriteError, error_chain
from memopt_cli.text.options import OPTIONS, Option
from memopt_cli.text.values import Real

P = ParamSpec("P")
R = TypeVar("R")

_CALLER: Final = 4
"""Stack level of the user's script: above :func:`warn_if_unchanged` are memopt's function and its wrapper."""
_MARKED_OPTION: Final = re.compile(r"`((?:memopt [a-z]|--?[a-z])[^`\n]*|file\.py:function)`")
_OPTIONS: Final[Mapping[str, tuple[str, Option]]] = {
    flag: (key.rpartition(".")[2], option)
    for key, option in OPTIONS.items()
    for flags in (option.flags or (f"--{key.rpartition('.')[2].replace('_', '-')}",))
    for flag in flags.split("/")
}
"""Flag -> the option's name, and its row in the table."""


def with_python_spelling(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` so that errors that it raises name arguments in place of flags.

    The errors behind them are reworded as well, since a traceback shows them.  The traceback begins here, as the frames
    below are memopt's own; the cause is kept for a step that fails, and its traceback begins in the user's code.
    """

    @functools.wraps(function)
    def spelled(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as err:
            for error in error_chain(err):
                if isinstance(error, MemoptError):
                    error.reword(in_python)
            if not isinstance(err, MemoptError | KeyboardInterrupt):
                raise
            cause = None if isinstance(err, UsageError | FileError | WriteError) else err.__cause__
            if cause is not None:
                cause = cause.with_traceback(_from_user_code(cause.__traceback__))
            raise err.with_traceback(None) from cause

    return spelled


def _from_user_code(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` from its first frame on that is neither memopt's nor PyTorch's; ``None`` without one."""
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] not in ("memopt_cli", "torch"):
            break
        traceback = traceback.tb_next
    return traceback


def warn_if_unchanged(reason: str) -> None:
    """Warn that the calling function left the model unchanged, and ``reason``; do nothing if ``reason`` is empty.

    The returned model looks the same with a plan or without, and few scripts read the summary.
    """
    if reason:
        warnings.warn(in_python(reason), stacklevel=_CALLER)


def notes_in_python(result: Any) -> Any:
    """Return ``result`` with its notes, or the notes of its summary, in Python's words."""
    if hasattr(result, "summary"):
        return replace(result, summary=notes_in_python(result.summary))
    if not hasattr(result, "notes"):
        return result
    return replace(result, notes=type(result.notes)(map(in_python, result.notes)))


def on_command_line(text: str) -> str:
    """Return ``text`` with its marked options as flags, without the backticks."""
    return "".join(split_marked_options(text))


def split_marked_options(text: str) -> list[str]:
    """Split ``text`` at its marked options and commands, which are every second part, without the backticks."""
    parts = [""]
    for index, part in enumerate(_MARKED_OPTION.split(text)):
        if index % 2 == 0:
            parts[-1] += part
        elif _parse_marked(part) is None:
            parts[-1] += f"`{part}`"
        else:
            parts += [part, ""]
    return parts


def in_python(text: str) -> str:
    """Return ``text`` with its marked options as arguments: ``dims={"B": 8}`` for ```--dim B=8```.

    ```memopt check --level 3``` becomes ``memopt_cli.check(level=3)``, and ```file.py:function``` "a function".  An
    option that no function takes stays a flag if it is the only one, and is left out among others: ``--plan-only``, for
    example, since functions write no model.
    """
    return _MARKED_OPTION.sub(_marked_in_python, text)


def _parse_marked(marked: str) -> tuple[list[str], list[tuple[str, str]]] | None:
    """Split ``marked`` into the words before its first flag, and its flags with their values (empty for none).

    Returns ``None`` for text that is not an option: a PyTorch error that memopt quotes may also have backticks.
    """
    with contextlib.suppress(ValueError):  # a quotation that does not end
        command: list[str] = []
        flags: list[tuple[str, str]] = []
        for word in shlex.split(marked):
            flag, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
            if flag in _OPTIONS:
                flags.append((flag, value))
            elif not flags and not word.startswith("-"):
                command.append(word)
            elif flags and not flags[-1][1]:
                flags[-1] = (flags[-1][0], word)
            else:
                return None
        return command, flags
    return None


def _marked_in_python(marked: re.Match[str]) -> str:
    parsed = _parse_marked(marked[1])
    if parsed is None:
        return marked[0]
    command, flags = parsed
    if command == ["file.py:function"]:
        return "a function"
    sizes = [_size_argument(value) for flag, value in flags if flag == "--dim" and "=" in value]
    trusted = [(field, value) for flag, value in flags if (field := _field_of_trust(flag))]
    single = [(f, v) for f, v in flags if not _field_of_trust(f) and (f != "--dim" or "=" not in v)]
    arguments = [spelled for flag, value in single if (spelled := _argument(flag, value))]
    if sizes:
        arguments.append(f"dims={{{', '.join(sizes)}}}")
    if trusted:
        arguments.append(_trust_argument(trusted))
    if not arguments:
        return marked[1]
    if not command:
        return ", ".join(arguments)
    name = "apply_plan" if command[1] == "apply" else command[1].replace("-", "_")
    positional = ["inputs" if word == "…" else "model" for word in command[2:]]
    return f"memopt_cli.{name}({', '.join([*positional, *arguments])})"


def _size_argument(text: str) -> str:
    name, _, size = text.partition("=")
    return f'"{name}": ({size.replace(":", ", ")})' if ":" in size else f'"{name}": {size}'


def _field_of_trust(flag: str) -> str:
    """Return the field of :class:`memopt_cli.Trust` that ``flag`` sets; empty if it is another argument."""
    argument, _, field = (_OPTIONS[flag][1].python or "").partition(".")
    return field if argument == "trust" else ""


def _trust_argument(settings: list[tuple[str, str]]) -> str:
    """Return the argument ``trust`` for ``settings``, by field: ``trust=memopt_cli.Trust(packages=("a", "b"))``.

    A field without a value is a switch.
    """
    fields: dict[str, list[str]] = {}
    for field, value in settings:
        fields.setdefault(field, []).extend([f'"{value}"'] if value else [])
    spelled = []
    for field, values in fields.items():
        comma = "," if len(values) == 1 else ""
        spelled.append(f"{field}=({', '.join(values)}{comma})" if values else f"{field}=True")
    return f"trust=memopt_cli.Trust({', '.join(spelled)})"


def _argument(flag: str, value: str) -> str:
    """Return ``flag`` with ``value`` as an argument, such as ``level=3``; empty if no function takes it."""
    name, option = _OPTIONS[flag]
    spelled = name if option.python is None else option.python
    if not spelled or not value or spelled.startswith("memopt_cli."):  # a Python function with its own name
        return f"{name}=True" if option.takes is None and option.python is None else spelled
    if value == "none":
        return f"{spelled}={'math.inf' if isinstance(option.kind, Real) and option.kind.unlimited else 'None'}"
    if value == "file.py:function":
        return f"{spelled}=function"
    return f"{spelled}={value}" if re.fullmatch(r"[\d.]+", value) else f'{spelled}="{value}"'

"""Reading ``memopt.yaml``, a file of flags.  Keys are the names of flags, and the command line overrides them.

A file that memopt finds in the working directory may have been downloaded with a model.  Unless ``--config`` names it,
it must therefore not run code, vouch for code, or name files outside its folder.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from memopt_cli.errors import UnsafeFileError, UsageError, shorten
from memopt_cli.text.documents import kept_below, printable, quoted_flag, read_mapping
from memopt_cli.text.options import Option, find_option

DEFAULT_PATH = Path("memopt.yaml")

_COMMAND_LINE_ONLY = {"help", "help-all", "config", "trust-pickle", "force", "output", "html", "snapshot"}
"""Flags that a file must not set: they disable a check, or name a file to write, which all commands would share."""

_RUNS_CODE = {"trust", "sandbox", "no-sandbox"}
"""Keys that vouch for code.  Only a file named by ``--config`` may set them."""

_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings that a config file adds to the command line, in addition to the defaults of flags."""

    path: str = ""
    """The file; empty if there is none."""
    trust: tuple[str, ...] = ()
    """Packages whose module classes are trusted, like those of well-known libraries."""
    dims: tuple[str, ...] = ()
    """``NAME=SIZE``; ``--dim`` wins by name."""


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Read the file at ``path``, and make its flags the defaults of this command; the callback of ``--config``.

    ``trust`` and ``dims``, which are not flags, go to ``context.obj``, a :class:`Config`.
    ``path``: the value of ``--config``; by default ``memopt.yaml`` in the working directory, if there is one.
    Raises :class:`UsageError` for a file that cannot be read, a key that no command knows, or a value of a wrong kind,
    and :class:`UnsafeFileError` for a file that nobody named and that runs code or names a file elsewhere.
    """
    file = Path(path) if path is not None else DEFAULT_PATH
    context.obj = Config()
    if path is None and not file.exists():
        return None
    if path is None and not file.is_file():
        raise UsageError(f"{file} here is not a regular file", hint="Remove it, or name another with `--config`.")
    data = read_mapping(file, "Write flags and their values, as in level: 4.")
    _refuse_unknown(context, file, data)
    if path is None:
        _refuse_code(context, file, data)
    context.obj = Config(
        path=str(file), trust=_flag_texts(file, "trust", data.pop("trust", [])), dims=_dims(file, data.pop("dims", {}))
    )
    context.default_map = _defaults(context, file, data)
    if path is None:
        _refuse_paths(context, file, data)
    return path


def _refuse_code(context: typer.Context, file: Path, data: dict[str, Any]) -> None:
    """Raise :class:`UnsafeFileError` for keys and values in ``file`` that may run or vouch for code."""
    code = _RUNS_CODE | {
        name
        for command in _commands(context)
        for name, parameter in _flags(command).items()
        if _option(command, parameter).checked_risk == "code"
    }
    unsafe = sorted(key for key, value in data.items() if key in code or _names_function(value))
    if unsafe:
        raise _unsafe(file, f"sets '{unsafe[0]}', which may run or trust code, or write to another folder")


def _unsafe(file: Path, problem: str) -> UnsafeFileError:
    hint = f"If the file is yours, add `{quoted_flag('--config', str(file))}`."
    return UnsafeFileError(f"{file} in this folder {problem}", hint=hint)


def _option(command: Any, parameter: Any) -> Option:
    return find_option(command.name.replace("-", "_"), parameter.name)


def _names_function(value: Any) -> bool:
    """Return whether ``value`` names a function, which some flags take as well as plain values."""
    return any(".py:" in str(item) for item in (value if isinstance(value, list) else [value]))


def _commands(context: typer.Context) -> list[Any]:
    return list(getattr(context.parent and context.parent.command, "commands", {}).values())


def _refuse_paths(context: typer.Context, file: Path, data: dict[str, Any]) -> None:
    for key, parameter in _flags(context.command).items():
        is_file = _option(context.command, parameter).checked_risk == "file"
        if key in data and is_file and not kept_below(str(data[key]), file.parent):
            raise _unsafe(file, f"sets '{key}' to a path outside it: {str(data[key])[:200]}")


def _refuse_unknown(context: typer.Context, file: Path, data: dict[str, Any]) -> None:
    """Raise :class:`UsageError` for a key unknown to all commands, or one that belongs on the command line."""
    known = {"trust", "dims", *(flag for command in _commands(context) for flag in _flags(command))}
    for key in data:
        if key in _COMMAND_LINE_ONLY:
            raise UsageError(f"{file}: '{key}' cannot be set in a file", hint=f"Use --{key} on the command line.")
        if key not in known:
            nearest_keys = difflib.get_close_matches(key[:100], known, n=1)
            hint = f"Did you mean {nearest_keys[0]}?" if nearest_keys else f"Known keys: {', '.join(sorted(known))}."
            raise UsageError(f"{file}: unknown key {shorten(printable(key[:100]))}", hint=hint)


def _defaults(context: typer.Context, file: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return the values in ``data`` for this command, as a dictionary by parameter; keys of others are left out."""
    flags = _flags(context.command)
    return {
        flags[key].name: list(_flag_texts(file, key, value)) if flags[key].multiple else _flag_text(file, key, value)
        for key, value in data.items()
        if key in flags
    }


def _flags(command: Any) -> dict[str, Any]:
    """Return the parameters of ``command`` that a file may set, by their flags without dashes."""
    named = {option[2:]: p for p in command.params for option in p.opts if option.startswith("--")}
    return {name: p for name, p in named.items() if name not in _COMMAND_LINE_ONLY}


def _dims(file: Path, dims: Any) -> tuple[str, ...]:
    if not isinstance(dims, dict):
        raise UsageError(f"{file}: dims must be names and sizes, not {shorten(dims)}", hint="Write dims: {B: 8}.")
    return tuple(f"{name}={_flag_text(file, 'dims', size)}" for name, size in dims.items())


def _flag_texts(file: Path, key: str, value: Any) -> tuple[str, ...]:
    return tuple(_flag_text(file, key, item) for item in (value if isinstance(value, list) else [value]))


def _flag_text(file: Path, key: str, value: Any) -> str:
    """Return a scalar as it is typed on the command line, so that the same code parses both."""
    if not isinstance(value, str | int | float):
        raise UsageError(f"{file}: {key} cannot be {shorten(value)}", hint="Write text, a number, true or false.")
    text = str(value)
    if _CONTROL.search(text):
        raise UsageError(f"{file}: the value of {key} has control characters: {shorten(text)}", hint="Remove them.")
    return text

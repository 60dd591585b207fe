"""Checking the values of command-line options that Python calls do not share, such as paths of files.

``text/options.py`` names these checks as the ``kind`` of an option, and :data:`CHECKS` finds them.  Each check returns
the parsed value, or raises :class:`typer.BadParameter` with the reason.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import typer

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import is_pretrained, parse_device, parse_factory, parse_mesh
from memopt_cli.records import BUILT_IN, DeviceProfile, DimRange
from memopt_cli.search.estimation.cards import device_profile
from memopt_cli.text.misnamed import file_refusal, folder_refusal, missing_refusal, weights_in
from memopt_cli.text.optimizer_text import MadeOptimizer, is_function, notebook_refusal, parse_optimizer
from memopt_cli.text.options import MAX_RANKS
from memopt_cli.text.values import ValueKind, Whole


@contextlib.contextmanager
def _as_typer_error() -> Iterator[None]:
    """Turn a :class:`UsageError` in the ``with`` block into Typer's error, whose message names the option."""
    try:
        yield
    except UsageError as err:
        raise typer.BadParameter(f"{err.message}. {err.hint}".strip()) from err


def card(text: str) -> DeviceProfile:
    """Return the device that ``text`` names: a card, or a YAML file that describes one."""
    with _as_typer_error():
        return device_profile(text)


def check_model(location: str) -> str:
    """Return ``location``; raise :class:`typer.BadParameter` if it names no model."""
    _refuse_notebook(location if ":" in location else f"{location}:FUNCTION")
    refusal = None
    if os.path.isdir(location):
        refusal = None if is_pretrained(location) else folder_refusal(location)
    elif location.endswith((".py", ".json", ".yaml", ".yml")) and os.path.exists(location):
        refusal = file_refusal(location, b"")
    if refusal is not None:
        raise UsageError(f"'{location}' {refusal[0]}", hint=refusal[1])
    if os.path.exists(location):
        if not os.access(location, os.R_OK):
            raise typer.BadParameter(f"'{location}' cannot be read: permission denied")
    elif is_function(location):
        check_file(location.rpartition(":")[0])
    elif parse_factory(location) is None:
        message, hint = missing_refusal(location)
        raise UsageError(message, hint=hint or "See memopt --help.")
    return location


def check_device(device: str) -> str:
    """Return ``device`` if it reads ``auto``, ``cpu`` or ``cuda:N``; whether the device exists is checked later."""
    with _as_typer_error():
        return parse_device(device)


def check_function(text: str) -> str:
    """Return ``text`` if it reads ``file.py:function`` and the file exists, which is not yet opened."""
    _refuse_notebook(text)
    if not is_function(text):
        raise typer.BadParameter(f"'{text}' is not of the form file.py:function")
    check_file(text.rpartition(":")[0])
    return text


def check_parallel(text: str) -> str:
    """Return ``text`` if it names a built-in way to spread a model (``fsdp``, ``ddp``) or is ``file.py:function``."""
    if text in BUILT_IN:
        return text
    _refuse_notebook(text)
    if not is_function(text):
        raise typer.BadParameter(f"'{text}' is neither {' nor '.join(BUILT_IN)} nor of the form file.py:function")
    return check_function(text)


def check_mesh(text: str) -> str:
    """Return ``text`` if it parses as the axes of a mesh, such as ``dp=4,tp=2``."""
    with _as_typer_error():
        parse_mesh(text)
    return text


def check_optimizer(text: str) -> str:
    """Return ``text`` if it names an optimizer of ``torch.optim``, or is ``file.py:function``."""
    _refuse_notebook(text)
    with _as_typer_error():
        choice = parse_optimizer(text)
    return check_function(text) if isinstance(choice, MadeOptimizer) else text


def _refuse_notebook(text: str) -> None:
    """Raise :class:`typer.BadParameter` if ``text`` names a notebook instead of Python code or a model."""
    if refusal := notebook_refusal(text):
        raise typer.BadParameter(refusal)


def check_file(path: str) -> str:
    """Return ``path`` if a file exists there, which is not yet opened."""
    if os.path.isdir(path):
        raise typer.BadParameter(f"'{path}' is a folder, not a file")
    if not os.path.exists(path):
        raise typer.BadParameter(f"there is no file '{path}'")
    return path


def check_log(path: str) -> str:
    """Return ``path`` if a file exists there, or if it is ``-``, for standard input."""
    return path if path == "-" else check_file(path)


def check_weights(path: str) -> str:
    """Return ``path`` if it is a file of weights, or the path of the only such file in the folder ``path``."""
    return check_file(weights_in(path))


def check_code(path: str) -> str:
    """Return ``path`` if it is a folder or a Python file."""
    if not os.path.isdir(path):
        _refuse_notebook(path)
        check_file(path)
        if not path.endswith(".py"):
            raise typer.BadParameter(f"'{path}' is neither a folder nor a Python file")
    return path


def _range_of(symbol: str, maximum: int = 2**63 - 1) -> Callable[[str], DimRange]:
    """Return a parser of ranges of ``symbol`` such as ``1:64``, or of one number, up to ``maximum``."""

    def parse(text: str) -> DimRange:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text.replace(" ", ""), re.ASCII)
        if match is None:
            raise typer.BadParameter(f"'{text}' is not LOW:HIGH, as in 1:64")
        low, high = (parsed_by(Whole(1, maximum))(number) for number in (match[1], match[2] or match[1]))
        if low > high:
            raise typer.BadParameter(f"the range {text} is empty; write the smaller number first")
        return DimRange(symbol=symbol, low=low, high=high)

    return parse


def parsed_by(kind: ValueKind) -> Callable[[str], Any]:
    """Return a parser for ``kind``, a kind of values that Python calls share, with Typer's error."""

    def parse(text: str) -> Any:
        try:
            with _as_typer_error():
                return kind.parse(text)
        except ValueError as refusal:
            raise typer.BadParameter(f"'{text}' is not {refusal}") from refusal

    return parse


CHECKS: Final[Mapping[str, Callable[[str], Any]]] = {
    "card": card,
    "code": check_code,
    "device": check_device,
    "file": check_file,
    "function": check_function,
    "log": check_log,
    "mesh": check_mesh,
    "model": check_model,
    "optimizer": check_optimizer,
    "parallel": check_parallel,
    "weights": check_weights,
    "range of ranks": _range_of("ranks", MAX_RANKS),
    "range of replicas": _range_of("replicas"),
}

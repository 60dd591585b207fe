"""Parsers and checks of what is given to flags: each raises :class:`typer.BadParameter` that says why not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import typer

from memopt_cli.errors import UsageError
from memopt_cli.inputs.spec_text import (
    MODEL_SETTINGS,
    is_built_in,
    is_pretrained,
    parse_device,
    parse_factory,
    parse_mesh,
)
from memopt_cli.records import BUILT_IN, DeviceProfile
from memopt_cli.search.estimation.cards import device_profile
from memopt_cli.text.optimizer_text import MadeOptimizer, is_function, notebook_refusal, parse_optimizer
from memopt_cli.text.units import parse_amount


def whole(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` to ``high``, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError as err:
            raise typer.BadParameter(f"'{text}' is not a whole number") from err
        if not low <= value <= high:
            bound = f"at least {low}" if value < low and high > 1000 else f"from {low} to {high}"
            raise typer.BadParameter(f"it is {value}; it must be {bound}")
        return value

    return parse


def memory(text: str) -> int | float:
    """``8GiB`` -> bytes, ``60%`` -> a share, which is a float."""
    try:
        amount = parse_amount(text)
    except UsageError as err:
        hint = " (write for example 24GiB, 512MB or 60%)" if err.hint else ""
        raise typer.BadParameter(f"{err.message}{hint}") from err
    if not amount:
        raise typer.BadParameter("it is 0 bytes; nothing fits into that (a share is written 60%)")
    return amount


def seconds(low: float) -> Callable[[str], float]:
    """A parser of times in seconds, at least ``low``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError as err:
            raise typer.BadParameter(f"'{text}' is not a number of seconds") from err
        if not low <= value <= 10**6:
            raise typer.BadParameter(f"it is {value:g} s; it must be from {low:g} to 1000000 s")
        return value

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError as err:
        raise typer.BadParameter(f"'{text}' is not a number") from err
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"it is {value:g}; it must be above 0 and finite")
    return value


def card(text: str) -> DeviceProfile:
    """The name of a card, or a YAML file that describes one."""
    try:
        return device_profile(text)
    except UsageError as err:
        raise typer.BadParameter(f"{err.message}. {err.hint}".strip()) from err


def check_model(location: str) -> str:
    """Raises :class:`typer.BadParameter` for what names no model."""
    _refuse_notebook(location if ":" in location else f"{location}:FUNCTION")
    if os.path.isdir(location) and not is_pretrained(location):
        raise typer.BadParameter(f"'{location}' is a folder without {MODEL_SETTINGS}, not a model")
    if os.path.exists(location):
        if not os.access(location, os.R_OK):
            raise typer.BadParameter(f"'{location}' cannot be read: permission denied")
    elif is_function(location):
        check_file(location.rpartition(":")[0])
    elif parse_factory(location) is None:
        raise typer.BadParameter(f"there is no file '{location}', and it is not of the form package.module:callable")
    return location


def check_any_model(location: str | None) -> str | None:
    """The same where none need be named."""
    return None if location is None else check_model(location)


def check_device(device: str | None) -> str | None:
    """``auto``, ``cpu`` or ``cuda:N``; whether there is such a device is asked later."""
    try:
        return None if device is None else parse_device(device)
    except UsageError as err:
        raise typer.BadParameter(err.message) from err


def check_function(text: str | None) -> str | None:
    """``file.py:function``, not yet opened."""
    if text is None:
        return None
    _refuse_notebook(text)
    if not is_function(text):
        raise typer.BadParameter(f"'{text}' is not of the form file.py:function")
    check_file(text.rpartition(":")[0])
    return text


def check_parallel(text: str | None) -> str | None:
    """A built-in way to spread a model, or ``file.py:function``, not yet opened."""
    if text is None or is_built_in(text):
        return text
    _refuse_notebook(text)
    if not is_function(text):
        raise typer.BadParameter(f"'{text}' is neither {' nor '.join(BUILT_IN)} nor of the form file.py:function")
    return check_function(text)


def check_mesh(text: str | None) -> str | None:
    """Axes and their lengths."""
    try:
        if text is not None:
            parse_mesh(text)
    except UsageError as err:
        raise typer.BadParameter(f"{err.message}. {err.hint}") from err
    return text


def check_optimizer(text: str | None) -> str | None:
    """A name of ``torch.optim``, or ``file.py:function``, not yet opened."""
    if text is None:
        return None
    _refuse_notebook(text)
    try:
        choice = parse_optimizer(text)
    except UsageError as err:
        raise typer.BadParameter(f"{err.message}. {err.hint}".strip()) from err
    return check_function(text) if isinstance(choice, MadeOptimizer) else text


def _refuse_notebook(text: str) -> None:
    """Raise :class:`typer.BadParameter` if ``text`` names a notebook in the place of Python code or of a model."""
    if refusal := notebook_refusal(text):
        raise typer.BadParameter(refusal)


def check_file(path: str | None) -> str | None:
    """Callback of a flag that names a file to read, which is not yet opened."""
    if path is not None and os.path.isdir(path):
        raise typer.BadParameter(f"'{path}' is a folder, not a file")
    if path is not None and not os.path.exists(path):
        raise typer.BadParameter(f"there is no file '{path}'")
    return path


def check_code(paths: list[str]) -> list[str]:
    """Folders and Python files that exist."""
    for path in paths:
        if os.path.isdir(path):
            continue
        _refuse_notebook(path)
        check_file(path)
        if not path.endswith(".py"):
            raise typer.BadParameter(f"'{path}' is neither a folder nor a Python file")
    return paths

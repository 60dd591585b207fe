"""Functions that the user names as ``file.py:function``: the loss, and scripts that make inputs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memopt_cli.errors import UsageError, first_line


def user_function(
    reference: str, flag: str, known: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Callable[..., Any]:
    """The function that ``file.py:function`` names; naming it on the command line is the trust to run the file.

    ``known``: functions in memory, by their references.  Raises :class:`UsageError`, which names ``flag``, if there is
    no such file or function.
    """
    if reference in known:
        return known[reference]
    path, _, name = reference.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"{flag} {reference}: there is no file '{path}'", hint="Write file.py:function.")
    spec = importlib.util.spec_from_file_location(f"memopt_user_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{flag} {reference}: '{path}' is not a Python file", hint="Write file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look theirs up
    try:
        spec.loader.exec_module(module)
    except Exception as err:  # the user's code may raise anything
        raise UsageError(f"{flag} {reference}: running {path} failed: {first_line(err)}") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{flag} {reference}: {path} has no function {name}", hint="Write file.py:function.")
    return function  # type: ignore[no-any-return]

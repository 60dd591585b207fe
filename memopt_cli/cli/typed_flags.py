"""Collecting the flags typed by the user, to repeat them in the commands that a report suggests."""

from __future__ import annotations

from collections.abc import Container

import typer

from memopt_cli.text.documents import quoted_flag


def is_typed(context: typer.Context, name: str) -> bool:
    """Return whether the parameter ``name`` was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_flags(context: typer.Context, *, only: Container[str]) -> tuple[str, ...]:
    """Return the typed flags of ``context`` with their values, quoted for a shell, for the parameters in ``only``."""
    flags: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in only or not is_typed(context, name):
            continue
        value = context.params[name]
        if isinstance(value, bool):
            flags.append(parameter.opts[0] if value else parameter.secondary_opts[0])
            continue
        values = value if isinstance(value, list | tuple) else [value]
        flags += [quoted_flag(parameter.opts[-1], str(each)) for each in values]
    return tuple(flags)

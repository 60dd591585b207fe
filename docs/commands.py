"""The command reference, made from the command line itself while the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from memopt_cli.cli.app import app
from memopt_cli.cli.help import group_of
from memopt_cli.text.options import GROUPS


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add ``commands.md``."""
    files.append(File.generated(config, "commands.md", content="\n".join(_page())))
    return files


def _page() -> Iterator[str]:
    yield "# Commands\n"
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        yield from (f"## memopt {name}\n", f"{_plain(command.help)}\n")
        shown = [p for p in command.params if not getattr(p, "hidden", False)]
        for group in GROUPS:
            if parameters := [p for p in shown if group_of(p) == group]:
                yield from (f"**{group}**\n", "| | |", "|---|---|")
                yield from (f"| {_names(p)} | {_plain(p.help)} |" for p in parameters)
                yield ""


def _names(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    metavar = "" if parameter.metavar is None else f" {parameter.metavar}"
    return ", ".join(f"`{name}`" for name in names) + (f" `{metavar.strip()}`" if metavar else "")


def _plain(text: str | None) -> str:
    return (text or "").replace("\n", " ").replace("|", "\\|").replace("[", "\\[")

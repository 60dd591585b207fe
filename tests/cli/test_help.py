"""What ``--help`` shows of every command, on a terminal of 80 columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from memopt_cli.cli.app import app, main
from memopt_cli.cli.help import group_of
from memopt_cli.text.options import FINE, GROUPS

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> Any:
    return COMMANDS[request.param]


@pytest.fixture
def help_lines(command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command.name, "--help-all"]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_fit_80_columns(help_lines: list[str]) -> None:
    assert [line for line in help_lines if len(line) > 80] == []


def test_descriptions_have_room(help_lines: list[str]) -> None:
    """Those that take more than one line have at least 48 of the 80 columns."""
    indents = [len(line) - len(line.lstrip()) for line in help_lines]
    assert max(indents) <= 80 - 48


def test_every_option_is_described_once(command: Any, help_lines: list[str]) -> None:
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", "\n".join(help_lines), re.MULTILINE)
    options = [p for p in command.params if p.param_type_name == "option"]
    assert sorted(listed) == sorted([max(p.opts, key=len) for p in options] + ["--help"])
    assert [p.name for p in options if not p.help] == []


def test_arguments_come_first_and_limits_of_the_search_last(help_lines: list[str]) -> None:
    groups = [line[:-1] for line in help_lines if line.endswith(":") and not line.startswith(" ")]
    assert groups == [group for group in GROUPS if group in groups]
    assert GROUPS[-1] == FINE


def test_the_first_screen_has_what_people_use(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command.name, "--help"]) == 0
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(listed) <= 18
    parameters = [p for p in command.params if p.param_type_name == "option"]
    rest = {max(p.opts, key=len) for p in parameters} - {*listed} - {"--help-all"}
    assert ("--help-all" in listed) == bool(rest)
    if command.name == "optimize":
        assert {"--level", "--budget", "--max-slowdown", "--input", "--output"} <= set(listed)
        assert {"--profile", "--prefer", "--max-split-rounds", "--seed"}.isdisjoint(listed)


def test_what_people_use_first_is_not_among_the_finer_limits() -> None:
    fine = {p.name for p in COMMANDS["optimize"].params if group_of(p) == FINE}
    assert fine.isdisjoint({"level", "budget", "frontier", "max_slowdown", "target"})
    assert {"profile", "prefer", "checkpoint_budget", "max_split_rounds", "compress_x"} <= fine


def test_the_list_of_commands_is_not_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"^  {name} +\S.*\.$", shown, re.MULTILINE)] == []
    assert "..." not in shown.partition("Commands:")[2]

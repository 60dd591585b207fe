"""The table of options: every row is some command's, and what it takes is refused alike on all surfaces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from typer.main import get_command

from memopt_cli.cli.app import app
from memopt_cli.errors import OptionError
from memopt_cli.text.options import OPTIONS, check_option, check_option_if_given
from memopt_cli.text.values import Amount, Real, Size, ValueKind, Whole

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def test_every_row_is_an_option_of_some_command() -> None:
    used = {f"{name.replace('-', '_')}.{p.name}" for name, command in COMMANDS.items() for p in command.params}
    shared = {row.partition(".")[2] for row in used - OPTIONS.keys()}
    assert {row for row in OPTIONS if row not in used and row not in shared} == set()


def test_a_value_becomes_a_plain_one() -> None:
    assert check_option("level", torch.tensor(3)) == 3
    assert check_option("max_slowdown", math.inf) == math.inf
    assert isinstance(check_option("clip_norm", torch.tensor(0.5)), float)
    assert check_option_if_given("seed", None) is None
    with pytest.raises(OptionError, match="seed is None\nUse a whole number of at least 0"):
        check_option("seed", None)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Whole(0, 4), "5", "a whole number from 0 to 4"),
        (Whole(1), "1.5", "a whole number of at least 1"),
        (Whole(1), "9" * 30, "a whole number below 2"),
        (Real(0, 1), "nan", "a number from 0 to 1"),
        (Real(0, above=True), "inf", "a finite number above 0"),
        (Real(1, unlimited=True), "0.5", "a number of at least 1, or none"),
        (Real(0.1, 9, unit="seconds"), "0", "a number of seconds from 0.1 to 9"),
        (Amount(), "0MiB", "an amount that something fits into"),
        (Size(), "0MiB", "a size that something fits into: 64GiB or 512MB"),
        (Size(), "50%", "a size that something fits into: 64GiB or 512MB"),
    ],
)
def test_text_that_is_not_taken(kind: ValueKind, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        kind.parse(text)


def test_no_limit_has_a_word_on_the_command_line() -> None:
    assert Real(1, unlimited=True).parse("none") == math.inf

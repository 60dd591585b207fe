"""What a file's names can do to a message: nothing."""

from __future__ import annotations

import pytest

from memopt_cli.errors import BaselineError, FileFormatError, PlanError, UnsafeFileError, UsageError, first_line
from memopt_cli.records import RankLayout, from_data


@pytest.mark.parametrize("kind", [FileFormatError, UnsafeFileError, PlanError, BaselineError])
def test_a_message_of_a_file_is_one_line(kind: type[FileFormatError]) -> None:
    error = kind("it names \x1b[2J\n::error::x", hint="Do this,\nor that.")
    assert error.message == "it names \\x1b[2J\\n::error::x"
    assert error.hint == "Do this,\nor that."


def test_the_key_of_a_file_is_quoted_in_one_line() -> None:
    with pytest.raises(UsageError) as error:
        from_data(RankLayout, {"ranks": 2, "parallel": "fsdp", "mesh": {"a\n::error::": "many"}})
    assert error.value.message == "RankLayout.mesh.'a\\n::error::' must be int, not 'many'"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("too large\nat line 3", "ValueError: too large"),
        ("\n  too large  \n", "ValueError: too large"),
        (
            "a.ts raised:\n\nRuntimeError: \nno such op: x\nat line 3",
            "ValueError: a.ts raised: RuntimeError: no such op: x",
        ),
        ("nothing follows:", "ValueError: nothing follows:"),
        ("", "ValueError"),
    ],
)
def test_a_line_that_announces_the_next_is_followed_by_it(said: str, line: str) -> None:
    assert first_line(ValueError(said)) == line

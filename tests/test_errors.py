"""What a file's names can do to a message: nothing."""

from __future__ import annotations

import pytest

from memopt_cli.errors import BaselineError, FileFormatError, PlanError, UnsafeFileError, UsageError
from memopt_cli.records import Layout, from_data


@pytest.mark.parametrize("kind", [FileFormatError, UnsafeFileError, PlanError, BaselineError])
def test_a_message_of_a_file_is_one_line(kind: type[FileFormatError]) -> None:
    error = kind("it names \x1b[2J\n::error::x", hint="Do this,\nor that.")
    assert error.message == "it names \\x1b[2J\\n::error::x"
    assert error.hint == "Do this,\nor that."


def test_the_key_of_a_file_is_quoted_in_one_line() -> None:
    with pytest.raises(UsageError) as error:
        from_data(Layout, {"ranks": 2, "parallel": "fsdp", "mesh": {"a\n::error::": "many"}})
    assert error.value.message == "Layout.mesh.'a\\n::error::' must be int, not 'many'"

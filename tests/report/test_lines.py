"""Whatever is written, and in whatever pieces: a CI system obeys no line of it but those that are meant for it."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.report.lines import guard
from memopt_cli.text.documents import json_text

COMMANDS = ["::error::x", " \t::stop-commands::x", "a\r::error::x", "##[error]x", "a ##vso[x]y", "##teamcity[x]"]
PIECES = st.text(" \t\n\r:#[aov\u2028\x85", max_size=6) | st.sampled_from(COMMANDS)


def is_obeyed(text: str) -> bool:
    lines = [line.lstrip() for line in text.splitlines()]
    return any(line.startswith("::") or any(f"##{name}[" in line for name in ("", "vso", "teamcity")) for line in lines)


def written(*pieces: str) -> str:
    stream = io.StringIO(newline="")
    for piece in pieces:
        guard(stream).write(piece)
    return stream.getvalue()


@pytest.mark.parametrize("text", COMMANDS)
def test_commands_are_shown(text: str) -> None:
    assert is_obeyed(text)
    assert not is_obeyed(written(text))
    assert written(text).replace("\\", "") == text


@pytest.mark.slow
@given(st.lists(PIECES, max_size=8))
def test_pieces_are_as_the_whole(pieces: list[str]) -> None:
    stream = io.StringIO(newline="")
    lines = guard(stream)
    for piece in pieces:
        assert lines.write(piece) == len(piece)
    assert not is_obeyed(stream.getvalue())
    assert stream.getvalue() == written("".join(pieces))
    assert stream.getvalue().replace("\\", "") == "".join(pieces)


def test_lines_in_a_row_are_guarded_too() -> None:
    stream = io.StringIO()
    guard(stream).writelines(["a\n", "::error::x\n"])
    assert stream.getvalue() == "a\n:\\:error::x\n"


def test_a_command_of_our_own_holds_no_other() -> None:
    stream = io.StringIO()
    lines = guard(guard(stream))  # type: ignore[arg-type]
    lines.command("error title=a::##vso[b]\n::c\n")
    lines.write("::d\n")
    assert stream.getvalue() == "::error title=a::##vso\\[b]\n:\\:c\n:\\:d\n"


@pytest.mark.slow
@given(st.recursive(PIECES, lambda inner: st.lists(inner) | st.dictionaries(PIECES, inner), max_leaves=6))
def test_json_is_as_it_was(value: object) -> None:
    assert written(json_text(value)) == json_text(value)
    assert json.loads(written(json_text(value))) == value

"""Facts are remembered from run to run in a folder that no other user may write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memopt_cli.files.state import recall, remember
from memopt_cli.records import Trust

TRUST = Trust(code_paths=("/net.py",))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records of one kind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "memopt" / "kind"


def recalled(key: str, max_bytes: int = 1000) -> Trust | None:
    return recall("kind", key, Trust, max_bytes)


def test_a_record_is_recalled_by_its_kind_and_key_alone(state: Path) -> None:
    remember("kind", "a", TRUST)
    assert recalled("a") == TRUST
    assert recalled("b") is None
    assert recall("other", "a", Trust, 1000) is None
    assert state.stat().st_mode & 0o777 == 0o700


def test_the_oldest_records_are_forgotten(state: Path) -> None:
    for age, key in enumerate("abcd"):
        remember("kind", key, TRUST)
        for path in state.glob("*.json"):
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - (age + 1) * 10**9))
    remember("kind", "e", TRUST, max_records=2)
    assert [recalled(key) is not None for key in "abcde"] == [False, False, False, True, True]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"code_paths": 3}', '{"unknown": []}'])
def test_a_damaged_record_is_no_record(state: Path, text: str) -> None:
    remember("kind", "a", TRUST)
    next(state.glob("*.json")).write_text(text)
    assert recalled("a") is None


def test_a_record_that_is_too_large_is_no_record() -> None:
    remember("kind", "a", TRUST)
    assert recalled("a", max_bytes=10) is None


def test_a_folder_that_others_may_write_to_is_not_used(state: Path) -> None:
    remember("kind", "a", TRUST)
    state.chmod(0o777)
    assert recalled("a") is None
    remember("kind", "b", TRUST)
    assert len(list(state.iterdir())) == 1


def test_without_a_folder_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember("kind", "a", TRUST)
    assert recalled("a") is None

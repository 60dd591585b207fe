"""Trust that was typed for a file is offered again, to that user and for that content alone, and never applied."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt_cli.files.trusted import recall_trust, remember_trust
from memopt_cli.records import Trust

Memopt = Callable[..., Any]
AGAIN = "You trusted this file before, and it is unchanged. To do so again: memopt profile net.pt -i 2x3"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is remembered."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "memopt" / "trusted"


@pytest.fixture
def profile(memopt: Memopt, in_process: None, user_code: str, monkeypatch: pytest.MonkeyPatch) -> Memopt:
    """``memopt profile`` of a model whose class is user code."""
    monkeypatch.syspath_prepend(user_code)
    from faulty import Fine

    torch.save(Fine(), "net.pt")
    return lambda *trust: memopt("profile", "net.pt", "-i", "2x3", *trust)


def test_the_command_with_the_trust_is_offered_while_the_file_is_the_same(profile: Memopt, state: Path) -> None:
    assert "before" not in profile().err
    assert profile("--allow-package", "faulty").code == 0
    done = profile()
    assert done.code == 4
    assert f"hint: {AGAIN} --allow-package faulty\n" in done.err
    assert done.err.count("--allow-package") == 1
    torch.save(torch.load("net.pt", weights_only=False).requires_grad_(False), "net.pt")
    assert "before" not in profile().err
    assert state.stat().st_mode & 0o777 == 0o700


def test_what_a_file_of_settings_vouches_for_is_not_remembered(profile: Memopt, state: Path) -> None:
    Path("own.yaml").write_text("allow-package: faulty\n")
    assert profile("--config", "own.yaml").code == 0
    assert not state.exists()


def test_paths_of_code_are_remembered_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.pt").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    remember_trust("net.pt", empty, Trust(code_paths=("train.py",), sandbox=False))
    monkeypatch.chdir("/")
    found = recall_trust(str(tmp_path / "net.pt"))
    assert found is not None
    assert found.flags == f"--code-path {tmp_path}/train.py --no-sandbox"
    assert recall_trust(str(tmp_path / "state" / "net.pt")) is None


@pytest.mark.parametrize("forge", ["writable", "another's", "nonsense", "unknown"])
def test_nothing_is_offered_that_somebody_else_may_have_written(
    forge: str, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "net.pt"
    model.write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    remember_trust(str(model), empty, Trust(pickle=True))
    assert recall_trust(str(model)) == Trust(pickle=True)
    (kept,) = state.iterdir()
    if forge == "writable":
        state.chmod(0o777)
    elif forge == "another's":
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
    else:
        kept.write_text("[" if forge == "nonsense" else json.dumps({"pickle": True, "more": 1}))
    assert recall_trust(str(model)) is None


def test_without_a_folder_to_write_to_nothing_is_lost(profile: Memopt, state: Path) -> None:
    state.parent.parent.write_text("a file in its place")
    assert profile("--allow-package", "faulty").code == 0
    assert profile().code == 4

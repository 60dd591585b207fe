"""``explain_oom``: what is kept where a script runs out of memory, and what is raised then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memopt_cli
from memopt_cli.errors import OptionError
from memopt_cli.oom_text import read_oom


def run_out() -> None:
    torch.empty(1 << 60)


def test_the_error_is_kept_and_raised_with_a_note(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised, memopt_cli.explain_oom(tmp_path / "a b"):
        run_out()
    assert raised.value.__notes__ == [f"memopt explain MODEL --log '{tmp_path / 'a b.log'}'"]
    found = read_oom((tmp_path / "a b.log").read_text())
    assert found is not None
    assert found.asked_bytes == 4 << 60
    assert found.line.startswith(__file__)


def test_it_decorates_a_function_and_replaces_what_it_kept_before(tmp_path: Path) -> None:
    decorated = memopt_cli.explain_oom(tmp_path / "kept")(run_out)
    (tmp_path / "kept.log").write_text("old")
    with pytest.raises(RuntimeError):
        decorated()
    assert "old" not in (tmp_path / "kept.log").read_text()


def test_other_errors_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other") as raised, memopt_cli.explain_oom(tmp_path / "kept"):
        raise ValueError("other")
    assert not getattr(raised.value, "__notes__", [])
    with memopt_cli.explain_oom(tmp_path / "kept"):
        pass
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_does_not_hide_the_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate") as raised, memopt_cli.explain_oom(tmp_path / "no" / "kept"):
        run_out()
    assert raised.value.__notes__[0].startswith("memopt could not keep what explains it: ")


def test_a_path_of_another_type_is_refused() -> None:
    with pytest.raises(OptionError), memopt_cli.explain_oom(3):  # type: ignore[arg-type]
        pass

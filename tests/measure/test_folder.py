"""The folder of a subprocess goes, whatever was done to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memopt_cli.measure.folder import Folder, remove


def test_it_goes_with_whom_it_belongs_to() -> None:
    folder = Folder()
    path = Path(folder.path)
    (path / "inner").mkdir()
    (path / "inner/file").write_text("x")
    del folder
    assert not path.exists()


@pytest.mark.slow
def test_folders_in_folders(tmp_path: Path) -> None:
    """More than Python recurses into, and than files can be open."""
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("a", dir_fd=here)
        inner = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    remove(str(top))
    assert not top.exists()


def test_nothing_outside_is_touched(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir(mode=0o500)
    (tmp_path / "file").write_text("x")
    (inside / "inner").mkdir(parents=True)
    for number, target in enumerate((outside, tmp_path / "file", tmp_path, Path("nowhere"))):
        (inside / f"link {number}").symlink_to(target)
        (inside / f"inner/link {number}").symlink_to(target)
    (inside / "inner").chmod(0)
    remove(str(inside))
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "file"}
    assert outside.stat().st_mode & 0o777 == 0o500


def test_what_cannot_be_removed_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for path in ("link", "nowhere"):
        remove(str(tmp_path / path))
    assert (tmp_path / "link").is_symlink()

"""All files or none."""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from memopt_cli.errors import UsageError, WriteError
from memopt_cli.text import writing
from memopt_cli.text.writing import check_targets, content, write_all


def failing(err: BaseException) -> Callable[[BinaryIO], object]:
    def fill(file: BinaryIO) -> None:
        file.write(b"half of it")
        raise err

    return fill


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_writes_all(tmp_path: Path) -> None:
    files = write_all({tmp_path / "a": content(b"1"), tmp_path / "b": content(b"2")}, force=False)
    assert files == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert listing(tmp_path) == {"a": b"1", "b": b"2"}


def test_files_have_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    write_all({tmp_path / "a": content(b"1")}, force=False)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_existing_file_needs_force(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"old")
    files = {tmp_path / "a": content(b"1"), tmp_path / "b": content(b"2")}
    with pytest.raises(UsageError, match=r"b exists") as caught:
        write_all(files, force=False)
    assert "--force" in caught.value.hint
    assert listing(tmp_path) == {"b": b"old"}
    write_all(files, force=True)
    assert listing(tmp_path) == {"a": b"1", "b": b"2"}


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        (tmp_path / "a").write_bytes(b"theirs")

    with pytest.raises(UsageError):
        write_all({tmp_path / "a": fill}, force=False)
    assert listing(tmp_path) == {"a": b"theirs"}


@pytest.mark.parametrize(
    "err", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError("x")]
)
def test_failure_while_filling_leaves_nothing(err: BaseException, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(WriteError if isinstance(err, OSError) else type(err)):
        write_all({tmp_path / "a": content(b"new"), tmp_path / "b": failing(err)}, force=True)
    assert listing(tmp_path) == {"a": b"old"}


def test_disk_full_under_another_exception(tmp_path: Path) -> None:
    """``torch.save`` raises a RuntimeError while it handles the OSError of the file."""

    def fill(file: BinaryIO) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 1472 vs 1366")

    with pytest.raises(WriteError, match="No space left on device"):
        write_all({tmp_path / "a": fill}, force=False)
    assert listing(tmp_path) == {}


def test_a_disk_that_is_really_full(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode: open_file("/dev/full", os.O_WRONLY))
    with pytest.raises(WriteError, match="No space left"), writing._os_errors(Path("model.pt")):
        writing._fill(Path("model.pt"), content(b"x"))


def _links_refused(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


_IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("has_links", "err", "step"),
    [
        *((False, err, step) for err in (_IO_ERROR, KeyboardInterrupt()) for step in range(5)),
        *((True, _IO_ERROR, step) for step in range(3)),  # a link that fails is a rename instead
        *((True, KeyboardInterrupt(), step) for step in range(5)),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_failure_while_renaming_restores_what_was(
    has_links: bool, err: BaseException, step: int, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps: two files with a backup each, one new; any may fail, or be interrupted just after it was done."""
    if not has_links:
        monkeypatch.setattr(os, "link", _links_refused)
    before = {"a": b"old a", "c": b"old c"}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    calls = iter(range(100))

    def failing(do: Callable[..., None]) -> Callable[..., None]:
        def do_or_fail(source: Any, target: Any, **options: Any) -> None:
            if next(calls) != step:
                return do(source, target, **options)
            if late:
                do(source, target, **options)
            raise err

        return do_or_fail

    for name in ("replace", "link") if has_links and err is not _IO_ERROR else ("replace",):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with pytest.raises(WriteError if isinstance(err, OSError) else KeyboardInterrupt):
        write_all({tmp_path / name: content(b"new") for name in "abc"}, force=True)
    assert listing(tmp_path) == before


def test_a_file_that_is_replaced_is_there_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever this process is killed, the old or the new one stands under its name."""
    (tmp_path / "a").write_bytes(b"old")
    seen: list[bytes] = []

    def watched(do: Callable[..., None]) -> Callable[..., None]:
        def watched_call(*args: Any, **options: Any) -> None:
            do(*args, **options)
            seen.append((tmp_path / "a").read_bytes())

        return watched_call

    for name in ("replace", "link", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    write_all({tmp_path / "a": content(b"new")}, force=True)
    assert seen[0] == b"old"
    assert seen[-1] == b"new"
    assert listing(tmp_path) == {"a": b"new"}


def test_targets_are_checked_beforehand(tmp_path: Path) -> None:
    check_targets([tmp_path / "free"], force=False)
    with pytest.raises(UsageError, match="is a folder"):
        check_targets([tmp_path], force=True)
    with pytest.raises(WriteError, match="there is no folder"):
        check_targets([tmp_path / "no" / "x.pt"], force=False)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_not_replaced(force: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(os.devnull)
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(UsageError, match="is not a regular file"):
            write_all({path: content(b"x")}, force=force)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists"):
        check_targets([tmp_path / "a"], force=False)


def test_folder_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root everything is writable
    with pytest.raises(WriteError, match="not writable"):
        check_targets([tmp_path / "a"], force=False)


def test_a_name_too_long(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="too long"):
        write_all({tmp_path / ("x" * 300): content(b"")}, force=False)


def test_a_file_that_comes_to_be_there_at_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    link = os.link

    def meanwhile(source: Path, target: Path) -> None:
        if target == second:
            second.write_text("another's")
        link(source, target)

    monkeypatch.setattr(os, "link", meanwhile)
    with pytest.raises(UsageError, match="exists"):
        write_all({first: content(b"1"), second: content(b"2")}, force=False)
    assert second.read_text() == "another's"
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_on_a_disk_without_links_files_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _links_refused)
    write_all({tmp_path / "one": content(b"1")}, force=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("one", "1")]


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by whoever could foresee its name."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".a.known.memopt").symlink_to(tmp_path / "precious")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "known")
    with pytest.raises(WriteError, match="File exists"):
        write_all({tmp_path / "a": content(b"other")}, force=True)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a").exists()


def test_names_of_temporary_files_are_never_the_same(tmp_path: Path) -> None:
    seen = set[str]()

    def look(file: BinaryIO) -> None:
        seen.update(path.name for path in tmp_path.iterdir() if path.name != "a")

    for _ in range(3):
        write_all({tmp_path / "a": look}, force=True)
    assert len(seen) == 3

"""The user's own state folder, in which memopt remembers facts from run to run.

No other user may write to the folder, or nothing is remembered and recalled: a record may vouch for a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TypeVar

from memopt_cli.errors import MemoptError
from memopt_cli.records import from_data, to_data
from memopt_cli.text.documents import json_text, read_bytes, read_json
from memopt_cli.text.writing import content, write_all

Record = TypeVar("Record")

_FOR_OTHERS = 0o022
"""Permission bits that let group and others write."""


def remember(kind: str, key: str | bytes, record: object, *, max_records: int | None = None) -> None:
    """Remember ``record`` under ``key`` among the records of its ``kind``; beyond ``max_records``, forget the oldest.

    If the folder cannot be written to, nothing is remembered, and no error is raised.
    """
    with contextlib.suppress(OSError, RuntimeError, MemoptError):  # ``Path.home`` raises RuntimeError without a home
        path = _record_path(kind, key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(path.parent):
            return
        write_all({path: content(json_text(to_data(record)).encode())}, force=True)
        if max_records is not None:
            by_age = sorted(path.parent.glob("*.json"), key=lambda record_path: record_path.stat().st_mtime)
            for old_path in by_age[:-max_records]:
                old_path.unlink(missing_ok=True)


def recall(kind: str, key: str | bytes, record_type: type[Record], max_bytes: int) -> Record | None:
    """Return the record of ``kind`` under ``key``; ``None`` if there is none, or none of ``record_type``."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, MemoptError):
        path = _record_path(kind, key)
        if _is_own(path.parent):
            record: Record = from_data(record_type, read_json(read_bytes(path, max_bytes)))
            return record
    return None


def _record_path(kind: str, key: str | bytes) -> Path:
    stated = os.environ.get("XDG_STATE_HOME", "")
    state = Path(stated) if os.path.isabs(stated) else Path.home() / ".local" / "state"
    digest = hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()
    return state / "memopt" / kind / f"{digest}.json"


def _is_own(folder: Path) -> bool:
    """Return whether ``folder`` is the user's, and no other user may write to it."""
    state = folder.stat()
    return state.st_uid == os.getuid() and not state.st_mode & _FOR_OTHERS

"""Remembering the trust that a user typed for a model file; it is offered again, and never applied by itself.

Nothing that travels with a model may vouch for it, so the trust is kept in the user's own state folder.  There is one
file for each pair of a path and a content: a model that is replaced, or copied elsewhere, must be trusted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path

from memopt_cli.errors import MemoptError
from memopt_cli.records import Trust, from_data, to_data
from memopt_cli.text.documents import json_text, read_bytes, read_json
from memopt_cli.text.writing import content, write_all

_MAX_BYTES = 1 << 16  # a remembered trust is a few lines
_FOR_OTHERS = 0o022
"""Permission bits that let group and others write."""


def remember_trust(location: str, sha256: str, trust: Trust) -> None:
    """Remember that the user typed ``trust`` for the file at ``location`` whose hash is ``sha256``.

    If the folder cannot be written to, nothing is remembered, and no error is raised.
    """
    typed_trust = replace(trust, code_paths=tuple(map(os.path.abspath, trust.code_paths)))
    with contextlib.suppress(OSError, RuntimeError, MemoptError):  # ``Path.home`` raises RuntimeError without a home
        path = _record_path(location, sha256)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(path.parent):
            write_all({path: content(json_text(to_data(typed_trust)).encode())}, force=True)


def recall_trust(location: str) -> Trust | None:
    """Return the trust last typed for ``location`` with its current content, or ``None`` if no trust is remembered."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, MemoptError):
        path = _record_path(location, hashlib.sha256(read_bytes(location)).hexdigest())
        if _is_own(path.parent):
            return from_data(Trust, read_json(read_bytes(path, _MAX_BYTES)))
    return None


def _record_path(location: str, sha256: str) -> Path:
    stated = os.environ.get("XDG_STATE_HOME", "")
    state = Path(stated) if os.path.isabs(stated) else Path.home() / ".local" / "state"
    key = hashlib.sha256(os.fsencode(f"{os.path.abspath(location)}\0{sha256}")).hexdigest()
    return state / "memopt" / "trusted" / f"{key}.json"


def _is_own(folder: Path) -> bool:
    """Return whether ``folder`` is the user's, and no other user may write to it."""
    state = folder.stat()
    return state.st_uid == os.getuid() and not state.st_mode & _FOR_OTHERS

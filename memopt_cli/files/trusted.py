"""Remembering the trust that a user typed for a model file; it is offered again, and never applied by itself.

Nothing that travels with a model may vouch for it, so the trust is kept in the user's own state folder.  There is one
record for each pair of a path and a content: a model that is replaced, or copied elsewhere, must be trusted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace

from memopt_cli.errors import MemoptError
from memopt_cli.files.state import recall, remember
from memopt_cli.records import Trust
from memopt_cli.text.documents import read_bytes

_KIND = "trusted"
_MAX_BYTES = 1 << 16  # a remembered trust is a few lines


def remember_trust(location: str, sha256: str, trust: Trust) -> None:
    """Remember that the user typed ``trust`` for the file at ``location`` whose hash is ``sha256``.

    If the state folder cannot be written to, nothing is remembered, and no error is raised.
    """
    typed_trust = replace(trust, code_paths=tuple(map(os.path.abspath, trust.code_paths)))
    remember(_KIND, _key(location, sha256), typed_trust)


def recall_trust(location: str) -> Trust | None:
    """Return the trust last typed for ``location`` with its current content, or ``None`` if no trust is remembered."""
    with contextlib.suppress(OSError, MemoptError):
        sha256 = hashlib.sha256(read_bytes(location)).hexdigest()
        return recall(_KIND, _key(location, sha256), Trust, _MAX_BYTES)
    return None


def _key(location: str, sha256: str) -> bytes:
    return os.fsencode(f"{os.path.abspath(location)}\0{sha256}")

"""How large a model may become that is loaded from a file, and who is asked to keep to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from memopt_cli.inputs.spec_text import ADAPTER_SETTINGS, base_of, is_factory
from memopt_cli.records import ModelSource
from memopt_cli.text.documents import MOST_BYTES, read_bytes, read_json

_WIDENING, _MARGIN_BYTES = 4, 1 << 30
"""Weights of 8 bits may be trained in 32, and a model makes buffers that its file does not hold, as masks are."""
_UNBOUNDED_BYTES: Final = 1 << 50
"""What the user's code makes, on the largest of disks."""


def is_confined(source: ModelSource) -> bool:
    """What a file says is run behind a second wall; code that the user names is trusted."""
    return source.trust.sandbox and not source.trust.pickle and not is_factory(source.location)


def most_saved_bytes(source: ModelSource) -> int:
    """Bytes that a model may take when it is saved: of one from a file far more than that holds, but no full disk."""
    if not is_confined(source):
        return _UNBOUNDED_BYTES
    return _WIDENING * sum(map(_bytes_of, _places(source))) + _MARGIN_BYTES


def _places(source: ModelSource) -> Iterator[str]:
    yield source.location
    if source.weights is not None:
        yield source.weights
    with contextlib.suppress(OSError, ValueError):  # no adapter, or none that can be loaded
        settings = read_json(read_bytes(os.path.join(source.location, ADAPTER_SETTINGS), MOST_BYTES))
        named = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
        base = base_of(source.location, named)
        if base is not None:
            yield base


def _bytes_of(path: str) -> int:
    """Of a file, or of those in a folder."""
    try:
        if not os.path.isdir(path):
            return os.stat(path).st_size
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    except OSError:  # it is gone: loading it says so
        return 0

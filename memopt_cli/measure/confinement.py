"""Which models run in the sandbox, and how large the files that they save may become."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from memopt_cli.inputs.spec_text import ADAPTER_SETTINGS, base_of, is_factory
from memopt_cli.records import ModelSource
from memopt_cli.text.documents import MAX_BYTES, read_bytes, read_json

_BYTES_PER_ORIGINAL_BYTE = 4
"""Maximum bytes of a saved model for each byte of its original: weights of 8 bits may be trained in 32."""
_MARGIN_BYTES = 1 << 30
"""Bytes that a saved model may have in addition: a model may make buffers, such as masks, that its file lacks."""
_UNBOUNDED_BYTES: Final = 1 << 50
"""The bound for models from the user's own code, larger than any disk."""


def is_confined(source: ModelSource) -> bool:
    """Return whether the model of ``source`` runs in the sandbox; the user's own code does not."""
    return source.trust.sandbox and not source.trust.pickle and not is_factory(source.location)


def max_saved_bytes(source: ModelSource) -> int:
    """Return the bytes that the model of ``source`` may take when it is saved.

    The bound for a model from a file is generous, but keeps a hostile one from filling the disk.
    """
    if not is_confined(source):
        return _UNBOUNDED_BYTES
    return _BYTES_PER_ORIGINAL_BYTE * sum(map(_bytes_of, _places(source))) + _MARGIN_BYTES


def _places(source: ModelSource) -> Iterator[str]:
    yield source.location
    if source.weights is not None:
        yield source.weights
    with contextlib.suppress(OSError, ValueError):  # no adapter, or none that can be loaded
        settings = read_json(read_bytes(os.path.join(source.location, ADAPTER_SETTINGS), MAX_BYTES))
        base_name = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
        base = base_of(source.location, base_name)
        if base is not None:
            yield base


def _bytes_of(path: str) -> int:
    try:
        if not os.path.isdir(path):
            return os.stat(path).st_size
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    except OSError:  # a missing file is reported when it is loaded
        return 0

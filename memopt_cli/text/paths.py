"""Paths of modules in reports and messages, which name many of them in few rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from memopt_cli.text.units import format_count

_NUMBER: Final = re.compile(r"(^|\.)\d+(?=\.|$)")


def module_name(path: str) -> str:
    """Return ``path`` for messages; the model itself, whose path is empty, is ``(root)``."""
    return path or "(root)"


def quote_module(path: str) -> str:
    """Return ``path`` in quotes for messages; the model itself is ``'(root)'``."""
    return f"'{module_name(path)}'"


def is_within(path: str, ancestor: str) -> bool:
    """Return whether ``path`` is ``ancestor`` or lies below it; the empty path is the root."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def gather_paths(bytes_by_path: Mapping[str, int]) -> dict[str, int]:
    """Return ``bytes_by_path``, path -> bytes, largest first, with paths that differ only in one number as one row.

    For example ``blocks.*.mlp (×12)`` with the bytes of all twelve.
    """
    paths_by_pattern: dict[str, list[str]] = defaultdict(list)
    for path in bytes_by_path:
        paths_by_pattern[_NUMBER.sub(r"\1*", path, count=1)].append(path)
    rows = {
        f"{name} (×{len(paths)})" if len(paths) > 1 else paths[0]: sum(bytes_by_path[path] for path in paths)
        for name, paths in paths_by_pattern.items()
    }
    return dict(sorted(rows.items(), key=lambda row: -row[1]))


def attributes_in_words(attributes: Sequence[str]) -> str:
    """Describe ``attributes``, given by their paths: ``gradient_checkpointing of 5 modules``."""
    counts = Counter(attribute.rpartition(".")[2] for attribute in attributes)
    return ", ".join(f"{name} of {format_count(count, 'module')}" for name, count in counts.items())


def stems_of(before: str, after: str) -> tuple[str, str]:
    """Return both paths without the last names that they share.

    Example: ``features.0.conv``, ``backbone.0.conv`` -> ``features``, ``backbone``.
    """
    old, new = before.split("."), after.split(".")
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    return ".".join(old), ".".join(new)

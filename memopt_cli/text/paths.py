"""Paths of modules, as reports and messages name many of them in few rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

_NUMBER: Final = re.compile(r"(^|\.)\d+(?=\.|$)")


def gathered(held: Mapping[str, int]) -> dict[str, int]:
    """Return ``held``, path -> bytes, largest first, with paths that differ in one number alone as one row.

    For example ``blocks.*.mlp (×12)`` with the bytes of all twelve.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for path in held:
        alike[_NUMBER.sub(r"\1*", path, count=1)].append(path)
    rows = {
        f"{name} (×{len(paths)})" if len(paths) > 1 else paths[0]: sum(held[path] for path in paths)
        for name, paths in alike.items()
    }
    return dict(sorted(rows.items(), key=lambda row: -row[1]))

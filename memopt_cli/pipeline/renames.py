"""Renamed parts of a model: the modules of two models that are the same under other paths."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memopt_cli.records import ModuleBytes, Rename
from memopt_cli.text.paths import stems_of

Moves = Mapping[str, str]
"""Path of a module before -> its path now, for those that have another one."""


def find_renames(
    before: Sequence[ModuleBytes], after: Sequence[ModuleBytes]
) -> tuple[tuple[Rename, ...], dict[str, str]]:
    """Find renamed parts of the model; return these renames, and a mapping of old to new paths of modules.

    Example: ``features.0.conv`` is gone and ``backbone.0.conv`` is new, with the same class, parameters, buffers and
    output bytes.  Without the last names that both share, the pair votes for the rename ``features`` -> ``backbone``.
    The renames with most votes are applied first, even to modules that have changed in size.  The modules that are
    left vote by class, where as many are new as are gone: they were renamed and changed in size.
    """
    old, new = ({m.path: m for m in modules} for modules in (before, after))
    missing = {path: module for path, module in old.items() if path not in new}
    added = {path: module for path, module in new.items() if path not in old}
    moves: dict[str, str] = {}
    targets: set[str] = set()
    renames = []
    sides = _SortedPaths(missing), _SortedPaths(added)
    for by_class in (False, True):
        unmatched = [module for path, module in missing.items() if path not in moves]
        free = [module for path, module in added.items() if path not in targets]
        votes = Counter(stems_of(*pair) for pair in _equal_pairs(unmatched, free, by_class=by_class))
        for stems, _ in votes.most_common():
            move_count = 0
            for path, target in _renamed_paths(*sides, *stems):
                is_free = path not in moves and target not in targets and path in missing and target in added
                if is_free and _is_successor(added[target], missing[path]):
                    moves[path] = target
                    targets.add(target)
                    move_count += 1
            if move_count:
                renames.append(Rename(before=stems[0], after=stems[1], modules=move_count))
    return tuple(renames), moves


class _SortedPaths:
    """A sorted list of module paths, in which those below a module are found by bisection."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._sorted = sorted(paths)

    def below(self, stem: str) -> Sequence[str]:
        """Return the path ``stem``, if it is in the list, and the paths of all modules in that module."""
        if not stem:
            return self._sorted
        own_index, start, end = (bisect.bisect_left(self._sorted, text) for text in (stem, f"{stem}.", f"{stem}/"))
        return [*(path for path in self._sorted[own_index : own_index + 1] if path == stem), *self._sorted[start:end]]


def _renamed_paths(missing: _SortedPaths, added: _SortedPaths, before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield the paths that a rename would change, each with its new path; iterate over the shorter side, for speed."""
    sources, targets = missing.below(before), added.below(after)
    if len(sources) <= len(targets):
        for path in sources:
            yield path, _replace_prefix(path, before, after)
    else:
        for path in targets:
            source = _replace_prefix(path, after, before)
            if _replace_prefix(source, before, after) == path:
                yield source, path


def _equal_pairs(
    missing: Iterable[ModuleBytes], added: Iterable[ModuleBytes], *, by_class: bool
) -> Iterator[tuple[str, str]]:
    """Yield paths of modules of equal class and sizes, in pairs.

    ``by_class``: of equal class, whatever the sizes, if both sides have as many.
    """
    paths_by_key: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, modules in enumerate((missing, added)):
        for module in modules:
            key = module.class_name if by_class else (module.class_name, _sizes(module))
            paths_by_key[key][side].append(module.path)
    for before, after in paths_by_key.values():
        if not by_class or len(before) == len(after):
            yield from zip(before, after, strict=False)


def _is_successor(new: ModuleBytes, old: ModuleBytes) -> bool:
    """Return whether ``new``, at the place of ``old`` in a renamed part, is that module, perhaps of a renamed class."""
    return new.class_name == old.class_name or _sizes(new) == _sizes(old)


def _sizes(module: ModuleBytes) -> tuple[int, ...]:
    return module.output_bytes, *(module.held_bytes.get(kind, 0) for kind in ("parameters", "buffers"))


def _replace_prefix(path: str, before: str, after: str) -> str:
    rest = path[len(before) :].strip(".")
    return ".".join(part for part in (after, rest) if part)

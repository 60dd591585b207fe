"""Checking the optimized model's file: the original may have taken over the subprocess that wrote it.

The comparison with the original runs in a process that unpickles neither file.  The file passes the same audit, and may
use no class of a library or of the user that the original does not use.  It may hold only the model: its
later reader may be ``torch.load``, which makes everything in a file, needed or not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from memopt_cli.errors import MemoptError, UnsafeFileError
from memopt_cli.inputs.spec_text import ADAPTER_SETTINGS
from memopt_cli.loading import format_of, read_file, read_same
from memopt_cli.loading.archive import record_names
from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.module_pickle import ModulePickle, audit_objects, refuse_attacks, storages_of
from memopt_cli.loading.pickles.audit import assign_kinds, uses_in
from memopt_cli.loading.pickles.described import NESTED
from memopt_cli.loading.pickles.kinds import kinds_of
from memopt_cli.loading.pickles.kinds.interface import Denied, Missing, Recipe
from memopt_cli.loading.pickles.kinds.modules import Libraries
from memopt_cli.loading.pickles.kinds.trusted_names import TrustedNames
from memopt_cli.loading.pickles.names import within_class
from memopt_cli.loading.pickles.nodes import Built, Global, reachable
from memopt_cli.loading.pickles.reading import PickledFile, read_pickled
from memopt_cli.loading.pickles.scan import suspend_collection
from memopt_cli.loading.user_code import UserCode
from memopt_cli.records import ModelSource, Trust

_START: Final = b"PK\x03\x04"
_SCRIPT_RECORD: Final = "constants.pkl"
"""A record that makes ``torch.load`` take an archive for TorchScript, and run it."""
_LIFTED: Final = {("torch.nn.modules.container.Sequential", False)}
"""The only class of PyTorch that loading builds from a file without a pickled module."""
_ATTACK_HINT: Final = "The original may be an attack on PyTorch: run it nowhere else. If you trust it: `--no-sandbox`."


def check_returned(path: str, source: ModelSource) -> int:
    """Return the size in bytes of the file at ``path``, if it could do nothing that its original could not.

    Raises :class:`UnsafeFileError` if it could, and :class:`ChangedFileError` if the original has changed.
    """
    is_folder = os.path.isdir(source.location)
    adapts = is_folder and os.path.isfile(os.path.join(source.location, ADAPTER_SETTINGS))
    trust = Trust(packages=("peft",)) if adapts else source.trust
    trusted = TrustedNames(trust, UserCode(trust.code_paths))
    with suspend_collection():
        original_classes = None if is_folder else _classes_of_original(source, trusted)
        file = replace(read_file(path), path="the file")
        try:
            _check_file(file, original_classes, trusted)
        except MemoptError as err:
            raise UnsafeFileError(
                f"the subprocess returned something that is not an optimized model: {err.message}", hint=_ATTACK_HINT
            ) from err
    return len(file.data)


def _classes_of_original(source: ModelSource, trusted: TrustedNames) -> set[tuple[str, bool]]:
    """Return the :func:`_classes` of the original.

    TorchScript and exports have only those that a Sequential becomes; their other modules become memopt's own.
    """
    file, _ = read_same(source.location, None, source.sha256)
    return set(_classes(read_pickled(file), trusted)) if isinstance(format_of(file), ModulePickle) else _LIFTED


def _check_file(file: ModelFile, original_classes: set[tuple[str, bool]] | None, trusted: TrustedNames) -> None:
    """Raise :class:`MemoptError` if ``file`` holds anything but an optimized model.

    ``original_classes``: the :func:`_classes` of the original; ``None`` for a folder, which names no classes.
    """
    if not file.data.startswith(_START) or _SCRIPT_RECORD in record_names(file.data):
        raise UnsafeFileError("it is not an archive of torch.save")
    pickled = read_pickled(file)
    refuse_attacks(file, pickled.scan, trusted.code)
    if NESTED in pickled.scan.wanted or _has_unused_objects(pickled):
        raise UnsafeFileError("it creates objects that are not part of the model")
    audit_objects(file, pickled, pickled.pickle.root, kinds_of(storages_of(pickled), trusted), trusted)
    if original_classes is not None and (
        added := {name for name, _ in set(_classes(pickled, trusted)) - original_classes}
    ):
        raise UnsafeFileError(
            f"it has {', '.join(sorted(added))}, which the original does not have, or has in a different form"
        )


def _has_unused_objects(pickled: PickledFile) -> bool:
    """Return whether the file imports or makes anything that its model does not use.

    A nested class is no exception: to name ``Outer.Inner``, protocol 2 imports ``Outer`` and makes a call that asks it
    for ``Inner``, and the model uses both only by that name.
    """
    root = pickled.pickle.root
    reached = {id(value) for value in reachable(root)}
    used = {str(use.name) for use in uses_in(root)}
    used |= {name.rpartition(".")[0] for name in used}
    dropped = [step.node for step in pickled.pickle.steps if id(step.node) not in reached]
    callees = (str(within_class(node)) for node in dropped if isinstance(node, Built))
    return not used.issuperset(itertools.chain(map(str, pickled.scan.wanted), callees))


def _classes(pickled: PickledFile, trusted: TrustedNames) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it is called) of each class of a library or of code that the user trusts.

    A class has the name that it would be saved under now: ``timm.models.layers.DropPath`` of an older file is
    ``timm.layers.drop.DropPath``.
    """
    known, _ = assign_kinds(uses_in(pickled.pickle.root), kinds_of(storages_of(pickled), trusted))
    recipes: dict[tuple[Global, str], Recipe | Denied | Missing] = {}
    for use, kind in known:
        if not isinstance(kind, Libraries | TrustedNames):
            continue
        key = use.name, use.how
        recipe = recipes[key] = recipes.get(key) or kind.recipe(use)
        known_class = recipe.kind if isinstance(recipe, Recipe) else None
        name = (
            f"{known_class.__module__}.{known_class.__qualname__}" if isinstance(known_class, type) else str(use.name)
        )
        yield name, use.how == "called"

"""Objects in memopt's own files: segments, lifted modules, scripts, and the few classes that they need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.loading.archive import NESTED_CODE_LIMIT
from memopt_cli.loading.pickles.kinds.interface import (
    BrokenError,
    Denied,
    Graph,
    Missing,
    Recipe,
    Use,
    plain_entries,
    resolve,
)
from memopt_cli.loading.pickles.kinds.modules import check_attributes, fill, module_recipe
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple
from memopt_cli.loading.script_archive import check_script_archive
from memopt_cli.runtime.compressor import COMPRESSORS
from memopt_cli.runtime.container import check_installed, restore_by_length, restore_segment
from memopt_cli.runtime.lengths import LengthOf
from memopt_cli.runtime.lifted.module import LiftedModule, restore_lifted
from memopt_cli.runtime.module_state import label_of
from memopt_cli.runtime.script import ScriptLeaf, archive_bytes
from memopt_cli.runtime.segment_config import SegmentConfig

RUNTIME: Final = "memopt_cli.runtime"
RESTORE_SEGMENT: Final = Global(f"{RUNTIME}.container", "restore_segment")
RESTORE_BY_LENGTH: Final = Global(f"{RUNTIME}.container", "restore_by_length")
RESTORE_SEGMENTS: Final = (RESTORE_SEGMENT, RESTORE_BY_LENGTH)
RESTORE_LIFTED: Final = Global(f"{RUNTIME}.lifted.module", "restore_lifted")

_MODULES: Final = frozenset(
    f"{RUNTIME}.{name}"
    for name in ("runs.Chain", "runs.Run", "runs.GroupedSequential", "script.ScriptLeaf", "script.ScriptPart")
)
_CONFIG_FIELDS: Final = {f.name for f in fields(SegmentConfig)}
_LENGTH_FIELDS: Final = {f.name for f in fields(LengthOf)}


class RuntimeNames:
    """Names of the runtime that are a part of the format of saved models."""

    def claims(self, use: Use) -> bool:
        """Return whether ``use`` is a way in which saved models use a name of the runtime; no other kind claims it."""
        if use.name in (*RESTORE_SEGMENTS, RESTORE_LIFTED):
            return use.how == "called"
        if str(use.name) in _MODULES:
            return use.how in ("created", "held")
        return use.how == "created" and use.name.module == f"{RUNTIME}.compressor"

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """Return the recipe for ``use``."""
        if use.name in RESTORE_SEGMENTS:
            make = restore_by_length if use.name == RESTORE_BY_LENGTH else restore_segment
            restore = functools.partial(_segment, make)
            return Recipe(
                make=restore,
                role="module",
                kind=lambda node, graph: graph.class_of(
                    next(iter(node.argument_items()), None)
                ),  # the class that the module had before
                fill=fill,
                check=_check_segment,
            )
        if use.name == RESTORE_LIFTED:
            return Recipe(make=restore_lifted, role="module", kind=LiftedModule, check=_check_lifted)
        target = resolve(use.name)
        if isinstance(target, Denied | Missing):
            return target
        if use.how == "held":
            return Recipe(make=lambda: target, role="named", kind=target)
        if isinstance(target, type) and issubclass(target, nn.Module):
            return replace(module_recipe(target), fill=_fill_script) if target is ScriptLeaf else module_recipe(target)
        if target not in map(type, COMPRESSORS.values()):
            return Denied("is not part of memopt's file format")
        return Recipe(make=lambda: object.__new__(target), kind=target)  # compressors hold no state


def _fill_script(target: Any, state: Any) -> None:
    """Check the TorchScript archive in ``state`` as a TorchScript file is checked, then give it to ``target``."""
    archive = state.get("archive") if isinstance(state, dict) else None
    if not isinstance(archive, Tensor) or archive.dtype != torch.uint8 or archive.dim() != 1:
        raise BrokenError("a script has no archive")
    try:
        check_script_archive(archive_bytes(archive), "its TorchScript part", NESTED_CODE_LIMIT)
    except ValueError as err:
        raise BrokenError(f"its TorchScript part is damaged: {err}") from err
    fill(target, state)


def _segment(restore: Callable[..., nn.Module], original: Any, settings: Any) -> nn.Module:
    try:
        return restore(original, settings)
    except ValueError as reason:
        kind = original if isinstance(original, type) else type(original)
        raise BrokenError(f"an instance of {kind.__name__} cannot be a segment: {reason}") from reason


def check_segment(module: nn.Module) -> None:
    """Raise :class:`BrokenError` if ``module``, after it has its state, is a segment that no plan could have made."""
    try:
        check_installed(module)
    except ValueError as reason:
        raise BrokenError(f"its {label_of(module)} cannot be a segment: {reason}") from reason


def _check_segment(node: Built, graph: Graph) -> str:
    """Refuse a segment that is made neither of a module's class and a state, nor of a lifted module."""
    is_plain = _is_by_length if node.callee == RESTORE_BY_LENGTH else _is_plain
    match node.argument_items():
        case (original, Built() as settings) if is_plain(settings):
            kind = graph.class_of(original)
            entries = plain_entries(node.state)
            if isinstance(original, Built) and original.callee == RESTORE_LIFTED and not node.has_state:
                return ""
            if not isinstance(original, Global) or kind is None or not issubclass(kind, nn.Module):
                return "makes a segment of an object that is not a module"
            return "has a state of an unexpected type" if entries is None else check_attributes(kind, entries, graph)
    return "makes a segment from unexpected arguments"


def _is_plain(settings: Built) -> bool:
    """Return whether ``settings`` has only fields of a segment's configuration, whose values are checked later."""
    entries = plain_entries(settings)
    return entries is not None and all(name in _CONFIG_FIELDS and _is_setting(value) for name, value in entries)


def is_segment(value: Built) -> bool:
    """Return whether ``value`` makes a segment; in a plan by length, whether it is one in some range at least."""
    match value.callee, value.argument_items():
        case callee, (_, Built() as settings) if callee == RESTORE_BY_LENGTH:
            configs = dict(plain_entries(settings) or ()).get("configs")
            return not isinstance(configs, Tuple) or any(config is not None for config in configs.items)
    return value.callee in RESTORE_SEGMENTS


def _is_by_length(settings: Built) -> bool:
    """Return whether ``settings`` are of a plan by length: ascending bounds, each with a configuration or none."""
    match dict(plain_entries(settings) or ()):
        case {"up_to": Tuple() as up_to, "configs": Tuple() as configs, "length": length, "path": path, **others}:
            are_configs = all(item is None or (isinstance(item, Built) and _is_plain(item)) for item in configs.items)
            ascend = all(type(bound) is int for bound in up_to.items) and list(up_to.items) == sorted(set(up_to.items))
            is_known = not others and isinstance(path, str) and _is_setting(path) and _is_length(length)
            return is_known and are_configs and ascend and 0 < len(up_to.items) == len(configs.items)
    return False


def _is_length(value: Any) -> bool:
    if value is None:
        return True
    entries = dict(plain_entries(value) or ()) if isinstance(value, Built) else {}
    return entries.keys() == _LENGTH_FIELDS and all(map(_is_setting, entries.values()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, Tuple):
        return all(isinstance(item, int | str) and _is_setting(item) for item in value.items)
    return isinstance(value, bool | int) or (isinstance(value, str) and value.isprintable())


def _check_lifted(node: Built, graph: Graph) -> str:
    """Refuse a lifted module whose state is not a module's; whether it suits the program is checked once it is made."""
    match node.argument_items():
        case (Tuple(), Built() as state):
            entries = plain_entries(state)
            return (
                "has a state of an unexpected type"
                if entries is None
                else check_attributes(LiftedModule, entries, graph)
            )
    return "rebuilds a lifted module from unexpected arguments"

"""Finding the model, or the state dicts, among the entries of a pickle, before any object is made.

A checkpoint such as ``{"model": net, "epoch": 3}`` holds one model, which is found by itself; ``--key`` names an entry
of a file that holds several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UsageError, with_article
from memopt_cli.loading.interface import no_model
from memopt_cli.loading.pickles.described import tensor_of
from memopt_cli.loading.pickles.kinds.interface import plain_entries
from memopt_cli.loading.pickles.kinds.own import RESTORE_LIFTED, RESTORE_SEGMENTS, RUNTIME
from memopt_cli.loading.pickles.nodes import Built, Tuple, entries_of
from memopt_cli.text.documents import abridge, quoted_flag
from memopt_cli.text.units import format_shape
from memopt_cli.training.wrappers import WRAPPERS, Wrapper

SCRIPT_LEAF: Final = f"{RUNTIME}.script.ScriptLeaf"
_MAX_LOOKED_AT = 100_000
"""Maximum number of values that are searched for a model."""
_DEEPEST = 20
"""Maximum depth of nested containers."""
_SHOWN = 8
"""Maximum number of names in a message."""
_MAX_NAME_LENGTH = 200
"""Maximum number of characters in a name."""

Path = tuple[str, ...]
Notes = tuple[str, ...]
Entries = Callable[[Any], list[tuple[str, Any]]]


def is_module(value: Any) -> bool:
    """Return whether ``value`` is the stand-in of a module: its state has ``_modules``, or memopt itself made it."""
    if not isinstance(value, Built):
        return False
    if value.callee in (*RESTORE_SEGMENTS, RESTORE_LIFTED) or str(value.name) == SCRIPT_LEAF:
        return True
    return any(name == "_modules" for name, _ in plain_entries(value.state) or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModule:
    """The model in a file, before it is made."""

    root: Any
    """The stand-in of the model."""
    notes: Notes = ()
    """Sentences for the user on where the model was found."""
    wrappers: tuple[Wrapper, ...] = ()
    """Wrappers around the model that are left out, outermost first.  The last is the innermost one that cannot be used
    outside its training process, such as ``DistributedDataParallel``."""


def module_in(root: Any, key: str | None, path: str, code_paths: Sequence[str] = ()) -> FoundModule:
    """Find the stand-in of the model in ``root``.

    ``key`` is the model's entry, as keys joined by dots; ``None`` finds the only model in the file's containers.
    Raises :class:`UsageError` if the key names no entry, or if there are several models and no key; and
    :class:`FileFormatError` if there is no model, with ``path``, the content of the file, and functions in the files
    ``code_paths`` that build the model.
    """
    whole, where = root, tuple[str, ...]()
    if key is not None:
        where, root, _ = place_of(root, key, path)
    if not _is_model(root):
        models = modules_in(root)
        if len(models) > 1:
            raise several_models(models, path)
        if not models:
            holds = ("collections", "argparse", "types")
            is_object = isinstance(root, Built) and root.how != "plain" and root.name.package not in holds
            if is_object and tensor_of(root) is None:
                return FoundModule(root=root)  # an object without a state: only making it shows whether it is a model
            raise _without_model(root, whole, path, code_paths)
        ((within, root),) = models.items()
        where = (*where, *within)
    wrappers, root = _split_wrappers(root, path)
    return FoundModule(root=root, notes=place_notes("The model is", where, whole), wrappers=wrappers)


def several_models(models: dict[Path, Any], path: str) -> UsageError:
    """Return the error for a file that holds more than one model."""
    first = ".".join(next(iter(models)))
    return UsageError(
        f"{path} holds {len(models)} models: {list_paths(models)}", hint=f"Name one: `{quoted_flag('--key', first)}`."
    )


def place_of(root: Any, key: str, path: str, *, entries: Entries | None = None) -> tuple[Path, Any, str]:
    """Return the path of the entry ``key``, keys joined by dots, in ``root``, the entry, and a prefix in it.

    The prefix, such as ``net.``, is of names of a state dict: the end of ``key`` where that is no entry; else empty.
    ``entries`` lists the entries of a container by key or number; by default of a stand-in for one.
    Raises :class:`UsageError` if there is no such entry.
    """
    value, rest, entries_in = root, key, entries or container_entries
    where: list[str] = []
    while rest:
        entries_here = dict(entries_in(value))
        name = max(
            (name for name in entries_here if rest == name or rest.startswith(f"{name}.")), key=len, default=None
        )
        if name is None and is_state_dict(value) and any(name.startswith(f"{rest}.") for name in entries_here):
            return tuple(where), value, f"{rest}."
        if name is None:
            names = list_paths([(name,) for name in entries_here]) or "none"
            raise UsageError(f"{path} has no entry {key!r}", hint=f"Entries there: {names}.")
        value, rest = entries_here[name], rest[len(name) + 1 :]
        where.append(name)
    return tuple(where), value, ""


def place_notes(what: str, where: Path, root: Any, *, file: str = "the file", entries: Entries | None = None) -> Notes:
    """Return notes on the entry of the file where a model was found, and on entries that are not written with it.

    ``what``: the start of the sentence, ``The model is`` or ``The weights are``; ``where``: the path in ``root``, empty
    for the whole file, which is not mentioned; ``entries``: see :func:`place_of`.
    """
    if not where:
        return ()
    other_paths, value = list[Path](), root
    for depth, name in enumerate(where):
        entries_here = dict((entries or container_entries)(value))
        other_paths += [(*where[:depth], other) for other in entries_here if other != name]
        value = entries_here[name]
    left_out = f" The checkpoint's other entries are not copied: {list_paths(other_paths)}." if other_paths else ""
    return (f"{what} the entry {abridge('.'.join(where), _MAX_NAME_LENGTH)!r} of {file}.{left_out}",)


def state_dicts_in(root: Any) -> dict[Path, Any]:
    """Map paths to the stand-ins of dicts whose values are all tensors; dicts inside modules are left out."""
    return dict(found_in(root, is_state_dict))


def modules_in(root: Any) -> dict[Path, Any]:
    """Map paths to the stand-ins of modules; modules inside modules are left out."""
    return dict(found_in(root, _is_model))


def refuse_other(root: Any, whole: Any, path: str) -> None:
    """Raise :class:`FileFormatError` if ``root``, an entry of ``whole``, is one tensor or the state of an optimizer.

    It is a :class:`UsageError` if another entry has the weights of the optimizer's model.
    ``whole``: everything in the file, which is ``root`` itself if no entry was named.
    """
    if (tensor := tensor_of(root)) is not None:
        raise FileFormatError(
            f"{path} holds one tensor ({format_shape(tensor.shape)}), neither a model nor its weights",
            hint="Save the model with torch.save(model, path).",
        )
    if _is_optimizer_state(root):
        if paths := {**state_dicts_in(whole), **modules_in(whole)}:
            first = quoted_flag("--key", ".".join(next(iter(paths))))
            raise UsageError(
                f"this entry of {path} holds the state of an optimizer: the model's weights are in {list_paths(paths)}",
                hint=f"Use `{first}`, or leave `--key` out.",
            )
        raise FileFormatError(
            f"{path} holds the state of an optimizer: the model's weights are in another file",
            hint="Use the file that torch.save(model, path) or torch.save(model.state_dict(), path) wrote.",
        )


def _is_optimizer_state(value: Any) -> bool:
    return {"state", "param_groups"} == {name for name, _ in entries_of(value)}


def is_state_dict(value: Any) -> bool:
    """Return whether ``value`` is the stand-in of a dict whose values are all tensors."""
    entries = entries_of(value)
    return bool(entries) and all(isinstance(name, str) and tensor_of(item) is not None for name, item in entries)


def _is_model(value: Any) -> bool:
    return is_module(value) or _is_wrapper(value)


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, Built) and str(value.name) in WRAPPERS


def _split_wrappers(root: Any, path: str) -> tuple[tuple[Wrapper, ...], Any]:
    """Return the wrappers of ``root`` down to the last that needs its own process, and the module in that wrapper."""
    wrappers: list[Wrapper] = []
    inner, left_out = root, 0
    while _is_wrapper(inner) and len(wrappers) < _DEEPEST:
        wrappers.append(WRAPPERS[str(inner.name)])
        inner = _module_in_wrapper(inner, wrappers[-1].attribute, path)
        if not wrappers[-1].stands_alone:
            root, left_out = inner, len(wrappers)
    return tuple(wrappers[:left_out]), root


def unwrapped(model: Any, path: str) -> Any:
    """Return the stand-in of the module in all wrappers of ``model``, which the file at ``path`` holds."""
    for _ in range(_DEEPEST):
        if not _is_wrapper(model):
            break
        model = _module_in_wrapper(model, WRAPPERS[str(model.name)].attribute, path)
    return model


def _module_in_wrapper(root: Built, attribute: str, path: str) -> Any:
    modules = next((part for name, part in plain_entries(root.state) or () if name == "_modules"), None)
    submodules = dict(entries_of(modules))
    inner = submodules.get(attribute, next(iter(root.argument_items()), None))
    if not _is_model(inner):
        raise FileFormatError(
            f"{path} holds a {root.name.name} without the object that it wraps",
            hint=f"Save model.{attribute} with torch.save.",
        )
    return inner


def _without_model(root: Any, whole: Any, path: str, code_paths: Sequence[str]) -> FileFormatError:
    refuse_other(root, whole, path)
    if names := [where[-1] for where, _ in found_in(root, lambda value: tensor_of(value) is not None)]:
        return no_model(path, names, code_paths)
    kind = str(root.name).removeprefix("builtins.") if isinstance(root, Built) else type(root).__name__.lower()
    return FileFormatError(
        f"{path} holds {with_article(kind)}, not a model",
        hint="Save one with torch.save(model, path).",
    )


def found_in(root: Any, wanted: Callable[[Any], bool], *, entries: Entries | None = None) -> Iterator[tuple[Path, Any]]:
    """Yield the ``wanted`` values in the containers of ``root``, each once; ``entries`` is as in :func:`place_of`."""
    pending: list[tuple[Path, Any]] = [((), root)]
    seen, looked = set[int](), 0
    while pending and looked < _MAX_LOOKED_AT:
        where, value = pending.pop()
        looked += 1
        if id(value) in seen or not (entries or isinstance(value, Built | Tuple)):
            continue
        seen.add(id(value))
        if wanted(value):
            yield where, value
        elif not (is_module(value) or _is_optimizer_state(value)) and len(where) < _DEEPEST:
            pending.extend(reversed([((*where, name), item) for name, item in (entries or container_entries)(value)]))


def container_entries(value: Any) -> list[tuple[str, Any]]:
    """Return the entries of the container ``value``, by key or number."""
    if isinstance(value, Tuple):
        return [(str(number), item) for number, item in enumerate(value.items)]
    if not isinstance(value, Built) or value.how == "stored" or tensor_of(value) is not None:
        return []
    numbered = [(str(number), item) for number, item in enumerate(value.items)]
    return numbered or [(str(name), item) for name, item in value.entries if isinstance(name, str | int)]


def list_paths(paths: Collection[Path]) -> str:
    """List the first few paths of ``paths``, as keys joined by dots."""
    names = [repr(abridge(".".join(where), _MAX_NAME_LENGTH)) for where in itertools.islice(paths, _SHOWN)]
    return ", ".join(names) + (", …" if len(paths) > _SHOWN else "")

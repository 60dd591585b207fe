"""Building models by the user's own code (``package.module:callable``), and loading weights into them."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, MemoptError, UsageError, first_line, type_in_words
from memopt_cli.loading.contents import state_dict_of
from memopt_cli.loading.exported import Exported
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, Format, ModelFile
from memopt_cli.loading.module_pickle import build_data, refuse_attacks
from memopt_cli.loading.pickles.entries import (
    list_paths,
    modules_in,
    place_notes,
    place_of,
    refuse_other,
    state_dicts_in,
)
from memopt_cli.loading.pickles.reading import read_pickled
from memopt_cli.loading.safetensors_file import is_safetensors, read_safetensors
from memopt_cli.loading.torchscript import TorchScript
from memopt_cli.loading.user_code import UserCode, file_in, import_failure, make_importable, user_code
from memopt_cli.loading.user_function import user_function
from memopt_cli.records import FIRST_USED
from memopt_cli.runtime.private_torch import UNKNOWN_WITHOUT_DATA, unseen
from memopt_cli.text.documents import quoted_flag, quoted_path
from memopt_cli.text.misnamed import other_class_hint
from memopt_cli.text.optimizer_text import is_function
from memopt_cli.text.units import format_shape, format_some
from memopt_cli.training.module_calls import raised_at
from memopt_cli.training.step import is_out_of_memory
from memopt_cli.training.user_step import Step, StepModels

T = TypeVar("T")

_SHOWN = 3
"""Maximum number of weights that an error lists by name, for each kind of mismatch."""
_WITH_CODE: Final[Mapping[str, Format]] = {"TorchScript": TorchScript(), "a program of torch.export": Exported()}
"""A kind of file that holds a model with its code -> its format."""


def build(location: str) -> nn.Module:
    """Return the model that the callable at ``location`` builds, or the models of its step as one.

    ``location`` is ``package.module:callable`` or ``file.py:function``.  PyTorch's generator is seeded before the call,
    so the parameters are equal every time.  Raises :class:`UsageError` if the import fails, if there is no such
    callable, or if its result is neither an ``nn.Module`` nor a :class:`~memopt_cli.training.user_step.Step`, and
    :class:`FileFormatError` if the call fails.
    """
    if is_function(location):
        make_importable(Path(location.rpartition(":")[0]).resolve().parent)
        factory = user_function(location, "MODEL")
    else:
        factory = _import_module(location)
    built = _call_factory(factory, location)
    return built if isinstance(built, nn.Module) else StepModels(built, functools.partial(make_step, factory, location))


def _import_module(location: str) -> Callable[[], Any]:
    module, _, name = location.partition(":")
    try:
        with user_code(module):
            factory: Any = importlib.import_module(module)
    except (Exception, SystemExit) as err:  # the user's code may raise anything
        reason, hint = import_failure(err)
        raise UsageError(f"{location}: importing {module} failed: {reason}", hint=hint) from err
    own, file = file_in(Path.cwd(), module), getattr(factory, "__file__", None)
    if own is not None and (file is None or not _is_meant(Path(file).resolve(), own.resolve())):
        raise UsageError(
            f"{location}: {module} is installed, as {file or 'a built-in module'}, and another is in this folder",
            hint="`--code-path .` takes the one in this folder. To take the installed one, run memopt elsewhere.",
        )
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise UsageError(
            f"{location}: {module} has nothing callable named {name}", hint="Name a class or a function that builds it."
        )
    return factory  # type: ignore[no-any-return]


def _is_meant(file: Path, own: Path) -> bool:
    """Return whether the module ``file`` lies where the user told Python to look first, or is the folder's ``own``."""
    search_path = itertools.takewhile(lambda folder: folder != sysconfig.get_path("stdlib"), sys.path)
    is_own = (file.parent, file.name.partition(".")[0]) == (own.parent, own.stem)  # perhaps compiled
    return is_own or any(file.is_relative_to(Path(folder).resolve()) for folder in search_path if folder)


def make_step(factory: Callable[[], Any], location: str) -> Step:
    """Return the step that ``factory`` makes.  Raises the errors of :func:`build`."""
    built = _call_factory(factory, location)
    if not isinstance(built, Step):
        raise UsageError(
            f"{location}() returned {type_in_words(built)}, not a memopt_cli.Step as in its first call",
            hint="Let it return the same kind of object in every call: each profiling subprocess calls it.",
        )
    return built


def _call_factory(factory: Callable[[], Any], location: str) -> nn.Module | Step:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # every subprocess must build the same parameters
            with user_code(location.partition(":")[0]):
                product = factory()
    except MemoptError:
        raise
    except (Exception, SystemExit) as err:
        hint = "The same error appears when plain Python calls it: correct that line."
        if _needs_arguments(factory):
            hint = "It is called without arguments: name a function that passes those that it needs."
        elif is_out_of_memory(err):
            hint = "It does not fit here; `memopt profile --fake` may not need that memory."
        elif isinstance(err, UNKNOWN_WITHOUT_DATA):
            hint = "The function reads values of tensors, which have none with `--fake`: leave it out, or read none."
        raise FileFormatError(f"{location}() failed: {first_line(err)}{raised_at(err)}", hint=hint) from err
    if not isinstance(product, nn.Module | Step):
        raise UsageError(
            f"{location}() returned {type_in_words(product)}, neither an nn.Module nor a memopt_cli.Step",
            hint="Let it return the model, or name another function.",
        )
    return product


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` cannot be called without arguments, according to its signature."""
    try:
        inspect.signature(function).bind()
    except ValueError:  # a class or function of an extension may have no signature
        return False
    except TypeError:
        return True
    return False


def fill(model: nn.Module, file: ModelFile, location: str = "") -> tuple[str, ...]:
    """Load the state dict in ``file`` into ``model``, strictly, and return notes on where it was found.

    The state dict may be an entry of a checkpoint, and its names may have the prefixes of wrappers (``module.``).  A
    saved module serves as its state dict: its tensors are made, and its class is not imported.
    Raises :class:`FileFormatError` if no state dict fits, with the other classes in the file of ``location``, and
    :class:`UsageError` if the names under several prefixes do, or if the key names no entry.
    """
    notes: list[str] = []
    with unseen():  # even if the model is built without data, the tensors of the file are read with theirs
        if is_safetensors(file.data):
            where, weights = _safetensors_in(file)
        else:
            where, weights = _state_dict_in(model, file, notes)
    own = model.state_dict()
    prefixes = _common_prefixes(own, weights)
    if len(prefixes) > 1:
        shown = prefixes[:_SHOWN]
        flags = [f"`{quoted_flag('--key', '.'.join((*where, prefix.rstrip('.'))))}`" for prefix in shown]
        raise UsageError(
            f"{file.path} has weights for {type(model).__name__} under {' and under '.join(map(repr, shown))}",
            hint=f"Choose one: {' or '.join(flags)}.",
        )
    if prefixes and weights.keys() != own.keys():
        weights = _without_prefix(prefixes[0], weights, notes)
    try:
        model.load_state_dict(weights, strict=True)
    except Exception as err:  # the model's own hooks run here
        reason = _mismatch(own, weights) or first_line(err)
        others = other_class_hint(location, weights) if is_function(location) else ""
        raise FileFormatError(
            f"{file.path} does not fit {type(model).__name__}: {reason}",
            hint=f"Use weights of the model that the callable builds. {others}".strip(),
        ) from err
    return tuple(notes)


def _safetensors_in(file: ModelFile) -> tuple[tuple[str, ...], Mapping[str, Tensor]]:
    """Return the tensors of ``file`` whose names begin with its key, without the key, and the key as a path."""
    weights = read_safetensors(file.data, file.path)
    if file.key is None:
        return (), weights
    if not (chosen := _under(f"{file.key}.", weights)):
        hint = f"Its tensors are {format_some(list(weights), _SHOWN)}."
        raise UsageError(f"{file.path} has no tensors under {file.key!r}", hint=hint)
    return (file.key,), chosen


def _state_dict_in(model: nn.Module, file: ModelFile, notes: list[str]) -> tuple[tuple[str, ...], Mapping[str, Tensor]]:
    """Return the only state dict in ``file``, or the first with the names of ``model``, and its path.

    Nothing else is made.
    """
    if (kind := next((name for name, format_ in _WITH_CODE.items() if format_.recognizes(file)), None)) is not None:
        raise FileFormatError(
            f"{file.path} is {kind}: a model with its code, not weights alone",
            hint=f"Use {quoted_path(file.path)} as the model, without `--weights`.",
        )
    pickled = read_pickled(file)
    refuse_attacks(file, pickled.scan, UserCode(()))
    whole = pickled.pickle.root
    outer, root, prefix = ((), whole, "") if file.key is None else place_of(whole, file.key, file.path)
    saved = state_dicts_in(root)
    try:
        state_dicts = {where: _under(prefix, dict(stored.entries)) for where, stored in saved.items()}
        of_modules = {where: state_dict_of(module) for where, module in modules_in(root).items()}
        state_dicts |= {where: tensors for where, tensors in of_modules.items() if tensors}
    except ValueError as err:
        raise FileFormatError(f"{file.path} cannot be read: {err}", hint=DOWNLOAD_AGAIN_HINT) from err
    own = model.state_dict()
    fitting = [where for where, tensors in state_dicts.items() if _common_prefixes(own, tensors)]
    fitting = [where for where in fitting if len(state_dicts[where]) == len(own)] or fitting
    if not state_dicts:
        refuse_other(root, whole, file.path)
        raise FileFormatError(
            f"{file.path} holds no state dict", hint="Save one with torch.save(model.state_dict(), path)."
        )
    where = next(iter(fitting or state_dicts))
    if len(fitting) > 1 or (len(state_dicts) > 1 and not fitting):
        names = list_paths(dict.fromkeys(fitting or state_dicts))
        if not fitting:
            raise FileFormatError(
                f"{file.path} holds {len(state_dicts)} state dicts, and none fits: {names}",
                hint=f"Name one to see the differences: `{quoted_flag('--key', '.'.join(where))}`.",
            )
        notes.append(f"The file has several state dicts ({names}){FIRST_USED} `--key` names another.")
    else:
        what = f"The weights are under {prefix!r} in" if prefix else "The weights are"
        notes += place_notes(what, (*outer, *where), whole, file=file.path)
    chosen = None if prefix else saved.get(where)
    if chosen is None:  # the state dict of a module, or a part of one: it is not itself in the file
        chosen, pickle = pickled.pickle.with_dict(state_dicts[where].items())
        pickled = replace(pickled, pickle=pickle)
    weights: Mapping[str, Tensor] = build_data(file, pickled, chosen)
    return tuple(filter(None, (*outer, prefix.rstrip("."), *where))), weights


def _under(prefix: str, weights: Mapping[str, T]) -> dict[str, T]:
    """Return those of ``weights`` whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _without_prefix(prefix: str, weights: Mapping[str, Tensor], notes: list[str]) -> Mapping[str, Tensor]:
    """Return ``weights`` under the model's own names, without the prefix that a wrapper put before each.

    Weights without the prefix are left out: they belong to the wrapper, such as weights of a Lightning module's loss.
    """
    named = {_without_compiled_parts(name): tensor for name, tensor in weights.items()}
    if prefix:
        notes.append(
            f"The names of the weights begin with {prefix!r}: they are loaded without it, under the model's own names."
        )
    elif named.keys() != weights.keys():
        notes.append("The weights were saved from a compiled model.")
    if others := [name for name in named if not name.startswith(prefix)]:
        notes.append(f"Weights of the file that are not the model's are left out: {format_some(others, _SHOWN)}.")
    return _under(prefix, named)


def _common_prefixes(own: Collection[str], names: Collection[str]) -> list[str]:
    """Return the prefixes, such as ``module.``, that ``names`` add to each of ``own``; the empty one stands alone."""
    plain_names = dict.fromkeys(map(_without_compiled_parts, names))
    if not own or len(plain_names) != len(names):
        return []
    first = next(iter(own))
    prefixes = [name.removesuffix(first) for name in plain_names if name.endswith(first)]
    prefixes = [prefix for prefix in prefixes if not prefix or prefix.endswith(".")]
    prefixes = [prefix for prefix in prefixes if all(prefix + name in plain_names for name in own)]
    return [""] if "" in prefixes else prefixes


def _without_compiled_parts(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _mismatch(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return the reason why ``weights`` do not fit, with the first few names of each kind.

    An empty string: they fit.
    """
    missing = [str(name) for name in own if name not in weights]
    unexpected = [str(name) for name in weights if name not in own]
    other_shape = [
        f"{name} is {format_shape(weights[name].shape)}, not {format_shape(tensor.shape)}"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    other_kind = [name for name in own if name in weights and _storage_kind(weights[name]) != _storage_kind(own[name])]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of a different shape": other_shape,
        "of a different kind": other_kind,
    }
    return ", ".join(
        f"{len(names)} {kind} ({', '.join([*names[:_SHOWN], *['…'][: len(names) - _SHOWN]])})"
        for kind, names in kinds.items()
        if names
    )


def _storage_kind(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that differs between dense, sparse, quantized and meta tensors."""
    return tensor.layout, tensor.is_quantized, tensor.is_meta

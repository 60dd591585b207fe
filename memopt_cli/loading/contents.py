"""Listing the modules and tensors of a model file for ``memopt inspect``, without importing a class or building any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from memopt_cli.loading.pickles.described import PickledTensor, items_in, tensor_of
from memopt_cli.loading.pickles.entries import SCRIPT_LEAF
from memopt_cli.loading.pickles.kinds.own import RESTORE_LIFTED, RESTORE_SEGMENTS, is_segment
from memopt_cli.loading.pickles.nodes import Built, Global, Tuple, entries_of
from memopt_cli.loading.script_objects import TYPE_TAG
from memopt_cli.records import StoredModule, StoredTensor, TensorKind
from memopt_cli.text.documents import printable
from memopt_cli.training.wrappers import WRAPPERS

Registered = Mapping[str, Mapping[str, TensorKind]]
"""Class of a script -> attribute -> the kind of tensor that it is registered as."""

_SCRIPT: Final = "__torch__"
"""The class of a module that stayed TorchScript; its parts are in its own archive."""
_RECONSTRUCTORS: Final = (*map(str, RESTORE_SEGMENTS), "copyreg._reconstructor")
DEEPEST = 100
"""Maximum depth of nested modules and containers."""
_MAX_PLACES = 1_000_000
"""Maximum number of visited values."""
_MAX_NAME_LENGTH = 200
"""Maximum number of characters in a listed name."""
_RUNS: Final = "_memopt_runs"
"""The attribute in which a Sequential keeps its runs of layers; they are not among its children."""
_SEQUENCES: Final = ("builtins.list", "builtins.set", "builtins.tuple", "collections.deque")


@dataclass(slots=True)
class FileContents:
    """The modules and tensors of a file, in its order."""

    modules: list[StoredModule] = field(default_factory=list)
    tensors: list[StoredTensor] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    """For each tensor, the index of its module in ``modules``; -1 for a tensor outside modules."""
    parents: list[int] = field(default_factory=list)
    """For each module, the index of its parent; -1 for a root."""
    memory: list[Any] = field(default_factory=list)
    """For each tensor, a key that only tensors of the same memory share."""

    def add_tensor(self, tensor: StoredTensor, *, home: int, memory: Any) -> None:
        self.tensors.append(tensor)
        self.homes.append(home)
        self.memory.append(memory)

    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Group the names of the tensors that share their memory."""
        groups: dict[Any, list[str]] = {}
        for tensor, memory in zip(self.tensors, self.memory, strict=True):
            if tensor.size_bytes:
                groups.setdefault(memory, []).append(tensor.name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def distinct(self) -> Iterator[tuple[StoredTensor, int]]:
        """Yield each tensor once, with the index of its first module; shared tensors have several."""
        seen = set()
        for tensor, home, memory in zip(self.tensors, self.homes, self.memory, strict=True):
            if memory not in seen:
                seen.add(memory)
                yield tensor, home

    def counted_modules(self) -> tuple[StoredModule, ...]:
        """Return the modules with the numbers of their parameters and bytes, children included."""
        items, sizes = [0] * len(self.modules), [0] * len(self.modules)
        for tensor, home in self.distinct():
            if tensor.kind in ("parameter", "buffer"):
                while home >= 0:
                    items[home] += count_items(tensor) if tensor.kind == "parameter" else 0
                    sizes[home] += tensor.size_bytes
                    home = self.parents[home]
        return tuple(
            replace(module, parameters=count, size_bytes=size)
            for module, count, size in zip(self.modules, items, sizes, strict=True)
        )


def count_items(tensor: StoredTensor) -> int:
    """Return the number of items of ``tensor``; sizes that are symbols count as 1."""
    return items_in(size for size in tensor.shape if isinstance(size, int))


def contents_of(root: Any, *, registered: Registered | None = None, loose: TensorKind = "tensor") -> FileContents:
    """List the modules and tensors in ``root``, which :func:`~memopt_cli.loading.pickles.scan.scan_pickle` returned.

    ``registered`` gives the kinds of attributes that the code of a TorchScript archive declares; ``loose`` is the kind
    of tensors outside modules.  Raises :class:`ValueError` for modules nested deeper than in any real model.
    """
    return _Walk(registered or {}, loose).all_of(root)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value that is still to be visited, with its path and the index of its module (``home``)."""

    path: str
    value: Any
    kind: TensorKind
    home: int
    depth: int


class _Walk:
    def __init__(self, registered: Registered, loose: TensorKind) -> None:
        self._registered = registered
        self._loose = loose
        self._found = FileContents()
        self._seen: set[int] = set()

    def all_of(self, root: Any) -> FileContents:
        pending, looked = [_Place("", root, self._loose, -1, 0)], 0
        while pending:
            place, looked = pending.pop(), looked + 1
            if place.depth > DEEPEST:
                raise ValueError(f"it is nested deeper than {DEEPEST} modules or containers")
            if looked > _MAX_PLACES:
                raise ValueError(f"it names more than {_MAX_PLACES} modules and tensors")
            pending.extend(reversed(list(self._list_value(place))))
        return self._found

    def _list_value(self, place: _Place) -> Iterator[_Place]:
        """Add the value of ``place`` to the contents, and yield the places that the value has."""
        tensor = tensor_of(place.value)
        if tensor is not None:
            self._add_tensor(place, tensor)
        elif id(place.value) not in self._seen:
            self._seen.add(id(place.value))
            attributes = self._attributes(place.value)
            if {"_modules", "_parameters"} <= attributes.keys() or class_of(place.value) == SCRIPT_LEAF:
                yield from self._inside_module(place, attributes)
            elif class_of(place.value).startswith(f"{_SCRIPT}."):
                yield from self._inside_script(place, attributes)
            elif place.home < 0:  # containers that a module keeps are not listed
                yield from _inside_container(place)

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Return the ``__dict__`` that the file gives the object ``value``; empty if another object already has it."""
        state = _state_of(value)
        if id(state) in self._seen:
            return {}
        self._seen.add(id(state))
        return {name: item for name, item in entries_of(state) if isinstance(name, str)}

    def _add_tensor(self, place: _Place, tensor: PickledTensor) -> None:
        storage = tensor.storage
        memory = (storage.key, tensor.offset, tensor.shape, tensor.stride) if storage else id(place.value)
        stored = StoredTensor(
            name=place.path,
            kind=place.kind,
            shape=tensor.shape,
            dtype=tensor.dtype,
            size_bytes=tensor.size_bytes,
            trainable=tensor.trainable,
        )
        self._found.add_tensor(stored, home=place.home, memory=memory)

    def _add_module(self, place: _Place) -> int:
        segment = isinstance(place.value, Built) and is_segment(place.value)
        # TorchScript's ``__torch__.models.___torch_mangle_3.Net`` is ``models.Net`` in the source code.
        parts = class_of(place.value).removeprefix(f"{_SCRIPT}.").split(".")
        self._found.modules.append(
            StoredModule(
                path=place.path,
                class_name=".".join(part for part in parts if not part.startswith("___torch_mangle_")),
                parameters=0,
                size_bytes=0,
                segment=segment,
            )
        )
        self._found.parents.append(place.home)
        return len(self._found.modules) - 1

    def _inside_module(self, place: _Place, attributes: Mapping[str, Any]) -> Iterator[_Place]:
        home = self._add_module(place)
        registers: dict[str, TensorKind] = {"_parameters": "parameter", "_buffers": "buffer"}
        for register, kind in registers.items():
            for name, value in entries_of(attributes.get(register)):
                yield _Place(_joined_path(place.path, name), value, kind, home, place.depth + 1)
        for name, value in attributes.items():
            if tensor_of(value) is not None:
                yield _Place(_joined_path(place.path, name), value, "attribute", home, place.depth + 1)
        for register in ("_modules", _RUNS):  # children before runs, which hold the same layers: the first path counts
            for name, value in entries_of(attributes.get(register)):
                yield _Place(_joined_path(place.path, name), value, "attribute", home, place.depth + 1)

    def _inside_script(self, place: _Place, attributes: Mapping[str, Any]) -> Iterator[_Place]:
        home = self._add_module(place)
        kinds = self._registered.get(class_of(place.value), {})
        for name, value in attributes.items():
            yield _Place(_joined_path(place.path, name), value, kinds.get(name, "attribute"), home, place.depth + 1)


def _inside_container(place: _Place) -> Iterator[_Place]:
    value = place.value
    if class_of(value) == TYPE_TAG and isinstance(value.arguments, Tuple) and value.arguments.items:
        value = value.arguments.items[0]
    if isinstance(value, Tuple):
        items: Iterable[tuple[Any, Any]] = enumerate(value.items)
    elif isinstance(value, Built) and str(value.callee) in _SEQUENCES:
        items = enumerate(value.items)
    else:
        items = entries_of(value)
    for name, item in items:
        if isinstance(item, Built | Tuple) and isinstance(name, str | int):
            yield _Place(_joined_path(place.path, name), item, place.kind, -1, place.depth + 1)


def _arguments_of(value: Built) -> tuple[Any, ...]:
    return value.arguments.items if isinstance(value.arguments, Tuple) else ()


def _state_of(value: Any) -> Any:
    """Return the stand-in of the ``__dict__`` that the file gives the object ``value``; ``None`` if there is none."""
    value = _unwrap(value)
    if not isinstance(value, Built):
        return None
    state = _arguments_of(value)[1] if _is_lifted(value) else value.state
    if isinstance(state, Tuple) and state.items:  # a class with slots has a pair of ``__dict__`` and the slots
        state = state.items[0]
    return state


def state_dict_of(module: Any) -> dict[str, Any]:
    """Return the stand-ins of the tensors in the state dict that ``module`` has by default, by name.

    Raises :class:`ValueError` for modules nested deeper than in any real model, or far too many.
    """
    tensors_by_name: dict[str, Any] = {}
    pending, looked = [("", module, 0)], 0
    while pending:
        prefix, value, depth = pending.pop()
        looked += 1
        if depth > DEEPEST or looked + len(tensors_by_name) > _MAX_PLACES:
            raise ValueError(f"its modules are nested deeper than {DEEPEST}, or more than {_MAX_PLACES}")
        attributes = dict(entries_of(_state_of(value)))
        kept_out = _items_of(attributes.get("_non_persistent_buffers_set"))
        for register in ("_parameters", "_buffers"):
            for name, item in entries_of(attributes.get(register)):
                if tensor_of(item) is not None and not (register == "_buffers" and name in kept_out):
                    tensors_by_name[f"{prefix}{name}"] = item
        children = entries_of(attributes.get("_modules"))
        pending += [(f"{prefix}{name}.", child, depth + 1) for name, child in reversed(children)]
    return tensors_by_name


def _items_of(value: Any) -> list[Any]:
    """Return the items of ``value``, the stand-in of a set, which older pickles make of a list."""
    holders = [value, *_arguments_of(value)] if isinstance(value, Built) else []
    return [item for part in holders if isinstance(part, Built) for item in part.items]


def _is_lifted(value: Built) -> bool:
    return value.callee == RESTORE_LIFTED and len(_arguments_of(value)) == 2


def _unwrap(value: Any) -> Any:
    """Return the module that ``value`` is made from, if it is a segment or the result of ``torch.compile``.

    Else ``value`` is returned.
    """
    while isinstance(value, Built) and (value.callee in RESTORE_SEGMENTS or _is_compiled(value)):
        arguments = _arguments_of(value)
        if not (arguments and isinstance(arguments[0], Built)):
            break
        value = arguments[0]
    return value


def _is_compiled(value: Built) -> bool:
    return str(value.callee) in WRAPPERS and value.state is None  # other wrappers hold the module in their state


def class_of(value: Any) -> str:
    """Return the name of the class of the object that ``value`` stands for, with its module; empty if it has none."""
    value = _unwrap(value)
    if not isinstance(value, Built):
        return ""
    arguments = _arguments_of(value)
    if _is_lifted(value):
        program = arguments[0].items if isinstance(arguments[0], Tuple) else ()
        return printable(str(program[1])[:_MAX_NAME_LENGTH]) if len(program) > 1 else "Lifted"
    if str(value.callee) in _RECONSTRUCTORS and arguments and isinstance(arguments[0], Global):
        return str(arguments[0])
    return str(value.callee) if isinstance(value.callee, Global) else ""


def _joined_path(path: str, name: Any) -> str:
    own = printable(str(name)[:_MAX_NAME_LENGTH])
    return f"{path}.{own}" if path else own

"""Owners: objects in which Python keeps state that a forward may change, as values under names.

All owners are read and written back in one way: a module's attributes, buffers, children and hooks, the variables that
its code names (:mod:`memopt_cli.runtime.variables`), and the lists, dictionaries and objects that these hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Set
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from memopt_cli.runtime.frozen import find_slots, freeze, is_opaque, slots_in
from memopt_cli.runtime.module_state import LEARNED_KEY, STRUCTURE, ScriptSlots
from memopt_cli.runtime.private_torch import (
    attributes_of_script,
    buffers_of,
    children_of,
    global_hook_tables,
    hook_tables,
)

Slots = dict[Any, Any]
"""Name in an owner -> its value at one moment, by reference."""


class Owner:
    """An object that keeps values under names."""

    __slots__ = ()

    def read(self) -> Slots:
        """Return the current values by name."""
        raise NotImplementedError

    def write(self, slots: Slots) -> None:
        """Make ``slots`` the values, and remove all others."""
        raise NotImplementedError

    def holds(self, slots: Slots) -> bool:
        """Return whether the values are the same objects as the values of ``slots``."""
        return is_same(self.read(), slots)

    def mapping(self) -> dict[Any, Any] | None:
        """Return the dictionary whose entries are this owner's slots, for fast comparison, or ``None`` without one."""
        return None


def is_same(a: Slots, b: Slots) -> bool:
    """Return whether two readings of one owner hold the same objects."""
    return a is b or (len(a) == len(b) and all(map(is_, a.values(), b.values())) and list(a) == list(b))


class Snapshot:
    """The slots of some owners at one moment, in flat lists, so that few fast passes compare them all.

    Example: the dictionaries ``{"a": x, "b": y}`` and ``{"c": z}`` have the lengths 2 and 1, and the values x, y, z.
    """

    __slots__ = ("_lengths", "_mappings", "_names", "_others", "_readers", "_values", "_views")

    def __init__(
        self, readings: Iterable[tuple[Owner, Slots]], *, with_names: bool = False, without: Set[str] = frozenset()
    ) -> None:
        """Take ``readings``, owners with their slots.

        ``with_names``: in dictionaries, compare names as well.  ``without``: names of attributes of modules that are
        not compared.
        """
        self._mappings: list[dict[Any, Any]] = []
        self._views: list[Iterable[Any]] = []
        """The current values of each dictionary that is compared as a whole."""
        self._readers: list[tuple[Callable[[Any], tuple[Any, ...]], dict[Any, Any]]] = []
        """Each other dictionary, and the function that reads the values to compare."""
        self._values: list[Any] = []
        """The values then: first the values of the views, then of the readers."""
        reader_values: list[Any] = []
        self._names: list[Any] = []
        self._others: list[tuple[Owner, Slots]] = []
        """The owners that are not dictionaries, which are compared one by one."""
        for owner, slots in readings:
            mapping = owner.mapping()
            if mapping is None:
                self._others.append((owner, slots))
                continue
            self._mappings.append(mapping)
            if with_names:
                self._names += slots
            names = [name for name in slots if name not in without] if isinstance(owner, Attributes) else [*slots]
            if len(names) == len(mapping):
                self._views.append(mapping.values())
                self._values += slots.values()
            elif names:  # the first name twice, since for a single name ``itemgetter`` returns no tuple
                self._readers.append((itemgetter(names[0], *names), mapping))
                reader_values += [slots[name] for name in (names[0], *names)]
        self._values += reader_values
        self._lengths = [*map(len, self._mappings)]

    def is_current(self) -> bool:
        """Return whether the owners hold the same objects now."""
        if [*map(len, self._mappings)] != self._lengths:
            return False
        try:
            read = [read(mapping) for read, mapping in self._readers]
        except KeyError:  # an attribute has another name now
            return False
        if not all(map(is_, chain.from_iterable((*self._views, *read)), self._values)):
            return False
        if self._names and [*chain.from_iterable(self._mappings)] != self._names:
            return False
        for owner, slots in self._others:  # noqa: SIM110  # a generator would take as long as the comparison
            if not owner.holds(slots):
                return False
        return True


def _replace_items(mapping: MutableMapping[Any, Any], slots: Slots) -> None:
    for name in mapping.keys() - slots.keys():
        del mapping[name]
    mapping.update(slots)


class Attributes(Owner):
    """The attributes of a module, which is held weakly: what is learned of a module must not keep it alive.

    A module that is gone has no attributes: forward has put another module in its place.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def _attributes(self) -> dict[str, Any]:
        module = self._module()
        return {} if module is None else vars(module)

    def mapping(self) -> dict[Any, Any]:
        return self._attributes()

    def read(self) -> Slots:
        slots = dict(self._attributes())
        slots.pop(LEARNED_KEY, None)  # it is not state, and refers to this owner
        return slots

    def write(self, slots: Slots) -> None:
        mapping = self._attributes()
        structure = {name: value for name, value in mapping.items() if name in STRUCTURE}
        _replace_items(mapping, slots | structure)


class Table(Owner):
    """A dictionary that a module or PyTorch itself holds: buffers, children, hooks; or the variables of a thread."""

    __slots__ = ("_mapping",)

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self._mapping = mapping

    def mapping(self) -> dict[Any, Any]:
        return self._mapping

    def read(self) -> Slots:
        return dict(self._mapping)

    def write(self, slots: Slots) -> None:
        # Cleared, so that the entries get the order of ``slots``: hooks run in that order.
        self._mapping.clear()
        self._mapping.update(slots)


class Items(Owner):
    """The items of a list, a queue or a set, under their indices."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any] | deque[Any] | set[Any]) -> None:
        self._items = items

    def read(self) -> Slots:
        return dict(enumerate(self._items))

    def write(self, slots: Slots) -> None:
        self._items.clear()
        (self._items.update if isinstance(self._items, set) else self._items.extend)(slots.values())


class Slotted(Owner):
    """The attributes of an object that its class declares by ``__slots__``."""

    __slots__ = ("_object",)

    def __init__(self, value: object) -> None:
        self._object = value

    def read(self) -> Slots:
        return slots_in(self._object)

    def write(self, slots: Slots) -> None:
        for name in self.read().keys() - slots.keys():
            object.__delattr__(self._object, name)
        for name, held in slots.items():
            object.__setattr__(self._object, name, held)


class ScriptAttributes(Owner):
    """The buffers and attributes of a ``ScriptModule``, which is held weakly."""

    __slots__ = ("_module",)

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._module = weakref.ref(module)

    def _slots(self) -> ScriptSlots:
        module = self._module()
        assert module is not None, "the reader holds the module"
        return ScriptSlots(module)

    def read(self) -> Slots:
        return dict(self._slots())

    def write(self, slots: Slots) -> None:
        self._slots().update(slots)


class ModuleVariables(Owner):
    """Some variables of a Python module, given as its dictionary, or of a class."""

    __slots__ = ("_owner", "names")

    def __init__(self, owner: dict[str, Any] | type) -> None:
        self._owner: Any = weakref.ref(owner) if isinstance(owner, type) else owner
        self.names: set[str] = set()

    def read(self) -> Slots:
        variables = self._owner if isinstance(self._owner, dict) else vars(self._owner() or object)
        return {name: variables[name] for name in self.names if name in variables}

    def write(self, slots: Slots) -> None:
        if isinstance(self._owner, dict):
            for name in self.names - slots.keys():
                self._owner.pop(name, None)
            self._owner.update(slots)
            return
        for name in self.read().keys() - slots.keys():
            type.__delattr__(self._owner(), name)
        for name, value in slots.items():
            type.__setattr__(self._owner(), name, value)


class Cell(Owner):
    """A variable of an enclosing function, as an inner function refers to it; the inner function is held weakly."""

    __slots__ = ("_function", "_index")

    def __init__(self, function: types.FunctionType, index: int) -> None:
        """Take the variable at ``index`` in the closure of ``function``."""
        self._function, self._index = weakref.ref(function), index

    def _cell(self) -> types.CellType:
        function = self._function()
        cells = None if function is None else function.__closure__
        return cells[self._index] if cells else types.CellType()

    def read(self) -> Slots:
        try:
            return {"": self._cell().cell_contents}
        except ValueError:  # it is empty
            return {}

    def write(self, slots: Slots) -> None:
        if slots:
            self._cell().cell_contents = slots[""]
        else:
            with contextlib.suppress(ValueError):
                del self._cell().cell_contents


class Function(Owner):
    """The default values and the attributes of a function, which is held weakly."""

    __slots__ = ("_function",)

    def __init__(self, function: types.FunctionType) -> None:
        self._function = weakref.ref(function)

    def read(self) -> Slots:
        function = self._function()
        if function is None:
            return {}
        return {"=": function.__defaults__, "*=": function.__kwdefaults__, **vars(function)}

    def write(self, slots: Slots) -> None:
        function, attributes = self._function(), dict(slots)
        if function is not None:
            function.__defaults__, function.__kwdefaults__ = attributes.pop("="), attributes.pop("*=")
            _replace_items(vars(function), attributes)


class InContext(Owner):
    """The value of a :class:`contextvars.ContextVar` in the current context."""

    __slots__ = ("_variable",)

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def read(self) -> Slots:
        try:
            return {"": self._variable.get()}
        except LookupError:  # nobody has set it
            return {}

    def write(self, slots: Slots) -> None:
        if slots:
            self._variable.set(slots[""])


class HiddenContents(Owner):
    """The contents of an object that keeps them in no attributes, such as an array or a random generator."""

    __slots__ = ("_object", "_seen")

    def __init__(self, value: object) -> None:
        self._object = value
        self._seen = freeze(value, id)

    def read(self) -> Slots:
        now = freeze(self._object, id)
        if now.data != self._seen.data:
            self._seen = now
        return {"": self._seen}

    def write(self, slots: Slots) -> None:
        """Leave the object as it is: the first call that changes it does not run again."""


def list_owners(modules: Sequence[nn.Module]) -> Iterator[Owner]:
    """Yield the owners of all state of ``modules`` besides their parameters."""
    for module in modules:
        yield Attributes(module)
        if isinstance(module, torch.jit.ScriptModule):  # its buffers and children cannot be replaced
            if attributes_of_script(module):
                yield ScriptAttributes(module)
        else:
            yield from (Table(buffers_of(module)), Table(children_of(module)))


def owners_in(part: Any) -> Iterator[Owner]:
    """Yield the owners that keep the state of ``part``, a collection, an array or another object."""
    if is_opaque(part):
        yield HiddenContents(part)
        return
    if isinstance(part, dict):
        yield Table(part)
    elif isinstance(part, list | deque | set):
        yield Items(part)
    if hasattr(part, "__dict__"):
        yield Table(vars(part))
    if find_slots(type(part)):
        yield Slotted(part)


def tables_of_hooks(modules: Sequence[nn.Module]) -> list[dict[Any, Any]]:
    """Return the dictionaries of hooks that run inside a call of the first of ``modules``, the parent of the others.

    The first module's own hooks are left out: they run before and after the segment.
    """
    return [*global_hook_tables(), *(table for module in modules[1:] for table in hook_tables(module))]

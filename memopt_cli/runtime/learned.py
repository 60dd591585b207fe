"""Knowledge from earlier calls of a segment: which of the state that its forward might change it does change.

The first call is watched: everything that forward could change is compared before and after.  Later calls compare only
what is cheap to compare and what was seen to change.  A call is watched again when modules, their mode or their hooks
have changed, and now and then (:class:`~memopt_cli.runtime.samples.Turns`).

An *owner* keeps values under names: the attributes of a module, a dictionary, the variables of a function.  A *slot* is
one name in an owner.  It *moves* if forward exchanges its value, or changes it in place, and *stays* otherwise.  For a
block with a batch norm and a counter ``self.calls``::

    owner                      stays                          moves            is written in place
    attributes of the block    training, kernel_size, …       calls
    buffers of the norm                                       running_mean, …  running_mean, running_var, …
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq, is_
from typing import Any, Final

from torch import Tensor, nn

from memopt_cli.runtime.frozen import ATOMS, freeze, parts_of
from memopt_cli.runtime.module_state import LEARNED_KEY, STRUCTURE, leaves_in
from memopt_cli.runtime.owners import Owner, Slots, Table, is_same, owners_in, owners_of, tables_of_hooks
from memopt_cli.runtime.parameters import Parameters
from memopt_cli.runtime.private_torch import is_of_transform, parameters_of
from memopt_cli.runtime.samples import Turns
from memopt_cli.runtime.segment_config import Installed
from memopt_cli.runtime.variables import Code, may_draw, variables_of

_WATCHED_EXCHANGES: Final = 2
"""How many times a slot's value may change between calls and still cause the next call to be watched."""
_MOST_OWNERS: Final = 1000
"""The most owners that are looked at, outside of the modules."""
Slot = tuple[int, Any]
"""The place of an owner among :attr:`Known.owners`, and a name in it."""


@dataclass(slots=True)
class Reading:
    """The values of slots when forward starts."""

    stays: list[Slots]
    """The slots of each owner that forward leaves alone, as far as is known."""
    before: dict[int, Slots]
    """Place of an owner in which something moves -> all its slots; in a watched forward, of every owner."""
    moves: dict[int, Slots]
    """Place of such an owner -> its slots that move."""


class Known:
    """Everything that a call of some modules might change, and which of it was seen to change."""

    def __init__(self, modules: Sequence[nn.Module], others: Sequence[Any]) -> None:
        """Find all that a call of ``modules``, the first of which holds the rest, with ``others`` might change."""
        self.parameters = [_parameters_of(module) for module in modules]
        """The parameters of each module, by their names."""
        tables = tables_of_hooks(modules)
        self.without_hooks = [table for table in tables if not table]
        """Dictionaries of hooks that are empty."""
        self.empty: list[dict[Any, Any]] = []
        """Other dictionaries of modules that are empty."""
        own: list[Owner] = [*owners_of(modules)]
        # The state that a hook's code changes is not searched: hooks run again, and can ask ``is_recomputing()``.
        hooked: list[Owner] = [Table(table) for table in tables if table]
        behind, self.may_draw = _behind(own, modules, others)
        """Whether forward may draw from the global generators of Python or NumPy, since its code names one."""
        self.owners = [*own, *hooked, *behind]
        self._kinds_of_others = {type(other) for other in others}
        self.own = len(own) + len(hooked)
        """How many of the owners belong to modules; the others are variables of code, and parts of objects."""
        self.hooked = range(len(own), self.own)
        """The places of dictionaries of hooks among the owners."""
        self._slots_of_parts: dict[int, Slot] = {}
        """Place of an owner that is a part of an object -> the slot in which that object stands."""
        self._add_parts()
        self.places = [*range(len(self.owners))]
        """The places of the owners that are looked at."""
        self.moves: list[set[Any]] = [set() for _ in self.owners]
        """The names in each owner whose value was seen to be exchanged, or changed."""
        self.stays = [owner.read() for owner in self.owners]
        """The values in the other slots of each owner, as read last.  The list is replaced, never changed."""
        slots = ((p, name, value) for p, slots in enumerate(self.stays) for name, value in slots.items())
        self.looked_at = {(p, name): _kind_of(value) for p, name, value in slots if _may_change(name, value)}
        """Slot in which a tensor or an object stood when forward was watched -> its kind."""
        self.written: set[Slot] = set()
        """The slots to whose tensors forward writes in place."""
        self._sort()

    def _add_parts(self) -> None:
        """Make the lists, dictionaries and plain objects in the slots owners as well."""
        seen = set[int]()
        for place, owner in enumerate(list(self.owners)):
            for name, value in owner.read().items():
                if is_object(name, value):
                    parts = [part for part in parts_of(value) if id(part) not in seen]
                    seen.update(map(id, parts))
                    inner = [owner for part in parts for owner in owners_in(part)]
                    for within in inner[: max(0, _MOST_OWNERS - len(self.owners))]:
                        self._slots_of_parts[len(self.owners)] = place, name
                        self.owners.append(within)

    def _sort(self) -> None:
        """Prepare what :meth:`is_still` compares, since it runs four times a call."""
        self.movers = [place for place in self.places if self.moves[place]]
        """The places of owners in which something moves."""
        still = [place for place in self.places if not self.moves[place]]
        mappings = {place: self.owners[place].mapping() for place in still}
        self._mappings = [mapping for mapping in mappings.values() if mapping is not None]
        self._lengths = [*map(len, self._mappings)]
        parts = {place: mapping for place, mapping in mappings.items() if mapping is not None and self.is_part(place)}
        self._parts, self._names = [*parts.values()], [name for place in parts for name in self.stays[place]]
        self._values = [v for p, mapping in mappings.items() if mapping is not None for v in self.stays[p].values()]
        self._others = [(self.owners[place], self.stays[place]) for place, m in mappings.items() if m is None]
        own = {id(parameter) for table in self.parameters for parameter in table.values()}
        # What lies in a tuple has no owner, for a tuple cannot change.
        stay = [v for slots in self.stays for v in leaves_in(slots.values()) if isinstance(v, Tensor)]
        self.tensors = [t for t in stay if id(t) not in own and not is_of_transform(t)]
        """The tensors among what stays, but for the modules' own parameters."""

    def is_still(self) -> bool:
        """Tell whether nothing was exchanged in the owners in which nothing was seen to move."""
        if [*map(len, self._mappings)] != self._lengths:
            return False
        if not all(map(is_, chain.from_iterable(map(dict.values, self._mappings)), self._values)):
            return False
        if self._parts and not all(map(eq, chain.from_iterable(self._parts), self._names)):
            return False
        return all(owner.holds(slots) for owner, slots in self._others)

    def is_part(self, place: int) -> bool:
        """Tell whether the owner at ``place`` is a part of an object that stands in a slot of another one."""
        return place in self._slots_of_parts

    def read_all(self) -> Reading:
        """Return every slot, for a watched forward, the first to use this."""
        slots = dict(enumerate(self.stays))
        return Reading(self.stays, slots, slots)

    def read(self, others: Sequence[Any], exchanged: Counter[Slot]) -> Reading | None:
        """Read the slots that move; note others whose value was exchanged, which count as moving from now on.

        ``others``: objects among the arguments.  ``exchanged``: how often each slot was exchanged between calls.
        Returns ``None`` if forward is to be watched again: modules, their mode or their hooks have changed; or forward
        may do something new, since an attribute has changed, an object of another kind stands in a slot, or a part of
        an object was changed.
        """
        if any(self.without_hooks) or any(self.empty) or not self._knows(others):
            return None
        if not self.is_still() and not self._note_changes(self.places, exchanged):
            return None
        if self.movers and not self._note_changes(self.movers, exchanged):
            return None
        if any(map(self.is_part, self.movers)):
            return None
        before = {place: self.owners[place].read() for place in self.movers}
        moves = {place: {n: v for n, v in slots.items() if n in self.moves[place]} for place, slots in before.items()}
        for place, slots in moves.items():
            for name, value in slots.items():
                if _may_change(name, value) and self.looked_at.get((place, name)) is not _kind_of(value):
                    return None
        return Reading(self.stays, before, moves)

    def _knows(self, others: Sequence[Any]) -> bool:
        """Tell whether objects such as ``others`` were given before, and none is a function, which may be any."""
        return all(type(o) in self._kinds_of_others and not isinstance(o, types.FunctionType) for o in others)

    def _note_changes(self, places: Sequence[int], exchanged: Counter[Slot]) -> bool:
        """Note the values exchanged in the owners at ``places``; return whether forward still does what it did before.

        The first few times that a value is exchanged, the answer is no: forward may branch on it, draw or count.
        """
        is_new = False
        for place in places:
            rest = {name: v for name, v in self.owners[place].read().items() if name not in self.moves[place]}
            if names := changed(self.stays[place], rest):
                both = [slots[name] for slots in (self.stays[place], rest) for name in names & slots.keys()]
                if place in self.hooked or "training" in names or any(isinstance(v, nn.Module) for v in both):
                    return False
                exchanged.update((place, name) for name in names)
                is_new |= any(exchanged[place, name] <= _WATCHED_EXCHANGES for name in names)
                self.note({place: names})
        return not is_new

    def note(self, found: Mapping[int, set[Any]]) -> None:
        """Note that the slots ``found``, names by the place of the owner, move."""
        self.stays = [*self.stays]
        for place, names in found.items():
            self.moves[place] |= names
            self.stays[place] = {name: value for name, value in self.stays[place].items() if name not in names}
        self._sort()

    def tidy(self) -> None:
        """Forget owners that need no look: empty dictionaries, and parts of moving objects, which are copied whole."""
        self.empty += [table for table in self.parameters if not table]
        self.parameters = [table for table in self.parameters if table]
        dropped = {place for place, (of, name) in self._slots_of_parts.items() if name in self.moves[of]}
        for place in range(self.hooked.start):
            if isinstance(owner := self.owners[place], Table) and not (self.stays[place] or self.moves[place]):
                self.empty.append(owner.mapping())
                dropped.add(place)
        for place in dropped:
            self.owners[place] = Table({})  # not what may come to hold the graph that holds this
        self.places = [place for place in self.places if place not in dropped]
        self.moves = [set() if place in dropped else names for place, names in enumerate(self.moves)]
        self.stays = [{} if place in dropped else slots for place, slots in enumerate(self.stays)]
        self._sort()


class Learned:
    """Knowledge of one segment from its calls."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """Start without knowledge.  ``module``: the segment, if more of its calls are to come."""
        self._module = None if module is None else weakref.ref(module)
        self.known: Known | None = None
        """Everything that its calls might change; ``None`` before the first call has ended."""
        self.runs = Turns()
        self.stages: dict[int, Learned] = {}
        """Place of a module that the segment is split into -> the knowledge of it."""
        self.parameters: Parameters | None = None
        """The parameters in the latest call; ``None`` if that was watched."""
        self.exchanged = Counter[Slot]()
        """Slot -> how often somebody exchanged what stood there between two calls."""
        self.draws_outside = False
        """Whether forward draws from the global random generators of Python or NumPy."""
        self.runs_to_end: dict[int, bool] = {}
        """Number of tensors that a forward saves -> whether one of its last operators fills a tensor after saving it
        (:mod:`memopt_cli.runtime.noise`)."""
        self.compared: int | None = None
        """The place of the saved tensor that is compared in every call, -1 for the last; ``None`` if none is."""
        self.overwrites_input = False
        """Whether forward writes over its input, so that a recomputation needs a copy."""
        self.is_differentiated_in_forward = False
        """Whether the forward of a segment around it computes gradients through it, as its recomputation will."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Learned:
        return Learned()  # a copy of the module is another module

    def belongs_to(self, module: nn.Module) -> bool:
        """Tell whether this was learned of ``module`` itself, and not of one that it is a copy of."""
        return self._module is not None and self._module() is module


def learned_of(module: nn.Module) -> Learned:
    """Return the knowledge of the segment ``module``, which is kept on the module itself."""
    found: Learned | None = vars(module).get(LEARNED_KEY)
    if found is None or not found.belongs_to(module):
        found = Learned(module)
        if isinstance(module, Installed):
            attributes = vars(module)
            others = {name: value for name, value in attributes.items() if name != LEARNED_KEY}
            attributes.clear()
            attributes[LEARNED_KEY] = found  # the first one, see ``Attributes``
            attributes.update(others)
    return found


def changed(before: Slots, after: Slots) -> set[Any]:
    """Return the names whose object differs between ``before`` and ``after``, or is missing in one of them."""
    if is_same(before, after):
        return set()
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in both if before[name] is not after[name]}


def is_plain_state(value: Any) -> bool:
    """Tell whether ``value`` is a tensor that belongs to the state: no parameter, and nothing that a transform left."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_of_transform(value)


def _kind_of(value: Any) -> Any:
    """Return the kind of ``value``, with which code does the same: its class, or the code of a function."""
    return value.__code__ if isinstance(value, types.FunctionType) else type(value)


def _may_change(name: Any, value: Any) -> bool:
    return isinstance(value, Tensor) or is_object(name, value)


def is_object(name: Any, value: Any) -> bool:
    """Tell whether ``value``, under ``name``, may change without being exchanged, and is no tensor or module."""
    is_changeable = type(value) not in ATOMS and not isinstance(value, Tensor | nn.Module)
    return is_changeable and name not in STRUCTURE and name != "_buffers"  # which is an owner by itself


def _parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of ``module`` itself; those of a ScriptModule cannot be exchanged."""
    parameters: Any = parameters_of(module)
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def _behind(owners: Sequence[Owner], modules: Sequence[nn.Module], others: Sequence[Any]) -> tuple[list[Owner], bool]:
    """Return the variables that the code of ``modules`` names, and the code of the objects that they or these hold.

    Also return whether any of that code may draw from the global generators of Python or NumPy.
    """
    found: dict[int, Owner] = {}
    draws = False
    kinds = dict.fromkeys(type(module) for module in modules)
    code: list[Any] = [vars(kind).get("_original", kind) for kind in kinds]  # of a segment the class beneath
    values: list[Any] = [*others]
    for owner in owners:
        values += [value for name, value in owner.read().items() if is_object(name, value)]
    seen = set[int]()
    while (code or values) and len(found) < _MOST_OWNERS:
        new = [c for c in (*code, *_code_in(values)) if id(c) not in seen]
        seen.update(map(id, new))
        code, values = [], []
        draws |= any(map(may_draw, new))
        for owner in (owner for c in new for owner in variables_of(c)):
            if id(owner) not in found:
                found[id(owner)] = owner
                values += owner.read().values()
    return [*found.values()], draws


def _code_in(values: Sequence[Any]) -> list[Any]:
    """Return the functions, the Python modules, and the classes of the objects that lie in ``values``."""
    shared = freeze(list(values), lambda tensor: None).shared.values() if values else ()
    unwrapped = (inspect.getattr_static(value, "__wrapped__", value) for value in shared)
    return [value for value in unwrapped if isinstance(value, Code)]

"""Learning, from the calls of a segment, which part of its state forward changes.

A recomputation must start from the state that forward started from, but copying all state that forward could change
would be slow.  So the first call is *watched*: everything that forward could change is compared before and after.
Later calls copy only the state that was seen to change, and of the rest compare what is cheap to compare.  A call is
watched again when modules, their mode or their hooks have changed, and now and then
(:class:`~memopt_cli.runtime.samples.WatchSchedule`).

An *owner* keeps values under names: the attributes of a module, a dictionary, the variables of a function.  A *slot* is
one name in an owner, given as the owner's index and the name.  It *changes* if forward replaces its value
or modifies it in place, and is *stable* otherwise.  For a block with a batch norm and a counter ``self.calls``::

    owner                      stable                         changes          is written in place
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
from typing import Any, Final

from torch import Tensor, nn

from memopt_cli.runtime.frozen import ATOMS, find_objects, freeze
from memopt_cli.runtime.module_state import LEARNED_KEY, STRUCTURE, leaves_in
from memopt_cli.runtime.owners import Owner, Slots, Snapshot, Table, is_same, list_owners, owners_in, tables_of_hooks
from memopt_cli.runtime.parameters import Parameters
from memopt_cli.runtime.private_torch import is_of_transform, parameters_of
from memopt_cli.runtime.samples import WatchSchedule
from memopt_cli.runtime.segment_config import Installed
from memopt_cli.runtime.variables import Code, find_variables, may_use_random

_WATCHED_EXCHANGES: Final = 2
"""Number of times that code between calls may replace a slot's value; each makes the next call watched.  Later ones are
assumed to be regular: a training loop that sets ``model.step = n`` does so before every call."""
_MAX_OWNERS: Final = 1000
"""Maximum number of owners that are looked at, outside the modules."""
Slot = tuple[int, Any]
"""Index of an owner in :attr:`KnownState.owners`, and a name in it."""


@dataclass(slots=True)
class Reading:
    """The values of slots when forward starts."""

    stable: list[Slots]
    """For each owner, the slots that forward has not been seen to change."""
    before: dict[int, Slots]
    """Index of an owner in which something changes -> all its slots; in a watched forward, of every owner."""
    changing: dict[int, Slots]
    """Index of such an owner -> its slots that change; in a watched forward, all slots."""


class KnownState:
    """Everything that a call of some modules might change, and the part of it that was seen to change.

    ``owners``, ``changing`` and ``stable`` are parallel lists::

        i   owners[i]                  changing[i]          stable[i]
        0   attributes of the block    {"calls"}            {"training": True, "kernel_size": (3, 3), …}
        1   buffers of the norm        {"running_mean"}     {}
        2   its dictionary of hooks    {}                   {7: hook}         2 is in ``hooked``
        3   variables of its code      {}                   {"cache": […]}
        4   the list in ``cache``      {}                   its items         a part of the object in (3, "cache")

    An owner that need not be looked at any more leaves ``indices``, and stays in the lists as an empty dictionary, so
    that the indices of the others do not change.
    """

    def __init__(self, modules: Sequence[nn.Module], others: Sequence[Any]) -> None:
        """Find everything that a call of ``modules`` might change.

        The first of ``modules`` contains the rest; ``others``: the arguments of the call that are not tensors.
        """
        self.parameters = [_own_parameters(module) for module in modules]
        """The parameters of each module by name."""
        tables = tables_of_hooks(modules)
        self.without_hooks = [table for table in tables if not table]
        """Dictionaries of hooks that were empty when the watched call started."""
        self.empty: list[dict[Any, Any]] = []
        """Other dictionaries of modules that were empty then."""
        own: list[Owner] = [*list_owners(modules)]
        # State that only a hook's code changes is not searched for: a recomputation runs the hook again, and the hook
        # can call ``is_recomputing()`` if it must not change that state twice.
        hooked: list[Owner] = [Table(table) for table in tables if table]
        code_owners, self.may_use_random = _owners_of_code(own, modules, others)
        """Whether forward may use the global generator of Python or NumPy, since its code names that."""
        self.owners = [*own, *hooked, *code_owners]
        self._kinds_of_others = {type(other) for other in others}
        self.module_owner_count = len(own) + len(hooked)
        """Number of owners of modules, which come first; after them come variables of code, then parts of objects."""
        self.hooked = range(len(own), self.module_owner_count)
        """The indices of the owners that are dictionaries of hooks."""
        self._slots_of_parts: dict[int, Slot] = {}
        """Index of an owner that is a part of an object -> the object's slot."""
        self._add_parts()
        self.indices = [*range(len(self.owners))]
        """The indices of the owners that are looked at."""
        self.changing: list[set[Any]] = [set() for _ in self.owners]
        """For each owner, the names whose value forward replaced or changed in a watched call."""
        self.stable = [owner.read() for owner in self.owners]
        """For each owner, the other slots, and their values when last read.  A change makes a new list, since a
        :class:`Reading` may still refer to this one."""
        slots = ((i, name, value) for i, slots in enumerate(self.stable) for name, value in slots.items())
        self.looked_at = {(i, name): _kind_of(value) for i, name, value in slots if _may_change(name, value)}
        """Slot that held a tensor or an object when forward was watched -> the class of it, or a function's code."""
        self.written: set[Slot] = set()
        """The slots to whose tensors forward writes in place."""
        self._prepare_comparison()

    def _add_parts(self) -> None:
        """Make the lists, dictionaries and plain objects in the slots owners as well."""
        seen = set[int]()
        for index, owner in enumerate(list(self.owners)):
            for name, value in owner.read().items():
                if is_object(name, value):
                    parts = [part for part in find_objects(value) if id(part) not in seen]
                    seen.update(map(id, parts))
                    inner = [owner for part in parts for owner in owners_in(part)]
                    for owner_of_part in inner[: max(0, _MAX_OWNERS - len(self.owners))]:
                        self._slots_of_parts[len(self.owners)] = index, name
                        self.owners.append(owner_of_part)

    def _prepare_comparison(self) -> None:
        """Prepare what :meth:`is_stable` and :meth:`_is_unchanged` compare, which run four times a call."""
        self.changing_owners = [index for index in self.indices if self.changing[index]]
        """The indices of owners in which something changes."""
        stable_owners = [index for index in self.indices if not self.changing[index]]
        readings = [(self.owners[index], self.stable[index]) for index in stable_owners if not self.is_part(index)]
        parts = [(self.owners[index], self.stable[index]) for index in stable_owners if self.is_part(index)]
        self._all, self._state = Snapshot(readings), Snapshot(readings, without=STRUCTURE)
        # In dictionaries that are parts of objects, names are compared too: ``cache[new] = cache.pop(old)`` exchanges a
        # key, and leaves the values as they were.
        self._parts = Snapshot(parts, with_names=True) if parts else None
        parameters = {id(parameter) for table in self.parameters for parameter in table.values()}
        # Also from tuples, which are not owners: a tuple cannot change, but a tensor in it can.
        stable_tensors = [v for slots in self.stable for v in leaves_in(slots.values()) if isinstance(v, Tensor)]
        self.tensors = [t for t in stable_tensors if id(t) not in parameters and not is_of_transform(t)]
        """The tensors in stable slots, without the modules' own parameters."""

    def is_stable(self) -> bool:
        """Return whether the owners that never changed in a watched call still hold the same objects."""
        return self._state.is_current() and (self._parts is None or self._parts.is_current())

    def _is_unchanged(self) -> bool:
        """Return whether neither state nor structure (such as dictionaries of hooks) was replaced in these owners.

        No recomputation restores structure, so it is compared once a call.
        """
        return self._all.is_current() and (self._parts is None or self._parts.is_current())

    def is_part(self, index: int) -> bool:
        """Return whether the owner at ``index`` is a part of an object in a slot of another owner."""
        return index in self._slots_of_parts

    def read_all(self) -> Reading:
        """Return a reading in which every slot counts as changing, for a watched forward."""
        slots = dict(enumerate(self.stable))
        return Reading(self.stable, slots, slots)

    def read(self, others: Sequence[Any], exchanged: Counter[Slot]) -> Reading | None:
        """Read the slots that change; return ``None`` if forward must be watched again.

        That is so if modules, their mode or their hooks have changed, or if forward may do something new: an attribute
        has changed, a slot holds an object of a different class, or a part of an object was changed.  Slots that got
        new values since the last call count as changing from now on.

        ``others``: objects among the arguments.  ``exchanged``: number of exchanges of each slot between calls.
        """
        if any(self.without_hooks) or any(self.empty) or not self._knows_types(others):
            return None
        if not self._is_unchanged() and not self._note_changes(self.read_owners(self.indices), exchanged):
            return None
        before = self.read_owners(self.changing_owners)
        if before and not self._note_changes(before, exchanged):
            return None
        if any(map(self.is_part, before)):
            return None
        changing = dict[int, Slots]()
        for index, slots in before.items():
            names = self.changing[index]
            is_whole = slots.keys() <= names
            changing[index] = slots if is_whole else {n: value for n, value in slots.items() if n in names}
            for name, value in changing[index].items():
                kind = self.looked_at.get((index, name))
                if type(value) is not kind and _may_change(name, value) and kind is not _kind_of(value):
                    return None
        return Reading(self.stable, before, changing)

    def _knows_types(self, others: Sequence[Any]) -> bool:
        """Return whether each of ``others`` has a type seen in the watched call, and that no argument is a function.

        Each function may change other state, so a call with a function is always watched.
        """
        return all(type(o) in self._kinds_of_others and not isinstance(o, types.FunctionType) for o in others)

    def read_owners(self, indices: Sequence[int]) -> dict[int, Slots]:
        """Return the current slots of the owners at ``indices``, by index."""
        return {index: self.owners[index].read() for index in indices}

    def _note_changes(self, readings: Mapping[int, Slots], exchanged: Counter[Slot]) -> bool:
        """Note the values replaced since the last call in the owners of ``readings``, their current slots.

        Return whether forward may be expected to change the same slots as before.  The first two times that a value is
        replaced it may not: forward could branch on ``self.mode``, and count or use dropout only in one branch.
        """
        is_new = False
        for index, slots in readings.items():
            changing = self.changing[index]
            if not self.stable[index] and slots.keys() <= changing:
                continue
            others = {name: value for name, value in slots.items() if name not in changing}
            if names := find_changes(self.stable[index], others):
                common = [part[name] for part in (self.stable[index], others) for name in names & part.keys()]
                if index in self.hooked or "training" in names or any(isinstance(v, nn.Module) for v in common):
                    return False
                exchanged.update((index, name) for name in names)
                is_new |= any(exchanged[index, name] <= _WATCHED_EXCHANGES for name in names)
                self.add_changing({index: names})
        return not is_new

    def add_changing(self, newly_changing: Mapping[int, set[Any]]) -> None:
        """Note that the slots ``newly_changing``, names by the owner's index, change from now on."""
        self.stable = [*self.stable]
        for index, names in newly_changing.items():
            self.changing[index] |= names
            self.stable[index] = {name: value for name, value in self.stable[index].items() if name not in names}
        self._prepare_comparison()

    def drop_needless_owners(self) -> None:
        """Drop owners that need not be compared: empty dictionaries, and parts of objects that are copied."""
        self.empty += [table for table in self.parameters if not table]
        self.parameters = [table for table in self.parameters if table]
        dropped = {index for index, (of, name) in self._slots_of_parts.items() if name in self.changing[of]}
        for index in range(self.hooked.start):
            if isinstance(owner := self.owners[index], Table) and not (self.stable[index] or self.changing[index]):
                self.empty.append(owner.mapping())
                dropped.add(index)
        for index in dropped:
            # No reference may stay: a list, for example, may later hold autograd's graph, which holds this.
            self.owners[index] = Table({})
        self.indices = [index for index in self.indices if index not in dropped]
        self.changing = [set() if index in dropped else names for index, names in enumerate(self.changing)]
        self.stable = [{} if index in dropped else slots for index, slots in enumerate(self.stable)]
        self._prepare_comparison()


class SegmentKnowledge:
    """The knowledge of one segment that its calls have shown."""

    def __init__(self, module: nn.Module | None = None) -> None:
        """Start without knowledge.  ``module``: the segment; ``None`` if the knowledge serves one call only."""
        self._module = None if module is None else weakref.ref(module)
        self.known: KnownState | None = None
        """Everything that its calls might change; ``None`` if the first call has not ended yet."""
        self.schedule = WatchSchedule()
        self.stages: dict[int, SegmentKnowledge] = {}
        """Index of a module that the segment is split into (``__spatial_split__``) -> the knowledge of it."""
        self.parameters: Parameters | None = None
        """The parameters in the latest call; ``None`` if that call was watched."""
        self.exchanged = Counter[Slot]()
        """Slot -> number of exchanges of its value between two calls, for example by a training loop."""
        self.uses_random_outside = False
        """Whether forward uses the global random generators of Python or NumPy."""
        self.runs_to_end: dict[int, bool] = {}
        """Number of tensors that a forward saves -> whether one of its last operators fills a tensor after saving it
        (:mod:`memopt_cli.runtime.segment_run`)."""
        self.compared: int | None = None
        """The index of the saved tensor that is compared in every call, counted from the end (-1 is the last tensor);
        ``None`` if no tensor is compared."""
        self.overwrites_input = False
        """Whether forward writes over its input, so that a recomputation needs a copy."""
        self.is_differentiated_in_forward = False
        """Whether an enclosing segment differentiates this one in its own forward, and so again when it recomputes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentKnowledge:
        return SegmentKnowledge()  # a copy of the module is another module

    def belongs_to(self, module: nn.Module) -> bool:
        """Return whether this was learned from calls of ``module``: a copied module has the original's at first."""
        return self._module is not None and self._module() is module


def ensure_learned(module: nn.Module) -> SegmentKnowledge:
    """Return the knowledge of the segment ``module``, which is kept on the module itself."""
    learned: SegmentKnowledge | None = vars(module).get(LEARNED_KEY)
    if learned is None or not learned.belongs_to(module):
        learned = SegmentKnowledge(module)
        if isinstance(module, Installed):
            vars(module)[LEARNED_KEY] = learned
    return learned


def find_changes(before: Slots, after: Slots) -> set[Any]:
    """Return the names whose value is not the same object in ``before`` and ``after``, or is missing in one of them."""
    if is_same(before, after):
        return set()
    common = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in common if before[name] is not after[name]}


def is_plain_state(value: Any) -> bool:
    """Return whether ``value`` is a tensor of the state: no parameter, and not left by a ``torch.func`` transform."""
    # ``nn.Parameter`` has an ``isinstance`` of its own, written in Python, so most tensors must not get there.
    is_tensor = type(value) is Tensor or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    return is_tensor and not is_of_transform(value)


def _kind_of(value: Any) -> Any:
    """Return the class of ``value``, or a function's code: forward should do the same with values of one kind."""
    return value.__code__ if isinstance(value, types.FunctionType) else type(value)


def _may_change(name: Any, value: Any) -> bool:
    return isinstance(value, Tensor) or is_object(name, value)


def is_object(name: Any, value: Any) -> bool:
    """Return whether ``value``, under ``name``, is an object that may change in place: no number, tensor or module."""
    is_changeable = type(value) not in ATOMS and not isinstance(value, Tensor | nn.Module)
    # The dictionary of buffers is an owner itself.
    return is_changeable and name not in STRUCTURE and name != "_buffers"


def _own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of ``module`` itself.  In a ScriptModule they cannot be replaced."""
    parameters: Any = parameters_of(module)
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def _owners_of_code(
    owners: Sequence[Owner], modules: Sequence[nn.Module], others: Sequence[Any]
) -> tuple[list[Owner], bool]:
    """Return the variables that a call of ``modules`` may use, and whether its code may use global random numbers.

    The search starts with the code of the modules' classes and of the objects in ``owners`` and ``others``.  It goes on
    with the code of the objects in the variables that it finds, until it finds no new ones.
    """
    owners_by_id: dict[int, Owner] = {}
    may_be_random = False
    kinds = dict.fromkeys(type(module) for module in modules)
    code: list[Any] = [vars(kind).get("_original", kind) for kind in kinds]  # for a segment, the module's own class
    values: list[Any] = [*others]
    for owner in owners:
        values += [value for name, value in owner.read().items() if is_object(name, value)]
    seen = set[int]()
    while (code or values) and len(owners_by_id) < _MAX_OWNERS:
        new = [c for c in (*code, *_code_in(values)) if id(c) not in seen]
        seen.update(map(id, new))
        code, values = [], []
        may_be_random |= any(map(may_use_random, new))
        for owner in (owner for c in new for owner in find_variables(c)):
            if id(owner) not in owners_by_id:
                owners_by_id[id(owner)] = owner
                values += owner.read().values()
    return [*owners_by_id.values()], may_be_random


def _code_in(values: Sequence[Any]) -> list[Any]:
    """Return the functions, the Python modules, and the classes of the objects that lie in ``values``."""
    shared = freeze(list(values), lambda tensor: None).shared.values() if values else ()
    unwrapped = (inspect.getattr_static(value, "__wrapped__", value) for value in shared)
    return [value for value in unwrapped if isinstance(value, Code)]

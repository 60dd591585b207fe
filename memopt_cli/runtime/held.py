"""Holding the state that a segment's forward changes, until backward has recomputed the segment from it.

For example, a spiking layer sets ``self.v`` in each of 100 calls; each recomputation must start from the ``v`` of its
own call.  Tensors are held without the graph that made them, and objects as copies (``frozen.py``): with its graph, the
``v`` of one call would keep alive what all the calls before it have saved.  ``learned.py`` explains slots and owners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from memopt_cli.runtime.copies import Copy, copy_values, is_unchanged, version_of
from memopt_cli.runtime.frozen import FrozenCopy, freeze, pickle_value
from memopt_cli.runtime.learned import KnownState, Reading, Slot, find_changes, is_object, is_plain_state
from memopt_cli.runtime.module_state import Complaint, leaves_in
from memopt_cli.runtime.owners import Slots

_MAX_COPY_BYTES: Final = 1 << 16
"""Maximum bytes of a tensor that is copied, in a watched call, if an object outside the module holds it."""
_OTHERS: Final[Slot] = (-1, None)
"""A slot of no owner, for the arguments that are not tensors."""


@dataclass(slots=True, eq=False)
class HeldTensor:
    """The record of a tensor of the state, as the tensor was when forward started."""

    number: int
    """The ``id`` of the tensor."""
    alias: Tensor | None
    """Detached alias of the tensor; ``None`` once it is released, or if every call copies the tensor."""
    version: int
    """PyTorch's version counter when forward started, or, if no copy is held, when forward ended."""
    needs_gradient: bool
    """Whether the tensor required a gradient when forward started."""
    copy: Copy | None = None
    """A copy of its values; ``None`` if forward does not write to it."""
    released_index: int | None = None
    """Index of the tensor among the released tensors; ``None`` if it is still held."""

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether forward has, or may have, written to ``tensor``, the tensor of this record.

        Batch norm writes its running statistics without raising their version, so vectors that were copied always
        count as written.
        """
        is_vector = self.copy is not None and self.copy.shared is None and tensor.dim() <= 1
        return is_vector or not self.is_equal(tensor)

    def is_equal(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, the tensor of this record, still has the values that it had before forward."""
        is_unwritten = version_of(tensor) == self.version
        return is_unwritten and (self.copy is None or is_unchanged(tensor.detach(), self.copy.values))


class HeldSlots:
    """The values in the slots that change, and the arguments that are not tensors, from before forward.

    How each is held, for a block (owner 0) with a counter, a list ``seen``, and a batch norm's buffers (owner 1)::

        slot                         listed in                       held as
        (0, "calls"): a number       values[0]["calls"]              the number
        (1, "running_mean"): tensor  values[1]["running_mean"]       the HeldTensor in tensors; the tensor itself is
                                                                     in originals until forward has ended
        (0, "seen"): an object       object_slots                    a part of the one pickle _objects; if forward may
                                                                     change it, another pickle of its own in _contents
        arguments                    _OTHERS, in place of a slot     the same
    """

    def __init__(self, known: KnownState, reading: Reading, others: Iterable[Any], *, is_watched: bool) -> None:
        """Hold the slots that change according to ``reading``, and ``others``, the arguments that are not tensors.

        ``is_watched``: copy whatever forward might change, and not only what earlier calls changed.
        """
        self._known, self._is_watched = known, is_watched
        self._before = reading.before
        """Every slot of the owners in which something changes, until forward has ended."""
        self._others = [*others]
        self.values: dict[int, Slots] = {}
        """Index of an owner -> its slots that change and hold no object; a tensor is held as a :class:`HeldTensor`."""
        self.object_slots: set[Slot] = set()
        """The slots that change and hold objects."""
        self._objects: FrozenCopy | None = None
        """One pickle of the objects in :attr:`object_slots` and of the arguments; ``None`` if there are neither."""
        self._contents: dict[Slot, FrozenCopy] = {}
        """Slot -> a separate pickle of its object, to find out whether forward changes that object."""
        self.names: dict[int, list[Any]] = {}
        """Index of an owner in which something changes -> the names of all its slots, in their order."""
        self.tensors: dict[int, HeldTensor] = {}
        """``id`` of a tensor -> the record of it."""
        self.originals: dict[int, Tensor] = {}
        """``id`` of a tensor -> the tensor itself, until forward has ended."""
        self.irreversible: Complaint = ""
        """Reason why forward cannot be undone."""
        self.has_new_changes = False
        """Whether forward wrote to a tensor that was not copied, since no earlier call had written to it."""
        self._hold_slots(reading.changing)

    def _hold_slots(self, readings: Mapping[int, Slots]) -> None:
        objects: dict[int, Slots] = {}
        copied, written = set[int](), self._known.written
        for index, slots in readings.items():
            held_slots = self.values[index] = dict[str, Any]()
            for name, value in slots.items():
                if isinstance(value, Tensor):
                    record = held_slots[name] = self._hold_tensor(value)
                    is_written = (index, name) in written
                    if record is not value and (is_written or (self._is_watched and self._may_write(index, value))):
                        copied.add(record.number)
                elif is_object(name, value) and not self._known.is_part(index):
                    objects.setdefault(index, {})[name] = value
                    self.object_slots.add((index, name))
                else:
                    held_slots[name] = value
        if objects or self._others:
            # All in one pickle: two objects that refer to one list also do so in the copy.
            self._objects = freeze((objects, self._others), self._hold_tensor)
            if iterator := self._objects.uncopyable_iterator:
                self.irreversible = f"holds {iterator}, and may move it on"
            copied |= self._freeze_contents(objects)
        for number, copy in copy_values([self.originals[number] for number in copied]).items():
            self.tensors[number].copy = copy
        for number, record in self.tensors.items():
            # A watched call drops the copies of what forward does not change.
            if record.copy is None or self._is_watched:
                record.alias = self.originals[number].detach()

    def _hold_tensor(self, tensor: Tensor) -> Any:
        """Return the :class:`HeldTensor` of ``tensor``, or ``tensor`` itself if it is not state, but a parameter."""
        if not is_plain_state(tensor):
            return tensor
        number = id(tensor)
        record = self.tensors.get(number)
        if record is None:
            record = self.tensors[number] = HeldTensor(number, None, version_of(tensor), tensor.requires_grad)
            self.originals[number] = tensor
        return record

    def _may_write(self, index: int, tensor: Tensor) -> bool:
        """Return whether ``tensor`` in the owner at ``index`` is copied in a watched call: forward may write to it.

        In a watched call nothing is known, so every tensor of the module is copied.  A large one elsewhere (a data set,
        say) is not: if forward writes to it, :meth:`written` finds its version raised, and forward cannot be undone.
        """
        return 0 <= index < self._known.module_owner_count or tensor.nbytes <= _MAX_COPY_BYTES

    def _freeze_contents(self, objects: Mapping[int, Slots]) -> set[int]:
        """Copy each of ``objects``, and the arguments, by itself; return the ``id`` of each tensor in them to copy."""
        numbers = set[int]()
        slot_values = {(index, name): value for index, slots in objects.items() for name, value in slots.items()}
        for slot, value in {**slot_values, _OTHERS: self._others}.items():
            if self._is_watched or slot in self._known.written:
                self._contents[slot] = freeze(value, self._hold_tensor)
                inner = _numbers_in(self._contents[slot])
                numbers |= {n for n in inner if not self._is_watched or self._may_write(slot[0], self.originals[n])}
        return numbers

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Hold ``tensors`` no longer: the caller passes them, or equal ones, to :meth:`StartingState.replay`."""
        for index, tensor in enumerate(tensors):
            if (record := self.tensors.get(id(tensor))) is not None:
                record.alias, record.released_index = None, index

    # ------------------------------------------------------------------------------------------- after forward

    def written(self) -> set[int]:
        """Return the ``id`` of each tensor that forward has written to."""
        numbers = set[int]()
        for number, held in self.tensors.items():
            is_copied = held.copy is not None
            # In an unwatched call, only tensors that earlier calls wrote to are copied.
            if (is_copied and not self._is_watched) or held.is_written(self.originals[number]):
                numbers.add(number)
                if not is_copied and self._is_watched:
                    shape = tuple(self.originals[number].shape)
                    self.irreversible = f"writes in place to a tensor of shape {shape} in an object"
                self.has_new_changes |= not is_copied and not self._is_watched
        return numbers

    def changes(self, index: int, before: Slots, written: set[int]) -> set[Any]:
        """Return the names whose value in the owner at ``index`` was replaced or changed since ``before``.

        ``written``: the result of :meth:`written`.
        """
        before, after = self._before.get(index, before), self._known.owners[index].read()
        names = find_changes(before, after)
        if written:
            leaves = {name: leaves_in([value]) for name, value in before.items()}
            written_names = {name for name in leaves if any(id(leaf) in written for leaf in leaves[name])}
            self._known.written |= {(index, name) for name in written_names}
            names |= written_names
        return names | {
            slot[1] for slot in self._contents if slot[0] == index and self._is_changed(slot, after, written)
        }

    def _is_changed(self, slot: Slot, after: Slots, written: set[int]) -> bool:
        """Return whether forward has changed the object that was in ``slot``, or written to a tensor in it."""
        contents, is_changed = self._contents[slot], False
        if not written.isdisjoint(_numbers_in(contents)):
            self._known.written.add(slot)
            is_changed = True
        if self._is_watched and slot[1] in after:
            is_changed |= contents.data != pickle_value(after[slot[1]])
        return is_changed

    def drop_unneeded(self, written: set[int]) -> list[tuple[Tensor, HeldTensor]]:
        """Drop everything that a recomputation does not need; return the tensors still held, with their records.

        ``written``: the result of :meth:`written`.
        """
        if _OTHERS in self._contents:
            self._is_changed(_OTHERS, {None: self._others}, written)
        changing = self._known.changing
        if self._is_watched:
            filtered = {p: {n: v for n, v in slots.items() if n in changing[p]} for p, slots in self.values.items()}
            self.values = {index: slots for index, slots in filtered.items() if slots}
            self.object_slots = {slot for slot in self.object_slots if slot[1] in changing[slot[0]]}
        if not self.object_slots and not self._others:
            self._objects = None
        indices = {*self.values, *(index for index, _ in self.object_slots)}
        self.names = {index: [*self._before[index]] for index in indices}
        for number, record in self.tensors.items():
            if record.copy is not None and number in written:
                record.copy.needs_gradient = record.needs_gradient
            else:
                record.copy = None
                record.version = version_of(self.originals[number])
        if self._is_watched or self._objects is not None:
            kept = [r for slots in self.values.values() for r in slots.values() if isinstance(r, HeldTensor)]
            inner = () if self._objects is None else _numbers_in(self._objects)
            self.tensors = {record.number: record for record in (*kept, *(self.tensors[number] for number in inner))}
        held_of = [(self.originals[number], record) for number, record in self.tensors.items()]
        # Drop every reference to originals: an argument or an object may later hold autograd's graph of this call,
        # which holds this, and that would be a cycle.
        self._before = {}
        self._contents.clear()
        self.originals.clear()
        self._others.clear()
        return held_of

    # ---------------------------------------------------------------------------------------------- afterwards

    def thaw(self, tensor_for: Callable[[Any], Any]) -> tuple[dict[int, Slots], list[Any]]:
        """Return the values for the slots that change, as a dictionary by owner's index, and copies of the arguments.

        ``tensor_for``: returns the tensor to use for a :class:`HeldTensor`, and any other value as it is.
        """
        objects, others = self._objects.thaw(tensor_for) if self._objects is not None else ({}, [])
        slots = {index: {n: tensor_for(held) for n, held in by_name.items()} for index, by_name in self.values.items()}
        for index, by_name in objects.items():
            object_values = {name: value for name, value in by_name.items() if (index, name) in self.object_slots}
            slots[index] = slots.get(index, {}) | object_values
        return slots, others

    def put_back(self, slot: Slot, current: Any, value: Any) -> Any:
        """Return the value to put into ``slot`` permanently: ``current`` if it equals ``value`` or can be made equal.

        Others may refer to the ``current`` object, so it is replaced only if there is no other way.
        """
        if isinstance(current, Tensor):
            record = self.tensors.get(id(current))
            if record is None or self.originals.get(record.number) is not current or current.grad_fn is not None:
                return value
            # The module's own vector that forward may have written is always replaced by the one held: code that
            # records a step relies on nobody else holding it.
            is_own = 0 <= slot[0] < self._known.module_owner_count
            is_changed = record.is_written(current) if is_own else not record.is_equal(current)
            return value if is_changed else current
        if type(current) is not type(value) or not is_object(slot[1], value):
            return value
        if slot in self._contents and self._contents[slot].data == pickle_value(current):
            return current
        return current if restore_contents(current, value) else value


def _numbers_in(frozen: FrozenCopy) -> set[int]:
    """Return the ``id`` of each tensor in ``frozen`` that is held."""
    return {record.number for record in frozen.shared.values() if isinstance(record, HeldTensor)}


def restore_contents(target: Any, value: Any) -> bool:
    """Give the object ``target``, to which others may refer, the contents of ``value``; return whether it worked.

    An object may keep more than its attributes show, and ``__setstate__`` need not restore it: a generator of NumPy's
    has no state there at all, and ``itertools.cycle`` leaves its iterator where it is.  So the outcome is compared.
    """
    if target is value:  # an object that is not copied, such as a lock
        return True
    kind: Any = type(target)
    reduced: Any = value.__reduce__() if kind.__reduce__ is not object.__reduce__ else ()
    if isinstance(target, dict):
        target.clear()
        dict.update(target, value)  # a Counter's own ``update`` would add up counts
    elif isinstance(target, list | deque | set):
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(value)
    elif isinstance(reduced, tuple) and len(reduced) > 2 and hasattr(target, "__setstate__"):
        target.__setstate__(reduced[2])
    elif hasattr(target, "__dict__"):
        vars(target).clear()
        vars(target).update(vars(value))
    return pickle_value(target) == pickle_value(value)

"""The values in the slots that a forward changes, held from its start until it has run again.

Tensors are held without the graph that made them, and objects as copies.  Otherwise each call would keep alive what
later calls leave in the same slots, and through that every later call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from memopt_cli.runtime.copies import Copy, copies_of, is_unchanged, version_of
from memopt_cli.runtime.frozen import Frozen, data_of, freeze
from memopt_cli.runtime.learned import Known, Reading, Slot, changed, is_object, is_plain_state
from memopt_cli.runtime.module_state import leaves_in
from memopt_cli.runtime.owners import Slots

_LARGEST_COPY: Final = 1 << 16
"""Most bytes of a tensor that is copied if an object outside of the module holds it."""
_OTHERS: Final[Slot] = (-1, None)
"""The slot that stands for the arguments that are no tensors."""


@dataclass(slots=True, eq=False)
class HeldTensor:
    """A tensor of the state, as it was when forward started."""

    number: int
    """The ``id`` of the tensor."""
    alias: Tensor | None
    """The tensor without its graph; ``None`` if it was lent."""
    version: int
    needs_gradient: bool
    copy: Copy | None = None
    """A copy of its values, if forward writes to it; otherwise ``None``."""
    lent: int | None = None
    """Its place among the tensors that were lent; ``None`` if it was not."""

    @classmethod
    def of(cls, tensor: Tensor) -> HeldTensor:
        """Hold ``tensor`` as it is now."""
        return cls(id(tensor), tensor.detach(), version_of(tensor), tensor.requires_grad)

    def is_written(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor``, the one that is held, counts as written since.

        Batch norm writes its statistics without raising their version, so vectors that were copied count as written.
        """
        is_vector = self.copy is not None and self.copy.shared is None and tensor.dim() <= 1
        return is_vector or not self.is_equal(tensor)

    def is_equal(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor``, the one that is held, has the values that it had."""
        is_unwritten = version_of(tensor) == self.version
        return is_unwritten and (self.copy is None or is_unchanged(tensor.detach(), self.copy.values))


class HeldSlots:
    """The values in the slots that move, and the arguments that are no tensors, as forward started."""

    def __init__(self, known: Known, reading: Reading, others: Iterable[Any], *, is_watched: bool) -> None:
        """Hold the slots that move according to ``reading``, and ``others``, which are among the arguments.

        ``is_watched``: copy whatever forward might change, and not only what it was seen to change.
        """
        self._known, self._is_watched = known, is_watched
        self._before = reading.before
        """Every slot of the owners in which something moves, until forward has ended."""
        self._others = [*others]
        self.moves: dict[int, Slots] = {}
        """Place of an owner -> its slots that move, without objects, and with :class:`HeldTensor` for tensors."""
        self.moving: set[Slot] = set()
        """The slots of objects that move."""
        self._objects: Frozen | None = None
        """A copy of these objects, by place of the owner and name, and of the arguments; ``None`` without any."""
        self._contents: dict[Slot, Frozen] = {}
        """Slot -> a copy of its object alone, if forward's effect on it is to be found out."""
        self.names: dict[int, list[Any]] = {}
        """Place of an owner in which something moves -> the names of all its slots, in their order."""
        self.tensors: dict[int, HeldTensor] = {}
        """``id`` of a tensor -> what is held of it."""
        self.originals: dict[int, Tensor] = {}
        """``id`` of a tensor -> the tensor itself, until forward has ended."""
        self.lost = ""
        """Why forward cannot be undone, a sentence without its subject; empty if it can."""
        self.is_surprised = False
        """Whether forward wrote to a tensor that was not copied, since no earlier call had written to it."""
        self._take(reading.moves)

    def _take(self, readings: Mapping[int, Slots]) -> None:
        objects: dict[int, Slots] = {}
        copied = set[int]()
        for place, slots in readings.items():
            moves = self.moves[place] = dict[str, Any]()
            for name, value in slots.items():
                if is_object(name, value) and not self._known.is_part(place):
                    objects.setdefault(place, {})[name] = value
                    self.moving.add((place, name))
                    continue
                held = moves[name] = self._hold(value) if isinstance(value, Tensor) else value
                if isinstance(held, HeldTensor) and self._may_write((place, name), value):
                    copied.add(held.number)
        if objects or self._others:
            self._objects = freeze((objects, self._others), self._hold)
            if stuck := self._objects.stuck:
                self.lost = f"holds {stuck}, and may move it on"
            copied |= self._look_into(objects)
        for number, copy in copies_of([self.originals[number] for number in copied]).items():
            self.tensors[number].copy = copy

    def _hold(self, tensor: Tensor) -> Any:
        """Return what is held in place of ``tensor`` until forward runs again: itself if it is no state."""
        if not is_plain_state(tensor):
            return tensor
        number = id(tensor)
        if number not in self.tensors:
            self.tensors[number], self.originals[number] = HeldTensor.of(tensor), tensor
        return self.tensors[number]

    def _may_write(self, slot: Slot, tensor: Tensor) -> bool:
        """Tell whether forward may write to ``tensor``, which stands in ``slot``."""
        if not self._is_watched:
            return slot in self._known.written
        return 0 <= slot[0] < self._known.own or tensor.nbytes <= _LARGEST_COPY

    def _look_into(self, objects: Mapping[int, Slots]) -> set[int]:
        """Note what ``objects`` and the arguments hold, and return the ``id`` of each tensor that may be written."""
        found = set[int]()
        named = {(place, name): value for place, slots in objects.items() for name, value in slots.items()}
        for slot, value in {**named, _OTHERS: self._others}.items():
            if self._is_watched or slot in self._known.written:
                self._contents[slot] = freeze(value, self._hold)
                inner = _numbers_in(self._contents[slot])
                found |= {number for number in inner if self._may_write(slot, self.originals[number])}
        return found

    def lend(self, lent: Iterable[Tensor]) -> None:
        """Hold the tensors ``lent`` no longer: somebody else gives them back."""
        for place, tensor in enumerate(lent):
            if (held := self.tensors.get(id(tensor))) is not None:
                held.alias, held.lent = None, place

    # ------------------------------------------------------------------------------------------- after forward

    def written(self) -> set[int]:
        """Return the ``id`` of each tensor that forward has written to."""
        found = set[int]()
        for number, held in self.tensors.items():
            is_copied = held.copy is not None
            if (is_copied and not self._is_watched) or held.is_written(self.originals[number]):
                found.add(number)
                if not is_copied and self._is_watched:
                    shape = tuple(self.originals[number].shape)
                    self.lost = f"writes in place to a tensor of shape {shape} in an object"
                self.is_surprised |= not is_copied and not self._is_watched
        return found

    def changes(self, place: int, before: Slots, written: set[int]) -> set[Any]:
        """Return the names in the owner at ``place`` whose object is not the one in ``before``, or was changed."""
        before, after = self._before.get(place, before), self._known.owners[place].read()
        names = changed(before, after)
        if written:
            found = {name for name, value in before.items() if any(id(leaf) in written for leaf in leaves_in([value]))}
            self._known.written |= {(place, name) for name in found}
            names |= found
        return names | {slot[1] for slot in self._contents if slot[0] == place and self._changes(slot, after, written)}

    def _changes(self, slot: Slot, after: Slots, written: set[int]) -> bool:
        """Tell whether forward has changed the object that stood in ``slot``, or written to a tensor in it."""
        contents, is_changed = self._contents[slot], False
        if not written.isdisjoint(_numbers_in(contents)):
            self._known.written.add(slot)
            is_changed = True
        if self._is_watched and slot[1] in after:
            is_changed |= contents.data != data_of(after[slot[1]])
        return is_changed

    def let_go(self, written: set[int]) -> list[tuple[Tensor, HeldTensor]]:
        """Drop what a recomputation does not need; return the tensors that are held, and what is held of each.

        ``written``: the result of :meth:`written`.
        """
        if _OTHERS in self._contents:
            self._changes(_OTHERS, {None: self._others}, written)
        moves = self._known.moves
        if self._is_watched:
            filtered = {p: {n: v for n, v in slots.items() if n in moves[p]} for p, slots in self.moves.items()}
            self.moves = {place: slots for place, slots in filtered.items() if slots}
            self.moving = {slot for slot in self.moving if slot[1] in moves[slot[0]]}
        if not self.moving and not self._others:
            self._objects = None
        self.names = {place: [*self._before[place]] for place in {*self.moves, *(place for place, _ in self.moving)}}
        for number, held in self.tensors.items():
            if held.copy is not None and number in written:
                held.copy.needs_gradient = held.needs_gradient
            else:
                held.copy = None
                held.version = version_of(self.originals[number])
        kept = [held for slots in self.moves.values() for held in slots.values() if isinstance(held, HeldTensor)]
        inner = () if self._objects is None else _numbers_in(self._objects)
        self.tensors = {held.number: held for held in (*kept, *(self.tensors[number] for number in inner))}
        found = [(self.originals[number], held) for number, held in self.tensors.items()]
        self._before = {}
        self._contents.clear()
        self.originals.clear()
        self._others.clear()  # they may come to hold the graph that holds this
        return found

    # ---------------------------------------------------------------------------------------------- afterwards

    def thaw(self, live: Callable[[Any], Any]) -> tuple[dict[int, Slots], list[Any]]:
        """Return the values for the slots that move, by the place of the owner, and copies of the arguments.

        ``live`` gives the tensor that takes the place of a :class:`HeldTensor`.
        """
        objects, others = self._objects.thaw(live) if self._objects is not None else ({}, [])
        slots = {place: {name: live(held) for name, held in moves.items()} for place, moves in self.moves.items()}
        for place, named in objects.items():
            moving = {name: value for name, value in named.items() if (place, name) in self.moving}
            slots[place] = slots.get(place, {}) | moving
        return slots, others

    def put_back(self, slot: Slot, there: Any, value: Any) -> Any:
        """Return the value that ``slot`` is to have for good: ``there`` if it equals ``value``, or can be made to."""
        if isinstance(there, Tensor):
            held = self.tensors.get(id(there))
            if held is None or self.originals.get(held.number) is not there or there.grad_fn is not None:
                return value
            # A vector of the module's own is exchanged: whoever records a step wants it held by nobody else.
            is_own = 0 <= slot[0] < self._known.own
            is_changed = held.is_written(there) if is_own else not held.is_equal(there)
            return value if is_changed else there
        if type(there) is not type(value) or not is_object(slot[1], value):
            return value
        if slot in self._contents and self._contents[slot].data == data_of(there):
            return there
        return there if put_right(there, value) else value


def _numbers_in(frozen: Frozen) -> set[int]:
    return {held.number for held in frozen.shared.values() if isinstance(held, HeldTensor)}


def put_right(there: Any, value: Any) -> bool:
    """Give the object ``there``, to which others may refer, the contents of ``value``; tell whether that worked.

    An object may keep more than its attributes show, and ``__setstate__`` need not put it back: a generator of NumPy's
    has no state there at all, and a cycle leaves its iterator where it is.  So the outcome is compared.
    """
    if there is value:  # it is not copied
        return True
    kind: Any = type(there)
    reduced: Any = value.__reduce__() if kind.__reduce__ is not object.__reduce__ else ()
    if isinstance(there, dict):
        there.clear()
        dict.update(there, value)  # a Counter's own would count
    elif isinstance(there, list | deque | set):
        there.clear()
        (there.update if isinstance(there, set) else there.extend)(value)
    elif isinstance(reduced, tuple) and len(reduced) > 2 and hasattr(there, "__setstate__"):
        there.__setstate__(reduced[2])
    elif hasattr(there, "__dict__"):
        vars(there).clear()
        vars(there).update(vars(value))
    return data_of(there) == data_of(value)

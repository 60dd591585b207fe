"""Put a module's state back for a recomputation: buffers, attributes, and the objects that they refer to.

A recomputed forward must start from the state that the first one started from, and leave no trace: batch statistics,
neuron membranes and counters advance once a step, however often forward runs.  ``learned.py`` finds out which state
forward changes, and ``held.py`` holds that; this file takes the state before forward, and restores it in backward.

One segment, two time steps; each assigns its membrane ``v``, a matrix, again (``self.v = 0.5 * self.v + x``) and counts
up ``count`` in place (``self.count.add_(1)``)::

    forward 1   StartingState(module)   v = A, count = 0    taken: A by reference, and a copy of count
                ... runs ...            v = B, count = 1
                end_forward()
    forward 2   StartingState(module)   v = B, count = 1
                ... runs ...            v = C, count = 2
                end_forward()
    backward 2  with replay():          v = B, count = 1    forward runs again, up to C and 2
                afterwards              v = C, count = 2    as if it had not
    backward 1  with replay():          v = A, count = 0
                afterwards              v = C, count = 2

Tensors are held without the graph that made them.  Otherwise each call would keep alive the graph of the call before
it, and so of all earlier calls, and memory would grow with every call.

A segment inside another does not hold its ``v`` from forward to backward, since the outer segment recomputes it.  It
*releases* its matrices: :meth:`StartingState.release_tensors` returns them, the outer segment treats them as it treats
all tensors that autograd saves in it, and :meth:`StartingState.replay` takes the recomputed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from memopt_cli.runtime.compressor import internal_tensors
from memopt_cli.runtime.copies import Copy, restored_tensors, version_of
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.held import HeldSlots, HeldTensor, restore_contents
from memopt_cli.runtime.learned import KnownState, Reading, SegmentKnowledge, Slot, is_object
from memopt_cli.runtime.module_state import Complaint, find_matrices, label_of, restored
from memopt_cli.runtime.owners import Slots, is_same
from memopt_cli.runtime.parameters import Parameters
from memopt_cli.runtime.settings import Settings

# Complaints about a forward that cannot be recomputed.
_HOOKS: Final = "adds or removes hooks of its modules"
_DROPOUT: Final = "has a recurrent layer with dropout, for which cuDNN has its own random generator"
_SCRIPTED_RECURRENT: Final = frozenset({"RNN", "LSTM", "GRU"})
"""Original class names of the TorchScript modules that are made of recurrent layers."""


class StartingState:
    """The state from which a forward started, kept as long as its recomputation may need it."""

    __slots__ = (
        *("__weakref__", "_generators", "_received", "_held", "_irreversible", "_known", "_learned", "_module"),
        *("_parameters", "_reads", "_settings", "_stable", "has_new_changes", "is_watched"),
    )

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor] = (),
        others: Sequence[Any] = (),
        learned: SegmentKnowledge | None = None,
        *,
        watches: bool = True,
    ) -> None:
        """Take the state of ``module`` before its forward.

        ``inputs``, ``others``: the tensors among the arguments of forward, and the other objects.  ``learned``: the
        knowledge from earlier calls.  ``watches``: compare all state that forward might change, despite that knowledge.
        """
        self._module = module
        self._learned = learned = SegmentKnowledge() if learned is None else learned
        known = learned.known
        reading = None if watches or known is None else known.read(others, learned.exchanged)
        self.is_watched = reading is None
        if known is None or reading is None:
            known = KnownState([*module.modules()], others)
            reading = known.read_all()
        self._known = known
        self._stable = reading.stable
        """For each owner, the slots that forward does not change, and their values."""
        self._held: HeldSlots | None = None
        """The values of the slots that change; ``None`` if no slot changes."""
        if reading.changing or others:
            with internal_tensors():
                self._held = HeldSlots(known, reading, others, is_watched=self.is_watched)
        self._reads = [(t, version_of(t)) for t in known.tensors] if known.tensors else []
        """The tensors in slots that forward does not change, but may read, and their versions."""
        self._settings = Settings()
        self._parameters = Parameters(known.parameters, learned.parameters, is_watched=self.is_watched)
        learned.parameters = None if self.is_watched else self._parameters
        tensors = (*inputs, *self._parameters.tensors, *(() if self._held is None else self._held.originals.values()))
        # A set of devices takes several times as long.
        devices = () if all(map(_is_on_cpu, tensors)) else {t.device for t in tensors}
        self._generators = Generators(devices, outside=self.is_watched or learned.uses_random_outside)
        self._received: dict[int, Copy] | None = None
        """``id`` of a tensor -> its values before a later call wrote to it; ``None`` if no call did."""
        self._irreversible: Complaint = ""
        """Reason why forward cannot be undone."""
        self.has_new_changes = False
        """Whether forward changed what no earlier call had changed, so that nothing was held to restore it."""

    def release_tensors(self) -> list[Tensor]:
        """Return the matrices of the state, and hold them no longer: the caller passes them to :meth:`replay`."""
        state_tensors = find_matrices(self._module)
        if self._held is not None:
            self._held.release(state_tensors)
        return state_tensors

    # ------------------------------------------------------------------------------------------- after forward

    def end_forward(self, *, has_failed: bool = False) -> None:
        """Learn, once forward has ended, the changes that it made; drop all that a recomputation does not need.

        ``has_failed``: forward raised an error, so that the next call may do more than this one did.
        """
        known = self._known
        written = set[int]() if self._held is None else self._held.written()
        if not self.is_watched and self._reads:
            newly_written = {id(tensor) for tensor, version in self._reads if version_of(tensor) != version}
            self.has_new_changes = bool(newly_written)
            written |= newly_written
        if self._held is not None:
            self.has_new_changes |= self._held.has_new_changes
        # A call that learns something replaces the list ``known.stable``: if it is the same list, no other call has.
        may_be_stable = not self.is_watched and not self.has_new_changes and known.stable is self._stable
        is_stable = may_be_stable and known.is_stable()
        if self._held is not None or not is_stable:
            # If nothing new changed, the tensors that are copied in every call are already known to be written.
            self._learn_changes(known.changing_owners if is_stable else known.indices, set() if is_stable else written)
            self._drop_unneeded(written)
        if self._reads:
            self._register_as_reader(tensor for tensor, _ in self._reads)
        self.has_new_changes |= any(known.empty)
        if any(known.without_hooks):
            self._irreversible = _HOOKS
        self._parameters.end_forward()
        self._generators.end_forward()
        if self.is_watched:
            on_cuda = any(device.type == "cuda" for device in self._generators.devices)
            self._irreversible = _DROPOUT if on_cuda and has_recurrent_dropout(self._module) else self._irreversible
            if not has_failed:
                self._learned.known = known
            self._learned.uses_random_outside |= self._generators.moved_outside or known.may_use_random

    def _learn_changes(self, indices: Sequence[int], written: set[int]) -> None:
        """Find out what forward has changed in the owners at ``indices``, and note which slots change for the first
        time.

        ``written``: the ``id`` of each tensor that forward has written to.
        """
        known, newly_changing = self._known, dict[int, set[Any]]()
        held_slots = self._held = self._held or HeldSlots(known, Reading(self._stable, {}, {}), (), is_watched=False)
        for index in indices:
            names = held_slots.changes(index, self._stable[index], written)
            if names and index in known.hooked:
                self._irreversible = _HOOKS
            if new := names - known.changing[index]:
                newly_changing[index] = new
        if newly_changing:
            known.add_changing(newly_changing)
        self._irreversible = held_slots.irreversible or self._irreversible
        if self.is_watched:
            known.drop_needless_owners()
            self._stable = known.stable
            self._reads = [(t, version_of(t)) for t in known.tensors]
        else:
            # A plain value is restored by reference.  But an object that changes for the first time in an unwatched
            # call was changed in place, and nobody has copied it before.
            values = ((name, self._stable[index].get(name)) for index, new in newly_changing.items() for name in new)
            self.has_new_changes |= any(is_object(name, value) for name, value in values)

    def _drop_unneeded(self, written: set[int]) -> None:
        """Hold only what a recomputation needs; give copies of written tensors to other calls that read them."""
        assert self._held is not None
        records = self._held.drop_unneeded(written)
        self._register_as_reader(tensor for tensor, record in records if record.copy is None)
        for tensor, record in records:
            if record.copy is not None and tensor.dim() > 1:  # each call copies vectors itself
                _hand_over(tensor, record)

    def _register_as_reader(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self.is_watched or tensor in _ever_written:
                _readers.setdefault(tensor, WeakSet()).add(self)

    def receive(self, number: int, written: HeldTensor) -> None:
        """Take the copy of the tensor with the ``id`` ``number`` that another call made before its forward wrote to it.

        A copy of a different version is ignored: it has values that this call's forward did not see.
        """
        versions = [version for tensor, version in self._reads if id(tensor) == number]
        if self._held is not None and (own := self._held.tensors.get(number)) is not None:
            versions.append(own.version)
        if written.version in versions and written.copy is not None:
            self._received = {**(self._received or {}), number: written.copy}

    def irreversible_effect(self) -> Complaint:
        """Return a change by forward that nothing can undo; empty if there is none."""
        if self._parameters.written:
            return f"writes to its parameter {self._parameters.written} in place"
        if self._parameters.has_gradients:
            return "calls backward in its forward, which adds to the gradients of its parameters"
        return self._irreversible

    # ---------------------------------------------------------------------------------------------- afterwards

    @contextmanager
    def replay(self, state_tensors: Sequence[Tensor] = ()) -> Iterator[list[Any]]:
        """Put the module into the starting state in the ``with`` block, and yield copies of ``others``.

        ``state_tensors``: the tensors that :meth:`release_tensors` returned, or equal ones.  Raises
        :class:`RuntimeError` if a parameter or a tensor of the state has changed in a way that cannot be undone.
        """
        self._parameters.check()
        self._check_reads()
        known, generators = self._known, self._generators.current()
        # If nothing has changed since forward where nothing was seen to change, only the other owners are restored.
        is_stable = known.stable is self._stable and not self._received and known.is_stable()
        current_slots = known.read_owners(known.changing_owners if is_stable else known.indices)
        # Dictionaries that were empty when forward started, and are not any more: for example, a hook was added since.
        filled: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        if any(known.without_hooks) or any(known.empty):
            filled = [(table, dict(table)) for table in (*known.without_hooks, *known.empty) if table]
        with self._settings.in_force(), self._parameters.in_place():
            try:
                for table, _ in filled:
                    table.clear()
                others = self._write_state(state_tensors, current_slots)
                self._generators.restore(generators)
                yield others
            finally:
                if is_stable and not known.is_stable():  # this time forward has changed more than before: restore all
                    current_slots = {index: self._stable[index] for index in known.indices} | current_slots
                for index, slots in current_slots.items():
                    if not known.owners[index].holds(slots):
                        known.owners[index].write(slots)
                for table, entries in filled:
                    table.update(entries)
                generators.restore()

    def restore(self, state_tensors: Sequence[Tensor] = (), others: Sequence[Any] = ()) -> None:
        """Put the module, the generators and ``others`` into the starting state to run forward again; they stay in it.

        ``others``: the arguments that are not tensors, which belong to the caller.  Raises :class:`RuntimeError` if one
        of them cannot be restored.
        """
        self._parameters.put()
        current_slots = self._known.read_owners(self._known.indices)
        copied = self._write_state(state_tensors, current_slots, None if self._held is None else self._held.put_back)
        if self._keep_added_hooks(current_slots) or any(self._known.without_hooks):
            self._keep_flags(current_slots)
        for argument, value in zip(others, copied, strict=False):
            if not restore_contents(argument, value):
                raise RuntimeError(
                    f"{label_of(self._module)} has advanced its argument, a {type(argument).__name__}, which cannot "
                    "be restored for a recomputation; remove the module from the plan"
                )
        self._generators.restore()

    def _keep_added_hooks(self, before: Mapping[int, Slots]) -> bool:
        """Add the hooks in ``before`` that the starting state did not have; return whether there are any."""
        added = False
        for index in self._known.hooked:
            wanted, current = self._stable[index], before.get(index, {})
            if current.keys() - wanted.keys():
                added = True
                ordered_hooks = {number: wanted.get(number, hook) for number, hook in current.items()}
                self._known.owners[index].write(ordered_hooks | wanted)
        return added

    def _keep_flags(self, before: Mapping[int, Slots]) -> None:
        """Keep the flags in ``before`` that note that a forward has added hooks, since the hooks stay as well.

        Without its flag, the next forward would add the hooks again, like models of transformers that collect hidden
        states.
        """
        for index, slots in before.items():
            owner = self._known.owners[index]
            current_slots = owner.read()
            flags = {name: value for name, value in slots.items() if value is True and name not in current_slots}
            if flags:
                owner.write(current_slots | flags)

    def _write_state(
        self,
        state_tensors: Sequence[Tensor],
        current_slots: Mapping[int, Slots],
        value_for: Callable[[Slot, Any, Any], Any] | None = None,
    ) -> list[Any]:
        """Write the starting state to the slots, whose values are ``current_slots``, and return copies of ``others``.

        ``value_for``: returns the new value of a slot, given its current value and a copy of the value to restore;
        without it, the new value is the copy.
        """
        held_slots, received = self._held, self._received or {}
        if held_slots is None:
            tensors = restored_tensors(received) if received else {}
            restored_slots = dict[int, Slots]()
            others = list[Any]()
        else:
            copies = {n: record.copy for n, record in held_slots.tensors.items() if record.copy is not None}
            tensors = restored_tensors(copies | received if received else copies)
            restored_slots, others = held_slots.thaw(partial(_tensor_for, tensors, state_tensors))
        for index, current in current_slots.items():
            wanted = self._stable[index]
            if received:
                wanted = {name: restored(value, tensors) for name, value in wanted.items()}
            if index in restored_slots:
                values = restored_slots[index]
                if value_for is not None:
                    values = {n: value_for((index, n), current.get(n), value) for n, value in values.items()}
                wanted = wanted | values
                # The order counts: hooks run in it, and forward may iterate over a dictionary.
                order = wanted if held_slots is None else held_slots.names.get(index, wanted)
                wanted = {name: wanted[name] for name in order}
            if not is_same(wanted, current):
                self._known.owners[index].write(wanted)
        return others

    def _check_reads(self) -> None:
        """Raise :class:`RuntimeError` if a tensor that forward read has been written since."""
        reads = [(tensor, version, id(tensor)) for tensor, version in self._reads]
        records = () if self._held is None else self._held.tensors.values()
        reads += ((h.alias, h.version, h.number) for h in records if h.copy is None and h.alias is not None)
        for tensor, version, number in reads:
            if version_of(tensor) != version and number not in (self._received or {}):
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that {label_of(self._module)} reads was modified in "
                    f"place between forward and backward (version {version} -> {version_of(tensor)}), so recomputing "
                    "with it would be wrong. Call backward before the in-place change, or assign a new tensor."
                )


_is_on_cpu = attrgetter("is_cpu")
_readers: MutableMapping[Tensor, WeakSet[StartingState]] = WeakTensorKeyDictionary()
"""Tensor -> the calls that hold it without a copy; they get the copy of the next call that writes to it."""
_ever_written: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""Tensors to which a forward has written, as keys.  Calls that are not watched register as readers of only these."""


def has_recurrent_dropout(module: nn.Module) -> bool:
    """Return whether cuDNN, on a GPU, would apply dropout between the layers of a recurrent module in ``module``."""

    def has_dropout(part: Any) -> bool:
        if not isinstance(part, nn.RNNBase) and getattr(part, "original_name", "") not in _SCRIPTED_RECURRENT:
            return False
        return part.training and part.num_layers > 1 and bool(part.dropout)

    return torch.backends.cudnn.enabled and any(map(has_dropout, module.modules()))


def _hand_over(tensor: Tensor, written: HeldTensor) -> None:
    """Give the copy in ``written``, of ``tensor`` before forward wrote to it, to the calls that hold it without one."""
    _ever_written[tensor] = True
    for reader in _readers.pop(tensor, ()):
        reader.receive(id(tensor), written)


def _tensor_for(tensors: dict[int, Tensor], state_tensors: Sequence[Tensor], held: Any) -> Any:
    """Return the tensor for ``held``, which is in ``tensors`` or added to it; ``held`` itself if it holds no tensor."""
    if not isinstance(held, HeldTensor):
        return held
    if held.number not in tensors:
        source = held.alias if held.released_index is None else state_tensors[held.released_index]
        assert source is not None, "a tensor without an alias was released"
        tensors[held.number] = source.detach().requires_grad_(held.needs_gradient)
    return tensors[held.number]

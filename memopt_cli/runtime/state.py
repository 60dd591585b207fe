"""State of a module besides its parameters: buffers, attributes, and objects that they refer to.

A recomputed forward must start from the state that the first one started from, and leave no trace: batch statistics,
neuron membranes and counters advance once a step, however often forward runs.

One segment, two time steps; each assigns its membrane ``v``, a matrix, anew (``self.v = 0.5 * self.v + x``) and counts
up ``count`` in place (``self.count.add_(1)``)::

    forward 1   StartingState(module)   v = A, count = 0    taken: A by reference, and a copy of count
                ... runs ...            v = B, count = 1
                settle()
    forward 2   StartingState(module)   v = B, count = 1
                ... runs ...            v = C, count = 2
                settle()
    backward 2  with replay():          v = B, count = 1    forward runs again, up to C and 2
                afterwards              v = C, count = 2    as if it had not
    backward 1  with replay():          v = A, count = 0
                afterwards              v = C, count = 2

Tensors are held without the graph that made them.  Otherwise each call would keep alive the graph of the call before
it, that one the graph of the call before that, and memory would grow with every call.

A segment inside another does not hold its ``v`` from forward to backward, since the outer one makes it again.  It
*lends* its matrices: :meth:`StartingState.lend` hands them over, and :meth:`StartingState.replay` is given them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from memopt_cli.runtime.compressor import beside_the_model
from memopt_cli.runtime.copies import Copy, remade, version_of
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.held import HeldSlots, HeldTensor, put_right
from memopt_cli.runtime.learned import Known, Learned, Reading, Slot, is_object
from memopt_cli.runtime.module_state import matrices_of, name_of, restored
from memopt_cli.runtime.owners import Slots, is_same
from memopt_cli.runtime.parameters import Parameters
from memopt_cli.runtime.settings import Settings

_HOOKS: Final = "adds or removes hooks of modules within it"
_DROPOUT: Final = "has a recurrent layer with dropout, which cuDNN draws from a generator of its own"
_SCRIPTED_RECURRENT: Final = frozenset({"RNN", "LSTM", "GRU"})
"""Original class names of the TorchScript modules that are made of recurrent layers."""


class StartingState:
    """The state from which a forward started, kept as long as its recomputation may need it."""

    __slots__ = (
        *("__weakref__", "_generators", "_handed", "_held", "_known", "_learned", "_lost", "_module", "_parameters"),
        *("_reads", "_settings", "_stays", "is_surprised", "is_watched"),
    )

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor] = (),
        others: Sequence[Any] = (),
        learned: Learned | None = None,
        *,
        watches: bool = True,
    ) -> None:
        """Note the state of ``module``.

        ``inputs``, ``others``: the tensors among the arguments of forward, and the other objects.  ``learned``: the
        knowledge from earlier calls; ``watches``: look at everything that forward might change all the same.
        """
        self._module = module
        self._learned = learned = Learned() if learned is None else learned
        known = learned.known
        reading = None if watches or known is None else known.read(others, learned.exchanged)
        self.is_watched = reading is None
        if known is None or reading is None:
            known = Known([*module.modules()], others)
            reading = known.read_all()
        self._known = known
        self._stays = reading.stays
        """The slots of each owner that forward leaves alone."""
        self._held: HeldSlots | None = None
        """The slots that move; ``None`` if none do."""
        if reading.moves or others:
            with beside_the_model():
                self._held = HeldSlots(known, reading, others, is_watched=self.is_watched)
        self._reads = [(t, version_of(t)) for t in known.tensors] if known.tensors else []
        """The tensors in slots that forward leaves alone, and their versions."""
        self._settings = Settings()
        self._parameters = Parameters(known.parameters, learned.parameters, is_watched=self.is_watched)
        learned.parameters = None if self.is_watched else self._parameters
        tensors = () if self._held is None else self._held.originals.values()
        devices = {t.device for t in (*inputs, *self._parameters.tensors, *tensors)}
        self._generators = Generators(devices, outside=self.is_watched or learned.draws_outside)
        self._handed: dict[int, Copy] | None = None
        """``id`` of a tensor -> its values before a later call wrote to it; ``None`` if none did."""
        self._lost = ""
        self.is_surprised = False
        """Whether forward did what no earlier call had shown, so that this one cannot run again."""

    def lend(self) -> list[Tensor]:
        """Return the matrices of the state, and hold them no longer: :meth:`replay` is to be given them."""
        lent = matrices_of(self._module)
        if self._held is not None:
            self._held.lend(lent)
        return lent

    # ------------------------------------------------------------------------------------------- after forward

    def settle(self, *, has_failed: bool = False) -> None:
        """Learn what forward, which has ended, has changed, and hold no more than a recomputation needs.

        ``has_failed``: forward raised an error, so that the next call may do more than this one did.
        """
        known, written = self._known, set[int]() if self._held is None else self._held.written()
        if not self.is_watched and self._reads:
            late = {id(tensor) for tensor, version in self._reads if version_of(tensor) != version}
            self.is_surprised = bool(late)
            written |= late
        if self._held is not None:
            self.is_surprised |= self._held.is_surprised
        is_known = not self.is_watched and not self.is_surprised and known.stays is self._stays
        is_still = is_known and known.is_still()
        if self._held is not None or not is_still:
            # If nothing new moved, the tensors that are copied in every call are already known to be written.
            self._learn(known.movers if is_still else known.places, set() if is_still else written)
            self._let_go(written)
        self._register_as_reader(tensor for tensor, _ in self._reads)
        self.is_surprised |= any(known.empty)
        if any(known.without_hooks):
            self._lost = _HOOKS
        self._parameters.settle()
        self._generators.settle()
        if self.is_watched:
            on_cuda = any(device.type == "cuda" for device in self._generators.devices)
            self._lost = _DROPOUT if on_cuda and has_recurrent_dropout(self._module) else self._lost
            if not has_failed:
                self._learned.known = known
            self._learned.draws_outside |= self._generators.moved_outside or known.may_draw

    def _learn(self, places: Sequence[int], written: set[int]) -> None:
        """Find out what forward has changed in the owners at ``places``."""
        known, found = self._known, dict[int, set[Any]]()
        held = self._held = self._held or HeldSlots(known, Reading(self._stays, {}, {}), (), is_watched=False)
        for place in places:
            names = held.changes(place, self._stays[place], written)
            if names and place in known.hooked:
                self._lost = _HOOKS
            if new := names - known.moves[place]:
                found[place] = new
        if found:
            known.note(found)
        self._lost = held.lost or self._lost
        if self.is_watched:
            known.tidy()
            self._stays = known.stays
            self._reads = [(t, version_of(t)) for t in known.tensors]
        else:  # what an object was is not known where nobody knew that it would move
            others = ((name, self._stays[place].get(name)) for place, names in found.items() for name in names)
            self.is_surprised |= any(is_object(name, value) for name, value in others)

    def _let_go(self, written: set[int]) -> None:
        """Hold only what a recomputation needs; exchange copies of written tensors with other calls that need them."""
        assert self._held is not None
        held = self._held.let_go(written)
        self._register_as_reader(tensor for tensor, one in held if one.copy is None)
        for tensor, one in held:
            if one.copy is not None and tensor.dim() > 1:  # vectors are copied by everybody
                _hand_over(tensor, one)

    def _register_as_reader(self, tensors: Iterable[Tensor]) -> None:
        """Register this call as a reader of ``tensors``, of which it holds no copy."""
        for tensor in tensors:
            if self.is_watched or tensor in _ever_written:
                _readers.setdefault(tensor, WeakSet()).add(self)

    def receive(self, number: int, written: HeldTensor) -> None:
        """Take over the values that the tensor with this ``id`` had before the forward of another call wrote to it."""
        versions = [version for tensor, version in self._reads if id(tensor) == number]
        if self._held is not None and (own := self._held.tensors.get(number)) is not None:
            versions.append(own.version)
        if written.version in versions and written.copy is not None:
            self._handed = {**(self._handed or {}), number: written.copy}

    def lost(self) -> str:
        """Return what forward did that nothing can undo, a sentence without its subject; empty if nothing."""
        if self._parameters.written:
            return f"writes to its parameter {self._parameters.written} in place"
        if self._parameters.has_gradients:
            return "calls backward in its forward, which adds to the gradients of its parameters"
        return self._lost

    # ---------------------------------------------------------------------------------------------- afterwards

    @contextmanager
    def replay(self, lent: Sequence[Tensor] = ()) -> Iterator[list[Any]]:
        """Put the module into the starting state for the time of the block, and yield copies of ``others``.

        ``lent``: the tensors that :meth:`lend` returned, or equal ones.  Raises :class:`RuntimeError` if a parameter or
        a tensor of the state has changed in a way that cannot be undone.
        """
        self._parameters.check()
        self._check()
        known, generators = self._known, self._generators.now()
        is_still = known.stays is self._stays and not self._handed and known.is_still()
        present = {place: known.owners[place].read() for place in (known.movers if is_still else known.places)}
        hooks = [(table, dict(table)) for table in (*known.without_hooks, *known.empty) if table]
        with self._settings.in_force(), self._parameters.in_place():
            try:
                for table, _ in hooks:
                    table.clear()
                others = self._put(lent, present, lambda slot, there, value: value)
                self._generators.restore(generators)
                yield others
            finally:
                if is_still and not known.is_still():
                    present = {place: self._stays[place] for place in known.places} | present
                for place, slots in present.items():
                    if not known.owners[place].holds(slots):
                        known.owners[place].write(slots)
                for table, there in hooks:
                    table.update(there)
                generators.restore()

    def enter(self, lent: Sequence[Tensor] = (), others: Sequence[Any] = ()) -> None:
        """Put the module, the generators and ``others`` into the starting state, for good.

        Raises :class:`RuntimeError` where one of ``others``, which are the caller's, cannot be put back.
        """
        self._parameters.put()
        present = {place: self._known.owners[place].read() for place in self._known.places}
        copied = self._put(lent, present, self._held.put_back if self._held is not None else lambda *slot: slot[-1])
        for there, value in zip(others, copied, strict=False):
            if not put_right(there, value):
                raise RuntimeError(
                    f"{name_of(self._module)} has advanced a {type(there).__name__} that it is given, which cannot be "
                    "put back for a recomputation; take it out of the plan"
                )
        self._generators.restore()

    def _put(
        self, lent: Sequence[Tensor], present: Mapping[int, Slots], made_of: Callable[[Slot, Any, Any], Any]
    ) -> list[Any]:
        """Write the starting state to the slots, whose values are ``present``, and return copies of ``others``.

        ``made_of``: gives the new value of a slot, from its present value and a copy of the one to restore.
        """
        held, handed = self._held, self._handed or {}
        if held is None:
            made, moving, others = remade(handed), dict[int, Slots](), list[Any]()
        else:
            made = remade({n: one.copy for n, one in held.tensors.items() if one.copy is not None} | handed)
            moving, others = held.thaw(lambda one: _live(one, made, lent))
        for place, there in present.items():
            wanted = self._stays[place]
            if handed:
                wanted = {name: restored(value, made) for name, value in wanted.items()}
            if place in moving:
                wanted = wanted | {n: made_of((place, n), there.get(n), v) for n, v in moving[place].items()}
                order = wanted if held is None else held.names.get(place, wanted)
                wanted = {name: wanted[name] for name in order}
            if not is_same(wanted, there):
                self._known.owners[place].write(wanted)
        return others

    def _check(self) -> None:
        """Raise :class:`RuntimeError` if a tensor that forward read has been written since."""
        reads = [(tensor, version, id(tensor)) for tensor, version in self._reads]
        held = () if self._held is None else self._held.tensors.values()
        reads += ((h.alias, h.version, h.number) for h in held if h.copy is None and h.alias is not None)
        for tensor, version, number in reads:
            if version_of(tensor) != version and number not in (self._handed or {}):
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that {name_of(self._module)} reads was modified in "
                    f"place between forward and backward (version {version} -> {version_of(tensor)}); recomputing with "
                    "it would be wrong. Call backward before, or assign a new tensor."
                )


_readers: MutableMapping[Tensor, WeakSet[StartingState]] = WeakTensorKeyDictionary()
"""Tensor -> the calls that hold it without a copy, and are handed one if another call writes to it."""
_ever_written: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""Tensors to which a forward has written.  Calls that are not watched register as readers of these alone."""


def has_recurrent_dropout(module: nn.Module) -> bool:
    """Tell whether cuDNN would draw dropout between the layers of a recurrent module in ``module``, on a GPU."""

    def draws(part: Any) -> bool:
        if not isinstance(part, nn.RNNBase) and getattr(part, "original_name", "") not in _SCRIPTED_RECURRENT:
            return False
        return part.training and part.num_layers > 1 and bool(part.dropout)

    return torch.backends.cudnn.enabled and any(map(draws, module.modules()))


def _hand_over(tensor: Tensor, written: HeldTensor) -> None:
    """Give the copy of ``tensor``, to which forward wrote, to the calls that hold it without one."""
    _ever_written[tensor] = True
    for reader in _readers.pop(tensor, ()):
        reader.receive(id(tensor), written)


def _live(held: Any, made: dict[int, Tensor], lent: Sequence[Tensor]) -> Any:
    """Return the tensor that takes the place of ``held``: one of ``made``, which it is added to."""
    if not isinstance(held, HeldTensor):
        return held
    if held.number not in made:
        source = held.alias if held.lent is None else lent[held.lent]
        assert source is not None, "one that is not held was lent"
        made[held.number] = source.detach().requires_grad_(held.needs_gradient)
    return made[held.number]

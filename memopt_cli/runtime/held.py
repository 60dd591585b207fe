"""What a segment's forward saves, held until it is known that the forward can run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.noise import noise_since
from memopt_cli.runtime.objects import version_of
from memopt_cli.runtime.private_torch import alias, hooks_on_saving, is_fake, next_node, not_compiled, number_of
from memopt_cli.runtime.samples import sample


class Held:
    """The tensors that one forward saves, beside what the checkpoint around it keeps of each.

    They are all alive at once again when the forward is recomputed, so holding them until it ends does not raise a
    step's peak; those of a node that ends in forward go with it.  A forward may compute gradients of its own: it finds
    them here.
    """

    def __init__(self, note_save: Callable[[], None], note_use: Callable[[], None], *, is_sampled: bool) -> None:
        """``note_save`` is called whenever one is saved, ``note_use`` whenever forward itself asks for one.

        ``is_sampled``: a few elements of each are noted.
        """
        self._note_save, self._note_use, self._is_sampled = note_save, note_use, is_sampled
        self._pack, self._unpack = hooks_on_saving()
        self._saved: list[_Place] = []
        self._awaited: list[ref[_Saved]] = []
        """What nothing of was asked for yet."""
        self._first = next_node()
        self._last_nodes = range(self._first, self._first)

    def holding(self) -> saved_tensors_hooks:
        """Forward runs within, directly in PyTorch's checkpoint."""
        return saved_tensors_hooks(self._hold, self._give)

    @property
    def last_nodes(self) -> range:
        """Numbers of nodes of autograd; that which saved a tensor last is one of them, and none of the others did.

        An operator that is given a view of what was written in place makes a node for the view behind its own.
        """
        return self._last_nodes

    def samples(self, outputs: Sequence[Tensor]) -> list[list[Any] | None]:
        """A few elements of each tensor in order; ``None`` of one that is written later, or has none to show.

        ``outputs``: of the forward.
        """
        noise = noise_since(self._first, outputs)
        return [None if noise.intersection(place.nodes) else place.lasting_sample() for place in self._saved]

    def drop(self) -> None:
        """Forward can run again: leave them to the checkpoint."""
        for saved in self._there():
            saved.tensor = None
        self._awaited = [place.saved for place in self._saved]
        self._end()

    def remake(self) -> None:
        """Have forward run again now, if it has not.  What it makes is held, and may not change until it is used."""
        awaited, self._awaited = self._awaited, []
        for place in awaited:
            if (saved := place()) is not None:
                saved.tensor = self._unpack(saved.remade)
                saved.version = version_of(saved.tensor)

    def keep(self, hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None) -> None:
        """Forward cannot run again: backward gets them as they are.

        ``hooks``: whoever packs and unpacks what is saved around the segment, and would have without it.
        """
        if hooks is not None:
            pack, self._unpack = hooks
            for saved in self._there():
                if saved.tensor is not None and not saved.is_input and version_of(saved.tensor) == saved.version:
                    with torch.no_grad():
                        saved.remade = pack(saved.tensor)
                    saved.tensor = None
        self._end()

    def _end(self) -> None:
        self._saved.clear()
        self._note_use = note_nothing

    @not_compiled
    def _hold(self, tensor: Tensor) -> _Saved:
        self._note_save()
        following = next_node()
        if following != self._last_nodes.stop:
            self._last_nodes = range(self._last_nodes.stop, following)
        saved = _Saved(_without_node(tensor, following), version_of(tensor), self._pack(tensor))
        self._saved.append(_Place(ref(saved), self._last_nodes, sample(tensor) if self._is_sampled else None))
        return saved

    def _there(self) -> Iterator[_Saved]:
        """Those that a node of autograd still has."""
        return (saved for place in self._saved if (saved := place.saved()) is not None)

    @not_compiled
    def _give(self, saved: _Saved) -> Tensor:
        self._note_use()
        self._awaited = []
        if saved.tensor is None:
            made: Tensor = self._unpack(saved.remade)
            return made
        if version_of(saved.tensor) != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} needed for backward has been modified by an inplace "
                f"operation: it is at version {version_of(saved.tensor)}, and {saved.version} was expected"
            )
        return saved.tensor


def note_nothing() -> None:
    """What is done with the asking, unless somebody minds."""


def _without_node(tensor: Tensor, following: int) -> Tensor:
    """What the node that saves its own output may hold, and be freed before :meth:`drop` all the same.

    ``following``: the number of the next node.
    """
    node = tensor.grad_fn
    is_output = node is not None and number_of(node) >= following - 1
    return alias(tensor) if is_output and (type(tensor) is Tensor or is_fake(tensor)) else tensor


def held_as_inputs() -> saved_tensors_hooks:
    """Within, what is saved are inputs of a segment: one around that cannot run again keeps them as they are.

    Others' hooks may return what lies otherwise in memory, on which other operators would run.
    """
    pack, unpack = hooks_on_saving()

    def mark(tensor: Tensor) -> Any:
        saved = pack(tensor)
        if isinstance(saved, _Saved):
            saved.is_input = True
        return saved

    return saved_tensors_hooks(mark, unpack)


@dataclass(slots=True)
class _Place:
    """One in the order in which they were saved."""

    saved: ref[_Saved]
    nodes: range
    """Numbers of autograd's nodes, among them that of the one that saved it."""
    sample: list[Any] | None

    def lasting_sample(self) -> list[Any] | None:
        """The sample, if there is one, and the tensor was not written since."""
        saved = self.saved()
        if self.sample is None or saved is None or saved.tensor is None or sample(saved.tensor) != self.sample:
            return None
        return self.sample


@dataclass(slots=True, weakref_slot=True)
class _Saved:
    tensor: Tensor | None
    version: int
    remade: Any
    """Of what the checkpoint around, or others around the segment, give the tensor again."""
    is_input: bool = False
    """Of a segment within."""


def saving_aside() -> saved_tensors_hooks:
    """Within, a checkpoint around does not hear of what is saved: backward will not see it again."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

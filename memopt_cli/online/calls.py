"""Checks of every call of an algorithm: the sizes of inputs and states, and that states and traces belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from memopt_cli.errors import MemoptError
from memopt_cli.online.states import State
from memopt_cli.runtime.copies import version_of


class Sizes:
    """The shapes of inputs and states, per sample."""

    def __init__(self, states: Iterable[State], compiled: Sequence[Tensor] = (), *, has_batch: bool) -> None:
        """Take the shapes from ``states``, and from ``compiled``, the inputs of the step that was compiled.

        ``has_batch``: whether the first axis is the batch.
        """
        self._has_batch = has_batch
        self._inputs = [self._of_sample(tensor) for tensor in compiled]
        self._states = [(state, state.shape) for state in states]

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise :class:`MemoptError` if ``inputs`` have other shapes, or the states another batch size."""
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            types = [type(x).__name__ for x in inputs]
            raise MemoptError(f"the inputs are of types {types}", hint="Give one or more tensors.")
        if self._has_batch and not all(x.dim() for x in inputs):
            raise MemoptError("an input has no batch axis, and the mode is Batching()", hint="Give inputs [B, ...].")
        shapes = [self._of_sample(x) for x in inputs]
        if self._inputs and shapes != self._inputs:
            batch = "[B, ...] with " if self._has_batch else ""
            raise MemoptError(
                f"the inputs have shapes {shapes} per sample; the algorithm was compiled for {self._inputs}",
                hint=f"Give inputs {batch}of those shapes, or make and compile an algorithm for the new ones.",
            )
        self._check_states((inputs[0].shape[0],) if self._has_batch else ())

    def _check_states(self, lead: tuple[int, ...]) -> None:
        for state, of_sample in self._states:
            if state.value.shape != (*lead, *of_sample):
                raise MemoptError(
                    f"state {state.name} of {type(state.module).__name__} has shape {tuple(state.value.shape)}, the "
                    f"inputs need {(*lead, *of_sample)}",
                    hint="Call reset_state(batch_size=B) for Batching(); reset_state() for one sample; and for vmap, "
                    "initialize in vmap_new_states and call the algorithm through Vmap",
                )

    def _of_sample(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape[1:] if self._has_batch else tensor.shape)


class Past:
    """The states and traces after the last step, with their version counters; empty before the first step.

    If a script sets the states, say to zero for a new sequence, but not the traces, the traces belong to a past that
    the states no longer have, and gradients would be wrong.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int]] = []

    def __reduce__(self) -> tuple[type[Past], tuple[()]]:
        return Past, ()  # a copy of the algorithm has tensors of its own, so what is kept here means nothing to it

    def keep(self, held: Iterable[tuple[str, Tensor]]) -> None:
        """Remember ``held``, pairs of name and tensor, as the tensors after the last step."""
        self._kept = [(tensor, version_of(tensor)) for _, tensor in held]

    def check(self, held: Iterable[tuple[str, Tensor]]) -> None:
        """Raise :class:`MemoptError` if some of ``held`` were written since the last step and others were not."""
        if not self._kept:
            return
        written = [
            name
            for (name, now), (kept, version) in zip(held, self._kept, strict=True)
            if now.data_ptr() != kept.data_ptr() or version_of(now) != version
        ]
        if written and len(written) < len(self._kept):
            raise MemoptError(
                f"{written[0]} was written after the last step, and the traces were not: they belong to another past",
                hint="Begin a sequence with reset_state(batch_size=B), or reset_state() within vmap_new_states. To "
                "forget the past of some samples, let the cell multiply its state by a mask.",
            )

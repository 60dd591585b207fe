"""Checks of every call of an algorithm: the sizes of inputs and states, and that states and traces belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from memopt_cli.errors import MemoptError
from memopt_cli.online.states import State
from memopt_cli.runtime.copies import version_of


class SampleShapes:
    """The shapes of inputs and states, per sample."""

    def __init__(self, states: Iterable[State], compiled_inputs: Sequence[Tensor] = (), *, has_batch: bool) -> None:
        """Take the shapes from ``states``, and from ``compiled_inputs``, the inputs of the compiled step.

        ``has_batch``: whether the first axis is the batch.
        """
        self._has_batch = has_batch
        self._input_shapes = [self._sample_shape(tensor) for tensor in compiled_inputs]
        self._states = [(state, state.shape) for state in states]

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise :class:`MemoptError` if ``inputs`` have other shapes, or the states another batch size."""
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            types = [type(x).__name__ for x in inputs]
            raise MemoptError(f"the inputs are not all tensors, but of types {types}", hint="Pass one or more tensors.")
        if self._has_batch and not all(x.dim() for x in inputs):
            raise MemoptError("an input has no batch axis, and the mode is Batching()", hint="Pass inputs [B, ...].")
        shapes = [self._sample_shape(x) for x in inputs]
        if self._input_shapes and shapes != self._input_shapes:
            batch = "[B, ...] with " if self._has_batch else ""
            raise MemoptError(
                f"the inputs have shapes {shapes} per sample; the algorithm was compiled for {self._input_shapes}",
                hint=f"Pass inputs {batch}of those shapes, or make and compile an algorithm for the new ones.",
            )
        self._check_states((inputs[0].shape[0],) if self._has_batch else ())

    def _check_states(self, batch_shape: tuple[int, ...]) -> None:
        for state, sample_shape in self._states:
            if state.value.shape != (*batch_shape, *sample_shape):
                raise MemoptError(
                    f"state {state.name} of {type(state.module).__name__} has shape {tuple(state.value.shape)}, the "
                    f"inputs need {(*batch_shape, *sample_shape)}",
                    hint="Call reset_state(batch_size=B) for Batching(); reset_state() for one sample; and for vmap, "
                    "initialize in vmap_new_states and call the algorithm through Vmap.",
                )

    def _sample_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape[1:] if self._has_batch else tensor.shape)


class Past:
    """The states and traces after the last step, with their version counters; before the first step, none.

    If a script sets the states, say to zero for a new sequence, but not the traces, the traces belong to a past that
    the states no longer have, and gradients would be wrong.
    """

    def __init__(self) -> None:
        self._versions: list[tuple[Tensor, int]] = []

    def __reduce__(self) -> tuple[type[Past], tuple[()]]:
        return Past, ()  # a copy of the algorithm has its own tensors

    def remember(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Remember ``tensors``, pairs of name and tensor, as the tensors after the last step."""
        self._versions = [(tensor, version_of(tensor)) for _, tensor in tensors]

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise :class:`MemoptError` if only some of ``tensors`` were written since the last step."""
        if not self._versions:
            return
        written_names = [
            name
            for (name, tensor), (old_tensor, version) in zip(tensors, self._versions, strict=True)
            if tensor.data_ptr() != old_tensor.data_ptr() or version_of(tensor) != version
        ]
        if written_names and len(written_names) < len(self._versions):
            raise MemoptError(
                f"{written_names[0]} was written after the last step, and the traces were not: they belong to another "
                "past",
                hint="Begin a sequence with reset_state(batch_size=B), or reset_state() within vmap_new_states. To "
                "forget the past of some samples, let the cell multiply its state by a mask.",
            )

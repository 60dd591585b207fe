"""States from which chunks start, recomputed in backward instead of being held since forward (``recompute_states``).

A module that carries state over its chunks, such as a neuron's membrane, has a state before each chunk.  Backward
needs them in reverse order.  To recompute one, the chunks before it run from the nearest known state, and on the way
the states halfway to it are remembered: of n chunks about log2(n) states are held at a time, and each chunk runs about
log2(n) / 2 times more (recursive bisection, as in Griewank, "Achieving logarithmic growth of temporal and spatial
complexity in reverse automatic differentiation", 1992).  With 8 chunks::

    state 7          chunks 0 … 6 run from state 0; states 3, 5 and 6 are remembered on the way
    states 6 and 5   are known
    state 4          chunk 3 runs from state 3
    state 3          is known
    state 2          chunks 0 and 1 run from state 0; state 1 is remembered on the way
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import find_matrices, label_of
from memopt_cli.runtime.state import StartingState


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: StartingState
    """The state from which the chunk starts, without the recomputed tensors."""
    needs_gradient: tuple[bool, ...]
    """Whether each recomputed tensor needs a gradient; empty if the chunk starts where the first chunk does."""
    run: Callable[[Sequence[Any]], object]
    """A function that recomputes the chunk's forward."""


class ChunkStarts:
    """The states from which the chunks of one pass over a module start."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._chunks: list[_Chunk] = []
        self._first: set[int] = set()
        """Identities of the tensors of the state that the first chunk starts from."""
        self._states: dict[int, list[Tensor]] = {0: []}
        """Index of a chunk -> the tensors it starts from; none for chunk 0, whose starting state holds its own."""
        self._generators = Generators()

    def add(self, start: StartingState, run: Callable[[Sequence[Any]], object]) -> Callable[[], list[Tensor]]:
        """Add the next chunk: it starts at ``start``, and ``run`` recomputes its forward.

        Returns a function that recomputes the tensors for :meth:`StartingState.replay`.
        """
        tensors = find_matrices(self._module)
        if not self._chunks:
            self._first = {id(t) for t in tensors}
        if self._first.issuperset(map(id, tensors)):  # the state has not moved
            self._chunks.append(_Chunk(start, (), run))
            return list
        start.release_tensors()
        self._chunks.append(_Chunk(start, tuple(t.requires_grad for t in tensors), run))
        return functools.partial(self._start_tensors, len(self._chunks) - 1)

    def check_repeatable(self) -> None:
        """Raise :class:`RuntimeError` if a chunk used random numbers, so that it cannot be recomputed."""
        if self._generators.moved():
            raise RuntimeError(
                f"{label_of(self._module)} uses random numbers, so its states cannot be made again. "
                "Set recompute_states to false in the plan."
            )

    def _start_tensors(self, index: int) -> list[Tensor]:
        """Return the tensors from which the chunk at ``index`` starts; call it for all later chunks before.

        States of later chunks are dropped: backward has been there.
        """
        nearest = max(start for start in self._states if start <= index)
        tensors, remembered = self._states[nearest], {index, *_halfway_chunks(nearest, index)}
        for chunk in range(nearest, index):
            tensors = self._next_state(chunk, tensors)
            if chunk + 1 in remembered:
                self._states[chunk + 1] = tensors
        self._states = {start: state for start, state in self._states.items() if start < index}
        return tensors

    def _next_state(self, index: int, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that the chunk at ``index`` leaves to the next one, when it starts from ``tensors``."""
        needs_gradient = self._chunks[index + 1].needs_gradient
        # If the next chunk starts where the first one does, its starting state holds all tensors.
        if not needs_gradient:
            return []
        # The graph is on, since forward may need one (``torch.autograd.grad``), but nothing is saved for it.
        nothing_saved = saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
        state_tensors = tensors if self._chunks[index].needs_gradient else ()
        with nothing_saved, self._chunks[index].start.replay(state_tensors) as others:
            self._chunks[index].run(others)
            state = find_matrices(self._module)
        return [t.detach().requires_grad_(is_needed) for t, is_needed in zip(state, needs_gradient, strict=True)]


def _halfway_chunks(start: int, stop: int) -> Iterator[int]:
    """Yield the chunk halfway from ``start`` to ``stop``, then the one halfway from there: 3, 5, 6 for 0 and 7."""
    while stop - start > 1:
        start = (start + stop) // 2
        yield start

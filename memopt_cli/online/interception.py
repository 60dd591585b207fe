"""Running one time step of a model while an algorithm controls the calls of traced weights and of cells.

A *cell* is a module that declares states.  Inside a call of a cell, new tensors are computed neuron by neuron from the
states of the last step and the outputs of traced weights.  What leaves the call, its new states and the tensors that it
returns, is tied to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.lanes import Act, with_batch_axis
from memopt_cli.online.states import State, states_of
from memopt_cli.online.traces import Gate, ModuleUse, PastState
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.private_torch import is_of_vmap, tree_flatten, tree_unflatten, without_transform


class WholeBatch:
    """Runs functions on whole batches, even if the model sees one sample, a lane of a ``vmap``."""

    def __init__(self, *, has_batch: bool) -> None:
        """Prepare for a model that sees the batch (``has_batch``), or one sample at a time."""
        self._has_batch = has_batch
        self._witness = torch.empty(0)
        self.size = 1
        """Number of samples in the batch, inside :meth:`lift`."""

    @contextmanager
    def like(self, witness: Tensor) -> Iterator[None]:
        """Take the batch size and the ``vmap`` lane from ``witness``, an input of the model, in the ``with`` block."""
        self._witness = witness
        try:
            yield
        finally:
            self._witness = torch.empty(0)

    def lift(self, act: Act, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run ``act`` on ``tensors`` with all samples, ``[B, ...]``, and return its results as the model sees them."""
        if self._has_batch:
            self.size = self._witness.shape[0]
            return act(*tensors)

        def act_on_batch(witness: Tensor, *whole: Tensor) -> tuple[Tensor, ...]:
            self.size = witness.shape[0]
            return act(*whole)

        return with_batch_axis(act_on_batch, self._witness, *tensors)


class Interception:
    """A time step of a model in which methods of a subclass control weights and cells.

    For a cell ``lif`` that calls a weight ``rec`` inside, and a weight ``fc`` before it, :meth:`run` calls::

        on_use(fc, x)            returns the output of ``fc``
        on_enter("lif", 0, v)    returns the state that ``lif`` finds
        on_use(rec, s)           returns the output of ``rec``
        on_leave("lif", 0, v, s) returns the new state and the spikes that the model sees

    All tensors have a leading batch axis.
    """

    def __init__(self, weights: Mapping[str, nn.Module], cells: Mapping[str, nn.Module], *, batched: bool) -> None:
        """Control ``weights`` and ``cells``, both dotted path -> module; ``batched``: the model sees a batch."""
        self.weights, self.cells = weights, cells
        self.gate = Gate()
        self.batch = WholeBatch(has_batch=batched)
        self._calls: dict[str, int] = {}
        self.states = {path: cell_states(cell) for path, cell in cells.items()}
        self.watched: dict[str, nn.Module] = {}
        """Further modules with counted calls."""
        self.max_calls: Mapping[str, int] | None = None
        """Dotted path -> maximum number of calls of the module in a step; ``None`` for no limit."""
        self._versions: dict[str, list[tuple[Tensor, int]]] = {}
        """Cell -> the last value of each of its states that is known, with the version counter of the tensor."""

    def on_use(self, use: ModuleUse, *z: Tensor) -> tuple[Tensor]:
        """Return the output that the model gets from ``use``, a call of a traced weight with the input ``z``."""
        raise NotImplementedError

    def on_enter(self, cell: str, call: int, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the values that ``cell`` finds in its ``states`` in its call number ``call`` of this step, from 0."""
        raise NotImplementedError

    def on_leave(self, cell: str, call: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the model gets: the new states of ``cell``, then the tensors that it returns."""
        raise NotImplementedError

    def on_overwritten(self, past_state: PastState) -> None:
        """Handle that another module wrote ``past_state`` before its cell was called."""
        raise NotImplementedError

    def on_forgotten(self, past_state: PastState) -> None:
        """Handle a constant that another module left in ``past_state`` at the end of the step, which ends its past."""
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """Run one time step of ``model`` on ``inputs``, and return its output; its states advance."""
        self._calls.clear()
        self._versions = {cell: _versions(states) for cell, states in self.states.items()}
        with self._intercept():
            output = model(*inputs)
        for cell in self.cells:
            for state in self._overwritten(cell):
                if state.value.requires_grad:
                    raise MemoptError(
                        f"{_name(cell, state)} is written after its cell has been called, and not by the cell",
                        hint="Let the cell that declares a state write the state, in its forward: pass what the cell "
                        "needs, such as a mask, as an argument.",
                    )
                self.on_forgotten(PastState(cell, state.name))
        self._versions = {}
        return output

    def act_on(self, states: Sequence[State], act: Callable[..., tuple[Tensor, ...]]) -> None:
        """Replace the values of ``states``, with all samples, with what ``act`` returns for them."""
        if states:
            for state, value in zip(states, self.batch.lift(act, *_values(states)), strict=True):
                state.value = value

    @contextmanager
    def _intercept(self) -> Iterator[None]:
        forwards = {m: partial(self._note_use, path) for path, m in self.weights.items()}
        forwards |= {m: partial(self._cell, path, m.forward) for path, m in self.cells.items()}
        forwards |= {m: partial(self._watch_cell, path, m.forward) for path, m in self.watched.items()}
        own_forwards = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in forwards:
                del module.__dict__["forward"]
                if module in own_forwards:
                    module.__dict__["forward"] = own_forwards[module]

    def _note_use(self, path: str, input: Tensor | None = None) -> Tensor:
        use = ModuleUse(path, self._count_call(path))
        (y,) = self.batch.lift(partial(self.on_use, use), *(() if input is None else (input,)))
        return y

    def _overwritten(self, cell: str) -> list[State]:
        """Return the states of ``cell`` that were written since its last call, or since the step began."""
        return [
            state
            for state, (seen, version), (now, written) in zip(
                self.states[cell], self._versions[cell], _versions(self.states[cell]), strict=True
            )
            if now is not seen or written != version
        ]

    def _count_call(self, path: str) -> int:
        """Count a call of the module at ``path``, and return the number of its earlier calls in this step."""
        call = self._calls.get(path, 0)
        if self.max_calls is not None and call >= self.max_calls.get(path, 0):
            raise changed_step(path, f"is called {call + 1} times" if call else "is called")
        self._calls[path] = call + 1
        return call

    def _watch_cell(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._count_call(path)
        return forward(*args, **kwargs)

    def _cell(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, states = self._count_call(path), self.states[path]
        for state in self._overwritten(path):
            self.on_overwritten(PastState(path, state.name))
        self.act_on(states, partial(self.on_enter, path, call))
        leaves, spec = tree_flatten(forward(*args, **kwargs))
        values = _values(states)
        outputs = {id(t): t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()}
        for value in values:
            outputs.pop(id(value), None)
        leaving = self.batch.lift(partial(self.on_leave, path, call), *values, *outputs.values())
        replacements = dict(zip([*map(id, values), *outputs], leaving, strict=True))
        for state, value in zip(states, leaving, strict=False):
            state.value = value.clone()  # the model may write a state in place, but not a tensor that is tied
        self._versions[path] = _versions(states)
        return tree_unflatten([replacements.get(id(leaf), leaf) for leaf in leaves], spec)


def cell_states(cell: nn.Module) -> list[State]:
    """Return the floating states that ``cell`` declares itself, in the order of declaration."""
    return [s for s in states_of(cell).values() if s.module is cell and s.value.is_floating_point()]


def changed_step(path: str, change: str) -> MemoptError:
    """Return the error that ``path`` changed in a step; ``change`` continues its name: ``is written …``."""
    return MemoptError(
        f"{path or 'the model'} {change}, which was not so in the step that compile_graph ran",
        hint="Let every step take the same path, and multiply by a mask where some steps skip a part. Or compile with "
        "inputs for which the step does everything that any step does.",
    )


def _name(cell: str, state: State) -> str:
    return f"{cell}.{state.name}" if cell else state.name


def _values(states: Sequence[State]) -> list[Tensor]:
    return [state.value for state in states]


def _versions(states: Sequence[State]) -> list[tuple[Tensor, int]]:
    """Return the values of ``states``, each with its version counter, which writing in place increases."""
    return [(v, version_of(without_transform(v) if is_of_vmap(v) else v)) for v in _values(states)]

"""Running one time step of a model with its traced weights and its cells in an algorithm's hands.

A *cell* is a module that declares states.  Its call is the boundary: within it, the states as the last step left
them, the outputs of traced weights and whatever is computed from them neuron by neuron; its new states and what it
returns leave it tied to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.states import State, states_of
from memopt_cli.online.traces import Gate, Held, Use
from memopt_cli.online.whole_batch import WholeBatch
from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.private_torch import is_of_vmap, tree_flatten, tree_unflatten, without_transform


class Interception:
    """Calls ``on_use``, ``on_enter`` and ``on_leave`` during a step, on tensors with a leading batch axis."""

    def __init__(self, weights: Mapping[str, nn.Module], cells: Mapping[str, nn.Module], *, batched: bool) -> None:
        """``weights`` and ``cells``: dotted path -> module.  ``batched``: the model sees a batch, not one sample."""
        self.weights, self.cells = weights, cells
        self.gate = Gate()
        self.batch = WholeBatch(is_seen=batched)
        self._calls: dict[str, int] = {}
        self.states = {path: cell_states(cell) for path, cell in cells.items()}
        self.watched: dict[str, nn.Module] = {}
        """Further modules whose calls are counted."""
        self.most_calls: Mapping[str, int] | None = None
        """How often each module is called in a step at most; ``None``: that is being found out."""
        self._seen: dict[str, list[tuple[Tensor, int]]] = {}
        """Values of a cell's states, as the step has found or left them, and how often each had been written."""

    def on_use(self, use: Use, *z: Tensor) -> tuple[Tensor]:
        """A traced weight is used; returns what the model gets for its output."""
        raise NotImplementedError

    def on_enter(self, cell: str, call: int, *states: Tensor) -> tuple[Tensor, ...]:
        """A cell is called, for the first time in this step if ``call`` is 0; returns what it finds in its states."""
        raise NotImplementedError

    def on_leave(self, cell: str, call: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """A cell has ended; its new states and then what it returns, as the model is to see them."""
        raise NotImplementedError

    def on_overwritten(self, held: Held) -> None:
        """A cell that is about to be called finds in its state what another module wrote there."""
        raise NotImplementedError

    def on_forgotten(self, held: Held) -> None:
        """A step ends with a constant in a state that no cell left there: nothing of the past is in it."""
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
        """One time step of the model; its states are left as the step left them."""
        self._calls.clear()
        self._seen = {cell: _as_they_are(states) for cell, states in self.states.items()}
        with self._installed():
            output = model(*inputs)
        for cell in self.cells:
            for state in self._overwritten(cell):
                if state.value.requires_grad:
                    raise MemoptError(
                        f"{_name(cell, state)} is written after its cell has been called, and not by the cell",
                        hint="Let the cell that declares a state write it, in its forward: give it what it needs, as "
                        "a mask",
                    )
                self.on_forgotten(Held(cell, state.name))
        self._seen = {}
        return output

    def act_on(self, states: Sequence[State], act: Callable[..., tuple[Tensor, ...]]) -> None:
        """Replace the values of states by what ``act`` makes of them, those of the whole batch."""
        if states:
            for state, value in zip(states, self.batch.lift(act, *_values(states)), strict=True):
                state.value = value

    @contextmanager
    def _installed(self) -> Iterator[None]:
        forwards = {m: partial(self._use, path) for path, m in self.weights.items()}
        forwards |= {m: partial(self._cell, path, m.forward) for path, m in self.cells.items()}
        forwards |= {m: partial(self._watch, path, m.forward) for path, m in self.watched.items()}
        own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in forwards:
                del module.__dict__["forward"]
                if module in own:
                    module.__dict__["forward"] = own[module]

    def _use(self, path: str, input: Tensor | None = None) -> Tensor:
        use = Use(path, self._count(path))
        (y,) = self.batch.lift(partial(self.on_use, use), *(() if input is None else (input,)))
        return y

    def _overwritten(self, cell: str) -> list[State]:
        """States that hold something else than the step has found or left in them."""
        return [
            state
            for state, (seen, version), (now, written) in zip(
                self.states[cell], self._seen[cell], _as_they_are(self.states[cell]), strict=True
            )
            if now is not seen or written != version
        ]

    def _count(self, path: str) -> int:
        """How often the module was called in this step before."""
        call = self._calls.get(path, 0)
        if self.most_calls is not None and call >= self.most_calls.get(path, 0):
            raise changed(path, f"is called {call + 1} times" if call else "is called")
        self._calls[path] = call + 1
        return call

    def _watch(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._count(path)
        return forward(*args, **kwargs)

    def _cell(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, states = self._count(path), self.states[path]
        for state in self._overwritten(path):
            self.on_overwritten(Held(path, state.name))
        self.act_on(states, partial(self.on_enter, path, call))
        leaves, spec = tree_flatten(forward(*args, **kwargs))
        values = _values(states)
        outputs = {id(t): t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()}
        for value in values:
            outputs.pop(id(value), None)
        seen = self.batch.lift(partial(self.on_leave, path, call), *values, *outputs.values())
        replaced = dict(zip([*map(id, values), *outputs], seen, strict=True))
        for state, value in zip(states, seen, strict=False):
            state.value = value.clone()  # what leaves a cell may not be written in place, a state may
        self._seen[path] = _as_they_are(states)
        return tree_unflatten([replaced.get(id(leaf), leaf) for leaf in leaves], spec)


def cell_states(cell: nn.Module) -> list[State]:
    """The floating states that a module declares itself, in the order of declaration."""
    own = (state for state in states_of(cell).values() if state.module is cell)
    return [state for state in own if state.value.is_floating_point()]


def changed(path: str, what: str) -> MemoptError:
    """A step does what that of ``compile_graph`` did not."""
    return MemoptError(
        f"{path or 'the model'} {what}, which was not so in the step that compile_graph saw",
        hint="Let every step take the same path, multiplying by a mask what some of them leave out; or compile with "
        "inputs by which the step does all that any step does",
    )


def _name(cell: str, state: State) -> str:
    return f"{cell}.{state.name}" if cell else state.name


def _values(states: Sequence[State]) -> list[Tensor]:
    return [state.value for state in states]


def _as_they_are(states: Sequence[State]) -> list[tuple[Tensor, int]]:
    """The values, and how often each was written in place."""
    return [(v, version_of(without_transform(v) if is_of_vmap(v) else v)) for v in _values(states)]

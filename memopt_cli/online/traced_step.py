"""Running time steps of a model with eligibility traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from memopt_cli.online.interception import Interception
from memopt_cli.online.states import State, states_of
from memopt_cli.online.structure import Structure, jacobian_row
from memopt_cli.online.traces import Row, Ties, Trace, Use


class TracedStep(Interception):
    """Advances the traces as the model runs, and ties what leaves a cell to the weights.

    In a single step, a cell's graph serves for its Jacobian and is cut from the loss: the gradient goes from what
    leaves the cell straight to the weights and to whatever their inputs were computed from.  In a window of several
    steps nothing is cut; the gradient that reaches the window's first states goes to the weights by their traces.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, traces: Sequence[Trace], *, batched: bool, window: bool
    ) -> None:
        self.structure = structure
        self.traces = {trace.use: trace for trace in traces}
        self._reaching: dict[str, list[Trace]] = {}
        for trace in traces:
            for cell in trace.groups:
                self._reaching.setdefault(cell, []).append(trace)
        weights = {use.path: model.get_submodule(use.path) for use in self.traces}
        super().__init__(weights, {cell: model.get_submodule(cell) for cell in self._reaching}, batched=batched)
        self._window = window
        self._model_states = list(states_of(model).values())
        self._trace_states = [(t, name, state) for t in traces for name, state in states_of(t).items()]
        self._outputs: dict[Use, Tensor] = {}
        self._found: dict[str, tuple[Tensor, ...]] = {}

    @property
    def states_held(self) -> list[State]:
        """Those of the model and of the traces."""
        return [*self._model_states, *(state for _, _, state in self._trace_states)]

    @contextmanager
    def traces_loaded(self) -> Iterator[None]:
        """The traces' values are at hand within; afterwards they are advanced, and the model's states are constants."""
        self.lift(self._load, *(state.value for _, _, state in self._trace_states))
        try:
            yield
            advanced = self.lift(lambda: tuple(trace.live.values[name] for trace, name, _ in self._trace_states))
        finally:
            for trace in self.traces.values():
                trace.end()
            self._outputs, self._found = {}, {}
            for state in self._model_states:
                state.value = state.value.detach()
        for (_, _, state), value in zip(self._trace_states, advanced, strict=True):
            state.value = value

    def step(self, model: nn.Module, inputs: Sequence[Tensor], scale: float | Tensor) -> Any:
        """The model's output.  ``scale``: what this step's gradients are divided by."""
        self._set_scale(scale)
        return self.run(model, inputs)

    def tie_to_past(self, scale: float | Tensor) -> None:
        """Make the gradients of the states as they are now gradients of the weights, by the traces."""
        self._set_scale(scale)
        for cell, states in self.states.items():
            tied = self.lift(partial(self._tie_to_past, cell), *(state.value for state in states))
            for state, value in zip(states, tied, strict=True):
                state.value = value

    def on_use(self, use: Use, *z: Tensor) -> tuple[Tensor]:
        if use in self.structure.constant and not self._window:
            z = tuple(tensor.detach() for tensor in z)
        y = self.traces[use].use_weight(z[0] if z else None, self.batch, attached=self._window)
        uncut = self._window and y.requires_grad
        (self._outputs[use],) = self.gate.tie([y], [[]]) if uncut else (y.detach().requires_grad_(),)
        return (self._outputs[use],)

    def on_enter(self, cell: str, *states: Tensor) -> tuple[Tensor, ...]:
        uncut = (self._window and state.requires_grad for state in states)
        self._found[cell] = tuple(
            s.view_as(s) if keep else s.detach().requires_grad_() for s, keep in zip(states, uncut, strict=True)
        )
        return self._found[cell]

    def on_leave(self, cell: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(self.states[cell])
        if self._window:
            self._extend(cell, tensors[:count])
            return self.gate.tie(tensors, [[] for _ in tensors])
        ties = {i: self._through_states(cell, i, tensors) for i in range(count, len(tensors))}
        direct = [i for i in range(len(tensors)) if not ties.get(i)]
        ties |= zip(direct, self._extend(cell, [tensors[i] for i in direct]), strict=True)
        values = [q if (cell, i) in self.structure.attached else q.detach() for i, q in enumerate(tensors)]
        return self.gate.tie(values, [ties[i] for i in range(len(tensors))])

    def _through_states(self, cell: str, i: int, tensors: Sequence[Tensor]) -> Ties:
        """Those of tensor ``i`` to new states, if it is known to depend on new states alone; else empty."""
        expected = self.structure.derived.get((cell, i), frozenset())
        if not expected:
            return []
        row = jacobian_row(self.gate, tensors[i], tensors[: len(self.states[cell])])
        slopes = {j: slope for j, slope in enumerate(row) if slope is not None}
        return [(slope, j) for j, slope in slopes.items()] if slopes.keys() == expected else []

    def _extend(self, cell: str, tensors: Sequence[Tensor]) -> list[Ties]:
        """The ties of each tensor, of which the cell's states are the first; its traces advance."""
        rows = [self._row(cell, q) for q in tensors]
        of_traces = [trace.extend(cell, rows) for trace in self._reaching[cell]]
        return [[tie for ties in of_row for tie in ties] for of_row in zip(*of_traces, strict=True)]

    def _row(self, cell: str, q: Tensor) -> Row:
        uses = [trace.use for trace in self._reaching[cell]]
        found = self._found[cell]
        row = jacobian_row(self.gate, q, [*found, *(self._outputs[use] for use in uses)])
        names = (state.name for state in self.states[cell])
        return Row(
            hidden={name: d for name, d in zip(names, row, strict=False) if d is not None},
            inputs={use: d for use, d in zip(uses, row[len(found) :], strict=True) if d is not None},
        )

    def _load(self, *values: Tensor) -> tuple[Tensor, ...]:
        for trace in self.traces.values():
            trace.begin()
        for (trace, name, _), value in zip(self._trace_states, values, strict=True):
            trace.live.values[name] = value
        return ()

    def _tie_to_past(self, cell: str, *values: Tensor) -> tuple[Tensor, ...]:
        traces, names = self._reaching[cell], [state.name for state in self.states[cell]]
        ties: list[Ties] = [[(None, trace.past(cell, name)) for trace in traces] for name in names]
        return self.gate.tie([value.detach() for value in values], ties)

    def _set_scale(self, scale: float | Tensor) -> None:
        for trace in self.traces.values():
            trace.live.scale = scale

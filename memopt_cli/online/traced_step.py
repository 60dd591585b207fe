"""Running time steps of a model that advance its eligibility traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from memopt_cli.online.graph import AutogradGraph
from memopt_cli.online.interception import Interception, changed_step
from memopt_cli.online.operations import make_operation
from memopt_cli.online.states import State, states_of
from memopt_cli.online.step_parts import StepParts, describe_source
from memopt_cli.online.structure import Structure
from memopt_cli.online.trace_set import TraceSet
from memopt_cli.online.traces import CellOutput, Gate, GradientChannel, ModuleUse, PastState, Row, Ties, Trace
from memopt_cli.runtime.private_torch import tree_leaves


class TracedStep(Interception):
    """Runs time steps, advances the traces, and ties the outputs of cells to the weights.

    In a single step, the graph inside a cell serves only for its Jacobian and is cut from the loss: the gradient of an
    output goes by ties straight to the weights, and to whatever their inputs were computed from.  For a neuron
    ``v = 0.9 v + w(x)``, the row of ``v`` is ``dv/dv^(t-1) = 0.9`` and ``dv/dy = 1``.  Of the gradient ``l`` of ``v``,
    the second entry gives ``w`` its ordinary gradient of this step, and the first gives it ``0.9 l`` times the trace.

    In a window of several steps nothing is cut: autograd computes the gradients inside the window, and the gradient
    that reaches the window's first states goes to the weights by their traces.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, traces: Sequence[Trace], *, batched: bool, window: bool
    ) -> None:
        self.structure = structure
        self.traces = TraceSet(traces)
        weights = {use.path: model.get_submodule(use.path) for use in self.traces.by_use}
        super().__init__(weights, {cell: model.get_submodule(cell) for cell in structure.cells}, batched=batched)
        self._window = window
        """Whether backward goes through several steps at once."""
        self._model_states = list(states_of(model).values())
        self._read_outputs = {out for edges in structure.edges.values() for out in edges.outputs}
        """Outputs of cells that other outputs of cells read in the same step."""
        watched = structure.call_counts.keys() - weights.keys() - self.cells.keys()
        self.watched = {path: model.get_submodule(path) for path in watched}
        self.max_calls = structure.call_counts
        self._unfollowed_states = {
            past_state: State(model.get_submodule(past_state.cell), past_state.name)
            for past_state in structure.unfollowed_sources
        }
        """Past state that no traced weight may reach, as each step checks -> the state in the model."""
        self._parts = StepParts(structure, self.gate)
        """The parts of the step that runs; every step starts with new ones."""

    @property
    def all_states(self) -> list[State]:
        """States of the model and of the traces."""
        return [*self._model_states, *self.traces.states]

    @property
    def followed_states(self) -> dict[str, State]:
        """Name -> state of the model that a traced weight reaches."""
        named = ((PastState(cell, state.name), state) for cell, states in self.states.items() for state in states)
        return {describe_source(key): state for key, state in named if key in self.traces.reached}

    @contextmanager
    def traces_loaded(self) -> Iterator[None]:
        """Load the traces for the steps in the ``with`` block; then store them and make the states constants."""
        self.batch.lift(self.traces.load, *(state.value for state in self.traces.states))
        try:
            yield
            advanced = self.batch.lift(self.traces.values)
        finally:
            self.traces.end()
            self._parts = StepParts(self.structure, self.gate)
            for state in self._model_states:
                state.value = state.value.detach()
        for state, value in zip(self.traces.states, advanced, strict=True):
            state.value = value

    def tie_to_past(self, scale: float | Tensor) -> None:
        """Tie the current states to the traces, which turn gradients of the states into gradients of the weights.

        In a window all states are tied; in a single step, only states that are read outside their cells.  ``scale``:
        the divisor of the last step's gradients.
        """
        self.traces.set_scale(scale)
        for cell, states in self.states.items():
            tied = [s for s in states if self._window or PastState(cell, s.name) in self.structure.exposed_states]
            self.act_on(tied, partial(self._tie_to_past, [PastState(cell, state.name) for state in tied]))

    def step(self, model: nn.Module, inputs: Sequence[Tensor], scale: float | Tensor) -> Any:
        """Run one step of ``model``, and return its output; ``scale`` divides the gradients of this step."""
        self.traces.set_scale(scale)
        if self.structure.sources_by_weight:
            self._parts.graph = AutogradGraph(model, set(), {})
        for cell, states in self.states.items():
            self.act_on(states, partial(self._keep_past, [PastState(cell, state.name) for state in states]))
        output = self.run(model, inputs)
        if self.structure.entering_states and not self._window:
            results = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            self.batch.lift(self._parts.check_results, *results)
        unfollowed = {
            past_state: state.value
            for past_state, state in self._unfollowed_states.items()
            if state.value.requires_grad
        }
        self.batch.lift(partial(self._advance, list(unfollowed)), *unfollowed.values())
        return output

    def on_overwritten(self, past_state: PastState) -> None:
        if past_state not in self.structure.exposed_states:
            raise changed_step(f"{past_state.cell}.{past_state.name}".removeprefix("."), "is written outside its cell")

    def on_forgotten(self, past_state: PastState) -> None:
        self._parts.new_rows[past_state] = Row()

    def on_use(self, use: ModuleUse, *z: Tensor) -> tuple[Tensor]:
        z = tuple(tensor.view_as(tensor) for tensor in z)  # a new node of the graph, at which later walks end
        self._parts.end_walks_at(z)
        # A call without a trace: its output reaches cells only through later calls.
        if use not in self.traces.by_use:
            operation = make_operation(self.weights[use.path])
            return (operation.apply(z[0] if z else None, self.batch.size, operation.weight, operation.bias),)
        # The input of a constant use depends on no parameter, so it needs no gradient.
        if use in self.structure.constant_uses and not self._window:
            z = tuple(tensor.detach() for tensor in z)
        trace, weight_input = self.traces.by_use[use], z[0] if z else None
        y = trace.use_weight(weight_input, self.batch.size, attached=self._window)
        if use in self.structure.connected_uses and not self._window:
            y = trace.attached(weight_input, self.batch.size)
        is_uncut = (self._window or use in self.structure.connected_uses) and y.requires_grad
        if is_uncut:
            (output,) = self.gate.tie([y], [[]])
        else:
            # The cells get a leaf of the graph, at which their Jacobians end.  Gradients of the loss do not pass it:
            # the ties take them from the outputs of the cells straight to the weight.
            output = y.detach().requires_grad_()
            if use in self.structure.unread_parts:
                _refuse_gradient(self.gate, output, describe_source(use))
        self._parts.use_outputs[use] = output
        return (output,)

    def on_enter(self, cell: str, call: int, *states: Tensor) -> tuple[Tensor, ...]:
        names = [PastState(cell, state.name) for state in self.states[cell]]
        is_guarded = not call and not self._window
        return tuple(
            self._parts.past_values[past_state].clone()
            if is_guarded and past_state in self.structure.unread_parts
            else value
            for past_state, value in zip(names, states, strict=True)
        )

    def on_leave(self, cell: str, call: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outs = [CellOutput(cell, call, number) for number in range(len(tensors))]
        names = [state.name for state in self.states[cell]]
        ties: list[Ties] = [[] for _ in tensors]
        values = list(tensors)
        for out, q in zip(outs, tensors, strict=True):
            is_state = out.number < len(names)  # new states come before returned tensors
            if out not in self.structure.edges or (self._window and not is_state and out not in self._read_outputs):
                continue  # autograd computes its whole gradient by its graph
            self._parts.check_weighted(out, q)
            row = self._parts.row(out, q, tensors[: len(names)])
            total = self._parts.rows[out] = row.total(self._parts.rows)
            if is_state:
                self._parts.new_rows[PastState(cell, names[out.number])] = total
            if not self._window:
                is_attached = out in self.structure.attached_outputs and not row.through.keys() & set(outs)
                ties[out.number] = self._ties(self.structure.without_graph_entries(row) if is_attached else row)
                values[out.number] = q if is_attached else q.detach()
        leaving = self.gate.tie(values, ties)
        self._parts.cell_outputs |= zip(outs, leaving, strict=True)
        self._parts.end_walks_at(leaving)
        return leaving

    def _ties(self, row: Row) -> Ties:
        cell_outputs = self._parts.cell_outputs
        through: Ties = [
            (
                slope,
                GradientChannel((cell_outputs[out],), lambda gradient: (gradient,))
                if out in cell_outputs
                else out.number,
            )
            for out, slope in row.through.items()
        ]
        return [*through, *self.traces.ties(row)]

    def _advance(self, unfollowed: Sequence[PastState], *values: Tensor) -> tuple[Tensor, ...]:
        self._parts.check_unfollowed(unfollowed, values)
        self.traces.advance(self._parts.new_rows)
        self._parts = StepParts(self.structure, self.gate)
        return ()

    def _keep_past(self, names: Sequence[PastState], *values: Tensor) -> tuple[Tensor, ...]:
        """Keep the ``values`` of states for Jacobians, and return copies, which the model may write in place."""
        copies: list[Tensor] = []
        for past_state, value in zip(names, values, strict=True):
            is_tied = value.requires_grad and (self._window or past_state in self.structure.exposed_states)
            self._parts.past_values[past_state] = value.view_as(value) if is_tied else value.detach().requires_grad_()
            copies.append(self._parts.past_values[past_state].clone())
            if past_state in self.structure.unread_parts and not self._window:
                _refuse_gradient(self.gate, copies[-1], describe_source(past_state))
        return tuple(copies)

    def _tie_to_past(self, names: Sequence[PastState], *values: Tensor) -> tuple[Tensor, ...]:
        return self.gate.tie(
            [value.detach() for value in values], [self.traces.past_ties(past_state) for past_state in names]
        )


def _refuse_gradient(gate: Gate, tensor: Tensor, name: str) -> None:
    """Raise an error in backward if a loss reads ``tensor``, which only cells read in the compiled step."""

    def refuse(gradient: Tensor) -> None:
        if not gate.closed and gradient.any():
            raise changed_step(name, "is read outside its cell")

    tensor.register_hook(refuse)

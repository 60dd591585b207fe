"""Running time steps of a model with eligibility traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import Node

from memopt_cli.online.interception import Interception, changed
from memopt_cli.online.operations import operation_of
from memopt_cli.online.states import State, states_of
from memopt_cli.online.structure import Graph, Source, Structure, jacobian_row, leaves_before, only
from memopt_cli.online.traces import Channel, Held, Left, Row, Ties, Trace, Use
from memopt_cli.runtime.private_torch import tree_leaves

K = TypeVar("K")


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
        weights = {use.path: model.get_submodule(use.path) for use in self.traces}
        super().__init__(weights, {cell: model.get_submodule(cell) for cell in structure.cells}, batched=batched)
        self._window = window
        self._model_states = list(states_of(model).values())
        self._trace_states = [(t, name, state) for t in traces for name, state in states_of(t).items()]
        self._read = {left for edges in structure.edges.values() for left in edges.left}
        watched = structure.calls.keys() - weights.keys() - self.cells.keys()
        self.watched = {path: model.get_submodule(path) for path in watched}
        self.most_calls = structure.calls
        self._not_followed = {held: State(model.get_submodule(held.cell), held.name) for held in structure.not_followed}
        self._outputs: dict[Use, Tensor] = {}
        self._found: dict[Held, Tensor] = {}
        self._left: dict[Left, Tensor] = {}
        self._rows: dict[Left, Row] = {}
        self._new: dict[Held, Row] = {}
        self._graph: Graph | None = None
        self._followed: set[Node] = set()
        """Inputs of traced weights, and what leaves a cell: what they were computed from is looked at there."""

    @property
    def states_held(self) -> list[State]:
        """Those of the model and of the traces."""
        return [*self._model_states, *(state for _, _, state in self._trace_states)]

    @property
    def followed_states(self) -> dict[str, State]:
        """Name -> state of the model that a trace tells of."""
        held = {held for trace in self.traces.values() for held in trace.shapes}
        named = ((Held(cell, state.name), state) for cell, states in self.states.items() for state in states)
        return {name_of(key): state for key, state in named if key in held}

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
            self._forget()
            for state in self._model_states:
                state.value = state.value.detach()
        for (_, _, state), value in zip(self._trace_states, advanced, strict=True):
            state.value = value

    def tie_to_past(self, scale: float | Tensor) -> None:
        """Make the gradients of states as they are now gradients of the weights, by the traces: of all in a window.

        ``scale``: what the last step's gradients were divided by.
        """
        self._set_scale(scale)
        for cell, states in self.states.items():
            tied = [s for s in states if self._window or Held(cell, s.name) in self.structure.exposed]
            self.act_on(tied, partial(self._tie_to_past, [Held(cell, state.name) for state in tied]))

    def step(self, model: nn.Module, inputs: Sequence[Tensor], scale: float | Tensor) -> Any:
        """The model's output.  ``scale``: what this step's gradients are divided by."""
        self._set_scale(scale)
        self._graph = Graph(model, set(), {}) if self.structure.weighted else None
        for cell, states in self.states.items():
            self.act_on(states, partial(self._find, [Held(cell, state.name) for state in states]))
        output = self.run(model, inputs)
        if self.structure.entering and not self._window:
            results = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            self.lift(self._check_results, *results)
        others = {held: state.value for held, state in self._not_followed.items() if state.value.requires_grad}
        self.lift(partial(self._advance, list(others)), *others.values())
        return output

    def on_overwritten(self, held: Held) -> None:
        if held not in self.structure.exposed:
            raise changed(f"{held.cell}.{held.name}".removeprefix("."), "is written outside its cell")

    def on_forgotten(self, held: Held) -> None:
        self._new[held] = Row()

    def on_use(self, use: Use, *z: Tensor) -> tuple[Tensor]:
        z = tuple(tensor.view_as(tensor) for tensor in z)
        self._followed.update(tensor.grad_fn for tensor in z if tensor.grad_fn is not None)
        if use not in self.traces:  # an earlier call of a traced weight that reaches a cell past a later one alone
            operation = operation_of(self.weights[use.path])
            return (operation.apply(z[0] if z else None, self.batch, operation.weight, operation.bias),)
        if use in self.structure.constant and not self._window:
            z = tuple(tensor.detach() for tensor in z)
        trace, given = self.traces[use], z[0] if z else None
        y = trace.use_weight(given, self.batch, attached=self._window)
        if use in self.structure.connected and not self._window:
            y = trace.attached(given, self.batch)
        uncut = (self._window or use in self.structure.connected) and y.requires_grad
        if uncut:
            (self._outputs[use],) = self.gate.tie([y], [[]])
        else:
            self._outputs[use] = y.detach().requires_grad_()
            if use in self.structure.unread:
                self._refuse_gradient(self._outputs[use], name_of(use))
        return (self._outputs[use],)

    def on_enter(self, cell: str, call: int, *states: Tensor) -> tuple[Tensor, ...]:
        names = [Held(cell, state.name) for state in self.states[cell]]
        is_guarded = not call and not self._window
        return tuple(
            self._found[held].clone() if is_guarded and held in self.structure.unread else value
            for held, value in zip(names, states, strict=True)
        )

    def on_leave(self, cell: str, call: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        lefts = [Left(cell, call, number) for number in range(len(tensors))]
        names = [state.name for state in self.states[cell]]
        ties: list[Ties] = [[] for _ in tensors]
        values = list(tensors)
        for left, q in zip(lefts, tensors, strict=True):
            is_state = left.number < len(names)
            if left not in self.structure.edges or (self._window and not is_state and left not in self._read):
                continue  # its own graph tells all there is
            self._check_weighted(left, q)
            row = self._row(left, q, tensors[: len(names)])
            self._rows[left] = row.total(self._rows)
            if is_state:
                self._new[Held(cell, names[left.number])] = self._rows[left]
            if not self._window:
                attached = left in self.structure.attached and not row.through.keys() & set(lefts)
                ties[left.number] = self._ties(self._beside_its_graph(row) if attached else row)
                values[left.number] = q if attached else q.detach()
        leaving = self.gate.tie(values, ties)
        self._left |= zip(lefts, leaving, strict=True)
        self._followed.update(tensor.grad_fn for tensor in leaving if tensor.grad_fn is not None)
        return leaving

    def _row(self, left: Left, q: Tensor, new: Sequence[Tensor]) -> Row:
        """By paths within the cell; through its new states, if it is known to depend on these alone."""
        if left in self.structure.derived:
            states = sorted(only(q, _made_by(new)))
            slopes = jacobian_row(self.gate, q, [new[j] for j in states])
            through = {Left(left.cell, left.call, j): s for j, s in zip(states, slopes, strict=True) if s is not None}
            if through:
                return Row(through=through)
        edges, known = self.structure.edges[left], self.structure.known[left]
        held = {key: self._found[key] for key in edges.held if key in self._found}
        uses = {key: self._outputs[key] for key in edges.uses if key in self._outputs}
        past = {key: self._left[key] for key in edges.left if key in self._left}
        others = self._others(known)
        row = iter(jacobian_row(self.gate, q, [*held.values(), *uses.values(), *past.values(), *others.values()]))
        found = Row(_entries(held, row), _entries(uses, row), _entries(past, row))
        _refuse_further(left.cell, _entries(others, row))
        return found

    def _check_weighted(self, key: Left | Held, q: Tensor) -> None:
        """Raises :class:`MemoptError` for what used to enter weights alone, and reaches ``q`` past them as well."""
        if self._graph is not None and key in self.structure.weighted:
            for source in self._graph.read_directly(q, self._others(frozenset())) & self.structure.weighted[key]:
                raise changed(key.cell, f"reads {name_of(source)} past the weight that it entered")

    def _others(self, known: frozenset[Source]) -> dict[Source, Tensor]:
        """All that there is in this step so far, but for what is ``known``."""
        parts: tuple[Mapping[Any, Tensor], ...] = (self._found, self._outputs, self._left)
        return {key: tensor for part in parts for key, tensor in part.items() if key not in known}

    def _check_not_followed(self, cells: Sequence[Held], values: Sequence[Tensor]) -> None:
        """Raises :class:`MemoptError` if a state that carried nothing of a traced weight has come to do so."""
        for held, value in zip(cells, values, strict=True):
            self._check_weighted(held, value)
            others = self._others(self.structure.not_followed[held])
            row = jacobian_row(self.gate, value, list(others.values()))
            _refuse_further(held.cell, _entries(others, iter(row)))

    def _beside_its_graph(self, row: Row) -> Row:
        """Without what the graph of a tensor that is attached to it leads to."""
        return Row(
            {held: d for held, d in row.hidden.items() if held not in self.structure.exposed},
            {use: d for use, d in row.inputs.items() if use not in self.structure.connected},
        )

    def _ties(self, row: Row) -> Ties:
        through: Ties = [
            (slope, Channel((self._left[earlier],), _as_it_is) if earlier in self._left else earlier.number)
            for earlier, slope in row.through.items()
        ]
        of_traces = ([*trace.onward(row), *trace.ties(row)] for trace in self.traces.values())
        return [*through, *(tie for ties in of_traces for tie in ties)]

    def _load(self, *values: Tensor) -> tuple[Tensor, ...]:
        loaded: dict[Use, dict[str, Tensor]] = {use: {} for use in self.traces}
        for (trace, name, _), value in zip(self._trace_states, values, strict=True):
            loaded[trace.use][name] = value
        for use, trace in self.traces.items():
            trace.begin(loaded[use])
        return ()

    def _advance(self, not_followed: Sequence[Held], *values: Tensor) -> tuple[Tensor, ...]:
        self._check_not_followed(not_followed, values)
        for trace in self.traces.values():
            trace.advance(self._new)
        self._forget()
        return ()

    def _forget(self) -> None:
        self._outputs, self._found, self._left, self._rows, self._new = {}, {}, {}, {}, {}
        self._followed, self._graph = set(), None

    def _find(self, names: Sequence[Held], *values: Tensor) -> tuple[Tensor, ...]:
        """States as the last step left them, for Jacobians; the model gets copies, which it may write in place."""
        shown: list[Tensor] = []
        for held, value in zip(names, values, strict=True):
            is_tied = value.requires_grad and (self._window or held in self.structure.exposed)
            self._found[held] = value.view_as(value) if is_tied else value.detach().requires_grad_()
            shown.append(self._found[held].clone())
            if held in self.structure.unread and not self._window:
                self._refuse_gradient(shown[-1], name_of(held))
        return tuple(shown)

    def _check_results(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Raises :class:`MemoptError` if what the step returns reads a state that is followed in its cell alone."""
        read = {id(leaf) for leaf in leaves_before(results, self._followed)}
        for held in self.structure.entering:
            if id(self._found[held]) in read:
                raise changed(name_of(held), "is read outside its cell")
        return ()

    def _refuse_gradient(self, tensor: Tensor, name: str) -> None:
        """Of a loss: no more than cells are known to read the tensor."""

        def refuse(gradient: Tensor) -> None:
            if not self.gate.closed and gradient.any():
                raise changed(name, "is read outside its cell")

        tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    def _tie_to_past(self, names: Sequence[Held], *values: Tensor) -> tuple[Tensor, ...]:
        traces = self.traces.values()
        ties: list[Ties] = [[(None, t.past(held)) for t in traces if held in t.shapes] for held in names]
        return self.gate.tie([value.detach() for value in values], ties)

    def _set_scale(self, scale: float | Tensor) -> None:
        for trace in self.traces.values():
            trace.set_scale(scale)


def _refuse_further(cell: str, row: Mapping[Any, Tensor]) -> None:
    """Raises :class:`MemoptError` for an entry that is not zero."""
    for source, slope in row.items():
        if slope.any():
            raise changed(cell, f"reads {name_of(source)}")


def name_of(source: Source) -> str:
    """How messages name it."""
    match source:
        case Use(path=path):
            return f"the output of {path}"
        case Held(cell=cell, name=name):
            return f"{cell}.{name}".removeprefix(".")
        case Left(cell=cell):
            return f"what {cell} leaves"


def _made_by(tensors: Sequence[Tensor]) -> dict[Node, int]:
    return {tensor.grad_fn: j for j, tensor in enumerate(tensors) if tensor.grad_fn is not None}


def _entries(keys: Iterable[K], row: Iterator[Tensor | None]) -> dict[K, Tensor]:
    """Those of the next ones that are there, by key."""
    return {key: entry for key in keys if (entry := next(row)) is not None}


def _as_it_is(gradient: Tensor) -> tuple[Tensor]:
    return (gradient,)

"""The traces of all weights of a model, whose time steps begin and end together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from memopt_cli.online.states import State, states_of
from memopt_cli.online.traces import ModuleUse, PastState, Row, Ties, Trace


class TraceSet:
    """One trace for every use of a traced weight."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.by_use = {trace.use: trace for trace in traces}
        self._named = [(trace, name, state) for trace in traces for name, state in states_of(trace).items()]

    @property
    def states(self) -> list[State]:
        """States of all traces."""
        return [state for _, _, state in self._named]

    @property
    def reached(self) -> set[PastState]:
        """States of the model that a traced weight reaches."""
        return {past_state for trace in self.by_use.values() for past_state in trace.shapes}

    def load(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Prepare the first step: give :attr:`states` these ``values``, each ``[B, ...]``."""
        loaded: dict[ModuleUse, dict[str, Tensor]] = {use: {} for use in self.by_use}
        for (trace, name, _), value in zip(self._named, values, strict=True):
            loaded[trace.use][name] = value
        for use, trace in self.by_use.items():
            trace.begin(loaded[use])
        return ()

    def values(self) -> tuple[Tensor, ...]:
        """Return the values of :attr:`states` after the last step, ``[B, ...]`` each."""
        return tuple(trace.live.values[name] for trace, name, _ in self._named)

    def end(self) -> None:
        """Drop the tensors that the traces hold only while steps run."""
        for trace in self.by_use.values():
            trace.end()

    def set_scale(self, scale: float | Tensor) -> None:
        """Divide by ``scale`` the gradients of all tensors that are tied from now on."""
        for trace in self.by_use.values():
            trace.set_scale(scale)

    def advance(self, rows: Mapping[PastState, Row]) -> None:
        """Advance the traces by one step, given the total ``rows`` of the new states."""
        for trace in self.by_use.values():
            trace.advance(rows)

    def ties(self, row: Row) -> Ties:
        """Return the ties of a tensor with ``row`` to the weights and to whatever their inputs were computed from."""
        trace_ties = ([*trace.onward(row), *trace.ties(row)] for trace in self.by_use.values())
        return [tie for ties in trace_ties for tie in ties]

    def past_ties(self, past_state: PastState) -> Ties:
        """Return the ties of ``past_state``, a state after the last step, to all weights that reach it."""
        return [(None, trace.past_channel(past_state)) for trace in self.by_use.values() if past_state in trace.shapes]

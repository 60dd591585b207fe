"""The parts of a time step while it runs: their rows, and the checks against the step that ``compile_graph`` ran.

The structure was found in one step.  If the model branches, a part may read something in a later step that it did not
read in the first.  The traces would then be wrong without a sign, so the checks raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

from memopt_cli.online.graph import AutogradGraph, find_sole_ends, jacobian_row
from memopt_cli.online.interception import changed_step
from memopt_cli.online.structure import Source, Structure
from memopt_cli.online.traces import CellOutput, Gate, ModuleUse, PastState, Row
from memopt_cli.runtime.graph import leaves_before

K = TypeVar("K")


class StepParts:
    """The tensors at which a step is split into parts, and the rows of the cells' outputs so far."""

    def __init__(self, structure: Structure, gate: Gate) -> None:
        self.structure = structure
        self.gate = gate
        self.graph: AutogradGraph | None = None
        """Graph of the step; ``None`` if no check needs it, since no part is read only through weights."""
        self.past_values: dict[PastState, Tensor] = {}
        """State of the last step -> its value."""
        self.use_outputs: dict[ModuleUse, Tensor] = {}
        """Use of a traced weight -> its output."""
        self.cell_outputs: dict[CellOutput, Tensor] = {}
        """Output of a cell -> the tensor."""
        self.rows: dict[CellOutput, Row] = {}
        """Output of a cell -> its row by all paths."""
        self.new_rows: dict[PastState, Row] = {}
        """State -> the row of its new value, by all paths."""
        self._walk_ends: set[Node] = set()
        """Nodes at which a walk of the graph ends, since their tensors were checked when they were made."""

    def end_walks_at(self, tensors: Iterable[Tensor]) -> None:
        """End later walks of the graph at ``tensors``, which are checked when they are made."""
        self._walk_ends.update(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)

    def row(self, key: CellOutput, output: Tensor, new_states: Sequence[Tensor]) -> Row:
        """Return the row of ``output`` by paths inside its cell, or through ``new_states`` if it depends only on them.

        ``key``: the output of the cell that the tensor ``output`` is.
        """
        if key in self.structure.source_states:
            index_by_node = {t.grad_fn: i for i, t in enumerate(new_states) if t.grad_fn is not None}
            indices = sorted(find_sole_ends(output, index_by_node))
            slopes = jacobian_row(self.gate, output, [new_states[index] for index in indices])
            through = {
                CellOutput(key.cell, key.call, index): slope
                for index, slope in zip(indices, slopes, strict=True)
                if slope is not None
            }
            if through:
                return Row(through=through)
        edges = self.structure.edges[key]
        past_values = {state: self.past_values[state] for state in edges.past_states if state in self.past_values}
        use_outputs = {use: self.use_outputs[use] for use in edges.uses if use in self.use_outputs}
        cell_outputs = {out: self.cell_outputs[out] for out in edges.outputs if out in self.cell_outputs}
        unknown_parts = self._unknown_parts(self.structure.known_sources[key])
        tensors = (*past_values.values(), *use_outputs.values(), *cell_outputs.values(), *unknown_parts.values())
        entries = iter(jacobian_row(self.gate, output, tensors))
        row = Row(_entries(past_values, entries), _entries(use_outputs, entries), _entries(cell_outputs, entries))
        _refuse_new_reads(key.cell, _entries(unknown_parts, entries))
        return row

    def check_weighted(self, key: CellOutput | PastState, value: Tensor) -> None:
        """Raise :class:`MemoptError` if ``value`` reads a part directly that it read only through weights before."""
        if self.graph is not None and key in self.structure.sources_by_weight:
            for source in (
                self.graph.find_direct_sources(value, self._unknown_parts(frozenset()))
                & self.structure.sources_by_weight[key]
            ):
                raise changed_step(key.cell, f"reads {describe_source(source)} past the weight that it entered")

    def check_unfollowed(self, past_states: Sequence[PastState], values: Sequence[Tensor]) -> None:
        """Raise :class:`MemoptError` if a state depends on traced weights on which it did not depend before."""
        for past_state, value in zip(past_states, values, strict=True):
            self.check_weighted(past_state, value)
            unknown_parts = self._unknown_parts(self.structure.unfollowed_sources[past_state])
            row = jacobian_row(self.gate, value, list(unknown_parts.values()))
            _refuse_new_reads(past_state.cell, _entries(unknown_parts, iter(row)))

    def check_results(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Raise :class:`MemoptError` if ``results`` of the step read a state that only its cell may read."""
        leaf_ids = {id(leaf) for leaf in leaves_before(results, self._walk_ends)}
        for past_state in self.structure.entering_states:
            if id(self.past_values[past_state]) in leaf_ids:
                raise changed_step(describe_source(past_state), "is read outside its cell")
        return ()

    def _unknown_parts(self, known_sources: frozenset[Source]) -> dict[Source, Tensor]:
        parts: tuple[Mapping[Any, Tensor], ...] = (self.past_values, self.use_outputs, self.cell_outputs)
        return {key: tensor for part in parts for key, tensor in part.items() if key not in known_sources}


def _refuse_new_reads(cell: str, row: Mapping[Any, Tensor]) -> None:
    """Raise :class:`MemoptError` if a derivative in ``row`` is not zero, so that ``cell`` reads a new part."""
    for source, slope in row.items():
        if slope.any():
            raise changed_step(cell, f"reads {describe_source(source)}")


def describe_source(source: Source) -> str:
    """Return the name of ``source`` in messages."""
    match source:
        case ModuleUse(path=path):
            return f"the output of {path}"
        case PastState(cell=cell, name=name):
            return f"{cell}.{name}".removeprefix(".")
        case CellOutput(cell=cell):
            return f"an output of {cell}"


def _entries(keys: Iterable[K], row: Iterator[Tensor | None]) -> dict[K, Tensor]:
    """Take an entry of ``row`` for each of ``keys``; return those that are not ``None``, by key."""
    return {key: entry for key in keys if (entry := next(row)) is not None}

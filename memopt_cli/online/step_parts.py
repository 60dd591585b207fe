"""The parts of a time step while it runs: their rows, and the checks against the step that ``compile_graph`` ran.

The structure was found in one step.  If the model branches, a part may read something in a later step that it did not
read in that one.  The traces would then be wrong, and nothing would show it, so the checks raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

from memopt_cli.online.graph import Graph, jacobian_row, only
from memopt_cli.online.interception import changed
from memopt_cli.online.structure import Source, Structure
from memopt_cli.online.traces import CellOutput, Gate, PastState, Row, Use
from memopt_cli.runtime.graph import leaves_before

K = TypeVar("K")


class StepParts:
    """The tensors at which a step is taken apart, and the rows of the cells' outputs so far."""

    def __init__(self, structure: Structure, gate: Gate) -> None:
        self.structure = structure
        self.gate = gate
        self.graph: Graph | None = None
        """Graph of the step; ``None`` if no check needs it, since no part is read through weights only."""
        self.past_values: dict[PastState, Tensor] = {}
        """State of the last step -> its value."""
        self.outputs: dict[Use, Tensor] = {}
        """Use of a traced weight -> its output."""
        self.out: dict[CellOutput, Tensor] = {}
        """Output of a cell -> the tensor."""
        self.rows: dict[CellOutput, Row] = {}
        """Output of a cell -> its row by all paths."""
        self.new_rows: dict[PastState, Row] = {}
        """State -> the row of its new value, by all paths."""
        self._followed: set[Node] = set()
        """Nodes at which a walk of the graph ends: the tensors there were checked when they were made."""

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """End later walks of the graph at ``tensors``, which are checked when they are made."""
        self._followed.update(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)

    def row(self, out: CellOutput, q: Tensor, new: Sequence[Tensor]) -> Row:
        """Return the row of ``q`` by paths inside its cell; through ``new`` states if ``q`` depends only on these."""
        if out in self.structure.derived:
            states = sorted(only(q, _made_by(new)))
            slopes = jacobian_row(self.gate, q, [new[j] for j in states])
            through = {
                CellOutput(out.cell, out.call, j): s for j, s in zip(states, slopes, strict=True) if s is not None
            }
            if through:
                return Row(through=through)
        edges, known = self.structure.edges[out], self.structure.known[out]
        held = {key: self.past_values[key] for key in edges.held if key in self.past_values}
        uses = {key: self.outputs[key] for key in edges.uses if key in self.outputs}
        earlier = {key: self.out[key] for key in edges.out if key in self.out}
        others = self._unknown_parts(known)
        entries = iter(
            jacobian_row(self.gate, q, [*held.values(), *uses.values(), *earlier.values(), *others.values()])
        )
        row = Row(_entries(held, entries), _entries(uses, entries), _entries(earlier, entries))
        _refuse_further(out.cell, _entries(others, entries))
        return row

    def check_weighted(self, key: CellOutput | PastState, q: Tensor) -> None:
        """Raise :class:`MemoptError` if ``q`` now reads a part directly that it read only through weights."""
        if self.graph is not None and key in self.structure.weighted:
            for source in self.graph.read_directly(q, self._unknown_parts(frozenset())) & self.structure.weighted[key]:
                raise changed(key.cell, f"reads {name_of(source)} past the weight that it entered")

    def check_not_followed(self, cells: Sequence[PastState], values: Sequence[Tensor]) -> None:
        """Raise :class:`MemoptError` if a state that did not depend on traced weights now does."""
        for held, value in zip(cells, values, strict=True):
            self.check_weighted(held, value)
            others = self._unknown_parts(self.structure.not_followed[held])
            row = jacobian_row(self.gate, value, list(others.values()))
            _refuse_further(held.cell, _entries(others, iter(row)))

    def check_results(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Raise :class:`MemoptError` if ``results`` of the step read a state that only its cell may read."""
        read = {id(leaf) for leaf in leaves_before(results, self._followed)}
        for held in self.structure.entering:
            if id(self.past_values[held]) in read:
                raise changed(name_of(held), "is read outside its cell")
        return ()

    def _unknown_parts(self, known: frozenset[Source]) -> dict[Source, Tensor]:
        """Return the parts of this step so far that are not ``known``."""
        parts: tuple[Mapping[Any, Tensor], ...] = (self.past_values, self.outputs, self.out)
        return {key: tensor for part in parts for key, tensor in part.items() if key not in known}


def _refuse_further(cell: str, row: Mapping[Any, Tensor]) -> None:
    """Raise :class:`MemoptError` if a derivative in ``row`` is not zero: ``cell`` reads a part that it did not read."""
    for source, slope in row.items():
        if slope.any():
            raise changed(cell, f"reads {name_of(source)}")


def name_of(source: Source) -> str:
    """Return the name of ``source`` in messages."""
    match source:
        case Use(path=path):
            return f"the output of {path}"
        case PastState(cell=cell, name=name):
            return f"{cell}.{name}".removeprefix(".")
        case CellOutput(cell=cell):
            return f"an output of {cell}"


def _made_by(tensors: Sequence[Tensor]) -> dict[Node, int]:
    return {tensor.grad_fn: j for j, tensor in enumerate(tensors) if tensor.grad_fn is not None}


def _entries(keys: Iterable[K], row: Iterator[Tensor | None]) -> dict[K, Tensor]:
    """Return key -> next entry of ``row``, for each of ``keys`` that has one."""
    return {key: entry for key in keys if (entry := next(row)) is not None}

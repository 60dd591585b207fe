"""What a step has made so far, and what it may not read: the rows of tensors that leave its cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

from memopt_cli.online.graph import Graph, jacobian_row, only
from memopt_cli.online.interception import changed
from memopt_cli.online.structure import Source, Structure
from memopt_cli.online.traces import Gate, Held, Left, Row, Use
from memopt_cli.runtime.leaves import leaves_before

K = TypeVar("K")


class StepParts:
    """The tensors at which a step is taken apart, and the rows of those that have left a cell."""

    def __init__(self, structure: Structure, gate: Gate) -> None:
        self.structure = structure
        self.gate = gate
        self.graph: Graph | None = None
        """There if something may enter weights alone."""
        self.found: dict[Held, Tensor] = {}
        """States as the last step left them."""
        self.outputs: dict[Use, Tensor] = {}
        """Of traced weights."""
        self.left: dict[Left, Tensor] = {}
        self.rows: dict[Left, Row] = {}
        """Total ones."""
        self.new: dict[Held, Row] = {}
        """Those of states as this step leaves them."""
        self._followed: set[Node] = set()
        """Inputs of traced weights, and what leaves a cell: what they were computed from is looked at there."""

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """What these were computed from has been looked at."""
        self._followed.update(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)

    def row(self, left: Left, q: Tensor, new: Sequence[Tensor]) -> Row:
        """By paths within the cell; through its new states, if it is known to depend on these alone."""
        if left in self.structure.derived:
            states = sorted(only(q, _made_by(new)))
            slopes = jacobian_row(self.gate, q, [new[j] for j in states])
            through = {Left(left.cell, left.call, j): s for j, s in zip(states, slopes, strict=True) if s is not None}
            if through:
                return Row(through=through)
        edges, known = self.structure.edges[left], self.structure.known[left]
        held = {key: self.found[key] for key in edges.held if key in self.found}
        uses = {key: self.outputs[key] for key in edges.uses if key in self.outputs}
        past = {key: self.left[key] for key in edges.left if key in self.left}
        others = self._others(known)
        row = iter(jacobian_row(self.gate, q, [*held.values(), *uses.values(), *past.values(), *others.values()]))
        found = Row(_entries(held, row), _entries(uses, row), _entries(past, row))
        _refuse_further(left.cell, _entries(others, row))
        return found

    def check_weighted(self, key: Left | Held, q: Tensor) -> None:
        """Raises :class:`MemoptError` for what used to enter weights alone, and reaches ``q`` past them as well."""
        if self.graph is not None and key in self.structure.weighted:
            for source in self.graph.read_directly(q, self._others(frozenset())) & self.structure.weighted[key]:
                raise changed(key.cell, f"reads {name_of(source)} past the weight that it entered")

    def check_not_followed(self, cells: Sequence[Held], values: Sequence[Tensor]) -> None:
        """Raises :class:`MemoptError` if a state that carried nothing of a traced weight has come to do so."""
        for held, value in zip(cells, values, strict=True):
            self.check_weighted(held, value)
            others = self._others(self.structure.not_followed[held])
            row = jacobian_row(self.gate, value, list(others.values()))
            _refuse_further(held.cell, _entries(others, iter(row)))

    def check_results(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Raises :class:`MemoptError` if what the step returns reads a state that is followed in its cell alone."""
        read = {id(leaf) for leaf in leaves_before(results, self._followed)}
        for held in self.structure.entering:
            if id(self.found[held]) in read:
                raise changed(name_of(held), "is read outside its cell")
        return ()

    def _others(self, known: frozenset[Source]) -> dict[Source, Tensor]:
        """All that there is in this step so far, but for what is ``known``."""
        parts: tuple[Mapping[Any, Tensor], ...] = (self.found, self.outputs, self.left)
        return {key: tensor for part in parts for key, tensor in part.items() if key not in known}


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

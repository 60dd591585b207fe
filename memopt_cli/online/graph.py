"""Walking autograd's graph of one time step, to find the parts that a tensor was computed from, and Jacobians."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from memopt_cli.online.operations import traceable_layers
from memopt_cli.online.structure import Source
from memopt_cli.online.traces import Gate
from memopt_cli.runtime.graph import nodes_from
from memopt_cli.runtime.private_torch import vector_jacobian

_PRODUCTS = (
    "Addbmm", "Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "CudnnRnn", "Dot", "Embedding", "Linear", "Miopen",
    "Mkldnn", "Mm", "Mv", "Trilinear",
)  # fmt: skip
"""Beginnings of the names of nodes that are products with a weight, if one of their factors is a parameter."""


def jacobian_row(
    gate: Gate, q: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None
) -> list[Tensor | None]:
    """Return ``cotangent * dq/dinput`` for each of ``inputs``, by paths within the cell, or ``None`` without a path.

    Without a ``cotangent``, all its entries are 1, which gives the diagonal of an elementwise Jacobian.
    """
    if not q.requires_grad or not inputs:
        return [None] * len(inputs)
    gate.closed = True
    try:
        ones = torch.ones_like(q) if cotangent is None else cotangent
        return vector_jacobian((q,), (ones,), inputs)
    finally:
        gate.closed = False


@dataclass(slots=True)
class Reads:
    """The parts of a step that a tensor was computed from."""

    direct: set[Source] = field(default_factory=set)
    """Parts on paths that enter no weight."""
    weighted: set[Source] = field(default_factory=set)
    """Parts on paths that enter a weight without a tag."""
    has_parameters: bool = False
    """Whether the tensor reads trainable parameters, or inputs of the model that require a gradient."""
    tagged: set[str] = field(default_factory=set)
    """Paths of modules whose tagged weights the tensor reads without a call of the module, as in ``x @ fc.weight``."""
    plain: set[str] = field(default_factory=set)
    """Names of trainable parameters that are read and belong to no layer that could be tagged."""
    mixed: set[Source] = field(default_factory=set)
    """Parts in ``direct`` that are not read neuron by neuron (but by a sum over neurons, for example), or that are also
    in ``weighted``."""

    @property
    def sources(self) -> set[Source]:
        return self.direct | self.weighted


_Edge = tuple[Node, int]


def _edge_of(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class AutogradGraph:
    """Autograd's graph of a step, walked from a tensor to the leaves that it was computed from."""

    def __init__(self, model: nn.Module, trainable: set[int], weights: Mapping[str, nn.Module]) -> None:
        self._parameters = {id(p) for p in model.parameters()}
        self._has_frozen = any(not p.requires_grad for p in model.parameters())
        self._trainable = trainable
        layers = [p for layer in traceable_layers(model) for p in layer.parameters()]
        names = {id(p): name for name, p in model.named_parameters() if id(p) in trainable}
        self._plain = {key: name for key, name in names.items() if key not in set(map(id, layers))}
        self._tagged = {id(p): path for path, module in weights.items() for p in module.parameters()}

    def reads(self, tensor: Tensor, leaves: Mapping[Source, Tensor]) -> Reads:
        """Return the parts that ``tensor`` was computed from; ``leaves`` maps each part to its leaf in the graph."""
        names = {id(leaf): source for source, leaf in leaves.items()}
        reads = Reads()
        for leaf, weighted in self._walk(tensor):
            if (source := names.get(id(leaf))) is not None:
                (reads.weighted if weighted else reads.direct).add(source)
            elif id(leaf) not in self._parameters or id(leaf) in self._trainable:
                reads.has_parameters = True
                if (path := self._tagged.get(id(leaf))) is not None:
                    reads.tagged.add(path)
                if (name := self._plain.get(id(leaf))) is not None:
                    reads.plain.add(name)
        return reads

    def _walk(self, tensor: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yield each leaf that ``tensor`` was computed from, and whether a path to it enters a weight."""
        if tensor.grad_fn is None:
            if tensor.requires_grad:
                yield tensor, False
            return
        pending, seen = [(tensor.grad_fn, False)], set()
        while pending:
            node, weighted = pending.pop()
            if (node, weighted) in seen:
                continue
            seen.add((node, weighted))
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf, weighted
                continue
            weighted = weighted or self._is_weight(node)
            pending += [(input_node, weighted) for input_node, _ in node.next_functions if input_node is not None]

    def find_direct_sources(self, tensor: Tensor, sources: Mapping[Source, Tensor]) -> set[Source]:
        """Return the ``sources`` from which a path without a weight or another source leads to ``tensor``."""
        ends = {_edge_of(source): key for key, source in sources.items() if source.requires_grad}
        pending = [_edge_of(tensor)] if tensor.requires_grad else []
        seen = set[_Edge]()
        direct = set[Source]()
        while pending:
            edge = pending.pop()
            if edge in seen:
                continue
            seen.add(edge)
            node = edge[0]
            if edge in ends:
                direct.add(ends[edge])
            elif not hasattr(node, "variable") and not self._is_weight(node):
                pending += [
                    (input_node, number) for input_node, number in node.next_functions if input_node is not None
                ]
        return direct

    def _is_weight(self, node: Node) -> bool:
        """Return whether ``node`` is a product with a factor that comes only from parameters."""
        if not node.name().startswith(_PRODUCTS):
            return False
        factors = [
            {id(leaf.variable) for leaf in nodes_from([factor]) if hasattr(leaf, "variable")}
            for factor, _ in node.next_functions
            if factor is not None
        ]
        # A frozen parameter is not in autograd's graph, so a missing edge may be a frozen weight.
        is_fixed = self._has_frozen and any(input_node is None for input_node, _ in node.next_functions)
        return is_fixed or any(factor and factor <= self._parameters for factor in factors)


def find_sole_ends(tensor: Tensor, ends: Mapping[Node, int]) -> frozenset[int]:
    """Return the numbers of the ``ends`` that ``tensor`` depends on.

    The set is empty if ``tensor`` depends on anything else, or if one of these ends depends on another.
    """
    reached, has_leaf = reachable_ends([tensor.grad_fn], ends)
    inputs = (node for end, number in ends.items() if number in reached for node, _ in end.next_functions)
    inner, _ = reachable_ends(inputs, ends)
    return frozenset() if has_leaf or inner & reached else frozenset(reached)


def reachable_ends(starts: Iterable[Node | None], ends: Mapping[Node, int]) -> tuple[set[int], bool]:
    """Return the numbers of the first ``ends`` on paths from ``starts``, and whether another path leads to a leaf."""
    reached: set[int] = set()

    def is_end(node: Node) -> bool:
        if node in ends:
            reached.add(ends[node])
        return node in ends

    leaves = [node for node in nodes_from(starts, is_end) if hasattr(node, "variable")]
    return reached, bool(leaves)

"""Which weights carry traces, found by running one step and differentiating it.

A step is taken apart at the states that the last one left, at the outputs of tagged weights, and at what leaves the
cells.  What each part reads of the others, and whether it does so neuron by neuron, says which states a weight reaches:
paths from cell to cell are followed through the time steps, and end where they enter a weight, traced or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from memopt_cli.errors import MemoptError
from memopt_cli.online.interception import Interception, cell_states
from memopt_cli.online.operations import operation_of, trace_kind
from memopt_cli.online.states import State
from memopt_cli.online.traces import Gate, Group, Held, Left, Use
from memopt_cli.online.undeclared import refuse_undeclared
from memopt_cli.runtime.private_torch import tree_leaves, vector_jacobian
from memopt_cli.runtime.state import StartingState

_SPREADS = (1.0, 10.0)
"""How far from rest states are where the step is looked at, the structure at the first: what mixes neurons only where
they are large is seen at the last.
"""

Source = Held | Use | Left
"""What a tensor may be computed from."""

_PRODUCTS = (
    "Addbmm", "Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "CudnnRnn", "Dot", "Embedding", "Linear", "Miopen",
    "Mkldnn", "Mm", "Mv", "Trilinear",
)  # fmt: skip
"""Nodes of autograd's graph that multiply with a weight, if one of their factors is a parameter."""


@dataclass(frozen=True, slots=True)
class Edges:
    """What a tensor that leaves a cell depends on neuron by neuron, of all that carries traces."""

    held: tuple[Held, ...] = ()
    uses: tuple[Use, ...] = ()
    left: tuple[Left, ...] = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """What one time step of a model looks like to an online algorithm."""

    groups: dict[Use, tuple[Group, ...]]
    """Use of a traced weight -> the groups of states it reaches neuron by neuron, in this step or a later one, without
    passing another weight."""
    z_shapes: dict[Use, tuple[int, ...] | None]
    """Shape of the weight's input per sample; ``None`` for an elementwise parameter, which has none."""
    cells: tuple[str, ...]
    """Paths of those that have states in a group, or through which others are reached."""
    edges: dict[Left, Edges]
    """Of every tensor that is followed."""
    constant: frozenset[Use]
    """Uses whose input was computed from nothing but the last step's states and the model's inputs."""
    connected: frozenset[Use]
    """Uses whose output is read by more than the cells, which are tied to it."""
    doubled: frozenset[Use]
    """Those of them that one of the cells reads through the graph of an attached tensor."""
    exposed: frozenset[Held]
    """States that, as the last step left them, are read by more than the cell that declares them."""
    attached: frozenset[Left]
    """Tensors that depend on more than their edges tell."""
    derived: dict[Left, frozenset[int]]
    """Tensors that depend on nothing but the cell's new states -> the numbers of those states."""
    untraced: dict[str, str]
    """Tagged module -> why it carries no trace: it gets the gradient of each step alone."""
    calls: dict[str, int]
    """Tagged module or cell -> how often the step called it."""
    known: dict[Left, frozenset[Source]]
    """All that a tensor that is followed was computed from, by any path."""
    not_followed: dict[Held, frozenset[Source]]
    """The same of the states that carry nothing of traced weights."""
    unread: frozenset[Held | Use]
    """States, and outputs of traced weights, that no gradient reaches but from the cells that are tied to them."""
    entering: frozenset[Held]
    """States that, as the last step left them, are read outside their cells by weights and by their own cells alone."""
    weighted: dict[Left | Held, frozenset[Source]]
    """Tensor that leaves a cell, or state that is not followed -> what carries traces, and was found to reach it past
    weights without tags alone."""


def find_structure(model: nn.Module, inputs: Sequence[Tensor], *, batched: bool) -> Structure:
    """Run ``model`` on one step's inputs and see; its states and buffers, and the random generator, stay as they were.

    Raises :class:`MemoptError` if a traced weight reaches a state in a way that eligibility traces cannot follow.
    """
    weights = {path: m for path, m in model.named_modules() if trace_kind(m)}
    cells = {path: m for path, m in model.named_modules() if cell_states(m)}
    start = StartingState(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), _all_trainable(model) as trainable:
            refuse_undeclared(model, inputs)
            start.enter()
            graph = Graph(model, trainable, weights)
            probes = [_Probe(weights, cells, graph, batched=batched, spread=spread) for spread in _SPREADS]
            for probe in probes:
                with probe.lanes_of(inputs[0]):
                    probe.take_step(model, inputs)
                start.enter()
    finally:
        start.enter()
    for left, reads in probes[0].reads.items():
        reads.mixed = reads.mixed.union(*(probe.reads[left].mixed for probe in probes if left in probe.reads))
    return _Reach(probes[0]).structure()


def jacobian_row(
    gate: Gate, q: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None
) -> list[Tensor | None]:
    """``cotangent * dq/dinput`` for each input, by paths within the cell; ``None`` where there is no path.

    With the default, a cotangent of ones, that is the diagonal of an elementwise Jacobian.
    """
    if not q.requires_grad or not inputs:
        return [None] * len(inputs)
    gate.closed = True
    try:
        ones = torch.ones_like(q) if cotangent is None else cotangent
        return vector_jacobian((q,), (ones,), inputs)
    finally:
        gate.closed = False


# ---------------------------------------------------------------------------------------------- a step, taken apart


@dataclass(slots=True)
class _Reads:
    """What a tensor was computed from."""

    direct: set[Source] = field(default_factory=set)
    """By paths that enter no weight."""
    weighted: set[Source] = field(default_factory=set)
    """By paths that enter a weight that has no tag."""
    parameters: bool = False
    """Trainable ones, or inputs of the model that want a gradient."""
    tagged: set[str] = field(default_factory=set)
    """Modules whose tagged weights it reads itself, not by calling them."""
    mixed: set[Source] = field(default_factory=set)
    """Of ``direct``, those that do not act neuron by neuron; the weighted ones among them act in two ways."""

    @property
    def sources(self) -> set[Source]:
        return self.direct | self.weighted


class _Probe(Interception):
    """Takes one step with every part of it cut off from the others, and notes what each one reads."""

    def __init__(
        self,
        weights: Mapping[str, nn.Module],
        cells: Mapping[str, nn.Module],
        graph: Graph,
        *,
        batched: bool,
        spread: float,
    ) -> None:
        """``spread``: how far from rest the states are."""
        super().__init__(weights, cells, batched=batched)
        self.reads: dict[Use | Left, _Reads] = {}
        """Of the input of each use and of each tensor that leaves a cell, in the order in which they were made."""
        self.of_output: list[_Reads] = []
        self.z_shapes: dict[Use, tuple[int, ...] | None] = {}
        self.shapes: dict[Left, tuple[int, ...]] = {}
        self.derived: dict[Left, frozenset[int]] = {}
        self.overwritten: set[Held] = set()
        """States that their cells find changed."""
        self.forgotten: set[Held] = set()
        """States that the step leaves as constants."""
        self.read_outside: set[Held] = set()
        """States that their own cell is given by what calls it, besides finding them."""
        self._graph = graph
        self.leaves: dict[Source, Tensor] = {}
        self._shown: dict[Node, int] = {}
        """Nodes of what is shown of states outside their cells, numbered as ``_shown_states``."""
        self._shown_states: list[Held] = []
        self._random = torch.Generator().manual_seed(0)
        self._spread = spread

    def take_step(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Fill in what is noted."""
        for cell, states in self.states.items():
            self.act_on(states, lambda *values, cell=cell: self._hold(cell, values))
        output = self.run(model, inputs)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if results:
            self.lift(self._end, *results)

    def on_use(self, use: Use, *z: Tensor) -> tuple[Tensor]:
        self.z_shapes[use] = tuple(z[0].shape[1:]) if z else None
        self.reads[use] = self._graph.reads(z[0], self.leaves) if z else _Reads()
        operation = operation_of(self.weights[use.path])
        _check_weight(use.path, self.weights[use.path])
        y = operation.apply(z[0] if z else None, self.batch, operation.weight, operation.bias)
        return (self._cut(use, y),)

    def on_overwritten(self, held: Held) -> None:
        self.overwritten.add(held)

    def on_forgotten(self, held: Held) -> None:
        self.forgotten.add(held)

    @property
    def calls(self) -> dict[str, int]:
        """Path of a tagged module or a cell -> how often it was called."""
        return {path: self._calls.get(path, 0) for path in (*self.weights, *self.cells)}

    def on_enter(self, cell: str, call: int, *states: Tensor) -> tuple[Tensor, ...]:
        names = [Held(cell, state.name) for state in self.states[cell]]
        return tuple(
            value if call or held in self.overwritten else self.leaves[held].clone()
            for held, value in zip(names, states, strict=True)
        )

    def on_leave(self, cell: str, call: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._note_outside(cell, tensors)
        count, lefts = len(self.states[cell]), [Left(cell, call, i) for i in range(len(tensors))]
        new = {t.grad_fn: i for i, t in enumerate(tensors[:count]) if t.grad_fn is not None}
        for left, q in zip(lefts, tensors, strict=True):
            _check_real(self.states[cell][left.number].name if left.number < count else "", cell, q)
            self.shapes[left] = tuple(q.shape[1:])
            reads = self.reads[left] = self._graph.reads(q, self.leaves)
            reads.mixed = {s for s in reads.direct if s in reads.weighted or not self._elementwise(q, self.leaves[s])}
            if left.number >= count and (states := only(q, new)):
                self.derived[left] = states
        return tuple(self._cut(left, q) for left, q in zip(lefts, tensors, strict=True))

    def _hold(self, cell: str, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # Away from rest, where surrogates and gates have slopes.
        names = [Held(cell, state.name) for state in self.states[cell]]
        shown = tuple(
            self._cut(held, value + self._spread * self._noise(value)).clone()
            for held, value in zip(names, values, strict=True)
        )
        for held, value in zip(names, shown, strict=True):
            assert value.grad_fn is not None
            self._shown[value.grad_fn] = len(self._shown_states)
            self._shown_states.append(held)
        return shown

    def _note_outside(self, cell: str, tensors: Sequence[Tensor]) -> None:
        reached: set[int] = set()
        for tensor in tensors:
            list(_leaves_behind(tensor, self._shown, reached))
        self.read_outside |= {held for number in reached if (held := self._shown_states[number]).cell == cell}

    def _end(self, *results: Tensor) -> tuple[Tensor, ...]:
        self.of_output = [self._graph.reads(result, self.leaves) for result in results]
        return ()

    def _cut(self, source: Source, tensor: Tensor) -> Tensor:
        self.leaves[source] = tensor.detach().requires_grad_()
        return self.leaves[source]

    def _elementwise(self, q: Tensor, leaf: Tensor) -> bool:
        """An elementwise Jacobian maps a random cotangent to its product with the diagonal: zeros to zeros."""
        (diagonal,) = jacobian_row(self.gate, q, [leaf])
        if diagonal is None:
            return True
        noise = self._noise(q)
        return leaf.shape == q.shape and all(
            _same(image, diagonal * cotangent) and not image[(cotangent == 0) & image.isfinite()].any()
            for cotangent in (noise.clamp_min(0), noise.clamp_max(0))
            if (image := jacobian_row(self.gate, q, [leaf], cotangent)[0]) is not None
        )

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._random, dtype=torch.float64).to(like)


_Edge = tuple[Node, int]


def _edge_of(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class Graph:
    """Walks autograd's graph from a tensor to the leaves that it was computed from."""

    def __init__(self, model: nn.Module, trainable: set[int], weights: Mapping[str, nn.Module]) -> None:
        self._parameters = {id(p) for p in model.parameters()}
        self._has_frozen = any(not p.requires_grad for p in model.parameters())
        self._trainable = trainable
        self._tagged = {id(p): path for path, module in weights.items() for p in module.parameters()}

    def reads(self, tensor: Tensor, leaves: Mapping[Source, Tensor]) -> _Reads:
        """What ``tensor`` was computed from."""
        names = {id(leaf): source for source, leaf in leaves.items()}
        found = _Reads()
        for leaf, weighted in self._walk(tensor):
            if (source := names.get(id(leaf))) is not None:
                (found.weighted if weighted else found.direct).add(source)
            elif id(leaf) not in self._parameters or id(leaf) in self._trainable:
                found.parameters = True
                if (path := self._tagged.get(id(leaf))) is not None:
                    found.tagged.add(path)
        return found

    def _walk(self, tensor: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Each leaf, and whether a path to it enters a weight."""
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
            pending += [(following, weighted) for following, _ in node.next_functions if following is not None]

    def read_directly(self, tensor: Tensor, sources: Mapping[Source, Tensor]) -> set[Source]:
        """Those of the sources that ``tensor`` was computed from by a path past weights and other sources."""
        ends = {_edge_of(source): key for key, source in sources.items() if source.requires_grad}
        pending, seen, found = [_edge_of(tensor)] if tensor.requires_grad else [], set[_Edge](), set[Source]()
        while pending:
            edge = pending.pop()
            if edge in seen:
                continue
            seen.add(edge)
            node = edge[0]
            if edge in ends:
                found.add(ends[edge])
            elif not hasattr(node, "variable") and not self._is_weight(node):
                pending += [(before, number) for before, number in node.next_functions if before is not None]
        return found

    def _is_weight(self, node: Node) -> bool:
        """Whether the node is a product, one factor of which comes from parameters alone."""
        if not node.name().startswith(_PRODUCTS):
            return False
        factors = [
            {id(node.variable)} if hasattr(node, "variable") else {id(leaf) for leaf in _leaves_of_node(node)}
            for node, _ in node.next_functions
            if node is not None
        ]
        is_fixed = self._has_frozen and any(before is None for before, _ in node.next_functions)
        return is_fixed or any(factor and factor <= self._parameters for factor in factors)


def only(tensor: Tensor, ends: Mapping[Node, int]) -> frozenset[int]:
    """The numbers of the ``ends`` that ``tensor`` depends on, if it depends on nothing else and none of them on
    another; else empty.
    """
    reached: set[int] = set()
    if not tensor.requires_grad or next(_leaves_behind(tensor, ends, reached), None) is not None:
        return frozenset()
    inner: set[int] = set()
    for node, number in ends.items():
        if number in reached:
            for before, _ in node.next_functions:
                if before is not None:
                    list(_leaves_of_node(before, ends, inner))
    return frozenset() if inner & reached else frozenset(reached)


def _check_weight(path: str, module: nn.Module) -> None:
    """Raises :class:`MemoptError` for a weight of which two readings are two tensors of other values."""
    if isinstance(vars(module).get("weight"), Tensor):
        raise MemoptError(
            f"a hook computes the weight of {path} anew before each call: no trace can refer to it",
            hint="Use a parametrization (torch.nn.utils.parametrizations), or take the tag off with untraced()",
        )
    once, again = operation_of(module), operation_of(module)
    for a, b in ((once.weight, again.weight), (once.bias, again.bias)):
        if a is not None and b is not None and a is not b and not torch.equal(a, b):
            raise MemoptError(
                f"the weight of {path} is computed anew each time it is read, and differs from the last time",
                hint="Call eval() on the parametrization that computes it, or take the tag off with untraced()",
            )


def _check_real(state: str, cell: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        raise MemoptError(
            f"{f'{cell}.{state}'.removeprefix('.') if state else f'what {cell} returns'} is complex: the Jacobian of a "
            "neuron is not one number then",
            hint="Declare its real and its imaginary part as two states, as memopt_cli.LRU does",
        )


def _leaves_behind(
    tensor: Tensor, ends: Mapping[Node, int] | None = None, reached: set[int] | None = None
) -> Iterator[Tensor]:
    """The leaves that a tensor was computed from.  Paths end at ``ends``; their numbers go to ``reached``."""
    if tensor.grad_fn is None:
        yield tensor
    else:
        yield from _leaves_of_node(tensor.grad_fn, ends, reached)


def leaves_before(tensors: Sequence[Tensor], ends: set[Node]) -> Iterator[Tensor]:
    """The leaves that tensors were computed from, by paths that pass none of the ``ends``."""
    pending, seen = [t.grad_fn for t in tensors if t.grad_fn is not None], set(ends)
    yield from (t for t in tensors if t.grad_fn is None)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [following for following, _ in node.next_functions if following is not None]


def _leaves_of_node(
    start: Node, ends: Mapping[Node, int] | None = None, reached: set[int] | None = None
) -> Iterator[Tensor]:
    pending, seen = [start], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if ends is not None and reached is not None and node in ends:
            reached.add(ends[node])
        elif hasattr(node, "variable"):
            yield node.variable
        else:
            pending += [following for following, _ in node.next_functions if following is not None]


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[set[int]]:
    """Within, frozen parameters are found in the graph as well; gives the ids of those that are not."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield trainable
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _same(a: Tensor, b: Tensor) -> bool:
    finite = a.isfinite() & b.isfinite()
    scale = max(1.0, b[finite].abs().max().item()) if finite.any() else 1.0
    # Of float32 whatever the dtype: surrogates may compute in it, as snnTorch's do.
    return torch.allclose(a[finite], b[finite], rtol=0, atol=scale * torch.finfo(torch.float32).eps ** 0.5)


# ---------------------------------------------------------------------------------------------- what reaches what


class _Reach:
    """Follows the weights from part to part of the step, and on through the time steps."""

    def __init__(self, probe: _Probe) -> None:
        self.probe, self.reads = probe, probe.reads
        self.lefts = [part for part in self.reads if isinstance(part, Left)]
        self.uses = [part for part in self.reads if isinstance(part, Use)]
        self.behind: dict[Left, set[Source]] = {}
        """Tensor that leaves a cell -> the uses and states behind it, past all other cells."""
        for left in self.lefts:
            behind = (self.behind[s] if isinstance(s, Left) else {s} for s in self.reads[left].direct)
            self.behind[left] = set[Source]().union(*behind)
        self.new = {
            Held(left.cell, names[left.number].name): left
            for left in self.lefts
            if left.number < len(names := probe.states[left.cell])
            and Held(left.cell, names[left.number].name) not in probe.forgotten
        }
        """State -> what the cell's last call in the step made of it."""
        self.reached = {use: held for use in self.uses if (held := self._states_reached(use))}
        self.held: set[Held] = set().union(*self.reached.values())
        needed = self._needed()
        self.cells = {left.cell for left in needed if self._carries(left)}
        self.followed = {left for left in needed if left.cell in self.cells}
        self.traced = {use.path for use in self.reached}
        untraced = {use for use in self.uses if use.path not in self.traced}
        self.left_alone: set[Source] = set[Source](untraced).union(self.lefts) - self.followed
        """What is not followed: it is part of what reads it."""

    def structure(self) -> Structure:
        """All that is to be known.  Raises :class:`MemoptError` if traces cannot follow."""
        lefts = [left for left in self.lefts if left in self.followed]
        for left in lefts:
            self._check(left)
        self._check_tagged()
        edges = {left: self._edges(left) for left in lefts}
        constant = frozenset(use for use in self.reached if self._is_constant(use))
        exposed = frozenset(held for held in self.held if self._is_exposed(held))
        for held in exposed:
            self._check_exposed(held, constant)
        attached = frozenset(left for left in lefts if self._is_attached(left, edges[left]))
        connected = frozenset(use for use in self.reached if self._is_connected(use))
        read_by_attached = {use for left in attached - self.probe.derived.keys() for use in edges[left].uses}
        unread = self._unread(constant, connected, read_by_attached)
        reason = "its output enters no cell (a module that declares states), or only past another traced weight"
        return Structure(
            groups={use: self._groups(held) for use, held in self.reached.items()},
            z_shapes={use: self.probe.z_shapes[use] for use in self.reached},
            cells=tuple(path for path in self.probe.cells if path in self.cells),
            edges=edges,
            constant=constant,
            connected=connected,
            doubled=connected & read_by_attached,
            exposed=exposed,
            attached=attached,
            derived={left: states for left, states in self.probe.derived.items() if left in self.followed},
            untraced={path: reason for path in self.probe.weights if path not in self.traced},
            calls=self.probe.calls,
            known={left: self._known(left) for left in lefts},
            not_followed=self._not_followed(),
            unread=unread,
            entering=frozenset(self.held) - unread - exposed,
            weighted=self._weighted(),
        )

    def _known(self, left: Left) -> frozenset[Source]:
        return frozenset(self.reads[left].sources | self._behind_it(self.reads[left])[1])

    def _not_followed(self) -> dict[Held, frozenset[Source]]:
        found: dict[Held, frozenset[Source]] = {}
        for cell in self.probe.cells.keys() - self.cells:
            lefts = [left for left in self.lefts if left.cell == cell]
            known = frozenset[Source]().union(*map(self._known, lefts))
            found |= {Held(cell, state.name): known for state in self.probe.states[cell]}
        return found

    def _unread(
        self, constant: frozenset[Use], connected: frozenset[Use], read_by_attached: set[Use]
    ) -> frozenset[Held | Use]:
        inputs = [self.reads[use] for use in self.uses if use not in constant]
        others = [self.reads[left] for left in self.lefts if left not in self.followed]
        read = set[Source](self.probe.overwritten | self.probe.read_outside).union(
            *(self._behind_it(r)[1] for r in (*inputs, *others, *self.probe.of_output))
        )
        for left in self.followed:
            own = self.reads[left]
            read |= own.weighted | {s for s in own.direct if isinstance(s, Held) and s.cell != left.cell}
        uses = self.reached.keys() - connected - read_by_attached
        return frozenset((self.new.keys() | uses) - read)

    def _weighted(self) -> dict[Left | Held, frozenset[Source]]:
        found: list[tuple[Left | Held, frozenset[Source]]] = [
            (left, self._known(left) - self.reads[left].direct) for left in self.lefts if left in self.followed
        ]
        found += self._not_followed().items()  # by no path past weights: else they would be
        carrying = {key: frozenset(filter(self._carries, sources)) for key, sources in found}
        return {key: sources for key, sources in carrying.items() if sources}

    def _states_reached(self, use: Use) -> set[Held]:
        """In the step of the use, and from there in later ones."""
        reached = {held for held, left in self.new.items() if use in self.behind[left]}
        while more := {h for h, left in self.new.items() if h not in reached and self.behind[left] & reached}:
            reached |= more
        return reached

    def _carries(self, source: Source) -> bool:
        """Whether it depends on traced weights neuron by neuron."""
        if isinstance(source, Left):
            return any(map(self._carries, self.behind[source]))
        return source in self.held or source in self.reached

    def _needed(self) -> set[Left]:
        """What leaves a cell and has to be followed: states, what they are made of, and what comes with traced ones."""
        needed: set[Left] = set()
        with_states = {held.cell for held in self.held}
        for left in reversed(self.lefts):
            if left.number < len(self.probe.states[left.cell]) or left.cell in with_states or left in needed:
                needed |= {left, *(s for s in self.reads[left].direct if isinstance(s, Left))}
        return needed

    def _edges(self, left: Left) -> Edges:
        direct = [s for s in self.probe.leaves if s in self.reads[left].direct and self._carries(s)]
        return Edges(
            held=tuple(s for s in direct if isinstance(s, Held)),
            uses=tuple(s for s in direct if isinstance(s, Use)),
            left=tuple(s for s in direct if isinstance(s, Left)),
        )

    def _groups(self, reached: set[Held]) -> tuple[Group, ...]:
        by_cell: dict[str, list[Held]] = {}
        for held in self.new:
            if held in reached:
                by_cell.setdefault(held.cell, []).append(held)
        return tuple(
            Group(cell, tuple(held.name for held in states), self.probe.shapes[self.new[states[0]]])
            for cell, states in by_cell.items()
        )

    def _is_attached(self, left: Left, edges: Edges) -> bool:
        reads = self.reads[left]
        others = reads.sources - {*edges.held, *edges.uses, *edges.left} | reads.weighted
        return reads.parameters or any(not isinstance(source, Held) for source in others)

    def _is_constant(self, use: Use) -> bool:
        parameters, sources = self._behind_it(self.reads[use])
        return not parameters and all(isinstance(source, Held) for source in sources)

    def _behind_it(self, reads: _Reads) -> tuple[bool, set[Source]]:
        """Whether parameters without traces are, and which sources: those of what is not followed in its place."""
        pending, seen, parameters = [reads], set[Source](), False
        while pending:
            reads = pending.pop()
            parameters |= reads.parameters
            more = reads.sources - seen
            seen |= more
            for source in more & self.left_alone:
                assert not isinstance(source, Held)
                pending.append(self.reads[source])
                parameters |= isinstance(source, Use)
        return parameters, seen - self.left_alone

    def _is_connected(self, use: Use) -> bool:
        """Read by the output, by weights, or by what leaves a cell and is not followed neuron by neuron."""
        parts = ((part in self.followed, reads) for part, reads in self.reads.items())
        return any(use in reads.sources for reads in self.probe.of_output) or any(
            use in (reads.weighted if followed else reads.sources) for followed, reads in parts
        )

    def _is_exposed(self, held: Held) -> bool:
        """Read by the output, past all cells that are followed, or neuron by neuron by another of those; or changed
        before its cell is called.
        """
        return (
            held in self.probe.overwritten
            or any(held in self._behind_it(reads)[1] for reads in self.probe.of_output)
            or any(held in self.reads[left].direct for left in self.followed if left.cell != held.cell)
        )

    def _check(self, left: Left) -> None:
        for source in sorted(filter(self._carries, self.reads[left].mixed), key=str):
            name, of = self._name(source), self._name(left)
            if source in self.reads[left].weighted:
                raise MemoptError(
                    f"{name} reaches {of} through a weight without a tag, and past it as well",
                    hint="Tag that weight with traced(), if it is a linear or convolutional layer: the past is not "
                    "followed through it; or take the tags off those before it with untraced()",
                )
            raise MemoptError(
                f"{name} {self._shape(source)} does not reach {of}, {self.probe.shapes[left]} per sample, neuron by "
                "neuron",
                hint="Let cells hold and pass on only what acts on each neuron by itself, or put a linear layer in "
                "between, where the past ends; or mark the weights before it with untraced(), to train them with the "
                "gradient of each step alone",
            )

    def _check_tagged(self) -> None:
        """Raises :class:`MemoptError` for a tagged weight whose past would be followed for some of its uses alone."""
        tagged: dict[Source, set[str]] = {}
        for left in self.lefts:
            tagged[left] = self.reads[left].tagged.union(*(tagged.get(s, ()) for s in self.reads[left].direct))
        for held, left in self.new.items():
            for path in sorted(tagged[left]):
                raise MemoptError(
                    f"the weight of {path} reaches {self._name(held)} without a call of {path}, by its attribute or by "
                    "a module that shares it: that past is not followed",
                    hint=f"Call {path}, tag the module that shares its weight with traced(), or take the tag of {path} "
                    "off with untraced(), to train it with the gradient of each step alone",
                )

    def _check_exposed(self, held: Held, constant: frozenset[Use]) -> None:
        entering = [self.reads[use] for use in self.uses if use.path in self.traced and use not in constant]
        weighted = [reads for left in self.followed if held not in (reads := self.reads[left]).direct - reads.weighted]
        if any(held in self._behind_it(reads)[1] for reads in (*entering, *weighted)):
            raise MemoptError(
                f"{self._name(held)}, as the last step left it, enters a weight, and is read past it and outside its "
                "cell as well",
                hint="Read it as a constant where it enters the weight: detach() it there.",
            )

    def _name(self, source: Source) -> str:
        if isinstance(source, Use):
            return source.path or "the model"
        if isinstance(source, Held):
            return f"{source.cell}.{source.name}" if source.cell else source.name
        states: Sequence[State] = self.probe.states[source.cell]
        if source.number < len(states):
            return self._name(Held(source.cell, states[source.number].name))
        return f"what {source.cell or 'the model'} returns"

    def _shape(self, source: Source) -> tuple[int, ...]:
        return tuple(self.probe.leaves[source].shape[1:])

"""Which weights carry traces, found by running one step and differentiating it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from memopt_cli.errors import MemoptError
from memopt_cli.online.interception import Interception, cell_states
from memopt_cli.online.operations import operation_of, trace_kind
from memopt_cli.online.traces import Gate, Group, Use
from memopt_cli.runtime.state import StartingState


@dataclass(frozen=True, slots=True)
class Structure:
    """What one time step of a model looks like to an online algorithm."""

    groups: dict[Use, tuple[Group, ...]]
    """Use of a traced weight -> the groups of states it reaches neuron by neuron, without passing another state or
    traced weight."""
    z_shapes: dict[Use, tuple[int, ...] | None]
    """Shape of the weight's input per sample; ``None`` for an elementwise parameter, which has none."""
    constant: frozenset[Use]
    """Uses whose input was computed from nothing but the last step's states and the model's inputs."""
    attached: frozenset[tuple[str, int]]
    """Cell and number of the tensor leaving it, where that depends on more than states and traced weights."""
    derived: dict[tuple[str, int], frozenset[int]]
    """The same, where it depends on nothing but the cell's new states -> the numbers of those states."""
    untraced: dict[str, str]
    """Tagged module -> why it carries no trace: it gets the gradient of each step alone."""


def find_structure(model: nn.Module, inputs: Sequence[Tensor], *, batched: bool) -> Structure:
    """Run ``model`` on one step's inputs and see; its states and buffers, and the random generator, stay as they were.

    Raises :class:`MemoptError` if a traced weight reaches a state in a way that eligibility traces cannot follow.
    """
    weights = {path: m for path, m in model.named_modules() if trace_kind(m)}
    cells = {path: m for path, m in model.named_modules() if cell_states(m)}
    start = StartingState(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            reach = _Reach(weights, cells, batched=batched)
            with reach.lanes_of(inputs[0]):
                reach.run(model, inputs)
            start.enter()
            traced = {use.path for use in reach.reached}
            reached_cells = {group.cell for groups in reach.reached.values() for group in groups}
            paths = _Paths(_only(weights, traced), _only(cells, reached_cells), batched=batched)
            with paths.lanes_of(inputs[0]):
                output = paths.run(model, inputs)
            paths.refuse_bypass(output)
    finally:
        start.enter()
    reason = "its output enters no cell (a module that declares states), or only past another traced weight"
    return Structure(
        groups={use: tuple(groups) for use, groups in reach.reached.items()},
        z_shapes={use: shape for use, shape in reach.z_shapes.items() if use.path in traced},
        constant=frozenset(paths.constant),
        attached=frozenset(paths.attached),
        derived=paths.derived,
        untraced={path: reason for path in weights if path not in traced},
    )


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
        # What torch.autograd.grad calls once it has checked its arguments, which takes as long as a small Jacobian.
        return list(Variable._execution_engine.run_backward((q,), (ones,), True, False, tuple(inputs), True, False))
    finally:
        gate.closed = False


class _Reach(Interception):
    """Finds which uses of weights reach which cells, and that they do so neuron by neuron."""

    def __init__(self, weights: Mapping[str, nn.Module], cells: Mapping[str, nn.Module], *, batched: bool) -> None:
        super().__init__(weights, cells, batched=batched)
        self.reached: dict[Use, list[Group]] = {}
        self.z_shapes: dict[Use, tuple[int, ...] | None] = {}
        self._outputs: dict[Use, Tensor] = {}
        self._found: dict[str, tuple[Tensor, ...]] = {}
        self._random = torch.Generator().manual_seed(0)

    def on_use(self, use: Use, *z: Tensor) -> tuple[Tensor]:
        self.z_shapes[use] = tuple(z[0].shape[1:]) if z else None
        operation = operation_of(self.weights[use.path])
        y = operation.apply(z[0] if z else None, self.batch, operation.weight, operation.bias)
        self._outputs[use] = y.detach().requires_grad_()
        return (self._outputs[use],)

    def on_enter(self, cell: str, *states: Tensor) -> tuple[Tensor, ...]:
        # Away from rest, where surrogates and gates have slopes.
        self._found[cell] = tuple((s + self._noise(s)).detach().requires_grad_() for s in states)
        return self._found[cell]

    def on_leave(self, cell: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        uses, states = list(self._outputs), self._found[cell]
        inputs = [*states, *self._outputs.values()]
        rows = [jacobian_row(self.gate, q, inputs) for q in tensors]
        reaching = [use for i, use in enumerate(uses, len(states)) if any(row[i] is not None for row in rows)]
        if reaching:
            names = tuple(state.name for state in self.states[cell])
            for q, row in zip(tensors, rows, strict=True):
                self._check(cell, q, inputs, row, [*names, *(use.path for use in uses)])
            group = Group(cell, names, tuple(states[0].shape[1:]))
            for use in reaching:
                self.reached.setdefault(use, []).append(group)
        return tuple(q.detach().requires_grad_() for q in tensors)

    def _check(
        self, cell: str, q: Tensor, inputs: Sequence[Tensor], row: Sequence[Tensor | None], names: Sequence[str]
    ) -> None:
        """An elementwise Jacobian maps a random cotangent to its product with the diagonal."""
        cotangent = self._noise(q)
        mapped = jacobian_row(self.gate, q, inputs, cotangent)
        for tensor, diagonal, image, name in zip(inputs, row, mapped, names, strict=True):
            if diagonal is None or image is None:
                continue
            if tensor.shape != q.shape or not _same(image, diagonal * cotangent):
                raise MemoptError(
                    f"{name} {tuple(tensor.shape)} does not reach what {cell or 'the model'} makes of it, "
                    f"{tuple(q.shape)}, neuron by neuron",
                    hint="let the cell hold only what acts on each neuron by itself; or mark the weight with "
                    "untraced(), to train it with the gradient of each step alone",
                )

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._random, dtype=torch.float64).to(like)


class _Paths(Interception):
    """With the traced weights known: what else the tensors of a step depend on."""

    def __init__(self, weights: Mapping[str, nn.Module], cells: Mapping[str, nn.Module], *, batched: bool) -> None:
        super().__init__(weights, cells, batched=batched)
        self.constant: set[Use] = set()
        self.attached: set[tuple[str, int]] = set()
        self.derived: dict[tuple[str, int], frozenset[int]] = {}
        self._outputs: dict[Use, Tensor] = {}
        self._onward: list[Tensor] = []
        self._states: set[int] = set()
        self._found: list[Tensor] = []

    def on_use(self, use: Use, *z: Tensor) -> tuple[Tensor]:
        if z and set(_sources(z[0])) <= self._states:
            self.constant.add(use)
        operation = operation_of(self.weights[use.path])
        y = operation.apply(z[0] if z else None, self.batch, operation.weight, operation.bias)
        self._onward.append(y)
        self._outputs[use] = y.detach().requires_grad_()
        return (self._outputs[use],)

    def on_enter(self, cell: str, *states: Tensor) -> tuple[Tensor, ...]:
        found = tuple(s.detach().requires_grad_() for s in states)
        self._found += found
        self._states |= set(map(id, found))
        return found

    def on_leave(self, cell: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        known = self._states | {id(y) for y in self._outputs.values()}
        self.attached |= {(cell, i) for i, q in enumerate(tensors) if not set(_sources(q)) <= known}
        number = {t.grad_fn: i for i, t in enumerate(tensors[: len(self.states[cell])]) if t.grad_fn is not None}
        for i, q in enumerate(tensors[len(self.states[cell]) :], start=len(self.states[cell])):
            reached: set[int] = set()
            leaves = set(_sources(q, number, reached))
            if q.requires_grad and not leaves:
                self.derived[cell, i] = frozenset(reached)
        return tuple(q.detach().requires_grad_() for q in tensors)

    def refuse_bypass(self, output: object) -> None:
        """What leaves a cell other than as its state or its result would lose the gradient that comes from there."""
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        entries = {id(y): f"the output of {use.path}" for use, y in self._outputs.items()}
        states = {id(s): "the last step's state of a cell" for s in self._found}
        for ends, names in ((results, entries | states), (self._onward, entries)):
            inside = [t for t in (*self._outputs.values(), *self._found) if id(t) in names]
            for end in ends:
                for tensor, gradient in zip(inside, jacobian_row(self.gate, end, inside), strict=True):
                    if gradient is not None:
                        raise MemoptError(
                            f"{names[id(tensor)]} reaches a state, and something else past the states",
                            hint="use a weight of its own for each and let a cell return what others read of it; or "
                            "mark the weight with untraced()",
                        )


def _sources(
    tensor: Tensor, ends: Mapping[torch.autograd.graph.Node, int] | None = None, reached: set[int] | None = None
) -> Iterator[int]:
    """Ids of the leaves that a tensor was computed from.  Paths end at ``ends``; their numbers go to ``reached``."""
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield id(tensor)
        return
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if ends is not None and reached is not None and node in ends:
            reached.add(ends[node])
        elif hasattr(node, "variable"):
            yield id(node.variable)
        else:
            pending += [following for following, _ in node.next_functions if following is not None]


def _same(a: Tensor, b: Tensor) -> bool:
    finite = a.isfinite() & b.isfinite()
    scale = max(1.0, b[finite].abs().max().item()) if finite.any() else 1.0
    return torch.allclose(a[finite], b[finite], rtol=0, atol=scale * torch.finfo(a.dtype).eps ** 0.5)


def _only(modules: Mapping[str, nn.Module], paths: set[str]) -> dict[str, nn.Module]:
    return {path: module for path, module in modules.items() if path in paths}

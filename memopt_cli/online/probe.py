"""Taking one time step of a model apart, to record which parts each part reads, and whether neuron by neuron.

Every part (a state from the last step, an output of a tagged weight or of a cell) is replaced by a detached copy that
requires gradients, a *leaf*.  The leaves of a tensor's graph are then the parts that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from memopt_cli.errors import MemoptError
from memopt_cli.online.graph import AutogradGraph, Reads, find_sole_ends, jacobian_row, reachable_ends
from memopt_cli.online.interception import Interception
from memopt_cli.online.operations import make_operation
from memopt_cli.online.structure import Source
from memopt_cli.online.traces import CellOutput, ModuleUse, PastState
from memopt_cli.runtime.private_torch import tree_leaves


class Probe(Interception):
    """A time step that cuts every part off from the others, and records the parts read by each."""

    def __init__(
        self,
        weights: Mapping[str, nn.Module],
        cells: Mapping[str, nn.Module],
        graph: AutogradGraph,
        *,
        batched: bool,
        spread: float,
    ) -> None:
        """Prepare a step from random states, on average ``spread`` away from their values at rest."""
        super().__init__(weights, cells, batched=batched)
        self.reads: dict[ModuleUse | CellOutput, Reads] = {}
        """Use -> the parts that its input reads; output of a cell -> the parts that it reads, in order."""
        self.output_reads: list[Reads] = []
        """The parts that each tensor of the model's output reads."""
        self.input_shapes: dict[ModuleUse, tuple[int, ...] | None] = {}
        """Use -> shape of its input per sample; ``None`` for an elementwise parameter, which has no input."""
        self.shapes: dict[CellOutput, tuple[int, ...]] = {}
        """Output of a cell -> its shape per sample."""
        self.derived: dict[CellOutput, frozenset[int]] = {}
        """Output of a cell that depends only on the cell's new states -> the numbers of those states."""
        self.overwritten: set[PastState] = set()
        """States that another module writes before their cell is called."""
        self.forgotten: set[PastState] = set()
        """States that another module has set to a constant when the step ends."""
        self.read_outside: set[PastState] = set()
        """States that the model reads and passes to their own cell as an argument."""
        self._graph = graph
        self.leaves: dict[Source, Tensor] = {}
        """Part -> the leaf that takes its place."""
        self._shown_nodes: dict[Node, int] = {}
        """Node of autograd's graph at which the model gets the value of a state -> the index in ``_states_shown``."""
        self._states_shown: list[PastState] = []
        self._random = torch.Generator().manual_seed(0)
        self._spread = spread

    def take_step(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Run one step of ``model`` on ``inputs``, and record the inputs of its parts."""
        for cell, states in self.states.items():
            self.act_on(states, lambda *values, cell=cell: self._cut_states(cell, values))
        output = self.run(model, inputs)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if results:
            self.batch.lift(self._end, *results)

    def on_use(self, use: ModuleUse, *z: Tensor) -> tuple[Tensor]:
        self.input_shapes[use] = tuple(z[0].shape[1:]) if z else None
        self.reads[use] = self._graph.reads(z[0], self.leaves) if z else Reads()
        operation = make_operation(self.weights[use.path])
        _check_weight(use.path, self.weights[use.path])
        y = operation.apply(z[0] if z else None, self.batch.size, operation.weight, operation.bias)
        return (self._cut(use, y),)

    def on_overwritten(self, past_state: PastState) -> None:
        self.overwritten.add(past_state)

    def on_forgotten(self, past_state: PastState) -> None:
        self.forgotten.add(past_state)

    @property
    def calls(self) -> dict[str, int]:
        """Path of a tagged module or a cell -> number of its calls."""
        return {path: self._calls.get(path, 0) for path in (*self.weights, *self.cells)}

    def on_enter(self, cell: str, call: int, *states: Tensor) -> tuple[Tensor, ...]:
        names = [PastState(cell, state.name) for state in self.states[cell]]
        return tuple(
            value if call or past_state in self.overwritten else self.leaves[past_state].clone()
            for past_state, value in zip(names, states, strict=True)
        )

    def on_leave(self, cell: str, call: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        reached, _ = reachable_ends((tensor.grad_fn for tensor in tensors), self._shown_nodes)
        self.read_outside |= {p for number in reached if (p := self._states_shown[number]).cell == cell}
        count = len(self.states[cell])
        outs = [CellOutput(cell, call, i) for i in range(len(tensors))]
        new = {t.grad_fn: i for i, t in enumerate(tensors[:count]) if t.grad_fn is not None}
        for out, q in zip(outs, tensors, strict=True):
            _check_real(self.states[cell][out.number].name if out.number < count else "", cell, q)
            self.shapes[out] = tuple(q.shape[1:])
            reads = self.reads[out] = self._graph.reads(q, self.leaves)
            reads.mixed = {s for s in reads.direct if s in reads.weighted or not self._elementwise(q, self.leaves[s])}
            if out.number >= count and (states := find_sole_ends(q, new)):
                self.derived[out] = states
        return tuple(self._cut(out, q) for out, q in zip(outs, tensors, strict=True))

    def _cut_states(self, cell: str, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # Random values: at rest (mostly 0) a surrogate or gate may have the slope 0, and its output would not seem to
        # depend on the state.
        names = [PastState(cell, state.name) for state in self.states[cell]]
        shown = tuple(
            self._cut(past_state, value + self._spread * self._noise_like(value)).clone()
            for past_state, value in zip(names, values, strict=True)
        )
        for past_state, value in zip(names, shown, strict=True):
            assert value.grad_fn is not None
            self._shown_nodes[value.grad_fn] = len(self._states_shown)
            self._states_shown.append(past_state)
        return shown

    def _end(self, *results: Tensor) -> tuple[Tensor, ...]:
        self.output_reads = [self._graph.reads(result, self.leaves) for result in results]
        return ()

    def _cut(self, source: Source, tensor: Tensor) -> Tensor:
        self.leaves[source] = tensor.detach().requires_grad_()
        return self.leaves[source]

    def _elementwise(self, q: Tensor, leaf: Tensor) -> bool:
        """Return whether ``q`` depends on ``leaf`` neuron by neuron, that is, by a diagonal Jacobian.

        Backward of a cotangent of ones gives the diagonal, if there is only a diagonal.  If so, a random cotangent must
        give its product with the diagonal, and zeros where it is zero.  With ``q = [x0, x0 + x1]``, ones give
        ``[2, 1]``, but ``[c0, c1]`` gives ``[c0 + c1, c1]`` instead of ``[2 c0, c1]``.
        """
        (diagonal,) = jacobian_row(self.gate, q, [leaf])
        if diagonal is None:
            return True
        noise = self._noise_like(q)
        return leaf.shape == q.shape and all(
            _is_close(image, diagonal * cotangent) and not image[(cotangent == 0) & image.isfinite()].any()
            for cotangent in (noise.clamp_min(0), noise.clamp_max(0))
            if (image := jacobian_row(self.gate, q, [leaf], cotangent)[0]) is not None
        )

    def _noise_like(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._random, dtype=torch.float64).to(like)


def _check_weight(path: str, module: nn.Module) -> None:
    """Raise :class:`MemoptError` if the weight of ``module`` is not the same each time it is read."""
    if isinstance(vars(module).get("weight"), Tensor):
        raise MemoptError(
            f"a hook computes the weight of {path} again before each call, so that no trace can refer to it",
            hint="Use a parametrization (torch.nn.utils.parametrizations), or remove the tag with untraced().",
        )
    first, second = make_operation(module), make_operation(module)
    for a, b in ((first.weight, second.weight), (first.bias, second.bias)):
        if a is not None and b is not None and a is not b and not torch.equal(a, b):
            raise MemoptError(
                f"the weight of {path} is computed again at each read, and differs from the last value",
                hint="Call eval() on the parametrization that computes it, or remove the tag with untraced().",
            )


def _check_real(state: str, cell: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        raise MemoptError(
            f"{f'{cell}.{state}'.removeprefix('.') if state else f'an output of {cell}'} is complex, and the Jacobian "
            "of a neuron must be one real number",
            hint="Declare its real and its imaginary part as two states.",
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    finite = a.isfinite() & b.isfinite()
    scale = max(1.0, b[finite].abs().max().item()) if finite.any() else 1.0
    # The precision of float32, whatever the dtype: surrogates may compute in float32, like snnTorch's.
    return torch.allclose(a[finite], b[finite], rtol=0, atol=scale * torch.finfo(torch.float32).eps ** 0.5)

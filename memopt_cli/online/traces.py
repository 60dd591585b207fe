"""Eligibility traces: what D-RTRL and ES-D-RTRL remember of the past, for one use of one weight.

Take a weight ``W`` with ``y = W z`` and a neuron with the state ``h^t = 0.9 h^(t-1) + y``.  The derivative of the
current state by the weight is ``e^t = dh^t/dW = 0.9 e^(t-1) + z``: the eligibility trace.  If the loss of step t gives
``l = dL^t/dh^t``, the gradient of the weight by all steps so far is ``l e^t``, and no earlier step stays in memory.

In general the weight reaches a group ``h`` of k states per neuron, of one cell or of several that are connected neuron
by neuron.  The factors are ``D = dh^t/dh^(t-1)`` (0.9 above) and ``F = dh^t/dy`` (1 above), both diagonal over neurons.

A :class:`Row` holds one line of these Jacobians: the derivatives of a tensor ``q`` that a cell computes from
``(h^(t-1), y)`` neuron by neuron, such as a new state or a spike.  In backward the gradient of ``q`` must reach the
weights.  For that ``q`` is *tied* to channels (:class:`GradientChannel`): each sums ``coefficient * dL/dq`` over all
``q`` that are tied to it, and turns the sum into gradients of weights, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.operations import Operation, weights_per_output
from memopt_cli.online.states import declare_state


class ModuleUse(NamedTuple):
    """One call of a trace-tagged module within a time step."""

    path: str
    call: int
    """Number of the call in the step, from 0."""


class PastState(NamedTuple):
    """A state as the last step left it: ``h^(t-1)``."""

    cell: str
    """Dotted path of the module that declares the state."""
    name: str


class CellOutput(NamedTuple):
    """A tensor that a call of a cell hands to the rest of the model: a new state, or a part of its output."""

    cell: str
    call: int
    """Number of the call in the step, from 0."""
    number: int
    """Number of the tensor in the call: new states come first, in the order of declaration, then returned tensors."""


@dataclass(frozen=True, slots=True)
class Group:
    """The states of one cell that a weight reaches."""

    cell: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of each state, per sample."""


@dataclass(frozen=True, slots=True)
class Row:
    """The derivatives of one tensor ``q``, as diagonals: every entry has the shape of ``q``.

    There is no entry for a tensor that ``q`` does not depend on.
    """

    hidden: Mapping[PastState, Tensor] = field(default_factory=dict)
    """State -> ``dq/dh^(t-1)``."""
    inputs: Mapping[ModuleUse, Tensor] = field(default_factory=dict)
    """Use of a weight -> ``dq/dy``."""
    through: Mapping[CellOutput, Tensor] = field(default_factory=dict)
    """Earlier output of a cell in this step -> ``dq/doutput``.  ``hidden`` and ``inputs`` then leave out the paths that
    lead through these outputs."""

    def total(self, rows: Mapping[CellOutput, Row]) -> Row:
        """Return the row by all paths, without ``through``; ``rows`` has the total rows of these outputs."""
        if not self.through:
            return self
        hidden, inputs = dict(self.hidden), dict(self.inputs)
        for out, slope in self.through.items():
            _add_product(slope, rows[out].hidden, hidden)
            _add_product(slope, rows[out].inputs, inputs)
        return Row(hidden, inputs)


def _add_product(slope: Tensor, entries: Mapping[Any, Tensor], sums: dict[Any, Tensor]) -> None:
    for key, entry in entries.items():
        sums[key] = sums[key] + slope * entry if key in sums else slope * entry


@dataclass(frozen=True, slots=True, eq=False)
class GradientChannel:
    """A sum of gradients of several outputs of cells, which becomes gradients of weights."""

    targets: tuple[Tensor | None, ...]
    """Tensors that get the gradients, mostly a weight and its bias; ``None`` for one that needs no gradient."""
    to_targets: Callable[[Tensor], tuple[Tensor | None, ...]]
    """Function of the sum that returns the gradients of ``targets``."""


Ties = list[tuple[Tensor | None, "GradientChannel | int"]]
"""Pairs of a coefficient (``None`` stands for 1) and a target: the gradient, times the coefficient, is added to that
channel, or to the gradient of the same call's earlier output with this number."""


class _TiedTensors(torch.autograd.Function):
    """The identity on several tensors; in backward, their gradients also go to their ties."""

    @staticmethod
    def forward(
        ctx: Any, gate: Gate, ties: Sequence[Ties], channels: Sequence[GradientChannel], *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gate, ctx.ties, ctx.channels = gate, ties, channels
        return tuple(value.view_as(value) for value in tensors[: len(ties)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise MemoptError(
                "eligibility traces give first derivatives only, and a second derivative of an online step was "
                "requested",
                hint="Leave create_graph=True out, or differentiate the model without the algorithm.",
            )
        if ctx.gate.closed:
            return (None,) * len(ctx.needs_input_grad)
        sums: dict[GradientChannel | int, Tensor] = {
            i: gradient for i, gradient in enumerate(gradients) if gradient is not None
        }
        # From the last output to the first: an output may be tied to an earlier one of the same call, whose gradient
        # is complete only after all later ones have added their parts.
        for i in reversed(range(len(ctx.ties))):
            for coefficient, target in ctx.ties[i] if i in sums else ():
                part = sums[i] if coefficient is None else sums[i] * coefficient
                sums[target] = sums[target] + part if target in sums else part
        onward = [sums.get(i) if ctx.needs_input_grad[3 + i] else None for i in range(len(ctx.ties))]
        for channel in ctx.channels:
            onward += channel.to_targets(sums[channel]) if channel in sums else (None,) * len(channel.targets)
        return None, None, None, *onward


@dataclass(slots=True)
class Gate:
    """A switch at the tied tensors of a step, through which gradients of a loss pass, and Jacobians do not.

    A Jacobian is taken within one cell, so backward must end at the tensors that enter the cell.
    """

    closed: bool = False
    """Whether a Jacobian is taken now."""

    def tie(self, values: Sequence[Tensor], ties: Sequence[Ties]) -> tuple[Tensor, ...]:
        """Return ``values`` unchanged; in backward the gradient of each also goes to its ``ties``."""
        channels = list(
            dict.fromkeys(end for value_ties in ties for _, end in value_ties if isinstance(end, GradientChannel))
        )
        targets = (target for channel in channels for target in channel.targets)
        tied: tuple[Tensor, ...] = _TiedTensors.apply(self, ties, channels, *values, *targets)  # type: ignore[no-untyped-call]
        return tied


@dataclass(slots=True, eq=False)
class _GradientFactors:
    """The factors that turn a neuron's gradient into a weight's gradient in ES-D-RTRL."""

    z: Tensor | None
    """Filtered input, ``[B, ...]``; ``None`` for a weight without an input."""
    scale: float | Tensor = 1.0
    """Divisor of the gradient, which corrects the bias of the filter's start."""


@dataclass(slots=True, eq=False)
class _RunningStep:
    """The tensors of a trace while a step runs, each with a leading batch axis."""

    values: dict[str, Tensor]
    """Name of the trace's declared state -> its value after the last step."""
    filtered: _GradientFactors
    z: Tensor | None = None
    """Input of the weight in this step, detached; ``None`` for an elementwise parameter."""
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    """Output of the weight; through it gradients reach the tensors that ``z`` was computed from."""
    channels: dict[object, GradientChannel] = field(default_factory=dict)
    """State, or use of the weight -> the channel that sums its gradients in this step."""


class Trace(nn.Module):
    """The eligibility trace of one use of a weight; it is kept in declared states, which are batched like any other."""

    live: _RunningStep

    def __init__(self, use: ModuleUse, groups: Sequence[Group], operation: Operation) -> None:
        super().__init__()
        self.use = use
        self.operation = operation
        self.shapes = {PastState(group.cell, name): group.shape for group in groups for name in group.names}
        """State that the weight reaches -> its shape per sample."""

    def begin(self, values: dict[str, Tensor]) -> None:
        """Begin a step with ``values``: name of a state of the trace -> its value, ``[B, ...]``."""
        self.live = _RunningStep(values, _GradientFactors(values.get("input")))

    def end(self) -> None:
        """Drop everything that belongs to the graph of the last step."""
        del self.live

    def use_weight(self, z: Tensor | None, batch: int, *, attached: bool) -> Tensor:
        """Return ``y`` for the input ``z``, ``[batch, ...]``; ``attached``: in the graph of the weight."""
        live, operation = self.live, self.operation
        live.z = None if z is None else z.detach()
        weight, bias = operation.weight, operation.bias
        if not attached:
            weight, bias = (None if t is None else t.detach() for t in (weight, bias))
        live.y = operation.apply(z, batch, weight, bias)
        return live.y

    def attached(self, z: Tensor | None, batch: int) -> Tensor:
        """Return ``y`` in the graph of the weight, for parts of the model outside cells that read it."""
        return self.operation.apply(z, batch, self.operation.weight, self.operation.bias)

    def set_scale(self, scale: float | Tensor) -> None:
        """Divide by ``scale`` the gradients of all tensors that are tied from now on."""
        self.live.filtered.scale = scale

    def ties(self, row: Row) -> Ties:
        """Return the ties that lead the gradient of a tensor with ``row`` to the weights through the trace."""
        raise NotImplementedError

    def onward(self, row: Row) -> Ties:
        """Return the ties that lead the gradient of a tensor with ``row`` to ``y`` and what ``y`` depends on."""
        live = self.live
        if self.use not in row.inputs or not live.y.requires_grad:
            return []
        channel = live.channels.setdefault(self.use, GradientChannel((live.y,), lambda gradient: (gradient,)))
        return [(row.inputs[self.use], channel)]

    def past_channel(self, past_state: PastState) -> GradientChannel:
        """Return the channel of ``past_state``, which turns ``dL/dh^(t-1)`` into gradients of the weights."""
        raise NotImplementedError

    def advance(self, rows: Mapping[PastState, Row]) -> None:
        """Advance the trace by one step, given the total ``rows`` of the new states; without a row, nothing changes."""
        self.begin(self.live.values | self._advanced({h: row for h, row in rows.items() if h in self.shapes}))

    def _advanced(self, rows: Mapping[PastState, Row]) -> dict[str, Tensor]:
        raise NotImplementedError

    def _channel(self, to_weights: Callable[[Tensor], tuple[Tensor | None, ...]]) -> GradientChannel:
        return GradientChannel((self.operation.weight, self.operation.bias), to_weights)

    def _followed_entries(self, row: Row) -> Iterator[tuple[PastState, Tensor]]:
        return ((past_state, entry) for past_state, entry in row.hidden.items() if past_state in self.shapes)


class FullTrace(Trace):
    """The trace of D-RTRL, ``e^t = D e^(t-1) + F (x) z``: ``B * I * H * k`` numbers, one per weight, neuron and state.

    The gradient ``l e^t`` has two parts: ``l F (x) z`` is the weight's ordinary gradient of this step, which autograd
    computes; ``l D e^(t-1)``, by the steps before, comes through one channel per state.
    """

    def __init__(self, use: ModuleUse, groups: Sequence[Group], operation: Operation) -> None:
        super().__init__(use, groups, operation)
        for past_state, shape in self.shapes.items():
            if _is_trainable(operation.weight):
                declare_state(self, _key(past_state, "weight"), (*shape, weights_per_output(operation)))
            if _is_trainable(operation.bias):
                declare_state(self, _key(past_state, "bias"), shape)

    def use_weight(self, z: Tensor | None, batch: int, *, attached: bool) -> Tensor:
        return super().use_weight(z, batch, attached=True)

    def attached(self, z: Tensor | None, batch: int) -> Tensor:
        return self.live.y

    def ties(self, row: Row) -> Ties:
        return [(entry, self.past_channel(past_state)) for past_state, entry in self._followed_entries(row)]

    def past_channel(self, past_state: PastState) -> GradientChannel:
        live, operation = self.live, self.operation
        weight_trace, bias_trace = (live.values.get(_key(past_state, part)) for part in ("weight", "bias"))

        def to_weights(gradient: Tensor) -> tuple[Tensor | None, ...]:
            return (
                None if weight_trace is None else operation.contract(gradient, weight_trace),
                None if bias_trace is None else operation.bias_gradient(gradient * bias_trace),
            )

        return live.channels.setdefault(past_state, self._channel(to_weights))

    def _advanced(self, rows: Mapping[PastState, Row]) -> dict[str, Tensor]:
        values, z = self.live.values, self.live.z
        patches = None if z is None else self.operation.rows(z)
        parts = {"weight": patches, "bias": None}
        return {
            key: self._advance_part(past_state, row, part, inputs)
            for past_state, row in rows.items()
            for part, inputs in parts.items()
            if (key := _key(past_state, part)) in values
        }

    def _advance_part(self, past_state: PastState, row: Row, part: str, patches: Tensor | None) -> Tensor:
        """Return ``sum_j D_j e_j + F (x) z`` for ``part``, the weight or the bias (with ``z = 1``)."""

        def spread(jacobian: Tensor) -> Tensor:
            return jacobian.unsqueeze(-1) if part == "weight" else jacobian

        old_values = self.live.values
        terms = [spread(entry) * old_values[_key(state, part)] for state, entry in self._followed_entries(row)]
        total = terms[0] if terms else torch.zeros_like(old_values[_key(past_state, part)])
        for term in terms[1:]:
            total += term
        if self.use not in row.inputs:
            return total
        entry = spread(row.inputs[self.use])
        return total.add_(entry) if patches is None else total.addcmul_(entry, patches)


class FactoredTrace(Trace):
    """The trace of ES-D-RTRL, in two factors: ``B * (I + k * H)`` numbers.

    The first factor filters the input, ``e_x^t = a e_x^(t-1) + z``; the second filters the neurons, ``e_f^t = a D
    e_f^(t-1) + (1 - a) F``.  The gradient of a weight is ``sum_B e_x^t (x) (l e_f^t / c)``, and the gradient of a bias
    ``sum_B l e_f^t / c``, with the ``c`` of :meth:`set_scale`.
    """

    def __init__(
        self, use: ModuleUse, groups: Sequence[Group], operation: Operation, decay: float, z_shape: Sequence[int] | None
    ) -> None:
        super().__init__(use, groups, operation)
        self.decay = decay
        if z_shape is not None and _is_trainable(operation.weight):
            declare_state(self, "input", z_shape)
        for past_state, shape in self.shapes.items():
            declare_state(self, _key(past_state, "neuron"), shape)

    def use_weight(self, z: Tensor | None, batch: int, *, attached: bool) -> Tensor:
        y = super().use_weight(z, batch, attached=attached)
        if "input" in self.live.values and self.live.z is not None:
            self.live.filtered.z = self.decay * self.live.values["input"] + self.live.z
        return y

    def ties(self, row: Row) -> Ties:
        factor, filtered = self._factor(row), self.live.filtered
        if factor is None:
            return []
        # The filtered input is looked up in backward: the weight may be used only after this tensor has left its cell.
        channel = self._channel(lambda gradient: self._to_weights(gradient, filtered.z, filtered.scale))
        return [(factor, self.live.channels.setdefault(None, channel))]

    def past_channel(self, past_state: PastState) -> GradientChannel:
        neuron, z = self.live.values[_key(past_state, "neuron")], self.live.values.get("input")
        scale = self.live.filtered.scale
        return self._channel(lambda gradient: self._to_weights(gradient * neuron, z, scale))

    def _to_weights(self, gradient: Tensor, z: Tensor | None, scale: float | Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient / scale
        operation = self.operation
        return (
            None if z is None else operation.weight_gradient(z, gradient),
            operation.bias_gradient(gradient) if _is_trainable(operation.bias) else None,
        )

    def _advanced(self, rows: Mapping[PastState, Row]) -> dict[str, Tensor]:
        values, filtered = self.live.values, self.live.filtered
        factors = {key: self._factor(row) for past_state, row in rows.items() if (key := _key(past_state, "neuron"))}
        advanced = {key: torch.zeros_like(values[key]) if f is None else f for key, f in factors.items()}
        return advanced if filtered.z is None else {**advanced, "input": filtered.z}

    def _factor(self, row: Row) -> Tensor | None:
        """Return ``a sum_j D_j e_f,j + (1 - a) F``, the factor of a tensor with ``row``; ``None`` if it has no term."""
        terms = [
            entry * self.live.values[_key(past_state, "neuron")] for past_state, entry in self._followed_entries(row)
        ]
        use_entry = row.inputs.get(self.use)
        if not terms:
            return None if use_entry is None else use_entry * (1 - self.decay)
        total = sum(terms[1:], terms[0])
        return total.mul_(self.decay) if use_entry is None else total.lerp_(use_entry, 1 - self.decay)


def _key(past_state: PastState, part: str) -> str:
    return f"{past_state.cell}.{past_state.name}:{part}".replace(".", "/")  # the name of a buffer has no dots


def _is_trainable(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad

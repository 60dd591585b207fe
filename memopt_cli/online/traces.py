"""Eligibility traces: what D-RTRL and ES-D-RTRL remember of the past, for one use of one weight.

Notation, for a weight ``W`` with ``y = W z`` that reaches a group ``h`` of k states per neuron: ``D = dh^t/dh^(t-1)``
and ``F = dh^t/dy``, both diagonal over neurons, and ``l = dL^t/dh^t``.

A :class:`Row` is one line of these Jacobians: that of any tensor ``q`` that depends on ``(h^(t-1), y)`` neuron by
neuron, a new state or a spike computed from it.  The gradient reaches the weights through *channels*: tensors that
``q`` is tied to, with a coefficient each.  A channel gets the sum of ``coefficient * dL/dq`` over all ``q`` tied to
it and turns it into gradients of weights, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.operations import Operation, weights_per_output
from memopt_cli.online.states import declare_state

Channels = list[tuple[Tensor | None, Tensor]]
"""Coefficient, ``None`` for 1, and channel, both of the shape of the row's tensor."""


class Use(NamedTuple):
    """One call of a trace-tagged module within a time step."""

    path: str
    call: int
    """0 for the module's first call in a step."""


@dataclass(frozen=True, slots=True)
class Group:
    """The states of one cell that a weight reaches."""

    cell: str
    """Dotted path of the module that declares them."""
    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each of them, per sample."""


@dataclass(frozen=True, slots=True)
class Row:
    """Diagonal Jacobian of one tensor ``q``; every entry has the shape of ``q``."""

    hidden: dict[str, Tensor]
    """State name -> ``dq/dh^(t-1)``.  States that ``q`` does not depend on are left out, uses likewise."""
    inputs: dict[Use, Tensor]
    """Use of a weight -> ``dq/dy``."""


# ---------------------------------------------------------------------------------------------- where gradients go


class _Channel(torch.autograd.Function):
    """Zeros whose gradient becomes gradients of weights."""

    @staticmethod
    def forward(
        ctx: Any, to_weights: Callable[[Tensor], tuple[Tensor | None, ...]], like: Tensor, *weights: Tensor | None
    ) -> Tensor:
        ctx.to_weights = to_weights
        return like.new_zeros(()).expand(like.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        return None, None, *ctx.to_weights(gradient)


class _Tied(torch.autograd.Function):
    """A tensor as it is; its gradient goes on to itself and, times a coefficient each, to its channels."""

    @staticmethod
    def forward(
        ctx: Any, gate: Gate, coefficients: tuple[Tensor | None, ...], value: Tensor, *channels: Tensor
    ) -> Tensor:
        ctx.gate, ctx.coefficients = gate, coefficients
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        if ctx.gate.closed:
            return None, None, None, *(None for _ in ctx.coefficients)
        onward = gradient if ctx.needs_input_grad[2] else None
        return None, None, onward, *(gradient if c is None else gradient * c for c in ctx.coefficients)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise MemoptError(
            "a second derivative of an online step was asked for; traces have first ones alone",
            hint="leave create_graph=True out, or differentiate the model without the algorithm",
        )


@dataclass(slots=True)
class Gate:
    """Stands at states and weights.  Closed while a Jacobian is taken, whose paths end there; losses pass."""

    closed: bool = False

    def tie(self, value: Tensor, channels: Channels) -> Tensor:
        """``value``, unchanged, with its gradient sent into the channels as well."""
        coefficients = tuple(coefficient for coefficient, _ in channels)
        ends = (channel for _, channel in channels)
        tied: Tensor = _Tied.apply(self, coefficients, value, *ends)  # type: ignore[no-untyped-call]
        return tied


# ---------------------------------------------------------------------------------------------- traces


@dataclass(slots=True, eq=False)
class _Live:
    """A trace while a step runs; every tensor with a leading batch axis."""

    values: dict[str, Tensor] = field(default_factory=dict)
    """Name of the declared state -> its value."""
    z: Tensor | None = None
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    """Carries gradient to whatever ``z`` was computed from."""
    scale: float | Tensor = 1.0
    """What the gradient is divided by."""


class Trace(nn.Module):
    """The eligibility trace of one use of a weight.  Its states are declared ones, so they are batched as any other."""

    live: _Live

    def __init__(self, use: Use, groups: Sequence[Group], operation: Operation) -> None:
        super().__init__()
        self.use = use
        self.operation = operation
        self.groups = {group.cell: group for group in groups}

    def begin(self) -> None:
        """A step begins; the values of the states are yet to be filled in."""
        self.live = _Live()

    def end(self) -> None:
        """The step has ended: nothing of its graph stays."""
        del self.live

    def use_weight(self, z: Tensor | None, batch: int, *, attached: bool) -> Tensor:
        """``y``, for an input ``z [batch, ...]``; ``attached``: the weight gets its own gradient from it."""
        live, operation = self.live, self.operation
        weight, bias = operation.weight, operation.bias
        if not attached:
            weight, bias = _detached(weight), _detached(bias)
        live.z = None if z is None else z.detach()
        live.y = operation.apply(z, batch, weight, bias)
        return live.y

    def extend(self, cell: str, rows: Sequence[Row]) -> list[Channels]:
        """The channels of every row, and the traces one step on.  The first rows are those of the cell's states."""
        raise NotImplementedError

    def past(self, cell: str, name: str, like: Tensor) -> Tensor:
        """A channel that takes ``dL/dh`` of a state as the last step left it."""
        raise NotImplementedError

    def _onward(self, row: Row) -> Channels:
        """To whatever ``z`` was computed from."""
        return [(row.inputs[self.use], self.live.y)] if self.use in row.inputs and self.live.y.requires_grad else []

    def _channel(self, like: Tensor, to_weights: Callable[[Tensor], tuple[Tensor | None, ...]]) -> Tensor:
        operation = self.operation
        channel: Tensor = _Channel.apply(to_weights, like, operation.weight, operation.bias)  # type: ignore[no-untyped-call]
        return channel


class FullTrace(Trace):
    """D-RTRL: ``e^t = D e^(t-1) + F (x) z``, an entry per weight, neuron and state: ``B * I * H * k`` numbers.

    The gradient ``l e^t`` is taken in two parts: ``l F (x) z`` is the weight's ordinary gradient of this step;
    ``l D e^(t-1)``, the past, comes through one channel per state.
    """

    def __init__(self, use: Use, groups: Sequence[Group], operation: Operation) -> None:
        super().__init__(use, groups, operation)
        for group in groups:
            for name in group.names:
                if _trainable(operation.weight):
                    declare_state(self, _key(group, name, "weight"), (*group.shape, weights_per_output(operation)))
                if _trainable(operation.bias):
                    declare_state(self, _key(group, name, "bias"), group.shape)

    def use_weight(self, z: Tensor | None, batch: int, *, attached: bool) -> Tensor:
        return super().use_weight(z, batch, attached=True)

    def extend(self, cell: str, rows: Sequence[Row]) -> list[Channels]:
        group = self.groups[cell]
        past = {name: self.past(cell, name, self.live.y) for name in group.names}
        channels = [[*self._onward(row), *((row.hidden[j], past[j]) for j in row.hidden)] for row in rows]
        patches = None if self.live.z is None else self.operation.rows(self.live.z)
        advanced = {}
        for name, row in zip(group.names, rows, strict=False):
            if (key := _key(group, name, "weight")) in self.live.values:
                advanced[key] = self._advanced(group, row, "weight", patches)
            if (key := _key(group, name, "bias")) in self.live.values:
                advanced[key] = self._advanced(group, row, "bias", None)
        self.live.values |= advanced
        return channels

    def past(self, cell: str, name: str, like: Tensor) -> Tensor:
        group, values, operation = self.groups[cell], self.live.values, self.operation
        of_weight, of_bias = (values.get(_key(group, name, part)) for part in ("weight", "bias"))

        def to_weights(gradient: Tensor) -> tuple[Tensor | None, ...]:
            return (
                None if of_weight is None else operation.contract(gradient, of_weight),
                None if of_bias is None else operation.bias_gradient(gradient * of_bias),
            )

        return self._channel(like, to_weights)

    def _advanced(self, group: Group, row: Row, part: str, patches: Tensor | None) -> Tensor:
        """``sum_j D_j e_j + F (x) z``, where ``z`` is 1 for a bias."""

        def spread(jacobian: Tensor) -> Tensor:
            return jacobian.unsqueeze(-1) if part == "weight" else jacobian

        old = {name: self.live.values[_key(group, name, part)] for name in group.names}
        terms = [spread(entry) * old[name] for name, entry in row.hidden.items()]
        total = terms[0] if terms else torch.zeros_like(old[group.names[0]])
        for term in terms[1:]:
            total += term
        if self.use not in row.inputs:
            return total
        entry = spread(row.inputs[self.use])
        return total.add_(entry) if patches is None else total.addcmul_(entry, patches)


class FactoredTrace(Trace):
    """ES-D-RTRL: the input and the neurons are filtered apart, ``B * (I + k * H)`` numbers.

    ``e_x^t = a e_x^(t-1) + z`` and ``e_f^t = a D e_f^(t-1) + (1 - a) F``; the gradient of a weight is
    ``sum_B e_x^t (x) (l e_f^t / c)``, that of a bias ``sum_B l e_f^t / c``, with ``c`` of :meth:`set_scale`.
    """

    def __init__(
        self, use: Use, groups: Sequence[Group], operation: Operation, decay: float, z_shape: Sequence[int] | None
    ) -> None:
        super().__init__(use, groups, operation)
        self.decay = decay
        if z_shape is not None and _trainable(operation.weight):
            declare_state(self, "input", z_shape)
        for group in groups:
            for name in group.names:
                declare_state(self, _key(group, name, "neuron"), group.shape)

    def use_weight(self, z: Tensor | None, batch: int, *, attached: bool) -> Tensor:
        y = super().use_weight(z, batch, attached=attached)
        if "input" in self.live.values and self.live.z is not None:
            self.live.values["input"] = self.decay * self.live.values["input"] + self.live.z
        return y

    def extend(self, cell: str, rows: Sequence[Row]) -> list[Channels]:
        group = self.groups[cell]
        filtered = [self._filtered(group, row) for row in rows]
        channel = self._channel(self.live.y, self._to_weights())
        channels = [[*self._onward(row), (trace, channel)] for row, trace in zip(rows, filtered, strict=True)]
        self.live.values |= {_key(group, n, "neuron"): t for n, t in zip(group.names, filtered, strict=False)}
        return channels

    def past(self, cell: str, name: str, like: Tensor) -> Tensor:
        neuron, to_weights = self.live.values[_key(self.groups[cell], name, "neuron")], self._to_weights()
        return self._channel(like, lambda gradient: to_weights(gradient * neuron))

    def _to_weights(self) -> Callable[[Tensor], tuple[Tensor | None, ...]]:
        operation, z, scale = self.operation, self.live.values.get("input"), self.live.scale
        of_bias = _trainable(operation.bias)

        def to_weights(gradient: Tensor) -> tuple[Tensor | None, ...]:
            gradient = gradient / scale
            return (
                None if z is None else operation.weight_gradient(z, gradient),
                operation.bias_gradient(gradient) if of_bias else None,
            )

        return to_weights

    def _filtered(self, group: Group, row: Row) -> Tensor:
        """``a sum_j D_j e_f,j + (1 - a) F``: the factor of the row's tensor."""
        terms = [entry * self.live.values[_key(group, name, "neuron")] for name, entry in row.hidden.items()]
        total = sum(terms[1:], terms[0]) if terms else torch.zeros_like(self.live.y)
        of_use = row.inputs.get(self.use)
        return total.mul_(self.decay) if of_use is None else total.lerp_(of_use, 1 - self.decay)


def _key(group: Group, name: str, part: str) -> str:
    return f"{group.cell}.{name}:{part}".replace(".", "/")  # the name of a buffer has no dots


def _trainable(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()

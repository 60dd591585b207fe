"""Eligibility traces: what D-RTRL and ES-D-RTRL remember of the past, for one use of one weight.

Notation, for a weight ``W`` with ``y = W z`` that reaches a group ``h`` of k states per neuron: ``D = dh^t/dh^(t-1)``
and ``F = dh^t/dy``, both diagonal over neurons, and ``l = dL^t/dh^t``.

A :class:`Row` is one line of these Jacobians: that of any tensor ``q`` that depends on ``(h^(t-1), y)`` neuron by
neuron, a new state or a spike computed from it.  The gradient reaches the weights through *channels* that ``q`` is
tied to, with a coefficient each.  A channel gets the sum of ``coefficient * dL/dq`` over all ``q`` that leave a cell
and turns it into gradients of weights, once.
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


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """Where gradients of what leaves a cell meet."""

    targets: tuple[Tensor | None, ...]
    to_targets: Callable[[Tensor], tuple[Tensor | None, ...]]
    """What has met -> gradients of the targets."""


Ties = list[tuple[Tensor | None, "Channel | int"]]
"""Coefficient, ``None`` for 1, and where the gradient goes times that: a channel, or the tensor of this number among
those that leave the cell, an earlier one."""


class _Leaving(torch.autograd.Function):
    """Tensors as they are; the gradient of each goes on to itself and, times coefficients, to where it is tied to."""

    @staticmethod
    def forward(
        ctx: Any, gate: Gate, ties: Sequence[Ties], channels: Sequence[Channel], *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gate, ctx.ties, ctx.channels = gate, ties, channels
        return tuple(value.view_as(value) for value in tensors[: len(ties)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        _refuse_second_derivative()
        if ctx.gate.closed:
            return (None,) * len(ctx.needs_input_grad)
        met: dict[Channel | int, Tensor] = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        for i in reversed(range(len(ctx.ties))):
            for coefficient, end in ctx.ties[i] if i in met else ():
                part = met[i] if coefficient is None else met[i] * coefficient
                met[end] = met[end] + part if end in met else part
        onward = [met.get(i) if ctx.needs_input_grad[3 + i] else None for i in range(len(ctx.ties))]
        for channel in ctx.channels:
            onward += channel.to_targets(met[channel]) if channel in met else (None,) * len(channel.targets)
        return None, None, None, *onward


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

    def tie(self, values: Sequence[Tensor], ties: Sequence[Ties]) -> tuple[Tensor, ...]:
        """``values``, unchanged, with the gradient of each sent to where it is tied to as well."""
        channels = list(dict.fromkeys(end for of_value in ties for _, end in of_value if isinstance(end, Channel)))
        targets = (target for channel in channels for target in channel.targets)
        tied: tuple[Tensor, ...] = _Leaving.apply(self, ties, channels, *values, *targets)  # type: ignore[no-untyped-call]
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

    def extend(self, cell: str, rows: Sequence[Row]) -> list[Ties]:
        """The ties of every row, and the traces one step on.  The first rows are those of the cell's states."""
        raise NotImplementedError

    def past(self, cell: str, name: str) -> Channel:
        """A channel that takes ``dL/dh`` of a state as the last step left it."""
        raise NotImplementedError

    def _onward(self, rows: Sequence[Row]) -> list[Ties]:
        """Of every row, to whatever ``z`` was computed from."""
        if not self.live.y.requires_grad:
            return [[] for _ in rows]
        channel = Channel((self.live.y,), lambda gradient: (gradient,))
        return [[(row.inputs[self.use], channel)] if self.use in row.inputs else [] for row in rows]

    def _channel(self, to_weights: Callable[[Tensor], tuple[Tensor | None, ...]]) -> Channel:
        return Channel((self.operation.weight, self.operation.bias), to_weights)


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

    def extend(self, cell: str, rows: Sequence[Row]) -> list[Ties]:
        group = self.groups[cell]
        past = {name: self.past(cell, name) for name in group.names}
        onward = self._onward(rows)
        ties: list[Ties] = [
            [*of_row, *((row.hidden[j], past[j]) for j in row.hidden)] for of_row, row in zip(onward, rows, strict=True)
        ]
        patches = None if self.live.z is None else self.operation.rows(self.live.z)
        advanced = {}
        for name, row in zip(group.names, rows, strict=False):
            if (key := _key(group, name, "weight")) in self.live.values:
                advanced[key] = self._advanced(group, row, "weight", patches)
            if (key := _key(group, name, "bias")) in self.live.values:
                advanced[key] = self._advanced(group, row, "bias", None)
        self.live.values |= advanced
        return ties

    def past(self, cell: str, name: str) -> Channel:
        group, values, operation = self.groups[cell], self.live.values, self.operation
        of_weight, of_bias = (values.get(_key(group, name, part)) for part in ("weight", "bias"))

        def to_weights(gradient: Tensor) -> tuple[Tensor | None, ...]:
            return (
                None if of_weight is None else operation.contract(gradient, of_weight),
                None if of_bias is None else operation.bias_gradient(gradient * of_bias),
            )

        return self._channel(to_weights)

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

    def extend(self, cell: str, rows: Sequence[Row]) -> list[Ties]:
        group = self.groups[cell]
        filtered = [self._filtered(group, row) for row in rows]
        channel = self._channel(self._to_weights())
        ties: list[Ties] = [
            [*of_row, (trace, channel)] for of_row, trace in zip(self._onward(rows), filtered, strict=True)
        ]
        self.live.values |= {_key(group, n, "neuron"): t for n, t in zip(group.names, filtered, strict=False)}
        return ties

    def past(self, cell: str, name: str) -> Channel:
        neuron, to_weights = self.live.values[_key(self.groups[cell], name, "neuron")], self._to_weights()
        return self._channel(lambda gradient: to_weights(gradient * neuron))

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

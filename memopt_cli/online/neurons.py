"""Cells to learn online: neurons whose states act on each neuron by itself, and what makes cells of others."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from memopt_cli.errors import MemoptError, UsageError, first_line
from memopt_cli.online.lanes import with_batch_axis
from memopt_cli.online.operations import ElementWise, traced
from memopt_cli.online.states import declare_state

DECAY = math.exp(-1 / 5)
"""Share of a potential that survives a step of 1 ms at a time constant of 5 ms."""


class _Spike(torch.autograd.Function):
    """Heaviside step at a threshold; ``max(0, 0.3 (1 - |v - threshold|))`` as its derivative."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(v)  # not what is above threshold: a state is there anyway
        ctx.threshold = threshold
        return _heaviside(v, threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        v: Tensor = ctx.saved_tensors[0]
        slope = (v - ctx.threshold).abs_().mul_(-0.3).add_(0.3).clamp_min_(0)
        return slope.mul_(gradients[0]), None


def spike(v: Tensor, threshold: float = 0.0) -> Tensor:
    """1 where ``v`` reaches the threshold, else 0, with a triangle for its derivative: ``max(0, 0.3 (1 - |u|))``, where
    ``u = v - threshold``.  Works under vmap.
    """
    fire = functools.partial(_spike, threshold=threshold)
    spikes: Tensor = with_batch_axis(fire, v)[0] if is_batchedtensor(v) else fire(v)[0]
    return spikes


def _spike(v: Tensor, threshold: float) -> tuple[Tensor]:
    return (_Spike.apply(v, threshold) if v.requires_grad else _heaviside(v, threshold),)  # type: ignore[no-untyped-call]


def _heaviside(v: Tensor, threshold: float) -> Tensor:
    return torch.ge(v, threshold, out=torch.empty_like(v))  # on the CPU much faster than a comparison and a cast


class LIF(nn.Module):
    """Leaky integrate-and-fire neurons, soft reset: ``v^t = decay (v^(t-1) - s(v^(t-1))) + y``; spikes ``s(v^t)``."""

    v: Tensor

    def __init__(self, size: int | Sequence[int], decay: float = DECAY) -> None:
        super().__init__()
        self.decay = decay
        declare_state(self, "v", size)

    def get_spike(self) -> Tensor:
        """Of the potential as it is now."""
        return spike(self.v, threshold=1.0)

    def forward(self, y: Tensor) -> Tensor:
        """Currents ``[B, *size]`` -> spikes of the same shape."""
        self.v = self.decay * (self.v - self.get_spike()) + y
        return self.get_spike()


class IF(LIF):
    """Integrate-and-fire neurons: no leak."""

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__(size, decay=1.0)


class AdaptiveLIF(nn.Module):
    """LIF neurons whose threshold rises with every spike: two states, potential ``v`` and adaptation ``a``.

    ``v^t = decay v^(t-1) + y - threshold s^(t-1)``, ``a^t = rho a^(t-1) + s^(t-1)``, spikes where ``v`` reaches
    ``1 + beta a`` (Bellec et al. 2020).
    """

    v: Tensor
    a: Tensor

    def __init__(self, size: int | Sequence[int], decay: float = DECAY, rho: float = 0.97, beta: float = 0.2) -> None:
        super().__init__()
        self.decay, self.rho, self.beta = decay, rho, beta
        declare_state(self, "v", size)
        declare_state(self, "a", size)

    def get_spike(self) -> Tensor:
        """Of potential and adaptation as they are now."""
        return spike(self.v - self.beta * self.a, threshold=1.0)

    def forward(self, y: Tensor) -> Tensor:
        """Currents ``[B, *size]`` -> spikes of the same shape."""
        before = self.get_spike()
        self.v = self.decay * self.v + y - (1 + self.beta * self.a) * before
        self.a = self.rho * self.a + before
        return self.get_spike()


class GatedUnit(nn.Module):
    """A gated unit that recurs neuron by neuron: ``h^t = f h^(t-1) + (1 - f) c``, with ``f`` and ``c`` of ``[x, h]``.

    Both weights are trace-tagged; the recurrence through them is theirs.
    """

    h: Tensor

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.forget = traced(nn.Linear(inputs + size, size))
        self.candidate = traced(nn.Linear(inputs + size, size))
        declare_state(self, "h", size)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` -> ``[B, size]``."""
        z = torch.cat([x, self.h], dim=-1)
        forget = torch.sigmoid(self.forget(z))
        self.h = forget * self.h + (1 - forget) * torch.tanh(self.candidate(z))
        return self.h


class LeakyRateReadout(nn.Module):
    """``r^t = decay r^(t-1) + s W``: leaks like a neuron, never spikes.

    Its weight is a plain parameter with the gradient of each step alone, as in the network of the reference;
    ``traced(readout.linear)`` gives it a trace.
    """

    r: Tensor

    def __init__(self, size: int, outputs: int, decay: float = DECAY) -> None:
        super().__init__()
        self.decay = decay
        self.linear = nn.Linear(size, outputs, bias=False)
        kaiming_normal_(self.linear.weight)
        declare_state(self, "r", outputs)

    def forward(self, spikes: Tensor) -> Tensor:
        """``[B, size]`` -> ``[B, outputs]``."""
        # Not an add with alpha, which torch.compile drops where it adds to a matrix product.
        self.r = self.decay * self.r + self.linear(spikes)
        return self.r


_FITTING = (
    "name every state that the cell takes and returns, in that order; for one named tuple of states, give a tuple of "
    "that type that holds their shapes"
)


class ExplicitState(nn.Module):
    """A cell of one whose states are passed: ``cell(input, *states) -> (output, *new states)``.

    That is snnTorch's way: ``ExplicitState(snntorch.Leaky(0.9), {"mem": 200})``.  A cell whose states come as one
    named tuple, ``cell(input, state) -> (output, new state)``, is given a tuple of their shapes, as Norse's:
    ``ExplicitState(norse.LIFCell(), norse.LIFFeedForwardState(v=200, i=200))``.  What the cell keeps in attributes of
    its own is put back after each call.
    """

    def __init__(
        self,
        cell: nn.Module,
        states: Mapping[str, int | Sequence[int]] | tuple[int | Sequence[int], ...],
    ) -> None:
        """``states``: name -> shape per sample, in the order in which the cell takes and returns them; or a named
        tuple of shapes, of the type that the cell takes and returns.
        """
        super().__init__()
        self.together = None if isinstance(states, Mapping) else type(states)
        shapes = states if isinstance(states, Mapping) else _shapes_by_name(states)
        if not shapes:
            raise UsageError("a cell without states", hint="give the states that the cell takes: {name: shape}")
        self.cell = cell
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            declare_state(self, name, shape)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the cell returns first."""
        values = [getattr(self, name) for name in self.names]
        held, buffers = dict(vars(self.cell)), dict(self.cell._buffers)
        try:
            returned = self.cell(*inputs, *(values if self.together is None else [self.together(*values)]))
        except MemoptError:
            raise
        except Exception as err:  # the cell's own code may raise anything
            raise MemoptError(
                f"{type(self.cell).__name__} cannot be called with {len(inputs)} inputs and {self._wanted}: "
                f"{first_line(err)}",
                hint=_FITTING,
            ) from err
        finally:
            vars(self.cell).clear()
            vars(self.cell).update(held)
            self.cell._buffers.update(buffers)
        output, states = self._taken_apart(returned)
        for name, state in zip(self.names, states, strict=True):
            setattr(self, name, state)
        return output

    def _taken_apart(self, returned: Any) -> tuple[Tensor, Sequence[Tensor]]:
        parts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        states = parts[1:] if self.together is None else parts[1] if len(parts) == 2 else ()
        if len(states) != len(self.names) or not all(isinstance(t, Tensor) for t in (parts[0], *states)):
            raise MemoptError(
                f"{type(self.cell).__name__} returned {_types_of(returned)}, not an output and {self._wanted}",
                hint=_FITTING,
            )
        return parts[0], states

    @property
    def _wanted(self) -> str:
        names = ", ".join(self.names)
        return f"the states {names}" if self.together is None else f"one {self.together.__name__} of {names}"


def _shapes_by_name(states: object) -> dict[str, int | Sequence[int]]:
    if not isinstance(states, tuple) or not hasattr(states, "_fields"):
        raise UsageError(
            f"states of type {type(states).__name__}", hint="give {name: shape}, or a named tuple of shapes"
        )
    return dict(zip(states._fields, states, strict=True))


def _types_of(returned: object) -> str:
    if isinstance(returned, tuple | list):
        return f"({', '.join(type(part).__name__ for part in returned)})"
    return type(returned).__name__


def kaiming_normal_(weight: Tensor) -> Tensor:
    """Fill ``[O, I]`` with a normal of variance ``2 / I``, cut at two standard deviations, and return it.

    The cut leaves 0.8796 of the standard deviation, which is made up for, as in JAX's and BrainState's initializers.
    """
    std = math.sqrt(2 / weight.shape[1]) / 0.87962566
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def elementwise_decay(size: int, initial: float = DECAY) -> ElementWise:
    """A leak of its own for every neuron, to be learnt: call it within a cell and multiply."""
    return ElementWise(torch.full((size,), initial))

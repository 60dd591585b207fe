"""Cells to learn online: neurons, a projection and a readout, and a wrapper for cells of other libraries."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, UsageError, first_line, type_in_words
from memopt_cli.online.lanes import BATCHING_HINT, with_batch_axis
from memopt_cli.online.states import declare_state, environ, is_number
from memopt_cli.runtime.private_torch import buffers_of, is_of_vmap

_STATES_HINT = (
    "Name every state that the cell takes and returns, in that order. For one named tuple of states, pass a tuple of "
    "that type with their shapes."
)


class _Spike(torch.autograd.Function):
    """A step at a threshold, with ``max(0, 0.3 (1 - |v - threshold|))`` as its derivative."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(v)  # the state ``v`` is in memory anyway; ``v - threshold`` would be a further tensor
        ctx.threshold = threshold
        return _heaviside(v, threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        v: Tensor = ctx.saved_tensors[0]
        slope = (v - ctx.threshold).abs_().mul_(-0.3).add_(0.3).clamp_min_(0)
        return slope.mul_(gradients[0]), None


def spike(v: Tensor, threshold: float = 0.0) -> Tensor:
    """Return 1 where ``v`` reaches ``threshold``, else 0.

    The derivative is a triangle, ``max(0, 0.3 (1 - |u|))`` with ``u = v - threshold``.  Works under vmap.
    """
    apply = functools.partial(_spike, threshold=threshold)
    spikes: Tensor = with_batch_axis(apply, v)[0] if is_of_vmap(v) else apply(v)[0]
    return spikes


def _spike(v: Tensor, threshold: float) -> tuple[Tensor]:
    return (_Spike.apply(v, threshold) if v.requires_grad else _heaviside(v, threshold),)  # type: ignore[no-untyped-call]


def _heaviside(v: Tensor, threshold: float) -> Tensor:
    return torch.ge(v, threshold, out=torch.empty_like(v))  # on the CPU much faster than a comparison and a cast


SpikeFunction = Callable[[Tensor], Tensor]
"""A function of ``u``: 1 where ``u`` is 0 or more, with its own derivative, like snnTorch's surrogates."""

Reset = Literal["soft", "hard"]


class Neuron(nn.Module):
    """Neurons that take one step per call, with the sum of the inputs received since their last step."""

    _received: Tensor | None = None

    def receive(self, y: Tensor) -> None:
        """Add ``y``, ``[B, *size]``, to the input of the next step."""
        self._received = y if self._received is None else self._received + y

    def take_input(self, like: Tensor) -> Tensor:
        """Return the sum of the inputs since the last step; if there were none, zeros shaped like ``like``."""
        projected, self._received = self._received, None
        return torch.zeros_like(like) if projected is None else projected


class LIF(Neuron):
    """Leaky integrate-and-fire neurons.

    In each step ``v^t = V_rest + decay (r^(t-1) - V_rest) + y``, and a neuron spikes where ``v`` reaches ``V_th``.
    ``decay`` is ``exp(-dt / tau)``, and ``r`` is ``v`` after its reset: ``v - (V_th - V_reset) s`` if soft, ``V_reset``
    wherever it spiked if hard.  ``tau=math.inf`` makes integrate-and-fire neurons, which do not leak.
    """

    v: Tensor
    """Potential, ``[B, *size]``."""

    def __init__(
        self,
        size: int | Sequence[int],
        tau: float = 5.0,
        V_th: float = 1.0,
        V_reset: float = 0.0,
        V_rest: float = 0.0,
        *,
        spk_reset: Reset = "soft",
        spk_fun: SpikeFunction | None = None,
    ) -> None:
        """Declare the potential of neurons of shape ``size`` per sample.

        ``tau``: in the unit of ``environ.dt``, ms.  ``spk_fun``: makes spikes of ``(v - V_th) / (V_th - V_reset)``; by
        default :func:`spike`.
        """
        super().__init__()
        if not V_th > V_reset:
            raise UsageError(f"V_th={V_th} is not above V_reset={V_reset}", hint="Pass a threshold above the reset.")
        if spk_fun is not None and not callable(spk_fun):
            raise UsageError(
                f"spk_fun is {spk_fun!r}, not a function", hint="Pass a function of u: 1 where u is 0 or more, else 0."
            )
        if spk_reset not in ("soft", "hard"):
            raise UsageError(f"unknown spk_reset {spk_reset!r}", hint='Pass "soft" or "hard".')
        self.decay = compute_decay(tau)
        self.V_th, self.V_reset, self.V_rest = V_th, V_reset, V_rest
        self.spk_reset, self.spk_fun = spk_reset, spk_fun
        declare_state(self, "v", size)

    def get_spike(self) -> Tensor:
        """Return the spikes of the current potential."""
        scale = self.V_th - self.V_reset
        if self.spk_fun is None and scale == 1:
            return spike(self.v, self.V_th)
        return (self.spk_fun or spike)((self.v - self.V_th) / scale).to(self.v)

    def forward(self, y: Tensor | None = None) -> Tensor:
        """Take one step with ``y``, ``[B, *size]``, added to the potential, and return its spikes, of that shape."""
        if y is not None:
            self.receive(y)
        spikes = self.get_spike()
        drop = self.V_th - self.V_reset if self.spk_reset == "soft" else self.v.detach() - self.V_reset
        self.v = self._leak(self.v - drop * spikes) + self.take_input(self.v)
        return self.get_spike()

    def _leak(self, v: Tensor) -> Tensor:
        # A function of its own: a local variable of ``forward`` would keep the tensor ``v`` until the end of the step.
        return self.decay * v if self.V_rest == 0 else self.V_rest + self.decay * (v - self.V_rest)


def compute_decay(tau: float) -> float:
    """Return ``exp(-dt / tau)``, the share of a state that is left after one time step of ``environ.dt``."""
    if not (is_number(tau) and tau > 0):
        raise UsageError(
            f"tau is {tau!r}, not a time constant", hint="Pass a number above 0, in the unit of environ.dt."
        )
    return math.exp(-environ.dt / tau)


class DeltaProj(nn.Module):
    """A projection: the output of ``comm`` is added to the potential of ``post`` in the next step of ``post``."""

    def __init__(self, comm: nn.Module, post: Neuron) -> None:
        """Project by ``comm``, usually a tagged linear layer, to ``post``; the model itself must call ``post``."""
        super().__init__()
        if not isinstance(post, Neuron):
            raise UsageError(f"post is {type_in_words(post)}", hint="Pass neurons: LIF or another Neuron.")
        self.comm = comm
        self.post = post

    def forward(self, *inputs: Tensor) -> None:
        """Give the output of ``comm`` for ``inputs`` to ``post``; calling ``post()`` uses it."""
        self.post.receive(self.comm(*inputs))


class LeakyRateReadout(nn.Module):
    """A readout that leaks like a neuron and never spikes: ``r^t = decay r^(t-1) + s W``.

    ``decay`` is ``exp(-dt / tau)``.  The weight is a plain parameter with only the gradient of each step, as in the
    network of the reference; ``traced(readout.linear)`` gives it a trace.
    """

    r: Tensor
    """Outputs, ``[B, outputs]``."""

    def __init__(self, size: int, outputs: int, tau: float = 5.0) -> None:
        super().__init__()
        self.decay = compute_decay(tau)
        self.linear = nn.Linear(size, outputs, bias=False)
        kaiming_normal_(self.linear.weight)
        declare_state(self, "r", outputs)

    def forward(self, spikes: Tensor) -> Tensor:
        """Add ``spikes``, ``[B, size]``, and return the outputs, ``[B, outputs]``."""
        # Not ``torch.add(..., alpha=self.decay)``: torch.compile drops alpha where it adds to a matrix product.
        self.r = self.decay * self.r + self.linear(spikes)
        return self.r


class ExplicitState(nn.Module):
    """A wrapper that declares the states which a cell takes and returns: ``cell(input, *states)``.

    The cell returns ``(output, *new states)``, like snnTorch's: ``ExplicitState(snntorch.Leaky(0.9), {"mem": 200})``.
    For a cell that takes its states as one named tuple, as Norse's cells do, give a tuple of their shapes:
    ``ExplicitState(norse.LIFCell(), norse.LIFFeedForwardState(v=200, i=200))``.  If a cell returns only its new states,
    the first is the output: ``ExplicitState(snntorch.RLeaky(0.9, linear_features=200), {"spk": 200, "mem": 200})``.
    Attributes that the cell writes are restored after each call.
    """

    def __init__(
        self,
        cell: nn.Module,
        states: Mapping[str, int | Sequence[int]] | tuple[int | Sequence[int], ...],
    ) -> None:
        """Declare ``states`` for ``cell``.

        ``states``: name -> shape per sample, in the order in which the cell takes and returns them; or a named tuple of
        shapes, of the type that the cell takes and returns.
        """
        super().__init__()
        self.tuple_type = None if isinstance(states, Mapping) else type(states)
        shapes = states if isinstance(states, Mapping) else _named_shapes(states)
        if not isinstance(cell, nn.Module):
            raise UsageError(f"cell is {type_in_words(cell)}", hint="Pass a torch.nn.Module.")
        if not shapes:
            raise UsageError("no states are given", hint="Pass the states that the cell takes: {name: shape}.")
        self.cell = cell
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            declare_state(self, name, shape)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the cell with ``inputs`` and its states, keep the new states, and return its first output."""
        values = [getattr(self, name) for name in self.names]
        attributes, buffers = dict(vars(self.cell)), dict(buffers_of(self.cell))
        try:
            returned = self.cell(*inputs, *(values if self.tuple_type is None else [self.tuple_type(*values)]))
        except MemoptError:
            raise
        except Exception as err:  # the cell's own code may raise anything
            raise MemoptError(
                f"{type(self.cell).__name__} cannot be called with {len(inputs)} inputs and {self._state_words}: "
                f"{first_line(err)}",
                hint=BATCHING_HINT if isinstance(err, RuntimeError) and any(map(is_of_vmap, inputs)) else _STATES_HINT,
            ) from err
        finally:
            vars(self.cell).clear()
            vars(self.cell).update(attributes)
            buffers_of(self.cell).update(buffers)
        output, states = self._split_result(returned)
        for name, state in zip(self.names, states, strict=True):
            setattr(self, name, state)
        return output

    def _split_result(self, returned: Any) -> tuple[Tensor, Sequence[Tensor]]:
        parts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        if self.tuple_type is not None:
            states = parts[1] if len(parts) == 2 else ()
        else:
            states = parts if len(parts) == len(self.names) else parts[1:]
        if len(states) != len(self.names) or not all(isinstance(t, Tensor) for t in (parts[0], *states)):
            raise MemoptError(
                f"{type(self.cell).__name__} returned {_type_names(returned)}, not an output and {self._state_words}",
                hint=_STATES_HINT,
            )
        return parts[0], states

    @property
    def _state_words(self) -> str:
        names = ", ".join(self.names)
        return f"the states {names}" if self.tuple_type is None else f"one {self.tuple_type.__name__} of {names}"


def _named_shapes(states: object) -> dict[str, int | Sequence[int]]:
    if not isinstance(states, tuple) or not hasattr(states, "_fields"):
        raise UsageError(
            f"states is {type_in_words(states)}, not a mapping or a named tuple",
            hint="Pass {name: shape}, or a named tuple of shapes.",
        )
    return dict(zip(states._fields, states, strict=True))


def _type_names(returned: object) -> str:
    if isinstance(returned, tuple | list):
        return f"({', '.join(type(part).__name__ for part in returned)})"
    return type(returned).__name__


def kaiming_normal_(weight: Tensor) -> Tensor:
    """Fill ``weight``, ``[O, I]``, with a normal of variance ``2 / I``, cut at two standard deviations, and return it.

    The cut multiplies the standard deviation by 0.8796, which is compensated, as in JAX's and BrainState's
    initializers.
    """
    std = math.sqrt(2 / weight.shape[1]) / 0.87962566
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

"""Gated cells to learn online.  All weights are trace-tagged; recurrence through them is cut, that of each neuron with
itself is followed.  Every cell maps ``[B, inputs]`` to ``[B, size]``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.online.operations import ElementWise, traced
from memopt_cli.online.states import declare_state


class _Cell(nn.Module):
    h: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        declare_state(self, "h", size)


def _weight(inputs: int, size: int, *, bias: bool = True) -> nn.Linear:
    return traced(nn.Linear(inputs, size, bias=bias))


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


class VanillaRNN(_Cell):
    """``h^t = tanh(W [x, h^(t-1)])``: all of its recurrence passes the weight, so that none is followed."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(size)
        self.weight = _weight(inputs + size, size)

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.weight(torch.cat([x, self.h], dim=-1)))
        return self.h


class GRU(_Cell):
    """``h^t = z h^(t-1) + (1 - z) tanh(W [x, r h^(t-1)])``, with gates ``z`` and ``r`` of ``[x, h^(t-1)]``."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(size)
        self.update, self.reset = _weight(inputs + size, size), _weight(inputs + size, size)
        self.candidate = _weight(inputs + size, size)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.h], dim=-1)
        update, reset = torch.sigmoid(self.update(both)), torch.sigmoid(self.reset(both))
        candidate = torch.tanh(self.candidate(torch.cat([x, reset * self.h], dim=-1)))
        self.h = update * self.h + (1 - update) * candidate
        return self.h


class MGU(_Cell):
    """A GRU with one gate: ``h^t = (1 - f) h^(t-1) + f tanh(W [x, f h^(t-1)])`` (Zhou et al. 2016)."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(size)
        self.forget, self.candidate = _weight(inputs + size, size), _weight(inputs + size, size)

    def forward(self, x: Tensor) -> Tensor:
        forget = torch.sigmoid(self.forget(torch.cat([x, self.h], dim=-1)))
        candidate = torch.tanh(self.candidate(torch.cat([x, forget * self.h], dim=-1)))
        self.h = (1 - forget) * self.h + forget * candidate
        return self.h


class MiniGRU(_Cell):
    """``h^t = (1 - z) h^(t-1) + z W x``, with a gate of ``x`` alone: no recurrence is cut (Feng et al. 2024)."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(size)
        self.update, self.candidate = _weight(inputs, size), _weight(inputs, size)

    def forward(self, x: Tensor) -> Tensor:
        update = torch.sigmoid(self.update(x))
        self.h = (1 - update) * self.h + update * self.candidate(x)
        return self.h


class MinimalRNN(_Cell):
    """``h^t = u h^(t-1) + (1 - u) z``, with ``z = tanh(W x)`` and a gate ``u`` of ``[z, h^(t-1)]`` (Chen 2017)."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(size)
        self.input, self.update = _weight(inputs, size), _weight(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.input(x))
        update = torch.sigmoid(self.update(torch.cat([z, self.h], dim=-1)))
        self.h = update * self.h + (1 - update) * z
        return self.h


class LSTM(_Cell):
    """Two states: ``c^t = f c^(t-1) + i tanh(g)``, ``h^t = o tanh(c^t)``; gates and ``g`` are of ``[x, h^(t-1)]``."""

    c: Tensor

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(size)
        declare_state(self, "c", size)
        self.input, self.forget = _weight(inputs + size, size), _weight(inputs + size, size)
        self.candidate, self.output = _weight(inputs + size, size), _weight(inputs + size, size)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.h], dim=-1)
        kept = torch.sigmoid(self.forget(both)) * self.c
        self.c = kept + torch.sigmoid(self.input(both)) * torch.tanh(self.candidate(both))
        self.h = torch.sigmoid(self.output(both)) * torch.tanh(self.c)
        return self.h


class LRU(nn.Module):
    """A linear recurrent unit: a complex ``h^t = l h^(t-1) + g B x``, diagonal, in two states; real and imaginary part
    are returned side by side, ``[B, 2 size]`` (Orvieto et al. 2023).

    ``l = exp(-exp(nu) + i exp(theta))`` is learnt, and so is ``g``, each with a trace.
    """

    def __init__(self, inputs: int, size: int, r_min: float = 0.4, r_max: float = 0.99) -> None:
        """Moduli start between ``r_min`` and ``r_max``, phases between 0 and pi / 10."""
        super().__init__()
        if not 0 <= r_min < r_max <= 1:
            raise UsageError(f"moduli from {r_min} to {r_max}", hint="Give 0 <= r_min < r_max <= 1.")
        self.real_input, self.imaginary_input = _weight(inputs, size, bias=False), _weight(inputs, size, bias=False)
        modulus = torch.sqrt(torch.rand(size) * (r_max**2 - r_min**2) + r_min**2)
        self.nu = ElementWise(torch.log(-torch.log(modulus)))
        self.theta = ElementWise(torch.log(torch.rand(size) * math.pi / 10))
        self.gain = ElementWise(torch.sqrt(1 - modulus**2))
        self.recurrence = _ComplexDecay(size)

    def forward(self, x: Tensor) -> Tensor:
        decay, phase, gain = torch.exp(-torch.exp(self.nu())), torch.exp(self.theta()), self.gain()
        real, imaginary = self.recurrence(
            decay * torch.cos(phase),
            decay * torch.sin(phase),
            gain * self.real_input(x),
            gain * self.imaginary_input(x),
        )
        return torch.cat([real, imaginary], dim=-1)


class _ComplexDecay(nn.Module):
    real: Tensor
    imaginary: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        declare_state(self, "real", size)
        declare_state(self, "imaginary", size)

    def forward(self, a: Tensor, b: Tensor, real: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor]:
        """``(a + i b) h + real + i imaginary``."""
        before, beside = self.real, self.imaginary
        self.real, self.imaginary = a * before - b * beside + real, b * before + a * beside + imaginary
        return self.real, self.imaginary

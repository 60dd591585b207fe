"""Synapses to learn online: what stands between spikes and the neurons they reach."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.online.neurons import Neuron, decay_of
from memopt_cli.online.states import declare_state


class DeltaProj(nn.Module):
    """Adds what ``comm`` makes of its input to the potential of ``post``, in the step that ``post`` takes next."""

    def __init__(self, comm: nn.Module, post: Neuron) -> None:
        """``comm``: a tagged linear layer, as a rule.  ``post``: neurons, which the model calls itself."""
        super().__init__()
        if not isinstance(post, Neuron):
            raise UsageError(f"post is a {type(post).__name__}", hint="Give neurons: LIF, IF, ALIF or another Neuron.")
        self.comm = comm
        self.post = post

    def forward(self, *inputs: Tensor) -> None:
        """``[B, inputs]`` -> nothing; ``post()`` has it."""
        self.post.receive(self.comm(*inputs))


class Expon(nn.Module):
    """Conductance that decays: ``g^t = decay g^(t-1) + y``, where ``decay`` is ``exp(-dt / tau)``."""

    g: Tensor

    def __init__(self, size: int | Sequence[int], tau: float = 5.0) -> None:
        super().__init__()
        self.decay = decay_of(tau)
        declare_state(self, "g", size)

    def forward(self, y: Tensor) -> Tensor:
        """``[B, *size]`` -> conductance of that shape."""
        self.g = self.decay * self.g + y
        return self.g


class Alpha(nn.Module):
    """Conductance that rises before it decays: ``h^t = decay h^(t-1) + y``, ``g^t = decay g^(t-1) + (1 - decay)
    h^(t-1)``.
    """

    h: Tensor
    g: Tensor

    def __init__(self, size: int | Sequence[int], tau: float = 8.0) -> None:
        super().__init__()
        self.decay = decay_of(tau)
        declare_state(self, "h", size)
        declare_state(self, "g", size)

    def forward(self, y: Tensor) -> Tensor:
        """``[B, *size]`` -> conductance of that shape."""
        self.g = self.decay * self.g + (1 - self.decay) * self.h
        self.h = self.decay * self.h + y
        return self.g


class STD(nn.Module):
    """Short-term depression: of the share ``x`` that has recovered, every spike uses ``U``.

    ``x`` recovers to 1 with time constant ``tau``; returned is the share left to this step's spikes, ``x s``.
    """

    x: Tensor

    def __init__(self, size: int | Sequence[int], tau: float = 200.0, U: float = 0.07) -> None:
        super().__init__()
        self.decay, self.U = decay_of(tau), _share(U)
        declare_state(self, "x", size, torch.ones)

    def forward(self, spikes: Tensor) -> Tensor:
        """``[B, *size]`` -> the same, weighted."""
        recovered = 1 - self.decay * (1 - self.x)
        self.x = recovered - self.U * self.x * spikes
        return self.x * spikes


class STP(nn.Module):
    """Short-term plasticity: every spike raises the use ``u`` of resources and takes ``u x`` of what there is, ``x``.

    ``u`` falls back to 0 with ``tau_f``, ``x`` recovers to 1 with ``tau_d``; returned is ``u x s``.
    """

    u: Tensor
    x: Tensor

    def __init__(self, size: int | Sequence[int], U: float = 0.15, tau_f: float = 1500.0, tau_d: float = 200.0) -> None:
        super().__init__()
        self.U = _share(U)
        self.facilitation, self.depression = decay_of(tau_f, "tau_f"), decay_of(tau_d, "tau_d")
        declare_state(self, "u", size, functools.partial(torch.full, fill_value=self.U))
        declare_state(self, "x", size, torch.ones)

    def forward(self, spikes: Tensor) -> Tensor:
        """``[B, *size]`` -> the same, weighted."""
        recovered = 1 - self.depression * (1 - self.x)
        fallen = self.facilitation * self.u
        used = fallen + self.U * (1 - fallen) * spikes
        self.x = recovered - used * recovered * spikes
        self.u = used
        return used * recovered * spikes


def _share(U: float) -> float:
    if not 0 < U <= 1:
        raise UsageError(f"U={U}", hint="Give the share of resources that a spike uses, above 0 and at most 1.")
    return U

"""Small models for all tests, so that a test's own class says only what is peculiar about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

GIVEN = object()
"""A part that whoever makes the model gives."""


class Parts(nn.Module):
    """A module whose class line lists what it has; a subclass writes nothing but its forward.

    ``class Gated(Parts, gate=lambda: nn.Linear(4, 4), block=GIVEN, calls=0)`` stands for an ``__init__`` that makes a
    layer ``gate``, takes a ``block`` and sets ``calls`` to 0.  What can be called is called, for each instance anew;
    anything else is set as it is.  ``Gated(block)`` gives parts in the order of the line, ``Gated(block, calls=1)``
    another value for any of them.
    """

    _made: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **parts: Any) -> None:
        super().__init_subclass__()
        cls._made = {**cls._made, **parts}

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()
        named |= zip((n for n, part in self._made.items() if part is GIVEN and n not in named), given, strict=True)
        for name, part in self._made.items():
            setattr(self, name, named.pop(name) if name in named else part() if callable(part) else part)
        assert not named, f"{type(self).__name__} has no {', '.join(named)}"


def mlp(width: int = 4, hidden: int = 6) -> nn.Sequential:
    """Two linear layers with a tanh between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


def deep_net(blocks: int = 3) -> nn.Sequential:
    """Blocks of 64 features, each of which is worth a segment."""

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    return nn.Sequential(*(block() for _ in range(blocks)))


class Reading(Parts, inner=lambda: nn.Linear(64, 64)):
    """Looks at what its input holds, so that it cannot run on tensors without data."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output * 2 if output.sum().item() > 0 else output * 3


class Before(nn.Module):
    """A linear layer ``before`` and then ``block``, whose input therefore requires a gradient."""

    def __init__(self, block: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(width, width), block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(self.before(x), *args, **kwargs)


class Checkpointed(Parts, block=GIVEN, reentrant=False):
    """A checkpoint of the user's own around ``block``, which runs again whenever somebody asks for what it saved."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Loop(Parts, first=lambda: nn.Linear(4, 4), block=GIVEN, times=GIVEN):
    """A linear layer, and then ``block`` several times a step, as a spiking network over time has it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.block(x)
        return x


class Holding(Parts, linear=lambda: nn.Linear(4, 4), held=GIVEN, advance=GIVEN):
    """A layer ``linear`` whose output is scaled by what ``advance`` makes of ``held``, which it may move on."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * float(self.advance(self.held))).sin()


class Overwriting(Parts, linear=lambda: nn.Linear(4, 4)):
    """Begins with writing over its input, and what it computes of it depends on what was there."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2)).tanh()


def counter() -> Callable[[], float]:
    """Return a function that counts its calls in a variable around it."""
    number = 0.0

    def count() -> float:
        nonlocal number
        number += 1
        return number

    return count

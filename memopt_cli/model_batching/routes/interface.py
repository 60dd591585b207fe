"""Routes: ways to run all models of a stacked model on their inputs."""

from __future__ import annotations

from typing import Any, Literal, Protocol

RouteName = Literal["fused", "vmap", "loop"]


class Refused(Exception):
    """The refusal of a route to run a model; the message says why and names the module or function."""


class Route(Protocol):
    """A runner of the stacked model that it was made for, whose tensors it reads at every call."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of all models for ``args`` and ``kwargs``; all tensors are (models, …)."""

    def reset(self) -> None:
        """Forget what modules have kept in attributes since the route was made; most routes refuse such a model."""

"""The interface of a route, which runs all models of a stacked model on their inputs."""

from __future__ import annotations

from typing import Any, Literal, Protocol

RouteName = Literal["fused", "vmap", "loop"]


class RouteRefusedError(Exception):
    """The refusal of a route to run a model; the message has the reason, and the module or function."""


class Route(Protocol):
    """Runs one stacked model, and reads the model's current tensors at every call."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of all models for ``args`` and ``kwargs``; all tensors are (models, …)."""

    def reset(self) -> None:
        """Reset state that modules keep in attributes to that when the route was made.

        Routes other than the loop refuse models with such state, and have nothing to do here.
        """

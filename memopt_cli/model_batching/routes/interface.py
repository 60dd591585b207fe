"""What a route is: a way to run all models of a stacked one on their inputs."""

from __future__ import annotations

from typing import Any, Literal, Protocol

RouteName = Literal["fused", "vmap", "loop"]


class Refused(Exception):
    """A route cannot run this model; the message says why and names the module or function."""


class Route(Protocol):
    """Runs the models of the stacked model it was made for, whose tensors it reads at every call."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of all models; every tensor going in and coming out is (models, …)."""

    def reset(self) -> None:
        """Forget what modules have kept in attributes since the route was made."""

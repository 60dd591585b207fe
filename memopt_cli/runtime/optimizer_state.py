"""The state of an optimizer that stands in for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class StateOnDemand(defaultdict[Any, Any]):
    """Made when it is asked for: of each parameter what a function makes.

    An optimizer may have made state when it was made itself, as PyTorch 2.8's Adagrad, and fail without it.
    """

    def __init__(self, make: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__(dict)
        self._make = make

    def __missing__(self, parameter: Any) -> dict[str, Any]:
        self[parameter] = made = self._make(parameter)
        return made

"""The state of an optimizer that stands in for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class StateOnDemand(defaultdict[Any, Any]):
    """State of each parameter that ``make`` makes when it is first asked for.

    Some optimizers make state when they are made, as PyTorch 2.8's Adagrad, and fail without it.
    """

    def __init__(self, make: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__(dict)
        self._make = make

    def __missing__(self, parameter: Any) -> dict[str, Any]:
        self[parameter] = made = self._make(parameter)
        return made

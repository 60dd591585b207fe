"""Segments by length: the settings of a module depend on the length of the model's input.

The root of the model reads the length of its input, and modules inside look it up while they run.  A segment remembers
the length at which it ran, and is recomputed with the settings for that.  The user's own checkpoint does not
remember it, so modules by length run there as without a plan.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from memopt_cli.runtime.module_state import SEGMENT_KEY
from memopt_cli.runtime.runs import named_parts
from memopt_cli.runtime.segment_config import SegmentConfig
from memopt_cli.runtime.this_thread import this_thread
from memopt_cli.runtime.warned import warn_caller

_warned: WeakSet[nn.Module] = WeakSet()
"""Roots that have warned of an input beyond the last range, or without such a dimension."""
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOf:
    """The dimensions of arguments of the model's forward whose largest size is the length; its fields are checked."""

    name: str
    """The symbol of the dimension in messages, such as ``S``."""
    argument: int | str | tuple[int | str, ...]
    """The position of the argument from 0, or its name; of several arguments, one for each axis."""
    axis: int | tuple[int, ...]
    """The dimension of that argument; a negative one counts from the last.  Of several, the largest size counts."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a dimension has the symbol {reprlib.repr(self.name)}")
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        arguments = self.argument if isinstance(self.argument, tuple) else (self.argument,) * len(axes)
        if any(type(argument) not in (int, str) or (type(argument) is int and argument < 0) for argument in arguments):
            raise ValueError(f"the argument {reprlib.repr(self.argument)} is neither a position nor a name")
        if not axes or not all(type(axis) is int for axis in axes):
            raise ValueError(f"the axis {reprlib.repr(self.axis)} is not a whole number")
        if len(arguments) != len(axes):
            raise ValueError(f"there are {len(arguments)} arguments, and {len(axes)} axes")

    @property
    def axes(self) -> dict[int | str, tuple[int, ...]]:
        """Argument -> its dimensions that count."""
        if not isinstance(self.argument, tuple):
            return {self.argument: self.axis if isinstance(self.axis, tuple) else (self.axis,)}
        assert isinstance(self.axis, tuple), "checked"
        axes: dict[int | str, tuple[int, ...]] = {}
        for argument, axis in zip(self.argument, self.axis, strict=True):
            axes[argument] = (*axes.get(argument, ()), axis)
        return axes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigsByLength:
    """The settings of a module in each of several ranges of lengths.

    Raises :class:`ValueError` unless the ranges ascend from 1 and each has settings.
    """

    up_to: tuple[int, ...]
    """The maximum length in each range; the last range also has all longer ones."""
    configs: tuple[SegmentConfig | None, ...]
    """The settings in each range; ``None`` where it runs as without a plan."""
    length: LengthOf | None = None
    """In the root, which sees the model's input, the dimension that is the length; ``None`` if it is another module."""
    path: str = ""
    """The path in the plan, for messages."""

    def __post_init__(self) -> None:
        if not all(type(bound) is int for bound in self.up_to):
            raise ValueError(f"the bounds of ranges must be whole numbers, not {reprlib.repr(self.up_to)}")
        if not self.up_to or list(self.up_to) != sorted(set(self.up_to)) or self.up_to[0] < 1:
            raise ValueError(f"ranges of lengths must ascend from 1, not {reprlib.repr(self.up_to)}")
        if len(self.configs) != len(self.up_to):
            raise ValueError(f"there are {len(self.up_to)} ranges of lengths, and settings for {len(self.configs)}")

    def config_at(self, length: float) -> SegmentConfig | None:
        """Return the settings at ``length``."""
        return self.configs[min(bisect.bisect_left(self.up_to, length), len(self.up_to) - 1)]


def current_length() -> float:
    """Return the length of the current input; infinity if unknown, since a module was called outside its model."""
    return this_thread.length


class at_length:
    """Context manager that gives the current input this ``length``."""

    __slots__ = ("_length", "_outer")

    def __init__(self, length: float) -> None:
        self._length = length

    def __enter__(self) -> None:
        self._outer, this_thread.length = this_thread.length, self._length

    def __exit__(self, *raised: object) -> None:
        this_thread.length = self._outer


def segment_of(module: nn.Module) -> SegmentConfig | None:
    """Return the settings of ``module`` as a segment now; ``None`` if it runs as without a plan.

    For a module by length these are the settings for the current length; outside a step, for the longest range.
    """
    config: SegmentConfig | ConfigsByLength | None = getattr(module, SEGMENT_KEY, None)  # PyTorch 2.8: not by ``vars``
    return config.config_at(current_length()) if isinstance(config, ConfigsByLength) else config


def config_of(module: nn.Module) -> SegmentConfig:
    """Return the settings of ``module``, which must run as a segment."""
    config = segment_of(module)
    assert config is not None, "the caller passes a module that runs as a segment"
    return config


def with_length_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Return a context in which the length of these arguments is the current length, if ``module`` is a root."""
    ranges: ConfigsByLength = vars(module)[SEGMENT_KEY]
    return _NOTHING if ranges.length is None else at_length(_length_in(module, ranges, ranges.length, args, kwargs))


def _length_in(
    module: nn.Module, ranges: ConfigsByLength, length: LengthOf, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> float:
    """Return the length of the arguments; if one lacks that dimension, warn once and return infinity.

    An argument that is ``None`` counts only if all are.
    """
    arguments = {argument: _find_argument(type(module).forward, argument, args, kwargs) for argument in length.axes}
    given = {argument: x for argument, x in arguments.items() if x is not None} or arguments
    size = 0
    for argument, x in given.items():
        axes = length.axes[argument]
        if not isinstance(x, Tensor) or x.is_nested or not all(-x.dim() <= axis < x.dim() for axis in axes):
            kind = f"of class {type(x).__name__}"
            if isinstance(x, Tensor):
                kind = "a nested tensor" if x.is_nested else f"a tensor of {x.dim()} dimensions"
            dimensions = " and ".join(map(str, axes))
            _warn_longest(
                module, f"{length.name} is dimension {dimensions} of the argument {argument!r}, which is {kind}"
            )
            return math.inf
        size = max(size, *(x.shape[axis] for axis in axes))
    if size > ranges.up_to[-1]:
        _warn_longest(module, f"{length.name} is {size}, beyond the {ranges.up_to[-1]} for which the plan was made")
    return size


def _warn_longest(module: nn.Module, reason: str) -> None:
    if module in _warned or not torch.is_grad_enabled():
        return
    _warned.add(module)
    warn_caller(f"{reason}: the plan for its longest inputs is used, and a step may take more than its budget")


def _find_argument(
    forward: Callable[..., Any], argument: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    position, name = _position_and_name(forward, argument)
    if position is not None and position < len(args):
        return args[position]
    return kwargs.get(name) if name is not None else None


def length_refusal(root: nn.Module, ranges: ConfigsByLength) -> str:
    """Return why ``root`` cannot read the length of its input for the modules in it."""
    if ranges.length is None:
        return ""
    for argument in ranges.length.axes:
        if not takes_argument(root, argument):
            return f"its forward does not take the argument {reprlib.repr(argument)}"
    for path, part in named_parts(root):
        inner = vars(part).get(SEGMENT_KEY)
        if part is not root and isinstance(inner, ConfigsByLength):
            if inner.length is not None:
                return f"{path} in it is by its own length"
            if inner.up_to != ranges.up_to:
                return f"{path} in it has other ranges of lengths"
    return ""


def takes_argument(module: nn.Module, argument: int | str) -> bool:
    """Return whether the forward of ``module`` takes ``argument``, a position or a name."""
    parameters = _parameters(type(module).forward)
    if isinstance(argument, str):
        return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)
    return argument < len(_positional(parameters)) or any(p.kind is p.VAR_POSITIONAL for p in parameters)


@functools.cache
def _position_and_name(forward: Callable[..., Any], argument: int | str) -> tuple[int | None, str | None]:
    """Return position, after ``self``, and name of ``argument``; ``None`` if the signature does not show it."""
    names = _positional(_parameters(forward))
    if isinstance(argument, int):
        return argument, names[argument] if argument < len(names) else None
    return names.index(argument) if argument in names else None, argument


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())[1:]


def _positional(parameters: Sequence[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

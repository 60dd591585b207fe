"""Declared states: tensors that a module carries from one time step to the next.

A state is declared with its shape for one sample.  ``init_all_states(model)`` makes it for one sample, ``(M)``;
``init_all_states(model, batch_size=B)`` for a batch, ``(B, M)``: *manual batching*.  For *automatic batching* see
:mod:`memopt_cli.online.lanes`.
"""

from __future__ import annotations

import math
import numbers
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.runtime.private_torch import MODULE_ATTRIBUTES, buffers_of, tree_leaves
from memopt_cli.runtime.runs import child_path

Initializer = Callable[..., Tensor]
"""Function called as ``initializer(shape, dtype=..., device=...)``: ``torch.zeros``, ``torch.rand`` and their like."""

_DECLARED = "_declared_states"


@dataclass(frozen=True, slots=True)
class Batching:
    """The mode in which a model's states and inputs carry a leading batch axis."""


def check_mode(mode: object) -> None:
    """Raise :class:`UsageError` unless ``mode`` is ``Batching()`` or ``None``."""
    if mode is not None and not isinstance(mode, Batching):
        raise UsageError(f"mode is {mode!r}, not Batching()", hint="Pass Batching(), or None for one sample at a time.")


def is_number(value: object) -> bool:
    """Return whether ``value`` is a real number, and not a truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_size(value: object, minimum: int) -> bool:
    """Return whether ``value`` is a whole number of at least ``minimum``, and not a truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= minimum


class Environment:
    """Defaults for all cells and algorithms that are made from now on."""

    def __init__(self) -> None:
        self.mode: Batching | None = None
        """Mode of algorithms; ``None`` if models see one sample at a time."""
        self.dt = 1.0
        """Length of a time step, in the unit of the time constants of neurons: ms."""

    def set(self, **settings: Any) -> None:
        """Set ``mode``, ``dt`` or both by name, and keep the others.  Raises :class:`UsageError` for other names."""
        for name, value in settings.items():
            if name not in ("mode", "dt"):
                raise UsageError(f"environ has no setting {name!r}", hint="Set mode or dt.")
            if name == "dt" and not (is_number(value) and 0 < value < math.inf):
                raise UsageError(f"dt is {value!r}, not the length of a time step", hint="Pass a number above 0.")
            if name == "mode":
                check_mode(value)
        vars(self).update(settings)


environ = Environment()


_Declaration = tuple[tuple[int, ...], Initializer | None, str | None]
"""Shape per sample, initializer (``None`` for zeros) and tag; a plain tuple, so that models pickle it as plain data."""


@dataclass(slots=True, eq=False)
class State:
    """One declared state of a module."""

    module: nn.Module
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the state of one sample."""
        return self._declaration[0]

    @property
    def tag(self) -> str | None:
        """Tag of the ``vmap_new_states`` that made the value; ``None`` for a value made outside it."""
        return self._declaration[2]

    @property
    def value(self) -> Tensor:
        value: Tensor = buffers_of(self.module)[self.name]
        assert value is not None
        return value

    @value.setter
    def value(self, value: Tensor) -> None:
        buffers_of(self.module)[self.name] = value  # ten times as fast as ``setattr`` on a module

    def initialize(self, batch_size: int | None = None) -> None:
        """Set the initial value, ``(*shape)`` or ``(batch_size, *shape)``; dtype and device stay the same."""
        batch_shape = () if batch_size is None else (batch_size,)
        old_value, (shape, initializer, _) = self.value, self._declaration
        self.value = (initializer or torch.zeros)(
            (*batch_shape, *shape), dtype=old_value.dtype, device=old_value.device
        )
        self.set_tag(None)
        if (recorded := _recorded_states.get()) is not None:
            recorded.append(self)

    def set_tag(self, tag: str | None) -> None:
        """Set the ``tag`` of the ``vmap_new_states`` that made the value."""
        _declarations(self.module)[self.name] = (*self._declaration[:2], tag)

    @property
    def _declaration(self) -> _Declaration:
        return _declarations(self.module)[self.name]


_recorded_states: ContextVar[list[State] | None] = ContextVar("recorded_states", default=None)


def declare_state(
    module: nn.Module, name: str, shape: int | Sequence[int], initializer: Initializer | None = None
) -> None:
    """Declare that ``module.name`` is a state of ``shape`` per sample, and initialize it for one sample.

    The value is a buffer that is not saved.  ``module`` reads and assigns it like any attribute.

    Parameters
    ----------
    module:
        Module that carries the state from one time step to the next.
    name:
        Name of the attribute.
    shape:
        Size or sizes of the state of one sample.
    initializer:
        Function called as ``initializer(shape, dtype=..., device=...)``; by default zeros.

    Raises
    ------
    UsageError
        If ``shape`` is not a shape, or ``module`` cannot have a buffer of that name.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    if not all(is_size(size, 0) for size in sizes):
        raise UsageError(f"state {name!r}: {sizes} is not a shape", hint="Pass the sizes of one sample, none negative.")
    example = next(module.parameters(), torch.empty(0))
    try:
        module.register_buffer(name, example.detach().new_empty(0), persistent=False)
    except (KeyError, TypeError) as err:
        raise UsageError(
            f"{name!r} cannot be a state of {type(module).__name__}: {err.args[0]}", hint="Rename it."
        ) from err
    module.__dict__.setdefault(_DECLARED, {})[name] = (sizes, initializer, None)
    State(module, name).initialize()


def states_of(model: nn.Module) -> dict[str, State]:
    """Return every state declared in ``model``, by dotted path."""
    return {
        child_path(path, name): State(module, name)
        for path, module in model.named_modules()
        for name in _declarations(module)
    }


def tensors_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield dotted path and tensor for each tensor in an attribute or buffer of ``model``, or in a container there."""
    for path, module in model.named_modules():
        for name, value in (*buffers_of(module).items(), *vars(module).items()):
            place = child_path(path, name)
            if isinstance(value, Tensor):
                yield place, value
            elif isinstance(value, list | tuple | dict | deque) and name not in MODULE_ATTRIBUTES:
                yield from ((place, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def init_all_states(model: nn.Module, batch_size: int | None = None) -> None:
    """Reset every declared state of ``model`` to its initial value.

    Parameters
    ----------
    model:
        Module that declares states, itself or in its submodules.
    batch_size:
        Number of samples in a batch, the first axis of each state; ``None`` for one sample without that axis.

    Raises
    ------
    UsageError
        If ``batch_size`` is not a whole number of at least 1.
    """
    if batch_size is not None and not is_size(batch_size, 1):
        raise UsageError(
            f"batch_size is {batch_size!r}, not a number of samples",
            hint="A batch has at least one sample; leave it out for one sample.",
        )
    for state in states_of(model).values():
        state.initialize(batch_size)


@contextmanager
def recording_new_states() -> Iterator[list[State]]:
    """Yield a list, to which the ``with`` block adds each state that it initializes."""
    states: list[State] = []
    token = _recorded_states.set(states)
    try:
        yield states
    finally:
        _recorded_states.reset(token)


def _declarations(module: nn.Module) -> dict[str, _Declaration]:
    declarations: dict[str, _Declaration] = module.__dict__.get(_DECLARED, {})
    return declarations

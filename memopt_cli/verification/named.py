"""The names that ``memopt verify`` gives to the tensors left by steps of two models, to compare them.

Outputs are named by key, state by path.  Numbers in attributes and a model's own random generators are turned into
tensors as well, but stay apart: a model may store the time.  They are compared only if two runs of one model agree.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.module_state import generators_by_name, numbers_by_attribute, state_by_name
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.verification.effects import generator_state, named_gradients

_NUMBERS = (bool, int, float, complex)


def tensors_by_name(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors in ``value``, by paths that begin with ``name``: ``output.logits``, ``output[0]``."""
    return {path: leaf for path, leaf in _walk_leaves(name, value) if isinstance(leaf, Tensor)}


def numbers_by_name(name: str, value: Any) -> dict[str, Tensor]:
    """Return the numbers in ``value`` as tensors, by paths that begin with ``name``."""
    return {path: _as_tensor([leaf]) for path, leaf in _walk_leaves(name, value) if not isinstance(leaf, Tensor)}


def _walk_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers in ``value`` with their paths; from unknown containers, only the tensors."""
    if isinstance(value, Tensor) or type(value) in _NUMBERS:
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            is_plain = isinstance(key, str) and key.isidentifier()  # else 1 and "1" would share a name
            yield from _walk_leaves(f"{name}.{key}" if is_plain else f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple | deque):
        for index, inner in enumerate(value):
            yield from _walk_leaves(f"{name}[{index}]", inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _walk_leaves(f"{name}.{part.name}", getattr(value, part.name))
    else:
        yield from ((f"{name}[{index}]", tensor) for index, tensor in enumerate(tensors_of(value)))


def compute_deferred(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors``, each deferred one computed."""
    return {name: t.values() if isinstance(t, DeferredLinear) else t for name, t in tensors.items()}


def named_tensors_on(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients, buffers, tensors in attributes of ``model``, and the global random generators, by name.

    Unlike :func:`memopt_cli.verification.effects.tensors_on`, it names state by path: two models may keep different
    tensors.
    """
    buffers = dict(model.named_buffers())
    buffer_ids = {id(buffer) for buffer in buffers.values()}
    state = {name: t for name, t in state_by_name(model).items() if isinstance(t, Tensor) and id(t) not in buffer_ids}
    named = {f"buffer {name}": t for name, t in buffers.items()} | {f"state {name}": t for name, t in state.items()}
    return named | named_gradients(model) | generator_state()


@dataclass(frozen=True, slots=True)
class AttributeValues:
    """The numbers and random generators in a model's attributes, at one moment."""

    numbers: Mapping[str, Sequence[Any]]
    generator_states: Mapping[str, bytes]

    @classmethod
    def read(cls, model: nn.Module) -> AttributeValues:
        """Read the current numbers and generators of ``model``."""
        states = {name: _state_bytes(generator) for name, generator in generators_by_name(model).items()}
        return cls(numbers_by_attribute(model), states)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attributes, in the form that :meth:`changes_since` returns."""
        return tuple(f"state {name}" for name in (*self.numbers, *self.generator_states))

    def changes_since(self, start: AttributeValues) -> dict[str, Tensor]:
        """Return the numbers and generators that have changed since ``start``, as tensors by name."""
        changes = {name: _as_tensor(now) for name, now in self.numbers.items() if now != start.numbers.get(name)}
        for name, state in self.generator_states.items():
            if state != start.generator_states.get(name):
                changes[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        return {f"state {name}": tensor for name, tensor in changes.items()}


def own_generator_states(model: nn.Module) -> bytes:
    """Return the states of the generators that ``model`` owns."""
    return b"".join(map(_state_bytes, generators_by_name(model).values()))


def _state_bytes(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    return pickle.dumps(generator)


def _as_tensor(numbers: Sequence[Any]) -> Tensor:
    """Return ``numbers`` as a tensor; integers as the bytes of their text, since they may be of any size."""
    if not all(isinstance(number, int) for number in numbers):
        is_complex = any(isinstance(number, complex) for number in numbers)
        return torch.tensor(numbers, dtype=torch.complex128 if is_complex else torch.float64)
    return torch.frombuffer(bytearray(repr(list(numbers)).encode()), dtype=torch.uint8)

"""Names of the tensors that a step leaves, by which ``memopt verify`` compares models: outputs by key, state by path.

Numbers in attributes and a model's own random generators are turned into tensors, too, but kept apart from the others:
a model may store the time, so only those are compared that are equal after two runs of one model.
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
from memopt_cli.verification.effects import generator_state

_NUMBERS = (bool, int, float, complex)


def tensors_by_name(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors in ``value``, by paths that begin with ``name``: ``output.logits``, ``output[0]``."""
    return {path: leaf for path, leaf in _leaves_of(name, value) if isinstance(leaf, Tensor)}


def numbers_by_name(name: str, value: Any) -> dict[str, Tensor]:
    """Return the numbers in ``value`` as tensors, by paths that begin with ``name``."""
    return {path: _as_tensor([leaf]) for path, leaf in _leaves_of(name, value) if not isinstance(leaf, Tensor)}


def _leaves_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers in ``value`` with their paths; in unknown containers, the tensors PyTorch finds."""
    if isinstance(value, Tensor) or type(value) in _NUMBERS:
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves_of(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple | deque):
        for place, inner in enumerate(value):
            yield from _leaves_of(f"{name}[{place}]", inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _leaves_of(f"{name}.{part.name}", getattr(value, part.name))
    else:
        yield from ((f"{name}[{place}]", tensor) for place, tensor in enumerate(tensors_of(value)))


def computed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors``, with the deferred ones among them computed."""
    return {name: t.values() if isinstance(t, DeferredLinear) else t for name, t in tensors.items()}


def effects_on(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients, buffers, tensors in attributes of ``model``, and the global random generators, by name."""
    buffers = dict(model.named_buffers())
    known = {id(buffer) for buffer in buffers.values()}
    state = {name: t for name, t in state_by_name(model).items() if isinstance(t, Tensor) and id(t) not in known}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = {f"{kind} {name}": t for kind, held in (("buffer", buffers), ("state", state)) for name, t in held.items()}
    return named | gradients | generator_state()


@dataclass(frozen=True, slots=True)
class Others:
    """The numbers and random generators in a model's attributes, at one moment."""

    numbers: Mapping[str, Sequence[Any]]
    generators: Mapping[str, bytes]

    @classmethod
    def of(cls, model: nn.Module) -> Others:
        """Read the present numbers and generators of ``model``."""
        generators = {name: _position(generator) for name, generator in generators_by_name(model).items()}
        return cls(numbers_by_attribute(model), generators)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attributes, in the form that :meth:`moved_since` returns."""
        return tuple(f"state {name}" for name in (*self.numbers, *self.generators))

    def moved_since(self, start: Others) -> dict[str, Tensor]:
        """Return the numbers and generators that have changed since ``start``, as tensors by name."""
        numbers = {name: _as_tensor(held) for name, held in self.numbers.items() if held != start.numbers.get(name)}
        generators = {
            name: torch.frombuffer(bytearray(position), dtype=torch.uint8)
            for name, position in self.generators.items()
            if position != start.generators.get(name)
        }
        return {f"state {name}": tensor for name, tensor in (numbers | generators).items()}


def own_positions(model: nn.Module) -> bytes:
    """Return the states of the generators that ``model`` owns."""
    return b"".join(map(_position, generators_by_name(model).values()))


def _position(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    return pickle.dumps(generator)


def _as_tensor(numbers: Sequence[Any]) -> Tensor:
    """Return ``numbers`` as a tensor; integers as the bytes of their text, since they may be of any size."""
    if not all(isinstance(number, int) for number in numbers):
        is_complex = any(isinstance(number, complex) for number in numbers)
        return torch.tensor(numbers, dtype=torch.complex128 if is_complex else torch.float64)
    return torch.frombuffer(bytearray(repr(list(numbers)).encode()), dtype=torch.uint8)

"""What a step leaves, by names that two ways to train a model share: outputs by their keys, state by its path.

Numbers and a model's own random generators are told as tensors, apart from the others: only those are compared that
two runs of one model leave the same, for a model may note the time.
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
from memopt_cli.verification.equality import generator_state

_NUMBERS = (bool, int, float, complex)


def tensors_by_name(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors within: ``output.logits``, ``output[0]``."""
    return {path: leaf for path, leaf in _leaves_of(name, value) if isinstance(leaf, Tensor)}


def numbers_by_name(name: str, value: Any) -> dict[str, Tensor]:
    """The numbers within, as tensors."""
    return {path: _as_tensor([leaf]) for path, leaf in _leaves_of(name, value) if not isinstance(leaf, Tensor)}


def _leaves_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers; of what is no known container, the tensors that PyTorch finds in it."""
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
    """With the values of those that a plan puts off."""
    return {name: t.values() if isinstance(t, DeferredLinear) else t for name, t in tensors.items()}


def left_on(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of parameters, buffers, the tensors among attributes, and global random generators."""
    buffers = dict(model.named_buffers())
    known = {id(buffer) for buffer in buffers.values()}
    state = {name: t for name, t in state_by_name(model).items() if isinstance(t, Tensor) and id(t) not in known}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = {f"{kind} {name}": t for kind, held in (("buffer", buffers), ("state", state)) for name, t in held.items()}
    return named | gradients | generator_state()


@dataclass(frozen=True, slots=True)
class Others:
    """Numbers and random generators among a model's attributes, as they stand now."""

    numbers: Mapping[str, Sequence[Any]]
    generators: Mapping[str, bytes]

    @classmethod
    def of(cls, model: nn.Module) -> Others:
        """Those of a model."""
        generators = {name: _position(generator) for name, generator in generators_by_name(model).items()}
        return cls(numbers_by_attribute(model), generators)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the attributes, as :meth:`moved_since` names them."""
        return tuple(f"state {name}" for name in (*self.numbers, *self.generators))

    def moved_since(self, start: Others) -> dict[str, Tensor]:
        """Those that stand elsewhere than at the start."""
        numbers = {name: _as_tensor(held) for name, held in self.numbers.items() if held != start.numbers.get(name)}
        generators = {
            name: torch.frombuffer(bytearray(position), dtype=torch.uint8)
            for name, position in self.generators.items()
            if position != start.generators.get(name)
        }
        return {f"state {name}": tensor for name, tensor in (numbers | generators).items()}


def own_positions(model: nn.Module) -> bytes:
    """Where a model's own generators stand."""
    return b"".join(map(_position, generators_by_name(model).values()))


def _position(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    return pickle.dumps(generator)


def _as_tensor(numbers: Sequence[Any]) -> Tensor:
    """Numbers; whole ones have no rounding, and may be of any size."""
    if not all(isinstance(number, int) for number in numbers):
        return torch.tensor(numbers, dtype=torch.complex128 if any(map(_is_complex, numbers)) else torch.float64)
    return torch.frombuffer(bytearray(repr(list(numbers)).encode()), dtype=torch.uint8)


def _is_complex(number: Any) -> bool:
    return isinstance(number, complex)

"""Numbers that a model reads while it is built without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt_cli.own_step import NUMBER_READ
from memopt_cli.runtime.private_torch import TorchDispatchMode, is_fake, memory_of, schema_of, unseen
from memopt_cli.runtime.tree import map_leaves, tensors_of

_MOST_VALUES = 4096
"""Of what is computed: rates and sizes of layers are few."""
_SOURCES = {"aten::arange", "aten::full", "aten::linspace", "aten::logspace", "aten::ones", "aten::zeros"}
"""They make a tensor of numbers."""


class NumbersKnown(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, tensors have no data, but numbers that follow from the code alone can be read.

    Models with stochastic depth read ``torch.linspace(0, rate, depth)[3].item()``, and build other layers where that is
    0.  A small tensor of the CPU is computed beside the one without data, and so is what follows from it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """The id of a storage without data -> that storage, so that no other has its id, and its values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if func is NUMBER_READ and (value := self._value_of(args[0])) is not None:
            with unseen():
                return value.item()
        made = func(*args, **kwargs)
        if schema_of(func).is_mutable:
            for tensor in filter(_has_storage, given):
                self._values.pop(memory_of(tensor), None)
        elif self._follows(func, given) and all(map(self._is_new_and_small, tensors_of(made))):
            with unseen():
                really = func(*map_leaves(self._known, args), **map_leaves(self._known, kwargs))
            for fake, value in zip(tensors_of(made), tensors_of(really), strict=True):
                if fake.stride() == value.stride():
                    self._values[memory_of(fake)] = fake.untyped_storage(), value
        return made

    def _follows(self, func: Any, given: list[Tensor]) -> bool:
        """Whether what an operator makes follows from the code."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        return all(self._value_of(t) is not None for t in given) if given else schema_of(func).name in _SOURCES

    def _is_new_and_small(self, tensor: Tensor) -> bool:
        is_small = is_fake(tensor) and tensor.device.type == "cpu" and tensor.numel() <= _MOST_VALUES
        # A view has the values that it is of.
        return is_small and _has_storage(tensor) and memory_of(tensor) not in self._values

    def _value_of(self, tensor: Tensor) -> Tensor | None:
        if not is_fake(tensor):
            return tensor
        _, values = self._values.get(memory_of(tensor), (None, None)) if _has_storage(tensor) else (None, None)
        if values is None or values.dtype != tensor.dtype:
            return None
        with unseen():
            return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _known(self, leaf: Any) -> Any:
        return self._value_of(leaf) if isinstance(leaf, Tensor) else leaf


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided

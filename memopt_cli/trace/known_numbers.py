"""Numbers that a model reads from tensors without data.

Models with stochastic depth read ``torch.linspace(0, rate, depth)[3].item()`` and build other layers where that is 0;
attention makes no mask where ``attention_mask.all()``.  Such numbers follow from the code and from the inputs alone.
So a mode notes how each tensor was made, for as long as that tensor lives, and runs the noted operators, on the CPU,
only when a number is read.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.private_torch import (
    UNKNOWN_WITHOUT_DATA,
    TorchDispatchMode,
    has_schema,
    is_fake,
    is_made_of_others,
    memory_of,
    replaced,
    schema_of,
    tree_leaves,
    unseen,
    version_counter,
)
from memopt_cli.runtime.tree import map_leaves, tensors_of

_aten = torch.ops.aten
_MOST_VALUES = 1 << 24
"""Most elements of a tensor that is computed to read a number: a mask of 4096 by 4096."""
_SOURCES = frozenset("arange eye full linspace logspace ones scalar_tensor tril_indices triu_indices zeros".split())
"""Operators that make tensors from numbers."""
_CONSTANT = _aten.lift_fresh.default
"""Operator that ``torch.tensor([1, 2])`` calls on a tensor with data."""


class NumbersKnown(TorchDispatchMode):
    """A mode for tensors without data in which numbers can be read that follow from the code, and from inputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[weakref.ref[Any], _Made, int]] = {}
        """Key of a storage without data -> that storage, how it was made, and which of the results it is."""

    def tell(self, tensor: Tensor, values: Tensor) -> None:
        """Let ``tensor``, without data, have ``values``, which nobody writes to."""
        self._note([tensor], _Made.of(values))

    @contextmanager
    def known_to_libraries(self) -> Iterator[None]:
        """Let transformers read tensors of known numbers in the block.

        It asks whether a tensor is fake before it reads whether a mask is needed.  If so, it makes a mask, and copies
        of keys and values, which a real step does not.
        """
        asked = sys.modules.get("transformers.utils.import_utils")
        if asked is None or not hasattr(asked, "is_fake_tensor"):
            yield
            return
        with replaced(asked, "is_fake_tensor", lambda plain: lambda x: plain(x) and not self._is_known(x)):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except UNKNOWN_WITHOUT_DATA:
            result = self._by_numbers(func, args, kwargs)
            if result is None:
                raise
        if func is _CONSTANT and not is_fake(args[0]):
            with unseen(), torch.no_grad():
                values = args[0].clone()
            self.tell(result, values)
            return result
        if not self._made and not _is_source(func):
            return result
        if _writes(func):
            for tensor in filter(_has_storage, tensors_of((args, kwargs))):
                self._made.pop(memory_of(tensor), None)
        elif self._follows(func, args, kwargs):
            given = map_leaves(self._noted, (args, kwargs))
            self._note(tensors_of(result), _Made(lambda: _run(func, given)))
        return result

    def _by_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that needs numbers, or their count; ``None`` if they are not known."""
        if takes := _TAKES.get(func):
            masks = [leaf for leaf in tensors_of(args[1]) if leaf.dtype is torch.bool]
            values = [self._noted(mask).values() if self._is_known(mask) else None for mask in masks]
            return None if any(value is None for value in values) else takes(self, *args, values)
        if not self._follows(func, args, kwargs):
            return None
        found = _run(func, map_leaves(self._noted, (args, kwargs)))
        device = next(tensor.device for tensor in tensors_of((args, kwargs)))
        return map_leaves(lambda leaf: self.made_known(leaf, device) if isinstance(leaf, Tensor) else leaf, found)

    def made_known(self, values: Tensor, device: torch.device) -> Tensor:
        """Make a tensor without data on ``device`` that has ``values``."""
        made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
        self.tell(made, values)
        return made

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether the result of an operator follows from known numbers."""
        for leaf in args:  # a quick no: most operators have an unknown tensor among these
            if isinstance(leaf, Tensor) and not self._is_known(leaf):
                return False
        given = tensors_of((args, kwargs))
        return _is_function(func) and all(map(self._is_known, given)) if given else _is_source(func)

    def _is_known(self, tensor: Tensor) -> bool:
        # A tensor with data does not count: a write to it may run on a copy without.
        return is_fake(tensor) and _has_storage(tensor) and memory_of(tensor) in self._made

    def _note(self, tensors: list[Tensor], made: _Made) -> None:
        for place, tensor in enumerate(tensors):
            is_new = is_fake(tensor) and _has_storage(tensor) and memory_of(tensor) not in self._made
            if is_new and tensor.numel() <= _MOST_VALUES:  # a view is known by the tensor that it is of
                forget = functools.partial(self._forget, memory_of(tensor))
                self._made[memory_of(tensor)] = weakref.ref(tensor.untyped_storage(), forget), made, place
                made.strides[place] = tensor.stride()

    def _forget(self, key: int, _: object) -> None:
        self._made.pop(key, None)

    def _noted(self, leaf: Any) -> Any:
        """Return ``leaf``, an argument of an operator, in a form that can be kept."""
        if not isinstance(leaf, Tensor):
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        _, made, place = self._made[memory_of(leaf)]
        return _View(leaf, made, place)


class _Made:
    """The results of an operator, computed when they are needed."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.strides: dict[int, tuple[int, ...]] = {}
        """Index of a result -> its strides without data."""
        self._run: Callable[[], Any] | None = run
        self._results: list[Tensor] = []

    @classmethod
    def of(cls, values: Tensor) -> _Made:
        """Return ``values`` as a result, as long as nobody writes to them."""
        if values.is_inference():
            return cls(lambda: values)
        version = version_counter(values)
        return cls(lambda: values if version_counter(values) == version else None)

    def result(self, place: int) -> Tensor | None:
        """Return the result at ``place``; ``None`` if it cannot be computed."""
        if self._run is not None:
            with suppress(RuntimeError):  # the CPU lacks an operator, or the chain to here is too long
                self._results = tensors_of(self._run())
            self._run = None
        found = self._results[place] if self._results else None
        return found if found is not None and found.stride() == self.strides.get(place, found.stride()) else None


class _View:
    """A tensor that is an argument of an operator, as a view of the result of another."""

    def __init__(self, tensor: Tensor, made: _Made, place: int) -> None:
        self._made, self._place, self._dtype = made, place, tensor.dtype
        self._geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._is_plain = _is_plain(tensor)

    def values(self) -> Tensor | None:
        """Return its values on the CPU; ``None`` if they cannot be computed."""
        found = self._made.result(self._place)
        if found is None or found.dtype != self._dtype or not (self._is_plain and _is_plain(found)):
            return None
        with unseen(), torch.no_grad():
            return found.as_strided(*self._geometry).cpu()


def _indexed(numbers: NumbersKnown, x: Tensor, indices: list[Tensor | None], masks: list[Tensor]) -> Tensor:
    """Return ``x[indices]``, where ``masks`` are the values of the masks among ``indices``, in order."""
    values = iter(masks)
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool:
            places.append(index)
            continue
        with unseen():
            found = next(values).nonzero(as_tuple=True)
        places += [numbers.made_known(place, x.device) for place in found]
    taken: Tensor = _aten.index.Tensor(x, places)
    return taken


def _selected(numbers: NumbersKnown, x: Tensor, mask: Tensor, masks: list[Tensor]) -> Tensor:
    """Return ``x.masked_select(mask)``, where ``masks`` has the values of ``mask``."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    with unseen():
        number = int(masks[0].broadcast_to(shape).count_nonzero())
    return torch.empty(number, dtype=x.dtype, device=x.device)


def _run(func: Any, given: tuple[Any, dict[str, Any]]) -> Any:
    """Run an operator on known numbers; ``None`` if they cannot be computed."""
    views = [leaf for leaf in tree_leaves(given) if isinstance(leaf, _View)]
    values = {id(view): view.values() for view in views}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = map_leaves(lambda leaf: values.get(id(leaf), leaf), given)
    with unseen(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has neither a conjugate nor a negative bit, so that its memory holds its values."""
    return not (tensor.is_conj() or tensor.is_neg())


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


@functools.cache
def _writes(func: Any) -> bool:
    return has_schema(func) and bool(schema_of(func).is_mutable)


@functools.cache
def _is_source(func: Any) -> bool:
    return _is_function(func) and schema_of(func).name.removeprefix("aten::") in _SOURCES


@functools.cache
def _is_function(func: Any) -> bool:
    """Return whether ``func`` gives equal results for equal arguments, and has no other effect."""
    if not has_schema(func) or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return "empty" not in schema_of(func).name


_TAKES: dict[Any, Callable[..., Tensor]] = {_aten.index.Tensor: _indexed, _aten.masked_select.default: _selected}
"""Operators whose result has a size that masks decide: only the masks must be known, not the tensor."""

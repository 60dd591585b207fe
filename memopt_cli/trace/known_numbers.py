"""Numbers that a model may read from tensors without data, since they follow from its code and its inputs.

Models with stochastic depth read ``torch.linspace(0, rate, depth)[3].item()`` and build other layers if that is 0;
attention makes no mask if ``attention_mask.all()``.  Such numbers depend on no parameter.  So a dispatch mode notes how
each tensor was made from known ones, for as long as the tensor lives; only when a number is read does it run the noted
operators, on the CPU.

Some models and many training scripts also ask whether all numbers are finite, and act if they are not.  They are
assumed to be, as in any step that trains.
"""

from __future__ import annotations

import functools
import math
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
_MAX_VALUES = 1 << 24
"""Maximum number of elements of a tensor that is computed to read a number: a mask of 4096 by 4096."""
_SOURCES = frozenset("arange eye full linspace logspace ones scalar_tensor tril_indices triu_indices zeros".split())
"""Operators that make tensors from numbers."""
_CONSTANT = _aten.lift_fresh.default
"""Operator that ``torch.tensor([1, 2])`` calls on a tensor with data."""
_ASKS_WHETHER_NOT_FINITE = {_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default}
_COMPARES = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
"""Comparison -> its result for two equal numbers."""
_COMPARES_WITH_NUMBER = {_aten.eq.Scalar: True, _aten.ne.Scalar: False}
"""Comparison with a Python number -> its result if they are equal."""


class NumbersKnown(TorchDispatchMode):
    """Dispatch mode in which numbers can be read from tensors without data, if they follow from code and inputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[weakref.ref[Any], _Made, int]] = {}
        """Key of a storage without data -> the storage, the operator that makes it, and the index among its results."""

    def note_values(self, tensor: Tensor, values: Tensor) -> None:
        """Note that ``tensor``, which has no data, has ``values``.  They must not be written to."""
        self._note_results([tensor], _Made.from_values(values))

    @contextmanager
    def readable_by_libraries(self) -> Iterator[None]:
        """Let the transformers library read known numbers in the ``with`` block, as it does in a real step.

        To find out whether a mask is needed, the library reads the mask.  If the mask is fake, it makes one in any
        case, and copies of keys and values, which a real step does not make.
        """
        library = sys.modules.get("transformers.utils.import_utils")
        if library is None or not hasattr(library, "is_fake_tensor"):
            yield
            return
        with replaced(library, "is_fake_tensor", lambda plain: lambda x: plain(x) and not self._is_known(x)):
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
        if (answer := _if_finite(func, args)) is not None and not self._follows(func, args, kwargs):
            self._note_results([result], _Made(functools.partial(_filled, result.shape, result.stride(), answer)))
            return result
        if func is _CONSTANT and not is_fake(args[0]):
            with unseen(), torch.no_grad():
                values = args[0].clone()
            self.note_values(result, values)
            return result
        if not self._made and not _is_source(func):  # nothing is known yet, so nothing follows from it
            return result
        if _is_writing(func):  # its arguments have other values from now on, which are not tracked
            for tensor in tensors_of((args, kwargs)):
                if tensor.layout is torch.strided:
                    self._made.pop(memory_of(tensor), None)
        elif self._follows(func, args, kwargs):
            arguments = map_leaves(self._make_note, (args, kwargs))
            self._note_results(tensors_of(result), _Made(lambda: _run_on_numbers(func, arguments)))
        return result

    def _by_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of ``func``, which fails without data, from known numbers; ``None`` if one is not known."""
        if takes := _TAKES.get(func):
            masks = [leaf for leaf in tensors_of(args[1]) if leaf.dtype is torch.bool]
            values = [self._make_note(mask).values() if self._is_known(mask) else None for mask in masks]
            return None if any(value is None for value in values) else takes(self, *args, values)
        if not self._follows(func, args, kwargs):
            return None
        result = _run_on_numbers(func, map_leaves(self._make_note, (args, kwargs)))
        device = next(tensor.device for tensor in tensors_of((args, kwargs)))
        return map_leaves(lambda leaf: self.made_known(leaf, device) if isinstance(leaf, Tensor) else leaf, result)

    def made_known(self, values: Tensor, device: torch.device) -> Tensor:
        """Make a tensor without data on ``device`` that is known to have ``values``."""
        tensor = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
        self.note_values(tensor, values)
        return tensor

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool:
        for leaf in args:  # answers for most operators, and quickly: they have an unknown tensor among these
            if isinstance(leaf, Tensor) and not self._is_known(leaf):
                return False
        tensors = tensors_of((args, kwargs))
        return _is_function(func) and all(map(self._is_known, tensors)) if tensors else _is_source(func)

    def _is_known(self, tensor: Tensor) -> bool:
        # A tensor with data does not count: a write to it may happen on a copy without data, unseen.
        return is_fake(tensor) and tensor.layout is torch.strided and memory_of(tensor) in self._made

    def _note_results(self, tensors: list[Tensor], made: _Made) -> None:
        """Note that ``tensors`` are the results of ``made``; views need no note, since their storage has one."""
        for index, tensor in enumerate(tensors):
            is_new = is_fake(tensor) and tensor.layout is torch.strided and memory_of(tensor) not in self._made
            if is_new and tensor.numel() <= _MAX_VALUES:
                forget = functools.partial(self._forget, memory_of(tensor))
                self._made[memory_of(tensor)] = weakref.ref(tensor.untyped_storage(), forget), made, index
                made.strides[index] = tensor.stride()

    def _forget(self, key: int, _: object) -> None:
        self._made.pop(key, None)

    def _make_note(self, leaf: Any) -> Any:
        """Return ``leaf``, an argument of an operator, in a form that does not keep tensors alive, for the CPU."""
        if not isinstance(leaf, Tensor):
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        _, result, index = self._made[memory_of(leaf)]
        return _View(leaf, result, index)


class _Made:
    """The results of an operator, computed when they are first needed."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.strides: dict[int, tuple[int, ...]] = {}
        """Index of a result -> the strides that it has without data."""
        self._run: Callable[[], Any] | None = run
        self._results: list[Tensor] = []

    @classmethod
    def from_values(cls, values: Tensor) -> _Made:
        """Return ``values`` as a result, which is no longer known once they are written to."""
        if values.is_inference():
            return cls(lambda: values)
        version = version_counter(values)
        return cls(lambda: values if version_counter(values) == version else None)

    def result(self, index: int) -> Tensor | None:
        """Return the result at ``index``; ``None`` if it cannot be computed."""
        if self._run is not None:
            with suppress(RuntimeError):  # the CPU lacks an operator, or the chain of operators is too long to recurse
                self._results = tensors_of(self._run())
            self._run = None
        result = self._results[index] if self._results else None
        if result is None or result.stride() != self.strides.get(index, result.stride()):
            return None  # the views that were noted would show other elements
        return result


class _View:
    """An argument of an operator: a view of the result of an earlier one, without the tensor itself."""

    def __init__(self, tensor: Tensor, made: _Made, index: int) -> None:
        self._made, self._index, self._dtype = made, index, tensor.dtype
        self._geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._is_plain = _is_plain(tensor)

    def values(self) -> Tensor | None:
        """Return the values of the view on the CPU; ``None`` if they cannot be computed."""
        result = self._made.result(self._index)
        if result is None or result.dtype != self._dtype or not (self._is_plain and _is_plain(result)):
            return None
        with unseen(), torch.no_grad():
            return result.as_strided(*self._geometry).cpu()


def _index_numbers(numbers: NumbersKnown, x: Tensor, indices: list[Tensor | None], masks: list[Tensor]) -> Tensor:
    """Return ``x[indices]`` without data; ``masks`` are the values of the masks among ``indices``, in order."""
    values = iter(masks)
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool:
            places.append(index)
            continue
        with unseen():
            true_at = next(values).nonzero(as_tuple=True)
        places += [numbers.made_known(index, x.device) for index in true_at]
    selection: Tensor = _aten.index.Tensor(x, places)
    return selection


def _masked_select(numbers: NumbersKnown, x: Tensor, mask: Tensor, masks: list[Tensor]) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    with unseen():
        number = int(masks[0].broadcast_to(shape).count_nonzero())
    return torch.empty(number, dtype=x.dtype, device=x.device)


def _run_on_numbers(func: Any, arguments: tuple[Any, dict[str, Any]]) -> Any:
    """Run ``func`` on noted ``arguments``; ``None`` if their values cannot be computed."""
    views = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, _View)]
    values = {id(view): view.values() for view in views}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = map_leaves(lambda leaf: values.get(id(leaf), leaf), arguments)
    with unseen(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _if_finite(func: Any, args: Any) -> bool | None:
    """Return the elements of the result of ``func`` if all numbers are finite; ``None`` if ``func`` asks something
    else.

    ``torch.isfinite(x)`` asks whether ``x == x`` and whether ``x.abs() != inf``.
    """
    if func in _ASKS_WHETHER_NOT_FINITE:
        return False
    if func in _COMPARES and args[0] is args[1] and args[0].is_floating_point():
        return _COMPARES[func]
    if func in _COMPARES_WITH_NUMBER and isinstance(args[1], float) and math.isinf(args[1]):
        return not _COMPARES_WITH_NUMBER[func]
    return None


def _filled(shape: torch.Size, strides: tuple[int, ...], value: bool) -> Tensor:
    with unseen():
        return torch.empty_strided(shape, strides, dtype=torch.bool).fill_(value)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has neither a conjugate nor a negative bit, so that its memory holds its values."""
    return not (tensor.is_conj() or tensor.is_neg())


@functools.cache
def _is_writing(func: Any) -> bool:
    return has_schema(func) and bool(schema_of(func).is_mutable)


@functools.cache
def _is_source(func: Any) -> bool:
    return _is_function(func) and schema_of(func).name.removeprefix("aten::") in _SOURCES


@functools.cache
def _is_function(func: Any) -> bool:
    """Return whether the results of ``func`` depend only on its arguments: not on generators or old memory."""
    if not has_schema(func) or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return "empty" not in schema_of(func).name


_TAKES: dict[Any, Callable[..., Tensor]] = {
    _aten.index.Tensor: _index_numbers,
    _aten.masked_select.default: _masked_select,
}
"""Operator with results of a size that depends on masks -> a function that computes them from the masks alone."""

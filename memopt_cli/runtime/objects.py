"""What forward may move on in objects and variables: attributes, arrays, random generators, iterators, caches.

What a module itself keeps is put back whole (:mod:`memopt_cli.runtime.state`).  Other objects belong to the rest of the
program as well: they are looked at before forward, and for a recomputation only what differs from then is written.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import pathlib
import re
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.runtime.compressor import same_bits
from memopt_cli.runtime.iterators import Iterators, is_iterator, within
from memopt_cli.runtime.object_parts import CONTAINERS, Part, part_of
from memopt_cli.runtime.private_torch import version_counter, with_data
from memopt_cli.runtime.variables import Variables, variables_of

_MOST_PARTS: Final = 1000
"""Objects that are looked at: more are a program, and no state of a module's."""
_LARGEST_COPY: Final = 1 << 16
"""Bytes of a tensor that is copied; of a larger one it is only noticed that it was written."""
_LARGEST_SUMMED: Final = 1 << 20
"""Bytes of a tensor whose bits are looked at; of a larger one it is only noticed that its version is another."""
_NO_STATE: Final = (
    *(nn.Module, nn.Parameter, type, types.ModuleType, types.BuiltinFunctionType),
    *(types.MethodType, weakref.ref, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(enum.Enum, io.IOBase, logging.Logger, pathlib.PurePath, re.Pattern),
)
_NO_CODE: Final = (*_NO_STATE, *CONTAINERS, Tensor, Variables)
"""Objects whose methods are no code of the program's."""
_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class Objects:
    """Where the objects stand that can be reached from some values, which :meth:`restore` puts back."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._parts: list[Part] = []
        self._tensors: dict[int, _Noted] = {}
        self._iterators = Iterators(*self._reach(values))

    def _reach(self, values: Iterable[Any]) -> tuple[list[Any], set[int]]:
        """The iterators among what is reached, and the ``id`` of all that lies where nothing can take its place."""
        pending, seen = [(value, False) for value in values][::-1], set[int]()
        iterators, fast = list[Any](), set[int]()
        while pending and len(self._parts) < _MOST_PARTS:
            value, is_fast = pending.pop()
            if type(value) in _ATOMS:
                continue
            if is_fast:
                fast.add(id(value))
            if id(value) in seen:
                continue
            seen.add(id(value))
            pending.extend((inner, True) for inner in held_fast(value))
            pending[:0] = [(found, False) for found in _variables_around(value)]
            if isinstance(value, _NO_STATE):
                continue
            if isinstance(value, Tensor):
                if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
                    self._tensors[id(value)] = _Noted(value)
            elif is_iterator(value):
                iterators.append(value)
            elif not isinstance(value, tuple | frozenset) and (part := part_of(value)) is not None:
                self._parts.append(part)
                pending.extend((inner, part.holds_fast) for inner in part.inner())
        return iterators, fast

    def settle(self) -> None:
        """Forward has ended: note what it moved that nothing can put back."""
        self._iterators.settle()
        with with_data():
            for noted in self._tensors.values():
                noted.settle(was_written=noted.was_written())

    def lost(self) -> str:
        """What forward did to them that nothing can undo, a sentence without its subject; empty if nothing."""
        if self._iterators.moved:
            return f"moves {self._iterators.moved} on"
        with with_data():
            written = next((noted for noted in self._tensors.values() if noted.is_lost()), None)
        return f"writes in place to a tensor of shape {written.shape} in an object" if written else ""

    def has_moved(self) -> bool:
        """Whether one of them has other attributes or items than it had; what they hold of numbers is not compared."""
        return any(part.has_moved() for part in self._parts)

    def check(self) -> None:
        """Raises :class:`RuntimeError` where forward cannot start again from what was there: it was written since."""
        for noted in self._tensors.values():
            with with_data():
                is_lost = noted.is_lost()
            if is_lost:
                raise RuntimeError(
                    f"a tensor of shape {noted.shape} in an object was written in place between forward and backward; "
                    "recomputing with it would be wrong. Give the object a new tensor instead."
                )

    def now(self) -> Objects:
        """The same objects, where they stand now."""
        found = Objects(())
        found._parts = [type(part)(part.value) for part in self._parts]
        return found

    def again(self) -> dict[int, Any]:
        """What takes the place of some objects while forward starts again, by the ``id`` of each."""
        with with_data():  # among them are tensors of the program's own, which have data in a dry run too
            written = {key: noted.again() for key, noted in self._tensors.items()}
        return self._iterators.again() | {key: tensor for key, tensor in written.items() if tensor is not None}

    def restore(self, replaced: Mapping[int, Any] | None = None) -> None:
        """Put all of them back; one whose ``id`` is in ``replaced`` as that other object."""
        for part in self._parts:
            part.restore(replaced or {})


class _Noted:
    """A tensor that an object holds, its version and sums; of a small one a copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self.shape = tuple(tensor.shape)
        with with_data():
            self.copy = tensor.detach().clone() if tensor.nbytes <= _LARGEST_COPY else None
            self._note(tensor)
        self._is_lost = False
        self._is_settled = False

    def _note(self, tensor: Tensor | None) -> None:
        self._version = version_of(tensor)
        self._sums = _sums(tensor) if tensor is not None and self.copy is None else None

    def was_written(self) -> bool:
        tensor = self._tensor()
        if tensor is None:
            return False
        if self.copy is not None:
            return self.copy.shape != tensor.shape or not is_unchanged(tensor.detach(), self.copy)
        # Sums too, for ``.data`` is written without raising the version.
        return self._version != version_of(tensor) or not _are_equal(self._sums, _sums(tensor))

    def again(self) -> Tensor | None:
        """What takes its place where forward starts again; ``None`` of one that is what it was then."""
        needs_copy = self._is_settled or self._tensor() is None or self.was_written()
        return self.copy.clone() if self.copy is not None and needs_copy else None

    def settle(self, *, was_written: bool) -> None:
        self._is_settled = True
        tensor = self._tensor()
        self._is_lost = was_written and self.copy is None
        if not was_written and self.copy is None:
            return  # version and sums are what they were
        if not was_written:
            self.copy = None
        elif self.copy is not None and tensor is not None:
            self.copy.requires_grad_(tensor.requires_grad)
        self._note(tensor)

    def is_lost(self) -> bool:
        return self._is_lost or (self.copy is None and self.was_written())


def _sums(tensor: Tensor) -> Tensor | None:
    """Sums over the rows and the columns of its bits, laid out as a table: they tell most writes, in little memory.

    ``None`` of one that is too large for that, or whose bits do not simply lie in one piece.
    """
    is_plain = tensor.is_contiguous() and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    if not is_plain or tensor.nbytes > _LARGEST_SUMMED:
        return None
    words = tensor.detach().view(-1).view(_WORDS[min(8, tensor.element_size())])
    table, rest = words[: words.numel() - words.numel() % _ROW].view(-1, _ROW), words[-(words.numel() % _ROW) :]
    return torch.cat((table.sum(0), table.sum(1), rest.sum().view(1)))


_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW: Final = 251
"""Elements in a row of such a table: a prime, so that rows of the tensor lie otherwise."""


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def version_of(tensor: Tensor | None) -> int:
    """How often a tensor was written in place; 0 for one of inference, which does not count."""
    if tensor is None or tensor.is_inference():
        return 0
    try:
        return version_counter(tensor)
    except RuntimeError:  # it was one of inference, whose ``.data`` was exchanged
        return 0


def is_unchanged(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a tensor is as it was copied, a NaN too; one that holds no plain values counts as unchanged."""
    if tensor.is_meta or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return True
    return torch.equal(tensor, copy) or (not tensor.is_quantized and same_bits(tensor, copy))


def held_fast(value: Any) -> Iterator[Any]:
    """What can be reached through it where nothing else can take its place.

    Of a tuple its items; of an iterator what it reads; of a callable what it has to hand: a method's function and
    object, what a partial is given, defaults of a function.
    """
    if isinstance(value, tuple | frozenset):
        yield from value
    elif is_iterator(value):
        yield from within(value)
    elif isinstance(value, _METHODS):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())


_METHODS: Final = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _variables_around(value: Any) -> tuple[Variables | types.FunctionType, ...]:
    """What a function reads, or the methods of a class or of an object."""
    if isinstance(value, types.FunctionType | type):
        return variables_of(value)
    return () if isinstance(value, _NO_CODE) else variables_of(type(value))

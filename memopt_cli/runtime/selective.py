"""Keeping the outputs of some operators in a segment, so that they are not recomputed (selective checkpointing).

The idea comes from PyTorch's ``create_selective_checkpoint_contexts``, with these differences:

- A kept output that is modified in place later, through whatever view, is copied first.  PyTorch looks only at the
  version counters.  But the output of ``aten::_unsafe_view``, the last operator of a matrix product in three
  dimensions, has its own version counter: an in-place activation after it would give wrong gradients silently.
- Only the innermost segment that runs an operator may keep the operator's output: if an outer segment kept it, the
  recomputation of the inner one would run the operator all the same.
- A second backward through the same graph recomputes the outputs that the first backward has used up.
- If an operator that uses random numbers is skipped, the generator is put where the operator left it.

The segment itself looks after the running statistics and the counter of a norm, whether the norm's output is kept or
recomputed (:class:`~memopt_cli.runtime.state.StartingState`).
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt_cli.runtime.generators import position_of, put_at
from memopt_cli.runtime.module_state import Complaint
from memopt_cli.runtime.places.schedule import Handle, Parcel
from memopt_cli.runtime.private_torch import (
    OpOverloadPacket,
    TorchDispatchMode,
    TreeSpec,
    alias,
    consists_of_others,
    has_kernel,
    has_schema,
    is_fake,
    memory_of,
    schema_of,
    tree_flatten,
    tree_unflatten,
    version_counter,
)
from memopt_cli.runtime.this_thread import this_thread

Call = tuple[str, int]
"""Name of an operator, without the overload, and the number of a segment's call of it, from 1."""


_KEPT_NAME = re.compile(r"(?P<namespace>\w+)::(?P<operator>\w+)(#(?P<call>[1-9]\d*))?")
"""``aten::convolution``, or ``aten::convolution#2`` for only the second call of a segment."""
_NO_OPERATOR = (
    "there is no operator of that name; names are like aten::convolution, without the overload, or "
    "aten::convolution#2 for the second call"
)
_NOTHING: AbstractContextManager[None] = nullcontext()


def keep_refusal(names: Sequence[str]) -> str:
    """Return why outputs of the operators ``names`` (``aten::convolution``) cannot be kept."""
    return _first_refused(names, _operator_refusal)


def why_misspelled(names: Sequence[str]) -> str:
    """Return why one of ``names`` is an operator of no version of PyTorch."""
    return _first_refused(names, lambda name: "" if _KEPT_NAME.fullmatch(name) else _NO_OPERATOR)


def _first_refused(names: Sequence[str], refusal_of: Callable[[str], str]) -> str:
    refusals = ((name, refusal_of(name)) for name in names)
    return next((f"it should keep the output of {reprlib.repr(name)}: {why}" for name, why in refusals if why), "")


def _operator_refusal(name: str) -> str:
    parts = _KEPT_NAME.fullmatch(name)
    packet = getattr(getattr(torch.ops, parts["namespace"], None), parts["operator"], None) if parts else None
    if not isinstance(packet, OpOverloadPacket):
        return _NO_OPERATOR
    overload = getattr(packet, packet.overloads()[0])
    if not has_kernel(overload):
        return "only TorchScript has it"
    if consists_of_others(overload):
        return "it consists of other operators; name those"
    if schema_of(overload).is_mutable:
        return "it writes in place"
    if any(result.alias_info is not None for result in schema_of(overload).returns):
        return "it returns a view, which takes no memory"
    # Autocast caches casts of weights, so forward and recomputation may run different numbers of them.
    return "autocast may run it in forward only" if packet is torch.ops.aten._to_copy else ""


@dataclass(slots=True)
class _Output:
    """The return value of one call of an operator."""

    leaves: list[Any]
    spec: TreeSpec | None
    """The containers around the leaves; ``None`` if it is a single leaf."""
    signature: tuple[Any, ...]
    """Shapes and dtypes of the call's tensors: a recomputed call with other ones must not get this output."""
    position_after: Tensor | None
    """Position of the generator after the call; ``None`` if it used no random numbers."""
    watched: list[tuple[Tensor, int]]
    """Tensors that share memory with the output, and their versions when forward ended, to notice later writes."""

    def send(self, parcel: Parcel) -> None:
        """Send the tensors with ``parcel``, and free all tensors that share their memory."""
        for index, leaf in enumerate(self.leaves):
            if _has_storage(leaf):
                key = memory_of(leaf)
                others = [tensor for tensor, _ in self.watched if memory_of(tensor) == key]
                self.leaves[index] = parcel.send(leaf, others)
                if self.leaves[index] is not leaf:
                    self.watched = [(tensor, version) for tensor, version in self.watched if memory_of(tensor) != key]


class KeptOutputs:
    """The outputs that one run of a segment keeps."""

    def __init__(self, names: Sequence[str], parcel: Parcel | None = None) -> None:
        """Keep outputs of the operators ``names``.  ``parcel``: sends them to a place; ``None`` if they stay."""
        self._parcel = parcel
        self._calls: dict[str, set[int]] = defaultdict(set)
        """Operator -> the numbers of its calls whose outputs are kept, from 1; 0 means all calls."""
        for name in names:
            operator, _, call = name.partition("#")
            self._calls[operator].add(int(call or 0))
        self._outputs: dict[Call, _Output] = {}
        self._needed_outputs = 0
        """Number of outputs when autograd last saved a tensor: a recomputation ends there, and needs no later ones."""
        self._in_storage: dict[int, list[tuple[_Output, int]]] = defaultdict(list)
        """Storage -> the outputs in it, each with the index of its leaf."""
        self.other_kernel: Complaint = ""
        """How PyTorch runs a different kernel because outputs are kept."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep outputs of the forward that runs in the ``with`` block."""
        with _innermost(self), _Recording(self):
            yield
        self._in_storage.clear()
        for key in list(self._outputs)[self._needed_outputs :]:
            del self._outputs[key]
        for output in self._outputs.values():
            output.watched = [(tensor, version_counter(tensor)) for tensor, _ in output.watched]
            if self._parcel is not None:
                output.send(self._parcel)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Return kept outputs to the recomputation in the ``with`` block, in place of running the operators."""
        with _innermost(self), _Replaying(self):
            yield

    def note_save(self) -> None:
        """Note that autograd saves a tensor now."""
        self._needed_outputs = len(self._outputs)

    def add(self, call: Call, signature: tuple[Any, ...], result: Any, position_after: Tensor | None) -> None:
        """Keep ``result``, which ``call`` has returned.

        ``signature``: shapes and dtypes of its tensors.
        ``position_after``: the generator's position after it, or ``None`` if it used no random numbers.
        """
        leaves, spec = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        output = self._outputs[call] = _Output(leaves, spec, signature, position_after, [])
        for index, leaf in enumerate(leaves):
            if _has_storage(leaf):
                self._in_storage[memory_of(leaf)].append((output, index))

    def copy_before_write(self, tensor: Any) -> None:
        """Copy the kept outputs in the memory of ``tensor``, which is about to be modified in place."""
        if not _has_storage(tensor):
            return
        key = memory_of(tensor)
        for output, index in self._in_storage.pop(key, ()):
            output.leaves[index] = output.leaves[index].clone()
            output.watched = [(t, v) for t, v in output.watched if memory_of(t) != key]

    def watch(self, tensor: Any) -> None:
        """Watch ``tensor`` for later writes if it lies in the memory of a kept output."""
        if _has_storage(tensor):
            for output, _ in self._in_storage.get(memory_of(tensor), ()):
                output.watched.append((alias(tensor), 0))

    def take(self, call: Call, signature: tuple[Any, ...]) -> _Output | None:
        """Return the output that ``call`` had in forward, and drop it here; ``None`` if it is not kept.

        Raises :class:`RuntimeError` if the call has other arguments now, or the output was modified after forward.
        """
        output = self._outputs.pop(call, None)
        if output is None:
            return None
        name, _ = call
        if output.signature != signature:
            raise RuntimeError(
                f"a recomputation calls {name} on {signature}, and forward called it on {output.signature}: the module "
                "does not compute the same twice. Remove this operator from keep in the plan."
            )
        if any(version_counter(tensor) != version for tensor, version in output.watched):
            raise RuntimeError(
                f"an output of {name} that a segment keeps was modified in place after the segment's forward. "
                "Use an out-of-place operation there, or remove this operator from keep in the plan."
            )
        output.leaves = [leaf.get() if isinstance(leaf, Handle) else leaf for leaf in output.leaves]
        return output

    def wants(self, call: Call) -> bool:
        """Return whether the outputs of ``call`` are to be kept."""
        operator, number = call
        return not self._calls[operator].isdisjoint((0, number))

    def counts(self, operator: str) -> bool:
        """Return whether a call of ``operator`` counts now: its outputs are kept, and no inner segment runs."""
        return operator in self._calls and this_thread.keeping is self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept, so that no write matters."""
        return not self._in_storage


class NothingKept:
    """The stand-in for :class:`KeptOutputs` in a segment that recomputes everything."""

    other_kernel: Complaint = ""

    def note_save(self) -> None:
        """Ignore that autograd saves a tensor now."""

    def recording(self) -> AbstractContextManager[None]:
        """Hide the operators in the ``with`` block from an enclosing segment that counts them to keep outputs."""
        return uncounted()

    replaying = recording


class _Calls(TorchDispatchMode):
    """A mode that numbers a segment's own calls of operators, for ``aten::convolution#2``."""

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _kept_call(self, func: Any) -> Call | None:
        """Return the call of ``func`` that is being made, if its outputs are to be kept."""
        operator = _operator_name(func)
        if not self._kept.counts(operator):
            return None
        self._counts[operator] += 1
        call = operator, self._counts[operator]
        # A call with ``out=`` is counted, but must be recomputed: its effect is the write.
        return call if self._kept.wants(call) and not schema_of(func).is_mutable else None


class _Recording(_Calls):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = self._kept
        if not kept.is_empty:
            written = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)]
            for tensor in _tensors_in(written):
                kept.copy_before_write(tensor)
        if _may_be_max_pool1d(func, args):
            kept.other_kernel = "pools in one dimension, with a different kernel where outputs are kept"
        call = self._kept_call(func)  # before it runs, since a call that fails counts as well
        result = func(*args, **kwargs)
        if call:
            generator = _generator_used(func, kwargs, result)
            position_after = None if generator is None else position_of(generator)
            kept.add(call, _call_signature(args, kwargs), result, position_after)
        if not kept.is_empty:
            for leaf in _tensors_in(result):
                kept.watch(leaf)
        return result


class _Replaying(_Calls):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._kept_call(func)
        output = self._kept.take(call, _call_signature(args, kwargs)) if call else None
        if output is None:
            return func(*args, **kwargs)
        result = output.leaves[0] if output.spec is None else tree_unflatten(output.leaves, output.spec)
        # The generator of this call, not forward's: a recomputation copies generators that modules and globals hold.
        if output.position_after is not None and (generator := _generator_used(func, kwargs, result)) is not None:
            put_at(generator, output.position_after)
        return result


def _may_be_max_pool1d(func: Any, args: Any) -> bool:
    """Return whether ``func`` may be ``max_pool1d`` on the CPU, of a tensor that needs no gradient.

    Without a mode, PyTorch would use a kernel that computes no indices.  Its output has a different layout in memory,
    and a later dropout would make its mask in that order.
    """
    if func is not torch.ops.aten.max_pool2d_with_indices.default:
        return False
    x = args[0]
    is_trained = x.requires_grad and torch.is_grad_enabled()
    return x.device.type == "cpu" and x.shape[-2] == 1 and not is_trained and not x.is_contiguous()


def uncounted() -> AbstractContextManager[None]:
    """Return a context manager that counts calls of operators for no segment."""
    return _NOTHING if this_thread.keeping is None else _innermost(None)


@contextmanager
def _innermost(kept: KeptOutputs | None) -> Iterator[None]:
    outer, this_thread.keeping = this_thread.keeping, kept
    try:
        yield
    finally:
        this_thread.keeping = outer


@functools.cache
def _operator_name(func: Any) -> str:
    name: str = func.name()
    return name.partition(".")[0]


def _call_signature(args: Any, kwargs: Any) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype) for t in _tensors_in((args, tuple(kwargs.values()))))


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, arguments or result of an operator, which is faster than PyTorch's walk."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    for inner in value if isinstance(value, tuple | list) else ():
        if isinstance(inner, Tensor):
            tensors.append(inner)
        elif isinstance(inner, tuple | list):
            tensors += _tensors_in(inner)
    return tensors


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = schema_of(func).arguments if has_schema(func) else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _generator_used(func: Any, kwargs: dict[str, Any], result: Any) -> torch.Generator | None:
    """Return the generator that a call of ``func`` with this ``result`` has used; ``None`` if it used none."""
    if not _is_random(func):
        return None
    generator: torch.Generator | None = kwargs.get("generator")
    if generator is not None:
        return generator
    first = next(iter(_tensors_in(result)), None)
    # Without data, no generator moves.
    if first is None or is_fake(first):
        return None
    if first.device.type == "cpu":
        return torch.default_generator
    generators: Sequence[torch.Generator] = torch.get_device_module(first.device).default_generators
    return generators[first.device.index]


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided

"""Reading, taking and putting back the state of a module tree: buffers, and what modules keep in attributes.

:class:`ModuleState` takes all state by reference, whether forward changes it or not; segments take more care
(``state.py``).  The rest of this file lists state by name, copies modules and resets hidden state.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memopt_cli.runtime.frozen import ATOMS
from memopt_cli.runtime.generators import position_of, put_at
from memopt_cli.runtime.private_torch import (
    attributes_of_script,
    buffers_of,
    children_of,
    is_of_transform,
    parameters_of,
    program_of,
)

SEGMENT_KEY = "_memopt_segment"
"""Attribute with the settings of a segment."""
RUNS_KEY = "_memopt_runs"
"""Attribute with the runs of a divided Sequential."""
LEARNED_KEY = "_memopt_learned"
"""Attribute with the knowledge from the calls of a segment."""
COMPILED_KEY = "_memopt_compiled"
"""Attribute of a model that a plan compiles: the settings, as plain data, which are saved with the model."""
COMPILED_CALL = "_compiled_call_impl"
"""Attribute with the compiled call of such a model, which PyTorch does not save."""
STRUCTURE = (frozenset(vars(nn.Module())) - {"_buffers", "training"}) | {
    SEGMENT_KEY,
    RUNS_KEY,
    LEARNED_KEY,
    COMPILED_KEY,
    COMPILED_CALL,
}
"""Names of the attributes that are not state: parameters, children, hooks, and memopt's own."""
_NUMBERS = frozenset({bool, int, float, complex})

Complaint = str
"""A description of what is wrong with a module, as a predicate ("uses random numbers"); empty if nothing is wrong.

Whoever shows it puts the module's name (:func:`label_of`) before it.
"""


def uninitialized(module: nn.Module, *, recurse: bool = True) -> str:
    """Return the path of a parameter or buffer of ``module`` that has no shape yet; empty if there is none."""
    for path, part in module.named_modules() if recurse else [("", module)]:
        for name, tensor in (*parameters_of(part).items(), *buffers_of(part).items()):
            if is_lazy(tensor):
                return f"{path}.{name}".removeprefix(".")
    return ""


def label_of(module: nn.Module) -> str:
    """Return the label of ``module`` in messages: its class, and for a segment its path in the plan."""
    return name_at(module, getattr(vars(module).get(SEGMENT_KEY), "path", ""))


def name_at(module: nn.Module, path: str) -> str:
    """Return the name of ``module`` at ``path`` in the plan for messages; ``torch.compile`` can trace this."""
    kind = type(module).__name__
    return f"{kind} at '{path}'" if path else kind


@dataclass(slots=True)
class _Container:
    """A built-in container and its items at one moment, restored in place, since other objects may refer to it."""

    container: dict[Any, Any] | list[Any] | deque[Any] | set[Any]
    items: Any

    def restore(self, replaced: Mapping[int, Any]) -> Any:
        items = [restored(item, replaced) for item in self.items]
        self.container.clear()
        if isinstance(self.container, dict):
            # Not ``update``: a Counter's own ``update`` would count the pairs.
            for key, value in items:
                self.container[key] = value
        elif isinstance(self.container, set):
            self.container.update(items)
        else:
            self.container.extend(items)
        return self.container


@dataclass(frozen=True, slots=True)
class _HeldGenerator:
    """A module's own random generator, and its position at one moment."""

    generator: torch.Generator
    position: Tensor

    def restore(self) -> torch.Generator:
        put_at(self.generator, self.position)
        return self.generator


class ScriptSlots(MutableMapping[str, Any]):
    """The buffers and attributes of a ScriptModule as a mapping: they are kept in its program, not in ``vars``."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._program = program_of(module)
        # In a script that was loaded, buffers are also among the attributes; a dictionary has each name once.
        buffers = (name for name, _ in buffers_of(module).items())
        self._names = dict.fromkeys((*attributes_of_script(module), *buffers))

    def __getitem__(self, name: str) -> Any:
        return self._program.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._program.setattr(name, value)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)  # a program's attributes are fixed

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _attributes_of(module: nn.Module) -> Iterator[MutableMapping[str, Any]]:
    yield vars(module)
    if isinstance(module, torch.jit.ScriptModule) and attributes_of_script(module):
        yield ScriptSlots(module)


class _Attributes:
    """A mapping of a module's attributes, and their values at one moment."""

    __slots__ = ("_atoms", "_mapping", "_names", "objects")

    def __init__(self, mapping: MutableMapping[str, Any]) -> None:
        self._mapping, self._names = mapping, tuple(mapping)
        self._atoms: dict[str, Any] = {}
        """Values of immutable types, such as numbers."""
        self.objects: dict[str, Any] = {}
        """Other values; containers with their items, and generators with their position."""
        for name in _names_of_state(self._names):
            value = mapping[name]
            if type(value) in ATOMS or _is_atom(value):
                self._atoms[name] = value
            else:
                self.objects[name] = _hold_value(value)

    def restore(self, replaced: Mapping[int, Any]) -> None:
        if tuple(self._mapping) != self._names:
            for name in self._mapping.keys() - self._atoms.keys() - self.objects.keys() - STRUCTURE:
                del self._mapping[name]
        self._mapping.update(self._atoms)
        for name, value in self.objects.items():
            self._mapping[name] = restored(value, replaced)


class ModuleState:
    """The state of a module tree at one moment, by reference: cheap to take, and restored by :meth:`restore`.

    A tensor that is written in place is not restored: callers copy those (:meth:`tensors`).
    """

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module] | None = None) -> None:
        """Take the state of ``module``, or only of ``modules``, which are among its parts."""
        modules = list(module.modules()) if modules is None else modules
        self._attributes = [_Attributes(mapping) for m in modules for mapping in _attributes_of(m)]
        # The children of a ScriptModule are in no dictionary, and cannot be replaced.
        self._children = [(table, dict(table)) for table in map(children_of, modules) if isinstance(table, dict)]

    def restore(self, replaced: Mapping[int, Any] | None = None) -> None:
        """Put everything back; tensors and iterators whose ``id`` is a key of ``replaced`` become the value there."""
        for table, children in self._children:
            if table != children:
                table.clear()
                table.update(children)
        for attributes in self._attributes:
            attributes.restore(replaced or {})

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor among buffers and attributes."""
        # Not parameters, nor tensors that a transform of torch.func has left behind: these cannot be read.
        leaves = (leaf for attributes in self._attributes for leaf in leaves_in(attributes.objects.values()))
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return (t for t in tensors if not is_of_transform(t) and (type(t) is Tensor or not isinstance(t, nn.Parameter)))


def find_matrices(module: nn.Module) -> list[Tensor]:
    """Return the tensors of more than one dimension that ``module`` keeps in buffers and attributes, each once.

    Tensors of inference are not among them: autograd does not save these.
    """
    return list({id(t): t for t in ModuleState(module).tensors() if t.dim() > 1 and not t.is_inference()}.values())


def state_by_name(module: nn.Module, without: Container[nn.Module] = ()) -> dict[str, Any]:
    """Return the tensors and numbers that ``module`` keeps besides parameters, by path and name.

    Modules in ``without`` are left out.  In a container, index or key is the name: ``cell.memories.v``, ``history.0``.
    """
    leaves = (leaf for name, value in _named_attributes(module, without) for leaf in _named_leaves(name, value))
    return {
        path: leaf
        for path, leaf in leaves
        if type(leaf) in _NUMBERS or (isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter))
    }


def numbers_by_attribute(module: nn.Module) -> dict[str, list[Any]]:
    """Return the numbers in the attributes of ``module`` and its parts, by path and name (``cell.steps``)."""
    numbers = {
        name: [leaf for _, leaf in _named_leaves(name, value) if type(leaf) in _NUMBERS]
        for name, value in _named_attributes(module)
    }
    return {name: leaves for name, leaves in numbers.items() if leaves}


def generators_by_name(module: nn.Module) -> dict[str, Any]:
    """Return the random generators of PyTorch, NumPy and Python that ``module`` keeps for itself, by path and name."""
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = () if numpy_random is None else (numpy_random.Generator, numpy_random.RandomState)
    leaves = (leaf for name, value in _named_attributes(module) for leaf in _named_leaves(name, value))
    return {name: leaf for name, leaf in leaves if isinstance(leaf, (torch.Generator, random.Random, *of_numpy))}


def _named_attributes(module: nn.Module, without: Container[nn.Module] = ()) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        for attributes in () if part in without else _attributes_of(part):
            state = {**dict(buffers_of(part).items()), **{k: v for k, v in attributes.items() if k != "_buffers"}}
            yield from ((_joined_path(path, key), value) for key, value in state.items() if key not in STRUCTURE)


def _named_leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list | tuple | deque):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _named_leaves(_joined_path(path, key), inner)


def _joined_path(path: str, key: Any) -> str:
    return f"{path}.{key}".removeprefix(".")


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module``, in which tensors with a graph are detached, since they cannot be copied.

    An error that a class of the attributes raises is passed on.
    """
    graphs = {id(t): t.detach().clone() for t in ModuleState(module).tensors() if t.grad_fn is not None}
    return deepcopy(module, graphs)


def reset_hidden_state(module: nn.Module) -> None:
    """Reset the state that earlier steps left on ``module``: SpikingJelly's memories, snnTorch's membranes.

    Tensors with a graph are detached: a module that holds one can be neither copied nor pickled.
    """
    for m in module.modules():
        for name in ("reset", "reset_mem") if hasattr(m, "_memories") else ("reset_mem",):
            reset = getattr(m, name, None)
            if callable(reset):
                reset()
                break
    detach_state(module)


def detach_state(module: nn.Module) -> None:
    """Detach the tensors that ``module`` keeps in buffers and attributes, so that it can be copied."""
    state = ModuleState(module)
    state.restore({id(t): t.detach() for t in state.tensors() if t.grad_fn is not None})


@functools.lru_cache(maxsize=1000)
def _names_of_state(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in STRUCTURE)


def _is_atom(value: Any) -> bool:
    return type(value) in ATOMS or (type(value) is tuple and all(map(_is_atom, value)))


def _hold_value(value: Any) -> Any:
    if isinstance(value, list | deque):
        return _Container(value, [_hold_value(item) for item in value])
    if isinstance(value, dict):
        return _Container(value, [(key, _hold_value(item)) for key, item in value.items()])
    if type(value) is set:
        return _Container(value, list(value))
    if isinstance(value, torch.Generator):
        return _HeldGenerator(value, position_of(value))
    return value


def restored(value: Any, replaced: Mapping[int, Any]) -> Any:
    """Return ``value`` with held containers and generators restored, and the values of ``replaced`` by ``id``."""
    if type(value) is Tensor or type(value) in ATOMS:
        return replaced.get(id(value), value)
    if isinstance(value, _Container):
        return value.restore(replaced)
    if isinstance(value, _HeldGenerator):
        return value.restore()
    if isinstance(value, tuple):
        items = [restored(item, replaced) for item in value]
        if not all(map(is_, items, value)):
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        return value
    return replaced.get(id(value), value)


def leaves_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values in ``values``, and those in tuples and held containers there, without immutable ones."""
    for value in values:
        if isinstance(value, _Container):
            yield from leaves_in(value.items)
        elif isinstance(value, tuple):
            yield from leaves_in(value)
        elif type(value) not in ATOMS:
            yield value

"""What a module carries besides its parameters: buffers, and tensors or numbers it keeps in attributes.

A recomputed forward must start from the state that the first one started from, and leave no trace: batch statistics,
neuron membranes and counters advance once a step, however often forward runs.

One segment, two time steps; its membrane ``v``, a matrix, is assigned anew in each (``self.v = 0.5 * self.v + x``), its
``count`` goes up in place (``self.count.add_(1)``)::

    forward 1   StartingState(module)   v = A, count = 0    taken: both by reference, and a copy of each
                ... runs ...            v = B, count = 1
                settle()                                    A did not change: its copy goes, the reference stays,
                                                            and who writes to A later hands over a copy of it;
                                                            count did: its copy (0) stays
    forward 2   StartingState(module)   v = B, count = 1
                ... runs ...            v = C, count = 2
                settle()
    backward 2  with replay():          v = B, count = 1    forward runs again, up to C and 2
                afterwards              v = C, count = 2    as if it had not
    backward 1  with replay():          v = A, count = 0
                afterwards              v = C, count = 2

A segment within another does not hold its ``v`` from forward to backward: the one around makes it again.  It *lends*
its large tensors: ``lend()`` hands them to PyTorch's checkpoint as inputs of the segment, which the recomputation
around makes anew; ``settle()`` then *forgets* them, a gap (:class:`_Forgotten`) with the ``id`` of each in its place;
and ``replay(lent)`` fills the gaps with what the checkpoint gives back, in the same order::

    lend()           gives [B]    saved by the checkpoint around, no longer by us
    settle()         v = gap
    replay([B'])     v = B'       equal to B, and of the graph that the recomputation around has just made
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from memopt_cli.runtime.copies import copies_of, remade
from memopt_cli.runtime.objects import Objects, is_unchanged, version_of
from memopt_cli.runtime.private_torch import (
    attributes_of_script,
    buffers_of,
    children_of,
    global_hook_tables,
    hook_tables,
    is_of_transform,
    is_started,
    memory_of,
    not_compiled,
    parameters_of,
    program_of,
    unseen,
)
from memopt_cli.runtime.settings import Settings

SEGMENT_KEY, RUNS_KEY = "_memopt_segment", "_memopt_runs"
"""Attributes that make a module a segment, and divide a Sequential into runs."""
_STRUCTURE = (frozenset(vars(nn.Module())) - {"_buffers", "training"}) | {SEGMENT_KEY, RUNS_KEY}
"""Attributes of every module that are no state: its parameters, children and hooks."""
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""Types of values that are put back as they are; most attributes are of one."""
_NUMBERS = frozenset({bool, int, float, complex})


def uninitialized(module: nn.Module, *, recurse: bool = True) -> str:
    """The first parameter or buffer that has no shape before a lazy module has run; empty if there is none."""
    for path, part in module.named_modules() if recurse else [("", module)]:
        for name, tensor in (*parameters_of(part).items(), *buffers_of(part).items()):
            if is_lazy(tensor):
                return f"{path}.{name}".removeprefix(".")
    return ""


def name_of(module: nn.Module) -> str:
    """How messages name a module: its class, and of a segment its path in the plan."""
    path, kind = getattr(vars(module).get(SEGMENT_KEY), "path", ""), type(module).__name__
    return f"{kind} at '{path}'" if path else kind


@dataclass(slots=True)
class _Container:
    """A built-in container and what it held: restored in place, since others may hold it too."""

    container: dict[Any, Any] | list[Any] | deque[Any] | set[Any]
    items: Any

    def restore(self, replaced: Mapping[int, Any]) -> Any:
        items = [_restored(item, replaced) for item in self.items]
        self.container.clear()
        if isinstance(self.container, dict):
            for key, value in items:  # a Counter's ``update`` would count the pairs
                self.container[key] = value
        elif isinstance(self.container, set):
            self.container.update(items)
        else:
            self.container.extend(items)
        return self.container


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A module's own random generator, and where it stood."""

    generator: torch.Generator
    position: Tensor

    def restore(self) -> torch.Generator:
        self.generator.set_state(self.position)
        return self.generator


class Generators:
    """Where the global random generators stand: Python's, NumPy's, and PyTorch's on the CPU and on devices."""

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        """``devices``: those to look at, besides the CPU; ``None``: every one in use."""
        self._devices = [torch.device("cpu"), *filter(_is_started, _every_device() if devices is None else devices)]
        positions: dict[str | torch.device, Any] = {"Python": random.getstate()}
        if "numpy.random" in sys.modules:
            positions["NumPy"] = pickle.dumps(sys.modules["numpy.random"].get_state(legacy=False))
        with unseen():  # a dry run's tensors have no values
            positions |= {device: _position(device) for device in self._devices}
        self._positions = {generator: _shared(generator, position) for generator, position in positions.items()}

    def restore(self) -> None:
        """Put them back there."""
        for generator, position in self._positions.items():
            if isinstance(generator, torch.device):
                with unseen():
                    _put(generator, position)
            elif generator == "NumPy":
                sys.modules["numpy.random"].set_state(pickle.loads(position))
            else:
                random.setstate(position)

    def keep_moved(self) -> None:
        """Forget those that stand there still, if there are other threads: they draw, and must not draw the same again.

        Without others all are kept: forward may have drawn and put a generator back (``torch.random.fork_rng``).
        """
        if threading.active_count() > 1:
            now = Generators(self._devices)._positions
            self._positions = {key: held for key, held in self._positions.items() if now.get(key) != held}

    def now(self) -> Generators:
        """Where the same ones stand now."""
        found = Generators(self._devices)
        found._positions = {key: found._positions[key] for key in self._positions}
        return found

    def moved(self) -> bool:
        """Whether one of them stands elsewhere now."""
        return self._positions != self.now()._positions  # NumPy may have been imported since

    def to_bytes(self) -> bytes:
        """The positions in a form to compare."""
        return pickle.dumps(self._positions)


def _position(device: torch.device) -> bytes:
    """Not as a tensor: whether it is held already, or newly made, is not to be seen in a measured peak."""
    on_cpu = device.type == "cpu"
    position = torch.get_rng_state() if on_cpu else torch.get_device_module(device).get_rng_state(device)
    return ctypes.string_at(position.data_ptr(), position.nbytes)


def _put(device: torch.device, position: bytes) -> None:
    tensor = torch.frombuffer(bytearray(position), dtype=torch.uint8)
    if device.type == "cpu":
        torch.set_rng_state(tensor)
    else:
        torch.get_device_module(device).set_rng_state(tensor, device)


def _every_device() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator()
    if kind is None or not _is_started(kind):
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def _is_started(device: torch.device) -> bool:
    """Whether one may have been drawn from there, as PyTorch's checkpoint asks it."""
    return device.type not in ("cpu", "meta") and is_started(device)


_latest: dict[str | torch.device, Any] = {}
"""The position of a generator that was asked for last: most stand there still when they are asked for next."""


def _shared(generator: str | torch.device, position: Any) -> Any:
    """``position``, or what is held of the same already."""
    if _latest.get(generator) != position:
        _latest[generator] = position
    return _latest[generator]


@dataclass(frozen=True, slots=True)
class _Forgotten:
    """Stands for a tensor that is no longer held, by its id."""

    key: int


class _Slots(MutableMapping[str, Any]):
    """What a ScriptModule keeps besides its parameters and children: not in its dictionary, but in its program."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._program = program_of(module)
        # Of one that was loaded they name its buffers too.
        buffers = (name for name, _ in buffers_of(module).items())
        self._names = dict.fromkeys((*attributes_of_script(module), *buffers))

    def __getitem__(self, name: str) -> Any:
        return self._program.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._program.setattr(name, value)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)  # a program's are what they are

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _attributes_of(module: nn.Module) -> Iterator[MutableMapping[str, Any]]:
    """Where a module keeps its state."""
    yield vars(module)
    if isinstance(module, torch.jit.ScriptModule) and attributes_of_script(module):
        yield _Slots(module)


def _parameters_of(module: nn.Module) -> dict[str, Any]:
    """Those of a ScriptModule cannot be exchanged."""
    parameters: Any = parameters_of(module)
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


class ModuleState:
    """The state of a module tree at one moment, by reference: cheap to take, and put back by :meth:`restore`."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._attributes = [(attributes, *_held(attributes)) for m in modules for attributes in _attributes_of(m)]
        self._kinds = {type(m): None for m in modules}
        # A ScriptModule's cannot be exchanged.
        self._children = [(children_of(m), dict(children_of(m))) for m in modules if isinstance(children_of(m), dict)]

    def restore(self, replaced: Mapping[int, Any] | None = None) -> None:
        """Put everything back; a tensor or iterator whose ``id`` is in ``replaced`` as that other one."""
        for children, held in self._children:
            if children != held:
                children.clear()
                children.update(held)
        for attributes, atoms, held in self._attributes:
            for key in attributes.keys() - atoms.keys() - held.keys() - _STRUCTURE:
                del attributes[key]
            attributes.update(atoms)
            for key, value in held.items():
                attributes[key] = _restored(value, replaced or {})

    def forget(self, keys: Sequence[int]) -> None:
        """Do not hold the tensors of these ids any longer; :meth:`restore` must be given others in their place."""
        forgotten = {key: _Forgotten(key) for key in keys}
        self._attributes = [
            (attributes, atoms, {name: _without(value, forgotten) for name, value in held.items()})
            for attributes, atoms, held in self._attributes
        ]

    def kinds(self) -> Iterator[type[nn.Module]]:
        """The classes of its modules."""
        yield from self._kinds

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor among the attributes."""
        for *_, held in self._attributes:
            yield from _tensors(held.values())

    def others(self) -> Iterator[Any]:
        """What else there is among them: neither tensors, nor what is put back as it is."""
        for *_, held in self._attributes:
            yield from _others(held.values())

    def large_tensors(self) -> list[Tensor]:
        """Each of those once that are no vectors: batch statistics are, which forward writes in place."""
        return list({id(t): t for t in self.tensors() if t.dim() > 1}.values())


def state_by_name(module: nn.Module, without: Container[nn.Module] = ()) -> dict[str, Any]:
    """The tensors and numbers among what a module keeps besides parameters, by path and name; not those of ``without``.

    In a container they are named by place or key: ``cell.memories.v``, ``history.0``.
    """
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for attributes in () if part in without else _attributes_of(part):
            held = {**dict(buffers_of(part).items()), **{k: v for k, v in attributes.items() if k != "_buffers"}}
            _name(found, path, {key: value for key, value in held.items() if key not in _STRUCTURE})
    return found


def _name(found: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, dict | list | tuple | deque):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _name(found, f"{path}.{key}".removeprefix("."), inner)
    elif type(value) in _NUMBERS or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
        found[path] = value


class _Parameters:
    """The parameters with which a forward ran.

    They are not copied, so they must not change before the recomputation; and ``torch.func.functional_call`` puts
    others in their place for the time of one call.
    """

    def __init__(self, module: nn.Module) -> None:
        held = map(_parameters_of, module.modules())
        self._used = [(parameters, dict(parameters)) for parameters in held]
        self._trainable = {id(p): p.requires_grad for p in self.tensors()}
        self._versions = {id(p): version_of(p) for p in self.tensors() if not is_lazy(p)}
        self._places = {id(p): _place_of(p) for p in self.tensors() if _is_plain(p) and _has_place(p)}
        self._gradients = [(p, p.grad, _version(p.grad)) for p in self.tensors() if p.is_leaf]
        self.written = ""
        """Name of a parameter that forward itself wrote."""
        self.has_gradients = False
        """Whether forward itself called backward, which adds to theirs."""

    def tensors(self) -> Iterator[Tensor]:
        """Those that there are."""
        return (p for _, used in self._used for p in used.values() if p is not None)

    def settle(self) -> None:
        """Forward has ended: from now on they stay as they are."""
        named = ((name, p) for _, used in self._used for name, p in used.items() if _is_plain(p))
        self.written = next((name for name, p in named if self._is_written(p)), "")
        self._places.clear()
        self.has_gradients = any(p.grad is not g or _version(g) != version for p, g, version in self._gradients)
        self._gradients.clear()
        self._versions = {id(p): version_of(p) for p in self.tensors()}

    def _is_written(self, p: Tensor) -> bool:
        """Whether it has another version, or by ``.data`` other memory; one that was made meanwhile has not."""
        if id(p) not in self._places:
            return False
        return version_of(p) != self._versions[id(p)] or _place_of(p) != self._places[id(p)]

    def check(self) -> None:
        """Raises :class:`RuntimeError` if one was modified in place since."""
        for _, used in self._used:
            for name, p in used.items():
                if _is_plain(p) and version_of(p) != self._versions[id(p)]:
                    raise RuntimeError(
                        f"the parameter {name} of shape {tuple(p.shape)} was modified in place between forward and "
                        f"backward (version {self._versions[id(p)]} -> {version_of(p)}); recomputing with it would be "
                        "wrong. Call backward before the optimizer's step."
                    )

    def put(self) -> None:
        """Have them stand where they stood, and no others."""
        for current, used in self._used:
            _exchange(current, used)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """They stand where they stood within, and need gradients if they did; others before and after.

        Those of before are back afterwards wherever forward has put others, or was ended before it took them off again.
        """
        others = [(current, dict(current)) for current, _ in self._used]
        present = [(p, p.requires_grad) for p in self.tensors() if p.is_leaf and not p.is_inference()]
        for p, _ in present:
            p.requires_grad_(self._trainable[id(p)])
        try:
            yield
        finally:
            for p, trainable in present:
                p.requires_grad_(trainable)
            for current, there in others:
                _exchange(current, there)


def _exchange(current: dict[str, Any], held: Mapping[str, Any]) -> None:
    """Put parameters in the place of others; FSDP gathers and frees sharded ones by hooks, in a recomputation too."""
    if current.keys() == held.keys() and all(p is held[name] for name, p in current.items()):
        return
    sharded = {name: p for name, p in current.items() if not (_may_move(p) and _may_move(held.get(name)))}
    _fill(current, {**held, **sharded})


def _may_move(parameter: Tensor | None) -> bool:
    return parameter is None or _is_plain(parameter)


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else version_of(gradient)


def _place_of(parameter: Tensor) -> int:
    place: int = memory_of(parameter)
    return place


def _has_place(parameter: Tensor) -> bool:
    """Not a lazy one, nor one that was made under a transform of torch.func, which is over."""
    return not is_lazy(parameter) and not is_of_transform(parameter)


def _is_plain(parameter: Tensor | None) -> TypeGuard[Tensor]:
    """Not sharded, nor any other tensor with a life of its own."""
    return parameter is not None and type(parameter) in (Tensor, nn.Parameter)


class _Hooks:
    """The hooks that ran within a module's forward: with others a recomputation would compute something else.

    Not the module's own, which run before and after the whole.
    """

    def __init__(self, module: nn.Module) -> None:
        inner = (table for m in module.modules() if m is not module for table in hook_tables(m))
        self._tables = [(table, dict(table) if table else _NO_HOOKS) for table in (*global_hook_tables(), *inner)]
        self.changed = False
        """Whether forward itself added or removed some."""

    def settle(self) -> None:
        """Forward has ended."""
        self.changed = any(table != held for table, held in self._tables)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """They are there within, and those that there are by now before and after."""
        others = [(table, held, dict(table)) for table, held in self._tables if table != held]
        for table, held, _ in others:
            _fill(table, held)
        try:
            yield
        finally:
            for table, _, there in others:
                _fill(table, there)


_NO_HOOKS: dict[Any, Any] = {}


def _fill(table: dict[Any, Any], hooks: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(hooks)


_readers: MutableMapping[Tensor, WeakSet[StartingState]] = WeakTensorKeyDictionary()
"""Who needs the values that a tensor has now and holds no copy of it."""


class StartingState:
    """The state in which a forward started, kept as long as its recomputation may need it.

    Tensors are copied at the start; :meth:`settle`, called when forward has ended, drops the copies of those that did
    not change.  Whoever changes one of these later, in a forward that has a starting state as well, hands over a copy.
    What the attributes refer to is kept in any case: whoever calls the module may change it between two calls (a time
    step's number, say), or before backward (``eval()``).
    """

    @not_compiled  # it looks into objects and functions of which the compiler knows nothing
    def __init__(self, module: nn.Module, inputs: Sequence[Tensor] = (), others: Iterable[Any] = ()) -> None:
        """``inputs``, ``others``: the tensors among the arguments of forward, and what else is among them."""
        self._module = module
        self._settings = Settings()
        self._state = ModuleState(module)
        self._objects = Objects((*self._state.others(), *others, *self._state.kinds()))
        self._parameters = _Parameters(module)
        self._hooks = _Hooks(module)
        tensors = list(self._state.tensors())
        self._devices = {tensor.device for tensor in (*inputs, *self._parameters.tensors(), *tensors)}
        self._generators = Generators(self._devices)
        self._taken = {id(t): (t, version_of(t), t.requires_grad) for t in tensors}
        self._copies = copies_of(tensors)
        self._lent: list[int] = []
        self._read: dict[int, int] = {}
        """The id of a tensor that is not copied -> its version."""

    def lend(self) -> list[Tensor]:
        """Hand the tensors over: their values come back in :meth:`enter`, and are not held here meanwhile.

        Vectors stay: they are small; and so do tensors of inference, which autograd does not save.
        """
        tensors = [t for t in self._state.large_tensors() if not t.is_inference()]
        self._lent = [id(t) for t in tensors]
        return tensors

    def settle(self) -> None:
        """Forward has ended: keep what it changed, for those who only read it before, too."""
        for key, (tensor, version, needs_gradient) in self._taken.items():
            copy = self._copies[key]
            is_large = tensor.dim() > 1 or copy.shared is not None
            if version_of(tensor) == version and is_large and is_unchanged(tensor.detach(), copy.values):
                # Bits are compared, for ``.data`` is written without raising the version.  Vectors stay, small as they
                # are: batch norm writes its statistics so.
                del self._copies[key]
                self._read[key] = version
                _readers.setdefault(tensor, WeakSet()).add(self)
                continue
            copy.needs_gradient = needs_gradient
            if version_of(tensor) != version:
                self._hand_over(tensor, version)
        self._taken.clear()
        self._state.forget(self._lent)
        self._objects.settle()
        self._parameters.settle()
        self._hooks.settle()
        self._generators.keep_moved()

    def lost(self) -> str:
        """What forward did that nothing can undo, a sentence without its subject; empty if nothing."""
        written = self._parameters.written
        if written:
            return f"writes to its parameter {written} in place"
        if self._parameters.has_gradients:
            return "calls backward in its forward, which adds to the gradients of its parameters"
        if self._hooks.changed:
            return "adds or removes hooks of modules within it"
        return self._objects.lost()

    def _hand_over(self, tensor: Tensor, version: int) -> None:
        for reader in _readers.pop(tensor, ()):
            if reader._read[id(tensor)] == version:
                reader._copies[id(tensor)] = self._copies[id(tensor)]

    def _check(self) -> None:
        for tensor in self._state.tensors():
            key = id(tensor)
            if key not in self._copies and version_of(tensor) != self._read.get(key, version_of(tensor)):
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that {name_of(self._module)} reads was modified in "
                    f"place between forward and backward (version {self._read[key]} -> {version_of(tensor)}); "
                    "recomputing with it would be wrong. Call backward before, or assign a new tensor."
                )

    def enter(self, lent: Sequence[Tensor] = ()) -> None:
        """Put the module and the generators into the starting state."""
        self._enter(lent)

    def _enter(self, lent: Sequence[Tensor]) -> dict[int, Any]:
        replaced: dict[int, Any] = dict(zip(self._lent, lent, strict=True))
        replaced |= remade(self._copies) | self._objects.again()
        self._parameters.put()
        self._state.restore(replaced)
        self._objects.restore(replaced)
        self._generators.restore()
        return replaced

    @contextmanager
    def replay(self, lent: Sequence[Tensor] = ()) -> Iterator[Mapping[int, Any]]:
        """The starting state within, the present one again afterwards.

        Gives what takes the place of objects meanwhile, by the ``id`` of each.  Raises :class:`RuntimeError` if a
        parameter, or a tensor of the state, has changed, which cannot be undone.
        """
        self._parameters.check()
        self._check()
        self._objects.check()
        current, objects = ModuleState(self._module), self._objects.now()
        generators = self._generators.now()
        with self._settings.in_force(), self._parameters.in_place(), self._hooks.in_place():
            try:
                yield self._enter(lent)
            finally:
                objects.restore()
                current.restore()
                generators.restore()


def copy_of(module: nn.Module) -> nn.Module:
    """A deep copy; what has a graph among its attributes, which cannot be copied, is detached in it.

    Raises whatever the classes of the module's attributes raise.
    """
    graphs = {id(t): t.detach().clone() for t in ModuleState(module).tensors() if t.grad_fn is not None}
    return deepcopy(module, graphs)


def reset_hidden_state(module: nn.Module) -> None:
    """Forget what earlier steps left on the module: SpikingJelly's memories, snnTorch's membranes, graphs.

    Attributes that hold a tensor with a graph are detached: such a module could be neither copied nor pickled.
    """
    for m in module.modules():
        for name in ("reset", "reset_mem") if hasattr(m, "_memories") else ("reset_mem",):
            reset = getattr(m, name, None)
            if callable(reset):
                reset()
                break
    detach_state(module)


def detach_state(module: nn.Module) -> None:
    """Cut what a module keeps in buffers and attributes off the graph that made it: as it is, it cannot be copied."""
    state = ModuleState(module)
    state.restore({id(t): t.detach() for t in state.tensors() if t.grad_fn is not None})


def _held(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state among a module's attributes: what is put back as it is, and what needs a look."""
    atoms: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for key, value in attributes.items():
        if key in _STRUCTURE:
            continue
        if _is_atom(value):
            atoms[key] = value
        else:
            held[key] = _hold(value)
    return atoms, held


def _is_atom(value: Any) -> bool:
    return type(value) in _ATOMS or (type(value) is tuple and all(map(_is_atom, value)))


def _hold(value: Any) -> Any:
    if isinstance(value, list | deque):
        return _Container(value, [_hold(item) for item in value])
    if isinstance(value, dict):
        return _Container(value, [(key, _hold(item)) for key, item in value.items()])
    if type(value) is set:
        return _Container(value, list(value))
    if isinstance(value, torch.Generator):
        return _Drawing(value, value.get_state())
    return value


def _restored(value: Any, replaced: Mapping[int, Any]) -> Any:
    if isinstance(value, _Container):
        return value.restore(replaced)
    if isinstance(value, _Drawing):
        return value.restore()
    if isinstance(value, tuple):
        return _rebuilt(value, [_restored(item, replaced) for item in value])
    if isinstance(value, _Forgotten):
        return replaced[value.key]
    return replaced.get(id(value), value)


def _without(value: Any, forgotten: dict[int, _Forgotten]) -> Any:
    if isinstance(value, _Container):
        return _Container(value.container, [_without(item, forgotten) for item in value.items])
    if isinstance(value, tuple):
        return _rebuilt(value, [_without(item, forgotten) for item in value])
    return forgotten.get(id(value), value) if isinstance(value, Tensor) else value


def _rebuilt(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _others(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Container):
            yield from _others(value.items)
        elif isinstance(value, tuple):
            yield from _others(value)
        elif not isinstance(value, Tensor | _Drawing) and not _is_atom(value):
            yield value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            # What a transform of torch.func has left behind can be neither read nor copied.
            if not isinstance(value, nn.Parameter) and not is_of_transform(value):
                yield value
        elif isinstance(value, _Container):
            yield from _tensors(value.items)
        elif isinstance(value, tuple):
            yield from _tensors(value)

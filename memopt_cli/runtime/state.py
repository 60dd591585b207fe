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
around makes anew; ``settle()`` then *forgets* them, a gap (``_Forgotten``) with the ``id`` of each in its place;
and ``replay(lent)`` fills the gaps with what the checkpoint gives back, in the same order::

    lend()           gives [B]    saved by the checkpoint around, no longer by us
    settle()         v = gap
    replay([B'])     v = B'       equal to B, and of the graph that the recomputation around has just made
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from memopt_cli.runtime.compressor import beside_the_model
from memopt_cli.runtime.copies import copies_of, remade
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import ModuleState, name_of
from memopt_cli.runtime.objects import Objects, is_unchanged, version_of
from memopt_cli.runtime.private_torch import (
    global_hook_tables,
    hook_tables,
    is_fake,
    is_of_transform,
    memory_of,
    not_compiled,
    parameters_of,
)
from memopt_cli.runtime.recurrent import has_recurrent_dropout
from memopt_cli.runtime.settings import Settings
from memopt_cli.runtime.variables import variables_of


def _parameters_of(module: nn.Module) -> dict[str, Any]:
    """Those of a ScriptModule cannot be exchanged."""
    parameters: Any = parameters_of(module)
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


class _Parameters:
    """The parameters with which a forward ran.

    They are not copied, so they must not change before the recomputation; and ``torch.func.functional_call`` puts
    others in their place for the time of one call.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._used = [(parameters, dict(parameters)) for parameters in map(_parameters_of, modules)]
        self.tensors = [p for _, used in self._used for p in used.values() if p is not None]
        self._trainable = {id(p): p.requires_grad for p in self.tensors}
        self._versions = {id(p): version_of(p) for p in self.tensors if not is_lazy(p)}
        self._places = {id(p): _place_of(p) for p in self.tensors if _is_plain(p) and _has_place(p)}
        self._gradients = [(p, p.grad, _version(p.grad)) for p in self.tensors if p.is_leaf]
        self.written = ""
        """Name of a parameter that forward itself wrote."""
        self.has_gradients = False
        """Whether forward itself called backward, which adds to theirs."""

    def settle(self) -> None:
        """Forward has ended: from now on they stay as they are."""
        named = ((name, p) for _, used in self._used for name, p in used.items() if _is_plain(p))
        self.written = next((name for name, p in named if self._is_written(p)), "")
        self._places.clear()
        self.has_gradients = any(p.grad is not g or _version(g) != version for p, g, version in self._gradients)
        self._gradients.clear()
        self._versions = {id(p): version_of(p) for p in self.tensors}

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
        present = [(p, p.requires_grad) for p in self.tensors if p.is_leaf and not p.is_inference()]
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
    """Not sharded, nor any other tensor with a life of its own; one of a dry run counts its versions as others do."""
    return parameter is not None and (type(parameter) in (Tensor, nn.Parameter) or is_fake(parameter))


class _Hooks:
    """The hooks that ran within a module's forward: with others a recomputation would compute something else.

    Not the module's own, which run before and after the whole.
    """

    def __init__(self, within: Sequence[nn.Module]) -> None:
        inner = itertools.chain.from_iterable(map(hook_tables, within))
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
        modules = list(module.modules())
        self._state = ModuleState(module, modules)
        code = itertools.chain.from_iterable(map(variables_of, self._state.kinds()))
        with beside_the_model():
            self._objects = Objects((*self._state.others(), *others, *code))
        self._parameters = _Parameters(modules)
        self._hooks = _Hooks([m for m in modules if m is not module])
        tensors = list(self._state.tensors())
        self._devices = {tensor.device for tensor in (*inputs, *self._parameters.tensors, *tensors)}
        self._generators = Generators(self._devices)
        self._taken = {id(t): (t, version_of(t), t.requires_grad) for t in tensors}
        with beside_the_model():
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
        on_cuda = any(device.type == "cuda" for device in self._devices)
        if on_cuda and has_recurrent_dropout(self._module, self._state.kinds()):
            return "has a recurrent layer with dropout, which cuDNN draws from a generator of its own"
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

    def _enter(self, lent: Sequence[Tensor], present: Generators | None = None) -> dict[int, Any]:
        """``present``: where the generators stand, if that is known."""
        replaced: dict[int, Any] = dict(zip(self._lent, lent, strict=True))
        replaced |= remade(self._copies) | self._objects.again()
        self._parameters.put()
        self._state.restore(replaced)
        self._objects.restore(replaced)
        self._generators.restore(present)
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
                yield self._enter(lent, generators)
            finally:
                objects.restore()
                current.restore()
                generators.restore()

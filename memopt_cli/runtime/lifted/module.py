"""Modules whose methods are generated from a stored program: lifted TorchScript and exported models.

A class is made for each program, after the program is checked (``program.py``); its code is text that ``source.py``
writes.  A checked program calls only allowed operators and its own modules.  :func:`check_lifted` makes sure that
the attributes under the names of these modules are modules, and that those that the program reads or sets are data.
"""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from memopt_cli.runtime.lifted.operators import FUNCTIONS, is_data
from memopt_cli.runtime.lifted.program import BadProgramError, check_program, check_size, is_further_call, walk_nodes
from memopt_cli.runtime.lifted.source import generate
from memopt_cli.runtime.private_torch import MODULE_ATTRIBUTES, buffers_of, children_of, parameters_of
from memopt_cli.runtime.script import ScriptLeaf, ScriptPart

_CLASSES: dict[str, type[LiftedModule]] = {}
_NUMBERS = itertools.count()
"""Numbers for the classes' files and modules, so that tracebacks and ``torch.compile`` find their code."""
_NAMING: Final = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "IMPORT_NAME"})


class LiftedModule(nn.Module):
    """The base of all lifted classes; each subclass is made from one program."""

    _program: ClassVar[tuple[Any, ...]]
    """The program (:mod:`memopt_cli.runtime.lifted.program`) from which the class is made."""
    _constants: tuple[Tensor, ...]
    """Tensors that are part of the program; they follow the module to its device and keep their dtype."""
    _device: torch.device | None
    """The device to which the module was moved; ``None`` if it never was."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return restore_lifted, (self._program, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> LiftedModule:
        twin: LiftedModule = nn.Module.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def _home(self, stored: str) -> torch.device:
        """Return the device of the module; ``stored`` if it has no tensors and was never moved."""
        tensors = itertools.chain(self.parameters(), self.buffers(), self._constants)
        return next((t.device for t in tensors), self._device or torch.device(stored))

    def _apply(self, fn: Any, recurse: bool = True) -> LiftedModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._device = fn(torch.empty(0)).device
        devices = (fn(torch.empty(0, dtype=t.dtype, device=t.device)).device for t in self._constants)
        self._constants = tuple(t.to(device) for t, device in zip(self._constants, devices, strict=True))
        return self


def lifted_class(program: tuple[Any, ...]) -> type[LiftedModule]:
    """Return the class of ``program``: the same one whenever it is called with an equal program.

    Raises :class:`BadProgramError`, before any code is made, if the data is not a program.
    """
    check_size(program)
    key = repr(program)  # not ``program``: tuples with 1, 1.0 and True are equal, but different programs
    if key not in _CLASSES:
        check_program(program)
        _CLASSES[key] = _make_class(program)
    return _CLASSES[key]


def restore_lifted(program: tuple[Any, ...], state: dict[str, Any]) -> LiftedModule:
    """Return a lifted module for an unpickler.  Saved models name this function: do not rename it.

    ``program`` is described in :mod:`memopt_cli.runtime.lifted.program`; ``state`` are the module's attributes.
    Raises :class:`BadProgramError` unless both are data that such a module can have.
    """
    kind = lifted_class(program)
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise BadProgramError("its state is not a module's")
    module: LiftedModule = nn.Module.__new__(kind)
    vars(module).update(state)
    check_lifted(module)
    return module


def check_lifted(module: LiftedModule) -> None:
    """Raise :class:`BadProgramError` unless the current attributes of ``module`` fit its program.

    Paths that the program calls must be modules, and those that it reads or sets must be data: then it can reach
    nothing but operators.  Running it cannot change that, since it sets only data, and never a module.
    """
    _check_state(module)
    _, _, methods, functions = type(module)._program
    for method in (*methods, *functions):
        for node in walk_nodes(method[3]):
            _check_node(node, module)


def make_module(program: tuple[Any, ...], constants: tuple[Tensor, ...]) -> LiftedModule:
    """Return a module of the class of ``program``, without parameters, buffers and children."""
    module = lifted_class(program)()
    module._constants, module._device = constants, None
    return module


def list_operators(module: nn.Module) -> list[str]:
    """Return the operators, such as ``aten::linear``, that methods of ``module`` call; none if it is not lifted."""
    _, _, methods, functions = module._program if isinstance(module, LiftedModule) else (0, "", (), ())
    nodes = (node for method in (*methods, *functions) for node in walk_nodes(method[3]))
    return [detail for kind, detail, *_ in nodes if kind == "operator"]


def global_names(code: types.CodeType) -> set[str]:
    """Return the names of globals and modules in ``code`` and in its inner functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    named_here = {step.argval for step in dis.get_instructions(code) if step.opname in _NAMING}
    return named_here.union(*map(global_names, inner))


def _make_class(program: tuple[Any, ...]) -> type[LiftedModule]:
    text, names = generate(program)
    _, name, methods, functions = program
    number = next(_NUMBERS)
    file = f"<lifted {name} {number}>"
    try:
        code = compile(text, file, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise BadProgramError(f"Python cannot compile it ({err})") from err
    known = {**FUNCTIONS, **names}
    defined = {function[0] for function in functions}
    # Python would look up any other name among its builtins, ``open`` and ``eval`` included.
    if unknown := global_names(code) - {*known, *defined}:
        raise BadProgramError(f"it names {', '.join(sorted(unknown))}, which no program may")
    if double := defined & known.keys():
        raise BadProgramError(f"it defines {', '.join(sorted(double))}, a name that is already in use")
    namespace = _namespace(number, known)
    exec(code, namespace)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks and inspect
    body = {method[0]: namespace[method[0]] for method in methods}
    # Methods were defined as globals.  Put the names back: a method called ``len`` must not hide the function that
    # other methods call.
    namespace.update(known)
    if any(map(is_further_call, body)):
        body["forward"] = _running_further_calls(body)
    return type(name, (LiftedModule,), {"__module__": __name__, "_program": program, **body})


def _namespace(number: int, names: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of generated code: those of its own module, which Python can import.

    ``torch.compile`` looks globals up by the name of that module, and finds Python's builtins there for the functions
    of PyTorch and memopt that it compiles into it; PyTorch imports lazily, by the import that it finds there.
    """
    module = types.ModuleType(f"{__package__}.program_{number}")
    sys.modules[module.__name__] = module
    vars(module).update(names)
    return vars(module)


def _running_further_calls(methods: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a forward that runs another of ``methods`` in its place if a keyword names one (:data:`FURTHER_CALL`)."""
    forward = methods.get("forward", nn.Module.forward)
    further = {name: method for name, method in methods.items() if is_further_call(name)}

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, forward_as: str | None = None, **kwargs: Any) -> Any:
        return (forward if forward_as is None else further[forward_as])(self, *args, **kwargs)

    return run


# ---------------------------------------------------------------------------------------------- what a program reaches


def _check_state(module: LiftedModule) -> None:
    state = vars(module)
    if not state.keys() >= MODULE_ATTRIBUTES:
        raise BadProgramError("its state is not a module's")
    children = state["_modules"]
    if not all(isinstance(child, nn.Module) for child in children.values()):
        raise BadProgramError("a lifted module holds a child that is not a module")
    registered = [(nn.Parameter, state["_parameters"]), (Tensor, state["_buffers"])]
    if not all(t is None or isinstance(t, kind) for kind, tensors in registered for t in tensors.values()):
        raise BadProgramError("a parameter or buffer is not a tensor")
    shadowed = state.keys() & {*children, *state["_parameters"], *state["_buffers"]}
    shadowed |= {name for name in state if _class_has(module, name)}
    if shadowed:
        raise BadProgramError(f"the attribute {', '.join(sorted(shadowed))} hides another one")
    constants = state.get("_constants", ())
    if type(constants) is not tuple or not all(isinstance(constant, Tensor) for constant in constants):
        raise BadProgramError("a constant tensor is not a tensor")
    if not isinstance(state.get("_device"), torch.device | None):
        raise BadProgramError("its device is not a device")


def _class_has(module: nn.Module, name: str) -> bool:
    """Return whether the class of ``module`` has a method, property or other attribute ``name``."""
    return any(name in vars(kind) for kind in type(module).__mro__)


def _check_node(node: tuple[Any, ...], module: LiftedModule) -> None:
    # A program reaches into lifted modules only; of others it may call no method but forward.
    kind, detail = node[0], node[1]
    if kind == "tensor" and detail >= len(vars(module).get("_constants", ())):
        raise BadProgramError("a constant tensor is missing")
    if kind == "call":
        _check_call(_module_at(module, detail[0]), *detail)
    elif kind in ("get", "parameter", "set"):
        owner, name = _module_at(module, detail[:-1]), detail[-1]
        if not isinstance(owner, LiftedModule | ScriptLeaf | ScriptPart):
            raise BadProgramError(f"{'.'.join(detail[:-1])} is not lifted, and more than its forward is used")
        if not (_can_set(owner, name) if kind == "set" else _can_get(owner, name)):
            raise BadProgramError(f"the attribute {'.'.join(detail)} is something other than data")


def _module_at(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    """Return the module at ``path`` in ``module``; raise if Python would find another object there."""
    for name in path:
        child = children_of(module).get(name)
        if child is None or name in vars(module) or _class_has(module, name):
            raise BadProgramError(f"there is no module {'.'.join(path)}")
        module = child
    return module


def _check_call(owner: nn.Module, path: tuple[str, ...], method: str) -> None:
    if isinstance(owner, LiftedModule):
        if all(method != own[0] for own in type(owner)._program[2]) or method in vars(owner):
            raise BadProgramError(f"{'.'.join(path)} has no method {method}")
    elif method != "forward":
        raise BadProgramError(f"{'.'.join(path)} is not lifted, and more than its forward is used")


def _can_get(owner: nn.Module, name: str) -> bool:
    """Return whether ``owner`` has an attribute ``name`` that is data."""
    for table in (parameters_of(owner), buffers_of(owner)):
        if name in table:
            return is_data(table[name]) and not _class_has(owner, name)
    return name in vars(owner) and not _class_has(owner, name) and is_data(vars(owner)[name])


def _can_set(owner: nn.Module, name: str) -> bool:
    """Return whether a program may set ``name`` of ``owner``: data that is there, or a new name in a lifted module."""
    is_new = isinstance(owner, LiftedModule) and not any(name in table for table in (vars(owner), children_of(owner)))
    return _can_get(owner, name) or (is_new and not _class_has(owner, name))

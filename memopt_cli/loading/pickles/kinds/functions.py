"""Functions that modules keep as attributes: only those are allowed that do nothing but compute.

Of PyTorch's operators, those are allowed that a lifted program may call (:mod:`memopt_cli.runtime.lifted.allowed`),
by any of their names in Python.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from memopt_cli.loading.pickles.kinds.interface import (
    Denied,
    Graph,
    ListedNames,
    Missing,
    Recipe,
    Role,
    Use,
    is_dunder,
    is_inside,
    is_surrogate,
    quote,
    resolve,
)
from memopt_cli.loading.pickles.nodes import GETATTR, Built, Global
from memopt_cli.runtime.lifted.allowed import is_allowed

_OPERATOR_MODULES: Final = tuple(f"torch._C._{name}" for name in ("nn", "linalg", "special", "fft"))
"""Modules whose functions have the names of operators."""
_OPERATOR_OWNERS: Final = ("torch._C._VariableFunctionsClass", "torch._C.TensorBase", "torch._C._TensorBase")
"""Classes whose attributes have the names of operators: a pickle stores ``torch.bmm`` as an attribute of the first, and
``torch.Tensor.view`` as an attribute of one of the others."""
_FUNCTION_MODULES: Final[Mapping[str, re.Pattern[str]]] = {
    "torch.nn.functional": re.compile(r"(?!triplet_margin_with_distance_loss)[a-z]\w+"),
    "torch.functional": re.compile(r"[a-z]\w+"),
    "torch.nn.init": re.compile(r"[a-z]\w+"),
    "torchvision.ops": re.compile(r"[a-z]\w+"),
    "norse.torch.functional": re.compile(r"\w+_step(_\w+)?|compute_\w+"),
}
"""Module or package -> names of its functions that only compute, and do not call their arguments."""
_MATH: Final = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh degrees dist erf erfc exp exp2 expm1 fabs "
    "floor fmod fsum gamma hypot isclose isfinite isinf isnan ldexp lgamma log log10 log1p log2 modf pow prod "
    "radians remainder sin sinh sqrt tan tanh trunc".split()
)
_BUILTINS: Final = frozenset("abs all any divmod isinstance len pow round sum".split())
_OPERATOR: Final = frozenset(
    "abs add and_ contains eq floordiv ge gt inv invert is_ is_not le lt matmul mod mul ne neg not_ or_ pos "
    "pow sub truediv truth xor".split()
)


class Functions:
    """Functions that a module holds as values, such as ``torch.nn.functional.relu``."""

    def claims(self, use: Use) -> bool:
        """Return whether ``use`` holds a function by a listed name."""
        if use.how != "held":
            return False
        module, name = use.name.module, use.name.name
        if module in _OPERATOR_MODULES:
            return is_allowed(f"aten::{name}")
        if any(is_inside(module, package) and names.fullmatch(name) for package, names in _FUNCTION_MODULES.items()):
            return True
        listed = {"builtins": _BUILTINS, "math": _MATH, "operator": _OPERATOR, "_operator": _OPERATOR}
        return name in listed.get(module, ()) or f"{module}.{name}" in _OPERATOR_OWNERS

    def recipe(self, use: Use) -> Recipe | Denied | Missing:
        """Return the recipe for the function ``use``, or the reason to refuse it.

        One of ``_OPERATOR_OWNERS`` is made as a text, its name, so that nothing can be done with it but ``getattr``.
        """
        if str(use.name) in _OPERATOR_OWNERS:
            return Recipe(make=lambda: str(use.name))
        function = resolve(use.name)
        if isinstance(function, Denied | Missing):
            return function
        # A module such as ``torch.nn.functional`` also has imported names.  They may do more than compute.
        python = _in_function_module(use.name.module)
        if not callable(function) or (python and not _in_function_module(str(getattr(function, "__module__", "")))):
            return Denied("is not a function that memopt knows to only compute")
        return Recipe(make=lambda: function, role="callable")


def _in_function_module(module: str) -> bool:
    return any(is_inside(module, package) for package in _FUNCTION_MODULES)


_KEPT_METHODS: Final = {
    "snntorch": ("_base_sub", "_base_zero", "_base_int", "_surrogate_bypass"),
    "norse": ("initial_state",),
    "torch.nn": ("reset_parameters",),
    "transformers": ("prepare_inputs_for_generation",),
}
"""Library -> methods that its modules keep as attributes."""
_HOOK_METHODS: Final = {"torch.nn": ("_infer_parameters", "_lazy_load_hook"), "transformers": ("load_hook",)}
"""Library -> methods that its modules register as hooks."""


def _check_attribute(node: Built, graph: Graph) -> str:
    """Return the reason why ``node``, a call of ``getattr``, must not be made."""
    match node.argument_items():
        case Global() as owner, str(name) if str(owner) in _OPERATOR_OWNERS:
            is_permitted = is_allowed(f"aten::{name}")
            owner_name = owner.name
        case owner, str(name):
            kind = graph.class_of(owner)
            is_class = isinstance(owner, Global) or (isinstance(owner, Built) and owner.callee == GETATTR)
            may_get = _may_get_from_class if is_class else _may_get_from_object
            is_permitted = kind is not None and may_get(kind, name, graph)
            owner_name = kind.__name__ if kind else "an object without a known class"
        case _:
            return "asks for an attribute without a name"
    return "" if is_permitted else f"asks for the attribute {quote(name)} of {owner_name}"


def _may_get_from_class(cls: type, name: str, graph: Graph) -> bool:
    if issubclass(cls, enum.Enum):
        return name in cls.__members__
    if is_surrogate(cls):
        return name == "apply"
    inner = _class_attribute(cls, name)
    return _is_listed(cls, name, _KEPT_METHODS) or is_surrogate(inner) or (graph.trusts(cls) and not is_dunder(name))


def _class_attribute(cls: type, name: str) -> Any:
    """Return the attribute ``name`` of the class ``cls``, unbound; for a static method its function."""
    attribute = inspect.getattr_static(cls, name, None)
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute


def _may_get_from_object(cls: type, name: str, graph: Graph) -> bool:
    method = _class_attribute(cls, name)
    if not isinstance(method, types.FunctionType) or is_dunder(name):
        return False
    is_forward = name == "forward" and issubclass(cls, nn.Module)
    is_listed = any(_is_listed(cls, name, listed) for listed in (_KEPT_METHODS, _HOOK_METHODS))
    return is_forward or is_listed or graph.trusts(cls)


def _is_listed(cls: type, name: str, listed: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether the method ``name`` of ``cls``, a library's class, is ``listed`` and defined by the library."""
    method = _class_attribute(cls, name)
    home = str(getattr(method, "__module__", ""))
    libraries = (library for library, names in listed.items() if name in names and is_inside(cls.__module__, library))
    return isinstance(method, types.FunctionType) and any(is_inside(home, library) for library in libraries)


def _inner_class(node: Built, graph: Graph) -> type | None:
    """Return the nested class that ``node``, a call of ``getattr``, gets from a class; ``None`` for other calls."""
    owner, name = node.argument_items()
    kind = graph.class_of(owner)
    inner = _class_attribute(kind, name) if kind is not None and isinstance(name, str) else None
    return inner if isinstance(inner, type) else None


def _role(node: Built, graph: Graph) -> Role:
    owner, name = node.argument_items()
    kind = graph.class_of(owner)
    if kind is None:
        return "callable"
    if issubclass(kind, enum.Enum):
        return "data"
    if graph.trusts(kind):
        return "trusted"
    return "hook" if _is_listed(kind, name, _HOOK_METHODS) else "callable"


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, str):  # the name of a class of operators
        module, _, kind = owner.rpartition(".")
        return getattr(getattr(importlib.import_module(module), kind), name)
    return getattr(owner, name) if isinstance(owner, type) else types.MethodType(getattr(type(owner), name), owner)


ATTRIBUTES: Final = ListedNames(
    called={str(GETATTR): Recipe(make=_attribute, check=_check_attribute, role=_role, kind=_inner_class)},
    created={},
    held={},
)
"""Results of ``getattr``: an operator, which Python finds in a class; a member of an enum; a method."""

"""The operators that lifted programs may use: PyTorch operators that only compute, and Python expressions.

TorchScript's operators on numbers, strings, lists and dicts mean what Python's mean, so they become Python
expressions; an operator on tensors is called as it is (``torch.ops``), with the kernel that the original called.
"""

from __future__ import annotations

import functools
import math
import re
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.runtime.lifted.allowed import is_allowed
from memopt_cli.runtime.private_torch import (
    LAYOUT_OF_MKLDNN,
    OpOverload,
    OpOverloadPacket,
    buffers_of,
    parameters_of,
    schema_of,
)

# ---------------------------------------------------------------------------------------------- Python's own


@dataclass(frozen=True, slots=True)
class Expression:
    """An operator that generated code writes as a Python expression: ``aten::mul.int`` is ``{0} * {1}``."""

    template: str
    """The expression, with ``{0}``, ``{1}`` … in the places of the operands, and ``{...}`` for a list of all."""
    pure: bool = False
    """Whether the result depends on nothing that can change, so that it may be computed later, where it is used."""
    reads: bool = False
    """Whether the operator reads a list, dict or tensor; it must not move past a statement, which might change that."""
    alias: bool = False
    """Whether the operator is a statement that changes its first operand, which is also its result."""

    def operands(self) -> int:
        """Return the number of operands that the operator needs."""
        return max((int(slot) + 1 for slot in re.findall(r"\{(\d+)\}", self.template)), default=0)


# The keys of the four tables that follow are pairs of operators and overloads, each separated by spaces:
# ``("aten::div", "int float -")`` names ``aten::div.int``, ``aten::div.float``, and ``aten::div`` without an overload.
# The tables differ in whether an expression may move to where its result is used.  ``_PURE``: any distance.
# ``_READING``: only if no statement lies in between, which might change the list, dict or tensor that is read.
# ``_CHANGING``: never, since it changes an operand or depends on a global mode.  ``_ALIASING``: never, and its result
# is its first operand, which it changes.


_NUMBERS: Final = "int float int_float float_int -"
_EQUALS: Final = f"{_NUMBERS} str bool device int_list float_list bool_list str_list"
_LISTS: Final = "t int_list float_list bool_list Tensor_list"
_KEYS: Final = ("str", "int", "bool", "float", "Tensor")

_PURE: Final = {
    ("aten::add", f"{_NUMBERS} str"): "{0} + {1}",
    ("aten::sub", _NUMBERS): "{0} - {1}",
    ("aten::mul", _NUMBERS): "{0} * {1}",
    ("aten::div", "int float -"): "{0} / {1}",
    ("aten::floordiv", _NUMBERS): "{0} // {1}",
    ("aten::remainder", _NUMBERS): "{0} % {1}",
    ("aten::pow", "int float int_float float_int Scalar_Scalar"): "float({0}) ** {1}",
    ("aten::pow", "int_to_int"): "{0} ** {1}",
    ("aten::neg", "int float Scalar"): "-{0}",
    ("aten::eq", f"{_EQUALS} enum"): "{0} == {1}",
    ("aten::ne", f"{_EQUALS} enum"): "{0} != {1}",
    ("aten::lt", f"{_NUMBERS} str"): "{0} < {1}",
    ("aten::gt", f"{_NUMBERS} str"): "{0} > {1}",
    ("aten::le", f"{_NUMBERS} str"): "{0} <= {1}",
    ("aten::ge", f"{_NUMBERS} str"): "{0} >= {1}",
    ("aten::__and__", "bool int"): "{0} & {1}",
    ("aten::__or__", "bool int"): "{0} | {1}",
    ("aten::__xor__", "bool int"): "{0} ^ {1}",
    ("aten::__lshift__", "int"): "{0} << {1}",
    ("aten::__rshift__", "int"): "{0} >> {1}",
    ("aten::__not__", "-"): "not {0}",
    ("aten::__is__", "-"): "{0} is {1}",
    ("aten::__isnot__", "-"): "{0} is not {1}",
    ("prim::min", _NUMBERS): "min({0}, {1})",
    ("prim::max", _NUMBERS): "max({0}, {1})",
    ("prim::abs", "int float Scalar -"): "abs({0})",
    ("aten::Int", "float bool Scalar str"): "int({0})",
    ("aten::Float", "int bool Scalar str"): "float({0})",
    ("aten::Bool", "int float"): "bool({0})",
    ("aten::sqrt", "int float"): "math.sqrt({0})",
    ("aten::exp", "int float"): "math.exp({0})",
    ("aten::log", "int float"): "math.log({0})",
    ("aten::sin", "int float"): "math.sin({0})",
    ("aten::cos", "int float"): "math.cos({0})",
    ("aten::tanh", "int float"): "math.tanh({0})",
    ("aten::ceil", "int float"): "math.ceil({0})",
    ("aten::floor", "int float"): "math.floor({0})",
    ("aten::isnan", "float"): "math.isnan({0})",
    ("aten::isinf", "float"): "math.isinf({0})",
    ("aten::gcd", "int"): "math.gcd({0}, {1})",
    ("aten::__range_length", "-"): "len(range({0}, {1}, {2}))",
    ("aten::__derive_index", "-"): "{1} + {0} * {2}",
    ("aten::len", "str Tensor"): "len({0})",
    ("aten::size", "-"): "list({0}.size())",
    ("aten::size", "int"): "{0}.size({1})",
    ("aten::dim", "-"): "{0}.dim()",
    ("aten::numel", "-"): "{0}.numel()",
    ("aten::stride", "int"): "{0}.stride({1})",
    ("aten::is_floating_point", "-"): "{0}.is_floating_point()",
    ("aten::is_complex", "-"): "{0}.is_complex()",
    ("prim::requires_grad", "-"): "{0}.requires_grad",
    ("prim::dtype", "-"): "dtype_code({0})",
    ("prim::device", "-"): "{0}.device",
    ("prim::layout", "-"): "layout_code({0})",
    ("prim::is_cuda", "-"): "{0}.is_cuda",
    ("prim::is_cpu", "-"): "{0}.is_cpu",
    ("prim::is_sparse", "-"): "{0}.is_sparse",
    ("prim::is_quantized", "-"): "{0}.is_quantized",
    ("prim::is_nested", "-"): "{0}.is_nested",
    ("prim::is_meta", "-"): "{0}.is_meta",
    ("prim::type", "-"): "{0}.type",
    ("prim::index", "-"): "{0}.index",
    ("aten::device", "with_index -"): "device({...})",
    ("prim::StringIndex", "-"): "{0}[{1}]",
    ("aten::slice", "str"): "{0}[{1}:{2}:{3}]",
    ("aten::str", "-"): "str({0})",
    ("aten::format", "-"): "format_text({...})",
    ("aten::lower", "-"): "{0}.lower()",
    ("aten::upper", "-"): "{0}.upper()",
    ("aten::strip", "-"): "{0}.strip({1})",
    ("aten::startswith", "-"): "{0}.startswith({1}, {2}, {3})",
    ("aten::endswith", "-"): "{0}.endswith({1}, {2}, {3})",
    ("aten::replace", "-"): "{0}.replace({1}, {2}, {3})",
    ("aten::find", "-"): "{0}.find({1}, {2}, {3})",
    ("prim::NumToTensor", "Scalar bool"): "number_tensor({0})",
}

_READING: Final = {
    ("aten::add", "t"): "{0} + {1}",
    ("aten::mul", "left_t right_"): "{0} * {1}",
    ("aten::len", " ".join(["t", *(f"Dict_{key}" for key in _KEYS)])): "len({0})",
    ("aten::__getitem__", " ".join(["t", "str", *(f"Dict_{key}" for key in _KEYS)])): "{0}[check_key({1})]",
    ("aten::__contains__", " ".join(["int_list", "float_list", "str_list", *_KEYS])): "check_key({1}) in {0}",
    ("aten::slice", "t"): "{0}[{1}:{2}:{3}]",
    ("aten::list", "t -"): "list({0})",
    ("aten::copy", " ".join(["t", *(f"Dict_{key}" for key in _KEYS)])): "{0}.copy()",
    ("aten::join", "-"): "{0}.join({1})",
    ("aten::split", "str"): "{0}.split({1}, {2})",
    ("aten::keys", " ".join(_KEYS)): "list({0}.keys())",
    ("aten::values", " ".join(_KEYS)): "list({0}.values())",
    ("aten::items", " ".join(_KEYS)): "list({0}.items())",
    ("aten::get", " ".join(_KEYS)): "{0}.get(check_key({1}))",
    ("aten::get", " ".join(f"default_{key}" for key in _KEYS)): "{0}.get(check_key({1}), {2})",
    ("aten::index", "list_int list_float list_bool list_str"): "{0}.index({1})",
    ("aten::count", "int float bool str"): "{0}.count({1})",
    ("prim::min", "self_int self_float self_bool"): "min({0})",
    ("prim::max", "self_int self_float self_bool"): "max({0})",
    ("aten::sum", "int float bool"): "sum({0})",
    ("aten::any", "str int float bool"): "any({0})",
    ("aten::all", "int float bool"): "all({0})",
    ("aten::Int", "Tensor"): "int({0})",
    ("aten::Float", "Tensor"): "float({0})",
    ("aten::Bool", "Tensor"): "bool({0})",
    ("aten::IntImplicit", "-"): "int({0})",
    ("aten::FloatImplicit", "-"): "float({0})",
    ("aten::ScalarImplicit", "-"): "{0}.item()",
    ("aten::item", "-"): "{0}.item()",
    # A tensor that shares memory as ``data`` does, but with changes that autograd notices.
    ("prim::data aten::data", "-"): "{0}.detach()",
    ("prim::rangelist", "-"): "list(range({0}))",
}

_CHANGING: Final = {
    ("aten::is_autocast_enabled", "-"): "is_autocast_enabled()",
    ("aten::is_autocast_cpu_enabled", "-"): "is_autocast_enabled('cpu')",
    ("aten::is_grad_enabled", "-"): "is_grad_enabled()",
    ("aten::pop", "t"): "{0}.pop(check_key({1}))",
    ("aten::pop", " ".join(f"Dict_{key}" for key in _KEYS)): "{0}.pop(check_key({1}))",
    ("aten::pop", " ".join(f"Dict_default_{key}" for key in _KEYS)): "{0}.pop(check_key({1}), {2})",
    ("aten::setdefault", " ".join(_KEYS)): "{0}.setdefault(check_key({1}), {2})",
    ("aten::insert", "t"): "{0}.insert({1}, {2})",
    ("aten::extend", "t"): "{0}.extend({1})",
    ("aten::clear", " ".join(["t", *_KEYS])): "{0}.clear()",
    ("aten::reverse", "t"): "{0}.reverse()",
    ("aten::remove", "int float bool"): "{0}.remove({1})",
    ("aten::sort", "int float bool str"): "{0}.sort(reverse={1})",
    ("aten::update", " ".join(_KEYS)): "{0}.update(check_dict({1}))",
    ("aten::Delete", "t"): "{0}.pop(check_key({1}))",
    ("aten::Delete", " ".join(f"Dict_{key}" for key in _KEYS)): "{0}.pop(check_key({1}))",
    ("aten::warn", "-"): "warn({0})",
    ("prim::Print", "-"): "print({...})",
    ("aten::tensor", "float int bool -"): "make_tensor({0}, {1}, {2}, {3})",
}

_ALIASING: Final = {
    ("aten::append", "t"): "{0}.append({1})",
    ("aten::_set_item", "t"): "{0}[check_key({1})] = {2}",
    ("aten::_set_item", " ".join(_KEYS)): "{0}[check_key({1})] = {2}",
    ("aten::add_", "t"): "{0}.extend({1})",
}


EXPRESSIONS: Final[Mapping[str, Expression]] = {
    name if overload == "-" else f"{name}.{overload}": Expression(
        template, pure=group is _PURE, reads=group is _READING, alias=group is _ALIASING
    )
    for group in (_PURE, _READING, _CHANGING, _ALIASING)
    for (names, overloads), template in group.items()
    for name in names.split()
    for overload in overloads.split()
}
"""Operator with its overload (``aten::add.int``) -> the Python expression that computes it."""

# ---------------------------------------------------------------------------------------------- PyTorch's


@functools.cache
def find_operator(key: str) -> OpOverload | None:
    """Return the operator on tensors named ``key`` (``aten::add.Tensor``); ``None`` if none is known and allowed."""
    name, _, overload = key.partition(".")
    namespace, _, operator = name.partition("::")
    if not is_allowed(name):
        return None
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    function = getattr(packet, overload or "default", None)
    return function if isinstance(function, OpOverload) and _is_on_tensors(function) else None


@functools.cache
def _is_on_tensors(operator: OpOverload) -> bool:
    schema = schema_of(operator)
    return any(
        "Tensor" in str(item.type) or "Generator" in str(item.type) for item in (*schema.arguments, *schema.returns)
    )


# ---------------------------------------------------------------------------------------------- small functions


DTYPES: Final = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"),
)
"""Names of dtypes, in the order of TorchScript's numbers for them."""

_DTYPE_CODES: Final = {getattr(torch, name): code for code, name in enumerate(DTYPES)}
_LAYOUTS: Final = {torch.strided: 0, torch.sparse_coo: 1, LAYOUT_OF_MKLDNN: 4}


def dtype_code(tensor: Tensor) -> int:
    """Return TorchScript's number for the dtype of ``tensor``.  Raises :class:`KeyError` if it has none."""
    return _DTYPE_CODES[tensor.dtype]


def layout_code(tensor: Tensor) -> int:
    """Return TorchScript's number for the layout of ``tensor``.  Raises :class:`KeyError` if it has none."""
    return _LAYOUTS[tensor.layout]


def number_tensor(number: int | float | bool) -> Tensor:
    """Return ``number`` as a tensor without dimensions, as wide as a Python number."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def make_tensor(data: Any, dtype: int | None, device: torch.device | None, requires_grad: bool) -> Tensor:
    """Return ``torch.tensor`` of ``data``, with TorchScript's number for ``dtype``."""
    kind = None if dtype is None else getattr(torch, DTYPES[dtype])
    return torch.tensor(data, dtype=kind, device=device, requires_grad=requires_grad)


def format_text(pattern: str, *values: Any) -> str:
    """Put ``values`` in the places of ``{}``, and nothing more: ``str.format`` would read their attributes."""
    first, *pieces = pattern.split("{}")
    return first + "".join(f"{value}{piece}" for value, piece in zip(values, pieces, strict=False))


def check_key(value: Any) -> Any:
    """Return ``value`` if it may be a key.

    Raises :class:`ScriptError` if not.  Containers are refused: hashing a deeply nested tuple could overflow the stack.
    """
    if not isinstance(value, _KEYS_OF_DICTS):
        raise ScriptError(f"the program uses a {type(value).__name__} as a key")
    return value


def check_dict(value: Any) -> dict[Any, Any]:
    """Return ``value`` if it is a dict.  Raises :class:`ScriptError` if not, since nobody has checked its keys."""
    if not isinstance(value, dict):
        raise ScriptError(f"the program uses a {type(value).__name__} as a dict")
    return value


_KEYS_OF_DICTS: Final = (bool, int, float, complex, str, Tensor)


def parameter_of(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter or buffer ``name``, which is no identifier, such as ``0`` in a ``ParameterList``."""
    table = parameters_of(module) if name in parameters_of(module) else buffers_of(module)
    tensor: Tensor | None = table[name]
    return tensor


class ScriptError(RuntimeError):
    """A lifted program raised an exception."""


def is_data(value: Any) -> bool:
    """Return whether ``value`` is data: a tensor, a number, a text, or containers of these."""
    pending, seen = [value], set[int]()
    while pending:
        item = pending.pop()
        if isinstance(item, list | tuple | dict):
            if id(item) not in seen:
                seen.add(id(item))
                pending.extend((*item, *item.values()) if isinstance(item, dict) else item)
        elif item is not None and not isinstance(item, _DATA):
            return False
    return True


_DATA: Final = (Tensor, bool, int, float, str, torch.dtype, torch.device)


def checked_data(value: Any) -> Any:
    """Return ``value``, which becomes an attribute.  Raises :class:`ScriptError` if it is not data but a module."""
    if not is_data(value):
        raise ScriptError(f"the program sets an attribute to a {type(value).__name__}, which is not data")
    return value


FUNCTIONS: Final[Mapping[str, Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, float, int, len, list, max, min, print, range, str, sum)},
    **{f.__name__: f for f in (dtype_code, layout_code, number_tensor, make_tensor, format_text)},
    **{f.__name__: f for f in (parameter_of, checked_data, check_key, check_dict)},
    "math": types.SimpleNamespace(
        **{name: getattr(math, name) for name in "sqrt exp log sin cos tanh ceil floor isnan isinf gcd inf nan".split()}
    ),
    "device": torch.device,
    "dtypes": types.SimpleNamespace(**{name: getattr(torch, name) for name in DTYPES}),
    "warn": warnings.warn,
    "ScriptError": ScriptError,
    "is_autocast_enabled": torch.is_autocast_enabled,
    "is_grad_enabled": torch.is_grad_enabled,
    "set_grad_enabled": torch.set_grad_enabled,
}
"""Name that generated code may use besides its own variables and operators -> the object that it stands for."""

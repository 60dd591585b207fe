"""What some of PyTorch's operators trust their arguments to be, checked before they run.

Most operators look at what they are given.  Those of :mod:`memopt_cli.runtime.lifted.argument_checks` read or write
outside of their tensors where a shape, an index or a length is wrong, and every operator does so for a number that
names a dtype, a layout or a way to compute, and means nothing.  Shapes are compared on all tensors, those of a dry run
too; numbers are read only where there are some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from memopt_cli.runtime.lifted.argument_checks import CHECKS, Arguments, Check, groups_fit
from memopt_cli.runtime.private_torch import OpOverload, schema_of

_EMPTY: Final = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators that show memory as it was left: what they return is filled with zeros."""
_NAMING: Final = frozenset({"aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d"})
"""Operators that take numbers which name a way to compute."""
_TRUSTING: Final = _EMPTY | _NAMING | frozenset(name.partition(".")[0] for name in CHECKS) - {"aten::to", "aten::copy"}
"""Names of those operators; what is checked of ``to`` are TorchScript's own overloads, and lists have ``copy``, too."""


class ArgumentError(RuntimeError):
    """A program gave an operator arguments that it must not run on."""


def checked(operator: OpOverload, *, with_codes: bool) -> Callable[..., Any]:
    """The operator behind its check; as it is if it needs none.

    ``with_codes``: numbers of dtypes, layouts and memory formats are computed and must be looked at too.  What is
    returned raises :class:`ArgumentError`.
    """
    check = _check_of(schema_of(operator))
    codes = codes_of(operator) if with_codes else ()
    is_empty = schema_of(operator).name in _EMPTY
    if check is None and not codes and not is_empty:
        return operator
    bind = _binder(operator)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        for position, kind in codes:
            name = schema_of(operator).arguments[position].name
            if not is_code(given[name], kind):
                raise ArgumentError(f"{operator} was given {given[name]!r} as its {name}")
        _require(check, operator, given)
        result = operator(*args, **kwargs)
        return result.zero_() if is_empty else result

    return call


def guarded(function: Callable[..., Any], operator: OpOverload) -> Callable[..., Any]:
    """PyTorch's own function of an operator behind the same check.

    What is returned raises :class:`ArgumentError`.
    """
    check, bind = _check_of(schema_of(operator)), _binder(operator)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _require(check, operator, bind(args, kwargs))
        return function(*args, **kwargs)

    return call


def _binder(operator: OpOverload) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    names = [argument.name for argument in schema_of(operator).arguments]
    defaults = {a.name: a.default_value for a in schema_of(operator).arguments if a.has_default_value()}
    return lambda args, kwargs: {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _require(check: Check | None, operator: OpOverload, given: Arguments) -> None:
    if check is not None and not check(given):
        raise ArgumentError(f"{operator} was given arguments that do not fit each other: {_shapes(given)}")


def is_checked(schema: Any) -> bool:
    """Whether a check stands before the operator of a schema in lifted programs.

    Scripts that could not be lifted have no checks, and must not use it.
    """
    # Scripts of quantized layers need the latter's: it only divides.
    return schema.name in _EMPTY or _check_of(schema) not in (None, groups_fit)


def trusts_arguments(operator: str) -> bool:
    """Whether an operator, e.g. ``aten::lstm``, has an overload with such a check."""
    return operator in _TRUSTING


def _check_of(schema: Any) -> Check | None:
    return CHECKS.get(f"{schema.name}.{schema.overload_name}", CHECKS.get(schema.name))


def _shapes(given: Arguments) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in given.items() if isinstance(value, Tensor))


# ---------------------------------------------------------------------------------------------- numbers that are names

_CODES: Final[Mapping[str, frozenset[int]]] = {
    "ScalarType": frozenset({*range(16), *range(23, 30), 44}),  # without those of less than a byte
    "Layout": frozenset({0}),
    "MemoryFormat": frozenset(range(4)),
    **dict.fromkeys(("interpolation_mode", "padding_mode", "normalization", "mask_type"), frozenset(range(3))),
}
"""TorchScript's numbers of dtypes, layouts and memory formats; of layouts the plain one.  And numbers that name a way
to compute, by the name of the argument: kernels know no others."""


@functools.cache
def codes_of(operator: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and kind of each argument that is the number of a dtype, layout or memory format."""
    return codes_in(schema_of(operator))


def codes_in(schema: Any) -> tuple[tuple[int, str], ...]:
    """The same, of an operator's schema."""
    return tuple((position, kind) for position, kind in enumerate(map(_kind, schema.arguments)) if kind in _CODES)


def _kind(argument: Any) -> str:
    kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    return _NAMED.get(argument.name, kind) if kind == "int" else kind


_NAMED: Final = {name: name for name in _CODES if name.islower()} | {"dtype": "ScalarType"}


def is_code(value: Any, kind: str) -> bool:
    """Whether a value is none, such a number, or Python's own object in its place."""
    if value is None or isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return True
    return type(value) is int and value in _CODES[kind]

"""NumPy's arrays and numbers with plain dtypes."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from typing import Any, Final

from memopt_cli.loading.pickles.described import items_in
from memopt_cli.loading.pickles.kinds.interface import BrokenError, Missing, Recipe, Use, quote

_PLAIN: Final = re.compile(r"[biufc]\d{1,2}|[SU][1-9]\d{0,8}|bool|O8")
"""Names of dtypes of numbers, text, or objects that the file holds, but not of structures."""
_MAX_ITEMS = 2**48
"""Maximum number of items of an array."""
_MAX_SIZES = 32
"""Maximum number of dimensions of an array."""
_SCALARS: Final = (
    "bool_ bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)


class Arrays:
    """Arrays, numbers and dtypes of NumPy, and their classes."""

    def claims(self, use: Use) -> bool:
        """Return whether ``use`` is in the table of NumPy's names."""
        return str(use.name) in _RECIPES.get(use.how, {})

    def recipe(self, use: Use) -> Recipe | Missing:
        """Return the recipe for ``use``; if NumPy is missing, the refusal."""
        try:
            importlib.import_module("numpy")
        except ImportError:
            return Missing("NumPy is not installed")
        return _RECIPES[use.how][str(use.name)]


def _dtype(name: Any, *_: Any) -> Any:
    import numpy as np

    if type(name) is not str or not _PLAIN.fullmatch(name):
        raise BrokenError("an array holds values other than numbers")
    return np.dtype(name)


def _fill_dtype(dtype: Any, state: Any) -> None:
    """Accept the state of a plain dtype in the usual byte order, which adds nothing; refuse any other."""
    match state:
        case (int(), "<" | "|" | "=", None, None, None, *_):
            return
    raise BrokenError("an array has a structured dtype, or its bytes are in a different order")


def _empty(*_: Any) -> Any:
    import numpy as np

    return np.empty(0, dtype="u1")


def _fill_array(array: Any, state: Any) -> None:
    _, shape, dtype, is_column_major, data = state
    if type(data) is list:
        _check_objects(data, dtype, shape)
        array.__setstate__((1, tuple(shape), dtype, bool(is_column_major), data))
        return
    _check_bytes(data, dtype, shape)
    array.__setstate__((1, tuple(shape), dtype, bool(is_column_major), bytes(data)))


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy as np

    _check_bytes(data, dtype, shape)
    if order not in ("C", "F"):
        raise BrokenError("an array has an unknown order")
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order=order)


def _number(dtype: Any, data: Any) -> Any:
    import numpy as np

    _check_bytes(data, dtype, ())
    return np.frombuffer(data, dtype)[0]


def _check_bytes(data: Any, dtype: Any, shape: Any) -> None:
    import numpy as np

    is_plain = isinstance(dtype, np.dtype) and not dtype.hasobject
    if not is_plain or type(data) not in (bytes, bytearray) or type(shape) is not tuple:
        raise BrokenError("an array is built from unexpected arguments")
    if len(data) != _count_items(shape) * dtype.itemsize:
        raise BrokenError(f"an array of shape {quote(shape)} has {len(data)} bytes")


def _check_objects(data: list[Any], dtype: Any, shape: Any) -> None:
    import numpy as np

    if not isinstance(dtype, np.dtype) or not dtype.hasobject or type(shape) is not tuple:
        raise BrokenError("an array is built from unexpected arguments")
    if len(data) != _count_items(shape):
        raise BrokenError(f"an array of shape {quote(shape)} has {len(data)} items")


def _count_items(shape: tuple[Any, ...]) -> int:
    """Return the number of items of an array of ``shape``.  Raises :class:`BrokenError` for a shape that is too large,
    even if one of its sizes is 0, or that has other values than sizes."""
    try:
        if items_in(size or 1 for size in shape) <= _MAX_ITEMS and len(shape) <= _MAX_SIZES:
            return items_in(shape)
    except (TypeError, ValueError) as err:
        raise BrokenError(f"an array has a shape that is not made of sizes: {quote(shape)}") from err
    raise BrokenError(f"an array has a shape that is too large: {quote(shape)}")


_RECIPES: Final[dict[str, dict[str, Recipe]]] = {
    "called": {
        "numpy.dtype": Recipe(make=_dtype, fill=_fill_dtype),
        **{
            f"numpy.{core}.{name}": recipe
            for core in ("_core", "core")
            for name, recipe in {
                "multiarray._reconstruct": Recipe(make=_empty, fill=_fill_array),
                "multiarray.scalar": Recipe(make=_number),
                "numeric._frombuffer": Recipe(make=_array),
            }.items()
        },
    },
    "held": {
        f"numpy.{name}": Recipe(make=functools.partial(pkgutil.resolve_name, f"numpy:{name}"), role="callable")
        for name in ("ndarray", *_SCALARS.split())
    },
}

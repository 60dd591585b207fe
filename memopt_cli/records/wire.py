"""Turning records into plain JSON and YAML values (:func:`to_data`), and reading them back (:func:`from_data`).

Reading checks every field.  Plans, summaries and the messages of profiling subprocesses all use this pair.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

from memopt_cli.errors import UsageError, shorten
from memopt_cli.records.batch import BatchAdvice, BatchEstimate, NoBatchFits
from memopt_cli.records.dropped import Differs, NotRun, OwnIsBetter, SavesTooLittle, TooSlow
from memopt_cli.records.measurement import Crashed, Measurement, OutOfMemory, StepFailed, TimedOut
from memopt_cli.records.plan import ChunkRule, Refused
from memopt_cli.records.rank import NotPredicted, RankBatch, RankLost, RanksMeasured

Record = TypeVar("Record")

_TAGGED = (
    *(Measurement, OutOfMemory, TimedOut, Crashed, StepFailed, ChunkRule, Refused),
    *(BatchAdvice, BatchEstimate, NoBatchFits, RankBatch, NotPredicted),
    *(RanksMeasured, RankLost),
    *(TooSlow, SavesTooLittle, Differs, NotRun, OwnIsBetter),
)
"""Records that are members of a union, such as ``Measurement | OutOfMemory``; plain data distinguishes them by
``kind``."""
_MAX_KEY_LENGTH = 60  # characters of a key that a message shows in full


def to_data(value: Any) -> Any:
    """Convert ``value``, a record, to dicts, lists and scalars; members of unions get their class name as ``kind``."""
    if is_dataclass(value) and not isinstance(value, type):
        data = {f.name: to_data(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **data} if type(value) in _TAGGED else data
    if isinstance(value, Mapping):
        return {key: to_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    return value


def to_short_data(record: Any) -> Any:
    """Convert ``record`` like :func:`to_data`, without fields that have their default.

    For files that people read, and for the answers of profiling subprocesses: these have a maximum size.
    """
    if isinstance(record, list | tuple):
        return [to_short_data(item) for item in record]
    if not is_dataclass(record):
        return to_data(record)
    values = {f.name: (getattr(record, f.name), f) for f in fields(record)}
    data = {
        name: to_short_data(value)
        for name, (value, f) in values.items()
        if value != (f.default if f.default_factory is MISSING else f.default_factory())
    }
    return {"kind": type(record).__name__, **data} if type(record) in _TAGGED else data


def from_data(cls: type[Record], data: Any, *, where: str = "") -> Record:
    """Read ``data`` as a record of class ``cls``, or of one class in a union ``cls``; the inverse of :func:`to_data`.

    Raises :class:`UsageError` that names the place (``segments[2].chunks``) for a missing or unknown key and for a
    value of the wrong type.
    """
    result: Record = _read(cls, data, where or getattr(cls, "__name__", str(cls)))
    return result


def _read(annotation: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_dataclass(annotation):
        return _read_record(annotation, data, where)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, data, where)
    if origin is Literal:
        if data not in arguments:
            raise UsageError(f"{where} is {shorten(data)}; it must be one of {', '.join(map(str, arguments))}")
        return data
    if origin in (tuple, list):
        if not isinstance(data, list | tuple):
            raise UsageError(f"{where} must be a list, not {shorten(data)}")
        return origin(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, Mapping):
            raise UsageError(f"{where} must be a mapping, not {shorten(data)}")
        return {
            _read(arguments[0], k, where): _read(arguments[1], v, f"{where}.{_key_text(k)}") for k, v in data.items()
        }
    return data if annotation is Any else _read_scalar(annotation, data, where)


def _key_text(key: Any) -> str:
    """Format ``key`` for messages, as a part of a position in a file: ``segments[2].chunks``."""
    return key if isinstance(key, str) and len(key) <= _MAX_KEY_LENGTH and key.isprintable() else shorten(key)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    """Return the types of the fields of ``cls``; cached, since a trace has thousands of records."""
    return typing.get_type_hints(cls)


def _read_record(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be a mapping, not {shorten(data)}")
    fields_by_name = {f.name: f for f in fields(cls)}
    refuse_unknown((key for key in data if key != "kind"), fields_by_name, where)
    hints = _field_types(cls)
    values = {}
    for name, f in fields_by_name.items():
        if name in data:
            values[name] = _read(hints[name], data[name], f"{where}.{name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise UsageError(f"{where} lacks the key {name!r}")
    try:
        return cls(**values)
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", hint=err.hint) from err


def refuse_unknown(keys: Iterable[Any], known: Collection[str], where: str) -> None:
    """Raise :class:`UsageError` for the first of ``keys`` that is not in ``known``."""
    for key in keys:
        if key not in known:
            raise UsageError(f"{where} has an unknown key {shorten(key)}", hint=f"Known keys: {', '.join(known)}.")


def _read_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    records = {o.__name__: o for o in options if isinstance(o, type) and is_dataclass(o)}
    if len(records) > 1:
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if not isinstance(kind, str) or kind not in records:
            raise UsageError(f"{where} must have a kind among {', '.join(records)}, not {shorten(kind)}")
        return _read(records[kind], data, where)
    for option in options[:-1]:  # without records, the first type that fits; if none does, the error is the last one's
        try:
            return _read(option, data, where)
        except UsageError:
            continue
    return _read(options[-1], data, where)


def _read_scalar(annotation: Any, data: Any, where: str) -> Any:
    if annotation is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError as err:
            raise UsageError(f"{where} is too large a number") from err
    if not isinstance(data, annotation) or (isinstance(data, bool) and annotation is not bool):
        kind, hint = annotation.__name__, ""
        if annotation is str:
            kind = "text"
            if not isinstance(data, Mapping | list):
                hint = "YAML takes text that looks like a number, a date or a yes or no for one: write it in quotes."
        raise UsageError(f"{where} must be {kind}, not {shorten(data)}", hint=hint)
    return data

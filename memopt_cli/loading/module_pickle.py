"""``torch.save(model, path)``: a pickled ``nn.Module``, in the zip format or the legacy one (before PyTorch 1.6).

It is loaded with ``weights_only=True`` and exactly the globals that it wants and that are allowed.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, UnsafeFileError, first_line
from memopt_cli.loading.archive import check_archive
from memopt_cli.loading.interface import Loaded, ModelFile, no_model
from memopt_cli.loading.pickle_scan import Global, PickleScan, scan_pickle
from memopt_cli.loading.pickled_tensors import check_tensors
from memopt_cli.loading.trust import (
    RESTORE_SEGMENT,
    Allowed,
    Denied,
    Missing,
    Unvouched,
    Verdict,
    as_flags,
    is_attack,
    together,
    verdict,
)
from memopt_cli.loading.user_code import UserCode
from memopt_cli.progress import Ask, WantedGlobal
from memopt_cli.records import Trust
from memopt_cli.runtime.container import segment_classes
from memopt_cli.runtime.script import UnsafeScript

_LEGACY_PICKLES: Final = 5
"""Magic number, protocol version, system information, the object, names of its storages."""
_CLASS_OF_NOTE: Final = Global("memopt_cli.loading.module_pickle", "class_of_note")


class ModulePickle:
    """The format of ``torch.save``; see :class:`memopt_cli.loading.interface.Format`."""

    name = "pickle"

    def recognizes(self, file: ModelFile) -> bool:
        return True

    def load(self, file: ModelFile, trust: Trust, ask: Ask | None) -> Loaded:
        loaded = _load_trusted(file, trust) if trust.pickle else _load_checked(file, trust, ask)
        if isinstance(loaded, nn.Module):
            return Loaded(module=loaded)
        items = list(_nested(loaded))
        inside = next((item for item in items if isinstance(item, nn.Module)), None)
        if inside is not None:
            around, kind = type(loaded).__name__, type(inside).__name__
            raise FileFormatError(
                f"{file.path} holds a {around} with a {kind} in it, not a model by itself",
                hint="Save the model by itself, with torch.save(model, path).",
            )
        tensors = sum(isinstance(item, Tensor) for item in items)
        if tensors:
            raise no_model(file, tensors)
        raise FileFormatError(
            f"{file.path} holds a {type(loaded).__name__}, not a model", hint="Save one with torch.save(model, path)."
        )


def load_tensors(data: bytes, path: str) -> Any:
    """What ``torch.save`` wrote, if it holds only tensors and plain containers.  On the CPU.

    Raises :class:`UnsafeFileError` if it wants anything else, :class:`FileFormatError` if it is damaged.
    """
    try:
        return _load_checked(ModelFile(path=path, data=data), Trust(), None)
    except (UnsafeFileError, FileFormatError) as err:
        kind = UnsafeFileError if isinstance(err, UnsafeFileError) else FileFormatError
        raise kind(err.message, hint="Save tensors in plain lists and dicts, with torch.save(tensors, path).") from err


def class_of_note(tag: str, original: type, file: str, source: str) -> type:
    """The class in a legacy file's note, whose source code is ignored."""
    return original


# ---------------------------------------------------------------------------------------------- reading


def _load_trusted(file: ModelFile, trust: Trust) -> Any:
    code = UserCode(trust.code_paths)
    code.run_scripts()
    return _read(file, file.data, weights_only=False)


def _load_checked(file: ModelFile, trust: Trust, ask: Ask | None) -> Any:
    scan = scan_file(file)
    allowed = _check(file, scan, trust, ask)
    data = _without_notes(file.data, scan) if scan.class_notes else file.data
    with _allowing(_restricted(allowed, scan)):
        return _read(file, data, weights_only=True)


def _read(file: ModelFile, data: bytes, *, weights_only: bool) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except UnsafeScript as err:
        raise UnsafeFileError(f"{file.path} was not loaded: its TorchScript part uses {err}") from err
    except Exception as err:  # a damaged file can make the unpickler raise anything
        if "Unsupported operand" in str(err):
            hint = "It was pickled with a protocol above 2: save it again with torch.save(model, path)."
        else:
            hint = "Save the model again with torch.save(model, path); --trust-pickle reads it unchecked."
        raise FileFormatError(f"{file.path} cannot be read: {_plain(err)}", hint=hint) from err


def _plain(err: Exception) -> str:
    """PyTorch's first line ends before its advice to turn its check off."""
    return first_line(err).partition(" In PyTorch 2.6")[0].replace("Weights only load failed.", "damaged")


def scan_file(file: ModelFile) -> PickleScan:
    """What the file says, of either format, read without running any of it.

    Raises :class:`FileFormatError` if it is damaged or no pickle, and as :func:`check_archive`.
    """
    if not file.data:
        raise FileFormatError(f"{file.path} is empty", hint="Save the model again with torch.save(model, path).")
    scan = PickleScan(size=len(file.data))
    try:
        if file.data.startswith(b"PK"):
            records = check_archive(file.data, file.path)
            scan.root = scan_pickle(io.BytesIO(_zip_record(file.data)), scan)
            check_tensors(scan.built, {name.partition("/data/")[2]: size for name, size in records.items()}, 0)
        else:
            _scan_legacy(file.data, scan)
            check_tensors(scan.built, None, len(file.data))
    except ValueError as err:
        raise FileFormatError(
            f"{file.path} is no model saved by torch.save ({err})",
            hint="It may be damaged, truncated or another format.",
        ) from err
    return scan


def _zip_record(data: bytes) -> bytes:
    # PyTorch's own reader: it must be the same record that torch.load will read.
    try:
        record: bytes = torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data.pkl")
    except RuntimeError as err:
        known = zipfile.is_zipfile(io.BytesIO(data))
        raise ValueError("the archive holds no data.pkl" if known else "the archive is damaged") from err
    return record


def _scan_legacy(data: bytes, scan: PickleScan) -> None:
    stream, values = io.BytesIO(data), []
    try:
        for _ in range(_LEGACY_PICKLES):
            values.append(scan_pickle(stream, scan))
            scan.root = values[-1] if len(values) < _LEGACY_PICKLES else values[-2]
    except ValueError:
        # A single pickle that wants something is reported as that, not as a damaged file.
        if not scan.wanted or scan.is_costly:
            raise


def _without_notes(data: bytes, scan: PickleScan) -> bytes:
    """The same file, with each class note turned into a call of :func:`class_of_note`.

    The restricted unpickler refuses such notes.  ``( 'module' Class file source t Q`` becomes
    ``class_of_note ( 'module' Class file source t R``.
    """
    call = f"c{_CLASS_OF_NOTE.module}\n{_CLASS_OF_NOTE.name}\n".encode()
    edits = {note.start: call + data[note.start : note.start + 1] for note in scan.class_notes}
    edits |= {note.end: b"R" for note in scan.class_notes}
    pieces, done = [], 0
    for position in sorted(edits):
        pieces += [data[done:position], edits[position]]
        done = position + 1
    return b"".join([*pieces, data[done:]])


# ---------------------------------------------------------------------------------------------- checking


def _check(file: ModelFile, scan: PickleScan, trust: Trust, ask: Ask | None) -> dict[Global, Allowed]:
    """The object of every global wanted; raises if one is refused or missing."""
    verdicts = _verdicts(scan, trust)
    denied = {wanted: v for wanted, v in verdicts.items() if isinstance(v, Denied)}
    if denied and ask is not None and all(map(_can_be_asked, denied.values())) and ask(_requests(denied)):
        vouched = replace(trust, globals=(*trust.globals, *map(str, denied)))
        verdicts = _verdicts(scan, vouched)
        denied = {wanted: v for wanted, v in verdicts.items() if isinstance(v, Denied)}
    if denied:
        raise _refusal(file, denied)
    for wanted, v in verdicts.items():
        if isinstance(v, Missing):
            raise FileFormatError(
                f"{file.path} needs {wanted}, which cannot be imported: {v.reason}",
                hint=f"Install {wanted.package}, or add the folder that holds it: --code-path FOLDER.",
            )
    return {wanted: v for wanted, v in verdicts.items() if isinstance(v, Allowed)}


def _verdicts(scan: PickleScan, trust: Trust) -> dict[Global, Verdict]:
    """Of every global wanted; one that no model needs is the last, since a verdict may import a library."""
    code, verdicts = UserCode(trust.code_paths), dict[Global, Verdict]()
    for wanted in sorted(scan.wanted, key=lambda wanted: (not is_attack(wanted), str(wanted))):
        verdicts[wanted] = verdict(wanted, called=wanted in scan.called, trust=trust, code=code)
        if is_attack(wanted):
            break
    return verdicts


def _can_be_asked(denied: Denied) -> bool:
    """A yes would help: it can neither excuse an attack nor find a script."""
    return denied.remedy is not None and not denied.remedy.code_paths


def _requests(denied: Mapping[Global, Denied]) -> list[WantedGlobal]:
    return [
        WantedGlobal(name=str(wanted), package=wanted.package, reason=verdict.reason)
        for wanted, verdict in denied.items()
    ]


def _refusal(file: ModelFile, denied: Mapping[Global, Denied]) -> Unvouched:
    listed = "; ".join(f"{wanted} {verdict.reason}" for wanted, verdict in denied.items())
    never = ", ".join(str(wanted) for wanted, verdict in denied.items() if verdict.remedy is None)
    remedy = together(verdict.remedy for verdict in denied.values() if verdict.remedy is not None)
    if never:
        hint = f"No model needs {never}: the file is likely an attack (--trust-pickle turns the check off)."
    else:
        hint = f"If you trust where it came from, add: {as_flags(remedy)}"
    return Unvouched(f"{file.path} was not loaded: {listed}", hint=hint, remedy=Trust() if never else remedy)


# ---------------------------------------------------------------------------------------------- allowing


def _restricted(allowed: Mapping[Global, Allowed], scan: PickleScan) -> Iterator[tuple[Any, str]]:
    """Pairs of object and name for PyTorch's restricted unpickler, beyond those that it knows."""
    for wanted, v in allowed.items():
        if not v.native:
            yield v.value, str(wanted)
            if RESTORE_SEGMENT in allowed and isinstance(v.value, type) and issubclass(v.value, nn.Module):
                for kind in segment_classes(v.value):
                    # It fills objects of these classes but finds them by no name: no pickle can spell this one.
                    yield kind, f"segment of {wanted}: {kind.__qualname__}"
    if scan.class_notes:
        yield class_of_note, str(_CLASS_OF_NOTE)


@contextlib.contextmanager
def _allowing(pairs: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """``safe_globals`` that leaves behind what was there before, and nothing else."""
    known = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([pair for pair in pairs if pair not in known]):
        yield


def _nested(value: Any) -> Iterator[Any]:
    """It, and what its containers hold, each container visited once."""
    pending, seen = [value], set[int]()
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(item.values() if isinstance(item, Mapping) else item)

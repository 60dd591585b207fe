"""Describing the contents of a model file of any format for ``memopt inspect``, without running or building it."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from memopt_cli.errors import FileFormatError, UnsafeFileError
from memopt_cli.loading import format_of
from memopt_cli.loading.archive import Archive
from memopt_cli.loading.contents import FileContents, contents_of, count_items
from memopt_cli.loading.exported_contents import read_exported
from memopt_cli.loading.interface import DOWNLOAD_AGAIN_HINT, ModelFile
from memopt_cli.loading.module_pickle import refusals_by_name
from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.described import check_tensors
from memopt_cli.loading.pickles.entries import container_entries, is_state_dict, list_paths
from memopt_cli.loading.pickles.kinds.interface import Denied, Missing
from memopt_cli.loading.pickles.reading import PickledFile, read_pickled
from memopt_cli.loading.pickles.scan import scan_pickle, suspend_collection
from memopt_cli.loading.safetensors_file import read_header
from memopt_cli.loading.script_archive import check_script_file
from memopt_cli.records import GlobalVerdict, Inspection, StoredTensor, TensorKind, Trust
from memopt_cli.text.documents import printable
from memopt_cli.text.units import dtype_name

_REGISTERS = re.compile(
    r"^class (\w+)\(Module\):\n  __parameters__ = \[(.*)\]\n  __buffers__ = \[(.*)\]$", re.MULTILINE
)
_LONG = 200
"""Maximum number of characters shown of a remark in the file."""
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """The findings of the reader of one format in a file."""

    format: str
    contents: FileContents
    versions: dict[str, str] = field(default_factory=dict)
    globals: tuple[GlobalVerdict, ...] = ()
    inputs: tuple[StoredTensor, ...] = ()
    notes: tuple[str, ...] = ()


def describe_file(file: ModelFile) -> Inspection:
    """Describe the contents of ``file``.

    Raises :class:`FileFormatError` if it is damaged or of no known format, :class:`UnsafeFileError` for an archive
    that would harm whoever unpacks it.  Names that loading would refuse are not an error here, but part of the answer.
    """
    try:
        with suspend_collection():
            findings = _READERS[format_of(file).name](file)
        contents = findings.contents
        kinds = [(tensor.kind, count_items(tensor), tensor.size_bytes) for tensor, _ in contents.distinct()]
    except (ValueError, RecursionError) as err:
        raise FileFormatError(f"{file.path} cannot be read: {err}", hint=DOWNLOAD_AGAIN_HINT) from err
    counted = ("parameter",) if contents.modules else ("parameter", "tensor")
    return Inspection(
        path=file.path,
        format=findings.format,
        size_bytes=len(file.data),
        sha256=hashlib.sha256(file.data).hexdigest(),
        versions={printable(what)[:_LONG]: printable(text)[:_LONG] for what, text in findings.versions.items()},
        modules=contents.counted_modules(),
        tensors=tuple(contents.tensors),
        tied=contents.tied(),
        globals=findings.globals,
        inputs=findings.inputs,
        notes=findings.notes,
        parameters=sum(items for kind, items, _ in kinds if kind in counted),
        parameter_bytes=sum(size for kind, _, size in kinds if kind in counted),
        buffer_bytes=sum(size for kind, _, size in kinds if kind == "buffer"),
    )


def _sound_archive(file: ModelFile) -> Archive:
    """Return the archive in ``file``.  Raises :class:`FileFormatError` if a record does not match its checksum."""
    archive = Archive(file.data, file.path)
    for record in archive.sizes:
        archive.view(record)
    return archive


def _pickle(file: ModelFile) -> _Findings:
    pickled = read_pickled(file)
    built = [step.node for step in pickled.pickle.steps if step.action == "make"]
    zipped = _sound_archive(file) if pickled.form == "zip" else None
    records = {name.removeprefix("data/"): size for name, size in zipped.sizes.items()} if zipped else None
    check_tensors(built, records, len(file.data))
    contents = contents_of(pickled.pickle.root)
    wrapped = bool(contents.modules) and contents.modules[0].path != ""
    notes = tuple[str, ...]()
    if wrapped:
        what = "container of a module"
        notes = (f"Its module is the entry {contents.modules[0].path!r}.",)
    elif contents.modules:
        what = "module"
    elif not contents.tensors:
        what = "something else"
    elif contents.tensors[0].name == "":
        what = "tensor"
    elif is_state_dict(pickled.pickle.root):
        what = "state dict"
    else:
        entries = [(name,) for name, _ in container_entries(pickled.pickle.root)]
        what = "container of tensors"
        notes = (f"Its entries are {list_paths(entries)}; none of them is a module.",)
    return _Findings(
        format=f"pickled {what} ({pickled.form})",
        contents=contents,
        versions=_versions(zipped) if zipped else {},
        globals=tuple(_verdicts(file, pickled)),
        notes=notes,
    )


def _verdicts(file: ModelFile, pickled: PickledFile) -> Iterator[GlobalVerdict]:
    """Judge each name that ``pickled`` would import as loading without any flag does."""
    for wanted, verdict in sorted(refusals_by_name(file, pickled).items(), key=lambda pair: str(pair[0])):
        match verdict:
            case None:
                yield GlobalVerdict(name=str(wanted), verdict="allowed")
            case Missing(reason=reason):
                yield GlobalVerdict(name=str(wanted), verdict="missing", reason=reason, flag="--code-path FOLDER")
            case Denied(reason=reason, remedy=None):
                yield GlobalVerdict(name=str(wanted), verdict="refused", reason=reason)
            case Denied(reason=reason, remedy=Trust() as remedy):
                yield GlobalVerdict(name=str(wanted), verdict="needs trust", reason=reason, flag=remedy.flags)


def _script(file: ModelFile) -> _Findings:
    archive = _sound_archive(file)
    try:
        check_script_file(file.data, file.path)
        note = "Every operator in its code is known to be harmless."
    except UnsafeFileError as err:
        note = f"{err.message.partition(': ')[2].capitalize()}: loading it takes `--trust-pickle`."
    registered = dict(_registered_names(archive))
    inputs = "traced_inputs.pkl" in archive.sizes
    traced = contents_of(_describe_pickle(archive, "traced_inputs.pkl"), loose="input").tensors if inputs else []
    return _Findings(
        format=f"TorchScript ({'traced' if inputs else 'scripted'})",
        contents=contents_of(_describe_pickle(archive, "data.pkl"), registered=registered),
        versions=_versions(archive),
        inputs=tuple(traced),
        notes=(note,),
    )


def _registered_names(archive: Archive) -> Iterator[tuple[str, dict[str, TensorKind]]]:
    """Yield each class in the code of ``archive`` with the attributes that it declares as parameters and buffers."""
    for record in archive.sizes:
        if record.startswith("code/") and record.endswith(".py"):
            module = record.removeprefix("code/").removesuffix(".py").replace("/", ".")
            for name, parameters, buffers in _REGISTERS.findall(archive.read(record).decode(errors="replace")):
                kinds: dict[str, TensorKind] = dict.fromkeys(_QUOTED.findall(parameters), "parameter")
                yield f"{module}.{name}", kinds | dict.fromkeys(_QUOTED.findall(buffers), "buffer")


def _describe_pickle(archive: Archive, record: str) -> Any:
    data = archive.read(record)
    return scan_pickle(io.BytesIO(data), PickleScan(size=sum(archive.sizes.values()))).root


def _safetensors(file: ModelFile) -> _Findings:
    entries, remarks = read_header(file.data, file.path)
    contents = FileContents()
    for name, entry in entries.items():
        dtype, size = dtype_name(entry.dtype), entry.end - entry.start
        stored = StoredTensor(name=printable(name), kind="tensor", shape=entry.shape, dtype=dtype, size_bytes=size)
        contents.add_tensor(stored, home=-1, memory=name)
    return _Findings(format="safetensors", contents=contents, versions=remarks)


def _describe_exported(file: ModelFile) -> _Findings:
    archive = _sound_archive(file)
    try:
        contents, versions, inputs = read_exported(archive)
    except (KeyError, TypeError, AttributeError, IndexError, json.JSONDecodeError) as err:
        raise ValueError("its description of the program is not what torch.export writes") from err
    return _Findings(
        format="exported program (torch.export)",
        contents=contents,
        versions=_versions(archive) | versions,
        inputs=inputs,
    )


def _versions(archive: Archive) -> dict[str, str]:
    records = {"archive": "version", "format": ".format_version", "pt2 archive": "archive_version"}
    versions = {what: archive.text(record) for what, record in records.items()}
    return {what: text for what, text in versions.items() if text}


_READERS: Final[dict[str, Callable[[ModelFile], _Findings]]] = {
    "safetensors": _safetensors,
    "exported": _describe_exported,
    "torchscript": _script,
    "pickle": _pickle,
}
"""Name of a :class:`~memopt_cli.loading.interface.Format` -> its reader."""

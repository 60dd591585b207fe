"""Describing the modules and tensors of a ``.pt2`` archive (``torch.export.save``) from the JSON in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from memopt_cli.loading.archive import NESTED_TENSORS_LIMIT, Archive
from memopt_cli.loading.contents import DEEPEST, FileContents, contents_of
from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.pickles.described import MAX_SIZE, item_bytes, items_in
from memopt_cli.loading.pickles.reading import read_pickled
from memopt_cli.records import StoredModule, StoredTensor, TensorKind
from memopt_cli.text.documents import printable, read_json

DTYPE_NAMES: Final = dict(
    enumerate(
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16".split(), 1
    )
) | {28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2"}
"""Number of a dtype in an exported program -> its name (``ScalarType`` in torch/_export/serde/schema.py)."""
NO_MODULE: Final = "_empty_nn_module_stack_from_metadata_hook"
"""The path that ``torch.export`` gives operators that it added outside any module."""
_SYMBOL: Final = re.compile(r"Symbol\('(\w+)'")
_MIN_VALUES = 2_000_000
"""Separators that the JSON of a program may have however small its file is; a value takes up to 80 bytes of memory."""
_MAX_VALUES = 16_000_000
"""Maximum number of separators in the JSON of a program, enough for some 200,000 operators."""
_BYTES_PER_VALUE = 8
"""Number of bytes that allow one further separator; PyTorch, which does not compress the JSON, writes some 12 each."""
PROGRAM: Final = "models/model.json"
PROGRAMS: Final = (PROGRAM, "serialized_exported_program.json")
"""Records that hold the program: since PyTorch 2.8, and before."""
_PICKLED_WEIGHTS: Final = "data/weights/model.pt"
"""The record in which PyTorch 2.8 pickles all weights."""


def read_exported(archive: Archive) -> tuple[FileContents, dict[str, str], tuple[StoredTensor, ...]]:
    """Read the modules and tensors of the program in ``archive``, the versions that wrote it, and its inputs.

    Raises :class:`KeyError`, :class:`TypeError`, :class:`AttributeError`, :class:`IndexError` or :class:`ValueError`
    for a description that is not what ``torch.export`` writes.
    """
    program = read_program(archive, next(name for name in PROGRAMS if name in archive.sizes))
    graph, signature = program["graph_module"]["graph"], program["graph_module"]["signature"]
    values = graph["tensor_values"]
    schema = program.get("schema_version", {})
    versions = {
        "torch": str(program.get("torch_version", "")),
        "export schema": f"{schema.get('major', '?')}.{schema.get('minor', '?')}",
    }
    return _contents(graph, signature, values, _records(archive)), versions, tuple(_inputs(signature, values))


def read_program(archive: Archive, record: str) -> Any:
    """Return the JSON in ``record``.  Raises :class:`ValueError` if it is broken, or too large for its file."""
    max_values = min(_MIN_VALUES + archive.size_bytes // _BYTES_PER_VALUE, _MAX_VALUES)
    return read_json(archive.read(record), max_values=max_values)


def _records(archive: Archive) -> dict[str, Any]:
    """Map the name of each weight to the place of its bytes, which is the same for tied weights."""
    if _PICKLED_WEIGHTS in archive.sizes:
        file = ModelFile(path=_PICKLED_WEIGHTS, data=archive.read(_PICKLED_WEIGHTS))
        weights = contents_of(read_pickled(file, NESTED_TENSORS_LIMIT).pickle.root)
        return dict(zip((tensor.name for tensor in weights.tensors), weights.memory, strict=True))
    config = "data/weights/model_weights_config.json"
    entries = read_json(archive.read(config))["config"] if config in archive.sizes else {}
    return {name: f"{entry['path_name']} {entry['tensor_meta']}" for name, entry in entries.items()}


def _contents(graph: Any, signature: Any, values: Any, records: dict[str, Any]) -> FileContents:
    contents = FileContents()
    tensors = list(_tensors(signature, values))
    classes = _classes(graph["nodes"])
    for path in [tensor.name.rpartition(".")[0] for tensor in tensors]:
        classes.setdefault(checked_path(path), "?")  # its tensors are used, but its forward is not called
    places: dict[str, int] = {}
    for path in sorted(_with_parents(classes), key=_natural_order):
        places[path] = len(places)
        contents.modules.append(StoredModule(path=path, class_name=classes.get(path, "?"), parameters=0, size_bytes=0))
        contents.parents.append(places[path.rpartition(".")[0]] if path else -1)
    for tensor in tensors:
        contents.add_tensor(
            tensor, home=places[tensor.name.rpartition(".")[0]], memory=records.get(tensor.name, tensor.name)
        )
    return contents


def _tensors(signature: Any, values: Any) -> Iterator[StoredTensor]:
    kinds: dict[str, tuple[str, TensorKind]] = {
        "parameter": ("parameter_name", "parameter"),
        "buffer": ("buffer_name", "buffer"),
        "tensor_constant": ("tensor_constant_name", "attribute"),
    }
    for spec in signature["input_specs"]:
        for what, (key, kind) in kinds.items():
            if what in spec:
                yield _described_tensor(str(spec[what][key]), kind, values[spec[what]["arg"]["name"]])


def _inputs(signature: Any, values: Any) -> Iterator[StoredTensor]:
    for spec in signature["input_specs"]:
        name = spec.get("user_input", {}).get("arg", {}).get("as_tensor", {}).get("name")
        if name is not None:
            yield _described_tensor(str(name), "input", values[name])


def _described_tensor(name: str, kind: TensorKind, meta: Any) -> StoredTensor:
    sizes = [_read_size(size) for size in meta["sizes"]]
    dtype = DTYPE_NAMES.get(meta["dtype"], f"dtype {meta['dtype']}")
    return StoredTensor(
        name=printable(name),
        kind=kind,
        shape=tuple(shown for shown, _ in sizes),
        dtype=dtype,
        size_bytes=min(items_in(hint for _, hint in sizes) * item_bytes(dtype), MAX_SIZE),
        trainable=kind == "parameter" and meta.get("requires_grad") is True,
    )


def _read_size(size: Any) -> tuple[int | str, int]:
    """Return ``size`` in two forms: a number or a symbol to show, and the number in the example inputs."""
    if "as_int" in size:
        return size["as_int"], size["as_int"]
    expression = size["as_expr"]["expr_str"]
    hint = size["as_expr"].get("hint") or {}
    return _SYMBOL.sub(r"\1", expression).partition(",")[0], hint.get("as_int", 1)


def _classes(nodes: Any) -> dict[str, str]:
    """Map the path of each module that was called to its class.

    Every operator names the modules that it ran in, as ``key,path,class;key,path,class``, outermost first.
    """
    classes: dict[str, str] = {}
    for node in nodes:
        for entry in filter(None, node.get("metadata", {}).get("nn_module_stack", "").split(";")):
            _, path, class_name = entry.split(",", 2)
            if path != NO_MODULE:
                classes.setdefault(checked_path(path), class_name)
    return classes


def checked_path(path: str) -> str:
    """Return ``path``.  Raises :class:`ValueError` if it is deeper than in any real model."""
    if path.count(".") >= DEEPEST:
        raise ValueError(f"a module is nested deeper than {DEEPEST}")
    return path


def _with_parents(paths: Any) -> set[str]:
    complete = {""}
    for path in paths:
        while path and path not in complete:
            complete.add(path)
            path = path.rpartition(".")[0]
    return complete


def _natural_order(path: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts ``layers.10`` after ``layers.9``, and parents before children."""
    parts = path.split(".") if path else []
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

"""What is in a ``.pt2`` archive (``torch.export.save``), told from the JSON in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from memopt_cli.loading.archive import OF_TENSORS_WITHIN, Archive
from memopt_cli.loading.contents import DEEPEST, Contents, contents_of
from memopt_cli.loading.interface import ModelFile
from memopt_cli.loading.pickles.described import LARGEST, item_bytes, items_in
from memopt_cli.loading.pickles.reading import read_pickled
from memopt_cli.records import StoredModule, StoredTensor, TensorKind
from memopt_cli.text.documents import printable, read_json

_DTYPES: Final = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
}
"""The numbers that an exported program has for dtypes."""
NO_MODULE: Final = "_empty_nn_module_stack_from_metadata_hook"
"""The path that ``torch.export`` gives operators that it added outside of any module."""
_SYMBOL: Final = re.compile(r"Symbol\('(\w+)'")
_LEAST_VALUES, _MOST_VALUES, _BYTES_PER_VALUE = 2_000_000, 16_000_000, 8
"""Separators that a program's JSON may have in any file, and at most, those of some 200,000 operators; and for how many
bytes of the file there is one: PyTorch compresses nothing, and writes 12.  Each takes up to 80 bytes of memory."""
PROGRAMS: Final = ("models/model.json", "serialized_exported_program.json")
"""Records of the program: since PyTorch 2.8, and before."""
PICKLED_WEIGHTS: Final = "data/weights/model.pt"
"""PyTorch 2.8's record of all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported program, as far as it describes a model."""

    contents: Contents
    versions: dict[str, str]
    inputs: tuple[StoredTensor, ...]


def read_exported(archive: Archive) -> Exported:
    """The modules, tensors and inputs of the program.

    Raises what a wrong description runs into: :class:`KeyError`, :class:`TypeError`, :class:`AttributeError`,
    :class:`IndexError` or :class:`ValueError`.
    """
    record = next((name for name in PROGRAMS if name in archive.sizes), None)
    if record is None:
        raise ValueError("it holds no exported program")
    program = read_program(archive, record)
    graph, signature = program["graph_module"]["graph"], program["graph_module"]["signature"]
    values = graph["tensor_values"]
    schema = program.get("schema_version", {})
    return Exported(
        contents=_contents(graph, signature, values, _records(archive)),
        versions={
            "torch": str(program.get("torch_version", "")),
            "export schema": f"{schema.get('major', '?')}.{schema.get('minor', '?')}",
        },
        inputs=tuple(_inputs(signature, values)),
    )


def read_program(archive: Archive, record: str) -> Any:
    """The JSON of the program.  Raises :class:`ValueError` for one that is none, or far too much for such a file."""
    most = min(_LEAST_VALUES + archive.size_bytes // _BYTES_PER_VALUE, _MOST_VALUES)
    return read_json(archive.read(record), most_values=most)


def _records(archive: Archive) -> dict[str, Any]:
    """Name of each weight -> where its bytes are, which is the same for tied weights."""
    if PICKLED_WEIGHTS in archive.sizes:
        file = ModelFile(path=PICKLED_WEIGHTS, data=archive.read(PICKLED_WEIGHTS))
        weights = contents_of(read_pickled(file, OF_TENSORS_WITHIN).pickle.root)
        return dict(zip((tensor.name for tensor in weights.tensors), weights.memory, strict=True))
    config = "data/weights/model_weights_config.json"
    entries = read_json(archive.read(config))["config"] if config in archive.sizes else {}
    return {name: f"{entry['path_name']} {entry['tensor_meta']}" for name, entry in entries.items()}


def _contents(graph: Any, signature: Any, values: Any, records: dict[str, Any]) -> Contents:
    contents = Contents()
    tensors = list(_tensors(signature, values))
    classes = _classes(graph["nodes"])
    for path in [tensor.name.rpartition(".")[0] for tensor in tensors]:
        classes.setdefault(checked_path(path), "?")  # a module whose tensors are used and whose forward is not called
    places: dict[str, int] = {}
    for path in sorted(_with_parents(classes), key=_natural):
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
                yield _tensor(str(spec[what][key]), kind, values[spec[what]["arg"]["name"]])


def _inputs(signature: Any, values: Any) -> Iterator[StoredTensor]:
    for spec in signature["input_specs"]:
        name = spec.get("user_input", {}).get("arg", {}).get("as_tensor", {}).get("name")
        if name is not None:
            yield _tensor(str(name), "input", values[name])


def _tensor(name: str, kind: TensorKind, meta: Any) -> StoredTensor:
    sizes = [_size(size) for size in meta["sizes"]]
    dtype = _DTYPES.get(meta["dtype"], f"dtype {meta['dtype']}")
    return StoredTensor(
        name=printable(name),
        kind=kind,
        shape=tuple(shown for shown, _ in sizes),
        dtype=dtype,
        size_bytes=min(items_in(hint for _, hint in sizes) * item_bytes(dtype), LARGEST),
        trainable=kind == "parameter" and meta.get("requires_grad") is True,
    )


def _size(size: Any) -> tuple[int | str, int]:
    """How a size is shown, and what it was in the example."""
    if "as_int" in size:
        return size["as_int"], size["as_int"]
    expression, hint = size["as_expr"]["expr_str"], size["as_expr"].get("hint") or {}
    return _SYMBOL.sub(r"\1", expression).partition(",")[0], hint.get("as_int", 1)


def _classes(nodes: Any) -> dict[str, str]:
    """Path of each module that was called -> its class: ``key,path,class;key,path,class`` on every operator."""
    found: dict[str, str] = {}
    for node in nodes:
        for entry in filter(None, node.get("metadata", {}).get("nn_module_stack", "").split(";")):
            _, path, class_name = entry.split(",", 2)
            if path != NO_MODULE:
                found.setdefault(checked_path(path), class_name)
    return found


def checked_path(path: str) -> str:
    """A path of modules, none deeper than any model's.  Raises :class:`ValueError`."""
    if path.count(".") >= DEEPEST:
        raise ValueError(f"a module is nested deeper than {DEEPEST}")
    return path


def _with_parents(paths: Any) -> set[str]:
    found = {""}
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts ``layers.10`` behind ``layers.9``, and parents before children."""
    parts = path.split(".") if path else []
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

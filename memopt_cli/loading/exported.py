"""``.pt2`` archives (``torch.export.save``), read as JSON and bytes without PyTorch's loader.

PyTorch's loader evaluates expressions, imports modules by name and unpickles everything in the archive.  Here a program
becomes modules in four steps:

1. :mod:`.exported_graph` reads the graph as a flat list of operators.
2. :mod:`.exported_modules` sorts the operators into the modules that they ran in.
3. This file reads the tensors, and writes the forward of the root: export flattened its arguments and results, which
   may be nested, so the forward takes a dict apart and puts a tuple together again.
4. This file puts the modules together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from memopt_cli.errors import FileFormatError, MemoptError, UnsafeFileError, shorten
from memopt_cli.inputs.spec_text import INPUT_DTYPES
from memopt_cli.loading.archive import NESTED_TENSORS_LIMIT, Archive, record_names
from memopt_cli.loading.exported_contents import PROGRAM, PROGRAMS, checked_path, read_program
from memopt_cli.loading.exported_graph import (
    DTYPE_CODES,
    GraphReader,
    NotAllowedError,
    Op,
    Operand,
    size_text,
)
from memopt_cli.loading.exported_modules import Builder, Method, Scope
from memopt_cli.loading.fixed_mode import mode_notes
from memopt_cli.loading.input_spec import range_like
from memopt_cli.loading.interface import Loaded, ModelFile
from memopt_cli.loading.module_pickle import load_tensors
from memopt_cli.loading.pickles.described import check_view, items_in
from memopt_cli.loading.sequentials import restore_sequentials
from memopt_cli.records import InputSpec, TensorSpec, Trust
from memopt_cli.runtime.lifted.module import LiftedModule, make_module
from memopt_cli.runtime.lifted.operators import DTYPES
from memopt_cli.runtime.lifted.program import VERSION, BadProgramError, is_attribute, is_parameter
from memopt_cli.runtime.private_torch import children_of, memory_of, parameters_of
from memopt_cli.text.documents import read_json

_EXAMPLES: Final = "data/sample_inputs/model.pt"
_RECORDS: Final = re.compile(
    r"data/(weights|constants)/(model_\w+_config\.json|(weight|tensor)_\d+)"
    r"|data/(weights|constants|sample_inputs)/model\.pt"
    rf"|{re.escape(PROGRAM)}|byteorder|version|archive_(format|version)|\.data/(version|serialization_id)"
    r"|\.format_version|\.storage_alignment|extra/.+"
    r"|serialized_(exported_program\.json|(state_dict|constants|example_inputs)\.pt)",
    re.ASCII,
)
"""Names of the records of a program, as PyTorch writes them since 2.8 and before; none holds compiled code."""
_MAX_NAME_LENGTH: Final = 80  # longer names of records are cut in messages
_SCHEMA: Final = 8
"""Major version of the program's JSON: since PyTorch 2.6."""
_SYMBOL = re.compile(r"Symbol\('(\w+)'[^()]*\)")
_MAX_PAIRS: Final = 10**6
"""Maximum number of pairs of names of the same tensor, over all tensors: each name is compared with the others."""
_FIXED_SIZES: Final = (
    "torch.export fixed every size: with inputs of other sizes the model may fail, or compute other values."
)
_CONTAINERS: Final = ("builtins.tuple", "builtins.list", "builtins.dict")


class Exported:
    """The format of ``torch.export.save``; see :class:`memopt_cli.loading.interface.Format`."""

    name = "exported"

    def recognizes(self, file: ModelFile) -> bool:
        return not record_names(file.data).isdisjoint(PROGRAMS)

    def load(self, file: ModelFile, trust: Trust) -> Loaded:
        archive = Archive(file.data, file.path)
        if unknown := [name for name in archive.sizes if not _RECORDS.fullmatch(name)]:
            name = unknown[0][:_MAX_NAME_LENGTH]
            raise UnsafeFileError(
                f"{file.path} was not loaded: it has a record named {name}, which memopt does not know",
                hint="Export the model alone: torch.export.save(torch.export.export(model, inputs), path).",
            )
        if PROGRAM not in archive.sizes:
            raise FileFormatError(
                f"{file.path} was exported by a PyTorch before 2.8",
                hint="Save it again with a newer one: torch.export.save(torch.export.load(path), path).",
            )
        try:
            return _Program(archive, file.path).lift()
        except NotAllowedError as err:
            raise UnsafeFileError(
                f"{file.path} was not loaded: it uses {err}, which is not on memopt's list",
                hint="Save the model itself with torch.save(model, path), or as TorchScript.",
            ) from err
        except BadProgramError as err:
            raise UnsafeFileError(
                f"{file.path} was not loaded: {err}",
                hint="No exporter writes such a program, so the file may be an attack: do not load it.",
            ) from err
        except MemoptError:
            raise
        except Exception as err:  # a damaged or hostile program may raise anything
            raise FileFormatError(
                f"{file.path} holds no exported program that can be read ({type(err).__name__}: {err})",
                hint="Export the model again: torch.export.save(torch.export.export(model, inputs), path).",
            ) from err


class _Program:
    def __init__(self, archive: Archive, path: str) -> None:
        self._archive = archive
        self._path = path
        program = read_program(archive, PROGRAM)
        version = program["schema_version"]["major"]
        if version != _SCHEMA:
            raise FileFormatError(
                f"{path} has version {shorten(version)} of the format; memopt reads {_SCHEMA}",
                hint="Export the model again with the PyTorch that is installed.",
            )
        self._graph = program["graph_module"]["graph"]
        self._signature = program["graph_module"]["signature"]
        (call, *_) = program["graph_module"]["module_call_graph"]
        self._call = call["signature"]
        self._names: dict[str, tuple[str, str]] = {}
        """Name of an input of the graph -> its kind and its name in the model."""
        for spec in self._signature["input_specs"]:
            for kind in ("parameter", "buffer", "tensor_constant"):
                if kind in spec:
                    self._names[spec[kind]["arg"]["name"]] = kind, spec[kind][f"{kind}_name"]
        self._tensors = self._read_tensors()

    def lift(self) -> Loaded:
        """Build the model.

        Raises :class:`NotAllowedError` and :class:`BadProgramError`; a damaged program may raise any exception.
        """
        reader = GraphReader()
        ops, results = reader.read(self._graph)
        constants = frozenset(name for name, (kind, _) in self._names.items() if kind == "tensor_constant")
        builder = Builder(reader, self._input_paths(), constants)
        root = builder.scope((), self._class_name())
        arguments = self._arguments()
        mutations, results = self._mutations(results)
        tree = _read_tree(read_json(self._call["out_spec"])[1])
        root.methods.append(_root_method(Method(builder, (), root), (*ops, *mutations), results, arguments, tree))
        module = restore_sequentials(self._assemble(builder.scopes))
        examples = self._load_weights(_EXAMPLES) if _EXAMPLES in self._archive.sizes else None
        spec, example_notes = _example_spec(examples, arguments, self._graph["tensor_values"])
        notes = [f"torch.export dropped the custom backward of {function}." for function in sorted(reader.functions)]
        notes += mode_notes((scope.program() for scope in builder.scopes.values()), "torch.export")
        if tree.kind not in (None, *_CONTAINERS):
            notes.append(f"The model returned a {tree.kind}; it returns a {'dict' if tree.keys else 'tuple'} now.")
        return Loaded(module=module, notes=(*notes, *example_notes), example_spec=spec)

    def _read_tensors(self) -> dict[str, Tensor]:
        """Read the parameters, buffers and constants by name; names that share memory in the file share a tensor."""
        read: dict[str, Tensor] = {}
        for folder, config in (("weights", "weights_config"), ("constants", "constants_config")):
            read |= self._read_pickled_weights(f"data/{folder}/model.pt")
            record = f"data/{folder}/model_{config}.json"
            entries = read_json(self._archive.read(record))["config"] if record in self._archive.sizes else {}
            shared: dict[str, Tensor] = {}
            stored: dict[str, Any] = {}
            for name, entry in entries.items():
                record = entry["path_name"]
                key = f"{record} {entry['tensor_meta']}"
                if record not in stored:
                    path = f"data/{folder}/{record}"
                    stored[record] = (
                        _as_tensor(self._load_weights(path), record)
                        if entry.get("use_pickle")
                        else bytearray(self._archive.read(path))
                    )
                if key not in shared:
                    shared[key] = self._stored_tensor(stored[record], entry)
                read[name] = shared[key]
        return read

    def _read_pickled_weights(self, record: str) -> dict[str, Tensor]:
        """Read the tensors of ``record``, in which PyTorch 2.8 pickles all of them."""
        read: dict[str, Tensor] = {}
        shared: dict[Any, Tensor] = {}
        for name, tensor in self._load_weights(record).items() if record in self._archive.sizes else ():
            view = (
                memory_of(_as_tensor(tensor, name)),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            read[str(name)] = shared.setdefault(view, tensor)
        return read

    def _load_weights(self, record: str) -> Any:
        return load_tensors(self._archive.read(record), f"{self._path} ({record})", NESTED_TENSORS_LIMIT)

    def _stored_tensor(self, stored: Tensor | bytearray, entry: Any) -> Tensor:
        meta = entry["tensor_meta"]
        if isinstance(stored, Tensor):
            tensor = stored
        else:
            dtype = getattr(torch, DTYPES[DTYPE_CODES[meta["dtype"]]])
            flat = torch.frombuffer(stored, dtype=dtype) if stored else torch.empty(0, dtype=dtype)
            sizes, strides = ([int(size_text(s)) for s in meta[key]] for key in ("sizes", "strides"))
            offset = int(size_text(meta["storage_offset"]))
            check_view(sizes, strides, offset, dtype.itemsize, len(stored))
            tensor = torch.as_strided(flat, sizes, strides, offset)
        if entry["is_param"]:
            return nn.Parameter(tensor, requires_grad=bool(meta["requires_grad"]))
        return tensor

    def _input_paths(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Map each input of the graph to all paths of its tensor in the model, the input's own path first."""
        shared: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            shared.setdefault(id(tensor), []).append(name)
        if sum(len(names) ** 2 for names in shared.values()) > _MAX_PAIRS:
            raise ValueError("its tensors have more names than memopt checks")
        places: dict[str, tuple[tuple[str, ...], ...]] = {}
        for name, (kind, target) in self._names.items():
            if kind != "tensor_constant":
                other_names = [other for other in shared[id(self._tensors[target])] if other != target]
                places[name] = tuple(tuple(n.split(".")) for n in (target, *other_names))
        return places

    def _class_name(self) -> str:
        for node in self._graph["nodes"]:
            stack = node.get("metadata", {}).get("nn_module_stack", "")
            _, path, class_name = [*stack.partition(";")[0].split(",", 2), "", "", ""][:3]
            if path == "" and class_name:
                return str(class_name)
        return "Exported"

    def _assemble(self, scopes: dict[tuple[str, ...], Scope]) -> LiftedModule:
        modules: dict[tuple[str, ...], LiftedModule] = {}

        def module_at(path: tuple[str, ...]) -> LiftedModule:
            if path not in modules:
                scope = scopes.get(path)
                program = scope.program() if scope else (VERSION, "Module", (), ())
                values = tuple(self._tensors[self._names[n][1]] for n in scope.constants) if scope else ()
                modules[path] = make_module(program, values)
                if path:
                    children_of(module_at(path[:-1]))[path[-1]] = modules[path]
            return modules[path]

        kinds = {target: kind for kind, target in self._names.values()}
        persistent = {
            s["buffer"]["buffer_name"]: s["buffer"]["persistent"]
            for s in self._signature["input_specs"]
            if "buffer" in s
        }
        for name, tensor in self._tensors.items():
            path = tuple(checked_path(name).split("."))
            if not all(map(is_attribute, path)):
                raise ValueError(f"a tensor is named {name}")
            if isinstance(tensor, nn.Parameter):
                parameters_of(module_at(path[:-1]))[path[-1]] = tensor
            elif kinds.get(name) != "tensor_constant":
                module_at(path[:-1]).register_buffer(path[-1], tensor, persistent=persistent.get(name, True))
        for path in scopes:
            module_at(path)
        return module_at(())

    def _arguments(self) -> list[_Argument]:
        positional, named = _read_tree(read_json(self._call["in_spec"])[1]).children
        names = self._call.get("forward_arg_names") or []
        names = [*names, *(f"input_{i}" for i in range(len(names), len(positional.children)))]
        trees = [*zip(names, positional.children, strict=False), *zip(named.keys, named.children, strict=True)]
        leaves = iter([s for s in self._signature["input_specs"] if "user_input" in s or "constant_input" in s])
        arguments = []
        for index, (name, tree) in enumerate(trees):
            if not is_parameter(name):
                raise ValueError(f"an argument is named {name!r}")
            inputs = tuple(_spec_operand(next(leaves)) for _ in range(tree.leaves()))
            arguments.append(_Argument(name, tree, inputs, keyword=index >= len(positional.children)))
        return arguments

    def _mutations(self, results: list[Operand]) -> tuple[list[Op], list[Operand]]:
        """Return operators that copy outputs of the graph into changed tensors, and the other outputs.

        torch.export turns writes in place, such as those to running statistics, into outputs of the graph.
        """
        names = {target: name for name, (_, target) in self._names.items()}
        ops, returned = [], []
        for spec, result in zip(self._signature["output_specs"], results, strict=True):
            ((kind, detail),) = spec.items()
            if kind in ("buffer_mutation", "parameter_mutation", "user_input_mutation"):
                target = detail.get("user_input_name") or names[detail.get("buffer_name") or detail["parameter_name"]]
                ops.append(Op("operator", "aten::copy_", (target, result, (False,))))
            elif kind in ("user_output", "loss_output"):
                returned.append(result)
            else:
                raise ValueError(f"it has an output of the unknown kind {kind}")
        return ops, returned


def _as_tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is not a tensor")
    return value


@dataclass(frozen=True, slots=True)
class _Tree:
    """The nesting of arguments or results: a container of trees, or a single value."""

    kind: str | None
    """Class of the container, such as ``builtins.dict``; ``None`` for a single value."""
    keys: tuple[Any, ...]
    """Keys of a dict, in the order of ``children``; empty for other containers."""
    children: tuple[_Tree, ...]

    def leaves(self) -> int:
        """Count the single values."""
        return 1 if self.kind is None else sum(child.leaves() for child in self.children)


def _read_tree(data: Any) -> _Tree:
    children = tuple(map(_read_tree, data["children_spec"]))
    context = data["context"]
    keys = read_json(context) if isinstance(context, str) and context.startswith("[") else []
    return _Tree(data["type"], tuple(keys) if len(keys) == len(children) else (), children)


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    tree: _Tree
    leaves: tuple[Operand, ...]
    """For each single value in the argument, the name of the graph's input, or ``(constant,)`` if export fixed it."""
    keyword: bool

    def is_constant(self) -> bool:
        """Return whether export stored the argument as a constant, so that the graph has no input for it."""
        return all(type(leaf) is tuple for leaf in self.leaves)


def _spec_operand(spec: Any) -> Operand:
    if "constant_input" in spec:
        ((kind, value),) = spec["constant_input"]["value"].items()
        return (None if kind == "as_none" else value,)
    ((_, value),) = spec["user_input"]["arg"].items()
    return str(value.get("name", value.get("as_name")))


def _root_method(
    method: Method, ops: tuple[Op, ...], results: list[Operand], arguments: list[_Argument], tree: _Tree
) -> tuple[Any, ...]:
    """Return the forward of the whole model, which takes its arguments apart and packs its results."""
    parameters: list[tuple[Any, ...]] = []
    optional = False
    for argument in arguments:
        optional = optional or argument.is_constant()  # as in Python, all arguments after one with a default need one
        whole = argument.leaves[0] if argument.tree.kind is None else argument
        value = method.value(whole if type(whole) is str else f"*{argument.name}", argument.name)
        constant = argument.leaves[0] if argument.tree.kind is None and argument.is_constant() else (None,)
        parameters.append((value, argument.name, constant if optional else ()))
        if argument.tree.kind is not None:
            _unpack(method, value, argument.tree, iter(argument.leaves))
    method.sequence(ops, 0, {result for result in results if type(result) is str})
    hints, block = method.finish([_pack(method, tree, iter(results))])
    return "forward", tuple(parameters), hints, block


def _unpack(method: Method, whole: int, tree: _Tree, leaves: Iterator[Operand]) -> None:
    """Add nodes that take the argument ``whole`` apart, down to the graph's inputs."""
    names = [next(leaves) if child.kind is None else "*part" for child in tree.children]
    values = [method.value(name if type(name) is str else "*constant", "") for name in names]
    if tree.keys:
        for key, value in zip(tree.keys, values, strict=True):
            method.nodes.append(("operator", "aten::__getitem__.Dict_str", (whole, (key,)), (value,), ()))
    elif values:
        method.nodes.append(("unpack", None, (whole,), tuple(values), ()))
    for child, value in zip(tree.children, values, strict=True):
        if child.kind is not None:
            _unpack(method, value, child, leaves)


def _pack(method: Method, tree: _Tree, results: Iterator[Operand]) -> Any:
    """Add nodes that put the next results into the containers of ``tree``, and return the operand of the outermost.

    A container that is not Python's own, such as a ``ModelOutput``, becomes a dict or a tuple.
    """
    if tree.kind is None:
        return method.operand(next(results))
    items = [_pack(method, child, results) for child in tree.children]
    kind = "list" if tree.kind == "builtins.list" else "tuple"
    if tree.keys:
        kind = "dict"
    pairs = (
        [operand for key, item in zip(tree.keys, items, strict=True) for operand in ((key,), item)]
        if tree.keys
        else items
    )
    value = method.value("*packed", "outputs")
    method.nodes.append((kind, None, tuple(pairs), (value,), ()))
    return value


def _example_spec(
    examples: Any, arguments: Sequence[_Argument], shapes: Mapping[str, Any]
) -> tuple[InputSpec | None, tuple[str, ...]]:
    """Return the spec of the example inputs (``None`` if one is nested or not a tensor), and notes for the user."""
    inputs = [a for a in arguments if not a.is_constant()]
    if not all(a.tree.kind is None and a.leaves[0] in shapes for a in inputs):
        return None, ("Its example inputs are nested or are not tensors: describe the inputs with `--input-script`.",)
    metas = {a.name: shapes[str(a.leaves[0])] for a in inputs}
    symbols = _symbols(list(metas.values()))
    tensors, has_names = [], False
    for index, argument in enumerate(arguments):
        has_names = has_names or argument.keyword or argument.is_constant()
        if not argument.is_constant():
            example = _example(examples, argument.name if argument.keyword else index)
            tensors.append(_tensor_spec(argument.name if has_names else None, metas[argument.name], symbols, example))
    dims = {symbols[text]: hint for meta in metas.values() for text, hint in _hints(meta) if text in symbols}
    spec = InputSpec(tensors=tuple(tensors), dims=dims, source="the example inputs in the file")
    return spec, () if dims else (_FIXED_SIZES,)


def _example(examples: Any, place: str | int) -> Tensor | None:
    """Return the example of the argument at ``place``, its name or position; ``None`` if there is no plain tensor."""
    try:
        args, kwargs = examples
        value = kwargs[place] if isinstance(place, str) else args[place]
    except (TypeError, ValueError, LookupError):
        return None
    return value if isinstance(value, Tensor) and value.layout is torch.strided else None


def _tensor_spec(name: str | None, meta: Any, symbols: Mapping[str, str], example: Tensor | None) -> TensorSpec:
    dtype = DTYPES[DTYPE_CODES[meta["dtype"]]]
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"an input has dtype {dtype}")
    shape = tuple(symbols.get(text, hint) for text, hint in _hints(meta))
    return TensorSpec(name=name, shape=shape, dtype=dtype, values=_values_like(dtype, example))


def _values_like(dtype: str, example: Tensor | None) -> str:
    """Return the ``values`` of an input (``normal``, ``0..2``) whose random numbers are most like ``example``."""
    floating = getattr(torch, dtype).is_floating_point
    if example is None or not example.numel():
        return "normal" if floating else "0..2"
    low, high = float(example.min()), float(example.max())
    if low == high and low in (0, 1):
        return "ones" if low else "zeros"
    if not floating:
        return range_like(example) if low < 0 else f"0..{max(int(high), 1) + 1}"
    if bool(((example == 0) | (example == 1)).all()):
        return f"spikes:{float(example.double().mean()):.4f}"
    return "normal"


def _hints(meta: Any) -> list[tuple[str, int]]:
    """Return for each dimension its symbol, empty if its size is fixed, and its size in the example."""
    sizes = []
    for size in meta["sizes"]:
        if "as_int" in size:
            sizes.append(("", size["as_int"]))
        else:
            symbol = _SYMBOL.fullmatch(size["as_expr"]["expr_str"])
            sizes.append((symbol[1] if symbol else "", size["as_expr"]["hint"]["as_int"]))
    items_in(hint for _, hint in sizes)
    return sizes


def _symbols(metas: Sequence[Any]) -> dict[str, str]:
    """Map each symbol of the program to ``B``, ``S`` or ``T`` if its position shows which, else capitalize it.

    If only one of the first two dimensions varies, it is the batch, ``B``.  If both do, the input is ``[B, S]`` for
    integers (tokens), and ``[T, B, C, H, W]`` for floating tensors of five dimensions (images over time).
    """
    symbols: dict[str, str] = {}
    used_names = set[str]()
    for meta in metas:
        names = [text for text, _ in _hints(meta)]
        integer = not getattr(torch, DTYPES[DTYPE_CODES[meta["dtype"]]]).is_floating_point
        varying = [bool(name) for name in names[:2]]
        if varying == [True, True] and integer:
            usual: tuple[str, ...] = ("B", "S")
        elif varying == [True, True]:
            usual = ("T", "B") if len(names) == 5 else ()
        else:
            usual = ("B", "B")
        for name, short in zip(names, usual, strict=False):
            if name and short not in used_names:
                used_names.add(symbols.setdefault(name, short))
        for name in filter(None, names):
            used_names.add(symbols.setdefault(name, name[0].upper() + name[1:]))
    return symbols

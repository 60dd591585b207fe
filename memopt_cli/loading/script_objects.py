"""Comparing the objects in the pickles of a TorchScript archive with the classes that its code declares.

PyTorch does not compare them.  Its interpreter finds an attribute by its position in the declared class, and trusts
the declared length of a tuple: an archive that declares ``Tuple[int, Tensor]`` and pickles ``(7,)`` would make it read
beyond the tuple, and take the bytes there for a pointer.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from memopt_cli.loading.pickles.names import MAX_ATTRIBUTE_LENGTH
from memopt_cli.loading.pickles.nodes import DICT, LIST, Built, Global, Tuple, entries_of
from memopt_cli.loading.pickles.packed_weights import NATIVE, is_packed
from memopt_cli.runtime.script_code import UnsafeScriptError, attribute_types, parse_type

TYPE_TAG: Final = "torch.jit._pickle.restore_type_tag"
_LISTS: Final = frozenset(f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor"))
"""Functions that turn a list into one of a certain type."""
_MAX_SOURCE_BYTES: Final = 64 << 20
"""Maximum number of bytes of one source, which may repeat a stored line many times."""
_RESTORING: Final = frozenset({"__getstate__", "__setstate__"})
TENSORS: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_qtensor")
_NUMBERS: Final[Mapping[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
    "NoneType": (type(None),),
    "number": (int, float, bool),
    "Scalar": (int, float, bool),
}
_CALLED: Final[Mapping[str, tuple[str, ...]]] = {
    "Tensor": TENSORS,
    "Device": ("torch.device",),
    "complex": ("builtins.complex",),
    "number": ("builtins.complex",),
}
"""Types whose values are made by calls."""


@dataclass(frozen=True, slots=True)
class _Class:
    base: str
    attributes: Mapping[str, ast.expr]
    restores: bool
    """Whether the class has ``__getstate__`` or ``__setstate__``, whose code takes the state of an object."""


class ScriptObjects:
    """The classes that an archive's code declares; its objects are compared with them."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        """Collect the classes in ``trees``, which maps a record to its parsed code.

        Raises :class:`UnsafeScriptError` for a class declared twice, and :class:`ValueError` for an attribute whose
        name is too long.
        """
        self._classes: dict[str, _Class] = {}
        self._kinds: dict[int, str] = {}
        """Identity of each container that was checked -> its type."""
        for record, tree in trees.items():
            module = record.removeprefix("code/").removesuffix(".py").replace("/", ".")
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._declare(f"{module}.{node.name}", node)

    def _declare(self, name: str, node: ast.ClassDef) -> None:
        if name in self._classes:
            raise UnsafeScriptError(f"two classes named {name}")
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        base = ast.unparse(node.bases[0]) if node.bases else ""
        attributes = attribute_types(node)
        longest = max(map(len, attributes), default=0)
        if longest > MAX_ATTRIBUTE_LENGTH:
            raise ValueError(f"a class has an attribute with a name of {longest} characters")
        self._classes[name] = _Class(base, attributes, bool(methods & _RESTORING))

    def check(self, node: Any) -> None:
        """Raise :class:`ValueError` if the class of ``node`` is not declared, or declares other attributes."""
        if not isinstance(node, Built):
            return
        name = str(node.callee)
        if (node.items or node.entries or node.has_state) and node.how in ("called", "stored"):
            raise ValueError(f"it adds items or state to an object that {name} returned")
        if node.how == "created":
            self._check_object(node, name)
        elif node.how == "called" and name.startswith("__torch__."):
            if name not in self._classes or self._classes[name].base != "Enum":
                raise ValueError(f"it calls {name}")
        elif node.how == "called" and name == TYPE_TAG:
            match node.argument_items():
                case (value, str(text)) if self._fits_type(value, parse_type(text)):
                    return
            raise ValueError("a container does not have its declared type")

    def is_packed(self, node: Any) -> TypeGuard[Built]:
        """Return whether making ``node`` copies the tensors of its state, like packed weights of quantized layers."""
        if not isinstance(node, Built) or node.how != "created":
            return False
        known = self._classes.get(str(node.callee))
        return str(node.callee).startswith(NATIVE) or (known is not None and known.restores)

    def _check_object(self, node: Built, name: str) -> None:
        known = self._classes.get(name)
        if not node.has_state or node.items or node.entries:
            raise ValueError(f"an object of {name} is not made in one step")
        if name.startswith(NATIVE):
            if not is_packed(name, _strip_type_tag(node.state)):
                raise ValueError(f"an object of {name} has a state that PyTorch does not write")
            return
        if known is None or known.base in ("Enum", "NamedTuple", "Interface", "ModuleInterface"):
            raise ValueError(f"its code has no class {name}")
        state = _strip_type_tag(node.state)
        if not _is_plain(state, DICT) and not known.restores:
            raise ValueError(f"an object of {name} has no attributes")
        for attribute, value in entries_of(state):
            kind = known.attributes.get(attribute) if isinstance(attribute, str) else None
            if kind is not None and not self._fits_type(value, kind):
                raise ValueError(f"the attribute {attribute} of {name} is not of type {ast.unparse(kind)[:80]}")

    def _fits_type(self, value: Any, kind: ast.expr) -> bool:
        """Return whether PyTorch may take ``value`` for one of the type ``kind``."""
        match kind:
            case ast.Name(id="Any"):
                return True
            case ast.Name(id=name):
                calls = isinstance(value, Built) and value.how == "called" and str(value.callee)
                return type(value) in _NUMBERS.get(name, ()) or calls in _CALLED.get(name, ())
            case ast.Constant(value=None):
                return value is None
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return value is None or self._fits_type(value, inner)
            case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=kinds)):
                return any(self._fits_type(value, inner) for inner in kinds)
            case ast.Subscript(value=ast.Name(id=name), slice=inner):
                return self._container_fits(_strip_type_tag(value), name, inner)
            case ast.Attribute():
                return self._is_object(value, ast.unparse(kind))
        return False

    def _container_fits(self, value: Any, name: str, inner: ast.expr) -> bool:
        # Two attributes may hold the same container.  If they declare different types, code could fill it as one type
        # and read it as the other.
        kind = f"{name} {ast.dump(inner)}"
        if self._kinds.setdefault(id(value), kind) != kind:
            return False
        kinds = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "List" and len(kinds) == 1:
            return _is_plain(value, LIST) and all(self._fits_type(item, kinds[0]) for item in value.items)
        if name == "Dict" and len(kinds) == 2:
            pairs = entries_of(value)
            return _is_plain(value, DICT) and all(
                self._fits_type(k, kinds[0]) and self._fits_type(v, kinds[1]) for k, v in pairs
            )
        return name == "Tuple" and self._fit_each(value, kinds)

    def _fit_each(self, value: Any, kinds: list[ast.expr]) -> bool:
        same = isinstance(value, Tuple) and len(value.items) == len(kinds)
        return same and all(map(self._fits_type, value.items, kinds))

    def _is_object(self, value: Any, name: str) -> bool:
        known = self._classes.get(name)
        if known is not None and known.base == "NamedTuple":
            return self._fit_each(value, list(known.attributes.values()))
        how = "called" if known is not None and known.base == "Enum" else "created"
        return isinstance(value, Built) and value.how == how and str(value.callee) == name


def _is_plain(value: Any, kind: Global) -> bool:
    return isinstance(value, Built) and value.how == "plain" and value.callee == kind


def _strip_type_tag(value: Any) -> Any:
    """Return the container in ``value``, a call that gives a container its type; ``value`` itself otherwise."""
    match value:
        case Built(how="called", callee=Global() as callee) if str(callee) == TYPE_TAG and value.argument_items():
            return value.argument_items()[0]
        case Built(how="called", callee=Global() as callee) if (
            str(callee) in _LISTS and len(value.argument_items()) == 1
        ):
            return value.argument_items()[0]
    return value


def check_lines(root: Any) -> None:
    """Raise :class:`ValueError` unless ``root`` is a table of source lines: PyTorch does not check its positions."""
    sizes: list[int] | None = None
    match root:
        case Tuple(items=("FORMAT_WITH_STRING_TABLE", Tuple(items=texts), Tuple(items=rows))):
            sizes = [len(text.encode("utf-8", "replace")) if isinstance(text, str) else -1 for text in texts]
        case Tuple(items=rows):
            pass
        case _:
            rows = (None,)
    known: dict[int, int] = {}
    if min(sizes or (), default=0) < 0 or not all(_is_row(row, sizes, known) for row in rows):
        raise ValueError("its table of source lines is broken")


def _is_row(row: Any, sizes: list[int] | None, known: dict[int, int]) -> bool:
    """Return whether ``row`` has a position in the code and a range in a source; ``known`` caches sizes of sources."""
    match row:
        case Tuple(items=(int(at), Tuple(items=(Tuple() as source, int(start), int(end))), *_)):
            if id(source) not in known:
                known[id(source)] = _source_size(source, sizes)
            size = known[id(source)]
            return at >= 0 and size >= 0 and 0 <= start <= end <= max(size, 1)  # an empty source has the range 0 to 1
    return False


def _source_size(source: Tuple, sizes: list[int] | None) -> int:
    """Return the bytes of ``source``, a text or a list of indices of lines; -1 if it is neither."""
    match sizes, source.items:
        case None, (str(text), None | str(), int(line)) if line >= 0:
            return len(text.encode("utf-8", "replace"))
        case list(), (lines, int(name), int(line)) if 0 <= name < len(sizes) and line >= 0:
            indices = _strip_type_tag(lines)
            if _is_plain(indices, LIST) and all(type(i) is int and 0 <= i < len(sizes) for i in indices.items):
                size = sum(sizes[i] for i in indices.items)
                return size if size <= _MAX_SOURCE_BYTES else -1
    return -1

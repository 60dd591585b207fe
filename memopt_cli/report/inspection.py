"""Text of ``memopt inspect``: the module tree with repeated blocks folded, and what loading the file would import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.table import Table
from rich.text import Text

from memopt_cli.records import GlobalVerdict, Inspection, StoredModule, StoredTensor
from memopt_cli.report.lines import plain_table
from memopt_cli.text.units import format_bytes, format_count

_SHOWN = 12
"""Maximum number of listed groups of tied tensors, and of listed parts of a file that has only weights."""
_MAX_ROWS = 24
"""Maximum number of tensors of a file of weights alone that are listed one by one without ``-v``."""
_MAX_LISTED = 5
"""Number of tensors that are listed if there are more than :data:`_MAX_ROWS`."""


@dataclass(slots=True, eq=False)
class _Node:
    name: str
    module: StoredModule
    tensors: list[StoredTensor] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    likeness: int = 0
    """Number that two modules share if their trees have the same classes and shapes: repeated blocks are folded."""
    lines: int = 1
    """Lines that the module's tree takes if nothing in it is folded."""


def headline(inspection: Inspection) -> Iterator[str]:
    """Yield the path, format and size of ``inspection``, a warning of an attack, its digest, and its versions."""
    yield f"{inspection.path}: {inspection.format}, {format_bytes(inspection.size_bytes)}"
    if refused := [f"{item.name} {item.reason}" for item in inspection.globals if item.verdict == "refused"]:
        more = f"; and {len(refused) - 1} more below" if len(refused) > 1 else ""
        yield f"not safe: {refused[0]}{more}"
    yield f"sha256 {inspection.sha256}"
    if inspection.versions:
        yield ", ".join(f"{what} {version}" for what, version in inspection.versions.items())


def contents_tables(inspection: Inspection, *, verbose: bool) -> Iterator[Table]:
    """Yield the module tree, or for a file of weights alone its tensors: their parts and the largest, if many."""
    if inspection.modules:
        yield _tree_table(inspection)
    elif verbose or not _is_long(inspection):
        yield _tensor_table("tensor", inspection.tensors)
    else:
        yield _part_table(inspection)
        largest = sorted(inspection.tensors, key=lambda tensor: -tensor.size_bytes)
        yield _tensor_table("largest tensors", largest[:_MAX_LISTED])


def _is_long(inspection: Inspection) -> bool:
    return not inspection.modules and len(inspection.tensors) > _MAX_ROWS


def remarks(inspection: Inspection, *, verbose: bool) -> Iterator[str]:
    """Yield the totals of ``inspection``, its dtypes, tied tensors, example inputs and notes."""
    if not inspection.modules and not inspection.tensors:
        yield "no model and no tensors in it"
    elif inspection.modules:
        buffers = f", buffers {format_bytes(inspection.buffer_bytes)}" if inspection.buffer_bytes else ""
        yield f"{inspection.parameters:,} parameters, {format_bytes(inspection.parameter_bytes)}{buffers}"
    else:
        number = format_count(len(inspection.tensors), "tensor")
        more = "; `-v` lists them all" if _is_long(inspection) and not verbose else ""
        yield f"{number}, {inspection.parameters:,} items, {format_bytes(inspection.parameter_bytes)}{more}"
    dtypes = Counter(tensor.dtype for tensor in inspection.tensors)
    if dtypes:
        yield "dtypes: " + ", ".join(f"{dtype} ({count})" for dtype, count in dtypes.most_common())
    for names in inspection.tied[:_SHOWN]:
        yield f"tied: {' = '.join(names)}"
    if len(inspection.tied) > _SHOWN:
        yield f"tied: … {len(inspection.tied) - _SHOWN} more"
    for tensor in inspection.inputs:
        yield f"example input {_name_and_shape(tensor)} {tensor.dtype}"
    yield from inspection.notes


def globals_table(verdicts: Sequence[GlobalVerdict]) -> Table:
    """Return a table of ``verdicts`` on the globals that a pickle names; those that need attention come first."""
    headings = ("it would import", "verdict", "why", "to allow it")
    table = plain_table(*headings, names=headings)
    order = ("refused", "needs trust", "missing", "allowed")
    for item in sorted(verdicts, key=lambda item: order.index(item.verdict)):
        style = {"refused": "bold red", "needs trust": "yellow", "missing": "yellow"}.get(item.verdict, "")
        table.add_row(item.name, Text(item.verdict, style=style), item.reason, item.flag)
    return table


def _part_table(inspection: Inspection) -> Table:
    """Return the number and bytes of the tensors under each prefix of their names, the largest part first."""
    shared = {name for names in inspection.tied for name in names[1:]}  # the bytes of tied tensors count once
    sizes = {
        part: (len(tensors), sum(tensor.size_bytes for tensor in tensors if tensor.name not in shared))
        for part, tensors in _group_by_prefix(inspection.tensors).items()
    }
    table = plain_table("part", "tensors", "size", names=["part"])
    ordered = sorted(sizes.items(), key=lambda item: -item[1][1])
    for part, (number, size) in ordered[:_SHOWN]:
        table.add_row(part, f"{number:,}", format_bytes(size))
    if others := [size for _, size in ordered[_SHOWN:]]:
        numbers, rest = zip(*others, strict=True)
        table.add_row(f"… {len(others)} more", f"{sum(numbers):,}", format_bytes(sum(rest)))
    return table


def _group_by_prefix(tensors: Sequence[StoredTensor]) -> dict[str, list[StoredTensor]]:
    """Return ``tensors`` by the longest prefix of their names that gives few parts, yet more than one if it can."""
    parts = {"": list(tensors)}
    for depth in range(1, max(tensor.name.count(".") for tensor in tensors) + 2):
        further: dict[str, list[StoredTensor]] = {}
        for tensor in tensors:
            further.setdefault(".".join(tensor.name.split(".")[:depth]), []).append(tensor)
        if len(parts) > 1 and len(further) > _SHOWN:
            break
        parts = further
    return parts


def _tensor_table(heading: str, tensors: Sequence[StoredTensor]) -> Table:
    table = plain_table(heading, "shape", "dtype", "size", names=[heading, "shape", "dtype"])
    for tensor in tensors:
        table.add_row(tensor.name, _shape_text(tensor) or "scalar", tensor.dtype, format_bytes(tensor.size_bytes))
    return table


def _tree_table(inspection: Inspection) -> Table:
    table = plain_table("module", "parameters", "size", "own tensors", names=["module", "own tensors"])
    for root in _roots(inspection):
        for label, node in _lines(root, "", ""):
            if node is None:
                table.add_row(Text(label, style="dim"), "", "", "")
            else:
                size = format_bytes(node.module.size_bytes) if node.module.size_bytes else "–"
                table.add_row(label, f"{node.module.parameters:,}", size, _own_tensors(node.tensors))
    return table


def _roots(inspection: Inspection) -> list[_Node]:
    nodes: dict[str, _Node] = {}
    roots: list[_Node] = []
    for module in inspection.modules:
        parent, name = _parent_of(module.path, nodes)
        nodes[module.path] = _Node(name, module)
        (parent.children if parent else roots).append(nodes[module.path])
    for tensor in inspection.tensors:
        parent, name = _parent_of(tensor.name, nodes)
        if parent:
            parent.tensors.append(tensor)
    kinds: dict[object, int] = {}
    for node in reversed(nodes.values()):  # children before parents
        own = tuple((t.name.rpartition(".")[2], t.kind, t.shape, t.dtype) for t in node.tensors)
        kind = (node.module.class_name, node.module.segment, own, tuple(child.likeness for child in node.children))
        node.likeness = kinds.setdefault(kind, len(kinds))
        node.lines = 1 + sum(child.lines for child in node.children)
    return roots


def _parent_of(path: str, nodes: dict[str, _Node]) -> tuple[_Node | None, str]:
    """Return the module among ``nodes`` that holds ``path``, and the name of ``path`` in it."""
    above, _, name = path.rpartition(".")
    return (nodes.get(above), name) if path else (None, "")


def _lines(node: _Node, lead: str, below: str) -> Iterator[tuple[str, _Node | None]]:
    """Yield the text of each line of the tree of ``node``, with its node; ``None`` for a line of folded modules.

    ``lead`` comes before the first line, ``below`` before the lines of children.
    """
    segment = " (segment)" if node.module.segment else ""
    class_name = node.module.class_name.rpartition(".")[2]
    yield f"{lead}{node.name} {class_name}{segment}" if node.name else f"{lead}{class_name}{segment}", node
    groups = [list(group) for _, group in groupby(node.children, key=lambda child: child.likeness)]
    for position, group in enumerate(groups):
        last = position == len(groups) - 1
        folded = (len(group) - 1) * group[0].lines > 1  # one line "… 1 more like it" would save nothing for one leaf
        shown = group[:1] if folded else group
        for child in shown:
            end = last and not folded and child is shown[-1]
            yield from _lines(child, below + ("└── " if end else "├── "), below + ("    " if end else "│   "))
        if folded:
            names = f"{group[1].name} … {group[-1].name}" if len(group) > 2 else group[1].name
            yield f"{below}{'└── ' if last else '├── '}… {len(group) - 1} more like it: {names}", None


def _own_tensors(tensors: Sequence[StoredTensor]) -> str:
    """Return ``tensors`` by kind in one line, such as ``weight 64×3×7×7; buffers running_mean 64``."""
    labels = {"parameter": "", "buffer": "buffers ", "attribute": "kept "}
    kinds = {kind: ", ".join(_name_and_shape(t) for t in tensors if t.kind == kind) for kind in labels}
    return "; ".join(f"{labels[kind]}{text}" for kind, text in kinds.items() if text)


def _name_and_shape(tensor: StoredTensor) -> str:
    return f"{tensor.name.rpartition('.')[2] or '(the only one)'} {_shape_text(tensor)}".rstrip()


def _shape_text(tensor: StoredTensor) -> str:
    return "×".join(map(str, tensor.shape))

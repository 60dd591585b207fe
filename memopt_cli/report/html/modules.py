"""Activations that each module keeps for backward, and its time, as a tree and as a treemap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from memopt_cli.records import StepTrace
from memopt_cli.report.html.figure import INK, NEUTRAL, PALETTE, Figure, text
from memopt_cli.report.profiling import below, nearest
from memopt_cli.text.units import format_bytes

_MIN_SHARE = 0.0005
"""Minimum share of the whole for a part of the treemap to be drawn by itself; smaller ones are drawn as one."""
_BULK = 0.9
"""A child above this share of its module stands for the module, so that colours are given to the child's parts."""


@dataclass(slots=True, kw_only=True)
class KeptByModule:
    """A module, and the activations made in it that forward keeps for backward."""

    path: str
    class_name: str
    name: str = "(model)"
    """Path relative to its parent in the tree; ``(model)`` for the root."""
    nbytes: int = 0
    """Bytes that the module and those below it keep."""
    seconds: float = 0.0
    """Seconds of the operators of the module and of those below it; 0 if they ran on fake tensors only."""
    operators: Counter[str] = field(default_factory=Counter)
    """Operator -> bytes that it made in the module itself, not below."""
    children: list[KeptByModule] = field(default_factory=list)

    def walk(self) -> Iterator[KeptByModule]:
        """Yield this module and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def kept_by_module(trace: StepTrace) -> KeptByModule:
    """Return the module tree of ``trace``; a module without a called parent hangs below the nearest called one."""
    tree = {module.path: KeptByModule(path=module.path, class_name=module.class_name) for module in trace.modules}
    root = tree.setdefault("", KeptByModule(path="", class_name=""))
    for path, module in tree.items():
        if path:
            above = nearest(path, tree)
            module.name = below(path, above)
            tree[above].children.append(module)
    for nbytes, operator, path in _left_by_forward(trace):
        tree[_self_or_nearest(path, tree)].operators[operator] += nbytes
    for op in trace.ops:
        tree[_self_or_nearest(op.module, tree)].seconds += op.seconds
    _add_up(root)
    return root


def _left_by_forward(trace: StepTrace) -> Iterator[tuple[int, str, str]]:
    """Yield bytes, operator and module of each activation of ``trace`` that is alive when forward ends."""
    end = sum(op.phase == "forward" for op in trace.ops)
    for s in trace.storages:
        if s.kind == "activations" and 0 <= s.born < end and (s.died is None or s.died >= end):
            yield s.nbytes, trace.ops[s.born].name, s.module


def _self_or_nearest(path: str, tree: dict[str, KeptByModule]) -> str:
    return path if path in tree else nearest(path, tree)


def _add_up(module: KeptByModule) -> None:
    """Add what the modules below ``module`` keep, and their time, to its own."""
    for child in module.children:
        _add_up(child)
    module.nbytes = module.operators.total() + sum(child.nbytes for child in module.children)
    module.seconds += sum(child.seconds for child in module.children)


@dataclass(slots=True)
class _Sectors:
    """Columns of a treemap, filled one sector at a time."""

    total_bytes: int
    ids: list[str] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    hovers: list[str] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)

    def add(self, parent: str, label: str, nbytes: int, hover: str, colour: str) -> str:
        """Add a sector inside ``parent``, and return the id under which others can be put into it."""
        name = f"s{len(self.ids)}"
        share = 100 * nbytes / self.total_bytes
        self.ids.append(name)
        self.parents.append(parent)
        self.labels.append(text(label))
        self.values.append(nbytes)
        self.hovers.append(f"{hover}<br><b>{format_bytes(nbytes)}</b>, {share:.1f} %")
        self.colours.append(colour)
        return name

    def fill(self, module: KeptByModule, parent: str, colours: dict[str, str], colour: str = NEUTRAL) -> None:
        """Add ``module``, its operators and the modules below it; parts too small to be seen become one sector."""
        colour = colours.get(module.path, colour)
        hover = f"{text(module.path or '(model)')}<br>{text(module.class_name)}"
        own = self.add(parent, module.name, module.nbytes, hover, colour)
        least = _MIN_SHARE * self.total_bytes
        operators = [(name, nbytes) for name, nbytes in module.operators.most_common() if nbytes >= least]
        for i, (name, nbytes) in enumerate(operators):
            origin = f"made by {text(name)}<br>in {text(module.path or '(model)')}"
            distinct = PALETTE[i % len(PALETTE)] if colour == NEUTRAL else colour
            self.add(own, name.removeprefix("aten::"), nbytes, origin, distinct)
        large = [child for child in module.children if child.nbytes >= least]
        for child in large:
            self.fill(child, own, colours, colour)
        rest = module.nbytes - sum(nbytes for _, nbytes in operators) - sum(child.nbytes for child in large)
        if rest:
            self.add(own, "smaller", rest, "what is too small to be drawn", colour)


def treemap_figure(root: KeptByModule) -> Figure:
    """Return the treemap of ``root``: areas are bytes, and a click on a module opens it."""
    sectors = _Sectors(max(1, root.nbytes))
    sectors.fill(root, "", _colours(root))
    trace = {
        "type": "treemap",
        "ids": sectors.ids,
        "parents": sectors.parents,
        "labels": sectors.labels,
        "values": sectors.values,
        "branchvalues": "total",
        "text": list(map(format_bytes, sectors.values)),
        "textinfo": "label+text",
        "hovertext": sectors.hovers,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"colors": sectors.colours, "line": {"width": 1, "color": "rgba(16,21,28,.4)"}},
        "textfont": {"color": INK},
        "tiling": {"pad": 2},
        "pathbar": {"thickness": 24},
        "maxdepth": 4,
    }
    return {"data": [trace], "layout": {"height": 420, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}}


def _colours(root: KeptByModule) -> dict[str, str]:
    """Return a colour for each child of the first module from ``root`` down that no single child dominates."""
    module = root
    while module.children and (largest := max(module.children, key=lambda m: m.nbytes)).nbytes > _BULK * module.nbytes:
        module = largest
    return {child.path: PALETTE[i % len(PALETTE)] for i, child in enumerate(module.children)}

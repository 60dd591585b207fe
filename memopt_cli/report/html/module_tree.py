"""Module tree as nested HTML lists: what each module keeps for backward, its time, and what the plan does there."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.report.html.modules import KeptByModule
from memopt_cli.text.units import format_bytes, format_seconds


def module_tree(before: KeptByModule, after: KeptByModule | None, plan: Plan) -> str:
    """Return the tree, opened down to the modules of ``plan``, with what was ``before`` it and, if given, ``after``."""
    planned = {segment.path: segment for segment in plan.segments}
    now = None if after is None else {module.path: module for module in after.walk()}
    return f'<ul class="tree">{_branch_html(before, planned, now)}</ul>'


def _branch_html(module: KeptByModule, planned: dict[str, SegmentPlan], after: dict[str, KeptByModule] | None) -> str:
    line = _line(module, planned.get(module.path), after)
    if not module.children:
        return f"<li><div>{line}</div></li>"
    below = "".join(_branch_html(child, planned, after) for child in module.children)
    wanted = not module.path or any(child.path in planned for child in module.walk() if child is not module)
    return f"<li><details{' open' if wanted else ''}><summary>{line}</summary><ul>{below}</ul></details></li>"


def _line(module: KeptByModule, segment: SegmentPlan | None, after: dict[str, KeptByModule] | None) -> str:
    badges = "".join(f'<span class="badge {kind}">{escape(label)}</span>' for kind, label in _badges(segment))
    shown = [module] if after is None else [module, after.get(module.path)]
    size = " → ".join(format_bytes(m.nbytes if m else 0) for m in shown)
    if any(m.seconds for m in shown if m):
        size += ", " + " → ".join(format_seconds(m.seconds if m else 0.0) for m in shown)
    name = f"<b>{escape(module.name)}</b> <i>{escape(module.class_name)}</i>"
    title = escape(module.path)
    return f'<span class="line"><span title="{title}">{name}</span>{badges}<span class="size">{size}</span></span>'


def _badges(segment: SegmentPlan | None) -> Iterator[tuple[str, str]]:
    """Yield the CSS class and the text of each badge for what ``segment`` does; none without a segment."""
    if segment is None:
        return
    yield "segment", "segment"
    if segment.chunks > 1:
        where = "through the loss" if segment.through_loss else f"axis {segment.axis}"
        yield "chunks", f"{segment.chunks} chunks, {where}"
    if segment.spatial_split:
        yield "segment", "spatial split"
    if segment.compressor != "null":
        yield "packed", f"packed: {segment.compressor}"

"""Exporting a plan as plain PyTorch code, for projects that cannot depend on memopt.

The exported code is the source of ``api/plain.py``, with its empty table ``SEGMENTS`` filled in.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import replace

from memopt_cli.api import plain
from memopt_cli.files.memopt_files import load_plan
from memopt_cli.records import Plan, SegmentPlan
from memopt_cli.text.documents import printable
from memopt_cli.text.paths import is_within, module_name
from memopt_cli.text.spelling import with_python_spelling
from memopt_cli.text.units import format_count


@with_python_spelling
def export_plan(plan: Plan | str | os.PathLike[str]) -> str:
    """Return Python code that applies ``plan`` with ``torch.utils.checkpoint`` and selective policies alone.

    ``plan``: a plan, or the path of its file.  Chunks, packing and an optimizer in backward need memopt; they are left
    out, and comments at the head of the code list them.  Raises ``UsageError`` for an argument that is not a plan.
    """
    whole = load_plan(plan)
    plan = replace(whole.longest, in_backward=whole.in_backward, compile=whole.compile)
    reasons = list(_left_out(plan))
    if whole.by is not None:
        same = "at every size it does what the plan does at the largest"
        reasons.insert(0, f"the size of {whole.by.dim} makes no difference: {same}")
    # The list goes into comments, not into the docstring: a module's name may contain quotes that would end the
    # docstring.  It cannot end a comment, since printable() escapes line breaks.
    left_out = [f"# - {printable(reason)}" for reason in reasons]
    head = ["# Left out, since plain PyTorch cannot do it:", *left_out, ""] if left_out else []
    source = inspect.getsource(plain)
    table = {s.path: () if _keeps_around_others(s, plan) else s.keep for s in plan.segments if not s.through_loss}
    rows = "".join(f"    {key!r}: {value!r},\n" for key, value in table.items())
    code = " = {\n" + rows + "}" if rows else " = {}"
    return "\n".join([*head, source.replace(": dict[str, tuple[str, ...]] = {}", code, 1)])


def _keeps_around_others(segment: SegmentPlan, plan: Plan) -> bool:
    """Return whether ``segment`` keeps outputs of operators, and contains other segments.

    Kept outputs are named by call, such as ``aten::addmm#2``, and plain PyTorch does not count calls in inner segments.
    """
    return bool(segment.keep) and any(is_within(s.path, segment.path) and s is not segment for s in plan.segments)


def _left_out(plan: Plan) -> Iterator[str]:
    if plan.packed:
        yield "what is saved for backward outside segments is not packed"
    if plan.place != "device":
        yield f"what is saved for backward outside segments stays on the device, and does not go to {plan.place}"
    if plan.in_backward:
        yield "the optimizer does not run in backward"
    if plan.compile is not None:
        yield f"the model is not compiled: after this, call model.compile(backend={plan.compile.backend!r})"
    for segment in plan.segments:
        path = module_name(segment.path)
        if segment.through_loss:
            yield f"{path}: no segment; the plan runs it in {segment.chunks} chunks through the loss"
            continue
        if segment.chunks > 1:
            yield f"{path}: run whole, not in {format_count(segment.chunks, 'chunk')}"
        if segment.place != "device":
            yield f"{path}: what it stores stays on the device, and does not go to {segment.place}"
        if segment.compressor != "null":
            yield f"{path}: its input is stored as it is, not packed ({segment.compressor})"
        if segment.spatial_split:
            yield f"{path}: the modules that __spatial_split__ returns are not separate segments"
        if _keeps_around_others(segment, plan):
            yield f"{path}: recomputes outputs that the plan keeps ({', '.join(segment.keep)})"

"""Loss heads: linear layers whose output goes to a cross-entropy and nowhere else, as in language models.

A plan may run such a head together with its loss in chunks ("through its loss"), so that the logits of a whole batch
never exist at once.  This file finds the heads in a recorded step, and adds those to a plan that lower its peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memopt_cli.records import ModuleTrace, Plan, SegmentPlan, StepTrace
from memopt_cli.search.plan.interface import is_within

_MIN_ROWS = 128
"""Fewest rows of a chunk: matrix products of fewer rows are slow."""
_ON_THE_WAY = {"aten::_to_copy", "aten::clone"}
"""Operators allowed between the head and its loss, besides views: casts and copies."""
_LOSS = "aten::_log_softmax"


def with_heads(start: Plan, peak_bytes: int, trace: StepTrace, peak_of: Callable[[Plan], float]) -> Plan:
    """Return ``start`` with the heads that lower its peak of ``peak_bytes``; ``start`` itself if none does.

    A head that leaves the peak as it is may be among them: where two heads have equal peaks, one alone lowers nothing.
    ``peak_of`` counts the peak of a plan by a dry run, infinite if that fails.
    """
    best, lowest = start, float(peak_bytes)
    for head in loss_heads(trace):
        others = tuple(s for s in best.segments if not is_within(head.path, s.path))
        plan = replace(best, segments=(*others, head))
        if (peak := peak_of(plan)) <= lowest:
            best, lowest = plan, peak
    return best if lowest < peak_bytes else start


def loss_heads(trace: StepTrace) -> tuple[SegmentPlan, ...]:
    """Return a segment for every loss head in ``trace``, in so many chunks that one of the output is input-sized."""
    return tuple(
        SegmentPlan(path=module.path, chunks=_chunks(module), through_loss=True)
        for module in trace.modules
        if module.calls == 1
        and module.class_name == "Linear"
        and not module.refusal
        and len(module.input_shape) > 1
        and module.output_bytes > module.input_bytes
        and _feeds_loss_alone(trace, module)
    )


def _chunks(module: ModuleTrace) -> int:
    """Return a power of two of chunks, such that one chunk of the output is about as large as the whole input."""
    wanted = 1 << math.ceil(math.log2(module.output_bytes / max(1, module.first_input_bytes)))
    rows = math.prod(module.input_shape[:-1])
    return max(2, min(wanted, rows // _MIN_ROWS))


def _feeds_loss_alone(trace: StepTrace, module: ModuleTrace) -> bool:
    """Return whether forward only views and casts the output of ``module``, and then computes a loss of it.

    The model may also return the output: no operator reads it for that.
    """
    call = next(call for call in trace.calls if call.path == module.path)
    logits = set(call.outputs)
    reaches_loss = False
    for op in trace.ops[call.end :]:
        if op.phase != "forward":
            break
        if not logits.intersection(op.reads):
            continue
        if op.mutates or not (op.name in _ON_THE_WAY or op.name == _LOSS or not op.makes):
            return False
        reaches_loss |= op.name == _LOSS
        logits |= set() if op.name == _LOSS else set(op.makes)
    return reaches_loss

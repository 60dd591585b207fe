"""Loss heads: linear layers whose output goes to a cross-entropy and nowhere else, as in language models.

A plan may run such a head together with its loss in chunks ("through its loss"), so that the logits of a whole batch
never exist at once.  This file finds the heads in a recorded step, and adds to a plan the heads that lower its peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memopt_cli.records import ModuleTrace, Plan, SegmentPlan, StepTrace
from memopt_cli.text.paths import is_within

_MIN_ROWS = 128
"""Minimum number of rows of a chunk: matrix products of fewer rows are slow."""
_CASTS_AND_COPIES = {"aten::_to_copy", "aten::clone"}
"""Operators that, like views, may lie between the head and its loss."""
_LOSS = "aten::_log_softmax"


def add_heads(start: Plan, peak_bytes: int, trace: StepTrace, count_peak: Callable[[Plan], float]) -> Plan:
    """Return ``start`` with the heads that lower its peak of ``peak_bytes``; ``start`` itself if no head does.

    Where two heads have equal peaks, one of them lowers nothing.  So heads that leave the peak as it is stay as well.
    ``count_peak`` returns the peak of a plan in bytes, by a dry run; infinity if the dry run fails.
    """
    best, lowest = start, float(peak_bytes)
    for head in loss_heads(trace):
        segments = tuple(s for s in best.segments if not is_within(head.path, s.path))
        plan = replace(best, segments=(*segments, head))
        if (peak := count_peak(plan)) <= lowest:
            best, lowest = plan, peak
    return best if lowest < peak_bytes else start


def loss_heads(trace: StepTrace) -> tuple[SegmentPlan, ...]:
    """Return a segment for every loss head in ``trace``, with chunks of the output about as large as the input."""
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
    """Return the power of two for which one chunk of the output is about as large as the whole input."""
    chunks = 1 << math.ceil(math.log2(module.output_bytes / max(1, module.first_input_bytes)))
    rows = math.prod(module.input_shape[:-1])
    return max(2, min(chunks, rows // _MIN_ROWS))


def _feeds_loss_alone(trace: StepTrace, module: ModuleTrace) -> bool:
    """Return whether forward only views and casts the output of ``module``, and then computes a loss from it.

    The model may also return the output: no operator reads it then.
    """
    call = next(call for call in trace.calls if call.path == module.path)
    logits = set(call.outputs)
    reaches_loss = False
    for op in trace.ops[call.end :]:
        if op.phase != "forward":
            break
        if not logits.intersection(op.reads):
            continue
        if op.mutates or not (op.name in _CASTS_AND_COPIES or op.name == _LOSS or not op.makes):
            return False
        reaches_loss |= op.name == _LOSS
        logits |= set() if op.name == _LOSS else set(op.makes)
    return reaches_loss

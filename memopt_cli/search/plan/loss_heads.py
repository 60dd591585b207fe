"""Linear layers whose output goes to a cross-entropy and nowhere else: the heads of language models.

Such a head may run through its loss in chunks, so that the logits of a whole batch never exist at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memopt_cli.records import ModuleTrace, Plan, SegmentPlan, StepTrace
from memopt_cli.search.plan.interface import is_within

_LEAST_ROWS = 128
"""Fewest rows of a chunk: products of fewer are slow."""
_ON_THE_WAY = {"aten::_to_copy", "aten::clone"}
_LOSS = "aten::_log_softmax"


def with_heads(start: Plan, peak_bytes: int, trace: StepTrace, peak_of: Callable[[Plan], float]) -> Plan:
    """Add to ``start`` every head through its loss that does not raise the peak; return ``start`` if none lowers it.

    A head that merely does not raise it may stay, since of two equal peaks one head alone lowers none.  ``peak_of``
    counts a plan by a dry run, infinite where that fails.
    """
    best, lowest = start, float(peak_bytes)
    for head in loss_heads(trace):
        others = tuple(s for s in best.segments if not is_within(head.path, s.path))
        plan = replace(best, segments=(*others, head))
        if (peak := peak_of(plan)) <= lowest:
            best, lowest = plan, peak
    return best if lowest < peak_bytes else start


def loss_heads(trace: StepTrace) -> tuple[SegmentPlan, ...]:
    """Return a segment for every head in ``trace``, so cut that a chunk of the output is as large as the input."""
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
    wanted = 1 << math.ceil(math.log2(module.output_bytes / max(1, module.first_input_bytes)))
    rows = math.prod(module.input_shape[:-1])
    return max(2, min(wanted, rows // _LEAST_ROWS))


def _feeds_loss_alone(trace: StepTrace, module: ModuleTrace) -> bool:
    """Return whether forward reads the output of ``module`` only in views and casts, and then in a loss.

    A model may return it besides: that is no read.
    """
    call = next(call for call in trace.calls if call.path == module.path)
    logits = set(call.outputs)
    found = False
    for op in trace.ops[call.end :]:
        if op.phase != "forward":
            break
        if not logits.intersection(op.reads):
            continue
        if op.mutates or not (op.name in _ON_THE_WAY or op.name == _LOSS or not op.makes):
            return False
        found |= op.name == _LOSS
        logits |= set() if op.name == _LOSS else set(op.makes)
    return found

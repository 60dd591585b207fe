"""Remembering how long the operators of a step take, so that the same command finds the same plan again.

Times of one step differ by a few per cent from run to run, and so do the rates of packing.  That is enough for another
plan: near the time limit, 1 % of the step buys up to 4 % of the peak (seen in a BERT of four layers).  So a search
uses the times of the first search for this step on this machine.  Measurements, not these times, decide at the end.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib.metadata import version

from memopt_cli.files.state import recall, remember
from memopt_cli.measure.jobs import ConditionsJob
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import Conditions, StepTrace, to_data
from memopt_cli.version import __version__

_KIND = "operator-times"
_MAX_BYTES = 16 << 20
_MAX_RECORDS = 64
"""Maximum number of remembered steps; a record takes some 20 bytes for each operator."""
_FASTER_SHARE = 0.8
"""A step that takes less than this share of the remembered one replaces it: the machine was busy before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTimes:
    """Times of the operators of one step, in order, and the other times that price a plan."""

    operators_s: tuple[float, ...]
    modules_s: tuple[float, ...]
    packing_bytes_per_s: float
    segment_overhead: float

    @classmethod
    def of(cls, trace: StepTrace) -> _StepTimes:
        return cls(
            operators_s=tuple(op.seconds for op in trace.ops),
            modules_s=tuple(module.forward_s for module in trace.modules),
            packing_bytes_per_s=trace.packing_bytes_per_s,
            segment_overhead=trace.segment_overhead,
        )

    def put_into(self, trace: StepTrace) -> StepTrace:
        """Return ``trace`` with these times."""
        ops = zip(trace.ops, self.operators_s, strict=True)
        modules = zip(trace.modules, self.modules_s, strict=True)
        return replace(
            trace,
            ops=tuple(replace(op, seconds=seconds) for op, seconds in ops),
            modules=tuple(replace(module, forward_s=seconds) for module, seconds in modules),
            packing_bytes_per_s=self.packing_bytes_per_s,
            segment_overhead=self.segment_overhead,
        )

    def fits(self, trace: StepTrace) -> bool:
        """Return whether these are times and rates of ``trace``: a record is a file, and files may be damaged."""
        times = (*self.operators_s, *self.modules_s)
        lengths = len(self.operators_s), len(self.modules_s)
        is_sound = min(times, default=0) >= 0 and self.packing_bytes_per_s > 0 and self.segment_overhead > 0
        return is_sound and self.step_s > 0 and lengths == (len(trace.ops), len(trace.modules))

    @property
    def step_s(self) -> float:
        """Seconds of all operators."""
        return sum(self.operators_s)


class OperatorTimes:
    """Times of operators on the machine of some sessions, from this run and from earlier ones."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.recalled = False
        """Whether a step was given the times of an earlier run."""

    def settle(self, trace: StepTrace) -> StepTrace:
        """Return ``trace`` with the remembered times of its step, or remember its times.

        A step that was not timed here, such as one for another device, stays as it is.
        """
        fresh = _StepTimes.of(trace)
        if self._sessions.prepared.subject.card is not None or not fresh.fits(trace):
            return trace
        key = f"{self._conditions_text}\n{_step_text(trace)}"
        known = recall(_KIND, key, _StepTimes, _MAX_BYTES)
        if known is None or not known.fits(trace) or fresh.step_s < _FASTER_SHARE * known.step_s:
            remember(_KIND, key, fresh, max_records=_MAX_RECORDS)
            return trace
        self.recalled = True
        return known.put_into(trace)

    @functools.cached_property
    def _conditions_text(self) -> str:
        """The conditions under which operators are timed: device, threads, libraries and their versions."""
        answer = self._sessions().ask(ConditionsJob())
        conditions = to_data(answer) if isinstance(answer, Conditions) else None
        return json.dumps([__version__, version("torch"), conditions], sort_keys=True)


def _step_text(trace: StepTrace) -> str:
    """Return a text that two steps share if they run the same operators on tensors of the same sizes."""
    ops = [(op.name, op.module, op.phase, op.dtype, op.flops, op.moved_bytes, op.packs) for op in trace.ops]
    return json.dumps([ops, [module.path for module in trace.modules]])

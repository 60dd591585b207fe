"""Remembering what a search learnt of a step, so that the same command finds the same plan again.

Times of one step differ by a few per cent from run to run, and so do the rates of packing.  That is enough for another
plan: near the time limit, 1 % of the step buys up to 4 % of the peak (seen in a BERT of four layers).  So a search uses
three facts of the first search for this step on this machine: the operators' times, the error of predictions, and the
plans that kept the time limit.  Measurements still decide.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import dataclass, replace
from importlib.metadata import version

from memopt_cli.files.state import recall, remember
from memopt_cli.measure.jobs import ConditionsJob
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import Conditions, Plan, StepTrace, to_data
from memopt_cli.version import __version__

_KIND = "searched-steps"
_MAX_BYTES = 16 << 20
_MAX_RECORDS = 64
"""Maximum number of remembered steps; a record takes some 20 bytes for each operator."""
_MAX_ACCEPTED = 16
"""Maximum number of plans remembered for a step."""
_FASTER_SHARE = 0.8
"""A step that takes less than this share of the remembered one replaces it: the machine was busy before."""
_SLOWER_RATIO = 20
"""A step that takes this multiple of the remembered one replaces it: no machine is that busy."""
_SHARED_TIME = 0.5
"""Minimum share of a remembered step's time that its operators still take now, one by one."""
_RATES_RATIO = 100
"""Maximum ratio of a remembered rate to one that was just measured, or the other way round."""
ERRORS = (0.6, 10.0)
"""Smallest and largest error of predictions that is used.  A plan that seems faster or slower still was measured in an
unusual moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchedStep:
    """A recorded step, and what searches for it have learnt."""

    operators_s: tuple[float, ...]
    """Seconds of the operators, in their order."""
    modules_s: tuple[float, ...]
    packing_bytes_per_s: float
    segment_overhead: float
    extra_time_error: float = 1.0
    """Measured extra time of a plan divided by the predicted one."""
    accepted: tuple[str, ...] = ()
    """Digests of the plans that were measured within a time limit, with that limit."""

    @classmethod
    def of(cls, trace: StepTrace) -> _SearchedStep:
        return cls(
            operators_s=tuple(op.seconds for op in trace.ops),
            modules_s=tuple(module.forward_s for module in trace.modules),
            packing_bytes_per_s=trace.packing_bytes_per_s,
            segment_overhead=trace.segment_overhead,
        )

    def is_timed(self) -> bool:
        """Return whether the step was timed: all its operators and rates, and some take time."""
        times = (*self.operators_s, *self.modules_s)
        return min(times, default=0) >= 0 and 0 < self.step_s < math.inf and min(self.rates) > 0

    def fits(self, fresh: _SearchedStep) -> bool:
        """Return whether this may be an earlier record of the ``fresh`` step.

        A record is a file, and files may be damaged.  NaN fails every comparison.
        """
        lengths = len(self.operators_s), len(self.modules_s)
        if lengths != (len(fresh.operators_s), len(fresh.modules_s)) or not self.is_timed():
            return False
        shared_s = sum(map(min, self.operators_s, fresh.operators_s))
        ratios = [ours / theirs for ours, theirs in zip(self.rates, fresh.rates, strict=True)]
        return (
            shared_s >= _SHARED_TIME * self.step_s
            and fresh.step_s < _SLOWER_RATIO * self.step_s
            and all(1 / _RATES_RATIO <= ratio <= _RATES_RATIO for ratio in ratios)
            and ERRORS[0] <= self.extra_time_error <= ERRORS[1]
        )

    @property
    def rates(self) -> tuple[float, float]:
        """Rate of packing, and factor of the time that segments cost."""
        return self.packing_bytes_per_s, self.segment_overhead

    @property
    def step_s(self) -> float:
        """Seconds of all operators."""
        return sum(self.operators_s)

    def put_into(self, trace: StepTrace) -> StepTrace:
        """Return ``trace`` with these times and rates."""
        ops = zip(trace.ops, self.operators_s, strict=True)
        modules = zip(trace.modules, self.modules_s, strict=True)
        return replace(
            trace,
            ops=tuple(replace(op, seconds=seconds) for op, seconds in ops),
            modules=tuple(replace(module, forward_s=seconds) for module, seconds in modules),
            packing_bytes_per_s=self.packing_bytes_per_s,
            segment_overhead=self.segment_overhead,
        )


class EarlierSearches:
    """Facts from earlier searches for the step of some sessions, on this machine; this search adds to them."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.recalled = False
        """Whether a recorded step was given the times of an earlier search."""
        self._original: tuple[str, _SearchedStep] | None = None
        """Key and facts of the first step that was recorded, the original's."""

    def settle(self, trace: StepTrace) -> StepTrace:
        """Return ``trace`` with the remembered times of its step, or remember its times.

        A step that was not timed here, such as one for another device, stays as it is.
        """
        fresh = _SearchedStep.of(trace)
        if self._sessions.prepared.subject.card is not None or not fresh.is_timed():
            return trace
        key = f"{self._conditions_text}\n{_step_text(trace)}"
        known = recall(_KIND, key, _SearchedStep, _MAX_BYTES)
        if known is None or not known.fits(fresh) or fresh.step_s < _FASTER_SHARE * known.step_s:
            known = fresh
            remember(_KIND, key, fresh, max_records=_MAX_RECORDS)
        else:
            self.recalled = True
        self._original = self._original or (key, known)
        return known.put_into(trace)

    @property
    def extra_time_error(self) -> float:
        """Measured extra time of a plan divided by the predicted one, as known so far; 1 if predictions are right."""
        return self._original[1].extra_time_error if self._original else 1.0

    def has_accepted(self, plan: Plan, max_slowdown: float) -> bool:
        """Return whether an earlier search measured ``plan`` within ``max_slowdown``."""
        return self._original is not None and _digest(plan, max_slowdown) in self._original[1].accepted

    def accept(self, plan: Plan, max_slowdown: float, extra_time_error: float) -> None:
        """Remember that ``plan`` was measured within ``max_slowdown``, and the error of predictions that chose it.

        Of several errors the least stays: other work of the machine only makes steps slower.
        """
        if self._original is None:
            return
        key, step = self._original
        error = min(max(extra_time_error, ERRORS[0]), ERRORS[1])
        known = [digest for digest in step.accepted if digest != _digest(plan, max_slowdown)]
        changed = replace(
            step,
            extra_time_error=min(error, step.extra_time_error) if step.accepted else error,
            accepted=(*known, _digest(plan, max_slowdown))[-_MAX_ACCEPTED:],
        )
        if changed != step:
            remember(_KIND, key, changed, max_records=_MAX_RECORDS)

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


def _digest(plan: Plan, max_slowdown: float) -> str:
    """Return a short text for ``plan`` within ``max_slowdown``, which begins with the limit."""
    return f"{max_slowdown:g}:{hashlib.sha256(json.dumps(to_data(plan)).encode()).hexdigest()}"

"""Find a plan by length for ``memopt optimize --dim S=64:2048 --budget …``: one plan for each of a few ranges.

Example, for lengths 64 to 2048: no plan up to 512, a light one up to 1024, and a heavy one beyond.  Each range has the
fastest plan that fits at its largest length, measured and verified by
:func:`~memopt_cli.pipeline.plans.optimization.find_here`, or by estimates alone for a device that is not here
(``--for``).

The search starts with the longest inputs, which must fit.  It then finds the largest length at which the original fits
without a plan, and cuts the lengths between the two where shorter inputs may train faster with a plan of their own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import MemoptError, NothingFitsError, Terminated, UsageError
from memopt_cli.inputs.batch_axis import BATCH
from memopt_cli.inputs.spec_text import format_tensor
from memopt_cli.measure.jobs import ORIGINAL, CountJob, Measured, MeasureJob
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    STEP,
    Budget,
    Counted,
    DimRange,
    InputDimension,
    InputSpec,
    LevelRow,
    Measurement,
    OptimizeRequest,
    OutOfMemory,
    Plan,
    PlanRange,
    RangeRow,
    SearchGoal,
    StepFailed,
    Verification,
)
from memopt_cli.search.batch_size.length_strategies import read_histogram
from memopt_cli.search.plan.bounds import Work, inner_bounds
from memopt_cli.text.units import format_bytes

_EVEN = 64
"""The approximate number of evenly spaced lengths that represent a range without ``--lengths``."""
_RUNS = 3
"""Maximum number of lengths at which the original is run to see whether it fits."""


def lengths_of(request: OptimizeRequest, varied: DimRange) -> dict[int, float]:
    """Return length -> how often it occurs; without ``--lengths``, evenly spaced lengths, each once.

    Raises :class:`UsageError` for a file that holds none, and for a length outside of the range.
    """
    if request.lengths is None:
        low, high = varied.low, varied.high
        unit = low if high % low == 0 else 1  # 64:2048 suggests that all lengths are multiples of 64
        step = unit * max(1, -(-(high - low) // (unit * _EVEN)))
        return dict.fromkeys((*range(low, high, step), high), 1.0)
    named, counts = "lengths", request.lengths
    if isinstance(counts, str):
        named, counts = counts, read_histogram(counts)
    outside = next((length for length in counts if not varied.low <= length <= varied.high), None)
    if outside is not None:
        raise UsageError(
            f"{named} has the length {outside}, outside of the range {varied.symbol}={varied.low}:{varied.high}",
            hint=f"Widen the range to {min(*counts, varied.low)}:{max(*counts, varied.high)}, or leave the length out.",
        )
    return {length: float(count) for length, count in counts.items()}


def dimension_of(spec: InputSpec, symbol: str) -> InputDimension:
    """Return the input and the axis at which a plan reads its length: the first in ``spec`` to name ``symbol``.

    Raises :class:`UsageError` where no shape names it.
    """
    position = 0
    for tensor in spec.tensors:
        if symbol in tensor.shape:
            argument = position if tensor.name is None else tensor.name
            return InputDimension(dim=symbol, argument=argument, axis=tensor.shape.index(symbol))
        position += tensor.name is None
    shapes = ", ".join(map(format_tensor, spec.tensors)) or f"described by {spec.source}"
    raise UsageError(
        f"memopt must know which dimension of which input {symbol} is, but no shape names it ({shapes})",
        hint=f"Write it into a shape, as in Bx{symbol}@int64=0..32000.",
    )


FindPlan = Callable[[OptimizeRequest, Prepared], Findings]


def find_by_length(request: OptimizeRequest, varied: DimRange, prepared: Prepared, *, find_plan: FindPlan) -> Findings:
    """Find a plan with ranges of the ``varied`` dimension; all other findings describe its longest inputs.

    ``find_plan`` finds a plan for inputs of one length.  Raises :class:`MemoptError` as that does.
    """
    if prepared.facts.format == STEP:
        raise UsageError(
            "a plan by length looks at an input of a model's forward, but a step of your own has none",
            hint="Give the dimension one size.",
        )
    if varied.symbol == BATCH:
        raise UsageError(
            f"a plan by length needs another dimension than the batch, {BATCH}", hint="Give the batch one size."
        )
    by = dimension_of(prepared.subject.spec, varied.symbol)
    counts = lengths_of(request, varied)
    search = _ByLength(request, prepared, varied, counts, find_plan, Work.of(counts))
    search.check_sizes(by)
    found = search.find_longest()
    if not _passes(found) or found.decisive is not None:
        return found
    assert found.budget_bytes is not None, "it was asked for"
    parts = search.all_ranges(_part(varied.high, found), found.budget_bytes)
    ranges = (
        PlanRange(up_to=part.up_to, segments=part.plan.segments, packed=part.plan.packed, place=part.plan.place)
        for part in parts
    )
    plan = Plan(by=by, ranges=tuple(ranges))
    if all(part.plan.is_empty for part in parts):
        plan = Plan()
        found.notes.append(f"The original fits at every {varied.symbol} up to {varied.high}: no ranges are needed.")
    elif len(parts) == 1 and not search.interrupted:
        found.notes.append(f"One plan serves every {varied.symbol}: no faster one was found for shorter inputs.")
    rows = list(search.rows(parts)) if plan.ranges else []
    found.notes.extend(search.estimate(parts))
    if request.lengths is None and plan.ranges:
        found.notes.append("All lengths count as equally frequent; `--lengths` says how often each occurs.")
    return replace(found, plan=plan, ranges=rows, interrupted=search.interrupted, notes=[*found.notes, *search.notes])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A range of lengths, given by its largest, and the plan found for it."""

    up_to: int
    original: LevelRow
    applied: LevelRow
    """The row whose plan is applied; the original's where that fits."""
    verification: Verification | None = None
    """The verification of the plan; `None` where the original is applied."""

    @property
    def plan(self) -> Plan:
        """The plan that is applied in the range."""
        return self.applied.plan

    @property
    def slowdowns(self) -> tuple[float, float]:
        """The measured and the predicted slowdown; where one is unknown, the other is used for both."""
        if self.plan.is_empty:
            return 1.0, 1.0
        before, after, predicted = self.original.outcome, self.applied.outcome, self.applied.predicted_slowdown
        if isinstance(before, Measurement) and isinstance(after, Measurement):
            measured = after.slowdown(before)
            return measured, predicted or measured
        return predicted or 1.0, predicted or 1.0

    def may_be_faster(self, longer: _Part) -> bool:
        """Return whether the plan is faster than that of the ``longer`` range as measured or as predicted.

        One of the two is enough: measured times vary, and predictions rest on measured times.
        """
        return any(mine < its for mine, its in zip(self.slowdowns, longer.slowdowns, strict=True))


def _part(up_to: int, found: Findings) -> _Part:
    applied = next(row for row in found.rows[::-1] if row.level == found.applied_level)
    return _Part(up_to=up_to, original=found.rows[0], applied=applied, verification=found.verification)


def _passes(found: Findings) -> bool:
    """Return whether the plan in ``found`` passed verification."""
    return found.verification is not None and found.verification.passed


@dataclass(slots=True)
class _ByLength:
    """One search for a plan by length."""

    request: OptimizeRequest
    prepared: Prepared
    varied: DimRange
    counts: Mapping[int, float]
    find_plan: FindPlan
    work: Work
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    def _sessions(self) -> Sessions:
        """Open sessions for dry runs, with the allocator of the card of ``--for`` if there is one."""
        on_card = replace(self.prepared, subject=replace(self.prepared.subject, card=self.request.card))
        return Sessions(on_card, "full size" if self.request.runs else on_card.dry_data, notes=[])

    def at(self, length: int) -> Prepared:
        """Return the model with inputs of ``length``."""
        return self.prepared.sized(self.varied.symbol, length)

    def check_sizes(self, by: InputDimension) -> None:
        """Raise :class:`MemoptError` if the model fails at an end of the range, with a plan that reads the length."""
        symbol, reads_length = self.varied.symbol, Plan(by=by, ranges=(PlanRange(up_to=self.varied.high),))
        lengths = dict.fromkeys((self.varied.low, self.varied.high))
        with self._sessions() as sessions:
            for length in lengths:
                job = CountJob(plan=reads_length, fake=True, dims={symbol: length})
                found = sessions().ask(job)
                if self.request.runs and isinstance(found, StepFailed):  # try again with data, which the model may need
                    found = sessions().ask(replace(job, fake=False))
                if not isinstance(found, Counted | OutOfMemory):
                    raise_failure(found, f"the model does not run at {symbol}={length}: ")

    def find(self, length: int) -> Findings:
        """Find the fastest plan within the budget at ``length``, measured and verified."""
        self.prepared.progress.stage(f"{self.varied.symbol} up to {length}")
        found = self.find_plan(self.request, self.at(length))
        self.interrupted |= found.interrupted
        # A budget such as 50% is a share of the original's peak at the first, longest length: fix it in bytes.
        if found.budget_bytes is not None:
            goal = SearchGoal(budget=Budget(nbytes=found.budget_bytes))
            self.request = replace(self.request, goal=goal)
        return found

    def find_longest(self) -> Findings:
        """Find the plan of the longest inputs.  Raises :class:`NothingFitsError`, which names their length."""
        longest = f"{self.varied.symbol}={self.varied.high}"
        try:
            return self.find(self.varied.high)
        except NothingFitsError as err:
            hint = f"Let the range end below {longest}. {err.hint}"
            raise NothingFitsError(f"at {longest} {err.message}", hint=hint) from err

    def all_ranges(self, longest: _Part, budget_bytes: int) -> list[_Part]:
        """Return the ranges, the shortest lengths first.  Ctrl-C ends the search and keeps the ranges found so far."""
        plain: list[_Part] = []
        parts = [longest]
        try:
            if self.interrupted or max(longest.slowdowns) <= 1:
                return parts
            plain.extend(self._plain(longest, budget_bytes))
            bound = plain[0].up_to if plain else 0
            inner = inner_bounds(self.work, plain=bound, longest=longest.up_to, slowdown=max(longest.slowdowns))
            for length in reversed(inner):
                parts[:0] = self._faster_than(parts[0], length)
                if self.interrupted:
                    break
        except KeyboardInterrupt as err:
            if isinstance(err, Terminated) or not self.request.interruptible:
                raise
            self.interrupted = True
            self.prepared.progress.interrupted("The search is interrupted: the ranges that it has found are kept.")
        return [*plain, *parts]

    def _faster_than(self, longer: _Part, length: int) -> Iterator[_Part]:
        """Yield a range that ends at ``length``, if its plan is faster than that of the ``longer`` range."""
        try:
            found = self.find(length)
        except MemoptError as err:
            self.notes.append(f"No range ends at {self.varied.symbol}={length}: {err.message}.")
            return
        part = _part(length, found)
        if not _passes(found):
            difference = found.verification.difference if found.verification else "it is not verified"
            self.notes.append(f"No range ends at {self.varied.symbol}={length}: with its plan {difference}.")
        elif part.plan != longer.plan and part.may_be_faster(longer):
            yield part

    # ------------------------------------------------------------------------------------------ without a plan

    def _plain(self, longest: _Part, budget_bytes: int) -> Iterator[_Part]:
        """Yield the range in which the original fits without a plan, if there is one.

        Dry runs propose its largest length, and a run confirms it.  Dry runs leave out the workspaces of kernels, which
        are assumed to be the same share of the peak at all lengths.  For a card of ``--for``, dry runs alone decide.
        """
        self.prepared.progress.stage("the original within the budget")
        candidates = [length for length in self.work.lengths if length < longest.up_to]
        share, is_fake = _allocated_share(longest.original), longest.original.predicted_tensor_peak_bytes is not None
        with self._sessions() as sessions:
            probes = SearchProbes(sessions, limit_s=None)

            def peak(length: int) -> float:
                """Return the original's peak in bytes, of tensors or for a card allocated; infinite if it fails."""
                found = probes.ask(CountJob(plan=ORIGINAL, fake=is_fake, dims={self.varied.symbol: length}))
                if not isinstance(found, Counted):
                    return math.inf
                return found.tensor_peak_bytes if self.request.card is None else found.allocated_peak_bytes

            if self.request.card is not None:
                fitting = _largest(candidates, peak, budget_bytes)
                if fitting is not None:
                    yield self._fits(longest.original, fitting, None, int(peak(fitting)))
                return
            for _ in range(_RUNS):
                fitting = _largest(candidates, peak, budget_bytes / share)
                if fitting is None:
                    return
                measured = self._measured(fitting)
                if measured is not None and measured.allocated_peak_bytes <= budget_bytes:
                    yield self._fits(longest.original, fitting, measured, measured.allocated_peak_bytes)
                    return
                candidates = [length for length in candidates if length < fitting]
                # The workspaces were a larger share than assumed: correct the share by this run.
                share *= 1.0 if measured is None else measured.allocated_peak_bytes / (share * peak(fitting))

    def _fits(self, original: LevelRow, length: int, measured: Measurement | None, peak_bytes: int) -> _Part:
        """Return the range up to ``length`` without a plan; ``measured`` is ``None`` for an estimate."""
        takes = "it is estimated to take" if measured is None else "it takes"
        self.prepared.progress.note(
            f"Up to {self.varied.symbol}={length} the original fits: {takes} {format_bytes(peak_bytes)} there."
        )
        row = replace(
            original,
            outcome=measured,
            predicted_allocated_peak_bytes=peak_bytes if measured is None else None,
            predicted_slowdown=None,
        )
        return _Part(up_to=length, original=row, applied=row)

    def _measured(self, length: int) -> Measurement | None:
        self.prepared.progress.update(0, None, f"the original at {self.varied.symbol}={length}")
        job = MeasureJob(plan=ORIGINAL, warm_up=self.request.search.options.warmup_in_profile_workers)
        found = self.at(length).ask(job)
        return found.measurement if isinstance(found, Measured) else None

    # ------------------------------------------------------------------------------------------ the report

    def estimate(self, parts: Sequence[_Part]) -> Iterator[str]:
        """Yield a sentence on how much shorter the ranges make an epoch than one plan for all lengths would."""
        longest = self.work.epoch({parts[-1].up_to: parts[-1].slowdowns[0]})
        share = self.work.epoch({part.up_to: part.slowdowns[0] for part in parts}) / longest
        if share < 1:
            yield (
                f"An epoch of these lengths takes about {share:.0%} of the time that it takes with the plan of the "
                "longest alone (an estimate: a step of the original is taken to be as long as its input)."
            )

    def rows(self, parts: Sequence[_Part]) -> Iterator[RangeRow]:
        """Yield a row of the report for each of ``parts``."""
        low, steps = self.varied.low, sum(self.counts.values())
        for part in parts:
            inside = sum(count for length, count in self.counts.items() if low <= length <= part.up_to)
            outcome = part.applied.outcome
            assert isinstance(outcome, Measurement | None), "it was proven"
            assert outcome is not None or self.request.card is not None, "it was measured"
            yield RangeRow(
                low=low,
                up_to=part.up_to,
                share=inside / steps,
                plan=part.plan,
                original=part.original.outcome,
                outcome=outcome,
                predicted_allocated_peak_bytes=part.applied.predicted_allocated_peak_bytes,
                predicted_slowdown=part.applied.predicted_slowdown,
                verification=part.verification,
            )
            low = part.up_to + 1


def _allocated_share(original: LevelRow) -> float:
    """Return the ratio of the ``original``'s allocated peak to its tensor peak; 1 if either is unknown."""
    if isinstance(original.outcome, Measurement):
        return original.outcome.allocated_peak_bytes / original.outcome.tensor_peak_bytes
    tensors, allocated = original.predicted_tensor_peak_bytes, original.predicted_allocated_peak_bytes
    return allocated / tensors if tensors and allocated else 1.0


def _largest(lengths: Sequence[int], peak_of: Callable[[int], float], most_bytes: float) -> int | None:
    """Return the largest of the ascending ``lengths`` whose peak is at most ``most_bytes``; ``None`` if none is."""
    fitting = bisect.bisect_right(lengths, most_bytes, key=peak_of)
    return lengths[fitting - 1] if fitting else None

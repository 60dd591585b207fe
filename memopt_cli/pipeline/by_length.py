"""``memopt optimize --dim S=64:2048 --budget …``: a plan for each of a few ranges of lengths.

The longest comes first, for it must fit.  Then the largest length at which the original fits, and where lengths lie
between the two, bounds there: each range has the fastest plan that meets the budget at its largest length, found,
measured and verified as by :func:`~memopt_cli.pipeline.optimization.find_plan`.  For a device that is not here, nothing
is measured, and estimates say what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.batch_axis import BATCH
from memopt_cli.batch_size.length_strategies import read_histogram
from memopt_cli.errors import MemoptError, NothingFitsError, Terminated, UsageError
from memopt_cli.measure.jobs import ORIGINAL, CountJob, Data, Measured, MeasureJob
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.peaks_by_length import Peaks, allocated_share, largest
from memopt_cli.pipeline.prepare import Prepared
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.pipeline.summary import Findings
from memopt_cli.plan.bounds import Work, inner_bounds
from memopt_cli.plan.policy import Resolved
from memopt_cli.progress import Progress
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
)
from memopt_cli.spec_text import format_tensor
from memopt_cli.units import format_bytes

_EVEN = 64
"""Lengths of a range of which it is not said how often each comes."""
_RUNS = 3
"""Lengths at which the original is run to see whether it fits, at most."""


def lengths_of(request: OptimizeRequest, varied: DimRange) -> dict[int, float]:
    """How often each length occurs; where that is not said, lengths that lie evenly in the range.

    Raises :class:`UsageError` for a file that holds none, and for a length outside of the range.
    """
    if request.lengths is None:
        low, high = varied.low, varied.high
        unit = low if high % low == 0 else 1  # who goes from 64 to 2048 may run at multiples of 64 alone
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
    """Which argument of forward has the dimension, the first if several do.

    Raises :class:`UsageError` where that is not known, or it is the batch.
    """
    position = 0
    for tensor in spec.tensors:
        if symbol in tensor.shape:
            argument = position if tensor.name is None else tensor.name
            return InputDimension(dim=symbol, argument=argument, axis=tensor.shape.index(symbol))
        position += tensor.name is None
    shapes = ", ".join(map(format_tensor, spec.tensors)) or f"described by {spec.source}"
    raise UsageError(
        f"which dimension of which input {symbol} is must be known, and no shape names it ({shapes})",
        hint=f"Write it into a shape, as in Bx{symbol}@int64=0..32000.",
    )


FindPlan = Callable[[OptimizeRequest, Resolved, Prepared, Progress], Findings]


def find_by_length(
    request: OptimizeRequest,
    varied: DimRange,
    resolved: Resolved,
    prepared: Prepared,
    progress: Progress,
    *,
    find_plan: FindPlan,
) -> Findings:
    """The plan has ranges; all else is of the longest, which is that of the model's inputs.

    ``find_plan`` finds a plan for inputs of one length.  Raises :class:`MemoptError` as that does.
    """
    if prepared.facts.format == STEP:
        raise UsageError(
            "a plan by length looks at an input of a model's forward, and a step of one's own has none",
            hint="Give the dimension one size.",
        )
    if varied.symbol == BATCH:
        raise UsageError(
            f"a plan by length is for another dimension than the batch, {BATCH}", hint="Give the batch one size."
        )
    by = dimension_of(prepared.subject.spec, varied.symbol)
    counts = lengths_of(request, varied)
    search = _ByLength(request, resolved, prepared, progress, varied, counts, find_plan, Work.of(counts))
    search.check_sizes(by)
    longest = search.find_longest()
    found = longest.found
    assert found is not None
    if not longest.row_passes:
        return found
    parts = search.all_ranges(longest)
    ranges = (PlanRange(up_to=part.up_to, segments=part.plan.segments, packed=part.plan.packed) for part in parts)
    plan = Plan(by=by, ranges=tuple(ranges))
    if all(part.found is None or part.found.plan.is_empty for part in parts):
        plan = Plan()
        found.notes.append(f"The original fits at every {varied.symbol} up to {varied.high}: no ranges are needed.")
    elif len(parts) == 1 and not search.interrupted:
        found.notes.append(f"One plan does at every {varied.symbol}: none that is faster at shorter inputs was found.")
    rows = list(search.rows(parts)) if plan.ranges else []
    found.notes.extend(search.estimate(parts))
    if request.lengths is None and plan.ranges:
        found.notes.append("All lengths are taken to be as frequent; --lengths says how frequent each is.")
    return replace(found, plan=plan, ranges=rows, interrupted=search.interrupted, notes=[*found.notes, *search.notes])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A range that ends at a length, and what was found there."""

    up_to: int
    found: Findings | None
    """``None``: the original fits."""
    original: Measurement | None = None
    """Where it does."""
    counted: Counted | None = None
    """The same by an estimate, on a device that is not here."""

    @property
    def row(self) -> LevelRow:
        """Of the plan that is applied."""
        assert self.found is not None, "it has a plan"
        return next(row for row in self.found.rows[::-1] if row.level == self.found.applied_level)

    @property
    def row_passes(self) -> bool:
        """Whether the plan computes what the original does."""
        assert self.found is not None, "it has a plan"
        return self.found.verification is not None and self.found.verification.passed

    @property
    def plan(self) -> Plan:
        """What is done in the range."""
        return Plan() if self.found is None else self.found.plan

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Step time over that of the original, as measured and as predicted; the one where the other is not known."""
        if self.found is None or self.plan.is_empty:
            return 1.0, 1.0
        before, after, predicted = self.found.rows[0].outcome, self.row.outcome, self.row.predicted_slowdown
        if isinstance(before, Measurement) and isinstance(after, Measurement):
            measured = after.slowdown(before)
            return measured, predicted or measured
        return predicted or 1.0, predicted or 1.0

    def may_be_faster(self, longer: _Part) -> bool:
        """Whether either account says so: measured times vary, and predicted ones rest on them."""
        return any(mine < its for mine, its in zip(self.slowdowns, longer.slowdowns, strict=True))


_ORIGINAL = _Part(up_to=0, found=None)


@dataclass(slots=True)
class _ByLength:
    """One search: the parts of it that share what was asked for."""

    request: OptimizeRequest
    resolved: Resolved
    prepared: Prepared
    progress: Progress
    varied: DimRange
    counts: Mapping[int, float]
    find_plan: FindPlan
    work: Work
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    def _sessions(self) -> Sessions:
        """For dry runs, as on the device that the plan is for."""
        there = replace(self.prepared, subject=replace(self.prepared.subject, card=self.request.card))
        data: Data = "full size" if self.request.card is None else "small batch"
        return Sessions(there, self.request.timeout_s, data, notes=[])

    def at(self, length: int) -> Prepared:
        """The model with inputs of a length."""
        return self.prepared.sized(self.varied.symbol, length)

    def check_sizes(self, by: InputDimension) -> None:
        """Raises :class:`MemoptError` for a model that cannot look at its input, or does not run at both lengths."""
        symbol, looking = self.varied.symbol, Plan(by=by, ranges=(PlanRange(up_to=self.varied.high),))
        lengths = dict.fromkeys((self.varied.low, self.varied.high))
        with self._sessions() as sessions:
            for length in lengths:
                job = CountJob(plan=looking, fake=True, dims={symbol: length})
                found = sessions().ask(job)
                is_here = self.request.card is None
                if is_here and isinstance(found, StepFailed):  # it may not run on tensors without data alone
                    found = sessions().ask(replace(job, fake=False))
                if not isinstance(found, Counted | OutOfMemory):
                    raise_failure(found, f"the model does not run at {symbol}={length}: ")

    def find(self, length: int) -> _Part:
        """The fastest plan that meets the budget at a length, proven."""
        self.progress.stage(f"{self.varied.symbol} up to {length}")
        found = self.find_plan(self.request, self.resolved, self.at(length), self.progress)
        self.interrupted |= found.interrupted
        if found.budget_bytes is not None:  # a share is one of the original's peak at the longest
            goal = SearchGoal(budget=Budget(nbytes=found.budget_bytes))
            self.request = replace(self.request, goal=goal)
        return _Part(up_to=length, found=found)

    def find_longest(self) -> _Part:
        """That of the whole range.  Raises :class:`NothingFitsError` that names its length."""
        longest = f"{self.varied.symbol}={self.varied.high}"
        try:
            return self.find(self.varied.high)
        except NothingFitsError as err:
            hint = f"Let the range end below {longest}. {err.hint}"
            raise NothingFitsError(f"at {longest} {err.message}", hint=hint) from err

    def all_ranges(self, longest: _Part) -> list[_Part]:
        """From the shortest on.  Ctrl-C ends the search for more of them."""
        parts = [longest]
        try:
            if self.interrupted or not _ORIGINAL.may_be_faster(longest):
                return parts
            plain = self._plain(longest)
            parts[:0] = [] if plain is None else [plain]
            bound = 0 if plain is None else plain.up_to
            inner = inner_bounds(self.work, plain=bound, longest=longest.up_to, slowdown=max(longest.slowdowns))
            for length in reversed(inner):
                part = self._faster_than(parts[-1] if plain is None else parts[1], length)
                if part is not None:
                    parts.insert(0 if plain is None else 1, part)
                if self.interrupted:
                    break
        except KeyboardInterrupt as err:
            if isinstance(err, Terminated) or not self.request.interruptible:
                raise
            self.interrupted = True
            self.progress.note("The search is interrupted: the ranges that it has found are kept.")
        return parts

    def _faster_than(self, longer: _Part, length: int) -> _Part | None:
        """A plan for inputs up to a length; ``None`` if that is no faster than the one for longer ones."""
        try:
            part = self.find(length)
        except MemoptError as err:
            self.notes.append(f"No range ends at {self.varied.symbol}={length}: {err.message}.")
            return None
        if not part.row_passes:
            assert part.found is not None
            difference = part.found.verification.difference if part.found.verification else "it is not verified"
            self.notes.append(f"No range ends at {self.varied.symbol}={length}: with its plan {difference}.")
            return None
        return part if part.plan != longer.plan and part.may_be_faster(longer) else None

    # ------------------------------------------------------------------------------------------ without a plan

    def _plain(self, longest: _Part) -> _Part | None:
        """The largest length at which the original was run within the budget; ``None`` if there is none.

        Dry runs say where to try; their peaks are without the workspaces of kernels, which are taken to grow alike.
        """
        assert longest.found is not None
        budget = longest.found.budget_bytes
        assert budget is not None, "it was asked for"
        self.progress.stage("the original within the budget")
        candidates = [length for length in self.work.lengths if length < longest.up_to]
        original = longest.found.rows[0]
        share, is_fake = allocated_share(original), original.predicted_tensor_peak_bytes is not None
        with self._sessions() as sessions:
            peaks = Peaks(sessions, self.varied.symbol, fake=is_fake)
            if self.request.card is not None:
                return self._plain_elsewhere(largest(candidates, peaks.allocated, budget), peaks)
            for _ in range(_RUNS):
                fitting = largest(candidates, peaks.of, budget / share)
                if fitting is None:
                    return None
                measured = self._measured(fitting)
                if measured is not None and measured.allocated_peak_bytes <= budget:
                    self.progress.note(
                        f"Up to {self.varied.symbol}={fitting} the original fits: it takes "
                        f"{format_bytes(measured.allocated_peak_bytes)} there."
                    )
                    return _Part(up_to=fitting, found=None, original=measured)
                candidates = [length for length in candidates if length < fitting]
                share *= 1.0 if measured is None else measured.allocated_peak_bytes / (share * peaks.of(fitting))
        return None

    def _plain_elsewhere(self, fitting: int | None, peaks: Peaks) -> _Part | None:
        """The same on a device that is not here, by an estimate."""
        counted = None if fitting is None else peaks.counted(fitting)
        if fitting is None or counted is None:
            return None
        self.progress.note(
            f"Up to {self.varied.symbol}={fitting} the original fits: it is estimated to take "
            f"{format_bytes(counted.allocated_peak_bytes)} there."
        )
        return _Part(up_to=fitting, found=None, counted=counted)

    def _measured(self, length: int) -> Measurement | None:
        self.progress.update(0, None, f"the original at {self.varied.symbol}={length}")
        job = MeasureJob(plan=ORIGINAL, warm_up=self.resolved.options.warmup_in_profile_workers)
        found = self.at(length).ask(job, self.request.timeout_s)
        return found.measurement if isinstance(found, Measured) else None

    # ------------------------------------------------------------------------------------------ what is told

    def estimate(self, parts: Sequence[_Part]) -> Iterator[str]:
        """How much shorter an epoch is than with the plan of the longest alone, if it is."""
        longest = self.work.epoch({parts[-1].up_to: parts[-1].slowdowns[0]})
        share = self.work.epoch({part.up_to: part.slowdowns[0] for part in parts}) / longest
        if share < 1:
            yield (
                f"An epoch of these lengths takes about {share:.0%} of the time that it takes with the plan of the "
                "longest alone (an estimate: a step of the original is taken to be as long as its input)."
            )

    def rows(self, parts: Sequence[_Part]) -> Iterator[RangeRow]:
        """A line for each range."""
        low, steps = self.varied.low, sum(self.counts.values())
        for part in parts:
            inside = sum(count for length, count in self.counts.items() if low <= length <= part.up_to)
            outcome = part.original if part.found is None else part.row.outcome
            assert isinstance(outcome, Measurement | None), "it was proven"
            assert outcome is not None or self.request.card is not None, "it was measured"
            counted = None if part.counted is None else part.counted.allocated_peak_bytes
            yield RangeRow(
                low=low,
                up_to=part.up_to,
                share=inside / steps,
                plan=part.plan,
                original=part.original if part.found is None else part.found.rows[0].outcome,
                outcome=outcome,
                predicted_allocated_peak_bytes=part.row.predicted_allocated_peak_bytes if part.found else counted,
                predicted_slowdown=None if part.found is None else part.row.predicted_slowdown,
                verification=None if part.found is None else part.found.verification,
            )
            low = part.up_to + 1

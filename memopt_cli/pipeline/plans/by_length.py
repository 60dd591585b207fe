"""Finding a plan by length for ``memopt optimize --dim S=64:2048 --budget …``: one plan for each of a few ranges.

Example, for lengths 64 to 2048: no plan up to 512, a light one up to 1024, and a heavy one beyond.  Each range has the
fastest plan that fits at its largest length, measured and verified by
:func:`~memopt_cli.pipeline.plans.optimization.find_here`, or by estimates alone for a device that is not here
(``--for``).

Each plan is found and verified at the largest length of its range.  A segment reruns the module's own code, so a plan
verified at one length also holds at others.  One case escapes: code for short inputs only, if it cannot be repeated;
a dry run at a short length does not show it either.  In training, backward ends with an error if the module saves
tensors of a different number or shape.

Shorter inputs have smaller tensors, but on the CPU a convolution chooses its kernel by shape, and one kernel
may need more workspace than another does for longer inputs.  So each plan is also run at a few of its shorter lengths;
where it exceeds the budget, another range ends.

The search starts with the longest inputs, which must fit.  It then finds the largest length at which the original fits
without a plan, and cuts the lengths between the two where shorter inputs may train faster with their own plan.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memopt_cli.errors import MemoptError, NothingFitsError, UsageError
from memopt_cli.inputs.batch_axis import BATCH
from memopt_cli.inputs.spec_text import format_tensor
from memopt_cli.measure.jobs import ORIGINAL, CountJob, MeasureJob
from memopt_cli.pipeline.failures import raise_failure
from memopt_cli.pipeline.plans.budget_errors import ParametersTooLargeError
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.plan_measurements import measurement_in
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.pipeline.search_probes import SearchProbes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    STEP,
    Budget,
    DimRange,
    Failure,
    InputDimension,
    InputSpec,
    LengthRun,
    LevelRow,
    Measurement,
    OptimizeRequest,
    OutOfMemory,
    Plan,
    PlanRange,
    RangeRow,
    SearchGoal,
    StepFailed,
    StepPeaks,
    Verification,
    describe,
)
from memopt_cli.search.batch_size.length_strategies import read_histogram
from memopt_cli.search.plan.bounds import Work, inner_bounds
from memopt_cli.text.units import format_bytes

_EVEN_LENGTHS = 64
"""Approximate number of evenly spaced lengths that represent a range without ``--lengths``."""
_MIN_INTERVALS = 8
"""Minimum number of intervals into which those lengths divide the range, unless the range holds fewer."""
_MAX_ORIGINAL_RUNS = 3
"""Maximum number of lengths at which the original is run to see whether it fits."""
_RUNS_INSIDE = 4
"""Maximum number of lengths below the largest at which the plan of a range is run."""


def lengths_of(request: OptimizeRequest, varied: DimRange) -> dict[int, float]:
    """Return how often each length occurs, as a dictionary; without ``--lengths``, evenly spaced ones occur once each.

    Raises :class:`UsageError` for a file that holds none, and for a length outside the range.
    """
    if request.lengths is None:
        low, high = varied.low, varied.high
        unit = math.gcd(low, high)  # 64:2048 suggests that all lengths are multiples of 64
        while unit > 1 and high - low < unit * _MIN_INTERVALS:
            unit = unit // 2 if unit % 2 == 0 else 1  # 32:64 does not suggest that there is none between
        step = unit * max(1, -(-(high - low) // (unit * _EVEN_LENGTHS)))
        return dict.fromkeys((*range(low, high, step), high), 1.0)
    source, counts = "lengths", request.lengths
    if isinstance(counts, str):
        source, counts = counts, read_histogram(counts)
    length_outside = next((length for length in counts if not varied.low <= length <= varied.high), None)
    if length_outside is not None:
        raise UsageError(
            f"{source} has the length {length_outside}, outside the range {varied.symbol}={varied.low}:{varied.high}",
            hint=f"Widen the range to {min(*counts, varied.low)}:{max(*counts, varied.high)}, or leave the length out.",
        )
    return {length: float(count) for length, count in counts.items()}


def dimension_of(spec: InputSpec, symbol: str) -> InputDimension:
    """Return the inputs and the axes at which a plan reads its length: all that have ``symbol`` in ``spec``.

    In training their sizes may differ; the largest counts.  Raises :class:`UsageError` if no shape names it.
    """
    position = 0
    places: list[tuple[int | str, int]] = []
    for tensor in spec.tensors:
        argument = position if tensor.name is None else tensor.name
        places += [(argument, axis) for axis, size in enumerate(tensor.shape) if size == symbol]
        position += tensor.name is None
    if places:
        arguments, axes = zip(*places, strict=True)
        return InputDimension(
            dim=symbol,
            argument=arguments if len(set(arguments)) > 1 else arguments[0],
            axis=axes if len(axes) > 1 else axes[0],
        )
    shapes = ", ".join(map(format_tensor, spec.tensors)) or f"described by {spec.source}"
    raise UsageError(
        f"no input has a dimension {symbol} to choose the range of the plan by ({shapes})",
        hint=f"Write it into a shape, as in Bx{symbol}@int64=0..32000.",
    )


FindPlan = Callable[[OptimizeRequest, PreparedModel], Findings]


def find_by_length(
    request: OptimizeRequest, varied: DimRange, prepared: PreparedModel, *, find_plan: FindPlan
) -> Findings:
    """Find a plan with ranges of the ``varied`` dimension; all other findings describe its longest inputs.

    ``find_plan`` finds a plan for inputs of one length.  Raises the errors of ``find_plan``.
    """
    if prepared.facts.format == STEP:
        raise UsageError(
            "a plan by length reads an input of the model's forward, which your own step does not have",
            hint="Use one size for the dimension.",
        )
    if varied.symbol == BATCH:
        raise UsageError(f"a plan by length cannot depend on the batch, {BATCH}", hint="Use one size for the batch.")
    dimension = dimension_of(prepared.subject.spec, varied.symbol)
    counts = lengths_of(request, varied)
    search = _ByLength(request, prepared, varied, counts, find_plan, Work.from_counts(counts))
    search.check_sizes(dimension)
    findings = search.find_longest()
    if not _is_verified(findings) or findings.decisive is not None:
        return findings
    assert findings.budget_bytes is not None, "plans by length have a budget"
    ranges = search.all_ranges(_range_of(varied.high, findings), findings.budget_bytes)
    plan_ranges = (
        PlanRange(
            up_to=length_range.up_to,
            segments=length_range.plan.segments,
            packed=length_range.plan.packed,
            place=length_range.plan.place,
        )
        for length_range in ranges
    )
    plan = Plan(by=dimension, ranges=tuple(plan_ranges))
    over = [run for length_range in ranges for run in _over_budget(length_range, findings.budget_bytes)]
    if all(length_range.plan.is_empty for length_range in ranges):
        plan = Plan()
        original = ranges[-1].original.outcome
        exceeds = isinstance(original, Measurement) and original.allocated_peak_bytes > findings.budget_bytes
        subject = "With its own checkpoints, the model" if exceeds else "The original"
        findings.notes += [
            f"At {varied.symbol}={run.length} it takes {format_bytes(run.allocated_peak_bytes)}, above the budget, "
            "and no plan was found that fits there."
            for run in over
        ] or [f"{subject} fits at every {varied.symbol} that was run: no ranges are needed."]
    elif len(ranges) == 1 and not search.interrupted:
        findings.notes.append(f"One plan serves every {varied.symbol}: no faster one was found for shorter inputs.")
    rows = list(search.rows(ranges)) if plan.ranges else []
    findings.notes.extend(search.estimate(ranges))
    if request.lengths is None and plan.ranges:
        findings.notes.append("All lengths count as equally frequent; give their frequencies with `--lengths`.")
    return replace(
        findings,
        plan=plan,
        ranges=rows,
        over_budget=over,
        interrupted=search.interrupted,
        notes=[*findings.notes, *search.notes],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """A range of lengths, given by its largest, and the plan found for it."""

    up_to: int
    original: LevelRow
    applied: LevelRow
    """Row whose plan is applied; the original's where that fits."""
    verification: Verification | None = None
    """Verification of the plan; ``None`` if the original is applied."""
    inside: list[LengthRun] = field(default_factory=list)
    """Runs at shorter lengths of the range."""

    @property
    def plan(self) -> Plan:
        """Plan that is applied in the range."""
        return self.applied.plan

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Measured and predicted slowdown; where one is unknown, the other is used for both."""
        if self.plan.is_empty:
            return 1.0, 1.0
        original_outcome, applied_outcome = self.original.outcome, self.applied.outcome
        predicted = self.applied.predicted_slowdown
        if isinstance(original_outcome, Measurement) and isinstance(applied_outcome, Measurement):
            measured_slowdown = applied_outcome.slowdown(original_outcome)
            return measured_slowdown, predicted or measured_slowdown
        return predicted or 1.0, predicted or 1.0

    def may_be_faster(self, longer: _Range) -> bool:
        """Return whether the plan is faster than the ``longer`` range's plan, as measured or as predicted.

        One of the two is enough: measured times vary, and predictions rest on measured times.
        """
        return any(mine < its for mine, its in zip(self.slowdowns, longer.slowdowns, strict=True))


def _range_of(up_to: int, findings: Findings) -> _Range:
    applied_row = next(row for row in findings.rows[::-1] if row.level == findings.applied_level)
    applied_row = replace(applied_row, plan=findings.plan)  # the same plan, with its compared chunks marked
    return _Range(up_to=up_to, original=findings.rows[0], applied=applied_row, verification=findings.verification)


def _over_budget(length_range: _Range, budget_bytes: int) -> list[LengthRun]:
    """Return the runs of the plan of ``length_range`` that took more than ``budget_bytes``."""
    runs, outcome = length_range.inside, length_range.applied.outcome
    if isinstance(outcome, Measurement) and not length_range.plan.is_empty:
        runs = [*runs, LengthRun(length=length_range.up_to, allocated_peak_bytes=outcome.allocated_peak_bytes)]
    return [run for run in runs if run.allocated_peak_bytes > budget_bytes]


def _is_verified(findings: Findings) -> bool:
    return findings.verification is not None and findings.verification.passed


@dataclass(slots=True)
class _ByLength:
    request: OptimizeRequest
    prepared: PreparedModel
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

    def prepared_at(self, length: int) -> PreparedModel:
        """Return the model with inputs of ``length``."""
        return self.prepared.with_size(self.varied.symbol, length)

    def check_sizes(self, dimension: InputDimension) -> None:
        """Raise :class:`MemoptError` if the model fails at an end of the range, with a plan that reads the length."""
        symbol = self.varied.symbol
        reads_length = Plan(by=dimension, ranges=(PlanRange(up_to=self.varied.high),))
        lengths = dict.fromkeys((self.varied.low, self.varied.high))
        with self._sessions() as sessions:
            for length in lengths:
                job = CountJob(plan=reads_length, fake=True, dims={symbol: length})
                answer = sessions().ask(job)
                # Try again with data, which the model may need.
                if self.request.runs and isinstance(answer, StepFailed):
                    answer = sessions().ask(replace(job, fake=False))
                if not isinstance(answer, StepPeaks | OutOfMemory):
                    raise_failure(answer, f"the model does not run at {symbol}={length}: ")

    def find_at(self, length: int, budget_bytes: int | None = None) -> Findings:
        """Find the fastest plan within ``budget_bytes`` at ``length``, measured and verified.

        ``budget_bytes``: by default the budget of the request.
        """
        self.prepared.progress.stage(f"{self.varied.symbol} up to {length}")
        request = self.request if budget_bytes is None else _with_budget(self.request, budget_bytes)
        findings = self.find_plan(request, self.prepared_at(length))
        self.interrupted |= findings.interrupted
        # A budget such as 50% is a share of the original's peak at the first, longest length: fix it in bytes.
        if budget_bytes is None and findings.budget_bytes is not None:
            self.request = _with_budget(self.request, findings.budget_bytes)
        return findings

    def find_longest(self) -> Findings:
        """Find the plan of the longest inputs.  Raises :class:`NothingFitsError`, which names their length."""
        longest = f"{self.varied.symbol}={self.varied.high}"
        try:
            return self.find_at(self.varied.high)
        except ParametersTooLargeError:
            raise
        except NothingFitsError as err:
            hint = f"End the range at a different {self.varied.symbol}, usually a smaller one. {err.hint}"
            raise NothingFitsError(f"at {longest} {err.message}", hint=hint) from err

    def all_ranges(self, longest: _Range, budget_bytes: int) -> list[_Range]:
        """Return the ranges, the shortest lengths first.

        Ctrl-C and SIGTERM end the search and keep the ranges found so far: their plans are measured and verified.
        """
        ranges = [longest]
        try:
            if not self.interrupted and max(longest.slowdowns) > 1:
                self._add_shorter(ranges, budget_bytes)
            if self.request.runs and not self.interrupted:
                self._run_inside(ranges, budget_bytes)
        except KeyboardInterrupt:
            if not self.request.interruptible:
                raise
            self.interrupted = True
            self.prepared.progress.interrupted("The search is interrupted: the ranges that it has found are kept.")
        return ranges

    def _add_shorter(self, ranges: list[_Range], budget_bytes: int) -> None:
        """Insert ranges that train shorter inputs faster before the one range in ``ranges``."""
        longest = ranges[0]
        ranges[:0] = self._range_without_plan(longest, budget_bytes)
        first = len(ranges) - 1
        shortest_bound = ranges[0].up_to if first else 0
        inner_lengths = inner_bounds(
            self.work, plain=shortest_bound, longest=longest.up_to, slowdown=max(longest.slowdowns)
        )
        is_fake = longest.original.predicted_tensor_peak_bytes is not None
        for length in reversed(self._lower_to_running(inner_lengths, shortest_bound, is_fake=is_fake)):
            longer, shorter = ranges[first], self._range_up_to(length)
            if shorter is not None and shorter.plan != longer.plan and shorter.may_be_faster(longer):
                ranges.insert(first, shorter)
            if self.interrupted:
                break

    def _run_inside(self, ranges: list[_Range], budget_bytes: int) -> None:
        """Run the plan of each of ``ranges`` at a few shorter lengths; where one exceeds the budget, end a range there.

        The new range has a plan that fits at its largest length.  Both parts are then run at a few lengths themselves.
        """
        index, is_fake = len(ranges) - 1, ranges[-1].original.predicted_tensor_peak_bytes is not None
        while index >= 0 and not self.interrupted:
            above = ranges[index - 1].up_to if index else self.varied.low - 1
            run_already = {run.length for run in ranges[index].inside}
            lengths = self._lengths_inside(above, ranges[index].up_to, is_fake=is_fake) - run_already
            is_cut = any(
                self._ends_range(ranges, index, length, budget_bytes) for length in sorted(lengths, reverse=True)
            )
            index += 1 if is_cut else -1

    def _lengths_inside(self, above: int, up_to: int, *, is_fake: bool) -> set[int]:
        """Return a few lengths between ``above`` and ``up_to`` at which the model runs, one in each part of the range.

        With ``--lengths``, it is the most frequent length of its part.  Without, it is the one that powers of two
        divide best, 32 rather than 31 or 34, since images and sequences are cut to such lengths.
        """
        occurring = range(above + 1, up_to) if self.request.lengths is None else sorted(self.counts)
        lengths = [length for length in occurring if above < length < up_to]
        count = min(_RUNS_INSIDE, len(lengths))
        ends = [number * len(lengths) // count for number in range(count)] + [len(lengths)]

        def likelihood(length: int) -> float:
            return length & -length if self.request.lengths is None else self.counts[length]

        likeliest = [max(lengths[start:end], key=likelihood) for start, end in itertools.pairwise(ends)]
        with self._dry_peaks(is_fake=is_fake) as peak:
            runs = [next(self._runs_near(peak, above, length), None) for length in likeliest]
        return {run[0] for run in runs if run is not None}

    def _ends_range(self, ranges: list[_Range], index: int, length: int, budget_bytes: int) -> bool:
        """Run the plan of ``ranges[index]`` at ``length``; return whether a range that ends there was inserted."""
        longer, symbol = ranges[index], self.varied.symbol
        outcome = self._measure(MeasureJob(plan=longer.plan, steps=1, warm_up=False), length)
        if not isinstance(outcome, Measurement):
            self.notes.append(
                f"At {symbol}={length}, the plan up to {symbol}={longer.up_to} could not be run: {describe(outcome)}."
            )
            return False
        peak_bytes = outcome.allocated_peak_bytes
        run = LengthRun(length=length, allocated_peak_bytes=peak_bytes)
        longer.inside.append(run)  # before the search: if that is interrupted, the run counts
        shorter = self._range_up_to(length, bytes_to_beat=peak_bytes) if peak_bytes > budget_bytes else None
        if shorter is None or shorter.plan == longer.plan:
            return False
        longer.inside.remove(run)
        self.notes.append(
            f"A range ends at {symbol}={length}: the plan up to {symbol}={longer.up_to} takes "
            f"{format_bytes(peak_bytes)} there."
        )
        ranges.insert(index, shorter)
        return True

    def _range_up_to(self, length: int, bytes_to_beat: int = 0, budget_bytes: int | None = None) -> _Range | None:
        """Find a plan for the range that ends at ``length``, or return ``None`` and add a note with the reason.

        ``bytes_to_beat``: the peak there under the plan for longer inputs, where that exceeds the budget.  If no plan
        fits, the smallest is taken, provided that it takes less.  ``budget_bytes``: see :meth:`find_at`.
        """
        try:
            findings = self.find_at(length, budget_bytes)
        except MemoptError as err:
            if isinstance(err, NothingFitsError) and 0 < err.least_bytes < bytes_to_beat:
                smallest = self._range_up_to(length, budget_bytes=err.least_bytes)
                if smallest is not None:
                    found = "the smallest plan found is used there"
                    self.notes.append(f"At {self.varied.symbol}={length}, {err.message}; {found}.")
                return smallest
            self.notes.append(f"No range ends at {self.varied.symbol}={length}: {err.message}.")
            return None
        if not _is_verified(findings):
            failed = findings.verification
            fault = f"failed verification ({failed.difference})" if failed else "is not verified"
            self.notes.append(f"No range ends at {self.varied.symbol}={length}: its plan {fault}.")
            return None
        return _range_of(length, findings)

    def _range_without_plan(self, longest: _Range, budget_bytes: int) -> Iterator[_Range]:
        """Yield the range in which the original fits without a plan, if there is one.

        Dry runs propose its largest length, and a run confirms it.  Dry runs leave out the workspaces of kernels, which
        are assumed to be the same share of the peak at all lengths.  For a card of ``--for``, dry runs alone decide.
        """
        self.prepared.progress.stage("the original within the budget")
        candidates = [length for length in self.work.lengths if length < longest.up_to]
        share = _allocated_share(longest.original)
        is_fake = longest.original.predicted_tensor_peak_bytes is not None
        with self._dry_peaks(is_fake=is_fake) as peak:
            run_near = functools.partial(self._run_near, peak, 0)
            if self.request.card is not None:
                if largest := _largest_within(candidates, run_near, budget_bytes):
                    yield self._range_of_original(longest.original, largest[0], None, int(largest[1]))
                return
            for _ in range(_MAX_ORIGINAL_RUNS):
                largest = _largest_within(candidates, run_near, budget_bytes / share)
                if largest is None:
                    return
                length_that_fits, counted_bytes = largest
                warm_up = self.request.search.options.warmup_in_profile_workers
                outcome = self._measure(MeasureJob(plan=ORIGINAL, warm_up=warm_up), length_that_fits)
                if isinstance(outcome, Measurement):
                    peak_bytes = outcome.allocated_peak_bytes
                    if peak_bytes <= budget_bytes:
                        yield self._range_of_original(longest.original, length_that_fits, outcome, peak_bytes)
                        return
                    # The workspaces were a larger share than assumed: correct the share by this run.
                    share = peak_bytes / counted_bytes
                candidates = [length for length in candidates if length < length_that_fits]

    @contextlib.contextmanager
    def _dry_peaks(self, *, is_fake: bool) -> Iterator[Callable[[int], float | None]]:
        """Yield a function from a length to the original's peak there, see :meth:`_peak`; each length is run once."""
        with self._sessions() as sessions:
            yield functools.partial(self._peak, SearchProbes(sessions, limit_s=None), is_fake)

    def _peak(self, probes: SearchProbes, is_fake: bool, length: int) -> float | None:
        """Return the original's tensor peak in bytes, or for a card its allocated peak; infinite if unknown.

        Returns ``None`` if the model does not run at ``length``.
        """
        answer = probes.ask(CountJob(plan=ORIGINAL, fake=is_fake, dims={self.varied.symbol: length}))
        if isinstance(answer, StepFailed):
            return None
        if not isinstance(answer, StepPeaks):
            return math.inf
        return answer.tensor_peak_bytes if self.request.card is None else answer.allocated_peak_bytes

    def _lower_to_running(self, bounds: Sequence[int], above: int, *, is_fake: bool) -> list[int]:
        """Return ``bounds``, each lowered to a length at which the model runs; it stays larger than ``above``.

        A bound for which no such length is found is left out.
        """
        with self._dry_peaks(is_fake=is_fake) as peak:
            return sorted({run[0] for bound in bounds if (run := self._run_near(peak, above, bound)) is not None})

    def _run_near(self, peak: Callable[[int], float | None], above: int, length: int) -> tuple[int, float] | None:
        """Return ``length``, or a slightly shorter one above ``above``, at which the model runs, and its peak.

        If the model runs at none of the lengths tried, add a note that lists them, and return ``None``.
        """
        run = next(self._runs_near(peak, above, length), None)
        if run is None:
            shorter = [n for n in _lengths_to_try(self.varied, length) if above < n < length]
            tried = f", nor at the shorter lengths that were tried ({', '.join(map(str, shorter))})" if shorter else ""
            where = f"{self.varied.symbol}={length}{tried}"
            self.notes.append(f"The model does not run at {where}. Name the lengths that occur with `--lengths`.")
        return run

    def _runs_near(self, peak: Callable[[int], float | None], above: int, length: int) -> Iterator[tuple[int, float]]:
        """Yield ``length`` and shorter lengths, longer than ``above``, at which the model runs, each with its peak."""
        for tried in _lengths_to_try(self.varied, length):
            if tried > above and (nbytes := peak(tried)) is not None:
                yield tried, nbytes

    def _range_of_original(
        self, original: LevelRow, length: int, measurement: Measurement | None, peak_bytes: int
    ) -> _Range:
        """Return the range up to ``length`` without a plan; ``measurement`` is ``None`` for an estimate."""
        verb = "it is estimated to take" if measurement is None else "it takes"
        self.prepared.progress.note(
            f"Up to {self.varied.symbol}={length} the original fits: {verb} {format_bytes(peak_bytes)} there."
        )
        row = replace(
            original,
            outcome=measurement,
            predicted_allocated_peak_bytes=peak_bytes if measurement is None else None,
            predicted_slowdown=None,
        )
        return _Range(up_to=length, original=row, applied=row)

    def _measure(self, job: MeasureJob, length: int) -> Measurement | Failure:
        subject = "the original" if job.plan.is_empty else "the plan"
        self.prepared.progress.update(0, None, f"{subject} at {self.varied.symbol}={length}")
        return measurement_in(self.prepared_at(length).ask(job))

    def estimate(self, ranges: Sequence[_Range]) -> Iterator[str]:
        """Yield a sentence on how much shorter the ranges make an epoch than one plan for all lengths would."""
        epoch_with_one_plan = self.work.epoch({ranges[-1].up_to: ranges[-1].slowdowns[0]})
        share = (
            self.work.epoch({length_range.up_to: length_range.slowdowns[0] for length_range in ranges})
            / epoch_with_one_plan
        )
        if share < 1:
            yield (
                f"An epoch of these lengths takes about {share:.0%} of the time that it takes with the plan of the "
                "longest for all (an estimate: the time of a step is assumed to be proportional to its length)."
            )

    def rows(self, ranges: Sequence[_Range]) -> Iterator[RangeRow]:
        """Yield a row of the report for each of ``ranges``."""
        low, total_count = self.varied.low, sum(self.counts.values())
        for length_range in ranges:
            count_inside = sum(count for length, count in self.counts.items() if low <= length <= length_range.up_to)
            outcome = length_range.applied.outcome
            assert isinstance(outcome, Measurement | None), "an applied plan was measured, or estimated for a card"
            assert outcome is not None or self.request.card is not None, "without a card, an applied plan was measured"
            yield RangeRow(
                low=low,
                up_to=length_range.up_to,
                share=count_inside / total_count,
                plan=length_range.plan,
                original=length_range.original.outcome,
                outcome=outcome,
                predicted_allocated_peak_bytes=length_range.applied.predicted_allocated_peak_bytes,
                predicted_slowdown=length_range.applied.predicted_slowdown,
                verification=length_range.verification,
                inside=tuple(length_range.inside),
            )
            low = length_range.up_to + 1


def _allocated_share(original: LevelRow) -> float:
    """Return the ratio of the ``original``'s allocated peak to its tensor peak; 1 if either is unknown."""
    if isinstance(original.outcome, Measurement):
        return original.outcome.allocated_peak_bytes / original.outcome.tensor_peak_bytes
    tensors, allocated = original.predicted_tensor_peak_bytes, original.predicted_allocated_peak_bytes
    return allocated / tensors if tensors and allocated else 1.0


def _lengths_to_try(varied: DimRange, length: int) -> Iterator[int]:
    """Yield ``length`` and then shorter ones, for a model that accepts only every n-th length; few in number.

    The model runs at both ends of the range ``varied``, so these lengths lie whole steps of n from the lower end.  A
    network that halves its input a few times has a power of two for n; any other n is taken to divide both ends.
    """
    distance = length - varied.low
    steps = [1 << number for number in range(max(1, distance.bit_length() - 1))]
    yield from dict.fromkeys(length - distance % step for step in (*steps, math.gcd(varied.low, varied.high)))


def _with_budget(request: OptimizeRequest, budget_bytes: int) -> OptimizeRequest:
    return replace(request, goal=SearchGoal(budget=Budget(nbytes=budget_bytes)))


def _largest_within(
    lengths: Sequence[int], run_near: Callable[[int], tuple[int, float] | None], max_bytes: float
) -> tuple[int, float] | None:
    """Return the largest length whose peak is at most ``max_bytes``, and its peak; ``None`` if there is no such length.

    It is one of the ascending ``lengths``, or what ``run_near`` returns for it with its peak: a length at which the
    model runs.
    """
    largest, fitting, end = None, 0, len(lengths)
    while fitting < end:
        middle = (fitting + end) // 2
        run = run_near(lengths[middle])
        if run is not None and run[1] <= max_bytes:
            largest, fitting = max(largest or run, run), middle + 1
        else:
            end = middle
    return largest

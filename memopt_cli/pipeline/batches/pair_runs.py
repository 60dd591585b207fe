"""Rating the runs of a search for the fastest training by samples a second, and choosing the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.trials import Pair, Trials
from memopt_cli.records import Accumulation, BatchProbe, PairRun
from memopt_cli.search.batch_size.accumulation import accumulate, make_accumulation
from memopt_cli.search.batch_size.runs import Limits

_TIE_SHARE = 0.01
"""Two rates that differ by at most this share count as equal, and the simpler plan wins."""

_MAX_FINALISTS = 3
"""Maximum number of pairs that are run again at the end."""
_NOISE_SHARE = 0.2
"""Variation of a rate from run to run, as a share, on a busy machine (benchmarks/fastest.py)."""
_SHORT_STEP_S = 10.0
"""Maximum seconds of a step that is run again: another run of a longer one would take minutes."""


@dataclass(slots=True, kw_only=True)
class PairRuns:
    """Runs of pairs of a plan and a batch, each rated with the number of passes in a step of the optimizer."""

    trials: Trials
    limits: Limits
    global_batch: int | None
    micro_batches: int
    """Number of passes in a step of the optimizer without ``--global-batch``."""

    def all(self) -> list[PairRun]:
        """Return all pairs, in the order in which they were run."""
        usable, rate = self._usable_pairs(), self.samples_per_s
        return [
            PairRun(
                plan=plan,
                batch=batch,
                steps=self._steps(batch),
                outcome=run,
                samples_per_s=rate(batch, run.step_s, run.update_s) if isinstance(run, BatchProbe) else None,
                usable=(plan, batch) in usable,
                late=isinstance(run, BatchProbe) and not self.limits.is_in_time(run.step_s),
            )
            for (plan, batch), run in self.trials.outcomes.items()
        ]

    def usable(self) -> list[PairRun]:
        """Return the pairs that may be the answer."""
        return [pair for pair in self.all() if pair.usable]

    def _usable_pairs(self) -> list[Pair]:
        """Return the pairs that may be the answer; if every step is too long, only the pair with the shortest."""
        budget_bytes = self.limits.budget_bytes
        fitting = [
            (plan, run)
            for plan, run in self.trials.successful_runs()
            if run.allocated_peak_bytes <= budget_bytes and self.largest_usable(run.batch) == run.batch
        ]
        timely_pairs = [(plan, run) for plan, run in fitting if self.limits.is_in_time(run.step_s)]
        shortest = sorted(fitting, key=lambda pair: pair[1].step_s)[:1]
        return [(plan, run.batch) for plan, run in timely_pairs or shortest]

    def largest_usable(self, largest: int) -> int:
        """Return the largest batch up to ``largest`` that may be recommended; 0 if there is none.

        It is a multiple of ``--multiple-of``, and with ``--global-batch``, equal passes of it make up the global batch.
        """
        unit, global_batch = self.limits.multiple_of, self.global_batch
        rounded = largest // unit * unit
        return rounded if global_batch is None or not rounded else accumulate(global_batch, rounded, unit).batch

    def accumulation(self, batch: int) -> Accumulation | None:
        """Return the passes of ``batch`` in a step of the optimizer; ``None`` for one pass and no global batch."""
        if self.global_batch is None:
            return make_accumulation(batch, self.micro_batches)
        return Accumulation(global_batch=self.global_batch, batch=batch, steps=self._steps(batch))

    def _steps(self, batch: int) -> int:
        """Return the number of passes of ``batch`` in a step of the optimizer."""
        return self.micro_batches if self.global_batch is None else -(-self.global_batch // batch)

    def samples_per_s(self, batch: int, step_s: float, update_s: float) -> float:
        """Return the rate of ``batch``, by ``step_s``, the time of its step, and ``update_s``, the update's part."""
        return samples_per_s(batch, step_s, update_s, self._steps(batch))


def samples_per_s(batch: int, step_s: float, update_s: float, steps: int) -> float:
    """Return the samples per second of ``steps`` passes of ``batch`` and one update.

    ``step_s`` is the time of one pass and an update.  Where it is predicted, it may be below the measured ``update_s``,
    which is therefore capped.
    """
    return steps * batch / (steps * step_s - (steps - 1) * min(update_s, step_s))


def rank_pairs(pairs: list[PairRun]) -> Iterator[int]:
    """Yield the indices of usable ``pairs``, fastest first; among equally fast pairs, the simplest plan first."""
    rates = {index: pair.samples_per_s or 0.0 for index, pair in enumerate(pairs) if pair.usable}
    while rates:
        tie_rate = (1 - _TIE_SHARE) * max(rates.values())
        index = min((i for i, rate in rates.items() if rate >= tie_rate), key=lambda i: _cost(pairs[i]))
        yield index
        del rates[index]


def finalists(pairs: list[PairRun], max_pairs: int) -> list[PairRun]:
    """Return the pairs to run again, fastest first: those so close that another run may change the winner."""
    ranked_pairs = [pairs[index] for index in rank_pairs(pairs)]
    best = max((pair.samples_per_s or 0.0 for pair in ranked_pairs), default=0.0)
    short_runs = [
        pair for pair in ranked_pairs if isinstance(pair.outcome, BatchProbe) and pair.outcome.step_s < _SHORT_STEP_S
    ]
    rivals = [pair for pair in short_runs if (pair.samples_per_s or 0.0) >= (1 - _NOISE_SHARE) * best]
    return rivals[: min(_MAX_FINALISTS, max_pairs)] if len(rivals) > 1 and max_pairs > 1 else []


def best_original(pairs: list[PairRun]) -> int | None:
    """Return the index of the fastest of ``pairs`` without a plan; ``None`` if there is none."""
    return next((index for index in rank_pairs(pairs) if pairs[index].plan == ORIGINAL), None)


def _cost(pair: PairRun) -> tuple[int, bool, int, int]:
    """Return a sort key: the complexity of the plan of ``pair``, then its batch."""
    chunks = sum(segment.chunks for segment in pair.plan.segments)
    return len(pair.plan.segments), pair.plan.packed, chunks, pair.batch

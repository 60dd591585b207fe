"""Compare the answer of ``memopt recommend-batch --search`` with a sweep of plans and batch sizes.

    python benchmarks/fastest.py [--only NAME] [--optimizer adamw] [--samples 2 16]

The sample models are those of ``make samples``; the others are of transformers.  The memory limit is the peak of the
original with a batch of ``--samples``, plus 2 %, since a prediction may be off by that much.  The sweep runs the
original, ``checkpoint`` on every block, and the plans of ``memopt optimize --frontier`` at four times that batch; each
with the largest batch that fits, and three quarters, half and a quarter of it.  The best of many runs is partly luck.
The answer, the fastest pairs of the sweep, and the best pairs of the original and of ``checkpoint`` therefore run again
in turns; the table shows their medians.

Wanted: the search makes at most eight runs, and its answer trains at least 97 % of the samples per second of the best
of all these pairs.  Times need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

from benchmarks.results import table, this_command, write_section
from memopt_cli.inputs.spec_text import parse_tensor
from memopt_cli.measure import processes
from memopt_cli.measure.jobs import ORIGINAL
from memopt_cli.pipeline.batches.batch_probes import BatchProbes
from memopt_cli.pipeline.batches.fastest_search import fastest_prepared
from memopt_cli.pipeline.batches.trials import Pair, Trials
from memopt_cli.pipeline.plans.optimization import find_plan
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, prepare
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    BatchProbe,
    BatchRequest,
    Failure,
    FastestTraining,
    InputSpec,
    ModelSource,
    OptimizeRequest,
    Plan,
    SearchGoal,
    SearchOverrides,
    SegmentPlan,
    StepSettings,
    Trust,
)
from memopt_cli.records.progress import Progress
from memopt_cli.search.batch_size.memory_limit import compute_limits
from memopt_cli.search.batch_size.peak_model import PeakModel
from memopt_cli.search.batch_size.runs import Runs
from memopt_cli.search.plan.policy import resolve
from memopt_cli.text.units import format_bytes

TIME_LIMIT_S = 600.0
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Batches that the sweep runs, as shares of the largest batch of a plan."""
WANTED = 0.97
"""Least samples per second of the answer, as a share of the best of the sweep."""
_ROOM = 1.02
"""Memory limit, as a multiple of the original's peak."""
_TURNS = 3
_IN_TURNS = 3
"""Number of the sweep's fastest pairs that run again, besides those of the original and of ``checkpoint``."""
HEADER = [
    "limit",
    "answer",
    "samples/s",
    "sweep's best",
    "original's",
    "checkpoint's",
    "of the best",
    "runs",
    "as wanted",
]
SEARCH = resolve(SearchOverrides())
GPT2 = "benchmarks/out_of_memory.py:gpt2"
VIT = "benchmarks/out_of_memory.py:vit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Model, the paths of its blocks, and its inputs; ``None``: those described beside its file."""

    model: str
    blocks: tuple[str, ...]
    spec: InputSpec | None = None


def _spec(text: str, **dims: int) -> InputSpec:
    return InputSpec(tensors=(parse_tensor(text),), dims=dims, source="benchmark")


CASES = {
    "gpt": Case(model="sample_models/build/gpt.pt", blocks=tuple(f"blocks.{i}" for i in range(6))),
    "resnet": Case(model="sample_models/build/resnet.pt", blocks=tuple(f"stages.{i}" for i in range(4))),
    "char_rnn": Case(model="sample_models/build/char_rnn.pt", blocks=("rnn",)),
    "Hugging Face gpt2": Case(
        model=GPT2,
        blocks=tuple(f"transformer.h.{i}" for i in range(4)),
        spec=_spec("input_ids:BxS@int64=0..96", B=4, S=64),
    ),
    "Hugging Face vit": Case(
        model=VIT,
        blocks=tuple(f"vit.layers.{i}" for i in range(4)),
        spec=_spec("Bx3x64x64", B=4),
    ),
}


@dataclass(slots=True, kw_only=True)
class Sweep:
    """Runs of plans at every share of their largest batch, within a memory limit."""

    prepared: PreparedModel
    limit_bytes: int
    trials: Trials
    first: int
    """Batch of each plan's first run, from which its largest batch is predicted."""

    def rates(self, plans: list[Plan]) -> dict[Pair, float]:
        """Return the samples per second of each plan at each batch that fits."""
        found: dict[Pair, float] = {}
        for plan in plans:
            largest = self.largest(plan)
            batches = sorted({max(1, int(share * largest)) for share in SHARES}) if largest else []
            runs = [self.trials.run(plan, batch) for batch in batches]
            found |= {(plan, run.batch): run.samples_per_s for run in runs if self._fits(run)}
        return found

    def largest(self, plan: Plan) -> int:
        """Return the largest batch of ``plan``, predicted by dry runs and corrected by runs until one fits."""
        limits = compute_limits(self.limit_bytes, self.prepared.subject.settings.device, 1e9)
        model = PeakModel(batch=self.prepared.batch, runs=Runs(limits), predict=None)
        model.runs[self.first] = self.trials.run(plan, self.first)
        with Sessions(self.prepared, "small batch", notes=[]) as session:
            model.predict = BatchProbes(session=session, plan=plan, progress=Progress()).predict
            while batch := model.largest_within(self.limit_bytes):
                run = model.runs[batch] = self.trials.run(plan, batch)
                if self._fits(run):
                    break
        return batch

    def _fits(self, run: BatchProbe | Failure) -> TypeGuard[BatchProbe]:
        return isinstance(run, BatchProbe) and run.allocated_peak_bytes <= self.limit_bytes

    def in_turns(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        """Run ``pairs`` again in turns, and return the median samples per second of each."""
        runs: dict[Pair, list[float]] = {pair: [] for pair in pairs}
        for _, pair in itertools.product(range(_TURNS), runs):
            self.trials.outcomes.pop(pair, None)
            run = self.trials.run(*pair)
            assert isinstance(run, BatchProbe)
            runs[pair].append(run.samples_per_s)
        return {pair: statistics.median(rates) for pair, rates in runs.items()}


def plans_at(prepared: PreparedModel, request: BatchRequest, batch: int) -> list[Plan]:
    """Return the plans on the frontier of memory and time at ``batch``."""
    frontier = OptimizeRequest(
        source=request.source,
        spec=None,
        settings=request.settings,
        search=SEARCH,
        goal=SearchGoal(frontier=True),
        recommend_batch=False,
    )
    found = find_plan(frontier, prepared.at(batch))
    return [point.plan for point in found.frontier if not point.plan.is_empty and not point.plan.in_backward]


def rows(case: Case, optimizer: str, samples: list[int]) -> Iterator[list[str]]:
    """Yield a row of ``case`` for each number of ``samples``, which sets the memory limit."""
    source = ModelSource(location=case.model, trust=Trust(code_paths=(".",)))
    settings = StepSettings(device="cuda:0" if torch.cuda.is_available() else "cpu", optimizer=optimizer)
    load_request = LoadRequest(source=source, spec=case.spec, settings=settings, timeout_s=TIME_LIMIT_S)
    prepared = prepare(load_request, progress=Progress(), ask=None)
    prepared = replace(prepared, subject=replace(prepared.subject, layer_runs=True))
    for batch in samples:
        run = _trials(prepared, 1 << 60).run(ORIGINAL, batch)
        assert isinstance(run, BatchProbe)
        yield _row(case, prepared, settings, batch, int(run.allocated_peak_bytes * _ROOM))


def _trials(prepared: PreparedModel, limit_bytes: int) -> Trials:
    return Trials(prepared=prepared, limit_bytes=limit_bytes)


def _row(case: Case, prepared: PreparedModel, settings: StepSettings, batch: int, limit_bytes: int) -> list[str]:
    source = prepared.subject.source
    request = BatchRequest(source=source, spec=None, settings=settings, memory=limit_bytes, search=SEARCH)
    found = fastest_prepared(request, prepared)
    trials = _trials(prepared, limit_bytes)
    sweep = Sweep(prepared=prepared, limit_bytes=limit_bytes, trials=trials, first=batch)
    blocks = Plan(segments=tuple(SegmentPlan(path=path) for path in case.blocks))
    rates = sweep.rates([ORIGINAL, blocks, *plans_at(prepared, request, 4 * batch)])
    fastest = sorted(rates, key=lambda pair: -rates[pair])
    peers = [next((pair for pair in fastest if pair[0] == plan), None) for plan in (ORIGINAL, blocks)]
    answer = (found.answer.plan, found.answer.batch)
    again = sweep.in_turns(dict.fromkeys([answer, *filter(None, peers), *fastest[:_IN_TURNS]]))
    original, checkpoint = (0.0 if pair is None else again[pair] for pair in peers)
    best = max(fastest[:_IN_TURNS], key=again.__getitem__, default=None)
    swept = None if best is None else (best, again[best])
    return cells(found, again[answer], limit_bytes, original, checkpoint, swept)


def cells(
    found: FastestTraining,
    rate: float,
    limit_bytes: int,
    original: float,
    blocks: float,
    swept: tuple[Pair, float] | None,
) -> list[str]:
    """Return the cells under :data:`HEADER`; rates are samples per second.

    ``swept`` is the best of the sweep; ``None`` if nothing in it fits.
    """
    best = 0.0 if swept is None else swept[1]
    wanted = found.times_run <= 8 and rate >= WANTED * max(best, original, blocks)
    return [
        format_bytes(limit_bytes),
        _words((found.answer.plan, found.answer.batch)),
        f"{rate:.3g}",
        "none" if swept is None else f"{best:.3g} ({_words(swept[0])})",
        *(f"{number:.3g}" for number in (original, blocks)),
        f"{rate / max(best, rate):.3f}",
        str(found.times_run),
        "yes" if wanted else "no",
    ]


def _words(pair: Pair) -> str:
    plan, batch = pair
    return f"batch {batch}, {'no plan' if plan.is_empty else f'{len(plan.segments)} segments'}"


def main() -> int:
    """Run every case; return 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 16], help="of the original, that make a limit")
    given = parser.parse_args()
    wanted = True
    for name, case in CASES.items():
        if given.only not in name:
            continue
        found = []
        for row in rows(case, given.optimizer, given.samples):
            print(name, *row, sep=" | ", flush=True)
            found.append(row)
        wanted &= all(row[-1] == "yes" for row in found)
        write_section(f"recommend-batch --search: {name}", this_command(), table(HEADER, found))
    return int(not wanted)


if __name__ == "__main__":
    with processes.keep_server(early=True):
        status = main()
    sys.exit(status)

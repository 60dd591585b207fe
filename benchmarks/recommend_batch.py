"""Compare ``memopt recommend-batch`` with a finder that doubles and bisects the batch size.

    python benchmarks/recommend_batch.py [--models gpt,resnet] [--limits 900MiB,2500MiB]

Each model at each limit has a section in RESULTS.md.

The finder is Lightning's algorithm (``Tuner.scale_batch_size(mode="binsearch")``): double from 2 until a trial fails,
then bisect until the largest batch is known.  Each trial is a probe of memopt in a fresh subprocess, so that both
measure the same thing.  The finder's answer is exact; memopt's batch must fit, and 5 % more (at least one sample) must
not.  CPU seconds, summed over all subprocesses, allow a comparison on a busy machine, too.

The sample models are those of ``make samples``.  The limits emulate small cards.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.results import table, write_section
from memopt_cli.measure.jobs import ORIGINAL, ProbeJob
from memopt_cli.pipeline import recommend_batch
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, prepare
from memopt_cli.records import BatchProbe, BatchRequest, ModelSource, StepSettings, Trust
from memopt_cli.records.progress import Progress
from memopt_cli.text.units import exact_bytes, parse_bytes

SAMPLES = Path(__file__).parents[1] / "sample_models"
LIMITS = {
    "char_rnn": ("16MiB", "64MiB", "256MiB"),
    "gpt": ("900MiB", "1500MiB", "2500MiB"),
    "resnet": ("450MiB", "900MiB", "1500MiB"),
    "spiking_vgg": ("900MiB", "1500MiB", "2500MiB"),
}
TIME_LIMIT_S = 600.0
HEADER = ["batch", "largest", "runs", "dry runs", "finder's trials", "time", "finder's", "ratio", "of CPU"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Answers of memopt and the finder for one model at one limit."""

    model: str
    limit_bytes: int
    recommended: int
    """Batch that memopt recommends."""
    largest: int
    """Largest batch that fits, by the finder."""
    probes: int
    """Number of memopt's runs."""
    dry_runs: int
    """Number of memopt's dry runs."""
    seconds: float
    """Wall seconds of memopt."""
    trials: int
    """Number of the finder's trials."""
    finder_seconds: float
    """Wall seconds of the finder."""
    cpu_seconds: float
    """CPU seconds of memopt."""
    finder_cpu_seconds: float
    """CPU seconds of the finder."""

    @property
    def is_right(self) -> bool:
        """Whether the batch fits, and one that is 5 % larger does not."""
        return self.recommended <= self.largest < self.recommended + max(1, math.ceil(0.05 * self.recommended))

    @property
    def is_good(self) -> bool:
        """Whether the answer is right, from at most six runs and in at most a third of the finder's time."""
        return self.is_right and self.probes <= 6 and 3 * self.seconds <= self.finder_seconds

    def cells(self) -> list[str]:
        """Return the cells under :data:`HEADER`."""
        counts = (self.recommended, self.largest, self.probes, self.dry_runs, self.trials)
        ratios = (self.seconds / self.finder_seconds, self.cpu_seconds / self.finder_cpu_seconds)
        times = (f"{self.seconds:.1f} s", f"{self.finder_seconds:.1f} s")
        return [*map(str, counts), *times, *(f"{ratio:.2f}" for ratio in ratios)]


def find(prepared: PreparedModel, limit_bytes: int) -> tuple[int, int]:
    """Return the largest batch within ``limit_bytes`` by doubling and bisection, and the number of trials."""
    tried: dict[int, bool] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            with prepared.session() as session:
                found = session.ask(ProbeJob(plan=ORIGINAL, batch=batch))
            tried[batch] = isinstance(found, BatchProbe) and found.allocated_peak_bytes <= limit_bytes
        return tried[batch]

    low, high = 0, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, len(tried)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its subprocesses that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run(model: str, limit_bytes: int) -> Case:
    """Run memopt, then the finder, on ``model`` within ``limit_bytes``."""
    source = ModelSource(
        location=str(SAMPLES / "build" / f"{model}.pt"), trust=Trust(code_paths=(str(SAMPLES.parent),))
    )
    settings = StepSettings(device="cuda:0" if torch.cuda.is_available() else "cpu")
    request = BatchRequest(source=source, spec=None, settings=settings, memory=limit_bytes)
    started, cpu_started = time.perf_counter(), cpu_seconds()
    found = recommend_batch(request, progress=Progress(), ask=None)
    between, cpu_between = time.perf_counter(), cpu_seconds()
    load_request = LoadRequest(source=source, spec=None, settings=settings, timeout_s=TIME_LIMIT_S)
    prepared = prepare(load_request, progress=Progress(), ask=None)
    largest, trials = find(prepared, limit_bytes)
    return Case(
        model=model,
        limit_bytes=limit_bytes,
        recommended=found.batch,
        largest=largest,
        probes=found.probes,
        dry_runs=found.dry_runs,
        seconds=between - started,
        trials=trials,
        finder_seconds=time.perf_counter() - between,
        cpu_seconds=cpu_between - cpu_started,
        finder_cpu_seconds=cpu_seconds() - cpu_between,
    )


def main() -> int:
    """Run the cases that the options name; return 1 if one of them is wrong or slow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(LIMITS))
    parser.add_argument("--limits", help="instead of each model's own three")
    arguments = parser.parse_args()
    is_good = True
    for model in arguments.models.split(","):
        for limit in arguments.limits.split(",") if arguments.limits else LIMITS[model]:
            case = run(model, parse_bytes(limit))
            report(case)
            is_good &= case.is_good
    return 0 if is_good else 1


def report(case: Case) -> None:
    """Print the results, and write them to RESULTS.md."""
    limit, verdict = exact_bytes(case.limit_bytes), "" if case.is_good else "  NOT as wanted"
    print(f"{case.model} {limit}: {' | '.join(case.cells())}{verdict}", flush=True)
    wanted = "right, from at most 6 runs, in at most a third of the finder's time"
    command = f"python benchmarks/recommend_batch.py --models {case.model} --limits {limit}"
    text = f"{wanted}: {'yes' if case.is_good else 'no'}\n\n{table(HEADER, [case.cells()])}"
    write_section(f"recommend-batch: {case.model} in {limit}", command, text)


if __name__ == "__main__":
    sys.exit(main())

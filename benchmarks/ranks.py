"""Compare the predicted peak of one rank of many with that of real ranks: ``python benchmarks/ranks.py``.

Every layout of ``tests/training/sharded/cases.py`` is predicted in a process of its own, and counted in as many
processes as it has ranks, joined by gloo.  One prediction is repeated twenty times, and must not change.  Then a model
of 6.6 billion parameters is predicted at 8, 64 and 1024 ranks, and Llama 3 70B gets a plan at 256 ranks.  The results
are a section of ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import table, this_command, write_section
from memopt_cli.text.units import format_bytes
from tests.training.sharded.cases import FOUR, FULLY_SHARDED, REPLICATED, THREE, TWO, counted_really

HEADER = ["ranks", "layout", "predicted", "counted", "difference"]
LARGE = ("8", "64", "1024")
_TIMES = 20
_BUDGET = "60GiB"


def beside_real_ranks() -> tuple[list[list[str]], int]:
    """Return the rows under :data:`HEADER`, and the largest difference in bytes, those of DDP excepted."""
    rows, worst = [], 0
    for cases in ((*TWO, *REPLICATED), THREE, FOUR):
        with tempfile.TemporaryDirectory() as folder:
            found = counted_really(cases, Path(folder))
        for case in cases:
            counted = found[case.name][0].tensor_peak_bytes
            predicted = case.predicted().tensor_peak_bytes
            rows.append([str(case.ranks), case.name, f"{predicted:,}", f"{counted:,}", f"{predicted - counted:+,} B"])
            print(" | ".join(rows[-1]), flush=True)
            worst = worst if case in REPLICATED else max(worst, abs(predicted - counted))
    return rows, worst


def of_large_model(ranks: str) -> list[str]:
    """Predict the large model at ``ranks``; return its peak, and the seconds and memory of the prediction."""
    flags = ["--fake", "--ranks", ranks, "--parallel", "fsdp", "-i", "1x2048@int64=0..32000", "--json", "-q"]
    command = [sys.executable, "-m", "memopt_cli", "profile", "benchmarks/large.py:build", *flags]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    peaks = {each["rank"]: each["tensor_peak_bytes"] for each in json.loads(done.stdout)["ranks"]}
    told = ", ".join(f"rank {rank}: {format_bytes(peak)}" for rank, peak in peaks.items())
    return [ranks, told, f"{seconds:.0f} s", format_bytes(memory)]


def of_llama() -> list[str]:
    """Plan for Llama; return the peaks of a rank without and with the plan, its predicted slowdown, and seconds."""
    flags = ["--ranks", "256", "--parallel", "benchmarks/llama.py:shard", "--optimizer", "adamw", "--json", "-q"]
    goal = ["-i", "input_ids:1x4096@int64=0..128256", "--budget", _BUDGET, "--plan-only", "--unverified"]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = ["-o", str(Path(folder) / "llama.pt")]
        command = [sys.executable, "-m", "memopt_cli", "optimize", "benchmarks/llama.py:build", *flags, *goal, *output]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)["summary"]
    ranks = [summary["parallel"]["original"], *summary["parallel"]["planned"][:1]]
    peaks = [format_bytes(rank["tensor_peak_bytes"]) for rank in ranks]
    return [
        _BUDGET,
        *peaks,
        f"{summary['levels'][-1]['predicted_slowdown']:.2f}×",
        f"{time.monotonic() - started:.0f} s",
    ]


def main() -> int:
    """Write the section; return 1 if a prediction differs from the count, or from itself."""
    rows, worst = beside_real_ranks()
    peaks = {FULLY_SHARDED.predicted().tensor_peak_bytes for _ in range(_TIMES)}
    large = [of_large_model(ranks) for ranks in LARGE]
    text = (
        f"{table(HEADER, rows)}\n\nThe counted are those of rank 0, the median of three.\n\n"
        f"{_TIMES} predictions of `fsdp` at 2 ranks, in as many processes: {len(peaks)} number.\n\n"
        f"A model of 6.6 billion parameters, `benchmarks/large.py`, all of it in float32:\n\n"
        f"{table(['ranks', 'tensor peak, predicted', 'time', 'largest process'], large)}\n\n"
        "Llama 3 70B, `benchmarks/llama.py`, at 256 ranks, 4096 words each:\n\n"
        f"{table(['budget', 'without a plan', 'with one', 'slowdown, priced', 'time'], [of_llama()])}"
    )
    write_section("One rank of many", this_command(), text)
    return int(worst > 0 or len(peaks) > 1)


if __name__ == "__main__":
    sys.exit(main())

"""Compare the estimates of ``--for CARD`` with measurements on that card, which this machine must have.

    python benchmarks/cards.py h100-80gb [--only resnet]

All figures come from the command line: ``memopt profile --for`` and ``memopt optimize --for --budget 50%`` estimate;
``memopt profile --device`` measures the original, and ``memopt apply --confirm`` the plan.  *off* is the difference of
estimate and measurement, divided by the measurement.  The sample models are those of ``make samples``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.results import table, this_command, write_section
from memopt_cli.pipeline.plans.confirmation import relative_error
from memopt_cli.text.units import format_bytes

DIMS = {
    "gpt": ["--dim", "B=64"],
    "resnet": ["--dim", "B=256"],
    "spiking_vgg": ["--dim", "B=64"],
}
DEVICE = "cuda:0"
BUDGET = "50%"
HEADER = ["step", "allocated", "estimated", "off", "reserved", "estimated", "off", "step time", "estimated", "off"]


def memopt(*words: str) -> dict[str, Any]:
    """Run ``memopt`` with the arguments ``words``, and return its JSON report."""
    command = [sys.executable, "-m", "memopt_cli", *words, "--allow-package", "sample_models", "--json", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return dict(json.loads(done.stdout))


def estimated(name: str, card: str, folder: Path) -> dict[str, Any]:
    """Return the estimate for model ``name`` without a plan, and write a plan to ``folder``."""
    model = f"sample_models/build/{name}.pt"
    out = ["--budget", BUDGET, "--plan-only", "-o", str(folder / f"{name}.pt")]
    memopt("optimize", model, *DIMS[name], "--for", card, *out)
    return dict(memopt("profile", model, *DIMS[name], "--for", card)["estimate"])


def rows(name: str, estimate: dict[str, Any], folder: Path) -> list[list[str]]:
    """Return the rows of model ``name`` without and with its plan."""
    model, plan = f"sample_models/build/{name}.pt", str(folder / f"{name}.plan.yaml")
    original = memopt("profile", model, *DIMS[name], "--device", DEVICE)["measurement"]
    confirmed = memopt("apply", model, plan, *DIMS[name], "--confirm", "--device", DEVICE)["confirmation"]
    return [
        _row(f"{name}, {DIMS[name][1]}", estimate, original),
        _row(f"… within {BUDGET}", confirmed["predicted"], confirmed["measurement"]),
    ]


def _row(title: str, estimate: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    cells = [title]
    for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
        cells += [format_bytes(measured[name]), format_bytes(estimate[name]), _off(estimate[name], measured[name])]
    times = sorted(measured["step_times_s"])
    step_s = times[len(times) // 2]
    return [*cells, f"{1e3 * step_s:.1f} ms", f"{1e3 * estimate['step_s']:.1f} ms", _off(estimate["step_s"], step_s)]


def _off(estimate: float, measured: float) -> str:
    return f"{relative_error(estimate, measured):+.1%}"


def main() -> None:
    """Estimate all models at once, then measure them one at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", help="the name of the card that this machine has, as --for takes it")
    parser.add_argument("--only", choices=list(DIMS), default=None)
    given = parser.parse_args()
    names = [given.only] if given.only else list(DIMS)
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor() as pool:
        folder = Path(made)
        estimates = dict(zip(names, pool.map(lambda name: estimated(name, given.card, folder), names), strict=True))
        for name in names:
            found = table(HEADER, rows(name, estimates[name], folder))
            print(found)
            write_section(f"Estimates for {given.card}: {name}", this_command(), found)


if __name__ == "__main__":
    main()

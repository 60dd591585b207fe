"""Write the table in ``docs/spiking.md``: the networks of ``examples/spiking_nets.py`` at their tutorials' sizes.

    python benchmarks/spiking.py [--only CSNN]

Runs ``memopt optimize`` on each network, with the command in its row; with ``--only`` it runs one network and just
prints its row.  Steps are timed, so that the machine should do nothing else; peaks repeat.  All take about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import machine, table
from memopt_cli.records import Measurement, MemOptSummary, from_data
from memopt_cli.text.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "spiking.md"
NETS = "examples/spiking_nets.py"
_TABLE = re.compile(r"(?<=<!-- table of: python benchmarks/spiking\.py -->\n).*?(?=<!-- end -->)", re.DOTALL)

REALISTIC = {
    "LIFClassifier": "256x1x28x28=0..1",
    "CSNN": "64x1x28x28",
    "GestureNet": "TxBx2x32x32=spikes:0.2 --dim T=16 --dim B=16",
    "LearnedDecay": "64x1x28x28",
    "SpikingResNet": "32x3x32x32",
    "RecurrentNet": "256x28x28",
    "LeakyNet": "512x784",
    "LeakyConvNet": "128x1x28x28",
    "LearnedBeta": "TxBx100=spikes:0.2 --dim T=100 --dim B=128",
    "OwnNet": "TxBx64 --dim T=100 --dim B=128",
}
"""Network -> its inputs, as written after ``-i``."""


def main() -> None:
    """Write all of the table, or print one of its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=REALISTIC)
    only: str | None = parser.parse_args().only
    rows = []
    for name in REALISTIC if only is None else [only]:
        rows.append(list(row_of(name)))
        print(" | ".join(rows[-1]), flush=True)
    if only is None:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


def with_table(page: str, rows: list[list[str]]) -> str:
    """Return the text of ``page`` with the table between its two comments replaced by one of ``rows``."""
    header = ["network", "peak", "with the plan", "step", "`memopt optimize examples/spiking_nets.py:` …"]
    made = f"\n{table(header, rows)}\n\n{machine(('torch', 'spikingjelly', 'snntorch'))}\n\n"
    text, count = _TABLE.subn(lambda _: made, page)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table, and should have one")
    return text


def row_of(name: str) -> Iterator[str]:
    """Run the command of network ``name``, and yield the cells of its row; end the program if it fails."""
    arguments = f"-i {REALISTIC[name]}"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "net.memopt.pt"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "memopt_cli", "optimize", f"{NETS}:{name}", *shlex.split(arguments)),
                *("--plan-only", "--no-recommend-batch", "-q", "-o", str(output)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        found = from_data(MemOptSummary, json.loads(output.with_suffix(".summary.json").read_text())["summary"])
    before, after = (found.levels[0].outcome, next(r.outcome for r in found.levels if r.level == found.applied_level))
    assert isinstance(before, Measurement)
    assert isinstance(after, Measurement)
    assert found.verification is not None
    assert found.verification.passed
    share = after.allocated_peak_bytes / before.allocated_peak_bytes
    yield f"`{name}`"
    yield format_bytes(before.allocated_peak_bytes)
    yield f"{format_bytes(after.allocated_peak_bytes)} ({share:.2f}×)"
    yield f"{after.slowdown(before):.2f}×"
    yield f"`{name} {arguments}`"


if __name__ == "__main__":
    main()

"""Every spiking network of the tutorials gets a plan from the command line, and it is proven."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memopt_cli.records import MemOptSummary, from_data

NETS = Path(__file__).parents[2] / "examples" / "spiking_nets.py"
SMALL = {
    "LIFClassifier": ("2x1x28x28=0..1", 1),
    "CSNN": ("2x1x28x28", 1),
    "GestureNet": ("3x2x2x32x32=spikes:0.2", 3),
    "LearnedDecay": ("2x1x28x28", 1),
    "SpikingResNet": ("2x3x8x8", 1),
    "RecurrentNet": ("4x20x28", 1),
    "LeakyNet": ("16x784", 1),
    "LeakyConvNet": ("2x1x28x28", 1),
    "LearnedBeta": ("8x4x100=spikes:0.2", 3),
    "OwnNet": ("8x4x64", 3),
}
"""Network -> inputs, and the level of the search; where few chunks are conceivable the third is quick, too."""


QUICK = ("LIFClassifier", "CSNN", "LeakyNet", "OwnNet")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.exhaustive) for name in SMALL]
)
def test_a_plan_is_found_applied_and_proven(
    name: str, memopt: Callable[..., Any], in_process: None, tmp_path: Path
) -> None:
    inputs, level = SMALL[name]
    done = memopt(
        *f"optimize {NETS}:{name} -i {inputs} --level {level} --max-slowdown none --plan-only".split(),
        *"--no-recommend-batch -o net.memopt.pt".split(),
    )
    assert done.code == 0, done.err
    found = from_data(MemOptSummary, json.loads((tmp_path / "net.memopt.summary.json").read_text())["summary"])
    assert not found.plan.is_empty, done.out
    assert found.applied_level > 0
    assert found.verification.passed

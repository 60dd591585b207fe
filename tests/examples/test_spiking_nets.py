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
    "LIFClassifier": "2x1x28x28=0..1",
    "CSNN": "2x1x28x28",
    "GestureNet": "3x2x2x32x32=spikes:0.2",
    "LearnedDecay": "2x1x28x28",
    "SpikingResNet": "2x3x8x8",
    "RecurrentNet": "4x8x28",
    "LeakyNet": "16x784",
    "LeakyConvNet": "2x1x28x28",
    "LearnedBeta": "8x4x100=spikes:0.2",
    "OwnNet": "8x4x64",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_plan_is_found_applied_and_proven(
    name: str, memopt: Callable[..., Any], in_process: None, tmp_path: Path
) -> None:
    done = memopt(
        *f"optimize {NETS}:{name} -i {SMALL[name]} --level 3 --max-slowdown none --plan-only".split(),
        *"--no-recommend-batch -o net.memopt.pt --search-time 1".split(),
    )
    assert done.code == 0, done.err
    found = from_data(MemOptSummary, json.loads((tmp_path / "net.memopt.summary.json").read_text())["summary"])
    assert found.plan is not None
    assert not found.plan.is_empty, done.out
    assert found.applied_level > 0
    assert found.verification is not None
    assert found.verification.passed

"""The manager in a real training loop, in a process of its own: memory stays below a limit that is lowered half-way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

CODE = """
import json, sys
sys.path[:0] = ["examples", "."]
import batch_manager_digits as example
steps = example.main(epochs=2)
print(json.dumps([[s.batch, s.peak_bytes, s.limit_bytes, s.loss] for s in steps]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be restarted")
@pytest.mark.exhaustive
def test_memory_stays_below_a_limit_that_is_lowered_half_way() -> None:
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    limits = sorted({limit for _, _, limit, _ in steps})
    assert len(limits) == 2
    before, after = ([s for s in steps if s[2] == limit] for limit in reversed(limits))
    assert sum(batch for batch, *_ in before) == sum(batch for batch, *_ in after) == 1500
    # The law answers within an interval what the first steps at a new size cost beyond what was expected.
    assert max(peak / limit for _, peak, limit, _ in steps) <= 0.95
    assert max(peak / limit for _, peak, limit, _ in [*before[-10:], *after[-10:]]) <= 0.9
    assert max(peak for _, peak, *_ in before) > 0.9 * limits[0]  # it had to give way
    assert max(batch for batch, *_ in after) < max(batch for batch, *_ in before)
    assert steps[-1][3] < 0.5 * steps[0][3]

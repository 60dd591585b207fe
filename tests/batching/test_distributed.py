"""Two processes agree on a batch size over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

REPOSITORY = Path(__file__).parents[2]

CODE = """
import sys
import torch.distributed as dist
from memopt_cli.records import AdaptiveSizing
from memopt_cli.batching.sizer import AdaptiveBatchSizer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
config = AdaptiveSizing(adaptation_interval=2)
sizer = AdaptiveBatchSizer(config=config, initial_batch_size=32, distributed=True)
usages = [[0.1, 0.1, 0.1, 0.1], [0.1, 0.78, 0.97, 0.1]][rank]
sizes = [sizer.adapt_batch_size(1.0, usage) for usage in usages]
if rank == 0:
    sizer.report_out_of_memory()
sizes.append(sizer.adapt_batch_size(1.0, 0.5))
print(*sizes, sizer.reason, sep=",")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_two_ranks_take_the_smaller_size(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), f"file://{tmp_path}/meeting"],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    # Call 2: rank 1 has no room to grow.  Call 3: it is in danger.  Call 4: both grow.  Then rank 0 runs out of memory.
    # The last line alone is the answer: above it, PyTorch 2.8 says that gloo is connected.
    assert [out.splitlines()[-1].split(",") for out, _ in answers] == [
        ["32", "32", "16", "20", "10", "out of memory"],
        ["32", "32", "16", "20", "10", "another rank needs a smaller batch"],
    ]

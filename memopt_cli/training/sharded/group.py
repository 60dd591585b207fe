"""A group of ranks: a real one, that a launcher started, or PyTorch's fake one in this process alone, whose collectives
send nothing and give what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memopt_cli.errors import StepError, UsageError
from memopt_cli.records import Layout
from memopt_cli.runtime.private_torch import start_fake_group
from memopt_cli.training.sharded.agreement import lost_ranks_told


@contextlib.contextmanager
def fake_group(layout: Layout, rank: int) -> Iterator[DeviceMesh]:
    """Within, this process is that rank; gives the mesh of all of them.

    It lies on the CPU: tensors without data that say they are on another device cannot train where there is none.
    Raises :class:`UsageError` in a process that has a group of its own, and :class:`StepError` without
    ``torch.distributed``.
    """
    _require_distributed()
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group already, and a rank is predicted in one of its own",
            hint="Predict before init_process_group, or from the command line.",
        )
    start_fake_group(rank, layout.ranks)
    try:
        yield _mesh("cpu", layout)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def real_group(layout: Layout, device: str, timeout_s: float) -> Iterator[DeviceMesh]:
    """Within, this process is the rank that its environment says (``RANK``, ``MASTER_ADDR`` …); gives the mesh of all.

    On the CPU gloo joins them, on CUDA NCCL.  Raises :class:`RankLostError` where they do not come together.
    """
    _require_distributed()
    backend = "gloo"
    if device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    with lost_ranks_told():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield _mesh(device.partition(":")[0], layout)
    dist.destroy_process_group()  # not after a failure: a rank that is gone would be waited for


def _mesh(device_type: str, layout: Layout) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))


def _require_distributed() -> None:
    if not dist.is_available():
        raise StepError(
            "this PyTorch comes without torch.distributed", hint="Take one that has it: torch.__config__ says."
        )

"""Process groups: a real one, of ranks that a launcher started, or PyTorch's fake one, only in this process.

With a fake group one process can predict one rank of many.  Its collectives send nothing, and return their own inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memopt_cli.errors import StepError, UsageError
from memopt_cli.records import RankLayout
from memopt_cli.runtime.private_torch import start_fake_group
from memopt_cli.training.sharded.agreement import reporting_lost_ranks


@contextlib.contextmanager
def fake_group(layout: RankLayout, rank: int) -> Iterator[DeviceMesh]:
    """Make this process ``rank`` of a fake group for the block, and yield the mesh of all ranks.

    The mesh is on the CPU, since a machine without a GPU cannot train on tensors of a GPU, even without data.  Raises
    :class:`UsageError` in a process that has its own group, and :class:`StepError` without ``torch.distributed``.
    """
    _require_distributed()
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group already, but memopt makes its own group to predict a rank",
            hint="Predict before init_process_group, or from the command line.",
        )
    start_fake_group(rank, layout.ranks)
    try:
        yield _mesh("cpu", layout)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def real_group(layout: RankLayout, device: str, timeout_s: float) -> Iterator[DeviceMesh]:
    """Join the group that the environment describes (``RANK``, ``MASTER_ADDR`` …), and yield the mesh of all ranks.

    The backend is gloo on the CPU and NCCL on CUDA.  Raises :class:`RankLostError` if the ranks do not meet.
    """
    _require_distributed()
    backend = "gloo"
    if device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    with reporting_lost_ranks():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield _mesh(device.partition(":")[0], layout)
    dist.destroy_process_group()  # not after a failure: it would wait for a rank that is gone


def _mesh(device_type: str, layout: RankLayout) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))


def _require_distributed() -> None:
    if not dist.is_available():
        raise StepError(
            "this PyTorch comes without torch.distributed", hint="Install a PyTorch that was built with it."
        )

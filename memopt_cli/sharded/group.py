"""A group of ranks in one process: PyTorch's fake one, whose collectives send nothing and give what they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memopt_cli.errors import StepError, UsageError
from memopt_cli.records import Layout
from memopt_cli.runtime.private_torch import start_fake_group


@contextlib.contextmanager
def fake_group(layout: Layout, rank: int) -> Iterator[DeviceMesh]:
    """Within, this process is that rank; gives the mesh of all of them.

    It lies on the CPU: tensors without data that say they are on another device cannot train where there is none.
    Raises :class:`UsageError` in a process that has a group of its own, and :class:`StepError` without
    ``torch.distributed``.
    """
    if not dist.is_available():
        raise StepError(
            "this PyTorch comes without torch.distributed", hint="Predict with one that has it: torch.__config__ says."
        )
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group already, and a rank is predicted in one of its own",
            hint="Predict before init_process_group, or from the command line.",
        )
    start_fake_group(rank, layout.ranks)
    try:
        yield init_device_mesh("cpu", tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

"""Functions that spread no model, or in a way that cannot be predicted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore


def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
    return None


def whole(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def another_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(nn.Embedding(101, 8), mesh=mesh)


def compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return torch.compile(fully_shard(model, mesh=mesh), backend="eager")  # type: ignore[return-value]


def hooked(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type, return-value]
    return wrapper


def static(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapper = DistributedDataParallel(model)
    wrapper._set_static_graph()
    return wrapper


def batched(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb_list=[1, 2])


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Which has a parameter that gets no gradient, where the build says so."""
    return DistributedDataParallel(model)


def failing(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise LookupError("no such layer")


def another_group(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dist.init_process_group("gloo")
    return model


def exchanged_group(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return model


def older(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return FullyShardedDataParallel(model)


def engine(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    class DeepSpeedEngine(nn.Module):
        __module__ = "deepspeed.runtime.engine"

    made = DeepSpeedEngine()
    made.module = model
    return made


def stage(model: nn.Module, mesh: DeviceMesh) -> Any:
    class PipelineStage:
        __module__ = "torch.distributed.pipelining.stage"

    return PipelineStage()


def of_two(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.size() > 2:
        raise ValueError("no more than two")
    return fully_shard(model, mesh=mesh)


def last_gathers_all(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The last rank gathers the model at once, the others block by block."""
    if dist.get_rank() < mesh.size() - 1:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh)

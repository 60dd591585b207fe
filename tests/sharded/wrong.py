"""Functions that spread no model, or in a way that cannot be predicted."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel


def nothing(model: nn.Module, mesh: DeviceMesh) -> None:
    return None


def whole(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def failing(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise LookupError("no such layer")


def another_group(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dist.init_process_group("gloo")
    return model


def exchanged_group(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2)
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

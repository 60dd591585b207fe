"""Layouts whose ranks are predicted, and counted in real processes that gloo joins."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memopt_cli.measure.answers.ranks import median_count, warm_up, with_buckets
from memopt_cli.records import Plan, RankPrediction, SegmentPlan, StepPeaks, StepSettings
from memopt_cli.runtime.state import StartingState
from memopt_cli.text.optimizer_text import parse_optimizer
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.optimizers import optimizer_maker
from memopt_cli.training.step import TrainingStep
from tests.training.sharded import models

WAIT = timedelta(minutes=2)
"""How long a rank waits for another."""
SEGMENTS = Plan(segments=tuple(SegmentPlan(path=f"blocks.{i}") for i in range(3)))
CONVOLUTIONS = Plan(segments=tuple(SegmentPlan(path=f"3.{i}") for i in range(3)))


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    shard: Callable[[nn.Module, DeviceMesh], nn.Module]
    mesh: dict[str, int]
    build: Callable[[], nn.Module] = models.transformer
    inputs: str = f"4x{models.LENGTH}@int64=0..{models.WORDS}"
    plan: Plan = field(default_factory=Plan)
    optimizer: str = "none"
    clip_norm: float | None = None
    accumulate: int = 1

    @property
    def ranks(self) -> int:
        product = 1
        for length in self.mesh.values():
            product *= length
        return product

    def predicted(self, rank: int = 0, **changes: Any) -> RankPrediction:
        from memopt_cli.ranks import predict_rank

        return predict_rank(
            self.build,
            self.inputs,
            ranks=self.ranks,
            mesh=self.mesh,
            parallelize=self.shard,
            plan=self.plan,
            rank=rank,
            optimizer=self.optimizer,
            clip_norm=self.clip_norm,
            accumulate=self.accumulate,
            **changes,
        )


def _of_images(case: Case) -> Case:
    return replace(case, name=f"{case.name}, convolutional", build=models.convolutional, inputs="4x3x12x12")


def _axis(ranks: int) -> dict[str, int]:
    return {"dp": ranks}


FULLY_SHARDED = Case(name="fsdp", shard=models.shard, mesh=_axis(2))
TENSOR_PARALLEL = Case(name="tensor parallel", shard=models.split, mesh={"tp": 2})
BOTH = Case(name="fsdp × tp", mesh={"dp": 2, "tp": 2}, shard=models.split_and_shard)
TWO = (
    FULLY_SHARDED,
    replace(FULLY_SHARDED, name="fsdp, segments", plan=SEGMENTS),
    replace(FULLY_SHARDED, name="fsdp, adamw, clipped", optimizer="adamw", clip_norm=1.0),
    replace(FULLY_SHARDED, name="fsdp, accumulating", accumulate=2),
    replace(FULLY_SHARDED, name="fsdp, adamw, clipped, accumulating", optimizer="adamw", clip_norm=1.0, accumulate=2),
    replace(FULLY_SHARDED, name="fsdp, bf16", shard=models.shard_in_bf16),
    replace(FULLY_SHARDED, name="fsdp, bf16, segments", shard=models.shard_in_bf16, plan=SEGMENTS),
    replace(FULLY_SHARDED, name="fsdp, kept", shard=models.shard_and_keep),
    replace(FULLY_SHARDED, name="fsdp, no mesh", shard=models.shard_without_mesh),
    replace(FULLY_SHARDED, name="fsdp, no mesh, kept", shard=models.shard_without_mesh_and_keep),
    _of_images(FULLY_SHARDED),
    replace(_of_images(FULLY_SHARDED), name="fsdp, convolutional, segments", plan=CONVOLUTIONS),
    TENSOR_PARALLEL,
    replace(TENSOR_PARALLEL, name="tensor parallel, segments", plan=SEGMENTS),
    replace(TENSOR_PARALLEL, name="tensor parallel, adamw", optimizer="adamw"),
)
THREE = (
    replace(FULLY_SHARDED, name="fsdp, uneven", mesh=_axis(3)),
    replace(FULLY_SHARDED, name="fsdp, uneven, segments", mesh=_axis(3), plan=SEGMENTS),
    replace(_of_images(FULLY_SHARDED), mesh=_axis(3)),
)
FOUR = (
    replace(FULLY_SHARDED, mesh=_axis(4)),
    replace(FULLY_SHARDED, name="fsdp, kept, bf16", mesh=_axis(4), shard=models.shard_in_bf16),
    replace(FULLY_SHARDED, name="fsdp × tp", mesh={"dp": 2, "tp": 2}, shard=models.split_and_shard),
    replace(
        FULLY_SHARDED, name="fsdp × tp, segments", mesh={"dp": 2, "tp": 2}, shard=models.split_and_shard, plan=SEGMENTS
    ),
    replace(FULLY_SHARDED, name="hsdp", mesh={"replicate": 2, "shard": 2}),
    replace(FULLY_SHARDED, name="hsdp, segments", mesh={"replicate": 2, "shard": 2}, plan=SEGMENTS),
    replace(_of_images(FULLY_SHARDED), name="hsdp, convolutional", mesh={"replicate": 2, "shard": 2}),
)
REPLICATED = (
    Case(name="ddp", shard=models.replicate, mesh=_axis(2)),
    Case(name="ddp, views", shard=models.replicate_in_views, mesh=_axis(2)),
    Case(name="ddp, segments", shard=models.replicate, mesh=_axis(2), plan=SEGMENTS),
    Case(name="ddp, adamw", shard=models.replicate, mesh=_axis(2), optimizer="adamw"),
    Case(name="ddp, views, adamw", shard=models.replicate_in_views, mesh=_axis(2), optimizer="adamw"),
    Case(name="ddp, buckets", shard=models.replicate_in_buckets, mesh=_axis(2)),
    Case(name="ddp, unused", shard=models.replicate_what_is_used, mesh=_axis(2), build=models.partly),
    _of_images(Case(name="ddp", shard=models.replicate, mesh=_axis(2))),
    _of_images(Case(name="ddp, views", shard=models.replicate_in_views, mesh=_axis(2))),
)


def counted_really(cases: tuple[Case, ...], folder: Path) -> dict[str, list[StepPeaks]]:
    """Name -> what each rank counted; all cases are of as many ranks."""
    (ranks,) = {case.ranks for case in cases}
    found = in_group(ranks, partial(_counts, cases), folder)
    return {case.name: [of_rank[case.name] for of_rank in found] for case in cases}


def in_group(ranks: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What ``work`` gives, which can be pickled, in each of so many processes that gloo joins."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", __name__])  # imported once, for the ranks of all groups
    torch.multiprocessing.start_processes(_process, (ranks, work, str(folder)), nprocs=ranks, start_method="forkserver")
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _process(rank: int, ranks: int, work: Callable[[], Any], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=WAIT)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(work()))
    dist.destroy_process_group()


def _counts(cases: tuple[Case, ...]) -> dict[str, StepPeaks]:
    found = {}
    for case in cases:
        torch.manual_seed(0)
        step = real_step(case)
        start = StartingState(step.unwrapped_model)
        warm_up(step, start)
        bucketed = with_buckets(step, start)
        counted = [median_count(bucketed, start) for _ in range(3)]  # a thread of gloo's may let go of a buffer late
        found[case.name] = sorted(counted, key=lambda count: count.tensor_peak_bytes)[1]
        dist.barrier()
    return found


def real_step(case: Case) -> TrainingStep:
    """One rank's, in a process that has a group."""
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model = case.shard(apply_plan(case.build().train(), case.plan), mesh)
    make = optimizer_maker(parse_optimizer(case.optimizer))
    settings = StepSettings(optimizer=case.optimizer, clip_norm=case.clip_norm, micro_batches=case.accumulate)
    given = (
        torch.randn(4, 3, 12, 12)
        if case.build is models.convolutional
        else torch.randint(0, models.WORDS, (4, models.LENGTH))
    )
    return TrainingStep(
        model=model, args=(given,), kwargs={}, settings=settings, optimizer=make(model), make_optimizer=make
    )

"""What a profiling subprocess can be asked of copies of a model that are trained as one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from memopt_cli.measure.jobs import StepJob
from memopt_cli.records import BatchProbe, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasJob(StepJob[BatchProbe]):
    """The allocated peak of a step that copies of the model take as one."""

    answered_by: ClassVar[str] = "memopt_cli.model_batching.answers:probe"
    plan: Plan
    batch: int
    """Of each copy."""
    replicas: int
    """Copies, at least 2."""
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Sizes of other symbols than described."""
    limit_bytes: int | None = None
    """CUDA: the most that the allocator may hold, fragmentation included, as on a smaller device."""

"""What a profiling subprocess can be asked, and what it answers: one JSON line each way."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records import (
    ChunkRule,
    InputSpec,
    ModelSource,
    Plan,
    Refused,
    StepSettings,
    StepTrace,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, inputs and step that a subprocess works on; sent once, first."""

    source: ModelSource
    spec: InputSpec
    settings: StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A recorded step, and how it was recorded."""

    trace: StepTrace
    fake: bool
    """On fake tensors: dry runs are possible."""
    note: str
    """Why not, if not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Record a step of the original model -> :class:`Traced`."""

    fake: bool
    """On fake tensors if the model allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob:
    """The tensor peak under a plan -> ``Counted``."""

    plan: Plan
    fake: bool
    """A dry run on fake tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingJob:
    """Whether the module at ``path`` can run in chunks -> :class:`ChunkingFound`."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingFound:
    """The answer to a :class:`ChunkingJob`."""

    rule: ChunkRule | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob:
    """Warm up once, take timed steps, count both peaks -> ``Measurement``."""

    plan: Plan
    steps: int
    """Timed steps, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob:
    """The allocated peak at another batch size -> ``BatchProbe``."""

    plan: Plan
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """The plan against the original at a batch size -> ``Verification``."""

    plan: Plan
    batch: int


Job = TraceJob | CountJob | ChunkingJob | MeasureJob | ProbeJob | VerifyJob

JOBS: dict[str, type[Job]] = {
    kind.__name__: kind for kind in (TraceJob, CountJob, ChunkingJob, MeasureJob, ProbeJob, VerifyJob)
}
"""By the name that goes over the wire."""

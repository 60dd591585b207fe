"""What a profiling subprocess can be asked, and what it answers: one JSON line each way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from memopt_cli.records import (
    ChunkRule,
    InputSpec,
    ModelSource,
    OnlineRule,
    Plan,
    Refused,
    StepSettings,
    StepTrace,
)

ORIGINAL = Plan()
"""No segments: the model as it is."""

_NO_INPUTS, _DEFAULTS = InputSpec(source="not known yet"), StepSettings()

Data = Literal["full size", "small batch", "none"]
"""Which steps may be run on data: of any size, of a few samples (the full one does not fit, or is not to be tried), or
none (the parameters have no data either)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, inputs and step that a subprocess works on; sent once, first."""

    source: ModelSource
    spec: InputSpec = _NO_INPUTS
    settings: StepSettings = _DEFAULTS
    data: Data = "full size"
    layer_runs: bool = False
    """Flat Sequentials are divided into runs of layers, each of which can be a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeJob:
    """What a command must know of the model -> ``ModelFacts``; no step is run.

    The answer is a failure if the model's step cannot be recorded, or the plan or the replicas do not suit it.
    """

    inputs: bool = True
    """Find the inputs of its step."""
    spec: InputSpec | None = None
    """What is given of them."""
    plan: Plan = ORIGINAL
    """One that is to suit the model."""
    replicas: bool = False
    """Copies of the model are to be trained as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob:
    """What is in a file -> ``Inspection``; nothing in it is run."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """The model as a file, with a plan installed -> the file in pieces, then :class:`Saved`."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All of a file was sent."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChanged:
    """The answer to a job that loads the model, where a file is not what the subject says: it ends the command."""

    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A recorded step, and how it was recorded."""

    trace: StepTrace
    fake: bool
    """On fake tensors."""
    dry_run_bytes: int | None
    """The tensor peak of the same step on fake tensors, if it was recorded on them too: dry runs are possible."""
    note: str = ""
    """Why they are not, if the model does not allow them."""
    unknown: tuple[str, ...] = ()
    """What is not known of the step, and why."""

    @property
    def has_dry_runs(self) -> bool:
        """Whether plans can be counted without running them."""
        return self.dry_run_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Record a step of the model -> :class:`Traced`."""

    fake: bool
    """On fake tensors if the model allows."""
    plan: Plan = ORIGINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob:
    """The tensor peak under a plan -> ``Counted``."""

    plan: Plan
    fake: bool
    """A dry run on fake tensors."""
    batch: int | None = None
    """Batch size; ``None``: as the inputs are described.  Of other sizes no workspaces are known: a dry run gives the
    tensor peak alone."""
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols than described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingJob:
    """Whether the module at ``path`` can run in chunks -> :class:`ChunkingFound`."""

    path: str
    allow_inexact: bool = False
    """Chunks that differ by their batch statistics alone will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingFound:
    """The answer to a :class:`ChunkingJob`."""

    rule: ChunkRule | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob:
    """Take timed steps, count both peaks -> ``Measurement``."""

    plan: Plan
    steps: int
    """Timed steps, at least."""
    warm_up: bool = True
    """Take a step before the timed ones; without it, the first of them pays for what is used for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintJob:
    """What the steps left that were measured last -> ``Fingerprint``; no step is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob:
    """The allocated peak at another batch size -> ``BatchProbe``."""

    plan: Plan
    batch: int
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols than described."""
    limit_bytes: int | None = None
    """CUDA: the most that the allocator may hold, fragmentation included, as on a smaller device."""
    replicas: int = 1
    """Copies of the model that take the step as one, each with the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob:
    """The allocated peak of a sequence that is learnt online -> ``BatchProbe``."""

    rule: OnlineRule
    symbol: str
    """That of the time steps."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementJob:
    """The gradient of a sequence online against through time -> ``GradientAgreement``."""

    rule: OnlineRule
    symbol: str
    """That of the time steps."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the inputs."""

    batch: int
    dims: dict[str, int] = field(default_factory=dict)
    """Of other symbols, where they are not as described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesJob:
    """The least at which all chunks of a plan run -> :class:`Sizes`."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """The plan against the original at a batch size -> ``Verification``."""

    plan: Plan
    batch: int
    dims: dict[str, int] = field(default_factory=dict)
    """Sizes of other symbols than described."""
    further: bool = False
    """In the steps that follow, too."""
    asked_s: float = 0.0
    """Time of a step of the original as described, where the sizes are smaller."""


FileJob = DescribeJob | InspectJob | SaveJob
"""What needs the model, and no step of it."""
StepJob = TraceJob | CountJob | ChunkingJob | MeasureJob | FingerprintJob | ProbeJob | OnlineJob | AgreementJob
Job = FileJob | StepJob | SizesJob | VerifyJob

JOBS: dict[str, type[Job]] = {kind.__name__: kind for kind in get_args(Job)}
"""By the name that goes over the wire."""

"""What a profiling subprocess can be asked, and what it answers: one JSON line each way.

A job says what type its answer has and which function gives it.  Other packages have jobs of their own: the worker
knows none of them, it looks up the function that the job names.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    CompiledStep,
    Conditions,
    Counted,
    DeviceProfile,
    Fingerprint,
    Followed,
    InputSpec,
    Inspection,
    Layout,
    Measurement,
    ModelFacts,
    ModelSource,
    Plan,
    RankLost,
    RanksMeasured,
    Refused,
    SnapshotFacts,
    StepSettings,
    StepTrace,
    Verification,
)

Answer = TypeVar("Answer", covariant=True)

ORIGINAL = Plan()
"""No segments: the model as it is."""

PER_TENSOR: Final = 512 << 20
"""Bytes of memory of an answer that tells of each tensor of a model, or each module: of a hundred thousand, or so."""

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
    card: DeviceProfile | None = None
    """A device that is not here, whose allocator and times steps on tensors without data are to have."""
    layer_runs: bool = False
    """Flat Sequentials are divided into runs of layers, each of which can be a segment."""
    tries_rows: bool = True
    """Segments in chunks try whether their rows mix, which takes as long as a few forwards: not where all that a plan
    leaves is compared with what the original leaves."""
    layout: Layout | None = None
    """How the model is spread over ranks, of which the subprocess is one; only steps without data are run then."""
    rank: int = 0
    """Which one."""

    @property
    def wants_compiler(self) -> bool:
        """Steps without data, and models that are built without, take what PyTorch compiles with, which takes long to
        import.
        """
        return self.data == "none" or self.spec != _NO_INPUTS


class Job(Generic[Answer]):
    """A question about the subject: ``class CountJob(StepJob[Counted])`` is answered by a ``Counted``, or a failure."""

    __slots__ = ()
    answered_by: ClassVar[str]
    """``module:function``; it takes the :class:`Subject` and the job, and runs in the subprocess."""
    most_bytes: ClassVar[int] = 16 << 20
    """Of memory that it may take to read the answer: whoever sends it is not trusted."""


class StepJob(Job[Answer]):
    """One for which steps of the loaded model are run: the function takes the ``Bench`` it is loaded on and the job."""

    __slots__ = ()


def name_of(job: Job[Any]) -> str:
    """Of its class, as it goes over the wire."""
    return f"{type(job).__module__}:{type(job).__qualname__}"


def class_of(name: str) -> type[Job[Any]]:
    """The inverse; the name comes from the process that asks, which is trusted."""
    found: type[Job[Any]] = pkgutil.resolve_name(name)
    return found


def answer_of(kind: type[Job[Answer]]) -> type[Answer]:
    """The type of a job's answer."""
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    (answer,) = get_args(base)
    found: type[Answer] = answer
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionsJob(Job[Conditions]):
    """Under what its steps are measured; no model is loaded for it."""

    answered_by: ClassVar[str] = "memopt_cli.measure.conditions:conditions"


# ---------------------------------------------------------------------------------------------- of the model file


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeJob(Job[ModelFacts]):
    """What a command must know of the model; no step is run.

    The answer is a failure if the model's step cannot be recorded, or the plan or the replicas do not suit it.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:describe"
    most_bytes: ClassVar[int] = PER_TENSOR
    inputs: bool = True
    """Find the inputs of its step."""
    spec: InputSpec | None = None
    """What is given of them."""
    plan: Plan = ORIGINAL
    """One that is to suit the model."""
    replicas: bool = False
    """Copies of the model are to be trained as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob(Job[Inspection]):
    """What is in a file; nothing in it is run."""

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:inspect"
    most_bytes: ClassVar[int] = PER_TENSOR
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob(Job[SnapshotFacts]):
    """What a pickle of ``torch.cuda.memory._snapshot()`` tells; nothing in it is run."""

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:snapshot"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All of a file was sent."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob(Job[Saved]):
    """The model as a file, with a plan installed: the file comes in pieces before the answer.  No function's job: it
    is part of the wire."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A file that was saved needs nothing that its original does not need."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareJob(Job[Compared]):
    """What another subprocess has saved, which has run the model: this one runs nothing of it, and reads both files.

    The answer is a failure if the file could do anything that the original could not.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:compare_saved"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChanged:
    """The answer to a job that loads the model, where a file is not what the subject says: it ends the command."""

    message: str
    hint: str


# ---------------------------------------------------------------------------------------------- of recorded steps


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
    checkpoints: tuple[str, ...] = ()
    """Paths of the modules whose forward calls ``torch.utils.checkpoint``; not looked for under a plan."""

    @property
    def has_dry_runs(self) -> bool:
        """Whether plans can be counted without running them."""
        return self.dry_run_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob(StepJob[Traced]):
    """Record a step of the model."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:trace_step"
    most_bytes: ClassVar[int] = 1 << 30  # two hundred thousand operators
    fake: bool
    """On fake tensors if the model allows."""
    plan: Plan = ORIGINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordJob(StepJob[StepTrace]):
    """Record a step that is run, without the seconds of its operators: what is not planned needs none."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:record_step"
    most_bytes: ClassVar[int] = TraceJob.most_bytes
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob(StepJob[Counted]):
    """The tensor peak under a plan."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:count"
    plan: Plan
    fake: bool
    """A dry run on fake tensors."""
    batch: int | None = None
    """Batch size; ``None``: as the inputs are described.  Of other sizes no workspaces are known: a dry run gives the
    tensor peak alone."""
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Sizes of other symbols than described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingFound:
    """How a module may run in chunks, or why it may not."""

    rule: ChunkRule | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingJob(StepJob[ChunkingFound]):
    """Whether the module at ``path`` can run in chunks."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.chunks:try_in_chunks"
    path: str
    allow_inexact: bool = False
    """Chunks that differ by their batch statistics alone will do."""


# ---------------------------------------------------------------------------------------------- of timed steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measurement, and what its steps left."""

    measurement: Measurement
    left: Fingerprint
    not_as_planned: tuple[str, ...] = ()
    """Of each segment that runs plainly or whole, because of what its forward does: a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob(StepJob[Measured]):
    """Take timed steps, count both peaks."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:measure"
    most_bytes: ClassVar[int] = PER_TENSOR
    plan: Plan
    steps: int = 3
    """Timed steps, at least."""
    warm_up: bool = True
    """Take a step before the timed ones; without it, the first of them pays for what is used for the first time."""
    limit_bytes: int | None = None
    """CUDA: the most that the allocator may hold, fragmentation included, as on a smaller device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedJob(StepJob[Fingerprint]):
    """What a step of the original leaves with every parameter at the next number up or down, as chance has it."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:take_rounded"
    most_bytes: ClassVar[int] = PER_TENSOR


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedInTurns:
    """Wall times of steps of the original and with a plan, one after the other in one process."""

    original_times_s: tuple[float, ...]
    planned_times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeInTurnsJob(StepJob[TimedInTurns]):
    """How much longer a plan makes the step, by pairs of steps: what slows the machine down slows both."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:time_in_turns"
    plan: Plan
    pairs: int = 3
    """Pairs of timed steps, at least."""
    most_slowdown: float | None = None
    """A plan that is slower by far takes one pair; ``None``: it may be as slow as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob(StepJob[BatchProbe]):
    """The allocated peak at another batch size."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:probe"
    plan: Plan
    batch: int
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Sizes of other symbols than described."""
    limit_bytes: int | None = None
    """CUDA: the most that the allocator may hold, fragmentation included, as on a smaller device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledJob(StepJob[CompiledStep]):
    """The allocated peak and the time of the step, compiled."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.compiled:measure"
    plan: Plan
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasJob(StepJob[BatchProbe]):
    """The allocated peak of a step that copies of the model take as one."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.model_batching:probe"
    plan: Plan
    batch: int
    """Of each copy."""
    replicas: int
    """Copies, at least 2."""
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Sizes of other symbols than described."""
    limit_bytes: int | None = None
    """CUDA: the most that the allocator may hold, fragmentation included, as on a smaller device."""


# ---------------------------------------------------------------------------------------------- of many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class InGroup:
    """What became of it."""

    outcome: RanksMeasured | RankLost


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob(Job[InGroup]):
    """Measure a step on the rank of a real group that the subject names, together with the others."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.ranks:measure"
    most_bytes: ClassVar[int] = PER_TENSOR
    plan: Plan
    spec: InputSpec | None
    """What is given of the inputs of one rank's step."""
    timeout_s: float
    """How long one rank waits for another."""


# ---------------------------------------------------------------------------------------------- of verified steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the inputs."""

    batch: int
    dims: dict[str, int] = field(default_factory=dict)
    """Of other symbols, where they are not as described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesJob(StepJob[Sizes]):
    """The least at which all chunks of a plan run."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.verified:find_least_sizes"
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob(StepJob[Verification]):
    """The plan against the original at a batch size."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.verified:verify_plan"
    plan: Plan
    batch: int
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Sizes of other symbols than described."""
    further: bool = False
    """In the steps that follow, too."""
    asked_s: float = 0.0
    """Time of a step of the original as described, where the sizes are smaller: so the others may take longer."""


# ---------------------------------------------------------------------------------------------- of consecutive steps


Mode = Literal["training", "eval", "as it came"]
"""Of a model's modules: all in training mode; in eval mode, without what random numbers the other draws; each in its
own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowJob(StepJob[Followed]):
    """What consecutive steps with an optimizer leave."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.followed:follow"
    most_bytes: ClassVar[int] = PER_TENSOR
    plan: Plan = ORIGINAL
    steps: int = 3
    watched: int | None = None
    """The index of a step whose calls of modules are told, too."""
    double: bool = False
    """In float64, all of it."""
    mode: Mode = "training"
    detached: bool = False
    """What a step leaves on the model is detached from its graph before the next, as training loops do for models that
    keep hidden state."""
    draws_alike: bool = False
    """What is compiled draws the random numbers that it would without."""

"""The jobs that memopt gives a profiling subprocess, and the types of their answers; each travels as a line of JSON.

To add a job, write its class here and its function in ``measure/answers/``.  The class names both the type of the
answer and the function::

    class CountJob(StepJob[Counted]):                                    # answered by a ``Counted``, or a failure
        answered_by = "memopt_cli.measure.answers.dry_runs:count"        # called in the subprocess, with the job

The worker has no list of jobs: it imports the function that the job names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    Conditions,
    Counted,
    DeviceProfile,
    Fingerprint,
    FollowedSteps,
    GradientAgreement,
    InputSpec,
    Inspection,
    Measurement,
    ModelFacts,
    ModelSource,
    OnlineRule,
    PlaceName,
    Plan,
    RankLayout,
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
"""The empty plan, which stands for the model as the user wrote it."""

PER_TENSOR: Final = 512 << 20
"""Bytes of memory for an answer about each tensor or module of a model, of which there may be some 100,000."""

_NO_INPUTS, _DEFAULTS = InputSpec(source="not known yet"), StepSettings()

Data = Literal["full size", "small batch", "none"]
"""The steps that may run on real tensors: steps of any size; steps of a few samples, if the full step does not fit or
must not be tried; or none, in which case the parameters are tensors without data, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, inputs and step that a subprocess works on, sent once before all jobs."""

    source: ModelSource
    spec: InputSpec = _NO_INPUTS
    settings: StepSettings = _DEFAULTS
    data: Data = "full size"
    card: DeviceProfile | None = None
    """A device that this machine lacks, whose peaks and times are estimated; ``None`` to measure the step's device."""
    layer_runs: bool = False
    """Whether flat Sequentials are divided into runs of layers, each of which can be a segment."""
    tries_rows: bool = True
    """Whether segments in chunks test that no row of the batch changes the result of another.  The test takes as long
    as a few forwards, and is needless where all results of a plan are compared with the original's."""
    layout: RankLayout | None = None
    """The layout of the model over ranks, if the subprocess is one rank of many: of a predicted group, whose steps run
    without data, or of a real one.  ``None`` for a single device."""
    rank: int = 0
    """Index of the subprocess's rank."""
    compiler_cache: str | None = None
    """Folder for the cache of PyTorch's compiler; ``None`` for the user's own cache, or that of the sandbox."""
    place: PlaceName = "device"
    """Place where plans may send stored tensors; the speed of these copies is measured when a step is recorded."""
    offload_folder: str | None = None
    """Folder for the file of stored tensors, if ``place`` is a file; ``None`` for the folder of temporary files."""

    @property
    def wants_compiler(self) -> bool:
        """Whether PyTorch's compiler is needed, by models or steps without data; importing it takes long."""
        return self.data == "none" or self.spec != _NO_INPUTS


class Job(Generic[Answer]):
    """A question about the subject."""

    __slots__ = ()
    answered_by: ClassVar[str]
    """``module:function``, the function that the subprocess calls with the :class:`Subject` and the job."""
    most_bytes: ClassVar[int] = 16 << 20
    """Bytes of memory that reading the answer may take: its sender is not trusted."""


class StepJob(Job[Answer]):
    """A question for which steps of the loaded model run: its function takes the ``Bench`` of the model and the job."""

    __slots__ = ()
    compiles: ClassVar[bool] = False
    """Whether a plan that compiles the model does so for this job; others record, count or compare the eager step."""


def class_of(name: str) -> type[Job[Any]]:
    """Return the class of jobs called ``name``, which comes from the process that asks, and is trusted."""
    kind: type[Job[Any]] = globals()[name]
    return kind


def answer_of(kind: type[Job[Answer]]) -> type[Answer]:
    """Return the type of the answer to jobs of the class ``kind``."""
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    answer: type[Answer]
    (answer,) = get_args(base)
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionsJob(Job[Conditions]):
    """A question for the conditions (device, libraries, settings) under which the subprocess would measure."""

    answered_by: ClassVar[str] = "memopt_cli.measure.conditions:conditions"


# ---------------------------------------------------------------------------------------------- the model file


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeJob(Job[ModelFacts]):
    """A question for the facts of the model that a command needs; no step is run.

    The answer is a failure if the model's step cannot be recorded, or the plan or the replicas do not suit it.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:describe"
    most_bytes: ClassVar[int] = PER_TENSOR
    inputs: bool = True
    """Whether to find the inputs of the model's step."""
    spec: InputSpec | None = None
    """The description of the inputs that the user gave; ``None`` if they gave none."""
    remembered: InputSpec | None = None
    """The description that the user gave for an earlier command; ``None`` if none is known."""
    plan: Plan = ORIGINAL
    """A plan that must suit the model, or the answer is a failure."""
    replicas: bool = False
    """Whether copies of the model must be trainable as one, or the answer is a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob(Job[Inspection]):
    """A question for the contents of the file at ``path``, of which nothing is run."""

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:inspect"
    most_bytes: ClassVar[int] = PER_TENSOR
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob(Job[SnapshotFacts]):
    """A question for the memory in a pickle of ``torch.cuda.memory._snapshot()``, of which nothing is run."""

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:snapshot"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The answer that a model was sent completely, or that a saved file needs no more than its original."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob(Job[Saved]):
    """A request for the model as a file, with ``plan`` installed.

    The file comes in pieces before the answer.  This job names no function: the worker itself sends the pieces.
    """

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareJob(Job[Saved]):
    """A request to compare the saved file at ``path`` with its original.

    A subprocess that has run a stranger's model wrote the file.  Another subprocess, which runs nothing of either file,
    compares them; the answer is a failure if the saved one could do anything that the original could not.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.model_file:compare_saved"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChanged:
    """The answer to any job for which the model would be loaded from a file that has changed; it ends the command."""

    message: str
    hint: str


# ---------------------------------------------------------------------------------------------- recorded steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A recorded step, and how it was recorded."""

    trace: StepTrace
    fake: bool
    """Whether the step was recorded on fake tensors."""
    dry_run_bytes: int | None
    """The tensor peak of the step on fake tensors; ``None`` if the model does not run on them."""
    note: str = ""
    """The reason why the model does not run on fake tensors; empty if it does."""
    unknown: tuple[str, ...] = ()
    """Sentences on what is not known of the step, and why."""
    checkpoints: tuple[str, ...] = ()
    """Paths of the modules whose forward calls ``torch.utils.checkpoint``; empty under a plan."""

    @property
    def has_dry_runs(self) -> bool:
        """Whether plans can be counted without running them."""
        return self.dry_run_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob(StepJob[Traced]):
    """A request to record a step of the model."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:trace_step"
    most_bytes: ClassVar[int] = 1 << 30  # two hundred thousand operators
    fake: bool
    """Whether to record on fake tensors, if the model runs on them."""
    plan: Plan = ORIGINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordJob(StepJob[StepTrace]):
    """A request to record a step on data without the seconds of its operators, which only planning needs."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:record_step"
    most_bytes: ClassVar[int] = TraceJob.most_bytes
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob(StepJob[Counted]):
    """A question for the tensor peak under a plan."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:count"
    plan: Plan
    fake: bool
    """Whether to take a dry run, on fake tensors."""
    batch: int | None = None
    """Batch size; ``None`` for the size in the description of the inputs.  Workspaces are not known at other sizes, so
    a dry run gives the tensor peak alone."""
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Symbol -> size, for the sizes that differ from the description of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingFound:
    """The rule by which a module may run in chunks, or the reason why it may not."""

    rule: ChunkRule | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingJob(StepJob[ChunkingFound]):
    """A question for whether the module at ``path`` can run in chunks."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.chunks:try_in_chunks"
    path: str
    allow_inexact: bool = False
    """Whether chunks may differ in their batch statistics."""


# ---------------------------------------------------------------------------------------------- timed steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measurement, and the results of its steps."""

    measurement: Measurement
    fingerprint: Fingerprint
    not_as_planned: tuple[str, ...] = ()
    """A sentence on each segment that runs plainly or whole, because its forward does not allow the plan."""
    broken: str = ""
    """PyTorch's reason for a graph break, after which parts of a model that the plan compiles run uncompiled.  Empty if
    the compiled model is one graph, and where nothing is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob(StepJob[Measured]):
    """A request to time steps under a plan, and to measure its tensor peak and its allocated peak.

    The tensors of compiled code are seen by the allocator alone, so a plan that compiles the model has one peak.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:measure"
    most_bytes: ClassVar[int] = PER_TENSOR
    compiles: ClassVar[bool] = True
    plan: Plan
    steps: int = 3
    """Number of timed steps, at least."""
    warm_up: bool = True
    """Whether to take a step before the timed ones; without it, the first of them includes one-time costs."""
    limit_bytes: int | None = None
    """On CUDA, bytes that the allocator may hold, as on a smaller device; ``None`` for all of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedJob(StepJob[Fingerprint]):
    """A question for the results of the original's step with each parameter rounded up or down, at random."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:take_rounded"
    most_bytes: ClassVar[int] = PER_TENSOR


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedInTurns:
    """Wall times in seconds of steps of the original and under plans, taken in turns in one process."""

    original_times_s: tuple[float, ...]
    planned_times_s: tuple[tuple[float, ...], ...]
    """Times under each plan, in the order of the job; a plan far beyond the limit has only the first."""
    waited: float = 0.0
    """Share of the time in which the steps waited for a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeInTurnsJob(StepJob[TimedInTurns]):
    """A question for the slowdown of plans, by steps in turns: what else the machine does slows all of them."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:time_in_turns"
    plans: tuple[Plan, ...]
    turns: int = 3
    """Number of timed steps of the original, and of each plan, at least."""
    most_slowdown: float | None = None
    """The limit on the slowdown; a plan that is far beyond it after one turn is timed no more.  ``None``: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob(StepJob[BatchProbe]):
    """A question for the allocated peak at another batch size."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:probe"
    compiles: ClassVar[bool] = True
    plan: Plan
    batch: int
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Symbol -> size, for the sizes that differ from the description of the inputs."""
    limit_bytes: int | None = None
    """On CUDA, bytes that the allocator may hold, as on a smaller device; ``None`` for all of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasJob(StepJob[BatchProbe]):
    """A question for the allocated peak of a step of many copies of the model, trained as one."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.model_batching:probe"
    plan: Plan
    batch: int
    """Batch size of each copy."""
    replicas: int
    """Number of copies, at least 2."""
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Symbol -> size, for the sizes that differ from the description of the inputs."""
    limit_bytes: int | None = None
    """On CUDA, bytes that the allocator may hold, as on a smaller device; ``None`` for all of the device."""


# ---------------------------------------------------------------------------------------------- online learning


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob(StepJob[BatchProbe]):
    """A question for the allocated peak and the time of online learning from a sequence of ``steps`` time steps."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:probe"
    rule: OnlineRule
    symbol: str
    """Symbol of the time steps in the inputs."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementJob(StepJob[GradientAgreement]):
    """A question for the difference between the online gradient of a sequence and its gradient through time."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:compare"
    rule: OnlineRule
    symbol: str
    """Symbol of the time steps in the inputs."""
    steps: int


# ---------------------------------------------------------------------------------------------- many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class InGroup:
    """The measurements of all ranks, or the reason why one was lost."""

    outcome: RanksMeasured | RankLost


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob(Job[InGroup]):
    """A request to measure a step on the subject's rank of a real group, together with the other ranks."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.ranks:measure"
    most_bytes: ClassVar[int] = PER_TENSOR
    plan: Plan
    spec: InputSpec | None
    """The description that the user gave of the inputs of one rank's step; ``None`` if they gave none."""
    timeout_s: float
    """Seconds that one rank waits for another."""


# ---------------------------------------------------------------------------------------------- verified steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the inputs."""

    batch: int
    dims: dict[str, int] = field(default_factory=dict)
    """Symbol -> size, for the sizes that differ from the description of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesJob(StepJob[Sizes]):
    """A question for the least sizes of the inputs at which every segment of a plan still runs in all its chunks."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.verified:find_least_sizes"
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob(StepJob[Verification]):
    """A request to verify a plan against the original at a batch size."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.verified:verify_plan"
    plan: Plan
    batch: int
    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Symbol -> size, for the sizes that differ from the description of the inputs."""
    further: bool = False
    """Whether to compare the steps after the first, too."""
    asked_s: float = 0.0
    """Seconds of a step of the original at full size, if ``batch`` and ``dims`` are smaller: the slower it is, the
    longer the further steps may take."""


# ---------------------------------------------------------------------------------------------- consecutive steps


Mode = Literal["training", "eval", "as it came"]
"""The mode of the model's modules: training for all; eval for all, which draws fewer random numbers; or the mode in
which each was saved."""


Compiling = Literal["as they are", "drawing alike", "keeping all"]
"""The way in which compiled parts are compiled: as they are; to draw the random numbers of uncompiled ones; or to keep
all that backward needs, whatever PyTorch's memory budget is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowJob(StepJob[FollowedSteps]):
    """A question for the results of consecutive steps with an optimizer."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.followed:follow"
    most_bytes: ClassVar[int] = PER_TENSOR
    compiles: ClassVar[bool] = True
    plan: Plan = ORIGINAL
    steps: int = 3
    watched: int | None = None
    """Index of a step whose calls of modules are recorded, too; ``None`` for no step."""
    double: bool = False
    """Whether everything is computed in float64."""
    mode: Mode = "training"
    detached: bool = False
    """Whether hidden state is detached from its graph between steps, as the training loops of recurrent models do."""
    compiled: Compiling = "as they are"

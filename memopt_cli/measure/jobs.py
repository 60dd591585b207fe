"""The jobs that memopt gives a profiling subprocess, and the types of their answers; each travels as a line of JSON.

To add a job, write its class here and its function in ``measure/answers/``.  The class names both the type of the
answer and the function::

    class CountJob(SizedJob[StepPeaks]):                                # answered by a ``StepPeaks``, or a failure
        answered_by = "memopt_cli.measure.answers.dry_runs:count_step"  # called in the subprocess, with the job

The worker has no list of jobs: it imports the function that the job names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from memopt_cli.records import (
    BatchProbe,
    ChunkRule,
    Conditions,
    DeviceProfile,
    Fingerprint,
    FollowedSteps,
    GradientAgreement,
    InputSpec,
    Inspection,
    Measurement,
    ModelCall,
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
    StepPeaks,
    StepSettings,
    StepTrace,
    Verification,
)

Answer = TypeVar("Answer", covariant=True)

ORIGINAL = Plan()
"""The empty plan, which stands for the model as the user wrote it."""

PER_TENSOR: Final = 512 << 20
""":attr:`Job.max_bytes` of answers with an entry for each tensor or module, of which a model may have some 100,000."""

_NO_INPUTS, _DEFAULTS = InputSpec(source="not known yet"), StepSettings()

Data = Literal["full size", "small batch", "none"]
"""The steps that may run on real tensors.  ``full size``: steps of any size.  ``small batch``: steps of a few samples,
since the full step does not fit or must not be tried.  ``none``: no steps, and the parameters have no data either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, inputs and step that a subprocess works on, sent once before all jobs."""

    source: ModelSource
    spec: InputSpec = _NO_INPUTS
    settings: StepSettings = _DEFAULTS
    data: Data = "full size"
    card: DeviceProfile | None = None
    """A device that this machine lacks, so that peaks and times on it are estimated; ``None`` to measure the step."""
    layer_runs: bool = False
    """Whether flat Sequentials are divided into runs of layers, and each run can be a segment."""
    tries_rows: bool = True
    """Whether segments in chunks test that no row of the batch changes the result of another row.  The test takes as
    long as a few forwards, and is needless if all results of a plan are compared with the original's."""
    layout: RankLayout | None = None
    """The layout of the model over ranks, if the subprocess is one rank of many.  The group may be predicted, and its
    steps run without data, or real; ``None`` for a single device."""
    rank: int = 0
    """Index of the subprocess's rank."""
    compiler_cache: str | None = None
    """Folder for the cache of PyTorch's compiler; ``None`` for the sandbox's cache, or the user's if not confined."""
    place: PlaceName = "device"
    """Place where plans may send stored tensors; the speed of these copies is measured when a step is recorded."""
    offload_folder: str | None = None
    """Folder for the file of stored tensors, if ``place`` is a file; ``None`` for the folder of temporary files."""

    @property
    def wants_compiler(self) -> bool:
        """Whether PyTorch's compiler is needed, by models or steps without data; importing it takes long."""
        return self.data == "none" or self.spec != _NO_INPUTS


class Job(Generic[Answer]):
    """A task for the subprocess, which it answers with an ``Answer``."""

    __slots__ = ()
    answered_by: ClassVar[str]
    """``module:function``, the function that the subprocess calls with the :class:`Subject` and the job."""
    max_bytes: ClassVar[int] = 16 << 20
    """Maximum memory in bytes that reading the answer may take: its sender is not trusted."""


class StepJob(Job[Answer]):
    """A job that runs steps of the loaded model: its function takes the ``Bench`` of the model and the job."""

    __slots__ = ()
    compiles: ClassVar[bool] = False
    """Whether a plan that compiles the model does so for this job; others record, count or compare the eager step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedJob(StepJob[Answer]):
    """A job that runs steps at chosen sizes of the inputs."""

    dims: dict[str, int] = field(default_factory=dict, hash=False)
    """Symbol -> size, for the sizes that differ from the description of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakJob(SizedJob[BatchProbe]):
    """A job that measures the allocated peak of a step under a plan."""

    plan: Plan
    batch: int
    """Batch size, of each copy if there are several."""
    limit_bytes: int | None = None
    """On CUDA, bytes that the allocator may hold, as on a smaller device; ``None`` for all of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineStepJob(StepJob[Answer]):
    """A job that learns online from a sequence of ``time_steps``."""

    rule: OnlineRule
    symbol: str
    """Symbol of the time steps in the inputs."""
    time_steps: int


def class_of(name: str) -> type[Job[Any]]:
    """Return the class of jobs called ``name``; the name comes from the parent process, which is trusted."""
    cls: type[Job[Any]] = globals()[name]
    return cls


def answer_of(cls: type[Job[Answer]]) -> type[Answer]:
    """Return the type of the answer to jobs of the class ``cls``, which may be a union of types."""
    (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
    answer: type[Answer]
    (answer,) = get_args(base)
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionsJob(Job[Conditions]):
    """Reports the conditions under which the subprocess would measure: device, libraries and settings."""

    answered_by: ClassVar[str] = "memopt_cli.measure.conditions:conditions"


# ---------------------------------------------------------------------------------------------- the model file


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRead:
    """Digests of the user's code in a process."""

    digests: dict[str, str]
    """Name of a method, function or constant -> a digest that is equal in a process with the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeJob(Job[CodeRead]):
    """Imports the code of a model that is in the parent's memory, to compare it with the parent's."""

    answered_by: ClassVar[str] = "memopt_cli.measure.same_code:read_code"
    names: tuple[str, ...]
    """Qualified names of classes and functions of the model."""
    functions: tuple[str, ...] = ()
    """Functions that its step calls, as ``file.py:function``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeJob(Job[ModelFacts]):
    """Collects the facts of a model that a command needs, without running a step.

    The answer is a failure if the model's step cannot be recorded, or the plan or the replicas do not suit it.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.without_steps:describe_model"
    max_bytes: ClassVar[int] = PER_TENSOR
    inputs: bool = True
    """Whether to find the inputs of the model's step."""
    spec: InputSpec | None = None
    """The user's description of the inputs; ``None`` if not given."""
    remembered: InputSpec | None = None
    """The description from an earlier command; ``None`` if no command remembered one."""
    plan: Plan = ORIGINAL
    """A plan; the answer is a failure if it does not suit the model."""
    replicas: bool = False
    """Whether the answer is a failure if copies of the model cannot be trained as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectJob(Job[Inspection]):
    """Lists the contents of the file at ``path`` without running any of it."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.without_steps:inspect"
    max_bytes: ClassVar[int] = PER_TENSOR
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob(Job[SnapshotFacts]):
    """Reads the memory in a pickle of ``torch.cuda.memory._snapshot()`` without running any of it."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.without_steps:snapshot"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAnswer:
    """The size of a model file that was sent completely."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob(Job[SaveAnswer]):
    """Sends the model as a file, with ``plan`` installed.

    The file comes in pieces before the answer.  This job names no function: the worker itself sends the pieces.
    """

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAnswer:
    """The size of a saved file that can do no more than its original."""

    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareJob(Job[CompareAnswer]):
    """Checks that the saved file at ``path`` can do no more than its original.

    A subprocess that has run a stranger's model wrote the file.  Another subprocess, which runs nothing of either file,
    compares them.  The answer is a failure if the saved file could do more than the original.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.without_steps:compare_saved"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChanged:
    """The answer to any job if a file of the model has changed since it was first read; it ends the command."""

    message: str
    hint: str


# ---------------------------------------------------------------------------------------------- recorded steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAnswer:
    """A recorded step, and how it was recorded."""

    trace: StepTrace
    fake: bool
    """Whether the step was recorded on fake tensors."""
    dry_run_bytes: int | None
    """The tensor peak of the step on fake tensors; ``None`` if the model does not run on fake tensors."""
    note: str = ""
    """The reason why the model does not run on fake tensors."""
    unknown: tuple[str, ...] = ()
    """Sentences on facts of the step that are not known, and why."""
    checkpoints: tuple[str, ...] = ()
    """Paths of the modules whose forward calls ``torch.utils.checkpoint``; empty under a plan."""

    @property
    def has_dry_runs(self) -> bool:
        """Whether plans can be counted without running them."""
        return self.dry_run_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob(StepJob[TraceAnswer]):
    """Records a step of the model."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:trace_step"
    max_bytes: ClassVar[int] = 1 << 30  # two hundred thousand operators
    fake: bool
    """Whether to record on fake tensors, if the model runs on them."""
    plan: Plan = ORIGINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordJob(StepJob[StepTrace]):
    """Records a step on data without the seconds of its operators, which only planning needs."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:record_step"
    max_bytes: ClassVar[int] = TraceJob.max_bytes
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob(SizedJob[StepPeaks]):
    """Counts the tensor peak of a step under a plan."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.dry_runs:count_step"
    plan: Plan
    fake: bool
    """Whether to take a dry run, on fake tensors."""
    batch: int | None = None
    """Batch size; ``None`` for the size in the description of the inputs.  At other sizes workspaces are not known, so
    a dry run gives only the tensor peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallJob(StepJob[ModelCall]):
    """Runs a forward, without data if possible, and returns the kinds of its arguments and the place of its loss."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.calls:describe_call"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingJob(StepJob[ChunkRule | Refused]):
    """Tries whether the module at ``path`` can run in chunks, and returns the rule or the reason."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.chunks:try_in_chunks"
    path: str
    allow_inexact: bool = False
    """Whether chunks may differ in their batch statistics."""


# ---------------------------------------------------------------------------------------------- timed steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureAnswer:
    """A measurement, and the results of its steps."""

    measurement: Measurement
    fingerprint: Fingerprint
    not_as_planned: tuple[str, ...] = ()
    """A sentence on each segment that is not recomputed, or runs whole, because its forward does not allow the plan."""
    graph_break: str = ""
    """PyTorch's reason for a graph break, which leaves parts of a compiled model uncompiled; empty if the compiled
    model is one graph, or if nothing is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob(StepJob[MeasureAnswer]):
    """Times steps under a plan, and measures its tensor peak and its allocated peak.

    The tensors of compiled code are seen by the allocator alone, so a plan that compiles the model has one peak.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:measure"
    max_bytes: ClassVar[int] = PER_TENSOR
    compiles: ClassVar[bool] = True
    plan: Plan
    steps: int = 3
    """Minimum number of timed steps."""
    warm_up: bool = True
    """Whether to take a step before the timed steps; otherwise the first timed step includes one-time costs."""
    limit_bytes: int | None = None
    """On CUDA, bytes that the allocator may hold, as on a smaller device; ``None`` for all of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedJob(StepJob[Fingerprint]):
    """Takes a step of the original with each parameter rounded up or down at random, and returns its results."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:take_rounded"
    max_bytes: ClassVar[int] = PER_TENSOR


NEAR_SHARE = 0.05
"""Maximum relative distance from the limit at which a measured slowdown may in truth be on the other side of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeInTurnsAnswer:
    """Wall times in seconds of steps of the original and under plans, taken in alternation in one process."""

    original_times_s: tuple[float, ...]
    planned_times_s: tuple[tuple[float, ...], ...]
    """Times under each plan, in the order of the job; a plan far beyond the limit on the slowdown has a single time."""
    waited: float = 0.0
    """Share of the time in which the steps waited for a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeInTurnsJob(StepJob[TimeInTurnsAnswer]):
    """Times the original and plans in alternation, so that other work of the machine slows all of them equally."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:time_in_turns"
    plans: tuple[Plan, ...]
    turns: int = 3
    """Minimum number of timed steps of the original, and of each plan."""
    max_slowdown: float | None = None
    """Limit on the slowdown (a plan far beyond the limit is timed in one turn only); ``None`` for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob(PeakJob):
    """Measures the allocated peak of a step at another batch size."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.timed:probe"
    compiles: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasJob(PeakJob):
    """Measures the allocated peak of a step of many copies of the model, trained as one."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.model_batching:probe"
    replicas: int
    """Number of copies, at least 2."""


# ---------------------------------------------------------------------------------------------- online learning


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineJob(OnlineStepJob[BatchProbe]):
    """Measures the allocated peak and the time of learning online."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementJob(OnlineStepJob[GradientAgreement]):
    """Compares the online gradient of a sequence with its gradient through time."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.online:compare"


# ---------------------------------------------------------------------------------------------- many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob(Job[RanksMeasured | RankLost]):
    """Measures a step on the subject's rank of a real group, together with the other ranks.

    The answer has the measurements of all ranks, or the reason why one was lost.
    """

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.ranks:measure"
    max_bytes: ClassVar[int] = PER_TENSOR
    plan: Plan
    spec: InputSpec | None
    """The user's description of the inputs of one rank's step; ``None`` if not given."""
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
    """Finds the smallest sizes of the inputs at which every segment of a plan still runs in all its chunks."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.verified:find_smallest_sizes"
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob(SizedJob[Verification]):
    """Verifies a plan against the original at a batch size."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.verified:verify_plan"
    plan: Plan
    batch: int
    further_steps: bool = False
    """Whether to compare the steps after the first as well."""
    original_step_s: float = 0.0
    """Seconds of a step of the original at full size, if ``batch`` and ``dims`` are smaller: the slower that step is,
    the longer the further steps may take."""


# ---------------------------------------------------------------------------------------------- consecutive steps


Mode = Literal["training", "eval", "as saved"]
"""The mode of the model's modules.  ``eval`` puts all of them in eval mode, so that most use no random numbers;
``as saved`` keeps the mode of each module in the file."""


Compiling = Literal["unchanged", "same random numbers", "no recomputation"]
"""The way in which compiled parts are compiled.  With ``same random numbers``, they use the random numbers of
uncompiled parts.  With ``no recomputation``, they keep all that backward needs, whatever PyTorch's memory budget is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowJob(StepJob[FollowedSteps]):
    """Takes consecutive steps with an optimizer, and returns their results."""

    answered_by: ClassVar[str] = "memopt_cli.measure.answers.followed:follow"
    max_bytes: ClassVar[int] = PER_TENSOR
    compiles: ClassVar[bool] = True
    plan: Plan = ORIGINAL
    steps: int = 3
    watched_step: int | None = None
    """Index of the step whose calls of modules are recorded as well; ``None`` for no step."""
    double: bool = False
    """Whether everything is computed in float64."""
    mode: Mode = "training"
    detached: bool = False
    """Whether hidden state is detached from its graph between steps, as in the training loops of recurrent models."""
    compiled: Compiling = "unchanged"

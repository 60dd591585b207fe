"""The request and the results of ``memopt explain``: why a step does not fit, and changes that make it fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memopt_cli.records.batch import BatchRecommendation
from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.measurement import Breakdown
from memopt_cli.records.model import ModelSource
from memopt_cli.records.plan import Plan
from memopt_cli.records.profile import Instant
from memopt_cli.records.settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """The options of ``memopt explain``, resolved."""

    source: ModelSource | None
    """Model; ``None`` if there is only a log or a snapshot."""
    spec: InputSpec | None = None
    """Inputs; ``None`` to look for them next to the model, then guess."""
    settings: StepSettings = StepSettings()
    memory: int | float | None = None
    """Bytes, or a share of the free memory; ``None`` for the memory in the log or snapshot, or else 0.9."""
    log_path: str | None = None
    """Path of a file with the text of an out-of-memory error; ``None`` if not given."""
    snapshot_path: str | None = None
    """Path of a pickle of ``torch.cuda.memory._snapshot()``; ``None`` if not given."""
    timeout_s: float = 600.0
    """Time limit in seconds of each answer of a profiling subprocess."""
    optimizer_in_backward: bool = False
    """Whether plans may run the optimizer in backward."""
    flags: tuple[str, ...] = ()
    """Flags that describe the model, its inputs and its step; suggested commands repeat them."""

    def __post_init__(self) -> None:
        """Raise :class:`OptionError` for options that exclude, or lack, each other."""
        if self.optimizer_in_backward:
            self.settings.check_in_backward()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryText:
    """The facts in a message that memory ran out, in bytes; 0 for a number that it does not give."""

    asked_bytes: int
    """Bytes of the failed allocation; 0 for a process that was killed."""
    free_bytes: int = 0
    """Bytes of the device that were free."""
    allocated_bytes: int = 0
    """Bytes held by tensors; where :attr:`before_bytes` are known, by all that the process took since then."""
    before_bytes: int = 0
    """Bytes that the process held before it trained, for Python and its libraries; 0 if not known."""
    limit: str = ""
    """Source of the limit of the process; empty if not known."""
    reserved_bytes: int = 0
    """Bytes held by PyTorch's allocator and by no tensor."""
    event: str = ""
    """Sentence on another fact in the log: which process was killed, or which one holds the GPU; or empty."""
    is_of_gpu: bool = False
    """Whether memory of a GPU ran out."""
    is_of_loading: bool = False
    """Whether memory ran out where a DataLoader's workers load data, rather than in the step."""
    line: str = ""
    """Innermost line of the traceback outside libraries, ``train.py:31``; empty if there is none."""

    @property
    def available_bytes(self) -> int:
        """Bytes that a step is certain to get: bytes held by tensors and free bytes; 0 if unknown."""
        return self.allocated_bytes + self.free_bytes if self.allocated_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A module or line, and the memory that it holds."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """Facts from a snapshot of PyTorch's allocator."""

    allocated_bytes: int
    """Bytes held by tensors."""
    reserved_bytes: int
    """Bytes held by the allocator, unused ones included."""
    asked_bytes: int
    """Bytes of the failed allocation; 0 if it is not in the snapshot."""
    free_bytes: int
    """Bytes of the device that were free at the failure."""
    lines: tuple[Holder, ...]
    """Bytes by the line of code that made the tensors, most first; an empty name where no stack was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change that makes the step fit, in a run, or in a dry run where the step does not fit here."""

    change: Literal["plan", "offload", "fused optimizer", "optimizer in backward", "micro-batches", "autocast"]
    text: str
    command: str
    """Command to type, or code to write."""
    plan: Plan = field(default_factory=Plan)
    """Plan under which the step was run."""
    batch: int | None = None
    """Samples of a micro-batch; ``None`` for the whole batch."""
    recommendation: BatchRecommendation | None = None
    """Recommendation of the micro-batches; ``None`` for another change."""
    predicted_bytes: int | None
    """Peak of a dry run; ``None`` if there was none."""
    peak_bytes: int | None
    """Measured allocated peak; ``None`` if the step was not run."""
    seconds: float | None
    """Seconds for all samples of the step; ``None`` if the step was not run."""
    not_run: str = ""
    """Reason why the step was not run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The result of ``memopt explain``: who held the memory when it ran out, and changes that fit."""

    header: FileHeader | None
    """Header; ``None`` if there is no model."""
    limit_bytes: int
    """Memory limit; 0 if not known."""
    limit: str
    """Source of the limit."""
    needed_bytes: int
    """Predicted allocated peak of the unchanged step; without a model, the bytes held by the snapshot or the error."""
    asked_bytes: int = 0
    """Bytes of the failed allocation, according to the error; 0 if not known."""
    event: str = ""
    """Sentence on another fact in the log: which process was killed, or which one holds the GPU; or empty."""
    instant: Instant | None = None
    """First instant at which the step needs more than the limit; ``None`` if it fits, or there is no model."""
    counted_as: str = ""
    """Batch at which the step was counted, and missing options, where the step fits in spite of the error; or empty."""
    line: str = ""
    """Line of the model's code at that instant; for a step that fits, at its peak."""
    raised_at: str = ""
    """Line of the user's code in the traceback of the error; empty if there is none."""
    breakdown: Breakdown | None = None
    modules: tuple[Holder, ...] = ()
    """Activation bytes by the module that made them, most first."""
    lines: tuple[Holder, ...] = ()
    """Activation bytes by line of the model's code, or by the stacks of a snapshot."""
    suggestions: tuple[Suggestion, ...] = ()
    """Changes with which the step fits, fastest first, changes of rounding last."""
    refused: tuple[str, ...] = ()
    """Changes that were tried and do not fit, each with the reason."""
    notes: tuple[str, ...] = ()
    spent_s: float = 0.0

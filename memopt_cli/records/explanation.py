"""``memopt explain``: why a step does not fit, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.measurement import Breakdown
from memopt_cli.records.model import ModelSource
from memopt_cli.records.plan import Plan
from memopt_cli.records.profile import Instant
from memopt_cli.records.settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """Everything ``memopt explain`` was asked for."""

    source: ModelSource | None
    """``None``: there is a snapshot alone."""
    spec: InputSpec | None = None
    """``None``: look for it beside the model, then guess."""
    settings: StepSettings = StepSettings()
    memory: int | float | None = None
    """Bytes, or a share of what the device has free; ``None``: what the log or the snapshot tells, else 0.9."""
    log_path: str | None = None
    """A file with the text of an out-of-memory error."""
    snapshot_path: str | None = None
    """A pickle of ``torch.cuda.memory._snapshot()``."""
    timeout_s: float = 600.0
    """Time limit of one profiling subprocess answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryText:
    """What PyTorch's message of an out-of-memory error says, in bytes; 0: it does not say."""

    asked_bytes: int
    """What could not be had."""
    free_bytes: int = 0
    """Of the device."""
    allocated_bytes: int = 0
    """Held by tensors."""
    reserved_bytes: int = 0
    """Held by PyTorch's allocator, and by no tensor."""
    line: str = ""
    """``train.py:31``: the innermost line of the traceback that is no library's."""

    @property
    def available_bytes(self) -> int:
        """What a step surely has: what tensors held, and what was free; 0: not known."""
        return self.allocated_bytes + self.free_bytes if self.allocated_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds memory, and how much."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """What a snapshot of PyTorch's allocator tells."""

    allocated_bytes: int
    """Held by tensors."""
    reserved_bytes: int
    """Held by the allocator, for tensors or for none."""
    asked_bytes: int
    """What could not be had; 0: it is not in it."""
    free_bytes: int
    """Of the device, then."""
    lines: tuple[Holder, ...]
    """By the line of the code that made the tensors, most first; an empty name: no stack was recorded."""


Change = Literal["plan", "optimizer in backward", "micro-batches", "autocast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change with which the step fits; it was run."""

    change: Change
    text: str
    command: str
    """What to type, or to write."""
    plan: Plan = field(default_factory=Plan)
    """The one under which it was run."""
    batch: int | None = None
    """Of a micro-batch; ``None``: the whole."""
    predicted_bytes: int | None
    """By a dry run; ``None``: there was none."""
    peak_bytes: int
    """The allocated peak, as measured."""
    seconds: float
    """Of as many samples as the step has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Who held what when the memory ran out, and what would fit."""

    header: FileHeader | None
    """``None``: of a snapshot alone."""
    limit_bytes: int
    """0: not known."""
    limit: str
    """Where that comes from."""
    needed_bytes: int
    """The allocated peak of the step as it is, predicted; of a snapshot what was held."""
    asked_bytes: int = 0
    """What could not be had, as the error says."""
    instant: Instant | None = None
    """The first at which more is held than there is; ``None``: the step fits, or there is no model."""
    line: str = ""
    """Of the model's code, at that instant or in the traceback."""
    breakdown: Breakdown | None = None
    modules: tuple[Holder, ...] = ()
    """Activations by the module that made them, most first."""
    lines: tuple[Holder, ...] = ()
    """The same by line of the model's code, or of a snapshot's stacks."""
    suggestions: tuple[Suggestion, ...] = ()
    """Fastest first; what rounds comes last."""
    refused: tuple[str, ...] = ()
    """What was tried and does not fit, and why."""
    notes: tuple[str, ...] = ()
    spent_s: float = 0.0

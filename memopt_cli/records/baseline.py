"""The requests and results of ``memopt baseline``, ``check`` and ``compare``: the needs of a step, now and before."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import RankLayout
from memopt_cli.records.measurement import Breakdown
from memopt_cli.records.plan import Plan
from memopt_cli.records.profile import SavedTensor
from memopt_cli.records.request import StepRequest
from memopt_cli.records.settings import Precision, StepSettings
from memopt_cli.records.trace import Phase

Metric = Literal[
    "peak",
    "allocated",
    "step",
    "offloaded",
    "parameters",
    "gathered",
    "buffers",
    "gradients",
    "reduction",
    "optimizer",
    "inputs",
    "activations",
    "temporaries",
]

METRICS: tuple[Metric, ...] = typing.get_args(Metric)
"""Tensor peak, the allocated peak, the step time, the most bytes in host memory or on the disk; then each category of
bytes alive at the instant of the tensor peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The growth of a metric over the baseline that ``--fail-on`` allows."""

    text: str
    """Limit as typed: ``peak:5%``."""
    metric: Metric
    amount: float
    """Per cent of the baseline if relative; otherwise bytes, or seconds for ``step``."""
    relative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions under which a step was measured."""

    settings: StepSettings
    backend: tuple[str, ...]
    """Libraries with kernels for PyTorch (``mkldnn``, ``cudnn`` …).  They decide what is saved for backward."""
    device_name: str
    python: str
    threads: int
    layout: RankLayout | None = None
    """Layout of the model, for the predicted step of one rank; ``None`` if the step was measured on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlace:
    """The operator that runs when the tensor peak is reached."""

    op: str
    """Name of the operator; empty before the first."""
    module: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """One module's own part of the tensor peak, without the modules below it."""

    path: str
    class_name: str
    output_bytes: int
    """Bytes of the module's output tensors over all calls, alive at the peak or not."""
    held_bytes: dict[str, int]
    """Category -> bytes alive at the instant of the tensor peak; categories that hold nothing are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The needs of one training step."""

    plan: Plan
    """Plan under which the step ran."""
    tensor_peak_bytes: int
    allocated_peak_bytes: int
    step_s: float
    """Median wall time of a step; it depends on the machine and its load."""
    breakdown: Breakdown
    """Bytes alive at the instant of the tensor peak."""
    peak: PeakPlace | None = None
    """Operator at the peak; ``None`` if no step was recorded, such as in a summary."""
    modules: tuple[ModuleBytes, ...] = ()
    """Modules in the order of first call."""
    saved: tuple[SavedTensor, ...] = ()
    """Largest tensors that autograd keeps for backward."""
    elsewhere_bytes: int = 0
    """Largest number of bytes that wait in host memory or on the disk, where the plan sends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShorterStep:
    """The needs of a step on a shorter input, at the largest length of one range of a plan by length."""

    dim: str
    """Symbol of the dimension whose size is the length."""
    size: int
    memory: StepMemory
    """Needs at that length, with the plan used there."""

    @property
    def name(self) -> str:
        """Length as text: ``S=512``."""
        return f"{self.dim}={self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The recorded needs of a training step, and the conditions of the measurement."""

    header: FileHeader
    conditions: Conditions | None
    """Conditions; ``None`` if read from a summary, which lacks them."""
    memory: StepMemory
    shorter: tuple[ShorterStep, ...] = ()
    """Steps of a plan by length, at the largest length of each range but the last."""
    plan_path: str = ""
    """Plan as named with ``--plan``; empty if the model carries the plan or has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """The result of ``memopt baseline``."""

    baseline: Baseline
    file: str
    notes: tuple[str, ...] = ()
    """Notes on the folders of the user's code, and on lengths of a plan by length that are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact that differs between two measurements."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A metric before and after, in bytes, or seconds for ``step``."""

    metric: Metric
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One limit, and whether the step exceeds it."""

    limit: Limit
    change: Change
    exceeded: bool
    at: str = ""
    """Length, ``S=512``, of a shorter range of a plan by length; empty at the length of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """A module that holds more or less at the tensor peak than before, the modules below it left out."""

    path: str
    """Path of the module; ``(the step)`` for the inputs and the state of the optimizer, which no module holds."""
    was: str
    """Path of the module before, if it has changed; else empty."""
    class_name: str
    before_bytes: int
    after_bytes: int
    growth_bytes: dict[str, int]
    """Category -> bytes that the module holds more than before; only categories that grew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """A group of modules with the same classes and bytes under another path."""

    before: str
    """Beginning of the modules' paths before; empty for the root."""
    after: str
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The paths of segments that differ between two plans, or are in only one of them."""

    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    packing: Literal["same", "dropped", "added"] = "same"
    """Change of packing outside segments."""
    sending: Literal["same", "dropped", "added"] = "same"
    """Change of sending tensors that are saved outside segments to another place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGrowth:
    """A tensor kept for backward, and its size before, when it was smaller."""

    saved: SavedTensor
    before_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A training step's needs now and before, whether limits are exceeded, and what explains the changes."""

    before: FileHeader
    after: FileHeader
    changes: tuple[Change, ...]
    """Changes of all metrics."""
    verdicts: tuple[Verdict, ...]
    """Verdicts on the limits; empty if there were none."""
    modules: tuple[ModuleChange, ...]
    """Modules that changed, largest growth first."""
    new_saved: tuple[SavedTensor, ...]
    """Tensors among the largest kept for backward that had no counterpart before."""
    grown_saved: tuple[SavedGrowth, ...] = ()
    """Tensors among the largest kept for backward that were smaller before."""
    renames: tuple[Rename, ...]
    plan: PlanChange
    peak_before: PeakPlace | None
    peak_after: PeakPlace | None
    peak_moved: bool
    """Whether the peak is in another operator or module; renames do not count."""
    unlike: tuple[Difference, ...]
    """Differences in the step itself (inputs, settings), so that changes may not come from the model; a check refuses
    them."""
    surroundings: tuple[Difference, ...]
    """Differences in versions and machines; most do not change the tensor peak."""
    layout: RankLayout | None = None
    """Layout of the model now, for predicted peaks of one rank; ``None`` for one device."""
    code: str = ""
    """Folders from which the model now imports the user's code: ``seglab from src``; empty if it imports none."""
    at: str = ""
    """Length, ``S=512``, of a shorter range of a plan by length; empty at the length of the inputs."""
    shorter: tuple[Comparison, ...] = ()
    """Comparisons at the largest length of each shorter range of a plan by length."""
    notes: tuple[str, ...] = ()
    """Notes on the step that was measured now, such as on layers that it skipped."""

    @property
    def parts(self) -> tuple[Comparison, ...]:
        """This comparison, and the comparisons of shorter inputs."""
        return (self, *self.shorter)

    @property
    def exceeded(self) -> tuple[Verdict, ...]:
        """Verdicts of limits that were exceeded, at any length."""
        return tuple(verdict for part in self.parts for verdict in part.verdicts if verdict.exceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRequest(StepRequest):
    """The options of ``memopt baseline``, resolved."""

    settings: StepSettings = StepSettings()
    plan_path: str | None = None
    """Path of a plan to run the step under; ``None`` for the plan that the file carries, if any."""
    layout: RankLayout | None = None
    """Layout of ranks, where one rank is predicted without data; ``None`` for one device."""
    output: str = "memopt-baseline.json"
    force: bool = False
    """Whether an existing file may be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest(StepRequest):
    """The options of ``memopt check``, resolved; ``None`` stands for the value in the baseline."""

    baseline_path: str
    limits: tuple[Limit, ...]
    spec: InputSpec | None = None
    device: str | None = None
    precision: Precision | None = None
    loss: str | None = None
    optimizer: str | None = None
    seed: int | None = None
    plan_path: str | None = None
    """Path of a plan to run the step under; ``None`` for the plan that the file carries, if any."""
    flags: tuple[str, ...] | None = None
    """Flags that describe the model, its inputs and its step; suggested commands repeat them; ``None`` for a
    call from Python."""
    layout: RankLayout | None = None

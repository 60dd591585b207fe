"""``memopt baseline``, ``check`` and ``compare``: what a step needs, against what it needed before."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import Layout
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
"""Tensor peak, allocated peak and step time, and each category of bytes alive at the instant of the tensor peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much a metric may grow over its baseline (``--fail-on``)."""

    text: str
    """As typed: ``peak:5%``."""
    metric: Metric
    amount: float
    """Percent of the baseline if relative; else bytes, of ``step`` seconds."""
    relative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under what a step was measured."""

    settings: StepSettings
    backend: tuple[str, ...]
    """Libraries that PyTorch may take kernels from (``mkldnn``, ``cudnn`` …): with others, other tensors are saved."""
    device_name: str
    python: str
    threads: int
    layout: Layout | None = None
    """How the model was spread; the step is that of one rank, predicted.  ``None``: it was measured on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlace:
    """What runs when the tensor peak is reached."""

    op: str
    """Empty before the first operator."""
    module: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """One module's own part of the tensor peak, the modules below it left out."""

    path: str
    class_name: str
    output_bytes: int
    """Of its output tensors, over all calls; whatever the peak."""
    held_bytes: dict[str, int]
    """Category -> bytes alive at the instant of the tensor peak; categories that hold nothing are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What one training step needs."""

    plan: Plan
    """What the step ran under."""
    tensor_peak_bytes: int
    allocated_peak_bytes: int
    step_s: float
    """Median wall time of a step; it depends on the machine and its load."""
    breakdown: Breakdown
    """At the instant of the tensor peak."""
    peak: PeakPlace | None = None
    """``None`` where no step was recorded, as in a summary."""
    modules: tuple[ModuleBytes, ...] = ()
    """In the order of first call."""
    saved: tuple[SavedTensor, ...] = ()
    """The largest that autograd keeps for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShorterStep:
    """What a step needs whose input is shorter: as long as one range of a plan by length goes."""

    dim: str
    """The symbol of the dimension whose size is the length."""
    size: int
    memory: StepMemory
    """Its plan is what acts at that length."""

    @property
    def name(self) -> str:
        """``S=512``."""
        return f"{self.dim}={self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What one training step needed when it was last looked at, and under what conditions."""

    header: FileHeader
    conditions: Conditions | None
    """``None``: read from a summary, which does not say."""
    memory: StepMemory
    shorter: tuple[ShorterStep, ...] = ()
    """Of a plan by length, at the largest length of each range that ends before that of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """What ``memopt baseline`` did."""

    baseline: Baseline
    file: str
    notes: tuple[str, ...] = ()
    """Of a plan by length, which lengths are not recorded, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not the same in two measurements."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A metric before and after: bytes, of ``step`` seconds."""

    metric: Metric
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One limit, and whether the step stays within it."""

    limit: Limit
    change: Change
    exceeded: bool
    at: str = ""
    """Of a plan by length, at which length if that is not the one of the inputs: ``S=512``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """A module that holds more or less at the tensor peak than before; its own bytes, those below it left out."""

    path: str
    was: str
    """Its path before, if that was another; else empty."""
    class_name: str
    before_bytes: int
    after_bytes: int
    growth_bytes: dict[str, int]
    """Category -> how much more it holds, where that is not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """Modules with the same classes and bytes under another path."""

    before: str
    """What their paths began with; empty: the root."""
    after: str
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Paths of segments that one of two plans has alone, or that both have in different ways."""

    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    packing: Literal["same", "dropped", "added"] = "same"
    """Of what is saved outside of segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one training step needs, against what it needed before, and why."""

    before: FileHeader
    after: FileHeader
    changes: tuple[Change, ...]
    """Of every metric."""
    verdicts: tuple[Verdict, ...]
    """None if there were no limits."""
    modules: tuple[ModuleChange, ...]
    """Largest growth first."""
    new_saved: tuple[SavedTensor, ...]
    """Of the largest tensors kept for backward, those without a counterpart before."""
    renames: tuple[Rename, ...]
    plan: PlanChange
    peak_before: PeakPlace | None
    peak_after: PeakPlace | None
    peak_moved: bool
    """It is reached in another operator or module; a rename is no move."""
    unlike: tuple[Difference, ...]
    """What the two would have to agree in to tell of the model alone; never any in a check."""
    surroundings: tuple[Difference, ...]
    """Versions and machines that differ; most of them leave the tensor peak alone."""
    layout: Layout | None = None
    """How the model is spread now; both peaks are predicted, of one rank.  ``None``: over one device."""
    at: str = ""
    """As of its verdicts."""
    shorter: tuple[Comparison, ...] = ()
    """Of a plan by length, at the largest length of each shorter range."""

    @property
    def parts(self) -> tuple[Comparison, ...]:
        """This one, and those of shorter inputs."""
        return (self, *self.shorter)

    @property
    def exceeded(self) -> tuple[Verdict, ...]:
        """The limits that were passed, at any length."""
        return tuple(verdict for part in self.parts for verdict in part.verdicts if verdict.exceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRequest(StepRequest):
    """Everything ``memopt baseline`` was asked for."""

    settings: StepSettings = StepSettings()
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the one that the file carries, if it does."""
    layout: Layout | None = None
    """Predict the step of one rank of many, without data."""
    output: str = "memopt-baseline.json"
    force: bool = False
    """An existing file may be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest(StepRequest):
    """Everything ``memopt check`` was asked for; ``None``: as in the baseline."""

    baseline_path: str
    limits: tuple[Limit, ...]
    spec: InputSpec | None = None
    device: str | None = None
    precision: Precision | None = None
    loss: str | None = None
    optimizer: str | None = None
    seed: int | None = None
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the one that the file carries, if it does."""
    layout: Layout | None = None

"""``memopt profile``: where the memory of a step goes."""

from __future__ import annotations

from dataclasses import dataclass

from memopt_cli.records.device import DeviceEstimate, DeviceProfile
from memopt_cli.records.header import FileHeader
from memopt_cli.records.layout import Layout
from memopt_cli.records.measurement import Breakdown, Measurement, OutOfMemory, PhasePeak
from memopt_cli.records.plan import CompressorName, Plan
from memopt_cli.records.rank import RankPrediction
from memopt_cli.records.request import StepRequest
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.trace import Phase, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest(StepRequest):
    """Everything ``memopt profile`` was asked for."""

    settings: StepSettings = StepSettings()
    plan_path: str | None = None
    """A plan to run the step under; ``None``: the model as it is."""
    fake: bool = False
    """Estimate on tensors without data; run no step at full size."""
    card: DeviceProfile | None = None
    """A device that is not here, for which the step is estimated without being run."""
    layout: Layout | None = None
    """Predict the step of one rank of many, without data."""
    rank: int | None = None
    """Which one; ``None``: the first and the last, and the larger of them in full."""
    backend: str | None = None
    """Measure the step compiled by this backend of ``torch.compile``, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A step of a model that is given to ``torch.compile`` as a whole, once it is compiled."""

    backend: str
    allocated_peak_bytes: int
    """As the allocator tells it; tensors within compiled code are seen by nobody else."""
    step_s: float
    broken: str
    """Why the model, without a plan, is not one graph, as PyTorch says it; empty if it is.  Of one that is not, parts
    run as they are, and maybe all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment of a recorded step: while an operator runs."""

    allocated_bytes: int
    """Storages alive, and the operator's workspace."""
    op: int
    """Index into the trace's operators; -1: before the first."""
    name: str
    """The operator; empty before the first."""
    phase: Phase
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUse:
    """One module's part of the memory, the modules below it included."""

    path: str
    class_name: str
    calls: int
    held_bytes: int
    """Activations and temporaries that it holds at the instant of the allocated peak."""
    saved_bytes: int
    """What forward leaves alive for backward."""
    seconds: float
    """Its operators in forward and backward; 0 where only tensors without data ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that autograd keeps for backward."""

    nbytes: int
    made_by: str
    """The operator that made it; empty for what existed before the step."""
    module: str
    """Of the operator that saved it first."""
    op: str
    """The operator that saved it first."""
    savers: int
    """How many operators did."""
    compressor: CompressorName
    """The smallest codec that holds its contents exactly."""
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Where the memory of one training step goes."""

    header: FileHeader
    plan: Plan
    measurement: Measurement | OutOfMemory | None
    """``None``: the step was not to be run at full size."""
    fake: bool
    """The step was recorded on tensors without data."""
    tensor_peak_bytes: int
    peak: Instant
    """Of the allocated peak, as recorded."""
    breakdown: Breakdown
    """At that instant."""
    workspace_bytes: int
    """What the operator of that instant holds for itself."""
    modules: tuple[ModuleUse, ...]
    """In the order of first call."""
    saved: tuple[SavedTensor, ...]
    """Largest first."""
    phases: tuple[PhasePeak, ...]
    """Of the recorded step, in turn."""
    live_bytes: tuple[int, ...]
    """Storages alive before the first operator, and when each has run."""
    flops: int
    notes: tuple[str, ...]
    trace: StepTrace
    estimate: DeviceEstimate | None = None
    """On a device that is not here, whose times the recorded operators then have; ``None``: none was asked for."""
    compiled: CompiledStep | None = None
    """The same step compiled; ``None``: that was not asked for."""
    ranks: tuple[RankPrediction, ...] = ()
    """Of a step that is spread over many ranks: those that were asked for.  The rest is of the first that is largest.
    """

    @property
    def rank(self) -> RankPrediction | None:
        """The rank whose step this is; ``None`` of a step on one device."""
        return max(self.ranks, key=lambda rank: rank.tensor_peak_bytes, default=None)

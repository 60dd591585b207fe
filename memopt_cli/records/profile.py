"""The request and the result of ``memopt profile``: where the memory and the time of a step go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt_cli.errors import OptionError
from memopt_cli.records.device import DeviceEstimate, DeviceProfile
from memopt_cli.records.header import FileHeader
from memopt_cli.records.layout import RankLayout
from memopt_cli.records.measurement import Breakdown, Measurement, OutOfMemory, PhasePeak
from memopt_cli.records.plan import CompressorName, Plan
from memopt_cli.records.rank import RankPrediction
from memopt_cli.records.request import StepRequest
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.trace import Phase, StepTrace

SEGMENT = "a segment"
"""Name of a segment that keeps a tensor for backward, in place of autograd."""
PACKING = "packing"
"""Name of the packing of a tensor outside segments, in place of autograd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest(StepRequest):
    """The options of ``memopt profile``, resolved."""

    settings: StepSettings = StepSettings()
    plan_path: str | None = None
    """Path of a plan to run the step under; ``None`` for the model as it is."""
    fake: bool = False
    """Whether to estimate on tensors without data, without any run at full size."""
    card: DeviceProfile | None = None
    """Device for which the step is estimated, since this machine lacks it; ``None`` for the device here."""
    layout: RankLayout | None = None
    """Layout of ranks, where one rank is predicted without data; ``None`` for one device."""
    rank: int | None = None
    """Rank to predict; ``None`` for the first and the last; the larger one is shown in full."""
    backend: str | None = None
    """Backend of ``torch.compile`` to measure the step with as well; ``None`` if it is not compiled."""

    @property
    def runs(self) -> bool:
        """Whether the step is run here at full size."""
        return self.card is None and self.layout is None and not self.fake

    def __post_init__(self) -> None:
        """Raise :class:`OptionError` for a compiled step that is not run."""
        if self.backend is not None and not self.runs:
            flag = "`--for`" if self.card else "`--ranks`" if self.layout else "`--fake`"
            raise OptionError(
                f"`--compile` measures the step, but {flag} runs none here", hint="Leave out `--compile`."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """The measured step of a model that ``torch.compile`` has compiled as a whole."""

    backend: str
    allocated_peak_bytes: int
    """Peak by the allocator; nothing else sees tensors in compiled code."""
    step_s: float
    broken: str
    """PyTorch's reason for a graph break in the model without a plan, after which some parts, or all, run uncompiled;
    empty if the model is one graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment of a recorded step, while an operator runs."""

    allocated_bytes: int
    """Bytes of storages alive, and of the operator's workspace."""
    op: int
    """Index of the operator in the trace; -1 before the first."""
    name: str
    """Name of the operator; empty before the first."""
    phase: Phase
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUse:
    """One module's part of the memory and time, children included."""

    path: str
    class_name: str
    calls: int
    held_bytes: int
    """Activations and temporaries that the module holds at the instant of the allocated peak."""
    saved_bytes: int
    """Bytes that the module's forward leaves alive for backward."""
    seconds: float
    """Seconds of the module's operators in forward and backward; 0 where only tensors without data ran."""


TimeUseName = Literal[
    "forward", "backward", "clip", "update", "recomputation", "packing and copies", "outside operators"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """One part of the time of a step."""

    name: TimeUseName
    """Name of the part: a phase without what a plan adds to it, a part that the plan adds, or the time between
    operators."""
    segment: str | None = None
    """Path of the segment that is recomputed; ``None`` for the other parts."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that autograd, or the plan in its place, keeps for backward."""

    nbytes: int
    made_by: str
    """Operator that made the storage; empty if it existed before the step."""
    module: str
    """Path of the module of the first operator that saved the storage."""
    op: str
    """First operator that saved the storage; or :data:`SEGMENT` or :data:`PACKING` if that part of a plan keeps it.
    Under a plan that packs, for a storage that is not packed: the last forward operator that reads it."""
    savers: int
    """Number of operators or segments that keep the storage."""
    compressor: CompressorName
    """Smallest compressor that holds the contents exactly."""
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The account of the memory of one training step."""

    header: FileHeader
    plan: Plan
    measurement: Measurement | OutOfMemory | None
    """Measurement; ``None`` if the step was not run at full size."""
    fake: bool
    """Whether the step was recorded on tensors without data."""
    tensor_peak_bytes: int
    peak: Instant
    """Instant of the recorded allocated peak."""
    breakdown: Breakdown
    """Bytes alive at that instant."""
    workspace_bytes: int
    """Workspace of the operator at that instant."""
    modules: tuple[ModuleUse, ...]
    """Modules in the order of first call."""
    saved: tuple[SavedTensor, ...]
    """Tensors kept for backward, largest first."""
    phases: tuple[PhasePeak, ...]
    """Phases of the recorded step, in order."""
    live_bytes: tuple[int, ...]
    """Bytes alive before the first operator, and after each."""
    flops: int
    times: tuple[TimeUse, ...]
    """Parts of the time of a step, recomputation by segment; empty where only tensors without data ran."""
    notes: tuple[str, ...]
    trace: StepTrace
    estimate: DeviceEstimate | None = None
    """Estimate for the device of ``--for``, which also gives the operators' times; ``None`` without ``--for``."""
    compiled: CompiledStep | None = None
    """Same step compiled; ``None`` without ``--compile``."""
    ranks: tuple[RankPrediction, ...] = ()
    """Predictions for ranks; empty without ``--ranks``.  With it, the other fields are about :attr:`rank`."""

    @property
    def rank(self) -> RankPrediction | None:
        """Rank whose step this is, the first one with the largest peak; ``None`` for a step on one device."""
        return max(self.ranks, key=lambda rank: rank.tensor_peak_bytes, default=None)

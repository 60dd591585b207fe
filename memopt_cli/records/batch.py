"""How large a step fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from memopt_cli.records.device import DeviceProfile
from memopt_cli.records.header import FileHeader
from memopt_cli.records.layout import Layout
from memopt_cli.records.learning import StrategyName
from memopt_cli.records.request import StepRequest
from memopt_cli.records.search import SearchOverrides
from memopt_cli.records.settings import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProbe:
    """One point of the memory model: the allocated peak at a batch size."""

    batch: int
    """Of each replica."""
    allocated_peak_bytes: int
    step_s: float
    """Wall time of a step."""
    update_s: float = 0.0
    """Of it, what clipping and the optimizers took, as far as that was measured."""
    replicas: int = 1
    """Copies of the model that took the step at once."""
    route: str = ""
    """What ran the copies (``BatchModule``); empty for one, which runs as it is."""

    @property
    def samples_per_s(self) -> float:
        """Of all copies together."""
        return self.replicas * self.batch / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """How large a batch fits: ``peak = intercept + slope * batch`` near the answer."""

    recommended_batch: int
    """The largest batch that was run and stayed within the budget."""
    fastest_batch: int
    """Of the batches that did, the one with most samples per second."""
    estimated_batch: int
    """The largest batch by the model; equal to ``recommended_batch`` when that was verified by a run."""
    probes: tuple[BatchProbe, ...]
    intercept_bytes: float
    slope_bytes: float
    """Bytes per sample, near the recommended batch."""
    budget_bytes: int
    device_bytes: int
    limited_by: str
    """What bounds the recommendation: the budget, the longest step that may be run, or a failed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """How large a batch would fit by the model; none was run."""

    batch: int
    predicted_peak_bytes: int
    budget_bytes: int
    is_limited_by_memory: bool = True
    """Whether anybody might train with so large a batch; if not, memory is no reason to choose another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatchFits:
    """Not even the smallest batch fits."""

    batch: int
    """The smallest."""
    budget_bytes: int
    reason: str
    """What became of it."""


BatchOutcome = BatchAdvice | BatchEstimate | NoBatchFits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAdvice:
    """How many copies of a model train fastest as one, each with the batch that is described."""

    fastest: int
    """Number of copies with most samples per second, of those within the budget."""
    probes: tuple[BatchProbe, ...]
    """One run for each number of copies that was tried, ascending; the last may be over the budget."""
    limited_by: str
    """Why no more copies were tried."""

    @property
    def best(self) -> BatchProbe:
        """The run of the fastest."""
        return next(run for run in self.probes if run.replicas == self.fastest)


Objective = Literal["max", "throughput"]

LONGEST_STEP_S: Final = 60.0
"""How long a step may take that is run to find a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRange:
    """Sizes of a symbol, doubled from the first to the last."""

    symbol: str
    low: int
    high: int

    def sizes(self) -> tuple[int, ...]:
        """``low``, twice that … and ``high``."""
        doubled = [self.low]
        while doubled[-1] * 2 < self.high:
            doubled.append(doubled[-1] * 2)
        return tuple(dict.fromkeys([*doubled, self.high]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """What fits in one case."""

    planned: bool
    """Under the plan."""
    dims: dict[str, int]
    """The size of the symbol that has a range; empty without one."""
    outcome: BatchOutcome
    """With copies: the batch of each of the fastest number of them."""
    replicas: ReplicaAdvice | None = None
    """``None``: not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """How a step of the optimizer is made of steps that fit."""

    global_batch: int
    """Samples per optimizer step, as asked for: by ``--global-batch``, or by ``--accumulate`` as so many batches."""
    batch: int
    """Of one forward and backward; it was run."""
    steps: int
    """Forward and backward passes per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBatching:
    """What an epoch of the user's sequences costs, batched one way."""

    name: str
    batch: int | None
    """Sequences of a batch; ``None``: as many as ``max_tokens`` allows."""
    max_tokens: int | None
    """Positions of a batch, padding too; ``None``: the batch has a number of sequences."""
    batches: int
    waste: float
    """Share of computed positions that are padding."""
    peak_bytes: int
    """Of the batch that needs most, by the fit."""
    epoch_s: float
    """By the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest(StepRequest):
    """Everything ``memopt recommend-batch`` was asked for."""

    settings: StepSettings = StepSettings()
    memory: int | float = 0.9
    """Bytes, or a share of the memory that the device has free."""
    objective: Objective = "max"
    global_batch: int | None = None
    """Samples per optimizer step."""
    multiple_of: int = 1
    dim_range: DimRange | None = None
    replicas: DimRange | None = None
    """Numbers of copies of the model; ``None``: one model is trained."""
    plan_path: str | None = None
    """A plan to recommend for, too."""
    lengths_path: str | None = None
    """A file of sequence lengths."""
    strategies: tuple[StrategyName, ...] = ()
    """Ways to learn sequences, to be compared over ``dim_range`` instead."""
    search: SearchOverrides | None = None
    """Look for the batch and the plan that train fastest together, with these limits of plans."""
    card: DeviceProfile | None = None
    """Estimate for a device that is not here; nothing is run at full size."""
    fake: bool = False
    """Estimate on tensors without data; nothing is run at full size."""
    layouts: tuple[Layout, ...] = ()
    """Of each, predict one rank; empty: one device."""
    search_limit_s: float | None = None
    """No pair is tried any more when that search has taken this long: the best so far is taken."""
    output: str | None = None
    """Path of the batch configuration; ``None``: none is written, or with a ``search`` one beside the model."""
    force: bool = False
    longest_step_s: float = LONGEST_STEP_S
    """No step that is run is to take longer."""

    @property
    def runs(self) -> bool:
        """Whether steps are run here at full size."""
        return self.card is None and not self.fake and not self.layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecommendation:
    """What ``memopt recommend-batch`` found."""

    header: FileHeader
    objective: Objective
    limit: str
    """The memory limit, and what sets it."""
    rows: tuple[BatchRow, ...]
    """Without the plan first; sizes ascending."""
    chosen: int
    """Index of the row that the recommendation is of: of the largest size at which a batch was run, the better by the
    objective."""
    batch: int
    """By the objective, of that row."""
    verified: bool
    """It was run; if not, it is an estimate."""
    accumulation: Accumulation | None
    """``None``: not asked for."""
    lengths: tuple[LengthBatching, ...]
    """Ways to batch the user's sequences; empty: not asked for."""
    notes: tuple[str, ...]
    probes: int
    """Steps that were run on data, failed ones too."""
    dry_runs: int
    files: tuple[str, ...]
    spent_s: float
    interrupted: bool = False
    """Something was still to be run; what is recommended is the best of what had been."""
    step: StepSettings = StepSettings()
    """How a step was run: a training script that is to take its memory and its time does the same."""
    plan: str = ""
    """Path of the plan's file; empty: no plan was asked for, or the model's file carries it."""
    card: str = ""
    """The device that is not here, for which it is an estimate; empty: the one here."""

"""The request and the results of ``memopt recommend-batch``: the largest or fastest batch that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from memopt_cli.errors import OptionError
from memopt_cli.records.device import DeviceProfile
from memopt_cli.records.header import FileHeader
from memopt_cli.records.layout import RankLayout
from memopt_cli.records.learning import StrategyName
from memopt_cli.records.request import StepRequest
from memopt_cli.records.search_options import ResolvedSearch
from memopt_cli.records.settings import StepSettings

LONGEST_STEP_S: Final = 60.0
"""Default of the longest step that is run to find a batch, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProbe:
    """A step that was run at one batch size: one point of the memory model ``peak = intercept + slope * batch``."""

    batch: int
    """Batch size of each copy of the model."""
    allocated_peak_bytes: int
    step_s: float
    """Wall time of a step in seconds."""
    update_s: float = 0.0
    """Seconds of the step that clipping and the optimizers took; 0 if not measured."""
    replicas: int = 1
    """Number of copies of the model that took the step together."""
    route: str = ""
    """Class that ran the copies (``BatchModule``); empty for a single model."""
    waited: float = 0.0
    """Share of the time in which the steps waited for a processor, because the machine was busy."""

    @property
    def samples_per_s(self) -> float:
        """Samples a second of all copies together."""
        return self.replicas * self.batch / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """The largest batch that fits; ``peak = intercept + slope * batch`` near it."""

    recommended_batch: int
    """Largest batch that was run and stayed within the budget."""
    fastest_batch: int
    """Batch with most samples per second, of those that were run and stayed within the budget."""
    estimated_batch: int
    """Largest batch by the memory model; equal to ``recommended_batch`` if no larger one is expected to fit."""
    probes: tuple[BatchProbe, ...]
    intercept_bytes: float
    slope_bytes: float
    """Bytes per sample, near the recommended batch."""
    budget_bytes: int
    device_bytes: int
    limited_by: str
    """Limit of the recommendation: the budget, the longest step that may be run, or a failed run."""
    without_optimizer: bool = False
    """Whether an optimizer's state would add to every peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEstimate:
    """The largest batch that fits according to the memory model; no batch was run to find it."""

    batch: int
    predicted_peak_bytes: int
    budget_bytes: int
    is_limited_by_memory: bool = True
    """Whether memory limits the batch: ``False`` if even batches larger than anybody trains with would fit."""
    because: str = ""
    """Reason why memory does not limit the batch."""
    is_measured: bool = False
    """Whether a step at this batch was run, and fitted."""
    without_optimizer: bool = False
    """Whether an optimizer's state would add to every peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatchFits:
    """The answer that not even the smallest batch fits."""

    batch: int
    """Smallest batch."""
    budget_bytes: int
    reason: str
    """Reason why the smallest batch does not fit."""


BatchOutcome = BatchAdvice | BatchEstimate | NoBatchFits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAdvice:
    """The fastest number of copies of a model that train as one, each at the described batch."""

    fastest: int
    """Number of copies with most samples per second, of those within the budget."""
    probes: tuple[BatchProbe, ...]
    """One run for each number of copies that was tried, ascending; the last may be over the budget."""
    limited_by: str
    """Reason why no more copies were tried."""

    @property
    def best(self) -> BatchProbe:
        """Run of the fastest number of copies."""
        return next(run for run in self.probes if run.replicas == self.fastest)


Objective = Literal["max", "throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRange:
    """Sizes of a symbol, doubled from the first to the last."""

    symbol: str
    low: int
    high: int

    def sizes(self) -> tuple[int, ...]:
        """Return ``low``, twice that … and ``high``."""
        doubled = [self.low]
        while doubled[-1] * 2 < self.high:
            doubled.append(doubled[-1] * 2)
        return tuple(dict.fromkeys([*doubled, self.high]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One row of the answer: the batch that fits with or without the plan, at one size of the ranged dimension."""

    planned: bool
    """Whether the step runs under the plan."""
    dims: dict[str, int]
    """Size of the symbol that has a range; empty without one."""
    outcome: BatchOutcome
    """Batch that fits; with copies, the batch of each copy at their fastest number."""
    replicas: ReplicaAdvice | None = None
    """Numbers of copies that were tried; ``None`` without ``--replicas``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """A step of the optimizer made up of several steps that fit."""

    global_batch: int
    """Samples per optimizer step: ``--global-batch``, or ``--accumulate`` times the batch."""
    batch: int
    """Samples of one forward and backward pass, the batch that was run."""
    steps: int
    """Forward and backward passes per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """The call of the model in a step, and the place of the loss in its output."""

    positional: int = 1
    """Number of positional arguments."""
    keywords: bool = False
    """Whether there are keyword arguments."""
    loss: Literal["of targets", "the output", "an attribute", "an entry"] = "of targets"
    """Place of the loss.  ``of targets``: a user function computes it from the output and targets.  ``an
    attribute``: it is ``output.loss``.  ``an entry``: it is ``output[entry]``."""
    entry: str | int = ""
    """Key or index of the loss, where it is an entry of the output."""
    draws_ignored: bool = False
    """Whether the inputs hold integers and some are -100, the label that losses ignore by default."""

    @property
    def may_ignore_labels(self) -> bool:
        """Whether labels of -100 may occur: the inputs hold some, or the model computes its loss from labels."""
        return self.draws_ignored or self.loss != "of targets"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBatching:
    """The cost of an epoch of the user's sequences under one strategy."""

    name: str
    batch: int | None
    """Sequences in a batch; ``None`` for as many as ``max_tokens`` allows."""
    max_tokens: int | None
    """Maximum number of positions in a batch, padding included; ``None`` if ``batch`` is given."""
    batches: int
    waste: float
    """Share of computed positions that are padding."""
    peak_bytes: int
    """Predicted peak of the batch that needs most."""
    epoch_s: float
    """Predicted seconds of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest(StepRequest):
    """The options of ``memopt recommend-batch``, resolved.

    The constructor raises :class:`OptionError` for options that cannot be combined, so later stages need not check.
    """

    settings: StepSettings = StepSettings()
    memory: int | float = 0.9
    """Bytes, or a share of the memory that the device has free."""
    objective: Objective | None = None
    """Objective that the user gave; ``None`` for the default, which is in :attr:`aim`."""
    global_batch: int | None = None
    """Samples per optimizer step."""
    multiple_of: int = 1
    dim_range: DimRange | None = None
    replicas: DimRange | None = None
    """Numbers of copies of the model to try; ``None`` for a single model."""
    plan_path: str | None = None
    """Path of a plan under which a batch is recommended as well; ``None`` to recommend one without a plan only."""
    lengths_path: str | None = None
    """Path of a file of sequence lengths; ``None`` if not given."""
    strategies: tuple[StrategyName, ...] = ()
    """Strategies to learn sequences, whose memory is compared over ``dim_range``; empty to recommend a batch."""
    search: ResolvedSearch | None = None
    """Limits on plans in a search for the fastest pair of a batch and a plan; ``None`` without ``--search``."""
    card: DeviceProfile | None = None
    """Device for which everything is estimated, since this machine lacks it; ``None`` for the device here."""
    fake: bool = False
    """Whether to estimate on tensors without data, without any run at full size."""
    layouts: tuple[RankLayout, ...] = ()
    """Layouts over several numbers of ranks, one rank of each to predict; empty for a single device."""
    search_limit_s: float | None = None
    """Seconds after which ``--search`` tries no more pairs; ``None`` if unlimited."""
    backend: str | None = None
    """Backend of ``torch.compile`` that compiles the step; ``None`` for a step that is not compiled."""
    output: str | None = None
    """Path of the batch configuration; ``None`` to write none, or with a ``search`` one next to the model."""
    force: bool = False
    longest_step_s: float = LONGEST_STEP_S
    """Longest step that is run, in seconds."""

    @property
    def runs(self) -> bool:
        """Whether steps are run here at full size."""
        return self.card is None and not self.fake and not self.layouts

    @property
    def aim(self) -> Objective:
        """Objective that chooses the batch; by default the largest batch, or the fastest number of copies."""
        return self.objective or ("max" if self.replicas is None else "throughput")

    @property
    def step(self) -> StepSettings:
        """Settings of the step that is run.

        If passes make up a global batch, the step accumulates two: with gradients of an earlier pass in memory, every
        later pass takes the same memory and time.
        """
        return self.settings if self.global_batch is None else replace(self.settings, micro_batches=2)

    @property
    def uncompiled(self) -> str:
        """First given option for which steps run, or are predicted, without a compiler; empty if there is none."""
        options = {
            "`--search`": self.search,
            "`--strategy`": self.strategies or None,
            "`--replicas`": self.replicas,
            "`--lengths`": self.lengths_path,
            "`--dim` with a range": self.dim_range,
            "`--ranks`": self.layouts or None,
            "`--for`": self.card,
            "`--fake`": self.fake or None,
        }
        return next((option for option, value in options.items() if value is not None), "")

    def __post_init__(self) -> None:
        """Raise :class:`OptionError` for options that cannot be combined or need each other."""
        if self.backend is not None and self.uncompiled:
            raise OptionError(
                f"`--compile` measures compiled steps, but {self.uncompiled} measures or predicts others",
                hint="Remove one of them.",
            )
        if not self.runs:
            self._check_without_runs()
        if self.layouts:
            self._check_ranks()
        if self.search is not None:
            self._check_search(self.search)
        elif self.strategies:
            self._check_strategies()
        elif self.replicas is not None and (self.dim_range is not None or self.lengths_path is not None):
            other_option = "`--lengths`" if self.dim_range is None else "a range of `--dim`"
            raise OptionError(
                f"`--replicas` cannot be combined with {other_option}",
                hint="Ask for one first, then for the other.",
            )
        if self.global_batch is not None and self.settings.micro_batches > 1:
            raise OptionError(
                f"`--global-batch {self.global_batch}` asks how many micro-batches make it up, but "
                f"`--accumulate {self.settings.micro_batches}` sets that number",
                hint="Remove one of them.",
            )

    def _check_without_runs(self) -> None:
        needs_runs = {
            "`--search`": self.search is not None,
            "`--strategy`": bool(self.strategies),
            "`--replicas`": self.replicas is not None,
            "`--objective throughput`": self.aim == "throughput",
            "`--lengths`": self.lengths_path is not None,
            "`--longest-step`": self.longest_step_s != LONGEST_STEP_S,
        }
        flag = next((flag for flag, is_wanted in needs_runs.items() if is_wanted), None)
        if flag is not None:
            place = "on many ranks, since one rank is predicted" if self.layouts else "without data"
            place = place if self.card is None else f"for {self.card.name}, which is not here"
            raise OptionError(f"{flag} needs steps that run, but no step runs {place}", hint=f"Remove {flag}.")

    def _check_ranks(self) -> None:
        if self.card is None and isinstance(self.memory, float):
            raise OptionError(
                "memopt cannot tell the memory of a rank's device",
                hint="Use a size, `--memory 80GiB`, or a card, `--for h100-80gb`.",
            )
        excluded = {
            "`--global-batch`": self.global_batch,
            "`--dim` with a range": self.dim_range,
            "`--output`": self.output,
        }
        flag = next((flag for flag, value in excluded.items() if value is not None), None)
        if flag is not None:
            raise OptionError(
                f"{flag} cannot be used with `--ranks`, which lists the batch that fits for each number of ranks",
                hint=f"Remove {flag}; `--json` has everything that is found.",
            )

    def _check_search(self, search: ResolvedSearch) -> None:
        if search.options.level == 0:
            raise OptionError("`--search` looks for plans, but level 0 allows none", hint="Raise `--level`.")
        excluded = {
            "`--strategy`": ("trains through time", bool(self.strategies)),
            "`--plan`": ("looks for the plan", self.plan_path is not None),
            "`--objective max`": ("looks for most samples per second", self.objective == "max"),
            "`--dim` with a range": ("finds one answer", self.dim_range is not None),
            "`--replicas`": ("trains one model", self.replicas is not None),
            "`--lengths`": ("finds one size of batch", self.lengths_path is not None),
        }
        for flag, (purpose, is_given) in excluded.items():
            if is_given:
                raise OptionError(
                    f"`--search` {purpose}: {flag} cannot be combined with it", hint="Remove one of them."
                )

    def _check_strategies(self) -> None:
        if self.dim_range is None:
            raise OptionError(
                "`--strategy` tabulates memory over time steps", hint="Add their range: `--dim T=16:4096`."
            )
        excluded = {
            "`--global-batch`": self.global_batch,
            "`--multiple-of`": None if self.multiple_of == 1 else self.multiple_of,
            "`--objective`": self.objective,
            "`--replicas`": self.replicas,
            "`--lengths`": self.lengths_path,
            "`--output`": self.output,
        }
        flags = [flag for flag, value in excluded.items() if value is not None]
        if flags:
            raise OptionError(
                f"{' and '.join(flags)} cannot be used with `--strategy`, which tabulates memory at one batch size",
                hint=f"Remove {' and '.join(flags)}, or ask without `--strategy`.",
            )
        if self.plan_path is not None and "plan" not in self.strategies:
            raise OptionError(
                f"`--strategy {','.join(self.strategies)}` does not use `--plan`",
                hint="Add plan to `--strategy`, or leave `--plan` out.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecommendation:
    """The result of ``memopt recommend-batch``."""

    header: FileHeader
    objective: Objective
    limit: str
    """Memory limit and its source, as text for a report."""
    rows: tuple[BatchRow, ...]
    """Cases, those without the plan first; sizes ascending."""
    chosen: int
    """Index of the recommended row: the better one by the objective, at the largest size at which a batch was run."""
    batch: int
    """Recommended batch: the batch of the chosen row."""
    verified: bool
    """Whether the recommended batch was run; otherwise it is an estimate."""
    accumulation: Accumulation | None
    """Passes that make up a step of the optimizer; ``None`` without ``--global-batch`` and ``--accumulate``."""
    lengths: tuple[LengthBatching, ...]
    """Costs of the strategies to batch the user's sequences; empty without ``--lengths``."""
    notes: tuple[str, ...]
    probes: int
    """Number of runs on data, failed ones included."""
    dry_runs: int
    files: tuple[str, ...]
    spent_s: float
    interrupted: bool = False
    """Whether the search was interrupted; the recommendation is the best of the runs until then."""
    step: StepSettings = StepSettings()
    """Settings of the step as run.  A training script must share them to need the same memory and time."""
    call: ModelCall = ModelCall()
    """Call of the model and place of its loss, for the loop to paste."""
    plan: str = ""
    """Path of the plan's file; empty if no plan was requested, or the model's file carries it."""
    card: str = ""
    """Name of the device for which the batch is an estimate, since this machine lacks it; empty for the device here."""
    backend: str = ""
    """Backend of ``torch.compile`` that ``--compile`` named; empty if only the plan decides about compiling."""

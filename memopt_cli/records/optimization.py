"""Requests and results of ``memopt optimize`` and ``memopt apply``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memopt_cli.errors import MemoptError, OptionError
from memopt_cli.records.batch import DimRange
from memopt_cli.records.device import Confirmation, DeviceProfile
from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import RankLayout
from memopt_cli.records.request import StepRequest
from memopt_cli.records.search_options import ResolvedSearch, SearchGoal, SearchOptions
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.summary import MemOptSummary, ParetoPoint
from memopt_cli.records.trace import StepTrace
from memopt_cli.records.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFrontier:
    """The plans shown by ``--frontier``, and the step for which they were shown; kept in a file next to the model."""

    header: FileHeader
    """Origin of the plans: the model and its inputs."""
    weights_sha256: str | None
    """Hash of the file of weights; ``None`` if there is none."""
    key: str | None
    """Entry of the model's file (``--key``); ``None`` for the file itself."""
    settings: StepSettings
    options: SearchOptions
    """Limits of the search that found the plans."""
    points: tuple[ParetoPoint, ...]
    """Plans in the order in which they are numbered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeRequest(StepRequest):
    """The options of ``memopt optimize``, resolved.

    The constructor raises :class:`OptionError` for options that cannot be combined, so later stages need not check.
    """

    settings: StepSettings = StepSettings()
    search: ResolvedSearch
    goal: SearchGoal = SearchGoal()
    shown: ShownFrontier | None = None
    """Frontier of an earlier command, from which the goal picks a plan; ``None`` to search."""
    dim_range: DimRange | None = None
    """Smallest and largest size of a dimension, for a plan by length within the goal's budget (the inputs have the
    largest); ``None`` for a plan at one size."""
    lengths: str | Mapping[int, int] | None = None
    """Path of a file of the sizes in training, or size -> its count; ``None`` if all sizes are equally frequent."""
    output: str | None = None
    """Path of the optimized model; ``None`` to write it next to the original."""
    dry_run: bool = False
    """Whether to search and report without writing anything."""
    card: DeviceProfile | None = None
    """Device for which the plan is found by estimates, since this machine lacks it; ``None`` for the device here."""
    layout: RankLayout | None = None
    """Layout over many ranks, where a plan for one is found without measuring; ``None`` for a single device."""
    plan_only: bool = False
    """Whether to write no model, because a training script applies the plan."""
    unverified: bool = False
    """Whether a plan for a step elsewhere is not compared with the original, since this machine may not hold the
    model."""
    force: bool = False
    """Whether existing files may be replaced."""
    longest_step_s: float | None = None
    """Longest step, in seconds, that verifies the recommended batch; ``None`` for the default, which depends on the
    plan's step."""
    recommend_batch: bool = True
    """Whether to predict, by dry runs, the batch that fits."""
    confirm_batch: bool = False
    """Whether to run steps of the predicted batch as well."""
    record_steps: bool = False
    """Whether to record a step before and after, for a report that shows them."""
    search_limit_s: float | None = None
    """Seconds after which the search tries no more plans; ``None`` if unlimited."""
    search_limit_name: str = "`--search-time`"
    """Text in messages for what set these seconds, or sets more: the command's flag, or another command."""
    measure_levels: bool = False
    """Whether to measure the plan of every level, and not only the applied one."""
    flags: tuple[str, ...] | None = None
    """Flags that describe the model, its inputs and its step, to suggest another memopt command; ``None`` for a
    call from Python."""
    backend: str | None = None
    """Backend of ``torch.compile``, to look for compiled steps as well; ``None`` to leave them out."""
    interruptible: bool = False
    """Whether Ctrl-C ends only the search, after which the best plan so far is measured, verified and written."""

    @property
    def runs(self) -> bool:
        """Whether steps are run here at full size."""
        return self.card is None and self.layout is None

    def __post_init__(self) -> None:
        """Raise :class:`OptionError` for options that exclude or need each other."""
        if self.search.options.level == 0 and (self.goal != SearchGoal() or self.backend is not None):
            raise OptionError(
                "a budget, the frontier, a pick of it and `--compile` need a search, but level 0 does not search",
                hint="Raise `--level`.",
            )
        if self.search.options.optimizer_in_backward:
            self.settings.check_in_backward()
        if self.dim_range is None and self.lengths is not None:
            raise OptionError(
                "`--lengths` gives the lengths of the inputs, but no dimension has a range",
                hint="Add it, for example `--dim S=64:2048`.",
            )
        if self.backend is not None:
            self._check_compiled()
        if self.dim_range is not None:
            self._check_range(self.dim_range)
        if self.unverified and self.runs:
            raise OptionError(
                "`--unverified` is for a step that is not run here, but this one is measured",
                hint="Remove `--unverified`, or give `--ranks` or `--for`.",
            )
        if not self.runs:
            self._check_without_runs()

    def _check_compiled(self) -> None:
        if not self.runs:
            raise OptionError(
                f"`--compile` measures compiled steps, but {'`--for`' if self.card else '`--ranks`'} runs none here",
                hint="Leave out `--compile`.",
            )
        if self.dim_range is not None:
            raise OptionError(
                f"a range of {self.dim_range.symbol} is compiled again at every size", hint="Use one size for `--dim`."
            )
        if self.confirm_batch:
            raise OptionError(
                "`--recommend-batch` predicts batches without a compiler",
                hint="Remove `--recommend-batch`: `memopt recommend-batch --compile` measures them.",
            )

    def _check_range(self, varied: DimRange) -> None:
        goal = self.goal
        not_at_all_sizes = {
            "`--pick`": goal.pick is not None,
            "`--frontier`": goal.frontier,
            "`--optimizer-in-backward`": self.search.options.optimizer_in_backward,
        }
        flag = next((flag for flag, is_wanted in not_at_all_sizes.items() if is_wanted), None)
        if flag is not None:
            raise OptionError(
                f"{flag} cannot be combined with a range of `--dim`", hint="Use one size for the dimension."
            )
        if goal.budget is None:
            raise OptionError(
                f"a range of {varied.symbol} needs a budget that the plans meet at all its sizes",
                hint="Add `--budget 8GiB`, or `--budget 60%` of the original's peak at the largest size.",
            )
        if self.unverified:
            raise OptionError(
                "`--unverified` is for one step, but a plan by length is verified at every range",
                hint="Use one size for `--dim`.",
            )

    def _check_without_runs(self) -> None:
        needs_runs = {
            "`--frontier`": self.goal.needs_frontier,
            "`--measure-levels`": self.measure_levels,
            "`--optimizer-in-backward`": self.search.options.optimizer_in_backward,
            "`--html` (or `--snapshot`)": self.layout is not None and self.record_steps,
            "`--dim` with a range": self.layout is not None and self.dim_range is not None,
        }
        flag = next((flag for flag, is_wanted in needs_runs.items() if is_wanted), None)
        if flag is not None:
            reason = (
                f"`--for {self.card.name}` is for a device that is not here" if self.card else "`--ranks` predicts them"
            )
            raise OptionError(
                f"{flag} needs steps that run, but {reason}",
                hint=f"Omit {flag}; `--budget` and `--max-slowdown` choose a plan by estimates.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest(StepRequest):
    """The options of ``memopt apply``, resolved."""

    plan_path: str
    spec: InputSpec | None = None
    """Inputs, which are needed only to verify or confirm; ``None`` to look for them next to the model, then guess."""
    settings: StepSettings = StepSettings()
    verify: bool = False
    """Whether to compare with the original first, and to write nothing if they differ."""
    confirm: bool = False
    """Whether to run the step under the plan first, and to compare it with the prediction in the plan's file."""
    output: str | None = None
    force: bool = False
    timeout_s: float = 600.0
    """Seconds that loading the model, the comparison, and each piece of the file written may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """The result of ``memopt apply``."""

    files: tuple[str, ...]
    verification: Verification | None = None
    """Verification, of a plan by length at the largest length; ``None`` without ``--verify``."""
    shorter: tuple[Verification, ...] = ()
    """Verifications of a plan by length at the largest length of each other range."""
    confirmation: Confirmation | None = None
    """Measured step and prediction; ``None`` without ``--confirm``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """One training step, recorded without a plan and under the applied one."""

    original: StepTrace
    optimized: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeResult:
    """The result of ``memopt optimize``."""

    header: FileHeader
    summary: MemOptSummary
    files: tuple[str, ...]
    """Paths written; empty for a dry run."""
    use: str = ""
    """Line of Python that trains with the written files; empty if there is nothing to use."""
    in_memory: bool = False
    """Whether the model was in memory: an applied plan is on it, and no file is written."""
    steps: RecordedSteps | None = None
    """Recorded steps; ``None`` if no report shows them."""
    ended_by: MemoptError | None = None
    """Error that ended the optimization after a plan was found; ``None`` if there was none."""

"""``memopt optimize`` and ``memopt apply``: what they were asked for, and what they did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memopt_cli.errors import MemoptError
from memopt_cli.records.batch import DimRange
from memopt_cli.records.device import Confirmation, DeviceProfile
from memopt_cli.records.header import FileHeader
from memopt_cli.records.inputs import InputSpec
from memopt_cli.records.layout import Layout
from memopt_cli.records.request import StepRequest
from memopt_cli.records.search import SearchGoal, SearchOverrides
from memopt_cli.records.settings import StepSettings
from memopt_cli.records.summary import MemOptSummary
from memopt_cli.records.trace import StepTrace
from memopt_cli.records.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeRequest(StepRequest):
    """Everything ``memopt optimize`` was asked for."""

    settings: StepSettings = StepSettings()
    search: SearchOverrides = field(default_factory=SearchOverrides)
    goal: SearchGoal = SearchGoal()
    dim_range: DimRange | None = None
    """The least and the largest size of a dimension: a plan for each of a few ranges, within the goal's budget.  The
    inputs have the largest."""
    lengths: str | Mapping[int, int] | None = None
    """A file of the sizes that it has in training, or how often each occurs; ``None``: all of its range alike."""
    output: str | None = None
    """Path of the optimized model; ``None``: beside the original."""
    dry_run: bool = False
    """Search and report, write nothing."""
    card: DeviceProfile | None = None
    """A device that is not here, for which the plan is searched; nothing is measured."""
    layout: Layout | None = None
    """Many ranks, for one of which the plan is searched; nothing is measured."""
    plan_only: bool = False
    """Write no model: the plan is applied where it trains."""
    unverified: bool = False
    """A plan for a step elsewhere is not compared with the original: this machine may not hold the model."""
    force: bool = False
    """Existing files may be replaced."""
    longest_step_s: float | None = None
    """The step that verifies the recommended batch is to take no longer; ``None``: see ``pipeline.batch_advice``."""
    recommend_batch: bool = True
    """Say which batch fits, too, by dry runs."""
    confirm_batch: bool = False
    """Run steps of that batch, too."""
    record_steps: bool = False
    """Record a step before and after, for a report that shows them."""
    search_limit_s: float | None = None
    """No plan is tried any more when the search has taken this long: the best so far is taken."""
    measure_levels: bool = False
    """Measure the plan of every level, not the applied one alone."""
    interruptible: bool = False
    """Ctrl-C in the search ends the search alone: the best so far is measured, verified and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest(StepRequest):
    """Everything ``memopt apply`` was asked for."""

    plan_path: str
    spec: InputSpec | None = None
    """As in :class:`OptimizeRequest`; only needed to verify."""
    settings: StepSettings = StepSettings()
    verify: bool = False
    """Compare with the original first; nothing is written if they differ."""
    confirm: bool = False
    """Run the step under the plan first, and hold what the plan's file predicts against it."""
    output: str | None = None
    force: bool = False
    timeout_s: float = 600.0
    """Of loading the model, of the comparison, and of each piece of the file that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What ``memopt apply`` did."""

    files: tuple[str, ...]
    verification: Verification | None = None
    """``None`` unless asked for; of a plan by length at the largest."""
    shorter: tuple[Verification, ...] = ()
    """Of a plan by length, at the largest length of each other range."""
    confirmation: Confirmation | None = None
    """``None`` unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """One training step as it was, and under the plan that is applied."""

    original: StepTrace
    optimized: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeResult:
    """What ``memopt optimize`` did."""

    header: FileHeader
    summary: MemOptSummary
    files: tuple[str, ...]
    """Paths written; empty for a dry run."""
    use: str = ""
    """Line of Python that trains with what was written; empty where nothing is to be used."""
    steps: RecordedSteps | None = None
    """``None`` unless asked for."""
    ended_by: MemoptError | None = None
    """What kept it from its end once the plan was found; all that was found before is here."""

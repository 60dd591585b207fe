"""Planner of ``memopt optimize`` for a recorded step, and a long random search of plans to compare it with.

The benchmarks of plans open a model with :func:`bench`, which records its step once.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from memopt_cli.loading.input_spec import read_spec_file
from memopt_cli.measure.jobs import MeasureAnswer, MeasureJob
from memopt_cli.pipeline.plans.findings import Findings
from memopt_cli.pipeline.plans.started_search import StartedSearch, start_search
from memopt_cli.pipeline.prepare import LoadRequest, PreparedModel, prepare
from memopt_cli.pipeline.search_probes import planner_probes
from memopt_cli.pipeline.sessions import Sessions
from memopt_cli.records import (
    Failure,
    InputSpec,
    LevelRow,
    Measurement,
    ModelSource,
    ModuleTrace,
    OptimizeRequest,
    PlaceName,
    Plan,
    Refused,
    SearchOptions,
    SearchOverrides,
    SegmentPlan,
    StepPeaks,
    StepSettings,
    StepTrace,
)
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.cost_model import CostModel
from memopt_cli.search.plan.dry_runs import PricedPlan
from memopt_cli.search.plan.interface import Probes
from memopt_cli.search.plan.levels import find_level
from memopt_cli.search.plan.planner import Planner
from memopt_cli.search.plan.policy import resolve
from memopt_cli.search.plan.targets import plain_segment

LEVEL = 4
TIMEOUT_S = 600.0
BUILD = Path("sample_models/build")
SPIKINGJELLY, UNET = "spikingjelly_vgg", "unet"
_LOSS = Path(__file__).with_name(f"{SPIKINGJELLY}.py")


def prepared(name: str, device: str = "cpu") -> PreparedModel:
    """Open the sample model ``name``, or one of the benchmarks' own."""
    settings = StepSettings(device=device, loss=f"{_LOSS}:total" if name == SPIKINGJELLY else None)
    folder = "benchmarks" if name in (SPIKINGJELLY, UNET) else "sample_models"
    return opened(f"{folder}.{name}:build", spec_of(name), settings)


def opened(location: str, spec: InputSpec, settings: StepSettings) -> PreparedModel:
    """Open the model that the function at ``location`` makes, with runs of layers in Sequentials as candidates."""
    load_request = LoadRequest(source=ModelSource(location=location), spec=spec, settings=settings, timeout_s=TIMEOUT_S)
    ready = prepare(load_request, progress=Progress(), ask=None)
    return replace(ready, subject=replace(ready.subject, layer_runs=True))


def spec_of(name: str) -> InputSpec:
    """Return the inputs of a step of model ``name``."""
    if name == SPIKINGJELLY:
        from benchmarks.spikingjelly_vgg import SPEC

        return SPEC
    if name == UNET:
        from benchmarks.unet import SPEC as UNET_SPEC

        return UNET_SPEC
    return read_spec_file(BUILD / f"{name}.inputs.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Model with one recorded step, whose dry runs and measurements are remembered."""

    name: str
    prepared: PreparedModel
    search: StartedSearch
    trace: StepTrace
    model: CostModel
    probes: Probes
    original: StepPeaks
    """Dry run of the step without a plan."""
    recorded_s: float
    """Seconds that loading and recording took."""
    measured: dict[Plan, Measurement | Failure] = field(default_factory=dict)
    """Plan -> measurement of one step, or why it failed."""

    def planner(self, place: PlaceName = "device") -> Planner:
        """Return a new planner for the recorded step, which may send tensors to ``place``."""
        return Planner(self.trace, self.original, self.probes, SearchOptions(level=LEVEL), place=place)

    def priced(self, plan: Plan) -> PricedPlan | None:
        """Return the dry run of ``plan``; ``None`` if the plan cannot run."""
        counted = self.probes.count(plan)
        if not isinstance(counted, StepPeaks):
            return None
        slowdown = self.model.predict(plan).step_s / self.model.step_s
        return PricedPlan(plan=plan, counted=counted, level=find_level(plan), slowdown=slowdown)

    def measure(self, plan: Plan) -> Measurement | Failure:
        """Measure one step under ``plan`` in a process of its own, unless that plan was measured before."""
        if plan not in self.measured:
            with self.prepared.session() as session:
                found = session.ask(MeasureJob(plan=plan, steps=1, warm_up=False))
            self.measured[plan] = found.measurement if isinstance(found, MeasureAnswer) else found
        return self.measured[plan]

    def measured_peak(self, plan: Plan) -> int:
        """Return the measured allocated peak of the step under ``plan``, in bytes."""
        found = self.measure(plan)
        if not isinstance(found, Measurement):
            raise SystemExit(f"{self.name}: a plan could not be measured: {found}")
        return found.allocated_peak_bytes

    def budgets(self, planner: Planner, count: int) -> list[int]:
        """Return ``count`` budgets in bytes, evenly from the least peak of a plan to just below the original's."""
        high, least = self.original.allocated_peak_bytes, planner.least(LEVEL)
        low = min(high, max(least.peak_bytes, self.measured_peak(least.plan)))
        return [low + (high - low) * step // count for step in range(count)]


@contextlib.contextmanager
def bench(name: str, ready: PreparedModel | None = None, search_s: float | None = None) -> Iterator[Bench]:
    """Record a step of ``ready`` or of model ``name``; ``search_s`` limits the seconds of the search."""
    started = time.perf_counter()
    ready = ready or prepared(name)
    with Sessions(ready, "full size", notes=[]) as session:
        subject, asked = ready.subject, resolve(SearchOverrides(level=LEVEL))
        request = OptimizeRequest(
            source=subject.source,
            spec=subject.spec,
            settings=subject.settings,
            search=asked,
            search_limit_s=search_s,
        )
        row = LevelRow(level=0, plan=Plan(), outcome=None, dry_runs=0, search_s=0.0)
        search = start_search(request, Findings.begin(request, ready), session, row)
        if not search.traced.has_dry_runs:
            raise SystemExit(f"{name}: no step could be recorded without data: {search.traced.note}")
        yield Bench(
            name=name,
            prepared=ready,
            search=search,
            trace=search.traced.trace,
            model=CostModel(search.traced.trace),
            probes=planner_probes(search.probes, search.original_dry_run, Progress(), fake=True, allow_inexact=False),
            original=search.original_dry_run,
            recorded_s=time.perf_counter() - started,
        )


class LongSearch:
    """Local search by random changes of the best plans so far: those that no other beats in both peak and time.

    Dry runs give the peak, the cost model the time.  The plans that it starts from count as found.
    """

    def __init__(self, one: Bench, start: Sequence[Plan]) -> None:
        self._bench = one
        self._random = random.Random(0)
        self._modules = [m for m in one.trace.modules if m.path and not m.refusal]
        self._packable = one.model.packable_bytes > 0
        self.found: dict[Plan, PricedPlan] = {}
        """Plans that could be dry-run -> peak and slowdown, in the order in which they were found."""
        for plan in (Plan(), *start):
            self._try(plan)

    def run(self, seconds: float) -> list[PricedPlan]:
        """Search for ``seconds``, and return every plan that could be dry-run."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._step()
        return list(self.found.values())

    def first(self, count: int) -> list[PricedPlan]:
        """Return the first ``count`` plans besides the original: those that the search started from, then new ones."""
        while len(self.found) <= count:
            self._step()
        return list(self.found.values())[1 : count + 1]

    def _step(self) -> None:
        plan = self._random.choice(self._good()).plan
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            plan = self._changed(plan)
        self._try(plan)

    def _try(self, plan: Plan) -> None:
        if plan not in self.found and (priced := self._bench.priced(plan)) is not None:
            self.found[plan] = priced

    def _good(self) -> list[PricedPlan]:
        plans = sorted(self.found.values(), key=lambda p: (p.peak_bytes, p.slowdown))
        good: list[PricedPlan] = []
        for priced in plans:
            if not good or priced.slowdown < good[-1].slowdown:
                good.append(priced)
        return good

    def _changed(self, plan: Plan) -> Plan:
        if self._packable and self._random.random() < 0.1:
            return replace(plan, packed=not plan.packed)
        module = self._random.choice(self._modules)
        others = tuple(s for s in plan.segments if s.path != module.path)
        here = next((s for s in plan.segments if s.path == module.path), None)
        if here is None:
            new: SegmentPlan | None = plain_segment(module, compress=True)
        else:
            new = self._in_chunks(module, here) if self._random.random() < 0.5 else None
        return replace(plan, segments=(*others, new) if new else others)

    def _in_chunks(self, module: ModuleTrace, here: SegmentPlan) -> SegmentPlan | None:
        rule = self._bench.probes.chunking(module.path)
        if isinstance(rule, Refused):
            return None
        return replace(
            here,
            chunks=self._random.randint(1, module.input_shape[rule.axis]),
            axis=rule.axis,
            seq_inputs=rule.seq_inputs,
            seq_outputs=rule.seq_outputs,
            batch_statistics=rule.batch_statistics,
        )

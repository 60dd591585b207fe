"""A model, its recorded step and a planner on it, as ``memopt optimize`` has them: what the cases of ``plans.py`` share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memopt_cli.measure.runner import Session
from memopt_cli.pipeline.batch_probes import replaceable
from memopt_cli.pipeline.prepare import Prepared, prepare
from memopt_cli.plan.cost_model import CostModel
from memopt_cli.plan.interface import Candidate, Probes
from memopt_cli.plan.planner import Planner, Priced
from memopt_cli.plan.search import Allowed
from memopt_cli.progress import Progress
from memopt_cli.records import Counted, Failure, Measurement, ModelSource, Plan, StepSettings, StepTrace

LEVEL = 4
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One model with one recorded step; dry runs are remembered."""

    name: str
    prepared: Prepared
    trace: StepTrace
    model: CostModel
    probes: Probes
    original: Counted

    def planner(self) -> Planner:
        """A planner that knows nothing yet but the recorded step."""
        return Planner(self.trace, self.probes, Allowed(), may_chunk=True, level=LEVEL)

    def start(self) -> Priced:
        """The original."""
        return Priced(candidate=Candidate(plan=Plan(level=LEVEL), counted=self.original), slowdown=1.0)

    def measured_peak(self, plan: Plan) -> int:
        """The allocated peak in bytes of one step in a process of its own."""
        with self.prepared.session(TIMEOUT_S) as session:
            found = session.measure(plan, steps=1, warm_up=False)
        if not isinstance(found, Measurement):
            raise SystemExit(f"{self.name}: a plan could not be measured: {found}")
        return found.allocated_peak_bytes


@contextlib.contextmanager
def bench(name: str, source: ModelSource, settings: StepSettings) -> Iterator[Bench]:
    """Load, and record a step on tensors without data."""
    prepared = prepare(source, None, settings, progress=Progress(), ask=None)
    with replaceable(lambda: prepared.session(TIMEOUT_S), lambda: None) as session:
        traced = session().trace(fake=True)
        if isinstance(traced, Failure) or not traced.fake:
            raise SystemExit(f"{name}: no step could be recorded without data: {traced}")
        count = counter(session)
        original = count(Plan(level=LEVEL))
        assert isinstance(original, Counted)
        yield Bench(
            name=name,
            prepared=prepared,
            trace=traced.trace,
            model=CostModel(traced.trace),
            probes=Probes(
                count=count, chunking=functools.cache(lambda path: session().chunking(path)), report=lambda text: None
            ),
            original=original,
        )


def counter(session: Callable[[], Session]) -> Callable[[Plan], Counted | Failure]:
    """Dry runs, each plan once."""
    return functools.cache(lambda plan: session().count(plan, fake=True))


def five_plans(one: Bench) -> list[Priced]:
    """The fastest plans found at five budgets from the least reachable peak upwards."""
    planner = one.planner()
    least = planner.least(one.original.allocated_peak_bytes)
    assert least is not None
    room = one.original.allocated_peak_bytes - least.peak_bytes
    found = [planner.within(least.peak_bytes + room * share // 5) for share in range(5)]
    return list({p.candidate.plan: p for p in (least, *found) if p is not None}.values())

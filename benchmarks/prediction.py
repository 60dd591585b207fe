"""Compare the peaks that the cost model predicts with those of dry runs, on random plans.

    python benchmarks/prediction.py [MODEL ...] [--plans 40] [--seed 0] [--drawn 12] [--verbose]

Models: gpt, resnet, spiking_vgg, lif_rnn and char_rnn (``sample_models``), and ``drawn``: ``--drawn`` small models of
randomly nested layers.  A random plan makes segments of a few modules; some run in chunks, where these were found to
compute the same, and some keep outputs.  A plan that cannot be dry-run is left out.

Without models the section of ``benchmarks/RESULTS.md`` is written.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results import table, this_command, write_section
from memopt_cli.errors import first_line
from memopt_cli.inputs.batch_axis import with_batch
from memopt_cli.loading.input_spec import make_inputs, read_spec_file
from memopt_cli.records import ChunkRule, InputSpec, Plan, SegmentPlan, StepSettings
from memopt_cli.training.step import TrainingStep, seed_everything
from memopt_cli.verification.chunking import capture_call, find_rule
from sample_models.__main__ import NAMES, write_sample
from tests.search.plan.subjects import Subject, drawn

DRAWN = "drawn"
NEAR, FAR = 0.02, 0.10
_SMALL_BATCH = 2
_MAX_SEGMENTS = 4
_CHUNKS = (2, 3, 4, 8)
_WORST = 10
"""Number of plans in the table of the largest errors."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Prediction and dry run of one plan of one model."""

    model: str
    plan: Plan
    counted_bytes: int
    """Peak of the plan's dry run, in bytes."""
    error: float
    """Relative error of the prediction."""


class Draws:
    """Source of random plans for one step."""

    def __init__(self, step: TrainingStep, small: TrainingStep, seed: str) -> None:
        """Record ``step``; ``small`` is the same step with a small batch, on which chunks are tried."""
        self.subject = Subject(step.model, *step.args, **step.kwargs)
        self._small = small
        self._chance = random.Random(seed)
        self._rules: dict[tuple[object, ...], ChunkRule | None] = {}
        self._modules = {m.path: m for m in self.subject.trace.modules}
        ops = self.subject.trace.ops
        self._costly = sorted({op.name for op in ops if op.phase == "forward" and op.flops})

    def plan(self) -> Plan:
        """Return a plan with one to four random modules as segments."""
        paths = self._chance.sample(
            self.subject.usable, min(len(self.subject.usable), self._chance.randint(1, _MAX_SEGMENTS))
        )
        return Plan(segments=tuple(map(self._segment, paths)))

    def _segment(self, path: str) -> SegmentPlan:
        kind = self._chance.choice(["plain", "plain", "chunks", "chunks", "kept"])
        if kind == "kept" and self._costly:
            return SegmentPlan(path=path, keep=(self._chance.choice(self._costly),))
        rule = self._rule(path) if kind == "chunks" else None
        if rule is None:
            return SegmentPlan(path=path)
        return SegmentPlan(path=path, chunks=self._chance.choice(_CHUNKS), **asdict(rule))

    def _rule(self, path: str) -> ChunkRule | None:
        """Return the rule by which the module at ``path`` may run in chunks, or ``None``; equal modules share one."""
        module = self._modules[path]
        kind = module.class_name, module.input_shape, module.output_bytes, module.saved_bytes
        if kind not in self._rules:
            found = find_rule(*capture_call(self._small, path), allow_inexact=True)
            self._rules[kind] = found if isinstance(found, ChunkRule) else None
        return self._rules[kind]


def steps(name: str, drawn_steps: int) -> Iterator[tuple[str, TrainingStep, TrainingStep]]:
    """Yield the steps of model ``name``: a name, the step, and the step with a small batch."""
    if name == DRAWN:
        for seed in range(drawn_steps):
            step = drawn(seed).real
            yield f"{DRAWN} {seed}", step, step
        return
    with tempfile.TemporaryDirectory() as folder:
        write_sample(name, Path(folder))
        spec = read_spec_file(Path(folder) / f"{name}.inputs.yaml")
    whole, small = (_step(name, described) for described in (spec, with_batch(spec, _SMALL_BATCH)))
    yield name, whole, small


def _step(name: str, spec: InputSpec) -> TrainingStep:
    args, kwargs = make_inputs(spec, seed=0, device="cpu", dtype=None)
    model = importlib.import_module(f"sample_models.{name}").build()
    return TrainingStep(model=model, args=args, kwargs=kwargs, settings=StepSettings())


def predicted(name: str, step: TrainingStep, small: TrainingStep, plans: int, seed: int) -> Iterator[Predicted]:
    """Yield the prediction and dry run of each different plan among ``plans`` random ones."""
    draws = Draws(step, small, f"{seed} {name}")
    for plan in dict.fromkeys(draws.plan() for _ in range(plans)):
        try:
            counted_bytes = draws.subject.dry_run(plan)
        except Exception as error:  # the plan is refused, or the model cannot run under it
            print(f"{name}: {first_line(error)}: {told(plan)}", file=sys.stderr)
            continue
        yield Predicted(name, plan, counted_bytes, draws.subject.error(plan))


def told(plan: Plan) -> str:
    """Return ``plan`` in one line."""
    return "; ".join(map(_told, plan.segments))


def _told(segment: SegmentPlan) -> str:
    chunks = f" in {segment.chunks} chunks" if segment.chunks > 1 else ""
    gathered = " with statistics of all" if segment.batch_statistics else ""
    return f"{segment.path}{chunks}{gathered}{' keeps ' if segment.keep else ''}{', '.join(segment.keep)}"


def share_within(found: list[Predicted], tolerance: float) -> str:
    """Return the share of errors within ``tolerance``, in percent."""
    return f"{sum(abs(one.error) <= tolerance for one in found) / max(1, len(found)):.0%}"


def report(found: list[Predicted]) -> str:
    """Return the report in Markdown: errors by model, and the plans with the largest errors."""
    by_model: dict[str, list[Predicted]] = {}
    for one in found:
        by_model.setdefault(one.model.split()[0], []).append(one)
    rows = [
        [
            name,
            f"{len(of)}",
            share_within(of, NEAR),
            share_within(of, FAR),
            f"{min(one.error for one in of):+.1%}",
            f"{max(one.error for one in of):+.1%}",
        ]
        for name, of in [*by_model.items(), ("all", found)]
    ]
    worst = sorted(found, key=lambda one: -abs(one.error))[:_WORST]
    return "\n\n".join(
        (
            table(["model", "plans", f"within {NEAR:.0%}", f"within {FAR:.0%}", "least", "most"], rows),
            table(["farthest off", "by", "plan"], [[one.model, f"{one.error:+.1%}", told(one.plan)] for one in worst]),
        )
    )


def main() -> None:
    """Draw plans, compare their predictions with dry runs, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[*NAMES, DRAWN, []])
    parser.add_argument("--plans", type=int, default=40, help="of every model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", type=int, default=12, help="small steps")
    parser.add_argument("--verbose", action="store_true", help="every plan that is off")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    seed_everything(0)
    found = []
    for name in given.models or (*NAMES, DRAWN):
        for own_name, step, small in steps(name, given.drawn):
            of = list(predicted(own_name, step, small, given.plans, given.seed))
            found += of
            print(f"{own_name}: {share_within(of, NEAR)} of {len(of)}", flush=True)
            for one in of if given.verbose else ():
                if abs(one.error) > NEAR:
                    print(f"  {one.error:+.1%} of {one.counted_bytes}: {told(one.plan)}", flush=True)
    if given.models:
        print(report(found))
    else:
        write_section("Predictions beside dry runs", this_command(), report(found))


if __name__ == "__main__":
    main()

"""The note on a measured step that skips layers names a seed whose step runs all of them."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable

import pytest
from torch import Tensor, nn, rand

from memopt_cli.errors import StepError
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.timed import measure
from memopt_cli.measure.jobs import ORIGINAL, MeasureJob, Subject
from memopt_cli.records import InputSpec, ModelSource, Plan, SegmentPlan, StepSettings, TensorSpec
from tests.zoo.models import GIVEN, Parts


class Drops(Parts, blocks=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), share=GIVEN, draw=GIVEN):
    """Skips each block with the probability ``share``, except the first."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 0 or self.draw() >= self.share:
                x = block(x)
        return x


def bench_of(build: Callable[[], nn.Module], seed: int) -> Bench:
    return Bench(
        Subject(
            source=ModelSource(location="net.pt"),
            spec=InputSpec(tensors=(TensorSpec(shape=("B", 8)),), dims={"B": 2}, source="here"),
            settings=StepSettings(seed=seed),
        ),
        build=build,
    )


def notes(share: float, draw: object, seed: int) -> list[str]:
    return notes_on(lambda: Drops(share=share, draw=draw), seed)


def notes_on(build: Callable[[], nn.Module], seed: int) -> list[str]:
    bench = bench_of(build, seed)
    with bench.restored():
        measure(bench, MeasureJob(plan=ORIGINAL))
    return [message for message in bench.messages if "skips" in message]


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: float(rand(()))])
def test_the_seed_that_is_named_runs_all_layers(draw: object) -> None:
    skipping = [note for seed in range(5) for note in notes(0.3, draw, seed)]
    assert skipping, "no step skips any"
    for note in skipping:
        found = re.search(r"Of 'blocks\.\*', .* give `--seed (\d+)`, which runs all of them\.$", note)
        assert found is not None, note
        assert notes(0.3, draw, int(found[1])) == []


class Residual(Parts, conv=lambda: nn.Linear(8, 8), down=GIVEN):
    """Skips its layer in itself: the block is called at any rate; the first block has a part that others lack."""

    def forward(self, x: Tensor) -> Tensor:
        skipped = x if self.down is None else self.down(x)
        return skipped if random.random() < 0.5 else self.conv(x) + skipped


class Stage(Parts, blocks=lambda: nn.ModuleList(Residual(down=None if n else nn.Linear(8, 8)) for n in range(3))):
    """Blocks that skip themselves."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_the_seed_that_is_named_runs_layers_that_skip_themselves() -> None:
    skipping = {seed: note for seed in range(6) for note in notes_on(Stage, seed)}
    assert skipping, "no step skips any"
    for note in skipping.values():
        found = re.search(r" give `--seed (\d+)`, which runs all of them\.$", note)
        assert found is not None, note
        assert notes_on(Stage, int(found[1])) == []


def test_where_no_seed_runs_all_layers_the_model_is_to_run_them() -> None:
    (note,) = notes(1.0, lambda: 0.5, 0)
    assert note.endswith("To plan for that step, make the model run all of them.")


def test_a_segment_that_only_other_seeds_call_is_never_called() -> None:
    def draw() -> float:
        return random.random()

    seed = next(seed for seed in range(5) if notes(0.3, draw, seed))
    refused = 0
    for path in ("blocks.1", "blocks.2", "blocks.3"):
        bench = bench_of(lambda: Drops(share=0.3, draw=draw), seed)
        with contextlib.suppress(StepError), bench.restored():
            measure(bench, MeasureJob(plan=Plan(segments=(SegmentPlan(path=path),))))
            continue
        refused += 1
    assert refused

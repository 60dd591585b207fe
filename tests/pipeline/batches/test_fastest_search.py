"""Which of the pairs that were run is the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt_cli.pipeline.batches import fastest_search
from memopt_cli.pipeline.batches.pair_runs import PairRuns, best_original, finalists, rank_pairs, samples_per_s
from memopt_cli.records import (
    SCHEMA_VERSION,
    TYPED,
    BatchProbe,
    BatchRequest,
    FastestTraining,
    FileHeader,
    InputSpec,
    ModelSource,
    OutOfMemory,
    PairRun,
    Plan,
    SearchOverrides,
    SegmentPlan,
    TensorSpec,
)
from memopt_cli.records.progress import Progress
from memopt_cli.search.plan.policy import resolve

ORIGINAL, ONE, TWO = (Plan(segments=tuple(SegmentPlan(path=str(i)) for i in range(count))) for count in range(3))


def pair(plan: Plan, batch: int, rate: float, *, usable: bool = True) -> PairRun:
    run = BatchProbe(batch=batch, allocated_peak_bytes=1, step_s=batch / rate)
    return PairRun(plan=plan, batch=batch, steps=1, outcome=run, samples_per_s=rate, usable=usable)


FAILED = PairRun(plan=TWO, batch=64, steps=1, outcome=OutOfMemory(detail=""), samples_per_s=None, usable=False)


@pytest.mark.parametrize(
    ("pairs", "order"),
    [
        ([pair(ORIGINAL, 8, 100), pair(ONE, 16, 120)], [1, 0]),
        ([pair(ORIGINAL, 8, 100), pair(ONE, 16, 100.5)], [0, 1]),  # as fast: no plan before a plan
        ([pair(TWO, 16, 100.5), pair(ONE, 16, 100)], [1, 0]),  # the simpler plan
        ([pair(ONE, 32, 100.5), pair(ONE, 16, 100)], [1, 0]),  # the smaller batch
        ([pair(ORIGINAL, 8, 500, usable=False), FAILED, pair(ONE, 16, 120)], [2]),
        ([FAILED], []),
    ],
)
def test_the_fastest_comes_first_and_of_those_as_fast_the_simplest(pairs: list[PairRun], order: list[int]) -> None:
    assert list(rank_pairs(pairs)) == order


HEADER = FileHeader(
    schema_version=SCHEMA_VERSION,
    memopt="0",
    torch="2",
    model="net.pt",
    sha256=None,
    spec=InputSpec(tensors=(TensorSpec(shape=(16, 4)),), source=TYPED),
    seed=0,
    device="cpu",
)


@pytest.mark.parametrize("plan", [ORIGINAL, ONE])
def test_a_plan_is_written_only_where_the_answer_has_one(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = FastestTraining(
        header=HEADER,
        budget_bytes=1 << 20,
        limit="1.0 MiB",
        runs=(pair(plan, 16, 100),),
        chosen=0,
        original=None,
        level=1,
        accumulation=None,
        verification=None,
        priced=0,
        dry_runs=0,
        times_run=1,
        notes=(),
        files=(),
        spent_s=1.0,
    )
    monkeypatch.setattr(fastest_search, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(fastest_search, "fastest_prepared", lambda *_: found)
    request = BatchRequest(
        source=ModelSource(location="net.pt"), spec=None, memory=0.9, search=resolve(SearchOverrides()), force=True
    )
    Path("net.memopt.plan.yaml").write_text("of an earlier run")
    answer = fastest_search.recommend_fastest(request, progress=Progress(), ask=None)
    is_left = plan.is_empty
    assert (Path("net.memopt.plan.yaml").read_text() == "of an earlier run") is is_left
    assert answer.files == ("net.memopt.batch.yaml", *["net.memopt.plan.yaml"] * (not is_left))
    assert answer.notes == ("net.memopt.plan.yaml was written by an earlier run and is left as it is.",) * is_left
    assert ("plan: net.memopt.plan.yaml" in Path("net.memopt.batch.yaml").read_text()) is not is_left


@pytest.mark.parametrize(
    ("global_batch", "passes", "found"),
    [(None, 1, None), (None, 4, (64, 16, 4)), (50, 1, (50, 16, 4)), (16, 1, (16, 16, 1))],
)
def test_the_passes_of_a_step(global_batch: int | None, passes: int, found: tuple[int, int, int] | None) -> None:
    runs = PairRuns(trials=None, limits=None, global_batch=global_batch, micro_batches=passes)  # type: ignore[arg-type]
    made = runs.accumulation(16)
    assert (None if made is None else (made.global_batch, made.batch, made.steps)) == found


def test_of_two_batches_of_the_original_that_are_as_fast_the_answer_is_its_best() -> None:
    """The larger one was, to half a per cent: the answer trained 0.99 times as fast as the original's best."""
    pairs = [pair(ORIGINAL, 16, 100), pair(ORIGINAL, 32, 100.5), pair(ONE, 64, 90)]
    assert best_original(pairs) == next(rank_pairs(pairs)) == 0
    assert best_original([pair(ORIGINAL, 16, 100, usable=False), pair(ONE, 16, 90)]) is None


SLOW, NEAR, BEST = pair(ORIGINAL, 1, 50), pair(ORIGINAL, 8, 100), pair(ONE, 16, 120)


@pytest.mark.parametrize(
    ("pairs", "most", "again"),
    [
        ([SLOW, NEAR, BEST], 8, [BEST, NEAR]),
        ([SLOW, BEST], 8, []),  # nothing comes near it
        ([NEAR, BEST], 1, []),  # one of two alone would be put before the other
        ([NEAR, BEST, pair(TWO, 16, 110), pair(TWO, 8, 105)], 8, [BEST, pair(TWO, 16, 110), pair(TWO, 8, 105)]),
        ([pair(ORIGINAL, 2000, 100), pair(ONE, 2000, 101)], 8, []),  # steps of twenty seconds
        ([FAILED, pair(ORIGINAL, 8, 119, usable=False), BEST], 8, []),
    ],
)
def test_what_may_only_seem_slower_than_the_best_is_run_again(
    pairs: list[PairRun], most: int, again: list[PairRun]
) -> None:
    assert finalists(pairs, most) == again


@pytest.mark.parametrize(
    ("steps", "update_s", "rate"),
    [
        (1, 0.2, 8.0),
        (4, 0.0, 8.0),
        (4, 0.2, 32 / 3.4),  # four passes of 0.8 s, and one update
        (2, 9.0, 16.0),  # of a step that is priced at less than the update took in a run
    ],
)
def test_all_passes_have_one_update(steps: int, update_s: float, rate: float) -> None:
    assert samples_per_s(8, 1.0, update_s, steps) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("priced", "larger"),
    [
        (
            [(ONE, 16), (TWO, 40)],
            "about 40. `memopt optimize` at that batch, with `--budget 1KiB`",
        ),
        ([(TWO, 8)], ""),  # a run without a plan reached as far
        ([], ""),
    ],
)
def test_a_larger_batch_that_fits_with_a_plan_is_told(priced: list[tuple[Plan, int]], larger: str) -> None:
    runs = [pair(ORIGINAL, 8, 100), pair(ORIGINAL, 64, 90, usable=False), FAILED]
    notes = list(fastest_search.larger_batch_notes(priced, runs, 1024))
    assert len(notes) == bool(larger)
    assert all(larger in note for note in notes)

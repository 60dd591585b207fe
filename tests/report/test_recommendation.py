"""``memopt recommend-batch`` for people: what was run is told from what was not."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memopt_cli.files.memopt_files import recommended_data
from memopt_cli.pipeline.batches.recommendation import accumulation_notes
from memopt_cli.records import (
    Accumulation,
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    BatchRecommendation,
    BatchRow,
    Explanation,
    LengthBatching,
    ModelCall,
    ModelFacts,
    NoBatchFits,
    ReplicaAdvice,
    Suggestion,
)
from memopt_cli.report import explanation
from memopt_cli.report.text import TextReport
from tests.zoo.records import a_header

MIB = 1 << 20
ADVICE = BatchAdvice(
    recommended_batch=40,
    fastest_batch=20,
    estimated_batch=40,
    probes=(
        BatchProbe(batch=20, allocated_peak_bytes=52 * MIB, step_s=0.1),
        BatchProbe(batch=40, allocated_peak_bytes=99 * MIB, step_s=0.25),
    ),
    intercept_bytes=5.0 * MIB,
    slope_bytes=2.5 * MIB,
    budget_bytes=100 * MIB,
    device_bytes=1 << 33,
    limited_by="--memory 100MiB",
)
FOUND = BatchRecommendation(
    header=a_header(),
    objective="max",
    limit="100.0 MiB (--memory 100MiB)",
    rows=(BatchRow(planned=False, dims={}, outcome=ADVICE),),
    chosen=0,
    batch=40,
    verified=True,
    accumulation=None,
    lengths=(),
    notes=("A note.",),
    probes=2,
    dry_runs=7,
    files=("b.yaml",),
    spent_s=3.0,
)


def shown(found: BatchRecommendation) -> list[str]:
    stream = io.StringIO()
    TextReport().show(found, stream)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_whole_report() -> None:
    assert shown(FOUND) == [
        "batch 40 fits, the largest that does (confirmed by a run)",
        "fastest of those run: batch 20, 200 samples/s; batch 40: 160",
        "memory limit: 100.0 MiB (--memory 100MiB)",
        "",
        "largest            fastest",
        "  batch      peak    batch  samples/s  per sample  limited by",
        "     40  99.0 MiB       20        200     2.5 MiB  --memory 100MiB",
        "",
        "batch run      peak      step  samples/s",
        "       20  52.0 MiB  100.0 ms        200",
        "       40  99.0 MiB  250.0 ms        160",
        "",
        "# for batch 40; `--objective throughput` prints them for the fastest of those run: batch 20, 200 samples/s; "
        "batch 40: 160",
        "# Lightning",
        "loader = DataLoader(dataset, batch_size=40, shuffle=True)",
        "trainer = Trainer(accumulate_grad_batches=1)",
        "# Hugging Face",
        "arguments = TrainingArguments(per_device_train_batch_size=40, gradient_accumulation_steps=1)",
        "# PyTorch",
        "loader = DataLoader(dataset, batch_size=40, shuffle=True)",
        "",
        "2 runs on data, 7 without; total time 3.00 s",
        "A note.",
        "wrote b.yaml",
    ]


def test_explain_names_no_objective_which_it_has_no_flag_for() -> None:
    said = Suggestion(
        change="micro-batches",
        text="2 micro-batches of 20",
        command="",
        recommendation=FOUND,
        predicted_bytes=None,
        peak_bytes=None,
        seconds=None,
    )
    told = Explanation(header=None, limit_bytes=9, limit="here", needed_bytes=9, instant=None, suggestions=(said,))
    lines = [*explanation.micro_batch_code(told)]
    assert lines[:2] == ["# 2 micro-batches of 20", "# Lightning"]


@pytest.mark.parametrize(
    ("loss", "steps", "is_told"),
    [("of targets", 2, True), ("of targets", 1, False), ("the output", 2, False), ("an entry", 2, False)],
)
def test_accumulation_with_a_loss_of_the_users_own_says_what_loss_it_suits(
    loss: Any, steps: int, is_told: bool
) -> None:
    accumulation = Accumulation(global_batch=4 * steps, batch=4, steps=steps)
    facts = cast(ModelFacts, SimpleNamespace(batch_norms=False, trainable_bytes=MIB))
    notes = [*accumulation_notes(accumulation, facts, ModelCall(loss=loss))]
    assert notes[0].endswith(" its peak is up to 1.0 MiB lower.") is (steps == 1)
    assert ("Accumulation trains as one large batch does only if the loss is a mean over samples." in notes) is is_told


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"objective": "throughput", "batch": 20}, "fastest of those run: batch 20, 200 samples/s; batch 40: 160"),
        ({"interrupted": True}, "batch 40 fits, the largest of those run"),
        ({"verified": False}, "about batch 40 would fit: an estimate, it was not run"),
        ({"accumulation": Accumulation(global_batch=512, batch=32, steps=16)}, "global batch 512: 16 × batch 32"),
    ],
)
def test_the_answer(change: dict[str, object], line: str) -> None:
    assert line in shown(replace(FOUND, **change))  # type: ignore[arg-type]


def test_which_of_several_state_dicts_is_used_stands_below_the_headline() -> None:
    note = "The file has several state dicts ('model', 'ema'); the first is used."
    lines = shown(replace(FOUND, notes=("another note", note)))
    assert lines[1] == note
    assert [lines.count(each) for each in ("another note", note)] == [1, 1]


def test_the_fastest_run_may_be_one_without_the_plan() -> None:
    slower = tuple(replace(run, step_s=2 * run.step_s) for run in ADVICE.probes)
    planned = BatchRow(planned=True, dims={}, outcome=replace(ADVICE, probes=slower))
    lines = shown(replace(FOUND, rows=(*FOUND.rows, planned), chosen=1))
    assert lines[1] == ("fastest of those run: batch 20 without the plan, 200 samples/s; batch 20 under the plan: 100")
    start = next(number for number, line in enumerate(lines) if "batch run" in line)
    assert [line.split()[:2] for line in lines[start + 1 : start + 5]] == [
        ["without", "20"],
        ["without", "40"],
        ["with", "20"],
        ["with", "40"],
    ]


def test_a_batch_limited_by_a_failure_is_not_called_the_largest_that_fits() -> None:
    outcome = replace(ADVICE, limited_by="a run at batch 90: killed by SIGSEGV")
    lines = shown(replace(FOUND, rows=(BatchRow(planned=False, dims={}, outcome=outcome),)))
    assert lines[0] == "batch 40 fits, the largest of those run; limited by a run at batch 90: killed by SIGSEGV"


def test_what_trains_fastest_is_pasted_without_a_word_on_the_largest() -> None:
    lines = shown(replace(FOUND, objective="throughput", batch=20))
    assert "loader = DataLoader(dataset, batch_size=20, shuffle=True)" in lines
    assert not any(line.startswith("# for batch") for line in lines)
    largest = replace(ADVICE, fastest_batch=40)
    lines = shown(replace(FOUND, rows=(BatchRow(planned=False, dims={}, outcome=largest),)))
    assert not any("fastest of those run" in line for line in lines)


def test_lines_for_the_fastest_batch_name_no_other_objective() -> None:
    """Passes of a global batch may be as large as the fastest batch that was run."""
    lines = shown(replace(FOUND, accumulation=Accumulation(global_batch=60, batch=20, steps=3)))
    assert "fastest of those run: batch 20, 200 samples/s; batch 40: 160" in lines
    assert not any(line.startswith("# for batch 20") for line in lines)


def test_accumulation_as_code_runs() -> None:
    lines = shown(replace(FOUND, accumulation=Accumulation(global_batch=512, batch=32, steps=16)))
    start = lines.index("# PyTorch")
    compile("\n".join(lines[start : lines.index("", start)]), "pasted", "exec")
    assert lines[start + 1] == "loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)"
    assert lines.index("optimizer.zero_grad()  # before each epoch: passes may be left over from the last one") > start
    assert "    (loss_function(model(inputs), targets) / 16).backward()" in lines
    assert "    if number % 16 == 0:" in lines


def test_a_last_batch_that_would_exceed_the_limit_is_dropped() -> None:
    over = BatchProbe(batch=10, allocated_peak_bytes=147 * MIB, step_s=0.1)
    outcome = replace(ADVICE, probes=(over, *ADVICE.probes))
    lines = shown(replace(FOUND, rows=(replace(FOUND.rows[0], outcome=outcome),)))
    assert "# drop_last: a smaller last batch may exceed the limit; batch 10 took 147.0 MiB" in lines
    assert lines.count("loader = DataLoader(dataset, batch_size=40, shuffle=True, drop_last=True)") == 2
    trainer = next(line for line in lines if line.startswith("arguments = "))
    assert trainer.endswith("gradient_accumulation_steps=1, dataloader_drop_last=True)")
    larger = replace(ADVICE, probes=(*ADVICE.probes, replace(over, batch=48)))
    assert not any(
        "drop_last" in line for line in shown(replace(FOUND, rows=(replace(FOUND.rows[0], outcome=larger),)))
    )


def test_a_batch_that_fits_under_the_plan_alone_is_pasted_with_it() -> None:
    row, apply = (
        BatchRow(planned=True, dims={}, outcome=ADVICE),
        "memopt_cli.apply_plan(model, 'p.plan.yaml')  # before it trains",
    )
    assert apply in shown(replace(FOUND, rows=(row,), plan="p.plan.yaml"))
    assert apply not in shown(replace(FOUND, plan="p.plan.yaml"))


def test_a_batch_of_a_compiled_step_is_pasted_with_what_compiles_it() -> None:
    lines = shown(replace(FOUND, backend="inductor"))
    assert lines[0] == "batch 40 fits, compiled by inductor, the largest that does (confirmed by a run)"
    assert "model.compile(backend='inductor')  # before it trains" in lines


def test_plans_sizes_and_what_was_not_run() -> None:
    rows = (
        BatchRow(planned=False, dims={"S": 128}, outcome=replace(ADVICE, estimated_batch=55, limited_by="the time")),
        BatchRow(
            planned=False,
            dims={"S": 256},
            outcome=BatchEstimate(batch=9, predicted_peak_bytes=3 * MIB, budget_bytes=4 * MIB),
        ),
        BatchRow(planned=True, dims={"S": 512}, outcome=NoBatchFits(batch=8, budget_bytes=4, reason="it took 9.0 GiB")),
    )
    lines = shown(replace(FOUND, rows=rows))
    assert lines[lines.index("# Lightning") - 2] == "# for S=128"
    assert lines[0] == (
        "batch 40 fits at S=128 (other S: see the table), without the plan, the largest that was run, limited by the "
        "time; about 55 would fit, as predicted"
    )
    assert [" ".join(line.split()) for line in lines[5:9]] == [
        "plan S batch peak batch samples/s per sample limited by",
        "without 128 40 99.0 MiB 20 200 2.5 MiB the time; about 55 would fit (an estimate)",
        "without 256 ~9 ~3.0 MiB – – – an estimate: it was not run",
        "with 512 none – – – – batch 8: it took 9.0 GiB",
    ]


def test_a_run_that_does_not_fit_is_marked_and_a_falling_peak_has_no_slope() -> None:
    over = BatchProbe(batch=48, allocated_peak_bytes=120 * MIB, step_s=0.3)
    late = BatchProbe(batch=44, allocated_peak_bytes=100 * MIB, step_s=90.0)
    outcome = replace(ADVICE, probes=(*ADVICE.probes, late, over), slope_bytes=-16.2 * MIB)
    lines = [" ".join(line.split()) for line in shown(replace(FOUND, rows=(replace(FOUND.rows[0], outcome=outcome),)))]
    assert "48 120.0 MiB 300.0 ms 160 over the limit" in lines
    assert "44 100.0 MiB 1 min 30 s 0.49 the step takes too long" in lines
    assert "40 99.0 MiB 250.0 ms 160" in lines
    assert "40 99.0 MiB 20 200 not linear --memory 100MiB" in lines
    assert "peak_fit" not in recommended_data(outcome, 40)


def test_ways_to_batch_sequences() -> None:
    ways = (
        LengthBatching(name="padding", batch=8, max_tokens=None, batches=7, waste=0.4321, peak_bytes=MIB, epoch_s=2.0),
        LengthBatching(
            name="token_budget", batch=None, max_tokens=96, batches=6, waste=0.01, peak_bytes=2 * MIB, epoch_s=1.0
        ),
        LengthBatching(
            name="sequence_packing", batch=8, max_tokens=None, batches=7, waste=0.0, peak_bytes=MIB, epoch_s=0.5
        ),
    )
    lines = [" ".join(line.split()) for line in shown(replace(FOUND, lengths=ways))]
    assert "padding 8 7 43.2 % ~1.0 MiB ~2.00 s" in lines
    assert "token budget max_tokens=96 6 1.0 % ~2.0 MiB ~1.00 s" in lines
    start = lines.index("# token budget, the fastest that pads")
    assert lines[start + 1].startswith("sampler = memopt_cli.batching.TokenBudgetSampler(lengths, max_tokens=96)")
    assert not any("batch_size=40" in line for line in lines)


REPLICAS = ReplicaAdvice(
    fastest=4,
    probes=(
        BatchProbe(batch=20, allocated_peak_bytes=10 * MIB, step_s=0.1),
        BatchProbe(batch=20, allocated_peak_bytes=40 * MIB, step_s=0.16, replicas=4, route="fused"),
        BatchProbe(batch=20, allocated_peak_bytes=160 * MIB, step_s=0.32, replicas=16, route="vmap"),
    ),
    limited_by="--memory 100MiB",
)


@pytest.mark.parametrize("copied", [False, True])
def test_a_busy_machine_is_mentioned(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt_cli.report.lines.BUSY", 0.2)
    busy = tuple(replace(run, waited=0.5) for run in ADVICE.probes)
    row = FOUND.rows[0]
    if copied:
        row = replace(row, replicas=replace(REPLICAS, probes=(*REPLICAS.probes[:2], replace(busy[0], replicas=16))))
    else:
        row = replace(row, outcome=replace(ADVICE, probes=busy))
    said = "the machine was busy: steps waited for a processor 50% of their time, so times are rough"
    assert said in shown(replace(FOUND, rows=(row,)))
    assert said not in shown(FOUND)


def test_copies() -> None:
    runs = tuple(replace(run, replicas=4, route="fused") for run in ADVICE.probes)
    row = BatchRow(planned=False, dims={}, outcome=replace(ADVICE, probes=runs), replicas=REPLICAS)
    lines = shown(replace(FOUND, rows=(row,)))
    assert lines[:13] == [
        "4 copies × batch 40 fits, the largest that does (confirmed by a run)",
        "fastest of those run: batch 20, 800 samples/s; batch 40: 640",
        "4 copies at batch 20: 2.5 times as many samples/s as 1 copy (fused); tried up to 16: --memory 100MiB",
        "memory limit: 100.0 MiB (--memory 100MiB)",
        "",
        "copies  batch of each       peak      step  samples/s  of each  route",
        "     1             20   10.0 MiB  100.0 ms        200      200  the model itself",
        "     4             20   40.0 MiB  160.0 ms        500      125  fused",
        "    16             20  160.0 MiB  320.0 ms      1,000       62  vmap, over the limit",
        "",
        "        largest            fastest",
        "copies    batch      peak    batch  samples/s  per sample  limited by",
        "     4       40  99.0 MiB       20        800     2.5 MiB  --memory 100MiB",
    ]
    assert "models = memopt_cli.model_batching.BatchModule(model, batch=4)" in lines
    assert "optimizer = torch.optim.AdamW(models.parameters())  # or yours: one for all copies" in lines
    assert "# 40 samples for each copy; the samples left over at the end are dropped" in lines
    assert "loader = DataLoader(dataset, batch_size=160, shuffle=True, drop_last=True)" in lines
    assert "    outputs = models(inputs, data_order='(g b)')" in lines
    assert not any("Lightning" in line for line in lines)


def test_copies_that_are_not_worth_it() -> None:
    slower = replace(REPLICAS, fastest=1, probes=REPLICAS.probes[:1], limited_by="more copies train no faster")
    lines = shown(replace(FOUND, rows=(BatchRow(planned=False, dims={}, outcome=ADVICE, replicas=slower),)))
    assert lines[0].startswith("1 copy × batch 40 fits, ")
    assert lines[2] == (
        "1 copy at batch 20: the fewest that were run are the fastest; tried up to 1: more copies train no faster"
    )
    assert "# Lightning" in lines

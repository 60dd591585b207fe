"""Text of ``memopt recommend-batch``: the batch that fits, and the settings to paste."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.records import (
    BatchAdvice,
    BatchEstimate,
    BatchProbe,
    BatchRecommendation,
    BatchRow,
    LengthBatching,
    ModelCall,
    NoBatchFits,
    ReplicaAdvice,
    StepSettings,
)
from memopt_cli.report.lines import busy_notes, plain_table
from memopt_cli.report.pasted import arguments_of, loop_lines, loop_of, loss_in, samples_of, training_settings
from memopt_cli.text.units import format_bytes, format_copies, format_seconds


def headline(recommendation: BatchRecommendation) -> Iterator[str]:
    """Yield the batch that fits, the fastest one if it is another, and the memory limit."""
    main = _main_row(recommendation)
    yield _fitting_batch(recommendation, main)
    if (fastest := _fastest(recommendation)) is not None:
        yield fastest
    if main.replicas is not None:
        yield _gain(main.replicas)
    if recommendation.accumulation is not None:
        passes = recommendation.accumulation
        yield f"global batch {passes.global_batch}: {passes.steps} × batch {passes.batch}"
    yield f"memory limit: {recommendation.limit}"


def _fitting_batch(recommendation: BatchRecommendation, main: BatchRow) -> str:
    """Return ``batch 40 fits at S=128, the largest that does (confirmed by a run)``, or an estimate."""
    where = _case_in_words(main)
    if any(row.dims != main.dims for row in recommendation.rows):
        where += "".join(f" (other {symbol}: see the table)" for symbol in main.dims)
    where += f", compiled by {recommendation.backend}" if recommendation.backend else ""
    if not main.planned and any(row.planned for row in recommendation.rows):
        where += ", without the plan"
    copies = f"{format_copies(main.replicas.fastest)} × " if main.replicas is not None else ""
    if not isinstance(main.outcome, BatchAdvice) or not recommendation.verified:
        estimate = f"{copies}batch {recommendation.batch}{where}"
        if recommendation.card:
            return f"{estimate} should fit on {recommendation.card}: an estimate"
        return f"about {estimate} would fit: an estimate, it was not run"
    largest, estimated = main.outcome.recommended_batch, main.outcome.estimated_batch
    if estimated > largest:
        run = f"the largest that was run, limited by {main.outcome.limited_by}"
        return f"{copies}batch {largest} fits{where}, {run}; about {estimated} would fit, as predicted"
    end = "the largest that does (confirmed by a run)"
    if recommendation.interrupted:
        end = "the largest of those run"
    elif f"({main.outcome.limited_by})" not in recommendation.limit:  # a run failed, though memory may suffice
        end = f"the largest of those run; limited by {main.outcome.limited_by}"
    return f"{copies}batch {largest} fits{where}, {end}"


def _fastest(recommendation: BatchRecommendation, batch: int | None = None) -> str | None:
    """Return ``fastest of those run: batch 20, 200 samples/s; batch 40: 160``; ``None`` if the largest is fastest.

    Runs without the plan count as well as those under it; if the fastest is in another row, the second batch is the
    fastest of the recommended row.  ``batch``: a batch that is named already, for which the
    answer is ``None`` too.
    """
    main = _main_row(recommendation)
    if not isinstance(main.outcome, BatchAdvice):
        return None
    fastest_by_row = [
        (row, _run_of(row.outcome, row.outcome.fastest_batch))
        for row in recommendation.rows
        if isinstance(row.outcome, BatchAdvice) and row.dims == main.dims
    ]
    row, fastest = max(fastest_by_row, key=lambda entry: (entry[1].samples_per_s, entry[0] is main))
    largest = _run_of(main.outcome, main.outcome.recommended_batch)
    if fastest is largest or (row is main and fastest.batch == batch):
        return None
    case = "" if row is main else " under the plan" if row.planned else " without the plan"
    other = largest if row is main else _run_of(main.outcome, main.outcome.fastest_batch)
    other_text = f"batch {other.batch}{_case_in_words(main) if case else ''}: {rate(other.samples_per_s)}"
    return f"fastest of those run: batch {fastest.batch}{case}, {rate(fastest.samples_per_s)} samples/s; {other_text}"


def _run_of(advice: BatchAdvice, batch: int) -> BatchProbe:
    return next(run for run in advice.probes if run.batch == batch)


def _gain(advice: ReplicaAdvice) -> str:
    """Return the speed-up of several copies of the model that train as one, according to ``advice``."""
    first, best = advice.probes[0], advice.best
    route = f" ({best.route})" if best.route else ""
    if best is first:
        gain = "the fewest that were run are the fastest"
    else:
        gain = (
            f"{best.samples_per_s / first.samples_per_s:.2g} times as many samples/s as {format_copies(first.replicas)}"
        )
    tried = f"tried up to {advice.probes[-1].replicas}: {advice.limited_by}"
    return f"{format_copies(best.replicas)} at batch {best.batch}: {gain}{route}; {tried}"


def tables(recommendation: BatchRecommendation) -> Iterator[Table]:
    """Yield the tables of ``recommendation``: copies, cases, runs, and ways to batch sequences; some have no rows."""
    yield from (_replica_table(row) for row in recommendation.rows if row.replicas is not None)
    yield _case_table(recommendation)
    yield _run_table(recommendation)
    yield _length_table(recommendation)


def _replica_table(row: BatchRow) -> Table:
    table = plain_table("copies", "batch of each", "peak", "step", "samples/s", "of each", "route", words=["route"])
    budget_bytes = row.outcome.budget_bytes
    for run in row.replicas.probes if row.replicas is not None else ():
        peak = format_bytes(run.allocated_peak_bytes)
        step = format_seconds(run.step_s)
        rates = rate(run.samples_per_s), rate(run.samples_per_s / run.replicas)
        route = run.route or "the model itself"
        if run.allocated_peak_bytes > budget_bytes:
            route += ", over the limit"
        table.add_row(str(run.replicas), str(run.batch), peak, step, *rates, route)
    return table


def _case_table(recommendation: BatchRecommendation) -> Table:
    symbol = next((name for row in recommendation.rows for name in row.dims), "")
    planned = any(row.planned for row in recommendation.rows)
    copied = any(row.replicas is not None for row in recommendation.rows)
    headings = [*(["plan"] if planned else []), *([symbol] if symbol else []), *(["copies"] if copied else [])]
    headings += ["largest\nbatch", "peak", "fastest\nbatch", "samples/s", "per sample", "limited by"]
    table = plain_table(*headings, names=["plan"], words=["limited by"])
    for row in recommendation.rows:
        plan_cell = ["with" if row.planned else "without"] if planned else []
        keys = [*plan_cell, *map(str, row.dims.values())]
        keys += ["–" if row.replicas is None else str(row.replicas.fastest)] if copied else []
        table.add_row(*keys, *_cells(row))
    return table


def _cells(row: BatchRow) -> tuple[str, ...]:
    match row.outcome:
        case BatchAdvice() as advice:
            fastest, largest = (_run_of(advice, size) for size in (advice.fastest_batch, advice.recommended_batch))
            is_estimated = advice.estimated_batch != advice.recommended_batch
            estimate_text = f"; about {advice.estimated_batch} would fit (an estimate)" if is_estimated else ""
            return (
                str(advice.recommended_batch),
                format_bytes(largest.allocated_peak_bytes),
                str(fastest.batch),
                rate(fastest.samples_per_s),
                format_bytes(advice.slope_bytes) if advice.slope_bytes > 0 else "not linear",  # other kernels ran
                advice.limited_by + estimate_text,
            )
        case BatchEstimate() as estimate:
            peak = f"~{format_bytes(estimate.predicted_peak_bytes)}"
            return (f"~{estimate.batch}", peak, "–", "–", "–", "an estimate: it was not run")
        case NoBatchFits() as nothing:
            return ("none", "–", "–", "–", "–", f"batch {nothing.batch}: {nothing.reason}")


def _run_table(recommendation: BatchRecommendation) -> Table:
    """Return a table of the batches that were run at the recommended sizes, without the plan and with it."""
    planned = any(row.planned for row in recommendation.rows)
    headings = [*(["plan"] if planned else []), "batch run", "peak", "step", "samples/s", ""]
    table = plain_table(*headings, names=["plan"], words=[""])
    for row in recommendation.rows:
        if row.dims != _main_row(recommendation).dims or not isinstance(row.outcome, BatchAdvice):
            continue
        plan_cell = ["with" if row.planned else "without"] if planned else []
        for run in row.outcome.probes:
            cells = (
                str(run.batch),
                format_bytes(run.allocated_peak_bytes),
                format_seconds(run.step_s),
                rate(run.samples_per_s),
            )
            table.add_row(*plan_cell, *cells, _verdict(run, row.outcome))
    return table


def _verdict(run: BatchProbe, advice: BatchAdvice) -> str:
    if run.allocated_peak_bytes > advice.budget_bytes:
        return "over the limit"
    return "the step takes too long" if run.batch > advice.recommended_batch else ""


def _length_table(recommendation: BatchRecommendation) -> Table:
    table = plain_table("sequences", "a batch", "batches", "waste", "peak", "epoch", names=["sequences"])
    for batching in recommendation.lengths:
        size = str(batching.batch) if batching.batch is not None else f"max_tokens={batching.max_tokens}"
        cells = (
            size,
            str(batching.batches),
            f"{100 * batching.waste:.1f} %",
            f"~{format_bytes(batching.peak_bytes)}",
            f"~{format_seconds(batching.epoch_s)}",
        )
        table.add_row(batching.name.replace("_", " "), *cells)
    return table


def settings(recommendation: BatchRecommendation, *, has_objective: bool = True) -> Iterator[str]:
    """Yield the lines to paste for ``recommendation``, for Lightning, Hugging Face's Trainer and plain PyTorch.

    ``has_objective``: whether the command has the flag ``--objective``, which may choose another batch.
    """
    batch, steps = recommendation.batch, 1
    if recommendation.accumulation is not None:
        batch, steps = recommendation.accumulation.batch, recommendation.accumulation.steps
    device = "cuda" if recommendation.card else recommendation.step.device
    main = _main_row(recommendation)
    if any(row.dims != main.dims for row in recommendation.rows):
        yield f"# for {', '.join(f'{symbol}={size}' for symbol, size in main.dims.items())}"
    if main.planned and recommendation.plan:
        yield f"memopt_cli.apply_plan(model, {recommendation.plan!r})  # before it trains"
    if recommendation.backend:
        yield f"model.compile(backend={recommendation.backend!r})  # before it trains"
    fastest = _fastest(recommendation, batch) if has_objective else None
    if fastest is not None and recommendation.objective == "max":
        yield f"# for batch {batch}; `--objective throughput` prints them for the {fastest}"
    advice = main.replicas
    if advice is not None and advice.fastest > 1:
        yield from _replica_settings(advice, batch, steps, recommendation.step, device, recommendation.call)
        return
    if recommendation.lengths:
        # Not every model takes packed sequences.
        padded = [batching for batching in recommendation.lengths if batching.name != "sequence_packing"]
        yield from _sequence_settings(min(padded, key=lambda batching: batching.epoch_s))
        yield from loop_of(recommendation.call, steps, recommendation.step, device)
        return
    outcome = main.outcome
    runs = outcome.probes if isinstance(outcome, BatchAdvice) else ()
    over_limit = [run for run in runs if run.allocated_peak_bytes > outcome.budget_bytes]
    yield from training_settings(batch, steps, recommendation.step, device, recommendation.call, over_limit)


def _sequence_settings(batching: LengthBatching) -> Iterator[str]:
    """Yield the lines of a ``DataLoader`` that batches sequences as ``batching`` does."""
    collate = "collate_fn=memopt_cli.batching.collate_padded"
    samplers = {
        "buckets": f"memopt_cli.batching.LengthBucketSampler(lengths, {batching.batch})",
        "token_budget": f"memopt_cli.batching.TokenBudgetSampler(lengths, max_tokens={batching.max_tokens})",
    }
    yield f"# {batching.name.replace('_', ' ')}, the fastest that pads"
    if batching.name in samplers:
        yield f"sampler = {samplers[batching.name]}  # sampler.set_epoch(epoch) before each epoch"
        yield f"loader = DataLoader(dataset, batch_sampler=sampler, {collate})"
    else:
        yield f"loader = DataLoader(dataset, batch_size={batching.batch}, shuffle=True, {collate})"


def _replica_settings(
    advice: ReplicaAdvice, batch: int, steps: int, step: StepSettings, device: str, call: ModelCall
) -> Iterator[str]:
    copies, fewest = advice.fastest, min(batch, advice.best.batch)
    outputs = f"models({arguments_of(call)}, data_order='(g b)')"
    yield f"models = memopt_cli.model_batching.BatchModule(model, batch={copies})"
    yield f"{outputs}  # once with {copies} × {fewest} samples: chooses what runs the copies"
    yield "optimizer = torch.optim.AdamW(models.parameters())  # or yours: one for all copies"
    yield f"# {batch} samples for each copy; the samples left over at the end are dropped"
    yield f"loader = DataLoader(dataset, batch_size={copies * batch}, shuffle=True, drop_last=True)"
    losses = f"memopt_cli.model_batching.batch_loss(outputs, targets, {copies}, loss_function, data_order='(g b)')"
    loss = f"{loss_in(call, 'outputs', losses)}.sum()"
    before, samples = f"outputs = {outputs}", samples_of(call)
    yield from loop_lines(loss, steps, step, device, before, model="models", samples=samples)


def remarks(recommendation: BatchRecommendation) -> Iterator[str]:
    """Yield the number of runs that led to the answer of ``recommendation``, their time, and notes."""
    total_time = format_seconds(recommendation.spent_s)
    yield f"{recommendation.probes} runs on data, {recommendation.dry_runs} without; total time {total_time}"
    all_advice = [row.replicas or row.outcome for row in recommendation.rows]
    yield from busy_notes(
        run.waited for advice in all_advice if isinstance(advice, BatchAdvice | ReplicaAdvice) for run in advice.probes
    )
    yield from recommendation.notes


def _main_row(recommendation: BatchRecommendation) -> BatchRow:
    return recommendation.rows[recommendation.chosen]


def _case_in_words(row: BatchRow) -> str:
    sizes = "".join(f" at {symbol}={size}" for symbol, size in row.dims.items())
    return sizes + (" under the plan" if row.planned else "")


def rate(samples_per_s: float) -> str:
    """Return ``samples_per_s`` as text, to two digits below 100."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.2g}"

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
    NoBatchFits,
    ReplicaAdvice,
    StepSettings,
)
from memopt_cli.report.lines import busy, plain_table
from memopt_cli.report.pasted import LOSS, loop_lines, training_settings
from memopt_cli.text.units import format_bytes, format_copies, format_seconds


def headline(found: BatchRecommendation) -> Iterator[str]:
    """Yield the batch that fits, the fastest one if it is another, and the memory limit."""
    main = _main(found)
    yield _fits(found, main)
    if (fastest := _fastest(main)) is not None:
        yield fastest
    if main.replicas is not None:
        yield _gain(main.replicas)
    if found.accumulation is not None:
        steps = found.accumulation.steps
        yield f"global batch {found.accumulation.global_batch}: {steps} × batch {found.accumulation.batch}"
    yield f"memory limit: {found.limit}"


def _fits(found: BatchRecommendation, main: BatchRow) -> str:
    """Return ``batch 40 fits at S=128, the largest that does; it was run``, or that it is an estimate."""
    where = _case(main) + (f", compiled by {found.backend}" if found.backend else "")
    if not main.planned and any(row.planned for row in found.rows):
        where += ", without the plan"
    copies = f"{format_copies(main.replicas.fastest)} × " if main.replicas is not None else ""
    if not isinstance(main.outcome, BatchAdvice) or not found.verified:
        estimate = f"{copies}batch {found.batch}{where}"
        if found.card:
            return f"{estimate} should fit on {found.card}: an estimate"
        return f"about {estimate} would fit: an estimate, it was not run"
    largest, estimated = main.outcome.recommended_batch, main.outcome.estimated_batch
    if estimated > largest:
        run = f"the largest that was run is {largest}, limited by {main.outcome.limited_by}"
        return f"about {copies}batch {estimated} fits{where}, as predicted; {run}"
    end = "the largest of those run" if found.interrupted else "the largest that does; it was run"
    return f"{copies}batch {largest} fits{where}, {end}"


def _fastest(main: BatchRow) -> str | None:
    """Return ``fastest of those run: batch 20, 200 samples/s; batch 40: 160``; ``None`` if the largest is fastest."""
    if not isinstance(main.outcome, BatchAdvice):
        return None
    runs = {run.batch: run for run in main.outcome.probes}
    fastest, largest = runs[main.outcome.fastest_batch], runs[main.outcome.recommended_batch]
    if fastest is largest:
        return None
    beside = f"batch {largest.batch}: {_rate(largest)}"
    return f"fastest of those run: batch {fastest.batch}, {_rate(fastest)} samples/s; {beside}"


def _gain(advice: ReplicaAdvice) -> str:
    """Return how much faster several copies of the model train as one, according to ``advice``."""
    first, best = advice.probes[0], advice.best
    route = f" ({best.route})" if best.route else ""
    if best is first:
        gain = "the fewest that were run are the fastest"
    else:
        gain = (
            f"{best.samples_per_s / first.samples_per_s:.2g} times as many samples/s as {format_copies(first.replicas)}"
        )
    end = f"tried up to {advice.probes[-1].replicas}: {advice.limited_by}"
    return f"{format_copies(best.replicas)} at batch {best.batch}: {gain}{route}; {end}"


def tables(found: BatchRecommendation) -> Iterator[Table]:
    """Yield the tables of ``found``: of copies, cases, runs, and ways to batch sequences; some have no rows."""
    yield from (_replica_table(row) for row in found.rows if row.replicas is not None)
    yield _case_table(found)
    yield _run_table(found)
    yield _length_table(found)


def _replica_table(row: BatchRow) -> Table:
    """Return a table of the numbers of copies that were run in the case ``row``."""
    table = plain_table("copies", "batch of each", "peak", "step", "samples/s", "of each", "route", words=["route"])
    for run in row.replicas.probes if row.replicas is not None else ():
        peak, step = format_bytes(run.allocated_peak_bytes), format_seconds(run.step_s)
        each = rate(run.samples_per_s / run.replicas)
        table.add_row(str(run.replicas), str(run.batch), peak, step, _rate(run), each, run.route or "the model itself")
    return table


def _case_table(found: BatchRecommendation) -> Table:
    """Return a table with a row for each case: without the plan and with it, at each size."""
    symbol = next((name for row in found.rows for name in row.dims), "")
    planned = any(row.planned for row in found.rows)
    copied = any(row.replicas is not None for row in found.rows)
    headings = [*(["plan"] if planned else []), *([symbol] if symbol else []), *(["copies"] if copied else [])]
    headings += ["largest\nbatch", "peak", "fastest\nbatch", "samples/s", "per sample", "limited by"]
    table = plain_table(*headings, names=["plan"], words=["limited by"])
    for row in found.rows:
        keys = [*(["with" if row.planned else "without"] if planned else []), *map(str, row.dims.values())]
        keys += ["–" if row.replicas is None else str(row.replicas.fastest)] if copied else []
        table.add_row(*keys, *_cells(row))
    return table


def _cells(row: BatchRow) -> tuple[str, ...]:
    match row.outcome:
        case BatchAdvice() as advice:
            runs = {run.batch: run for run in advice.probes}
            fastest = runs[advice.fastest_batch]
            return (
                str(advice.recommended_batch),
                format_bytes(runs[advice.recommended_batch].allocated_peak_bytes),
                str(fastest.batch),
                _rate(fastest),
                format_bytes(advice.slope_bytes),
                advice.limited_by + _beyond(advice),
            )
        case BatchEstimate() as estimate:
            peak = f"~{format_bytes(estimate.predicted_peak_bytes)}"
            return (f"~{estimate.batch}", peak, "–", "–", "–", "an estimate: it was not run")
        case NoBatchFits() as nothing:
            return ("none", "–", "–", "–", "–", f"batch {nothing.batch}: {nothing.reason}")


def _beyond(advice: BatchAdvice) -> str:
    if advice.estimated_batch == advice.recommended_batch:
        return ""
    return f"; about {advice.estimated_batch} would fit (an estimate)"


def _run_table(found: BatchRecommendation) -> Table:
    """Return a table of the batches that were run in the recommended case."""
    table = plain_table("batch run", "peak", "step", "samples/s")
    outcome = _main(found).outcome
    for run in outcome.probes if isinstance(outcome, BatchAdvice) else ():
        table.add_row(str(run.batch), format_bytes(run.allocated_peak_bytes), format_seconds(run.step_s), _rate(run))
    return table


def _length_table(found: BatchRecommendation) -> Table:
    """Return a table of how to batch the user's sequences."""
    table = plain_table("sequences", "a batch", "batches", "waste", "peak", "epoch", names=["sequences"])
    for batching in found.lengths:
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


def settings(found: BatchRecommendation) -> Iterator[str]:
    """Yield lines to paste for what ``found`` recommends, for Lightning, Hugging Face's Trainer and plain PyTorch."""
    batch, steps = found.batch, 1
    if found.accumulation is not None:
        batch, steps = found.accumulation.batch, found.accumulation.steps
    device = "cuda" if found.card else found.step.device
    if _main(found).planned and found.plan:
        yield f"memopt_cli.apply_plan(model, {found.plan!r})  # before it trains"
    if found.backend:
        yield f"model.compile(backend={found.backend!r})  # before it trains"
    fastest = _fastest(_main(found))
    if fastest is not None and found.objective == "max":
        yield f"# {fastest}"
    advice = _main(found).replicas
    if advice is not None and advice.fastest > 1:
        yield from _replica_settings(advice, batch, steps, found.step, device)
        return
    if found.lengths:
        # Not every model takes packed sequences.
        padded = [batching for batching in found.lengths if batching.name != "sequence_packing"]
        yield from _sequence_settings(min(padded, key=lambda batching: batching.epoch_s))
        yield from loop_lines(LOSS, steps, found.step, device, unless_plain=True)
        return
    yield from training_settings(batch, steps, found.step, device)


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


def _replica_settings(advice: ReplicaAdvice, batch: int, steps: int, step: StepSettings, device: str) -> Iterator[str]:
    copies, few = advice.fastest, min(batch, advice.best.batch)
    yield f"models = memopt_cli.model_batching.BatchModule(model, batch={copies})"
    yield f"models(inputs, data_order='(g b)')  # once with {copies} × {few} samples: chooses what runs the copies"
    yield "optimizer = torch.optim.AdamW(models.parameters())  # or yours: one for all copies"
    yield f"# {batch} samples for each copy; the samples left over at the end are dropped"
    yield f"loader = DataLoader(dataset, batch_size={copies * batch}, shuffle=True, drop_last=True)"
    losses = f"memopt_cli.model_batching.batch_loss(outputs, targets, {copies}, loss_function, data_order='(g b)')"
    outputs = "outputs = models(inputs, data_order='(g b)')"
    yield from loop_lines(f"{losses}.sum()", steps, step, device, outputs, model="models")


def remarks(found: BatchRecommendation) -> Iterator[str]:
    """Yield how many runs the answer of ``found`` rests on, how long they took, and notes."""
    yield f"{found.probes} runs on data, {found.dry_runs} without; total time {format_seconds(found.spent_s)}"
    yield from busy(run.waited for row in found.rows for run in _runs(row))
    yield from found.notes


def _runs(row: BatchRow) -> tuple[BatchProbe, ...]:
    """Return the runs in the case ``row``."""
    advice = row.replicas or row.outcome
    return advice.probes if isinstance(advice, BatchAdvice | ReplicaAdvice) else ()


def _main(found: BatchRecommendation) -> BatchRow:
    """Return the recommended case of ``found``."""
    return found.rows[found.chosen]


def _case(row: BatchRow) -> str:
    sizes = "".join(f" at {symbol}={size}" for symbol, size in row.dims.items())
    return sizes + (" under the plan" if row.planned else "")


def _rate(run: BatchProbe) -> str:
    return rate(run.samples_per_s)


def rate(samples_per_s: float) -> str:
    """Return ``samples_per_s`` as text, to two digits below 100."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.2g}"

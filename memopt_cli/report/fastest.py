"""Text of ``memopt recommend-batch --search``: the fastest batch and plan, and all that were run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.records import BatchProbe, Differs, FastestTraining, PairRun, describe
from memopt_cli.report.lines import busy_notes, plain_table
from memopt_cli.report.optimization import in_words, verification_line
from memopt_cli.report.pasted import training_settings
from memopt_cli.report.recommendation import rate
from memopt_cli.text.units import format_bytes, format_count, format_seconds


def headline(training: FastestTraining) -> Iterator[str]:
    """Yield the batch and the plan that ``training`` recommends, what they gain, and the memory limit."""
    answer = training.answer
    under = "without a plan" if answer.plan.is_empty else f"under a plan ({in_words(answer.plan)})"
    yield f"recommended: batch {answer.batch} {under}, the fastest of those run within the limit"
    yield gain(training)
    if training.accumulation is not None:
        yield f"global batch {training.accumulation.global_batch}: {answer.steps} × batch {answer.batch}"
    yield f"memory limit: {training.limit}"


def gain(training: FastestTraining) -> str:
    """Return the samples per second of the answer, compared with the best batch of the original model."""
    speed = training.answer.samples_per_s or 0.0
    if training.original is None:
        return f"{rate(speed)} samples/s; without a plan no batch fits"
    if training.original == training.chosen:
        return f"{rate(speed)} samples/s; {_why_no_plan(training)}"
    original = training.runs[training.original]
    ratio = speed / (original.samples_per_s or speed)
    return f"{rate(speed)} samples/s, {ratio:.2f} times the original at its best batch, {original.batch}"


def _why_no_plan(training: FastestTraining) -> str:
    """Return the reason why the answer of ``training`` has no plan."""
    if not training.priced and training.accumulation is not None and training.accumulation.steps == 1:
        return "no plan was tried, as no batch may be larger than the global one"
    if not training.priced:
        return "no plan was tried"
    if training.dropped:
        return f"with a plan it is faster, but {training.dropped[0].why.because}"
    if any(not run.plan.is_empty for run in training.runs):
        return "no plan that was run is faster"
    return "no plan is predicted to be faster"


RUN_HEADINGS = ("batch", "plan", "peak", "step", "samples/s", "")


def run_rows(training: FastestTraining) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the index and cells of every run of ``training``, under :data:`RUN_HEADINGS`; without a plan first."""
    order = sorted(
        range(len(training.runs)), key=lambda i: (not training.runs[i].plan.is_empty, training.runs[i].batch)
    )
    for index in order:
        run = training.runs[index]
        yield index, (str(run.batch), in_words(run.plan), *_numbers(run), _verdict(training, index))


def run_table(training: FastestTraining) -> Table:
    """Return :func:`run_rows` as a table, the recommended run in bold."""
    table = plain_table(*RUN_HEADINGS, words=["plan", ""])
    for index, cells in run_rows(training):
        table.add_row(*cells, style="bold" if index == training.chosen else None)
    return table


def _numbers(run: PairRun) -> tuple[str, str, str]:
    if not isinstance(run.outcome, BatchProbe) or run.samples_per_s is None:
        return "–", "–", "–"
    return format_bytes(run.outcome.allocated_peak_bytes), format_seconds(run.outcome.step_s), rate(run.samples_per_s)


def _verdict(training: FastestTraining, index: int) -> str:
    run = training.runs[index]
    if index == training.chosen:
        return "recommended"
    if not isinstance(run.outcome, BatchProbe):
        return describe(run.outcome)
    if run.outcome.allocated_peak_bytes > training.budget_bytes:
        return "over the limit"
    if run.late:
        return "the step takes too long"
    if not run.usable:
        return "does not divide the global batch"
    for dropped in training.dropped:
        if run.plan == dropped.plan:
            return "verification failed" if isinstance(dropped.why, Differs) else "could not be verified"
    return "the original's best" if index == training.original else ""


def settings(training: FastestTraining) -> Iterator[str]:
    """Yield the lines to paste into a training script for the answer of ``training``."""
    answer = training.answer
    plan = next((file for file in training.files if file.endswith(".plan.yaml")), None)
    if not answer.plan.is_empty:
        argument, where = ("plan", "plan is the result's .plan; ") if plan is None else (repr(plan), "")
        yield f"memopt_cli.apply_plan(model, {argument})  # {where}before it trains"
    runs = (run.outcome for run in training.runs if run.plan == answer.plan and isinstance(run.outcome, BatchProbe))
    over_limit = [run for run in runs if run.allocated_peak_bytes > training.budget_bytes]
    device = training.step.device
    yield from training_settings(answer.batch, answer.steps, training.step, device, training.call, over_limit)


def remarks(training: FastestTraining) -> Iterator[str]:
    """Yield the number of runs that led to the answer of ``training``, their time, and notes."""
    if training.verification is not None:
        yield verification_line(training.verification)
    yield (
        f"{format_count(training.times_run, 'run')} of {format_count(len(training.runs), 'pair')}, "
        f"{format_count(training.dry_runs, 'dry run')}, {format_count(training.priced, 'plan')} predicted; "
        f"total time {format_seconds(training.spent_s)}"
    )
    yield from busy_notes(run.outcome.waited for run in training.runs if isinstance(run.outcome, BatchProbe))
    yield from (dropped.sentence for dropped in training.dropped)
    yield from training.notes

"""Text on one rank of many: its tensor peak, predicted or measured, and the bytes that it exchanges."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.inputs.spec_text import format_layout
from memopt_cli.records import GroupMeasurement, PlannedRanks, RankMeasurement, RankPrediction, StepProfile
from memopt_cli.report.lines import plain_table
from memopt_cli.text.units import format_bytes, format_count, format_seconds

TENSOR_PEAK = "tensor peak of one rank, predicted"


def headline(profile: StepProfile) -> Iterator[str]:
    """Yield the peak of every predicted rank of ``profile``, the largest first; nothing if no rank was predicted."""
    largest = profile.rank
    if largest is None:
        return
    peak = format_bytes(largest.tensor_peak_bytes)
    yield f"{TENSOR_PEAK}: {peak} on rank {largest.rank} of {largest.layout.ranks} ({format_layout(largest.layout)})"
    for other in profile.ranks:
        if other is not largest:
            yield f"on rank {other.rank}: {format_bytes(other.tensor_peak_bytes)}"


def planned_headline(ranks: PlannedRanks) -> str:
    """Return ``tensor peak of one rank, predicted: 71.9 MiB → 39.4 MiB (8 ranks, fsdp over dp 8)`` for ``ranks``."""
    before = ranks.original
    after = max(ranks.planned, key=lambda rank: rank.tensor_peak_bytes)
    peaks = f"{format_bytes(before.tensor_peak_bytes)} → {format_bytes(after.tensor_peak_bytes)}"
    return f"{TENSOR_PEAK}: {peaks} ({before.layout.ranks} ranks, {format_layout(before.layout)})"


def planned_lines(ranks: PlannedRanks, *, verified: bool) -> Iterator[str]:
    """Yield the bytes that each rank of ``ranks`` needs and exchanges, and what was run to verify the plan."""
    for rank in ranks.planned:
        calls = format_count(sum(each.calls for each in rank.collectives), "collective")
        yield (
            f"rank {rank.rank}: {format_bytes(rank.tensor_peak_bytes)}, {calls} of "
            f"{format_bytes(rank.exchanged_bytes)} in all"
        )
    proof = "; the model was verified whole, in one process" if verified else ""
    yield f"predicted on tensors without data: no group of ranks ran{proof}"


_SHOWN = 16
"""Maximum number of ranks in the table: the first ones, and in any case the largest."""


def measured_headline(measurement: GroupMeasurement) -> Iterator[str]:
    """Yield the peak of the largest rank of ``measurement``, the error of its prediction, and the time of a step."""
    peak = format_bytes(measurement.tensor_peak_bytes)
    largest = measurement.largest
    yield (
        f"tensor peak of one rank, measured: {peak} on rank {largest.rank} of {measurement.layout.ranks} "
        f"({format_layout(measurement.layout)})"
    )
    predicted = measurement.predicted
    if predicted is not None:
        counted_bytes = measurement.ranks[predicted.rank].tensor_peak_bytes
        gap_bytes = predicted.tensor_peak_bytes - counted_bytes
        difference = f"{abs(gap_bytes) / counted_bytes:.2%} {'more' if gap_bytes > 0 else 'less'} than it counted"
        yield (
            f"predicted for rank {predicted.rank}: {format_bytes(predicted.tensor_peak_bytes)}, "
            f"{difference if gap_bytes else 'exactly as counted'}"
        )
    yield f"allocated peak {format_bytes(measurement.allocated_peak_bytes)}, step {format_seconds(measurement.step_s)}"


def rank_table(measurement: GroupMeasurement) -> Table:
    """Return a table of the memory and the step time of each rank."""
    table = plain_table("rank", "tensor peak", "allocated peak", "resident", "step")
    first = measurement.ranks[:_SHOWN]
    for each in first if measurement.largest in first else (*first[:-1], measurement.largest):
        sizes = (each.tensor_peak_bytes, each.allocated_peak_bytes, each.resident_bytes)
        table.add_row(f"{each.rank}", *map(format_bytes, sizes), format_seconds(each.step_s))
    return table


def measured_remarks(measurement: GroupMeasurement) -> Iterator[str]:
    """Yield the plan of the ranks, how peaks were counted, and notes."""
    if len(measurement.ranks) > _SHOWN:
        yield f"{len(measurement.ranks) - _SHOWN} more ranks are in the JSON"
    plan = (
        "without a plan"
        if measurement.plan.is_empty
        else f"plan {measurement.plan_digest[:12]} (SHA-256), the same on every rank"
    )
    yield f"{plan}; peaks and times are the most of any rank; allocated peaks counted by {measurement.ranks[0].backend}"
    yield from measurement.notes


def collective_table(found: RankPrediction | RankMeasurement) -> Table:
    """Return a table of the collectives that the rank of ``found`` takes part in during one step."""
    table = plain_table("exchanged in a step", "calls", "tensors as\na whole", names=["exchanged in a step"])
    for each in found.collectives:
        table.add_row(each.kind, f"{each.calls}", format_bytes(each.whole_bytes))
    return table


NOTE = (
    "predicted on tensors without data, in one process: no other rank ran, and no real group has confirmed it; what a "
    "backend stages for itself (NCCL, gloo) is not counted"
)

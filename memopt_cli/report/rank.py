"""One rank of many, for people: its tensor peak, predicted, and what it exchanges with the others."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.records import PlannedRanks, RankPrediction, StepProfile
from memopt_cli.spec_text import format_layout
from memopt_cli.units import counted, format_bytes

TENSOR_PEAK = "tensor peak of one rank, predicted"


def headline(found: StepProfile) -> Iterator[str]:
    """The peak of every rank that was asked for, that of the largest first."""
    largest = found.rank
    if largest is None:
        return
    peak = format_bytes(largest.tensor_peak_bytes)
    yield f"{TENSOR_PEAK}: {peak} on rank {largest.rank} of {largest.layout.ranks} ({format_layout(largest.layout)})"
    for other in found.ranks:
        if other is not largest:
            yield f"on rank {other.rank}: {format_bytes(other.tensor_peak_bytes)}"


def planned_headline(found: PlannedRanks) -> str:
    """``tensor peak of one rank, predicted: 71.9 MiB → 39.4 MiB (8 ranks, fsdp over dp 8)``."""
    before, after = found.original, max(found.planned, key=lambda rank: rank.tensor_peak_bytes)
    peaks = f"{format_bytes(before.tensor_peak_bytes)} → {format_bytes(after.tensor_peak_bytes)}"
    return f"{TENSOR_PEAK}: {peaks} ({before.layout.ranks} ranks, {format_layout(before.layout)})"


def planned_lines(found: PlannedRanks) -> Iterator[str]:
    """What each rank needs, what is exchanged, and what was run of it."""
    for rank in found.planned:
        calls = counted(sum(each.calls for each in rank.collectives), "collective")
        yield (
            f"rank {rank.rank}: {format_bytes(rank.tensor_peak_bytes)}, {calls} of "
            f"{format_bytes(rank.exchanged_bytes)} in all"
        )
    yield "predicted on tensors without data: no group of ranks ran; the model was verified whole, in one process"


def collective_table(found: RankPrediction) -> Table:
    """What it exchanges in one step, by kind."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("exchanged in a step", "calls", "tensors as\na whole"):
        table.add_column(heading, justify="left" if heading.startswith("exchanged") else "right", no_wrap=True)
    for each in found.collectives:
        table.add_row(each.kind, f"{each.calls}", format_bytes(each.whole_bytes))
    return table


NOTE = (
    "predicted on tensors without data, in one process: no other rank ran, and no real group has confirmed it; what a "
    "backend stages for itself (NCCL, gloo) is not counted"
)

"""One rank of many, for people: its tensor peak, predicted, and what it exchanges with the others."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from memopt_cli.records import RankPrediction, StepProfile
from memopt_cli.spec_text import format_layout
from memopt_cli.units import format_bytes

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

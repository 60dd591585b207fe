"""Limits on every later step, which may read no more than the step by which the structure was found."""

from __future__ import annotations

from memopt_cli.online.reach import Reach
from memopt_cli.online.structure import Source
from memopt_cli.online.traces import CellOutput, PastState, Use


def not_followed(reach: Reach) -> dict[PastState, frozenset[Source]]:
    """Return state that carries nothing of traced weights -> all that it was computed from."""
    found: dict[PastState, frozenset[Source]] = {}
    for cell in reach.probe.cells.keys() - reach.cells:
        outs = [out for out in reach.outs if out.cell == cell]
        known = frozenset[Source]().union(*map(reach.known, outs))
        found |= {PastState(cell, state.name): known for state in reach.probe.states[cell]}
    return found


def unread(
    reach: Reach, constant: frozenset[Use], connected: frozenset[Use], read_by_attached: set[Use]
) -> frozenset[PastState | Use]:
    """Return the states, and the uses of traced weights, that only cells which are tied to them read."""
    inputs = [reach.reads[use] for use in reach.uses if use not in constant]
    others = [reach.reads[out] for out in reach.outs if out not in reach.followed]
    read = set[Source](reach.probe.overwritten | reach.probe.read_outside).union(
        *(reach.sources_behind(r)[1] for r in (*inputs, *others, *reach.probe.of_output))
    )
    for out in reach.followed:
        own = reach.reads[out]
        read |= own.weighted | {s for s in own.direct if isinstance(s, PastState) and s.cell != out.cell}
    uses = reach.reached.keys() - connected - read_by_attached
    return frozenset((reach.new.keys() | uses) - read)


def weighted(reach: Reach) -> dict[CellOutput | PastState, frozenset[Source]]:
    """Return output of a cell, or state not followed -> parts that carry traces and reach it through weights alone."""
    found: list[tuple[CellOutput | PastState, frozenset[Source]]] = [
        (out, reach.known(out) - reach.reads[out].direct) for out in reach.outs if out in reach.followed
    ]
    found += not_followed(reach).items()  # by no path past weights: else they would be
    carrying = {key: frozenset(filter(reach.carries, sources)) for key, sources in found}
    return {key: sources for key, sources in carrying.items() if sources}

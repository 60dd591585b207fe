"""What every later step is held to: that it reads no more than the step by which the structure was found."""

from __future__ import annotations

from memopt_cli.online.reach import Reach
from memopt_cli.online.structure import Source
from memopt_cli.online.traces import Held, Left, Use


def not_followed(reach: Reach) -> dict[Held, frozenset[Source]]:
    """States that carry nothing of traced weights -> all that they were computed from."""
    found: dict[Held, frozenset[Source]] = {}
    for cell in reach.probe.cells.keys() - reach.cells:
        lefts = [left for left in reach.lefts if left.cell == cell]
        known = frozenset[Source]().union(*map(reach.known, lefts))
        found |= {Held(cell, state.name): known for state in reach.probe.states[cell]}
    return found


def unread(
    reach: Reach, constant: frozenset[Use], connected: frozenset[Use], read_by_attached: set[Use]
) -> frozenset[Held | Use]:
    """States, and outputs of traced weights, that no gradient reaches but from the cells that are tied to them."""
    inputs = [reach.reads[use] for use in reach.uses if use not in constant]
    others = [reach.reads[left] for left in reach.lefts if left not in reach.followed]
    read = set[Source](reach.probe.overwritten | reach.probe.read_outside).union(
        *(reach.behind_it(r)[1] for r in (*inputs, *others, *reach.probe.of_output))
    )
    for left in reach.followed:
        own = reach.reads[left]
        read |= own.weighted | {s for s in own.direct if isinstance(s, Held) and s.cell != left.cell}
    uses = reach.reached.keys() - connected - read_by_attached
    return frozenset((reach.new.keys() | uses) - read)


def weighted(reach: Reach) -> dict[Left | Held, frozenset[Source]]:
    """What carries traces and reaches a tensor that leaves a cell, or a state that is not followed, past weights."""
    found: list[tuple[Left | Held, frozenset[Source]]] = [
        (left, reach.known(left) - reach.reads[left].direct) for left in reach.lefts if left in reach.followed
    ]
    found += not_followed(reach).items()  # by no path past weights: else they would be
    carrying = {key: frozenset(filter(reach.carries, sources)) for key, sources in found}
    return {key: sources for key, sources in carrying.items() if sources}

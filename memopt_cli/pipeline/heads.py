"""Notes on what a training script must mind under a plan that runs a head through its loss."""

from __future__ import annotations

from memopt_cli.records import Plan
from memopt_cli.text.paths import quote_module
from memopt_cli.text.units import format_some


def heads_notes(plan: Plan) -> list[str]:
    """Return a note on the linear layers that ``plan`` runs in chunks through their loss; none if there are none."""
    heads = dict.fromkeys(quote_module(segment.path) for segment in plan.everywhere if segment.through_loss)
    if not heads:
        return []
    verb, its = ("runs", "its") if len(heads) == 1 else ("run", "their")
    return [
        f"{format_some([*heads])} {verb} in chunks through {its} loss, so {its} logits are not kept. Reading them "
        "recomputes them (in train mode), which must happen before optimizer.step()."
    ]

"""Gradient accumulation: a global batch split into several passes that fit, before one step of the optimizer."""

from __future__ import annotations

from memopt_cli.records import Accumulation

_MAX_RATIO = 2
"""To make all passes equal, at most this many times the fewest possible passes are made."""


def accumulate(global_batch: int, largest: int, multiple_of: int = 1) -> Accumulation:
    """Return the fewest equal passes that make up ``global_batch``, each of at most ``largest`` samples.

    The samples of a pass are a multiple of ``multiple_of``, as ``largest`` must be.  If no number of passes up to twice
    the fewest divides ``global_batch``, the passes together have a few samples more.
    """
    fewest = -(-global_batch // largest)
    for steps in range(fewest, _MAX_RATIO * fewest + 1):
        batch, rest = divmod(global_batch, steps)
        if rest == 0 and batch > 0 and batch % multiple_of == 0:
            return Accumulation(global_batch=global_batch, batch=batch, steps=steps)
    batch = -(-global_batch // (fewest * multiple_of)) * multiple_of
    return Accumulation(global_batch=global_batch, batch=batch, steps=fewest)


def make_accumulation(batch: int, steps: int) -> Accumulation | None:
    """Return the accumulation of ``steps`` passes of ``batch`` samples each; ``None`` if there is a single pass."""
    return Accumulation(global_batch=batch * steps, batch=batch, steps=steps) if steps > 1 else None

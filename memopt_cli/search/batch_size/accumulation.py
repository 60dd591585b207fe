"""Gradient accumulation: one step of the optimizer made of several that fit."""

from __future__ import annotations

from memopt_cli.records import Accumulation

_MORE_STEPS = 2
"""Multiple of the fewest steps that may be taken so that all batches are equal."""


def accumulate(global_batch: int, largest: int, multiple_of: int = 1) -> Accumulation:
    """Return the fewest equal steps that make up ``global_batch``, each of at most ``largest`` samples.

    Steps are a multiple of ``multiple_of``, of which ``largest`` is one, too.  Where no number of steps up to twice the
    fewest divides ``global_batch``, the steps together have a few samples more than it.
    """
    fewest = -(-global_batch // largest)
    for steps in range(fewest, _MORE_STEPS * fewest + 1):
        batch, rest = divmod(global_batch, steps)
        if rest == 0 and batch > 0 and batch % multiple_of == 0:
            return Accumulation(global_batch=global_batch, batch=batch, steps=steps)
    batch = -(-global_batch // (fewest * multiple_of)) * multiple_of
    return Accumulation(global_batch=global_batch, batch=batch, steps=fewest)


def accumulated(batch: int, steps: int) -> Accumulation | None:
    """Return how ``steps`` passes of ``batch`` samples make a step of the optimizer; ``None`` for a single pass."""
    return Accumulation(global_batch=batch * steps, batch=batch, steps=steps) if steps > 1 else None

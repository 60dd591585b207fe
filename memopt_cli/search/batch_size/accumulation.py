"""Gradient accumulation: a global batch split into several passes that fit, before one step of the optimizer."""

from __future__ import annotations

from memopt_cli.records import Accumulation

_MAX_RATIO = 2
"""Maximum number of passes, as a multiple of the minimum, that is made so that all are equal."""


def accumulate(global_batch: int, largest: int, multiple_of: int = 1) -> Accumulation:
    """Return the minimum number of equal passes that make up ``global_batch``, each of at most ``largest`` samples.

    The samples of a pass are a multiple of ``multiple_of``, as ``largest`` must be.  If no number of passes up to twice
    the minimum divides ``global_batch``, the passes together have a few samples more.
    """
    min_steps = -(-global_batch // largest)
    for steps in range(min_steps, _MAX_RATIO * min_steps + 1):
        batch, rest = divmod(global_batch, steps)
        if rest == 0 and batch > 0 and batch % multiple_of == 0:
            return Accumulation(global_batch=global_batch, batch=batch, steps=steps)
    batch = -(-global_batch // (min_steps * multiple_of)) * multiple_of
    return Accumulation(global_batch=global_batch, batch=batch, steps=min_steps)


def make_accumulation(batch: int, steps: int) -> Accumulation | None:
    """Return the accumulation of ``steps`` passes of ``batch`` samples each; ``None`` if there is a single pass."""
    return Accumulation(global_batch=batch * steps, batch=batch, steps=steps) if steps > 1 else None

"""A recorded step at other batch sizes, interpolated linearly between recordings at two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from memopt_cli.records import UPDATE_PHASES, Plan, StepTrace, StorageTrace
from memopt_cli.search.plan.cost_model import CostModel

_RATES = (
    "packing_bytes_per_s",
    "out_bytes_per_s",
    "in_bytes_per_s",
    "copying_s_per_byte",
    "segment_overhead",
    "recompute_factor",
)
"""Fields of a record that describe the device, and only a timed record has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledStep:
    """One step, recorded at two batch sizes with the same operators; :func:`pair_records` makes it."""

    small: StepTrace
    large: StepTrace

    @property
    def timed(self) -> StepTrace:
        """The larger record with timed operators; the larger record if neither was timed."""
        timed = (step for step in (self.large, self.small) if any(op.seconds for op in step.ops))
        return next(timed, self.large)

    def scale_to(self, batch: int, *, pace: float, update_pace: float) -> StepTrace:
        """Return the step at ``batch`` samples: its bytes, flops and shapes lie on the line through the two records.

        Operators take ``pace`` times as long as in :attr:`timed`.  Operators of the update, whose time does not depend
        on the batch, take ``update_pace`` times as long.
        """
        share = (batch - self.small.batch) / (self.large.batch - self.small.batch)
        step: StepTrace = _interpolate(self.small, self.large, share)
        ops = tuple(
            replace(op, seconds=timed.seconds * (update_pace if timed.phase in UPDATE_PHASES else pace))
            for op, timed in zip(step.ops, self.timed.ops, strict=True)
        )
        pairs = zip(step.storages, self.small.storages, self.large.storages, strict=True)
        storages = tuple(_with_common_compressor(*storage) for storage in pairs)
        rates = {name: getattr(self.timed, name) for name in _RATES}
        step = replace(step, batch=batch, ops=ops, storages=storages, **rates)
        return replace(step, allocated_peak_bytes=CostModel(step).predict(Plan()).allocated_peak_bytes)


def pair_records(small: StepTrace, large: StepTrace) -> ScaledStep | None:
    """Pair the records ``small`` and ``large``; ``None`` if operators or the lives of storages differ."""
    return ScaledStep(small=small, large=large) if _structure(small) == _structure(large) else None


def _structure(step: StepTrace) -> tuple[object, ...]:
    """Return the parts of ``step`` that do not depend on sizes."""
    paths = [module.path for module in step.modules]
    ops = [(op.name, op.module, op.phase, op.reads, op.makes, op.mutates) for op in step.ops]
    lives = [(s.kind, s.module, s.born, s.died, s.freed, s.saved_by) for s in step.storages]
    return paths, step.calls, ops, lives


def _interpolate(small: Any, large: Any, share: float) -> Any:
    """Interpolate numbers, ``share`` of the way from ``small`` to ``large``; take all else from ``large``."""
    if small == large:
        return large
    if is_dataclass(large) and not isinstance(large, type):
        names = [f.name for f in fields(large)]
        return replace(large, **{n: _interpolate(getattr(small, n), getattr(large, n), share) for n in names})
    if isinstance(large, Sequence) and not isinstance(large, str) and len(small) == len(large):
        return tuple(_interpolate(low, high, share) for low, high in zip(small, large, strict=True))
    if isinstance(large, bool) or not (isinstance(small, int | float) and isinstance(large, int | float)):
        return large
    value = max(0.0, small + share * (large - small))
    return round(value) if isinstance(large, int) else value


def _with_common_compressor(storage: StorageTrace, small: StorageTrace, large: StorageTrace) -> StorageTrace:
    """Return ``storage``, without a compressor if the two records have different ones."""
    if small.compressor == large.compressor:
        return storage
    return replace(storage, compressor="null", packed_bytes=storage.nbytes)

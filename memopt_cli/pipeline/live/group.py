"""A model that every rank of a group holds: one rank searches, all have its plan."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch import nn

from memopt_cli.errors import OptionError
from memopt_cli.records import Plan
from memopt_cli.training.apply import apply_plan, plan_of, put_back, taken_off

Found = TypeVar("Found")

_LIMIT: Final = timedelta(days=7)
"""Other ranks wait as long as the search takes, which has limits of its own."""


def on_every_rank(
    model: nn.Module, group: Any, optimize: Callable[[], Found], plan_in: Callable[[Found], Plan | None]
) -> Found:
    """Return what ``optimize`` finds, which puts the plan on ``model``; without a ``group``, this process does it.

    In a group, which is a ``torch.distributed.ProcessGroup``, the first rank does it, all others put ``plan_in`` what
    it found on their models, and all make sure that they have the same.  Raises on all ranks what fails on one, and
    :class:`UsageError` where their models differ; every model is then as it was.
    """
    if group is None:
        return optimize()
    ranks_of, parameters_of = _sharded(group)
    with ranks_of(group, _LIMIT) as ranks, put_back(model):
        ranks.require_same("model", parameters_of(model))
        found: Found = ranks.first(optimize)
        ranks.each(lambda: None if ranks.rank == 0 else _replace(model, plan_in(found) or Plan()))
        ranks.require_same("plan", plan_of(model))
        return found


def _replace(model: nn.Module, plan: Plan) -> None:
    with taken_off(model):
        apply_plan(model, plan.of_model)


def _sharded(group: object) -> tuple[Any, Any]:
    """Return the group with its module.  Raises :class:`OptionError` for what is no group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            "process_group is given, but this process has no group",
            hint="Call torch.distributed.init_process_group first.",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"process_group is a {type(group).__name__}, not a group of this process",
            hint="Give torch.distributed.group.WORLD, or a group that this process is in.",
        )
    from memopt_cli.training.sharded.agreement import parameters_of, ranks_of  # takes seconds to import

    return ranks_of, parameters_of

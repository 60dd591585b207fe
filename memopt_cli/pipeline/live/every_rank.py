"""Optimizing a model that every rank of a process group holds: the first rank searches, and all apply its plan."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch import nn

from memopt_cli.errors import OptionError, type_in_words
from memopt_cli.records import Plan
from memopt_cli.training.apply import apply_plan, plan_of, replacing_plan, restoring_plan

Result = TypeVar("Result")

_LIMIT: Final = timedelta(days=7)
"""Time limit of collectives, too long to matter: other ranks wait for the search, which has its own limits."""


def on_every_rank(
    model: nn.Module, group: Any, optimize: Callable[[], Result], plan_in: Callable[[Result], Plan | None]
) -> Result:
    """Return the result of ``optimize``, a function that puts a plan on ``model``; without a ``group``, just call it.

    In a group, a ``torch.distributed.ProcessGroup``, only the first rank calls it.  ``plan_in`` returns the plan in the
    result.  The other ranks put that plan on their models, and all check that they have the same.  An error on one rank
    is raised on all, and :class:`UsageError` if their models differ; every model is then as it was.
    """
    if group is None:
        return optimize()
    ranks_of, parameter_signatures = _import_agreement(group)
    with ranks_of(group, _LIMIT) as ranks, restoring_plan(model):
        ranks.require_same("model", parameter_signatures(model))
        result: Result = ranks.on_first(optimize)
        ranks.on_each(lambda: None if ranks.rank == 0 else _replace(model, plan_in(result) or Plan()))
        ranks.require_same("plan", plan_of(model))
        return result


def _replace(model: nn.Module, plan: Plan) -> None:
    with replacing_plan(model):
        apply_plan(model, plan.of_model)


def _import_agreement(group: object) -> tuple[Any, Any]:
    """Check ``group``, and import the functions that handle it.  Raises :class:`OptionError` if it is not a group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            "process_group is given, but this process has no group",
            hint="Call torch.distributed.init_process_group first.",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"process_group is {type_in_words(group)}, not a group of this process",
            hint="Pass torch.distributed.group.WORLD, or a group that contains this process.",
        )
    from memopt_cli.training.sharded.agreement import parameter_signatures, ranks_of  # takes seconds to import

    return ranks_of, parameter_signatures

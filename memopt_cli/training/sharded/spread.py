"""A model on one rank of many: sharded or replicated by the user's function, or by FSDP2 or DDP.

A rank is predicted in a fake group without data (:func:`shard_for_prediction`), or measured in a real one
(:func:`shard_for_measurement`).  Both refuse what memopt cannot count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memopt_cli.errors import MemoptError, StepError, UsageError, first_line, type_in_words
from memopt_cli.records import RankLayout
from memopt_cli.runtime.private_torch import is_compiled, reducing_ranks, replaced, sharded_without_the_others
from memopt_cli.training.sharded.replicated import without_reducer

Shard = Callable[[nn.Module, DeviceMesh], Any]
"""The user's function, which spreads a model over a mesh and returns it."""
_COMPILED_REASON = {
    "predicted": "compiled code needs real data",
    "measured": "memopt cannot see the tensors of compiled code",
}
_RETURN_HINT = "Let the function return the model that trains."
_CALL_HINT = "The function is called with the model and a DeviceMesh of {} with the axes {}."
_NO_GROUP_HINT = "The group and the mesh exist already: do not make new ones in the function."
_UNCOUNTED_REASON = "it handles memory in ways that are not counted here"
_UNCOUNTED_PACKAGES = {
    "deepspeed": _UNCOUNTED_REASON,
    "torch.distributed._composable.replicate": "it becomes DistributedDataParallel only in the first step",
    "torch.distributed.pipelining": "the schedule of a pipeline depends on data",
}
"""Package -> why its modules are refused."""
_ALTERNATIVES_HINT = "Use fully_shard, parallelize_module or DistributedDataParallel."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRank:
    """The model and the buckets of one rank."""

    model: nn.Module
    buckets: list[Tensor]
    """Buckets of ``DistributedDataParallel``; the list changes after the first step."""


def shard_for_prediction(model: nn.Module, mesh: DeviceMesh, layout: RankLayout, function: Shard | None) -> ShardedRank:
    """Shard ``model`` over ``mesh`` to predict a rank: by ``function``, or for ``None`` by FSDP2 or DDP (``layout``).

    Most functions change ``model`` in place.  Raises :class:`UsageError` for a function that fails, returns no module
    or a different model, spreads nothing or changes the default group, and :class:`StepError` for a model whose step
    cannot be predicted.
    """
    with without_reducer() as buckets, sharded_without_the_others():
        return ShardedRank(model=_call_and_check(model, mesh, layout, function, "predicted"), buckets=buckets)


def shard_for_measurement(model: nn.Module, mesh: DeviceMesh, layout: RankLayout, function: Shard | None) -> nn.Module:
    """Shard ``model`` on a real rank; raise :class:`StepError` if the sharded model cannot be measured."""
    return _call_and_check(model, mesh, layout, function, "measured")


def _call_and_check(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: RankLayout,
    function: Shard | None,
    what: Literal["predicted", "measured"],
) -> nn.Module:
    parts = set(model.modules())
    with _refusing_fsdp1(what):
        sharded_model = _call_layout(function or _BUILT_IN[layout.parallel], model, mesh, layout)
    _refuse(sharded_model, what)
    if not isinstance(sharded_model, nn.Module):
        raise UsageError(
            f"{layout.parallel} returned {type_in_words(sharded_model)}, not an nn.Module", hint=_RETURN_HINT
        )
    if parts.isdisjoint(sharded_model.modules()):
        raise UsageError(
            f"{layout.parallel} must return the model that it was given, and returned another one", hint=_RETURN_HINT
        )
    if any(map(is_compiled, sharded_model.modules())):
        raise StepError(
            f"{layout.parallel} returns a compiled model, which cannot be {what}: {_COMPILED_REASON[what]}",
            hint="Let it return the model before torch.compile; the compiled step keeps other tensors.",
        )
    has_parts = any(isinstance(module, FSDPModule | DistributedDataParallel) for module in sharded_model.modules())
    if not has_parts and not any(isinstance(parameter, DTensor) for parameter in sharded_model.parameters()):
        raise UsageError(
            f"{layout.parallel} left every parameter of {type(sharded_model).__name__} whole: it shards nothing",
            hint="Call fully_shard, parallelize_module or DistributedDataParallel in it.",
        )
    return sharded_model


def data_ranks(model: nn.Module) -> int:
    """Return the number of ranks that have their own samples: over which ``fully_shard`` or DDP reduces gradients.

    Ranks that divide the work differently, such as tensor parallel ones, are given the same samples.
    """
    parts = list(model.modules())
    sharded = (reducing_ranks(part) for part in parts if isinstance(part, FSDPModule))
    replicas = (part.process_group.size() for part in parts if isinstance(part, DistributedDataParallel))
    return max((*sharded, *replicas), default=1)


def _call_layout(function: Shard, model: nn.Module, mesh: DeviceMesh, layout: RankLayout) -> Any:
    group = dist.group.WORLD
    try:
        sharded_model = function(model, mesh)
    except MemoptError:
        raise
    except (Exception, SystemExit) as err:  # the user's code may raise anything
        raise UsageError(
            f"{layout.parallel} failed: {first_line(err)}",
            hint=f"{_CALL_HINT.format(mesh.device_type, layout.mesh)} {_NO_GROUP_HINT}",
        ) from err
    if not dist.is_initialized() or dist.group.WORLD is not group:
        raise UsageError(f"{layout.parallel} made its own process group", hint=_NO_GROUP_HINT)
    return sharded_model


def _refuse(sharded_model: Any, what: str) -> None:
    """Raise :class:`StepError` if a part of ``sharded_model`` is of a package whose memory is not counted."""
    parts = sharded_model.modules() if isinstance(sharded_model, nn.Module) else [sharded_model]
    kinds = [base for part in parts for base in type(part).__mro__]
    for base in kinds:
        for package, reason in _UNCOUNTED_PACKAGES.items():
            if f"{base.__module__}.".startswith(f"{package}."):
                raise StepError(f"{base.__name__} cannot be {what}: {reason}", hint=_ALTERNATIVES_HINT)


def _refusing_fsdp1(what: str) -> contextlib.AbstractContextManager[None]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise StepError(
            f"FullyShardedDataParallel (FSDP1) cannot be {what}: {_UNCOUNTED_REASON}", hint=_ALTERNATIVES_HINT
        )

    return replaced(FullyShardedDataParallel, "__init__", lambda _: refuse)


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard every repeated block of ``model``, then the rest, by FSDP2 (HSDP on a mesh of two axes)."""
    for block in find_repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


_BUILT_IN: dict[str, Shard] = {"fsdp": _fully_sharded, "ddp": lambda model, mesh: DistributedDataParallel(model)}


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model`` to shard one by one, such as the layers of a transformer.

    They are modules with parameters, several of the same class in an ``nn.ModuleList`` or ``nn.Sequential``.  In an
    ``nn.Sequential``, only classes that contain modules count: a row of linear layers has no blocks.
    """
    if isinstance(model, nn.ModuleList | nn.Sequential):
        children = [child for child in model.children() if next(child.parameters(), None) is not None]
        repeated = {cls for cls in map(type, children) if sum(type(child) is cls for child in children) > 1}
        if not isinstance(model, nn.ModuleList):
            repeated &= {type(child) for child in children if next(child.children(), None) is not None}
        inner = [child for child in children if type(child) not in repeated]
        return [child for child in children if type(child) in repeated] + [
            block for child in inner for block in find_repeated_blocks(child)
        ]
    return [block for child in model.children() for block in find_repeated_blocks(child)]

"""Finding the buckets in which ``DistributedDataParallel`` reduces gradients, by a hook on each module."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from memopt_cli.errors import StepError, first_line
from memopt_cli.training.step import TrainingStep


def buckets_seen(step: TrainingStep) -> tuple[Tensor, ...]:
    """Take ``step`` once, and return the buckets of all its DDP modules.

    DDP shows its buckets only to a communication hook.  The hook stays on the modules, and reduces as DDP does by
    itself.  Raises :class:`StepError` if a module has another hook.
    """
    replicas = [part for part in step.model.modules() if isinstance(part, DistributedDataParallel)]
    buckets: list[Tensor] = []

    def reduce(group: Any, bucket: Any) -> Any:
        if all(bucket.buffer() is not known for known in buckets):
            buckets.append(bucket.buffer())
        return allreduce_hook(group, bucket)

    reduce.__annotations__.clear()  # PyTorch compares them with classes, and here they are strings
    for replica in replicas:
        try:
            replica.register_comm_hook(replica.process_group, reduce)
        except RuntimeError as err:  # PyTorch allows one hook only
            raise StepError(
                f"DistributedDataParallel with a communication hook cannot be measured: {first_line(err)}",
                hint="Measure it without the hook.",
            ) from err
    if replicas:
        step.take()
    return tuple(buckets)

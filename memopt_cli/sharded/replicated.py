"""``DistributedDataParallel`` without its reducer, which is C++ and reads data: its buckets, in Python.

Buckets hold a copy of every gradient, from the first step to the last; with ``gradient_as_bucket_view`` gradients lie
in them instead.  The reducer fills a bucket as backward makes its gradients, in about the opposite order of the
parameters, reduces it when it is full, and copies the means back.  In the second step it is made anew, for the order
that was seen in the first, and has twice as many buckets for a moment: that is not counted.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memopt_cli.errors import StepError
from memopt_cli.runtime.private_torch import replaced

_FIRST_BYTES, _MEBIBYTE = 1 << 20, 1 << 20
"""Of the first bucket, at most, so that something is reduced early."""
_MOST_MEBIBYTES = 25
"""Of the others, unless the script says otherwise."""


class Replicated(DistributedDataParallel):
    """What a ``DistributedDataParallel`` is made into."""

    def __init__(self) -> None:
        raise NotImplementedError("it is made of another")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """That of the model within."""
        return self.module(*inputs, **kwargs)


@contextlib.contextmanager
def without_reducer() -> Iterator[list[Tensor]]:
    """Within, what is made a ``DistributedDataParallel`` becomes a :class:`Replicated`; gives the buckets of all.

    Raises :class:`StepError` for one that casts parameters, which is not counted.
    """
    buckets = list[Tensor]()
    signature = inspect.signature(DistributedDataParallel.__init__)

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        buckets.extend(_make(self, bound.arguments))

    with replaced(DistributedDataParallel, "__init__", lambda _: make):
        yield buckets


def _make(wrapper: Any, given: dict[str, Any]) -> list[Tensor]:
    if given.get("mixed_precision") is not None:
        raise StepError(
            "DistributedDataParallel with mixed_precision cannot be predicted: what it casts is not counted",
            hint="Predict it in the precision of the parameters.",
        )
    nn.Module.__init__(wrapper)
    wrapper.__class__ = Replicated
    wrapper.module = given["module"]
    mesh, group = given.get("device_mesh"), given.get("process_group")
    group = mesh.get_group() if mesh is not None else group
    if _sends_buffers(given):
        wrapper.register_forward_pre_hook(lambda module, _: _broadcast(module, group))
    most = given.get("bucket_cap_mb") or _MOST_MEBIBYTES
    as_view = bool(given.get("gradient_as_bucket_view"))
    trainable = [p for p in wrapper.module.parameters() if p.requires_grad]
    return [_bucket(some, group, as_view=as_view) for some in _assigned(trainable, int(most * _MEBIBYTE))]


def _sends_buffers(given: dict[str, Any]) -> bool:
    """In forward; the argument has another name since PyTorch 2.13."""
    said = given.get("forward_sync_buffers"), given.get("broadcast_buffers")
    return bool(next((each for each in said if each is not None), True))


def _assigned(parameters: list[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Parameters that share a bucket, the last of the model first; each is closed by the one that fills it."""
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    limit = dict.fromkeys({(p.dtype, p.device) for p in parameters}, _FIRST_BYTES)
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        bucket = open_.setdefault(kind, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= limit[kind]:
            limit[kind] = most_bytes
            yield open_.pop(kind)
    yield from open_.values()


def _bucket(parameters: list[Tensor], group: Any, *, as_view: bool) -> Tensor:
    """The memory of a bucket, which is filled whenever backward has made all gradients of these parameters."""
    first = parameters[0]
    flat = first.detach().new_empty(sum(p.numel() for p in parameters))
    views = [
        part.view(p.shape)
        for p, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True)
    ]
    waiting: set[int] = set()

    def arrived_at(index: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                views[index].copy_(parameter.grad)
                if as_view:
                    parameter.grad = views[index]
                waiting.add(index)
                if len(waiting) == len(parameters):
                    waiting.clear()
                    _reduce()

        return arrived

    def _reduce() -> None:
        dist.all_reduce(flat, group=group)
        for parameter, view in zip(parameters, views, strict=True):
            if not as_view and parameter.grad is not None:
                parameter.grad.copy_(view)

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(arrived_at(index))  # type: ignore[no-untyped-call]
    return flat


def _broadcast(wrapper: nn.Module, group: Any) -> None:
    """The first rank's buffers go to all, those of one dtype together."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in wrapper.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, group=group, group_src=0)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

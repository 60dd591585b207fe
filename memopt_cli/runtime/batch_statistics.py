"""Batch normalization in chunks with the statistics of the whole.

The chunks run several times.  In the first pass each one breaks off at the first batch norm and gives the mean and
variance of its input there; merged, inside autograd, they are the statistics of the whole (parallel variance, Chan et
al. 1979).  With these as ordinary tensors the next pass gets by that norm, to the second or to the end.  Autograd does
the rest: the gradient reaches the inputs through the normalized values and through the statistics.

Norms are met where every class of them ends up, in calls of ``batch_norm``; what they do to their running statistics
and counters happens in the first chunk of the last pass, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.lengths import segment_of
from memopt_cli.runtime.lifted.module import operators_of
from memopt_cli.runtime.module_state import ModuleState, name_of
from memopt_cli.runtime.objects import version_of
from memopt_cli.runtime.private_torch import (
    BatchNorm,
    buffers_of,
    has_gradient_hooks,
    suggest_memory_format,
    version_counter,
)
from memopt_cli.runtime.runs import named_parts


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the values of each channel."""

    mean: Tensor
    """Shape (C,), at least float32."""
    variance: Tensor
    """Shape (C,); the mean square of the deviations, not Bessel-corrected."""
    count: int
    """Values in each channel."""


def statistics_refusal(module: nn.Module, chunks: int) -> str:
    """Why ``module`` cannot run in chunks with the statistics of all of them; empty if it can."""
    if chunks < 2:
        return "batch statistics are gathered over chunks, and it runs in one"
    for name, inner in module.named_modules():
        if isinstance(inner, nn.SyncBatchNorm):
            return f"its {name or 'norm'} is a SyncBatchNorm, whose statistics are those of all processes"
        if isinstance(inner, torch.jit.ScriptModule):
            return f"its {name} is a ScriptModule, whose batch norms cannot be reached"
    if hooked := hooked_within(module):
        return f"a hook gets the gradients of its {hooked}, of which the passes over the chunks would give it parts"
    return ""


def hooked_within(module: nn.Module) -> str:
    """The first module in it whose gradients a hook gets; empty if there is none.

    What is before a norm gets a gradient in parts: one through the normalized values, one through the statistics, which
    leaves the norm by its input alone, past its hooks.  Those of ``module`` itself get the gradients of the whole.
    """
    within = ((name, inner) for name, inner in module.named_modules() if inner is not module)
    return next((name for name, inner in within if has_gradient_hooks(inner)), "")


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The modules in it that normalize by statistics of the batch while they train, lifted ones among them."""
    return [m for m in module.modules() if isinstance(m, BatchNorm) or "aten::batch_norm" in operators_of(m)]


class NotGathered(Exception):
    """Passes over the chunks do not give what the whole does: a sentence without its subject."""


class BatchStatistics:
    """The statistics of the norms in a module, gathered pass by pass."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], given: Sequence[Tensor] = ()) -> None:
        """``forward``: the module's own; ``given``: the tensors among its arguments.

        Raises :class:`ValueError` if a norm lies in a segment within.
        """
        _check_inner_segments(module)
        self._module = module
        self._forward = forward
        self._found: tuple[Statistics, ...] = ()
        self._start = _Start(module, given)

    def forwards(self, chunks: int) -> list[Callable[..., Any]]:
        """What runs in place of forward on each chunk of the next pass.

        It returns the :class:`Statistics` of the first norm that none are known of; after the last, the output.  Raises
        :class:`NotGathered`.
        """
        breaks_off: set[bool] = set()
        return [self._chunk(breaks_off, is_first=i == 0) for i in range(chunks)]

    def merge(self, parts: Sequence[Statistics]) -> None:
        """A pass has given ``parts``, one of each chunk; the module is put where it started from.

        Raises :class:`NotGathered`, or :class:`RuntimeError` if that cannot be done.
        """
        self._found = (*self._found, merged(parts))
        if self._start.draws():
            raise NotGathered("draws random numbers before a batch norm, others in chunks than as a whole")
        self.undo()

    def undo(self) -> None:
        """Put the module and the random generators where they started from.

        Raises :class:`RuntimeError` if that cannot be done.
        """
        self._start.enter()

    def _chunk(self, breaks_off: set[bool], *, is_first: bool) -> Callable[..., Any]:
        """``breaks_off``: of the chunks of one pass, whether they break off."""
        found = self._found

        def run(*args: Any, **kwargs: Any) -> Any:
            norms = _Norms(self._module, found, is_first)
            try:
                with norms, _counters_kept(self._module, kept=not is_first):
                    output = self._forward(*args, **kwargs)
            except _Unknown as unknown:
                output = unknown.statistics
            else:
                if norms.broken_off:
                    raise NotGathered("catches the exception that breaks off a pass over its chunks")
            breaks_off.add(isinstance(output, Statistics))
            if len(breaks_off) > 1:
                raise NotGathered("calls more batch norms on some chunks than on others")
            return output

        return run


def merged(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of several sets of values taken together."""
    count = sum(part.count for part in parts)
    mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(0)
    shares = [(part.variance + (part.mean - mean).square()) * (part.count / count) for part in parts]
    return Statistics(mean, torch.stack(shares).sum(0), count)


class _Unknown(Exception):  # no BaseException: at these, modules do not call their hooks
    """Forward has come to a norm whose statistics are not known."""

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.statistics = statistics


class _Norms(TorchFunctionMode):
    """Batch norms that would use the statistics of a chunk get those of the whole."""

    def __init__(self, module: nn.Module, found: tuple[Statistics, ...], updates: bool) -> None:
        super().__init__()
        self._module = module
        self._unused = list(found)
        self._updates = updates
        self.broken_off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS_ON_GRADIENTS:
            self.broken_off = True
            raise NotGathered("sets a hook in its forward, which would get gradients in parts")
        arguments = BATCH_NORMS.get(func)
        if arguments is None:
            return func(*args, **(kwargs or {}))
        given = dict(zip(arguments, args, strict=False)) | (kwargs or {})
        if not given.get("training", False):
            return func(*args, **(kwargs or {}))
        return self._normalize(**{key: given[key] for key in given.keys() & _USED})

    def _normalize(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not self._unused:
            if self._updates and running_mean is not None:
                self._uncount(running_mean)
            self.broken_off = True
            raise _Unknown(_measured(input))
        statistics = self._unused.pop(0)
        if self._updates:
            _update(running_mean, statistics.mean, momentum)
            _update(running_var, statistics.variance * (statistics.count / max(1, statistics.count - 1)), momentum)
        return _normalized(input, statistics, weight, bias, eps)

    def _uncount(self, running_mean: Tensor) -> None:
        """The norm has counted a call that comes once more: if a later chunk raises, nobody puts it back."""
        for norm in batch_norms(self._module):
            counter = buffers_of(norm).get("num_batches_tracked")
            if counter is not None and buffers_of(norm).get("running_mean") is running_mean:
                counter.data.sub_(1)


_HOOKS_ON_GRADIENTS = frozenset((Tensor.register_hook, Tensor.register_post_accumulate_grad_hook))
_USED = frozenset(("input", "running_mean", "running_var", "weight", "bias", "momentum", "eps"))
_OF_MODULES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OF_OPERATORS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _OF_MODULES,
    torch.batch_norm: _OF_OPERATORS,
    torch.ops.aten.batch_norm: _OF_OPERATORS,
    torch.ops.aten.batch_norm.default: _OF_OPERATORS,
}
"""The ways to ask for batch normalization, with the names of their positional arguments."""


def _measured(x: Tensor) -> Statistics:
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(precise, [d for d in range(x.dim()) if d != 1], correction=0)
    return Statistics(mean, variance, x.numel() // x.shape[1])


def _normalized(x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` as one product and one sum, in the dtype of ``x``."""
    if statistics.count == 1:
        raise ValueError(f"batch statistics of one value per channel, in an input of shape {tuple(x.shape)}")
    scale = (statistics.variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -statistics.mean * scale
    if bias is not None:
        shift = shift + bias
    channels = (1, -1) + (1,) * (x.dim() - 2)
    output = torch.addcmul(shift.view(channels), x.to(scale.dtype), scale.view(channels)).to(x.dtype)
    return output.contiguous(memory_format=_layout_of(x))


def _layout_of(x: Tensor) -> torch.memory_format:
    """What batch norm gives for ``x``: what follows may look at it as a vector, or draw noise in that order."""
    layout = _CHANNELS_LAST.get(x.dim())
    is_last = layout is not None and (x.is_contiguous(memory_format=layout) or suggest_memory_format(x) is layout)
    return layout if layout is not None and is_last else torch.contiguous_format


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@torch.no_grad()
def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:  # past the version, as batch norm itself writes it: its backward checks that
        running.data.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


@contextmanager
def _counters_kept(module: nn.Module, *, kept: bool) -> Iterator[None]:
    """Norms within do not count this call, if their counters are to be ``kept``."""
    counters = [buffers_of(m).get("num_batches_tracked") for m in batch_norms(module)] if kept else []
    copies = [(counter, counter.clone()) for counter in counters if counter is not None]
    try:
        yield
    finally:
        for counter, copy in copies:
            counter.data.copy_(copy)


class _Start:
    """Where a module and the random generators stand, to begin anew from there."""

    def __init__(self, module: nn.Module, given: Sequence[Tensor]) -> None:
        self._name = name_of(module)
        self._state = ModuleState(module)
        unique = {id(t): t for t in self._state.tensors()}
        self._copies = [(t, version_counter(t), t.detach().clone()) for t in unique.values()]
        self._given = [(t, version_of(t)) for t in given]
        self._generators = Generators()

    def draws(self) -> bool:
        """Whether random numbers were drawn since."""
        return self._generators.moved()

    @torch.no_grad()
    def enter(self) -> None:
        """Raises :class:`RuntimeError` if an argument was written, or a tensor with a graph was modified in place."""
        if any(version_of(tensor) != version for tensor, version in self._given):
            raise self._cannot("writes over its input")
        self._state.restore()
        for tensor, version, copy in self._copies:
            if tensor.requires_grad and version_counter(tensor) != version:
                raise self._cannot("modifies its state in place")
            # Where forward has raised the version, this does too: chunks may count on the values in between.
            (tensor.data if version_counter(tensor) == version else tensor).copy_(copy)
        self._generators.restore()

    def _cannot(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name} {what} before a batch norm, which cannot be undone for a second pass; set batch_statistics "
            "to false and chunks to 1 in the plan"
        )


def _check_inner_segments(module: nn.Module) -> None:
    for name, inner in named_parts(module):
        config = None if inner is module else segment_of(inner)
        if config is not None and config.recompute and batch_norms(inner):
            raise ValueError(
                f"{name_of(module)} gathers batch statistics over its chunks, and its {name}, which holds a "
                "batch norm, is a segment of its own; remove one of the two from the plan"
            )

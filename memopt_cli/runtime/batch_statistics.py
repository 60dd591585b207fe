"""Running a module in chunks, with batch norms that use the statistics of the whole batch.

The chunks run several times.  In the first *pass*, each chunk stops at the first batch norm and returns the mean and
variance of that norm's input.  Merging them, inside autograd, gives the statistics of the whole batch (parallel
variance, Chan et al. 1979).  The next pass normalizes with them, and goes on to the second norm, or to the end.

Each pass repeats the forward of the pass before it up to the norm, but backward goes through that part only once.  At
the norm, the later pass has a *link*: the norm's input, whose gradient goes to the graph of the earlier pass.  With two
norms, where ``h`` and ``k`` are their inputs in one chunk:

    pass 1:  x --> h --> mean, variance
                   ^          |
              link |          | merged over all chunks
                   |          v
    pass 2:  x --> h --> normalized h --> k --> mean, variance
                                          ^          |
                                     link |          | merged over all chunks
                                          |          v
    pass 3:  x --> h --> normalized h --> k --> normalized k --> y

Backward of pass 3 ends at the links of all chunks and at the statistics of ``k``.  Backward of pass 2 starts
from the gradients that reached ``k`` through the link and through the statistics, added up, and ends at ``h`` in the
same way, where backward of pass 1 begins.
So every forward operator is differentiated once.  If the operator before the norm is costly (a convolution, a linear
layer), pass 2 takes its output from pass 1, and runs it only when backward recomputes pass 2.  The price: the gradients
of ``h`` of all chunks exist at the same time.  If they would take more memory than the gradients of ``x``, pass 2 is
not linked, and its own backward goes all the way to ``x``.

Norms are found by intercepting ``batch_norm``, which every norm class calls in the end.  Every chunk starts from the
same running statistics and counters as the whole, and updates them as the whole would, so code that reads them sees the
same values as without chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.lengths import config_of, segment_of
from memopt_cli.runtime.module_state import ModuleState, label_of
from memopt_cli.runtime.norms import BATCH_NORMS, batch_norms
from memopt_cli.runtime.private_torch import (
    CHANNELS_LAST,
    buffers_of,
    has_gradient_hooks,
    hooks_on_saving,
    suggest_memory_format,
    version_counter,
)
from memopt_cli.runtime.running import bypassing_hooks
from memopt_cli.runtime.runs import named_parts
from memopt_cli.runtime.tree import tensors_of

_DIFFERENTIATING = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
"""Functions that compute gradients: called inside forward, they would end at the norms, where a chunk's graph ends."""
_HOOKS_ON_GRADIENTS = frozenset((Tensor.register_hook, Tensor.register_post_accumulate_grad_hook))
_COSTLY_NAMES = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
_COSTLY_PACKETS = [getattr(torch.ops.aten, name) for name in _COSTLY_NAMES]
_COSTLY = frozenset(
    (
        *(getattr(F, name) for name in _COSTLY_NAMES),
        *_COSTLY_PACKETS,
        *(getattr(packet, overload) for packet in _COSTLY_PACKETS for overload in packet.overloads()),
    )
)
"""Operators worth running once less.  Each makes a new tensor, so nothing else can write its output unseen."""
_UNSEEN_WRITES = frozenset(
    (
        *(Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
        *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage),
    )
)
"""Functions that give access to a tensor's memory: a write to it may not raise the version."""
_ARGUMENTS_USED = frozenset(("input", "running_mean", "running_var", "weight", "bias", "momentum", "eps"))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and variance of the values in each channel."""

    mean: Tensor
    """Shape (C,), at least float32."""
    variance: Tensor
    """Shape (C,); the mean square of the deviations, without Bessel's correction."""
    count: int
    """Number of values in each channel."""


@dataclass(slots=True)
class ReachedNorm:
    """The batch norm at which a chunk stopped in a pass, since its statistics were not known yet."""

    statistics: Statistics
    """The statistics of the norm's input in this chunk."""
    link: Tensor | None
    """A tensor without memory, in the shape of the norm's input; a gradient that reaches it goes on to that input.

    There is none if the gradients of all chunks would take more memory here than at the start of the module: then the
    next pass has no link here, and its own backward goes all the way to the start.
    """
    source: int | None
    """The index, among forward's calls of costly operators, of the call that made the norm's input; ``None`` if the
    next pass must run that call again, since its operator is cheap, or its output may have been modified."""
    values: Tensor | None
    """The norm's input, passed to the next pass once; ``None`` if that pass must recompute it."""
    running_statistics: tuple[Tensor, ...]
    """The running statistics that the norm updates."""

    def take(self) -> Tensor | None:
        """Return :attr:`values`, and drop them here."""
        values, self.values = self.values, None
        return values


@dataclass(frozen=True, slots=True)
class _Norm:
    """A batch norm whose statistics are known."""

    statistics: Statistics
    """The statistics of its input in all chunks together."""
    chunks: Sequence[ReachedNorm]
    """For each chunk, the record of the pass that stopped at this norm."""


def statistics_refusal(module: nn.Module, chunks: int) -> str:
    """Return why ``module`` cannot run in chunks with the statistics of all chunks."""
    if chunks < 2:
        return "batch statistics are gathered over chunks, and it runs in one"
    for name, inner in module.named_modules():
        if isinstance(inner, nn.SyncBatchNorm):
            return f"its {name or 'norm'} is a SyncBatchNorm, whose statistics come from all processes"
        if isinstance(inner, torch.jit.ScriptModule):
            return f"its {name} is a ScriptModule, whose batch norms cannot be reached"
        # The gradient before a norm has two parts: one comes through the normalized values, and one through the
        # statistics, which bypasses hooks.  Hooks of the module itself get the gradients of the whole.
        if inner is not module and has_gradient_hooks(inner):
            return f"a hook gets the gradients of its {name}, and the passes over the chunks would give it only parts"
    return ""


class NotGatheredError(Exception):
    """Passes over the chunks would not give the result of the whole; the message is a :data:`Complaint`."""


class BatchStatistics:
    """The statistics of the norms in a module, gathered pass by pass."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        """Prepare passes of the ``forward`` of ``module``; ``inputs`` are the tensors among its arguments.

        Raises :class:`ValueError` if a norm lies in an inner segment.
        """
        _check_inner_segments(module)
        self._module = module
        self._forward = forward
        self._norms: tuple[_Norm, ...] = ()
        """The norms whose statistics are known, in the order of forward."""
        # A segment finds its kept outputs by the number of the operator's call, which must be the same in every pass:
        # there no pass may skip an operator.
        self._hands_on = not config_of(module).keep
        self._start = StateBeforePasses(module, inputs)

    def forwards(self, chunks: int) -> Iterator[Callable[..., Any]]:
        """Yield, for each of the ``chunks`` of the next pass, the function that runs in place of forward.

        Call each function before the next is yielded.  It returns a :class:`ReachedNorm` at the first norm without
        known statistics, and the output once all are known.  It raises :class:`NotGatheredError`.
        """
        breaks_off: set[bool] = set()
        for index in range(chunks):
            self._start.restore_norms()
            yield self._chunk_forward(breaks_off, index)

    def merge(self, reached: Sequence[ReachedNorm]) -> None:
        """Merge the statistics of the norm that every chunk has ``reached``, and restore the module's state.

        Raises :class:`NotGatheredError`, or :class:`RuntimeError` if the state cannot be restored.
        """
        if self._start.has_used_random():
            raise NotGatheredError("uses random numbers before a batch norm, which differ between chunks and the whole")
        self._norms = (*self._norms, _Norm(merge_statistics([chunk.statistics for chunk in reached]), reached))
        self._start.add_norm(reached[0].running_statistics)
        self._start.restore()

    @property
    def undo(self) -> Callable[[], None]:
        """A function that puts the state of the module and of the random generators back, as before the first pass.

        It holds no results of passes.  It raises :class:`RuntimeError` if the state cannot be restored.
        """
        return self._start.restore

    def _chunk_forward(self, breaks_off: set[bool], index: int) -> Callable[..., Any]:
        """Return the function that runs the chunk at ``index``, and adds to ``breaks_off`` whether it broke off."""
        # The function must not hold ``self``: autograd's graph holds the function until backward, and ``self`` has
        # copies of the module's state.
        module, forward = self._module, self._forward
        known_norms, hands_on = self._norms, self._hands_on

        def run(*args: Any, **kwargs: Any) -> Any:
            input_bytes = sum(t.nbytes for t in tensors_of((args, kwargs)) if t.requires_grad)
            norms = _Norms(module, known_norms, index, hands_on, input_bytes)
            try:
                with norms:
                    output = forward(*args, **kwargs)
            except _ReachedUnknownNorm as unknown:
                output = unknown.reached
            else:
                if norms.broken_off:
                    raise NotGatheredError(norms.broken_off)
            breaks_off.add(isinstance(output, ReachedNorm))
            if len(breaks_off) > 1:
                raise NotGatheredError("calls more batch norms on some chunks than on others")
            return output

        return run


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of all values together, given the statistics of ``parts`` of them (Chan et al. 1979).

    The mean is the mean of the means, weighted by counts.  The variance is the mean of the variances, with the same
    weights, plus the variance of the means.  Values 1, 3 and 5, 7: means 2 and 6, variances 1 and 1; together 4 and
    1 + 4.
    """
    count = sum(part.count for part in parts)
    mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(0)
    shares = [(part.variance + (part.mean - mean).square()) * (part.count / count) for part in parts]
    return Statistics(mean, torch.stack(shares).sum(0), count)


class _ReachedUnknownNorm(
    Exception
):  # no BaseException: ``nn.Module`` calls its ``always_call`` hooks for an Exception only
    """The signal that breaks off a forward at a norm without known statistics."""

    def __init__(self, reached: ReachedNorm) -> None:
        super().__init__()
        self.reached = reached


class _Norms(TorchFunctionMode):
    """A mode in which batch norms use the statistics of the whole in place of a chunk's."""

    def __init__(
        self, module: nn.Module, known_norms: Sequence[_Norm], index: int, hands_on: bool, input_bytes: int
    ) -> None:
        """Run ``module`` on the chunk at ``index`` with the statistics of ``known_norms``, from earlier passes.

        ``hands_on``: hand a norm's input on to the next pass.
        ``input_bytes``: bytes of the chunk's inputs that need gradients.
        """
        super().__init__()
        self._module = module
        self._unused = list(known_norms)
        self._index = index
        self._hands_on = hands_on
        self._input_bytes = input_bytes
        self._linked = {norm.chunks[index].source: norm.chunks[index] for norm in known_norms}
        self._hooks = hooks_on_saving()
        self._costly = 0
        self._last: _Output | None = None
        """The output of the last costly operator; ``None`` if the next pass must run that operator itself."""
        self.broken_off = ""
        """Reason why this run must be discarded; set even if forward caught the exception."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = functools.partial(func, *args, **(kwargs or {}))
        if func in _DIFFERENTIATING:
            self._refuse("computes gradients in its forward, through batch statistics that its chunks share")
        if func in _HOOKS_ON_GRADIENTS:
            self._refuse("sets a hook in its forward, which would get gradients in parts")
        if func in _COSTLY:
            return self._run_costly(call)
        if func in _UNSEEN_WRITES:
            self._last = None
        arguments = BATCH_NORMS.get(func)
        if arguments is None:
            return call()
        by_name = dict(zip(arguments, args, strict=False)) | (kwargs or {})
        if not by_name.get("training", False):
            return call()
        return self._normalize(**{key: by_name[key] for key in by_name.keys() & _ARGUMENTS_USED})

    def _run_costly(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a costly operator, or take its output from the pass before if that passed it on."""
        reached = self._linked.get(self._costly)
        link = None if reached is None else reached.link
        output = (
            call()
            if reached is None or link is None
            else _link_gradient(_take_output(reached, call), link, is_seen=True)
        )
        # Inside the user's own ``torch.utils.checkpoint``, which sets hooks on saving, no operator may be skipped:
        # the checkpoint recomputes them all in backward, and compares the numbers of tensors that they save.
        is_own = hooks_on_saving() == self._hooks
        self._last = _Output(ref(output), version_of(output), output.requires_grad) if is_own else None
        self._costly += 1
        return output

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
            if running_mean is not None:
                self._uncount(running_mean)
            self.broken_off = "catches the exception by which memopt ends a pass over its chunks"
            raise _ReachedUnknownNorm(self._reached_norm(input, running_mean, running_var))
        norm = self._unused.pop(0)
        statistics, reached = norm.statistics, norm.chunks[self._index]
        if statistics.count == 1:
            raise ValueError(
                f"{label_of(self._module)}: a batch norm needs more than one value per channel in training, but got "
                f"one, in an input of shape {tuple(input.shape)}. Use a larger batch, or call eval()."
            )
        if reached.source not in (None, self._source_index(input, reached.link)):
            self._refuse("runs different operators before a batch norm when it is recomputed")
        if reached.link is not None:
            input = _link_gradient(input.detach(), reached.link)
        _update_running(running_mean, statistics.mean, momentum)
        _update_running(running_var, statistics.variance * (statistics.count / max(1, statistics.count - 1)), momentum)
        return _scale_and_shift(input, statistics, weight, bias, eps)

    def _reached_norm(self, input: Tensor, *running: Tensor | None) -> ReachedNorm:
        statistics, new_link = _measure_statistics(input)
        link = new_link if input.nbytes <= self._input_bytes else None
        source = self._source_index(input, link)
        values = input.detach() if self._hands_on and source is not None else None
        return ReachedNorm(statistics, link, source, values, tuple(t for t in running if t is not None))

    def _source_index(self, input: Tensor, link: Tensor | None) -> int | None:
        """Return the index of the costly operator that made ``input``; ``None`` if the next pass cannot skip it."""
        can_skip = link is not None and self._last is not None and self._last.is_input(input, link)
        return self._costly - 1 if can_skip else None

    def _uncount(self, running_mean: Tensor) -> None:
        # The norm has raised its ``num_batches_tracked``, and raises it again in the next pass.  Before that pass all
        # state is restored.  But if a chunk raises an exception first, nothing is, and the count would stay too high.
        for norm in batch_norms(self._module):
            counter = buffers_of(norm).get("num_batches_tracked")
            if counter is not None and buffers_of(norm).get("running_mean") is running_mean:
                counter.data.sub_(1)

    def _refuse(self, reason: str) -> NoReturn:
        self.broken_off = reason
        raise NotGatheredError(reason)


@dataclass(frozen=True, slots=True)
class _Output:
    """The output of a costly operator."""

    tensor: ref[Tensor]
    version: int
    """The output's version when the operator returned it."""
    requires_grad: bool
    """Whether the output needed a gradient then."""

    def is_input(self, input: Tensor, link: Tensor) -> bool:
        """Return whether this output is a norm's ``input``, unwritten, and needs a gradient only if ``link`` does."""
        is_same = self.tensor() is input and self.version == version_of(input)
        return is_same and self.requires_grad == link.requires_grad


def _take_output(reached: ReachedNorm, call: Callable[[], Tensor]) -> Tensor:
    """Return the operator's output that the pass before passed on.

    The values are available once.  Later passes, and the recomputation of this one, run the operator again.
    """
    values = reached.take()
    if values is not None:
        return values
    with bypassing_hooks():
        return call().detach()


class _Links(torch.autograd.Function):
    """Three tensors without values, in the places of ``x [B, C, ...]``, its mean [C] and its variance [C] in autograd.

    In backward, the gradients that reach the three add up to the gradient of ``x``.  With n values in each channel::

        d mean / d x = 1 / n        d variance / d x = 2 (x - mean) / n
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        channel_values = x.new_empty(x.shape[1], dtype=_in_precise_dtype(x))
        return x.new_empty(()).expand(x.shape), channel_values, torch.empty_like(channel_values)

    @staticmethod
    def backward(
        ctx: Any, x_gradient: Tensor | None, mean_gradient: Tensor | None, variance_gradient: Tensor | None
    ) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if (
            mean_gradient is None or variance_gradient is None
        ):  # the statistics were not used: no output depends on the norm
            return x_gradient
        precise, count = x.to(mean_gradient.dtype), x.numel() // x.shape[1]
        scale = variance_gradient * (2 / count)
        shift = mean_gradient / count - scale * precise.mean(_other_dims(x))
        gradient = torch.addcmul(_by_channel(shift, x), precise, _by_channel(scale, x)).to(x.dtype)
        return gradient if x_gradient is None else gradient.add_(x_gradient)


class _Linked(torch.autograd.Function):
    """The values of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, link: Tensor, is_seen: bool) -> Tensor:
        return values.data if is_seen else values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, gradient, None


def _link_gradient(values: Tensor, link: Tensor, *, is_seen: bool = False) -> Tensor:
    """Return ``values`` with their gradient going to ``link``.

    ``is_seen``: the module's own code gets them and may write to them in place, but autograd forbids that for views
    from custom functions.
    """
    linked: Tensor = _Linked.apply(values, link, is_seen)  # type: ignore[no-untyped-call]
    return linked


def _measure_statistics(x: Tensor) -> tuple[Statistics, Tensor]:
    """Return the statistics of ``x [B, C, ...]``, and a link to it."""
    # The only tensor that is saved from here on is ``x``: a recomputation for backward ends as soon as it has it.
    link, mean_link, variance_link = _Links.apply(x)  # type: ignore[no-untyped-call]
    values = x.detach().to(_in_precise_dtype(x))
    mean = values.mean(_other_dims(x))
    # Not ``torch.var_mean``, which takes five times as long.
    variance = (values - _by_channel(mean, x)).square_().mean(_other_dims(x))
    statistics = Statistics(
        _link_gradient(mean, mean_link), _link_gradient(variance, variance_link), x.numel() // x.shape[1]
    )
    return statistics, link


class _Scaled(torch.autograd.Function):
    """``x [B, C, ...]`` times ``scale`` [C] plus ``shift`` [C], in the dtype of ``x``.

    Its backward holds one tensor as large as ``x`` in addition to the gradients; the backward of ``addcmul`` holds two.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.addcmul(_by_channel(shift, x), x.to(scale.dtype), _by_channel(scale, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        precise = gradient.to(scale.dtype)
        scale_gradient, shift_gradient = (precise * x).sum(_other_dims(x)), precise.sum(_other_dims(x))
        return (precise * _by_channel(scale, x)).to(x.dtype), scale_gradient, shift_gradient


def _in_precise_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values [C]`` in a shape that broadcasts against ``x [B, C, ...]``."""
    return values.view((1, -1) + (1,) * (x.dim() - 2))


def _other_dims(x: Tensor) -> list[int]:
    """Return all dimensions of ``x`` except 1, the dimension of the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _scale_and_shift(
    x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias``, computed as ``x * scale + shift``."""
    scale = (statistics.variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -statistics.mean * scale
    if bias is not None:
        shift = shift + bias
    output: Tensor = _Scaled.apply(x, scale, shift)  # type: ignore[no-untyped-call]
    return output.contiguous(memory_format=_output_format(x))


def _output_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of batch norm's output for ``x``; a later dropout makes its mask in that order."""
    layout = CHANNELS_LAST.get(x.dim())
    is_last = layout is not None and (x.is_contiguous(memory_format=layout) or suggest_memory_format(x) is layout)
    return layout if layout is not None and is_last else torch.contiguous_format


@torch.no_grad()
def _update_running(running: Tensor | None, value: Tensor, momentum: float) -> None:
    # Through ``.data``, which raises no version: batch norm itself writes its statistics like this.
    if running is not None:
        running.data.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


class StateBeforePasses:
    """A copy of the state of a module and of the random generators, to restore before another pass."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        self._module = module
        self._state = ModuleState(module)
        self._batch_norms = batch_norms(module)
        self._state_of_norms = ModuleState(module, self._batch_norms)
        self._copies = {id(t): (t, version_counter(t), t.detach().clone()) for t in self._state.tensors()}
        self._norms = {id(t) for norm in self._batch_norms for t in buffers_of(norm).values() if t is not None}
        self._inputs = [(t, version_of(t)) for t in inputs]
        self._generators = Generators()

    def has_used_random(self) -> bool:
        """Return whether random numbers were used since this start was made."""
        return self._generators.moved()

    def add_norm(self, running: Sequence[Tensor]) -> None:
        """Copy the ``running`` statistics of a norm before it updates them."""
        for tensor in running:
            self._copies.setdefault(id(tensor), (tensor, version_counter(tensor), tensor.detach().clone()))
            self._norms.add(id(tensor))

    def restore_norms(self) -> None:
        """Put back the state of the batch norms; raise :class:`NotGatheredError` if the module has others now."""
        if batch_norms(self._module) != self._batch_norms:
            raise NotGatheredError("makes or takes away a batch norm in its forward")
        self._state_of_norms.restore()
        for tensor, _, copy in (self._copies[key] for key in self._norms & self._copies.keys()):
            tensor.data.copy_(copy)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the state of the module and of the random generators.

        Raises :class:`RuntimeError` if an argument was written, or a tensor with a graph was modified in place.
        """
        if any(version_of(tensor) != version for tensor, version in self._inputs):
            raise self._irreversible_error("writes over its input")
        self._state.restore()
        for tensor, version, copy in self._copies.values():
            if tensor.requires_grad and version_counter(tensor) != version:
                raise self._irreversible_error("modifies its state in place")
            # A write through ``.data`` does not raise the version.  If forward raised it, this write must too: a
            # chunk's graph may have saved the value in between, and autograd has to notice that it is overwritten.
            (tensor.data if version_counter(tensor) == version else tensor).copy_(copy)
        self._generators.restore()

    def _irreversible_error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{label_of(self._module)} {what} before a batch norm, which cannot be undone for a second pass. Set "
            "batch_statistics to false and chunks to 1 in the plan."
        )


def _check_inner_segments(module: nn.Module) -> None:
    for name, inner in named_parts(module):
        config = None if inner is module else segment_of(inner)
        if config is not None and config.recompute and batch_norms(inner):
            raise ValueError(
                f"{label_of(module)} gathers batch statistics over its chunks, and its {name}, which holds a "
                "batch norm, is a segment too. Remove one of the two from the plan."
            )

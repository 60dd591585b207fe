"""The loss of a language model without its logits: a linear head and the cross-entropy of its output, fused.

A head that runs in chunks returns a :class:`DeferredLinear`: a tensor with a shape and a dtype, but without values.
Reshaping it, selecting rows of it or casting it to a wider dtype only changes which rows it refers to.
``F.cross_entropy`` computes it chunk by chunk: from a chunk's logits it forms the chunk's share of the loss and of the
gradients at once, and then drops them.  So neither all logits nor their gradient ever exist, and backward needs only
one gradient of each argument of the head (the idea of Malinovskii et al.'s Cut Your Losses and of Hsu et al.'s Liger,
2024, in operators of PyTorch)::

    logits = head(x)                        DeferredLinear of shape (4, 128, 50000): nothing is computed
    logits[:, :-1].reshape(-1, 50000)       DeferredLinear, rows 0 … 126, 128 … 254, … of x
    F.cross_entropy(…, target)              for each chunk of these rows: logits, loss, gradients; logits are dropped

Any other operator computes the values first, and differentiates them: the result is right, but no memory is saved.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memopt_cli.runtime.cuts import chunk_lengths, record_cut
from memopt_cli.runtime.private_torch import (
    graph_is_kept,
    is_fake,
    make_without_memory,
    schema_of,
    tree_map,
    unseen,
    version_counter,
    with_plain_functions,
)
from memopt_cli.runtime.warned import warn_caller

_SAMPLE_SIZE = 64
"""Number of weights that are compared to notice a change without a new version."""
_MODIFIED = (
    "{} modifies the output of a linear layer that runs in chunks through its loss; remove the layer from the plan"
)
_SIGNATURE: inspect.Signature = inspect.signature(F.cross_entropy)

# Each function twice: as Python code calls it, and as the ATen operator that lifted modules call.
_aten = torch.ops.aten
_LINEAR: set[Any] = {F.linear, _aten.linear.default}
_CASTS: set[Any] = {Tensor.float, Tensor.double, Tensor.to, Tensor.type}
_CASTS |= {_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other, _aten._to_copy.default}
_RESHAPES: set[Any] = {
    *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous),
    *(torch.reshape, torch.flatten),
    *(_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.unflatten.int),
    *(_aten.contiguous.default, _aten._unsafe_view.default),
}
_VIEWS: set[Any] = {Tensor.__getitem__, Tensor.transpose, Tensor.permute, torch.transpose, torch.permute}
_VIEWS |= {_aten.transpose.int, _aten.permute.default, _aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default}
_MEMORY_READERS = {
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.tolist,
    Tensor.__repr__,
}
"""Functions that read memory; a deferred tensor has none: they get the computed values instead."""
_SHAPE_READERS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.is_floating_point,
    torch.numel,
}
_SHAPE_READERS |= {Tensor.is_contiguous, torch.is_floating_point, Tensor.stride, Tensor.get_device, Tensor.element_size}
"""Functions that never read values, so nothing is computed for them."""


@dataclass(slots=True, eq=False)
class _Head:
    """One deferred call of a linear layer."""

    x: Tensor
    """Shape (..., in_features)."""
    weight: Tensor
    """Shape (classes, in_features)."""
    bias: Tensor | None
    """Shape (classes,)."""
    chunks: int
    """Maximum number of chunks into which the rows of a loss are cut."""
    dtype: torch.dtype
    """The dtype of the output: autocast's, if autocast was on at the call."""
    versions: tuple[int, ...]
    """The versions of ``x``, ``weight`` and ``bias`` at the call."""
    sample: Tensor
    """Copies of about 64 weights: a fused optimizer (``fused=True``) writes weights without a new version."""
    label: str
    """The layer in messages, such as ``Linear at 'lm_head'``."""
    has_loss: bool = False
    """Whether a loss has been computed from the output chunk by chunk."""

    def check(self, *, sampled: bool = False) -> None:
        """Raise :class:`RuntimeError` if an argument has changed since the call.  ``sampled``: also compare values."""
        # FSDP frees weights between uses.
        changed = self.weight.untyped_storage().nbytes() < self.weight.nbytes
        changed |= self.versions != _versions_of(self.x, self.weight, self.bias)
        if sampled and not changed and not is_fake(self.weight):
            changed = not torch.equal(_sample_weight(self.weight), self.sample)
        if changed:
            raise RuntimeError(
                f"the output of {self.label} was read after the layer's weight or input had changed, and had not been "
                "computed: the plan runs this layer in chunks with its loss. Read it before optimizer.step(), or "
                "remove the layer from the plan."
            )

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the dtype of the output, detached from autograd's graph."""
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return self.weight.detach().to(self.dtype), bias

    def rows(self, index: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a copy of the rows ``index`` of the input, and their logits, from what :meth:`parameters` returned."""
        x = self.x.detach().flatten(0, -2).index_select(0, index).to(self.dtype)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return x, F.linear(x, weight, bias)


def _versions_of(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(-1 if t is None or t.is_inference() else version_counter(t) for t in tensors)


def _sample_weight(weight: Tensor) -> Tensor:
    flat = weight.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLE_SIZE)].clone()


class Deferring(TorchFunctionMode):
    """A mode in which linear layers return a :class:`DeferredLinear`, for a loss in ``chunks`` chunks.

    ``label``: the layer in messages.
    """

    def __init__(self, chunks: int, label: str) -> None:
        super().__init__()
        self._chunks = chunks
        self._label = label

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer ``func`` if it is a linear layer's function on a batch, and a gradient is wanted."""
        if func in _LINEAR and not kwargs:
            x, weight, *bias = args
            is_batch = isinstance(x, Tensor) and x.dim() > 1 and x.numel() > 0 and len(weight) > 1
            if is_batch and (x.requires_grad or weight.requires_grad):
                return _defer(x, weight, bias[0] if bias else None, self._chunks, self._label)
        return func(*args, **(kwargs or {}))


def _defer(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, label: str) -> Tensor:
    # A product without rows and classes costs nothing, and has the dtype that autocast gives the real one.
    empty_bias = None if bias is None else bias.detach()[:0]
    empty_output = F.linear(x.detach().flatten(0, -2)[:0], weight.detach()[:0], empty_bias)
    versions = _versions_of(x, weight, bias)
    head = _Head(x, weight, bias, chunks, empty_output.dtype, versions, _sample_weight(weight), label)
    shape = (*x.shape[:-1], len(weight))
    index = torch.arange(x[..., 0].numel(), device=x.device).view(shape[:-1])
    return _defer_rows(head, index.unsqueeze(-1).expand(shape), empty_output.dtype)


def _defer_rows(head: _Head, index: Tensor, dtype: torch.dtype) -> Tensor:
    output: Tensor = _Defer.apply(head.x, head.weight, head.bias, head, index, dtype)  # type: ignore[no-untyped-call]
    return output


class _Defer(torch.autograd.Function):
    """The autograd node of a deferred tensor; its backward runs where operators other than the loss used the values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, index: Tensor, dtype: Any
    ) -> Any:
        ctx.head, ctx.index = head, index
        return DeferredLinear(head, index, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        head: _Head = ctx.head
        head.check()
        index = _rows_of(ctx.index).flatten()
        rows = gradient.movedim(_class_axis(ctx.index), -1).reshape(-1, len(head.weight)).to(head.dtype)
        flat = head.x.flatten(0, -2)
        x_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            product = (rows @ head.weight.to(head.dtype)).to(flat.dtype)
            x_gradient = torch.zeros_like(flat).index_add(0, index, product).view(head.x.shape)
        if ctx.needs_input_grad[1]:
            weight_gradient = (rows.t() @ flat.index_select(0, index).to(head.dtype)).to(head.weight.dtype)
        if ctx.needs_input_grad[2] and head.bias is not None:
            bias_gradient = rows.sum(0).to(head.bias.dtype)
        return x_gradient, weight_gradient, bias_gradient, None, None, None


class DeferredLinear(Tensor):
    """The output of a linear layer, or some of its rows, whose values are computed only when they are needed."""

    _head: _Head
    _index: Tensor
    """For each element the row of the layer's input that it comes from; stride 0 marks the axis of the classes.

    A view or slice of this index shows the rows that the same view or slice of the output has.
    """
    _computed: Tensor | None
    """The values; ``None`` if they were not computed yet."""

    @staticmethod
    def __new__(cls, head: _Head, index: Tensor, dtype: torch.dtype) -> DeferredLinear:
        self: DeferredLinear = make_without_memory(cls, index.shape, dtype, head.x.device)
        self._head, self._index, self._computed = head, index, None
        return self

    @property
    def is_computed(self) -> bool:
        """Whether the values have been computed."""
        return self._computed is not None

    def values(self) -> Tensor:
        """Return the values, detached from autograd's graph; compute them the first time."""
        if self._computed is None:
            self._head.check(sampled=True)
            rows = _rows_of(self._index)
            _, flat = self._head.rows(rows.flatten(), *self._head.parameters())
            last = flat.view(*rows.shape, -1).to(self.dtype)
            self._computed = last.movedim(-1, _class_axis(self._index)).contiguous()
        return self._computed

    def read(self) -> Tensor:
        """Return the values, and warn if they had to be computed: that takes the memory that the plan was to save."""
        was_computed = self.is_computed
        values = self.values()
        if not was_computed:
            size = f"{values.nbytes / 2**20:.1f} MiB"
            if self._head.has_loss:
                how = f"after its loss, so it is computed again ({size}): a matmul, and its memory until it is freed"
                advice = "Read only the rows that you need (logits[:, -1]), or read it in eval()"
            else:
                how = f"by something other than cross_entropy, so it is computed whole ({size}), and so is its loss"
                advice = "Read it after its loss; if its loss is not F.cross_entropy, remove the layer from the plan"
            warn_caller(
                f"the output of a linear layer that runs in chunks through its loss is read {how}. {advice}.",
            )
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on the index only if it needs no values, like a reshape; else compute the values first."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is Tensor.__setitem__ and isinstance(first, DeferredLinear):
            raise RuntimeError(_MODIFIED.format("an assignment"))
        if isinstance(first, DeferredLinear) and not first.is_computed:
            output = _without_values(func, first, args[1:], kwargs)
            if output is not NotImplemented:
                return output
        with with_plain_functions():
            if isinstance(first, DeferredLinear) and func in _MEMORY_READERS:
                return func(first.read(), *args[1:], **kwargs)
            if func.__name__ != "__get__" and func not in _SHAPE_READERS:
                _compute_deferred((args, kwargs))  # here and not in dispatch, where a step's recorder would miss it
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operator ``func`` below autograd."""
        if func is torch.ops.aten.detach.default and not args[0].is_computed:  # autograd detaches what it saves
            return DeferredLinear(args[0]._head, args[0]._index, args[0].dtype)
        written_names = [
            a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        by_name = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | (kwargs or {})
        if any(isinstance(by_name.get(name), DeferredLinear) for name in written_names):
            raise RuntimeError(_MODIFIED.format(func))
        return func(*_compute_deferred(args), **_compute_deferred(kwargs or {}))


def _compute_deferred(value: Any) -> Any:
    return tree_map(lambda t: t.read() if isinstance(t, DeferredLinear) else t, value)


def _without_values(func: Any, deferred: DeferredLinear, args: Any, kwargs: Any) -> Any:
    """Return ``func(deferred, *args, **kwargs)`` without computing values, or ``NotImplemented`` if it needs them."""
    head, index = deferred._head, deferred._index
    with with_plain_functions():
        if not deferred.requires_grad:
            return NotImplemented
        if func is F.cross_entropy:
            return _cross_entropy(deferred, args, kwargs)
        if func is _aten.cross_entropy_loss.default:
            return _cross_entropy(deferred, (), _named_arguments(deferred, *args, **kwargs))
        if func in _CASTS:
            cast = func(torch.empty(0, dtype=deferred.dtype, device=deferred.device), *args, **kwargs)
            if not isinstance(cast, Tensor):  # ``logits.type()`` without an argument returns the name of the type
                return cast
            upwards = torch.promote_types(deferred.dtype, cast.dtype) == cast.dtype
            is_kept = upwards and cast.device == deferred.device
            return _defer_rows(head, index, cast.dtype) if is_kept else NotImplemented
        if func in _RESHAPES or func in _VIEWS:
            rows = _moved_index(func, deferred, args, kwargs)
            return NotImplemented if rows is None else _defer_rows(head, rows, deferred.dtype)
        if func is Tensor.retain_grad and head.has_loss:
            raise RuntimeError(
                f"retain_grad was called on the output of {head.label} after its loss was computed in chunks. Call it "
                "before the loss, or remove the layer from the plan."
            )
        if func is Tensor.register_hook and head.has_loss:
            warn_caller(
                f"a hook on the output of {head.label} is not called for a loss that is computed in chunks. Remove the "
                "layer from the plan if the hook must run.",
            )
            return func(deferred, *args, **kwargs)  # type: ignore[no-untyped-call]
    return NotImplemented


def _moved_index(func: Any, deferred: DeferredLinear, args: Any, kwargs: Any) -> Tensor | None:
    """Return the index of ``func(deferred, ...)``; ``None`` if some row of the result lacks a class."""
    index = deferred._index
    if func in _RESHAPES:
        with unseen():  # a recorded step must not count the bytes of this tensor
            example = func(torch.empty(index.shape, dtype=deferred.dtype, device="meta"), *args, **kwargs)
        shape = example.shape
        is_last = _class_axis(index) == index.dim() - 1 and shape and shape[-1] == index.shape[-1]
        if not is_last or example.dtype != deferred.dtype:
            return None
        return _rows_of(index).reshape(shape[:-1]).unsqueeze(-1).expand(shape)
    if func is Tensor.__getitem__ and not _is_basic(args[0]):
        return None
    moved_index: Tensor = func(index, *args, **kwargs)
    whole = [size for size, stride in zip(moved_index.shape, moved_index.stride(), strict=True) if stride == 0]
    return moved_index if whole == [index.shape[_class_axis(index)]] and moved_index.numel() else None


def _is_basic(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _class_axis(index: Tensor) -> int:
    return index.stride().index(0)


def _rows_of(index: Tensor) -> Tensor:
    return index.select(_class_axis(index), 0)


# ---------------------------------------------------------------------------------------------- the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """The arguments of one ``F.cross_entropy``."""

    target: Tensor
    """Classes, shape (rows,), int64."""
    weight: Tensor | None
    """Weight of each class, shape (classes,); ``None`` if all classes count equally."""
    ignore_index: int
    """The target of rows that have neither loss nor gradient."""
    label_smoothing: float
    """The share of the target, 0 to 1, that is spread over all classes."""
    is_mean: bool
    """Whether the loss is the mean over the rows, weighted by their targets' weights; otherwise it is the sum."""
    dtype: torch.dtype
    """The dtype in which the loss is computed: the dtype of the logits, but float32 at least."""

    def share(self) -> Tensor:
        """Return the factor from the sum over rows to the loss; infinity if every row is ignored."""
        if not self.is_mean:
            return torch.ones((), dtype=self.dtype, device=self.target.device)
        valid = self.target != self.ignore_index
        counted = valid if self.weight is None else self.weight[self.target.where(valid, 0)] * valid
        return counted.sum(dtype=self.dtype).reciprocal()

    def loss_and_gradient(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over ``rows``, and its gradient, which overwrites their ``logits``.

        loss = sum over rows of (1 - s) w_t (-log p_t) + s / C sum over c of w_c (-log p_c)
        """
        classes, smoothing = logits.shape[1], self.label_smoothing
        valid = self.target[rows] != self.ignore_index
        target = self.target[rows].where(valid, 0)
        log_p = logits.log_softmax(1)
        weight = log_p.new_ones(classes) if self.weight is None else self.weight.to(log_p.dtype)
        target_share = (1 - smoothing) * weight[target]
        loss = log_p.gather(1, target[:, None])[:, 0] * target_share
        class_share = torch.full_like(target_share, smoothing / classes)
        if smoothing:
            loss += (log_p @ weight) * class_share
        loss = -loss.where(valid, 0).sum()
        target_share, class_share = target_share.where(valid, 0), class_share.where(valid, 0)
        gradient = log_p.exp_().mul_((target_share + class_share * weight.sum())[:, None])
        gradient.scatter_add_(1, target[:, None], -target_share[:, None])
        if smoothing:
            gradient.addr_(class_share, weight, alpha=-1)
        return loss, gradient


def _named_arguments(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> dict[str, Any]:
    """Return the arguments of ``aten::cross_entropy_loss``, without its input, as ``F.cross_entropy`` takes them."""
    return {
        "target": target,
        "weight": weight,
        "reduction": ("none", "mean", "sum")[reduction],
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }


def _cross_entropy(logits: DeferredLinear, args: Any, kwargs: Any) -> Any:
    """Return ``F.cross_entropy`` of deferred ``logits``, or ``NotImplemented`` for variants that need all logits."""
    bound = _SIGNATURE.bind(logits, *args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = bound.arguments
    target, weight = arguments["target"], arguments["weight"]
    is_legacy = arguments["size_average"] is not None or arguments["reduce"] is not None
    is_scalar = arguments["reduction"] in ("mean", "sum") and not is_legacy
    differentiable = weight is not None and weight.requires_grad
    if not torch.is_grad_enabled() or not is_scalar or differentiable or target.dtype is not torch.int64:
        return NotImplemented
    if logits.dim() < 2 or _class_axis(logits._index) != 1 or _rows_of(logits._index).shape != target.shape:
        return NotImplemented
    head = logits._head
    head.check()
    head.has_loss = True
    loss = _Loss(
        target=target.flatten(),
        weight=weight,
        ignore_index=arguments["ignore_index"],
        label_smoothing=arguments["label_smoothing"],
        is_mean=arguments["reduction"] == "mean",
        dtype=torch.promote_types(logits.dtype, torch.float32),
    )
    # The dtype of the loss without chunks: under autocast float32, though the logits are float16.
    example = F.cross_entropy(torch.zeros(1, 2, dtype=logits.dtype, device=logits.device), target.new_zeros(1))
    rows = _rows_of(logits._index).flatten()
    value: Tensor = _LinearCrossEntropy.apply(head.x, head.weight, head.bias, head, rows, loss)  # type: ignore[no-untyped-call]
    return value.to(example.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of a linear layer's output; forward also computes the gradients, and backward only scales them.

    Forward computes the gradients of the sum over rows.  Backward multiplies them once, by the product of the mean's
    share and the incoming gradient (such as a scaler's factor in float16): two multiplications would round twice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, index: Tensor, loss: _Loss
    ) -> Tensor:
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        x_gradient = torch.zeros_like(x.flatten(0, -2), dtype=head.dtype) if wants_x else None
        weight_gradient = torch.zeros_like(weight, dtype=loss.dtype) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=loss.dtype) if wants_bias and bias is not None else None
        total = torch.zeros((), dtype=loss.dtype, device=x.device)
        record_cut(head.weight, head.chunks, len(index))
        ends = itertools.accumulate(chunk_lengths(len(index), head.chunks))
        with torch.autocast(x.device.type, enabled=False):
            parameters = head.parameters()
            for start, end in itertools.pairwise([0, *ends]):
                chunk = slice(start, end)
                rows, logits = head.rows(index[chunk], *parameters)
                value, gradient = loss.loss_and_gradient(logits.to(loss.dtype), chunk)
                del logits
                total += value
                gradient = gradient.to(head.dtype)
                if x_gradient is not None:
                    x_gradient.index_add_(0, index[chunk], gradient @ parameters[0])
                if weight_gradient is not None:
                    _add_product(weight_gradient, gradient, rows)
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0, dtype=loss.dtype)
            share = loss.share()
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x_gradient = None if x_gradient is None else x_gradient.view(x.shape)
        ctx.save_for_backward(share, x_gradient, weight_gradient, bias_gradient)
        return total * share

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss that was formed chunk by chunk cannot be differentiated twice (create_graph=True). Remove the "
                "linear layer from the plan."
            )
        share, *gradients = ctx.saved_tensors
        # If no row counts, the share is 1 / 0: the loss is NaN, as PyTorch's is, and its gradient is 0.
        scale = upstream * share.nan_to_num(nan=math.nan, posinf=0.0)
        # A second backward (retain_graph=True) needs the gradients unscaled; otherwise they are scaled in place.
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mul if graph_is_kept() else Tensor.mul_
        scaled = (
            None if g is None else multiply(g.to(scale.dtype), scale).to(dtype)
            for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Add ``gradient.t() @ rows`` to ``total``; ``rows`` are overwritten."""
    if total.dtype == rows.dtype:
        total.addmm_(gradient.t(), rows)
    else:
        # The product is formed in float16, where a sum over many rows may overflow.  Dividing the rows by a power of
        # two that is larger than their number is exact (but for denormals), and keeps the sum below the largest term.
        count = 1 << len(rows).bit_length()
        total.add_(gradient.t() @ rows.div_(count), alpha=count)

"""``DistributedDataParallel`` on tensors without data: its reducer, which is C++ and reads data, rewritten in Python.

A dry run of one rank uses it; the rest of DDP is PyTorch's own Python.  The reducer's buckets hold a copy of every
gradient throughout training; with ``gradient_as_bucket_view``, gradients are views of them.  A bucket is filled as
backward makes its gradients; when it is full it is reduced, and the means are copied back.  After the first step the
buckets are made anew, in the order in which gradients came.  The real reducer does so at the start of the second step,
and for a moment has the old and the new buckets, which is not counted here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from memopt_cli.errors import StepError
from memopt_cli.runtime.graph import leaves_before
from memopt_cli.runtime.private_torch import FIRST_BUCKET_BYTES, MAKES_REDUCER, SETS_HOOKS, assign_buckets, replaced

_UNCOUNTED = ("mixed_precision", "delay_all_reduce_named_params", "bucket_cap_mb_list", "batched_grad_copy")
"""Arguments of DDP that are refused, because this reducer makes no casts and no other buckets."""

_ELSEWHERE = frozenset(("device_ids", "output_device"))
"""Arguments that name a device of the user's script; they are dropped: here, tensors are on the CPU."""
_REDUCERS: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def without_reducer() -> Iterator[list[Tensor]]:
    """Give each ``DistributedDataParallel`` made in the ``with`` block a :class:`Reducer`; yield their buckets.

    The list changes after the first step.  Raises :class:`StepError` for features that are not counted.
    """
    buckets, noted = list[Tensor](), list[list[Tensor]]()
    signature = inspect.signature(DistributedDataParallel.__init__)

    # DDP's constructor calls the method that makes the C++ reducer; that is replaced, and notes the parameters.  Then
    # the replaced constructor makes the reducer in Python from them.
    def with_python_reducer(plain: Any) -> Any:
        def construct(*args: Any, **kwargs: Any) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            uncounted = next((name for name in _UNCOUNTED if arguments.get(name)), None)
            if uncounted is not None:
                raise _not_predicted(uncounted)
            is_static = bool(arguments.get("static_graph"))  # not passed on: after the first step it changes no memory
            finds_unused = bool(arguments.get("find_unused_parameters")) and not is_static
            plain(
                **{name: value for name, value in arguments.items() if name not in _ELSEWHERE}
                | {"static_graph": False, "find_unused_parameters": finds_unused, "init_sync": False}
            )
            wrapper = arguments["self"]
            wrapper.reducer = wrapper.logger = _Handle(Reducer(wrapper, noted.pop(), buckets, is_static=is_static))

        return construct

    def without_cpp_reducer(_: object) -> Any:
        def note_parameters(wrapper: object, parameters: list[Tensor], sparse: list[bool], *_: object) -> None:
            if any(sparse):
                raise _not_predicted("sparse gradients")
            noted.append(parameters)

        return note_parameters

    def refusing(name: str) -> Callable[[object], Any]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise _not_predicted(name.strip("_"))

        return lambda _: refuse

    with contextlib.ExitStack() as changed:
        changed.enter_context(replaced(DistributedDataParallel, "__init__", with_python_reducer))
        changed.enter_context(replaced(DistributedDataParallel, MAKES_REDUCER, without_cpp_reducer))
        for name in SETS_HOOKS:
            changed.enter_context(replaced(DistributedDataParallel, name, refusing(name)))
        yield buckets


def _not_predicted(what: str) -> StepError:
    return StepError(
        f"DistributedDataParallel with {what} cannot be predicted: memopt does not know what memory that takes",
        hint=f"Predict without {what}, or run memopt measure on a real group.",
    )


class _Handle:
    """A reference to a reducer by number, since a module's attributes, unlike a reducer, are reset before each step."""

    __slots__ = ("_number",)

    def __init__(self, reducer: Reducer) -> None:
        self._number = id(reducer)
        _REDUCERS[self._number] = reducer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_REDUCERS[self._number], name)


class Reducer:
    """The reducer of one DDP module, which stands for its logger as well; the hooks on parameters keep it alive.

    Raises :class:`StepError` where the real reducer would end the training: a parameter has no gradient, and
    ``find_unused_parameters`` is not set.
    """

    def __init__(self, wrapper: Any, parameters: list[Tensor], all_buckets: list[Tensor], *, is_static: bool) -> None:
        self._parameters, self._all_buckets = parameters, all_buckets
        self._group = wrapper.process_group
        self._as_view: bool = wrapper.gradient_as_bucket_view
        self._is_static = is_static
        self._finds_unused: bool = wrapper.find_unused_parameters
        cap: int = wrapper.bucket_bytes_cap
        self._limits = [FIRST_BUCKET_BYTES, cap] if wrapper.bucket_bytes_cap_default else [cap]
        self._seen: list[int] | None = None if self._finds_unused else []
        """Parameters in the order in which their gradients came in the first step; ``None`` after that step, and where
        unused parameters are looked for, since buckets then stay."""
        self._unused: set[int] = set()
        """Parameters that the current step does not use."""
        self._is_reducing = self._has_begun = False
        self._buckets: list[_Bucket] = []
        self._make_buckets(range(len(parameters)), self._limits if self._finds_unused else [sys.maxsize])
        self._used = parameters[0].detach().new_zeros(len(parameters), dtype=torch.int32)
        """Tensor with a flag for each parameter: whether any rank used it; only its memory matters here."""
        if self._finds_unused:
            all_buckets.append(self._used)
        for number, parameter in enumerate(parameters):
            hook = functools.partial(self._on_gradient, number)
            parameter.register_post_accumulate_grad_hook(hook)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_predicted(name.strip("_"))

    def prepare_for_forward(self) -> None:
        """Do nothing: no forward needs preparation."""

    set_runtime_stats_and_log = prepare_for_forward

    def _rebuild_buckets(self) -> bool:
        """Return ``False``: the buckets were already made again after the first step."""
        return False

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Expect the gradients of all parameters, or only of used ones.

        With ``find_unused_parameters``, these are the parameters that ``outputs`` depend on.
        """
        if self._has_begun and self._is_static and self._seen is not None:
            self._end_backward()
        if self._has_begun:
            raise StepError(
                "DistributedDataParallel cannot take a second step: a parameter had no gradient in the first",
                hint="find_unused_parameters=True lets it look for such parameters.",
            )
        self._is_reducing = True
        if self._finds_unused:
            reached = {id(leaf) for leaf in leaves_before(outputs)}
            self._unused = {n for n, parameter in enumerate(self._parameters) if id(parameter) not in reached}
        for bucket in self._buckets:
            bucket.missing = bucket.parts.keys() - self._unused

    def _make_buckets(self, order: Sequence[int], limits: list[int]) -> None:
        """Make buckets for the parameters in ``order``; ``limits`` are the bytes of the first bucket and of others."""
        replaced_ids = {id(bucket.flat) for bucket in self._buckets}
        self._all_buckets[:] = [flat for flat in self._all_buckets if id(flat) not in replaced_ids]
        self._buckets = []
        groups = assign_buckets([self._parameters[number] for number in order], limits)
        self._buckets = [self._make_bucket([order[position] for position in group]) for group in groups]
        self._all_buckets.extend(bucket.flat for bucket in self._buckets)

    def _make_bucket(self, numbers: list[int]) -> _Bucket:
        parameters = [self._parameters[number] for number in numbers]
        flat = parameters[0].detach().new_empty(sum(p.numel() for p in parameters))
        parts = torch.split(flat, [p.numel() for p in parameters])
        views = {n: part.view(p.shape) for n, p, part in zip(numbers, parameters, parts, strict=True)}
        return _Bucket(flat=flat, parts=views)

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        """Copy the gradient of ``parameter`` to its bucket, and reduce the bucket if it is full; called by a hook."""
        if not self._is_reducing:
            return
        if not self._has_begun:
            self._has_begun = True
            for bucket in self._buckets:
                if not bucket.missing:  # all of its parameters are unused
                    self._reduce_bucket(bucket)
        if self._seen is not None:
            self._seen.append(number)
        bucket = next(bucket for bucket in self._buckets if number in bucket.parts)
        assert parameter.grad is not None
        with torch.no_grad():
            bucket.parts[number].copy_(parameter.grad)
            if self._as_view:
                parameter.grad = bucket.parts[number]
            bucket.missing.discard(number)
            if not bucket.missing:
                self._reduce_bucket(bucket)
        if not any(bucket.missing for bucket in self._buckets):
            self._end_backward()

    def _reduce_bucket(self, bucket: _Bucket) -> None:
        """Sum ``bucket`` over the ranks, and copy the result to the gradients, unless those are views of it."""
        dist.all_reduce(bucket.flat, group=self._group)
        for number, view in bucket.parts.items():
            gradient = self._parameters[number].grad
            if gradient is not None and not self._as_view:
                gradient.copy_(view)

    def _end_backward(self) -> None:
        """End the backward of a step; after the first, make the buckets again in the order of its gradients."""
        self._is_reducing = self._has_begun = False
        if self._finds_unused:
            dist.all_reduce(self._used, group=self._group)
        if self._seen is not None:
            order = list(dict.fromkeys(self._seen))
            self._unused = set(range(len(self._parameters))) - set(order)
            self._seen = None
            self._make_buckets([*order, *sorted(self._unused)], self._limits)


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    flat: Tensor
    """Tensor that holds the gradients of several parameters one after another."""
    parts: dict[int, Tensor]
    """Number of a parameter -> the view of :attr:`flat` for its gradient."""
    missing: set[int] = field(default_factory=set)

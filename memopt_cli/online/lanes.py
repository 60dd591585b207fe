"""Automatic batching: a model written for one sample runs a batch by ``torch.func.vmap``, one *lane* per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from memopt_cli.errors import MemoptError, UsageError, first_line
from memopt_cli.online.states import is_size, recording_new_states, states_of, tensors_in
from memopt_cli.runtime.private_torch import (
    buffers_of,
    in_lanes,
    is_of_vmap,
    lane_axis,
    level_of,
    running_vmap,
    tree_leaves,
    tree_map_only,
    without_transform,
)

Act = Callable[..., tuple[Tensor, ...]]
"""Function of tensors with a leading batch axis that returns such tensors."""

BATCHING_HINT = "Batch the model by hand: init_all_states(model, batch_size), and mode=Batching() for an algorithm."


def vmap_new_states(axis_size: int, state_tag: str = "new") -> Callable[[Callable[[], object]], Callable[[], None]]:
    """Decorate a function that initializes states for one sample, so that it makes ``axis_size`` lanes of each.

    Random initial values differ from lane to lane.

    Parameters
    ----------
    axis_size:
        Lanes, one per sample: the size of a leading axis that every state gets.
    state_tag:
        Tag of these states, for :class:`Vmap` to find them.

    Returns
    -------
    A decorator of functions without arguments.  The function runs twice, once to record which states it makes and once
    for all lanes; it must do the same both times.

    Raises
    ------
    UsageError
        If ``axis_size`` is not a whole number of at least 1.
    """
    if not is_size(axis_size, 1):
        raise UsageError(f"axis_size is {axis_size!r}, not a batch size", hint="Pass the batch size, at least 1.")

    def decorate(initialize: Callable[[], object]) -> Callable[[], None]:
        def for_every_lane() -> None:
            with recording_new_states() as initialized:
                initialize()
            unique = list({(id(state.module), state.name): state for state in initialized}.values())

            def lane(_: Tensor) -> list[Tensor]:
                initialize()
                return [state.value for state in unique]

            values = torch.func.vmap(lane, randomness="different")(torch.arange(axis_size))
            for state, value in zip(unique, values, strict=True):
                state.value = value.contiguous()  # if all lanes have one value, vmap returns an expanded view
                state.set_tag(state_tag)

        return for_every_lane

    return decorate


class Vmap(nn.Module):
    """A model written for one sample, run on a batch: parameters are shared, and each lane has its own tagged states.

    Inputs are mapped over ``in_axes``, outputs have the batch at ``out_axes``.  A tensor that the model writes and that
    differs from lane to lane must be a tagged state; otherwise forward raises :class:`MemoptError`.
    """

    def __init__(self, model: nn.Module, vmap_states: str = "new", *, in_axes: int = 0, out_axes: int = 0) -> None:
        super().__init__()
        self.model = model
        self.vmap_states = vmap_states
        self.in_axes = in_axes
        self.out_axes = out_axes

    def forward(self, *inputs: Tensor) -> Any:
        """Return the model's output for each sample of ``inputs``, batched."""
        mapped = {path: s for path, s in states_of(self.model).items() if s.tag == self.vmap_states}
        if not mapped:
            raise _nothing_mapped(self.model, self.vmap_states)
        snapshot = [(m, dict(vars(m)), dict(buffers_of(m))) for m in self.model.modules()]
        lanes = next(iter(mapped.values())).value.shape[0]
        self._check(inputs, lanes)

        def lane(values: list[Tensor], arguments: tuple[Tensor, ...]) -> tuple[Any, list[Tensor]]:
            for state, value in zip(mapped.values(), values, strict=True):
                state.value = value
            output = self.model(*arguments)
            advanced = [state.value for state in mapped.values()]
            for state, value in zip(mapped.values(), values, strict=True):
                state.value = value
            _refuse_undeclared(self.model, set(mapped))
            return output, advanced

        values = [state.value for state in mapped.values()]
        run = torch.func.vmap(lane, (0, self.in_axes), (self.out_axes, 0), randomness="different")
        try:
            with _functions_of_whole_batches():
                output, values = run(values, inputs)
        except BaseException as err:
            _restore(snapshot)
            if isinstance(err, RuntimeError) and "Batching rule not implemented" in str(err):
                raise MemoptError(
                    f"{type(self.model).__name__} cannot run in lanes: {first_line(err)}", hint=BATCHING_HINT
                ) from err
            raise
        for state, value in zip(mapped.values(), values, strict=True):
            state.value = value
        return output

    def _check(self, inputs: tuple[Tensor, ...], lanes: int) -> None:
        for i, tensor in enumerate(inputs):
            if not -tensor.dim() <= self.in_axes < tensor.dim() or tensor.shape[self.in_axes] != lanes:
                raise MemoptError(
                    f"input {i} of shape {tuple(tensor.shape)} does not have {lanes} samples on axis {self.in_axes}",
                    hint="The states have that many lanes; make new ones for another batch size.",
                )


def _nothing_mapped(model: nn.Module, tag: str) -> MemoptError:
    if not states_of(model):
        return MemoptError(
            f"{type(model).__name__} declares no state that could differ from sample to sample",
            hint="Declare its states with declare_state(module, name, shape). ExplicitState declares the states of a "
            "cell that takes them as arguments, like snnTorch's cells without init_hidden.",
        )
    return MemoptError(
        f"no state of the model is tagged {tag!r}",
        hint="Initialize the states in a function decorated with vmap_new_states(axis_size, state_tag).",
    )


def with_batch_axis(act: Act, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run ``act`` on ``tensors`` of all lanes, called from within a lane of a ``vmap``; else on a batch of one sample.

    Arguments get a leading batch axis, and results lose it.  ``act`` runs below the ``vmap``, where ordinary autograd
    records it; a ``vmap`` rule of an ``autograd.Function`` would do the same at a much higher cost per call.
    """
    if not any(map(is_of_vmap, tensors)):
        return tuple(result.squeeze(0) for result in act(*(t.unsqueeze(0) for t in tensors)))
    lanes = running_vmap()
    size, level = lanes.batch_size(), lanes.level()
    whole = [_batch_first(t, size, level) for t in tensors]
    with lanes.lower():
        results = act(*whole)
    return tuple(in_lanes(result, level) for result in results)


@contextmanager
def _functions_of_whole_batches() -> Iterator[None]:
    """Apply every ``autograd.Function`` that has no rule for ``vmap`` to the batch of all lanes, in the ``with`` block.

    The surrogate gradients of spiking neurons are functions of this kind, written for batches.  A function that mixes
    the samples of a batch raises :class:`MemoptError`.
    """
    original_apply = vars(Function)["apply"]

    def apply(function: type[Function], *args: Any) -> Any:
        has_rule = function.setup_context is not Function.setup_context
        if has_rule or not any(isinstance(arg, Tensor) and is_of_vmap(arg) for arg in args):
            return original_apply.__get__(None, function)(*args)
        lanes = running_vmap()
        size, level = lanes.batch_size(), lanes.level()
        batched = [isinstance(arg, Tensor) and level_of(arg) == level for arg in args]
        whole = [_batch_first(arg, size, level) if lane else arg for arg, lane in zip(args, batched, strict=True)]
        with lanes.lower():
            _refuse_mixing_samples(function, whole, batched, size)
            results = original_apply.__get__(None, function)(*whole)
        return tree_map_only(Tensor, lambda result: in_lanes(result, level), results)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = original_apply  # type: ignore[method-assign]


_separating_functions: WeakSet[type[Function]] = WeakSet()
"""Functions that were found not to mix the samples of a batch."""


def _refuse_mixing_samples(function: type[Function], whole: Sequence[Any], batched: Sequence[bool], size: int) -> None:
    if function in _separating_functions:
        return
    with disable_proxy_modes_tracing(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        batch_results = _results_and_gradients(function, whole, batched)
        for i in range(size):
            sample = [arg[i] if lane else arg for arg, lane in zip(whole, batched, strict=True)]
            sample_results = _results_and_gradients(function, sample, batched)
            if [t[i].shape if t.dim() else None for t in batch_results] != [t.shape for t in sample_results] or not all(
                torch.allclose(t[i], result, equal_nan=True)
                for t, result in zip(batch_results, sample_results, strict=True)
            ):
                raise MemoptError(
                    f"{function.__name__}, an autograd.Function, does not treat a batch as it treats each sample",
                    hint=f"Define its setup_context() and vmap(), or generate_vmap_rule = True. Or: {BATCHING_HINT}",
                )
    _separating_functions.add(function)


def _results_and_gradients(function: type[Function], args: Sequence[Any], batched: Sequence[bool]) -> list[Tensor]:
    """Return the results of ``function``, and the gradients of their sum by the batched arguments."""
    leaves = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
    inputs = [arg for arg, lane in zip(leaves, batched, strict=True) if lane and arg.is_floating_point()]
    for arg in inputs:
        arg.requires_grad_()
    returned = function.apply(*leaves)
    results = [t for t in tree_leaves(returned) if isinstance(t, Tensor)]
    differentiable = [t for t in results if t.requires_grad]
    cotangents = [torch.ones_like(t) for t in differentiable]
    gradients = torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True) if differentiable else ()
    return [t.detach() for t in (*results, *gradients) if t is not None]


def _batch_first(tensor: Tensor, size: int, level: int) -> Tensor:
    """Return ``tensor`` of all lanes with the batch axis in front."""
    if level_of(tensor) != level:
        return tensor.expand(size, *tensor.shape)
    whole, axis = without_transform(tensor), lane_axis(tensor)
    return whole.movedim(axis, 0) if axis else whole  # no view if the axis is in front: each is a node of the graph


def _refuse_undeclared(model: nn.Module, mapped: set[str]) -> None:
    for path, tensor in tensors_in(model):
        if path not in mapped and is_of_vmap(tensor):
            raise MemoptError(
                f"{path} was written with a different value for each sample, but is not a mapped state",
                hint="Declare it with declare_state(module, name, shape) and initialize it in vmap_new_states.",
            )


def _restore(snapshot: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]) -> None:
    for module, attributes, buffers in snapshot:
        vars(module).clear()
        vars(module).update(attributes)
        buffers_of(module).clear()
        buffers_of(module).update(buffers)

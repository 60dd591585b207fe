"""The effects of a training step: collects the tensors that a step leaves, by name, and compares two steps by them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memopt_cli.errors import StepError, first_line
from memopt_cli.runtime.compressor import same_bits
from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.in_backward import StateOnDemand
from memopt_cli.runtime.module_state import ModuleState, copy_module
from memopt_cli.runtime.private_torch import TorchDispatchMode, schema_of
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep, cast, dtype_in, is_out_of_memory, seed_everything

_ROUNDING_SCALE = 1e-3
"""Share of the step's largest gradient below which a gradient may be nothing but rounding.  Examples are the gradients
of the keys' bias in attention, and of a bias before batch norm.  Differences of such gradients are divided by this
share of the largest gradient, not by their own size."""

_NORM_EPSILON = 1e-5
"""Number that norms add to a variance, so that smaller variances do not matter."""
AT_UPDATE = " at update "
"""Words between the name of a gradient that an optimizer used and the number of the update."""
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}


@dataclass(frozen=True, slots=True)
class EffectDifference:
    """The tensor that differs most between two steps."""

    name: str
    """Name of the tensor; empty if all tensors are bit-identical."""
    relative: float
    """Maximum absolute difference, divided by the largest magnitude in the reference tensor; infinity if the shapes
    differ.  For a gradient far smaller than the others, :data:`_ROUNDING_SCALE` gives the divisor.  It does so for the
    running statistics of a norm as well: a mean is measured by the deviation, and a variance by the mean."""
    compared: int
    """Number of tensors that were compared."""


def effects(step: TrainingStep) -> dict[str, Tensor]:
    """Run one step and collect its effects: outputs, gradients of parameters and of floating inputs, buffers, state.

    For a user's own step, these are the gradients that it passes to its optimizers, and the gradients that it leaves.

    The caller's inputs and random generators stay unchanged.  The model's gradients are removed before and afterwards,
    even if the step fails half-way; the model keeps the state that the step leaves.
    """
    step.model.zero_grad(set_to_none=True)
    try:
        with generators_kept():
            seed_everything(step.settings.seed)
            collected = _own_effects(step) if isinstance(step, OwnStep) else _plain_effects(step)
            collected |= generator_state()
        # The gradient of an embedding with sparse=True is sparse.
        gradients = {name: gradient.to_dense() for name, gradient in named_gradients(step.model).items()}
        return collected | gradients | copy_state(step.model)
    finally:
        step.model.zero_grad(set_to_none=True)


def _plain_effects(step: TrainingStep) -> dict[str, Tensor]:
    inputs = map_leaves(_fresh_leaf if step.compares_inputs else as_leaf, (step.args, step.kwargs))
    args, kwargs = copy_tensors(inputs)
    step = replace(step, args=args, kwargs=kwargs)
    # TorchScript runs unoptimized, like in segments: its profiling executor has derivatives that round differently.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        output = step.forward()
    outputs = dict(enumerate(tensors_of(output)))
    # A head that runs through its loss has a deferred output.  Read before the loss, it would be computed as a whole,
    # and so would the loss; so it is read afterwards.
    late = {i: t for i, t in outputs.items() if isinstance(t, DeferredLinear)}
    collected = {f"output[{i}]": t.detach().clone() for i, t in outputs.items() if i not in late}
    step.backward(output)
    collected |= {f"output[{i}]": t.values().clone() for i, t in late.items()}
    leaves = enumerate(tensors_of(inputs))
    return collected | {f"gradient of input {i}": t.grad for i, t in leaves if t.grad is not None}


def _own_effects(step: OwnStep) -> dict[str, Tensor]:
    args, kwargs = clone_tensors((step.args, step.kwargs))
    updates = UpdateGradients(step)
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        output = replace(step, args=args, kwargs=kwargs).run(on_update=updates.collect)
    return {f"output[{i}]": t.detach().clone() for i, t in enumerate(tensors_of(output))} | updates.gradients


class UpdateGradients:
    """Collects the gradients that a user's own step passes to its optimizers."""

    def __init__(self, step: OwnStep) -> None:
        self._names = {id(p): name for name, p in step.model.named_parameters()}
        self.count = 0
        self.gradients: dict[str, Tensor] = {}
        """Name of a gradient, with the number of the update (:data:`AT_UPDATE`) -> a copy of it."""

    def collect(self, optimizer: Optimizer) -> None:
        """Copy the gradients of ``optimizer``, which is about to step."""
        self.count += 1
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                name = f"gradient of {self._names[id(parameter)]}{AT_UPDATE}{self.count}"
                self.gradients[name] = parameter.grad.detach().clone()


def gradients_by_parameter(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the last gradient of each parameter among the effects ``found`` in a step, by parameter name."""
    gradients = ((name.partition(AT_UPDATE)[0], t) for name, t in found.items() if name.startswith("gradient of "))
    return {name.removeprefix("gradient of "): tensor for name, tensor in gradients}


def tensors_on(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a step left on ``model`` and on generators, not copied: gradients, buffers, state."""
    return state_tensors(model) | generator_state() | named_gradients(model)


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters of ``model`` that have one, by name."""
    return {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Copy the buffers of ``model`` and the tensors that it keeps in attributes, by name."""
    return {name: t.detach().clone() for name, t in state_tensors(model).items()}


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of ``model`` by name, and the tensors that it keeps in attributes by number."""
    buffers = dict(model.named_buffers())
    buffer_ids = {id(buffer) for buffer in buffers.values()}
    state = (t for t in ModuleState(model).tensors() if id(t) not in buffer_ids)
    return {f"buffer {name}": b for name, b in buffers.items()} | {f"state {i}": t for i, t in enumerate(state)}


class CannotCopyError(StepError):
    """Raised for a model that cannot be copied."""


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of ``model``.  Raises :class:`CannotCopyError` with the reason."""
    try:
        return copy_module(model)
    except Exception as error:  # the model's own classes may do anything
        raise CannotCopyError(f"the model cannot be copied ({first_line(error)})") from error


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Remove the gradients of the parameters in the ``with`` block, and restore them after it."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Restore the values of the parameters after the ``with`` block; yield the parameters that may change in it.

    A parameter whose elements share memory, like an expanded tensor, cannot be written to, and is not among them.
    """
    writable = [parameter for parameter in model.parameters() if not _is_expanded(parameter)]
    values = [(parameter, parameter.detach().clone()) for parameter in writable]
    try:
        yield writable
    finally:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)


def _is_expanded(parameter: Tensor) -> bool:
    if parameter.layout is not torch.strided:
        return False
    return any(size > 1 and not stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of PyTorch, Python and NumPy after the ``with`` block."""
    generators = Generators()
    try:
        yield
    finally:
        generators.restore()


def generator_state() -> dict[str, Tensor]:
    """Return the state of the global random generators, on every device in use."""
    return {"the random generator's state": torch.frombuffer(bytearray(Generators().to_bytes()), dtype=torch.uint8)}


def difference(reference: dict[str, Tensor], other: dict[str, Tensor]) -> EffectDifference:
    """Find the tensor in which the effects of two steps differ most; a tensor of only one step differs infinitely."""
    worst, worst_name = 0.0, ""
    gradients = [t for name, t in reference.items() if name.startswith("gradient")]
    min_gradient = _ROUNDING_SCALE * max(map(_magnitude, gradients), default=0.0)
    for name in sorted(reference.keys() | other.keys()):
        first, second = reference.get(name), other.get(name)
        if first is not None and second is not None and _have_same_bits(first, second):
            continue
        min_scale = min_gradient if name.startswith("gradient") else _min_statistic(name, reference)
        relative = _relative(first, second, min_scale)
        if relative > worst or not worst_name:
            worst, worst_name = relative, name
    return EffectDifference(worst_name, worst, len(reference.keys() | other.keys()))


def in_double(value: Any) -> Any:
    """Return a copy of ``value`` with its floating tensors in float64, and complex ones in complex128."""
    return map_leaves(lambda x: x.to(dtype_in(torch.float64, x)) if isinstance(x, Tensor) else x, value)


class DoubleThroughout(TorchDispatchMode):
    """Dispatch mode that doubles the width of requested dtypes, since a model's own ``x.float()`` would round.

    An operator that has no kernel for float64, such as the grouped product of a mixture of experts, runs in float32.
    Its inputs under two plans differ by less than float32 can show, so that its outputs are nearly always equal.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*map(_widen, args), **{name: _widen(value) for name, value in kwargs.items()})
        except RuntimeError as error:
            has_doubles = any(t.dtype in _NARROWER for t in tensors_of((args, kwargs)))
            if not has_doubles or schema_of(func).is_mutable or is_out_of_memory(error):
                raise
            narrow_args, narrow_kwargs = map_leaves(_to_narrower, (args, kwargs))
            with suppress(RuntimeError):
                return in_double(func(*narrow_args, **narrow_kwargs))
            raise


@contextmanager
def step_in_double(step: TrainingStep) -> Iterator[TrainingStep]:
    """Yield ``step`` in float64, including the model's own casts to float32; restore its tensors afterwards."""
    with step_cast_to_double(step) as double_step, DoubleThroughout():  # type: ignore[no-untyped-call]
        yield double_step


@contextmanager
def step_cast_to_double(step: TrainingStep) -> Iterator[TrainingStep]:
    """Yield ``step`` with parameters, buffers and inputs in float64; restore these afterwards.

    The model's own casts to float32 stay.  The step can be compiled, unlike one under a dispatch mode.
    """
    start = StartingState(step.model)
    stored = [(p, p.data) for p in step.model.parameters()]
    states = [(optimizer, optimizer.state) for optimizer in step.optimizers()]
    for optimizer, state in states:
        optimizer.state = StateOnDemand(functools.partial(_state_in_double, state))
    try:
        cast(step.model, torch.float64)
        args, kwargs = in_double((step.args, step.kwargs))
        settings = replace(step.settings, precision="fp64")  # no autocast, and no need for a scaler
        yield replace(step, args=args, kwargs=kwargs, settings=settings, scaler=None)
    finally:
        for parameter, data in stored:
            parameter.grad = None  # after a failed step there may be one in float64
            parameter.data = data
        for optimizer, state in states:
            optimizer.state = state
        start.restore()


def _state_in_double(state: Mapping[Any, dict[str, Any]], parameter: Any) -> dict[str, Any]:
    """Return the optimizer's state of ``parameter`` in float64; a step counter keeps its dtype, as PyTorch wants it."""
    own_state = copy.deepcopy(state.get(parameter, {}))
    return {name: value if name == "step" else in_double(value) for name, value in own_state.items()}


def _widen(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _to_narrower(value: Any) -> Any:
    return value.to(_NARROWER.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value


def bit_equal(reference: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two steps left identical bits."""
    return not difference(reference, other).name


def clone_tensors(value: Any) -> Any:
    """Return a copy of ``value`` with its tensors cloned, and detached from their graph."""
    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def as_leaf(value: Any) -> Any:
    """Return ``value``; if it is a tensor, a copy without its graph that needs a gradient if the tensor does.

    A tensor is copied even to be written to a file: a slice of a dataset would be stored with the whole dataset.
    """
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def copy_tensors(value: Any) -> Any:
    """Return ``value`` with clones of its tensors in their graph, which may be written in place, unlike leaves."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _fresh_leaf(leaf: Any) -> Any:
    """Return ``leaf``; if it is a tensor, a copy without its graph that needs a gradient if it is floating."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def _magnitude(tensor: Tensor) -> float:
    """Return the largest finite magnitude in ``tensor``; 0 if it has no elements."""
    if not tensor.numel():
        return 0.0
    largest = _largest(tensor)
    return largest if math.isfinite(largest) else _largest(tensor.abs().double().nan_to_num(0.0, 0.0, 0.0))


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude in ``tensor``, in one pass and without a copy; NaN if it contains NaN."""
    lowest, highest = torch.aminmax(tensor.abs() if tensor.is_complex() else tensor)
    return max(abs(lowest.item()), abs(highest.item()))


def _min_statistic(name: str, reference: dict[str, Tensor]) -> float:
    """Return the minimum divisor for the difference of a norm's running statistic ``name``; 0 for any other tensor.

    The mean of another norm's output is nothing but rounding, and so is the variance of a constant: such values have no
    scale of their own.
    """
    norm = name.removesuffix("running_mean").removesuffix("running_var")
    mean, variance = (reference.get(f"{norm}{statistic}") for statistic in ("running_mean", "running_var"))
    if norm == name or mean is None or variance is None:
        return 0.0
    if name.endswith("running_mean"):
        return _ROUNDING_SCALE * math.sqrt(_magnitude(variance) + _NORM_EPSILON)
    return _ROUNDING_SCALE * (_magnitude(mean) ** 2 + _NORM_EPSILON)


def _relative(reference: Tensor | None, other: Tensor | None, min_scale: float) -> float:
    """Return the largest difference over the largest magnitude of ``reference``, or over ``min_scale`` if more."""
    if reference is None or other is None or reference.shape != other.shape or reference.dtype != other.dtype:
        return float("inf")
    if not reference.is_floating_point():
        return 0.0 if torch.equal(reference, other) else float("inf")
    gap = _largest(reference.double() - other.double()) if reference.numel() else 0.0
    if not math.isfinite(gap):  # both may have the same NaN and infinities
        are_same = bool(((reference == other) | ((reference != reference) & (other != other))).all())
        return 0.0 if are_same else float("inf")
    scale = max(_largest(reference), min_scale) if gap else 1.0
    return gap / scale if scale else float("inf")


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout) and same_bits(a.to_dense(), b.to_dense())

"""Comparing each route with the loop over the models: two training steps must have the same effects.

Outputs, gradients and buffers of two steps are compared on a few models and samples, in float64 if the model allows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import first_line
from memopt_cli.model_batching.extension import AbstractBatchModule
from memopt_cli.model_batching.routes.fused import FusedRoute
from memopt_cli.model_batching.routes.interface import Route, RouteName, RouteRefusedError
from memopt_cli.model_batching.routes.loop import LoopRoute
from memopt_cli.model_batching.routes.vmap import VmapRoute
from memopt_cli.model_batching.stacked import first_models, list_slots
from memopt_cli.records import StepSettings
from memopt_cli.runtime.private_torch import TorchDispatchMode, schema_of
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.step import TrainingStep, seed_everything, seed_torch, seeds_of_backward
from memopt_cli.verification.effects import difference, effects, generator_state, generators_kept, in_double

ROUTES: dict[RouteName, Callable[[nn.Module, int], Route]] = {
    "fused": FusedRoute,
    "vmap": VmapRoute,
    "loop": LoopRoute,
}
"""Name -> class of the route, called with a stacked model and the number of models; in the order of trying them."""

TOLERANCE = 1e-10
"""A route computes the same if it differs from the loop by at most this, relatively, in float64."""
STORED_TOLERANCE = 1e-5
"""The limit for models that cannot run in float64, and are compared in their own precision."""
_COMPARED_MODELS = 2
_COMPARED_SAMPLES = 3
"""Number of compared samples of each model; it differs from the number of models, so that mixed-up axes show."""
_COMPARISON_SHARE = 0.1
"""Once a route can be used, other routes are compared for at most this share of the time of a step on all samples."""
_MIN_COMPARISON_S = 0.25
"""Minimum of the limit, in seconds, that follows from :data:`_COMPARISON_SHARE`."""
_MAX_COMPARISON_S = 1.0
"""Maximum of the limit, in seconds, that follows from :data:`_COMPARISON_SHARE`."""
_GENERATOR_KEY = "random generator"
"""Text in the names of effects that are states of random generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTrial:
    """Result of trying one route."""

    name: RouteName
    refused: str = ""
    """Reason why the route cannot be used."""
    difference: float = 0.0
    """Maximum relative difference from the loop in float64, over outputs, gradients and buffers.  NaN: not compared."""
    step_s: float = math.nan
    """Median seconds of its forward and backward, on few samples if all would take long.  NaN: not timed."""
    used: bool = False
    """Whether this route was chosen to run the models."""


@dataclass(frozen=True, slots=True)
class TrialInputs:
    """Stacked models, their number, and their inputs (models, samples, …), for a trial of a route."""

    tree: nn.Module
    models: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def element_count(self) -> int:
        """Number of elements of all inputs, at least 1."""
        return max(1, sum(tensor.numel() for tensor in tensors_of((self.args, self.kwargs))))

    def reduced(self) -> TrialInputs:
        """Return a copy with few models and few samples of each.

        All models stay if a registered batch module is among the modules, since it was made for their number.
        """
        has_fixed_number = any(isinstance(m, AbstractBatchModule) for m in self.tree.modules())
        count = self.models if has_fixed_number else min(self.models, _COMPARED_MODELS)
        samples = next((t.shape[1] for t in tensors_of((self.args, self.kwargs)) if t.dim() > 1), 0)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # Samples are in dimension 1, if that is as long as dimension 1 of the first input with two.
            is_sampled = leaf.dim() > 1 and leaf.shape[1] == samples
            return leaf[:count, :_COMPARED_SAMPLES] if is_sampled else leaf[:count]

        args, kwargs = map_leaves(cut, (self.args, self.kwargs))
        return TrialInputs(first_models(self.tree, count), count, args, kwargs)


class RouteModel(nn.Module):
    """A route on a stacked model as an ``nn.Module``, so that :class:`TrainingStep` can take steps with it."""

    def __init__(self, name: RouteName, tree: nn.Module, models: int) -> None:
        super().__init__()
        self.tree = tree
        self._route = ROUTES[name](tree, models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._route(args, kwargs)


class Reference:
    """Two steps of the loop, in float64 if the model can be run in it."""

    def __init__(self, full_inputs: TrialInputs) -> None:
        self._uses_random = False
        self.inputs = full_inputs.reduced()
        """A few models and samples; all of them, if the model fails on few samples."""
        self._run()
        if self._effects is None:
            self.inputs = full_inputs
            self._run()
        step_s = self._two_steps_s / 2 * full_inputs.element_count / self.inputs.element_count
        self.patience_s = min(_MAX_COMPARISON_S, max(_MIN_COMPARISON_S, _COMPARISON_SHARE * step_s))
        """Seconds after which no further route is compared once one can be used."""

    def _run(self) -> None:
        """Take the steps in float64, or if that fails, in the model's own precision."""
        if not self._try_steps(is_double=True):
            self._try_steps(is_double=False)

    def _try_steps(self, *, is_double: bool) -> bool:
        """Take the steps, and return whether they ran; if not, ``_failure`` is the reason."""
        self._effects: dict[str, Tensor] | None = None
        self._is_double = is_double
        arguments = self.inputs.args, self.inputs.kwargs
        self._arguments = in_double(arguments) if is_double else arguments
        started = time.perf_counter()
        try:
            self._effects = self._compute_effects("loop")
        except Exception as error:
            self._failure = first_line(error)
        self._two_steps_s = time.perf_counter() - started
        return self._effects is not None

    def try_route(self, name: RouteName) -> RouteTrial:
        """Return a trial of the route ``name``: whether it can be built, runs, and computes the same as the loop."""
        refused = ""
        relative = 0.0
        if name != "loop":
            try:
                refused, relative = self._compare(name)
            except RouteRefusedError as refusal:
                refused = str(refusal)
            except Exception as error:
                refused = first_line(error)
        return RouteTrial(name=name, refused=refused, difference=relative)

    def _compare(self, name: RouteName) -> tuple[str, float]:
        """Return why the route ``name`` cannot be used, and its largest relative difference."""
        if self._effects is None:
            return f"it cannot be compared with the loop, since a step of the loop fails: {self._failure}", 0.0
        worst = difference(self._effects, self._compute_effects(name))
        if worst.relative <= (TOLERANCE if self._is_double else STORED_TOLERANCE):
            return "", worst.relative
        return f"{worst.name} differs from the loop's by {worst.relative:.1e} of its magnitude", worst.relative

    def _compute_effects(self, name: RouteName) -> dict[str, Tensor]:
        if not self._uses_random:
            step_effects = self._two_steps(name)
            self._uses_random = any(_has_used_random(t) for key, t in step_effects.items() if _GENERATOR_KEY in key)
        # Dropout is left on otherwise, since a dispatch mode costs time, and makes PyTorch import its compiler.
        if self._uses_random:
            with _WithoutDropout():  # type: ignore[no-untyped-call]
                step_effects = self._two_steps(name)
        return {key: tensor for key, tensor in step_effects.items() if _GENERATOR_KEY not in key}

    def _two_steps(self, name: RouteName) -> dict[str, Tensor]:
        """Return the effects of two steps; the second starts from the buffers and the state after the first."""
        model = RouteModel(name, self._different_models(), self.inputs.models)
        args, kwargs = self._arguments
        step = TrainingStep(model=model, args=args, kwargs=kwargs, settings=settings_for(args, kwargs), loss=make_loss)
        return {f"{key} of step {number}": tensor for number in (1, 2) for key, tensor in effects(step).items()}

    def _different_models(self) -> nn.Module:
        """Return a copy of the models with weights that differ.

        Each route gets a new copy of the original: a copy of a copy would take longer, and twice the memory.
        """
        if self._is_double:
            tree = first_models(self.inputs.tree, self.inputs.models, dtype=torch.float64)
            tree.double()  # modules may convert more by themselves than parameters and buffers
        else:
            tree = first_models(self.inputs.tree, self.inputs.models)
        _make_different(tree)
        return tree


def _has_used_random(generators: Tensor) -> bool:
    """Return whether a step that left the random generators at ``generators`` has moved them."""
    with generators_kept():
        seed_everything(StepSettings().seed)
        (untouched,) = generator_state().values()
        return not torch.equal(generators, untouched)


def make_loss(output: Any) -> Tensor:
    """Return a scalar whose gradient equals the gradient of a step without a loss.

    Calling backward on outputs with given gradients would be the same, but makes PyTorch import SymPy, which takes a
    second.
    """
    roots, cotangents = seeds_of_backward(output, None, StepSettings().seed)
    weighted = [root if factor is None else root * factor for root, factor in zip(roots, cotangents, strict=True)]
    return torch.stack([(t.real if t.is_complex() else t).sum().double() for t in weighted]).sum()


def settings_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepSettings:
    """Return the settings of a step on the device of the first tensor in ``args`` and ``kwargs``."""
    device = next((str(t.device) for t in tensors_of((args, kwargs))), "cpu")
    return StepSettings(device=device)


@torch.no_grad()
def _make_different(tree: nn.Module) -> None:
    """Give the models in ``tree`` weights and statistics that differ.

    If all models were equal, a route that mixes them up would go unnoticed.
    """
    seed_torch(0)
    for tensor in {id(slot.tensor): slot.tensor for slot in list_slots(tree)}.values():
        if tensor.is_floating_point():
            # The noise varies within an output channel: a norm would undo one factor for all of it.
            shape = (tensor.shape[0], 1, *tensor.shape[2:]) if tensor.dim() > 2 else tensor.shape
            noise = torch.rand(shape, dtype=tensor.dtype, device=tensor.device)
            tensor.mul_(1 + 0.1 * noise)
            tensor.add_(0.01 * noise.flip(-1) if isinstance(tensor, nn.Parameter) and tensor.dim() else 0.0)


class _WithoutDropout(TorchDispatchMode):
    """A mode in which dropout keeps all values, in recomputations as well; routes would make different masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match schema_of(func).name:
            case "aten::bernoulli_" | "aten::bernoulli" as name:
                default = 0.5 if name.endswith("_") else args[0]  # ``bernoulli_`` omits a probability of 0.5
                probability = torch.as_tensor(args[1] if len(args) > 1 else kwargs.get("p", default))
                mask = (probability > 0).to(args[0]).expand_as(args[0])
                return args[0].copy_(mask) if name.endswith("_") else mask.clone()
            case "aten::native_dropout":
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in schema_of(func).arguments]
        if "dropout_p" in names and len(args) > names.index("dropout_p"):
            position = names.index("dropout_p")
            args = (*args[:position], 0.0, *args[position + 1 :])
        return func(*args, **kwargs)

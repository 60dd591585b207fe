"""Compare each route with the loop over the models: two training steps must have the same effects.

Compared are outputs, gradients and buffers of two steps on a few models and samples, in float64 if the model allows it.
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
from memopt_cli.model_batching.routes.interface import Refused, Route, RouteName
from memopt_cli.model_batching.routes.loop import LoopRoute
from memopt_cli.model_batching.routes.vmap import VmapRoute
from memopt_cli.model_batching.stacked import first_models, slots_of
from memopt_cli.records import StepSettings
from memopt_cli.runtime.private_torch import TorchDispatchMode, schema_of
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.step import Step, seed_everything, seed_torch, seeds_of_backward
from memopt_cli.verification.effects import difference, effects, generator_state, generators_kept, in_double

ROUTES: dict[RouteName, Callable[[nn.Module, int], Route]] = {
    "fused": FusedRoute,
    "vmap": VmapRoute,
    "loop": LoopRoute,
}
"""Name -> the class of the route, called with a stacked model and the number of models; in the order of trying them."""

TOLERANCE = 1e-10
"""Largest relative difference from the loop, in float64, with which a route counts as computing the same."""
STORED_TOLERANCE = 1e-5
"""The limit in place of :data:`TOLERANCE` for models that cannot run in float64, in the model's own precision."""
_FEW_MODELS = 2
"""Number of models that are compared."""
_FEW_SAMPLES = 3
"""Number of samples of each that are compared; not the number of models, so that mixed-up axes show."""
_COMPARING_SHARE = 0.1
"""Once a route can be used, others are compared for at most this share of the time of a step on all samples …"""
_SHORT_S = 0.25
"""… but for at least this many seconds, …"""
_COMPARING_S = 1.0
"""… and for at most this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTrial:
    """Result of trying one route."""

    name: RouteName
    refused: str = ""
    """Why it cannot be used; empty if it can."""
    difference: float = 0.0
    """Largest relative difference from the loop in float64, over outputs, gradients and buffers; NaN without one."""
    step_s: float = math.nan
    """Median seconds of its forward and backward, on few samples if all would take long; NaN if not timed."""
    used: bool = False
    """Whether this route was chosen to run the models."""


@dataclass(frozen=True, slots=True)
class Given:
    """The subject of a trial: stacked models, their number, and their inputs (models, samples, …)."""

    tree: nn.Module
    models: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def size(self) -> int:
        """Elements of all inputs, at least 1."""
        return max(1, sum(tensor.numel() for tensor in tensors_of((self.args, self.kwargs))))

    def few(self) -> Given:
        """Return a copy with few models and few samples of each.

        All models stay if a registered batch module is among the modules, which was made for their number.
        """
        knows_number = any(isinstance(m, AbstractBatchModule) for m in self.tree.modules())
        count = self.models if knows_number else min(self.models, _FEW_MODELS)
        samples = next((t.shape[1] for t in tensors_of((self.args, self.kwargs)) if t.dim() > 1), 0)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # Samples are in dimension 1, if that is as long as in the first input that has one.
            is_sampled = leaf.dim() > 1 and leaf.shape[1] == samples
            return leaf[:count, :_FEW_SAMPLES] if is_sampled else leaf[:count]

        args, kwargs = map_leaves(cut, (self.args, self.kwargs))
        return Given(first_models(self.tree, count), count, args, kwargs)


class RouteModel(nn.Module):
    """A route on a stacked model as an ``nn.Module``, with which :class:`Step` can take steps."""

    def __init__(self, name: RouteName, tree: nn.Module, models: int) -> None:
        super().__init__()
        self.tree = tree
        self._route = ROUTES[name](tree, models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._route(args, kwargs)


class Reference:
    """Two steps of the loop, in float64 if the model can be run in it."""

    def __init__(self, whole: Given) -> None:
        self._draws = False
        self.given = whole.few()
        """A few models and samples; all, if the model fails on few samples."""
        self._run()
        if self._effects is None:
            self.given = whole
            self._run()
        step_s = self._took_s / 2 * whole.size / self.given.size
        self.patience_s = min(_COMPARING_S, max(_SHORT_S, _COMPARING_SHARE * step_s))
        """Seconds after which no further route is compared once one can be used."""

    def _run(self) -> None:
        self._effects: dict[str, Tensor] | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]]
        for self._is_double in (True, False):
            given = self.given.args, self.given.kwargs
            self._inputs = in_double(given) if self._is_double else given
            started = time.perf_counter()
            try:
                self._effects = self._effects_of("loop")
                return
            except Exception as error:
                self._failure = first_line(error)
            finally:
                self._took_s = time.perf_counter() - started

    def trial_of(self, name: RouteName) -> RouteTrial:
        """Return a trial of the route ``name``: whether it can be built, runs, and computes the same as the loop."""
        refused, relative = "", 0.0
        if name != "loop":
            try:
                refused, relative = self._compared(name)
            except Refused as reason:
                refused = str(reason)
            except Exception as error:
                refused = first_line(error)
        return RouteTrial(name=name, refused=refused, difference=relative)

    def _compared(self, name: RouteName) -> tuple[str, float]:
        if self._effects is None:
            return f"it cannot be compared with the loop, whose step fails: {self._failure}", 0.0
        worst = difference(self._effects, self._effects_of(name))
        if worst.relative <= (TOLERANCE if self._is_double else STORED_TOLERANCE):
            return "", worst.relative
        return f"{worst.name} differs from the loop's by {worst.relative:.1e} of its magnitude", worst.relative

    def _effects_of(self, name: RouteName) -> dict[str, Tensor]:
        if not self._draws:
            left = self._two_steps(name)
            self._draws = any(_has_drawn(t) for key, t in left.items() if _RANDOM in key)
        if self._draws:  # only then, since a dispatch mode costs time, and makes PyTorch import its compiler
            with _WithoutDropout():  # type: ignore[no-untyped-call]
                left = self._two_steps(name)
        return {key: tensor for key, tensor in left.items() if _RANDOM not in key}

    def _two_steps(self, name: RouteName) -> dict[str, Tensor]:
        """Return the effects of two steps; the second starts from the buffers and the state that the first left."""
        model = RouteModel(name, self._different_models(), self.given.models)
        args, kwargs = self._inputs
        step = Step(model=model, args=args, kwargs=kwargs, settings=settings_for(args, kwargs), loss=loss_of)
        return {f"{key} of step {number}": tensor for number in (1, 2) for key, tensor in effects(step).items()}

    def _different_models(self) -> nn.Module:
        """Return a copy of the models with weights that differ.

        It is made again for each route: copying one that is kept would take longer, and twice the memory.
        """
        if self._is_double:
            tree = first_models(self.given.tree, self.given.models, dtype=torch.float64)
            tree.double()  # modules may convert more by themselves than parameters and buffers
        else:
            tree = first_models(self.given.tree, self.given.models)
        _make_different(tree)
        return tree


_RANDOM = "random generator"


def _has_drawn(generators: Tensor) -> bool:
    """Return whether a step that left the random generators at ``generators`` drew numbers."""
    with generators_kept():
        seed_everything(StepSettings().seed)
        (untouched,) = generator_state().values()
        return not torch.equal(generators, untouched)


def loss_of(output: Any) -> Tensor:
    """Return a scalar whose gradient is that of a step without a loss.

    Calling backward on outputs with given gradients would be the same, but makes PyTorch import SymPy, which takes a
    second.
    """
    roots, cotangents = seeds_of_backward(output, None, StepSettings().seed)
    weighed = [root if given is None else root * given for root, given in zip(roots, cotangents, strict=True)]
    return torch.stack([(t.real if t.is_complex() else t).sum().double() for t in weighed]).sum()


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
    for tensor in {id(slot.tensor): slot.tensor for slot in slots_of(tree)}.values():
        if tensor.is_floating_point():
            # The noise varies within an output channel: a norm would undo one factor for all of it.
            shape = (tensor.shape[0], 1, *tensor.shape[2:]) if tensor.dim() > 2 else tensor.shape
            noise = torch.rand(shape, dtype=tensor.dtype, device=tensor.device)
            tensor.mul_(1 + 0.1 * noise)
            tensor.add_(0.01 * noise.flip(-1) if isinstance(tensor, nn.Parameter) and tensor.dim() else 0.0)


class _WithoutDropout(TorchDispatchMode):
    """A mode in which dropout keeps all values, also in a recomputation: routes would draw different masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match schema_of(func).name:
            case "aten::bernoulli_" | "aten::bernoulli" as name:
                default = 0.5 if name.endswith("_") else args[0]  # ``bernoulli_`` omits a probability of 0.5
                probability = torch.as_tensor(args[1] if len(args) > 1 else kwargs.get("p", default))
                kept = (probability > 0).to(args[0]).expand_as(args[0])
                return args[0].copy_(kept) if name.endswith("_") else kept.clone()
            case "aten::native_dropout":
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in schema_of(func).arguments]
        if "dropout_p" in names and len(args) > names.index("dropout_p"):
            at = names.index("dropout_p")
            args = (*args[:at], 0.0, *args[at + 1 :])
        return func(*args, **kwargs)

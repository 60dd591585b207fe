"""Choosing the route measured to be fastest among the routes that compute the same as the loop over the models.

Choosing runs training steps, and must cost little compared with the time that it saves.  For 100 models of 64 samples:

1. The loop takes two steps with 2 models and 3 samples each, in float64 and with weights that differ between the models
   (:mod:`~memopt_cli.model_batching.comparison`).  Outputs, gradients, buffers and hidden state are the reference.
2. Each other route takes the same two steps.  It is refused if anything differs.  Once one route can be used and
   comparing has taken long enough, no further route is compared.
3. The usable routes take turns on all models and samples, and the smallest median wins
   (:mod:`~memopt_cli.model_batching.timing`).  If that would take seconds, they are timed on the few samples.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memopt_cli.errors import UsageError, first_line
from memopt_cli.model_batching.comparison import ROUTES, Reference, RouteTrial, TrialInputs
from memopt_cli.model_batching.routes.interface import Route, RouteName
from memopt_cli.model_batching.routes.loop import LoopRoute
from memopt_cli.model_batching.timing import Trials, time_routes
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.verification.effects import generators_kept

_NOT_TRIED = "it was not tried, since another route can be used"


def candidates(route: str) -> list[RouteName]:
    """Return the routes to try for ``route``, a name or ``auto``, in the order of trying them."""
    return [name for name in ROUTES if route in ("auto", name)]


def choose_route(
    tree: nn.Module, models: int, route: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool = True
) -> tuple[Route, list[RouteTrial]]:
    """Return the route that runs ``tree``, the stacked model, from now on, and a trial for each candidate.

    Everything is tried on copies of a few models, on a few samples of each: the model, its gradients and the random
    generators do not change.  Dropout is off while routes are compared, since each makes its own masks.  Without
    ``check`` nothing is tried: the first call uses the first route that runs.  Raises :class:`UsageError` with the
    reasons if ``route`` cannot be used.
    """
    if route == "loop":
        return LoopRoute(tree, models), [RouteTrial(name="loop", used=True)]
    if not check:
        first = _FirstRunnable(tree, models, route)
        return first, first.trials
    with warnings.catch_warnings(), torch.enable_grad(), generators_kept():
        warnings.simplefilter("ignore")  # vmap warns of slow operators, whose time is measured here anyway
        full_inputs = TrialInputs(tree, models, args, kwargs)
        reference = Reference(full_inputs)
        patience_s = reference.patience_s if route == "auto" else 0.0
        trials = _compare_routes(candidates(route), reference.try_route, limit_s=patience_s)
        trials = time_routes(trials, [reference.inputs, full_inputs]) if route == "auto" else trials
    steps_s = {name: trial.step_s for name, trial in trials.items() if not trial.refused}
    if not steps_s:
        raise _no_route_error(route, tree, trials)
    fastest = min(steps_s, key=lambda name: math.inf if math.isnan(steps_s[name]) else steps_s[name])
    trials[fastest] = replace(trials[fastest], used=True)
    return ROUTES[fastest](tree, models), list(trials.values())


def _compare_routes(names: list[RouteName], compare: Callable[[RouteName], RouteTrial], limit_s: float) -> Trials:
    """Return the trial by ``compare`` of each of ``names``.

    Once a route can be used and ``limit_s`` seconds are over, no other route is compared.  The loop is the reference,
    and needs no comparison.
    """
    trials: Trials = {}
    started = time.perf_counter()
    for name in names:
        has_usable = any(not trial.refused for trial in trials.values())
        if has_usable and name != "loop" and time.perf_counter() - started >= limit_s:
            trials[name] = RouteTrial(name=name, refused=_NOT_TRIED, difference=math.nan)
        else:
            trials[name] = compare(name)
    return trials


def _no_route_error(route: str, tree: nn.Module, trials: Trials) -> UsageError:
    reasons = "; ".join(dict.fromkeys(trial.refused for trial in trials.values()))
    return UsageError(
        f"the {route} route cannot run {type(tree).__name__}: {reasons}",
        hint='Use route="auto", which takes the fastest route that can.',
    )


class _FirstRunnable:
    """The first route whose first call raises no error; changes by routes that failed before it are undone."""

    def __init__(self, tree: nn.Module, models: int, route: str) -> None:
        self._tree = tree
        self._models = models
        self._name = route
        self._route: Route | None = None
        self.trials: list[RouteTrial] = []
        """One trial for each candidate.  Before the first call: empty."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._first_call(args, kwargs) if self._route is None else self._route(args, kwargs)

    def reset(self) -> None:
        if self._route is not None:
            self._route.reset()

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trials = {
            name: RouteTrial(name=name, refused=_NOT_TRIED, difference=math.nan) for name in candidates(self._name)
        }
        for name in trials:
            restore = _make_restorer(self._tree)
            try:
                route = ROUTES[name](self._tree, self._models)
                output = route(args, kwargs)
            except Exception as error:
                restore()
                if name == "loop":  # the last route: its error comes from the model
                    raise
                trials[name] = replace(trials[name], refused=first_line(error))
                continue
            self._route = route
            trials[name] = replace(trials[name], refused="", used=True)
            self.trials[:] = trials.values()
            return output
        raise _no_route_error(self._name, self._tree, trials)


def _make_restorer(tree: nn.Module) -> Callable[[], None]:
    """Return a function that restores ``tree`` and the random generators to their current state."""
    state, generators = ModuleState(tree), Generators()
    # ``ModuleState`` refers to tensors, and routes write buffers in place.
    copies = [(buffer, buffer.detach().clone()) for buffer in tree.buffers()]

    def restore() -> None:
        state.restore()
        generators.restore()
        with torch.no_grad():
            for buffer, value in copies:
                buffer.copy_(value)

    return restore

"""Choose the route: the fastest one, as measured, of those that compute the same as the loop over the models.

Choosing runs training steps, and must cost little beside the time that it saves.  For 100 models of 64 samples:

1. The loop takes two steps with 2 models and 3 samples each, in float64 and with weights that differ between the models
   (:mod:`~memopt_cli.model_batching.comparison`).  Outputs, gradients, buffers and hidden state are the reference.
2. Each other route takes the same two steps.  It is refused if anything differs.  Once one route can be used and
   comparing has taken long enough, no further route is compared.
3. The routes that are left take turns on all models and samples; the one with the smallest median wins
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
from memopt_cli.model_batching.comparison import ROUTES, Given, Reference, RouteTrial
from memopt_cli.model_batching.routes.interface import Route, RouteName
from memopt_cli.model_batching.routes.loop import LoopRoute
from memopt_cli.model_batching.timing import Trials, with_seconds
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.verification.effects import generators_kept

_NOT_TRIED = "it was not tried: another one can be used"


def candidates(wanted: str) -> list[RouteName]:
    """Return the routes to try for ``wanted``, the name of a route or ``auto``, in the order of trying them."""
    return [name for name in ROUTES if wanted in ("auto", name)]


def select(
    tree: nn.Module, models: int, wanted: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool = True
) -> tuple[Route, list[RouteTrial]]:
    """Return the route that runs ``tree``, the stacked model, from now on, and a trial for each candidate.

    Everything is tried on copies of a few models, on a few samples of each: the model, its gradients and the random
    generators do not change.  Dropout is off while routes are compared, since each draws its own numbers.  Without
    ``check`` nothing is tried: the first call uses the first route that runs.  Raises :class:`UsageError` with the
    reasons if the wanted route cannot be used.
    """
    if wanted == "loop":
        return LoopRoute(tree, models), [RouteTrial(name="loop", used=True)]
    if not check:
        first = _FirstThatRuns(tree, models, wanted)
        return first, first.trials
    with warnings.catch_warnings(), torch.enable_grad(), generators_kept():
        warnings.simplefilter("ignore")  # vmap warns of slow operators, whose time is measured here anyway
        whole = Given(tree, models, args, kwargs)
        reference = Reference(whole)
        patience_s = reference.patience_s if wanted == "auto" else 0.0
        trials = _compared(candidates(wanted), reference.trial_of, most_s=patience_s)
        trials = with_seconds(trials, [reference.given, whole]) if wanted == "auto" else trials
    usable = {name: trial.step_s for name, trial in trials.items() if not trial.refused}
    if not usable:
        raise _unusable(wanted, tree, trials)
    fastest = min(usable, key=lambda name: math.inf if math.isnan(usable[name]) else usable[name])
    trials[fastest] = replace(trials[fastest], used=True)
    return ROUTES[fastest](tree, models), list(trials.values())


def _compared(names: list[RouteName], compare: Callable[[RouteName], RouteTrial], most_s: float) -> Trials:
    """Return the trial by ``compare`` of each of ``names``.

    Once a route can be used and ``most_s`` seconds are over, no other is compared.  The loop needs no comparison: it is
    the reference.
    """
    trials: Trials = {}
    started = time.perf_counter()
    for name in names:
        is_found = any(not trial.refused for trial in trials.values())
        if is_found and name != "loop" and time.perf_counter() - started >= most_s:
            trials[name] = RouteTrial(name=name, refused=_NOT_TRIED, difference=math.nan)
        else:
            trials[name] = compare(name)
    return trials


def _unusable(wanted: str, tree: nn.Module, trials: Trials) -> UsageError:
    reasons = "; ".join(dict.fromkeys(trial.refused for trial in trials.values()))
    return UsageError(
        f"the {wanted} route cannot run {type(tree).__name__}: {reasons}",
        hint='Use route="auto", which takes the fastest route that can.',
    )


class _FirstThatRuns:
    """The first route whose first call raises no error; changes that others made before they failed are undone."""

    def __init__(self, tree: nn.Module, models: int, wanted: str) -> None:
        self._tree = tree
        self._models = models
        self._wanted = wanted
        self._route: Route | None = None
        self.trials: list[RouteTrial] = []
        """One trial for each candidate; empty before the first call."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._first_call(args, kwargs) if self._route is None else self._route(args, kwargs)

    def reset(self) -> None:
        if self._route is not None:
            self._route.reset()

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trials = {
            name: RouteTrial(name=name, refused=_NOT_TRIED, difference=math.nan) for name in candidates(self._wanted)
        }
        for name in trials:
            put_back = _restorer(self._tree)
            try:
                route = ROUTES[name](self._tree, self._models)
                output = route(args, kwargs)
            except Exception as error:
                put_back()
                if name == "loop":  # the last one: its error is the model's own
                    raise
                trials[name] = replace(trials[name], refused=first_line(error))
                continue
            self._route = route
            trials[name] = replace(trials[name], refused="", used=True)
            self.trials[:] = trials.values()
            return output
        raise _unusable(self._wanted, self._tree, trials)


def _restorer(tree: nn.Module) -> Callable[[], None]:
    """Return a function that puts ``tree`` and the random generators back into their present state."""
    state, generators = ModuleState(tree), Generators()
    # ``ModuleState`` refers to tensors, and routes write buffers in place.
    copies = [(buffer, buffer.detach().clone()) for buffer in tree.buffers()]

    def put_back() -> None:
        state.restore()
        generators.restore()
        with torch.no_grad():
            for buffer, before in copies:
                buffer.copy_(before)

    return put_back

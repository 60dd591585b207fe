"""Measure the seconds of a step of each route, in turns."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from memopt_cli.errors import first_line
from memopt_cli.model_batching.comparison import Given, RouteModel, RouteTrial, loss_of, settings_for
from memopt_cli.model_batching.routes.interface import RouteName
from memopt_cli.runtime.tree import map_leaves
from memopt_cli.training.step import Step, synchronize

_MAX_ROUNDS = 30
"""Most steps of each route that are timed."""
_TIMING_S = 1.0
"""Seconds that timing may take after the first steps.  If one step of each route would take longer, routes are timed on
few samples."""
_TIMING_SHARE = 0.25
"""Share of a step on all samples that timing on few may take after the first steps."""
_FAR_BEHIND = 1.5
"""Factor: a route whose best step takes more than so many times the fastest route's best step is timed no further."""

Trials = dict[RouteName, RouteTrial]
Timer = Callable[[], float]
"""A function that takes one step and returns its seconds."""


def with_seconds(trials: Trials, sizes: Sequence[Given]) -> Trials:
    """Return ``trials`` with the seconds of a step of each route; one that fails in the model's precision is refused.

    ``sizes``: models and inputs to take steps on, the smallest first.  The last is used if its steps are short.  If
    they are long, timing takes at most a share of one such step, or a single step of each route on the smallest.
    """
    for given in sizes:
        if sum(not trial.refused for trial in trials.values()) < 2:
            return trials  # nothing to choose from
        steps, first_s, trials = _first_steps(trials, given)
        whole_s = [sizes[-1].size / given.size * seconds for seconds in first_s.values()]
        if is_long := sum(whole_s) > _TIMING_S:
            break
    most_s = min(_TIMING_S, _TIMING_SHARE * min(whole_s)) if is_long else _TIMING_S
    seconds = _median_seconds(steps, first_s, most_s)
    return {name: replace(trial, step_s=seconds.get(name, math.nan)) for name, trial in trials.items()}


def _first_steps(trials: Trials, given: Given) -> tuple[dict[RouteName, Timer], dict[RouteName, float], Trials]:
    """Take a first step by each usable route; return the timers for further steps, the seconds, and the trials."""
    steps: dict[RouteName, Timer] = {}
    first_s: dict[RouteName, float] = {}
    updated = dict(trials)
    for name, trial in trials.items():
        if trial.refused:
            continue
        try:
            step = _timer(name, given)
            first_s[name], steps[name] = step(), step
        except Exception as error:
            if name != "loop":
                updated[name] = replace(trial, refused=first_line(error))
    return steps, first_s, updated


def _median_seconds(
    steps: dict[RouteName, Timer], first_s: dict[RouteName, float], most_s: float
) -> dict[RouteName, float]:
    """Return the median seconds of ``steps``, taken in turns, so that the load of the machine is the same for all.

    ``first_s``: the seconds of a first step of each, which warmed it up; returned if one more round would take longer
    than ``most_s``.
    """
    taken: dict[RouteName, list[float]] = {name: [] for name in steps}
    racing, started, done = list(steps), time.perf_counter(), 0
    round_s = sum(first_s.values())
    while len(racing) > 1 and done < _MAX_ROUNDS and time.perf_counter() - started + round_s <= most_s:
        for name in racing:
            taken[name].append(steps[name]())
        done, round_s = done + 1, sum(taken[name][-1] for name in racing)
        if done > 1:  # a single step may have been disturbed
            fastest = min(map(min, taken.values()))
            racing = [name for name in racing if min(taken[name]) <= _FAR_BEHIND * fastest]
    return {name: statistics.median(seconds) for name, seconds in taken.items()} if done else first_s


def _timer(name: RouteName, given: Given) -> Timer:
    """Return a function that takes one forward and backward by the route ``name`` on a copy of ``given``."""
    settings = settings_for(given.args, given.kwargs)
    args, kwargs = map_leaves(_own_leaf, (given.args, given.kwargs))
    model = RouteModel(name, copy.deepcopy(given.tree), given.models)
    step = Step(model=model, args=args, kwargs=kwargs, settings=settings, loss=loss_of)

    def run() -> float:
        step.model.zero_grad()
        synchronize(settings.device)
        start = time.perf_counter()
        step.backward(step.forward())
        synchronize(settings.device)
        return time.perf_counter() - start

    return run


def _own_leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

"""Measuring the seconds of a step of each route, in alternation."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from memopt_cli.errors import first_line
from memopt_cli.model_batching.comparison import RouteModel, RouteTrial, TrialInputs, make_loss, settings_for
from memopt_cli.model_batching.routes.interface import RouteName
from memopt_cli.runtime.tree import map_leaves
from memopt_cli.training.step import TrainingStep, synchronize

_MAX_ROUNDS = 30
"""Maximum number of timed steps of each route."""
_MAX_TIMING_S = 1.0
"""Maximum seconds of timing after the first steps; if one step of each route would take longer, samples are fewer."""
_MAX_TIMING_SHARE = 0.25
"""Timing on few samples, after the first steps, takes at most this share of a step on all samples."""
_MAX_LAG_FACTOR = 1.5
"""A route is timed no further if its best step takes more than this many times the fastest route's best step."""

Trials = dict[RouteName, RouteTrial]
Timer = Callable[[], float]
"""A function that takes one step and returns its seconds."""


def time_routes(trials: Trials, sizes: Sequence[TrialInputs]) -> Trials:
    """Return ``trials`` with the seconds of a step of each route.

    A route that fails in the model's precision is refused.

    ``sizes``: models and inputs to take steps on, the smallest first.  The last is used if its steps are short.  If
    they are long, timing takes at most a share of one such step, or a single step of each route on the smallest.
    """
    for inputs in sizes:
        if sum(not trial.refused for trial in trials.values()) < 2:
            return trials  # nothing to choose from
        steps, first_s, trials = _first_steps(trials, inputs)
        full_steps_s = [sizes[-1].element_count / inputs.element_count * s for s in first_s.values()]
        if is_long := sum(full_steps_s) > _MAX_TIMING_S:
            break
    limit_s = min(_MAX_TIMING_S, _MAX_TIMING_SHARE * min(full_steps_s)) if is_long else _MAX_TIMING_S
    seconds = _median_seconds(steps, first_s, limit_s)
    return {name: replace(trial, step_s=seconds.get(name, math.nan)) for name, trial in trials.items()}


def _first_steps(trials: Trials, inputs: TrialInputs) -> tuple[dict[RouteName, Timer], dict[RouteName, float], Trials]:
    """Take a first step by each usable route; return the timers for further steps, the seconds, and the trials."""
    steps: dict[RouteName, Timer] = {}
    first_s: dict[RouteName, float] = {}
    updated = dict(trials)
    for name, trial in trials.items():
        if trial.refused:
            continue
        try:
            step = _timer(name, inputs)
            first_s[name], steps[name] = step(), step
        except Exception as error:
            if name != "loop":
                updated[name] = replace(trial, refused=first_line(error))
    return steps, first_s, updated


def _median_seconds(
    steps: dict[RouteName, Timer], first_s: dict[RouteName, float], limit_s: float
) -> dict[RouteName, float]:
    """Return the median seconds of ``steps``, taken in alternation, so that all run under the same load of the machine.

    ``first_s``: the seconds of the first steps, which warmed up; returned if one more round would take longer than
    ``limit_s``.
    """
    times_s: dict[RouteName, list[float]] = {name: [] for name in steps}
    names = list(steps)
    rounds = 0
    started = time.perf_counter()
    round_s = sum(first_s.values())
    while len(names) > 1 and rounds < _MAX_ROUNDS and time.perf_counter() - started + round_s <= limit_s:
        for name in names:
            times_s[name].append(steps[name]())
        rounds += 1
        round_s = sum(times_s[name][-1] for name in names)
        if rounds > 1:  # a single step may have been disturbed
            fastest = min(map(min, times_s.values()))
            names = [name for name in names if min(times_s[name]) <= _MAX_LAG_FACTOR * fastest]
    return {name: statistics.median(seconds) for name, seconds in times_s.items()} if rounds else first_s


def _timer(name: RouteName, inputs: TrialInputs) -> Timer:
    """Return a function that takes one forward and backward by the route ``name`` on a copy of ``inputs``."""
    settings = settings_for(inputs.args, inputs.kwargs)
    args, kwargs = map_leaves(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf,
        (inputs.args, inputs.kwargs),
    )
    model = RouteModel(name, copy.deepcopy(inputs.tree), inputs.models)
    step = TrainingStep(model=model, args=args, kwargs=kwargs, settings=settings, loss=make_loss)

    def run() -> float:
        step.model.zero_grad()
        synchronize(settings.device)
        start = time.perf_counter()
        step.backward(step.forward())
        synchronize(settings.device)
        return time.perf_counter() - start

    return run

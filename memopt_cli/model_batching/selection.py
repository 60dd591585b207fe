"""Which route runs the models: the fastest measured one of those that compute what the per-model loop computes."""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError, first_line
from memopt_cli.model_batching.extension import AbstractBatchModule
from memopt_cli.model_batching.kernels.interface import Convolutions
from memopt_cli.model_batching.routes.fused import FusedRoute
from memopt_cli.model_batching.routes.interface import Refused, Route, RouteName
from memopt_cli.model_batching.routes.loop import LoopRoute
from memopt_cli.model_batching.routes.vmap import VmapRoute
from memopt_cli.model_batching.stacked import first_models, slots_of
from memopt_cli.records import StepSettings
from memopt_cli.runtime.generators import Generators
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.runtime.private_torch import Convolution, TorchDispatchMode, schema_of
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.step import Step, seed_everything, seed_torch, seeds_of_backward, synchronize
from memopt_cli.verification.equality import difference, effects, generator_state, generators_kept, in_double, state_of

TOLERANCE = 1e-10
"""Relative difference from the loop, in float64, up to which a route is taken to compute the same."""
STORED_TOLERANCE = 1e-5
"""The same for a model that cannot run in float64, in its own precision."""
_MANY_WEIGHTS = 5_000_000
"""Of a second step, which sees the buffers and the state that the first left, no more than the forward is compared for
models of more weights than that; nothing where no forward reads what the first left."""
_FEW_MODELS = 2
_FEW_SAMPLES = 3
"""Models, and samples of each, that are compared; another number, so that one is not taken for the other."""
_COMPARING_S = 1.0
_COMPARING_SHARE = 0.1
_SHORT_S = 0.25
"""No further route is compared after that share of a step on all samples, if there is one that can be used; but for a
short time always, and never for longer than the first of these."""
_MOST_ROUNDS = 30
_TIMING_S = 1.0
"""Seconds that timing may take after the first steps; where a step of each would take longer, they take it on few
samples."""
_TIMING_SHARE = 0.25
"""Of a step on all samples, what timing on few may take after the first steps."""
_FAR_BEHIND = 1.5
"""A route whose best step takes so many times as long as that of the fastest is timed no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTrial:
    """What was found out about one route."""

    name: RouteName
    variant: str = ""
    """How it runs convolutions, where that was tried both ways."""
    refused: str = ""
    """Why it cannot be used; empty if it can."""
    difference: float = 0.0
    """Largest relative difference from the loop in float64, over outputs, gradients and buffers; NaN if it was not
    compared."""
    step_s: float = math.nan
    """Median seconds of its forward and backward, of few samples where the whole would take long; NaN if it was not
    timed."""
    used: bool = False
    """Whether it is the one that runs the models."""


Build = Callable[[nn.Module, int], Route]
Timer = Callable[[], float]
"""Takes one step, and says how many seconds it took."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route that may be tried."""

    name: RouteName
    variant: str
    build: Build


_Tried = list[tuple[Candidate, RouteTrial]]


def candidates(tree: nn.Module, wanted: str) -> list[Candidate]:
    """The routes to try; ``wanted`` is a route's name or ``auto``."""
    convolves = any(isinstance(m, Convolution) for m in tree.modules())
    found = [
        Candidate("fused", "grouped convolutions" if convolves else "", _fused("grouped")),
        *([Candidate("fused", "convolutions by size", _fused("by size"))] if convolves else []),
        Candidate("vmap", "", VmapRoute),
        Candidate("loop", "", LoopRoute),
    ]
    return [c for c in found if wanted in ("auto", c.name)]


def _fused(how: Convolutions) -> Build:
    return functools.partial(FusedRoute, convolutions=how)


def select(
    tree: nn.Module, models: int, wanted: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool = True
) -> tuple[Route, list[RouteTrial]]:
    """The route to use from now on, and what was found out about each candidate.

    Everything is tried on copies of a few models, on a few samples of each: the model, its gradients and the random
    generators stay as they are.  Dropout is off while routes are compared, for each draws its own numbers.  Without
    ``check`` nothing is tried: the first call finds the first route that runs.  Raises :class:`UsageError` with the
    reasons if the wanted route cannot be used.
    """
    if wanted == "loop":
        return LoopRoute(tree, models), [RouteTrial(name="loop", used=True)]
    if not check:
        first = _FirstThatRuns(tree, models, wanted)
        return first, first.trials
    with warnings.catch_warnings(), torch.enable_grad(), generators_kept():
        warnings.simplefilter("ignore")  # vmap says where it is slow; that is measured
        whole = _Given(tree, models, args, kwargs)
        reference = _Reference(whole)
        patience_s = reference.patience_s if wanted == "auto" else 0.0
        tried = _tried(candidates(tree, wanted), reference.trial_of, most_s=patience_s)
        tried = _timed(tried, [reference.given, whole]) if wanted == "auto" else tried
    usable = [(math.inf if math.isnan(t.step_s) else t.step_s, i) for i, (_, t) in enumerate(tried) if not t.refused]
    if not usable:
        raise _unusable(wanted, tree, [trial for _, trial in tried])
    _, fastest = min(usable)
    trials = [replace(trial, used=index == fastest) for index, (_, trial) in enumerate(tried)]
    return tried[fastest][0].build(tree, models), trials


def _tried(found: list[Candidate], compare: Callable[[Candidate], RouteTrial], most_s: float) -> _Tried:
    """Each candidate and what ``compare`` says, which is asked no more once one can be used and the time is over.

    The loop is what the others are compared with: it can always be used.
    """
    tried: _Tried = []
    started, is_found = time.perf_counter(), False
    for candidate in found:
        is_late = is_found and time.perf_counter() - started >= most_s and candidate.name != "loop"
        late = RouteTrial(name=candidate.name, variant=candidate.variant, refused=_NOT_TRIED, difference=math.nan)
        tried.append((candidate, late if is_late else compare(candidate)))
        is_found = is_found or not tried[-1][1].refused
    return tried


_NOT_TRIED = "it was not tried: another one can be used"


def _kept(tree: nn.Module) -> Callable[[], None]:
    """Puts back what a route that fails may have changed by then: buffers, which it writes, and random generators."""
    state, generators = ModuleState(tree), Generators()
    copies = [(buffer, buffer.detach().clone()) for buffer in tree.buffers()]

    def put_back() -> None:
        state.restore()
        generators.restore()
        with torch.no_grad():
            for buffer, copy_before in copies:
                buffer.copy_(copy_before)

    return put_back


def _unusable(wanted: str, tree: nn.Module, trials: Sequence[RouteTrial]) -> UsageError:
    reasons = "; ".join(dict.fromkeys(trial.refused for trial in trials))
    return UsageError(
        f"the {wanted} route cannot run {type(tree).__name__}: {reasons}",
        hint='Use route="auto", which takes the fastest route that can.',
    )


class _FirstThatRuns:
    """The first route whose call raises nothing, which the first call finds; what another changed is put back."""

    def __init__(self, tree: nn.Module, models: int, wanted: str) -> None:
        self._tree = tree
        self._models = models
        self._wanted = wanted
        self._route: Route | None = None
        self.trials: list[RouteTrial] = []
        """What the first call found."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As :class:`~memopt_cli.model_batching.routes.interface.Route` says."""
        return self._first(args, kwargs) if self._route is None else self._route(args, kwargs)

    def reset(self) -> None:
        """As :class:`~memopt_cli.model_batching.routes.interface.Route` says."""
        if self._route is not None:
            self._route.reset()

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = candidates(self._tree, self._wanted)
        self.trials[:] = [RouteTrial(name=c.name, variant=c.variant, difference=math.nan) for c in found]
        for number, candidate in enumerate(found):
            put_back = _kept(self._tree)
            try:
                route = candidate.build(self._tree, self._models)
                output = route(args, kwargs)
            except Exception as error:
                put_back()
                if candidate.name == "loop":  # which runs whatever the model itself does
                    raise
                self.trials[number] = replace(self.trials[number], refused=first_line(error))
                continue
            self._route = route
            self.trials[number] = replace(self.trials[number], used=True)
            self.trials[number + 1 :] = [replace(trial, refused=_NOT_TRIED) for trial in self.trials[number + 1 :]]
            return output
        raise _unusable(self._wanted, self._tree, self.trials)


@dataclass(frozen=True, slots=True)
class _Given:
    """What a route is tried on: stacked models, their number, and their inputs (models, samples, …)."""

    tree: nn.Module
    models: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _few(whole: _Given) -> _Given:
    """The first few models, all where a registered module knows their number, and the first few samples of each."""
    knows_number = any(isinstance(m, AbstractBatchModule) for m in whole.tree.modules())
    count = whole.models if knows_number else min(whole.models, _FEW_MODELS)
    args, kwargs = map_leaves(lambda leaf: _first(leaf, count), _few_samples(whole.args, whole.kwargs))
    return _Given(first_models(whole.tree, count), count, args, kwargs)


def _first(leaf: Any, count: int) -> Any:
    return leaf[:count] if isinstance(leaf, Tensor) else leaf


def _few_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs with the first few samples of each model.

    Tensors whose second dimension is another than that of the first one's, the samples, keep it whole.
    """
    samples = next((t.shape[1] for t in tensors_of((args, kwargs)) if t.dim() > 1), 0)

    def cut(leaf: Any) -> Any:
        is_sampled = isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == samples
        return leaf[:, :_FEW_SAMPLES] if is_sampled else leaf

    return map_leaves(cut, (args, kwargs))


class _Trial(nn.Module):
    """A route on a copy of the stacked model, as a model to take steps with."""

    def __init__(self, candidate: Candidate, tree: nn.Module, models: int) -> None:
        super().__init__()
        self.tree = tree
        self._route = candidate.build(tree, models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._route(args, kwargs)


class _Reference:
    """What the loop computes, in float64 if the model can be run in it."""

    def __init__(self, whole: _Given) -> None:
        self._draws = False
        self.given = _few(whole)
        """What it runs on: a few models and samples, or the whole where a few samples are no input."""
        self._run()
        if self._effects is None:
            self.given = whole
            self._run()
        step_s = self._took_s / 2 * _size(whole) / _size(self.given)
        self.patience_s = min(_COMPARING_S, max(_SHORT_S, _COMPARING_SHARE * step_s))
        """Seconds after which no further route is compared, if there is one that can be used."""

    def _run(self) -> None:
        loop = Candidate("loop", "", LoopRoute)
        self._effects: dict[str, Tensor] | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]]
        self._precision: str
        for precision in ("fp64", "stored"):
            self._precision, self._inputs = precision, (self.given.args, self.given.kwargs)
            if precision == "fp64":
                self._inputs = in_double(self._inputs)
            started = time.perf_counter()
            try:
                self._effects = self._effects_of(loop)
                return
            except Exception as error:
                self._failure = first_line(error)
            finally:
                self._took_s = time.perf_counter() - started

    def trial_of(self, candidate: Candidate) -> RouteTrial:
        """Whether a route can be built, runs, and computes the same."""
        refused, relative = "", 0.0
        if candidate.name != "loop":
            try:
                refused, relative = self._compared(candidate)
            except Refused as reason:
                refused = str(reason)
            except Exception as error:
                refused = first_line(error)
        return RouteTrial(name=candidate.name, variant=candidate.variant, refused=refused, difference=relative)

    def _compared(self, candidate: Candidate) -> tuple[str, float]:
        if self._effects is None:
            return f"it cannot be compared with the loop, whose step fails: {self._failure}", 0.0
        worst = difference(self._effects, self._effects_of(candidate))
        tolerance = TOLERANCE if self._precision == "fp64" else STORED_TOLERANCE
        if worst.relative <= tolerance:
            return "", worst.relative
        return f"{worst.name} differs from the loop's by {worst.relative:.1e} of its magnitude", worst.relative

    def _effects_of(self, candidate: Candidate) -> dict[str, Tensor]:
        if not self._draws:
            found = self._steps_of(candidate)
            self._draws = any(_has_drawn(t) for name, t in found.items() if _RANDOM in name)
        if self._draws:  # a mode costs time, and the import of a compiler
            with _WithoutDropout():  # type: ignore[no-untyped-call]
                found = self._steps_of(candidate)
        return {name: tensor for name, tensor in found.items() if _RANDOM not in name}

    def _different_models(self) -> nn.Module:
        """Made anew each time: to keep them and to copy that would take longer, and twice the memory."""
        if self._precision == "stored":
            tree = first_models(self.given.tree, self.given.models)
        else:
            tree = first_models(self.given.tree, self.given.models, dtype=torch.float64)
            tree.double()  # what modules convert that is neither parameter nor buffer
        _make_different(tree)
        return tree

    def _steps_of(self, candidate: Candidate) -> dict[str, Tensor]:
        trial = _Trial(candidate, self._different_models(), self.given.models)
        args, kwargs = self._inputs
        step = Step(model=trial, args=args, kwargs=kwargs, settings=_settings(args, kwargs), loss=_loss)
        first = effects(step)
        found = {f"{name} of step 1": tensor for name, tensor in first.items()}
        if _weights_in(self.given.tree) > _MANY_WEIGHTS:
            if not _is_read_again(trial, first):
                return found
            with generators_kept(), torch.no_grad():
                seed_everything(StepSettings().seed)
                outputs = tensors_of(step.forward())
            again = {f"output[{i}]": tensor for i, tensor in enumerate(outputs)} | state_of(trial)
        else:
            again = effects(step)
        return found | {f"{name} of step 2": tensor for name, tensor in again.items()}


def _is_read_again(model: nn.Module, left: Iterable[str]) -> bool:
    """Whether a step may read what the one before it ``left``: all but the averages of batch norms in training."""
    averages = {
        f"buffer {path}.{name}"
        for path, module in model.named_modules()
        if type(module) in _BATCH_NORMS and module.training and getattr(module, "momentum", None) is not None
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    return any(name.startswith(("buffer ", "state ")) and name not in averages for name in left)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RANDOM = "random generator"


def _has_drawn(generators: Tensor) -> bool:
    """Whether a step left the random generators elsewhere than it was given them."""
    with generators_kept():
        seed_everything(StepSettings().seed)
        (untouched,) = generator_state().values()
        return not torch.equal(generators, untouched)


def _loss(output: Any) -> Tensor:
    """A scalar whose gradient is that of a step without a loss.

    Backward from gradients that are given makes PyTorch import what it computes symbolic shapes with: a second.
    """
    roots, cotangents = seeds_of_backward(output, None, StepSettings().seed)
    weighed = [root if given is None else root * given for root, given in zip(roots, cotangents, strict=True)]
    return torch.stack([(t.real if t.is_complex() else t).sum().double() for t in weighed]).sum()


@torch.no_grad()
def _make_different(tree: nn.Module) -> None:
    """Give the models weights and statistics that differ: between equal models, one taken for another goes unseen."""
    seed_torch(0)
    for tensor in {id(slot.tensor): slot.tensor for slot in slots_of(tree)}.values():
        if tensor.is_floating_point():
            # Not one number for an output channel, which a norm would take away again.
            shape = (tensor.shape[0], 1, *tensor.shape[2:]) if tensor.dim() > 2 else tensor.shape
            noise = torch.rand(shape, dtype=tensor.dtype, device=tensor.device)
            tensor.mul_(1 + 0.1 * noise)
            tensor.add_(0.01 * noise.flip(-1) if isinstance(tensor, nn.Parameter) and tensor.dim() else 0.0)


def _weights_in(tree: nn.Module) -> int:
    return sum(parameter.numel() for parameter in tree.parameters())


class _WithoutDropout(TorchDispatchMode):
    """Whatever drops values at random keeps them all, in a recomputation too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match schema_of(func).name:
            case "aten::bernoulli_" | "aten::bernoulli" as name:
                default = 0.5 if name.endswith("_") else args[0]  # one that is 0.5 is not passed on
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


# ---------------------------------------------------------------------------------------------- timing


def _timed(tried: _Tried, sizes: Sequence[_Given]) -> _Tried:
    """The trials with the times of their steps; one that fails in its own precision is refused.

    ``sizes``: what steps may be taken on, the least first; the last is taken if steps on it are short.  Where they
    take long, timing takes no more than a share of one, or a single step of each on the least.
    """
    for given in sizes:
        if sum(not trial.refused for _, trial in tried) < 2:
            return tried  # nothing to choose from
        steps, first_s = _first_steps(tried, given)
        whole_s = [_size(sizes[-1]) / _size(given) * seconds for seconds in first_s.values()]
        if sum(whole_s) > _TIMING_S:
            most_s = min(_TIMING_S, _TIMING_SHARE * min(whole_s))
            return _with_seconds(tried, _median_seconds(steps, first_s, most_s))
    return _with_seconds(tried, _median_seconds(steps, first_s, _TIMING_S))


def _first_steps(tried: _Tried, given: _Given) -> tuple[dict[int, Timer], dict[int, float]]:
    """Of each candidate that runs, by its index: what takes a step, and the seconds of a first one."""
    steps: dict[int, Timer] = {}
    first_s: dict[int, float] = {}
    for index, (candidate, trial) in enumerate(tried):
        if trial.refused:
            continue
        try:
            step = _timer(candidate, given)
            first_s[index], steps[index] = step(), step
        except Exception as error:
            if candidate.name != "loop":
                tried[index] = candidate, replace(trial, refused=first_line(error))
    return steps, first_s


def _with_seconds(tried: _Tried, seconds: dict[int, float]) -> _Tried:
    return [(candidate, replace(trial, step_s=seconds.get(i, math.nan))) for i, (candidate, trial) in enumerate(tried)]


def _size(given: _Given) -> int:
    return max(1, sum(tensor.numel() for tensor in tensors_of((given.args, given.kwargs))))


def _median_seconds(steps: dict[int, Timer], first_s: dict[int, float], most_s: float) -> dict[int, float]:
    """Of steps taken in turns, so that the load of the machine is the same for all that are still in the race.

    ``first_s``: what the first step of each took, which warms it up; where another would take longer than ``most_s``,
    that is the answer.
    """
    taken: dict[int, list[float]] = {index: [] for index in steps}
    racing, started, done = list(steps), time.perf_counter(), 0
    round_s = sum(first_s.values())
    while len(racing) > 1 and done < _MOST_ROUNDS and time.perf_counter() - started + round_s <= most_s:
        for index in racing:
            taken[index].append(steps[index]())
        done, round_s = done + 1, sum(taken[index][-1] for index in racing)
        if done > 1:  # a single step may have been disturbed
            fastest = min(map(min, taken.values()))
            racing = [index for index in racing if min(taken[index]) <= _FAR_BEHIND * fastest]
    return {index: statistics.median(seconds) for index, seconds in taken.items()} if done else first_s


def _timer(candidate: Candidate, given: _Given) -> Timer:
    """Takes one forward and backward on a copy of the model."""
    settings = _settings(given.args, given.kwargs)
    args, kwargs = map_leaves(_own_leaf, (given.args, given.kwargs))
    trial = _Trial(candidate, copy.deepcopy(given.tree), given.models)
    step = Step(model=trial, args=args, kwargs=kwargs, settings=settings, loss=_loss)

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


def _settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepSettings:
    device = next((str(t.device) for t in tensors_of((args, kwargs))), "cpu")
    return StepSettings(device=device)

"""Further steps of the verification of a plan: with other parameters, sizes, masks and modes, and frozen parameters.

A plan that passes on the recorded step may still fail in training, for example when a mask changes.  So two copies of
the model, one with the plan and one without, take the same few steps, and each step is compared.  A step at which the
plain model fails is skipped.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, StepError, first_line
from memopt_cli.records import FurtherCheck
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.text.units import format_seconds
from memopt_cli.training.step import TrainingStep, is_out_of_memory, synchronize
from memopt_cli.verification.effects import (
    CannotCopyError,
    EffectDifference,
    copy_model,
    difference,
    effects,
    gradients_by_parameter,
)
from memopt_cli.verification.variations import CHECKS, Arguments, CannotVaryError, Resize, Variation, variations

_MAX_STEPS = 4
"""All checks may take as long as this many plain steps at the compared size."""
_MAX_FULL_STEPS = 3
"""All checks may take as long as this many plain steps at the requested size, if that is longer."""
_MIN_LIMIT_S = 2.0
"""Seconds that all checks may take however fast a step is."""
_PAIR_RATIO = 3.0
"""Assumed time of the first pair of steps, one with the plan and one without, divided by the time of a plain step."""
_CHANGE_SHARE = 1e-3
"""Between two checks, a parameter changes by at most this share of the largest parameter."""
_NOISE_RATIO = 10.0
"""A difference of at most this many times the original's own difference from run to run does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The recorded step, and how it was compared."""

    step: TrainingStep
    batch: int
    """Number of samples in the step."""
    gradients: dict[str, Tensor]
    """Name of a parameter -> its gradient."""
    plain_s: float
    """Seconds of the step without the plan."""
    original_step_s: float
    """Seconds of a step without the plan at the requested size; 0 if this step has that size."""
    tolerance: float
    """Maximum relative difference that passes; 0 if the effects must be bit-identical."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str
    """Name of the check, as the end of a sentence: ``in eval mode``."""
    worst: EffectDifference
    detail: str = ""
    """Message of the error that the step with the plan raised; empty if it ran."""

    def differs(self, tolerance: float) -> bool:
        """Return whether the steps differ by more than ``tolerance``."""
        return self.worst.relative > tolerance if tolerance else bool(self.worst.name)


def follow(
    recorded: RecordedStep, install: Callable[[nn.Module], object], resize: Resize
) -> tuple[tuple[FurtherCheck, ...], CheckResult | None]:
    """Take further steps with and without the plan, up to the first that differs; ``install`` puts the plan on a copy.

    Returns all checks, and the check that differs, or ``None``.  If there is not enough time for all, the steps have
    fewer samples (``resize`` makes the inputs), or the last steps are skipped.
    """
    start = StartingState(recorded.step.model)
    try:
        pair = _Pair(recorded, install)
        share = _limit_s(recorded) / (CHECKS * _PAIR_RATIO * recorded.plain_s)
        affordable_batch = max(1, min(recorded.batch, int(recorded.batch * share)))  # all checks should end in time
        return _compare_all(recorded, pair, variations(recorded.batch, affordable_batch, resize))
    except CannotCopyError as error:
        skipped = FurtherCheck(name="in later steps", batch=recorded.batch, not_tried=error.message, skipped=True)
        return (skipped,), None
    finally:  # a copy may have changed the original, if for example a function in it refers to that
        recorded.step.model.zero_grad(set_to_none=True)
        start.restore()


def _compare_all(
    recorded: RecordedStep, pair: _Pair, all_variations: Iterable[Variation]
) -> tuple[tuple[FurtherCheck, ...], CheckResult | None]:
    checks: list[FurtherCheck] = []
    deadline = _Deadline(recorded)
    for variation in all_variations:
        try:
            with deadline.watching(variation):
                result = pair.compare(variation)
        except Exception as error:  # the model's own code may raise anything
            reason = error.message if isinstance(error, MemoptError) else first_line(error)
            skipped = isinstance(error, _NoTimeError) or is_out_of_memory(error)
            checks.append(FurtherCheck(name=variation.name, batch=variation.batch, not_tried=reason, skipped=skipped))
            continue
        checks.append(FurtherCheck(name=variation.name, batch=variation.batch, compared=result.worst.compared))
        if result.differs(recorded.tolerance):
            return tuple(checks), result
    return tuple(checks), None


def first_samples(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Arguments:
    """Return the inputs cut to the first ``size`` samples: each tensor that is as long as the first one.

    Raises :class:`StepError` if there are fewer samples.
    """
    length = next((len(t) for t in tensors_of((args, kwargs)) if t.dim()), 0)
    if not 0 < size <= length:
        raise StepError(f"the inputs hold {length} samples, not {size}")

    def cut(leaf: Any) -> Any:
        return leaf[:size] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == length else leaf

    cut_args, cut_kwargs = map_leaves(cut, (args, kwargs))
    return cut_args, cut_kwargs


class _NoTimeError(StepError):
    """Raised for a check for which there is not enough time."""


class _Deadline:
    """Keeps the checks within their time, by what the recorded step and the checks so far took."""

    def __init__(self, recorded: RecordedStep) -> None:
        self._recorded = recorded
        self._ends = time.monotonic() + _limit_s(recorded)
        self._pair_s: dict[int, float] = {}
        """Batch -> seconds of the last pair of steps at this batch."""

    @contextlib.contextmanager
    def watching(self, variation: Variation) -> Iterator[None]:
        """Time the check in the ``with`` block, or raise :class:`_NoTimeError` if it would end too late."""
        began = time.monotonic()
        expected_s = self._expected_s(variation.batch)
        if began + expected_s > self._ends:
            raise _NoTimeError(f"a step with the plan and one without take {format_seconds(expected_s)} together")
        yield
        self._pair_s[variation.batch] = time.monotonic() - began

    def _expected_s(self, batch: int) -> float:
        """Predict the seconds of a pair of steps at ``batch``, from the last pair or in proportion to another batch."""
        if batch in self._pair_s:
            return self._pair_s[batch]
        timed_batch = self._recorded.batch
        pair_s = _PAIR_RATIO * self._recorded.plain_s
        if self._pair_s:
            timed_batch, pair_s = max(self._pair_s.items())
        return pair_s * batch / timed_batch


def _limit_s(recorded: RecordedStep) -> float:
    return max(_MIN_LIMIT_S, _MAX_STEPS * recorded.plain_s, _MAX_FULL_STEPS * recorded.original_step_s)


class _SteppingCopy:
    """A copy of the model that takes one step after another.

    Each step begins with the state in which the last step ended, detached from its graph.  This state is restored
    first: the two copies share what lies outside them, such as a global dictionary of membranes, and the other copy
    has changed it meanwhile.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.model = copy_model(step.model)
        self._step = replace(step, model=self.model, optimizer=None)
        self._start = self._reached = StartingState(self.model)
        self.at_start = True
        """Whether the next step begins with the model's original state."""
        self.took_from_start = True
        """Whether the last step began with the model's original state."""

    def take(self, variation: Variation) -> dict[str, Tensor]:
        """Return the effects of a step that continues from the last one.

        If it fails, the step begins with the original state: it cannot continue if membranes have another batch size,
        for example.  An error that the model raises from the original state is passed on.
        """
        try:
            return self._take_pair(variation)
        except CannotVaryError:
            raise
        except Exception as error:
            if self.at_start or is_out_of_memory(error):
                self.at_start = True
                raise
            self.at_start = True
        return self.take(variation)  # once more, now from the original state

    def _take_pair(self, variation: Variation) -> dict[str, Tensor]:
        (self._start if self.at_start else self._reached).restore()
        with variation.vary(self._step) as step:
            collected = effects(step)
        synchronize(step.settings.device)
        self._reached = StartingState(self.model)
        self.took_from_start, self.at_start = self.at_start, False
        return collected

    def noise(self, variation: Variation) -> EffectDifference:
        self.at_start = True
        first = self.take(variation)
        self.at_start = True
        second = self.take(variation)
        self.at_start = True
        return difference(first, second)

    def update(self, gradients: dict[str, Tensor]) -> None:
        """Update the parameters with ``gradients``, the same for both copies so that rounding does not add up."""
        parameters = {name: p for name, p in self.model.named_parameters() if name in gradients}
        rate = _small_rate(list(parameters.values()), [gradients[name] for name in parameters])
        if not rate:
            return
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        torch.optim.SGD(parameters.values(), lr=rate).step()
        self.model.zero_grad(set_to_none=True)


class _Pair:
    """Two copies of the model, one of them with the plan."""

    def __init__(self, recorded: RecordedStep, install: Callable[[nn.Module], object]) -> None:
        self._plain, self._planned = _SteppingCopy(recorded.step), _SteppingCopy(recorded.step)
        self._tolerance = recorded.tolerance
        self._gradients = recorded.gradients
        install(self._planned.model)

    def compare(self, variation: Variation) -> CheckResult:
        """Update both copies, take a step of each, and compare the steps; an error of the plain model is passed on."""
        gradients, self._gradients = self._gradients, {}
        for stepping in (self._plain, self._planned):
            stepping.update(gradients)
        reference = self._plain.take(variation)
        self._planned.at_start = self._plain.took_from_start
        result = self._compare_with(reference, variation)
        if result.differs(self._tolerance):
            noise = self._plain.noise(variation)
            if noise.name and result.worst.relative <= _NOISE_RATIO * noise.relative:
                raise CannotVaryError("the original's own step is not repeatable")
        self._gradients = gradients_by_parameter(reference)
        return result

    def _compare_with(self, reference: dict[str, Tensor], variation: Variation) -> CheckResult:
        try:
            return CheckResult(variation.name, difference(reference, self._planned.take(variation)))
        except Exception as error:
            if is_out_of_memory(error):
                self._plain.at_start = True  # so that both copies begin the next step in the same state
                raise
            return CheckResult(
                variation.name, EffectDifference("the step", math.inf, len(reference)), first_line(error)
            )


def _small_rate(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    """Return a learning rate that moves ``parameters`` a little; 0 if ``gradients`` are zero or not finite."""
    steepest = _largest(gradients)
    rate = _CHANGE_SHARE * _largest(parameters) / steepest if steepest else 0.0
    return rate if math.isfinite(rate) else 0.0


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((t.detach().abs().max().item() for t in tensors if t.numel()), default=0.0)

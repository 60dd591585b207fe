"""Choosing among batch shapes by measuring a step of each here; the limits may be those of another machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

import torch
from torch import nn

from memopt_cli.batching.architecture import RULES, Architecture, candidate_shapes, recognize_architectures
from memopt_cli.batching.memory import MemoryMeter, choose_meter
from memopt_cli.batching.requirements import infer_requirements, require_batch_shape, sample_input, sequence_axis
from memopt_cli.batching.trial import Trial, try_step
from memopt_cli.errors import MemoryBudgetError, UsageError
from memopt_cli.records import OutOfMemory, from_data
from memopt_cli.text.units import format_bytes

_TIMED_STEPS = 3
"""Number of timed steps for each shape, after a first step that warms up."""
_TIE_SHARE = 0.01
"""Two scores that differ by at most this share are a tie, since timings are not more exact."""

Measure = Callable[[tuple[int, ...]], Trial | OutOfMemory]
"""Function of a batch shape that returns the peak and the time of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpecs:
    """Memory in bytes of the machine that the batch is for; ``None`` if it is this machine's."""

    gpu_memory: float | None = None
    cpu_memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Conditions that a feasible shape meets; ``None`` if there are none."""

    max_memory: float = 0.9
    """Share of the specified memory, in (0, 1]."""
    min_throughput: float | None = None
    """Minimum number of samples per second."""
    min_accuracy: float | None = None
    """Minimum value of the user's accuracy function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Weights of the objectives; each objective is relative to the best feasible shape."""

    throughput: float = 1.0
    memory: float = 0.0
    """Weight of using little memory."""
    accuracy: float = 0.0


class Candidate(TypedDict):
    """One measured shape."""

    shape: tuple[int, ...]
    batch_size: int
    seq_length: int | None
    """Size of axis 1 in 3 dimensions, of axis 2 in 4; ``None`` for a shape without an axis of sequences."""
    throughput: float
    """Samples per second; 0 if the step ran out of memory."""
    memory_bytes: int | None
    """Peak of one step in bytes, or ``None`` if the step ran out of memory."""
    accuracy: float | None
    """Value of the user's accuracy function, or ``None`` without one."""
    feasible: bool
    violated: list[str]
    """Conditions that the shape fails, with the values."""


class ShapeRecommendation(Candidate):
    """The chosen candidate, and all candidates that were measured."""

    candidates: list[Candidate]
    measured_on: str
    architecture: list[Architecture]
    advice: list[str]


class BatchShapeOptimizer:
    """Chooses among shapes of a model's input by measuring a step of each.

    ``hardware_specs`` (``gpu_memory``, ``cpu_memory`` in bytes) describes the machine that the batch is for.  Memory is
    limited as on that machine; throughput is measured on this machine.  ``accuracy_fn(batch_size)`` is the only source
    of accuracy.  ``measure`` replaces running steps here.
    """

    def __init__(
        self,
        model: nn.Module,
        hardware_specs: Mapping[str, float] | None = None,
        *,
        device: str | torch.device = "cpu",
        accuracy_fn: Callable[[int], float] | None = None,
        memory: MemoryMeter | None = None,
        measure: Measure | None = None,
    ) -> None:
        self._model = model
        self._specs = from_data(HardwareSpecs, dict(hardware_specs or {}), where="hardware_specs")
        self._device = str(device)
        self._accuracy_fn = accuracy_fn
        self._memory = memory or choose_meter(device)
        self._measure = measure or self._run

    def optimize_batch_shape(
        self,
        input_shapes: Sequence[Sequence[int]],
        constraints: Mapping[str, float] | None = None,
        *,
        objectives: Mapping[str, float] | None = None,
    ) -> ShapeRecommendation:
        """Return the feasible shape among ``input_shapes`` with the highest throughput, or in a tie, the lowest peak.

        Throughputs that differ by 1 % or less are a tie.
        ``constraints``: ``max_memory`` (share of the specified memory), ``min_throughput`` (samples/s),
        ``min_accuracy``.  ``objectives``: weights of ``throughput``, ``memory`` and ``accuracy``; by default only
        throughput counts.  If no shape is feasible, the shape with the smallest peak is returned, ``feasible`` is
        false, and ``violated`` says why.  Raises :class:`MemoryBudgetError` if no shape could be run.
        """
        limits = from_data(Constraints, dict(constraints or {}), where="constraints")
        weights = from_data(Objectives, dict(objectives or {}), where="objectives")
        if self._accuracy_fn is None and (limits.min_accuracy is not None or weights.accuracy):
            raise UsageError("min_accuracy and the weight of accuracy need accuracy_fn", hint="Pass accuracy_fn=.")
        shapes = list(dict.fromkeys(require_batch_shape(shape) for shape in input_shapes))
        if not shapes:
            raise UsageError("no batch shapes to choose from", hint="Pass at least one shape, the batch first.")
        candidates = [self._candidate(shape, limits) for shape in shapes]
        feasible = [c for c in candidates if c["feasible"]]
        chosen = _best(feasible, weights) if feasible else _smallest(candidates)
        kinds = recognize_architectures(self._model)
        return ShapeRecommendation(
            **chosen,
            candidates=candidates,
            measured_on=self._measured_on(),
            architecture=list(kinds),
            advice=[RULES[kind].advice for kind in kinds],
        )

    def recommend(
        self,
        input_shape: Sequence[int],
        constraints: Mapping[str, float] | None = None,
        *,
        objectives: Mapping[str, float] | None = None,
    ) -> ShapeRecommendation:
        """Return the best of the shapes near ``input_shape`` that suit the model's architecture."""
        shapes = candidate_shapes(self._model, require_batch_shape(input_shape))
        return self.optimize_batch_shape(shapes, constraints, objectives=objectives)

    def _candidate(self, shape: tuple[int, ...], limits: Constraints) -> Candidate:
        outcome = self._measure(shape)
        axis = sequence_axis(shape)
        trial = outcome if isinstance(outcome, Trial) else None
        throughput = shape[0] / trial.step_s if trial else 0.0
        accuracy = self._accuracy_fn(shape[0]) if self._accuracy_fn and trial else None
        peak = trial.peak_bytes if trial else None
        violated = self._violated_limits(peak, throughput, accuracy, limits)
        return Candidate(
            shape=shape,
            batch_size=shape[0],
            seq_length=None if axis is None else shape[axis],
            throughput=throughput,
            memory_bytes=peak,
            accuracy=accuracy,
            feasible=not violated,
            violated=violated,
        )

    def _violated_limits(
        self, peak: int | None, throughput: float, accuracy: float | None, limits: Constraints
    ) -> list[str]:
        if peak is None:
            return ["max_memory: out of memory on this machine"]
        violated = []
        budget = limits.max_memory * self._specified_bytes()
        if peak > budget:
            violated.append(f"max_memory: {format_bytes(peak)} of {format_bytes(budget)}")
        if limits.min_throughput is not None and throughput < limits.min_throughput:
            violated.append(f"min_throughput: {throughput:.3g} of {limits.min_throughput:.3g} samples/s")
        if limits.min_accuracy is not None and (accuracy is None or accuracy < limits.min_accuracy):
            violated.append(f"min_accuracy: {accuracy} of {limits.min_accuracy}")
        return violated

    def _specified_bytes(self) -> float:
        specified = self._specs.gpu_memory if self._device.startswith("cuda") else self._specs.cpu_memory
        return self._memory.capacity_bytes() if specified is None else specified

    def _measured_on(self) -> str:
        capacity_bytes = self._memory.capacity_bytes()
        text = f"this machine's {self._device} ({format_bytes(capacity_bytes)})"
        if math.isclose(self._specified_bytes(), capacity_bytes, rel_tol=0.05):
            return text
        return f"{text}, not the specified machine ({format_bytes(self._specified_bytes())}): throughput may differ"

    def _run(self, shape: tuple[int, ...]) -> Trial | OutOfMemory:
        requirements = infer_requirements(self._model)
        trials = []
        for _ in range(1 + _TIMED_STEPS):
            outcome = try_step(
                self._model,
                lambda: sample_input(shape, requirements, self._device),
                self._memory,
                self._device,
                backward=self._model.training,
            )
            if isinstance(outcome, OutOfMemory):
                return outcome
            trials.append(outcome)
        return Trial(peak_bytes=max(t.peak_bytes for t in trials), step_s=median(trial.step_s for trial in trials[1:]))


def _best(feasible: Sequence[Candidate], weights: Objectives) -> Candidate:
    scores = [_score(candidate, feasible, weights) for candidate in feasible]
    highest = max(scores)
    tied = [c for c, score in zip(feasible, scores, strict=True) if score >= highest - _TIE_SHARE * abs(highest)]
    return min(tied, key=lambda c: c["memory_bytes"] or 0)


def _score(candidate: Candidate, feasible: Sequence[Candidate], weights: Objectives) -> float:
    """Return the weighted sum of the objectives of ``candidate``, each relative to the best of ``feasible``."""
    smallest_bytes = min(c["memory_bytes"] or 0 for c in feasible)
    highest_throughput = max(c["throughput"] for c in feasible)
    highest_accuracy = max((c["accuracy"] or 0.0) for c in feasible)
    score = weights.throughput * candidate["throughput"] / highest_throughput
    score += weights.memory * smallest_bytes / max(1, candidate["memory_bytes"] or 0)
    if highest_accuracy > 0:
        score += weights.accuracy * (candidate["accuracy"] or 0.0) / highest_accuracy
    return score


def _smallest(candidates: Sequence[Candidate]) -> Candidate:
    measured = [c for c in candidates if c["memory_bytes"] is not None]
    if not measured:
        raise MemoryBudgetError(
            f"none of {len(candidates)} batch shapes could be run: out of memory",
            hint="Pass smaller shapes, or lower the memory of a step with memopt optimize.",
        )
    return min(measured, key=lambda c: c["memory_bytes"] or 0)

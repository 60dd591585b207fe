"""Learning a sequence online in the training steps of memopt, and comparing its gradient with backpropagation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.online.algorithm import D_RTRL, ES_D_RTRL, OnlineAlgorithm
from memopt_cli.online.over_time import step_model
from memopt_cli.online.states import Batching, State, states_of
from memopt_cli.records import TOLERANCE, GradientAgreement, OnlineRule
from memopt_cli.runtime.private_torch import tree_map
from memopt_cli.training.step import TrainingStep, seeds_of_backward
from memopt_cli.verification.effects import step_in_double

DECAY = 0.9
"""Decay of the filters of ES-D-RTRL."""

StepInputs = Callable[[int], tuple[Tensor, ...]]
"""Function of the number of a time step that returns its inputs, ``[B, ...]``."""


@dataclass(slots=True)
class OnlineSequence:
    """A sequence that an online algorithm learns step by step."""

    algorithm: OnlineAlgorithm
    step: TrainingStep
    """Training step of the whole sequence, whose settings and loss each time step uses."""
    inputs: StepInputs

    def run(self, steps: range) -> None:
        """Run forward and backward of each time step in ``steps``, which continue the steps before them."""
        for number in steps:
            self._take_step(number)

    def _take_step(self, number: int) -> None:
        # A function of its own, so that its graph, which holds the traces before this step, is freed before the next.
        time_step = replace(self.step, model=self.algorithm, args=self.inputs(number), kwargs={})
        roots, cotangents = _backward_seeds(time_step.forward(), self.step, number)
        torch.autograd.backward(roots, cotangents)

    @property
    def states(self) -> list[State]:
        """States of the model and of the traces, which every step replaces."""
        return list(states_of(self.algorithm).values())

    def restart(self) -> None:
        """Begin a new sequence."""
        self.algorithm.reset_state(self.inputs(0)[0].shape[0])


def learn_online(step: TrainingStep, rule: OnlineRule, inputs: StepInputs) -> OnlineSequence:
    """Return a sequence that the model of ``step`` learns by ``rule``; the model is changed.

    Raises :class:`MemoptError` if the model cannot be run online.
    """
    model = step_model(step.model, inputs(0))
    algorithm = D_RTRL(model, mode=Batching()) if rule == "D-RTRL" else ES_D_RTRL(model, DECAY, mode=Batching())
    algorithm.compile_graph(*inputs(0))
    return OnlineSequence(algorithm, step, inputs)


def compare_gradients(step: TrainingStep, rule: OnlineRule) -> GradientAgreement:
    """Compare the online gradient of the sequence ``step.args``, ``[T, B, ...]``, with backpropagation, in float64.

    Backpropagation through time takes the loss of the whole sequence, as in training; online learning takes the loss of
    each time step.
    """
    steps = len(step.args[0])
    with step_in_double(step) as double:
        reference = _gradient_through_time(double, steps)
        learn_online(double, rule, lambda number: tuple(x[number] for x in double.args)).run(range(steps))
        online = _take_gradients(double.model)
    difference, norm = (online - reference).norm(), reference.norm()
    relative = float(difference / norm) if norm else float(difference)
    cosine = float(torch.nn.functional.cosine_similarity(online, reference, dim=0, eps=1e-30))
    return GradientAgreement(
        rule=rule, steps=steps, cosine=cosine, relative_error=relative, exact=relative <= TOLERANCE
    )


def _gradient_through_time(step: TrainingStep, steps: int) -> Tensor:
    output = step.forward()
    if step.loss is not None:
        step.backward(output)
        return _take_gradients(step.model)
    seeds = [_backward_seeds(tree_map(lambda x, n=number: x[n], output), step, number) for number in range(steps)]
    torch.autograd.backward(
        [r for roots, _ in seeds for r in roots], [c for _, cotangents in seeds for c in cotangents]
    )
    return _take_gradients(step.model)


def _backward_seeds(output: Any, step: TrainingStep, number: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the tensors at which backward of one time step starts, and their gradients.

    The user's loss is written for sequences, so it is called with a sequence of one step.
    """
    sequence = tree_map(lambda x: x.unsqueeze(0), output) if step.loss is not None else output
    return seeds_of_backward(sequence, step.loss, step.settings.seed + number, step.report)


def _take_gradients(model: nn.Module) -> Tensor:
    """Return all gradients of ``model`` in one vector, in float64, and clear them."""
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)

"""The first steps of a model with a compiling plan, in which PyTorch compiles the model."""

from __future__ import annotations

import torch

from memopt_cli.errors import MemoptError, StepError, first_line
from memopt_cli.measure import sandbox
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.steps import take_from_start
from memopt_cli.records import Breakdown, Plan
from memopt_cli.runtime.private_torch import graph_breaks
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.log import optimizer_tensors
from memopt_cli.trace.storages import unique_bytes
from memopt_cli.training.apply import apply_plan
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep, is_out_of_memory

_COMPILING_STEPS = 2
"""Number of steps until nothing is compiled any more: the first starts without gradients.  Later steps start with
gradients, for which PyTorch may compile the model again."""


def compile_step(bench: Bench, plan: Plan, step: TrainingStep) -> str:
    """Apply ``plan``, which compiles the model, and take ``step`` until nothing is compiled any more.

    Return the reason why the model is not one graph.  Earlier compilations are dropped first: PyTorch compiles a
    function for a few models only, then runs it plainly.  Raises :class:`StepError` if the model does not compile.
    """
    assert plan.compile is not None, "the caller has a plan that compiles"
    if isinstance(step, OwnStep):
        raise StepError("your own step calls its models itself", hint="Compile them in its function.")
    torch.compiler.reset()
    apply_plan(bench.model, plan, bench.optimizer)
    with graph_breaks() as breaks:
        try:
            for _ in range(_COMPILING_STEPS):
                take_from_start(bench, step, lambda step: step.take())
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, MemoptError):
                raise
            advice = f"Take a step of torch.compile(model, backend={plan.compile.backend!r}) in plain Python"
            is_refused = sandbox.is_confined() and sandbox.is_refusal(error)  # the worker adds its own hint
            raise StepError(
                first_line(error), hint="" if is_refused else f"{advice}: it should fail in the same way."
            ) from error
    step.model.zero_grad(set_to_none=True)
    return breaks[0] if breaks else ""


def breakdown_of(step: TrainingStep, peak_bytes: int) -> Breakdown:
    """Divide ``peak_bytes`` of a compiled ``step``: tensors that live through the step by kind, and activations."""
    parameters = list(step.model.parameters())
    known = {
        "parameters_bytes": unique_bytes(parameters),
        "buffers_bytes": unique_bytes(step.model.buffers()),
        "gradients_bytes": unique_bytes(p.grad for p in parameters),
        "optimizer_bytes": unique_bytes(optimizer_tensors(step)),
        "inputs_bytes": unique_bytes(tensors_of((step.args, step.kwargs))),
    }
    rest = max(0, peak_bytes - sum(known.values()))
    return Breakdown(**known, activations_bytes=rest, temporaries_bytes=0)

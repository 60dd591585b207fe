"""``memopt_cli.verify``: compare how two models in memory train, or two steps that the user wrote."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memopt_cli.api.arguments import (
    Given,
    Inputs,
    Loss,
    Optimizer,
    StepArguments,
    check_inputs_argument,
    check_model,
    check_step,
)
from memopt_cli.api.shown import CommandReport
from memopt_cli.errors import OptionError, type_in_words
from memopt_cli.measure import processes
from memopt_cli.pipeline.equivalence import compare_prepared
from memopt_cli.pipeline.live.model import prepared_one_of_several, refuse_recursion
from memopt_cli.pipeline.live.step import prepared_step
from memopt_cli.pipeline.prepare import PreparedModel
from memopt_cli.records import Equivalence, InputSpec, Precision
from memopt_cli.records.progress import log_progress
from memopt_cli.runtime.private_torch import hooks_on_gradient, is_compiled
from memopt_cli.text.options import check_option
from memopt_cli.text.spelling import with_python_spelling
from memopt_cli.training.user_step import Step

Trained = nn.Module | Callable[[], Step]
"""A model, or a function that makes a step."""


@dataclass(frozen=True, slots=True, repr=False)
class VerificationReport(CommandReport):
    """Comparison of two trainings, shown as ``memopt verify`` shows it."""

    result: Equivalence

    @property
    def passed(self) -> bool:
        """Whether the candidate computes the same as the reference, within the tolerance."""
        return self.result.passed


@with_python_spelling
def verify(
    reference: Trained,
    candidate: Trained,
    inputs: Inputs,
    *,
    dims: Mapping[str, int] | None = None,
    steps: int = 3,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    clip_norm: float | None = None,
    precision: Precision = "stored",
    device: str | torch.device | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: bool = False,
) -> VerificationReport:
    """Compare how ``candidate`` and ``reference`` train, as ``memopt verify`` does; both stay as they are.

    Parameters
    ----------
    reference, candidate:
        The same model twice, with the same parameters, or two functions that each make a ``memopt_cli.Step``.
        The candidate trains differently: with checkpoints, compiled, or under a plan.
    inputs, dims:
        The inputs of a step, as for ``memopt_cli.optimize``.
    steps:
        Number of consecutive steps, all on the same inputs, each with an update of the optimizer (default: SGD).
    timeout:
        Seconds that a profiling subprocess may take for all steps.

    Other arguments are those of ``memopt_cli.optimize``.  Raises ``StepError`` if the two do not have the same
    parameters or the reference cannot be trained, and other errors of ``memopt_cli.errors``.
    """
    started = time.monotonic()
    step = check_step(loss, optimizer, 1, clip_norm, precision, device, seed)
    count, limit_s = check_option("steps", steps), check_option("timeout", timeout)
    given = check_inputs_argument(inputs, dims)
    with (
        log_progress(verbose) as progress,
        processes.keep_server(),
        refuse_recursion(),
        _prepare("reference", reference, given, step) as one,
        _prepare("candidate", candidate, given, step) as other,
    ):
        one, other = (replace(side, timeout_s=limit_s, progress=progress) for side in (one, other))
        equivalence = compare_prepared(one, other, count)
    named = replace(
        equivalence, reference="the reference", candidate="the candidate", spent_s=time.monotonic() - started
    )
    return VerificationReport(named)


@contextlib.contextmanager
def _prepare(name: str, trained: Trained, given: Given, step: StepArguments) -> Iterator[PreparedModel]:
    if isinstance(trained, nn.Module):
        model = check_model(trained)
        _refuse_hooks_on_gradients(name, model)
        obstacle = "a file holds no compiled model" if any(map(is_compiled, model.modules())) else ""
        with prepared_one_of_several(model, given, step.settings, step.functions, obstacle) as prepared:
            source = replace(prepared.subject.source, keeps_compiled=True)
            subject = replace(prepared.subject, source=source)
            yield replace(prepared, subject=subject)
        return
    if isinstance(trained, Step) or not callable(trained):
        raise OptionError(
            f"{name} is {type_in_words(trained)}", hint="Pass a torch.nn.Module, or the function that makes a step."
        )
    if isinstance(given, InputSpec):
        raise OptionError(
            f"the {name} makes a step, whose inputs cannot be text", hint="Pass tensors: inputs=(x, targets)."
        )
    with prepared_step(trained, given, step.settings) as prepared:
        yield prepared


def _refuse_hooks_on_gradients(name: str, model: nn.Module) -> None:
    """Refuse ``model`` if its parameters have hooks: memopt compares a copy, and ``copy.deepcopy`` drops such hooks."""
    hooked = next((path for path, parameter in model.named_parameters() if _hooks_of_others(parameter)), None)
    if hooked is not None:
        raise OptionError(
            f"the {name}'s parameter {hooked} has a hook on its gradient, which copies of the model lose",
            hint="Pass functions that make steps (memopt_cli.Step), and set the hooks in them.",
        )


def _hooks_of_others(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has hooks that are not memopt's own; memopt sets its own again with the plan."""
    modules = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks_on_gradient(parameter))
    return any(module.partition(".")[0] != "memopt_cli" for module in modules)

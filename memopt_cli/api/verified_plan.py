"""``memopt_cli.apply_plan``: put a plan on a live model, after comparing the model with and without it on request."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from memopt_cli.api.arguments import check_model
from memopt_cli.errors import OptionError, StepError, VerificationError
from memopt_cli.files.memopt_files import load_plan
from memopt_cli.records import CHANGES_NOTHING, Plan, StepSettings
from memopt_cli.runtime.in_backward import check_steps_alone
from memopt_cli.runtime.module_state import ModuleState, detach_state
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.text.spelling import warn_if_unchanged, with_python_spelling
from memopt_cli.text.units import format_shape
from memopt_cli.training import apply
from memopt_cli.training.module_calls import InputsRejectedError
from memopt_cli.training.step import TrainingStep
from memopt_cli.training.user_step import Step, join_models
from memopt_cli.training.wrappers import unwrap
from memopt_cli.verification.effects import generators_kept, gradients_kept
from memopt_cli.verification.further_steps import first_samples
from memopt_cli.verification.recorded_step import verify_step

Applied = TypeVar("Applied", bound=nn.Module | Step | Mapping[str, nn.Module])

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""One argument of ``forward``, its positional arguments, or its keyword arguments."""


@with_python_spelling
def apply_plan(
    model: Applied,
    plan: Plan | str | os.PathLike[str],
    *,
    verify: Inputs | list[Inputs] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
) -> Applied:
    """Install every segment of ``plan`` on ``model``, in place, or none if one fails; returns the model.

    ``model``: a model, a ``memopt_cli.Step``, or the models of a step by their names in the
    plan.  ``plan``: a plan, or the path of its file.

    ``verify``: inputs, or a list of several, such as batches of other sizes and padded batches.  For each, a step with
    the plan is compared with a step without it, in the mode that the model is in: outputs, gradients, buffers, hidden
    state and random numbers must be bit-identical, or, for a plan with chunks, to 1e-9 in float64.
    ``loss``: a function of the output, as in training.  ``optimizer``: the training script's, which a plan with
    ``in_backward`` runs in backward; the script must then not accumulate, clip or scale gradients.

    Raises ``PlanError`` for a plan that does not suit the model or its optimizer, ``VerificationError`` if a step
    differs, and ``StepError`` with the name of the module if a step fails; the model is then as it was.  Gradients stay
    as they are.  Warns if the plan changes nothing.
    """
    plan = load_plan(plan)
    if not isinstance(model, nn.Module | Step | Mapping):
        check_model(model)
    if not isinstance(model, nn.Module):
        _apply_to_step(model, plan, is_plain=verify is None and loss is None and optimizer is None)
        warn_if_unchanged(CHANGES_NOTHING if plan.is_empty else "")
        return model
    if verify is not None:
        for inputs in verify if isinstance(verify, list) else [verify]:
            _compare(model, plan.of_model.eager, inputs, loss)
    if plan.in_backward and optimizer is not None:
        with apply.refusing_in_backward(optimizer):
            check_steps_alone(optimizer)
    apply.apply_plan(model, plan, optimizer)
    warn_if_unchanged(CHANGES_NOTHING if plan.is_empty else "")
    return model


def _apply_to_step(step: Step | Mapping[str, nn.Module], plan: Plan, *, is_plain: bool) -> None:
    if not is_plain:
        raise OptionError(
            "verify, loss and optimizer are for a model, not for a step",
            hint="memopt optimize and memopt_cli.optimize_step verify the plan of a step.",
        )
    apply.apply_plan(join_models(step), plan)


@contextlib.contextmanager
def _detached_from_last_step(model: nn.Module) -> Iterator[None]:
    """Detach the state of ``model`` from the previous step's graph in the ``with`` block, and restore it afterwards.

    If a spiking network was trained and not reset, its membrane voltages still refer to that graph.  PyTorch has freed
    it: backward of the first step here would fail ("Trying to backward through the graph a second time").
    """
    before = ModuleState(model)
    detach_state(model)
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def _hint_on_verify(args: tuple[Any, ...]) -> Iterator[None]:
    """Let the hint of a model that fails on its arguments ``args`` in the ``with`` block speak of ``verify``."""
    try:
        yield
    except StepError as err:
        if len(args) == 1 and isinstance(args[0], Mapping):  # most models whose batch is a dictionary take its entries
            err.hint = "verify=[batch] calls model(**batch); verify=[(batch,)] calls model(batch)."
        elif isinstance(err, InputsRejectedError):
            err.hint = "Pass inputs that the model accepts: verify=[(x, y)] calls model(x, y)."
        raise


def _compare(model: nn.Module, plan: Plan, inputs: Inputs, loss: Callable[[Any], Tensor] | None) -> None:
    model = unwrap(model)
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else (inputs,)
    kwargs = {}
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    tensors = [*tensors_of((args, kwargs)), *model.parameters()]
    device = str(tensors[0].device) if tensors else "cpu"
    step = TrainingStep(model=model, args=args, kwargs=kwargs, settings=StepSettings(device=device), loss=loss)
    batch = next((len(t) for t in tensors if t.dim()), 1)
    with gradients_kept(model), generators_kept(), _detached_from_last_step(model), _hint_on_verify(args):
        install = functools.partial(apply.apply_plan, plan=plan)
        resize = functools.partial(first_samples, args, kwargs)
        verification = verify_step(step, plan, install, apply.remove_plan, batch=batch, full_size=True, resize=resize)
    if not verification.passed:
        shapes = ", ".join(format_shape(t.shape) for t in tensors_of((args, kwargs)))
        raise VerificationError(
            f"with the plan {verification.difference}, for inputs of the shape {shapes}",
            hint="The model is as it was; make a plan for it with memopt optimize.",
        )

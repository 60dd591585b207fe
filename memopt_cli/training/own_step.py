"""A step that the user wrote as a function (``memopt_cli.Step``): runs it, and reports its phase.

The function calls models, autograd and optimizers in any order, so phases are seen by hooks: on the autograd engine for
backward, on the optimizers for the update.

Every run starts from the same parameters: optimizers step at a learning rate of zero, and other changes of parameters
are undone before the next run.  Parameters whose gradients a previous step would leave have gradients of zeros.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memopt_cli.errors import StepError, type_in_words
from memopt_cli.records import Phase
from memopt_cli.records.progress import ignore
from memopt_cli.runtime.private_torch import TorchDispatchMode, engine_watched, is_fake
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.training.optimizers import closure_refusal
from memopt_cli.training.step import MAX_SCALE_TRIES, TrainingStep, check_finite, failure_named, give_zero_gradient
from memopt_cli.training.user_step import StepModels

OnPhase = Callable[[Phase], object]
OnUpdate = Callable[[Optimizer], object]
"""Function that is called with an optimizer that is about to step."""

NUMBER_READ = torch.ops.aten._local_scalar_dense.default
"""Operator that reads a number out of a tensor."""
NEVER_STEPPED = f"none of the step's optimizers has stepped in {MAX_SCALE_TRIES} steps"
LIST_OPTIMIZERS = "List the optimizers that it uses. A GradScaler skips updates whose gradients hold NaN or infinity."


class OwnStep(TrainingStep):
    """A step whose model is a :class:`StepModels`."""

    __slots__ = ()

    @property
    def models(self) -> StepModels:
        """Models of the step, as one module."""
        return cast(StepModels, self.model)

    def run(self, on_phase: OnPhase = ignore, on_update: OnUpdate = ignore) -> Any:
        """Take the step, and return the result of its function.

        ``on_phase`` is called with each phase as it begins, ``on_update`` with each optimizer before it steps.  Raises
        :class:`StepError` if the step returns no tensor, never calls backward, or does something that memopt cannot
        count; and whatever the function raises.
        """
        models = self.models
        is_first = models.leaves is None
        models.restore_moved()
        real = (p for p in models.parameters() if is_first and not is_fake(p))
        before = {p: p.detach().clone() for p in real}  # to learn which parameters the function itself changes
        watch = _Watch(self, on_phase, on_update)
        with watch.watching():
            output = models.step.run(*self.args, **self.kwargs)
        if not any(True for _ in tensors_of(output)):
            raise StepError(
                f"the step's function returned {type_in_words(output)}, not a tensor",
                hint="Return the losses from run, or other tensors that depend on the step: memopt compares them.",
            )
        watch.check()
        if is_first:
            models.learn(before)
        return output

    def take(self, on_phase: OnPhase = ignore) -> None:
        self.run(on_phase)

    def run_forward(self) -> None:
        self.run()

    def run_to_loss(self) -> None:
        self.run()

    def optimizers(self) -> tuple[Optimizer, ...]:
        return tuple(self.models.step.optimizers)

    def reset_gradients(self) -> None:
        """Give zeros to the parameters that have gradients after a step; the first call takes steps to find them."""
        models = self.models
        models.zero_grad(set_to_none=True)
        if models.leaves is None:
            start = StartingState(models)
            if any(map(is_fake, models.parameters())):  # without data: one step is enough, since no scaler skips it
                with _NumbersGuessed() as guessing:
                    self.run(guessing.enter)
            else:
                self.find_scale(start)
            start.restore()
            models.restore_moved()
            models.zero_grad(set_to_none=True)
        for name, parameter in models.named_parameters():
            if name in (models.leaves or ()):
                give_zero_gradient(parameter)

    def find_scale(self, start: StartingState) -> None:
        """Take steps until each optimizer has stepped, while the scaler in the user's function finds its scale.

        The steps follow one another, as in the user's script, and do not begin from ``start``: a scaler that begins
        again each time would never find its scale.
        """
        for _ in range(MAX_SCALE_TRIES):
            if self.has_usable_scale():
                return
            self.run()
        if not self.models.has_updated:
            raise StepError(NEVER_STEPPED, hint=LIST_OPTIMIZERS)

    def has_usable_scale(self) -> bool:
        return self.models.leaves is not None and not self.models.waiting

    def run_checked(self) -> Any:
        return self.run_checked_with(ignore)

    def run_checked_with(self, on_update: OnUpdate) -> Any:
        """Run one step as :meth:`run_checked` does, and call ``on_update`` before every update."""
        with failure_named(self.model):
            output = self.run(on_update=on_update)
        check_finite(output, "what the step returned")
        if self.has_usable_scale():  # otherwise a scaler skips updates with gradients that are not finite
            for name, parameter in self.models.named_parameters():
                if parameter.grad is not None:
                    check_finite(parameter.grad, f"the gradient of '{name}'")
        return output


class _Watch:
    """Watches autograd and the optimizers while a step runs."""

    def __init__(self, step: OwnStep, on_phase: OnPhase, on_update: OnUpdate) -> None:
        self._step = step
        self._on_phase = on_phase
        self._on_update = on_update
        self._phases: list[Phase] = []
        """Phases that have begun and not ended, the current one last; forward goes on after a backward or update."""
        self._rates: list[Any] = []
        """Learning rates of the parameter groups of the optimizer that is stepping."""
        self._listed = {id(optimizer) for optimizer in step.optimizers()}
        self._went_backward = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Report phases as they begin in the ``with`` block, and let optimizers step at a learning rate of zero."""
        enter = functools.partial(self._enter, "backward")
        before, after = (
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        )
        try:
            with engine_watched(enter, self._leave):
                self._enter("forward")
                yield
        finally:
            before.remove()
            after.remove()

    def check(self) -> None:
        """Raise :class:`StepError` if the step never called backward, or left a sparse gradient."""
        if not self._went_backward:
            raise StepError(
                "the step never calls backward: it keeps nothing that a plan could save",
                hint="Let run take a whole step, loss.backward() or torch.autograd.grad(…) included.",
            )
        self._refuse_sparse()

    def _enter(self, phase: Phase) -> None:
        self._went_backward |= phase == "backward"
        self._phases.append(phase)
        self._on_phase(phase)

    def _leave(self) -> None:
        self._phases.pop()
        self._on_phase(self._phases[-1])

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise StepError(closure_refusal(optimizer), hint="Call backward, then step without a closure.")
        if id(optimizer) not in self._listed:
            raise StepError(
                f"the step uses an optimizer, {type(optimizer).__name__}, that it does not list",
                hint="List all that it uses in optimizers=[...], since their state takes memory.",
            )
        self._refuse_sparse()
        if not _is_skipped(optimizer):
            self._step.models.waiting.discard(id(optimizer))
        self._on_update(optimizer)
        self._rates = [group.get("lr") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._enter("update")

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        self._leave()

    def _refuse_sparse(self) -> None:
        for name, parameter in self._step.models.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise StepError(
                    f"the gradient of '{name}' is sparse, which is not counted",
                    hint="Make it dense; for an nn.Embedding, set sparse=False.",
                )


def _is_skipped(optimizer: Optimizer) -> bool:
    """Return whether the fused ``optimizer`` skips its update because a scaler found gradients that are not finite."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and not is_fake(found_inf) and bool(found_inf.any())


def guessed_number(func: Any, args: Any, *, updating: bool) -> float | None:
    """Return the number that ``func`` reads from a tensor without data, or ``None`` if it does not read one.

    Optimizers read step counters ``n`` and divide by ``n`` and ``1 - n``, so (``updating``) they get 0.5.  Other reads,
    of losses to log and of tests for infinity, get 0.
    """
    if func is not NUMBER_READ or not is_fake(args[0]):
        return None
    return 0.5 if updating else 0.0


class _NumbersGuessed(TorchDispatchMode):
    """Dispatch mode in which a number read from a tensor without data is a guess (:func:`guessed_number`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase: Phase = "forward"

    def enter(self, phase: Phase) -> None:
        self._phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = guessed_number(func, args, updating=self._phase == "update")
        return func(*args, **(kwargs or {})) if number is None else number

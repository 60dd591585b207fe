"""Variations of a recorded step in which a plan must hold as well: other sizes, masks, modes, frozen parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from memopt_cli.errors import StepError, first_line
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep
from memopt_cli.verification.effects import in_double

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
Resize = Callable[[int], Arguments]
"""Function that makes the inputs at another batch size; it raises an error if they have only one."""
Vary = Callable[[TrainingStep], AbstractContextManager[TrainingStep]]
"""Function that returns a context manager: it yields a step with one thing changed, and undoes the change after."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One check of a plan."""

    name: str
    """End of a sentence, such as ``in eval mode``."""
    batch: int
    """Number of samples."""
    vary: Vary


class CannotVaryError(StepError):
    """Raised if a step has nothing to vary in this way, such as no mask."""


def variations(batch: int, size: int, resize: Resize) -> Iterator[Variation]:
    """Yield the variations of a step of ``batch`` samples, the ones most likely to matter first.

    If ``size`` is less, there is no time for more samples: the variations have ``size`` samples, unless the inputs
    cannot be resized.
    """
    recorded_batch = batch
    change_inputs: Vary = _as_recorded
    if size < batch:
        with contextlib.suppress(Exception):  # inputs of one size only: the variations have all samples
            resize(size)
            batch = size
            change_inputs = _resized_to(resize, size)
    for number, (name, vary) in enumerate(_KINDS.items()):
        yield Variation(name, batch, _combine(change_inputs, vary))
        if number == 0 and batch == recorded_batch:
            half = batch // 2 or 2
            yield Variation(f"at batch {half}", half, _resized_to(resize, half))


def _combine(first: Vary, second: Vary) -> Vary:
    @contextlib.contextmanager
    def varied(step: TrainingStep) -> Iterator[TrainingStep]:
        with first(step) as once, second(once) as twice:
            yield twice

    return varied


def _as_recorded(step: TrainingStep) -> AbstractContextManager[TrainingStep]:
    return contextlib.nullcontext(step)


def _resized_to(resize: Resize, size: int) -> Vary:
    def varied(step: TrainingStep) -> AbstractContextManager[TrainingStep]:
        try:
            args, kwargs = resize(size) if step.settings.precision != "fp64" else in_double(resize(size))
        except Exception as error:  # the function of a script may raise anything
            raise CannotVaryError(first_line(error)) from error
        return contextlib.nullcontext(replace(step, args=args, kwargs=kwargs))

    return varied


def _masks(step: TrainingStep) -> AbstractContextManager[TrainingStep]:
    """Flip masks among the inputs in the last half of their last dimension."""
    if not any(map(_is_mask, tensors_of((step.args, step.kwargs)))):
        raise CannotVaryError("no input is a mask")
    args, kwargs = map_leaves(_flip_half, (step.args, step.kwargs))
    return contextlib.nullcontext(replace(step, args=args, kwargs=kwargs))


def _is_mask(leaf: Any) -> bool:
    """Return whether ``leaf`` is a mask: zeros and ones, not floating, since floating ones are spikes."""
    if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex() or not leaf.dim():
        return False
    return leaf.shape[-1] > 1 and bool(((leaf == 0) | (leaf == 1)).all())


def _flip_half(leaf: Any) -> Any:
    if not _is_mask(leaf):
        return leaf
    flipped = leaf.clone()
    half = leaf.shape[-1] // 2
    flipped[..., half:] = leaf[..., half:] == 0
    return flipped


@contextlib.contextmanager
def _eval(step: TrainingStep) -> Iterator[TrainingStep]:
    modes = [(module, module.training) for module in step.model.modules()]
    step.model.eval()
    try:
        yield step
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _frozen(step: TrainingStep) -> Iterator[TrainingStep]:
    with _freezing(step) as freeze:
        freeze()
        yield step


@contextlib.contextmanager
def _freeze_before_backward(step: TrainingStep) -> Iterator[TrainingStep]:
    """Freeze parameters between forward and backward: when the loss is computed."""
    if isinstance(step, OwnStep):
        raise CannotVaryError("its function forms the loss")
    with _freezing(step) as freeze:

        def loss(output: Any) -> Any:
            freeze()
            return step.loss(output) if step.loss else output

        yield replace(step, loss=loss)


@contextlib.contextmanager
def _freezing(step: TrainingStep) -> Iterator[Callable[[], None]]:
    """Yield a function that freezes the first half of the parameters, in the model's order, in the ``with`` block."""
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    frozen = parameters[: len(parameters) // 2]
    if not frozen:
        raise CannotVaryError("it has fewer than two parameters")

    def set_trainable(trainable: bool) -> None:
        for parameter in frozen:
            parameter.requires_grad_(trainable)

    try:
        yield lambda: set_trainable(False)
    finally:
        set_trainable(True)


_KINDS: dict[str, Vary] = {
    "in the next step": _as_recorded,
    "with masks changed": _masks,
    "in eval mode": _eval,
    "with frozen parameters": _frozen,
    "with parameters frozen before backward": _freeze_before_backward,
}
"""Name of a check, as the end of a sentence -> the variation."""
CHECKS = len(_KINDS) + 1
"""Maximum number of checks of a step."""

"""What one training step is: forward, loss, backward, and the optimizer if asked for.

Everything that runs a model (recording, measuring, verifying) runs it through here, so that all mean the same step.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import StepError, first_line
from memopt_cli.records import Phase, StepSettings
from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.in_backward import is_in_backward
from memopt_cli.runtime.private_torch import is_fake, is_out_of_cpu_memory, is_started, unseen
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.training.module_calls import rejection, watched_modules
from memopt_cli.training.optimizers import OptimizerMaker, no_optimizer
from memopt_cli.training.wrappers import unwrapped

_CASTS = {"fp32": torch.float32, "fp64": torch.float64}
_AUTOCASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A model ready to take training steps on fixed inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: StepSettings
    loss: Callable[[Any], Tensor] | None = None
    """The user's loss of the model's output; ``None``: see :func:`seeds_of_backward`."""
    optimizer: torch.optim.Optimizer | None = None
    make_optimizer: OptimizerMaker = no_optimizer
    """Makes one as ``optimizer`` for a copy of the model."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss, and skips updates whose gradients are not finite."""
    buckets: Sequence[Tensor] = ()
    """In which gradients are reduced over ranks: there all the time, and nothing of the model leads to them.  Others
    may be there after a step."""

    @property
    def named(self) -> nn.Module:
        """The model, whose modules have their own names: what wraps it to run it, as DDP, has none."""
        return unwrapped(self.model)

    def forward(self) -> Any:
        """The model's output, under the precision's autocast."""
        with _autocast(self.settings):
            return self.model(*self.args, **self.kwargs)

    def backward(self, output: Any) -> None:
        """Gradients into ``.grad``."""
        with _autocast(self.settings):
            roots, cotangents = seeds_of_backward(output, self.loss, self.settings.seed)
        if self.scaler is not None:
            roots, cotangents = _scaled(self.scaler, roots, cotangents)
        torch.autograd.backward(roots, cotangents)

    def clip(self) -> None:
        """Unscale the gradients and clip them, as far as the step does either."""
        self.unscale()
        self.limit()

    def unscale(self) -> None:
        """The first of it."""
        if self.scaler is not None and self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)
        elif self.settings.precision == "fp16" and self.scaler is None:
            _unscale_without_data(self.model.parameters())

    def limit(self) -> None:
        """The second."""
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)

    def reach(self) -> None:
        """Call every module that the step calls, once at least."""
        with torch.no_grad():
            self.forward()

    def reach_loss(self) -> None:
        """The same, up to where backward starts."""
        seeds_of_backward(self.forward(), self.loss, self.settings.seed)

    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All that it has."""
        return () if self.optimizer is None else (self.optimizer,)

    def update(self) -> None:
        """The optimizer's step, if there is one.  Raises :class:`StepError` that names an optimizer which fails."""
        if self.optimizer is None:
            return
        try:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except Exception as err:  # of a class of anybody's
            if is_out_of_memory(err):
                raise
            raise StepError(f"{type(self.optimizer).__name__} cannot take a step: {first_line(err)}") from err

    def take(self, entered: Callable[[Phase], object]) -> None:
        """See :func:`take`."""
        entered("forward")
        output = self.forward()
        entered("backward")
        self.backward(output)
        del output
        if self.settings.precision == "fp16" or self.settings.clip_norm is not None:
            entered("clip")
            self.clip()
        if self.optimizer is not None:
            if not is_in_backward(self.optimizer):
                entered("update")
            self.update()

    def settle(self, start: StartingState) -> None:
        """Let the scaler find its scale, as a script does in its first updates, which it skips.

        Each try begins from ``start``; the last leaves its gradients.  Raises :class:`StepError` where gradients are
        finite at no scale.
        """
        if self.scaler is None:
            return
        for _ in range(SCALES):
            begin(self, start)
            self.backward(self.forward())
            if self.is_settled():
                return
            self.scaler.update(self.scaler.get_scale() / 2)
        raise StepError(_NEVER_FINITE, hint=_FIND_NAN)

    def is_settled(self) -> bool:
        """Whether the scaler, if there is one, would not skip an update by the gradients that are there."""
        return self.scaler is None or all(map(_is_finite, self.model.parameters()))

    def find_gradients(self) -> None:
        """See :func:`reset_gradients`."""
        if self.settings.micro_batches == 1:
            self.model.zero_grad(set_to_none=True)
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                give_zero_gradient(parameter)

    def checked(self) -> Any:
        """See :func:`run_checked`."""
        with _rejection_named(self.model):
            output = self.forward()
        check_finite(output)
        loss = functools.partial(_loss_of, loss=self.loss) if self.loss else None
        try:
            replace(self, loss=loss).backward(output)
        except StepError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise StepError(
                f"forward works but backward fails: {first_line(error)}",
                hint="The same error appears in a plain loss.backward(); see the operation it names.",
            ) from error
        return output


def take(step: Step, entered: Callable[[Phase], object] = lambda phase: None) -> None:
    """One step, whole, onto the gradients that are there.  ``entered`` is told the phases that it has, in turn.

    An optimizer that runs in backward has no phase of its own.
    """
    step.take(entered)


def give_zero_gradient(parameter: Tensor) -> None:
    """Whoever times the operators of the step does not see it.

    A gradient that is there, and no part of a graph, is zeroed in place.  A new one is written to at once: the system
    hands out memory at the first write, and a pass that accumulates finds it there.
    """
    with contextlib.nullcontext() if is_fake(parameter) else unseen():
        if parameter.grad is None or parameter.grad.grad_fn is not None or is_fake(parameter):
            parameter.grad = torch.zeros_like(parameter)
        if not is_fake(parameter):
            parameter.grad.zero_()


def _unscale_without_data(parameters: Iterable[Tensor]) -> None:
    """In place, as a scaler does, which would have to read whether the gradients are finite."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(1.0)


SCALES = 33
"""A scaler's, from 2^16 down to 2^-16: it does not stop at 1, and a loss that is a sum needs less."""
_NEVER_FINITE = "the gradients hold NaN or infinity, however small the loss is scaled: a GradScaler skips every update"
_FIND_NAN = "torch.autograd.set_detect_anomaly(True) in the script says where they come from."


def _is_finite(parameter: Tensor) -> bool:
    return parameter.grad is None or bool(torch.isfinite(parameter.grad.to_dense()).all())


def _scaled(
    scaler: torch.amp.GradScaler, roots: list[Tensor], cotangents: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """A loss becomes a scaled one, as in a training script; what stands for a loss is scaled where it is."""
    for cotangent in cotangents:
        if cotangent is not None:
            cotangent.mul_(scaler.scale(torch.ones((), device=cotangent.device)))
    return [
        scaler.scale(root) if cotangent is None else root for root, cotangent in zip(roots, cotangents, strict=True)
    ], cotangents


def make_scaler(settings: StepSettings) -> torch.amp.GradScaler | None:
    """Of a step in float16, whose gradients would be lost without."""
    return torch.amp.GradScaler(torch.device(settings.device).type) if settings.precision == "fp16" else None


def seeds_of_backward(
    output: Any, loss: Callable[[Any], Tensor] | None, seed: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Where backward starts: tensors and the gradients to start from.

    The user's loss if given; else an output that is a scalar, or has a ``loss`` entry, is the loss; else every
    floating leaf of the output with a random cotangent drawn from ``seed`` (a plain sum has vanishing gradients in
    many models), the same in whatever order a dict has them.  Raises :class:`StepError` if nothing is differentiable.
    """
    if loss is not None:
        output = loss(output)
    scalar = loss_entry(output)
    if scalar is not None:
        _require_gradient([scalar], "the loss")
        return [scalar], [None]
    leaves = [t for t in _by_keys(output) if t.requires_grad]
    _require_gradient(leaves, "the model's output")
    generator = torch.Generator(leaves[0].device).manual_seed(seed)
    return leaves, [torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device) for t in leaves]


def _by_keys(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, those of a dict in the order of its keys."""
    if isinstance(output, dict):
        for key in sorted(output, key=str):
            yield from _by_keys(output[key])
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _by_keys(part)
    else:
        yield from tensors_of(output)


def begin(step: Step, start: StartingState) -> None:
    """Put ``step`` where every step of its model begins, whatever the last one left, or left half done.

    Without this a membrane still hangs on the graph of the last step, whose backward then fails half-way: the layers
    behind it have gradients already, and a second try would add to them.
    """
    start.enter()
    reset_gradients(step)
    seed_everything(step.settings.seed)


def reset_gradients(step: Step) -> None:
    """Leave the gradients that the step is to find: none, or zeros where it accumulates or finds those of the last."""
    step.find_gradients()


def input_dtype(settings: StepSettings) -> torch.dtype | None:
    """The dtype that parameters and floating inputs are cast to; ``None`` leaves them as stored."""
    return _CASTS.get(settings.precision)


def place(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Move the model to the step's device and dtype, in training mode."""
    model.to(torch.device(settings.device))
    dtype = input_dtype(settings)
    if dtype is not None:
        cast(model, dtype)
    return model.train()


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Its floating parameters and buffers to float32 or float64, and complex ones as :func:`dtype_in` says.

    ``model.to(dtype)`` would keep the real parts alone.
    """
    model.double() if dtype is torch.float64 else model.float()
    for parameter in model.parameters():
        if parameter.is_complex():
            parameter.data = parameter.data.to(dtype_in(dtype, parameter))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_complex():
                setattr(module, name, buffer.to(dtype_in(dtype, buffer)))


def dtype_in(dtype: torch.dtype, tensor: Tensor) -> torch.dtype:
    """What becomes of a tensor in a step of that dtype: a complex one has parts of it, a whole one stays as it is."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def check_finite(output: Any, what: str = "the model's output") -> None:
    """Raises :class:`StepError` if an output holds NaN or infinity."""
    for tensor in tensors_of(output):
        if isinstance(tensor, DeferredLinear) and not tensor.is_computed:
            continue  # to read it is to give up what its layer runs in chunks for
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            found = f"holds NaN or infinity ({bad} of {tensor.numel()} values of shape {tuple(tensor.shape)})"
            raise StepError(
                f"{what} {found if tensor.dim() else 'is NaN or infinite'}",
                hint="Check the input values (-i …=LOW..HIGH, normal, spikes:RATE) and the stored parameters.",
            )


FORWARD_HINT = (
    "Give inputs that the model accepts, one for each argument of forward; on the command line: "
    "-i SHAPE[@dtype][=values]."
)
"""Of a forward that fails."""


def run_checked(step: Step) -> Any:
    """One forward and backward with every failure of the model's own code explained.

    Returns the output, detached from nothing.  Raises :class:`StepError` that names the module which rejected its
    input, or says that only backward fails.  Out of memory passes through as it is.
    """
    return step.checked()


@contextlib.contextmanager
def _rejection_named(model: nn.Module) -> Iterator[None]:
    """Within, a forward that fails raises :class:`StepError`, which names the module that rejected its input."""
    with watched_modules(model) as watched:
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise StepError(rejection(error, watched, model), hint=FORWARD_HINT) from error


def _loss_of(output: Any, loss: Callable[[Any], Tensor]) -> Tensor:
    try:
        found = loss(output)
    except Exception as error:  # the user's code may raise anything
        if is_out_of_memory(error):
            raise
        raise StepError(
            f"the loss failed: {first_line(error)}", hint="It is called with the model's output, and nothing else."
        ) from error
    check_finite(found, "the loss")
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_out_of_cpu_memory(error)


def loss_entry(output: Any) -> Tensor | None:
    """The loss that a model returns: a scalar, or an entry of that name; ``None`` if it returns none."""
    candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(candidate, Tensor) and candidate.numel() == 1 and candidate.dim() == 0:
        return candidate
    return None


def _require_gradient(tensors: list[Tensor], what: str) -> None:
    if not any(t.requires_grad for t in tensors):
        raise StepError(
            f"{what} has nothing to differentiate: no floating tensor in it depends on a parameter",
            hint="Give a differentiable loss with --loss file.py:function, or check that parameters require gradients; "
            "a part without parameters is optimized with the model that it belongs to, or by inputs that require "
            "gradients.",
        )


def _autocast(settings: StepSettings) -> contextlib.AbstractContextManager[Any]:
    dtype = _AUTOCASTS.get(settings.precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(settings.device).type, dtype=dtype)


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock read afterwards is honest."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seed_everything(seed: int) -> None:
    """Seed the generators that a model draws from: those of devices on which something has run."""
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """Those of PyTorch.

    ``torch.manual_seed`` also has a device start with this seed that nobody has used yet, in place of a seed that the
    user asked for.  Without a device it would format a traceback for each kind, 2 ms in a deep stack.
    """
    device = _accelerator()
    if device is not None and is_started(device):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@functools.cache
def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)

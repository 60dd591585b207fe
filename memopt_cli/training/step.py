"""The training step: forward, loss, backward, clipping, and the optimizer if requested.

Everything that runs a model (recording, measuring, verifying) does so through this module, so that all of it means the
same step.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import LossError, MemoptError, StepError, first_line
from memopt_cli.records import Phase, StepSettings
from memopt_cli.records.progress import Report, ignore
from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.graph import leaves_before
from memopt_cli.runtime.in_backward import is_in_backward
from memopt_cli.runtime.private_torch import (
    UNKNOWN_WITHOUT_DATA,
    is_fake,
    is_out_of_cpu_memory,
    is_started,
    unseen,
)
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.training.module_calls import failed_step
from memopt_cli.training.optimizers import OptimizerMaker, no_optimizer
from memopt_cli.training.wrappers import unwrap

_CASTS = {"fp32": torch.float32, "fp64": torch.float64}
_AUTOCASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SCALE_TRIES = 33
"""Number of scales that are tried, from 2^16 down to 2^-16; a loss that is a sum may need one below 1."""
_NEVER_FINITE = "the gradients hold NaN or infinity, however small the loss is scaled: a GradScaler skips every update"
_FIND_NAN = "torch.autograd.set_detect_anomaly(True) in the script shows where they come from."

_NO_PARAMETERS_HINT = (
    "The model has no parameters, so no loss can train it. torch.jit.freeze turns weights into constants, and "
    "quantization into integers: use the model as it was before. A part without parameters is optimized with the "
    "model that it belongs to, or by inputs that require gradients."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """A model ready to take training steps on fixed inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: StepSettings
    loss: Callable[[Any], Tensor] | None = None
    """The user's loss, a function of the model's output; ``None`` for the rules of :func:`seeds_of_backward`."""
    optimizer: torch.optim.Optimizer | None = None
    """Optimizer of the model's parameters; ``None`` for a step that ends with the gradients."""
    make_optimizer: OptimizerMaker = no_optimizer
    """Makes an optimizer like ``optimizer`` for a copy of the model."""
    scaler: torch.amp.GradScaler | None = None
    """Scaler of the loss, which skips updates without finite gradients; ``None`` if not scaled."""
    buckets: Sequence[Tensor] = ()
    """Buckets in which DDP reduces gradients over ranks; listed here: no attribute of the model refers to them.  A
    step may replace them."""
    report: Report = ignore
    """Callback for a message to the user, called whenever the start of backward is guessed."""
    compares_inputs: bool = True
    """Whether verification compares the gradients of floating inputs as well, which training does not compute."""

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model without wrappers such as DDP, so that its modules have the paths that plans use."""
        return unwrap(self.model)

    def forward(self) -> Any:
        """Run the model under the autocast of the step's precision, and return its output."""
        with _autocast(self.settings):
            return self.model(*self.args, **self.kwargs)

    def backward(self, output: Any) -> None:
        """Back-propagate from ``output`` into the ``.grad`` of parameters."""
        with _autocast(self.settings):
            try:
                roots, cotangents = seeds_of_backward(output, self.loss, self.settings.seed, self.report)
            except StepError as error:
                if next(self.model.parameters(), None) is None:
                    error.hint = _NO_PARAMETERS_HINT
                raise
        if self.scaler is not None:
            roots, cotangents = _scale_loss(self.scaler, roots, cotangents)
        torch.autograd.backward(roots, cotangents)  # outside autocast, as PyTorch advises

    def unscale_and_clip(self) -> None:
        """Unscale the gradients if the step scales its loss, then clip them if it clips."""
        self.unscale()
        self.clip_gradients()

    def unscale(self) -> None:
        """Unscale the gradients if the step scales its loss."""
        if self.scaler is not None and self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)
        elif self.settings.precision == "fp16" and self.scaler is None:
            _unscale_without_data(self.model.parameters())

    def clip_gradients(self) -> None:
        """Clip the gradients to the norm of the settings, if they have one."""
        if self.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)

    def run_forward(self) -> None:
        """Run forward without gradients, which calls each module of the step."""
        with torch.no_grad():
            self.forward()

    def run_to_loss(self) -> None:
        """Run forward and the loss, which call each module of the step, but not backward."""
        seeds_of_backward(self.forward(), self.loss, self.settings.seed)

    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return the optimizers of the step."""
        return () if self.optimizer is None else (self.optimizer,)

    def update(self) -> None:
        """Let the optimizer, if there is one, take its step.  Raises :class:`StepError` if it fails."""
        if self.optimizer is None:
            return
        try:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        except Exception as err:  # the user's optimizer may raise anything
            if is_out_of_memory(err):
                raise
            raise StepError(
                f"{type(self.optimizer).__name__} cannot take a step: {first_line(err)}",
                hint="Its step() raises the same error in plain Python: train this model with another optimizer.",
            ) from err

    def take(self, on_phase: Callable[[Phase], object] = ignore) -> None:
        """Take the whole step, adding to existing gradients.

        ``on_phase`` is called with each phase as it begins; an optimizer that runs in backward has no phase.
        """
        on_phase("forward")
        output = self.forward()
        on_phase("backward")
        self.backward(output)
        del output  # a training script drops it before the update as well
        if self.settings.precision == "fp16" or self.settings.clip_norm is not None:
            on_phase("clip")
            self.unscale_and_clip()
        if self.optimizer is not None:
            if not is_in_backward(self.optimizer):
                on_phase("update")
            self.update()

    def find_scale(self, start: StartingState) -> None:
        """Halve the scale of the loss until the gradients are finite, like a script's first, skipped updates.

        Each try begins from ``start``, and the gradients of the last try stay.  Raises :class:`StepError` if no scale
        makes gradients finite.
        """
        if self.scaler is None:
            return
        for _ in range(MAX_SCALE_TRIES):
            reset_step(self, start)
            self.backward(self.forward())
            if self.has_usable_scale():
                return
            self.scaler.update(self.scaler.get_scale() / 2)
        raise StepError(_NEVER_FINITE, hint=_FIND_NAN)

    def has_usable_scale(self) -> bool:
        """Return whether the scale lets the optimizer step: all current gradients are finite."""
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        return self.scaler is None or all(bool(torch.isfinite(g.to_dense()).all()) for g in gradients)

    def reset_gradients(self) -> None:
        """Remove all gradients; with several micro-batches, set them to zeros, since earlier ones leave gradients."""
        if self.settings.micro_batches == 1:
            self.model.zero_grad(set_to_none=True)
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                give_zero_gradient(parameter)

    def run_checked(self) -> Any:
        """Run one forward and backward, explain every failure of the model's own code, and return the output.

        Raises :class:`StepError`, with the name of the module whose forward failed, or with the statement that only
        backward fails.  An out-of-memory error is raised unchanged.
        """
        with failure_named(self.model):
            output = self.forward()
        check_finite(output)
        loss = functools.partial(_finite_loss, self.loss) if self.loss else None
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


def give_zero_gradient(parameter: Tensor) -> None:
    """Give ``parameter`` a gradient of zeros, hidden from active dispatch modes, which would count and time it.

    An existing gradient is zeroed in place, unless it is part of a graph.  A new one is written to at once: the system
    provides the memory of ``torch.zeros`` at the first write, which must not fall into a measured step.
    """
    with contextlib.nullcontext() if is_fake(parameter) else unseen():
        if parameter.grad is None or parameter.grad.grad_fn is not None or is_fake(parameter):
            parameter.grad = torch.zeros_like(parameter)
        if not is_fake(parameter):
            parameter.grad.zero_()


def _unscale_without_data(parameters: Iterable[Tensor]) -> None:
    """Multiply the gradients in place by 1, in place of a scaler, which needs data to see whether they are finite."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(1.0)


def _scale_loss(
    scaler: torch.amp.GradScaler, roots: list[Tensor], cotangents: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Scale losses into new tensors, like a training script, and ``cotangents`` of other roots in place."""
    for cotangent in cotangents:
        if cotangent is not None:
            cotangent.mul_(scaler.scale(torch.ones((), device=cotangent.device)))
    return [
        scaler.scale(root) if cotangent is None else root for root, cotangent in zip(roots, cotangents, strict=True)
    ], cotangents


def make_scaler(settings: StepSettings) -> torch.amp.GradScaler | None:
    """Make the scaler of a step in float16, whose gradients would underflow; ``None`` for others."""
    return torch.amp.GradScaler(torch.device(settings.device).type) if settings.precision == "fp16" else None


def seeds_of_backward(
    output: Any, loss: Callable[[Any], Tensor] | None, seed: int, report: Report = ignore
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the tensors that backward starts from, and their cotangents (``None`` for a loss).

    With a ``loss`` given, that is the only one.  Otherwise it is the loss that :func:`loss_entry` finds in ``output``.
    Otherwise backward starts from all floating tensors of the output, with random cotangents made from ``seed``: the
    gradients of a plain sum vanish in many models.  ``report`` is called with a message about each guess: which of
    several outputs is the loss, or that no output is.  Raises :class:`StepError` if nothing is differentiable.
    """
    if loss is not None:
        output = _call_loss(loss, output)
    scalar = loss_entry(output, report)
    if scalar is not None:
        _require_gradient([scalar], "the loss")
        return [scalar], [None]
    leaves = [t for _, t in _by_keys(output) if t.requires_grad]
    _require_gradient(leaves, "the model's output")
    if len(leaves) > 1:
        report(
            f"No loss is known: backward starts from random gradients on {len(leaves)} outputs; "
            "`--loss file.py:function` names one."
        )
    generator = torch.Generator(leaves[0].device).manual_seed(seed)
    return leaves, [torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device) for t in leaves]


def _by_keys(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``output`` with their names below ``name``, such as ``1`` or ``losses.nll``.

    Those of a dict come by sorted keys, so that its order does not change cotangents.
    """
    parts: Iterable[tuple[Any, Any]]
    if isinstance(output, dict):
        parts = ((key, output[key]) for key in sorted(output, key=str))
    elif isinstance(output, list | tuple):
        parts = enumerate(output)
    elif is_dataclass(output) and not isinstance(output, type):
        parts = ((field.name, getattr(output, field.name)) for field in fields(output))
    else:
        yield from ((name, tensor) for tensor in tensors_of(output))
        return
    for key, part in parts:
        yield from _by_keys(part, f"{name}.{key}".removeprefix("."))


def reset_step(step: TrainingStep, start: StartingState) -> None:
    """Give ``step`` the state ``start``, fresh gradients and seeds, as every step begins.

    Otherwise the membrane of a spiking neuron, for example, would still be part of the last step's graph.  Backward
    would fail half-way, and leave gradients in some layers, to which a second try would add.
    """
    start.restore()
    step.reset_gradients()
    seed_everything(step.settings.seed)


def input_dtype(settings: StepSettings) -> torch.dtype | None:
    """Return the dtype to cast parameters and floating inputs to; ``None`` to leave them as stored."""
    return _CASTS.get(settings.precision)


def move_model(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Move ``model`` to the device and dtype of ``settings``, and set it to training mode."""
    model.to(torch.device(settings.device))
    dtype = input_dtype(settings)
    if dtype is not None:
        cast(model, dtype)
    return model.train()


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and buffers of ``model`` to ``dtype``, float32 or float64.

    Complex tensors get the complex dtype of that precision; ``model.to(dtype)`` would keep only their real parts.
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
    """Return the dtype that ``tensor`` has in a step of ``dtype``; integers stay, complex numbers stay complex."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def check_finite(output: Any, what: str = "the model's output") -> None:
    """Raise :class:`StepError` if ``output`` holds NaN or infinity."""
    for tensor in tensors_of(output):
        if isinstance(tensor, DeferredLinear) and not tensor.is_computed:
            continue  # reading it would compute it whole, which its layer runs in chunks to avoid
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            description = f"holds NaN or infinity ({bad} of {tensor.numel()} values of shape {tuple(tensor.shape)})"
            raise StepError(
                f"{what} {description if tensor.dim() else 'is NaN or infinite'}",
                hint="Check the input values (`-i …=LOW..HIGH`, normal, spikes:RATE) and the stored parameters.",
            )


@contextlib.contextmanager
def failure_named(model: nn.Module) -> Iterator[None]:
    """Raise an error of the ``with`` block, a part of a step of ``model``, as a :class:`StepError` with its module.

    Errors of memopt, and errors for lack of memory, are raised unchanged.
    """
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        if isinstance(error, MemoptError) or is_out_of_memory(error):
            raise
        raise failed_step(error, model) from error


def _finite_loss(loss: Callable[[Any], Tensor], output: Any) -> Tensor:
    value: Tensor = _call_loss(loss, output)
    check_finite(value, "the loss")
    return value


def _call_loss(loss: Callable[[Any], Any], output: Any) -> Any:
    """Return the user's ``loss`` of ``output``.

    Raises :class:`LossError` if it is a class or fails, but not for a lack of memory or, in a dry run, of data.
    """
    if isinstance(loss, type):
        raise LossError(
            f"the loss, {loss.__name__}, is a class, which would only be made from the model's output",
            hint="Write a function of the output, with the targets in the same file, one for each sample: "
            f"def loss(output): return {loss.__name__}()(output, targets[: len(output)]).",
        )
    try:
        return loss(output)
    except Exception as error:  # the user's code may raise anything
        if is_out_of_memory(error) or isinstance(error, (MemoptError, *UNKNOWN_WITHOUT_DATA)):
            raise
        raise LossError(
            f"the loss failed: {first_line(error)}",
            hint="It gets only the model's output. Keep the targets in the same file as the function, one for each "
            "sample: def loss(output): return loss_fn(output, targets[: len(output)]). Without a loss, every output "
            "gets a random gradient, which takes the same memory.",
        ) from error


def was_raised_in_loss(error: BaseException) -> bool:
    """Return whether ``error`` was raised in the user's loss."""
    return any(frame.f_code is _call_loss.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the memory of a device or the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_out_of_cpu_memory(error)


def loss_entry(output: Any, report: Report = ignore) -> Tensor | None:
    """Return the loss in a model's ``output``; ``None`` if there is none.

    It is a scalar output, an entry ``loss``, or the only scalar among the outputs that requires a gradient, such as in
    ``return logits, loss``; ``report`` is called about the last one.  Such a scalar must depend on every parameter that
    the other outputs depend on: the temperature of a contrastive model, or an auxiliary loss of a few layers, is not
    the loss.
    """
    candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(candidate, Tensor) and candidate.dim() == 0:
        return candidate
    outputs = {id(tensor): (name, tensor) for name, tensor in _by_keys(output) if tensor.requires_grad}
    scalars = [(name, tensor) for name, tensor in outputs.values() if tensor.dim() == 0 and tensor.is_floating_point()]
    if len(scalars) != 1:
        return None
    ((name, scalar),) = scalars
    others = [tensor for _, tensor in outputs.values() if tensor is not scalar]
    if not {*map(id, leaves_before(others))} <= {*map(id, leaves_before([scalar]))}:
        return None
    named = name if name.isdecimal() else f"'{name}'"
    report(f"The scalar output {named} is taken as the loss; `--loss file.py:function` names another.")
    return scalar


def _require_gradient(tensors: list[Tensor], what: str) -> None:
    if not any(t.requires_grad for t in tensors):
        raise StepError(
            f"{what} has nothing to differentiate: no floating tensor in it depends on a parameter",
            hint="Use a differentiable loss with `--loss file.py:function`, or check that parameters require "
            "gradients; a part without parameters is optimized with the model that it belongs to, or by inputs that "
            "require gradients.",
        )


def _autocast(settings: StepSettings) -> contextlib.AbstractContextManager[Any]:
    dtype = _AUTOCASTS.get(settings.precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(settings.device).type, dtype=dtype)


def synchronize(device: str) -> None:
    """Wait until ``device`` has run all launched kernels, so that a clock read afterwards includes them."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seed_everything(seed: int) -> None:
    """Seed the generators of PyTorch, Python and NumPy that a model may use."""
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators of the CPU, and of a device that has been used.

    ``torch.manual_seed`` would also set the seed of an unused device that starts later, in place of the user's own.
    And on a machine without a device it formats a traceback for each kind of device, 2 ms in a deep stack.
    """
    device = _accelerator()
    if device is not None and is_started(device):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@functools.cache
def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)

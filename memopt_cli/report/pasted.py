"""Lines to paste into a training script, with the precision, clipping and accumulation of the measured step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memopt_cli.records import StepSettings

LOSS: Final = "loss_function(model(inputs), targets)"
_AUTOCASTS: Final = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_CASTS: Final = {"fp32": "model.float()", "fp64": "model.double()"}


def training_settings(batch: int, steps: int, step: StepSettings, device: str) -> Iterator[str]:
    """Yield the lines for a model that trains with ``batch``, and ``steps`` passes for each step of the optimizer.

    ``step`` is how it was measured, and ``device`` where it is to train, such as ``cuda:0``.
    """
    if step.precision in _CASTS:
        yield _CASTS[step.precision]
    loader = f"loader = DataLoader(dataset, batch_size={batch}, shuffle=True)"
    yield "# Lightning"
    yield loader
    yield f"trainer = Trainer({', '.join(_for_lightning(steps, step))})"
    yield "# Hugging Face"
    yield f"arguments = TrainingArguments({', '.join(_for_hugging_face(batch, steps, step))})"
    yield "# PyTorch"
    yield loader
    yield from loop_lines(LOSS, steps, step, device, unless_plain=True)


def _for_lightning(steps: int, step: StepSettings) -> Iterator[str]:
    yield f"accumulate_grad_batches={steps}"
    if step.precision in _AUTOCASTS:
        yield f'precision="{"bf16" if step.precision == "bf16" else "16"}-mixed"'
    elif step.precision == "fp64":
        yield 'precision="64-true"'
    if step.clip_norm is not None:
        yield f"gradient_clip_val={step.clip_norm:g}"


def _for_hugging_face(batch: int, steps: int, step: StepSettings) -> Iterator[str]:
    yield f"per_device_train_batch_size={batch}"
    yield f"gradient_accumulation_steps={steps}"
    if step.precision in _AUTOCASTS:
        yield f"{step.precision}=True"
    if step.clip_norm is not None:
        yield f"max_grad_norm={step.clip_norm:g}"


def loop_lines(
    loss: str,
    steps: int,
    step: StepSettings,
    device: str,
    *before: str,
    model: str = "model",
    unless_plain: bool = False,
) -> Iterator[str]:
    """Yield a loop over ``loader`` that computes ``loss``, after the lines ``before``, and trains ``model`` by it.

    ``unless_plain``: yield nothing for the loop that everybody writes, of one pass for each step of the optimizer.
    """
    autocast = _AUTOCASTS.get(step.precision)
    if unless_plain and steps == 1 and autocast is None and step.clip_norm is None:
        return
    device, scales = device.partition(":")[0], step.precision == "fp16"
    if scales:
        yield f'scaler = torch.amp.GradScaler("{device}")'
    yield f"for {'inputs, targets in loader' if steps == 1 else _NUMBERED}:"
    if autocast is not None:
        yield f'    with torch.autocast("{device}", {autocast}):'
        yield from (f"        {line}" for line in (*before, f"loss = {loss}"))
        loss = "loss"
    else:
        yield from (f"    {line}" for line in before)
    loss = loss if steps == 1 else f"{loss} / {steps}"
    whole = loss if steps == 1 else f"({loss})"
    yield f"    {f'scaler.scale({loss})' if scales else whole}.backward()"
    if steps > 1:
        yield f"    if number % {steps} == 0:"
    indent = " " * (4 if steps == 1 else 8)
    yield from (indent + line for line in _update_lines(step.clip_norm, model, scales=scales))


def _update_lines(clip_norm: float | None, model: str, *, scales: bool) -> Iterator[str]:
    """Yield how the optimizer takes its step; ``scales``: by a ``scaler``, as under ``fp16``."""
    if clip_norm is not None:
        if scales:
            yield "scaler.unscale_(optimizer)"
        yield f"torch.nn.utils.clip_grad_norm_({model}.parameters(), {clip_norm:g})"
    if scales:
        yield "scaler.step(optimizer)"
        yield "scaler.update()"
    else:
        yield "optimizer.step()"
    yield "optimizer.zero_grad()"


_NUMBERED: Final = "number, (inputs, targets) in enumerate(loader, start=1)"

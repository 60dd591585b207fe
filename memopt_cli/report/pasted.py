"""Lines to paste into a training script, with the precision, clipping and accumulation of the measured step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from memopt_cli.records import BatchProbe, ModelCall, StepSettings
from memopt_cli.text.units import format_bytes

_AUTOCASTS: Final = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_CASTS: Final = {"fp32": "model.float()", "fp64": "model.double()"}


def training_settings(
    batch: int, steps: int, step: StepSettings, device: str, call: ModelCall, over_limit: Sequence[BatchProbe] = ()
) -> Iterator[str]:
    """Yield the lines for a model that trains with ``batch``, and ``steps`` passes for each step of the optimizer.

    ``step`` is how it was measured, ``device`` where it is to train, such as ``cuda:0``, and ``call`` how it is called.
    ``over_limit``: runs that took more than the limit.  If one is of a smaller batch, the last batch of an epoch, which
    may be smaller as well, is dropped: other kernels may run, which take more workspace.
    """
    smaller = [run for run in over_limit if run.batch < batch]
    if smaller:
        took = ", ".join(f"batch {run.batch} took {format_bytes(run.allocated_peak_bytes)}" for run in smaller)
        yield f"# drop_last: a smaller last batch may exceed the limit; {took}"
    if step.precision in _CASTS:
        yield _CASTS[step.precision]
    whole = ", drop_last=True" if steps > 1 or smaller else ""  # a short last batch would weigh as much as the others
    loader = f"loader = DataLoader(dataset, batch_size={batch}, shuffle=True{whole})"
    yield "# Lightning"
    yield loader
    yield f"trainer = Trainer({', '.join(_for_lightning(steps, step))})"
    yield "# Hugging Face"
    drops = ["dataloader_drop_last=True"] if smaller else []
    yield f"arguments = TrainingArguments({', '.join([*_for_hugging_face(batch, steps, step), *drops])})"
    yield "# PyTorch"
    yield loader
    yield from loop_of(call, steps, step, device)


def loop_of(call: ModelCall, steps: int, step: StepSettings, device: str) -> Iterator[str]:
    """Yield a loop that trains the model by ``call``; nothing for one pass in full precision without clipping."""
    if steps == 1 and step.precision not in _AUTOCASTS and step.clip_norm is None:
        return
    if steps > 1 and call.may_ignore_labels:
        yield f"# 1/{steps} each: if your loss ignores labels (-100), weight each loss by its share of the others"
    output = f"model({arguments_of(call)})"
    loss = loss_in(call, output, f"loss_function({output}, targets)")
    yield from loop_lines(loss, steps, step, device, samples=samples_of(call))


def arguments_of(call: ModelCall) -> str:
    """Return the arguments of ``call`` as code: ``inputs``, or ``**batch`` for keywords."""
    positional = "inputs" if call.positional == 1 else "*inputs"
    return ", ".join([*([positional] if call.positional else []), *(["**batch"] if call.keywords else [])])


def loss_in(call: ModelCall, output: str, of_targets: str) -> str:
    """Return the loss of ``call`` as code; ``output`` and ``of_targets``: code for its output, and for a loss of it."""
    losses = {"the output": output, "an attribute": f"{output}.loss", "an entry": f"{output}[{call.entry!r}]"}
    return losses.get(call.loss, of_targets)


def samples_of(call: ModelCall) -> str:
    """Return the names of the values that the loader of a loop yields for ``call``: ``inputs, targets``."""
    names = {"inputs": call.positional > 0, "batch": call.keywords, "targets": call.loss == "of targets"}
    return ", ".join(name for name, is_used in names.items() if is_used)


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
    samples: str = "inputs, targets",
) -> Iterator[str]:
    """Yield a loop over ``loader`` that computes ``loss``, after the lines ``before``, and trains ``model`` by it.

    ``samples``: names of the values that ``loader`` yields.
    """
    autocast = _AUTOCASTS.get(step.precision)
    device, scales = device.partition(":")[0], step.precision == "fp16"
    if scales:
        yield f'scaler = torch.amp.GradScaler("{device}")'
    if steps == 1:
        yield f"for {samples} in loader:"
    else:
        yield "optimizer.zero_grad()  # before each epoch: passes may be left over from the last one"
        yield f"for number, {f'({samples})' if ',' in samples else samples} in enumerate(loader, start=1):"
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
    """Yield the lines of the optimizer step; with ``scales``, through a ``GradScaler`` (fp16)."""
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

"""How a step calls the model, and where the output holds the loss: a training loop to paste needs both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from memopt_cli.inputs.spec_text import parse_range
from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import SMALL_BATCH
from memopt_cli.measure.answers.without_data import may_need_data, step_under
from memopt_cli.measure.jobs import ORIGINAL, CallJob
from memopt_cli.records import ModelCall, TensorSpec
from memopt_cli.training.step import TrainingStep, loss_entry

_IGNORED: Final = -100
"""Label that PyTorch's losses ignore by default."""


def describe_call(bench: Bench, _: CallJob) -> ModelCall:
    """Describe the call of the model by a forward without data, or of a few samples if the model needs data."""
    draws_ignored = any(map(_draws_ignored, bench.subject.spec.tensors))
    try:
        with step_under(bench, ORIGINAL) as fake:
            return _call_of(fake.step, draws_ignored=draws_ignored)
    except Exception as error:  # the model's own code
        if bench.subject.data == "none" or not may_need_data(error):
            raise
    return _call_of(bench.step(min(SMALL_BATCH, bench.batch)), draws_ignored=draws_ignored)


def _draws_ignored(tensor: TensorSpec) -> bool:
    """Return whether the values of ``tensor`` are integers, some of them -100."""
    bounds = parse_range(tensor.values) if tensor.dtype == "int64" else None
    return bounds is not None and (bounds[0] == _IGNORED or _IGNORED in range(*bounds[1:]))


def _call_of(step: TrainingStep, *, draws_ignored: bool) -> ModelCall:
    call = ModelCall(positional=len(step.args), keywords=bool(step.kwargs), draws_ignored=draws_ignored)
    if step.loss is not None:
        return call
    output = step.forward()
    return _with_loss(call, output, loss_entry(output))


def _with_loss(call: ModelCall, output: Any, loss: Any) -> ModelCall:
    """Return ``call`` with the place of ``loss`` in ``output``; unchanged if ``loss`` lies deeper, or is ``None``."""
    if loss is None:
        return call
    if output is loss:
        return replace(call, loss="the output")
    if getattr(output, "loss", None) is loss:
        return replace(call, loss="an attribute")
    is_indexed = isinstance(output, list | tuple)
    entries = output.items() if isinstance(output, Mapping) else enumerate(output if is_indexed else ())
    keys = (key for key, value in entries if value is loss and isinstance(key, str | int))
    return next((replace(call, loss="an entry", entry=key) for key in keys), call)

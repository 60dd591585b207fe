"""How a step calls the model, and where the output holds the loss: a training loop to paste needs both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memopt_cli.measure.answers.bench import Bench
from memopt_cli.measure.answers.small_step import SMALL_BATCH
from memopt_cli.measure.answers.without_data import may_need_data, step_under
from memopt_cli.measure.jobs import ORIGINAL, CallJob
from memopt_cli.records import ModelCall
from memopt_cli.training.step import Step, loss_entry


def describe_call(bench: Bench, _: CallJob) -> ModelCall:
    """Describe the call of the model by a forward without data, or of a few samples if the model needs data."""
    try:
        with step_under(bench, ORIGINAL) as fake:
            return _call_of(fake.step)
    except Exception as error:  # the model's own code
        if bench.subject.data == "none" or not may_need_data(error):
            raise
    return _call_of(bench.step(min(SMALL_BATCH, bench.batch)))


def _call_of(step: Step) -> ModelCall:
    call = ModelCall(positional=len(step.args), keywords=bool(step.kwargs))
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

"""The inputs of every module in a single forward, for level 1 of SpikingJelly's calls, which records no whole step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt_cli.records import ModuleTrace
from memopt_cli.runtime import find_part
from memopt_cli.runtime.compressor import OWN_COMPRESSOR, OwnCompressor
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.compressor_choice import ContentsReader
from memopt_cli.trace.log import StorageLog, active, module_stack
from memopt_cli.trace.modules import ModuleNotes, requested_compressor, taking_notes
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.step import TrainingStep


def record_inputs(step: TrainingStep) -> tuple[ModuleTrace, ...]:
    """Record the modules called in one forward of ``step``, each with the compressor that holds its inputs exactly.

    The forward advances the model's state.  It runs without gradients, so the records have no saved bytes.
    """
    notes: dict[str, ModuleNotes] = {}
    with (
        torch.no_grad(),
        module_stack(step.unwrapped_model) as running,
        active(log := StorageLog(running), step),
        taking_notes(step.unwrapped_model, log, notes, ContentsReader(log)),
    ):
        step.forward()
    return tuple(
        note.to_record(path, find_part(step.unwrapped_model, path), order, saved_bytes=0)
        for order, (path, note) in enumerate(notes.items())
    )


def compressors_failing_on_zeros(step: TrainingStep) -> dict[str, str]:
    """Return how each ``x_compressor`` fails on zeros with the shape and dtype of its module's inputs, by module path.

    Every compressor can hold zeros, so a compressor that fails on them fits no input of this shape and dtype.  The
    forward that is run for this advances the model's state.
    """
    reason_by_path: dict[str, str] = {}

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        if requested_compressor(module) == OWN_COMPRESSOR:
            compressor = OwnCompressor(module.x_compressor)  # type: ignore[arg-type]
            reasons = (compressor.why_inexact(torch.zeros_like(tensor)) for tensor in tensors_of(inputs))
            reason_by_path.setdefault(path, next(filter(None, reasons), ""))

    with torch.no_grad(), module_hooks(step.model, enter, lambda *_: None):
        step.forward()
    return {path: reason for path, reason in reason_by_path.items() if reason}

"""What goes into each module: a forward alone, at the cost of a forward."""

from __future__ import annotations

import torch

from memopt_cli.records import ModuleTrace
from memopt_cli.runtime import find_part
from memopt_cli.step import Step
from memopt_cli.trace.contents import Contents
from memopt_cli.trace.log import StorageLog, active, module_stack
from memopt_cli.trace.modules import ModuleNotes, taking_notes


def record_inputs(step: Step) -> tuple[ModuleTrace, ...]:
    """The modules that one forward calls, their inputs looked into for the codec that holds them exactly.

    The model's state advances.  Nothing is kept for backward, so no bytes are saved.
    """
    notes: dict[str, ModuleNotes] = {}
    with (
        torch.no_grad(),
        module_stack(step.named) as running,
        active(log := StorageLog(running), step),
        taking_notes(step.named, log, notes, Contents(log)),
    ):
        step.forward()
    return tuple(
        note.to_record(path, find_part(step.named, path), order, saved_bytes=0)
        for order, (path, note) in enumerate(notes.items())
    )

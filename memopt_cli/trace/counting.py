"""The count of one step: its peaks, on real or fake tensors, and which modules hold the bytes at the peak.

On fake tensors this is the dry run, by which a search decides on a plan.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable

from memopt_cli.records import ModuleShare, StepPeaks, StepTrace, StorageTrace, break_down
from memopt_cli.runtime.places.interface import counted_elsewhere
from memopt_cli.runtime.stand_ins import StandIns
from memopt_cli.trace.log import Compressors, StorageLog, active, module_stack, packed_as, resident_bytes, run_step
from memopt_cli.trace.storages import Storage
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import TrainingStep

Life = tuple[int, int, int | None]
"""Bytes of a storage, the operator that made it (-1 if it existed before the step), and the first operator that ran
without it (``None`` if it outlives the step)."""
AllocatedPeak = Callable[[Iterable[Life]], int]
"""Function that returns the maximum bytes that an allocator takes for storages with lives in the order of birth."""


def count_step(
    step: TrainingStep,
    workspaces: Workspaces | None = None,
    compressors: Compressors | None = None,
    allocated: AllocatedPeak | None = None,
    stand_ins: StandIns | None = None,
) -> StepPeaks:
    """Run one ``step`` under the counter of storages, and remove its gradients.

    ``compressors`` pack tensors without data.  ``allocated`` computes the allocated peak of another device.  With
    ``stand_ins``, only the first and last of many equal chunks run; the bytes of all others count for the module in
    chunks, and not for its parts.
    """
    step.reset_gradients()
    with module_stack(step.unwrapped_model) as running:
        log = StorageLog(running, workspaces)
        few_chunks = (
            stand_ins.counting(lambda: log.storages.live_bytes) if stand_ins is not None else contextlib.nullcontext()
        )
        with packed_as(log, compressors), active(log, step), few_chunks, counted_elsewhere() as elsewhere:
            run_step(step, log)
    resident = resident_bytes(step)
    step.model.zero_grad(set_to_none=True)
    outlive_an_operator = (s for s in log.storages.made if s.nbytes and (s.died is None or s.died >= s.born))
    lives = [(s.nbytes, s.born - 1, s.died) for s in outlive_an_operator]  # ``born`` counts from 1, operators from 0
    return StepPeaks(
        tensor_peak_bytes=log.peaks.tensor_bytes,
        allocated_peak_bytes=allocated(lives) if allocated else log.peaks.allocated_bytes,
        resident_bytes=resident,
        breakdown=break_down((s.kind, s.nbytes) for s in log.storages.alive_at(log.peaks.tensor_tick)),
        holders=_bytes_by_module(log.storages.alive_at(log.peaks.allocated_tick)),
        phases=tuple(log.peaks.phases.values()),
        collectives=log.collectives.records(),
        operators=log.storages.tick,
        elsewhere_bytes=elsewhere.peak_bytes,
    )


def match_compressors(trace: StepTrace, dry_run: StepTrace) -> Compressors:
    """Return the compressors of storages and inputs that packed to fewer bytes in ``trace``, for use in a dry run.

    A module whose forward makes its storages by other operators in ``dry_run`` is left out.
    """
    real, dry = _made_in_forward(trace), _made_in_forward(dry_run)
    paths = (path for path in real.keys() & dry.keys() if [op for op, _ in real[path]] == [op for op, _ in dry[path]])
    saved = {(path, n): s.compressor for path in paths for n, (_, s) in enumerate(real[path]) if s.compressor != "null"}
    inputs = {m.path: m.packed_input_bytes / m.input_bytes for m in trace.modules if m.compressor != "null"}
    return Compressors(saved=saved, outputs=_output_compressors(trace), inputs=inputs)


def _output_compressors(trace: StepTrace) -> dict[tuple[str, int], str]:
    """Return the compressor of each output that has the same in every call, by module path and index of the output."""
    compressors: dict[tuple[str, int], set[str]] = defaultdict(set)
    for call in trace.calls:
        for number, index in enumerate(call.outputs):
            compressors[call.path, number].add(trace.storages[index].compressor)
    return {
        key: compressor for key, (compressor, *further) in compressors.items() if not further and compressor != "null"
    }


def _made_in_forward(trace: StepTrace) -> dict[str, list[tuple[str, StorageTrace]]]:
    """Return the storages that each module's forward makes, in order, with their operators' names, by module path."""
    storages_by_path: dict[str, list[tuple[str, StorageTrace]]] = defaultdict(list)
    for storage in trace.storages:
        if storage.born >= 0 and trace.ops[storage.born].phase == "forward":
            storages_by_path[storage.module].append((trace.ops[storage.born].name, storage))
    return storages_by_path


def _bytes_by_module(storages: Iterable[Storage]) -> tuple[ModuleShare, ...]:
    bytes_by_path: dict[str, int] = defaultdict(int)
    for s in storages:
        if s.kind in ("activations", "temporaries"):
            bytes_by_path[s.path] += s.nbytes
    ordered = sorted(bytes_by_path.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ModuleShare(path=path, held_bytes=nbytes) for path, nbytes in ordered)

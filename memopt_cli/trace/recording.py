"""The recording of one training step as a :class:`StepTrace`: its operators in order, storages, and calls of modules.

``record`` takes the step under a :class:`~memopt_cli.trace.step_log.StepLog`, which notes what happens; the rest of
this file turns the notes into records.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.records import ModuleCall, ModuleTrace, OpTrace, StepTrace, StorageTrace, ancestry
from memopt_cli.runtime import find_part
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.runtime.state import StartingState
from memopt_cli.trace.compressor_choice import ContentsReader, with_parts
from memopt_cli.trace.log import Compressors, StorageLog, active, module_stack, packed_as, resident_bytes, run_step
from memopt_cli.trace.modules import ModuleNotes, taking_notes
from memopt_cli.trace.step_log import StepLog
from memopt_cli.trace.storages import Storage
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.own_step import OwnStep
from memopt_cli.training.step import TrainingStep


def record(
    step: TrainingStep,
    batch: int,
    *,
    contents: bool,
    frees: bool = True,
    workspaces: Workspaces | None = None,
    compressors: Compressors | None = None,
) -> StepTrace:
    """Record one ``step`` of ``batch`` samples; the model's state is restored, and its gradients are removed.

    With ``contents`` (not on fake tensors), the values of every module's inputs and of saved tensors are examined for
    the compressor that holds them exactly.  With ``frees``, forward runs once more without autograd, to learn when the
    model itself releases each storage; otherwise the last use in forward counts.  ``workspaces`` were measured in a
    step with data.  ``compressors`` pack tensors without data.
    """
    step.model.zero_grad(set_to_none=True)
    before, start = ModuleState(step.model), StartingState(step.model)
    start.restore()  # gives the model copies: the step can free its state although ``start`` holds the originals
    step.reset_gradients()  # only now, so that nothing here keeps the gradients alive: a user's own step may free them
    notes: dict[str, ModuleNotes] = {}
    with module_stack(step.unwrapped_model) as running:
        log = StepLog(running, workspaces)
        examiner = ContentsReader(log) if contents else None
        with (
            packed_as(log, compressors),
            active(log, step),
            taking_notes(step.unwrapped_model, log, notes, examiner),
            log.watching(step.unwrapped_model, examiner),
        ):
            run_step(step, log)
    resident = resident_bytes(step)
    step.model.zero_grad(set_to_none=True)
    start.restore()  # the forward in _lives_without_autograd begins with the same state
    records = _Records(log)
    is_own = isinstance(step, OwnStep)
    freed = records.freed(_lives_without_autograd(step)) if frees and not is_own else records.last_uses()
    before.restore()
    saved = records.saved_bytes()
    ops = records.op_records()
    return StepTrace(
        modules=(
            *([_own_root(saved[""])] if is_own else []),
            *(
                note.to_record(path, find_part(step.unwrapped_model, path), order, saved[path])
                for order, (path, note) in enumerate(notes.items(), is_own)
            ),
        ),
        tensor_peak_bytes=log.peaks.tensor_bytes,
        allocated_peak_bytes=max(log.peaks.tensor_bytes, log.peaks.allocated_bytes),
        resident_bytes=resident,
        batch=batch,
        ops=ops,
        storages=with_parts(ops, records.storage_records(freed)),
        calls=records.call_records(),
    )


def _own_root(saved_bytes: int) -> ModuleTrace:
    """Return the root's entry for a user's own step, which runs no module around its models."""
    reason = "the step runs its models one by one"
    return ModuleTrace(path="", class_name="Step", calls=1, order=0, saved_bytes=saved_bytes, refusal=reason)


def _lives_without_autograd(step: TrainingStep) -> list[tuple[int, int, int | None]]:
    """Run a forward in which autograd saves nothing; return birth, bytes and death of its storages."""
    with (
        module_stack(step.unwrapped_model) as running,
        active(log := StorageLog(running), step),
        saved_tensors_hooks(lambda _: None, _nothing_saved),
    ):
        output = step.forward()
        lives = [(s.born, s.nbytes, s.died) for s in log.storages.made]
        del output
    return lives


def _nothing_saved(_: None) -> Tensor:
    raise AssertionError("this forward has no backward")


class _Records:
    """Makes records, with indices of operators, from a log in ticks: operator n runs between the ticks n and n + 1."""

    def __init__(self, log: StepLog) -> None:
        self._log = log

    def saved_bytes(self) -> dict[str, int]:
        """Return the bytes made in or below each module that were alive at the end of the model's forward, by path."""
        total: dict[str, int] = defaultdict(int)
        for s in self._log.storages.made:
            if s.kind == "activations" and (end := self._log.forward_end(s)) and not _is_dead(s, end):
                for path in ancestry(s.path):
                    total[path] += s.nbytes
        return total

    def freed(self, lives: list[tuple[int, int, int | None]]) -> list[int | None]:
        """Return for each storage the tick at which the model itself released it.

        ``lives`` come from a forward in which autograd saved nothing.  If its storages differ from the recorded
        forward, the last uses in forward are returned instead.
        """
        births = [(s.born, s.nbytes) for s in self._log.storages.made[: len(lives)]]
        if births != [(born, nbytes) for born, nbytes, _ in lives]:
            return self.last_uses()
        ends = dict(enumerate(died for *_, died in lives))
        return [s.died if ends.get(s.index) is None else ends[s.index] for s in self._log.storages.made]

    def last_uses(self) -> list[int | None]:
        """Return for each storage that autograd saves the tick of its last use in forward; for others, of their death.

        For a user's own step nothing better is known, since it cannot run without autograd.
        """
        log = self._log
        ran = ((tick, op.record) for tick, op in enumerate(log.ops[: log.last_forward_end], 1))
        uses = {index: tick for tick, op in ran if op.phase == "forward" for index in op.reads}
        saved = {s.index for s in log.storages.made if s.born > 0 and s.index in log.savers and log.forward_end(s)}
        return [max(uses.get(s.index, 0), s.born) if s.index in saved else s.died for s in log.storages.made]

    def op_records(self) -> tuple[OpTrace, ...]:
        """Return a record of every operator of the step; :func:`with_seconds` adds the seconds later."""
        results: dict[int, list[int]] = defaultdict(list)
        for s in self._log.storages.made:
            results[s.born - 1].append(s.index)
        return tuple(replace(op.record, makes=tuple(results[index])) for index, op in enumerate(self._log.ops))

    def storage_records(self, freed: list[int | None]) -> tuple[StorageTrace, ...]:
        """Return a record of every storage; ``freed`` has the ticks at which the model itself released them."""
        return tuple(self._storage_record(s, tick) for s, tick in zip(self._log.storages.made, freed, strict=True))

    def _storage_record(self, s: Storage, freed: int | None) -> StorageTrace:
        # A storage that dies in forward is in no graph at its end, though autograd saved it: its graph was dropped.
        end = self._log.forward_end(s)
        nodes = () if end and _is_dead(s, end - 1) else self._log.savers.get(s.index, ())
        savers = (self._log.op_of_node.get(node) for node in nodes)
        compressor, packed = self._log.packed.get(s.index, ("null", s.nbytes))
        return StorageTrace(
            nbytes=s.nbytes,
            kind=s.kind,
            module=self._log.ops[s.born - 1].record.module if s.born else s.path,
            born=s.born - 1,
            died=self._first_operator_after(s.died),
            freed=self._first_operator_after(freed),
            saved_by=tuple(sorted({op for op in savers if op is not None})),
            compressor=compressor,
            packed_bytes=packed,
            fixed_bytes=self._log.fixed_bytes.get(s.index, ()),
        )

    def _first_operator_after(self, tick: int | None) -> int | None:
        return tick if tick is not None and tick < len(self._log.ops) else None

    def call_records(self) -> tuple[ModuleCall, ...]:
        """Return a record of every call of a module in forward, with the range of its backward."""
        for index, op in enumerate(self._log.ops):
            number = -1 if op.call is None else op.call
            while number >= 0:  # the operator is part of the backward of this call, and of the enclosing ones
                call = self._log.calls[number]
                call.backward = range(call.backward.start if call.backward else index, index + 1)
                number = call.caller
        return tuple(
            ModuleCall(
                path=call.path,
                start=call.start,
                end=call.end,
                backward_start=call.backward.start,
                backward_end=call.backward.stop,
                inputs=call.inputs,
                outputs=call.outputs,
            )
            for call in self._log.calls
        )


def _is_dead(storage: Storage, tick: int) -> bool:
    return storage.died is not None and storage.died <= tick

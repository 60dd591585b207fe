"""One training step as a :class:`StepTrace`: operators in order, storages with their lives, calls of modules.

In backward an operator belongs to the module whose forward it differentiates.  Autograd numbers the nodes of its graph
in the order in which forward makes them; the numbers at which modules begin and end tell the module of a node.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.records import CompressorName, ModuleCall, OpTrace, Phase, StepTrace, StorageTrace
from memopt_cli.runtime import find_part
from memopt_cli.runtime.container import recomputing_module
from memopt_cli.runtime.private_torch import next_node, number_of, running_node, tree_leaves
from memopt_cli.runtime.state import ModuleState, StartingState
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.step import Step, module_hooks, reset_gradients
from memopt_cli.trace.contents import Contents, aside
from memopt_cli.trace.log import (
    Codecs,
    Storage,
    StorageLog,
    active,
    module_stack,
    packed_as,
    resident_bytes,
    run_step,
    shapes_of,
)
from memopt_cli.trace.modules import ModuleNotes, ancestry, taking_notes
from memopt_cli.trace.operators import draws, flops_of, modified, name_of
from memopt_cli.workspace import Workspaces


def record(
    step: Step,
    batch: int,
    *,
    contents: bool,
    frees: bool = True,
    workspaces: Workspaces | None = None,
    codecs: Codecs | None = None,
) -> StepTrace:
    """Record one step from the gradients that it is to find, and leave the model's state as it was, without them.

    ``contents``: look into the inputs of every module and into what autograd saves for the codec that holds them
    exactly (not on fake tensors).  ``frees``: run forward once more to learn when it lets go of each storage by itself.
    ``workspaces``: what the kernels were seen to take.  ``codecs``: what tensors without data are packed in.
    """
    reset_gradients(step)
    before, start = ModuleState(step.model), StartingState(step.model)
    start.enter()  # copies take the place of the tensors that are held here
    notes: dict[str, ModuleNotes] = {}
    with module_stack(step.model) as running:
        log = StepLog(running, workspaces)
        looking = Contents(log) if contents else None
        with (
            packed_as(log, codecs),
            active(log, step),
            taking_notes(step.model, log, notes, looking),
            log.watching(step.model, looking),
        ):
            run_step(step, log)
    resident = resident_bytes(step)
    step.model.zero_grad(set_to_none=True)
    start.enter()
    freed = log.freed(_lives_without_autograd(step) if frees else [])
    before.restore()
    saved = log.saved_bytes()
    return StepTrace(
        modules=tuple(
            note.to_record(path, find_part(step.model, path), order, saved[path])
            for order, (path, note) in enumerate(notes.items())
        ),
        tensor_peak_bytes=log.peak_bytes,
        allocated_peak_bytes=max(log.peak_bytes, log.allocated_peak_bytes),
        resident_bytes=resident,
        batch=batch,
        ops=log.op_records(),
        storages=log.storage_records(freed),
        calls=log.call_records(),
    )


def _lives_without_autograd(step: Step) -> list[tuple[int, int, int | None]]:
    """Birth, bytes and death of the storages of a forward of which autograd keeps nothing; same kernels as with it."""
    with (
        module_stack(step.model) as running,
        active(log := StorageLog(running), step),
        saved_tensors_hooks(lambda _: None, _nothing_saved),
    ):
        output = step.forward()
        lives = [(s.born, s.nbytes, s.died) for s in log.storages]
        del output
    return lives


def _nothing_saved(_: None) -> Tensor:
    raise AssertionError("this forward has no backward")


@dataclass(slots=True)
class _Call:
    path: str
    caller: int
    """Index of the call it was made in; -1: none."""
    start: int
    inputs: tuple[int, ...]
    end: int = 0
    outputs: tuple[int, ...] = ()
    backward: range = range(0)


@dataclass(slots=True)
class _Op:
    name: str
    phase: Phase
    module: str
    call: int | None
    """The call whose forward it differentiates (-1: one outside of modules); ``None`` in forward."""
    reads: tuple[int, ...]
    mutates: tuple[int, ...]
    random: bool
    flops: int
    workspace_bytes: int
    fixed_workspace_bytes: int


class StepLog(StorageLog):  # type: ignore[no-untyped-call]
    """The counter of storages, with notes on every operator, every call of a module and what autograd saves."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None) -> None:
        super().__init__(module_running, workspaces)
        self._contents: Contents | None = None
        self._ops: list[_Op] = []
        self._calls: list[_Call] = []
        self._innermost = -1
        self._turns: list[tuple[int, int]] = [(0, -1)]
        """From which node of autograd on which call was the innermost."""
        self._op_of_node: dict[int, int] = {}
        self._savers: dict[int, dict[int, None]] = defaultdict(dict)
        """Storage -> the nodes that hold it."""
        self._packed: dict[int, tuple[CompressorName, int]] = {}
        self._forward_ops = 0

    # ------------------------------------------------------------------------------------------ while it runs

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, workspace_bytes: int) -> None:
        phase, call = self._whence()
        module = self.module_running() if call is None else self._calls[call].path if call >= 0 else ""
        if phase == "forward":
            self._op_of_node.setdefault(next_node() - 1, len(self._ops))
        if self.phase == "forward":
            self._forward_ops += 1
        self._ops.append(
            _Op(
                name=name_of(func),
                phase=phase,
                module=module,
                call=call,
                reads=self._indices(tree_leaves((args, kwargs))),
                mutates=self._indices(modified(func, args, kwargs)),
                random=draws(func, args, kwargs),
                flops=flops_of(func, args, kwargs, output),
                workspace_bytes=workspace_bytes,
                fixed_workspace_bytes=self._fixed_bytes(func, args) if workspace_bytes else 0,
            )
        )

    def _fixed_bytes(self, func: Any, args: Any) -> int:
        return self.workspaces.fixed(name_of(func), shapes_of(args)) if self.workspaces else 0

    @contextmanager
    def watching(self, model: nn.Module, contents: Contents | None) -> Iterator[None]:
        """Note the calls of modules and what autograd saves; ``contents`` looks into that."""
        self._contents = contents

        def enter(path: str, module: nn.Module, inputs: Any) -> None:
            if self.phase == "forward":
                self._calls.append(_Call(path, self._innermost, len(self._ops), self._indices(tensors_of(inputs))))
                self._turn(len(self._calls) - 1)

        def leave(path: str, module: nn.Module, output: Any) -> None:
            if self.phase == "forward":
                call = self._calls[self._innermost]
                call.end, call.outputs = len(self._ops), self._indices(tensors_of(output))
                self._turn(call.caller)

        with module_hooks(model, enter, leave), saved_tensors_hooks(self._save, lambda alias: alias):
            yield

    def _turn(self, call: int) -> None:
        self._innermost = call
        self._turns.append((next_node(), call))

    def _whence(self) -> tuple[Phase, int | None]:
        """The phase of the operator that runs and, in backward, the call whose forward it differentiates."""
        if self.phase != "backward" or recomputing_module():
            return self.phase, None
        node = running_node()
        if node is None:  # the loss
            return "forward", None
        number = number_of(node)
        if number <= self._last_node:
            return "backward", self._turns[bisect.bisect_right(self._turns, (number, len(self._calls))) - 1][1]
        # Nodes that add a gradient to a parameter run at once when it is complete: with the operator before.
        return "backward", (self._ops[-1].call if self._ops[-1].call is not None else -1)

    @property
    def _last_node(self) -> int:
        return next(reversed(self._op_of_node), 0) + 1

    def _save(self, alias: Tensor) -> Tensor:
        """Autograd holds ``alias`` as it would hold the tensor itself: no storage lives longer for it."""
        storage = self.known(alias)
        if storage is not None and storage.kind != "parameters":
            self._savers[storage.index][next_node() - 1] = None
            if self._contents is not None and storage.index not in self._packed:
                with aside():
                    whole = (
                        alias if alias.nbytes == storage.nbytes else alias.new_empty(0).set_(alias.untyped_storage())
                    )
                self._packed[storage.index] = self._contents.codec_of_saved(whole)
        return alias

    def _indices(self, leaves: list[Any]) -> tuple[int, ...]:
        seen = (self.known(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return tuple(dict.fromkeys(storage.index for storage in seen if storage is not None))

    # ------------------------------------------------------------------------------------------ when it has run

    def saved_bytes(self) -> dict[str, int]:
        """Bytes born in a module, or below it, and alive when the model's forward had ended."""
        total: dict[str, int] = defaultdict(int)
        for s in self.storages:
            if s.kind == "activations" and s.born <= self._forward_ops and not _dead(s, self._forward_ops):
                for path in ancestry(s.path):
                    total[path] += s.nbytes
        return total

    def freed(self, lives: list[tuple[int, int, int | None]]) -> list[int | None]:
        """When forward itself let go of each storage, in ticks.

        ``lives``: the same forward when autograd keeps nothing.  If it ran otherwise, the last use in forward counts.
        """
        same = [(s.born, s.nbytes) for s in self.storages[: len(lives)]] == [(born, size) for born, size, _ in lives]
        ends = dict(enumerate(died for *_, died in lives)) if same else self._last_uses()
        return [s.died if ends.get(s.index) is None else ends[s.index] for s in self.storages]

    def _last_uses(self) -> dict[int, int | None]:
        born = {s.index: s.born for s in self.storages if 0 < s.born <= self._forward_ops}
        uses = {index: op for op, ran in enumerate(self._ops[: self._forward_ops], 1) for index in ran.reads}
        return {index: max(uses.get(index, 0), tick) for index, tick in born.items()}

    def op_records(self) -> tuple[OpTrace, ...]:
        """Every operator of the step; ``seconds`` are not known here."""
        made: dict[int, list[int]] = defaultdict(list)
        for s in self.storages:
            made[s.born - 1].append(s.index)
        return tuple(
            OpTrace(
                name=op.name,
                module=op.module,
                phase=op.phase,
                reads=op.reads,
                makes=tuple(made[index]),
                mutates=op.mutates,
                random=op.random,
                flops=op.flops,
                workspace_bytes=op.workspace_bytes,
                fixed_workspace_bytes=op.fixed_workspace_bytes,
            )
            for index, op in enumerate(self._ops)
        )

    def storage_records(self, freed: list[int | None]) -> tuple[StorageTrace, ...]:
        """Every storage; instants in ticks become operators: the n-th runs between ticks n and n + 1."""
        return tuple(self._storage_record(s, tick) for s, tick in zip(self.storages, freed, strict=True))

    def _storage_record(self, s: Storage, freed: int | None) -> StorageTrace:
        # A graph that ended in forward, its output being dropped, holds nothing.
        nodes = () if _dead(s, self._forward_ops - 1) else self._savers.get(s.index, ())
        savers = (self._op_of_node.get(node) for node in nodes)
        compressor, packed = self._packed.get(s.index, ("null", s.nbytes))
        return StorageTrace(
            nbytes=s.nbytes,
            kind=s.kind,
            module=self._ops[s.born - 1].module if s.born else s.path,
            born=s.born - 1,
            died=self._end_of(s.died),
            freed=self._end_of(freed),
            saved_by=tuple(sorted({op for op in savers if op is not None})),
            compressor=compressor,
            packed_bytes=packed,
        )

    def _end_of(self, tick: int | None) -> int | None:
        return tick if tick is not None and tick < len(self._ops) else None

    def call_records(self) -> tuple[ModuleCall, ...]:
        """Every call of a module in forward."""
        for index, op in enumerate(self._ops):
            call = -1 if op.call is None else op.call
            while call >= 0:
                known = self._calls[call]
                known.backward = range(known.backward.start if known.backward else index, index + 1)
                call = known.caller
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
            for call in self._calls
        )


def _dead(storage: Storage, tick: int) -> bool:
    return storage.died is not None and storage.died <= tick

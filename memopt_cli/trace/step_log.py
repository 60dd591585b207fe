"""Notes on one training step while it runs: its operators, its calls of modules, and its saved tensors.

The hard part is to tell which module an operator of backward belongs to.  Autograd numbers the nodes of its graph in
the order in which forward makes them, and this log notes the next number whenever a module begins or ends::

    call of           a      a.b     a             the innermost module that is running
    begins at node    0      3       7             node 5 was made in a.b, so when backward runs it, that is a.b's
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.records import CompressorName, OpTrace, Phase
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.compressor import makes_internal_tensors
from memopt_cli.runtime.private_torch import is_fake, next_node, running_node, sequence_number, tree_leaves, walk_parts
from memopt_cli.runtime.running import recomputing_module
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.compressor_choice import ContentsReader, outside_of_step
from memopt_cli.trace.lines import line_of_the_model
from memopt_cli.trace.log import StorageLog, shapes_of
from memopt_cli.trace.operators import count_flops, find_dtype, is_random, operator_name, written_tensors
from memopt_cli.trace.recurrent import fixed_bytes
from memopt_cli.trace.storages import Storage
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.module_calls import module_hooks

GREW: Final = "storage::resize_"
"""Name in the log for a resize that gives a storage bytes: it is noted like an operator."""
_RECURRENT: Final = torch.ops.aten.mkldnn_rnn_layer.default


@dataclass(slots=True)
class CalledModule:
    """One call of a module in forward."""

    path: str
    caller: int
    """Index of the enclosing call; -1 if there is none."""
    start: int
    """First operator of its forward."""
    inputs: tuple[int, ...]
    """Storages of its inputs."""
    end: int = 0
    """Operator after the last of its forward."""
    outputs: tuple[int, ...] = ()
    """Storages of its outputs."""
    backward: range = range(0)
    """Operators of its backward; empty if it has none."""


@dataclass(slots=True)
class LoggedOp:
    """One operator of the step."""

    record: OpTrace
    """Record of the operator; the storages that it makes are added once the step has ended."""
    call: int | None
    """In backward, index of the differentiated call (-1 outside modules); ``None`` outside backward."""


class StepLog(StorageLog):
    """Counts storages as its base does, and notes every operator, module call and saved tensor."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None) -> None:
        super().__init__(module_running, workspaces)
        self._contents: ContentsReader | None = None
        self.ops: list[LoggedOp] = []
        self.calls: list[CalledModule] = []
        self._innermost = -1
        """Index of the innermost call that is running; -1 outside calls."""
        self._path_of: dict[int, str] = {}
        self._call_from_node: list[tuple[int, int]] = [(0, -1)]
        """Pairs of a node's number and the innermost call from that node on, in order."""
        self.op_of_node: dict[int, int] = {}
        """Number of a node of autograd -> the forward operator that made it."""
        self.savers: dict[int, dict[int, None]] = defaultdict(dict)
        """Storage -> numbers of the nodes of autograd that hold it, in order (a dictionary as an ordered set)."""
        self.packed: dict[int, tuple[CompressorName, int]] = {}
        """Storage that autograd saves -> its compressor and its packed bytes."""
        self._forward_ends: list[int] = []
        """Number of operators that had run at the end of each forward; a user's own step has several."""
        self.fixed_bytes: dict[int, tuple[tuple[int, int], ...]] = {}
        """Storage -> :attr:`~memopt_cli.records.StorageTrace.fixed_bytes`."""

    def note_operator(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, workspace_bytes: int) -> None:
        phase, call = self._phase_and_call()
        path_of_call = self.calls[call].path if call is not None and call >= 0 else ""
        module = self.module_running() if call is None else path_of_call
        if phase == "forward":
            self.op_of_node.setdefault(next_node() - 1, len(self.ops))
        # Only in a step without data: to learn these bytes, the layer is run, which a measured step would count.
        if self.phase == "forward" and func is _RECURRENT and is_fake(output[3]):
            self.fixed_bytes |= dict.fromkeys(self._indices([output[3]]), fixed_bytes(args))
        arguments = tree_leaves((args, kwargs))
        fixed = (
            self.workspaces.fixed(operator_name(func), shapes_of(args)) if self.workspaces and workspace_bytes else 0
        )
        tensors = [leaf for leaf in (*arguments, *tree_leaves(output)) if isinstance(leaf, Tensor)]
        bytes_pairs = ((t.nbytes, storage.nbytes) for t in tensors if (storage := self.find_storage(t)) is not None)
        record = OpTrace(
            name=operator_name(func),
            phase=phase,
            module=module,
            reads=self._indices(arguments),
            mutates=self._indices(written_tensors(func, args, kwargs)),
            random=is_random(func, args, kwargs),
            flops=count_flops(func, args, kwargs, output),
            dtype=find_dtype(arguments),
            moved_bytes=sum(map(min, bytes_pairs)),  # an expanded tensor counts as its storage at most
            workspace_bytes=workspace_bytes,
            fixed_workspace_bytes=fixed,
            line=line_of_the_model() if self.phase == "forward" else "",
            recomputes=self._path_of.get(id(recomputing_module())),
            packs=makes_internal_tensors(),
        )
        self.ops.append(LoggedOp(record, call))

    def note_resize(self, nbytes: int) -> None:
        phase, call = self._phase_and_call()
        self.ops.append(LoggedOp(OpTrace(name=GREW, phase=phase, module=self.module_running()), call))

    def enter(self, phase: Phase) -> None:
        if phase == "backward":
            self._forward_ends.append(len(self.ops))
        super().enter(phase)

    def forward_end(self, storage: Storage) -> int:
        """Return the number of operators run by the end of the forward that made ``storage``; 0 if no forward did."""
        index = bisect.bisect_left(self._forward_ends, storage.born)
        is_of_forward = not storage.born or self.ops[storage.born - 1].record.phase == "forward"
        return self._forward_ends[index] if is_of_forward and index < len(self._forward_ends) else 0

    @property
    def last_forward_end(self) -> int:
        """Number of operators that had run at the end of the last forward."""
        return self._forward_ends[-1]

    @contextmanager
    def watching(self, model: nn.Module, contents: ContentsReader | None) -> Iterator[None]:
        """Note module calls and saved tensors in the ``with`` block; ``contents`` chooses their compressors."""
        self._contents = contents
        self._path_of = {id(module): path for path, module in named_parts(model)}

        def enter(path: str, module: nn.Module, inputs: Any) -> None:
            if self.phase == "forward":
                self.calls.append(CalledModule(path, self._innermost, len(self.ops), self._indices(tensors_of(inputs))))
                self._begin_call(len(self.calls) - 1)

        def leave(path: str, module: nn.Module, output: Any) -> None:
            if self.phase == "forward":
                call = self.calls[self._innermost]
                storages = filter(None, map(self.find_storage, tensors_of(output)))
                call.end, call.outputs = len(self.ops), tuple(storage.index for storage in storages)
                self._begin_call(call.caller)

        with (
            module_hooks(model, enter, leave, always_leave=True),
            saved_tensors_hooks(self._note_saved, lambda alias: alias),
        ):
            yield

    def _begin_call(self, call: int) -> None:
        self._innermost = call
        self._call_from_node.append((next_node(), call))

    def _phase_and_call(self) -> tuple[Phase, int | None]:
        """Return the phase of the running operator and, in backward, the call whose forward it differentiates."""
        if self.phase != "backward" or recomputing_module():
            return self.phase, None
        node = running_node()
        if node is None:  # no node runs: backward has not begun, and this is the loss
            return "forward", None
        number = sequence_number(node)
        if number <= next(reversed(self.op_of_node), 0) + 1:  # up to the last node of forward
            index = bisect.bisect_right(self._call_from_node, (number, len(self.calls))) - 1
            return "backward", self._call_from_node[index][1]
        # AccumulateGrad, which adds a gradient to a parameter, has a number above all others.  It runs as soon as the
        # gradient is complete, so it belongs to the same call as the operator before it.
        return "backward", (self.ops[-1].call if self.ops[-1].call is not None else -1)

    def _note_saved(self, alias: Tensor) -> Tensor:
        """Note that autograd saves ``alias``, and return it unchanged, so that no storage lives longer than usual."""
        storage = self.find_storage(alias)
        if storage is not None and storage.kind != "parameters":
            self.savers[storage.index][next_node() - 1] = None
            if self._contents is not None and storage.index not in self.packed:
                part = next(walk_parts(alias))
                with outside_of_step():
                    whole = part if part.nbytes == storage.nbytes else part.new_empty(0).set_(part.untyped_storage())
                self.packed[storage.index] = self._contents.compressor_of_saved(whole)
        return alias

    def _indices(self, leaves: list[Any]) -> tuple[int, ...]:
        storages = (self.find_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return tuple(dict.fromkeys(storage.index for storage in storages if storage is not None))

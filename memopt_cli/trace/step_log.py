"""Notes on one training step while it runs: its operators, its calls of modules, and what autograd saves."""

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

from memopt_cli.records import CompressorName, Phase
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.compressor import is_beside_the_model
from memopt_cli.runtime.private_torch import is_fake, next_node, number_of, parts_of, running_node, tree_leaves
from memopt_cli.runtime.running import recomputing_module
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.contents import Contents, aside
from memopt_cli.trace.lines import line_of_the_model
from memopt_cli.trace.log import StorageLog, shapes_of
from memopt_cli.trace.operators import draws, dtype_of, flops_of, modified, name_of
from memopt_cli.trace.recurrent import fixed_bytes
from memopt_cli.trace.storages import Storage
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.module_calls import module_hooks

GREW: Final = "storage::resize_"
"""Name that stands for an operator where a resize gives a storage bytes."""
_RECURRENT: Final = torch.ops.aten.mkldnn_rnn_layer.default


@dataclass(slots=True)
class CalledModule:
    """One call of a module in forward; instants are numbers of operators."""

    path: str
    caller: int
    """Index of the call that made it; -1 for none."""
    start: int
    inputs: tuple[int, ...]
    end: int = 0
    outputs: tuple[int, ...] = ()
    backward: range = range(0)


@dataclass(slots=True)
class RanOp:
    """One operator of the step."""

    name: str
    phase: Phase
    module: str
    call: int | None
    """Index of the call whose forward it differentiates, -1 for operators outside of modules; ``None`` in forward."""
    reads: tuple[int, ...]
    mutates: tuple[int, ...]
    random: bool
    flops: int
    dtype: str
    moved_bytes: int
    workspace_bytes: int
    fixed_workspace_bytes: int
    line: str
    recomputes: str | None = None
    """Path of the segment that is being recomputed."""
    packs: bool = False


class StepLog(StorageLog):
    """The counter of storages that also notes every operator, every call of a module, and what autograd saves."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None) -> None:
        super().__init__(module_running, workspaces)
        self._contents: Contents | None = None
        self.ops: list[RanOp] = []
        self.calls: list[CalledModule] = []
        self._innermost = -1
        self._path_of: dict[int, str] = {}
        """Id of a module -> its path."""
        self._turns: list[tuple[int, int]] = [(0, -1)]
        """Pairs of a node of autograd and the call that was the innermost from it on."""
        self.op_of_node: dict[int, int] = {}
        self.savers: dict[int, dict[int, None]] = defaultdict(dict)
        """Storage -> the nodes of autograd that hold it."""
        self.packed: dict[int, tuple[CompressorName, int]] = {}
        self._forward_ends: list[int] = []
        """Operators that had run at the end of each forward, of which a user's own step has several."""
        self.fixed_bytes: dict[int, tuple[tuple[int, int], ...]] = {}

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, workspace_bytes: int) -> None:
        phase, call = self._whence()
        module = self.module_running() if call is None else self.calls[call].path if call >= 0 else ""
        if phase == "forward":
            self.op_of_node.setdefault(next_node() - 1, len(self.ops))
        # Only in a step without data: finding out runs the layer, which a measurement would see.
        if self.phase == "forward" and func is _RECURRENT and is_fake(output[3]):
            self.fixed_bytes |= dict.fromkeys(self._indices([output[3]]), fixed_bytes(args))
        given = tree_leaves((args, kwargs))
        fixed = self.workspaces.fixed(name_of(func), shapes_of(args)) if self.workspaces and workspace_bytes else 0
        self.ops.append(
            RanOp(
                name=name_of(func),
                phase=phase,
                module=module,
                call=call,
                reads=self._indices(given),
                mutates=self._indices(modified(func, args, kwargs)),
                random=draws(func, args, kwargs),
                flops=flops_of(func, args, kwargs, output),
                dtype=dtype_of(given),
                moved_bytes=self._bytes_of([*given, *tree_leaves(output)]),
                workspace_bytes=workspace_bytes,
                fixed_workspace_bytes=fixed,
                line=line_of_the_model() if self.phase == "forward" else "",
                recomputes=self._path_of.get(id(recomputing_module())),
                packs=is_beside_the_model(),
            )
        )

    def grew(self, nbytes: int) -> None:
        phase, call = self._whence()
        self.ops.append(
            RanOp(
                name=GREW,
                phase=phase,
                module=self.module_running(),
                call=call,
                reads=(),
                mutates=(),
                random=False,
                flops=0,
                dtype="",
                moved_bytes=0,
                workspace_bytes=0,
                fixed_workspace_bytes=0,
                line="",
            )
        )

    def enter(self, phase: Phase) -> None:
        if phase == "backward":
            self._forward_ends.append(len(self.ops))
        super().enter(phase)

    def forward_end(self, storage: Storage) -> int:
        """Return how many operators had run at the end of the forward that made ``storage``; 0 if none did."""
        place = bisect.bisect_left(self._forward_ends, storage.born)
        is_of_forward = not storage.born or self.ops[storage.born - 1].phase == "forward"
        return self._forward_ends[place] if is_of_forward and place < len(self._forward_ends) else 0

    @property
    def last_forward_end(self) -> int:
        """Operators that had run at the end of the last forward."""
        return self._forward_ends[-1]

    @contextmanager
    def watching(self, model: nn.Module, contents: Contents | None) -> Iterator[None]:
        """Note calls of modules, and tensors that autograd saves, which ``contents`` looks into."""
        self._contents = contents
        self._path_of = {id(module): path for path, module in named_parts(model)}

        def enter(path: str, module: nn.Module, inputs: Any) -> None:
            if self.phase == "forward":
                self.calls.append(CalledModule(path, self._innermost, len(self.ops), self._indices(tensors_of(inputs))))
                self._turn(len(self.calls) - 1)

        def leave(path: str, module: nn.Module, output: Any) -> None:
            if self.phase == "forward":
                call = self.calls[self._innermost]
                seen = filter(None, map(self.known, tensors_of(output)))
                call.end, call.outputs = len(self.ops), tuple(storage.index for storage in seen)
                self._turn(call.caller)

        with module_hooks(model, enter, leave, always_leave=True), saved_tensors_hooks(self._save, lambda alias: alias):
            yield

    def _turn(self, call: int) -> None:
        self._innermost = call
        self._turns.append((next_node(), call))

    def _whence(self) -> tuple[Phase, int | None]:
        """Return the phase of the running operator and, in backward, the call whose forward it differentiates."""
        if self.phase != "backward" or recomputing_module():
            return self.phase, None
        node = running_node()
        if node is None:  # the loss
            return "forward", None
        number = number_of(node)
        if number <= self._last_node:
            return "backward", self._turns[bisect.bisect_right(self._turns, (number, len(self.calls))) - 1][1]
        # Nodes that add a gradient to a parameter run as soon as it is complete, so they belong to the operator before.
        return "backward", (self.ops[-1].call if self.ops[-1].call is not None else -1)

    @property
    def _last_node(self) -> int:
        return next(reversed(self.op_of_node), 0) + 1

    def _save(self, alias: Tensor) -> Tensor:
        """Note that autograd saves ``alias``, and return it: so no storage lives longer than without this hook."""
        storage = self.known(alias)
        if storage is not None and storage.kind != "parameters":
            self.savers[storage.index][next_node() - 1] = None
            if self._contents is not None and storage.index not in self.packed:
                held = next(parts_of(alias))
                with aside():
                    whole = held if held.nbytes == storage.nbytes else held.new_empty(0).set_(held.untyped_storage())
                self.packed[storage.index] = self._contents.codec_of_saved(whole)
        return alias

    def _bytes_of(self, leaves: list[Any]) -> int:
        tensors = ((leaf, self.known(leaf)) for leaf in leaves if isinstance(leaf, Tensor))
        return sum(min(tensor.nbytes, storage.nbytes) for tensor, storage in tensors if storage is not None)

    def _indices(self, leaves: list[Any]) -> tuple[int, ...]:
        seen = (self.known(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return tuple(dict.fromkeys(storage.index for storage in seen if storage is not None))

"""What one training step does with memory: storages with birth, death, module and kind, counted at the dispatcher.

The counter sees every storage that an operator returns, on real tensors and on fake ones alike, and counts the same
bytes in every run: the *tensor peak*.  What kernels allocate for themselves it does not see (the allocated peak does).
"""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from memopt_cli.records import Breakdown, CompressorName, Counted, ModuleShare, ModuleTrace, StepTrace
from memopt_cli.runtime import refusal
from memopt_cli.runtime.compressor import COMPRESSORS
from memopt_cli.runtime.container import recomputing_module
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import map_leaves, tensors_of
from memopt_cli.step import Step, make_optimizer, module_hooks, seed_everything, synchronize
from memopt_cli.workspace import Workspaces


@dataclass(slots=True, eq=False)
class Storage:
    """One storage's life, in ticks of the operator clock."""

    nbytes: int
    born: int
    path: str
    """Module that was running when it was born."""
    kind: str
    """A field of :class:`Breakdown` without its unit: ``activations``, ``gradients`` …"""
    died: int | None = None


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage alive while it is active."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspaces = workspaces
        self.allocated_peak_bytes = 0
        """The peak of the bytes alive and the workspace of the operator running."""
        self.allocated_peak_tick = 0
        self.storages: list[Storage] = []
        self.kind = "activations"
        """Kind of the storages born from now on."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_tick = 0
        self._tick = 0
        self._module_running = module_running
        self._alive: dict[int, tuple[weakref.ref[Any], Storage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = _with_workspace(func, args, func(*args, **(kwargs or {})))
        self._tick += 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.see(leaf, "activations" if recomputing_module() else self.kind)
        allocated = self.live_bytes + self._workspace_bytes(func, args)
        if allocated > self.allocated_peak_bytes:
            self.allocated_peak_bytes, self.allocated_peak_tick = allocated, self._tick
        return output

    def see(self, tensor: Tensor, kind: str) -> Storage | None:
        """The record of a tensor's storage, made now if it is new; ``None`` for layouts without one."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[1].nbytes == nbytes:
            return known[1]
        if known is not None:  # resized in place
            self._end(key)
        record = Storage(nbytes, self._tick, self._module_running(), kind)
        self._alive[key] = (weakref.ref(storage, lambda _: self._end(key)), record)
        self.storages.append(record)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_tick = self.live_bytes, self._tick
        return record

    def alive_at(self, tick: int) -> Iterator[Storage]:
        """The storages alive at an instant."""
        return (s for s in self.storages if s.born <= tick and (s.died is None or s.died >= tick))

    def alive(self) -> Iterator[Storage]:
        """The storages alive now."""
        return (record for _, record in list(self._alive.values()))

    def _workspace_bytes(self, func: Any, args: Any) -> int:
        if self._workspaces is None:
            return 0
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim())
        return self._workspaces.of(func.name().partition(".")[0], shapes)

    def _end(self, key: int) -> None:
        _, record = self._alive.pop(key)
        record.died = self._tick
        self.live_bytes -= record.nbytes


def count(step: Step, workspaces: Workspaces | None = None) -> Counted:
    """Run one step under the counter.  Gradients are ``None`` before and after."""
    with _counting(step, workspaces) as log:
        output = step.forward()
        log.kind = "temporaries"
        step.backward(output)
        del output
        _label_gradients(log, step.model)
        step.update()
    resident = resident_bytes(step)
    step.model.zero_grad(set_to_none=True)
    return Counted(
        tensor_peak_bytes=log.peak_bytes,
        allocated_peak_bytes=log.allocated_peak_bytes,
        resident_bytes=resident,
        breakdown=_breakdown(log.alive_at(log.peak_tick)),
        holders=_holders(log.alive_at(log.allocated_peak_tick)),
    )


def record(step: Step, batch: int, *, contents: bool) -> StepTrace:
    """Record one step of the original model.

    ``contents``: look into the inputs of every module for the codec that holds them exactly (not on fake tensors).
    """
    notes: dict[str, _ModuleNotes] = {}
    with _counting(step) as log:
        with _taking_notes(step.model, log, notes, contents):
            output = step.forward()
        alive = list(log.alive())
        saved = {path: _saved_bytes(path, alive) for path in notes}
        log.kind = "temporaries"
        step.backward(output)
        del output
        _label_gradients(log, step.model)
        step.update()
    resident = resident_bytes(step)
    step.model.zero_grad(set_to_none=True)
    seconds = _forward_seconds(step) if contents else {}
    return StepTrace(
        modules=tuple(
            note.to_record(path, step.model.get_submodule(path), order, saved[path], seconds.get(path, 0.0))
            for order, (path, note) in enumerate(notes.items())
        ),
        tensor_peak_bytes=log.peak_bytes,
        resident_bytes=resident,
        batch=batch,
    )


class FakeStep:
    """A step on fake tensors: no data, no memory, the same storages.

    Raises whatever the model raises when it wants data that fake tensors do not have.
    """

    def __init__(self, step: Step) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(self._mode):
            model = copy.deepcopy(step.model)
        with self._mode:
            args, kwargs = map_leaves(self._fake, (step.args, step.kwargs))
            self.step = Step(
                model=model,
                args=args,
                kwargs=kwargs,
                settings=step.settings,
                loss=step.loss,
                optimizer=make_optimizer(model, step.settings),
            )
        self._start = StartingState(model)
        if self.step.optimizer is not None:
            self.count()  # makes the optimizer's state, which a first step does not have yet

    def count(self, workspaces: Workspaces | None = None) -> Counted:
        """As :func:`count`."""
        self._start.enter()
        with self._mode:
            return count(self.step, workspaces)

    def record(self, batch: int) -> StepTrace:
        """As :func:`record`, without contents and times."""
        self._start.enter()
        with self._mode:
            return record(self.step, batch, contents=False)

    def _fake(self, leaf: Any) -> Any:
        return self._mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf


# ---------------------------------------------------------------------------------------------- running under the log


@contextmanager
def _counting(step: Step, workspaces: Workspaces | None = None) -> Iterator[StorageLog]:
    seed_everything(step.settings.seed)
    with _module_stack(step.model) as running:
        log = StorageLog(running, workspaces)
        for parameter in step.model.parameters():
            log.see(parameter, "parameters")
        for buffer in step.model.buffers():
            log.see(buffer, "buffers")
        for tensor in tensors_of((step.args, step.kwargs)):
            log.see(tensor, "inputs")
        for tensor in _optimizer_tensors(step):
            log.see(tensor, "optimizer")
        with log:
            yield log


@contextmanager
def _module_stack(model: nn.Module) -> Iterator[Callable[[], str]]:
    """A function that says which module is running; within a recomputation too."""
    stack: list[str] = []
    path_of: dict[int, str] = {id(module): path for path, module in model.named_modules()}

    def running() -> str:
        segment = recomputing_module()
        if segment is not None and not stack:
            return path_of.get(id(segment), "")
        return stack[-1] if stack else ""

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        stack.append(path)

    def leave(path: str, module: nn.Module, output: Any) -> None:
        stack.pop()

    with module_hooks(model, enter, leave, always_leave=True):
        yield running


@dataclass(slots=True)
class _ModuleNotes:
    calls: int = 0
    input_bytes: int = 0
    packed_bytes: int = 0
    compressor: CompressorName | None = None
    input_shape: tuple[int, ...] = ()
    outputs: set[int] = field(default_factory=set)
    output_bytes: int = 0
    mutates_input: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def enter(self, inputs: list[Tensor], contents: bool) -> None:
        if not self.calls and inputs:
            self.input_shape = tuple(inputs[0].shape)
        self.calls += 1
        self.versions = [(t, t._version) for t in inputs]
        nbytes = packed = _unique_bytes(inputs)
        name: CompressorName = "null"
        if contents:
            with torch.no_grad(), _disable_current_modes():
                name, packed = _smallest_codec(inputs)
        self.input_bytes += nbytes
        self.packed_bytes += packed
        self.compressor = name if self.compressor in (None, name) else "null"

    def leave(self, outputs: list[Storage | None]) -> None:
        self.mutates_input |= any(t._version != version for t, version in self.versions)
        self.versions = []
        for storage in outputs:
            if storage is not None and id(storage) not in self.outputs:
                self.outputs.add(id(storage))
                self.output_bytes += storage.nbytes

    def to_record(self, path: str, module: nn.Module, order: int, saved_bytes: int, forward_s: float) -> ModuleTrace:
        reason = refusal(module) or ("it modifies its input in place" if self.mutates_input else "")
        return ModuleTrace(
            path=path,
            class_name=type(module).__name__,
            calls=self.calls,
            order=order,
            forward_s=forward_s,
            input_bytes=self.input_bytes,
            input_shape=self.input_shape,
            packed_input_bytes=self.packed_bytes,
            compressor=self.compressor or "null",
            output_bytes=self.output_bytes,
            saved_bytes=saved_bytes,
            refusal=reason,
            spatial_split=hasattr(module, "__spatial_split__"),
        )


@contextmanager
def _taking_notes(model: nn.Module, log: StorageLog, notes: dict[str, _ModuleNotes], contents: bool) -> Iterator[None]:
    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        tensors = [t for t in tensors_of(inputs) if not isinstance(t, nn.Parameter)]
        notes.setdefault(path, _ModuleNotes()).enter(tensors, contents)

    def leave(path: str, module: nn.Module, output: Any) -> None:
        notes[path].leave([log.see(t, log.kind) for t in tensors_of(output)])

    with module_hooks(model, enter, leave):
        yield


def _smallest_codec(tensors: list[Tensor]) -> tuple[CompressorName, int]:
    """The codec that stores these tensors in fewest bytes, and the bytes: none unless it halves them."""
    best: CompressorName = "null"
    least = sum(t.numel() * t.element_size() for t in tensors)
    limit = least // 2
    names: tuple[CompressorName, ...] = ("bit", "uint8", "sparse")
    for name in names:
        held = sum(COMPRESSORS[name].compress(t).nbytes for t in tensors)
        if held <= limit and held < least:
            best, least = name, held
    return best, least


def _forward_seconds(step: Step) -> dict[str, float]:
    """Wall time of every module's forward, without the counter; children included."""
    seconds: dict[str, float] = defaultdict(float)
    started: list[float] = []

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        synchronize(step.settings.device)
        started.append(time.perf_counter())

    def leave(path: str, module: nn.Module, output: Any) -> None:
        synchronize(step.settings.device)
        seconds[path] += time.perf_counter() - started.pop()

    seed_everything(step.settings.seed)
    with module_hooks(step.model, enter, leave):
        step.forward()
    return dict(seconds)


# ---------------------------------------------------------------------------------------------- recurrent layers

_LONGEST = 64
"""Time steps of a recurrent layer that are run to learn its workspace; it grows in proportion beyond."""


def _with_workspace(func: Any, args: Any, output: Any) -> Any:
    """On the CPU a recurrent layer saves a large workspace for backward, and does not tell fake tensors its size."""
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not isinstance(output[3], FakeTensor):
        return output
    settings = tuple(tuple(a.shape) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args)
    return (*output[:3], output[3].new_empty(_recurrent_workspace_bytes(settings, args[0].dtype)))


@functools.cache
def _recurrent_workspace_bytes(settings: tuple[Any, ...], dtype: torch.dtype) -> int:
    """Bytes, learned by running the layer on zeros; ``settings``: its arguments, shapes in place of tensors."""
    (steps, *sizes), *rest = settings
    if steps > _LONGEST:
        half, whole = (_recurrent_workspace_bytes(((n, *sizes), *rest), dtype) for n in (_LONGEST // 2, _LONGEST))
        grown: int = (whole - half) * (steps - _LONGEST) // (_LONGEST // 2)
        return whole + grown
    with _disable_current_modes():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in settings[:_RECURRENT_TENSORS]]
        output = torch.ops.aten.mkldnn_rnn_layer(*tensors, *settings[_RECURRENT_TENSORS:])
        nbytes: int = output[3].nbytes
    return nbytes


_RECURRENT_TENSORS = 7
"""The layer's leading arguments: input, four weights and biases, two states."""


# ---------------------------------------------------------------------------------------------- adding up


def _label_gradients(log: StorageLog, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            storage = log.see(parameter.grad, "gradients")
            if storage is not None:
                storage.kind = "gradients"


def _breakdown(storages: Iterable[Storage]) -> Breakdown:
    total: dict[str, int] = defaultdict(int)
    for s in storages:
        total[s.kind] += s.nbytes
    return Breakdown(
        parameters_bytes=total["parameters"],
        buffers_bytes=total["buffers"],
        gradients_bytes=total["gradients"],
        optimizer_bytes=total["optimizer"],
        inputs_bytes=total["inputs"],
        activations_bytes=total["activations"],
        temporaries_bytes=total["temporaries"],
    )


def _holders(storages: Iterable[Storage]) -> tuple[ModuleShare, ...]:
    held: dict[str, int] = defaultdict(int)
    for s in storages:
        if s.kind in ("activations", "temporaries"):
            held[s.path] += s.nbytes
    ordered = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ModuleShare(path=path, held_bytes=nbytes) for path, nbytes in ordered)


def resident_bytes(step: Step) -> int:
    """Bytes of parameters, their gradients as far as there are any, buffers, inputs and optimizer state."""
    parameters = list(step.model.parameters())
    return _unique_bytes(
        (
            *parameters,
            *(p.grad for p in parameters),
            *step.model.buffers(),
            *tensors_of((step.args, step.kwargs)),
            *_optimizer_tensors(step),
        )
    )


def _optimizer_tensors(step: Step) -> list[Tensor]:
    if step.optimizer is None:
        return []
    return [t for state in step.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def _saved_bytes(path: str, alive: list[Storage]) -> int:
    return sum(s.nbytes for s in alive if s.kind == "activations" and _is_within(s.path, path))


def _unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    sizes = {}
    for t in tensors:
        if t is not None and t.layout is torch.strided:
            storage = t.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _is_within(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")

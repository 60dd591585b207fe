"""The counter of storages: what one training step holds at any instant, seen at the dispatcher.

It sees every storage that an operator returns, on real tensors and on fake ones alike, and counts the same bytes in
every run: the *tensor peak*.  What kernels allocate for themselves it does not see (the allocated peak does).

Where a tensor has several gradients, autograd adds each to the first in place if nobody else holds that; but not while
somebody watches the dispatcher, or on fake tensors.  Such a sum is counted in place of the first.  So is what a
derivative formula would write to (:mod:`memopt_cli.trace.formulas`).

A tensor that is made of others, a ``DTensor``, has their bytes: what it does is seen where they do it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.module_calls import module_hooks
from memopt_cli.own_step import OwnStep, guessed_number
from memopt_cli.records import Phase, PhasePeak
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.compressor import is_dense, is_packing, recorded_shares
from memopt_cli.runtime.deferred import DeferredLinear
from memopt_cli.runtime.in_backward import is_updating
from memopt_cli.runtime.packing import recorded_answers
from memopt_cli.runtime.private_torch import (
    TorchDispatchMode,
    caller_beyond,
    is_engine,
    is_fake,
    is_made_of_others,
    is_view,
    memory_of,
    parts_of,
    storage_key,
    tree_leaves,
)
from memopt_cli.runtime.running import recomputing_module
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.step import Step, seed_everything, take
from memopt_cli.trace.collectives import Exchanged, labelled, resizes_seen, staging_unseen
from memopt_cli.trace.formulas import Formula, formula_at
from memopt_cli.trace.operators import is_bookkeeping, name_of
from memopt_cli.trace.real_storages import as_on_real_tensors
from memopt_cli.workspace import Shapes, Workspaces, argument_shapes


@dataclass(slots=True, eq=False)
class Storage:
    """One storage's life, in ticks of the operator clock: 0 is before the first operator, n after the n-th."""

    index: int
    """Rank by birth."""
    nbytes: int
    born: int
    path: str
    """Module that was running when it was born; of a parameter or buffer, its owner."""
    kind: str
    """A field of :class:`Breakdown` without its unit: ``activations``, ``gradients`` …"""
    rank: int = 0
    """How many its module had made before it in forward."""
    died: int | None = None


@dataclass(slots=True)
class Peaks:
    """The most bytes alive at any instant so far, and when."""

    tensor_bytes: int = 0
    tensor_tick: int = 0
    allocated_bytes: int = 0
    """Of the bytes alive and the workspace of the operator running."""
    allocated_tick: int = 0
    phases: dict[Phase, PhasePeak] = field(default_factory=dict)
    phase: Phase | None = None
    """The one that goes on."""

    def enter(self, phase: Phase, live_bytes: int) -> None:
        """A phase begins with so many bytes alive."""
        self.phase = phase
        start = PhasePeak(phase=phase, tensor_peak_bytes=live_bytes, allocated_peak_bytes=live_bytes)
        self.phases[phase] = self.phases.get(phase, start).raised(live_bytes, live_bytes)

    def rise(self, tick: int, live_bytes: int, workspace_bytes: int) -> None:
        """To what is alive now, if that is more."""
        with_workspace = live_bytes + workspace_bytes
        if self.phase is not None:
            self.phases[self.phase] = self.phases[self.phase].raised(live_bytes, with_workspace)
        if live_bytes > self.tensor_bytes:
            self.tensor_bytes, self.tensor_tick = live_bytes, tick
        if with_workspace > self.allocated_bytes:
            self.allocated_bytes, self.allocated_tick = with_workspace, tick


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage alive while it is active."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspaces = workspaces
        self.storages: list[Storage] = []
        self.phase: Phase = "forward"
        self.is_own = False
        """The step is one of the user's own, which may read numbers outside of its modules."""
        self.live_bytes = 0
        self.peaks = Peaks()
        self._tick = 0
        self.module_running = module_running
        self._alive: dict[int, tuple[weakref.ref[Any], Storage, int]] = {}
        """The last is its size; what a plain step does not have has fewer bytes in the record."""
        self._made: Counter[str] = Counter()
        self._formula: Formula | None = None
        """Of the operator that ran last."""
        self._first: Storage | None = None
        """What the last operator would have written to in a plain step, if nobody else holds it."""
        self._with_first_bytes = 0
        self._written: Storage | None = None
        """What the last operator made, if it would have written to the first whoever holds that."""
        self.exchanged = Exchanged()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented
        self.settle()
        if func is _DEVICE and is_fake(args[0]):
            return args[0].fake_device  # two calls of three are this one, which the mode below takes long to answer
        updating = self.phase == "update" or is_updating()
        guesses = updating or (self.is_own and not self.module_running())
        output: Any = guessed_number(func, args, updating=updating) if guesses else None  # no size depends on it
        if output is None:
            output = as_on_real_tensors(func, args, func(*args, **(kwargs or {})))
        counts = not is_bookkeeping(func)
        in_formulas = self.phase == "backward" and not updating
        self._formula = formula_at(self._tick, self._formula) if in_formulas else None
        self._tick += counts
        share = 0.0 if func is _ZEROS else self._formula.share_of(name_of(func)) if self._formula else 1.0
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.see(leaf, share=share)
        self._label(func, args, kwargs or {}, output)
        workspace = self._workspace_bytes(func, args) if share else 0
        if in_formulas and (self._is_written(func, args) or self._is_sum(func, args)):
            self._first, self._with_first_bytes = self.known(args[0]), self.live_bytes
            self.peaks.rise(self._tick, self.live_bytes - (self._first.nbytes if self._first else 0), workspace)
            combines = self._formula is not None and self._formula.combines(name_of(func))
            self._written = self.known(output) if combines else None
        else:
            self.peaks.rise(self._tick, self.live_bytes, workspace)
        if counts:
            self.ran(func, args, kwargs or {}, output, workspace)
        return output

    def _is_written(self, func: Any, args: Any) -> bool:
        """Whether a formula calls an operator that in a plain step writes to its first argument."""
        formula = self._formula
        return formula is not None and formula.writes(name_of(func)) and self._is_of(formula, args[0])

    def _is_sum(self, func: Any, args: Any) -> bool:
        """Whether autograd adds one gradient of a tensor to another, and no formula two of the tensors that it made."""
        formula = self._formula
        return _adds_gradients(func, args) and (
            formula is None or formula.is_shared or not self._is_of(formula, args[0])
        )

    def _is_of(self, formula: Formula, tensor: Tensor) -> bool:
        made = self.known(tensor)
        return made is not None and made.born > formula.began

    def _label(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """What ranks exchange is called by its purpose."""
        self.exchanged.note(func, args, kwargs, output)
        for tensor, kind in labelled(func, args, kwargs):
            made = self.known(tensor)
            if made is not None and made.kind in _MADE:
                made.kind = kind

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, workspace_bytes: int) -> None:
        """An operator ran; a subclass may take notes."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size by no operator: FSDP frees parameters so, and makes room for them again."""
        self.settle()
        key, nbytes = storage_key(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[2] == nbytes:
            return
        if known is not None:
            self._end(key, self._tick)
        if nbytes:
            self._tick += 1
            self._begin(storage, None, None, 1.0)
            self.peaks.rise(self._tick, self.live_bytes, 0)
            self.grew(nbytes)

    def grew(self, nbytes: int) -> None:
        """A storage without bytes has some now, which counts as an operator; a subclass may take notes."""

    def see(
        self, tensor: Tensor, kind: str | None = None, path: str | None = None, *, share: float = 1.0
    ) -> Storage | None:
        """The record of a tensor's storage, made now if it is new; ``None`` for tensors without one.

        ``share``: of its bytes, what a plain step has.  All parts of a tensor are seen, and that of the first is told.
        """
        found = [self._see(part, kind, path, share) for part in parts_of(tensor)]
        return next(iter(found), None)

    def _see(self, tensor: Tensor, kind: str | None, path: str | None, share: float) -> Storage | None:
        if not _has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[2] == nbytes:
            return known[1]
        if known is not None:  # resized in place
            self._end(key, self._tick - 1)
        return self._begin(storage, kind, path, share)

    def _begin(self, storage: torch.UntypedStorage, kind: str | None, path: str | None, share: float) -> Storage:
        key, nbytes = storage_key(storage), storage.nbytes()
        if path is None:
            path = self.module_running()
        record = Storage(len(self.storages), int(nbytes * share), self._tick, path, kind or self._kind())
        if kind is None and self.phase == "forward" and not is_packing():
            record.rank = self._made[path]
            self._made[path] += 1
        self._alive[key] = (weakref.ref(storage, lambda _: self._end(key, self._tick)), record, nbytes)
        self.storages.append(record)
        self.live_bytes += record.nbytes
        return record

    def settle(self) -> None:
        """Nothing more happens to what the last operator made.

        A sum whose first summand others hold is one more, and so is what would have been written to.
        """
        if self._first is not None and self._first.died is None:
            if self._written is None:
                self.peaks.rise(self._tick, self._with_first_bytes, 0)
            else:
                self._drop(self._written)
        self._first = self._written = None

    def _drop(self, storage: Storage) -> None:
        """It has no bytes from now on, nor had any."""
        self.live_bytes -= storage.nbytes if storage.died is None else 0
        storage.nbytes = 0

    def enter(self, phase: Phase) -> None:
        """The step goes on to its next phase."""
        self.settle()
        self.phase = phase
        self.peaks.enter(phase, self.live_bytes)

    def known(self, tensor: Tensor) -> Storage | None:
        """The record of a tensor's storage, if it has been seen."""
        part = next(parts_of(tensor), tensor)
        found = self._alive.get(memory_of(part)) if _has_storage(part) else None
        return found[1] if found else None

    @property
    def operators(self) -> int:
        """Operators that ran so far."""
        return self._tick

    def alive_at(self, tick: int) -> Iterator[Storage]:
        """The storages alive at an instant."""
        return (s for s in self.storages if s.born <= tick and (s.died is None or s.died >= tick))

    def _kind(self) -> str:
        return "activations" if self.phase == "forward" or recomputing_module() else "temporaries"

    def _workspace_bytes(self, func: Any, args: Any) -> int:
        return self.workspaces.of(name_of(func), shapes_of(args)) if self.workspaces else 0

    def _end(self, key: int, tick: int) -> None:
        _, record, _ = self._alive.pop(key)
        record.died = tick - 1 if record is self._first else tick
        self.live_bytes -= record.nbytes


def shapes_of(args: Any) -> Shapes:
    """As workspaces are remembered by."""
    return argument_shapes(arg.shape if isinstance(arg, Tensor) else () for arg in args)


@contextmanager
def module_stack(model: nn.Module) -> Iterator[Callable[[], str]]:
    """A function that says which module is running; within a recomputation too."""
    stack: list[str] = []
    path_of: dict[int, str] = {id(module): path for path, module in named_parts(model)}

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


@dataclass(frozen=True, slots=True)
class Codecs:
    """What a step with data was seen to hold in less."""

    saved: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """(module, rank of a storage among those that its forward makes) -> the codec that held it."""
    inputs: Mapping[str, float] = field(default_factory=dict)
    """Module -> share of its inputs' bytes that their codec took."""


@contextmanager
def packed_as(log: StorageLog, codecs: Codecs | None) -> Iterator[None]:
    """Within, tensors without data that ``log`` sees are packed as ``codecs`` says."""
    known = codecs or Codecs()

    def codec_of(tensor: Tensor) -> str:
        storage = log.known(tensor)
        return known.saved.get((storage.path, storage.rank), "null") if storage else "null"

    with recorded_answers(codec_of), recorded_shares(lambda: known.inputs.get(log.module_running(), 1.0)):
        yield


@contextmanager
def active(log: StorageLog, step: Step) -> Iterator[None]:
    """``log`` sees what runs, with what exists before the step already in it; the generators are seeded."""
    seed_everything(step.settings.seed)
    log.is_own = isinstance(step, OwnStep)
    for name, parameter in step.named.named_parameters():
        log.see(parameter, "parameters", name.rpartition(".")[0])
        if parameter.grad is not None:
            log.see(parameter.grad, "gradients", name.rpartition(".")[0])
    for name, buffer in step.named.named_buffers():
        log.see(buffer, "buffers", name.rpartition(".")[0])
    for tensor in tensors_of((step.args, step.kwargs)):
        log.see(tensor, "inputs", "")
    for tensor in optimizer_tensors(step):
        log.see(tensor, "optimizer", "")
    for tensor in step.buckets:
        log.see(tensor, "reduction", "")
    with log, resizes_seen(log.resized), staging_unseen():
        yield


def run_step(step: Step, log: StorageLog) -> None:
    """One step under an active ``log``; leaves the gradients."""

    def enter(phase: Phase) -> None:
        if log.phase == "backward":
            _label_gradients(log, step.model)
        log.enter(phase)

    take(step, enter)
    log.settle()
    _label_gradients(log, step.model)


def resident_bytes(step: Step) -> int:
    """Bytes of parameters, their gradients as far as there are any, buffers, inputs and optimizer state."""
    parameters = list(step.model.parameters())
    return unique_bytes(
        (
            *parameters,
            *(p.grad for p in parameters),
            *step.model.buffers(),
            *tensors_of((step.args, step.kwargs)),
            *optimizer_tensors(step),
        )
    )


def optimizer_tensors(step: Step) -> list[Tensor]:
    """The state that the optimizer carries so far."""
    states = (state for optimizer in step.optimizers() for state in optimizer.state.values())
    return [t for state in states for t in state.values() if isinstance(t, Tensor)]


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that holding ``tensors`` takes: a slice counts as a slice, views that overlap as their storage."""
    return min(unique_bytes(tensors), sum(part.nbytes for t in tensors for part in parts_of(t)))


def unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages of ``tensors``, each once."""
    sizes = {}
    for t in (part for tensor in tensors if tensor is not None for part in parts_of(tensor)):
        if _has_storage(t):
            storage = t.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
    return sum(sizes.values())


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and (not isinstance(tensor, DeferredLinear) or tensor.is_computed)


def _label_gradients(log: StorageLog, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            storage = log.see(parameter.grad, "gradients")
            if storage is not None:
                storage.kind = "gradients"


def _adds_gradients(func: Any, args: Any) -> bool:
    """Whether autograd itself, and no function of a node, calls this operator: to add up the gradients of a tensor.

    It adds in place only to one that is dense, overlaps nothing and is no view, whose base holds it; a sparse one only
    to one that is contiguous.
    """
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    first, other = args
    if not isinstance(other, Tensor) or is_view(first) or not is_dense(first):
        return False
    if other.layout is not torch.strided and not first.is_contiguous():
        return False
    caller = caller_beyond(_AROUND)
    return caller is not None and is_engine(caller)


_MADE = frozenset(("activations", "temporaries"))
"""Kinds of storages of which nothing is known but when they were made."""

_DEVICE = torch.ops.prim.device.default
_ZEROS = torch.ops.aten._efficientzerotensor.default
"""What it makes says that it is zero and holds nothing."""

_AROUND = frozenset((__name__, "torch._compile", "torch._dynamo.eval_frame"))
"""What stands between an operator and a mode that sees it."""

"""The counter of storages: a dispatch mode that adds up the bytes alive at every instant of a training step.

It sees every storage that an operator returns, real tensors as well as fake ones, and counts the same bytes in
every run: the *tensor peak*.  The allocated peak also includes memory that kernels allocate for themselves; it is not
seen here, but added from :mod:`memopt_cli.trace.workspace`.

Some operators write in place in a plain step and make a new storage under a dispatch mode; that is not counted
(:mod:`memopt_cli.trace.in_place`).  A tensor made of others, such as a ``DTensor``, is counted as these.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.records import Phase
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.compressor import assuming_sparse_share, makes_internal_tensors
from memopt_cli.runtime.in_backward import is_updating
from memopt_cli.runtime.packing import recorded_answers
from memopt_cli.runtime.private_torch import TorchDispatchMode, is_fake, is_made_of_others, tree_leaves, walk_parts
from memopt_cli.runtime.running import recomputing_module
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.collectives import Collectives, exchange_buffers, resizes_seen, staging_unseen
from memopt_cli.trace.in_place import InPlace
from memopt_cli.trace.operators import is_bookkeeping, operator_name
from memopt_cli.trace.real_storages import corrected_output
from memopt_cli.trace.storages import Peaks, Storage, Storages, has_storage, unique_bytes
from memopt_cli.trace.workspace import Shapes, Workspaces, argument_shapes
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.own_step import OwnStep, guessed_number
from memopt_cli.training.step import TrainingStep, seed_everything

_PRELIMINARY_KINDS = frozenset(("activations", "temporaries"))
"""Kinds that a storage gets by the phase in which it is made, until its purpose is known."""
_DEVICE = torch.ops.prim.device.default


class StorageLog(TorchDispatchMode):
    """Counts every storage alive while it is active."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspaces = workspaces
        self.storages = Storages()
        self.phase: Phase = "forward"
        self.is_own = False
        """Whether the step is a user's own, whose function may read numbers from tensors, such as losses to log."""
        self.peaks = Peaks()
        self.module_running = module_running
        self.collectives = Collectives()
        self._in_place = InPlace(self.storages, self.peaks)
        self._made: Counter[str] = Counter()
        """Path of a module -> number of storages that it has made in forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented
        self._in_place.finish_operator()  # only now it shows whether others hold what the last operator wrote to
        if func is _DEVICE and is_fake(args[0]):
            return args[0].fake_device  # two of three calls ask for this, and the fake mode below answers slowly
        updating = self.phase == "update" or is_updating()
        # Optimizers, and a user's own function between its models, may read numbers: no size depends on such numbers.
        guesses = updating or (self.is_own and not self.module_running())
        output: Any = guessed_number(func, args, updating=updating) if guesses else None
        if output is None:
            output = corrected_output(func, args, func(*args, **(kwargs or {})))
        is_counted = not is_bookkeeping(func)
        differentiates = self.phase == "backward" and not updating
        share = self._in_place.plain_share(func, differentiates=differentiates)
        storages = self.storages
        storages.tick += is_counted
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.count_tensor(leaf, share=share)
        self._label_exchange(func, args, kwargs or {}, output)
        workspace = self.workspaces.look_up(operator_name(func), shapes_of(args)) if self.workspaces and share else 0
        replaced_bytes = self._in_place.replaced_bytes(func, args, output) if differentiates else 0
        self.peaks.raise_to(storages.tick, storages.live_bytes - replaced_bytes, workspace)
        if is_counted:
            self.note_operator(func, args, kwargs or {}, output, workspace)
        return output

    def _label_exchange(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Label tensors that serve an exchange among ranks as ``gathered`` or ``reduction``."""
        self.collectives.record_call(func, args, kwargs, output)
        for tensor, kind in exchange_buffers(func, args, kwargs):
            storage = self.find_storage(tensor)
            if storage is not None and storage.kind in _PRELIMINARY_KINDS:
                storage.kind = kind

    def note_operator(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, workspace_bytes: int) -> None:
        """Do nothing; subclasses note an operator that ran."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` again after Python code resized it, as FSDP does to free and restore parameters."""
        self.finish_operator()
        storages, nbytes = self.storages, storage.nbytes()
        if storages.find_unresized(storage, storages.tick) is None and nbytes:
            storages.tick += 1
            self._begin_storage(storage, None, None, 1.0)
            self.peaks.raise_to(storages.tick, storages.live_bytes, 0)
            self.note_resize(nbytes)

    def note_resize(self, nbytes: int) -> None:
        """Do nothing; subclasses note a resize to ``nbytes`` as if an operator had made them."""

    def count_tensor(
        self, tensor: Tensor, kind: str | None = None, path: str | None = None, *, share: float = 1.0
    ) -> Storage | None:
        """Return the record of the storage of ``tensor``, made now if it is new; ``None`` for tensors without one.

        A new record gets ``kind``, the module ``path`` (by default the running one), and ``share`` of the bytes, which
        a plain step would take.  Of a tensor made of others, all parts are counted, and the first is returned.
        """
        records = [self._count_part(part, kind, path, share) for part in walk_parts(tensor)]
        return next(iter(records), None)

    def _count_part(self, tensor: Tensor, kind: str | None, path: str | None, share: float) -> Storage | None:
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        record = self.storages.find_unresized(storage, self.storages.tick - 1)
        return record or self._begin_storage(storage, kind, path, share)

    def _begin_storage(
        self, storage: torch.UntypedStorage, kind: str | None, path: str | None, share: float
    ) -> Storage:
        if path is None:
            path = self.module_running()
        kind_now = "activations" if self.phase == "forward" or recomputing_module() else "temporaries"
        record = self.storages.begin(storage, path, kind or kind_now, share)
        if kind is None and self.phase == "forward" and not makes_internal_tensors():
            record.rank = self._made[path]
            self._made[path] += 1
        return record

    def finish_operator(self) -> None:
        """Finish the count of the last operator; to be called before the next one, and at the end of a phase."""
        self._in_place.finish_operator()

    def enter(self, phase: Phase) -> None:
        """Begin ``phase`` of the step."""
        self.finish_operator()
        self.phase = phase
        self.peaks.enter(phase, self.storages.live_bytes)

    def find_storage(self, tensor: Tensor) -> Storage | None:
        """Return the record of the storage of ``tensor``; ``None`` if it has not been seen."""
        return self.storages.find(tensor)


def shapes_of(args: Any) -> Shapes:
    """Return the shapes of ``args`` to look workspaces up by."""
    return argument_shapes(arg.shape if isinstance(arg, Tensor) else () for arg in args)


@contextmanager
def module_stack(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the path of the module running now, in recomputations as well."""
    stack: list[str] = []
    path_of: dict[int, str] = {id(module): path for path, module in named_parts(model)}

    def running() -> str:
        # In backward the stack is empty, but a segment may recompute operators outside its inner modules.
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
class Compressors:
    """Compressors of tensors that packed to fewer bytes in a step with data."""

    saved: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """Module, and index among the storages that its forward makes -> the compressor that held the storage."""
    outputs: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """Module, and index among its outputs -> the compressor that held that output, whichever module had made it."""
    inputs: Mapping[str, float] = field(default_factory=dict)
    """Module -> packed bytes of its inputs, divided by their bytes."""


@contextmanager
def packed_as(log: StorageLog, compressors: Compressors | None) -> Iterator[None]:
    """Pack tensors without data in the ``with`` block, watched by ``log``, as ``compressors`` says."""
    compressors = compressors or Compressors()
    compressor_of_whole: dict[int, str] = {}
    """Index of the storage of an output that was concatenated from chunks -> its compressor."""

    def note_concatenated(outputs: Sequence[Tensor]) -> None:
        path = log.module_running()
        for index, output in enumerate(outputs):
            if (storage := log.find_storage(output)) is not None:
                compressor_of_whole[storage.index] = compressors.outputs.get((path, index), "null")

    def compressor_of(tensor: Tensor) -> str:
        storage = log.find_storage(tensor)
        if storage is None:
            return "null"
        return compressor_of_whole.get(storage.index) or compressors.saved.get((storage.path, storage.rank), "null")

    def share_of_inputs() -> float:
        return compressors.inputs.get(log.module_running(), 1.0)

    with recorded_answers(compressor_of, note_concatenated), assuming_sparse_share(share_of_inputs):
        yield


@contextmanager
def active(log: StorageLog, step: TrainingStep) -> Iterator[None]:
    """Let ``log`` count the ``with`` block, from the tensors that exist before ``step`` on; seed all generators."""
    seed_everything(step.settings.seed)
    log.is_own = isinstance(step, OwnStep)
    for name, parameter in step.unwrapped_model.named_parameters():
        log.count_tensor(parameter, "parameters", name.rpartition(".")[0])
        if parameter.grad is not None:
            log.count_tensor(parameter.grad, "gradients", name.rpartition(".")[0])
    for name, buffer in step.unwrapped_model.named_buffers():
        log.count_tensor(buffer, "buffers", name.rpartition(".")[0])
    held_by_loss = _held_by_loss(step)  # kept alive: the step would make its own, short-lived ones without data
    for tensor in (*tensors_of((step.args, step.kwargs)), *held_by_loss):
        log.count_tensor(tensor, "inputs", "")
    for tensor in optimizer_tensors(step):
        log.count_tensor(tensor, "optimizer", "")
    for tensor in step.buckets:
        log.count_tensor(tensor, "reduction", "")
    with log, resizes_seen(log.resized), staging_unseen():
        yield


def run_step(step: TrainingStep, log: StorageLog) -> None:
    """Take one ``step`` under an active ``log``; its gradients stay."""

    def enter(phase: Phase) -> None:
        if log.phase == "backward":
            _label_gradients(log, step.model)
        log.enter(phase)

    step.take(enter)
    log.finish_operator()
    _label_gradients(log, step.model)


def resident_bytes(step: TrainingStep) -> int:
    """Return the bytes of parameters, gradients if there are any, buffers, inputs and optimizer state of ``step``.

    Targets that the loss holds are counted with the inputs: the step reads them, wherever they were made.
    """
    parameters = list(step.model.parameters())
    return unique_bytes(
        (
            *parameters,
            *(p.grad for p in parameters),
            *step.model.buffers(),
            *tensors_of((step.args, step.kwargs)),
            *_held_by_loss(step),
            *optimizer_tensors(step),
        )
    )


def _held_by_loss(step: TrainingStep) -> list[Tensor]:
    """Return the tensors that the loss of ``step`` holds on the devices of the model; in a dry run without data."""
    parameters = list(step.model.parameters())
    devices = {p.device for p in parameters}
    mode = next((p.fake_mode for p in parameters if is_fake(p)), None)  # type: ignore[attr-defined]
    held = [t for t in tensors_held_by(step.loss) if t.device in devices]
    return held if mode is None else [t if is_fake(t) else mode.from_tensor(t) for t in held]


def tensors_held_by(function: Callable[..., Any] | None) -> list[Tensor]:
    """Return the tensors that ``function`` refers to itself: in a closure, as globals, arguments or attributes."""
    if isinstance(function, nn.Module):
        return [*function.parameters(), *function.buffers()]
    if isinstance(function, functools.partial):
        return [*_tensors_in((*function.args, *function.keywords.values())), *tensors_held_by(function.func)]
    if not inspect.isfunction(function):  # a method of an object, or one that is called itself
        return _tensors_in(getattr(getattr(function, "__self__", function), "__dict__", {}).values())
    names = inspect.getclosurevars(function)
    return _tensors_in((*names.nonlocals.values(), *names.globals.values(), *(function.__defaults__ or ())))


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    parts = (tuple(v.values()) if isinstance(v, dict) else v if isinstance(v, list | tuple) else (v,) for v in values)
    return [part for some in parts for part in some if isinstance(part, Tensor)]


def optimizer_tensors(step: TrainingStep) -> list[Tensor]:
    """Return the tensors in the current state of the optimizers of ``step``."""
    states = (state for optimizer in step.optimizers() for state in optimizer.state.values())
    return [t for state in states for t in state.values() if isinstance(t, Tensor)]


def _label_gradients(log: StorageLog, model: nn.Module) -> None:
    """Label the gradients of ``model``, which were temporaries until autograd stored them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            storage = log.count_tensor(parameter.grad, "gradients")
            if storage is not None:
                storage.kind = "gradients"

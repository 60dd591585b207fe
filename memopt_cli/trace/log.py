"""The counter of storages: the bytes that a training step holds at any instant, seen at the dispatcher.

It sees every storage that an operator returns, of real tensors and of fake ones alike, and counts the same bytes in
every run: the *tensor peak*.  It does not see memory that kernels allocate for themselves, which the allocated peak
includes.

Where a plain step writes in place and a watched one makes a new storage, that is not counted
(:mod:`memopt_cli.trace.in_place`).  A tensor made of others, such as a ``DTensor``, is counted as these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.records import Phase
from memopt_cli.runtime import named_parts
from memopt_cli.runtime.compressor import is_beside_the_model, recorded_shares
from memopt_cli.runtime.in_backward import is_updating
from memopt_cli.runtime.packing import recorded_answers
from memopt_cli.runtime.private_torch import (
    TorchDispatchMode,
    is_fake,
    is_made_of_others,
    parts_of,
    tree_leaves,
)
from memopt_cli.runtime.running import recomputing_module
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.trace.collectives import Exchanged, labelled, resizes_seen, staging_unseen
from memopt_cli.trace.in_place import InPlace
from memopt_cli.trace.operators import is_bookkeeping, name_of
from memopt_cli.trace.real_storages import as_on_real_tensors
from memopt_cli.trace.storages import Peaks, Storage, Storages, has_storage, unique_bytes
from memopt_cli.trace.workspace import Shapes, Workspaces, argument_shapes
from memopt_cli.training.module_calls import module_hooks
from memopt_cli.training.own_step import OwnStep, guessed_number
from memopt_cli.training.step import Step, seed_everything


class StorageLog(TorchDispatchMode):
    """Counts every storage alive while it is active."""

    def __init__(self, module_running: Callable[[], str], workspaces: Workspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspaces = workspaces
        self.storages = Storages()
        self.phase: Phase = "forward"
        self.is_own = False
        """Whether the step is a user's own, which may read numbers outside of its modules."""
        self.peaks = Peaks()
        self.module_running = module_running
        self.exchanged = Exchanged()
        self._in_place = InPlace(self.storages, self.peaks)
        self._made: Counter[str] = Counter()
        """Module -> number of storages that it has made in forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented
        self._in_place.settle()
        if func is _DEVICE and is_fake(args[0]):
            return args[0].fake_device  # two calls of three are this one, and the mode below is slow to answer
        updating = self.phase == "update" or is_updating()
        guesses = updating or (self.is_own and not self.module_running())
        output: Any = guessed_number(func, args, updating=updating) if guesses else None  # no size depends on it
        if output is None:
            output = as_on_real_tensors(func, args, func(*args, **(kwargs or {})))
        counts = not is_bookkeeping(func)
        differentiates = self.phase == "backward" and not updating
        share = self._in_place.share_of(func, differentiates=differentiates)
        storages = self.storages
        storages.tick += counts
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.see(leaf, share=share)
        self._label(func, args, kwargs or {}, output)
        workspace = self.workspaces.of(name_of(func), shapes_of(args)) if self.workspaces and share else 0
        replaced = self._in_place.replaced_bytes(func, args, output) if differentiates else 0
        self.peaks.rise(storages.tick, storages.live_bytes - replaced, workspace)
        if counts:
            self.ran(func, args, kwargs or {}, output, workspace)
        return output

    def _label(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Give tensors that ranks exchange the kind of their purpose."""
        self.exchanged.note(func, args, kwargs, output)
        for tensor, kind in labelled(func, args, kwargs):
            made = self.known(tensor)
            if made is not None and made.kind in _MADE:
                made.kind = kind

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any, workspace_bytes: int) -> None:
        """Note that an operator ran; a hook for subclasses."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` anew after a resize without an operator, by which FSDP frees and restores parameters."""
        self.settle()
        storages, nbytes = self.storages, storage.nbytes()
        if storages.as_it_was(storage, storages.tick) is None and nbytes:
            storages.tick += 1
            self._begin(storage, None, None, 1.0)
            self.peaks.rise(storages.tick, storages.live_bytes, 0)
            self.grew(nbytes)

    def grew(self, nbytes: int) -> None:
        """Note that a resize gave a storage ``nbytes``, which counts as an operator; a hook for subclasses."""

    def see(
        self, tensor: Tensor, kind: str | None = None, path: str | None = None, *, share: float = 1.0
    ) -> Storage | None:
        """Return the record of the storage of ``tensor``, made now if it is new; ``None`` for tensors without one.

        A plain step has ``share`` of its bytes.  All parts of a tensor are counted; the record is that of the first.
        """
        found = [self._see(part, kind, path, share) for part in parts_of(tensor)]
        return next(iter(found), None)

    def _see(self, tensor: Tensor, kind: str | None, path: str | None, share: float) -> Storage | None:
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        known = self.storages.as_it_was(storage, self.storages.tick - 1)
        return known or self._begin(storage, kind, path, share)

    def _begin(self, storage: torch.UntypedStorage, kind: str | None, path: str | None, share: float) -> Storage:
        if path is None:
            path = self.module_running()
        record = self.storages.begin(storage, path, kind or self._kind(), share)
        if kind is None and self.phase == "forward" and not is_beside_the_model():
            record.rank = self._made[path]
            self._made[path] += 1
        return record

    def settle(self) -> None:
        """Close the account of the last operator, whose output nothing else happens to."""
        self._in_place.settle()

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase`` of the step."""
        self.settle()
        self.phase = phase
        self.peaks.enter(phase, self.storages.live_bytes)

    def known(self, tensor: Tensor) -> Storage | None:
        """Return the record of the storage of ``tensor``; ``None`` if it has not been seen."""
        return self.storages.known(tensor)

    def _kind(self) -> str:
        return "activations" if self.phase == "forward" or recomputing_module() else "temporaries"


def shapes_of(args: Any) -> Shapes:
    """Return the shapes of ``args`` by which workspaces are looked up."""
    return argument_shapes(arg.shape if isinstance(arg, Tensor) else () for arg in args)


@contextmanager
def module_stack(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the path of the module running now, in recomputations as well."""
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
    """Codecs of tensors that packed to fewer bytes in a step with data."""

    saved: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """(module, rank of a storage among those that its forward makes) -> the codec that held it."""
    outputs: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """(module, place among its outputs) -> the codec that held it, whichever module had made it."""
    inputs: Mapping[str, float] = field(default_factory=dict)
    """Module -> share of its inputs' bytes that remained in their codec."""


@contextmanager
def packed_as(log: StorageLog, codecs: Codecs | None) -> Iterator[None]:
    """Pack tensors without data that ``log`` sees in the block as ``codecs`` says."""
    known = codecs or Codecs()
    of_joined: dict[int, str] = {}
    """Index of the storage of an output that chunks were joined to -> its codec."""

    def joined(outputs: Sequence[Tensor]) -> None:
        path = log.module_running()
        for place, output in enumerate(outputs):
            if (storage := log.known(output)) is not None:
                of_joined[storage.index] = known.outputs.get((path, place), "null")

    def codec_of(tensor: Tensor) -> str:
        storage = log.known(tensor)
        if storage is None:
            return "null"
        return of_joined.get(storage.index) or known.saved.get((storage.path, storage.rank), "null")

    with recorded_answers(codec_of, joined), recorded_shares(lambda: known.inputs.get(log.module_running(), 1.0)):
        yield


@contextmanager
def active(log: StorageLog, step: Step) -> Iterator[None]:
    """Let ``log`` count the block, with everything that exists before ``step`` in it; generators are seeded."""
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
    """Take one ``step`` under an active ``log``, and leave its gradients."""

    def enter(phase: Phase) -> None:
        if log.phase == "backward":
            _label_gradients(log, step.model)
        log.enter(phase)

    step.take(enter)
    log.settle()
    _label_gradients(log, step.model)


def resident_bytes(step: Step) -> int:
    """Return the bytes of parameters, gradients if there are any, buffers, inputs and optimizer state of ``step``."""
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
    """Return the tensors in the present state of the optimizers of ``step``."""
    states = (state for optimizer in step.optimizers() for state in optimizer.state.values())
    return [t for state in states for t in state.values() if isinstance(t, Tensor)]


def _label_gradients(log: StorageLog, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            storage = log.see(parameter.grad, "gradients")
            if storage is not None:
                storage.kind = "gradients"


_MADE = frozenset(("activations", "temporaries"))
"""Kinds of storages that say no more than when they were made."""

_DEVICE = torch.ops.prim.device.default

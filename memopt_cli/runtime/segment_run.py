"""One call of a segment: what autograd saves in forward is given up, and made again when backward asks for it.

The mechanism is that of PyTorch's non-reentrant checkpoint: hooks on what autograd saves::

    forward     autograd saves 5 tensors    each is held by a _Saved until forward has ended, and then dropped
    backward    a node asks for the 4th     forward runs again; the tensors that autograd saves now are put into the
                                            five _Saved, and after the fifth the run is broken off, for it is done

They are held until forward has ended, because only then it is known whether it can run again.  That does not raise the
peak of a step: all of them are there at once again when forward runs for the second time.  A node that is gone by then
takes its _Saved with it.

A call inside another one has its inputs saved by that one, and so makes them again with it.  A segment that runs inside
the recomputation of another drops what it saves: nobody asks for it, unless the other's forward computes gradients.

References point from autograd's nodes to :class:`_Saved`, from there to :class:`SegmentRun`, and from there to inputs
and state without the graphs that made them.  So a call goes when its graph goes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.in_backward import updates_in_backward
from memopt_cli.runtime.learned import Learned
from memopt_cli.runtime.lengths import at_length, present_length
from memopt_cli.runtime.module_state import name_of
from memopt_cli.runtime.noise import noise_since
from memopt_cli.runtime.private_torch import forbids_hooks, is_of_transform, memory_of, next_node, not_compiled
from memopt_cli.runtime.running import outermost_turn, recomputing, segment_around, taking_turns
from memopt_cli.runtime.samples import agrees, glance, is_alike, sample
from memopt_cli.runtime.selective import KeptOutputs, NothingKept
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.runtime.unsafe import as_of, cannot_repeat, run_plainly, this_moment, unrepeatable_runs
from memopt_cli.runtime.waiting import wait_for

Repeat = Callable[[Sequence[Tensor], Sequence[Any]], object]
"""Runs a forward again, on the tensors and the other objects among its arguments."""
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Unrepeatable(RuntimeError):
    """A forward cannot run in a segment, or computes something else there; a sentence without its subject."""


class _Complete(Exception):
    """Everything that forward saved has been made again.  An ``Exception``: at others, modules skip their hooks."""


class _Saved:
    """A tensor that autograd saved in a segment."""

    __slots__ = ("__weakref__", "broken", "is_input", "packed", "run", "shape", "tensor", "version")

    def __init__(self, run: SegmentRun | None, tensor: Tensor) -> None:
        self.run = run
        """The call that makes it again; ``None`` if that cannot run again."""
        self.tensor: Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()
        """The tensor without the node that made it, which may be the very one that saves it; ``None`` if dropped."""
        self.version = version_of(tensor)
        self.shape: torch.Size | None = None
        self.packed: Any = None
        """The form in which hooks around the segment keep it, if its call cannot run again; otherwise ``None``."""
        self.is_input = False
        """Whether it is an input of a segment inside this one."""
        self.broken = ""
        """Why backward cannot have it, as when forward itself has written to it later; empty if it can."""


class SegmentRun:
    """One call of a segment."""

    is_of_segment, is_recomputation = True, False
    """Whether hooks on saving belong to a segment, and to its recomputation: asked of the object that has the hooks."""

    def __init__(
        self,
        module: nn.Module,
        learned: Learned,
        start: StartingState,
        repeat: Repeat,
        kept: KeptOutputs | NothingKept,
    ) -> None:
        """Prepare a call of ``module`` that starts from ``start``; ``repeat`` runs its forward again.

        ``learned``: what earlier calls have shown; ``kept``: keeps some operators' outputs.
        """
        self._module, self._learned, self._start, self._repeat = module, learned, start, repeat
        self._kept = kept
        self._began, self._length = this_moment(), present_length()
        self._outermost = outermost_turn() or module
        self._refs: list[ref[_Saved]] = []
        """The saved tensors in order, as far as autograd still has them."""
        self._glance: tuple[int, bytes] | None = None
        """The place of the saved tensor that is compared in every call, and some of its bytes; ``None`` if none is."""
        self._samples: dict[int, list[Any]] = {}
        """Place of a saved tensor -> a few of its elements; empty unless the call is watched."""
        self._first_node = next_node()
        """The number of the first node of autograd that forward makes."""
        self._watch = _Watch(self._first_node) if start.is_watched else None
        self.is_running = False
        self._was_repeated = False
        self._has_copies = learned.overwrites_input
        """Whether it was given copies of its inputs, since forward may write over them."""
        self.gathers = False
        """Whether it is one chunk of several that share batch statistics."""
        self.saved_inputs: list[_Saved] = []
        """The tensors among the arguments, if they belong to a segment around; otherwise empty."""
        self.inputs: Callable[[], list[Tensor]] = list
        """A function that returns the tensors among the arguments."""
        self.lent: Callable[[], Sequence[Tensor]] = tuple
        """A function that returns the tensors of the starting state that were lent to a segment around."""

    # ------------------------------------------------------------------------------------------------- forward

    def first(self, forward: functools.partial[Any], given: Sequence[Tensor], hooks: Hooks | None) -> Any:
        """Run ``forward`` for the first time.

        ``given``: the tensors among its arguments; ``hooks``: those on saving around the segment.  Raises
        :class:`Unrepeatable` where it must run without hooks of the segment's own.
        """
        versions, before = [version_of(t) for t in given], unrepeatable_runs()
        output = self._run(forward)
        if self._kept.changes:
            raise Unrepeatable(self._kept.changes)
        if reason := self._start.lost():
            run_plainly(self._module, reason)
        if self._start.is_surprised:
            cannot_repeat()
        overwrites = versions != [version_of(t) for t in given]
        self._learned.overwrites_input |= overwrites
        for saved in self.saved_inputs:  # the segment around makes them again, and this one overwrites them again
            saved.version = version_of(saved.tensor)
        if unrepeatable_runs() != before:  # it cannot run again, or one within cannot
            self._keep(hooks)
        elif overwrites and not (self.saved_inputs or self._has_copies):
            self._keep(None)
        else:
            self._give_up((output, forward.args))  # it may hand something over in a list that it was given
        return output

    def _run(self, forward: Callable[[], Any]) -> Any:
        self.is_running, has_failed = True, True
        hold = self._hold if self._watch is None else self._hold_watched
        try:
            with saved_tensors_hooks(hold, give), self._kept.recording():
                output = forward()
            has_failed = False
        except RuntimeError as error:
            if forbids_hooks(error):
                raise Unrepeatable("computes gradients by torch.func") from error
            raise
        finally:
            self.is_running = False
            self._start.settle(has_failed=has_failed)
        return output

    @not_compiled  # as are the other functions that autograd calls, within a part that is compiled
    def _hold(self, tensor: Tensor) -> _Saved:
        self._kept.note_save()
        saved = _Saved(self, tensor)
        self._refs.append(ref(saved))
        return saved

    @not_compiled
    def _hold_watched(self, tensor: Tensor) -> _Saved:
        assert self._watch is not None
        self._watch.note(tensor)
        return self._hold(tensor)

    def hold_input(self, tensor: Tensor) -> _Saved:
        """Save ``tensor``, an input of a segment inside this one, and return what stands for it."""
        saved = (self._hold if self._watch is None else self._hold_watched)(tensor)
        saved.is_input = True
        return saved

    def note_use(self) -> None:
        """Note that forward itself asks for what it saved.  Raises :class:`Unrepeatable` if gradients would differ."""
        if self.gathers:  # to which every chunk adds through the statistics
            raise Unrepeatable("computes gradients in its forward, through batch statistics that its chunks share")

    def _give_up(self, handed: Any) -> None:
        """Drop what was saved: forward, which ``handed`` on tensors, can run again."""
        if self._watch is not None:
            noise = noise_since(self._first_node, tensors_of(handed))
            self._samples = self._watch.samples(self._refs, noise)
            self._learned.runs_to_end[len(self._refs)] = not noise.isdisjoint(self._watch.last)
            self._learned.compared = self._last_activation()
        else:
            self._look_at_one()
            if len(self._refs) not in self._learned.runs_to_end:  # it has taken another course than those before
                noise = noise_since(self._first_node, tensors_of(handed))
                self._learned.runs_to_end[len(self._refs)] = bool(noise)
        for saved in self._there():
            tensor = saved.tensor
            assert tensor is not None
            saved.shape = tensor.shape
            if version_of(tensor) != saved.version:
                saved.broken = _overwritten(tensor, saved.version)
            saved.tensor = None
        if updates_in_backward():
            wait_for(self._module.parameters(), self)

    def _last_activation(self) -> int | None:
        """Return the place of the tensor to compare in every call, -1 for the last; ``None`` if none can be.

        It is counted from the end: a later call may save more tensors, and what is new in it shows in its last ones.
        """
        own = (p for p in self._module.parameters() if type(p) is nn.Parameter and not is_of_transform(p))
        parameters = set(map(memory_of, own))
        for place in sorted(self._samples, reverse=True):
            saved = self._refs[place]()
            tensor = None if saved is None else saved.tensor
            if tensor is not None and glance(tensor) is not None and memory_of(tensor) not in parameters:
                return place - len(self._refs)
        return None

    def _look_at_one(self) -> None:
        """Note some of the last activation, where that costs next to nothing."""
        if self._learned.compared is None or self.gathers:  # whose passes save now this, now that
            return
        place = len(self._refs) + self._learned.compared
        if place < 0:
            return
        saved = self._refs[place]()
        if saved is not None and saved.tensor is not None and version_of(saved.tensor) == saved.version:
            seen = glance(saved.tensor)
            self._glance = None if seen is None else (place, seen)

    def _keep(self, hooks: Hooks | None) -> None:
        """Have backward get what was saved as it is: forward cannot run again.

        Inputs of segments within are kept untouched: other hooks may lay them out otherwise in memory, and these
        segments would run on that.
        """
        for saved in self._there():
            tensor, saved.run = saved.tensor, None
            assert tensor is not None
            if hooks is not None and not saved.is_input and version_of(tensor) == saved.version:
                with torch.no_grad():
                    saved.packed, saved.tensor = (hooks[1], hooks[0](tensor)), None
        self._refs.clear()

    def _there(self) -> Iterator[_Saved]:
        return (saved for one in self._refs if (saved := one()) is not None)

    # ------------------------------------------------------------------------------------------------ backward

    def remake(self) -> None:
        """Run again now, unless that was done: the values of parameters are about to change."""
        if not self._was_repeated:
            self.repeat()

    def repeat(self) -> None:
        """Run forward again from where it started, without a trace, and lay what is saved into what was saved then.

        It knows nothing of what came before its inputs: hooks that forward puts on an input, or that others have put
        there, belong to the first run.
        """
        self._was_repeated = True
        if segment_around() is not None:  # its forward calls torch.autograd.grad, say, and so will its recomputation
            self._learned.is_differentiated_in_forward = True
        to_end = self._learned.runs_to_end.get(len(self._refs), False)
        again = _Again(self._module, self._refs, self._samples, self._glance, runs_to_end=to_end)
        with torch.enable_grad(), taking_turns(self._outermost), taking_turns(self._module), at_length(self._length):
            given = self.inputs()
            replayed = self._start.replay(self.lent())
            with recomputing(self._module), replayed as others, self._kept.replaying(), as_of(self._began):
                again.run(functools.partial(self._repeat, given, others))
        if self._samples:
            self._learned.runs.note_comparison()
        self._samples = {}
        if reason := again.difference():
            run_plainly(self._module, reason)


class _Again:
    """The tensors that autograd saves while a forward runs again."""

    is_of_segment, is_recomputation = True, True

    def __init__(
        self,
        module: nn.Module,
        refs: Sequence[ref[_Saved]],
        samples: Mapping[int, list[Any]],
        seen: tuple[int, bytes] | None,
        *,
        runs_to_end: bool,
    ) -> None:
        self._module, self._refs, self._samples, self._runs_to_end = module, refs, samples, runs_to_end
        self._count = 0
        self._seen_at, self._seen = seen or (-1, b"")
        self._suspects: list[tuple[list[Any], Tensor]] = []
        self._unlike: Tensor | None = None

    @not_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        """Put ``tensor`` in its place; the last one ends the run."""
        made = tensor.detach()
        place, self._count = self._count, self._count + 1
        if place >= len(self._refs):
            if self._runs_to_end:
                return made
            raise _Complete  # again, for the module's own code has caught it
        saved = self._refs[place]()
        if saved is not None:
            if saved.shape is None or made.shape != saved.shape:
                raise self._other(
                    f"saves a tensor of shape {tuple(made.shape)}, and forward saved {tuple(saved.shape or ())}"
                )
            saved.tensor, saved.version = made, version_of(made)
        if (before := self._samples.get(place)) is not None and not agrees(before, made):
            self._suspects.append((before, made))
        if place == self._seen_at and not is_alike(self._seen, made):
            self._unlike = made
        if self._count == len(self._refs) and not self._runs_to_end:
            raise _Complete
        return made

    hold_input = pack

    def run(self, repeat: Callable[[], object]) -> None:
        """Call ``repeat``, which ends early.  Raises :class:`RuntimeError` if it does not do what forward did."""
        try:
            with saved_tensors_hooks(self.pack, _itself):
                repeat()
        except _Complete:
            pass
        except RuntimeError:  # as which the exception leaves TorchScript's interpreter
            if self._count < len(self._refs):
                raise
        if self._count < len(self._refs):
            raise self._other(f"saves {self._count} tensors, and forward saved {len(self._refs)}")

    def _other(self, what: str) -> RuntimeError:
        """Return the error for a forward that does otherwise than before, which runs plainly from now on."""
        run_plainly(self._module, _DIFFERS, silently=True)
        return RuntimeError(
            f"{name_of(self._module)} {_DIFFERS}: it {what}. Backward cannot go on in this step; from the next one on "
            "the module runs without recomputation"
        )

    def difference(self) -> str:
        """Return what differs from forward, a sentence without its subject; empty if nothing that was looked at does.

        Some operators fill a tensor after they have saved it, so those that differed then are looked at again.
        """
        differing = (made for before, made in self._suspects if not agrees(before, made))
        shape = next((tuple(made.shape) for made in differing), None)
        if self._unlike is not None:
            shape = tuple(self._unlike.shape)
        return (
            ""
            if shape is None
            else (
                f"draws or reads something that memopt does not see (a tensor of shape {shape} was another when it ran "
                "again, and the gradients of this step are wrong)"
            )
        )


_DIFFERS = "computes something else when it runs again for backward"


class _Watch:
    """Notes on a watched forward, to be compared when it runs again."""

    def __init__(self, first_node: int) -> None:
        self.last = range(first_node, first_node)
        """Numbers of nodes among which is the one that saved a tensor last.  They can be several, since an operator
        that is given a view of what was written in place makes a node for the view after its own.
        """
        self._notes: list[tuple[range, list[Any] | None]] = []

    def note(self, tensor: Tensor) -> None:
        """Note that autograd saves ``tensor`` now."""
        following = next_node()
        if following != self.last.stop:
            self.last = range(self.last.stop, following)
        self._notes.append((self.last, sample(tensor)))

    def samples(self, saved: Sequence[ref[_Saved]], noise: Set[int]) -> dict[int, list[Any]]:
        """Return a few elements of each tensor by its place, but for those that were written later or have none.

        ``noise``: numbers of the nodes that fill a tensor after they have saved it.
        """
        found: dict[int, list[Any]] = {}
        for place, (one, (nodes, elements)) in enumerate(zip(saved, self._notes, strict=True)):
            tensor = None if (there := one()) is None else there.tensor
            if tensor is None or elements is None or not noise.isdisjoint(nodes):
                continue
            if sample(tensor) == elements:
                found[place] = elements
        return found


class Unused:
    """Tensors that autograd saves in a segment inside the recomputation of another, for which backward never asks."""

    is_of_segment, is_recomputation = True, True

    def __init__(self, *, drops: bool) -> None:
        """Prepare one call.  ``drops``: whether the tensors are dropped when it ends, and not with their graph."""
        self._drops = drops
        self._refs: list[ref[_Saved]] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Hold the tensors for the time of the block, in which forward itself may ask for them."""
        try:
            with saved_tensors_hooks(self.hold, give):
                yield
        finally:
            for one in self._refs if self._drops else ():
                if (saved := one()) is not None:
                    saved.tensor = None

    @not_compiled
    def hold(self, tensor: Tensor) -> _Saved:
        saved = _Saved(None, tensor)
        self._refs.append(ref(saved))
        return saved

    hold_input = hold


@not_compiled
def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _overwritten(tensor: Tensor, version: int) -> str:
    return (
        f"a tensor of shape {tuple(tensor.shape)} needed for backward has been modified by an inplace operation: it is "
        f"at version {version_of(tensor)}, and {version} was expected"
    )


@not_compiled
def give(saved: _Saved) -> Tensor:
    """Return what autograd saved, made again if need be."""
    run = saved.run
    if run is None or run.is_running:
        if run is not None:
            run.note_use()
        if saved.packed is not None:
            unpack, packed = saved.packed
            whole: Tensor = unpack(packed)
            return whole
    elif saved.tensor is None:
        if saved.broken:
            raise RuntimeError(saved.broken)
        run.repeat()
    tensor = saved.tensor
    if tensor is None:
        raise RuntimeError("backward asks for a tensor that a recomputation has dropped; please report this")
    if version_of(tensor) != saved.version:
        raise RuntimeError(_overwritten(tensor, saved.version))
    if run is not None and not run.is_running:
        saved.tensor = None  # asked for twice, it is made again
    return tensor

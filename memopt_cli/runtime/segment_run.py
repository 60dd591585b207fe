"""Running one call of a segment: tensors saved in forward are dropped, and recomputed when backward asks for one.

The mechanism is the same as in PyTorch's non-reentrant checkpoint, hooks on the tensors that autograd saves::

    forward     autograd saves 5 tensors    each is held by a _SavedTensor until forward has ended, and then dropped
    backward    a node asks for the 4th     forward runs again; the tensors that autograd saves now are put into the
                                            five _SavedTensors, and an exception ends the run after the fifth

In the names below, *hold* saves a tensor until forward has ended, *drop* frees the held ones, *keep* saves them for
backward after all, or the outputs of operators that the plan keeps, and *note* only remembers a number or a key.

The tensors are held until forward has ended, because only then is it known whether forward can be recomputed.  This
does not raise the peak of a step: all of them exist together once more when forward runs for the second time.  If a
node of autograd is freed before backward, its _SavedTensor is freed with it, and the recomputation skips it.

If a segment is called inside another, the outer segment saves the inner segment's inputs as it saves any tensor, so
that its recomputation includes them.  Inside the recomputation of another segment, a segment drops the tensors that it
saves: backward never asks for them, unless the outer segment's forward computes gradients itself.

References point from autograd's nodes to :class:`_SavedTensor`, from there to :class:`SegmentRun`, and from there to
inputs and state without the graphs that made them.  So a call is freed together with its graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt_cli.runtime.copies import version_of
from memopt_cli.runtime.graph import reachable_nodes
from memopt_cli.runtime.in_backward import updates_in_backward
from memopt_cli.runtime.learned import SegmentKnowledge
from memopt_cli.runtime.lengths import current_length
from memopt_cli.runtime.module_state import Complaint, label_of
from memopt_cli.runtime.private_torch import (
    forbids_hooks,
    is_of_transform,
    memory_of,
    name_of_node,
    next_node,
    not_compiled,
    sequence_number,
    unchanged,
)
from memopt_cli.runtime.running import enclosing_segment_run, outermost_segment, recomputing, taking_turns
from memopt_cli.runtime.samples import few_bytes, matches_few_bytes, matches_sample, sample
from memopt_cli.runtime.selective import KeptOutputs, NothingKept
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.this_thread import as_of
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.runtime.unsafe import cannot_repeat, run_plainly, this_moment, unrepeatable_runs
from memopt_cli.runtime.waiting import wait_for

Repeat = Callable[[Sequence[Tensor], Sequence[Any]], object]
"""A function that recomputes a forward from the tensors and the other objects among its arguments."""
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Autograd's hooks on saving: one that packs a tensor, and one that unpacks it."""
_DIFFERS = "computes something else when it runs again for backward"
_FILLED_LATER: Final = ("RreluWithNoiseBackward", "RreluWithNoiseFunctionalBackward")
"""Names of the nodes of all ATen operators whose schemas say that they write to an argument that they save.

A recomputation ends when the last tensor has been saved.  If the last operator is of this kind, it has not filled its
tensor by then, so a segment that ends in such an operator runs to its end.
"""


class UnrepeatableError(RuntimeError):
    """A forward cannot run in a segment, or computes other values there; the message is a :data:`Complaint`."""


class _StopRecomputation(Exception):
    """The signal that ends a recomputation: everything that forward saved has been recomputed.

    It is an ``Exception``, since ``nn.Module`` calls its ``always_call`` hooks only for those.
    """


class _SavedTensor:
    """A tensor that autograd saved in a segment; :func:`_make_saved` makes these.

    A call saves many, so rarely set values are the class's, and there is no ``__init__``, which would take twice as
    long.
    """

    run: SegmentRun | None
    """The call that recomputes the tensor; ``None`` if the call cannot be recomputed."""
    tensor: Tensor | None
    """The tensor; ``None`` if it is dropped."""
    version: int
    """The tensor's version when it was saved."""
    packed: Any = None
    """The unpacking hook that encloses the segment, and the packed form, if its call cannot be recomputed."""
    is_input = False
    """Whether the tensor is an input of a segment inside this one."""
    broken = ""
    """Reason why backward cannot use the tensor, for example that forward wrote to it later."""


def _make_saved(run: SegmentRun | None, tensor: Tensor) -> _SavedTensor:
    saved = _SavedTensor()
    saved.run = run
    # Without its ``grad_fn``, which may be the very node that saves the tensor: that would be a cycle.
    saved.tensor = tensor if tensor.is_leaf else tensor.detach()
    saved.version = version_of(tensor)
    return saved


class SegmentRun:
    """One call of a segment."""

    is_of_segment, is_recomputation = True, False
    """Class attributes that let ``running.enclosing_segment_run`` recognize the object behind saved-tensor hooks."""

    def __init__(
        self,
        module: nn.Module,
        learned: SegmentKnowledge,
        start: StartingState,
        repeat: Repeat,
        kept: KeptOutputs | NothingKept,
    ) -> None:
        """Prepare a call of ``module`` that starts from ``start``; ``repeat`` recomputes its forward.

        ``learned``: the knowledge from earlier calls.
        ``kept``: keeps the outputs of some operators, which are then not recomputed.
        """
        self._module = module
        self._learned = learned
        self._start = start
        self._repeat = repeat
        self._kept = kept
        self._keeps = type(kept) is KeptOutputs
        self._began = this_moment()
        self._length = current_length()
        outermost = outermost_segment() or module
        self._locked = (module,) if outermost is module else (outermost, module)
        """The segments whose locks a recomputation takes."""
        self._refs: list[ref[_SavedTensor]] = []
        """Weak references to the saved tensors, in order: dead once autograd has freed the node."""
        self._shapes: list[torch.Size | None] = []
        """The shapes of the saved tensors, once they are dropped; ``None`` if autograd had freed the node before."""
        self._compared_index: int | None = None
        """Index of the saved tensor that is compared in every call; ``None`` if no tensor is compared."""
        self._compared_bytes = b""
        """Some bytes of the tensor that is compared in every call."""
        self._samples: dict[int, list[Any]] = {}
        """Index of a saved tensor -> a few of its elements; empty unless the call is watched."""
        self._first_node = next_node()
        """The number of the first node of autograd that forward makes."""
        self._watch = _Watch(self._first_node) if start.is_watched else None
        """Notes on the saved tensors; ``None`` if the call is not watched."""
        self.is_running = False
        """Whether forward is running for the first time."""
        self._was_repeated = False
        self._has_copies = learned.overwrites_input
        """Whether copies of the inputs are stored, since forward may write over the inputs."""
        self.gathers = False
        """Whether the call is one chunk of several that share batch statistics."""
        self.saved_inputs: list[_SavedTensor] = []
        """The tensors among the arguments that an enclosing segment saves."""
        self.inputs: Callable[[], list[Tensor]] = list
        """A function that returns the tensors among the arguments."""
        self.state_tensors: Callable[[], Sequence[Tensor]] = tuple
        """A function that returns the tensors of the starting state that were released to an outer segment."""

    # ------------------------------------------------------------------------------------------------- forward

    def run_first(self, forward: functools.partial[Any], inputs: Sequence[Tensor], hooks: Hooks | None) -> Any:
        """Run ``forward`` for the first time.

        ``inputs``: the tensors among its arguments; ``hooks``: the enclosing hooks on saving.  Raises
        :class:`UnrepeatableError` if ``forward`` must run without the segment's hooks.
        """
        versions = [version_of(t) for t in inputs]
        before = unrepeatable_runs()
        output = self._run_forward(forward)
        if self._kept.other_kernel:
            raise UnrepeatableError(self._kept.other_kernel)
        if reason := self._start.irreversible_effect():
            run_plainly(self._module, reason)
        if self._start.has_new_changes:
            cannot_repeat()
        overwrites = versions != [version_of(t) for t in inputs]
        self._learned.overwrites_input |= overwrites
        # If forward wrote over its inputs, backward must not take that for an error: the segment around makes them
        # again, and this one overwrites them again.
        for saved in self.saved_inputs:
            saved.version = version_of(saved.tensor)
        if unrepeatable_runs() != before:  # this run, or one of an inner segment, cannot be repeated
            self._keep_saved(hooks)
        elif overwrites and not (self.saved_inputs or self._has_copies):  # the inputs are lost for a recomputation
            self._keep_saved(None)
        else:
            self._drop_saved((output, forward.args))  # the arguments too: forward may append outputs to a list in them
        return output

    def _run_forward(self, forward: Callable[[], Any]) -> Any:
        self.is_running = has_failed = True
        hold = self._hold if self._watch is None else self._hold_watched
        try:
            with saved_tensors_hooks(hold, unpack_saved), self._kept.recording():
                output = forward()
            has_failed = False
        except RuntimeError as error:
            if forbids_hooks(error):
                raise UnrepeatableError("computes gradients by torch.func") from error
            raise
        finally:
            self.is_running = False
            self._start.end_forward(has_failed=has_failed)
        return output

    @not_compiled  # autograd calls this, even from parts of the model that ``torch.compile`` compiles
    def _hold(self, tensor: Tensor) -> _SavedTensor:
        if self._keeps:
            self._kept.note_save()
        saved = _make_saved(self, tensor)
        self._refs.append(ref(saved))
        return saved

    @not_compiled
    def _hold_watched(self, tensor: Tensor) -> _SavedTensor:
        assert self._watch is not None
        self._watch.note_saved(tensor)
        return self._hold(tensor)

    def hold_input(self, tensor: Tensor) -> _SavedTensor:
        """Save ``tensor``, an input of a segment inside this one."""
        saved = (self._hold if self._watch is None else self._hold_watched)(tensor)
        saved.is_input = True
        return saved

    def note_use(self) -> None:
        """Note that forward asks for a saved tensor.  Raises :class:`UnrepeatableError` if gradients would differ."""
        if self.gathers:  # the gradient of one chunk depends on the others, through the statistics, which end its graph
            raise UnrepeatableError("computes gradients in its forward, through batch statistics that its chunks share")

    def _drop_saved(self, results: Any) -> None:
        """Drop the saved tensors, since forward can be recomputed; ``results`` hold its outputs."""
        if self._watch is not None:
            noise = _noise_since(self._first_node, tensors_of(results))
            self._samples = self._watch.samples(self._refs, noise)
            self._learned.runs_to_end[len(self._refs)] = not noise.isdisjoint(self._watch.last)
            self._learned.compared = self._last_activation()
        else:
            self._note_few_bytes()
            # If forward saves a number of tensors that it never saved before, it has taken another branch.
            if len(self._refs) not in self._learned.runs_to_end:
                noise = _noise_since(self._first_node, tensors_of(results))
                self._learned.runs_to_end[len(self._refs)] = bool(noise)
        for reference in self._refs:
            saved = reference()
            if saved is None:
                self._shapes.append(None)
                continue
            tensor = saved.tensor
            assert tensor is not None
            self._shapes.append(tensor.shape)
            if version_of(tensor) != saved.version:
                saved.broken = _overwritten_message(tensor, saved.version)
            saved.tensor = None
        if updates_in_backward():
            wait_for(self._module.parameters(), self)

    def _last_activation(self) -> int | None:
        """Return the index of the tensor to compare in every call; ``None`` if no tensor can be compared.

        The index is negative, counted from the end: if a later call saves more tensors, its last ones differ.
        """
        own_parameters = (p for p in self._module.parameters() if type(p) is nn.Parameter and not is_of_transform(p))
        parameters = set(map(memory_of, own_parameters))
        for index in sorted(self._samples, reverse=True):
            saved = self._refs[index]()
            tensor = None if saved is None else saved.tensor
            if tensor is not None and few_bytes(tensor) is not None and memory_of(tensor) not in parameters:
                return index - len(self._refs)
        return None

    def _note_few_bytes(self) -> None:
        """Note a few bytes of the last activation, if they can be read at almost no cost."""
        if self._learned.compared is None or self.gathers:  # passes over the same chunks save different tensors
            return
        index = len(self._refs) + self._learned.compared
        if index < 0:
            return
        saved = self._refs[index]()
        if saved is not None and saved.tensor is not None and version_of(saved.tensor) == saved.version:
            seen = few_bytes(saved.tensor)
            if seen is not None:
                self._compared_index, self._compared_bytes = index, seen

    def _keep_saved(self, hooks: Hooks | None) -> None:
        """Keep the saved tensors for backward, packed by the enclosing ``hooks``: forward cannot be recomputed.

        Inputs of segments inside are not packed: hooks may return them with other strides, and these segments would
        then run on strides that differ from forward's.
        """
        for saved in filter(None, (reference() for reference in self._refs)):
            tensor, saved.run = saved.tensor, None
            assert tensor is not None
            if hooks is not None and not saved.is_input and version_of(tensor) == saved.version:
                with torch.no_grad():
                    saved.packed, saved.tensor = (hooks[1], hooks[0](tensor)), None
        self._refs.clear()

    # ------------------------------------------------------------------------------------------------ backward

    def ensure_recomputed(self) -> None:
        """Recompute forward now, unless it was recomputed: the values of parameters are about to change."""
        if not self._was_repeated:
            self.repeat()

    def repeat(self) -> None:
        """Recompute forward from its starting state, and put the recomputed tensors into the :class:`_SavedTensor`.

        Its inputs are detached from the graph that made them: hooks that forward sets on an input, or that others have
        set there, act in the first run only.
        """
        self._was_repeated = True
        # Backward runs inside the forward of an enclosing segment, which calls ``torch.autograd.grad``, for example.
        # It will do so again when it is recomputed.
        if enclosing_segment_run() is not None:
            self._learned.is_differentiated_in_forward = True
        to_end = self._learned.runs_to_end.get(len(self._refs), False)
        compared = self._compared_index, self._compared_bytes
        repetition = _Repetition(self._module, self._refs, self._shapes, self._samples, *compared, runs_to_end=to_end)
        with torch.enable_grad(), taking_turns(*self._locked), as_of(self._began, self._length):
            inputs = self.inputs()
            with recomputing(self._module), self._start.replay(self.state_tensors()) as others, self._kept.replaying():
                repetition.run(functools.partial(self._repeat, inputs, others))
        if self._samples:
            self._learned.schedule.note_comparison()
        self._samples = {}
        if reason := repetition.difference():
            run_plainly(self._module, reason)


class _Repetition:
    """Hooks for a recomputed forward, which put its saved tensors into the :class:`_SavedTensor` of the first run."""

    is_of_segment, is_recomputation = True, True  # see SegmentRun

    def __init__(
        self,
        module: nn.Module,
        refs: Sequence[ref[_SavedTensor]],
        shapes: Sequence[torch.Size | None],
        samples: Mapping[int, list[Any]],
        compared_index: int | None,
        compared_bytes: bytes,
        *,
        runs_to_end: bool,
    ) -> None:
        """Prepare a run of ``module`` that recomputes the tensors of ``refs``, of these ``shapes``.

        ``samples``: elements of some of them; ``compared_index``, ``compared_bytes``: the tensor that is compared in
        every call, and some of its bytes; ``runs_to_end``: do not end the run when the last tensor is saved.
        """
        self._module = module
        self._refs = refs
        self._shapes = shapes
        self._samples = samples
        self._runs_to_end = runs_to_end
        self._count = 0
        self._compared_index, self._compared_bytes = compared_index, compared_bytes
        self._suspects: list[tuple[list[Any], Tensor]] = []
        """The elements and the tensor for each sampled one that differed when it was saved again."""
        self._differing: Tensor | None = None
        """The tensor that is compared in every call, if it differs."""

    @not_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        """Put ``tensor`` into the next :class:`_SavedTensor`; end the run after the last."""
        leaf = tensor if tensor.is_leaf else tensor.detach()
        index, refs = self._count, self._refs
        self._count = index + 1
        if index >= len(refs):
            if self._runs_to_end:
                return leaf
            raise _StopRecomputation  # once more: an ``except Exception`` in the module's own code has caught the first
        saved = refs[index]()
        if saved is not None:
            shape = self._shapes[index]
            if leaf.shape != shape:
                raise self._stop_repeating(
                    f"saves a tensor of shape {tuple(leaf.shape)}, and forward saved {tuple(shape or ())}"
                )
            saved.tensor = leaf
            saved.version = version_of(leaf)
        if self._samples and (before := self._samples.get(index)) is not None and not matches_sample(before, leaf):
            self._suspects.append((before, leaf))
        if index == self._compared_index and not matches_few_bytes(self._compared_bytes, leaf):
            self._differing = leaf
        if index + 1 == len(refs) and not self._runs_to_end:
            raise _StopRecomputation
        return leaf

    hold_input = pack

    def run(self, repeat: Callable[[], object]) -> None:
        """Call ``repeat``, which ends early.  Raises :class:`RuntimeError` if it saves different tensors."""
        try:
            with saved_tensors_hooks(self.pack, unchanged):
                repeat()
        except _StopRecomputation:
            pass
        except RuntimeError:  # TorchScript's interpreter raises one in place of ``_StopRecomputation``
            if self._count < len(self._refs):
                raise
        if self._count < len(self._refs):
            raise self._stop_repeating(f"saves {self._count} tensors, and forward saved {len(self._refs)}")

    def _stop_repeating(self, how: str) -> RuntimeError:
        """Stop recomputing the module from now on, and return the error for a run that differs in ``how``."""
        run_plainly(self._module, _DIFFERS, silently=True)
        return RuntimeError(
            f"{label_of(self._module)} {_DIFFERS}: it {how}. This step cannot be completed. From the next step on, "
            "the module runs without recomputation"
        )

    def difference(self) -> Complaint:
        """Return the difference of the run from forward.

        Some operators fill a tensor after they have saved it, so tensors that differed then are compared once more.
        """
        differing = (recomputed for before, recomputed in self._suspects if not matches_sample(before, recomputed))
        shape = next((tuple(recomputed.shape) for recomputed in differing), None)
        if self._differing is not None:
            shape = tuple(self._differing.shape)
        if shape is None:
            return ""
        return (
            f"uses random numbers or state that memopt cannot restore (a tensor of shape {shape} had other values when "
            "it was recomputed, so the gradients of this step are wrong)"
        )


class _Watch:
    """Samples of the tensors that a watched forward saves, to be compared with its recomputation."""

    def __init__(self, first_node: int) -> None:
        self.last = range(first_node, first_node)
        """Numbers of nodes, among them the node that saved a tensor last.

        There can be several: an operator on a view that was written in place makes a node for the view after its own.
        """
        self._notes: list[tuple[range, list[Any] | None]] = []
        """For each saved tensor, :attr:`last` then, and a few of its elements, or ``None`` if they cannot be read."""

    def note_saved(self, tensor: Tensor) -> None:
        following = next_node()
        if following != self.last.stop:
            self.last = range(self.last.stop, following)
        self._notes.append((self.last, sample(tensor)))

    def samples(self, saved: Sequence[ref[_SavedTensor]], noise: Set[int]) -> dict[int, list[Any]]:
        """Return a few elements of each saved tensor by its index, except of those that were written later.

        ``noise``: numbers of the nodes that fill a tensor after they have saved it.
        """
        samples: dict[int, list[Any]] = {}
        for index, (reference, (nodes, elements)) in enumerate(zip(saved, self._notes, strict=True)):
            tensor = None if (live := reference()) is None else live.tensor
            if tensor is None or elements is None or not noise.isdisjoint(nodes):
                continue
            if sample(tensor) == elements:
                samples[index] = elements
        return samples


class UnusedSaves:
    """Hooks for a segment called while another is recomputed: backward never asks for the tensors that it saves."""

    is_of_segment, is_recomputation = True, True  # see SegmentRun

    def __init__(self, *, drops: bool) -> None:
        """Prepare one call.  ``drops``: drop the tensors when the call ends; otherwise they go with their graph."""
        self._drops = drops
        self._refs: list[ref[_SavedTensor]] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Hold the tensors in the ``with`` block, in which forward itself may ask for them."""
        try:
            with saved_tensors_hooks(self.hold, unpack_saved):
                yield
        finally:
            for reference in self._refs if self._drops else ():
                if (saved := reference()) is not None:
                    saved.tensor = None

    @not_compiled
    def hold(self, tensor: Tensor) -> _SavedTensor:
        saved = _make_saved(None, tensor)
        self._refs.append(ref(saved))
        return saved

    hold_input = hold


def _noise_since(first: int, outputs: Iterable[Tensor]) -> frozenset[int]:
    """Return the numbers, from ``first`` on, of the nodes of ``outputs`` that fill a tensor after saving it.

    Backward never asks a node for its tensors if no output depends on the node.
    """
    nodes = reachable_nodes(outputs, lambda node: sequence_number(node) < first)
    return frozenset(sequence_number(node) for node in nodes if name_of_node(node).startswith(_FILLED_LATER))


def _overwritten_message(tensor: Tensor, version: int) -> str:
    return (
        f"a tensor of shape {tuple(tensor.shape)} needed for backward has been modified by an inplace operation: it is "
        f"at version {version_of(tensor)}, and {version} was expected"
    )


@not_compiled
def unpack_saved(saved: _SavedTensor) -> Tensor:
    """Return the tensor that ``saved`` holds for autograd; recompute forward if it was dropped."""
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
        raise RuntimeError("memopt has lost a tensor that backward needs, which is a bug of memopt; please report it")
    if version_of(tensor) != saved.version:
        raise RuntimeError(_overwritten_message(tensor, saved.version))
    if run is not None and not run.is_running:
        saved.tensor = None  # a second backward (retain_graph=True) recomputes it
    return tensor

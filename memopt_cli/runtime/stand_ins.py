"""Stand-ins: a dry run skips the middle ones of many equal chunks, and makes only the tensors that they would leave.

A dry run takes time by the number of its operators, and 256 chunks have many.  Equal chunks that change no state
allocate the same tensors.  Each chunk comes on top of what earlier chunks left, and that grows or shrinks by the same
bytes from chunk to chunk.  So the bytes at any instant of a chunk in the middle lie between those at the same instant
of an earlier and of a later chunk, and the peak is at either end.  One *stand-in* takes the place of all chunks in the
middle, and runs nothing: in forward it makes tensors like those that its chunks would leave, and in backward the
gradients of their inputs::

    chunks    0  1  2  3  4  5  6  7  8  9 10 11     of length 5
    run       0  1  2  [3 4  5  6  7  8] 9 10 11     the stand-in is of length 30

Where chunks have two lengths, which differ by one, each length has its own stand-in.  The two chunks before a
stand-in show what it leaves.  The chunk after it shows its gradients, since backward comes to that chunk first.  If
these show that chunks differ, or that their tensors cannot be made in one piece, the step ends there with
:class:`ChunksDifferError`.  Then the step must be run again, with all chunks of that module.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from memopt_cli.runtime.chunk_state import StateChanges
from memopt_cli.runtime.compressor import is_dense
from memopt_cli.runtime.private_torch import is_fake, with_function_modes
from memopt_cli.runtime.running import is_in_segment, is_recomputing

_EDGE_CHUNKS: Final = 3
"""Number of equal chunks that run on each side of a stand-in.  Three, because the first and the second chunk that add
to a gradient allocate differently from each other and from all later chunks."""
_MIN_REPLACED_CHUNKS: Final = 2
"""Minimum number of chunks that a stand-in replaces."""


class ChunksDifferError(BaseException):
    """Chunks differ, so the dry run must start again.  No ``Exception``, since a model might catch that."""


class StandIns:
    """The modules of one model in a dry run, and which of them have chunks that differ."""

    def __init__(self, model: nn.Module) -> None:
        self._live_bytes: Callable[[], int] | None = None
        self._unlike: WeakSet[nn.Module] = WeakSet()
        """Modules whose chunks differ."""
        for module in model.modules():
            _known[module] = self

    @contextlib.contextmanager
    def counting(self, live_bytes: Callable[[], int]) -> Iterator[None]:
        """Let stand-ins replace chunks in the ``with`` block; ``live_bytes`` returns the bytes of all live tensors.

        Raises :class:`ChunksDifferError` for a module whose chunks differ.  The next try runs all of them.
        """
        self._live_bytes = live_bytes
        try:
            yield
        finally:
            self._live_bytes = None

    def live_bytes_counter(self, module: nn.Module) -> Callable[[], int] | None:
        """Return the counter of live bytes if ``module`` may have stand-ins, or else ``None``."""
        return None if module in self._unlike else self._live_bytes

    def refuse(self, module: nn.Module) -> NoReturn:
        """Raise :class:`ChunksDifferError`, and run all chunks of ``module`` from now on."""
        self._unlike.add(module)
        raise ChunksDifferError


_known: MutableMapping[nn.Module, StandIns] = WeakKeyDictionary()
"""Module -> the stand-ins of its model."""


def abridge_call(module: nn.Module, lengths: Sequence[int], axis: int, pieces: Sequence[Tensor]) -> AbridgedCall | None:
    """Return a call of ``module`` in chunks of ``lengths`` with stand-ins; ``None`` if all chunks must run.

    ``pieces``: the tensors that are cut along ``axis``.
    """
    # The module itself may be unknown: a run of layers in one segment is a module made later.
    stand_ins = next((known for part in module.modules() if (known := _known.get(part)) is not None), None)
    live_bytes = stand_ins.live_bytes_counter(module) if stand_ins is not None else None
    if stand_ins is None or live_bytes is None or not all(map(is_fake, pieces)):
        return None
    counts = [count for _, group in itertools.groupby(lengths) for count in _abridged_counts(len([*group]))]
    if len(counts) == len(lengths):
        return None
    return AbridgedCall(module, stand_ins, live_bytes, counts, axis)


def _abridged_counts(count: int) -> list[int]:
    """Return the number of chunks, out of ``count``, for which each piece stands: for 12 1, 1, 1, 6, 1, 1, 1."""
    if count < 2 * _EDGE_CHUNKS + _MIN_REPLACED_CHUNKS:
        return [1] * count
    return [*[1] * _EDGE_CHUNKS, count - 2 * _EDGE_CHUNKS, *[1] * _EDGE_CHUNKS]


@dataclass(frozen=True, slots=True)
class _Form:
    """Shape and layout of a tensor that a chunk makes."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The dimensions in their order in memory, the outermost first."""
    dtype: torch.dtype
    device: torch.device
    is_differentiable: bool
    """Whether the tensor needs a gradient."""

    def repeated(self, count: int, axis: int) -> Tensor:
        """Return an empty tensor like the tensors of ``count`` chunks, concatenated along ``axis``."""
        shape = [*self.shape]
        shape[axis] *= count
        laid_out = torch.empty([shape[d] for d in self.order], dtype=self.dtype, device=self.device)
        return laid_out.permute([self.order.index(d) for d in range(len(shape))])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions of ``tensor`` in their order in memory, the outermost first.

    A dimension of size 1 (a chunk of one sample) also has the place that its stride gives it.
    """
    return sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], tensor.shape[d] == 1, d))


def _read_form(tensor: Any, axis: int) -> _Form | None:
    """Return the form of ``tensor``; ``None`` if the tensors of several chunks cannot be made as one."""
    if not isinstance(tensor, Tensor) or not -tensor.dim() <= axis < tensor.dim() or not is_dense(tensor):
        return None
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        return None
    order = tuple(in_memory(tensor))
    return _Form(tuple(tensor.shape), order, tensor.dtype, tensor.device, tensor.requires_grad)


class AbridgedCall:
    """One call of a module in chunks, some replaced by stand-ins, and the bytes and forms that the others show."""

    def __init__(
        self, module: nn.Module, stand_ins: StandIns, live_bytes: Callable[[], int], counts: Sequence[int], axis: int
    ) -> None:
        self.counts = counts
        """Number of chunks for which each piece of the input stands: one, or more for a stand-in."""
        self.axis = axis
        self._module, self._stand_ins, self._live_bytes = module, stand_ins, live_bytes
        self._state_changes = StateChanges(module)
        self._live = live_bytes()
        self._grown_bytes: list[int] = []
        """The growth of live tensors in forward, in bytes, for each chunk that ran."""
        self._outputs: list[_Form] = []
        """The forms of the latest chunk's outputs."""
        self._gradients: dict[int, list[_Form | None]] = {}
        """Index of a stand-in -> the forms of the gradients of the inputs of the chunk after it."""
        self._held_bytes: dict[int, int] = {}
        """Index of a stand-in -> the bytes that each of its chunks holds until its backward, outputs aside."""
        self._began_bytes: dict[int, int] = {}
        """Index of a stand-in -> the bytes of live tensors when backward came to the chunk after it."""

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths of the pieces, given the ``lengths`` of all chunks."""
        starts = itertools.accumulate(self.counts, initial=0)
        return [sum(lengths[start : start + count]) for start, count in zip(starts, self.counts, strict=False)]

    def noting_gradients(self, index: int, piece: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``piece``, the input of the chunk at ``index``; after a stand-in, hooks on it note its gradients."""
        if not index or self.counts[index - 1] == 1:
            return piece
        forms = self._gradients[index - 1] = [None] * len(piece)
        return tuple(self._note_form(tensor, forms, position) for position, tensor in enumerate(piece))

    def note_run(self, index: int, output: Any, outputs: int) -> None:
        """Note the bytes and outputs that the chunk at ``index`` has left; ``outputs``: number of joined outputs."""
        live, before = self._live_bytes(), self._live
        parts = output if isinstance(output, tuple) else (output,)
        if len(parts) > outputs or self._state_changes.changed_names():
            self._stand_ins.refuse(self._module)
        self._live = live
        self._grown_bytes.append(live - before)
        self._outputs = [self._form_or_refuse(part) for part in parts]
        if index and self.counts[index - 1] > 1:
            self._watch_backward(index - 1, parts)

    def stand_in(self, index: int, pieces: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Return the outputs of the stand-in at ``index``; until its backward, it holds as many bytes as its chunks."""
        held_bytes = self._held_bytes[index] = self._bytes_held_by_chunk()
        count = self.counts[index]
        moves = any(form.is_differentiable for form in self._outputs)
        anchor = torch.empty(0, device=pieces[0].device, requires_grad=moves)
        outputs: tuple[Any, ...] = _StandIn.apply(self, index, count * held_bytes, anchor, *pieces)  # type: ignore[no-untyped-call]
        self._live = self._live_bytes()
        return outputs

    def new_outputs(self, index: int) -> list[Tensor]:
        """Return new outputs of the stand-in at ``index``."""
        return [form.repeated(self.counts[index], self.axis) for form in self._outputs]

    def new_gradients(self, index: int) -> list[Tensor | None]:
        """Return new gradients of the inputs of the stand-in at ``index``."""
        count, forms = self.counts[index], self._gradients[index]
        return [None if form is None else form.repeated(count, self.axis) for form in forms]

    def check_backward(self, index: int) -> None:
        """Check, when backward comes to a stand-in, that the chunk after it left its inputs' gradients and no more."""
        grown_bytes = sum(form.nbytes for form in self._gradients[index] if form is not None) - self._held_bytes[index]
        if self._live_bytes() - self._began_bytes.get(index, 0) != grown_bytes:
            self._stand_ins.refuse(self._module)

    def differentiable(self) -> list[bool]:
        """Return whether each output is differentiable."""
        return [form.is_differentiable for form in self._outputs]

    def _bytes_held_by_chunk(self) -> int:
        """Return the bytes that each chunk holds until its backward, outputs aside."""
        *_, before, last = self._grown_bytes
        held_bytes = last - sum(form.nbytes for form in self._outputs)
        # Inside another segment, what chunks hold is dropped after forward and recomputed.  A stand-in would hold it
        # all the time, so it is refused there.
        is_within = is_in_segment() or is_recomputing()
        if before != last or held_bytes < 0 or (held_bytes and is_within):
            self._stand_ins.refuse(self._module)
        return held_bytes

    def _watch_backward(self, stand_in: int, outputs: Sequence[Tensor]) -> None:
        def begin(gradient: Tensor) -> None:
            self._began_bytes.setdefault(stand_in, self._live_bytes())

        for output in outputs:
            if output.requires_grad:
                _hook_gradient(output, begin)

    def _form_or_refuse(self, tensor: Any) -> _Form:
        return _read_form(tensor, self.axis) or self._stand_ins.refuse(self._module)

    def _note_form(self, tensor: Tensor, forms: list[_Form | None], position: int) -> Tensor:
        """Return a view of ``tensor`` with a hook that puts the form of its gradient into ``forms`` at ``position``."""
        if not tensor.requires_grad:
            return tensor

        def note(gradient: Tensor) -> None:
            forms[position] = self._form_or_refuse(gradient)

        watched = tensor.view_as(tensor)
        _hook_gradient(watched, note)
        return watched


def _hook_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    with with_function_modes(()):  # a memopt mode refuses hooks that forward sets; this one is memopt's own
        tensor.register_hook(hook)


class _StandIn(torch.autograd.Function):
    """The node of a stand-in in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: AbridgedCall, index: int, held_bytes: int, anchor: Tensor, *pieces: Tensor) -> Any:
        ctx.call, ctx.index = call, index
        outputs = call.new_outputs(index)
        ctx.held = torch.empty(held_bytes, dtype=torch.uint8, device=anchor.device) if held_bytes else None
        fixed = [t for t, moves in zip(outputs, call.differentiable(), strict=True) if not moves]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call.check_backward(ctx.index)
        ctx.held = None
        return None, None, None, None, *ctx.call.new_gradients(ctx.index)

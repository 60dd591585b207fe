"""One checkpointed call of a segment: its first run in forward, and later ones in backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from memopt_cli.runtime.found_statistics import FoundStatistics
from memopt_cli.runtime.held import Held, note_nothing
from memopt_cli.runtime.in_backward import updates_in_backward
from memopt_cli.runtime.lengths import at_length, present_length
from memopt_cli.runtime.noise import ends_in_noise, save_nothing
from memopt_cli.runtime.objects import version_of
from memopt_cli.runtime.private_torch import (
    CheckpointCall,
    StopRecomputation,
    checkpoint_around,
    forbids_hooks,
    is_complete,
    not_compiled,
)
from memopt_cli.runtime.running import (
    holding_inputs,
    note_inputs,
    outermost_turn,
    recomputing,
    taking_turns,
    within_segment,
)
from memopt_cli.runtime.samples import compared, is_sampled
from memopt_cli.runtime.selective import KeptOutputs, NothingKept
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import tensors_of
from memopt_cli.runtime.unsafe import as_of, marks, run_plainly, this_moment
from memopt_cli.runtime.waiting import wait_for


class Unrepeatable(RuntimeError):
    """A forward did what it cannot do in a segment, or does otherwise there: a sentence without its subject."""


overwrites_input: WeakSet[nn.Module] = WeakSet()
"""Segments that were seen to write over their inputs: a recomputation needs copies."""


class SegmentRun:
    """One checkpointed call of a segment: what PyTorch's checkpoint calls once in forward and again in backward."""

    def __init__(
        self,
        module: nn.Module,
        first: functools.partial[Any],
        call: Callable[[Sequence[Tensor], Mapping[int, Any]], Any],
        start: StartingState,
        inputs: int,
        keep: tuple[str, ...],
    ) -> None:
        """``first``: the first run; ``call``: a later one, of the tensors among the arguments and what replaces others.

        ``inputs``: how many tensors those are.
        """
        self._module = module
        self._first: functools.partial[Any] | None = first
        self._call = call
        self._start = start
        self._inputs = inputs
        self._kept = KeptOutputs(keep) if keep else NothingKept()
        self._statistics = FoundStatistics(module, keep)
        self._began, self._length = this_moment(), present_length()
        self._outermost = outermost_turn() or module
        self._ends_in_noise = False
        self._samples: list[list[Any] | None] = []
        self._run_around: Callable[[], object] = _nothing_around
        """Has a checkpoint of the user's own recompute all that came up to the segment's end, and so count it again."""
        self.hooks: Any = None
        """Those around the segment, on what autograd saves."""
        self.is_nested = False
        """Its inputs belong to the recomputation of the segment around."""
        self.is_checkpointed = False
        """A checkpoint of the user's own would hold what it saves, if it were no segment."""
        self.gathers = False
        """It is one chunk of several, whose batch statistics are those of all."""
        self.lent: Callable[[], Sequence[Tensor]] | None = None
        """Gives the tensors of the starting state, if they are no inputs and not held."""

    @not_compiled  # it only comes here where the compiler has given up
    def __call__(self, *given: Tensor) -> Any:
        """The first run, or a later one."""
        with taking_turns(self._outermost), taking_turns(self._module):
            return self._recompute(given) if self._first is None else self._run(given, self._first)

    def _run(self, given: Sequence[Tensor], first: functools.partial[Any]) -> Any:
        self._first, handed = None, (first.args, first.keywords)
        inputs = [(self._module, t, version_of(t)) for t in given[: self._inputs]]
        turn = is_sampled(self._module)
        held, before = Held(self._kept.note_save, self._note_use(), is_sampled=turn), marks()
        try:
            noting = self._statistics.recording(given[: self._inputs])
            with held.holding(), self._kept.recording(), noting, self._within():
                output = first()
        except RuntimeError as error:
            if forbids_hooks(error):
                raise Unrepeatable("computes gradients by torch.func") from error
            raise
        finally:
            self._start.settle()
        if self._kept.changes:
            raise Unrepeatable(self._kept.changes)
        if reason := self._start.lost():
            run_plainly(self._module, reason)
        if reason or marks() != before:  # or one within cannot run again: it would do otherwise than it did
            held.keep(self.hooks)
            return output
        if any(version_of(t) != version for _, t, version in inputs):
            overwrites_input.add(self._module)
            if not self.is_nested:
                held.keep()
        elif self.is_nested:
            note_inputs(inputs)
        self._samples = held.samples(tensors_of((output, handed))) if turn else []
        held.drop()
        if updates_in_backward():
            wait_for(self._module.parameters(), held)
        self._ends_in_noise = ends_in_noise(tensors_of((output, handed)), held.last_nodes)
        if self._ends_in_noise:
            save_nothing()
        if self.is_checkpointed and not self.is_nested and _keeps_statistics(self._module):
            pack, unpack = self.hooks
            # Alike in forward and in backward, which may have other defaults.
            mark = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._run_around = functools.partial(unpack, pack(mark))
        return output

    def _note_use(self) -> Callable[[], None]:
        if self.is_checkpointed:
            return _refuse_use
        return _refuse_use_in_chunks if self.gathers else note_nothing

    def _within(self) -> AbstractContextManager[None]:
        return within_segment(checkpointed=self.is_checkpointed)

    def _recompute(self, given: Sequence[Tensor]) -> Any:
        """From the state in which the first run started, and without a trace.

        Of what came before its inputs it knows nothing: hooks that forward puts on an input, or that others have put
        there and a gradient within forward would call, are those of the first run.
        """
        around = checkpoint_around()
        self._run_around()
        with at_length(self._length), recomputing(self._module):
            lent = given[self._inputs :] if self.lent is None else self.lent()
            if self._module not in overwrites_input:  # a leaf is not to be written
                given = [t.detach().requires_grad_() if t.requires_grad else t for t in given]
            with self._start.replay(lent) as replaced, self._kept.replaying(), self._statistics.replaying():
                with self._compared(), within_segment(), holding_inputs(), as_of(self._began):
                    output = self._repeat(given, replaced, around)
                if self._ends_in_noise:
                    save_nothing()
                return output

    def _repeat(self, given: Sequence[Tensor], replaced: Mapping[int, Any], around: CheckpointCall | None) -> Any:
        try:
            return self._call(given, replaced)
        except RuntimeError as error:  # as which PyTorch's end of a recomputation leaves TorchScript's interpreter
            if is_complete(around):
                raise StopRecomputation from error
            raise

    def _compared(self) -> AbstractContextManager[None]:
        return compared(self._module, self._samples, self._differs) if self._samples else contextlib.nullcontext()

    def _differs(self, shape: tuple[int, ...]) -> None:
        run_plainly(
            self._module,
            "draws or reads something that memopt does not see (a tensor of shape "
            f"{shape} was another when it ran again, and the gradients of this step are wrong)",
        )


def _keeps_statistics(module: nn.Module) -> bool:
    return any(m.training and getattr(m, "running_mean", None) is not None for m in module.modules())


def _nothing_around() -> None:
    """No such checkpoint, or it does not matter whether it recomputes."""


def _refuse_use() -> None:
    # The checkpoint would now run again what it is around: batch norms before the segment count that.
    raise Unrepeatable("computes gradients in its forward, within a checkpoint of your own")


def _refuse_use_in_chunks() -> None:
    # Gradients go through the statistics, to which every chunk adds.
    raise Unrepeatable("computes gradients in its forward, through batch statistics that its chunks share")

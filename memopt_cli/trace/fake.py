"""A training step on tensors without data (fake tensors)."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.records import Counted, StepSettings, StepTrace
from memopt_cli.runtime.private_torch import (
    FakeCopyMode,
    FakeTensorMode,
    buffers_of,
    fakes_exchanged,
    is_fake,
    memory_of,
    mend_copies_of_fakes,
    parameters_of,
)
from memopt_cli.runtime.stand_ins import ChunksDiffer, StandIns
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import map_leaves
from memopt_cli.trace.counting import AllocatedPeak, count
from memopt_cli.trace.known_numbers import NumbersKnown
from memopt_cli.trace.log import Codecs
from memopt_cli.trace.recording import record
from memopt_cli.trace.remembered import RememberingDryRun
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import Step, dtype_in, input_dtype
from memopt_cli.training.user_step import StepModels


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors have no data, and may be combined with tensors that have."""
    mend_copies_of_fakes()
    return RememberingDryRun(allow_non_fake_inputs=True)


@contextlib.contextmanager
def built_without_data(mode: FakeTensorMode) -> Iterator[None]:
    """Build models without data in the block; they may change the dtype of their tensors."""
    with mode, fakes_exchanged(), NumbersKnown():
        yield


def place_fake(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Place ``model``, without data, as :func:`~memopt_cli.training.step.place` does: ``Module.to`` cannot."""
    placed: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = placed.setdefault(id(tensor), _placed(tensor, settings))
    return model.train()


def _placed(tensor: Tensor, settings: StepSettings) -> Tensor:
    dtype = input_dtype(settings)
    moved = tensor.detach().to(torch.device(settings.device), None if dtype is None else dtype_in(dtype, tensor))
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _copied_without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy ``model`` without data.  Raises :class:`RuntimeError` for a user's own step that cannot be made so."""
    if isinstance(model, StepModels):
        with mode, NumbersKnown():
            try:
                return model.anew()
            except MemoptError as error:  # it blames the user's function, which is right where tensors have data
                raise RuntimeError(error.message) from error
    copied = {id(g): g.clone_state() for g in _generators_of(model)}  # copied in the mode, they would lose their state
    with FakeCopyMode(mode):
        return copy.deepcopy(model, copied)


def _generators_of(model: nn.Module) -> Iterator[torch.Generator]:
    return (value for m in model.modules() for value in vars(m).values() if isinstance(value, torch.Generator))


class FakeStep:
    """A step on fake tensors, which takes no memory and has the same storages as a real one.

    ``mode`` is that of tensors in ``step`` that are fake already.  ``sharded`` is a model without data to use in place
    of a copy of the step's.  Raises whatever the model raises when it needs data that fake tensors do not have.
    """

    def __init__(self, step: Step, mode: FakeTensorMode | None = None, sharded: nn.Module | None = None) -> None:
        self._mode = mode or fake_mode()
        self._frees = sharded is None  # a forward without its backward leaves parameters gathered
        self._given: list[tuple[Tensor, Tensor]] = []
        """Inputs without data, each with its values: integers and masks, which models read."""
        model = _copied_without_data(step.model, self._mode) if sharded is None else sharded
        args, kwargs = self._without_data(step)
        with self._mode:
            self.step = replace(
                step, model=model, args=args, kwargs=kwargs, optimizer=step.make_optimizer(model), scaler=None
            )
        self._start = StartingState(model)
        self._stand_ins = StandIns(model)
        if sharded is not None:
            self._settle()
        elif self.step.optimizer is not None:
            self.count()  # a first step makes the optimizer's state, which all later steps have

    @contextlib.contextmanager
    def fed(self, step: Step) -> Iterator[FakeStep]:
        """Take the inputs of another ``step`` for the block."""
        own = self.step, self._given
        self._take_inputs(step)
        try:
            yield self
        finally:
            self.step, self._given = own

    def feed(self, step: Step) -> None:
        """Go on with the inputs of another ``step``; for a sharded model."""
        self._take_inputs(step)
        self._start.enter()
        self._settle()

    def _take_inputs(self, step: Step) -> None:
        args, kwargs = self._without_data(step)
        self.step = replace(self.step, args=args, kwargs=kwargs)

    def _settle(self) -> None:
        """Take a first step, in which a ``DTensor`` makes more tensors to find out how operators are sharded."""
        with self._running():
            self.step.reset_gradients()
            self.step.take()
        self.step.model.zero_grad(set_to_none=True)

    def count(
        self,
        workspaces: Workspaces | None = None,
        codecs: Codecs | None = None,
        allocated: AllocatedPeak | None = None,
    ) -> Counted:
        """Count the step like :func:`~memopt_cli.trace.count`; of many equal chunks, few run."""
        stand_ins = self._stand_ins if allocated is None else None  # an allocator places many small tensors differently
        while True:
            self._start.enter()
            with contextlib.suppress(ChunksDiffer), self._running():
                return count(self.step, workspaces, codecs, allocated, stand_ins)

    def record(self, batch: int, workspaces: Workspaces | None = None, codecs: Codecs | None = None) -> StepTrace:
        """Record the step like :func:`~memopt_cli.trace.record`, without contents and times."""
        self._start.enter()
        with self._running():
            return record(self.step, batch, contents=False, frees=self._frees, workspaces=workspaces, codecs=codecs)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run the step in the block; it knows the same numbers every time, even if it writes to its inputs."""
        numbers = NumbersKnown()
        for tensor, values in self._given:
            numbers.tell(tensor, values)
        with self._mode, numbers, numbers.known_to_libraries():
            yield

    def _without_data(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of ``step`` without data, and remember the values that the model may read."""
        self._given = []

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or is_fake(leaf):
                return leaf
            made = self._mode.from_tensor(leaf)
            if leaf.layout is torch.strided and not leaf.is_floating_point() and not leaf.is_complex():
                self._given.append((made, leaf))
            return made

        with self._mode:
            args, kwargs = map_leaves(fake, (step.args, step.kwargs))
        owners: dict[int, set[int]] = defaultdict(set)
        for _, values in self._given:
            owners[values.untyped_storage().data_ptr()].add(memory_of(values))
        # Where two storages share memory, a write to one changes the other, which nobody sees here.
        self._given = [pair for pair in self._given if len(owners[pair[1].untyped_storage().data_ptr()]) == 1]
        return args, kwargs

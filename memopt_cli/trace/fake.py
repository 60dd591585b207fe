"""A training step on tensors without data (PyTorch's fake tensors): the dry run.

It runs the model's code and makes the same storages as a real step, but takes no memory and computes nothing.  Code
that reads a number from a tensor cannot go on without data, unless that number follows only from code and inputs
(:mod:`memopt_cli.trace.known_numbers`).
"""

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
from memopt_cli.records import StepPeaks, StepSettings, StepTrace
from memopt_cli.runtime.private_torch import (
    FakeCopyMode,
    FakeTensorMode,
    buffers_of,
    fake_parameters_swappable,
    is_fake,
    memory_of,
    parameters_of,
    patch_deepcopy,
)
from memopt_cli.runtime.stand_ins import ChunksDifferError, StandIns
from memopt_cli.runtime.state import StartingState
from memopt_cli.runtime.tree import map_leaves
from memopt_cli.trace.counting import AllocatedPeak, count_step
from memopt_cli.trace.known_numbers import NumbersKnown
from memopt_cli.trace.log import Compressors
from memopt_cli.trace.recording import record
from memopt_cli.trace.remembered import RememberingDryRun
from memopt_cli.trace.workspace import Workspaces
from memopt_cli.training.step import TrainingStep, dtype_in, input_dtype
from memopt_cli.training.user_step import StepModels


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors have no data, and operators may mix tensors with and without data."""
    patch_deepcopy()
    return RememberingDryRun(allow_non_fake_inputs=True)


@contextlib.contextmanager
def built_without_data(mode: FakeTensorMode) -> Iterator[None]:
    """Build models without data in the ``with`` block, including models that change the dtype of their tensors."""
    with mode, fake_parameters_swappable(), NumbersKnown():
        yield


def move_fake_model(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Place ``model``, without data, like :func:`~memopt_cli.training.step.place`; ``Module.to`` cannot do that."""
    placed: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = placed.setdefault(id(tensor), _place_on_device(tensor, settings))
    return model.train()


def _place_on_device(tensor: Tensor, settings: StepSettings) -> Tensor:
    dtype = input_dtype(settings)
    placed = tensor.detach().to(torch.device(settings.device), None if dtype is None else dtype_in(dtype, tensor))
    return nn.Parameter(placed, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placed


def _copied_without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy ``model`` without data.  Raises :class:`RuntimeError` for a user's own step that cannot be copied."""
    if isinstance(model, StepModels):
        with mode, NumbersKnown():
            try:
                return model.make_again()
            except MemoptError as error:  # its hint is about the user's function, which only fails without data
                raise RuntimeError(error.message) from error
    values = (value for module in model.modules() for value in vars(module).values())
    generators = (value for value in values if isinstance(value, torch.Generator))
    copied = {id(g): g.clone_state() for g in generators}  # the mode would copy them without their state
    with FakeCopyMode(mode):
        return copy.deepcopy(model, copied)


class FakeStep:
    """A step on fake tensors, with the same storages as a real one.

    ``mode`` is the mode of tensors in ``step`` that are fake already.  ``sharded`` is a model without data to use
    instead of a copy of the step's.  An error of a model that needs data is passed on: fake tensors have none.
    """

    def __init__(
        self, step: TrainingStep, mode: FakeTensorMode | None = None, sharded: nn.Module | None = None
    ) -> None:
        self._mode = mode or fake_mode()
        self._frees = sharded is None  # a forward without its backward leaves parameters gathered
        self._valued_inputs: list[tuple[Tensor, Tensor]] = []
        """Pairs of an input without data and its values, for integers and masks, whose numbers models read."""
        model = _copied_without_data(step.model, self._mode) if sharded is None else sharded
        args, kwargs = self._without_data(step)
        with self._mode:
            self.step = replace(
                step, model=model, args=args, kwargs=kwargs, optimizer=step.make_optimizer(model), scaler=None
            )
        self._start = StartingState(model)
        self._stand_ins = StandIns(model)
        if sharded is not None:
            self._warm_up()
        elif self.step.optimizer is not None:
            self.count()  # a first step makes the optimizer's state, which all later steps have

    @contextlib.contextmanager
    def using_inputs(self, step: TrainingStep) -> Iterator[FakeStep]:
        """Use the inputs of another ``step`` in the ``with`` block."""
        own = self.step, self._valued_inputs
        self._take_inputs(step)
        try:
            yield self
        finally:
            self.step, self._valued_inputs = own

    def set_inputs(self, step: TrainingStep) -> None:
        """Use the inputs of another ``step`` from now on; for a sharded model."""
        self._take_inputs(step)
        self._start.restore()
        self._warm_up()

    def _take_inputs(self, step: TrainingStep) -> None:
        args, kwargs = self._without_data(step)
        self.step = replace(self.step, args=args, kwargs=kwargs)

    def _warm_up(self) -> None:
        """Take a step that is not counted: in the first, ``DTensor`` makes tensors to learn how to shard operators."""
        with self._running():
            self.step.reset_gradients()
            self.step.take()
        self.step.model.zero_grad(set_to_none=True)

    def count(
        self,
        workspaces: Workspaces | None = None,
        compressors: Compressors | None = None,
        allocated: AllocatedPeak | None = None,
    ) -> StepPeaks:
        """Count the step like :func:`~memopt_cli.trace.count_step`, where of many equal chunks only a few run."""
        # An allocator's peak depends on every single tensor, so all chunks run for that.
        stand_ins = self._stand_ins if allocated is None else None
        while True:  # until no more chunks turn out to differ
            self._start.restore()
            with contextlib.suppress(ChunksDifferError), self._running():
                return count_step(self.step, workspaces, compressors, allocated, stand_ins)

    def record(
        self, batch: int, workspaces: Workspaces | None = None, compressors: Compressors | None = None
    ) -> StepTrace:
        """Record the step like :func:`~memopt_cli.trace.record`, without contents and times."""
        self._start.restore()
        with self._running():
            return record(
                self.step, batch, contents=False, frees=self._frees, workspaces=workspaces, compressors=compressors
            )

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run the step in the ``with`` block with the known values of its inputs, which earlier runs may overwrite."""
        numbers = NumbersKnown()
        for tensor, values in self._valued_inputs:
            numbers.note_values(tensor, values)
        with self._mode, numbers, numbers.readable_by_libraries():
            yield

    def _without_data(self, step: TrainingStep) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of ``step`` without data, and remember the values that the model may read."""
        self._valued_inputs = []

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or is_fake(leaf):
                return leaf
            fake_tensor = self._mode.from_tensor(leaf)
            if leaf.layout is torch.strided and not leaf.is_floating_point() and not leaf.is_complex():
                self._valued_inputs.append((fake_tensor, leaf))
            return fake_tensor

        with self._mode:
            args, kwargs = map_leaves(fake, (step.args, step.kwargs))
        owners: dict[int, set[int]] = defaultdict(set)
        for _, values in self._valued_inputs:
            owners[values.untyped_storage().data_ptr()].add(memory_of(values))
        # Where two storages share memory, a write to one changes the other's values unnoticed: they are not known.
        self._valued_inputs = [
            pair for pair in self._valued_inputs if len(owners[pair[1].untyped_storage().data_ptr()]) == 1
        ]
        return args, kwargs

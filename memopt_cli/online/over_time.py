"""Turning a model of one time step into a model of sequences (:class:`OverTime`), and back for online learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import MemoptError, UsageError, first_line
from memopt_cli.online.operations import trace_kind, traced
from memopt_cli.online.states import declare_state, init_all_states, states_of
from memopt_cli.runtime.module_state import detach_state, reset_hidden_state
from memopt_cli.runtime.private_torch import buffers_of, tree_leaves, tree_map
from memopt_cli.runtime.running import SequenceChunk, running_chunk
from memopt_cli.runtime.state import StartingState


class OverTime(nn.Module):
    """A model of sequences, ``[T, B, ...]``, that runs a model of one time step over them, from fresh states.

    For backpropagation through time, and for every command of memopt, it is a model like any other.  Online learning
    takes :attr:`model` out of it, and runs that step by step.  States may be declared, or kept by the neurons
    themselves, like snnTorch's (``init_hidden=True``).  As a segment in chunks along time (axis 0), it hands the
    states from one chunk to the next; along the batch (axis 1), each chunk starts from fresh states, and after the last
    chunk the states of all chunks are joined.
    """

    resumes_in_chunks = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._chunk_states: list[list[Tensor]] = []
        """Values of all states after each chunk of the batch that has run so far."""

    def forward(self, *inputs: Tensor) -> Any:
        """Return the outputs of all time steps of ``inputs``, stacked; the states become constants."""
        _check_sequences(inputs)
        chunk = running_chunk()
        axis = None if chunk is None else chunk.axis % inputs[0].dim()
        part = chunk if axis == 0 else None
        old_ids = {id(value) for _, _, value in _tensors(self.model)}
        if part is None or part.is_first:
            start_sequence(self.model, inputs[0].shape[1])
        outputs = [self.model(*step) for step in zip(*inputs, strict=True)]
        if part is None or part.is_last:
            detach_state(self.model)
        if chunk is not None and axis == 1:
            states = [place for place in _tensors(self.model) if id(place[2]) not in old_ids]
            self._join([s for s in states if s[2].shape[:1] == inputs[0].shape[1:2]], chunk)
        return tree_map(lambda *steps: torch.stack(steps), *outputs)

    def _join(self, states: Sequence[tuple[nn.Module, str, Tensor]], chunk: SequenceChunk) -> None:
        """Collect the ``states`` of a batch's ``chunk``; after the last chunk, join the states of all in place."""
        earlier = [] if chunk.is_first else self._chunk_states
        self._chunk_states = [*earlier, [value for _, _, value in states]]
        if chunk.is_last:
            for (module, name, _), *values in zip(states, *self._chunk_states, strict=True):
                _set_state(module, name, torch.cat(values))
            self._chunk_states = []


def _check_sequences(inputs: Sequence[object]) -> None:
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in inputs]
    lengths = {x.shape[0] if isinstance(x, Tensor) and x.dim() > 1 else 0 for x in inputs}
    if len(lengths) != 1 or lengths == {0}:
        raise UsageError(
            f"inputs of shapes {shapes} are not sequences of the same number of steps",
            hint="Pass one or more tensors [T, B, ...] with the same T, at least 1.",
        )


def _tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return module, name and value of every buffer, and of every attribute that is a tensor."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in (*buffers_of(module).items(), *vars(module).items())
        if isinstance(value, Tensor)
    ]


def start_sequence(model: nn.Module, batch_size: int) -> None:
    """Reset every state of ``model``, a model of one time step, including undeclared states."""
    reset_hidden_state(model)
    init_all_states(model, batch_size)


def step_model(model: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """Return the model of one time step in ``model``, ready for an online algorithm on a batch.

    ``inputs``: inputs of one step, ``[B, ...]``.  Undeclared states are found by running the step, and declared.  If no
    weight is tagged, all weights that can carry a trace get the tag.  Raises :class:`MemoptError` if the model cannot
    be run step by step.
    """
    if not isinstance(model, OverTime):
        raise MemoptError(
            f"{type(model).__name__} runs its time steps within its own forward",
            hint="Save memopt_cli.online.OverTime(model of one time step): it runs whole sequences as before.",
        )
    step = model.model
    start_sequence(step, inputs[0].shape[0])
    for module, name, value in _hidden_states(step, inputs):
        vars(module).pop(name, None)
        declare_state(module, name, value.shape[1:])
    init_all_states(step, inputs[0].shape[0])
    if not states_of(step):
        raise MemoptError(
            f"{type(step).__name__} carries nothing from one time step to the next",
            hint="Declare its states with memopt_cli.online.declare_state(module, name, shape).",
        )
    if not any(map(trace_kind, step.modules())):
        traced(step)
    return step


def _hidden_states(model: nn.Module, inputs: Sequence[Tensor]) -> list[tuple[nn.Module, str, Tensor]]:
    """Return module, attribute and value of each undeclared tensor that a step assigns and the next step reads."""
    start = StartingState(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            start_values = dict(_undeclared_tensors(model, inputs))
            _take_step(model, inputs)
            assigned = {
                key: value for key, value in _undeclared_tensors(model, inputs) if start_values.get(key) is not value
            }
            leaves = [_set_state(*key, value.detach().requires_grad_()) for key, value in assigned.items()]
            results = _take_step(model, inputs)
            results += [value for key, value in _undeclared_tensors(model, inputs) if key in assigned]
            are_read = _are_read([t for t in results if t.requires_grad], leaves)
    finally:
        start.restore()
    return [(*key, value) for (key, value), is_read in zip(assigned.items(), are_read, strict=True) if is_read]


def _take_step(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    try:
        return [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    except Exception as err:  # the model's own code may raise anything
        raise UsageError(
            f"{type(model).__name__} cannot run one time step on inputs {[tuple(x.shape) for x in inputs]}: "
            f"{first_line(err)}",
            hint="Describe inputs [T, B, ...] of a model that takes [B, ...] at a time.",
        ) from err


def _are_read(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[bool]:
    if not leaves or not results:
        return [False] * len(leaves)
    gradients = torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)
    return [gradient is not None for gradient in gradients]


def _undeclared_tensors(model: nn.Module, inputs: Sequence[Tensor]) -> list[tuple[tuple[nn.Module, str], Tensor]]:
    """Return the place (module and name) and value of each undeclared floating tensor with an entry per sample."""
    declared = {(id(state.module), state.name) for state in states_of(model).values()}
    return [
        ((module, name), value)
        for module, name, value in _tensors(model)
        if value.is_floating_point() and (id(module), name) not in declared
        if value.shape[:1] == inputs[0].shape[:1]
    ]


def _set_state(module: nn.Module, name: str, value: Tensor) -> Tensor:
    holder: dict[str, Any] = buffers_of(module) if name in buffers_of(module) else vars(module)
    holder[name] = value
    return value

"""The route by a loop over the models: slow, but right for every model, and the reference for the other routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching.stacked import Slot, list_slots, placeholder_copy, shared_names
from memopt_cli.runtime.module_state import ModuleState
from memopt_cli.runtime.private_torch import use_weights
from memopt_cli.runtime.tree import join_tensors, split_tensors


@dataclass(frozen=True, slots=True)
class _SharedSlot:
    """A slot of the stacked model, which gives each model its part of the tensor for a call."""

    slot: Slot
    is_shared: bool
    """Whether all models get the same tensor."""
    is_written: bool
    """Whether forward may write the tensor in place."""

    def views(self, models: int) -> Sequence[Tensor]:
        tensor = self.slot.tensor
        if self.is_shared:
            return [tensor] * models
        # ``unbind`` is faster, since its backward makes the whole gradient by one stack.  But autograd forbids in-place
        # writes to its outputs.
        return [tensor[g] for g in range(models)] if self.is_written else tensor.unbind(0)


class LoopRoute:
    """A loop over the models, on views of the stacked tensors.

    Each model has its own module tree, so that state in attributes is kept apart.  The views stay in the modules
    until the next call, since a segment recomputes from them in backward.
    """

    def __init__(self, tree: nn.Module, models: int) -> None:
        shared = shared_names(tree)
        # An embedding's ``max_norm`` writes its weight in forward.
        written_ids = {id(m.weight) for m in tree.modules() if getattr(m, "max_norm", None) is not None}
        self._shared_slots = [
            _SharedSlot(slot, slot.name in shared, slot.is_buffer or id(slot.tensor) in written_ids)
            for slot in list_slots(tree)
        ]
        self._models = [placeholder_copy(tree) for _ in range(models)]
        self._slots = [{slot.name: slot for slot in list_slots(model)} for model in self._models]
        self._recurrent = [[m for m in model.modules() if isinstance(m, nn.RNNBase)] for model in self._models]
        self._start_states = [ModuleState(model) for model in self._models]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the models on ``args`` and ``kwargs``, as :class:`~memopt_cli.model_batching.routes.interface.Route`."""
        parts = self._share_tensors()
        tensors, skeleton = split_tensors((args, kwargs))
        pieces = zip(*(t.unbind(0) for t in tensors), strict=True) if tensors else [()] * len(self._models)
        outputs = []
        for model, piece in zip(self._models, pieces, strict=True):
            model_args, model_kwargs = join_tensors(piece, skeleton)
            outputs.append(model(*model_args, **model_kwargs))
        self._collect_buffers(parts)
        return stack_outputs(outputs)

    def reset(self) -> None:
        """Restore the attributes that the modules had when the route was made."""
        for state in self._start_states:
            state.restore()

    def _share_tensors(self) -> list[tuple[Slot, Sequence[Tensor]]]:
        views: dict[int, Sequence[Tensor]] = {}
        for shared in self._shared_slots:
            key = id(shared.slot.tensor)
            views[key] = views.get(key) or shared.views(len(self._models))
        parts = [(shared.slot, views[id(shared.slot.tensor)]) for shared in self._shared_slots]
        for slot, pieces in parts:
            for slots, piece in zip(self._slots, pieces, strict=True):
                slots[slot.name].tensors[slot.key] = piece
        for module in (m for modules in self._recurrent for m in modules):
            use_weights(module)
        return parts

    def _collect_buffers(self, parts: list[tuple[Slot, Sequence[Tensor]]]) -> None:
        """Stack buffers that a model has replaced by new tensors; a buffer written in place needs nothing."""
        for slot, pieces in parts:
            new_tensors = [slots[slot.name].tensor for slots in self._slots]
            if slot.is_buffer and any(new is not old for new, old in zip(new_tensors, pieces, strict=True)):
                slot.tensors[slot.key] = torch.stack(new_tensors)


def stack_outputs(outputs: list[Any]) -> Any:
    """Return ``outputs``, one per model, as one output with tensors (models, …).

    Raises :class:`UsageError` if the models return tensors of different shapes or structures.
    """
    split = [split_tensors(output) for output in outputs]
    columns = list(zip(*(tensors for tensors, _ in split), strict=False))
    if len({len(tensors) for tensors, _ in split}) > 1 or any(len({t.shape for t in c}) > 1 for c in columns):
        shapes = sorted({str([tuple(t.shape) for t in tensors]) for tensors, _ in split})
        raise UsageError(
            f"the models return outputs of different shapes, which cannot be stacked: {'; '.join(shapes)}",
            hint="Batch the part of the model whose outputs have the same shape for every model.",
        )
    _, skeleton = split[0]
    return join_tensors([torch.stack(column) for column in columns], skeleton)

"""The route by ``torch.func``: a functional call of one model, mapped over the stacked tensors with ``vmap``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from memopt_cli.model_batching.mapping import map_models, refuse_kept_tensors, refuse_segments
from memopt_cli.model_batching.routes.interface import Route
from memopt_cli.model_batching.stacked import list_slots, placeholder_copy, shared_names
from memopt_cli.runtime.tree import join_tensors, split_tensors


class VmapRoute(Route):
    """All models in one call under ``vmap``; each uses random numbers of its own."""

    def __init__(self, tree: nn.Module, models: int) -> None:
        refuse_segments(tree)
        self._slots = list_slots(tree)
        shared = shared_names(tree)
        self._axes = {slot.name: None if slot.name in shared else 0 for slot in self._slots}
        self._models = models
        self._model = placeholder_copy(tree)
        self._has_run = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, skeleton = split_tensors((args, kwargs))

        def run_model(state: dict[str, Tensor], pieces: list[Tensor]) -> Any:
            return functional_call(self._model, state, *join_tensors(pieces, skeleton), tie_weights=False)

        state = {slot.name: slot.tensor for slot in self._slots}
        output = map_models(run_model, (self._axes, 0), state, tensors)
        if not self._has_run:
            refuse_kept_tensors(self._model)
            self._has_run = True
        return output

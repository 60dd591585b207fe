"""Stacking many copies of a model into one, with parameters and buffers (models, …), and taking them apart again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.model_batching.extension import AbstractBatchModule, find_batch_class
from memopt_cli.runtime import uninitialized
from memopt_cli.runtime.private_torch import buffers_of, parameters_of
from memopt_cli.runtime.runs import child_path
from memopt_cli.text.paths import quote_module

StateDict = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Slot:
    """An attribute of a module that holds a parameter or a buffer; a tied tensor has several slots."""

    name: str
    """The name as in ``named_parameters``, with the path of the module."""
    tensors: dict[str, Any]
    """The module's own dictionary of parameters or buffers."""
    key: str
    """The key in that dictionary."""
    is_buffer: bool

    @property
    def tensor(self) -> Tensor:
        """The tensor that is in the slot now."""
        tensor: Tensor = self.tensors[self.key]
        return tensor


def list_slots(model: nn.Module) -> list[Slot]:
    """Return the filled slots of ``model``, in the order of ``named_parameters``, tied ones included."""
    return [
        Slot(child_path(path, key), tensors, key, is_buffer)
        for path, module in model.named_modules(remove_duplicate=False)
        for is_buffer, tensors in ((False, parameters_of(module)), (True, buffers_of(module)))
        for key, tensor in tensors.items()
        if tensor is not None
    ]


def stack_model(model: nn.Module, models: int) -> nn.Module:
    """Return a copy of ``model`` with ``models`` copies of each parameter and buffer, and registered modules replaced.

    Ties stay ties, frozen parameters stay frozen.  Raises :class:`UsageError`, with the name of a module that cannot be
    batched.
    """
    refuse_unsupported(model)

    def stack(slot: Slot) -> Tensor:
        tensor = slot.tensor.detach()
        return tensor.expand(models, *tensor.shape).clone(memory_format=torch.contiguous_format)

    return replace_modules(_copy(model, stack), model, models)


def share_first(tree: nn.Module, model: nn.Module) -> None:
    """Make ``model`` share the tensors of the first model in ``tree``, a stacked model."""
    shared = shared_names(tree)
    stacked = {slot.name: slot.tensor.detach() for slot in list_slots(tree)}
    for slot in list_slots(model):
        slot.tensor.data = stacked[slot.name] if slot.name in shared else stacked[slot.name][0]


def replace_modules(tree: nn.Module, model: nn.Module, models: int) -> nn.Module:
    """Replace the modules of ``tree`` that have a registered batch class, and return the tree."""
    for path, original in list(model.named_modules()):
        batch_class = find_batch_class(original)
        if batch_class is None:
            continue
        replacement = batch_class.from_module(original, models)
        tree = _put_module(tree, path, replacement)
        replacement.adopt(original, path)
    return tree


def placeholder_copy(tree: nn.Module) -> nn.Module:
    """Return a single model with the structure of ``tree``, a stacked one; its tensors have shapes, but no data.

    A route puts tensors in when it runs the model.  Batch modules are replaced by the modules that they replaced.
    """
    shared = shared_names(tree)

    def empty(slot: Slot) -> Tensor:
        shape = slot.tensor.shape if slot.name in shared else slot.tensor.shape[1:]
        return torch.empty(shape, dtype=slot.tensor.dtype, device="meta")

    model = _copy(tree, empty)
    for path, module in list(model.named_modules()):
        if isinstance(module, AbstractBatchModule):
            model = _put_module(model, path, module.original.train(module.training))
            if not path:
                break
    return model


def _put_module(tree: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put ``module`` into ``tree`` at ``path``, and return the tree: ``module`` itself at the empty path."""
    if not path:
        return module
    parent, _, name = path.rpartition(".")
    setattr(tree.get_submodule(parent), name, module)
    return tree


def first_models(tree: nn.Module, count: int, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of ``tree`` with the first ``count`` of its models, its floating tensors in ``dtype``."""
    shared = shared_names(tree)

    def first(slot: Slot) -> Tensor:
        tensor = slot.tensor.detach()
        tensor = tensor if slot.name in shared else tensor[:count]
        return tensor.to(dtype if tensor.is_floating_point() else None, copy=True)

    return _copy(tree, first)


def shared_names(tree: nn.Module) -> set[str]:
    """Return the names of the buffers that all models of ``tree`` share."""
    return {
        child_path(path, name)
        for path, module in tree.named_modules()
        if isinstance(module, AbstractBatchModule)
        for name in module.shared_buffers
    }


def load_stacked(tree: nn.Module, states: StateDict | Sequence[StateDict], models: int, *, pad: bool) -> StateDict:
    """Return ``states``, one for all models or one for each, as a state dictionary of ``tree``.

    ``pad``: allow fewer states than models; the tensors of the other models become zero.
    """
    shared = shared_names(tree)
    if isinstance(states, Mapping):
        return {k: v if k in shared else v.expand(models, *v.shape) for k, v in states.items()}
    if not 0 < len(states) <= models or (len(states) < models and not pad):
        raise UsageError(
            f"{len(states)} state dictionaries for {models} models",
            hint="Pass one for all models, or one for each"
            f"{'' if pad else '; or fewer with batch_strict=False, and the other models become zero'}.",
        )
    for index, state in enumerate(states):
        if state.keys() != states[0].keys():
            differing = sorted(state.keys() ^ states[0].keys())
            raise UsageError(
                f"state dictionaries 0 and {index} do not have the same keys: {', '.join(differing)}",
                hint="Pass state dictionaries of models that are built alike.",
            )
    return {k: _stack_values(k, [s[k] for s in states], models, shared=k in shared) for k in states[0]}


def unstack(tree: nn.Module, models: int, device: torch.device | str | None) -> list[dict[str, Tensor]]:
    """Return a state dictionary for each model, with copies of its tensors: saving a view would save all models."""
    shared = shared_names(tree)
    whole = {k: v.detach() for k, v in tree.state_dict().items()}
    return [
        {k: (v if k in shared else v[g]).to(device=device, copy=True) for k, v in whole.items()} for g in range(models)
    ]


def refuse_unsupported(model: nn.Module) -> None:
    """Raise :class:`UsageError` if ``model`` has a module that no route can run; the message names it."""
    for path, module in model.named_modules():
        reason = _refusal(module)
        if reason:
            raise UsageError(f"module {quote_module(path)} ({type(module).__name__}) cannot be batched: {reason}")


def _refusal(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule's parameters cannot be replaced; batch the module it was made from"
    if uninitialized(module, recurse=False):
        return "its parameters are not initialized yet; run the model once"
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | nn.SyncBatchNorm):
        return "it spreads one model over several devices; batch the plain module"
    if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "sparse gradients cannot be stacked; set sparse=False"
    if type(module).__module__.startswith("torch.ao.nn.quantized"):
        return "its weights are packed, not parameters; batch the model before quantizing it"
    return ""


def _copy(model: nn.Module, copy_module: Callable[[Slot], Tensor]) -> nn.Module:
    """Return a copy of ``model`` in which ``copy_module`` makes each parameter and buffer; ties stay ties."""
    memo: dict[int, Any] = {}
    for slot in list_slots(model):
        if id(slot.tensor) not in memo:
            tensor = copy_module(slot)
            memo[id(slot.tensor)] = tensor if slot.is_buffer else nn.Parameter(tensor, slot.tensor.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{type(model).__name__} cannot be copied: {error}",
            hint="A module may hold a tensor with a graph from an earlier step: detach it, or reset its state. "
            "torch.nn.utils.weight_norm keeps such a tensor: use torch.nn.utils.parametrizations.weight_norm.",
        ) from error


def _stack_values(name: str, values: list[Tensor], models: int, *, shared: bool) -> Tensor:
    if shared:
        if any(not torch.equal(v, values[0]) for v in values[1:]):
            raise UsageError(
                f"buffer '{name}' is shared by all models, but their state dictionaries differ in it",
                hint="Set it to one value in all of them, or batch only models whose shared buffers are equal.",
            )
        return values[0]
    if len({v.shape for v in values}) > 1:
        raise UsageError(f"'{name}' has several shapes: {', '.join(str(tuple(v.shape)) for v in values)}")
    return torch.stack([*values, *(torch.zeros_like(values[0]) for _ in range(models - len(values)))])

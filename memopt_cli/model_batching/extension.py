"""Batch modules: kernels by the user, for types of modules that memopt has no kernel for."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from memopt_cli.errors import UsageError
from memopt_cli.text.paths import quote_module

B = TypeVar("B", bound="AbstractBatchModule")


class AbstractBatchModule(nn.Module):
    """Many copies of one module, with the user's own kernel.

    A subclass names the class that it replaces in ``base_class``.  Its parameters and buffers have the names of that
    class, and a leading dimension of ``batch`` models.  It computes ``forward`` on merged data: dimension 0 of every
    input and output is (image·model), the model fastest.  Values are loaded after construction.  The result is
    compared with ``base_class`` run model by model, like the result of every route.
    """

    base_class: ClassVar[type[nn.Module]] = nn.Module
    """The class of modules that this one replaces."""
    original: nn.Module
    """A copy of the module that this one replaces, without data."""

    @classmethod
    def from_module(cls, module: nn.Module, batch: int) -> Self:
        """Build the batch module of ``batch`` copies of ``module``; override this if the constructor takes more."""
        return cls(batch)

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self._shared_buffers: list[str] = []

    @property
    def shared_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that all models share."""
        return tuple(self._shared_buffers)

    def register_shared_buffer(self, name: str, tensor: Tensor, persistent: bool = True) -> None:
        """Register ``tensor`` as a buffer that all models share; it has the same shape as in ``base_class``."""
        self._shared_buffers.append(name)
        self.register_buffer(name, tensor, persistent)

    def adopt(self, original: nn.Module, path: str) -> None:
        """Copy the values of ``original`` into every model, and its training mode; remember its structure.

        Raises :class:`UsageError` if the two do not have the same parameters and buffers.
        """
        sources = dict(original.named_parameters()) | dict(original.named_buffers())
        targets = dict(self.named_parameters()) | dict(self.named_buffers())
        for name in sorted(sources.keys() | targets.keys()):
            is_shared = name in self.shared_buffers
            expected_shape = _shape(sources.get(name), None if is_shared else self.batch)
            actual_shape = _shape(targets.get(name), None)
            if expected_shape != actual_shape:
                raise UsageError(
                    f"{type(self).__name__} at {quote_module(path)} has '{name}' of shape {actual_shape}; for "
                    f"{self.batch} models of {type(original).__name__} it should be {expected_shape}"
                )
            with torch.no_grad():
                targets[name].copy_(sources[name])
            targets[name].requires_grad_(sources[name].requires_grad)
        self.train(original.training)
        empty_tensors: dict[int, Any] = {id(t): _empty_like(t) for t in sources.values()}
        object.__setattr__(self, "original", copy.deepcopy(original, empty_tensors))


_batch_classes: dict[type[nn.Module], type[AbstractBatchModule]] = {}
"""Class of a module -> the batch class that replaces it."""


def register_batch_module(batch_class: type[B]) -> type[B]:
    """Use ``batch_class`` for modules of its ``base_class`` in every model batched from now on; also a decorator.

    Parameters
    ----------
    batch_class:
        Subclass of :class:`AbstractBatchModule` with a ``base_class``.

    Returns
    -------
    ``batch_class``.

    Raises
    ------
    UsageError
        If it is not a subclass of :class:`AbstractBatchModule`, or has no ``base_class``.
    """
    if not (isinstance(batch_class, type) and issubclass(batch_class, AbstractBatchModule)):
        raise UsageError(
            f"{getattr(batch_class, '__name__', batch_class)} is not an AbstractBatchModule",
            hint="Register the batch class, whose base_class names the class that it replaces.",
        )
    if batch_class.base_class is nn.Module:
        raise UsageError(
            f"{batch_class.__name__}.base_class does not name the class that it replaces",
            hint="Set base_class to the class of torch.nn that it replaces, such as nn.Linear.",
        )
    _batch_classes[batch_class.base_class] = batch_class
    return batch_class


def find_batch_class(module: nn.Module) -> type[AbstractBatchModule] | None:
    """Return the batch class registered for the type of ``module`` itself, or ``None``."""
    return _batch_classes.get(type(module))


def _shape(tensor: Tensor | None, models: int | None) -> tuple[int, ...] | None:
    if tensor is None:
        return None
    return tuple(tensor.shape) if models is None else (models, *tensor.shape)


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

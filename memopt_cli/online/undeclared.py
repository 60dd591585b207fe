"""Refusing models that carry a tensor from one time step to the next undeclared, so that no trace would follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.states import states_of
from memopt_cli.runtime.graph import nodes_behind
from memopt_cli.runtime.private_torch import buffers_of, tree_leaves

_STRUCTURE = frozenset(vars(nn.Module()))


def refuse_undeclared(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Take two steps, and raise an error if anything but the declared states connects their graphs.

    A detached tensor that a module keeps connects nothing.  The states advance by both steps.
    Raises :class:`MemoptError`, which names the attribute.
    """
    first = _step(model, inputs)
    kept = {tensor.grad_fn: path for path, tensor in _undeclared(model) if tensor.grad_fn is not None}
    made = set(nodes_behind([*first, *(tensor for _, tensor in _undeclared(model))]))
    for state in states_of(model).values():
        state.value = state.value.detach()
    second = _step(model, inputs)  # a variable, since in PyTorch 2.8 the nodes of a user's Function die with its result
    for node in nodes_behind(second):
        if node in made and not hasattr(node, "variable"):
            raise MemoptError(
                f"{kept.get(node, 'something that the model keeps')} is carried from one time step to the next, and is "
                "not a declared state",
                hint="Declare it with declare_state(module, name, shape), so that its past is followed; or detach() "
                "what is kept, which makes a constant of it",
            )


def _step(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Take one step, and return its results and the declared states after it."""
    output: Any = model(*inputs)
    returned = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return [*returned, *(state.value for state in states_of(model).values())]


def _undeclared(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield path and value of every tensor in an attribute or a buffer that is not a declared state."""
    declared = {(id(state.module), state.name) for state in states_of(model).values()}
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in _STRUCTURE}
        for name, value in (attributes | buffers_of(module)).items():
            if (id(module), name) not in declared:
                leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
                yield from ((f"{path}.{name}".removeprefix("."), leaf) for leaf in leaves)

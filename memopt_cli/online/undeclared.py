"""Refusing models that carry a tensor from one time step to the next undeclared, so that no trace would follow it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from memopt_cli.errors import MemoptError
from memopt_cli.online.states import states_of, tensors_in
from memopt_cli.runtime.graph import reachable_nodes
from memopt_cli.runtime.private_torch import tree_leaves


def refuse_undeclared(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Take two steps, and raise an error if anything but the declared states connects their graphs.

    A detached tensor that a module keeps connects nothing.  The states advance by both steps.
    Raises :class:`MemoptError`, which names the attribute.
    """
    first_results = _results_and_states(model, inputs)
    states = states_of(model)
    undeclared = [(path, tensor) for path, tensor in tensors_in(model) if path not in states]
    paths = {tensor.grad_fn: path for path, tensor in undeclared if tensor.grad_fn is not None}
    first_nodes = set(reachable_nodes([*first_results, *(tensor for _, tensor in undeclared)]))
    for state in states.values():
        state.value = state.value.detach()
    # A variable, since in PyTorch 2.8 the nodes of a user-defined Function die with its result.
    second_results = _results_and_states(model, inputs)
    for node in reachable_nodes(second_results):
        if node in first_nodes and not hasattr(node, "variable"):
            raise MemoptError(
                f"{paths.get(node, 'a tensor that the model keeps')} is carried from one time step to the next, and is "
                "not a declared state",
                hint="Declare it with declare_state(module, name, shape), so that its past is followed; or keep a "
                "detach()ed tensor, which is a constant.",
            )


def _results_and_states(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    returned = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    return [*returned, *(state.value for state in states_of(model).values())]

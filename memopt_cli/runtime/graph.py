"""Walking autograd's graph, from results back to the leaves from which they were computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node


def reachable_nodes(tensors: Iterable[Tensor], is_end: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """Yield the nodes that computed ``tensors``, like :func:`nodes_from`."""
    return nodes_from((tensor.grad_fn for tensor in tensors), is_end)


def nodes_from(starts: Iterable[Node | None], is_end: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """Yield ``starts``, without ``None``, and the nodes reachable from them, each once, the nearest first.

    ``is_end``: returns whether the walk stops before a node; without it, the walk goes on to the leaves.
    """
    pending, seen = deque(starts), set[Node]()
    while pending:
        node = pending.popleft()
        if node is None or node in seen or (is_end is not None and is_end(node)):
            continue
        seen.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)


def leaves_before(tensors: Sequence[Tensor], ends: Collection[Node] = ()) -> Iterator[Tensor]:
    """Yield the leaves from which ``tensors`` were computed, by paths through none of the ``ends``."""
    yield from (tensor for tensor in tensors if tensor.grad_fn is None)
    for node in reachable_nodes(tensors, set(ends).__contains__):
        if hasattr(node, "variable"):
            yield node.variable

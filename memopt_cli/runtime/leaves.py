"""The leaves of autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node


def leaves_before(tensors: Sequence[Tensor], ends: Collection[Node] = ()) -> Iterator[Tensor]:
    """Yield the leaves from which ``tensors`` were computed, by paths that pass none of the ``ends``."""
    pending, seen = [t.grad_fn for t in tensors if t.grad_fn is not None], set(ends)
    yield from (t for t in tensors if t.grad_fn is None)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [following for following, _ in node.next_functions if following is not None]

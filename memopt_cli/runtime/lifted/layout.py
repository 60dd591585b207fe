"""Laying out generated code: which nodes of a program share a statement, and until when each value is needed.

If only one node uses a value, the value's expression is written into the statement of that node, its *user*, provided
that nothing in between can change the value::

    aten::mul.int(a, b) -> c, aten::floordiv.int(c, 2) -> d    becomes    d = a * b // 2

The product depends only on numbers, and may move any distance.  An attribute or an item of a list moves only if no
statement lies in between, since that might change it.  Operators on tensors never move, so that they run in their
order; only the last one of a function may stand in its ``return``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from memopt_cli.runtime.lifted.operators import EXPRESSIONS
from memopt_cli.runtime.lifted.program import values_among

Block = tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]
"""Parameters, nodes and results.  Each value has a number; a result is such a number, or a constant in a 1-tuple."""
Node = tuple[str, Any, tuple[Any, ...], tuple[int, ...], tuple[Block, ...]]
"""Kind, detail (such as an operator's name), operands, outputs, and the blocks of an ``if``, a ``loop`` or a ``grad``.

``("operator", "aten::mul.int", (3, (2,)), (4,), ())`` makes value 4, the product of value 3 and the constant 2.
"""

ATOMS: Final = ("parameter", "tensor", "device", "home", "none")
"""Kinds of nodes that are written where they are used, however often."""
_MAX_HEIGHT: Final = 32
"""Maximum number of expressions nested in each other, since Python's parser has a limit."""


def first_output(node: Node) -> int:
    """Return the first value that ``node`` makes."""
    return node[3][0]


class Layout:
    """The layout of one method; results are cached by block."""

    def __init__(self) -> None:
        self._uses: dict[int, frozenset[int]] = {}
        self._places: dict[tuple[int, bool], list[int]] = {}
        self._heights: dict[int, int] = {}

    def uses(self, block: Block) -> frozenset[int]:
        """Return the values that ``block`` uses and does not compute; its parameters may be among them."""
        if id(block) not in self._uses:
            _, nodes, results = block
            used = values_among(results).union(*map(self.used_by, nodes))
            self._uses[id(block)] = frozenset(used.difference(*(node[3] for node in nodes)))
        return self._uses[id(block)]

    def used_inside(self, node: Node) -> set[int]:
        """Return the values that the blocks of ``node`` use and that were computed before it."""
        return set().union(*(self.uses(block) - set(block[0]) for block in node[4]))

    def used_by(self, node: Node) -> set[int]:
        """Return the values that ``node`` uses, in its blocks too."""
        return values_among(node[2]) | self.used_inside(node) if node[4] else values_among(node[2])

    def places(self, block: Block, *, tail: bool = False) -> list[int]:
        """Return, for each node of ``block``, the index of the node whose statement contains its expression.

        That is the node itself, or the place of its only user.  One more item, the number of nodes, is the place of the
        block's end, which uses the results; in a ``tail`` the end is a ``return`` statement.
        """
        key = id(block), tail
        if key not in self._places:
            self._places[key] = self._place_nodes(block, tail)
        return self._places[key]

    def is_expression(self, node: Node) -> bool:
        """Return whether ``node``, which has blocks, is a choice between two expressions."""
        if node[0] != "if" or len(node[3]) != 1:
            return False
        return all(
            inner[0] in ATOMS or place == len(block[1])
            for block in node[4]
            for inner, place in zip(block[1], self.places(block), strict=False)
        )

    def _place_nodes(self, block: Block, tail: bool) -> list[int]:
        nodes, end = block[1], len(block[1])
        users = self._users_in(block)
        heights = self._measure_heights(block, users)
        places = [*range(end + 1)]
        # Backwards, since a node moves to where its user has moved.  ``barrier``: the nearest later statement.  A node
        # that reads a list may move into that statement, but not past it: the statement might change the list.
        barrier = end
        for index in range(end - 1, -1, -1):
            node = nodes[index]
            user = _only_user(node, users)
            if user is not None and heights[index] < _MAX_HEIGHT:
                adjacent = barrier >= places[user]
                moves = self._moves(node, adjacent) or (tail and adjacent and user == end and not node[4])
                places[index] = places[user] if moves else index
            if node[0] not in ATOMS and places[index] == index:
                barrier = index
        return places

    def _users_in(self, block: Block) -> dict[int, list[int]]:
        """Return, for each value, the indices of the nodes in ``block`` that use it; the block's end counts as one."""
        users: dict[int, list[int]] = {}
        for index, node in enumerate((*block[1], ("end", None, block[2], (), ()))):
            for value in (v for v in node[2] if type(v) is int):
                users.setdefault(value, []).append(index)
            for value in self.used_inside(node) if node[4] else ():
                # Entered twice, so that it has no only user: in a loop's block, it would be computed in every round.
                users.setdefault(value, []).extend((index, index))
        return users

    def _measure_heights(self, block: Block, users: dict[int, list[int]]) -> list[int]:
        """Return the nesting depth of each node's expression if every node that may move to its user does."""
        heights: list[int] = []
        value_heights: dict[int, int] = {}
        for node in block[1]:
            inner = max((self._block_height(inner) for inner in node[4]), default=0) if node[0] == "if" else 0
            height = 1 + max((value_heights.get(v, 0) for v in node[2] if type(v) is int), default=0) + inner
            heights.append(height)
            if _only_user(node, users) is not None and self._moves(node, True) and height < _MAX_HEIGHT:
                value_heights[first_output(node)] = height
        self._heights[id(block)] = max(heights, default=0)
        return heights

    def _block_height(self, block: Block) -> int:
        self.places(block)
        return self._heights[id(block)]

    def _moves(self, node: Node, adjacent: bool) -> bool:
        kind, detail = node[0], node[1]
        if kind == "if":
            return adjacent and self.is_expression(node)
        if kind != "operator":
            return kind in ("tuple", "list", "named") or (kind in ("item", "slice", "get", "dict") and adjacent)
        return detail in EXPRESSIONS and (EXPRESSIONS[detail].pure or (EXPRESSIONS[detail].reads and adjacent))


def _only_user(node: Node, users: Mapping[int, Sequence[int]]) -> int | None:
    """Return the only one of ``users`` of the only output of ``node``; ``None`` if it has more outputs or users."""
    output_users = users.get(first_output(node), ()) if len(node[3]) == 1 else ()
    return output_users[0] if len(output_users) == 1 else None


class NeededValues:
    """The values that are needed after a statement, by later ones of its block or by what follows the block."""

    def __init__(self, last: dict[int, int], index: int, outer: Container[int], ending: Iterable[int] = ()) -> None:
        self._last = last
        self._index = index
        self._outer = outer
        self.ending = ending
        """Values whose last use in the block is in the statement."""

    def __contains__(self, value: object) -> bool:
        return self._last.get(value, -1) > self._index or value in self._outer  # type: ignore[call-overload]

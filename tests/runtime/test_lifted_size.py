"""The cost of reading a program: time and memory in proportion to its size, and a limit to both."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memopt_cli.runtime.lifted import module as lifted
from memopt_cli.runtime.lifted import program as stored
from memopt_cli.runtime.lifted.program import BadProgramError

Block = tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]


class Builder:
    """A program with one method of ``x``, value 0."""

    def __init__(self) -> None:
        self.hints = [("x", True)]

    def value(self) -> int:
        self.hints.append(("y", True))
        return len(self.hints) - 1

    def operator(self, key: str, *operands: Any) -> tuple[Any, ...]:
        return "operator", key, operands, (self.value(),), ()

    def program(self, nodes: list[Any], result: int) -> tuple[Any, ...]:
        block: Block = ((), tuple(nodes), (result,))
        return 1, "Model", (("forward", ((0, "x", ()),), tuple(self.hints), block),), ()

    def listed(self, nodes: list[Any]) -> tuple[Any, ...]:
        """Return a program that returns all values as a list."""
        values = tuple(node[3][0] for node in nodes)
        result = self.value()
        return self.program([*nodes, ("list", None, values, (result,), ())], result)


def many_alive(count: int) -> Any:
    make = Builder()
    return make.listed([make.operator("aten::relu", 0) for _ in range(count)])


def many_inlined(count: int) -> Any:
    make = Builder()
    return make.listed([make.operator("aten::neg.int", 0) for _ in range(count)])


def a_long_chain(count: int) -> Any:
    make, nodes, last = Builder(), [], 0
    for _ in range(count):
        nodes.append(make.operator("aten::neg.int", last))
        last = nodes[-1][3][0]
    return make.program(nodes, last)


def many_branches(count: int) -> Any:
    make, nodes = Builder(), []
    for _ in range(count // 3):
        nodes.append(make.operator("aten::relu", 0))
        then = make.operator("aten::relu", 0)
        blocks: tuple[Block, ...] = (((), (then,), then[3]), ((), (), (0,)))
        nodes.append(("if", None, (0,), (make.value(),), blocks))
    return make.listed(nodes)


def many_loops(count: int) -> Any:
    make, nodes = Builder(), []
    for _ in range(count // 3):
        nodes.append(make.operator("aten::relu", 0))
        parameters = (make.value(), make.value())
        block: Block = (parameters, (), ((True,), parameters[1]))
        nodes.append(("loop", None, ((3,), (True,), 0), (make.value(),), (block,)))
    return make.listed(nodes)


def many_outputs(count: int) -> Any:
    make = Builder()
    values = tuple(make.value() for _ in range(count))
    result = make.value()
    return make.program([("unpack", None, (0,), values, ()), ("list", None, values, (result,), ())], result)


SHAPES = (many_alive, many_inlined, a_long_chain, many_branches, many_loops, many_outputs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_program_takes_twice_the_time(shape: Callable[[int], Any]) -> None:
    def seconds(count: int) -> float:
        program = shape(count)
        gc.collect()
        gc.disable()  # a collection looks at all that other tests have left
        try:
            begun = time.process_time()
            lifted._make_class(program)
            return time.process_time() - begun
        finally:
            gc.enable()

    seconds(100)
    short, long = map(min, zip(*[(seconds(1500), seconds(3000)) for _ in range(3)], strict=True))
    assert long < 3 * short + 0.02


@pytest.mark.slow
def test_twice_the_program_takes_twice_the_memory() -> None:
    def most(count: int) -> int:
        program = many_alive(count)
        tracemalloc.start()
        try:
            lifted.make_module(program, ())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most(3000) < min(2.2 * most(1500), 26 << 20)


def test_a_long_chain_of_expressions_is_several_statements() -> None:
    assert lifted.make_module(a_long_chain(1001), ())(2) == -2


# ---------------------------------------------------------------------------------------------- an end


def nested(depth: int, kind: str) -> Any:
    make = Builder()

    def block(left: int) -> Block:
        if not left:
            node = make.operator("aten::relu", 0)
            return (), (node,), ()
        inner = block(left - 1)
        if kind == "if":
            return (), (("if", None, (0,), (), (inner, ((), (), ()))),), ()
        parameters = (make.value(),)
        return (), (("loop", None, ((1,), (True,)), (), ((parameters, inner[1], ((True,),)),)),), ()

    return make.program(list(block(depth)[1]), 0)


@pytest.mark.parametrize(("kind", "deepest"), [("if", stored._MAX_BLOCK_DEPTH), ("loop", stored._MAX_LOOP_DEPTH)])
def test_blocks_nest_only_as_deep_as_python_compiles(kind: str, deepest: int) -> None:
    x = torch.ones(())
    assert lifted.make_module(nested(deepest, kind), ())(x) is x
    for depth in (deepest + 1, 95):
        with pytest.raises(BadProgramError, match="nested too deeply"):
            lifted.lifted_class(nested(depth, kind))


def test_choices_within_choices_compile() -> None:
    make = Builder()

    def block(left: int) -> Block:
        last, nodes = 0, []
        for _ in range(40):
            nodes.append(make.operator("aten::add.int", last, 0))
            last = nodes[-1][3][0]
        if left:
            nodes.append(("if", None, (last,), (make.value(),), (block(left - 1), ((), (), (0,)))))
            last = nodes[-1][3][0]
        return (), tuple(nodes), (last,)

    _, nodes, (result,) = block(20)
    assert lifted.make_module(make.program(list(nodes), result), ())(1) == 41


@pytest.mark.slow
def test_what_one_tuple_holds_counts_wherever_it_stands() -> None:
    bomb: tuple[Any, ...] = ("x" * 100,)
    for _ in range(60):
        bomb = (bomb, bomb)
    with pytest.raises(BadProgramError, match="too large"):
        lifted.lifted_class((1, "Model", (bomb,), ()))


def test_tuples_nest_to_an_end() -> None:
    deep: tuple[Any, ...] = ()
    for _ in range(5000):
        deep = (deep,)
    with pytest.raises(BadProgramError, match="nested too deeply"):
        lifted.lifted_class((1, "Model", (deep,), ()))

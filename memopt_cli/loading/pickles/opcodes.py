"""The opcodes of pickles: the effect of each on the stack of stand-ins.

A pickle is a program for a machine with a stack.  One that makes ``Fraction(1, 2)``, apart from its memo::

    GLOBAL fractions Fraction     pushes a Global
    BININT1 1, BININT1 2          push 1 and 2
    TUPLE2                        replaces both by a Tuple
    REDUCE                        replaces the Global and the Tuple by a Built with how="called"
    STOP                          ends the pickle, whose result is on top

:data:`_ACTIONS` has the effect of each opcode that does more than push its argument.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import IO, Any, Final

from memopt_cli.loading.pickles.charges import PickleScan
from memopt_cli.loading.pickles.making import Maker
from memopt_cli.loading.pickles.names import wanted_name
from memopt_cli.loading.pickles.nodes import (
    COMPUTED,
    DICT,
    FROZENSET,
    LIST,
    PERSISTENT,
    SET,
    Built,
    Global,
    Tuple,
)
from memopt_cli.loading.pickles.stack import Stack

_MAX_INT_BITS = 2048
"""Maximum number of bits in an integer."""


class Machine:
    """An unpickler that makes stand-ins instead of objects."""

    def __init__(self, scan: PickleScan) -> None:
        self.scan = scan
        self.stack = Stack(scan)
        self.maker = Maker(scan)
        self.result: Any = None

    def run(self, stream: IO[bytes]) -> None:
        """Follow the opcodes from the position of ``stream`` to the end of the pickle.

        Raises :class:`ValueError` for a pickle that is refused, and other exceptions of Python for a broken one.
        """
        spend = self.scan.spend
        read = stream.read
        check_size = self.stack.check_size
        code = b""
        while code != pickle.STOP:
            code = read(1)
            argument_of, action = _OPCODES[code]
            argument = None if argument_of is None else argument_of(stream)
            spend(1)
            action(self, argument)
            check_size()


Action = Callable[[Machine, Any], object]
"""Function ``action(machine, argument)`` that applies an opcode to the machine.  The argument follows the opcode in the
file, and is ``None`` if the opcode has none."""


def _stack_global(machine: Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        module, name = COMPUTED.module, COMPUTED.name
    machine.stack.push(wanted_name(machine.scan, module, name))


def _reduce(machine: Machine, _: Any) -> None:
    arguments, callee = machine.stack.pop(), machine.stack.pop()
    machine.stack.push(machine.maker.call(callee, arguments))


def _inst(machine: Machine, argument: str) -> None:
    items = machine.stack.pop_mark()
    callee = wanted_name(machine.scan, *argument.split(" ", 1))
    machine.stack.push(machine.maker.call(callee, machine.maker.make_tuple(items)))


def _obj(machine: Machine, _: Any) -> None:
    callee, *items = machine.stack.pop_mark()
    machine.stack.push(machine.maker.call(callee, machine.maker.make_tuple(items)))


def _new(machine: Machine, _: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    machine.stack.push(machine.maker.create(kind, arguments))


def _new_with_keywords(machine: Machine, _: Any) -> None:
    keywords, arguments, kind = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.stack.push(machine.maker.create(kind, arguments, keywords))


def _persistent(machine: Machine, _: Any) -> None:
    identity = machine.stack.pop()
    if isinstance(identity, Tuple) and identity.items[:1] == ("module",) and len(identity.items) == 4:
        # The legacy format stores a class with its source code, which is not needed.
        machine.stack.push(identity.items[1])
    else:
        _persistent_text(machine, identity)


def _persistent_text(machine: Machine, identity: Any) -> None:
    machine.stack.push(machine.maker.make(Built("stored", PERSISTENT, identity)))


def _make_counted_tuple(count: int) -> Action:
    return lambda machine, _: machine.stack.push(machine.maker.make_tuple(machine.stack.pop_last(count)))


def _empty(kind: Global) -> Action:
    return lambda machine, _: machine.stack.push(machine.maker.make(Built("plain", kind)))


def _make_filled(kind: Global, fill: Callable[[Maker, Built, list[Any]], None]) -> Action:
    """Return an action that makes a container of all values above the mark."""

    def action(machine: Machine, _: Any) -> None:
        items = machine.stack.pop_mark()
        node = machine.maker.make(Built("plain", kind))
        machine.stack.push(node)
        fill(machine.maker, node, items)

    return action


def _frozenset(machine: Machine, _: Any) -> None:
    """Make a frozenset as a call with a tuple, since a frozenset cannot be filled later."""
    items = machine.maker.make_tuple(machine.stack.pop_mark())
    machine.stack.push(machine.maker.call(FROZENSET, machine.maker.make_tuple([items])))


def _filling(take: Callable[[Stack], list[Any]], fill: Callable[[Maker, Built, list[Any]], None]) -> Action:
    """Return an action that pops values by ``take``, and puts them into the container below."""

    def action(machine: Machine, _: Any) -> None:
        items = take(machine.stack)
        fill(machine.maker, machine.stack.filled(), items)

    return action


def _build(machine: Machine, _: Any) -> None:
    state = machine.stack.pop()
    machine.maker.fill(machine.stack.filled(), state)


def _stop(machine: Machine, _: Any) -> None:
    machine.result = machine.stack.pop()


def _constant(value: object) -> Action:
    return lambda machine, _: machine.stack.push(value)


def _argument(machine: Machine, argument: Any) -> None:
    if isinstance(argument, int) and argument.bit_length() > _MAX_INT_BITS:
        raise ValueError(f"it holds a number of {argument.bit_length()} bits")
    machine.stack.push(argument)


def _refuse_opcode(machine: Machine, _: Any) -> None:
    raise ValueError("it uses an opcode that files do not need")


_ACTIONS: Final[dict[str, Action]] = {
    "GLOBAL": lambda machine, name: machine.stack.push(wanted_name(machine.scan, *name.split(" ", 1))),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "INST": _inst,
    "OBJ": _obj,
    "NEWOBJ": _new,
    "NEWOBJ_EX": _new_with_keywords,
    "PERSID": _persistent_text,
    "BINPERSID": _persistent,
    "MARK": lambda machine, _: machine.stack.mark(),
    "TUPLE": lambda machine, _: machine.stack.push(machine.maker.make_tuple(machine.stack.pop_mark())),
    "EMPTY_TUPLE": _make_counted_tuple(0),
    "TUPLE1": _make_counted_tuple(1),
    "TUPLE2": _make_counted_tuple(2),
    "TUPLE3": _make_counted_tuple(3),
    "EMPTY_LIST": _empty(LIST),
    "EMPTY_DICT": _empty(DICT),
    "EMPTY_SET": _empty(SET),
    "LIST": _make_filled(LIST, Maker.extend),
    "DICT": _make_filled(DICT, Maker.set_entries),
    "FROZENSET": _frozenset,
    "APPEND": _filling(lambda stack: stack.pop_last(1), Maker.extend),
    "APPENDS": _filling(Stack.pop_mark, Maker.extend),
    "ADDITEMS": _filling(Stack.pop_mark, Maker.add),
    "SETITEM": _filling(lambda stack: stack.pop_last(2), Maker.set_entries),
    "SETITEMS": _filling(Stack.pop_mark, Maker.set_entries),
    "BUILD": _build,
    "POP": lambda machine, _: machine.stack.drop(),
    "POP_MARK": lambda machine, _: machine.stack.pop_mark(),
    "DUP": lambda machine, _: machine.stack.push(machine.stack.top()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, index: machine.stack.put(index)),
    "MEMOIZE": lambda machine, _: machine.stack.memoize(),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine.stack.get(index)),
    "STOP": _stop,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"), _refuse_opcode),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
}
"""Name of an opcode -> its effect; all others push their argument."""
_OPCODES: Final = {
    opcode.code.encode("latin-1"): (opcode.arg.reader if opcode.arg else None, _ACTIONS.get(opcode.name, _argument))
    for opcode in pickletools.opcodes
}
"""Byte of an opcode -> the reader of its argument, ``None`` if it has none, and its effect."""

"""What each opcode does to the stack, and what it has made."""

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

_LONGEST_INT = 2048
"""Bits of a number."""


class Machine:
    """Follows a pickle, opcode by opcode."""

    def __init__(self, scan: PickleScan) -> None:
        self.scan = scan
        self.stack = Stack(scan)
        self.maker = Maker(scan)
        self.result: Any = None

    def run(self, stream: IO[bytes]) -> None:
        """Follow all opcodes from the stream's position on.

        Raises :class:`ValueError` if they say what no file may; what a broken pickle raises besides is Python's.
        """
        spend, read, check_size = self.scan.spend, stream.read, self.stack.check_size
        code = b""
        while code != pickle.STOP:
            code = read(1)
            argument_of, action = _OPCODES[code]
            argument = None if argument_of is None else argument_of(stream)
            spend(1)
            action(self, argument)
            check_size()


Action = Callable[[Machine, Any], object]
"""``action(machine, argument)``: the argument is what stands behind the opcode in the file, or ``None``."""


# ---------------------------------------------------------------------------------------------- names and calls


def _global(machine: Machine, argument: str) -> None:
    machine.stack.push(wanted_name(machine.scan, *argument.split(" ", 1)))


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
        # A class of the legacy format, with its source code, of no interest.
        machine.stack.push(identity.items[1])
    else:
        _persistent_text(machine, identity)


def _persistent_text(machine: Machine, identity: Any) -> None:
    machine.stack.push(machine.maker.make(Built("stored", PERSISTENT, identity)))


# ---------------------------------------------------------------------------------------------- containers


def _marked_tuple(machine: Machine, _: Any) -> None:
    machine.stack.push(machine.maker.make_tuple(machine.stack.pop_mark()))


def _counted_tuple(count: int) -> Action:
    return lambda machine, _: machine.stack.push(machine.maker.make_tuple(machine.stack.pop_last(count)))


def _empty(kind: Global) -> Action:
    return lambda machine, _: machine.stack.push(machine.maker.make(Built("plain", kind)))


def _filled(kind: Global, fill: Callable[[Maker, Built, list[Any]], None]) -> Action:
    """A container of all above the mark."""

    def action(machine: Machine, _: Any) -> None:
        items = machine.stack.pop_mark()
        node = machine.maker.make(Built("plain", kind))
        machine.stack.push(node)
        fill(machine.maker, node, items)

    return action


def _frozenset(machine: Machine, _: Any) -> None:
    """Whole from the start, as the protocols before 4 call for one."""
    items = machine.maker.make_tuple(machine.stack.pop_mark())
    machine.stack.push(machine.maker.call(FROZENSET, machine.maker.make_tuple([items])))


def _append(machine: Machine, _: Any) -> None:
    item = machine.stack.pop()
    machine.maker.extend(machine.stack.filled(), [item])


def _append_marked(machine: Machine, _: Any) -> None:
    items = machine.stack.pop_mark()
    machine.maker.extend(machine.stack.filled(), items)


def _add_marked(machine: Machine, _: Any) -> None:
    items = machine.stack.pop_mark()
    machine.maker.add(machine.stack.filled(), items)


def _set_item(machine: Machine, _: Any) -> None:
    items = machine.stack.pop_last(2)
    machine.maker.set_entries(machine.stack.filled(), items)


def _set_marked_items(machine: Machine, _: Any) -> None:
    items = machine.stack.pop_mark()
    machine.maker.set_entries(machine.stack.filled(), items)


def _build(machine: Machine, _: Any) -> None:
    state = machine.stack.pop()
    machine.maker.fill(machine.stack.filled(), state)


# ---------------------------------------------------------------------------------------------- stack and memo


def _duplicate(machine: Machine, _: Any) -> None:
    machine.stack.push(machine.stack.top())


def _put(machine: Machine, index: int) -> None:
    machine.stack.put(index)


def _get(machine: Machine, index: int) -> None:
    machine.stack.get(index)


def _stop(machine: Machine, _: Any) -> None:
    machine.result = machine.stack.pop()


def _constant(value: object) -> Action:
    return lambda machine, _: machine.stack.push(value)


def _argument(machine: Machine, argument: Any) -> None:
    if isinstance(argument, int) and argument.bit_length() > _LONGEST_INT:
        raise ValueError(f"it holds a number of {argument.bit_length()} bits")
    machine.stack.push(argument)


def _nothing(machine: Machine, _: Any) -> None:
    """Of the format itself."""


def _unsupported(machine: Machine, _: Any) -> None:
    raise ValueError("it uses an opcode for what a file cannot carry")


_ACTIONS: Final[dict[str, Action]] = {
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "INST": _inst,
    "OBJ": _obj,
    "NEWOBJ": _new,
    "NEWOBJ_EX": _new_with_keywords,
    "PERSID": _persistent_text,
    "BINPERSID": _persistent,
    "MARK": lambda machine, _: machine.stack.mark(),
    "TUPLE": _marked_tuple,
    "EMPTY_TUPLE": _counted_tuple(0),
    "TUPLE1": _counted_tuple(1),
    "TUPLE2": _counted_tuple(2),
    "TUPLE3": _counted_tuple(3),
    "EMPTY_LIST": _empty(LIST),
    "EMPTY_DICT": _empty(DICT),
    "EMPTY_SET": _empty(SET),
    "LIST": _filled(LIST, Maker.extend),
    "DICT": _filled(DICT, Maker.set_entries),
    "FROZENSET": _frozenset,
    "APPEND": _append,
    "APPENDS": _append_marked,
    "ADDITEMS": _add_marked,
    "SETITEM": _set_item,
    "SETITEMS": _set_marked_items,
    "BUILD": _build,
    "POP": lambda machine, _: machine.stack.drop(),
    "POP_MARK": lambda machine, _: machine.stack.pop_mark(),
    "DUP": _duplicate,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": lambda machine, _: machine.stack.memoize(),
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "STOP": _stop,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EXT1": _unsupported,
    "EXT2": _unsupported,
    "EXT4": _unsupported,
    "NEXT_BUFFER": _unsupported,
    "READONLY_BUFFER": _unsupported,
}


def _of(opcode: pickletools.OpcodeInfo) -> tuple[Callable[[IO[bytes]], Any] | None, Action]:
    """How its argument is read, if it has one, and what it does."""
    action = _ACTIONS.get(opcode.name, _argument if opcode.stack_after else _nothing)
    return None if opcode.arg is None else opcode.arg.reader, action


_OPCODES: Final = {opcode.code.encode("latin-1"): _of(opcode) for opcode in pickletools.opcodes}

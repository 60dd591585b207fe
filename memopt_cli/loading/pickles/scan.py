"""What a pickle says, read from its opcodes: nothing is imported, built or called.

The opcodes are followed on a stack of stand-ins, as the unpickler would with real objects: a name pushed early can
be called late, by way of the memo.
"""

from __future__ import annotations

import gc
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # Python 2's names, which protocol 2 writes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from memopt_cli.loading.pickles.described import tensor_of
from memopt_cli.loading.pickles.nodes import (
    COMPUTED,
    DICT,
    FROZENSET,
    GETATTR,
    LIST,
    PERSISTENT,
    SET,
    Built,
    Global,
    Pickle,
    Step,
    Tuple,
)

TENSOR_SUBCLASS_REBUILD: Final = Global("torch._tensor", "_rebuild_from_type_v2")
"""Calls its first argument."""

_DEEPEST_TUPLE, _DEEPEST_MARK, _LARGEST_STACK = 200, 10_000, 100_000
"""Bounds against files made to exhaust whoever reads them; picklers stay far below."""
_LEAST_WORK, _BYTES_PER_WORK, _MOST_WORK = 500_000, 8, 8_000_000
"""Opcodes, and items that plain containers are made of: a module takes 150 in a few hundred bytes."""
_COPIES, _LEAST_TAKEN = 4, 1 << 20
"""How often each byte of a file may be taken in by a call: bytes may stand in it once, and be used again and again."""
_WORK_PER_CHARACTER: Final = 200
"""Of a regular expression, which is compiled: ranges of characters of either case are slow."""
_HASHING: Final = ("set", "frozenset", "OrderedDict")
_SAME_HASHES: Final = 8
"""Comparisons of keys that take as long as an opcode."""
_LONGEST_INT, _LONGEST_NAME = 2048, 1000
"""Bits of a number, characters of an imported name."""
_EXHAUSTING: Final = "reading it would take far more work than a model of its size does"


@dataclass(slots=True)
class PickleScan:
    """What the pickles of a file want, and what following them took."""

    size: int
    """Bytes of the file: the work that reading it may take grows with it."""
    wanted: set[Global] = field(default_factory=set)
    """Every name, whether the model can be reached from it or not."""
    called: set[Global] = field(default_factory=set)
    """Those that it calls, or makes objects of."""
    work: int = 0
    taken: int = 0
    """Bytes and characters that calls take in."""
    most_work: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_work = min(_LEAST_WORK + self.size // _BYTES_PER_WORK, _MOST_WORK)

    def spend(self, work: int) -> None:
        """Raises :class:`ValueError` where unpickling would take far more work than a model of this size does."""
        self.work += work
        if self.work > self.most_work:
            raise ValueError(_EXHAUSTING)

    def take(self, size: int) -> None:
        """Raises :class:`ValueError` where objects are made of far more bytes than the file has."""
        self.taken += size
        if self.taken > _COPIES * self.size + _LEAST_TAKEN:
            raise ValueError(_EXHAUSTING)


def scan_pickle(stream: IO[bytes], scan: PickleScan) -> Pickle:
    """Follow the pickle at the stream's position to its end, and add what it wants to ``scan``.

    Raises :class:`ValueError` if the bytes there are no complete pickle, or unpickling them is made to take forever.
    """
    machine = _Machine(scan)
    collects = gc.isenabled()
    gc.disable()  # all that is made here stays, and would be looked through again and again
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            machine.step(opcode, argument)
        return Pickle(root=machine.result, steps=tuple(machine.steps))
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as err:
        raise ValueError("its bytes are not a pickle, or a broken one") from err
    finally:
        if collects:
            gc.enable()


class _Machine:
    def __init__(self, scan: PickleScan) -> None:
        self.result: Any = None
        self.steps: list[Step] = []
        self._scan = scan
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        """The stacks below each open mark."""
        self._memo: dict[int, Any] = {}
        self._hashes: Counter[tuple[int, int]] = Counter()
        """How many keys of a container have one hash."""

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        self._scan.spend(1)
        action = _ACTIONS.get(opcode.name)
        if action is not None:
            action(self, argument)
        elif opcode.stack_after:
            if isinstance(argument, int) and argument.bit_length() > _LONGEST_INT:
                raise ValueError(f"it holds a number of {argument.bit_length()} bits")
            self._stack.append(_CONSTANTS.get(opcode.name, argument))
        if len(self._stack) > _LARGEST_STACK:
            raise ValueError(_EXHAUSTING)

    def _make(self, node: Built | Tuple) -> None:
        self.steps.append(Step("make", node))
        self._stack.append(node)

    # ------------------------------------------------------------------------------------------ names and calls

    def _global(self, argument: str) -> None:
        self._stack.append(self._want(*argument.split(" ", 1)))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        known = isinstance(name, str) and isinstance(module, str)
        self._stack.append(self._want(module, name) if known else self._want(COMPUTED.module, COMPUTED.name))

    def _want(self, module: str, name: str) -> Global:
        if len(module) + len(name) > _LONGEST_NAME:
            raise ValueError(f"it imports a name of {len(module) + len(name)} characters")
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        found = Global(module, name)
        self._scan.wanted.add(found)
        return found

    def _reduce(self, _: Any) -> None:
        arguments = self._stack.pop()
        self._call(self._stack.pop(), arguments)

    def _inst(self, argument: str) -> None:
        items = self._pop_mark()
        self._call(self._want(*argument.split(" ", 1)), self._tuple(items))

    def _obj(self, _: Any) -> None:
        callee, *items = self._pop_mark()
        self._call(callee, self._tuple(items))

    def _new(self, _: Any) -> None:
        arguments = self._stack.pop()
        self._create(self._stack.pop(), arguments)

    def _new_with_keywords(self, _: Any) -> None:
        keywords, arguments = self._stack.pop(), self._stack.pop()
        self._create(self._stack.pop(), arguments, keywords)

    def _create(self, kind: Any, arguments: Any, keywords: Any = None) -> None:
        built = Built("created", self._named(kind), arguments, keywords)
        built.weight += sum(map(_hashed, built.given()))
        self._make(built)

    def _call(self, callee: Any, arguments: Any) -> None:
        if callee in _CREATING and isinstance(arguments, Tuple) and arguments.items:
            kind, *given = arguments.items
            if callee == _RECONSTRUCTOR and given != [_OBJECT, None]:
                raise ValueError("it makes an object of another one's parts")
            self._create(kind, self._tuple(given if callee == _NEWOBJ else []))
            return
        callee = _within_class(callee) or callee
        built = Built("called", callee, arguments)
        built.size = sum(map(_size, built.given()))
        self._scan.take(built.size)
        if self._named(callee).module in ("builtins", "collections", "torch"):
            built.weight += sum(map(_amount, built.given()))
            if callee.name not in ("range", "slice"):  # they take nothing in
                self._scan.spend(built.weight)
            if callee.name in _HASHING:
                self._hash(built, [_key_of(item, callee.name) for part in built.given() for item in _items_of(part)])
        else:
            built.weight += sum(map(_hashed, built.given()))
            if callee == _PATTERN:
                self._scan.spend(_WORK_PER_CHARACTER * built.size)
            if callee == _SPARSE:
                self._scan.take(sum(map(_tensor_bytes, built.given())))
        if callee == TENSOR_SUBCLASS_REBUILD:
            self._named(next(iter(built.given()), None))
        self._make(built)

    def _named(self, callee: Any) -> Global:
        """What is called or created; a callable that is computed is wanted under a name of its own."""
        found = _within_class(callee) or COMPUTED
        self._scan.wanted.add(found)
        self._scan.called.add(found)
        return found

    def _persistent(self, _: Any) -> None:
        identity = self._stack.pop()
        if isinstance(identity, Tuple) and identity.items[:1] == ("module",) and len(identity.items) == 4:
            self._stack.append(identity.items[1])  # a class of the legacy format, with its source code, of no interest
            return
        self._make(Built("stored", PERSISTENT, identity))

    def _persistent_text(self, identity: str) -> None:
        self._make(Built("stored", PERSISTENT, identity))

    # ------------------------------------------------------------------------------------------ containers

    def _mark(self, _: Any) -> None:
        if len(self._outer) > _DEEPEST_MARK:
            raise ValueError(_EXHAUSTING)
        self._outer.append(self._stack)
        self._stack = []

    def _pop_mark(self, _: Any = None) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _marked_tuple(self, _: Any) -> None:
        items = self._pop_mark()
        self._stack.append(self._tuple(items))

    def _counted_tuple(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)][::-1]
        self._stack.append(self._tuple(items))

    def _tuple(self, items: list[Any]) -> Tuple:
        inner = [item for item in items if isinstance(item, Tuple)]
        depth = 1 + max((item.depth for item in inner), default=0)
        if depth > _DEEPEST_TUPLE:
            raise ValueError(f"tuples are nested deeper than {_DEEPEST_TUPLE}")
        weight = len(items) + sum(item.weight for item in items if isinstance(item, Tuple | Built))
        made = Tuple(tuple(items), depth, weight)
        self._scan.spend(made.weight if inner else 0)  # a tuple of tuples of the same tuple …: whoever walks it, falls
        self.steps.append(Step("make", made))
        return made

    def _empty(self, kind: Global) -> None:
        self._make(Built("plain", kind))

    def _filled(self, kind: Global) -> None:
        items = self._pop_mark()
        self._make(Built("plain", kind))
        if kind == FROZENSET:
            self._hash(self._last(), items)
        (self._set if kind == DICT else self._extend)(items)

    def _append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def _append_marked(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _add_marked(self, _: Any) -> None:
        items = self._pop_mark()
        self._hash(self._last(), items)
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        node = self._last()
        node.items.extend(items)
        self.steps.append(Step("extend", node, tuple(items)))

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_marked_items(self, _: Any) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        node = self._last()
        keys, values = items[::2], items[1::2]
        self._hash(node, keys)
        node.entries.extend(zip(keys, values, strict=True))
        self.steps.append(Step("set", node, tuple(items)))

    def _hash(self, node: Built, keys: list[Any]) -> None:
        """Pay for what a dict or set does with its keys: it compares those of one hash, each with all before it."""
        for key in keys:
            self._scan.spend(_hashed(key))
            if not isinstance(key, str):
                self._hashes[id(node), _hash_of(key)] += 1
                self._scan.spend(self._hashes[id(node), _hash_of(key)] // _SAME_HASHES)

    def _build(self, _: Any) -> None:
        state, node = self._stack.pop(), self._last()
        if node.has_state:
            raise ValueError("it gives an object two states")
        node.state, node.has_state = state, True
        parts = state.items if isinstance(state, Tuple) else (state,)
        self._scan.spend(sum(_amount(part) for part in parts if isinstance(part, Built | Tuple)))
        self._scan.take(sum(map(_size, parts)))
        node.weight += sum(_hashed(value) for part in parts if isinstance(part, Built) for _, value in part.entries)
        self.steps.append(Step("fill", node))

    def _last(self) -> Built:
        """What is filled: never a class, or what the format has made whole."""
        node = self._stack[-1]
        if not isinstance(node, Built):
            raise ValueError("it fills what can hold nothing")
        return node

    # ------------------------------------------------------------------------------------------ stack and memo

    def _pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _duplicate(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, index: int) -> None:
        if index > self._scan.work + _LARGEST_STACK:  # readers keep a table that is as long as the largest
            raise ValueError(_EXHAUSTING)
        self._memo[index] = self._stack[-1]

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _stop(self, _: Any) -> None:
        self.result = self._stack.pop()

    def _unsupported(self, _: Any) -> None:
        raise ValueError("it uses an opcode for what a file cannot carry")


def _hashed(value: Any) -> int:
    """Items that hashing it visits."""
    return value.weight if isinstance(value, Tuple | Built) and value.how != "plain" else 1


def _within_class(callee: Any) -> Global | None:
    """The name that is called or created; protocols before 4 ask a class for one that is defined in it."""
    if isinstance(callee, Global):
        return callee
    match callee:
        case Built(how="called", callee=Global() as asked) if asked == GETATTR:
            match callee.given():
                case owner, str(name) if (found := _within_class(owner)) and name.isidentifier():
                    return Global(found.module, f"{found.name}.{name}") if len(found.name) < _LONGEST_NAME else None
    return None


def _items_of(value: Any) -> Sequence[Any]:
    return value.items if isinstance(value, Tuple | Built) else ()


def _key_of(item: Any, name: str) -> Any:
    """What is hashed of an item that a set, or a dict of pairs, is made of."""
    return item.items[0] if name == "OrderedDict" and isinstance(item, Tuple) and item.items else item


def _hash_of(key: Any) -> int:
    """The hash of a number, or of a tuple of some; of objects each has one of its own."""
    if isinstance(key, Tuple):
        return hash(tuple(map(_hash_of, key.items)))
    return hash(key)


def _amount(value: Any) -> int:
    """Items, or bytes, that an object takes in when it is made of ``value``."""
    if isinstance(value, Built):
        return value.weight + sum(map(_hashed, value.items)) + len(value.entries)
    if isinstance(value, int):
        return min(abs(value), 2**63)
    return _hashed(value)


def _size(value: Any) -> int:
    """Bytes or characters of it."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return value.size if isinstance(value, Built) else 0


def _tensor_bytes(parts: Any) -> int:
    """Bytes of the tensors in a tuple: a sparse one copies its indices."""
    found = map(tensor_of, parts.items if isinstance(parts, Tuple) else ())
    return sum(tensor.size_bytes for tensor in found if tensor is not None)


_RECONSTRUCTOR, _NEWOBJ, _OBJECT = (
    Global("copyreg", "_reconstructor"),
    Global("copyreg", "__newobj__"),
    Global("builtins", "object"),
)
_PATTERN, _SPARSE = Global("re", "_compile"), Global("torch._utils", "_rebuild_sparse_tensor")
_CREATING: Final = (_RECONSTRUCTOR, _NEWOBJ)
"""How the protocols before 2 create an empty object."""
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}

_ACTIONS: Final[dict[str, Callable[[_Machine, Any], object]]] = {
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "INST": _Machine._inst,
    "OBJ": _Machine._obj,
    "NEWOBJ": _Machine._new,
    "NEWOBJ_EX": _Machine._new_with_keywords,
    "PERSID": _Machine._persistent_text,
    "BINPERSID": _Machine._persistent,
    "MARK": _Machine._mark,
    "TUPLE": _Machine._marked_tuple,
    "EMPTY_TUPLE": lambda machine, _: machine._counted_tuple(0),
    "TUPLE1": lambda machine, _: machine._counted_tuple(1),
    "TUPLE2": lambda machine, _: machine._counted_tuple(2),
    "TUPLE3": lambda machine, _: machine._counted_tuple(3),
    "EMPTY_LIST": lambda machine, _: machine._empty(LIST),
    "EMPTY_DICT": lambda machine, _: machine._empty(DICT),
    "EMPTY_SET": lambda machine, _: machine._empty(SET),
    "LIST": lambda machine, _: machine._filled(LIST),
    "DICT": lambda machine, _: machine._filled(DICT),
    "FROZENSET": lambda machine, _: machine._filled(FROZENSET),
    "APPEND": _Machine._append,
    "APPENDS": _Machine._append_marked,
    "ADDITEMS": _Machine._add_marked,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_marked_items,
    "BUILD": _Machine._build,
    "POP": _Machine._pop,
    "POP_MARK": _Machine._pop_mark,
    "DUP": _Machine._duplicate,
    "PUT": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "GET": _Machine._get,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "STOP": _Machine._stop,
    "EXT1": _Machine._unsupported,
    "EXT2": _Machine._unsupported,
    "EXT4": _Machine._unsupported,
    "NEXT_BUFFER": _Machine._unsupported,
    "READONLY_BUFFER": _Machine._unsupported,
}
